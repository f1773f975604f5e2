"""One verdict about an attempt: of which class its end was, whose it was, how sure that is, and which lines decide.

It never disagrees with what was done: the cause in the ledger, by which the chain restarts or stops, is where it begins. The
output, the stacks and the flight recorder say more about it, or nothing. "Unknown" is an answer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ftsupervise.diagnosis.first_failure import VARIES, FirstFailure, LogEvent
from ftsupervise.diagnosis.flight_recorder import FlightFinding, FlightRecord, Trouble
from ftsupervise.diagnosis.stacks import MACHINE, RankStack, StackGroup, StackVerdict, alike, judge
from ftsupervise.diagnosis.vocabulary import FailureClass, Role
from ftsupervise.model import Attempt, Cause, CauseKind, FailureKind
from ftsupervise.rundir.progress import Straggler
from ftsupervise.units import rank_words


class Confidence(str, Enum):
    """The confidence in a verdict."""

    HIGH = "high"  # two kinds of evidence agree, or one that cannot mean anything else
    MEDIUM = "medium"  # one kind of evidence
    LOW = "low"  # a guess


class Evidence(NamedTuple):
    """A line that decides. ``source``: the ledger, the output of a rank, its stack, the flight recorder."""

    source: str
    text: str


class Diagnosis(NamedTuple):
    """The verdict about an attempt."""

    attempt: int | None
    kind: FailureClass
    confidence: Confidence
    headline: str
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    done: str = ""  # by us: "restarted in place"
    remedy: str = ""  # what to try
    stacks: tuple[StackGroup, ...] = ()
    unseen: tuple[str, ...] = ()  # what could not be read
    place: str = ""  # in the program: by it and its class the same failure is known again


class Material(NamedTuple):
    """All that is known of an attempt. ``attempt`` None: a folder of dumps and logs from elsewhere."""

    attempt: Attempt | None = None
    output: FirstFailure = FirstFailure(None, ())
    stacks: Sequence[RankStack] = ()
    flight: FlightRecord | None = None
    unseen: tuple[str, ...] = ()
    machine: str = MACHINE  # the architecture of its nodes
    straggler: Straggler | None = None  # for whom the others waited when its supervisor last looked


# The class of a failure by the ledger's cause alone, and by its failure.
_OF_CAUSE = {
    CauseKind.MEMORY: FailureClass.HOST_MEMORY,
    CauseKind.HOST_MEMORY: FailureClass.HOST_MEMORY,
    CauseKind.GPU_MEMORY: FailureClass.GPU_MEMORY,
    CauseKind.NODE: FailureClass.NODE,
    CauseKind.LAUNCH: FailureClass.NODE,
    CauseKind.NO_STEP: FailureClass.START,
    CauseKind.NO_START: FailureClass.START,
    CauseKind.NOT_STARTED: FailureClass.START,
    CauseKind.NOT_A_NUMBER: FailureClass.NUMBERS,
    CauseKind.DIVERGES: FailureClass.NUMBERS,
}
_OF_FAILURE = {
    FailureKind.DISK: FailureClass.DISK,
    FailureKind.NODE: FailureClass.NODE,
    FailureKind.START: FailureClass.START,
    FailureKind.NUMBERS: FailureClass.NUMBERS,
}
_OF_TROUBLE = {
    Trouble.MISMATCH: FailureClass.MISMATCH,
    Trouble.CIRCLE: FailureClass.MISMATCH,
    Trouble.NOT_JOINED: FailureClass.MISSING,
    Trouble.SILENT: FailureClass.MISSING,
    Trouble.LATE: FailureClass.STRAGGLER,
}
# Deaths that the supervisor has seen by itself. Another rank then finds its connection closed, in words of the program's own;
# without such a death they may be the cause, as where a dataset could not be fetched.
_DEATHS = frozenset({CauseKind.SIGNAL, CauseKind.MEMORY, CauseKind.HOST_MEMORY, CauseKind.GPU_MEMORY, CauseKind.NODE})
_CUT_OFF = re.compile(r"(?:\w+\.)*(?:Connection\w*|BrokenPipe|EOF)Error\b")
_CRASHES = frozenset({4, 6, 7, 8, 11})  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: a program does that to itself
_REMEDIES = {
    FailureClass.MISMATCH: "look for a branch that only some ranks take, and for smaller batches at the end of an epoch",
    FailureClass.MISSING: "look at what that rank did instead; a branch that only some ranks take is the usual reason",
    FailureClass.STUCK_IN_IO: "dmesg on that node; leave it out while its file system hangs: ftsupervise nodes exclude NODE",
    FailureClass.STUCK_IN_LOADER: "a sample that takes long, a lock, or a slow file system; long work calls guard.beat()",
    FailureClass.DEADLOCK: "two locks taken in different orders, or a queue that nobody fills: its stack names the line",
    FailureClass.BUSY: "a loop without an end, or C code that holds the interpreter: its stack names the line",
    FailureClass.STOPPED: "who stopped it (kill -STOP, a debugger, a cgroup that is frozen)? kill -CONT goes on",
    FailureClass.STRAGGLER: "compare that node with the others; leave it out: ftsupervise nodes exclude NODE",
    FailureClass.NODE: "the node is left out of the next attempts for a while; `ftsupervise nodes` lists its past",
    FailureClass.CRASH: "python -X faulthandler names the line of the crash",
}


def judge_attempt(of: Material) -> Diagnosis:
    """Return the verdict. Pure."""
    found = _judged(of)
    runs = of.attempt is not None and of.attempt.ended is None
    return found if of.straggler is None else with_a_slow_rank(found, of.straggler, runs=runs)


def with_a_slow_rank(found: Diagnosis, slow: Straggler, *, runs: bool) -> Diagnosis:
    """Add for whom the others wait: the verdict where there is no other, and else a line of evidence."""
    line = Evidence("the steps of all ranks", slow.words())
    if found.kind is not FailureClass.UNKNOWN and not (runs and found.kind is FailureClass.NONE):
        return found._replace(evidence=(*found.evidence, line))
    return found._replace(
        kind=FailureClass.STRAGGLER,
        confidence=Confidence.MEDIUM,
        headline=slow.words(),
        culprits=slow.ranks,
        nodes=(slow.node,) if slow.node else (),
        evidence=(line, *found.evidence),
        remedy=_REMEDIES[FailureClass.STRAGGLER],
    )


def _judged(of: Material) -> Diagnosis:
    one = of.attempt
    number = one.number if one is not None else None
    cause = one.cause if one is not None else None
    if cause is not None and cause.first.kind in _DEATHS:
        of = of._replace(output=of.output.read_anew(_who_lost_another))
    groups = tuple(alike(of.stacks))
    base = Diagnosis(
        number, FailureClass.UNKNOWN, Confidence.LOW, "", stacks=groups, unseen=(*of.unseen, *of.output.unseen)
    )
    if one is not None:
        base = base._replace(done=one.then)
        if one.ended is None and one.cause is None:
            base = base._replace(headline="it has not ended")
        elif cause is not None and one.was_asked:
            return _asked_to_leave(base, one, cause, of.output.first)
    hung = cause is not None and cause.kind is CauseKind.HANG
    if hung or (one is None and (of.stacks or of.flight)) or (cause is None and of.stacks):
        found = _hang(of, base, cause)
        if found is not None:
            return _at(found, cause)
    return _at(_end(of, base, cause), cause)


def _asked_to_leave(base: Diagnosis, one: Attempt, cause: Cause, first: LogEvent | None) -> Diagnosis:
    """Return the verdict about one whose end was asked for. An exception may have been the answer, in place of a save."""
    raised = first is not None and bool(first.where) and one.exit_code in (1, 128 + signal.SIGINT)
    if first is None or not raised or cause.kind not in (CauseKind.WARNING, CauseKind.EXIT, CauseKind.SIGNAL):
        said = f"it did not fail: {cause.words()}"
        return base._replace(kind=FailureClass.NONE, confidence=Confidence.HIGH, headline=said, evidence=_ledger(cause))
    by = " by SIGINT" if first.text.startswith("KeyboardInterrupt") else ""
    words = f"{first.text} at {first.where}"
    return base._replace(
        kind=FailureClass.USER_CODE,
        confidence=Confidence.MEDIUM,
        headline=f"it was asked to leave{by}, and an exception ended it: {words}; its save may not be whole",
        evidence=(Evidence("the output", words), *_ledger(cause)),
        remedy="have the handler of the signal set a flag, by which the loop saves and leaves with 0: docs/own-script.md",
        place=first.where,
    )


def _who_lost_another(event: LogEvent) -> LogEvent:
    own = event.kind is FailureClass.USER_CODE and _CUT_OFF.match(event.text)
    return event._replace(kind=FailureClass.NODE, role=Role.FOLLOWER) if own else event


def _ledger(cause: Cause | None) -> tuple[Evidence, ...]:
    return (Evidence("the ledger", cause.words()),) if cause is not None else ()


def _at(found: Diagnosis, cause: Cause | None) -> Diagnosis:
    """Add the ranks and nodes that the ledger names, where nothing else named any."""
    first = cause.first if cause is not None else None
    ranks, nodes = found.culprits, found.nodes
    if first is not None:
        named = tuple(int(text) for one in first.at for text in re.findall(r"\d+", one.ranks) if "-" not in one.ranks)
        ranks = ranks or named
        nodes = nodes or tuple(
            dict.fromkeys(one.node for one in first.at if one.node and (not ranks or set(named) & set(ranks)))
        )
    remedy = found.remedy or _REMEDIES.get(found.kind, "")
    return found._replace(culprits=ranks, nodes=nodes, remedy=remedy)


# ------------------------------------------------------------------------------------------------------------------ hangs


def _hang(of: Material, base: Diagnosis, cause: Cause | None) -> Diagnosis | None:
    """Return whose hang it was, by the flight recorder and the stacks."""
    accused = [int(text) for one in (cause.at if cause is not None else ()) for text in re.findall(r"\d+", one.ranks)]
    by_stacks = judge(of.stacks, accused, of.machine) if of.stacks else None
    if by_stacks is not None and by_stacks.kind is FailureClass.CRASH:
        by_stacks = _why_it_crashed(by_stacks, of.output.first)
    finding = of.flight.first if of.flight is not None else None
    if finding is not None and finding.trouble is Trouble.NOT_JOINED and by_stacks is not None and by_stacks.sure:
        # in one that the recorder took for done
        waits = {one.rank for one in of.stacks if one.seen.waits and not one.dies}
        left = tuple(rank for rank in finding.culprits if rank not in waits)
        finding = finding._replace(culprits=left) if left else None
        by_stacks = by_stacks._replace(sure=bool(left))
    if finding is not None and (found := _by_flight(base, finding, by_stacks)) is not None:
        return found._replace(evidence=(*found.evidence, *_ledger(cause))[:3])
    if by_stacks is not None:
        agreed = bool(accused) and set(accused) >= set(by_stacks.culprits)
        sure = Confidence.HIGH if by_stacks.sure and (agreed or not accused) else Confidence.MEDIUM
        source = f"the stack of {rank_words(by_stacks.culprits[:1])}"
        return base._replace(
            kind=by_stacks.kind,
            confidence=sure,
            headline=by_stacks.why,
            culprits=by_stacks.culprits,
            place=by_stacks.where,
            evidence=(Evidence(source, by_stacks.why), *_ledger(cause)),
        )
    if cause is None:
        return None
    return base._replace(headline=f"it stood still: {cause.words()}", evidence=_ledger(cause))


def _why_it_crashed(by_stacks: StackVerdict, first: LogEvent | None) -> StackVerdict:
    """Return what a rank died of, for whom the others waited until its process was gone. Where tensors differ in size, the one
    dies that was given too much, which need not be the one that is wrong."""
    if first is None or (first.rank is not None and first.rank not in by_stacks.culprits):
        return by_stacks
    sure = by_stacks.sure and first.kind is not FailureClass.MISMATCH
    return by_stacks._replace(kind=first.kind, why=f"{by_stacks.why}; {first.text}", sure=sure)


def _by_flight(base: Diagnosis, finding: FlightFinding, stacks: StackVerdict | None) -> Diagnosis | None:
    who = rank_words(finding.culprits)
    why = f"{who} {finding.text}"
    if finding.waiting and finding.trouble is Trouble.NOT_JOINED:
        why += f", which {rank_words(finding.waiting)} {'wait' if len(finding.waiting) > 1 else 'waits'} for"
    lines = [Evidence("the flight recorder", why)]
    kind = _OF_TROUBLE[finding.trouble]
    sure = Confidence.MEDIUM if finding.sure else Confidence.LOW
    if stacks is not None:
        agreed = set(stacks.culprits) == set(finding.culprits)
        lines.append(Evidence(f"the stack of {rank_words(stacks.culprits[:1])}", stacks.why))
        if agreed:
            sure = Confidence.HIGH if stacks.kind is not FailureClass.MISMATCH or finding.sure else Confidence.MEDIUM
            if finding.trouble in (Trouble.NOT_JOINED, Trouble.SILENT):  # the stack says why it did not join
                kind = stacks.kind
        elif finding.trouble is Trouble.SILENT:
            return None
        elif stacks.kind is not kind:  # else it died of what this one did
            sure = Confidence.LOW
    if finding.where:
        lines.append(Evidence("the flight recorder", f"{finding.collective or 'it'} was called at {finding.where}"))
    place = finding.where or finding.collective
    return base._replace(
        kind=kind, confidence=sure, headline=why, culprits=finding.culprits, evidence=tuple(lines), place=place
    )


# ------------------------------------------------------------------------------------------------------------------- ends


def _end(of: Material, base: Diagnosis, cause: Cause | None) -> Diagnosis:
    """Return what ended it, by the ledger and the first failure in the output."""
    one, first = of.attempt, of.output.first
    failed = one.failure if one is not None else None
    kind = _OF_CAUSE.get(cause.kind) if cause is not None else None
    if kind is None and failed is not None:
        kind = _OF_FAILURE.get(failed.kind)
    if failed is not None and failed.kind is FailureKind.MEMORY and kind is None:
        kind = FailureClass.GPU_MEMORY if "GPU" in failed.sign else FailureClass.HOST_MEMORY
    if one is not None and one.hardware:
        line = Evidence("the node", one.hardware)
        return base._replace(
            kind=FailureClass.HARDWARE,
            confidence=Confidence.HIGH,
            headline=one.hardware,
            evidence=(line, *_ledger(cause)),
        )
    if first is not None and first.kind is FailureClass.MISMATCH:  # whoever says it
        return _mismatched(of, base, first, cause)
    if first is not None:
        return _by_output(of, base, first, kind, cause)
    signalled = _signal(cause)
    if kind is None and signalled in _CRASHES:
        kind = FailureClass.CRASH
    if kind is not None and cause is not None:
        return base._replace(kind=kind, confidence=Confidence.MEDIUM, headline=cause.words(), evidence=_ledger(cause))
    told = [group for group in of.output.groups if group.first.role is Role.FOLLOWER]
    lines = tuple(_line(group.first) for group in told[:2])
    said = cause.words() if cause is not None else "nothing that was read says why"
    if told and (cause is None or cause.kind in (CauseKind.EXIT, CauseKind.SIGNAL)):
        said += "; the ranks say only that others had gone"
    return base._replace(headline=said, evidence=(*_ledger(cause), *lines)[:3])


def _mismatched(of: Material, base: Diagnosis, first: LogEvent, cause: Cause | None) -> Diagnosis:
    """Return who called something else, where the output says that one did. gloo aborts a rank that is given a larger tensor
    than its own: what its neighbours had called says who was wrong, and where they are alike it was the rank itself."""
    found = _by_output(of, base, first, None, cause)
    finding = of.flight.first if of.flight is not None else None
    known = _by_flight(base, finding, None) if finding is not None and finding.trouble is Trouble.MISMATCH else None
    if known is not None:
        return known._replace(evidence=(*known.evidence[:1], *found.evidence)[:3], remedy=first.remedy)
    alike = of.flight is not None and len(of.flight.ranks) > 1 and "EnforceNotMet" in first.text
    return found._replace(confidence=Confidence.MEDIUM if alike else Confidence.LOW)


def _by_output(
    of: Material, base: Diagnosis, first: LogEvent, kind: FailureClass | None, cause: Cause | None
) -> Diagnosis:
    agreed = kind is None or kind is first.kind
    ranks = (first.rank,) if first.rank is not None else ()
    group = next((one for one in of.output.groups if one.first == first), None)
    also = len(group.ranks) if group is not None else 0
    where = f" at {first.where}" if first.where else ""
    who = f"{rank_words(ranks)}: " if ranks else ""
    lines = [
        Evidence(f"the output{f' of {rank_words(ranks)}' if ranks else ''}", f"{first.text}{where}"),
        *_ledger(cause),
    ]
    followers = sum(one.times for one in of.output.groups if one.first.role is Role.FOLLOWER)
    if followers:
        lines.append(Evidence("the output", f"{followers} later lines of other ranks only follow from it"))
    sure = Confidence.HIGH if agreed and kind is not None else Confidence.MEDIUM
    if first.kind is FailureClass.USER_CODE and agreed and first.at is not None:
        sure = Confidence.HIGH
    if also > 1:  # the same words by several ranks: the first of them is so by its clock alone
        where += f" ({also} ranks say the same)"
        sure = Confidence.MEDIUM if first.kind is not FailureClass.USER_CODE else sure
    return base._replace(
        kind=first.kind if agreed or kind is None else kind,
        confidence=sure if agreed else Confidence.LOW,
        headline=f"{who}{first.text}{where}",
        culprits=ranks,
        nodes=(first.node,) if first.node else (),
        evidence=tuple(lines[:3]),
        remedy=first.remedy if agreed else "",
        place=first.where or VARIES.sub("#", first.text),
    )


def _signal(cause: Cause | None) -> int:
    while cause is not None:
        if cause.kind is CauseKind.SIGNAL:
            return cause.signal
        cause = cause.then
    return 0


def _line(event: LogEvent) -> Evidence:
    source = f"the output of {rank_words((event.rank,))}" if event.rank is not None else "the output"
    return Evidence(source, event.text)
