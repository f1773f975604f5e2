"""Where the attempts of a script without the guard begin: does it resume? Ledgers in, a word about them out."""

from __future__ import annotations

import os
import time
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.checkpoints.written import find_written
from ftsupervise.model import GUARD, NOBODY, OUTPUT, Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.run.decide import Budgets, NextAction, Situation, decide, stop_before
from ftsupervise.run.start_over import (
    ScriptPlace,
    keep_before,
    loads_at_once,
    newest_left,
    note_written,
    resumption,
)
from ftsupervise.rundir.attempt_pages import EndPage, StartPage, read_page, write_page
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.starting_over import left_before, must_hold, resumes, starts_over
from ftsupervise.truth import Beat, GivenCheckpoint, LeftCheckpoint, Resumed

BEGAN = datetime(2026, 11, 25, tzinfo=timezone.utc)
Seen = tuple[int | None, int | None]


def ledger_of(*seen: Seen, left: str = "out/ckpt.pt", source: str = OUTPUT, **more: object) -> list[Attempt]:
    """An attempt for each pair of first and last step, 20 hours each, ended by the time limit."""
    attempts = []
    for number, (first, last) in enumerate(seen, 1):
        at = BEGAN + timedelta(hours=20 * number)
        one = Attempt(number, f"88_{number}", at, ended=at + timedelta(hours=20), first_step=first, last_step=last)
        one = one._replace(source=source, cause=Cause(CauseKind.TIME_LIMIT), ready=60.0)
        attempts.append(one._replace(written=LeftCheckpoint(left) if left else None, **more))  # type: ignore[arg-type]
    return attempts


def test_a_run_that_begins_at_0_again_does_not_resume() -> None:
    (found,) = starts_over(ledger_of((0, 1690), (0, 12)))
    assert found.words() == "attempt 2 began at step 0, attempt 1 had reached 1,690: it does not resume"


@pytest.mark.parametrize(
    "seen",
    [
        [(0, 1690), (1500, 3200), (3000, 3400)],
        [(1, 280_000), (281, 290_000)][:1],  # one alone says nothing
        [(10, 1690), (None, None), (1600, 1700)],  # one whose steps were not read
        [(50, 52), (50, 53)],  # died right after the first line
        [(0, 2), (0, 2), (0, 2)],
    ],
)
def test_a_run_that_goes_on_or_of_which_too_little_is_known_is_left_alone(seen: list[Seen]) -> None:
    assert starts_over(ledger_of(*seen)) == ()
    assert stop_before(ledger_of(*seen)[:2], Budgets()) is None


def test_a_guard_is_believed_and_not_where_its_attempt_begins() -> None:
    assert starts_over(ledger_of((0, 900), (0, 12), source=GUARD)) == ()
    assert starts_over(ledger_of((0, 900), (0, 12), resumed=Resumed())) == ()
    assert starts_over(ledger_of((0, 900), (0, 12), source=NOBODY)) == ()
    assert starts_over(ledger_of((0, 900), (0, 12), source="")) == ()


def test_a_count_that_begins_anew_in_a_later_epoch_is_no_start_over() -> None:
    first, second = ledger_of((0, 9000), (0, 40))
    assert starts_over([first._replace(epoch=1), second._replace(epoch=3)]) == ()
    assert starts_over([first._replace(epoch=1), second._replace(epoch=1)])


def test_two_that_go_on_from_the_same_checkpoint_resume_both() -> None:
    """The first of those that count went on from step 1,050 and died before the next save; so the second begins there too."""
    attempts = ledger_of((1051, 1080), (1051, 1070), (1051, 1347))
    old, new = attempts[0].started - timedelta(minutes=1), attempts[0].started + timedelta(minutes=1)
    for at, told in ((old, 0), (new, 2)):
        left = LeftCheckpoint("out/checkpoint_0001050.pth", 1050, at, 160_000)
        assert len(starts_over([one._replace(written=left) for one in attempts])) == told


def test_one_that_begins_right_behind_what_it_was_given_resumes_whatever_is_known_of_those_before() -> None:
    """The first of those that count lived for two seconds, and what it went on from was left before a person launched."""
    first, second = [one._replace(written=None) for one in ledger_of((3101, 3107), (3101, 3220))]
    assert starts_over([first, second])
    given = GivenCheckpoint("out/checkpoint_0003100.pth", 3100, first.started - timedelta(minutes=1))
    assert not starts_over([first, second._replace(given=given)]) and resumes([second._replace(given=given)])
    unnamed = given._replace(path="out/latest.pt", step=None)
    assert not starts_over([first, second._replace(given=unnamed)]), "it is older than the first of them"
    anew = [one._replace(first_step=1, given=given) for one in (first, second)]
    assert starts_over(anew) and not resumes(anew), "it was given one, and has not gone on from it"
    newer = LeftCheckpoint("out/checkpoint_0003150.pth", 3150, first.started + timedelta(minutes=1))
    assert starts_over([first._replace(written=newer), second])
    assert not starts_over([first._replace(written=newer), second._replace(given=given)]), "that one was of no use"


def test_what_was_left_before_a_person_launched_is_what_the_first_attempt_since_went_on_from() -> None:
    old, first, second = ledger_of((2301, 3108), (3101, 3107), (3101, 3220), left="")
    old = old._replace(written=LeftCheckpoint("out/checkpoint_0003100.pth", 3100, old.ended))
    spent = [one._replace(ended=one.started + timedelta(seconds=2)) for one in (first, second)]
    assert starts_over(spent) and not starts_over(spent, left_before([old, *spent], 2))
    assert left_before([old, *spent], 1) is None
    other = LeftCheckpoint("out/checkpoint_0009000.pth", 9000, old.ended)
    assert starts_over(spent, other), "the first of them did not go on from that"


def test_the_second_start_over_with_a_checkpoint_left_each_time_is_held_and_none_without_one() -> None:
    attempts = ledger_of((0, 1690), (0, 800), (0, 700))
    assert not must_hold(starts_over(attempts[:2])) and must_hold(starts_over(attempts))
    found = stop_before(attempts, Budgets())
    assert found is not None and found.failure == "it does not resume" and found.times == 2
    assert "attempt 3 began at step 0, attempt 1 had reached 1,690" in found.why
    unsaved = [one._replace(written=None) for one in attempts]
    assert not must_hold(starts_over(unsaved)) and stop_before(unsaved, Budgets()) is None
    assert stop_before(attempts, Budgets(same_failure=0)) is None, "no brake at all"


def test_three_members_that_begin_anew_are_used_up_though_no_checkpoint_was_found() -> None:
    attempts = ledger_of((1, 4), (1, 4), (1, 4), (1, 4), left="")
    found = stop_before(attempts, Budgets())
    assert found is not None and found.failure == "it does not resume"
    assert "3 members in a row began anew: attempt 4 began at step 1, attempt 1 had reached 4" in found.why
    assert stop_before(attempts[:3], Budgets()) is None


def test_a_launch_after_it_begins_another_line() -> None:
    attempts = ledger_of((0, 1690), (0, 800), (0, 700))
    assert stop_before(attempts, Budgets(), None, 3) is None, "attempt 3 is the first of the new launch"


def test_a_run_that_has_gone_on_once_has_shown_that_it_resumes() -> None:
    assert resumes(ledger_of((0, 1690), (1500, 1600)))
    assert not resumes(ledger_of((0, 1690), (0, 1600))) and not resumes(ledger_of((0, 1690)))


@pytest.mark.parametrize(
    ("command", "left", "why"),
    [
        ("python train.py", "out/ckpt.pt", "no flag of the command says to go on from it"),
        ("python train.py --out=/s/$SLURM_JOB_ID", "/s/1/ckpt.pt", "names a folder by the number of its job"),
        ("python train.py --resume last", "out/ckpt.pt", "the command did not go on from it"),
        ("python train.py", "", "attempt 1 left no checkpoint that was found (does it save"),
    ],
)
def test_the_likely_reason_is_said(command: str, left: str, why: str) -> None:
    assert why in starts_over(ledger_of((0, 1690), (0, 8), left=left))[-1].why(command)


def test_another_folder_is_named() -> None:
    first, second = ledger_of((0, 1690), (0, 800))
    second = second._replace(written=LeftCheckpoint("/s/out-2/ckpt.pt"))
    assert "and it writes into /s/out-2" in starts_over([first, second])[-1].why("python train.py --resume")


# -------------------------------------------------------------------------------------------------------- the brake


def failed(one: Attempt, code: int = 1) -> Attempt:
    return one._replace(cause=Cause(CauseKind.EXIT, code=code), failure=Failure(FailureKind.CODE, f"exit {code}"))


def test_the_brake_names_what_the_command_was_given_and_not_what_lies_beside_it(tmp_path: Path) -> None:
    for name in ("out", "run"):
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(tmp_path / "out" / "checkpoint_0000600.pth", "w") as file:
        file.writestr("weights", "newer, and passed over")
    place = ScriptPlace(RunDir(tmp_path / "run"), tmp_path / "out", ("python", "train.py"))
    spent = [failed(one) for one in ledger_of((None, None), (None, None), left="")]
    assert loads_at_once(place, spent) == str(tmp_path / "out" / "checkpoint_0000600.pth")
    given = GivenCheckpoint(str(tmp_path / "out" / "checkpoint_0000500.pth"), 500)
    assert loads_at_once(place, [one._replace(given=given) for one in spent]) == given.path


def test_a_newer_checkpoint_is_progress_though_no_step_was_read() -> None:
    attempts = [failed(one) for one in ledger_of((None, None), (None, None), (None, None), (None, None))]
    attempts = [one._replace(ended=one.started + timedelta(minutes=2)) for one in attempts]
    saved = [
        one._replace(written=LeftCheckpoint(f"out/checkpoint-{500 * one.number}", 500 * one.number)) for one in attempts
    ]
    in_place = Budgets(in_place=100)
    assert decide(Situation(attempts), in_place).move is NextAction.STOP
    assert decide(Situation(saved), in_place).move is NextAction.RESTART


def test_an_exit_with_0_is_asked_about_once_it_may_have_trained_and_nobody_has_a_guard() -> None:
    (one,) = ledger_of((0, 1690))
    one = one._replace(cause=Cause(CauseKind.EXIT, code=0))
    asked = decide(Situation([one], asks=True), Budgets())
    assert asked.move is NextAction.STOP and asked.failure == "it left with 0"
    assert decide(Situation([one]), Budgets()).move is NextAction.LEAVE
    assert decide(Situation([one._replace(source=GUARD)], asks=True), Budgets()).move is NextAction.LEAVE
    brief = one._replace(last_step=None, first_step=None, written=None, ended=one.started + timedelta(seconds=3))
    assert decide(Situation([brief], asks=True), Budgets()).move is NextAction.LEAVE
    assert decide(Situation([one], asks=True, over="the job ends soon"), Budgets()).move is NextAction.LEAVE


def test_a_script_that_finds_its_work_done_is_asked_about_at_once() -> None:
    """Three members left within a second each after "Training complete", and then somebody was to fix what had failed."""
    trained, brief = ledger_of((1, 370), (None, None), left="")
    trained = trained._replace(ended=trained.started + timedelta(minutes=3))
    brief = brief._replace(cause=Cause(CauseKind.EXIT, code=0), ended=brief.started + timedelta(seconds=0.1))
    asked = decide(Situation([trained, brief], asks=True), Budgets())
    assert (asked.move, asked.failure) == (NextAction.STOP, "it left with 0")
    assert "after 0.1s, and nothing says that it is finished" in asked.why
    guarded = [trained._replace(source=GUARD), brief]
    assert decide(Situation(guarded, asks=True), Budgets()).move is NextAction.LEAVE


def test_an_exit_with_0_after_minutes_is_asked_about_though_nothing_was_read() -> None:
    (one,) = ledger_of((None, None), left="")
    one = one._replace(cause=Cause(CauseKind.EXIT, code=0), ended=one.started + timedelta(minutes=3))
    assert decide(Situation([one], asks=True), Budgets()).failure == "it left with 0"


def test_what_leaves_with_0_at_once_again_and_again_is_asked_about_too() -> None:
    brief = ledger_of((None, None), (None, None), (None, None), left="")
    ended = [
        one._replace(cause=Cause(CauseKind.EXIT, code=0), ended=one.started + timedelta(seconds=1)) for one in brief
    ]
    held = decide(Situation(ended, asks=True), Budgets())
    assert (held.move, held.failure, held.times) == (NextAction.STOP, "it left with 0", 3)
    assert decide(Situation(ended), Budgets()).failure != "it left with 0", "nobody asks here"


@pytest.mark.parametrize("kind", [CauseKind.TIME_LIMIT, CauseKind.WARNING])
def test_members_that_each_saved_are_not_used_up_though_no_step_was_read(kind: CauseKind) -> None:
    """Each wrote the same checkpoint.pt at its end and the next one went on from it: three were "too short for the start"."""
    attempts = ledger_of((None, None), (None, None), (None, None), (None, None), left="out/checkpoint.pt")
    attempts = [
        one._replace(cause=Cause(kind), ready=None, ended=one.started + timedelta(minutes=3)) for one in attempts
    ]
    assert stop_before(attempts, Budgets()) is None
    unsaved = [one._replace(written=None) for one in attempts]
    found = stop_before(unsaved, Budgets())
    assert found is not None and "left nothing to resume from" in found.why
    assert stop_before([*unsaved[:2], attempts[2], unsaved[3]], Budgets()) is None, "not in a row"
    same = [one._replace(written=LeftCheckpoint("out/ckpt-5.pt", 5)) for one in unsaved]
    assert stop_before(same, Budgets()) is not None, "its name says that none came further"


def test_a_folder_of_the_job_s_number_is_no_progress_and_no_step(tmp_path: Path) -> None:
    """Its numbers grow with each job, and each began at epoch 0."""
    rundir, attempts = RunDir(tmp_path / "run"), list[Attempt]()
    begun = datetime.now(timezone.utc) - timedelta(minutes=3)
    for number, job in enumerate((118, 144, 184), 1):
        (tmp_path / "checkpoints" / str(job)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(job) / "state.pth").write_text("w")
        rundir.attempt(number).mkdir(parents=True)
        one = Attempt(number, f"117_{number}", begun, ended=datetime.now(timezone.utc), source=OUTPUT)
        place = ScriptPlace(rundir, tmp_path / "checkpoints", ("true",), None, str(job))
        written = note_written(place, one)
        assert written is not None and written.step is None and written.by_job
        attempts.append(one._replace(cause=Cause(CauseKind.TIME_LIMIT), written=written))
    found = stop_before(attempts, Budgets())
    assert found is not None and found.failure == "it was not seen to resume"
    assert f"a folder of its own job's number, the last one {tmp_path}/checkpoints/184" in found.why


def test_a_file_of_weights_whose_name_has_no_ending_is_a_checkpoint(tmp_path: Path) -> None:
    for name in ("model_38", "loss_38", "events"):
        (tmp_path / name).write_text("w")
    found = find_written([tmp_path], 0.0, time.time() + 1)
    assert found is not None and (Path(found.path).name, found.step) == ("model_38", 38)


def test_no_checkpoint_is_looked_for_among_the_programs_of_the_machine(tmp_path: Path) -> None:
    """A job that looks for libcuda names /usr/lib, and Python's own files there end with .pth."""
    own = tmp_path / "out"
    own.mkdir()
    code = f"for d in /usr/lib /lib /etc /dev / /dev/shm ; do ls $d; done; python train.py --out={own}"
    place = ScriptPlace(RunDir(tmp_path / "run"), tmp_path / "run/checkpoints", ("bash", "-c", code))
    assert {str(path) for path in place.folders()} == {
        str(tmp_path / "run/checkpoints"),
        "/dev/shm",
        str(own),
        str(Path.cwd()),
    }


def test_when_somebody_takes_the_newest_checkpoint_away_the_one_before_it_is_gone_on_from_and_no_old_copy(
    tmp_path: Path,
) -> None:
    """Of a damaged one that its loader crashed on, for example: the run went 300 steps back, to a copy kept long before."""
    (tmp_path / "run").mkdir()
    (tmp_path / "out").mkdir()
    for name, age in (
        ("kept-200.pth", 300.0),
        ("out/checkpoint_0000400.pth", 100.0),
        ("out/checkpoint_0000450.pth", 50.0),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("weights", name)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    place = ScriptPlace(RunDir(tmp_path / "run"), tmp_path / "run" / "checkpoints", ("true",))
    old, new = ledger_of((1, 241), (201, 531))
    gone = new._replace(written=LeftCheckpoint(str(tmp_path / "out/checkpoint_0000500.pth")))
    kept = LeftCheckpoint(str(tmp_path / "out/checkpoint_0000200.pth"), kept=str(tmp_path / "kept-200.pth"))
    path, refused = newest_left(place, [gone, old._replace(written=kept)])
    assert (path, refused) == (tmp_path / "out" / "checkpoint_0000450.pth", "")


def test_what_an_attempt_saved_that_was_lost_with_its_node_is_gone_on_from(tmp_path: Path) -> None:
    """No supervisor was left to note it: a run that kept four checkpoints went back to the newest of the attempt before."""
    rundir, out = RunDir(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    begun = datetime.now(timezone.utc) - timedelta(minutes=30)
    saves = [out / f"checkpoint_{step:07}.pth" for step in (550, 600, 850, 900)]
    for path, age in zip(saves, (1300.0, 1210.0, 610.0, 600.0), strict=True):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("weights", path.name)
        os.utime(path, (time.time() - age,) * 2)
    ends = begun + timedelta(seconds=600), begun + timedelta(seconds=1200)
    steps = (1, 310), (301, 630), (601, 930)
    for number, (first, last) in enumerate(steps, 1):
        folder = rundir.attempt(number)
        folder.mkdir(parents=True)
        write_page(folder, StartPage(number, f"88_{number}", begun + timedelta(minutes=10 * (number - 1)), "n"))
        if number < 3:
            cause = Cause(CauseKind.SIGNAL, signal=9)
            end = EndPage(number, ends[number - 1], cause=cause, first_step=first, last_step=last, ready=1.0)
            write_page(folder, end._replace(source=OUTPUT))
            write_page(folder, LeftCheckpoint(str(saves[1] if number == 2 else out / "checkpoint_0000300.pth")))
        else:
            facts = {"attempt": "3", "source": OUTPUT, "first": str(first)}
            rundir.beats.mkdir()
            write_beat(rundir, Beat(0, last, "train", begun + timedelta(seconds=1740), facts=facts))
    place = ScriptPlace(rundir, rundir.checkpoints, ("python", "train.py", f"--out={out}"))
    assert keep_before(place, 4, lambda seconds: True, lambda words: None)
    rundir.attempt(4).mkdir()
    assert resumption(place, "--resume {checkpoint}", 4).words == ("--resume", str(saves[-1]))
    given = read_page(GivenCheckpoint, rundir.attempt(4))
    assert given is not None and (given.path, given.step) == (str(saves[-1]), 900) and given.at is not None
