"""The lighthouse of a run of replica groups, supervised: it is there, at one address, for as long as a group lives.

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

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import Refused
from ftsupervise.host import processes
from ftsupervise.host.ownership import shown_user
from ftsupervise.host.ports import listener, ports_of
from ftsupervise.replicas.lighthouse_health import LOOK_EVERY, LighthouseHealth, LighthouseVerdict
from ftsupervise.replicas.lighthouse_page import LighthousePage, PageNotSeen, Unseen, group_of, look
from ftsupervise.replicas.lighthouse_process import ENV_MARK, LighthouseProcess, NoLighthouse
from ftsupervise.replicas.lighthouse_record import LighthouseFiles, LighthouseRecord, LighthouseRestart
from ftsupervise.replicas.timeouts import Timeouts
from ftsupervise.units import show_duration

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


class LighthouseEvent(NamedTuple):
    """``restart``: groups that make no step soon after it are to be restarted, for torchft may have lost their call."""

    at: datetime
    words: str
    restart: bool = False


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
        self._events: list[LighthouseEvent] = []
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
        self._tell(f"the lighthouse of {self.place.groups} groups listens at {self.record.address}")
        if moves:
            self._tell(f"it was at {before.address} before: groups that were started with that address do not find it")
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

    def events(self) -> list[LighthouseEvent]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

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
            self._tell(f"supervisor {self.superseded} of the lighthouse has begun: this one has ended its own")

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
                    self._tell(f"the lighthouse ended ({why}) and cannot be started: {words}; it is tried again")
                    self._put(self.record._replace(trouble=words))
                continue
            if self._left():
                process.end()
                break
            down = time.monotonic() - began
            self._put(self.record.restarted(LighthouseRestart(at, why, down), process.pid))
            self._tell(f"the lighthouse ended ({why}); started again after {show_duration(down)}", True)
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
                    self._tell(f"the lighthouse: {words}")
            elif verdict is LighthouseVerdict.END:
                self._sentence = (process, words)
                self._rouse()
            if self.superseded is not None:
                self._rouse()

    # ------------------------------------------------------------------------------------------------------------ telling

    def _tell(self, words: str, restart: bool = False) -> None:
        self._say(words)
        self._events.append(LighthouseEvent(_now(), words, restart))

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
