"""What comes in the last moment of an attempt, or in the wrong order: who began it, and that somebody has told us to leave."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

from ftsupervise.errors import Error
from ftsupervise.host import bounded
from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import Cause, CauseKind
from ftsupervise.ranks.hang_detector import Detector, GapHistory, HangLimits, PhaseStats
from ftsupervise.ranks.hang_monitor import HangMonitor, SeenFromOutside
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.ranks.rank_table import first_failure
from ftsupervise.run import Options, gate, supervisor
from ftsupervise.run.command import RunningCommand
from ftsupervise.run.decide import Budgets
from ftsupervise.run.exit_analysis import CommandSpec
from ftsupervise.run.gate import wait_unless_stopped
from ftsupervise.run.job_end import JobEnd
from ftsupervise.run.states import AttemptProgress, AttemptState
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import RankState
from tests.neighbours.supervised import alive, outside_a_job


def options(tmp_path: Path, *command: str, in_place: int) -> Options:
    return Options(RunDir(tmp_path / "run"), command, "x", budgets=Budgets(in_place=in_place, back_off=0.0))


def test_a_signal_that_comes_as_the_command_ends_is_heard_and_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with scancel: srun ends of the same SIGTERM, and we have looked at it before we look at ours."""
    read = RunningCommand.read_the_last_events

    def late(self: RunningCommand) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        read(self)

    monkeypatch.setattr(RunningCommand, "read_the_last_events", late)
    clean = outside_a_job()
    asked = options(tmp_path, "sh", "-c", "exit 143", in_place=5)
    assert supervisor.run(asked, clean) == 143
    (only,) = ledger(asked.rundir)
    assert only.words == "cancelled or preempted (SIGTERM)"
    assert only.sign == ""


def test_a_question_that_is_asked_while_the_command_ends_is_answered_whatever_the_command_has_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the questions to Slurm about the nodes: without their answers the next attempt took a node that the job had lost."""
    read, answers = RunningCommand.read_the_last_events, []

    def question() -> None:
        answers.append(bounded.run(["sh", "-c", "sleep 0.5; echo node-1"], timeout=30))

    asking = Thread(target=question)

    def ask_ahead(self: RunningCommand) -> None:
        if not asking.ident:
            asking.start()
            while not bounded.awaited():
                sleep(0.001)
        read(self)

    monkeypatch.setattr(RunningCommand, "read_the_last_events", ask_ahead)
    left = f"sleep 600 & echo $! > {tmp_path}/pid"
    assert supervisor.run(options(tmp_path, "sh", "-c", left, in_place=0), outside_a_job()) == 0
    asking.join()
    assert not alive(int((tmp_path / "pid").read_text()))
    assert [(one.code, one.stdout) for one in answers] == [(0, "node-1\n")]


@pytest.mark.parametrize("in_place", [0, 5])
def test_who_raised_for_another_ones_end_is_not_named_though_heard_of_first(tmp_path: Path, in_place: int) -> None:
    now = monotonic()
    raised = RankExit(0, "node-0", 10, now, 1, True, True, True)
    killed = RankExit(1, "node-1", 11, now + 0.1, -9, False, False, True)
    news: list[list[RankExit]] = [[raised], [killed], []]
    agents: Any = SimpleNamespace(keep_running=lambda: None, table=SimpleNamespace(deaths=lambda: news.pop(0)))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(tree=frozenset)
    signals: Any = None
    asked = options(tmp_path, "srun", "train", in_place=in_place)
    one = RunningCommand(CommandSpec(asked, mine, asked.command, JobEnd(), signals, nobody, agents))
    said = [one.deaths.reported(warned=False) for _ in range(2)]
    assert one.deaths.death == killed
    assert (said == [None, None]) == (in_place == 0), "where nobody starts it again, nobody ends it for that either"


@pytest.mark.parametrize(("after", "code"), [(0.1, -15), (32.0, -9), (300.0, -6)])
def test_who_dies_of_srun_or_of_the_watchdog_long_after_a_rank_that_raised_is_its_victim(
    after: float, code: int
) -> None:
    raised = RankExit(3, "node-1", 10, 1000.0, 1, True, True, True)
    victim = RankExit(0, "node-0", 11, 1000.0 + after, code, False, False, True)
    assert first_failure([raised, victim]) == first_failure([victim, raised]) == raised
    assert first_failure([]) is None


def test_a_rank_that_the_command_has_outlived_is_not_what_it_ended_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun without --kill-on-bad-exit: a rank left in the first hour, another one crashes in the twentieth."""
    agents: Any = SimpleNamespace(keep_running=lambda: None, table=SimpleNamespace(deaths=list))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(tree=frozenset)
    signals: Any = SimpleNamespace(wait=lambda _: b"")
    asked = options(tmp_path, "srun", "train", in_place=0)
    one = RunningCommand(CommandSpec(asked, mine, asked.command, JobEnd(), signals, nobody, agents))
    for seconds, named in ((3600.0, False), (5.0, True)):
        one.deaths.crashes = [RankExit(1, "node-1", 11, monotonic() - seconds, 1, False, False, True)]
        one.read_the_last_events()
        assert (one.deaths.death is not None) == named


def test_a_rank_that_was_killed_is_named_though_its_node_is_heard_of_only_while_the_others_are_ended(
    tmp_path: Path,
) -> None:
    """As with the controller away: to end the others takes long then, and the agent that was asked has not answered."""
    now = monotonic()
    raised = RankExit(0, "node-0", 10, now - 12.0, 1, True, True, True)
    killed = RankExit(1, "node-1", 11, now - 11.9, -9, False, False, True)
    ours = RankExit(2, "node-2", 12, now - 1.0, -9, False, False, True)
    news: list[list[RankExit]] = [[raised], [killed, ours]]
    agents: Any = SimpleNamespace(keep_running=lambda: None, table=SimpleNamespace(deaths=lambda: news.pop(0)))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(tree=frozenset)
    signals: Any = SimpleNamespace(wait=lambda _: b"")
    asked = options(tmp_path, "srun", "train", in_place=5)
    one = RunningCommand(CommandSpec(asked, mine, asked.command, JobEnd(), signals, nobody, agents))
    assert one.deaths.reported(warned=False) == raised.cause()
    one.now = AttemptProgress(AttemptState.KILLING, now - 11.8, died_at=now - 11.8)
    one.deaths.touched = now - 11.7
    one.read_the_last_events()
    assert one.deaths.death == killed
    assert ours not in one.deaths.crashes, "we have killed it"


@pytest.mark.fault(
    "To end the other ranks takes minutes, because Slurm does not answer",
    "the rank they were ended for is named all the same",
)
def test_however_long_it_takes_to_end_the_others_the_rank_that_they_were_ended_for_is_named(tmp_path: Path) -> None:
    """A controller that does not answer is asked for a minute, and a step does not end meanwhile."""
    agents: Any = SimpleNamespace(keep_running=lambda: None, table=SimpleNamespace(deaths=list))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(tree=frozenset)
    signals: Any = SimpleNamespace(wait=lambda _: b"")
    asked = options(tmp_path, "srun", "train", in_place=5)
    one = RunningCommand(CommandSpec(asked, mine, asked.command, JobEnd(), signals, nobody, agents))
    began = monotonic() - 90.0
    one.deaths.crashes = [RankExit(1, "node-1", 11, began, -9, False, False, True)]
    one.now = AttemptProgress(AttemptState.KILLING, began + 0.1, died_at=began + 0.1)
    one.read_the_last_events()
    assert one.deaths.death is not None and one.deaths.death.rank == 1


def test_a_wait_of_no_time_hears_that_we_are_to_leave_too(tmp_path: Path) -> None:
    signals = SignalQueue()
    try:
        asked = options(tmp_path, "true", in_place=5)
        assert wait_unless_stopped(0.0, signals, asked)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not wait_unless_stopped(0.0, signals, asked)
    finally:
        signals.close()


@pytest.mark.parametrize("name", ["nodes", "switches"])
def test_of_several_who_make_a_directory_for_all_at_the_same_moment_none_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Six members of a chain that start together, before anybody was there."""
    folder = tmp_path / "run" / name
    there = Path.is_dir

    def a_moment_ago(self: Path) -> bool:
        if self == folder and not there(self):
            folder.mkdir(parents=True)
            return False
        return there(self)

    monkeypatch.setattr(Path, "is_dir", a_moment_ago)
    gate.prepare(RunDir(tmp_path / "run"))
    assert folder.exists()


def test_what_stands_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    gate.prepare(RunDir(tmp_path / "run"))
    (tmp_path / "run" / "switches").rmdir()
    (tmp_path / "run" / "switches").write_text("no directory")
    with pytest.raises(Error, match="File exists"):
        gate.prepare(RunDir(tmp_path / "run"))


def test_a_hang_that_is_left_alone_does_not_hide_that_the_lighthouse_is_at_another_address(tmp_path: Path) -> None:
    began, outside = monotonic(), SeenFromOutside()

    def stopped() -> list[RankState]:
        now = monotonic()
        return [RankState(rank, "node-0", 50, "train", began, began, now, rank + 1, "T", 1.0) for rank in (0, 1)]

    detector = Detector(HangLimits(floor=0.2), GapHistory({"train": PhaseStats(0.05, 1000)}))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(tree=frozenset, apart=frozenset, serving=lambda: 0)
    signals: Any = None
    asked = replace(options(tmp_path, "train", in_place=5), hang=HangLimits(floor=0.2), end_hung=True)
    spec = CommandSpec(asked, mine, asked.command, JobEnd(), signals, nobody, observes=lambda _: True)
    one = RunningCommand(spec, HangMonitor(detector, stopped, lambda *_: {}, tmp_path, lambda: outside))
    one.now = AttemptProgress(AttemptState.RUNNING)
    while one.left.hang is None and monotonic() < began + 60:
        one.look_for_a_hang()
        sleep(0.02)
    assert one.left.hang is not None and one.now.kill_at is None
    outside = SeenFromOutside(moved=True)
    while one.now.kill_at is None and monotonic() < began + 60:
        one.look_for_a_hang()
        sleep(0.02)
    assert one.now.cause == Cause(CauseKind.MOVED)
