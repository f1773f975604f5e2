"""The chain over a scheduler with moods, and the job scripts it hands over. Real files; the clock is ours."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.config.alerting import Alerts
from ftsupervise.crontab import chain, keepalive
from ftsupervise.crontab.chain import slot_comment, slot_of
from ftsupervise.crontab.entries import slots_after
from ftsupervise.crontab.install import remove
from ftsupervise.model import JobState
from ftsupervise.truth import Health
from tests.story.cron_folder import NINE, Folder, make
from tests.story.test_cron_tick import alerts_to

P5 = timedelta(minutes=5)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return make(tmp_path, backend="slurm", alerts=alerts_to(tmp_path / "heard"))


def ahead(folder: Folder) -> list[int]:
    """Minutes after nine for which jobs stand in the queue."""
    found = [slot_of(job.comment, folder.installed.id) for job in folder.queue.queue()]
    return sorted((slot - NINE) // timedelta(minutes=1) for slot in found if slot is not None)


def tick(folder: Folder, minutes: int, job: str) -> chain.Extended:
    """The job of a slot starts, ticks and ends."""
    folder.queue.end(job, JobState.RUNNING)
    done = folder.tick(NINE + timedelta(minutes=minutes, seconds=1), slot=NINE + timedelta(minutes=minutes), job_id=job)
    folder.queue.end(job, JobState.COMPLETED)
    assert done.extended is not None
    return done.extended


def test_an_install_puts_the_next_slots_in_the_queue_and_a_tick_adds_one(folder: Folder) -> None:
    assert ahead(folder) == [0, 5, 10]
    folder.queue.asked = 0
    assert len(tick(folder, 0, "1").submitted) == 1
    assert ahead(folder) == [5, 10, 15]
    assert folder.queue.asked == 2  # one of them is this test's own


@pytest.mark.fault(
    "A cron chain loses its controller for two slots",
    "the spare jobs carry on, and nothing is submitted on an unread queue",
)
def test_a_controller_that_is_down_changes_nothing_and_the_spares_carry_on(folder: Folder) -> None:
    folder.queue.down = "Unable to contact slurm controller"
    done = tick(folder, 0, "1")
    assert done.chain is None
    folder.queue.down = ""
    assert ahead(folder) == [5, 10]
    tick(folder, 5, "2")
    assert ahead(folder) == [10, 15, 20]


def test_a_successor_that_is_refused_is_an_alert_and_gets_resolved(folder: Folder) -> None:
    folder.queue.refuses = "Job violates accounting/QOS policy"
    folder.queue.end("1", JobState.RUNNING)
    done = folder.tick(NINE, slot=NINE, job_id="1")
    assert any("QOS policy" in words for words in done.notified)
    folder.queue.end("1", JobState.COMPLETED)
    folder.queue.refuses = ""
    folder.queue.end("2", JobState.RUNNING)
    assert any(words.startswith("resolved") for words in folder.tick(NINE + P5, slot=NINE + P5, job_id="2").notified)


def test_a_second_job_of_a_slot_asks_nobody_when_the_first_kept_the_chain(folder: Folder) -> None:
    tick(folder, 0, "1")
    folder.queue.asked = 0
    done = folder.tick(NINE + timedelta(seconds=2), slot=NINE, job_id="9")
    assert not done.claimed
    assert folder.queue.asked == 0


def test_a_second_job_of_a_slot_keeps_the_chain_when_the_first_was_killed_at_once(folder: Folder) -> None:
    from ftsupervise.crontab import history

    folder.change(period=timedelta(seconds=4))
    folder.queue.jobs.clear()
    history.claim_slot(folder.cron, NINE, NINE, "1")
    done = folder.tick(NINE + timedelta(seconds=1), slot=NINE, job_id="2")
    assert not done.claimed
    assert done.extended is not None
    assert len(done.extended.submitted) == 3


def test_ensure_asks_nobody_while_slots_come(folder: Folder) -> None:
    tick(folder, 0, "1")
    folder.queue.asked = 0
    assert "alive" in keepalive.see_to(folder.cron.root, folder.queue, NINE + timedelta(minutes=4)).words
    assert folder.queue.asked == 0


def test_ensure_brings_a_dead_chain_back_with_one_question_and_only_once(folder: Folder) -> None:
    folder.queue.jobs.clear()
    later = NINE + timedelta(minutes=20)
    folder.queue.asked = 0
    assert "brought back" in keepalive.see_to(folder.cron.root, folder.queue, later).words
    assert folder.queue.asked == 1
    assert ahead(folder) == [25, 30, 35]
    assert "another command" in keepalive.see_to(folder.cron.root, folder.queue, later + timedelta(seconds=3)).words
    assert ahead(folder) == [25, 30, 35]


def test_ensure_leaves_a_cron_alone_that_was_removed_or_never_there(folder: Folder, tmp_path: Path) -> None:
    assert remove(folder.cron, folder.installed, NINE, folder.queue).cancelled == ("1", "2", "3")
    later = NINE + timedelta(hours=1)
    assert "was removed" in keepalive.see_to(folder.cron.root, folder.queue, later).words
    assert "no cron is installed" in keepalive.see_to(tmp_path / "nowhere", folder.queue, later).words
    assert keepalive.look_after(tmp_path / "nowhere", folder.queue, later, run="x") is None
    assert ahead(folder) == []


def test_ensure_never_raises_whatever_lies_in_the_folder(folder: Folder) -> None:
    folder.cron.installed.write_text('{"id": 3}')
    assert "cannot tell" in keepalive.see_to(folder.cron.root, folder.queue, NINE).words
    folder.cron.installed.write_text("\0")
    assert "cannot tell" in keepalive.see_to(folder.cron.root, folder.queue, NINE).words


def test_the_runs_own_job_says_when_the_cron_is_dead_and_cannot_be_brought_back(folder: Folder) -> None:
    folder.queue.jobs.clear()
    folder.queue.refuses = "Access/permission denied"
    found = keepalive.look_after(folder.cron.root, folder.queue, NINE + timedelta(minutes=11), run="train")
    assert found is not None
    assert (found.health, found.run) == (Health.BAD, "train")
    assert "permission denied" in found.summary
    folder.queue.refuses = ""
    again = keepalive.look_after(folder.cron.root, folder.queue, NINE + timedelta(minutes=16), run="train")
    assert again is not None
    assert again.health is Health.OK


def test_a_controller_that_does_not_answer_is_no_verdict_about_the_cron(folder: Folder) -> None:
    folder.queue.down = "Socket timed out"
    found = keepalive.look_after(folder.cron.root, folder.queue, NINE + timedelta(hours=2), run="train")
    assert found is not None
    assert found.health is Health.UNKNOWN


def test_jobs_in_the_queue_that_never_become_slots_are_told(folder: Folder) -> None:
    """Python was taken away from under it: every job starts, fails, and leaves no trace but the lack of slots."""
    found = keepalive.look_after(folder.cron.root, folder.queue, NINE + timedelta(hours=2), run="train")
    assert found is not None
    assert found.health is Health.BAD
    assert "no slot for 2h" in found.summary


def test_a_colleagues_cron_is_looked_at_and_not_touched(folder: Folder) -> None:
    folder.change(owner="somebody-else")
    folder.queue.jobs.clear()
    found = keepalive.look_after(folder.cron.root, folder.queue, NINE + timedelta(hours=1), run="train")
    assert found is not None
    assert found.health is Health.BAD
    assert "somebody-else" in found.summary
    assert not folder.queue.jobs


def test_a_removed_cron_does_nothing_when_a_job_of_it_still_starts(folder: Folder) -> None:
    from ftsupervise.crontab.tick import tick as one

    remove(folder.cron, folder.installed, NINE, None)
    done = one(folder.cron, slot=NINE, now=NINE, job_id="1", slurm=lambda _: folder.queue, jobs=lambda _: folder.queue)
    assert done is None


def test_typing_install_again_with_another_period_leaves_one_chain_of_the_new_one(tmp_path: Path) -> None:
    folder = make(tmp_path, backend="slurm")
    other = make(tmp_path, backend="slurm", period=timedelta(minutes=30))
    assert other.installed.id == folder.installed.id
    other.queue.jobs = dict(folder.queue.jobs)  # one cluster
    done = keepalive.see_to(other.cron.root, other.queue, NINE, thorough=True)
    assert done.health is Health.OK
    minutes = ahead(other)
    assert set(minutes) == {0, 30, 60, 90} - {0} | {m for m in minutes if m % 30 == 0}
    assert slots_after(NINE, timedelta(minutes=30), 1)[0] == NINE + timedelta(minutes=30)


# ------------------------------------------------------------------------------------------------------ job scripts


def drop_job(folder: Folder) -> None:
    folder.drop("minutely", "report.slurm", "#SBATCH --mem=1G\n#SBATCH -o mine-%j.txt\necho x", mode=0o644)


def test_a_dropped_job_script_is_submitted_and_followed_to_its_end(folder: Folder) -> None:
    drop_job(folder)
    tick(folder, 0, "1")
    (run,) = folder.runs("minutely.report.slurm")
    assert run.start.job_id == "5"
    script = folder.queue.scripts["5"]
    assert script.startswith("#!/bin/sh\n#SBATCH --job-name=report.slurm\n")
    assert f"#SBATCH --output={run.folder}/output\necho x" in script
    tick(folder, 5, "2")
    assert folder.runs("minutely.report.slurm")[0].end.words == "skipped: its job 5 is PENDING"
    folder.queue.end("5", JobState.COMPLETED)
    tick(folder, 10, "3")
    newest, skipped, first = folder.runs("minutely.report.slurm")
    assert (first.end.outcome, first.end.words) == ("ok", "job 5 COMPLETED")
    assert skipped.end.outcome == "skipped"
    assert newest.open


def test_a_failing_job_script_is_an_alert(folder: Folder) -> None:
    drop_job(folder)
    tick(folder, 0, "1")
    folder.queue.end("5", JobState.FAILED, "NonZeroExitCode")
    folder.queue.end("2", JobState.RUNNING)
    told = folder.tick(NINE + P5, slot=NINE + P5, job_id="2").notified
    assert any("job 5 FAILED (NonZeroExitCode)" in words for words in told)


def test_a_job_that_nobody_saw_end_is_neither_a_failure_nor_a_success(folder: Folder) -> None:
    drop_job(folder)
    tick(folder, 0, "1")
    del folder.queue.jobs["5"]
    folder.queue.end("2", JobState.RUNNING)
    assert not [w for w in folder.tick(NINE + P5, slot=NINE + P5, job_id="2").notified if "report" in w]
    assert folder.runs("minutely.report.slurm")[1].end.outcome == "unknown"


def test_no_job_is_submitted_while_nobody_can_say_whether_the_last_one_runs(folder: Folder) -> None:
    drop_job(folder)
    tick(folder, 0, "1")
    folder.queue.down = "Unable to contact"
    folder.queue.jobs["2"] = folder.queue.jobs["2"]._replace(state=JobState.RUNNING)
    done = folder.tick(NINE + P5, slot=NINE + P5, job_id="2")
    assert done.worked.skipped == ("minutely/report.slurm",)


def test_what_sbatch_refuses_is_a_failure_with_its_words(folder: Folder) -> None:
    (folder.cron.folder("minutely") / "bad.slurm").write_text("echo no interpreter\n")
    tick(folder, 0, "1")
    (run,) = folder.runs("minutely.bad.slurm")
    assert run.end.outcome == "failed"
    assert "#!/bin/bash" in run.end.words


def test_alerts_settings_that_cannot_be_read_stop_nothing(folder: Folder) -> None:
    folder.change(alerts={"receivers": "nonsense"})
    folder.drop("minutely", "bad", "exit 1")
    folder.queue.end("1", JobState.RUNNING)
    done = folder.tick(NINE, slot=NINE, job_id="1")
    assert done.worked.ran == ("minutely/bad",)
    assert any("no alert is sent" in words for words in done.trouble)


def test_without_receivers_alerts_are_still_kept(tmp_path: Path) -> None:
    folder = make(tmp_path, backend="slurm", alerts=Alerts())
    folder.drop("minutely", "bad", "exit 1")
    folder.queue.end("1", JobState.RUNNING)
    assert any("bad" in words for words in folder.tick(NINE, slot=NINE, job_id="1").notified)
    assert slot_comment(folder.installed.id, NINE) == folder.queue.jobs["1"].comment
