"""Finds why an attempt ended. Pure functions from observations to the cause and the failure in the ledger."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ftsupervise.model import Cause, CauseKind, End, Failure, FailureKind, NodeRanks, signal_in
from ftsupervise.printable import OUR_LINE
from ftsupervise.truth import GIVEN_UP
from ftsupervise.units import signal_name

# Exit codes of other programs.
_AGAIN = 16  # Megatron: computed twice with different results, start again to find out which was wrong
_WRONG = 17  # Megatron: the same wrong result again
_MEGATRON = re.compile("megatron|rerun_state_machine", re.I)  # other programs use these codes too

# The guard or a person asked for these: the loop stopped in order, and nothing is wrong with it.
_ASKED = frozenset(
    {
        CauseKind.FINISHED,
        CauseKind.KILL_SWITCH,
        CauseKind.WARNING,
        CauseKind.TIME_LIMIT,
        CauseKind.RUN_TIME,
        CauseKind.CANCELLED,
        CauseKind.INTERRUPTED,
        CauseKind.PREEMPTED,
        CauseKind.REQUEUED,
        CauseKind.SUPERSEDED,
        CauseKind.MOVED,
    }
)
# The guard stopped the loop for one of these, which is a failure whatever the exit code.
_STOPPED_FOR = {
    CauseKind.HOST_MEMORY: FailureKind.MEMORY,
    CauseKind.GPU_MEMORY: FailureKind.MEMORY,
    CauseKind.NOT_A_NUMBER: FailureKind.NUMBERS,
    CauseKind.DIVERGES: FailureKind.NUMBERS,
}
# The loop stopped when asked to; these causes do not say why it was asked.
_MERELY_TOLD = (None, CauseKind.WARNING, CauseKind.TOLD)

_RANK = r"(?:\[?rank\s?\d+\]?:? ?|\d+: ?)?"  # "[rank0]: " is PyTorch's, "0: " that of srun --label
_ERROR = re.compile(rf"^{_RANK}((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::[ \t]*(.*))?$", re.M)
# words of a GPU or a node for a fault of the hardware
HARDWARE = re.compile(
    r"^.*(?:\bXid\b|uncorrectable (?:NVLink |double.bit )?ECC|fallen off the bus|Uncorrectable hardware|\bDBE\b).*$",
    re.M | re.I,
)
_UNNAMED = re.compile(rf"^{_RANK}Traceback \(most recent call last\):?\n(?:{_RANK}[ \t].*\n)+{_RANK}(\S.*)$", re.M)
_FATAL = re.compile(r"^.*(?:^\s*what\(\): |\bFatal Python error: |\bterminate called |\bFATAL\b).*$", re.M)
_SAYS_WHY = re.compile(
    r"\b(?:\w*error|fatal|failed|failure|cannot|can't|not found|no such|denied|refused|invalid)\b", re.I
)
_NOT_ITS_OWN = re.compile(rf"^(?:{OUR_LINE}|srun: |slurmstepd(?:-\S+)?: |\[\d{{4}}-\d\d-\d\dT\S+\] error: |\s*$)")
# of a rank that was killed while it wrote its traceback
_CUT_OFF = re.compile(r"(?:Traceback \(most recent call last\):?|File \".*\", line \d+(?:, in .*)?)$")
# another program has taken the port on which the ranks were to meet; in an error's own line, since programs also warn
# of it
_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)
_SIGNS: tuple[tuple[FailureKind, str, re.Pattern[str]], ...] = (
    (FailureKind.DISK, "no space left", re.compile(r"No space left on device|Disk quota exceeded")),
    (FailureKind.MEMORY, "GPU out of memory", re.compile(r"\bCUDA out of memory|OutOfMemoryError")),
    (FailureKind.MEMORY, "out of memory", re.compile(r"^MemoryError|Cannot allocate memory", re.M)),
    (FailureKind.HANG, "collective timed out", re.compile(r"Watchdog caught collective operation timeout")),
    (FailureKind.NUMBERS, "loss is not a number", re.compile(r"\bloss(?: is| became|:)? (?:nan|inf)\b", re.I)),
)


# Lightning and submitit do so at the warning, where the job may be requeued.
_BY_ITSELF = "scontrol requeue after the warning, by the program itself as it seems"
_NOTICED = 2.0  # seconds after which a death has been noticed, also on a busy machine
_CLOCKS = 10.0  # seconds by which the clocks of two machines may differ


class First(Enum):
    """Tells which came first: SIGTERM to rank 0, as its guard wrote down, or the first end of a rank or of the command."""

    REQUEST = "it was asked to stop"
    DEATH = "something had ended by then"  # srun, torchrun or we have told the rest to leave
    UNSEEN = "that is not known"


class Told(NamedTuple):
    """When rank 0 was told. Times are monotonic seconds on our clock."""

    at: float | None = None  # None: it wrote down no time
    here: bool = False  # that was by the clock of this machine

    def before(self, when: float, by: float) -> bool:
        """Return whether it was surely told earlier than ``when``, which is known to ``by`` seconds."""
        return self.at is not None and self.at < when - (by if self.here else max(by, _CLOCKS))

    def after(self, when: float) -> bool:
        return self.at is not None and self.at >= when + (0.0 if self.here else _CLOCKS)


def first_event(
    told: Told,
    *,
    ours: float,
    died_at: float | None = None,
    had_heard: bool | None = None,
    by_itself: bool = True,
) -> First:
    """Return what came first.

    ours       when we began to end processes ourselves, or the command was over
    died_at    when the first death was noticed; None: there was none, or nobody saw when
    had_heard  whether the process that died had got SIGTERM before, by its own page; None: it has none
    by_itself  something may have ended before the command did

    The page of the process that died says it without a clock. Clocks only say it where they differ by more than a death may
    be noticed late, and those of two machines may be apart.
    """
    if had_heard:
        return First.REQUEST
    if told.after(ours) or (died_at is not None and told.after(died_at)):
        return First.DEATH
    if not by_itself or (died_at is not None and told.before(died_at, _NOTICED)):
        return First.REQUEST
    return First.UNSEEN if had_heard is None else First.DEATH


def cause(
    code: int,
    *,
    finished: bool = False,
    stopped: Cause | None = None,
    stop_signal: int = 0,
    past_end: bool = False,
    death: Cause | None = None,
    ended: Cause | None = None,
    first: First = First.REQUEST,
) -> Cause:
    """The cause of an end, from the surest evidence to the weakest.

    code      exit code of the command, -N when a signal N ended it
    finished  the finished mark stands
    stopped   the cause the guard wrote down before the loop left
    stop_signal  the signal that asked ``ftsupervise run`` to stop, 0 if none did
    past_end  the job's time limit was reached (or is seconds away)
    death     the first death by Slurm's own lines in the output
    ended     why we ended the command ourselves
    first     where the guard wrote down SIGTERM and we were not asked to stop: what came first
    """
    if ended is not None:
        return ended
    how = command_end(code)
    if death is not None and code:
        left = code if code > 0 else 128 - code
        same = death.kind is CauseKind.EXIT and death.code == left
        how = death if same else death._replace(left=left)
    if finished:
        return Cause(CauseKind.FINISHED, then=how if code else None)
    kind = stopped.kind if stopped is not None else None
    if death is not None and death.kind is CauseKind.REQUEUED and kind in _MERELY_TOLD:
        return death._replace(text="scontrol requeue")
    if kind is CauseKind.TOLD and not stop_signal:
        said_by_slurm = how.kind in (CauseKind.PREEMPTED, CauseKind.TIME_LIMIT)  # what it was asked to stop for
        if first is First.DEATH or said_by_slurm:
            return how
        if first is First.UNSEEN and code:
            return how._replace(then=stopped, beside=True)
    if (
        not stop_signal and code == 0 and kind is CauseKind.TOLD
    ):  # Slurm signals the ranks first: with a GraceTime, long before us
        stop_signal = signal.SIGTERM
    if stop_signal in (signal.SIGTERM, signal.SIGHUP) and kind in _MERELY_TOLD:
        past_end = past_end or (death is not None and death.kind is CauseKind.TIME_LIMIT)  # it was lowered a moment ago
        stopped = Cause(CauseKind.TIME_LIMIT) if past_end else Cause(CauseKind.CANCELLED, signal=int(stop_signal))
    elif stop_signal and stopped is None:
        stopped = Cause(CauseKind.INTERRUPTED, signal=int(stop_signal))
    if stopped is None:
        return how
    return stopped if code == 0 or stop_signal else stopped._replace(then=how)


def after_the_warning(why: Cause) -> Cause:
    """Return the cause of an end after Slurm's warning was caught in the command, where ``why`` is all that is known of it."""
    if why.kind is CauseKind.REQUEUED:
        return why._replace(text=_BY_ITSELF)
    return Cause(CauseKind.WARNING, then=why) if why.kind is CauseKind.EXIT and why.code else why


def with_lost_nodes(ended: End, lost: Mapping[str, str]) -> End:
    """Return the end of an attempt that failed because it lost nodes. ``lost``: node -> Slurm's word."""
    if not lost:
        return ended
    was = ended.failure.detail if ended.failure is not None else ""
    how = ", ".join(f"{node} is {state}" for node, state in lost.items())
    found = Failure(FailureKind.NODE, "node failure", f"{how}{f'; {was}' if was else ''}")
    why = Cause(CauseKind.NODE, tuple(map(NodeRanks, lost)), text=how, then=ended.cause)
    return ended._replace(failure=found, cause=why)


def failure(
    code: int,
    of: Cause,
    *,
    asked: bool = False,
    death: Cause | None = None,
    output: str | None = "",
    oom: bool = False,
) -> Failure | None:
    """Return the failure in an end, None when it was none (done, or asked for).

    ``of`` is the result of ``cause``; ``asked``: we were asked to stop or warned, so the end is no failure; ``output``
    the end of the command's output, None when it cannot be seen; ``oom``: the kernel killed one of the job's processes
    for its memory meanwhile.
    """
    found = _failure(code, of, asked=asked, death=death, output=output or "", oom=oom)
    if found is None or found.kind in (FailureKind.HANG, FailureKind.GIVEN_UP, FailureKind.NUMBERS):
        return found
    return found._replace(detail=_deciding(found, output))


def _failure(code: int, of: Cause, *, asked: bool, death: Cause | None, output: str, oom: bool) -> Failure | None:
    if of.kind is CauseKind.HANG:
        return Failure(FailureKind.HANG, "hang", of.hang_words())
    kind = _STOPPED_FOR.get(of.kind)
    if kind is not None and not asked:
        if code == 0 or kind is FailureKind.NUMBERS:
            return Failure(kind, of.kind.value, of.text)
    elif asked or code == 0 or of.kind in _ASKED:
        return None
    died = death.kind if death is not None else None
    error, detail = _error(output)
    if oom or died is CauseKind.MEMORY:
        return Failure(FailureKind.MEMORY, "out of memory", detail)
    if death is not None and died in (CauseKind.NODE, CauseKind.LAUNCH):
        return Failure(FailureKind.NODE, "node failure", death.words())
    if death is not None and died is CauseKind.NO_STEP:
        return Failure(FailureKind.START, CauseKind.NO_STEP.value, death.words())
    if _TAKEN.search(_line(output, output.find(detail)) if detail else ""):
        return Failure(FailureKind.START, "port in use", f"the next attempt meets at another port: {detail}")
    if of.kind is CauseKind.NO_START:
        return Failure(FailureKind.START, CauseKind.NO_START.value, of.words())
    for kind, sign, pattern in _SIGNS:
        if found := pattern.search(output):
            return Failure(kind, sign, _line(output, found.start()))
    return _by_code(code, death, error, detail, megatron=bool(_MEGATRON.search(output)))


def _by_code(code: int, death: Cause | None, error: str, detail: str, *, megatron: bool) -> Failure:
    number = code
    if death is not None and death.kind is CauseKind.EXIT and death.code is not None:
        number = death.code
    elif death is not None:
        return Failure(FailureKind.SIGNAL, death.end_words(), detail)
    if number == GIVEN_UP:
        said = f"the launcher asks not to be started again (exit {GIVEN_UP})"
        return Failure(FailureKind.GIVEN_UP, f"exit {GIVEN_UP}", said)
    if megatron and number in (_AGAIN, _WRONG):
        what = "asks to be started again to find out" if number == _AGAIN else "is wrong again"
        return Failure(FailureKind.NUMBERS, f"exit {number}", f"a result did not hold when computed twice; it {what}")
    if by := -number if number < 0 else signal_in(number):
        return Failure(FailureKind.SIGNAL, f"killed by {signal_name(by)}", detail)
    return Failure(FailureKind.CODE, f"exit {number}", detail, error)


def _error(output: str) -> tuple[str, str]:
    """Return the name of the first exception that ended a traceback, and its line: later exceptions are mostly its
    consequences.
    """
    start = output.find("Traceback (most recent call last)")
    found = _ERROR.search(output, start) if start >= 0 else None
    if found is None:
        return "", ""
    return found[1][:200], f"{found[1]}{': ' + found[2] if found[2] else ''}"[:200]


def _deciding(found: Failure, output: str | None) -> str:
    """Return the line that explains the failure best.

    That is the hardware's message, then the failure's own sign, then the exception, then the last line that mentions an
    error. "no output" where a program exited with a code and printed nothing.
    """
    text = output or ""
    if hardware := HARDWARE.search(text):
        return hardware[0].strip()[:200]
    if found.detail:
        return found.detail
    if (unnamed := _UNNAMED.search(text)) is not None and not _NOT_ITS_OWN.match(unnamed[1]):
        return unnamed[1].strip()[:200]
    if fatal := _FATAL.search(text):
        return fatal[0].strip()[:200]
    if found.kind is not FailureKind.CODE:
        return ""
    own = [line.strip() for line in text.splitlines() if not _NOT_ITS_OWN.match(line)]
    telling = [line for line in own if not _CUT_OFF.search(line)]
    said = next((line for line in reversed(telling) if _SAYS_WHY.search(line)), telling[-1] if telling else "")
    return said[:200] or ("no output" if output is not None and not own else "")


def _line(output: str, at: int) -> str:
    begin = output.rfind("\n", 0, at) + 1
    end = output.find("\n", at)
    return output[begin : end if end >= 0 else len(output)].strip()[:200]


def command_end(code: int) -> Cause:
    """Return how the command ended, by its exit code alone."""
    return Cause(CauseKind.SIGNAL, signal=-code) if code < 0 else Cause(CauseKind.EXIT, code=code)
