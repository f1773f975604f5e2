"""``ftsupervise kill``, ``save`` and ``clear`` as people type them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.cli.switches import DELAY
from ftsupervise.config.schema import Launch, Run
from ftsupervise.launch.doubts import doubts, guard_of
from ftsupervise.model import GUARD
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, SAVE, clear_switch, read_brake, read_switch
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun, outside_a_job
from tests.neighbours.typed import typed


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "digits")
    run.switches.mkdir(parents=True)
    return run


def ftsupervise(*words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    return typed(*words, answer=answer)


def test_save_raises_the_switch_and_says_what_happens_and_how_to_undo(rundir: RunDir) -> None:
    done = ftsupervise("save", str(rundir.root), "--why", "before the move")
    assert done.returncode == 0
    assert read_switch(rundir, SAVE).why == "before the move"
    assert "No attempt of it runs now. The next one with a guard saves at its first step" in done.stdout
    assert f"ftsupervise clear {rundir.root}" in done.stdout


def test_kill_asks_nobody_when_nobody_is_there_and_does_nothing(rundir: RunDir) -> None:
    done = ftsupervise("kill", str(rundir.root))
    assert done.returncode == 64
    assert "--confirm digits" in done.stderr
    assert os.listdir(rundir.switches) == []


def test_kill_checks_the_name_it_is_given(rundir: RunDir) -> None:
    assert ftsupervise("kill", str(rundir.root), "--confirm", "other").returncode == 64
    assert not read_switch(rundir, KILL).up
    assert ftsupervise("kill", str(rundir.root), "--confirm", "digits").returncode == 0
    assert read_switch(rundir, KILL).up


def test_on_a_terminal_kill_asks_and_no_means_no(rundir: RunDir) -> None:
    import pty

    for answer, up in ((b"n\n", False), (b"y\n", True)):
        parent, child = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "ftsupervise", "kill", str(rundir.root)], stdin=child, stdout=child, stderr=child
        )
        os.close(child)
        os.write(parent, answer)
        process.wait(60)
        os.close(parent)
        assert read_switch(rundir, KILL).up is up


def test_the_first_reason_stays(rundir: RunDir) -> None:
    ftsupervise("kill", str(rundir.root), "--yes", "--why", "first")
    done = ftsupervise("kill", str(rundir.root), "--yes", "--why", "second")
    assert done.returncode == 0
    assert "up already" in done.stdout and "first" in done.stdout
    assert read_switch(rundir, KILL).why == "first"


GUARDED = """
import time
from ftsupervise import Guard

guard = Guard()
for step in range(10_000):
    if guard.step(step).stop:
        break
    time.sleep(0.05)
"""


def test_in_the_first_seconds_of_an_attempt_no_guard_is_assumed_and_none_denied(run: SupervisedRun) -> None:
    run.start("--stop-within", "120", "--", "sleep", "600")
    wait_until(lambda: ledger(run.rundir), "the attempt")
    began = r"attempt 1 began \d\S* ago, and it is not known yet whether a guard is in it"
    saved = ftsupervise("save", str(run.rundir.root)).stdout
    assert re.search(rf"is up; {began}\.\nWith a guard it saves at the next step", saved), saved
    assert "nothing hears a save, and the switch stays up." in saved
    killed = ftsupervise("kill", "--yes", str(run.rundir.root)).stdout
    assert re.search(rf"is up; {began}\.\nWith a guard it saves and stops at the next step", killed), killed
    assert "Without one, unless its command looks at the switch, it is ended by SIGTERM in 2m, with" in killed


def test_a_guard_that_reports_is_said_to_save_and_an_attempt_that_is_over_is_not(run: SupervisedRun) -> None:
    member = run.start("--", sys.executable, "-c", GUARDED)
    wait_until(lambda: any(one.source == GUARD for one in ledger(run.rundir)), "its guard")
    assert f"is up. It saves and stops {DELAY}." in ftsupervise("kill", "--yes", str(run.rundir.root)).stdout
    member.wait(60)
    clear_switch(run.rundir, KILL)
    assert "is up. No attempt of it runs now." in ftsupervise("kill", "--yes", str(run.rundir.root)).stdout


def test_clear_takes_down_one_or_both_and_says_which(rundir: RunDir) -> None:
    for name in (KILL, SAVE):
        (rundir.switches / name).touch()
    done = ftsupervise("clear", str(rundir.root), "--switch", "save")
    assert "save switch of digits is down" in done.stdout
    assert read_switch(rundir, KILL).up
    done = ftsupervise("clear", str(rundir.root))
    assert "kill switch of digits is down" in done.stdout
    assert "save switch of digits was not up" in done.stdout


@pytest.mark.threat(
    "A stranger lays a link where ftsupervise will write a switch.",
    "ftsupervise replaces the link and does not touch its target.",
)
def test_a_link_planted_in_the_switchs_place_is_replaced_and_its_target_untouched(
    rundir: RunDir, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (rundir.switches / SAVE).symlink_to(victim)
    assert ftsupervise("save", str(rundir.root)).returncode == 0
    assert victim.read_text() == "precious"
    assert read_switch(rundir, SAVE).up


@pytest.mark.parametrize("name", [KILL, SAVE])
def test_what_cannot_be_removed_is_one_sentence_and_what_to_type(rundir: RunDir, name: str) -> None:
    place = rundir.switches / name
    place.mkdir()
    done = ftsupervise("clear", str(rundir.root))
    assert done.returncode == 73
    assert f"cannot remove {place}: it is a folder" in done.stderr and "Traceback" not in done.stderr
    assert f"ls -la {place}" in done.stderr and f"rmdir {place}" in done.stderr


@pytest.mark.parametrize("words", [("save",), ("kill", "--yes"), ("clear",)])
def test_they_import_nothing_they_do_not_need(rundir: RunDir, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ftsupervise", *words, str(rundir.root)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {
        "pydantic",
        "rich",
        "jinja2",
        "requests",
        "slack_sdk",
        "psutil",
        "asyncio",
        "ssl",
        "subprocess",
    }


def test_kill_ends_the_process_of_a_local_chain_that_the_brake_holds(tmp_path: Path, until: Callable[..., Any]) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: held\nscheduler: local\nlaunch: {command: sh -c 'exit 3', jobs: 5, restart: {back_off: 1s, same_failure: 2}}\n"
    )
    run = RunDir(tmp_path / "runs" / "held")
    env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    typed("launch", folder=tmp_path, code=0, **env)
    brake = until(lambda: (found := read_brake(run)) and found.held and found, "the brake, and the chain on hold")
    (state,) = (tmp_path / "state").rglob("state.json")
    until(lambda: json.loads(state.read_text())["state"] == "PENDING", "the member to have ended")
    said = typed("kill", "--yes", str(run.root), folder=tmp_path, code=0, **env).stdout
    assert f"Members of held that the brake held were ended: {brake.held[0]}" in said
    until(
        lambda: json.loads(state.read_text())["state"] in ("COMPLETED", "FAILED", "CANCELLED"), "the end of the chain"
    )


def test_launch_promises_no_save_of_a_script_that_has_no_guard(tmp_path: Path) -> None:
    env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    for name, program in {"plain": "import time\n", "guarded": "from ftsupervise import Guard\n"}.items():
        place = tmp_path / name
        place.mkdir()
        (place / "train.py").write_text(program)
        command = f"{sys.executable} train.py"
        settings = (
            f"name: {name}\nscheduler: local\nlaunch: {{command: {command}, jobs: 1, restart: {{stop_within: 3m}}}}\n"
        )
        (place / "ftsupervise.yaml").write_text(settings)
        said = typed("launch", folder=place, code=0, **env).stdout
        typed("kill", "--yes", folder=place, **env)
        stops = "(saves first; anyone" if name == "guarded" else "(SIGTERM after 3m; anyone"
        assert f"kill-switch   {stops} in the group may)" in said
        assert ("  save now  " in said) is (name == "guarded")


@pytest.mark.parametrize("changed", [True, False])
def test_who_releases_the_brake_is_told_that_the_members_go_on_with_the_settings_of_their_launch(
    tmp_path: Path, until: Callable[..., Any], changed: bool
) -> None:
    settings = tmp_path / "ftsupervise.yaml"
    settings.write_text(
        "name: held\nscheduler: local\nlaunch: {command: sh -c 'exit 3', jobs: 5, restart: {back_off: 1s, same_failure: 2}}\n"
    )
    run = RunDir(tmp_path / "runs" / "held")
    env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    typed("launch", folder=tmp_path, code=0, **env)
    until(lambda: (found := read_brake(run)) and found.held and found, "the brake, and the chain on hold")
    if changed:
        settings.write_text(settings.read_text().replace("exit 3", "exit 0"))
    said = typed("clear", "--brake", str(run.root), folder=tmp_path, code=0, **env).stdout
    typed("kill", "--now", "--yes", str(run.root), folder=tmp_path, **env)
    assert "may start again." in said
    assert (f"go on with the settings of their launch; {settings} was changed since" in said) is changed
    assert (f"ftsupervise kill --now {run.root}; ftsupervise clear {run.root}; ftsupervise launch" in said) is changed


@pytest.mark.parametrize(
    ("command", "guard"),
    [
        ("bash job.sh", False),
        ("env TASK=1 bash job.sh", False),
        ("torchrun --nproc_per_node=2 -m src.train --epochs 3", False),
        ("cd src && srun python train.py", None),
        ("./train", None),
        ("bash guarded.sh", True),
    ],
)
def test_launch_looks_for_the_guard_in_a_job_script_and_in_a_module_too(
    tmp_path: Path, command: str, guard: bool | None
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("import time\n")
    (tmp_path / "guarded.py").write_text("from ftsupervise import Guard\n")
    (tmp_path / "job.sh").write_text("# FTSUPERVISE_ATTEMPT\nmkdir -p out\nsrun python3 src/train.py &\nwait\n")
    (tmp_path / "guarded.sh").write_text("python guarded.py\n")
    run = Run(name="r", run_dir=tmp_path / "runs/r", launch=Launch(command=command, srun=False))

    def read(path: Path) -> bytes | None:
        return path.read_bytes() if path.exists() else None

    assert guard_of(run, tmp_path, read)[1] is guard
    assert any("has no guard: when it leaves with 0" in one for one in doubts(run, tmp_path, read)) is (guard is False)


def test_launch_does_not_know_of_a_program_whether_it_has_a_guard_and_says_so(tmp_path: Path) -> None:
    env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    settings = "scheduler: local\nlaunch: {command: sleep 1, jobs: 1}\n"
    for name, more in {"one": "", "two-{task}": "sweep: {task: [1]}\n"}.items():
        (tmp_path / "ftsupervise.yaml").write_text(f'name: "{name}"\n{more}{settings}')
        said = typed("launch", folder=tmp_path, code=0, **env).stdout
        typed("kill", "--yes", folder=tmp_path, **env)
        assert re.search(r"  save now  .*   \(with a guard\)\n", said)
        assert "(with a guard it saves first, without one SIGTERM after 10m;" in said


def test_what_status_advises_for_a_local_run_that_hangs_can_be_typed_and_the_run_goes_on(
    tmp_path: Path, until: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Nothing but Slurm has a command that ends one job."""
    (tmp_path / "train.py").write_text(
        "import time\nfrom ftsupervise import Guard\n"
        "with Guard(poll=0.05, beat_every=0.1) as guard:\n"
        "    for step in range(1, 30):\n        guard.step(step)\n        time.sleep(0.05)\n    time.sleep(10_000)\n"
    )
    (tmp_path / "ftsupervise.yaml").write_text(
        f"name: stands\nscheduler: local\nwatch: {{hang: {{at_least: 2s, quiet: 2s, slow: 2s}}}}\n"
        "alerts: {receivers: [{file: {path: told.txt}}]}\n"
        f"launch: {{command: {sys.executable} train.py, jobs: 3, restart: {{hang: null}}}}\n"
    )
    env = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "FTSUPERVISE_LOCAL_KILL_WAIT": "1"}
    run = RunDir(tmp_path / "runs" / "stands")

    def say(*words: str) -> str:
        return typed(*words, folder=tmp_path, env=outside_a_job(**env)).stdout

    def advised() -> list[str]:
        """Return the command that status advises once the watch has seen that the run hangs."""
        say("watch")
        said = say("status", "stands")
        ends = next((line for line in said.splitlines() if "kill --now" in line), "")
        return re.findall(r"ftsupervise [^(;:]*?(?= {3}|;)", ends)

    request.addfinalizer(lambda: say("kill", "--yes", "--now", str(run.root)))
    say("launch")
    end, clear = until(advised, "the hang, and what to do about it", 60)
    assert end == f"ftsupervise kill --now {run.root}"
    told = (tmp_path / "told.txt").read_text()
    assert f"{end} (then {clear}; launched again, it goes on from the last checkpoint)" in told
    assert "py-spy dump on a node of it" in told and "squeue" not in told
    assert "Members of stands were ended: local-1_1, local-1_[2-3%1]" in say(*end.split()[1:], "--yes")
    until(lambda: "no job" in say("status", "stands"), "the end of all its jobs")
    assert "is down" in say(*clear.split()[1:])
    assert "submitted on this machine as job local-2" in say("launch", str(run.root))
    until(lambda: len(ledger(run)) == 2, "the next attempt")
    assert "local-2_1" in say("kill", "--yes", "--now", "stands")
    until(lambda: "no job" in say("status", "stands"), "the end of all its jobs")
