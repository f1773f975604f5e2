"""A script without the guard names a folder into which another account writes too: what lies there is no checkpoint of it.

Real accounts: ``daemon`` trains, ``games`` owns the folder of the data. A checkpoint may be unpickled by who loads it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.checkpoints.written import find_written, keep
from ftsupervise.run.start_over import ScriptPlace
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import LeftCheckpoint
from tests.neighbours.patience import wait_until

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

ADA, EVE = "daemon", "games"
TRAIN = (
    'echo "resume=$FTSUPERVISE_RESUME" >> "$HOME/said"; [ -e "$HOME/first" ] && exit 0; echo step 1; touch "$HOME/first"; '
    'while ! [ -e "$HOME/over" ]; do sleep 0.1; done; exit 3'
)
SETTINGS = """\
name: thesis
scheduler: local
launch: {{command: [sh, -c, '{train}', train, --data, {data}], jobs: 1, resume: "--from {{checkpoint}}",
  restart: {{in_place: 1, back_off: 0s}}}}
watch: {{disk: null, memory: null}}
"""


class Scene:
    """Ada's home, and a folder of eve's that everybody may write, as that of a data set."""

    def __init__(self, top: Path, python: str) -> None:
        self.python = python
        self.home, self.data = top / "home", top / "data"
        for folder, mode, who in ((self.home, 0o755, ADA), (self.data, 0o777, EVE)):
            folder.mkdir()
            shutil.chown(folder, who)
            folder.chmod(mode)
        self.run = self.home / "runs" / "thesis"
        (self.home / "ftsupervise.yaml").write_text(SETTINGS.format(train=TRAIN, data=self.data))
        shutil.chown(self.home / "ftsupervise.yaml", ADA)

    def do(self, who: str, *words: str) -> None:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "FTSUPERVISE_STATE_DIR": str(self.home / "state")}
        group = pwd.getpwnam(who).pw_gid
        done = subprocess.run(
            words, user=who, group=group, extra_groups=[], env=env, cwd=self.home if who == ADA else "/",
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def scene(python: str) -> Iterator[Scene]:
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    yield Scene(top, python)
    wait_until(lambda: _is_removed(top), "the job to leave the folder alone")


def _is_removed(top: Path) -> bool:
    shutil.rmtree(top, ignore_errors=True)
    return not top.exists()


@pytest.mark.threat(
    "Your command names a folder of data into which others write. A stranger lays `model-step-9.pt` there while the "
    "script trains, so that `launch.resume` names it to the next attempt, which unpickles it.",
    "A file of an account that is not trusted in the run directory is no checkpoint of the script. It is neither "
    "kept nor named.",
)
@pytest.mark.parametrize("who", [ADA, EVE])
def test_no_script_is_told_to_go_on_from_a_file_of_a_stranger(scene: Scene, who: str) -> None:
    """A counter-test is in it: what ada's own script wrote there is gone on from."""
    said = scene.home / "said"
    scene.do(ADA, scene.python, "-m", "ftsupervise", "launch", str(scene.home / "ftsupervise.yaml"))
    wait_until(lambda: (scene.home / "first").exists(), "the training")
    planted = scene.data / "model-step-9.pt"
    scene.do(who, "sh", "-c", f"sleep 2.5; echo poison > {planted}")
    scene.do(ADA, "touch", str(scene.home / "over"))
    wait_until(lambda: said.exists() and len(said.read_text().splitlines()) == 2, "the second attempt")
    wait_until(lambda: (scene.run / "attempts" / "0002" / "end.json").exists(), "its end")
    expected = f"--from {planted}" if who == ADA else ""
    assert said.read_text().splitlines() == ["resume=", f"resume={expected}"]
    assert [one.name for one in (scene.run / "kept").rglob("*.pt")] == (["model-step-9.pt"] if who == ADA else [])


@pytest.mark.threat(
    "Your command names a folder of data into which others write, or your working folder holds one. A stranger fills "
    "it with tens of thousands of files, so that the search for your script's checkpoint ends before it, and the "
    "next attempt begins at step 0.",
    "What belongs to others is counted by itself, and each folder has a search of its own.",
)
def test_a_folder_that_a_stranger_fills_hides_no_checkpoint_of_the_script(scene: Scene) -> None:
    """He makes tens of thousands of files and folders there, so that the search would end before it comes to ada's own."""
    work = scene.home / "work"
    shared = work / "a-shared"
    for folder in (work, shared, work / "out"):
        folder.mkdir()
    for folder in (shared, scene.data):
        for number in range(21_000):
            (folder / f"{number}").touch()
            os.chown(folder / f"{number}", pwd.getpwnam(EVE).pw_uid, -1)
    (work / "out" / "model-step-7.pt").write_bytes(b"ours")
    found = find_written([scene.data, work], 0.0, 1e11)
    assert found is not None
    assert (found.path, found.step) == (str(work / "out" / "model-step-7.pt"), 7)


@pytest.mark.threat(
    "A stranger lays a file of theirs into a checkpoint of your script, or exchanges one while it is kept.",
    "It is left out, or nothing is kept.",
)
def test_a_file_of_a_stranger_in_a_checkpoint_is_not_kept_and_one_that_was_exchanged_is_refused(scene: Scene) -> None:
    own, kept = scene.data / "step-3", scene.home / "kept"
    own.mkdir()
    (own / "model.pt").write_text("mine")
    (own / "poison.pt").write_text("poison")
    shutil.chown(own / "poison.pt", EVE)
    found = find_written([scene.data], 0, 1e12)
    assert found == LeftCheckpoint(str(own), 3, found.at if found else None, 4)
    done = keep(found, kept, 60)
    assert sorted(os.listdir(done.path)) == ["model.pt"]
    shutil.chown(own, EVE)
    assert find_written([scene.data], 0, 1e12) is None, "the folder itself is another's"
    (scene.data / "model-step-4.pt").write_text("poison")
    shutil.chown(scene.data / "model-step-4.pt", EVE)
    with pytest.raises(PermissionError, match="belongs to another account"):
        keep(LeftCheckpoint(str(scene.data / "model-step-4.pt")), kept, 60)
    assert os.listdir(kept) == ["step-3"]


@pytest.mark.threat(
    "A group, or everybody, may write the folder of a checkpoint of your script (umask 002 or 0), and a stranger "
    "lays a file into it that `launch.resume` would have the next attempt unpickle.",
    "A checkpoint with a file of an account that is not trusted in the run directory is passed over for the copy "
    "that was kept. Nobody else may write that copy.",
)
def test_a_checkpoint_into_which_a_stranger_wrote_is_not_gone_on_from_and_its_kept_copy_is(scene: Scene) -> None:
    """Its folder may be written by a group that eve is in, as with umask 002: she adds what torch.load would unpickle."""
    own, run = scene.data / "step-3", scene.home / "runs" / "thesis"
    (own / "part").mkdir(parents=True)
    (own / "part" / "model.pt").write_text("mine")
    (own / "part" / "model.pt").chmod(0o666)
    run.mkdir(parents=True)
    place = ScriptPlace(RunDir(run), scene.home / "checkpoints", ("true",))
    kept = keep(LeftCheckpoint(str(own)), scene.home / "kept", 60).path
    assert place.may_go_on_from(own)
    (own / "part" / "optimizer.pt").write_text("poison")
    shutil.chown(own / "part" / "optimizer.pt", EVE)
    assert not place.may_go_on_from(own)
    assert place.may_go_on_from(kept)
    assert not (kept / "part" / "model.pt").stat().st_mode & 0o022, "nobody else writes into what is kept"


@pytest.mark.threat(
    "A checkpoint that only the folder above it keeps private is kept in the run directory, or copied.",
    "What keeps others out of the source, on the whole way, keeps them out of the copy.",
)
@pytest.mark.parametrize("private", ["above", "folder", "file"])
@pytest.mark.parametrize("umask", [0, 0o022])
def test_what_is_kept_or_copied_of_a_private_checkpoint_is_reached_by_nobody_else(
    scene: Scene, umask: int, private: str
) -> None:
    """Whatever keeps others out of the source: the folder above it, its own folder, or its own mode."""
    above = scene.home / "private"
    source = above / "step-3" / "part"
    source.mkdir(parents=True)
    (source / "model.pt").write_text("mine")
    {"above": above, "folder": above / "step-3", "file": source / "model.pt"}[private].chmod(0o700)
    before = os.umask(umask)
    try:
        keep(LeftCheckpoint(str(above / "step-3")), scene.home / "kept" / "0001", 60)
    finally:
        os.umask(before)
    assert not reached_by_others(scene.home / "kept/0001/step-3/part/model.pt", scene.home)
    rights = FolderStore(above).rights("step-3/part/model.pt")
    assert not (rights.file.mode & 0o004 and rights.folder.mode & 0o001)


def reached_by_others(file: Path, top: Path) -> bool:
    way = [folder for folder in file.parents if folder.is_relative_to(top)]
    return bool(file.stat().st_mode & stat.S_IROTH and all(folder.stat().st_mode & stat.S_IXOTH for folder in way))
