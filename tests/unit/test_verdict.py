"""One verdict from all that is known of an attempt. It never disagrees with the ledger, and says how sure it is."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.diagnosis.first_failure import EventGroup, FirstFailure, LogEvent
from ftsupervise.diagnosis.flight_recorder import FlightFinding, FlightRecord, Trouble
from ftsupervise.diagnosis.stacks import RankStack, alike, parse_stack, read_stacks
from ftsupervise.diagnosis.verdict import Confidence, Material, judge_attempt
from ftsupervise.diagnosis.vocabulary import FailureClass, Role
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, NodeRanks, Standstill
from ftsupervise.rundir.progress import COMES_LAST, Straggler

NOW = datetime(2026, 11, 27, 20, 0, tzinfo=timezone.utc)
STACK = """pid {pid} state {state} syscall {syscall} wchan {wchan} waits {waits} at {at}

== process
Name:\tpython

== Python stacks (the main thread is the last one)
Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
Current thread 0x2 (most recent call first):
{frames}

== threads: name, state, where in the kernel
"""
WAITING = (
    '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce\n'
    '  File "/home/ada/train.py", line 30 in step'
)


def stack(
    rank: int, frames: str, *, state: str = "S", syscall: str = "202", wchan: str = "futex_wait", waits: bool = False
) -> RankStack:
    text = STACK.format(
        pid=100 + rank, state=state, syscall=syscall, wchan=wchan, waits="yes" if waits else "no", at="?", frames=frames
    )
    found = parse_stack(rank, text)
    assert found is not None
    return found


def others(but: int, world: int = 8) -> list[RankStack]:
    return [stack(rank, WAITING, waits=True) for rank in range(world) if rank != but]


def attempt(cause: Cause | None, failure: Failure | None = None, **more: object) -> Attempt:
    ended = NOW + timedelta(minutes=5) if cause is not None else None
    return Attempt(7, "42", NOW, ended=ended, cause=cause, failure=failure, then="restarted in place")._replace(**more)  # type: ignore[arg-type]


HUNG = attempt(
    Cause(CauseKind.HANG, (NodeRanks("node-2", "5"),), how=Standstill.IDLE, phase="train", step=30, waited=9.1),
    Failure(FailureKind.HANG, "hang"),
)
LOADER = (
    '  File "/env/site-packages/torch/utils/data/dataloader.py", line 701 in _next_data\n'
    '  File "/home/ada/train.py", line 28 in main'
)
READS = '  File "/home/ada/data.py", line 12 in read_shard\n  File "/home/ada/train.py", line 27 in main'
LOCKS = '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n  File "/home/ada/train.py", line 61 in log'
LOOPS = '  File "/home/ada/train.py", line 33 in filter_batch\n  File "/home/ada/train.py", line 29 in main'


ENFORCED = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
_ABORTS = LogEvent(FailureClass.MISMATCH, Role.CAUSE, None, "", None, "log", 0, ENFORCED, remedy="compare the shapes")
ABORTED = FirstFailure(_ABORTS, (EventGroup(_ABORTS, 1, ()),))
KILLED = attempt(
    Cause(CauseKind.SIGNAL, (NodeRanks("node-1", "6"),), signal=6, left=137),
    Failure(FailureKind.SIGNAL, "killed by SIGABRT"),
)


def test_whom_gloo_aborted_may_be_the_victim_which_only_its_neighbours_can_say() -> None:
    alone = judge_attempt(Material(KILLED, ABORTED))
    assert (alone.kind, alone.culprits, alone.confidence) == (FailureClass.MISMATCH, (6,), Confidence.LOW)
    alike = judge_attempt(Material(KILLED, ABORTED, flight=FlightRecord((), (5, 7))))
    assert (alike.kind, alike.culprits, alike.confidence) == (FailureClass.MISMATCH, (6,), Confidence.MEDIUM)
    larger = FlightFinding(Trouble.MISMATCH, (5,), (7,), "0", 73, "all_gather", "called all_gather with sizes [[400]]")
    known = judge_attempt(Material(KILLED, ABORTED, flight=FlightRecord((larger,), (5, 7))))
    assert (known.kind, known.culprits, known.confidence) == (FailureClass.MISMATCH, (5,), Confidence.MEDIUM)
    assert known.remedy == "compare the shapes" and len(known.evidence) == 3


@pytest.mark.parametrize("named", [(1, 5), (1,)])
def test_who_waits_by_its_stack_is_not_the_one_that_did_not_join(named: tuple[int, ...]) -> None:
    """As seen of gloo: a rank still waited in a broadcast that its recorder took for done, and had not called the next."""
    behind = FlightFinding(Trouble.NOT_JOINED, named, (0, 2, 4, 6, 7), "0", 72, "all_gather", "did not join all_gather")
    flight = FlightRecord((behind,), tuple(range(8)))
    found = judge_attempt(Material(HUNG, stacks=[*others(5), stack(5, LOOPS)], flight=flight))
    sure = Confidence.HIGH if 5 in named else Confidence.MEDIUM
    assert (found.culprits, found.confidence) == ((5,), sure)


def test_a_victim_of_the_oom_killer_that_is_not_gone_yet_has_not_crashed(tmp_path: Path) -> None:
    """As seen where a busy machine took seconds to give its memory back: the others waited, and it was a zombie."""
    for rank in range(8):
        frames, waits, state = (WAITING, "yes", "S") if rank != 6 else ("", "no", "Z")
        words = {"syscall": "202", "wchan": "futex_wait", "at": "?", "frames": frames}
        (tmp_path / f"rank-{rank}.txt").write_text(STACK.format(pid=26370 + rank, state=state, waits=waits, **words))
    (tmp_path / "node-node-1.txt").write_text(
        "== the kernel on faults\n[4235.519954] Memory cgroup out of memory: Killed process 26376 (python) total-vm:1421880kB, "
        "anon-rss:354916kB, file-rss:25192kB, shmem-rss:0kB, UID:0 pgtables:1092kB oom_score_adj:0\n"
    )
    hung = attempt(HUNG.cause._replace(at=(NodeRanks("node-1", "6"),)), HUNG.failure)  # type: ignore[union-attr]
    found = judge_attempt(Material(hung, stacks=read_stacks(tmp_path)))
    assert (found.kind, found.culprits) == (FailureClass.HOST_MEMORY, (6,))


@pytest.mark.parametrize(("state", "more"), [("Z", ""), ("R", "CoreDumping:\t1\n"), ("X", "")])
def test_a_rank_whose_core_is_being_written_has_crashed_and_does_not_compute(state: str, more: str) -> None:
    """As seen of a rank that gloo had aborted, on a machine that was busy: the others waited for seconds."""
    text = f"pid 14093 state {state} syscall -1 wchan ? waits no at ?\n\n== process\nName:\tpython\n{more}Threads:\t3\n"
    dies = parse_stack(5, text)
    assert dies is not None and dies.dies
    found = judge_attempt(Material(HUNG, stacks=[*others(5), dies]))
    assert (found.kind, found.culprits, found.confidence) == (FailureClass.CRASH, (5,), Confidence.HIGH)
    why = judge_attempt(Material(HUNG, ABORTED, [*others(5), dies]))
    assert (why.kind, why.culprits, why.confidence) == (FailureClass.MISMATCH, (5,), Confidence.MEDIUM)
    larger = FlightFinding(
        Trouble.MISMATCH, (4,), (6, 7), "0", 54, "all_reduce", "called all_reduce with sizes [[4000]]"
    )
    known = judge_attempt(Material(HUNG, ABORTED, [*others(5), dies], FlightRecord((larger,), (0, 4, 6, 7))))
    assert (known.kind, known.culprits, known.confidence) == (FailureClass.MISMATCH, (4,), Confidence.MEDIUM)


def test_of_one_that_was_lost_it_is_not_said_that_it_did_not_fail() -> None:
    lost = attempt(Cause(CauseKind.LOST))._replace(ended=None)
    found = judge_attempt(Material(lost))
    assert (found.kind, found.confidence) == (FailureClass.UNKNOWN, Confidence.LOW)
    assert found.headline == "ended without a record"


@pytest.mark.parametrize(
    ("frames", "state", "syscall", "wchan", "kind"),
    [
        (LOADER, "S", "202", "futex_wait", FailureClass.STUCK_IN_LOADER),
        (READS, "D", "0", "folio_wait_bit", FailureClass.STUCK_IN_IO),
        (READS, "S", "0", "fuse_request_wait", FailureClass.STUCK_IN_IO),
        (LOCKS, "S", "202", "futex_wait", FailureClass.DEADLOCK),
        (LOOPS, "S", "202", "futex_do_wait", FailureClass.DEADLOCK),
        (LOOPS, "R", "running", "0", FailureClass.BUSY),
        ("none", "R", "running", "0", FailureClass.BUSY),
        ("none", "T", "?", "do_signal_stop", FailureClass.STOPPED),
        ('  File "/home/ada/train.py", line 12 in nap', "S", "230", "hrtimer_nanosleep", FailureClass.MISSING),
    ],
)
def test_what_the_culprit_does_says_of_which_kind_a_hang_is(
    frames: str, state: str, syscall: str, wchan: str, kind: FailureClass
) -> None:
    stacks = [*others(5), stack(5, frames, state=state, syscall=syscall, wchan=wchan)]
    found = judge_attempt(Material(HUNG, stacks=stacks, machine="x86_64"))
    assert (found.kind, found.culprits, found.nodes) == (kind, (5,), ("node-2",))
    assert found.confidence is Confidence.HIGH, "the ledger and the stacks name the same rank"
    assert found.headline.startswith("rank 5 ") and "while ranks 0-4,6-7 wait for it" in found.headline


@pytest.mark.parametrize(
    ("machine", "kind"),
    [("aarch64", FailureClass.DEADLOCK), ("x86_64", FailureClass.MISSING), ("riscv64", FailureClass.MISSING)],
)
def test_a_system_call_has_another_number_on_another_architecture(machine: str, kind: FailureClass) -> None:
    """98 is futex on aarch64, and getrusage on x86-64. Where the numbers are not known nothing is concluded from one."""
    stacks = [*others(5), stack(5, LOOPS, syscall="98", wchan="futex_do_wait")]
    assert judge_attempt(Material(HUNG, stacks=stacks, machine=machine)).kind is kind


def test_equal_stacks_are_one_line() -> None:
    stacks = [*others(5), stack(5, READS, state="D", syscall="0", wchan="rpc_wait_bit_killable")]
    assert [one.words() for one in alike(stacks)] == [
        "ranks 0-4,6-7: waits for others in all_reduce (train.py:30 step)",
        "rank 5: waits in the kernel (rpc_wait_bit_killable, state D) (data.py:12 read_shard)",
    ]


def test_where_all_wait_nobody_is_accused_by_the_stacks() -> None:
    cause = Cause(CauseKind.HANG, phase="train", step=30, waited=9.1)
    found = judge_attempt(Material(attempt(cause, Failure(FailureKind.HANG, "hang")), stacks=others(99)))
    assert (found.kind, found.culprits, found.confidence) == (FailureClass.UNKNOWN, (), Confidence.LOW)


def flight(trouble: Trouble, *culprits: int, sure: bool = True) -> FlightRecord:
    text = "did not join all_reduce, number 21 of group 0"
    return FlightRecord(
        (FlightFinding(trouble, culprits, (0, 1), "0", 21, "all_reduce", text, "train.py:42 step", sure),), (0, 1)
    )


def test_the_recorder_and_the_stacks_agree() -> None:
    stacks = [*others(5), stack(5, LOADER)]
    found = judge_attempt(Material(HUNG, stacks=stacks, flight=flight(Trouble.NOT_JOINED, 5), machine="x86_64"))
    assert (found.kind, found.culprits, found.confidence) == (FailureClass.STUCK_IN_LOADER, (5,), Confidence.HIGH)
    assert {one.source for one in found.evidence} >= {"the flight recorder", "the stack of rank 5"}


def test_where_they_disagree_it_is_a_guess() -> None:
    stacks = [*others(5), stack(5, LOADER)]
    found = judge_attempt(Material(HUNG, stacks=stacks, flight=flight(Trouble.MISMATCH, 3)))
    assert found.confidence is Confidence.LOW


def test_the_recorder_alone_is_no_certainty() -> None:
    found = judge_attempt(Material(None, flight=flight(Trouble.MISMATCH, 3)))
    assert (found.kind, found.culprits, found.confidence) == (FailureClass.MISMATCH, (3,), Confidence.MEDIUM)


def event(kind: FailureClass, text: str, rank: int | None = 3, role: Role = Role.CAUSE, **more: object) -> LogEvent:
    return LogEvent(kind, role, rank, "", 1.0, "out.log", 10, text)._replace(**more)  # type: ignore[arg-type]


def output(*events: LogEvent) -> FirstFailure:
    causes = [one for one in events if one.role is Role.CAUSE]
    groups = tuple(EventGroup(one, 1, (one.rank,) if one.rank is not None else ()) for one in events)
    return FirstFailure(causes[0] if causes else None, groups, read=100)


EXIT = attempt(
    Cause(CauseKind.EXIT, (NodeRanks("node-1", "3"),), code=1), Failure(FailureKind.CODE, "exit 1", error="KeyError")
)


def test_the_program_s_own_error_is_named_with_its_line() -> None:
    told = event(FailureClass.NODE, "RuntimeError: Connection closed by peer", 0, Role.FOLLOWER)
    mine = event(FailureClass.USER_CODE, "KeyError: 'tokens'", where="train.py:42 step")
    found = judge_attempt(Material(EXIT, output(mine, told)))
    assert (found.kind, found.culprits, found.nodes, found.confidence) == (
        FailureClass.USER_CODE,
        (3,),
        ("node-1",),
        Confidence.HIGH,
    )
    assert found.headline == "rank 3: KeyError: 'tokens' at train.py:42 step"
    assert found.evidence[-1].text == "1 later lines of other ranks only follow from it"


LOST_ANOTHER = "ConnectionError: another rank is gone"


def a_line(kind: FailureClass, text: str, *, at: float | None, offset: int) -> EventGroup:
    event = LogEvent(kind, Role.CAUSE, None, "", at, "run.out", offset, text, "group.py:123 read" if at else "")
    return EventGroup(event, 1, ())


def test_a_rank_that_lost_its_connection_to_one_that_was_killed_is_not_the_cause() -> None:
    """A month: "an error in the program, rank 1 (confidence: high): ConnectionError", where rank 1 had died of SIGSEGV and
    rank 0 had said that, in an output without labels."""
    told = a_line(FailureClass.USER_CODE, LOST_ANOTHER, at=1.0, offset=0)
    srun = a_line(FailureClass.CRASH, "srun: error: node-1: task 1: Segmentation fault", at=None, offset=900)
    killed = Cause(CauseKind.SIGNAL, (NodeRanks("node-1", "1"),), signal=11)
    failed = Failure(FailureKind.SIGNAL, "killed by SIGSEGV")
    output = FirstFailure(told.first, (told, srun))
    found = judge_attempt(Material(attempt(killed, failed), output))
    assert (found.kind, found.culprits, found.nodes) == (FailureClass.CRASH, (1,), ("node-1",))
    assert "Segmentation fault" in found.headline
    found = judge_attempt(Material(attempt(killed, failed), FirstFailure(told.first, (told,))))
    assert found.kind is FailureClass.CRASH and "SIGSEGV" in found.headline, "where Slurm says nothing of it too"
    ended = Cause(CauseKind.EXIT, (NodeRanks("node-1", "1"),), code=1)
    found = judge_attempt(Material(attempt(ended, Failure(FailureKind.CODE, "exit 1")), output))
    assert found.headline.startswith(LOST_ANOTHER), "nobody was killed: what it could not reach is the cause"


def test_ranks_that_only_heard_of_it_leave_it_unknown() -> None:
    told = event(FailureClass.NODE, "RuntimeError: Connection closed by peer", 0, Role.FOLLOWER)
    found = judge_attempt(
        Material(attempt(Cause(CauseKind.EXIT, code=1), Failure(FailureKind.CODE, "exit 1")), output(told))
    )
    assert (found.kind, found.confidence) == (FailureClass.UNKNOWN, Confidence.LOW)
    assert "the ranks say only that others had gone" in found.headline


@pytest.mark.parametrize(
    ("cause", "failure", "kind"),
    [
        (Cause(CauseKind.NODE, (NodeRanks("node-1"),)), Failure(FailureKind.NODE, "node failure"), FailureClass.NODE),
        (Cause(CauseKind.MEMORY), Failure(FailureKind.MEMORY, "out of memory"), FailureClass.HOST_MEMORY),
        (Cause(CauseKind.EXIT, code=1), Failure(FailureKind.MEMORY, "GPU out of memory"), FailureClass.GPU_MEMORY),
        (Cause(CauseKind.EXIT, code=1), Failure(FailureKind.DISK, "no space left"), FailureClass.DISK),
        (Cause(CauseKind.SIGNAL, signal=11), Failure(FailureKind.SIGNAL, "killed by SIGSEGV"), FailureClass.CRASH),
        (Cause(CauseKind.SIGNAL, signal=9), Failure(FailureKind.SIGNAL, "killed by SIGKILL"), FailureClass.UNKNOWN),
        (Cause(CauseKind.DIVERGES), Failure(FailureKind.NUMBERS, "diverges"), FailureClass.NUMBERS),
        (Cause(CauseKind.NO_STEP), Failure(FailureKind.START, "no step"), FailureClass.START),
    ],
)
def test_without_any_output_the_ledger_says_it(cause: Cause, failure: Failure, kind: FailureClass) -> None:
    assert judge_attempt(Material(attempt(cause, failure))).kind is kind


def test_the_output_does_not_overrule_the_ledger() -> None:
    """A node was lost; a rank printed its exception for another reason a moment before."""
    lost = attempt(Cause(CauseKind.NODE, (NodeRanks("node-1"),)), Failure(FailureKind.NODE, "node failure"))
    found = judge_attempt(Material(lost, output(event(FailureClass.USER_CODE, "ValueError: x"))))
    assert (found.kind, found.confidence) == (FailureClass.NODE, Confidence.LOW)


def test_what_a_node_said_of_its_hardware_decides() -> None:
    found = judge_attempt(Material(EXIT._replace(hardware="NVRM: Xid 79: GPU has fallen off the bus"), output()))
    assert (found.kind, found.confidence) == (FailureClass.HARDWARE, Confidence.HIGH)


@pytest.mark.parametrize(
    ("cause", "words"),
    [(CauseKind.FINISHED, "finished"), (CauseKind.KILL_SWITCH, "kill switch"), (CauseKind.TIME_LIMIT, "time limit")],
)
def test_an_end_that_was_asked_for_is_no_failure(cause: CauseKind, words: str) -> None:
    found = judge_attempt(Material(attempt(Cause(cause))))
    assert (found.kind, found.confidence) == (FailureClass.NONE, Confidence.HIGH)
    assert found.headline == f"it did not fail: {words}"


def test_an_exception_in_answer_to_the_warning_is_told_and_that_the_save_may_not_be_whole() -> None:
    warned = Cause(CauseKind.WARNING, then=Cause(CauseKind.EXIT, code=130))
    raised = event(FailureClass.USER_CODE, "KeyboardInterrupt", where="train.py:51 main")
    found = judge_attempt(Material(attempt(warned, exit_code=130), output(raised)))
    assert found.kind is FailureClass.USER_CODE and found.confidence is Confidence.MEDIUM
    assert found.headline == (
        "it was asked to leave by SIGINT, and an exception ended it: KeyboardInterrupt at train.py:51 main; its save may not "
        "be whole"
    )
    own = Cause(CauseKind.WARNING, then=Cause(CauseKind.EXIT, code=99))
    assert judge_attempt(Material(attempt(own, exit_code=99), output(raised))).kind is FailureClass.NONE, "its own code"


def test_a_rank_for_which_the_others_waited_is_the_verdict_where_there_is_no_other() -> None:
    slow = Straggler((5,), "n5", 0.4, COMES_LAST, 8, NOW)
    said = "rank 5 on n5 is slow: it comes last at each step, which costs 40% of the time of all 8 ranks"
    runs = judge_attempt(Material(attempt(None), straggler=slow))
    assert (runs.kind, runs.culprits, runs.nodes, runs.headline) == (FailureClass.STRAGGLER, (5,), ("n5",), said)
    elsewhere = judge_attempt(Material(attempt(Cause(CauseKind.UNKNOWN))._replace(ended=None), straggler=slow))
    assert elsewhere.kind is FailureClass.STRAGGLER
    hung = judge_attempt(Material(HUNG, stacks=[*others(5), stack(5, LOADER)], straggler=slow))
    assert hung.kind is FailureClass.STUCK_IN_LOADER and hung.evidence[-1].text == said
