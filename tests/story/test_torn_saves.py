"""A program that loads by rules of its own is killed while it saves: the torn checkpoint ends no good run."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.quarantine import quarantined, set_aside
from ftsupervise.checkpoints.torn import Torn, find_torn
from ftsupervise.checkpoints.verify import CheckpointState, verify
from ftsupervise.checkpoints.written import is_own
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake, read_finished
from ftsupervise.scheduler.local import Local
from tests.neighbours.hdf5_files import NEW_CLOSED, NEW_KILLED, OLD_CLOSED, OLD_KILLED
from tests.neighbours.own_loader import CUT, trainer
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

Until = Callable[..., Any]
Launch = Callable[..., RunDir]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """``launch(program, deaths, more)``: a chain of local jobs that runs it. ``more``: of the settings."""
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))

    def one(program: str, deaths: tuple[str, ...], more: str = "", resume: str = "") -> RunDir:
        (tmp_path / "train.py").write_text(program)
        (tmp_path / "deaths").write_text("\n".join(deaths))
        (tmp_path / "ftsupervise.yaml").write_text(
            f'name: own\nscheduler: local\nlaunch:\n  command: {sys.executable} train.py\n  jobs: 3\n  finished_by: "exit 0"\n'
            f"  restart: {{back_off: 0s}}\n  resume: {json.dumps(resume)}\n{more}"
        )
        typed("launch", folder=tmp_path, env=env(tmp_path), code=0)
        return RunDir(tmp_path / "runs" / "own")

    yield one
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def env(folder: Path) -> dict[str, str]:
    return outside_a_job(FTSUPERVISE_STATE_DIR=str(folder / "state"))


def says(rundir: RunDir, attempt: int) -> str:
    return (rundir.attempt(attempt) / "run.log").read_text()


def output(rundir: RunDir) -> str:
    return "".join(path.read_text() for path in sorted(rundir.logs.glob("*.out")))


@pytest.mark.chain(
    "A program that loads by rules of its own is killed while it saves",
    "The torn checkpoint is set aside before the next attempt, and its loader takes the one before",
    "none",
    "`checkpoint-10 is torn`, what is done about it, and how to undo it",
)
@pytest.mark.resume(
    "Hugging Face's Trainer, or a program that saves as it does, is killed in the middle of a save, at any place",
    "the newest whole one: the torn one is set aside before the next attempt, and its own loader finds the one before",
    "log, `status`, a *damaged* event: checkpoint-10 is torn: …; it is set aside; to bring it back: mv …",
)
def test_a_save_that_is_cut_off_anywhere_costs_no_attempt_and_what_it_left_is_set_aside(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(trainer(200), (*CUT, "end"))
    until(lambda: read_finished(rundir) or read_brake(rundir), "the end of the run", 240)
    attempts = ledger(rundir)
    assert read_brake(rundir) is None
    assert len(attempts) == len(CUT) + 2, [one.words for one in attempts]
    began = list(map(int, re.findall(r"^begins behind (\d+)", output(rundir), re.M)))
    assert began == [5 * at for at in range(len(CUT) + 1)] + [5 * len(CUT) + 10], "the last but one had saved whole"
    aside = quarantined(tmp_path / "out")
    assert len(aside) == len(CUT)
    first, second = says(rundir, 2), says(rundir, 3)
    assert "checkpoint-10 is torn: trainer_state.json is missing" in first
    assert "attempt 1 ended while it was saved; checkpoint-5 is the newest whole one; it is set aside" in first
    assert "checkpoint-15 is torn" in second
    back = first.partition("to bring it back: ")[2].split("\n")[0]
    assert back == f"mv -T {tmp_path}/out/.quarantine/checkpoint-10 {tmp_path}/out/checkpoint-10"
    shown = typed("checkpoints", "list", folder=tmp_path, env=env(tmp_path), code=0).stdout
    assert f"set aside: {tmp_path}/out/.quarantine/checkpoint-10, because checkpoint-10 is torn: " in shown


@pytest.mark.resume(
    "The same, where `checkpoints.torn` says tell",
    "nothing before a person has acted: the program crashes on it",
    "the brake: none came as far as a step, and …/checkpoint-10 is what it loads; `checkpoints set-aside`",
)
def test_where_it_is_only_told_the_brake_names_the_checkpoint_and_the_command_that_sets_it_aside(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(trainer(40), ("model",), "checkpoints: {torn: tell}\n")
    brake = until(lambda: read_brake(rundir), "the brake", 120)
    torn = tmp_path / "out/checkpoint-10"
    assert torn.is_dir() and brake.loads == str(torn)
    typing = f"where it crashes on checkpoint-10: ftsupervise checkpoints set-aside {torn}; fix the cause, then: "
    seen = typed("status", ".", folder=tmp_path, env=env(tmp_path)).stdout
    assert typing in says(rundir, brake.attempt) and "checkpoints.torn says tell" in seen, seen
    assert f"none came as far as a step, and {torn} is what it loads" in brake.words()
    first, then = (f"ftsupervise {one}" for one in (f"checkpoints set-aside {torn}   (where it", "clear --brake"))
    assert first in seen and then in seen.partition(first)[2].partition("\n")[2], seen
    told = json.loads(typed("check", "brake", "--json", folder=tmp_path, env=env(tmp_path)).stdout)
    (alert,) = (one for one in told["findings"] if one["watchdog"] == "brake" and one["health"] == "bad")
    assert (
        alert["do"] == typing.replace("fix the cause", "fix what failed") + f"ftsupervise clear --brake {rundir.root}"
    )
    diagnosed = typed("diagnose", folder=tmp_path, env=env(tmp_path)).stdout
    assert typing.partition(";")[0] in " ".join(diagnosed.split()), diagnosed
    page = tmp_path / "report.html"
    typed("report", "--output", page, folder=tmp_path, env=env(tmp_path), code=0)
    assert typing.partition(";")[0][1:] in page.read_text()
    typed("checkpoints", "set-aside", torn, folder=tmp_path, env=env(tmp_path), code=0)
    typed("clear", "--brake", folder=tmp_path, env=env(tmp_path), code=0)
    until(lambda: read_finished(rundir), "the end of the run", 120)
    assert output(rundir).rpartition("begins behind ")[2].split()[0] == "5"


@pytest.mark.resume(
    "The same, while *going_back* is only told",
    "as the row before",
    "would have set checkpoint-10 aside: …",
)
def test_while_going_back_is_only_told_it_stays_and_what_would_have_been_done_is_told(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(trainer(40), ("model",), "act: {going_back: observe}\n")
    until(lambda: read_brake(rundir), "the brake", 120)
    assert (tmp_path / "out/checkpoint-10").is_dir() and not quarantined(tmp_path / "out")
    told = ledger(rundir)[1].observed
    assert [one.decision for one in told] == ["going_back"]
    assert told[0].words().startswith(f"would have set checkpoint-10 aside: {tmp_path}/out/checkpoint-10: ")
    assert "checkpoint-5 is the newest whole one" in told[0].why


@pytest.mark.chain(
    "A program crashes on its newest checkpoint before its first step, though it is whole",
    "After the third time the brake comes on, and the rest is held",
    "1 to 3",
    "The brake alert: none came as far as a step, which checkpoint it loads, and the command that sets it aside",
)
def test_a_loader_that_crashes_on_a_whole_checkpoint_leaves_it_there_and_the_brake_names_it(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    program = trainer(40).replace('"incomplete metadata"', '"?"').replace("    zipfile", "    0 / 0\n    zipfile")
    rundir = launch(program, ("end",))
    brake = until(lambda: read_brake(rundir), "the brake", 120)
    assert brake.loads == str(tmp_path / "out/checkpoint-10")
    assert not quarantined(tmp_path / "out") and "is torn" not in says(rundir, 2)
    assert "ZeroDivisionError" in brake.detail


@pytest.mark.resume(
    "The first save of all is cut off",
    "nothing before a person has acted: there is no other to take",
    "… no whole one of its kind lies beside it; it stays",
)
def test_a_first_save_that_is_cut_off_stays_because_the_loader_has_no_other(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(trainer(40).replace("saves == 2", "saves == 1"), ("weights",))
    until(lambda: read_brake(rundir), "the brake", 120)
    assert (tmp_path / "out/checkpoint-5").is_dir()
    assert "checkpoint-5 is torn: model.safetensors has " in says(rundir, 2)
    assert "no whole one of its kind lies beside it; it stays: its loader has no other to take" in says(rundir, 2)


# ------------------------------------------------------------------------------------------------------ what is known of whom


def archive(path: Path, *, whole: bool = True) -> None:
    """A file as torch.save makes it; or one whose end was never written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", bytes(9000))
    if not whole:
        os.truncate(path, 5000)


def accelerate(folder: Path, *, states: bool = True) -> None:
    for name in ("optimizer.bin", "scheduler.bin"):
        archive(folder / name)
    if states:
        (folder / "random_states_0.pkl").write_bytes(b"x")


def dcp(folder: Path, *, whole: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    if whole:
        (folder / ".metadata").write_bytes(b"\x80\x04__0_0.distcp.")


def deepspeed(folder: Path, *, whole: bool = True) -> None:
    archive(folder / "mp_rank_00_model_states.pt", whole=whole)
    archive(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def seen(folder: Path) -> Torn | None:
    found = find_torn([folder], (), is_own)
    assert len(found) < 2, found
    return found[0] if found else None


@pytest.mark.resume(
    "A save of Accelerate, Lightning (`hpc_ckpt_N.ckpt`), torch.save or DCP is cut off",
    "the newest whole one",
    "as in the first of these rows",
)
def test_each_layout_has_its_own_sign_of_a_save_that_was_cut_off(tmp_path: Path) -> None:
    """The older one of each is whole. What a loader takes by its highest number is found, and why it is torn."""
    accelerate(tmp_path / "a/step_50")
    accelerate(tmp_path / "a/step_100", states=False)
    archive(tmp_path / "l/hpc_ckpt_1.ckpt")
    archive(tmp_path / "l/hpc_ckpt_2.ckpt", whole=False)
    archive(tmp_path / "t/checkpoint_0098.pth")
    archive(tmp_path / "t/checkpoint_0099.pth", whole=False)
    dcp(tmp_path / "d/step-100")
    dcp(tmp_path / "d/step-200", whole=False)
    (tmp_path / "e/step-100").mkdir(parents=True)
    dcp(tmp_path / "e/step-90")
    reasons = {
        name: (one.path.name, one.why, one.whole and one.whole.name)
        for name in "altde"
        if (one := seen(tmp_path / name))
    }
    cut = "is cut short: its archive has no end"
    no_metadata = ".metadata is missing: not all ranks have written their part"
    assert reasons == {
        "a": ("step_100", "random_states_0.pkl is missing, which is written last", "step_50"),
        "l": ("hpc_ckpt_2.ckpt", f"it {cut}", "hpc_ckpt_1.ckpt"),
        "t": ("checkpoint_0099.pth", f"it {cut}", "checkpoint_0098.pth"),
        "d": ("step-200", no_metadata, "step-100"),
        "e": ("step-100", no_metadata, "step-90"),
    }


@pytest.mark.resume(
    "A save of DeepSpeed or Megatron is cut off, and its tracker names one",
    "what the tracker names; it is not taken away",
    "the log, where the tracker names the torn one: write the name of the whole one in there",
)
def test_what_a_tracker_names_is_not_taken_away_and_what_it_does_not_name_is_passed_over(tmp_path: Path) -> None:
    deepspeed(tmp_path / "global_step10")
    deepspeed(tmp_path / "global_step20", whole=False)
    (tmp_path / "latest").write_text("global_step10")
    found = seen(tmp_path)
    assert found is not None and found.passed_over and found.named == "global_step10"
    (tmp_path / "latest").write_text("global_step20")
    found = seen(tmp_path)
    assert found is not None and not found.passed_over and found.tracker == "latest"
    assert found.whole == tmp_path / "global_step10"


@pytest.mark.resume(
    "A checkpoint of a layout that is not known lacks files",
    "whatever its program takes: it is not touched",
    "nothing",
)
@pytest.mark.parametrize("names", [("5.txt", "6.txt"), ("weights.bin", "more.bin"), ("a.keras", "b.keras")])
def test_of_a_layout_that_is_not_known_nothing_is_said_however_it_looks(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / "step_10").mkdir(exist_ok=True)
        (tmp_path / "step_10" / name).write_text("all of it")
    (tmp_path / "step_20").mkdir()
    (tmp_path / "step_20" / names[0]).write_text("a part")
    assert seen(tmp_path) is None
    (tmp_path / "step_30").mkdir()
    assert seen(tmp_path) is None


def test_a_layout_without_its_sign_in_any_of_them_is_saved_in_another_way(tmp_path: Path) -> None:
    """Weights alone in folders called checkpoint-N, and a run of DeepSpeed that writes no ``latest``."""
    for step in (10, 20):
        archive(tmp_path / f"checkpoint-{step}/pytorch_model.bin")
        deepspeed(tmp_path / f"global_step{step}")
    assert seen(tmp_path) is None


def test_the_only_file_is_torn_and_has_no_other_to_take_its_place(tmp_path: Path) -> None:
    archive(tmp_path / "out/ckpt.pt", whole=False)
    found = seen(tmp_path)
    assert found is not None and (found.path.name, found.whole) == ("ckpt.pt", None)


def put(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def test_what_keras_was_killed_over_is_torn_by_the_formats_of_its_files(tmp_path: Path) -> None:
    """HDF5 says in its superblock how long the file is, once it is closed; a ``.keras`` is a zip."""
    archive(tmp_path / "k/model_epoch_01.keras")
    archive(tmp_path / "k/model_epoch_02.keras", whole=False)
    put(tmp_path / "o/ckpt-01.weights.h5", OLD_CLOSED)
    put(tmp_path / "o/ckpt-02.weights.h5", OLD_KILLED)
    put(tmp_path / "n/model_epoch_01.h5", NEW_CLOSED)
    put(tmp_path / "n/model_epoch_02.h5", NEW_KILLED)
    put(tmp_path / "c/model_epoch_01.h5", OLD_CLOSED)
    put(tmp_path / "c/model_epoch_02.h5", OLD_CLOSED[:2000])
    found = {name: one for name in "konc" if (one := seen(tmp_path / name)) is not None}
    assert {
        name: (one.path.name, one.why.partition(" ")[2], one.whole and one.whole.name) for name, one in found.items()
    } == {
        "k": ("model_epoch_02.keras", "is cut short: its archive has no end", "model_epoch_01.keras"),
        "o": (
            "ckpt-02.weights.h5",
            f"was not closed: it has {len(OLD_KILLED)} bytes, and its superblock says 2048",
            "ckpt-01.weights.h5",
        ),
        "n": (
            "model_epoch_02.h5",
            f"was not closed: it has {len(NEW_KILLED)} bytes, and its superblock says 2048",
            "model_epoch_01.h5",
        ),
        "c": ("model_epoch_02.h5", f"has 2000 bytes where its superblock says {len(OLD_CLOSED)}", "model_epoch_01.h5"),
    }
    assert verify(tmp_path / "o/ckpt-02.weights.h5").state is CheckpointState.TORN


def test_of_hdf5_that_was_closed_or_says_nothing_nothing_is_said(tmp_path: Path) -> None:
    put(tmp_path / "model_epoch_01.h5", OLD_CLOSED)
    shifted = put(tmp_path / "model_epoch_02.h5", bytes(512) + OLD_KILLED)  # a block of another program before it
    for raw in (shifted.read_bytes(), b"not HDF5 at all", OLD_CLOSED, OLD_CLOSED + b"padding", NEW_CLOSED):
        shifted.write_bytes(raw)
        assert seen(tmp_path) is None, raw[:16]


def test_data_are_no_checkpoint_and_what_keras_backs_up_by_itself_is_left_to_it(tmp_path: Path) -> None:
    put(tmp_path / "data/train.h5", OLD_KILLED)
    assert seen(tmp_path / "data") is None
    weights = put(tmp_path / "backup/latest.weights.h5", OLD_KILLED)
    assert seen(tmp_path / "backup") is not None, "it has no other"
    put(tmp_path / "backup/latest.weights.h5.bkp", OLD_CLOSED)
    assert seen(tmp_path / "backup") is None and weights.read_bytes() == OLD_KILLED


def test_the_quarantine_of_accelerates_own_folder_lies_beside_it_for_its_loader_takes_all_that_lies_in_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    accelerate(folder / "checkpoint_0")
    accelerate(folder / "checkpoint_1", states=False)
    put = set_aside(folder / "checkpoint_1", "it is torn", datetime.now(timezone.utc))
    assert put == tmp_path / ".quarantine/checkpoint_1" and os.listdir(folder) == ["checkpoint_0"]
    assert [(one.name, one.reason, one.was) for one in quarantined(folder)] == [
        ("checkpoint_1", "it is torn", str(folder / "checkpoint_1"))
    ]
    archive(tmp_path / "other/last.ckpt")
    set_aside(tmp_path / "other/last.ckpt", "a file has its reason too", datetime.now(timezone.utc))
    assert [(one.name, one.reason) for one in quarantined(tmp_path / "other")] == [
        ("last.ckpt", "a file has its reason too")
    ]


@pytest.mark.resume(
    "Another program has written what looks torn, while nothing of the run was at work",
    "whatever the program takes: it is not touched",
    "nothing",
)
def test_what_another_program_writes_when_nothing_of_the_run_is_at_work_stays(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    """A person copies a later checkpoint into the folder, from a run of before, while this one stands: its time is another."""
    older = "for one in (*folder.iterdir(), folder): os.utime(one, (9e8, 9e8))"
    program = trainer(40).replace("        os.kill", f"        {older}\n        os.kill")
    rundir = launch(program, ("model",))
    until(lambda: read_brake(rundir), "the brake", 120)
    assert (tmp_path / "out/checkpoint-10").is_dir() and "is torn" not in says(rundir, 2)


TOLD = """
import os, signal, sys, time, zipfile
from pathlib import Path
begun = int(Path(sys.argv[-1]).stem.rpartition("-")[2]) if sys.argv[1:] else 0
print(f"begins behind {begun}", flush=True)
for step in range(begun + 1, begun + 31):
    print(f"iter {step}: loss 3.1, time 80.12ms", flush=True)
    time.sleep(0.05)
    if step % 10 == 0:
        Path("out").mkdir(exist_ok=True)
        with zipfile.ZipFile(f"out/step-{step}.pt", "w") as archive:
            archive.writestr("archive/data.pkl", bytes(9000))
            archive.fp.flush()
            if begun == 0 and step == 30:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.resume(
    "The script is told where to go on from (`launch.resume`), and its newest file is torn",
    "the newest whole one",
    "… is torn",
)
def test_a_script_that_is_told_where_to_go_on_from_is_told_of_the_newest_whole_one(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(TOLD, (), "checkpoints: {torn: tell}\n", resume="--resume {checkpoint}")
    until(lambda: read_finished(rundir) or read_brake(rundir), "the end of the run", 120)
    assert re.findall(r"^begins behind (\d+)", output(rundir), re.M) == ["0", "20"]
    assert "step-30.pt is torn" in says(rundir, 2) and (tmp_path / "out/step-30.pt").is_file()


def test_a_first_save_whose_files_show_no_layout_yet_is_named_by_the_brake(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    """Nothing says that it is torn. What is known is that nothing comes as far as a step where it lies."""
    rundir = launch(trainer(40).replace("saves == 2", "saves == 1"), ("folder",))
    brake = until(lambda: read_brake(rundir), "the brake", 120)
    torn = tmp_path / "out/checkpoint-5"
    assert brake.loads == str(torn) and "is torn" not in says(rundir, 2)
    done = typed("checkpoints", "set-aside", torn, "--reason", "empty", folder=tmp_path, env=env(tmp_path), code=0)
    assert os.listdir(tmp_path / "out") == [], (
        "Hugging Face's examples begin in a folder without a checkpoint if it is empty"
    )
    assert f"mv -T {tmp_path}/.quarantine/checkpoint-5 {torn}" in done.stdout
    typed("clear", "--brake", folder=tmp_path, env=env(tmp_path), code=0)
    until(lambda: read_finished(rundir), "the end of the run", 120)


def test_only_a_checkpoint_is_set_aside_and_no_run_and_no_folder_of_them(tmp_path: Path) -> None:
    archive(tmp_path / "out/checkpoint-5/model.pt")
    archive(tmp_path / "out/checkpoint-6/model.pt")
    done = typed("checkpoints", "set-aside", tmp_path / "out", folder=tmp_path, env=env(tmp_path))
    assert done.returncode and "is no checkpoint" in done.stderr and len(os.listdir(tmp_path / "out")) == 2
    done = typed("checkpoints", "set-aside", tmp_path / "out/checkpoint-7", folder=tmp_path, env=env(tmp_path))
    assert done.returncode == 66, done
    typed("checkpoints", "set-aside", tmp_path / "out/checkpoint-6", folder=tmp_path, env=env(tmp_path), code=0)
    assert sorted(os.listdir(tmp_path / "out")) == [".quarantine", "checkpoint-5"]
