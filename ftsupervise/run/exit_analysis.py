"""Finds the rank that died first. srun's own exit code often names a victim: when one rank is killed it ends the others with
SIGTERM and exits with 143. Its messages in the job's output say more, in the order of events. Pure, but for reading.

The lines are Slurm's own, as seen on 22.05 to 26.05. Anybody may print such a line: an evaluation with an srun of its own, a
log that is quoted. So a line is a hint: it must be about our job, our step and our nodes (``Ours``), and while the command
runs ``deaths.py`` has it confirmed.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple

from ftsupervise.host.in_time import OneAtATime, PendingCall
from ftsupervise.host.processes import boot_id
from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import (
    Attempt,
    Cause,
    CauseKind,
    Claim,
    Failure,
    FailureKind,
    NodeRanks,
    Reached,
    ended,
    signal_in,
)
from ftsupervise.printable import OUR_LINE, SLURMS_LINE, printable, printable_lines
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.run import Options
from ftsupervise.run.job_end import JobEnd
from ftsupervise.rundir.log_lines import LINE
from ftsupervise.rundir.records import read_json
from ftsupervise.rundir.switches import read_stopped
from ftsupervise.scheduler.parse import is_srun
from ftsupervise.secrecy import masked
from ftsupervise.truth import DIVERGES, GIVEN_UP, NOT_A_NUMBER, LossTrouble
from ftsupervise.units import signal_name
from ftsupervise.warm.restarts import WarmStart

# Finds why an attempt ended. Pure functions from observations to the cause and the failure in the ledger.

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
_NOT_ITS_OWN = re.compile(rf"^(?:{OUR_LINE}|{SLURMS_LINE}|\s*$)")
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


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
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
    first: First = First.REQUEST,
) -> Cause:
    """The cause of an end that we have not brought about, from the surest evidence to the weakest.

    code      exit code of the command, -N when a signal N ended it
    finished  the finished mark stands
    stopped   the cause the guard wrote down before the loop left
    stop_signal  the signal that asked ``ftsupervise run`` to stop, 0 if none did
    past_end  the job's time limit was reached (or is seconds away)
    death     the first death by Slurm's own lines in the output
    first     where the guard wrote down SIGTERM and we were not asked to stop: what came first
    """
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
    if death is not None and death.kind is CauseKind.PREEMPTED and kind is None and not code and not stop_signal:
        return death
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


def by_slurm_alone(death: Cause | None, ours: Ours) -> Cause | None:
    """Return ``death`` where Slurm's line about this very job says that it has taken the job away.

    Slurm may signal the ranks before us (seen on 24.11): a program that leaves with 0 has then ended before we are told.
    """
    taken = death is not None and death.kind in (CauseKind.REQUEUED, CauseKind.PREEMPTED)
    return death if taken and ours.job else None


def taken_away(output: str, ours: Ours) -> Cause | None:
    """Return why Slurm ended this very job, by its own line: the time limit, or scancel. Its signal may reach the command's
    processes before us: a job script whose program has died of it goes on to its end, and leaves with 0."""
    found = next((one for one in _ENDED_JOB.finditer(output) if ours.job and ours.has_step(one["job"])), None)
    if found is None:
        return None
    return Cause(CauseKind.TIME_LIMIT) if found["limit"] else Cause(CauseKind.CANCELLED, signal=int(signal.SIGTERM))


def after_the_warning(why: Cause) -> Cause:
    """Return the cause of an end after Slurm's warning was caught in the command, where ``why`` is all that is known of it."""
    if why.kind is CauseKind.REQUEUED:
        return why._replace(text=_BY_ITSELF)
    return Cause(CauseKind.WARNING, then=why) if why.kind is CauseKind.EXIT else why


def with_lost_nodes(ended: Attempt, lost: Mapping[str, str]) -> Attempt:
    """Return an attempt that has failed because it lost nodes. ``lost``: node -> Slurm's word."""
    if not lost:
        return ended
    was = ended.failure.detail if ended.failure is not None else ""
    how = ", ".join(f"{node} is {state}" for node, state in lost.items())
    found = Failure(FailureKind.NODE, "node failure", was)
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
    return found._replace(detail=masked(_deciding(found, output, crashed=_has_crashed(death))))  # it goes into messages


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
    error, detail = ("", "") if _has_crashed(death) else _error(output)
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
        if kind is FailureKind.HANG and _has_crashed(death):
            continue  # the others waited for it
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


def _has_crashed(death: Cause | None) -> bool:
    """Return whether a rank died in a way of which it cannot print an exception: one in the output is that of another rank,
    which lost this one."""
    return death is not None and (
        death.kind is CauseKind.MEMORY or (death.kind is CauseKind.SIGNAL and death.signal in _CRASHES)
    )


def _deciding(found: Failure, output: str | None, *, crashed: bool) -> str:
    """Return the line that explains the failure best. ``crashed``: an exception in it is that of another rank.

    That is the hardware's message, then the failure's own sign, then the exception, then the last line that mentions an
    error. "no output" where a program exited with a code and printed nothing.
    """
    text = output or ""
    if hardware := HARDWARE.search(text):
        return hardware[0].strip()[:200]
    if found.detail:
        return found.detail
    if not crashed and (unnamed := _UNNAMED.search(text)) is not None and not _NOT_ITS_OWN.match(unnamed[1]):
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


# ------------------------------------------------------------------------------------------


_TASK = re.compile(
    r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>Killed|Terminated|Aborted|Segmentation fault"
    r"|Bus error|Floating point exception|Illegal instruction|Out Of Memory|Exited with exit code (?P<code>\d{1,9}))",
    re.M,
)
_NODE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.M)
_LAUNCH = re.compile(r"^srun: error: Task launch for StepId=(?P<step>\S+) failed on node (?P<node>[^\s:]+)", re.M)
_REFUSED = re.compile(r"^srun: error: Unable to create step for job (?P<job>\S+): (?P<why>.+)$", re.M)
# slurmstepd's own lines begin so; "slurmstepd-node-0: " where several slurmds share a host; since 26.05, and with a log format
# of the site's, only the time; or nothing at all
_STEPD = r"(?:slurmstepd(?:-\S+)?: |\[\d{4}-\d\d-\d\dT\S+\] )?error: "
_OOM = re.compile(
    rf"^{_STEPD}Detected \d+ oom[-_]kill event(?:.*?\bstep(?:Id=| )(?P<step>\d\w*(?:\.\w+)?))?", re.M | re.I
)
_DUE_TO = re.compile(
    rf"^{_STEPD}\*\*\* (?:JOB|STEP) (?P<step>\S+) .*CANCELLED AT \S+ DUE (?:TO|to) (?P<why>[A-Z][A-Za-z0-9 ]+?)(?:,| \*\*\*)",
    re.M,
)
_ENDED_JOB = re.compile(
    rf"^{_STEPD}\*\*\* JOB (?P<job>\S+) ON \S+ CANCELLED AT \S+(?P<limit> DUE TO TIME LIMIT)? \*\*\*", re.M
)
_NO_CAUSE = ("TASK FAILURE", "SIGNAL ")  # the task's own line explains the first; the second is scancel's
# torchrun's agent always exits with 1; this block names the cause
_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):.{0,100}?\btime\s*: (?P<time>\S+).{0,400}?\bhost\s*: (?P<host>\S+)"
    r".{0,400}?\brank\s*: (?P<rank>\d+)"
    r".{0,400}?\bexitcode\s*: (?P<code>-?\d{1,9})",
    re.S,
)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_REASONS = {
    "time limit": CauseKind.TIME_LIMIT,
    "node failure": CauseKind.NODE,
    "preemption": CauseKind.PREEMPTED,
    "job requeue": CauseKind.REQUEUED,
}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)|[@-Z\\^_])")
_OURS = re.compile(rf"^{OUR_LINE}.*\n?", re.M)
_READ = 256_000  # bytes read: the messages stand near the end
OUTLIVED = 60.0  # seconds after which a rank's death no longer explains the command's end; KillWait is 30 s
_NOTED = 5.0  # seconds between two notes of how long the output is


class Ours(NamedTuple):
    """Whom a line of Slurm's must be about to be believed. "" and None: that is unknown, and any will do."""

    job: str = ""
    step: str = ""  # "88.0"
    nodes: frozenset[str] | None = None
    lost: frozenset[str] | None = None  # nodes that Slurm or their agents have given up
    began: bool = False  # true if tasks of ours have been seen: our srun had its step

    def has_step(self, step: str | None) -> bool:
        """Return whether ``step`` ("88", "88.0", "88.batch") is ours, or may be."""
        if not step or not self.job:
            return True
        job, _, number = step.partition(".")
        of_job = "_" in job or job.partition("+")[0] == self.job  # (by its array's number: that is not known here)
        return of_job and (not number.isdigit() or not self.step or self.step == step)

    def has_node(self, node: str) -> bool:
        return self.nodes is None or bool({node, node.partition(".")[0]} & self.nodes)


def hints(output: str, ours: Ours) -> list[Cause]:
    """Return what Slurm's lines in ``output`` say of our tasks and nodes, in their order. A task that was asked to stop may be
    about to save: it is left out."""
    found = [(match.start(), _task(match)) for match in _TASK.finditer(output)]
    found = [one for one in found if not _asked_to_stop(one[1])]
    lost = [(match.start(), Cause(CauseKind.NODE, (NodeRanks(match["node"]),))) for match in _NODE.finditer(output)]
    found += [*lost, *((match.start(), _unlaunched(match)) for match in _launches(output, ours))]
    return [cause for _, cause in sorted(found, key=lambda one: one[0]) if ours.has_node(cause.at[0].node)]


def first_death(output: str, ours: Ours = Ours()) -> Cause | None:  # noqa: B008 - a frozen value
    """Return the cause by Slurm's lines about ``ours`` in ``output``, such as rank 1 on node-1, killed by SIGKILL; None if no
    line names one.
    """
    for due in _DUE_TO.finditer(output):
        if ours.has_step(due["step"]) and not due["why"].startswith(_NO_CAUSE):
            said = due["why"].lower()
            return Cause(_REASONS[said]) if said in _REASONS else Cause(CauseKind.OTHER, text=said)
    for node in (match["node"] for match in _NODE.finditer(output)):
        if ours.has_node(node) and (ours.lost is None or node in ours.lost):
            return Cause(CauseKind.NODE, (NodeRanks(node),))
    if launch := next(_launches(output, ours), None):
        return _unlaunched(launch)
    if not ours.began and (refused := _REFUSED.search(output)) and ours.has_step(refused["job"]):
        return Cause(CauseKind.NO_STEP, text=refused["why"].strip())
    if any(ours.has_step(match["step"]) for match in _OOM.finditer(output)):
        return Cause(CauseKind.MEMORY)
    if workers := list(_TORCHRUN.finditer(output)):  # one of each node's agent: the earliest that was not asked to stop
        worker = min(workers, key=lambda one: (int(one["code"]) == -signal.SIGTERM, one["time"]))
        return ended(int(worker["code"]), worker["host"], worker["rank"])
    deaths = [one for one in _tasks(output) if ours.has_node(one.at[0].node)]
    # the first that was not just ended along with the others
    first = next((one for one in deaths if not _asked_to_stop(one)), deaths[0] if deaths else None)
    return _crash(deaths) or first if first is not None and first.kind is CauseKind.EXIT else first


def _launches(output: str, ours: Ours) -> Iterator[re.Match[str]]:
    return (one for one in _LAUNCH.finditer(output) if ours.has_step(one["step"]) and ours.has_node(one["node"]))


def _unlaunched(match: re.Match[str]) -> Cause:
    return Cause(CauseKind.LAUNCH, (NodeRanks(match["node"]),))


def cause_of(
    death: RankExit,
    output: str,
    failed: Collection[int] = (),
    *,
    before: str = "",
    ours: Ours = Ours(),  # noqa: B008
    believed: Callable[[Cause], bool] = lambda _: True,
) -> Cause:
    """Describe how ``death`` ended. Prefer srun's line for that rank (it reports OOM kills, where Slurm sees them); otherwise
    use the node agent's.

    If the rank itself reported an error, blame instead the first rank that exited without reporting one, as by
    ``os._exit(7)``: the others failed because of it. ``failed``: the ranks that reported an error. ``before``: the output
    before we ended any rank; a rank that was killed first there was not killed by us. ``believed``: whether a line may be
    true, by all else that is known of its rank.
    """

    def told(text: str) -> list[Cause]:
        return [one for one in _tasks(text) if ours.has_node(one.at[0].node) and believed(one)]

    deaths, rank = told(output), str(death.rank)
    if death.failed and death.code is not None and death.code > 0:
        reported = {rank, *map(str, failed)}
        killed = _killed_first(told(before), reported)
        return _crash(deaths, reported) or killed or _left_first(deaths, reported) or death.cause()
    said = (one for one in deaths if one.at == (NodeRanks(death.node, rank),) and not death.oom)
    return next(said, death.cause())


def _asked_to_stop(one: Cause) -> bool:
    """Return whether it was asked to stop with SIGTERM, along with the others. It may be about to save."""
    return one.kind is CauseKind.SIGNAL and one.signal == signal.SIGTERM


def _crash(deaths: Iterable[Cause], failed: Collection[str] = ()) -> Cause | None:
    """Return the first rank that crashed by itself.

    Ranks that lose their connection to it exit with a code, and srun may report them first. An abort does not count:
    NCCL's watchdog aborts the victims. Nor does a crash of one of ``failed``: it had raised an error, and crashed in
    its teardown.
    """
    return next((one for one in deaths if one.signal in _CRASHES and one.at[0].ranks not in failed), None)


def _killed_first(deaths: Sequence[Cause], failed: Collection[str]) -> Cause | None:
    """Return the rank that ended first, by SIGKILL from outside: srun itself kills only after it has reported another rank."""
    first = deaths[0] if deaths else None
    return first if first is not None and first.signal == signal.SIGKILL and _alone(first, failed) else None


def _left_first(deaths: Iterable[Cause], failed: Collection[str]) -> Cause | None:
    """Return the first rank that exited by itself, with a code; None if it is one of ``failed``."""
    first = next((one for one in deaths if one.signal not in (signal.SIGKILL, signal.SIGTERM)), None)
    left = first is not None and first.code is not None and _alone(first, failed)
    return first if left else None


def _alone(one: Cause, failed: Collection[str]) -> bool:
    """Return whether the line is about one rank, and about none of ``failed``."""
    return one.at[0].ranks.isdigit() and one.at[0].ranks not in failed


def _tasks(output: str) -> list[Cause]:
    """Return the ends of tasks that srun reports, in its order."""
    return [_task(match) for match in _TASK.finditer(output)]


def _task(match: re.Match[str]) -> Cause:
    at = (NodeRanks(match["node"], match["tasks"].strip("[]")),)
    if match["code"]:
        return Cause(CauseKind.EXIT, at, code=int(match["code"]))
    number = _SIGNALS.get(match["how"])
    return Cause(CauseKind.MEMORY, at) if number is None else Cause(CauseKind.SIGNAL, at, signal=int(number))


def hardware(output: str) -> str:
    """Return the line that reports a fault of a GPU or a node; "" if there is none."""
    found = HARDWARE.search(output)
    return found[0].strip() if found is not None else ""


def blamed(output: str, ours: Ours = Ours()) -> tuple[str, ...]:  # noqa: B008
    """Return the nodes that failed or accepted no task, by Slurm's lines about ``ours``."""
    failed = (node for match in _NODE.finditer(output) if ours.has_node(node := match["node"]))
    gone = [node for node in failed if ours.lost is None or node in ours.lost]
    return tuple(dict.fromkeys((*gone, *(match["node"] for match in _launches(output, ours)))))


def root_error(path: Path) -> str:
    """Return the error in a file of torchrun's (``@record``): "ValueError: no such shape"; "" if there is none.

    Never raises.
    """
    try:
        said = (read_json(path, limit=1_000_000) or {}).get("message")
    except (OSError, ValueError):
        return ""
    if isinstance(said, dict):
        said = said.get("message")
    return printable(str(said).strip().partition("\n")[0], 500) if said else ""


def ends_with_a_rank(command: tuple[str, ...]) -> bool:
    """Return whether it is an srun that is meant to end as soon as one of its ranks has failed."""
    return is_srun(command) and may_end_with_a_rank(command)


def may_end_with_a_rank(command: tuple[str, ...]) -> bool:
    """Return whether srun is free to end with a failed rank: not if its options tell it to go on without that rank."""
    return not any(word in ("-K0", "--kill-on-bad-exit=0") for word in command)


def plain(data: bytes) -> str:
    """Return a job's output as lines that can be searched and printed.

    They have no colours or other escape sequences; each state of a progress bar is a line of its own, and ``?`` stands
    for other invisible characters.
    """
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    return printable_lines(text.replace("\r\n", "\n").replace("\r", "\n"))


_RAISED = 300  # characters
_OF_ONE_RANK = (CauseKind.HOST_MEMORY, CauseKind.GPU_MEMORY, CauseKind.NOT_A_NUMBER, CauseKind.DIVERGES)


def why_stopped(attempt: Path, seen: Reached) -> tuple[Cause | None, Reached]:
    """Return why the guard made the loop stop, with the words of the rank that saw it; None if it did not.

    Where that rank's beat is lost, trouble with the loss is known from rank 0's record.
    """
    said = read_stopped(attempt)
    if not said.cause:
        return None, seen
    kinds = {kind.value: kind for kind in CauseKind}
    found = Cause(kinds[said.cause]) if said.cause in kinds else Cause(CauseKind.OTHER, text=said.cause)
    if found.kind is CauseKind.KILL_SWITCH:  # who raised it, and why: it may be down when somebody asks
        found = found._replace(text=printable(said.reason.removeprefix(said.cause), _RAISED).lstrip(" :"))
    if found.kind not in _OF_ONE_RANK:
        return found, seen
    if found.kind.value in (NOT_A_NUMBER, DIVERGES) and (seen.trouble is None or not seen.trouble.stops):
        seen = seen._replace(trouble=LossTrouble(said.cause, said.step, said.step, then=said.then))
    if seen.because is None:
        return found, seen
    where, words = seen.because
    return found._replace(text=f"{where.words()}: {words.removeprefix(f'{said.cause}: ')}"), seen


def when_told(attempt: Path) -> Told:
    """Return when SIGTERM came to rank 0, by what its guard wrote down."""
    said = read_stopped(attempt)
    if said.told is None:
        return Told()
    return Told(monotonic() - (time() - said.told.timestamp()), here=bool(said.boot) and said.boot == boot_id())


def last_exits(exits: Iterable[RankExit], over: float) -> list[RankExit]:
    """Return the newest process of each rank that has ended, the first that did in front; without those that the command has
    long outlived when it was ``over``."""
    newest = {one.rank: one for one in sorted(exits, key=lambda one: one.at)}
    return sorted((one for one in newest.values() if one.at >= over - OUTLIVED), key=lambda one: one.at)


def by_itself(one: RankExit) -> bool:
    """Return whether a rank failed before it was asked to stop."""
    return not one.told and (one.failed or one.code not in (None, 0, -signal.SIGTERM))


def same_rank(said: Cause, one: RankExit) -> bool:
    """Return whether an agent's word is about the rank that a line of Slurm's or torchrun's names."""
    node, ranks = said.at[0]
    return ranks == str(one.rank) and node.partition(".")[0] == one.node.partition(".")[0]


def named_alone(output: str) -> set[tuple[str, str]]:
    """Return rank and node of each line about one rank that says more than that it was killed or told to leave."""
    alone = (one for one in _tasks(output) if one.signal not in (signal.SIGKILL, signal.SIGTERM))
    return {(one.at[0].ranks, one.at[0].node.partition(".")[0]) for one in alone}


def is_believed(said: Cause, pages: Collection[tuple[str, str]], exits: Iterable[RankExit]) -> bool:
    """Return whether a line about a rank may be true: its agent has seen such an end, or knows nothing of that rank.

    ``pages``: rank and node of those with a page. A log that is quoted names ranks of another night, and the tasks of an
    evaluation's own srun have the numbers of ranks that live on other nodes.
    """
    node, ranks = said.at[0]
    if (ranks, node.partition(".")[0]) not in pages:
        return all(rank != ranks for rank, _ in pages)
    return any(same_rank(said, one) and _fits(said, one) for one in exits)


def _fits(said: Cause, seen: RankExit) -> bool:
    if seen.code is None or not seen.final:  # what srun saw may be a shell around it
        return True
    code = seen.code if seen.code >= 0 else 128 - seen.code
    if said.kind is CauseKind.EXIT:
        return code == said.code
    return code == 128 + (said.signal or signal.SIGKILL)


class Output:
    """The file that this process's own output goes to from now on, if it is one: the batch script's log."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._start = self._read = self._size()
        self._rest = b""
        self._settled = 0  # Slurm's lines before it are left out
        self._sizes: deque[tuple[float, int]] = deque()  # when it had which size
        self._turn = OneAtATime[list[Cause]]()
        self._reading: PendingCall[str | None] | None = None
        self.said_at: dict[NodeRanks, float] = {}  # monotonic: when srun's newest line about ranks was read

    def note_before(self) -> None:
        """Read what was printed by now, beside: the file may lie on a dead mount, and the ranks are about to be signalled. What
        srun says of that comes a moment later."""
        self._reading = PendingCall(self.lately, "output")

    def before(self, seconds: float) -> str:
        """Return what was printed before that, waiting ``seconds`` for it at most."""
        return (self._reading(seconds) if self._reading is not None else None) or ""

    @property
    def is_file(self) -> bool:
        return self._start is not None

    def next_hints_within(self, ours: Ours, seconds: float) -> list[Cause]:
        """Return ``next_hints()``; none where the file does not answer within ``seconds``."""
        return self._turn(partial(self.next_hints, ours), seconds) or []

    def next_hints(self, ours: Ours) -> list[Cause]:
        """Return what srun's lines have said of our tasks and nodes since the last call, to be confirmed.

        Costs one fstat when nothing was written.
        """
        size = self._size()
        if size is None or self._read is None or size <= self._read:
            return []
        self._note(size)
        data = self._bytes(max(self._read, size - _READ), size) or b""
        self._read = size
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # each state of a progress bar is a line
        if not end:
            self._rest = (self._rest + data)[:LINE]
            return []
        whole, self._rest = self._rest + data[:end], data[end:][:LINE]
        found = hints(plain(whole), ours) if b"srun: error: " in whole else []
        self.said_at.update((one.at[0], monotonic()) for one in found)
        return found

    @property
    def read_to(self) -> int:
        """Return how far ``next_hints`` has read."""
        return self._read or 0

    def settle(self, at: int) -> None:
        """Leave out Slurm's lines before ``at`` from now on: what they said of our ranks was found untrue."""
        self._settled = max(self._settled, at)

    def _note(self, size: int) -> None:
        now = monotonic()
        if not self._sizes or now >= self._sizes[-1][0] + _NOTED:
            self._sizes.append((now, size))
            while len(self._sizes) > 1 and self._sizes[1][0] <= now - OUTLIVED:
                self._sizes.popleft()

    def lately(self) -> str | None:
        """Return ``since()`` without what was said long before the last look: the command has outlived it."""
        begin = self._settled
        if self._sizes and self._sizes[0][0] <= self._sizes[-1][0] - OUTLIVED:
            begin = max(begin, self._sizes[0][1])
        return self._from(begin)

    def since(self) -> str | None:
        """Return the last part of the output since the start, as plain lines and without our own, which repeat the
        command and earlier causes.

        None when it goes to a terminal or a pipe, or cannot be read.
        """
        return self._from(0)

    def _from(self, begin: int) -> str | None:
        size = self._size()
        if size is None or self._start is None:
            return None
        begin = max(begin, self._start, size - _READ)
        if size <= begin:
            return ""
        data = self._bytes(begin, size)
        return None if data is None else _OURS.sub("", plain(data))

    def _bytes(self, begin: int, end: int) -> bytes | None:
        try:
            # opened anew: ours was opened for writing only
            reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.pread(reader, end - begin, begin)
        except OSError:
            return None
        finally:
            os.close(reader)

    def _size(self) -> int | None:
        try:
            found = os.fstat(self._fd)
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None


# The command of one attempt, and how it is being ended.


class RanksKilled(Enum):
    """Where the ranks of a command have been sent SIGKILL."""

    ALL = "on all nodes"
    BUT_LOST = "on all nodes but those that are lost"
    SOME = "not on all nodes"


@dataclass(frozen=True)
class CommandSpec:
    """The command to run, with its surroundings."""

    options: Options
    mine: Claim
    command: tuple[str, ...]
    job: JobEnd
    signals: SignalQueue
    warm: WarmStart
    agents: Agents | None = None
    ours: Ours = Ours()  # noqa: RUF009 - a frozen value: whom a line of Slurm's must be about
    here: str = ""  # our own node
    states: Callable[[], Mapping[str, str]] = dict  # node -> what Slurm thinks of it
    # SIGKILL for the ranks on other nodes, which no signal of ours reaches
    kill_ranks: Callable[[], RanksKilled] = lambda: RanksKilled.ALL
    # the argv to start, so that each rank has the names by which it finds the others
    in_each_rank: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple
    # a signal for the ranks of its sruns, which these do not pass on
    tell_ranks: Callable[[int], None] = lambda _: None
    last_look: Callable[[], None] = lambda: None  # once it is over, before its progress is recorded
    observes: Callable[[str], bool] = lambda _: False  # whether a decision is only told

    @property
    def restarts(self) -> bool:
        return self.options.budgets.in_place > 0 and may_end_with_a_rank(self.command)

    @property
    def ends_with_a_rank(self) -> bool:
        return ends_with_a_rank(self.command)
