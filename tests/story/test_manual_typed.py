"""What the manual says to type is typed here, in its order, with ``scheduler: local``. The same on Slurm: tests/slurm."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.config.load import loads
from ftsupervise.findings import Finding
from ftsupervise.rundir.paths import RunDir
from ftsupervise.snapshots.room import node_folder
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from tests.manual.blocks import ROOT, marked
from tests.manual.stories import Story, copy_of
from tests.neighbours.smtp import MailServer


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Story]]:
    begun: list[Story] = []

    def make(name: str) -> Story:
        begun.append(Story(name, tmp_path / "first", dict(os.environ)))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


@pytest.fixture
def launched(begin: Callable[..., Story]) -> Callable[[str], Story]:
    """A story that begins with the files of the first one."""

    def make(name: str) -> Story:
        story = begin(name)
        for block in marked("run", "first"):
            if "file" in block.marks:
                story.write(block)
        return story

    return make


def test_every_story_in_the_manual_is_told_by_a_test() -> None:
    others = (
        "slurm/test_manual_slurm.py",
        "slurm/test_ddp_on_slurm.py",
        "story/test_torch_dcp.py",
        "story/framework_ranks.py",
        "story/test_exact_restart.py",
        "story/test_other_frameworks.py",
        "story/test_shell_example.py",
        "slurm/test_torchrun_on_slurm.py",
        "unit/test_recovery_benchmark.py",
        "unit/test_replica_benchmark.py",
        "story/test_replica_training.py",
        "story/test_jax_loop.py",
        "slurm/test_replica_examples.py",
    )
    here = "".join((ROOT / "tests" / name).read_text() for name in ("story/test_manual_typed.py", *others))
    names = {block.marks["run"] for block in marked("run")}
    assert {name for name in names if f'"{name}"' not in here} == set()


@pytest.mark.fault("The newcomer has no mail server", "the three steps of the README write messages to a file")
def test_three_steps_lead_to_a_supervised_run(begin: Callable[..., Story]) -> None:
    """As they stand, with no mail server anywhere; the run is long enough to be watched."""
    story = begin("first")
    began = time.monotonic()
    story.tell()
    messages = story.place / "messages.txt"
    story.until(lambda: "STARTED" in messages.read_text(), "the message that it has started")
    story.until(lambda: list((story.run / "checkpoints").glob("step-*")), "the checkpoint that was asked for")
    assert not (story.run / "state" / "finished").exists() and time.monotonic() - began < 300
    last = int(re.findall(r"^LAST = (\d+)", (story.place / "train.py").read_text(), re.M)[0])
    assert last * 0.1 >= 300, "somebody who reads on for five minutes still finds it running"
    entries = {path.name for path in story.run.iterdir()}
    (tree,) = marked("same", "run-directory")
    assert {name for name in entries if f"  {name}" not in tree.text} == set()


def test_a_damaged_checkpoint_is_passed_over_as_the_page_shows(begin: Callable[..., Story]) -> None:
    begin("latest").tell()


def test_the_line_for_mail_works_when_its_mark_is_taken_away(launched: Callable[[str], Story]) -> None:
    with MailServer() as mail:
        story = launched("first")
        config = story.place / "ftsupervise.yaml"
        line = "#   - email: {host: mail.example.org"
        assert line in config.read_text()
        config.write_text(config.read_text().replace(line, f"    - email: {{host: 127.0.0.1, port: {mail.port}"))
        story.type(["ftsupervise notify test"], strict=True)
        assert [str(one["To"]) for one in mail.mails] == ["ada@example.org"]
        assert (story.place / "messages.txt").read_text().count("\n") >= 1


def test_the_switches_do_what_the_manual_says(launched: Callable[[str], Story]) -> None:
    story = launched("switches")
    story.type(["ftsupervise launch"], strict=True)
    story.until(story.trains, "the run to train")
    story.tell()


def test_a_notebook_does_with_a_run_what_the_manual_shows(launched: Callable[[str], Story]) -> None:
    launched("python").tell()


def test_the_page_for_beginners_leads_from_a_check_to_a_run_that_goes_on(launched: Callable[[str], Story]) -> None:
    story = launched("started")
    story.tell()
    attempts = story.run / "attempts"
    story.until(lambda: len(list(attempts.glob("[0-9]*"))) >= 2, "the attempt after the stop")


@pytest.mark.parametrize("name", ["dry", "local", "sbatch"])
def test_a_launch_prints_what_the_manual_shows(launched: Callable[[str], Story], name: str) -> None:
    launched(name).tell()


def test_a_job_of_ones_own_is_supervised_by_one_line(launched: Callable[[str], Story]) -> None:
    story = launched("by-hand")
    train = story.place / "train.py"
    train.write_text(train.read_text().replace("sleep(0.1)", "sleep(0.001)"))
    story.tell()
    assert (story.place / "runs" / "by-hand" / "state" / "finished").exists()


def test_mistakes_in_the_settings_are_told_as_shown(begin: Callable[..., Story]) -> None:
    story = begin("errors")
    shown, _ = marked("run", "errors")
    text = shown.text.partition("$ cat ftsupervise.yaml\n")[2].partition("$ ")[0]
    (story.place / "ftsupervise.yaml").write_text(text)
    story.tell()
    assert (story.place / "ftsupervise.schema.json").stat().st_size > 1000


def test_an_error_is_told_to_a_program_as_shown(begin: Callable[..., Story]) -> None:
    begin("asked").tell()


def test_the_example_is_run_as_its_page_says(tmp_path: Path) -> None:
    story = Story("minimal", tmp_path / "minimal", dict(os.environ))
    story.run_name = "digits"
    story.place.rmdir()
    copy_of("examples/minimal", story.place)
    for name in ("train.py", "ftsupervise.yaml"):
        path = story.place / name
        text = path.read_text().replace("--step-time 0.05", "--step-time 0.001").replace("=0.02", "=0.001")
        path.write_text(text.replace("--steps 2000", "--steps 200000"))
    config = story.place / "ftsupervise.yaml"
    config.write_text(config.read_text() + "scheduler: local\n")
    try:
        story.tell()
    finally:
        story.close()


# ---------------------------------------------------------------------------------------------------------- python


def test_the_guard_s_block_runs_in_a_loop_that_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    saved: list[int] = []
    names: dict[str, Any] = {"first": 1, "last": 2000, "train": lambda step: None, "save": saved.append}
    for block in marked("run", "guard"):
        exec(compile(block.text, str(block), "exec"), {**names, "evaluate": lambda: None})
        assert (tmp_path / "state" / "finished").exists() and not saved
        (tmp_path / "state" / "finished").unlink()


def test_the_loop_that_gives_its_loss_leaves_unsaved_when_it_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FTSUPERVISE_GUARD_LOSS_NONFINITE", "resume")
    (block,) = marked("run", "loss")
    batches = Batches()
    never: list[Path] = []
    names = {"load": never.append, "loader": batches, "last": 50, "save": never.append}
    exec(compile(block.text, str(block), "exec"), {**names, "train": lambda step, batch: batch})
    assert batches.at == 33 and not batches.skipped and not never
    assert not (tmp_path / "state" / "finished").exists()


class Batches:
    """A loader whose batch 33 makes the loss no number."""

    at = skipped = 0

    def skip(self, count: int) -> None:
        self.skipped += count

    def __next__(self) -> float:
        self.at += 1
        return float("nan") if self.at == 33 else 1.0


def test_the_vote_over_ranks_is_taken_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI need not be there: what stands in for it is one rank's allreduce beside another rank that says SAVE."""
    other = int(Decision.SAVE) << 4 | 1
    mpi = types.ModuleType("mpi4py")
    world = types.SimpleNamespace(allreduce=lambda vote, op: op(vote, other))
    mpi.MPI = types.SimpleNamespace(COMM_WORLD=world, MAX=max)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", mpi)
    (block,) = marked("run", "agree")
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    guard = names["guard"]
    assert isinstance(guard, Guard)
    decisions = [guard.step(step) for step in range(1, 21)]
    guard.close()
    assert [step for step, decision in enumerate(decisions, 1) if decision.save] == [10, 20]


def test_the_loops_with_snapshots_run_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    for place in (root, node_folder(root)):
        Path(place).mkdir(mode=0o700)
    monkeypatch.setenv("FTSUPERVISE_SNAPSHOTS", root)
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (loop,), (warm,), (folder,) = marked("run", "snapshots"), marked("run", "warm-up"), marked("run", "snapshot-folder")
    state: dict[str, Any] = {name: {"weights": [1.5]} for name in ("model", "optimizer", "schedule", "place")}
    try:
        names = {**state, "last": 50, "load_checkpoint": lambda: 0, "train": lambda step: time.sleep(0.002)}
        exec(compile(loop.text, str(loop), "exec"), names)
        assert names["start"] == 0 and not list(Path(node_folder(root)).iterdir())
        names = {**state, "guard": Guard(), "batch": 1}
        exec(compile(warm.text, str(warm), "exec"), names)
        assert names["start"] is None
        saved: list[Path] = []
        names = {**names, "last": 50, "train": lambda step: time.sleep(0.01), "save": saved.append}
        exec(compile(folder.text, str(folder), "exec"), names)
        assert saved
    finally:
        shutil.rmtree(root)


def test_the_watchdog_in_contributing_finds_what_it_looks_for(tmp_path: Path) -> None:
    (block,) = marked("run", "watchdog")
    module = types.ModuleType("readme")
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    run = loads("name: first\nlaunch: {command: 'true'}")
    look = Look(
        run=run, rundir=RunDir(tmp_path), now=datetime(2026, 11, 21, tzinfo=timezone.utc), jobs=(), watchdog="readme"
    )
    (gone,) = module.__dict__["check"](look, None)
    (tmp_path / "README").touch()
    (there,) = module.__dict__["check"](look, None)
    assert isinstance(gone, Finding) and gone.health is Health.BAD and there.health is Health.OK
    assert gone.look == f"ls {tmp_path}"


def test_pip_install_makes_a_command_that_has_all_its_files(tmp_path: Path) -> None:
    """``pip install .`` word for word, in an environment that borrows the libraries of this one."""
    import shutil
    import subprocess
    import sysconfig
    import venv

    venv.create(tmp_path / "venv", with_pip=False)
    borrowed = sysconfig.get_path("purelib")
    python = str(tmp_path / "venv" / "bin" / "python")
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    (site / "borrowed.pth").write_text(borrowed + "\n")
    wanted = ("ftsupervise", "templates", "cron", "pyproject.toml", "README.md", "LICENSE")
    (tmp_path / "clone").mkdir()
    for name in wanted:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tmp_path / "clone" / name)
    line, with_extra = (block.text.strip() for block in marked("run", "install"))
    assert line == "pip install ." and with_extra == "pip install '.[demo]'"
    # Nothing is fetched: the libraries are there already, and setuptools is borrowed too.
    words = [python, "-m", *line.split(), "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(words, cwd=tmp_path / "clone", check=True, timeout=180, env=env)
    story = Story("install", tmp_path / "first", {**os.environ})
    story.env["PATH"] = f"{tmp_path}/venv/bin:{os.environ['PATH']}"
    for one in marked("run", "first"):
        if "file" in one.marks:
            story.write(one)
    where, version, script = story.type(
        [
            "python -c 'import ftsupervise, ftsupervise.cli.run, ftsupervise.report.metrics; print(ftsupervise.__file__)'",
            "ftsupervise --version",
            "ftsupervise launch --dry-run --scheduler slurm",
        ],
        strict=True,
    )
    assert where.startswith(str(site)) and version.startswith("ftsupervise 0.")
    assert "#SBATCH --job-name=first" in script
