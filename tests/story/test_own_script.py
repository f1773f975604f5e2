"""A script without the guard: what it has reached is not lost by a start from the beginning, and its end is asked for."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.written import find_written
from ftsupervise.model import Attempt
from ftsupervise.run.start_over import ScriptPlace, note_written
from ftsupervise.rundir.attempt_pages import write_page
from ftsupervise.rundir.ledger import kept_of, ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import Brake, read_brake, read_finished
from ftsupervise.scheduler.local import Local
from tests.neighbours.own_script import nano
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

Until = Callable[..., Any]
Launch = Callable[..., RunDir]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """``launch(program, deaths, key=value)``: a chain of local jobs that runs it."""
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))

    def one(program: str, deaths: int, stop_within: str = "10m", **more: object) -> RunDir:
        (tmp_path / "train.py").write_text(program)
        (tmp_path / "deaths").write_text(str(deaths))
        lines = "".join(f"  {key}: {value}\n" for key, value in more.items())
        (tmp_path / "ftsupervise.yaml").write_text(
            f"name: own\nscheduler: local\nlaunch:\n  command: {sys.executable} train.py\n  jobs: 4\n{lines}"
            f"  restart: {{back_off: 0s, stop_within: {stop_within}}}\n"
        )
        typed("launch", folder=tmp_path, env=env(tmp_path), code=0)
        return RunDir(tmp_path / "runs" / "own")

    yield one
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def env(folder: Path) -> dict[str, str]:
    return outside_a_job(FTSUPERVISE_STATE_DIR=str(folder / "state"))


def braked(rundir: RunDir) -> Brake | None:
    """The brake, once all that is left of the chain is on hold."""
    queue = Local().queue()
    return read_brake(rundir) if queue and all(job.reason == "JobHeldUser" for job in queue) else None


def test_a_script_that_begins_anew_is_told_what_it_reached_is_kept_and_the_second_time_holds_the_chain(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(nano(1000), 9)
    first = until(lambda: next(iter((rundir.root / "kept").glob("0001/ckpt.pt")), None), "what attempt 1 had saved", 60)
    saved = first.read_text()
    until(lambda: "it does not resume" in (rundir.attempt(2) / "run.log").read_text(), "the word about it", 60)
    said = (rundir.attempt(2) / "run.log").read_text()
    assert "attempt 2 began at step 0, attempt 1 had reached 45: it does not resume" in said
    assert "no flag of the command says to go on from it" in said and "launch: {resume: " in said
    brake = until(lambda: braked(rundir), "the chain on hold", 120)
    assert (brake.failure, len(ledger(rundir))) == ("it does not resume", 3)
    assert "attempt 3 began at step 0" in brake.why
    assert saved.startswith("40 by process")
    assert first.read_text() == saved != (tmp_path / "out/ckpt.pt").read_text(), "two starts have written over it"
    seen = typed("check", "recovery", folder=tmp_path, env=env(tmp_path))
    assert "attempt 3 began at step 0, attempt 1 had reached 45: it does not resume" in seen.stdout


def test_a_script_is_told_to_resume_and_its_end_with_0_is_asked_for_before_anybody_trains_over_it(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(nano(170), 3, resume="--init_from=resume")
    brake = until(lambda: braked(rundir), "the question", 120)
    attempts = ledger(rundir)
    assert brake.asks and [one.first_step for one in attempts] == [0, 40, 80, 120]
    assert "after " in brake.why and attempts[-1].last_step == 170
    assert not (rundir.root / "kept/0003").exists(), "it has shown that it resumes"
    seen = typed("status", folder=tmp_path, env=env(tmp_path))
    assert "it left with 0" in seen.stdout and "ftsupervise clear --finished" in seen.stdout
    assert ledger(rundir)[-1].then.startswith("stopped by the brake: it left with 0, after ")
    assert ": it left with 0, after " in (rundir.attempt(ledger(rundir)[-1].number) / "run.log").read_text()
    typed("clear", "--finished", folder=tmp_path, env=env(tmp_path), code=0)
    until(lambda: not Local().queue(), "the end of the members", 60)
    assert len(ledger(rundir)) == 4 and (mark := read_finished(rundir)) is not None and mark.step == 170


# Saves into a folder, plays another account that lays a file into it, and lets nothing be kept in the run directory; it dies.
LAID = """
import os, sys, time
from pathlib import Path
resumed = int(sys.argv[1].rpartition("-")[2]) if sys.argv[1:] else 0
for step in range(resumed, resumed + 60):
    print(f"iter {step}: loss 3.1, time 80.12ms", flush=True)
    time.sleep(0.05)
    if step == 20 and not resumed:
        saved = Path("out/step-20")
        saved.mkdir(parents=True)
        (saved / "model.pt").write_text("mine")
        (saved / "optimizer.pt").write_text("laid")
        os.chown(saved / "optimizer.pt", 54321, -1)
        (Path(os.environ["FTSUPERVISE_RUN_DIR"]) / "kept").touch()
sys.exit(0 if resumed else 7)
"""


@pytest.mark.resume(
    "Another account has laid a file into the checkpoint of a script that `launch.resume` would name, and there is "
    "no clean copy",
    "nothing: the command is not started, and the chain is held",
    "the brake: it cannot go on from what it has saved; what to look at and to remove",
)
@pytest.mark.root
def test_a_script_does_not_begin_anew_over_a_checkpoint_into_which_a_stranger_laid_a_file(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(LAID, 0, resume='"{checkpoint}"', finished_by='"exit 0"')
    brake = until(lambda: braked(rundir), "the chain on hold", 120)
    assert brake.why == "it cannot go on from what it has saved"
    assert "step-20 is this run's, but another account has laid something into it" in brake.detail
    assert [one.first_step for one in ledger(rundir)] == [0, None], "the second one has started nothing"
    (tmp_path / "out/step-20/optimizer.pt").unlink()
    typed("clear", "--brake", folder=tmp_path, env=env(tmp_path), code=0)
    until(lambda: read_finished(rundir), "the end of the run", 120)
    assert [one.first_step for one in ledger(rundir)] == [0, None, 20]


def test_an_exit_with_0_finishes_the_run_where_the_settings_say_so(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(nano(40), 0, finished_by='"exit 0"')
    until(lambda: not Local().queue(), "the end of the chain", 90)
    assert len(ledger(rundir)) == 1 and (mark := read_finished(rundir)) is not None and mark.step == 40
    assert read_brake(rundir) is None


LOSES_ITS_NODE = """
import os, sys
from pathlib import Path
if not Path("again").exists():
    Path("again").touch()
    print(f"srun: error: Node failure on {os.uname().nodename}", file=sys.stderr, flush=True)
    sys.exit(0)
"""


@pytest.mark.fault(
    "A node of a script without the guard is lost, and `srun` ends with 0, with `launch.finished_by: exit 0`",
    "that is not taken for the end of the run: the next attempt goes on",
)
@pytest.mark.parametrize("means", ["exit 0", "ask"])
def test_an_exit_with_0_of_an_srun_that_has_lost_its_node_does_not_finish_the_run(
    launch: Launch, until: Until, tmp_path: Path, means: str
) -> None:
    rundir = launch(LOSES_ITS_NODE + nano(40), 0, finished_by=f'"{means}"')
    until(lambda: len(ledger(rundir)) == 2 and ledger(rundir)[1].ended, "the end of the second attempt", 90)
    assert (
        "failed: that is not taken for the end of the run" in (rundir.attempt(1) / "run.log").read_text()
        or means == "ask"
    )
    until(lambda: read_finished(rundir) if means == "exit 0" else read_brake(rundir), "the word on the end", 60)
    assert ledger(rundir)[1].last_step == 40


def test_the_switches_say_that_nothing_in_it_hears_them(launch: Launch, until: Until, tmp_path: Path) -> None:
    rundir = launch(nano(100_000), 0, stop_within="3s")
    until(lambda: any(one.source == "output" for one in ledger(rundir)), "steps that are read", 60)
    assert "hears a save, and the switch stays up." in typed("save", folder=tmp_path, env=env(tmp_path)).stdout
    said = typed("kill", "--yes", folder=tmp_path, env=env(tmp_path)).stdout
    assert "ended by SIGTERM in 3s" in said.replace("\n", " "), said
    since = time.monotonic()
    until(lambda: ledger(rundir)[0].ended is not None, "its end", 60)
    assert time.monotonic() - since < 20, "not after the ten minutes of the default"
    assert ledger(rundir)[0].words.startswith("kill switch: ")
    until(lambda: not Local().queue(), "the end of the members", 60)
    (rundir.switches / "kill-switch").unlink()
    assert "No attempt of it runs now." in typed("kill", "--yes", folder=tmp_path, env=env(tmp_path)).stdout


HEARS_TERM = (
    "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (Path('term').write_text(str(iter_num)), sys.exit(0)))\n"
)


@pytest.mark.parametrize("hears", [False, True], ids=["dies of SIGTERM", "saves at SIGTERM"])
def test_a_script_that_does_not_catch_the_warning_trains_to_the_limit_and_is_stopped_there(
    launch: Launch, until: Until, tmp_path: Path, hears: bool
) -> None:
    program = nano(100_000).replace("begun = iter_num\n", f"begun = iter_num\n{HEARS_TERM if hears else ''}")
    rundir = launch(program, 0, time='"18s"', warn="9s", resume="--init_from=resume")
    log = until(lambda: next(rundir.logs.glob("*_1.out"), None), "the output", 60)
    said = rundir.attempt(1) / "run.log"
    until(lambda: said.exists() and "the job ends soon" in said.read_text(), "the warning", 90)
    assert "nothing in the command catches it, so nothing is sent: it trains on" in said.read_text()
    warned = last_iter(log)
    first = until(lambda: (one := ledger(rundir)[0]).ended is not None and one, "its end at the limit", 90)
    assert (first.last_step or 0) > warned + 40, "it trained on after the warning"
    assert "time limit" in first.words and first.failure is None, first.words
    second = until(lambda: len(ledger(rundir)) > 1 and ledger(rundir)[1].first_step is not None, "the next member", 90)
    assert second and (ledger(rundir)[1].first_step or 0) >= 40 and read_brake(rundir) is None
    assert (tmp_path / "term").exists() is hears


def last_iter(log: Path) -> int:
    return int(log.read_text().rpartition("iter ")[2].partition(":")[0])


SAYS_NO_STEP = """
import time
for at in range(400):
    print(f"[worker] batch done, loss 2.{at % 7}, {at % 3} files open", flush=True)
time.sleep(1000)
"""


def test_an_output_without_a_step_is_told_with_the_lines_that_were_read(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(SAYS_NO_STEP, 0)
    words = "no step found in 400 lines: launch.heartbeat says which number it is"
    until(lambda: ledger(rundir) and ledger(rundir)[0].unread == words, "the ledger's word", 90)
    until(lambda: "no step found in " in (rundir.attempt(1) / "run.log").read_text(), "the supervisor's word", 30)
    seen = typed("status", ".", folder=tmp_path, env=env(tmp_path)).stdout
    assert f"step      {words}" in seen and ", no step found in 400 lines" in seen
    assert f"attempt 1: {words}" in typed("config", "check", folder=tmp_path, env=env(tmp_path), code=0).stderr
    assert words in typed("check", "hang", folder=tmp_path, env=env(tmp_path)).stdout


SAYS_PERCENT = """
import sys, time
from pathlib import Path

deaths = int(Path("deaths").read_text())
for at in range(100_000):
    print(f"\\rProgress: {min(99.9, at / 4):5.1f}% words/sec/thread: 1459 lr: 0.03 avg.loss: 2.65", end="", flush=True)
    if at > 252 and deaths:
        Path("deaths").write_text(str(deaths - 1))
        sys.exit(10 + deaths)
    time.sleep(0.03)
"""


def test_a_percentage_is_shown_as_that_and_where_it_begins_again_that_is_told_and_nothing_is_held(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(SAYS_PERCENT, 1)
    again = "attempt 2 began again at 0 %, attempt 1 had reached 63 %: it does not resume"
    until(lambda: again in (rundir.attempt(2) / "run.log").read_text(), "the word about it", 90)
    first, second = ledger(rundir)[:2]
    assert first.percent is not None and (first.percent.last, first.last_step) == (63.0, None)
    assert second.ended is None and (second.last_step, second.unread) == (None, "")
    seen = typed("status", ".", folder=tmp_path, env=env(tmp_path)).stdout
    assert " % by its own words" in seen and ", to 63 % by its own words" in seen and again in seen
    assert again in typed("check", "recovery", folder=tmp_path, env=env(tmp_path)).stdout
    row = json.loads(typed("status", ".", "--json", folder=tmp_path, env=env(tmp_path), code=0).stdout)
    assert "percent" in json.dumps(row) and read_brake(rundir) is None


A_BAR_EACH_EPOCH = """
import time
for epoch in range(1000):
    for at in range(40):
        print(f"\\r{at * 100 // 40:3d}%|{'#' * (at // 4):10}| {at}/40 [00:01<00:50, 9.0it/s, loss=0.{at}]", end="", flush=True)
        time.sleep(0.1)
"""


def test_a_count_that_begins_anew_with_the_second_epoch_is_no_longer_shown(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(A_BAR_EACH_EPOCH, 0)
    until(lambda: ledger(rundir) and ledger(rundir)[0].last_step, "a step of the first epoch", 60)
    until(lambda: ledger(rundir)[0].last_step is None, "that it is taken back", 60)
    assert ledger(rundir)[0].first_step is None
    assert "no step yet" in typed("status", ".", folder=tmp_path, env=env(tmp_path)).stdout


def test_what_is_kept_of_a_script_is_listed_with_the_checkpoints(launch: Launch, until: Until, tmp_path: Path) -> None:
    rundir = launch(nano(1000), 1)
    kept = until(lambda: next(iter((rundir.root / "kept").glob("0001/ckpt.pt")), None), "what is kept", 60)
    until(lambda: kept_of(rundir), "its page", 30)
    seen = typed("checkpoints", "list", folder=tmp_path, env=env(tmp_path), code=0).stdout
    assert f"kept: {kept}, " in seen and f"of attempt 1, from {tmp_path}/out/ckpt.pt (a copy)" in seen
    told = typed("checkpoints", "list", "--json", folder=tmp_path, env=env(tmp_path), code=0).stdout
    assert [(one["attempt"], one["kept"]) for one in json.loads(told)["kept"]] == [(1, str(kept))]


def test_the_number_of_a_job_in_the_name_of_a_checkpoint_is_no_step_and_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "runs" / "r")
    monkeypatch.chdir(tmp_path)
    began = datetime.now(timezone.utc) - timedelta(minutes=5)
    for number, name in enumerate(("18", "113", "epoch13.pth", "checkpoint-113"), 1):
        folder = rundir.attempt(number)
        folder.mkdir(parents=True)
        write_json(folder / "start.json", {"attempt": number, "job_id": f"18_{number}", "at": began.isoformat()})
        saved = tmp_path / f"out{number}" / name
        at = saved if saved.suffix else saved / "state.pth"
        at.parent.mkdir(parents=True)
        at.write_bytes(b"weights")
        place = ScriptPlace(rundir, rundir.checkpoints, ("train", str(tmp_path / f"out{number}")), job="113")
        left = note_written(place, Attempt(number, f"18_{number}", began, last_step=1))
        assert left is not None and left.path == str(saved)
        assert left.step == {"18": None, "113": None, "epoch13.pth": 13, "checkpoint-113": 113}[name]
        write_page(folder, left._replace(kept=str(saved), how="a copy", step=int(re.sub(r"\D", "", name))))
    rundir.switches.mkdir()
    (rundir.root / "kept").mkdir()
    for number in range(1, 5):
        (rundir.root / "kept" / f"{number:04d}").mkdir()
    seen = typed("checkpoints", "list", str(rundir.root), folder=tmp_path, env=env(tmp_path)).stdout
    first, *kept = seen.splitlines()
    folders = " and in ".join(f"{tmp_path}/out{number}" for number in (4, 3, 2))
    assert first == f"{rundir.checkpoints} holds no checkpoint; the run's own were seen in {folders}"
    assert [("step 113," in line, "epoch 13," in line, "step" in line) for line in kept] == [
        (True, False, True), (False, True, False), (False, False, False), (False, False, False)
    ]  # fmt: skip


def test_what_is_exported_beside_a_checkpoint_is_not_what_is_kept(tmp_path: Path) -> None:
    """llama2.c writes ckpt.pt, from which it goes on, and right after it model.bin, for its program in C."""
    for name, at in (("ckpt.pt", 1000), ("model.bin", 1003)):
        (tmp_path / name).write_bytes(b"weights")
        os.utime(tmp_path / name, (at, at))
    found = find_written([tmp_path], 900, 2000)
    assert found is not None and found.path == str(tmp_path / "ckpt.pt")
    os.utime(tmp_path / "model.bin", (1900, 1900))
    later = find_written([tmp_path], 900, 2000)
    assert later is not None and later.path == str(tmp_path / "model.bin"), "the other was made once, at the start"
