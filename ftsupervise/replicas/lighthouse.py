"""The lighthouse of a run of replica groups, supervised: it is there, at one address, for as long as a group lives.

It stands alone because it needs no group: only the address at which it is to be.

Each group asks it at each step who takes part, and has its address from its start to its end. So the port is chosen before any
group starts, and a lighthouse that dies is started again at that very address, at once: the groups ask again once a second.
Where another program has taken the port meanwhile, it is tried again until it is free.

``SupervisedLighthouse`` does this in threads of its own, so that its owner (``ftsupervise groups run``, beside the groups
or in a job of its own) may wait for a disk or for Slurm meanwhile. It needs ``start()`` and ``stop()``; all else can be asked
at any time and never waits. The lighthouse ends with its supervisor, however that ends.

Two of one run would be two trainings that know nothing of each other. So each supervisor takes a turn in the run directory, and
one that sees a later turn ends its lighthouse.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import IO, NamedTuple

from ftsupervise.errors import Error, Refused
from ftsupervise.host import processes
from ftsupervise.host.ownership import shown_user
from ftsupervise.host.ports import free_port, listener, ports_of
from ftsupervise.printable import printable
from ftsupervise.replicas.bounds import Timeouts
from ftsupervise.replicas.members import LighthousePage, PageNotSeen, Unseen, group_of, look
from ftsupervise.replicas.record import LighthouseFiles, LighthouseRecord, LighthouseRestart
from ftsupervise.replicas.torchft_python import SERVER
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR
from ftsupervise.rundir.records import as_text, as_whole, parse_object
from ftsupervise.units import show_duration, signal_name

# Decides whether the lighthouse is to be ended. Pure: what was seen of it, and for how long.
#
# While a lighthouse is slow, or even stopped, all groups wait and lose nothing. A new one knows nobody, and costs more than a
# pause of a minute. So it is never restarted to be sure:
#
# - A stopped one is continued, which loses nothing.
# - One that answered once, and then not for a minute, is ended. One that never answered may be fine, and our sight wrong: five
#   times as long.
# - One whose port refuses connections is broken for certain: ten seconds.
# - One whose page is too large to be read, because somebody has told it thousands of names, is ended: a new one has heard of
#   none of them. At most every ten minutes, for the one who told them may tell them again.
# - What the network of this host does not let us see ends nothing, and neither does an answer that is not a lighthouse's.

LOOK_EVERY = 2.0  # seconds
_REFUSED = 10.0
_FULL, _FULL_AGAIN = 30.0, 600.0
_NEVER_ANSWERED = 5  # times as patient
_STOPPED = "T"  # in /proc/PID/stat; a debugger's "t" is left alone


class LighthouseVerdict(Enum):
    LEAVE = "leave"
    CONTINUE = "continue"  # SIGCONT
    END = "end"


class LighthouseHealth(NamedTuple):
    """This holds what was seen of one lighthouse process so far. Times: one monotonic clock, in seconds."""

    begun: float
    answered: float | None = None  # the last time
    refused: float | None = None  # since
    stopped: bool = False
    full: float | None = None  # since

    def after(
        self, now: float, seen: LighthousePage | PageNotSeen, state: str, silent: float
    ) -> tuple[LighthouseHealth, LighthouseVerdict, str]:
        """Add one more look; returns also what to do about it, in words. ``state``: of its process, one letter.
        ``silent``: seconds without an answer, after which it is ended."""
        if isinstance(seen, LighthousePage):
            return self._replace(answered=now, refused=None, stopped=False, full=None), *_LEAVE
        if seen.kind is Unseen.FULL:
            full = now if self.full is None else self.full
            then = self._replace(answered=now, refused=None, stopped=False, full=full)
            if now - full >= _FULL and now - self.begun >= _FULL_AGAIN:
                return (
                    then,
                    LighthouseVerdict.END,
                    f"{seen.why}: strangers have told it names, and a new one knows none",
                )
            return then, *_LEAVE
        if state == _STOPPED:
            words = "" if self.stopped else "it is stopped (SIGSTOP): it is continued"
            return self._replace(stopped=True, refused=None), LighthouseVerdict.CONTINUE, words
        if seen.kind not in (Unseen.REFUSED, Unseen.SILENT):
            # the clocks stand still: these seconds prove nothing
            return self._replace(begun=now, answered=now if self.answered is not None else None, refused=None), *_LEAVE
        refused = (now if self.refused is None else self.refused) if seen.kind is Unseen.REFUSED else None
        then = self._replace(refused=refused, stopped=False)
        if refused is not None and now - refused >= _REFUSED:
            return then, LighthouseVerdict.END, f"it lives, and its port refuses connections for {_REFUSED:.0f} s"
        patience = silent * (1 if self.answered is not None else _NEVER_ANSWERED)
        since = now - (self.begun if self.answered is None else self.answered)
        if since >= patience:
            return then, LighthouseVerdict.END, f"it lives, and has not answered for {show_duration(since)}"
        return then, *_LEAVE


_LEAVE = (LighthouseVerdict.LEAVE, "")


# ------------------------------------------------------------------------------------------


# One process that is the lighthouse: started, heard and ended, each within a bound. It dies with its supervisor.

ENV_MARK = "FTSUPERVISE_LIGHTHOUSE"  # in its environment: RUN/replicas, by which its own are told from others
_LISTEN = 30.0  # seconds for it to begin to listen: torchft comes from a cold network file system
_END = 2.0  # seconds for a killed process to be gone
_ANSWER = 10_000  # bytes
_SAID = 2_000  # bytes of its last words
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


class NoLighthouse(Error):
    """It does not listen. ``taken``: the port is another's."""

    def __init__(self, message: str, *, taken: bool = False) -> None:
        super().__init__(message)
        self.taken = taken


class LighthouseProcess:
    """It listens when this is made. Raises NoLighthouse."""

    def __init__(self, python: str, words: Sequence[str], mark: str, env: Mapping[str, str]) -> None:
        self.begun = time.monotonic()
        self.version = ""
        self._last = b""
        given = {key: value for key, value in env.items() if key not in (ENV_ATTEMPT_DIR, "TOKIO_WORKER_THREADS")}
        try:
            self._child = subprocess.Popen(
                [python, "-I", str(SERVER), *words],
                stdin=subprocess.PIPE,  # its end tells it that we are gone
                stdout=subprocess.PIPE,  # its end tells us that it is
                stderr=subprocess.PIPE,
                env={**given, "RUST_LOG": given.get("RUST_LOG", "warn"), ENV_MARK: mark},
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise NoLighthouse(f"{python} cannot be started: {error.strerror}") from None
        found = processes.process(self._child.pid)
        self.pid, self.start = self._child.pid, found.start if found else None
        try:
            self._await_listening()
        except BaseException:
            self.end()
            raise

    @property
    def state(self) -> str:
        """One letter as in /proc/PID/stat; "X" when it is gone."""
        found = processes.process(self.pid)
        return found.state if found is not None and found.start == self.start else "X"

    def ended_within(self, seconds: float, wake: int) -> bool:
        """Wait until it ends, ``wake`` (a descriptor) can be read, or the time is over. Is it gone?"""
        ready = self._poll(seconds, wake)
        if self._err().fileno() in ready:
            self._hear()
        return self._out().fileno() in ready

    def proceed(self) -> None:
        """SIGCONT."""
        processes.send([self.pid], signal.SIGCONT)

    def end(self) -> str:
        """SIGKILL if it lives, and why it ended in words. One that does not die is left behind."""
        try:
            code: int | None = self._child.wait(0.05)
        except subprocess.TimeoutExpired:
            code = None
        words = "" if code is None else f"killed by {signal_name(-code)}" if code < 0 else f"it ended with code {code}"
        processes.end_group(self.pid)
        if code is None:
            try:
                self._child.wait(_END)
            except subprocess.TimeoutExpired:
                self._child.returncode = -signal.SIGKILL  # so that not even its destructor waits for it again
                words = f"process {self.pid} cannot be killed"
        self._hear()
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        last = printable(" ".join(self._last.decode("utf-8", "replace").split())[-300:])
        return f"{words}: {last}" if words and last else words

    def _await_listening(self) -> None:
        told, until = b"", time.monotonic() + _LISTEN
        while not told.endswith(b"\n"):
            ready = self._poll(until - time.monotonic())
            if not ready:
                raise NoLighthouse(f"the lighthouse does not listen within {_LISTEN:.0f} s")
            if self._err().fileno() in ready:
                self._hear()
            if self._out().fileno() in ready:
                part = os.read(self._out().fileno(), _ANSWER)
                told += part
                if not part or len(told) > _ANSWER:
                    raise NoLighthouse(f"the lighthouse ended at its start: {self.end() or 'without a word'}")
        answer = parse_object(told)
        if answer.get("listening") is not True:
            number = as_whole(answer.get("errno")) or 0
            words = as_text(answer.get("problem")) or "its Python has no torchft"
            raise NoLighthouse(words, taken=number in _TAKEN)
        self.version = as_text(answer.get("version"), 60)

    def _poll(self, seconds: float, *more: int) -> list[int]:
        poll = select.poll()
        for fd in (self._out().fileno(), self._err().fileno(), *more):
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]

    def _hear(self) -> None:
        """Read what it says, or it would wait for us in the middle of its work."""
        try:
            os.set_blocking(self._err().fileno(), False)
            part = os.read(self._err().fileno(), 1 << 16)
        except (BlockingIOError, ValueError):
            return
        if not part:
            time.sleep(0.01)  # it has closed it, and lives
        self._last = (self._last + part)[-_SAID:]

    def _out(self) -> IO[bytes]:
        assert self._child.stdout is not None
        return self._child.stdout

    def _err(self) -> IO[bytes]:
        assert self._child.stderr is not None
        return self._child.stderr


# ------------------------------------------------------------------------------------------


_TICK = 0.05  # seconds between two looks of the lighthouse at who has come
_SILENT = 60.0  # seconds without an answer; never more than a tenth of what the groups wait
_AGAIN = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)  # seconds before each next try, the last one for all others
_PATIENCE = 3.0  # seconds for a port that groups may know
_FRESH = 4 * LOOK_EVERY  # seconds after which a page says nothing about now
_STEADY = 5.0  # seconds after which a lighthouse that runs counts as one


class LighthousePlace(NamedTuple):
    """This says where a lighthouse runs, and for whom."""

    home: Path  # RUN/replicas
    host: str  # the address of this host that the groups reach, in numbers
    groups: int  # that are wanted
    least: int  # that may train on
    timeouts: Timeouts
    job: str = ""
    node: str = ""

    def words(self, port: int) -> list[str]:
        """Return the arguments of ``lighthouse_server.py``.

        A new one, too, is told of no more than ``least``. Groups that live report ten times a second and ask once a second, so
        that it has heard of all before a majority has asked, and waits for them. Told of all that live, it would let the
        survivors of the next death wait.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        seconds = (self.timeouts.join, _TICK, self.timeouts.heartbeat)
        return [f"{host}:{port}", str(self.least), *(str(round(one * 1000)) for one in seconds)]

    def address(self, port: int) -> str:
        return f"http://[{self.host}]:{port}" if ":" in self.host else f"http://{self.host}:{port}"

    @property
    def silent(self) -> float:
        """Seconds without an answer after which it is ended."""
        return min(_SILENT, self.timeouts.quorum / 10)


class SupervisedLighthouse:
    """``python``: an interpreter that has torchft."""

    def __init__(
        self,
        place: LighthousePlace,
        python: str,
        say: Callable[[str], None],
        *,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        ip_address(place.host)  # a name could lead elsewhere at each restart
        self.place, self.record = place, LighthouseRecord()
        self._say, self._env, self._python = say, env, python
        self._files = LighthouseFiles(place.home, say)
        self._process: LighthouseProcess | None = None
        self._seen: tuple[float, LighthousePage | PageNotSeen] = (
            0.0,
            PageNotSeen(Unseen.CUT, "it is not looked at yet"),
        )
        self.restarted: float | None = None  # monotonic: torchft may have lost a group's call then
        self._sentence: tuple[LighthouseProcess | None, str] = (None, "")  # which one is to be ended, and why
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="lighthouse", daemon=True) for work in (self._follow, self._look_on)
        ]
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> LighthouseRecord:
        """The lighthouse listens when this returns. Raises an error: no port, no torchft, or the run directory is no help."""
        before = self._files.claim() or LighthouseRecord()
        here = before.host == self.place.host
        if here:
            _end_older(before, str(self.place.home))
        ports = ports_of(f"{self.place.home}/lighthouse", 0)
        ports += [port for port in (free_port(()),) if port]  # who knows the run's name may listen at all of those
        self._process, port = self._first_of([before.port, *ports] if here and before.port else ports, here)
        address, now = self.place.address(port), _now()
        moves = before.address not in ("", address)
        record = before._replace(
            host=self.place.host,
            port=port,
            address=address,
            moved=now if moves else before.moved,
            pid=self._process.pid,
            job=self.place.job,
            node=self.place.node,
            since=now,
            min_replicas=self.place.least,
            generation=self._files.number,
            boot=processes.boot_id(),
            version=self._process.version,
            down_since=None,
            trouble="",
        )
        self._put(record)
        self._say(f"the lighthouse of {self.place.groups} groups listens at {self.record.address}")
        if moves:
            self._say(f"it was at {before.address} before: groups that were started with that address do not find it")
        for thread in self._threads:
            thread.start()
        return self.record

    @property
    def address(self) -> str:
        """Each group has this in TORCHFT_LIGHTHOUSE; it is the same for as long as this lives."""
        return self.record.address

    @property
    def moved(self) -> datetime | None:
        """When it began at its address, where the run's lighthouse was at another one before: groups that were started
        earlier do not find it, and the lighthouse that moved may have ended before it could tell them."""
        return self.record.moved

    def page(self) -> LighthousePage | PageNotSeen:
        """Its page as it was seen last, some seconds ago at most."""
        at, seen = self._seen
        return seen if time.monotonic() - at < _FRESH else PageNotSeen(Unseen.CUT, "it has not been looked at lately")

    def heard(self, group: str) -> bool | None:
        """Return whether a start of this group sends heartbeats. None: the lighthouse could not be asked, or is new itself."""
        page, within = self.page(), 2 * self.place.timeouts.heartbeat
        if not isinstance(page, LighthousePage):
            return None
        if any(group_of(one) == group for one in page.heard(within)):
            return True
        return None if (_now() - self.record.since).total_seconds() < within + LOOK_EVERY else False

    def keep(self) -> None:
        """Start a thread again that an error has ended. Never waits."""
        for number, work in enumerate((self._follow, self._look_on)):
            if not self._threads[number].is_alive() and not self._left():
                self._threads[number] = threading.Thread(target=work, name="lighthouse", daemon=True)
                self._threads[number].start()

    @property
    def superseded(self) -> int | None:
        """The number of a later supervisor of this run's lighthouse; ours has ended then."""
        return self._files.newer

    def stop(self) -> None:
        """End it, and write down that there is none: a group that begins now waits for the next one."""
        self._over.set()
        self._rouse()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5.0)
        if self._process is not None:
            self._process.end()
        if self.record.address and self.superseded is None:
            self._put(self.record._replace(down_since=_now(), trouble="its supervisor has ended"))
        self._files.close()

    # --------------------------------------------------------------------------------------------------- the first start

    def _first_of(self, ports: list[int], again: bool) -> tuple[LighthouseProcess, int]:
        """``again``: groups may live that know the first of these ports, and the one before may just be ending."""
        until = time.monotonic() + (_PATIENCE if again else 0.0)
        for port in ports:
            while True:
                try:
                    return self._started(port), port
                except NoLighthouse as error:
                    if not error.taken:
                        raise
                if port != ports[0] or time.monotonic() >= until:
                    break
                time.sleep(_AGAIN[1])
            self._say(_taken(port))
        raise Refused(
            f"all ports of the lighthouse are taken at {self.place.host}: {', '.join(map(str, ports))}",
            hint="ss -ltnp shows the programs that listen there",
        )

    def _started(self, port: int) -> LighthouseProcess:
        return LighthouseProcess(self._python, self.place.words(port), str(self.place.home), self._env)

    # ------------------------------------------------------------------------------------------------- while it is there

    def _follow(self) -> None:
        """Start it again whenever it ends, and end it when it is to be ended."""
        while (process := self._process) is not None and not self._over.is_set():
            gone = process.ended_within(1.0, self._wake[0])
            self._drain()
            condemned, why = self._sentence
            if not gone and condemned is not process and self.superseded is None:
                continue
            ended = process.end()
            self._process = None if self._left() else self._restarted(ended if gone else why, _steady(process))
        if self.superseded is not None:
            self._say(f"supervisor {self.superseded} of the lighthouse has begun: this one has ended its own")

    def _left(self) -> bool:
        return self._over.is_set() or self.superseded is not None

    def _restarted(self, why: str, steady: bool) -> LighthouseProcess | None:
        """A new one at the same address, as soon as there can be one; None when it is no longer our turn."""
        at, began = _now(), time.monotonic()
        self._files.look()  # a later supervisor may have ended it
        self._put(self.record._replace(down_since=at, trouble=why))
        for pause in _pauses(steady):
            self._over.wait(pause)
            if self._left():
                break
            try:
                process = self._started(self.record.port)
            except NoLighthouse as error:
                words = _taken(self.record.port) if error.taken else error.message
                if words != self.record.trouble:
                    self._say(f"the lighthouse ended ({why}) and cannot be started: {words}; it is tried again")
                    self._put(self.record._replace(trouble=words))
                continue
            if self._left():
                process.end()
                break
            down = time.monotonic() - began
            self._put(self.record.restarted(LighthouseRestart(at, why, down), process.pid))
            self._say(f"the lighthouse ended ({why}); started again after {show_duration(down)}")
            self.restarted = time.monotonic()
            return process
        return None

    def _put(self, record: LighthouseRecord) -> None:
        self.record = record
        self._files.put(record)

    def _look_on(self) -> None:
        """Look at its page, bounded, and judge."""
        process, health = self._process, LighthouseHealth(time.monotonic())
        while not self._over.wait(LOOK_EVERY):
            if self._process is not process:
                process, health = self._process, LighthouseHealth(time.monotonic())
            if process is None:
                continue
            state = process.state
            seen = look(self.place.host, self.record.port, LOOK_EVERY, own=True)
            self._seen = (time.monotonic(), seen)
            if self._process is not process or process.state == "X":
                continue
            health, verdict, words = health.after(time.monotonic(), seen, state, self.place.silent)
            if verdict is LighthouseVerdict.CONTINUE:
                process.proceed()
                if words:
                    self._say(f"the lighthouse: {words}")
            elif verdict is LighthouseVerdict.END:
                self._sentence = (process, words)
                self._rouse()
            if self.superseded is not None:
                self._rouse()

    def _rouse(self) -> None:
        try:
            os.write(self._wake[1], b"!")
        except BlockingIOError:
            return

    def _drain(self) -> None:
        try:
            os.read(self._wake[0], 4096)
        except BlockingIOError:
            return


def _steady(process: LighthouseProcess) -> bool:
    """Did it run long enough to be started again at once?"""
    return time.monotonic() - process.begun >= _STEADY


def _pauses(steady: bool) -> Iterator[float]:
    yield from _AGAIN[0 if steady else 2 :]
    while True:
        yield _AGAIN[-1]


def _end_older(before: LighthouseRecord, mark: str) -> None:
    """End the lighthouse of a supervisor that is gone, if it is left: ours, on this host, since this boot."""
    one = processes.process(before.pid) if before.pid and before.boot == processes.boot_id() else None
    if one is not None and processes.environment(one.pid).get(ENV_MARK) == mark:
        processes.end_all(lambda: (), 2.0, (one,))


def _taken(port: int) -> str:
    uid = listener(port)
    whose = "a program" if uid is None else f"a program of {shown_user(uid)}"
    return f"port {port} is taken by {whose}"


def _now() -> datetime:
    return datetime.now(timezone.utc)
