"""Two runs that save into one folder: neither goes on from the other's checkpoints, removes or replaces them, unless a person
said that it takes them over."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftsupervise import Guard
from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.checkpoints.find import names_of_other_runs, sizes_back
from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.checkpoints.verify import verify
from ftsupervise.cli import ftsupervise
from ftsupervise.rundir.lineage import Belongs, belongs, keep_lineage, read_lineage
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed


class Runs:
    """Runs whose settings name one folder for checkpoints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.shared, self.patch = folder, folder / "shared", monkeypatch

    def rundir(self, name: str) -> RunDir:
        root = self.folder / "runs" / name
        if not root.is_dir():
            (root / "switches").mkdir(parents=True)
            checkpoints = f"{{path: {self.shared}, retain: {{last: 2}}, adopt: true}}"
            text = f"name: {name}\nscheduler: local\nlaunch: {{command: 'true', jobs: 1}}\ncheckpoints: {checkpoints}\n"
            (root / "run.yaml").write_text(f"{text}run_dir: {root}\n")
            (self.folder / f"{name}.yaml").write_text(f"{text}run_dir: {root}\n")
            keep_lineage(RunDir(root), name)
        return RunDir(root)

    def guard(self, name: str) -> Guard:
        self.patch.setenv("FTSUPERVISE_RUN_DIR", str(self.rundir(name).root))
        self.patch.setenv("FTSUPERVISE_RUN", name)
        self.patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(self.shared))
        return Guard(signals=(), rank=0, world=1)

    def save(self, name: str, *steps: int) -> None:
        with self.guard(name) as guard:
            for step in steps:
                with guard.checkpoint(step) as at:
                    (at / "weights").write_bytes(f"{name} {step}".encode() * 100)

    def latest(self, name: str) -> str | None:
        with self.guard(name) as guard:
            found = guard.latest()
        return None if found is None else found.name

    def type_it(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(ftsupervise, ["checkpoints", *words])
        assert getattr(done.exception, "exit_code", done.exit_code) == code, f"{done.output}\n{done.exception!r}"
        return f"{done.output}\n{done.exception}"

    def there(self) -> list[int]:
        return sorted(
            int(one.name.removeprefix("step-")) for one in self.shared.iterdir() if one.name.startswith("step-")
        )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, monkeypatch)


@pytest.mark.resume(
    "`prune` or `upkeep` of one of two runs in a folder",
    "all of the other run's",
    'prune: "run a (/runs/a) wrote it, and only that run removes it"',
)
def test_prune_of_one_run_leaves_the_checkpoints_of_another_in_the_same_folder(runs: Runs) -> None:
    runs.save("a", 10, 20, 30)
    runs.save("b", 1, 2, 3, 40)
    shown = runs.type_it("prune", str(runs.rundir("b").root))
    assert runs.there() == [3, 10, 20, 30, 40]
    assert "step-00000030: run a (" in shown and "wrote it, and only that run removes it" in shown
    runs.type_it("upkeep", str(runs.rundir("a").root))
    assert runs.there() == [3, 20, 30, 40]


def test_a_folder_of_several_runs_is_not_pruned_before_one_of_them_is_named(runs: Runs) -> None:
    runs.save("a", 10, 20, 30)
    runs.save("b", 40, 50, 60)
    assert "holds checkpoints of 2 runs" in runs.type_it("prune", str(runs.shared), "--last", "2", code=75)
    assert runs.there() == [10, 20, 30, 40, 50, 60]
    shown = runs.type_it("list", str(runs.shared))
    assert "of run a (" in shown and "of run b (" in shown


@pytest.mark.resume(
    "the other run began to save while this one ran",
    "the newest of its own",
    '"step-00000020 is another run\'s: run a (/runs/a) wrote it; it is passed over"',
)
def test_a_second_run_in_the_folder_does_not_go_on_from_what_the_first_one_saved(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.save("a", 10, 20)
    assert runs.latest("b") is None
    assert "step-00000020 is another run's: run a (" in capfd.readouterr().err
    runs.save("b", 5)
    assert (runs.latest("b"), runs.latest("a")) == ("step-00000005", "step-00000020")


@pytest.mark.resume(
    "two runs save the same step into one folder",
    "the first one's stays",
    'the second one\'s save raises: it "is a checkpoint of run a, and stays"',
)
def test_a_checkpoint_of_another_run_is_neither_replaced_nor_removed_by_the_loop(runs: Runs) -> None:
    runs.save("a", 10)
    with pytest.raises(FileExistsError, match="is a checkpoint of run a"):
        runs.save("b", 10)
    with runs.guard("b") as guard, pytest.raises(FileExistsError, match="is a checkpoint of run a"):
        guard.remove(runs.shared / "step-00000010")
    assert (runs.shared / "step-00000010/weights").read_bytes().startswith(b"a 10")


@pytest.mark.resume("the run directory was moved", "the newest, as before", "nothing")
@pytest.mark.resume(
    "the run directory was deleted or moved, and its run is launched anew in its place, with the checkpoints elsewhere",
    "nothing before `launch --take-over`",
    "launch refuses: … its directory lay here before, and was moved or deleted",
)
def test_a_run_whose_directory_was_moved_keeps_its_checkpoints_and_a_new_one_in_its_place_does_not_take_them(
    runs: Runs,
) -> None:
    runs.save("a", 10)
    root = runs.rundir("a").root
    moved = root.rename(root.with_name("elsewhere"))
    assert runs.latest("a") is None, "the run that was moved may still train"
    runs.patch.setenv("FTSUPERVISE_RUN_DIR", str(moved))
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() == runs.shared / "step-00000010"
    refused = typed("launch", "a.yaml", folder=runs.folder)
    assert refused.returncode == 75 and "its directory lay here before, and was moved or deleted" in refused.stderr
    (root / "run.yaml").unlink()
    assert typed("launch", "a.yaml", "--take-over", "a", folder=runs.folder).returncode == 0
    assert runs.latest("a") == "step-00000010"


@pytest.mark.resume(
    "the run directory was copied (`cp -r`)",
    "in the copy: what was copied with it; of a folder that both name nothing, and it removes none there",
    "launch refuses: … is a copy of that run's directory",
)
def test_a_copy_of_a_run_directory_is_another_run(runs: Runs) -> None:
    runs.save("a", 10, 20, 30)
    first = runs.rundir("a")
    with_it = first.checkpoints / "step-00000030"
    shutil.copytree(runs.shared / with_it.name, with_it)
    shutil.copytree(first.root, root := first.root.with_name("copy"))
    (root / "run.yaml").write_text((root / "run.yaml").read_text().replace(str(first.root), str(root)))
    (runs.folder / "copy.yaml").write_text((root / "run.yaml").read_text())
    runs.type_it("prune", str(root))
    assert runs.there() == [10, 20, 30]
    refused = typed("launch", "copy.yaml", folder=runs.folder)
    assert refused.returncode == 75 and f"{root} is a copy of that run's directory" in refused.stderr
    assert "--take-over a" in refused.stderr
    seen, kept = read_lineage(RunDir(root)), keep_lineage(RunDir(root), "a")
    assert seen.id == kept.id == read_lineage(RunDir(root)).id != read_lineage(first).id
    head = read_manifest(with_it)
    assert belongs(kept, head, root / "checkpoints") is Belongs.OURS, "what was copied with it is its own"
    assert belongs(kept, head, runs.shared) is Belongs.ANOTHERS
    moved = root.rename(root.with_name("later"))
    assert keep_lineage(RunDir(moved), "a").id == kept.id
    runs.type_it("prune", str(first.root))
    assert runs.there() == [20, 30]


def without_an_id(checkpoint: Path, run: str, step: int) -> None:
    """As a version before runs had an id wrote it."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * 1000)
    commit(checkpoint, Origin(step=step, run=run))


@pytest.mark.resume(
    "a manifest was written before runs had an id",
    "it counts as the run's of that name",
    "prune keeps it where another run saves too, and says so",
)
def test_a_manifest_of_before_runs_had_an_id_is_known_by_the_name_of_its_run(runs: Runs) -> None:
    for step in (1, 2, 3):
        without_an_id(runs.shared / f"step-{step:08d}", "a", step)
    assert (runs.latest("a"), runs.latest("b")) == ("step-00000003", None)
    runs.type_it("prune", str(runs.rundir("a").root))
    assert runs.there() == [2, 3]
    runs.save("b", 50)
    runs.type_it("prune", str(runs.rundir("a").root))
    without_an_id(runs.shared / "step-00000001", "a", 1)
    assert "another run has saved here" in runs.type_it("prune", str(runs.rundir("a").root))
    assert runs.there() == [1, 2, 3, 50], "only its name says that it is this run's: where another one saves, it stays"


@pytest.mark.resume(
    "another run has saved in the same `checkpoints.path`",
    "nothing of the other's: the newest of its own, or it begins anew in a folder of its own",
    'launch and the job refuse the folder: "holds checkpoints of another run: run a (/runs/a)", and how to take over',
)
def test_launch_refuses_the_folder_of_another_run_and_takes_over_on_a_word_that_is_written_down(runs: Runs) -> None:
    runs.save("a", 10, 20, 30)
    runs.rundir("b")
    refused = typed("launch", "b.yaml", folder=runs.folder)
    assert refused.returncode == 75 and "holds checkpoints of another run: run a (" in refused.stderr
    assert "--take-over a" in refused.stderr and not (runs.rundir("b").launches).exists()
    assert "launch would refuse at present" in typed("launch", "--dry-run", "b.yaml", folder=runs.folder).stderr
    assert typed("launch", "b.yaml", "--take-over", "c", folder=runs.folder).returncode != 0
    root = runs.rundir("b").root
    (root / "run.yaml").unlink()
    done = typed("launch", "b.yaml", "--take-over", "a", folder=runs.folder)
    assert done.returncode == 0, done.stderr
    assert [one.name for one in read_lineage(runs.rundir("b")).taken] == ["a"]
    assert runs.latest("b") == "step-00000030"
    runs.save("b", 40, 50, 60)
    assert "taken over from run a" in runs.type_it("list", str(root))
    runs.type_it("prune", str(root))
    assert runs.there() == [10, 20, 30, 50, 60], "what was taken over is not removed"


@pytest.mark.resume(
    "a job starts where only another run has saved",
    "nothing: the command is not started",
    "the job's log says whose they are, and how to take over",
)
def test_a_job_that_finds_the_checkpoints_of_another_run_does_not_begin(runs: Runs, run: SupervisedRun) -> None:
    runs.save("a", 10)
    member = run.start("true", FTSUPERVISE_CHECKPOINT_DIR=str(runs.shared))
    assert member.wait(60) == 75
    assert "holds checkpoints of another run: run a (" in member.said() and not run.attempts()


def test_the_watchdog_looks_past_the_checkpoints_of_another_run(runs: Runs) -> None:
    runs.save("a", 100)
    runs.save("b", 7)
    root = str(runs.rundir("b").root)
    assert [Path(path).name for path, *_ in sizes_back(str(runs.shared), "*", root)] == ["step-00000007"]
    assert names_of_other_runs(str(runs.shared), "*", root, ()) == ["step-00000100"]


def test_what_another_program_completed_is_adopted_for_its_run_unless_another_run_saves_there(runs: Runs) -> None:
    def lightning(name: str) -> Path:
        path = runs.shared / name
        path.write_bytes(b"PK\x03\x04" + b"w" * 100 + b"PK\x05\x06" + bytes(18))
        return path

    runs.shared.mkdir()
    first, me = lightning("epoch=1-step=1.ckpt"), runs.rundir("a")
    runs.type_it("upkeep", str(me.root))
    made = read_manifest(first)
    assert made is not None and (made.run, made.run_id) == ("a", read_lineage(me).id)
    runs.save("b", 5)
    second = lightning("epoch=1-step=9.ckpt")
    runs.type_it("upkeep", str(me.root))
    made = read_manifest(second)
    assert made is not None and (made.run, made.run_id) == ("", "") and verify(second).good


def test_two_that_give_a_run_its_id_at_once_give_it_one(runs: Runs, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "new")
    readers = []
    for _ in range(8):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writer, keep_lineage(rundir, "n").id.encode())
            os._exit(0)
        os.close(writer)
        readers.append((child, reader))
    found = set()
    for child, reader in readers:
        os.waitpid(child, 0)
        found.add(os.read(reader, 100))
        os.close(reader)
    assert found == {read_lineage(rundir).id.encode()} and json.loads(rundir.lineage.read_text())["names"] == ["n"]
