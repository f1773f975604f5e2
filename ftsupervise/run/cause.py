"""Why did an attempt end? Pure: what was seen goes in, the words of the ledger and the class of the failure come out."""

from __future__ import annotations

import re
import signal
from enum import Enum
from typing import NamedTuple

from ftsupervise.units import signal_name


class Kind(str, Enum):
    """Classes of failures. Each has a budget of its own (``launch.restart.budgets``)."""

    CODE = "code"  # the user's own program left with an exit code
    SIGNAL = "signal"  # killed by a signal nobody of us sent
    MEMORY = "memory"  # out of host or GPU memory
    NODE = "node"  # a node went away, or a step could not be started on it
    DISK = "disk"  # no space, or quota
    START = "start"  # the command could not be started at all
    HANG = "hang"  # no progress, ended by us or by a collective's own timeout
    NUMBERS = "numbers"  # the loss is no number, or a result did not hold when computed again
    GIVEN_UP = "given-up"  # the program itself says that starting it again is no use
    LOST = "lost"  # nobody lived to write down how it ended


NO_STEP = "srun could not create a step"


class Failure(NamedTuple):
    """A failure as the brake counts it: two with the same ``sign`` are the same failure."""

    kind: Kind
    sign: str  # "exit 1 (ModuleNotFoundError)", "killed by SIGKILL", "node failure"
    detail: str = ""  # the line of the output that says most


# What others mean by their exit codes.
_GIVEN_UP = 93  # NVIDIA's ft_launcher: no progress over its own restarts, do not start it again
_AGAIN = 16  # Megatron: computed twice with different results, start again to find out which was wrong
_WRONG = 17  # Megatron: the same wrong result again
_MEGATRON = re.compile("megatron|rerun_state_machine", re.I)  # others may end so for reasons of their own

_TERM = "told to stop (SIGTERM)"  # the guard's word for it

# Causes the guard or a person asked for: the loop left in order, and nothing is wrong with it.
_ASKED = (
    "finished",
    "kill switch",
    "warning signal",
    "time limit",
    "run time reached",
    "cancelled or preempted",
    "interrupted",
    "preempt",
    "superseded",
)

_RANK = r"(?:\[?rank\s?\d+\]?:? ?|\d+: ?)?"  # "[rank0]: " is PyTorch's, "0: " that of srun --label
_ERROR = re.compile(rf"^{_RANK}((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::[ \t]*(.*))?$", re.M)
# a GPU's or a node's own words for a fault of the hardware
HARDWARE = re.compile(
    r"^.*(?:\bXid\b|uncorrectable (?:NVLink |double.bit )?ECC|fallen off the bus|Uncorrectable hardware|\bDBE\b).*$",
    re.M | re.I,
)
_UNNAMED = re.compile(rf"^{_RANK}Traceback \(most recent call last\):?\n(?:{_RANK}[ \t].*\n)+{_RANK}(\S.*)$", re.M)
_FATAL = re.compile(r"^.*(?:^\s*what\(\): |\bFatal Python error: |\bterminate called |\bFATAL\b).*$", re.M)
_SAYS_WHY = re.compile(
    r"\b(?:\w*error|fatal|failed|failure|cannot|can't|not found|no such|denied|refused|invalid)\b", re.I
)
_NOT_ITS_OWN = re.compile(r"^(?:ftsupervise: |srun: |slurmstepd(?:-\S+)?: |\[\d{4}-\d\d-\d\dT\S+\] error: |\s*$)")
# of a rank that was killed before it could say more
_CUT_OFF = re.compile(r"(?:Traceback \(most recent call last\):?|File \".*\", line \d+(?:, in .*)?)$")
NO_OUTPUT = "no output"
_SIGNS: tuple[tuple[Kind, str, re.Pattern[str]], ...] = (
    (Kind.DISK, "no space left", re.compile(r"No space left on device|Disk quota exceeded")),
    (Kind.MEMORY, "GPU out of memory", re.compile(r"\bCUDA out of memory|OutOfMemoryError")),
    (Kind.MEMORY, "out of memory", re.compile(r"^MemoryError|Cannot allocate memory", re.M)),
    (Kind.HANG, "collective timed out", re.compile(r"Watchdog caught collective operation timeout")),
    (Kind.NUMBERS, "loss is not a number", re.compile(r"\bloss(?: is| became|:)? (?:nan|inf)\b", re.I)),
)


def cause(
    code: int, *, finished: bool, stopped: str, told: str, past_end: bool, death: str = "", ended: str = ""
) -> str:
    """The cause of an end, from the surest witness to the vaguest.

    code      exit code of the command, -N when a signal N ended it
    finished  the finished mark stands
    stopped   the cause the guard wrote down before the loop left, "" if it did not
    told      the signal that told ``ftsupervise run`` to stop ("SIGTERM"), "" if none
    past_end  the job's time limit was reached (or is seconds away)
    death     what Slurm's own lines in the output say of the first death, "" if nothing
    ended     why we ended the command ourselves, "" if we did not
    """
    if ended:
        return ended
    how = _how(code)
    if death and code:
        left = f"exit {code if code > 0 else 128 - code}"
        how = death if death.endswith(f" {left}") else f"{death} ({left})"
    if finished:
        return "finished" if code == 0 else f"finished, then {how}"
    if not told and code == 0 and stopped == _TERM:  # Slurm tells the ranks first: with a GraceTime, long before us
        told = "SIGTERM"
    if told in ("SIGTERM", "SIGHUP") and stopped in ("", "warning signal", _TERM):
        stopped = "time limit" if past_end else f"cancelled or preempted ({told})"
    elif told and not stopped:
        stopped = f"interrupted ({told})"
    if not stopped:
        return how
    return stopped if code == 0 or told else f"{stopped}, then {how}"


def failure(
    code: int, words: str, *, asked: bool, death: str = "", output: str | None = "", oom: bool = False
) -> Failure | None:
    """The failure in an end, None when it was none (done, or asked for).

    ``words`` is what ``cause`` said; ``asked``: we were told to leave or warned, so what follows is no failure; ``output``
    the end of the command's output, None when it cannot be seen; ``oom``: the kernel killed one of the job's processes for
    its memory meanwhile.
    """
    found = _failure(code, words, asked=asked, death=death, output=output or "", oom=oom)
    if found is None or found.kind in (Kind.HANG, Kind.GIVEN_UP, Kind.NUMBERS):
        return found
    return found._replace(detail=_deciding(found, output))


def _failure(code: int, words: str, *, asked: bool, death: str, output: str, oom: bool) -> Failure | None:
    if words.startswith("hang"):
        return Failure(Kind.HANG, "hang", words.removeprefix("hang: "))
    if asked or code == 0 or words.startswith(_ASKED):
        return Failure(Kind.MEMORY, "host memory") if words.startswith("host memory") and not asked else None
    detail = _detail(output)
    if oom or "out of memory" in death:
        return Failure(Kind.MEMORY, "out of memory", detail)
    if "node failure" in death or "launch failed" in death:
        return Failure(Kind.NODE, "node failure", death)
    if death.startswith(NO_STEP):
        return Failure(Kind.START, NO_STEP, death)
    if words.startswith("could not start"):
        return Failure(Kind.START, "could not start", words)
    for kind, sign, pattern in _SIGNS:
        if found := pattern.search(output):
            return Failure(kind, sign, _line(output, found.start()))
    plain = re.sub(r"^ranks? \S+ on \S+ ", "", death) if death else ""
    return _by_code(code, plain, detail, megatron=bool(_MEGATRON.search(output)))


def _by_code(code: int, plain: str, detail: str, *, megatron: bool) -> Failure:
    left = re.fullmatch(r"exit (\d+)", plain)
    number = int(left[1]) if left else code
    if number == _GIVEN_UP:
        return Failure(Kind.GIVEN_UP, "exit 93", "the launcher asks not to be started again (exit 93)")
    if megatron and number in (_AGAIN, _WRONG):
        what = "asks to be started again to find out" if number == _AGAIN else "is wrong again"
        return Failure(Kind.NUMBERS, f"exit {number}", f"a result did not hold when computed twice; it {what}")
    if plain and not left:
        return Failure(Kind.SIGNAL, plain, detail)
    if number < 0 or 128 < number < 128 + signal.NSIG:
        return Failure(Kind.SIGNAL, f"killed by {signal_name(-number if number < 0 else number - 128)}", detail)
    name = detail.partition(":")[0] if detail else ""
    return Failure(Kind.CODE, f"exit {number}" + (f" ({name})" if name else ""), detail)


def _detail(output: str) -> str:
    """The first exception that ended a traceback: the later ones are mostly its victims."""
    start = output.find("Traceback (most recent call last)")
    found = _ERROR.search(output, start) if start >= 0 else None
    return f"{found[1]}{': ' + found[2] if found[2] else ''}"[:200] if found else ""


def _deciding(found: Failure, output: str | None) -> str:
    """The line that says most of why: the hardware's own, then what the failure is known by, then the exception, then the
    last line that speaks of an error. Where a program has left with a code and said nothing at all, that."""
    text = output or ""
    if hardware := HARDWARE.search(text):
        return hardware[0].strip()[:200]
    if found.detail:
        return found.detail
    if (unnamed := _UNNAMED.search(text)) is not None and not _NOT_ITS_OWN.match(unnamed[1]):
        return unnamed[1].strip()[:200]
    if fatal := _FATAL.search(text):
        return fatal[0].strip()[:200]
    if found.kind is not Kind.CODE:
        return ""
    own = [line.strip() for line in text.splitlines() if not _NOT_ITS_OWN.match(line)]
    telling = [line for line in own if not _CUT_OFF.search(line)]
    said = next((line for line in reversed(telling) if _SAYS_WHY.search(line)), telling[-1] if telling else "")
    return said[:200] or (NO_OUTPUT if output is not None and not own else "")


def _line(output: str, at: int) -> str:
    begin = output.rfind("\n", 0, at) + 1
    end = output.find("\n", at)
    return output[begin : end if end >= 0 else len(output)].strip()[:200]


def _how(code: int) -> str:
    if code < 0:
        return f"killed by {signal_name(-code)}"
    if 128 < code < 128 + signal.NSIG:  # what a shell, srun or torchrun make of a child ended by a signal
        return f"exit {code} (a process killed by {signal_name(code - 128)})"
    return f"exit {code}"
