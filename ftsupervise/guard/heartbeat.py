"""This rank's beats: its step and phase, written at most every few seconds, and at once when it matters."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Optional

from ftsupervise.guard.loss_policy import LossWatch
from ftsupervise.guard.settings import RankContext, Voice, whole
from ftsupervise.guard.side_thread import SideThread
from ftsupervise.host.ownership import make_folder
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.fence import is_sealed
from ftsupervise.rundir.heartbeat_page import HeartbeatPage
from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.records import write_json
from ftsupervise.truth import SAVE, Beat, LossTrouble

# The page of this process reports its end before it has ended: with torch loaded that takes a second, or hangs in the
# teardown.
#
# Told when the interpreter ends, after the program's own ``except``, ``finally`` and threads, and after what it registered
# with ``atexit`` behind its guard. Its exit code is known then if an exception ended it, or a ``sys.exit()`` out of ``with
# Guard()``. Of a loop that was asked to stop, or has finished, only its end is recorded.

_OUTERMOST = ("<module>", "_run_module_as_main")  # of a program, and with ``python -m``


class ExitReport:
    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self._code = 0  # of a sys.exit() that went through the guard's block

    def passes(self, error: BaseException | None) -> None:
        """Note that an exception leaves the guard's block, and may be caught further out.

        It is ignored once the loop stops normally: other ranks may be about to save, and srun reports this one.
        """
        if not self._is_mine() or self._page.in_order:
            return
        self._code = _exit_code(error) if isinstance(error, SystemExit) else 0
        if self._code or isinstance(error, Exception):
            self._page.failed()

    def forget(self) -> None:
        """Forget an earlier exception, which was caught: the loop is entered again, or has ended normally."""
        if self._is_mine():
            self._code = 0
            self._page.stays()

    def leaves(self) -> None:
        if self._is_mine():
            self._page.leaving()

    def at_exit(self) -> None:
        """Record a normal exit: a process without this record was killed."""
        if not self._is_mine():
            return
        code = 0 if self._page.in_order else 1 if _uncaught() else self._code
        if code:
            _flush()
            self._page.ends(code)
        else:
            self._page.leaving()

    def _is_mine(self) -> bool:
        """Return whether this is the rank itself. A child that it has forked maps the same page, and exits too."""
        return os.getpid() == self._page.pid


def _flush() -> None:
    """Write out the program's prints: the interpreter does so only after this, and may not come to it."""
    for name in ("stdout", "stderr", "__stdout__"):
        try:
            getattr(sys, name).flush()
        except Exception:  # none, or closed
            continue


def _exit_code(error: SystemExit) -> int:
    """Return the exit code that the interpreter makes of the argument of ``sys.exit()``."""
    try:
        code = error.code
    except Exception:  # a subclass of somebody's
        return 1
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _uncaught() -> bool:
    """Return whether an exception has left the program. One that an extension printed and forgot began in another frame."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if not isinstance(error, Exception) or trace is None:
        return False
    return trace.tb_frame.f_back is None and trace.tb_frame.f_code.co_name in _OUTERMOST


# The rank's stacks on request: a signal from outside, answered by ``faulthandler`` in C, also with the GIL held.
#
# The answer goes to ``stack-N`` beside the rank's page, in node-local memory: a file system that hangs is not asked for it.
# The signal is one that is otherwise unused; a handler that the program has set for it, before or after, stays.


def answer_with_the_stack(directory: str | os.PathLike[str], rank: int) -> None:
    """Answer from now on. Raises OSError when the file cannot be made, RuntimeError when the handler cannot."""
    if signal.getsignal(heartbeat_page.STACK_SIGNAL) != signal.SIG_DFL:
        return
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(heartbeat_page.stack_path(directory, rank), flags, 0o600)
    faulthandler.register(heartbeat_page.STACK_SIGNAL, file=fd, all_threads=True)


def tell_the_worker_server(directory: str | os.PathLike[str], rank: int) -> None:
    """Leave a note where PyTorch's worker server of this rank listens: a program that sets its address for each rank does so in
    its own environment, which nobody sees from outside. Raises OSError."""
    named = next((os.environ[name] for name in heartbeat_page.ENV_SERVERS if os.environ.get(name)), "")
    if named:
        write_whole(heartbeat_page.server_note(directory, rank), named, mode=0o600, sync=False)


# The dump of PyTorch's flight recorder, left where an exception ends the program while it has a process group.
#
# When ranks give tensors of different sizes, gloo aborts the one that was given too much, which need not be the one that is
# wrong, and which says no more. Its neighbours learn of it at once: what they had called says who it was.

_DUMPED_WITHIN = 0.3  # seconds: the disk may hang


def leave_at_an_exception(attempt: Path, rank: int) -> None:
    """From now on leave it in the folder of ``attempt``, where the evidence of a hang puts those that it asks for."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid and issubclass(kind, Exception):  # and not in a child that it has forked
            _leave_dump(attempt / "evidence/flight" / f"rank_{rank}")
        before(kind, error, trace)

    sys.excepthook = hook


def _leave_dump(path: Path) -> None:
    """Write it, without stacks: these cost most, and the traceback has the one that counts. Never raises."""
    try:
        group, recorder = sys.modules.get("torch.distributed"), sys.modules.get("torch._C._distributed_c10d")
        if group is None or recorder is None or not group.is_initialized():
            return
        raw = recorder._dump_fr_trace(True, False, False)  # all collectives, no stacks, not only those under way
        writing = threading.Thread(target=_write_dump, args=(path, raw), daemon=True)
        writing.start()
        writing.join(_DUMPED_WITHIN)
    except Exception:  # law 7: another PyTorch
        return


def _write_dump(path: Path, raw: bytes) -> None:
    try:
        make_folder(path.parent, parents=True)
        write_whole(path, raw, sync=False)
    except OSError:
        return


_NOW = float("-inf")


class PhaseTime(NamedTuple):
    phase: str
    since: float  # monotonic: when the phase began
    saving: float = 0.0  # seconds in saves that are over


WATCH_EVERY = 60.0  # seconds between two checks of the watches


Facts = tuple[dict[str, str], Optional[LossTrouble]]


class BeatWriter:
    """Writes the beats of this rank, in the side thread. ``waits``: the loop waits for each of them.

    ``superseded``: has a newer attempt begun? The beats are its ranks' from then on.
    """

    def __init__(
        self, place: RankContext, voice: Voice, superseded: Callable[[], bool], side: SideThread, *, waits: bool
    ) -> None:
        self._place, self._voice, self._superseded = place, voice, superseded
        self._side, self._waits = side, waits

    def hand_over(self, kind: str, work: Callable[[], object], *, wait: bool) -> None:
        """Have it done in the side thread. News is waited for: the loop may hold the interpreter for long after it."""
        if wait or self._waits:
            self._side.do(kind, work)
        else:
            self._side.ask(kind, work)

    def write(self, step: int | None, phase: str, at: float, facts: Callable[[], Facts]) -> None:
        """Write the beat. ``at``: seconds since 1970. The facts are those of the moment of writing."""
        place = self._place
        if place.rundir is None or self._superseded():
            return
        try:
            now = datetime.fromtimestamp(at, timezone.utc)
            mine = Beat(place.rank, step, str(phase), now, os.getpid(), os.uname().nodename, *facts())
            heartbeat_page.write_beat(place.rundir, mine, place.area)
        except OSError as error:
            if place.area is None or not is_sealed(place.area):
                self._voice.later(f"cannot write the beat: {error.strerror}; training goes on")
        except Exception as error:  # law 7, and the rest of the check must still be made
            self._voice.later(f"cannot write the beat: {type(error).__name__}: {error}; training goes on")


class Heart:
    """Keeps step, phase and a few facts, and writes them to RUN/beats. Without a run directory it only keeps them."""

    def __init__(
        self, place: RankContext, every: float, voice: Voice, superseded: Callable[[], bool], side: SideThread
    ) -> None:
        self._place = place
        self._beats = BeatWriter(place, voice, superseded, side, waits=not every)
        self._voice = voice
        self._every = heartbeat_page.interval(place.world, every)
        self._due = self._phase_due = _NOW
        self._watch_due = time.monotonic() + WATCH_EVERY
        self._spent = PhaseTime("start", time.monotonic())
        self._age = age()  # seconds that this process took to come here
        self.step: int | None = None
        self.losses: LossWatch | None = None
        self.more_facts: Callable[[], dict[str, str]] = dict  # asked for with each beat
        self.ending: ExitReport | None = None
        self.page = self._open_page()
        self.facts: dict[str, str] = {"every": f"{self._every:g}"}
        if place.attempt is not None:
            self.facts["attempt"] = str(place.attempt)
        if place.rank < place.world and (place.world > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
            self.facts["world"] = str(place.world)  # torchrun may go on with fewer ranks

    @property
    def phase(self) -> str:
        return self._spent.phase

    def first(self, step: int) -> None:
        """Record the first step that this process finished."""
        self.facts["first"] = str(whole(step))
        self.facts["first_at"] = f"{time.time():.3f}"
        if self.phase == "start":
            self._begin_phase("train")
        if self.page is not None:
            self.page.first(whole(step))
        self._due = _NOW  # that a later attempt trains again is news
        self._tell_imports()

    def _tell_imports(self) -> None:
        """List the imported modules for a standby, when the supervisor wants one."""
        path = os.environ.get(ENV_IMPORTS, "")
        if not path or self._place.rank != 0:
            return
        try:
            write_imports(path, self._place.attempt, self._age)
        except Exception as error:  # law 7; restarts stay cold
            self._voice.once(f"cannot write {path}: {error}; restarts are cold")

    def _open_page(self) -> heartbeat_page.HeartbeatPage | None:
        """Make this rank's page in the node's memory, when the supervisor has named a place for it."""
        directory = os.environ.get(heartbeat_page.ENV_PAGES, "")
        if not directory or self._place.rundir is None:
            return None
        try:
            page = heartbeat_page.HeartbeatPage(directory, self._place.rank, self._place.attempt)
            self.ending = ExitReport(page)
            atexit.register(self.ending.at_exit)
            answer_with_the_stack(directory, self._place.rank)
            tell_the_worker_server(directory, self._place.rank)
            if self._place.attempt_dir is not None:
                leave_at_an_exception(self._place.attempt_dir, self._place.rank)
            return page
        except Exception as error:  # law 7; the beats in the run directory say the same, slowly
            self._voice.once(f"no page in {directory}: {error}; beats go through the run directory only")
            return None

    def beat(self, now: float) -> bool:
        """Write if it is due at monotonic ``now``; return whether it was."""
        if self.page is not None:
            self.page.beat(time.monotonic())
        if now < self._due:
            return False
        is_news = self._due == _NOW
        self._due = time.monotonic() + self._every
        if self._place.rundir is not None:
            write = partial(self._beats.write, whole(self.step), self.phase, time.time(), self._facts_now)
            self._beats.hand_over("beat", write, wait=is_news)
        return True

    def _facts_now(self) -> Facts:
        facts, losses = {**self.facts, **self.more_facts()}, self.losses
        if losses is None or losses.value is None:
            return facts, None
        facts["loss"] = f"{losses.value:.6g}"
        if losses.first is not None:
            facts["first_loss"] = f"{losses.first:.6g}"
        return facts, losses.trouble

    def miss_the_watch(self, now: float) -> None:
        """Rank 0 checks now and then whether the watches of this run still work."""
        if self._place.rundir is None or self._place.rank != 0 or now < self._watch_due:
            return
        self._watch_due = now + WATCH_EVERY
        self._beats.hand_over("watch", partial(self._look_for_watches, self._place.rundir), wait=False)

    def _look_for_watches(self, rundir: RunDir) -> None:
        from ftsupervise.rundir.heartbeat_page import watchers

        try:
            late = [w for w in watchers(rundir) if w.late_by(datetime.now(timezone.utc)) is not None]
        except OSError:
            return
        self.facts["watch"] = f"silent: {', '.join(w.host for w in late)}" if late else "ok"
        if late:
            self._voice.later(
                f"the watch on {late[0].host} has not checked since {late[0].at:%Y-%m-%d %H:%M} UTC: "
                "alerts about this run may not be sent (ftsupervise watch)"
            )

    def take_loss(self, loss: float, step: Any) -> bool:
        """Take a loss of the loop; return whether there is something to decide. A report goes out with the next check."""
        losses = self.losses
        try:
            news = losses is not None and losses.take(loss, self.step, step)
        except (TypeError, ValueError):
            self._voice.once(f"loss() takes a number, not {type(loss).__name__}")
            return False
        if self.page is not None and losses is not None and losses.value is not None:
            self.page.loss(losses.value)
        if news:
            self.soon()
        return news

    def last_step(self, step: Any) -> None:
        """Take the step after which the training is complete into the next beat."""
        self.facts["last_step"] = str(whole(step))
        if self.page is not None:
            self.page.last_step(whole(step))

    def saved(self, step: Any) -> None:
        """Take the newest saved step into the next beat, which is due at the next check."""
        self.facts["saved"] = str(whole(step))
        if self.page is not None:
            self.page.saved(whole(step))
        self.soon()

    def beat_now(self) -> None:
        self._due = _NOW
        self.beat(0.0)

    def soon(self) -> None:
        """Write at the next check, whatever the interval."""
        self._due = _NOW

    def change_phase(self, phase: str) -> None:
        """A phase is worth a beat at once; phases that flicker are not worth one each."""
        self._begin_phase(phase)
        now = time.monotonic()
        if now >= self._phase_due:
            self._phase_due = now + min(1.0, self._every)
            self._due = _NOW
        self.beat(now)

    def _begin_phase(self, phase: str) -> None:
        now, spent = time.monotonic(), self._spent
        saving = spent.saving + (now - spent.since if self.phase == SAVE else 0.0)
        if saving:
            self.facts["saving"] = f"{saving:.3f}"
        self._spent = PhaseTime(phase, now, saving)
        if self.page is not None:
            self.page.phase(phase, saving)


# The modules that this process has imported by its first step, for a standby that imports them in advance.
#
# Only modules of Python and installed packages: the program's own modules may change between two attempts.

ENV_IMPORTS = "FTSUPERVISE_IMPORTS"  # the file for the list; set by ``ftsupervise run`` when it needs one


class Imports(NamedTuple):
    """The modules that a rank had imported by its first step."""

    attempt: int | None = None
    seconds: float = 0.0  # that it took
    cpus: int = 0
    rss: int = 0  # bytes
    modules: Annotated[tuple[str, ...], 100_000] = ()  # in the order in which they were imported
    ours: Annotated[tuple[str, ...], 1000] = ()  # the same of this package, wherever it lies


def installed() -> list[str]:
    """Return the names of the imported modules that are installed, in the order in which they were imported."""
    roots = {str(Path(os.__file__).parent) + os.sep}
    roots |= {f"{entry}{os.sep}" for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    inside = tuple(roots)
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        real = spec is not None and getattr(spec, "name", "") == name and isinstance(file, str)
        if real and str(file).startswith(inside) and name != "sitecustomize" and not name.startswith("ftsupervise"):
            found.append(name)
    return found


def write_imports(path: str, attempt: int | None, seconds: float) -> None:
    """Write them down. ``seconds``: from the start of this process to where its imports were over. Raises OSError."""
    ours = tuple(name for name in sys.modules if name == "ftsupervise" or name.startswith("ftsupervise."))
    record = Imports(attempt, round(seconds, 2), len(os.sched_getaffinity(0)), _rss(), tuple(installed()), ours)
    write_json(Path(path), record, sync=False)


def age() -> float:
    """Return the seconds since this process was started; 0.0 where that cannot be seen."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _rss() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
