"""A run whose loss is no number, or diverges, goes back to an older checkpoint, skips batches, and stops after some tries."""

from __future__ import annotations

import json
import sys

import pytest

from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.model import CauseKind, FailureKind
from ftsupervise.rundir import switches
from ftsupervise.truth import SkippedBatches
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

# Trains to step 60 with a checkpoint every 5. Its state is (step, place in the data, weights). Bad batches spoil the weights.
TRAIN = """
import json, math, os, sys
from ftsupervise import Guard
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
guard = Guard(poll=0.02)
state = {"step": 0, "place": 0, "weights": 1.0}
if guard.restore(state=state) is None:
    found = guard.latest()
    if found:
        state.update(json.loads((found / "state").read_text()))
state["place"] += guard.skip
print("begins", attempt, state, flush=True)
while state["step"] < 60:
    state["step"] += 1
    state["place"] += 1
    step, place = state["step"], state["place"]
    if {bad}:
        state["weights"] = math.nan
    {fault}
    guard.loss(state["weights"])
    decision = guard.step(step)
    if decision.save or step % 5 == 0 and not decision.stop:
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(json.dumps(state))
    if decision.stop:
        print("leaving", decision.reason, flush=True)
        break
    guard.snapshot(step)
else:
    guard.finished(60)
"""
# The same with two ranks that meet in each step. Rank 0 alone asks for the checkpoint, and rank 1 alone has the loss.
TWO_RANKS = """
import json, math, os, socket
here, there = socket.socketpair()
os.environ["WORLD_SIZE"], os.environ["RANK"] = "2", "1"
child = os.fork()
rank = 0 if child else 1
os.environ["RANK"] = str(rank)
other = here if child else there
from ftsupervise import Guard
def agree(vote):
    other.sendall(vote.to_bytes(8, "big", signed=True))
    return max(vote, int.from_bytes(other.recv(8, socket.MSG_WAITALL), "big", signed=True))
guard = Guard(poll=0.02, agree=agree)
found = guard.latest() if rank == 0 else None
first = agree(json.loads((found / "state").read_text()) if found else 0)
place = first + guard.skip
print("rank", rank, "begins", first, place, flush=True)
for step in range(first + 1, 61):
    place += 1
    if rank == 1:
        guard.loss(math.nan if place == 32 else 1.0)
    decision = guard.step(step)
    if rank == 0 and (decision.save or step % 5 == 0 and not decision.stop):
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(str(step))
    if decision.stop:
        print("rank", rank, "leaves", step, flush=True)
        break
else:
    guard.finished(60)
guard.close()
if child:
    os.waitpid(child, 0)
"""
RESUME = ("--loss-nonfinite", "resume", "--loss-back", "10")
ON_DISK = (*RESUME, "--snapshot-every", "off")


def train(run: SupervisedRun, *words: str, bad: str = "False", fault: str = "pass", script: str = TRAIN) -> int:
    code = script.replace("{bad}", bad).replace("{fault}", fault)
    one = run.start("--in-place", "20", "--back-off", "0", "--warm", "off", *words, "--", sys.executable, "-c", code)
    return one.wait(120)


def begun(run: SupervisedRun) -> list[str]:
    return [one.resumed.checkpoint if one.resumed is not None else "?" for one in run.attempts()]


@pytest.mark.fault(
    "A bad batch makes the loss no number, where the settings say `resume`",
    "the run leaves unsaved, goes on from an older checkpoint, and is told how many batches to skip",
)
def test_a_bad_batch_makes_the_run_go_back_skip_it_and_finish(run: SupervisedRun) -> None:
    code = train(run, *RESUME, bad="place == 32")
    said = run.members[0].said()
    assert code == 0, said
    first, last = run.attempts()
    assert begun(run) == ["", "step-00000020"], said
    assert first.cause is not None and first.cause.kind is CauseKind.NOT_A_NUMBER and "nan at step 32" in first.words
    assert first.failure is not None and first.failure.kind is FailureKind.NUMBERS
    assert first.trouble is not None and (first.trouble.since, first.trouble.then) == (32, "resume")
    assert last.resumed is not None and last.resumed.skipped == (SkippedBatches(20, 12),), "batches 21 to 32"
    assert "begins 2 {'step': 20, 'place': 32, 'weights': 1.0}" in said
    assert (last.resumed.set_aside, last.resumed.more_aside) == ("step-00000030", 1)
    folder = run.rundir.checkpoints
    assert [one.name for one in quarantined(folder)] == ["step-00000025", "step-00000030"]
    assert json.loads((folder / "step-00000060" / "state").read_text()) == {"step": 60, "place": 72, "weights": 1.0}
    assert last.words == "finished" and "12 batches are skipped" in last.resumed.words()
    assert "stopping at step 32, unsaved" in said and "saving and stopping" not in said
    told = typed("status", run.rundir.root)
    assert "loss is not a number: rank 0 on" in told.stdout and "nan at step 32" in told.stdout, told
    assert "from step-00000020 (step-00000030 and 1 more were set aside; 12 batches are skipped)" in told.stdout, told


@pytest.mark.fault(
    "A crash after the run went back",
    "what its checkpoint does not know of is skipped again, and no more",
)
def test_a_crash_after_the_run_went_back_skips_what_its_checkpoint_does_not_know_of(run: SupervisedRun) -> None:
    code = train(run, *ON_DISK, bad="place == 32", fault="if step == {2: 23, 3: 28, 4: 33}.get(attempt): sys.exit(4)")
    said = run.members[0].said()
    assert code == 0, said
    assert begun(run)[1:] == ["step-00000020", "step-00000020", "step-00000025", "step-00000030"], said
    assert "begins 2 {'step': 20, 'place': 32, 'weights': 1.0}" in said
    assert "begins 3 {'step': 20, 'place': 32, 'weights': 1.0}" in said, "no checkpoint was made meanwhile"
    assert "begins 4 {'step': 25, 'place': 37, 'weights': 1.0}" in said, "this one knows what was skipped"
    assert [one.resumed.skip for one in run.attempts() if one.resumed is not None] == [0, 12, 12, 0, 0]


def test_a_snapshot_after_the_run_went_back_knows_what_was_skipped(run: SupervisedRun) -> None:
    code = train(run, *RESUME, bad="place == 32", fault="if attempt == 2 and step == 27: sys.exit(4)")
    said = run.members[0].said()
    assert code == 0 and "begins 3 {'step': 26, 'place': 38, 'weights': 1.0}" in said, said


@pytest.mark.fault(
    "The loss is no number again in the same place",
    "each time the run goes further back; then the brake comes on",
)
def test_a_run_that_comes_to_the_same_again_goes_back_further_and_stops_after_its_tries(run: SupervisedRun) -> None:
    code = train(run, *RESUME, bad="step == 32")
    said = run.members[0].said()
    assert code == 0, "the loop itself has left in order"
    assert begun(run) == ["", "step-00000020", "step-00000015", "step-00000010"], said
    assert [one.trouble.since for one in run.attempts() if one.trouble is not None] == [32] * 4
    skips = [one.resumed.skip for one in run.attempts() if one.resumed is not None]
    assert skips == [0, 12, 29, 51], "32 - 20, 44 - 15, 61 - 10: all that was used or skipped since then"
    brake = switches.read_brake(run.rundir)
    assert brake is not None and brake.times == 4 and "after going back to an older checkpoint" in brake.why, brake
    assert "nan at step 32" in brake.detail and brake.failure == "loss is not a number"
    assert "stopped by the brake" in said


def test_a_loss_that_stops_the_run_leaves_it_to_a_person_and_the_next_start_is_from_before(run: SupervisedRun) -> None:
    train(run, "--loss-nonfinite", "stop", bad="attempt == 1 and place == 32")
    assert len(run.attempts()) == 1 and switches.read_brake(run.rundir) is not None
    assert "guard.loss says stop" in run.members[0].said()
    switches.release_brake(run.rundir, who="ada", now=run.attempts()[0].started)
    assert train(run, "--loss-nonfinite", "stop", bad="attempt == 1 and place == 32") == 0
    assert begun(run) == ["", "step-00000030"] and run.attempts()[-1].words == "finished"
    assert run.attempts()[-1].resumed.skip == 0  # type: ignore[union-attr]


@pytest.mark.fault(
    "The loss is no number, and nothing stops the run for it",
    "no snapshot is taken, and the next attempt begins from before that",
)
def test_a_run_that_only_warns_goes_on_and_its_next_attempt_begins_from_before_the_loss_was_lost(
    run: SupervisedRun,
) -> None:
    code = train(run, bad="attempt == 1 and place == 32", fault="if attempt == 1 and step == 43: sys.exit(4)")
    said = run.members[0].said()
    assert code == 0, said
    assert begun(run) == ["", "step-00000030"], "not from 40, whose weights are no numbers, and from no snapshot"
    assert "loss is not a number: nan at step 32" in said and run.attempts()[-1].words == "finished"
    assert (begins := run.attempts()[-1].begins) is not None and begins.source != "memory"


@pytest.mark.fault("The loss goes up and stays there", "the run goes back to before it began")
def test_a_loss_that_diverges_goes_back_to_before_it_began(run: SupervisedRun) -> None:
    script = TRAIN.replace('"] < 60', '"] < 120').replace("finished(60)", "finished(120)")
    code = train(
        run,
        *("--loss-diverging", "resume", "--loss-back", "10", "--loss-patience", "16"),
        script=script,
        fault="if 62 <= place <= 70: state['weights'] = 9.0",
    )
    said = run.members[0].said()
    assert code == 0, said
    assert begun(run) == ["", "step-00000050"], said
    first, last = run.attempts()
    assert first.cause is not None and first.cause.kind is CauseKind.DIVERGES
    assert first.trouble is not None and (first.trouble.since, first.trouble.step) == (62, 77)
    assert last.resumed is not None and last.resumed.skip == 27 and last.words == "finished"


@pytest.mark.fault(
    "The loss is no number on one rank alone",
    "all ranks leave at the same step, and the ledger names the rank",
)
def test_a_loss_that_one_rank_alone_has_seen_makes_all_ranks_leave_and_go_back_together(run: SupervisedRun) -> None:
    code = train(run, *RESUME, script=TWO_RANKS)
    said = run.members[0].said()
    assert code == 0 and begun(run) == ["", "step-00000020"], said
    assert "rank 0 leaves 32" in said and "rank 1 leaves 32" in said
    assert "rank 0 begins 20 32" in said and "rank 1 begins 20 32" in said, "rank 1 has read what rank 0 chose"
    first, last = run.attempts()
    assert first.trouble is not None and first.trouble.rank == 1 and "rank 1 on" in first.words
    assert last.words == "finished"
