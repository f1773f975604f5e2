"""Lightning, the Trainer of Hugging Face and Accelerate: stopped and gone on with, killed and started again, on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.rundir.fence import open_area, seal
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import ROOT
from tests.neighbours.supervised import outside_a_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
BIN = Path(sys.executable).parent
NAMES = ("lightning", "huggingface", "accelerate")
RANKS = Path(__file__).with_name("framework_ranks.py")
STEPS = 30  # two epochs of the examples on two ranks


def environment(**more: str) -> dict[str, str]:
    """Without a GPU: NCCL does not take two ranks to one."""
    own = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return outside_a_job(**own, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **more)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which ``framework_ranks.py`` has run all three on two ranks."""
    folder = tmp_path_factory.mktemp("frameworks")
    words = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(RANKS), str(folder), *NAMES]
    env = environment(FTSUPERVISE_GUARD_POLL="0.05")
    done = subprocess.run(words, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_stopped_goes_on_to_the_bits_of_an_undisturbed_one(played: Path, name: str) -> None:
    alone, stopped, again, older = json.loads((played / "said.json").read_text())[name]
    found = re.search(r"^stopped \(kill switch.*\) at step (\d+), ", stopped, re.M)
    assert found and 7 <= int(found[1]) < STEPS, stopped
    assert ending(again) == ending(older) == ending(alone)
    run = RunDir(played / name / "again" / "run")
    assert run.finished.exists()
    assert {beat.facts["stop"] for beat in read_beats(run) if "stop" in beat.facts} <= {"kill switch"}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_framework_saved_is_found_with_its_manifest_and_the_oldest_go(played: Path, name: str) -> None:
    found = checkpoints_in(played / name / "alone" / "checkpoints")
    verdicts = [verify(one.path, Scope(Thoroughness.FULL)) for one in found]
    assert [(one.state, one.manifest, one.world) for one in verdicts] == [(CheckpointState.VERIFIED, True, 2)] * 3
    assert [one.step for one in verdicts] == ([30, 28, 21] if name == "huggingface" else [28, 21, 14])


def test_the_best_checkpoint_is_known_by_the_name_that_it_keeps(played: Path) -> None:
    found = checkpoints_in(played / "huggingface" / "best" / "checkpoints")
    assert len(found) == 2 and verify(found[0].path, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    state = json.loads((found[0].path / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(found[0].path)


def test_each_rank_has_saved_its_part(played: Path) -> None:
    places = (
        played / "huggingface" / "alone" / "checkpoints" / "checkpoint-28",
        played / "accelerate" / "alone" / "checkpoints",
    )
    assert {f"rng_state_{rank}.pth" for rank in (0, 1)} <= {path.name for path in places[0].iterdir()}
    newest = places[1] / "step-00000028"
    assert {f"random_states_{rank}.pkl" for rank in (0, 1)} <= {path.name for path in newest.iterdir()}


def test_a_rank_that_is_killed_costs_no_bit(tmp_path: Path, until: Until) -> None:
    """The cheapest of the three to start; the others are killed on Slurm, in the long tests."""
    shutil.copy(ROOT / "examples" / "accelerate" / "train.py", tmp_path)
    words = "train.py --epochs 6 --save-every 7"
    (tmp_path / "ftsupervise.yaml").write_text(
        f"name: killed\nscheduler: local\nlaunch:\n  command: torchrun --nproc-per-node 2 {words} --step-time 0.02\n"
        "  jobs: 1\n  restart: {back_off: 1s}\n"
    )
    launch = [str(BIN / "ftsupervise"), "launch"]
    subprocess.run(launch, cwd=tmp_path, env=environment(), check=True, timeout=60, stdout=subprocess.DEVNULL)
    run = RunDir(tmp_path / "runs" / "killed")
    (tmp_path / "alone").mkdir()
    by_itself = [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node=2",
        str(tmp_path / words.split()[0]),
        *words.split()[1:],
    ]
    alone = subprocess.Popen(
        [*by_itself, "--step-time", "0"], cwd=tmp_path / "alone", env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(list(run.checkpoints.glob("step-*"))) >= 2, "the second checkpoint", 120)
        os.kill(next(beat.pid for beat in read_beats(run) if beat.rank == 1), signal.SIGKILL)
        until(lambda: "ended: finished" in log(run), "the end", 120)
        undisturbed = alone.communicate(timeout=120)[0]
    finally:
        (run.switches / "kill-switch").touch()
        alone.kill()
    assert "killed by SIGKILL" in log(run)
    assert ending(log(run)) == ending(undisturbed)


def test_an_attempt_that_is_over_commits_nothing_and_stops(tmp_path: Path, until: Until) -> None:
    run, areas = RunDir(tmp_path / "run"), tmp_path / "areas"
    for folder in (run.switches, run.beats, run.checkpoints, run.attempt(1)):
        folder.mkdir(parents=True)
    env = environment(
        FTSUPERVISE_RUN_DIR=str(run.root),
        FTSUPERVISE_ATTEMPT="1",
        FTSUPERVISE_ATTEMPT_DIR=str(run.attempt(1)),
        FTSUPERVISE_STAGING=str(open_area(areas, 1)),
        FTSUPERVISE_CHECKPOINT_DIR=str(run.checkpoints),
        FTSUPERVISE_GUARD_POLL="0.05",
    )
    program = str(ROOT / "examples" / "accelerate" / "train.py")
    words = [sys.executable, program, "--save-every", "2", "--epochs", "1000"]
    alone = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: list(run.checkpoints.glob("step-*")), "the first checkpoint", 120)
        seal(areas, 2, (1,))
        run.attempt(2).mkdir()
        there = set(run.checkpoints.glob("step-*"))
        said = alone.communicate(timeout=120)[0]
    finally:
        alone.kill()
    assert re.search(r"^stopped \(superseded", said, re.M), said
    assert set(run.checkpoints.glob("step-*")) == there
    assert not run.finished.exists()


@pytest.mark.parametrize("name", NAMES)
def test_without_the_framework_the_import_says_what_to_install(name: str) -> None:
    """As in an environment without it: no site-packages, and so no torch either."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ftsupervise.integrations.{name}"
    done = subprocess.run([sys.executable, "-S", "-c", code], check=False, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"ImportError: .* needs (\S+), which is not installed here: pip install \1", last), done.stderr


def log(run: RunDir) -> str:
    return "".join(path.read_text() for path in sorted(run.logs.rglob("*")) if path.is_file())


def ending(text: str) -> str:
    """The last line of an example: its step and the digest of its weights."""
    found = re.findall(r"^finished at step \d+, weights \w+", text, re.M)
    assert len(found) == 1, text
    return str(found[0])
