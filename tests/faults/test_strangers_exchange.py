"""Somebody who may write the folder above a run puts another in its place: no job starts in it, and the watch says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from ftsupervise.errors import NotFound
from ftsupervise.rundir import pinned
from ftsupervise.rundir.ledger import claim
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.patience import wait_until
from tests.neighbours.stranger import as_stranger

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]

TYPED = str(Path(sys.executable).with_name("ftsupervise"))
SETTINGS = """\
name: thesis
scheduler: local
launch: {command: "touch $HOME/trained-$FTSUPERVISE_ATTEMPT", setup: ". ./setup.sh", jobs: 1}
watch: {disk: null, memory: null}
alerts: {receivers: [{file: {path: messages.txt}}]}
"""


class Scene:
    """A project folder that everybody may write, and in it a folder of one's own with a run."""

    def __init__(self, top: Path) -> None:
        self.top, self.home, self.project = top, top / "home", top / "project"
        self.home.mkdir(mode=0o700)
        self.project.mkdir()
        self.project.chmod(0o777)
        self.mine = self.project / "ada"
        self.mine.mkdir(mode=0o755)
        self.settings, self.run = self.mine / "ftsupervise.yaml", self.mine / "runs" / "thesis"
        self.settings.write_text(SETTINGS)
        (self.mine / "setup.sh").write_text("true\n")

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(self.home), "TMPDIR": str(self.home)}
        return subprocess.run([TYPED, *words], env=env, cwd=self.home, capture_output=True, text=True, timeout=120)

    def launch(self) -> None:
        done = self.type("launch", str(self.settings), "--again")
        assert done.returncode == 0, done.stderr

    def exchange(self, make: Callable[[], object]) -> None:
        """The stranger renames all that is mine away and makes something under its name."""

        def do() -> None:
            self.mine.rename(self.project / "away")
            make()

        as_stranger(do)

    def copied(self) -> None:
        """The stranger's copy of all that can be read, down to the token of the launch."""
        shutil.copytree(
            self.project / "away", self.mine, ignore=shutil.ignore_patterns("script", "messages.txt", "*.lock")
        )
        (self.mine / "setup.sh").write_text(f"touch {self.home}/setup-of-the-stranger\n")

    def run_script(self, more: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
        """The next member of the chain: Slurm keeps the script itself, and changes to its directory."""
        env = {**os.environ, "HOME": str(self.home), "PWD": str(self.mine), **more}
        return subprocess.run(
            ["bash", str(self.kept)], env=env, cwd=self.mine, capture_output=True, text=True, timeout=120
        )

    @property
    def kept(self) -> Path:
        return self.home / "script"

    def done(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir() if path.name.startswith(("trained", "setup")))


@pytest.fixture
def scene() -> Iterator[Scene]:
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    found = Scene(top)
    found.launch()
    wait_until(lambda: (found.run / "attempts" / "0001" / "end.json").exists(), "the first member to end")
    shutil.copy(found.run / "launches" / "0001" / "train.sbatch", found.kept)
    yield found
    wait_until(lambda: _is_removed(top), "the members that are still queued to leave the folder alone")


def _is_removed(top: Path) -> bool:
    try:
        shutil.rmtree(top)
    except OSError:  # a member has just written there
        return not top.exists()
    return True


def test_a_member_of_the_chain_goes_on_in_the_folder_that_was_launched(scene: Scene) -> None:
    assert scene.run_script().returncode == 0
    assert scene.done() == ["trained-1", "trained-2"]


@pytest.mark.threat(
    "A group or everybody may write a folder above the training code, and puts another folder in its place.",
    "The job script checks the owner of its folder before it runs anything, and starts nothing if the owner has "
    "changed since the launch.",
)
def test_no_code_of_a_folder_that_a_stranger_put_in_the_place_of_ours_is_run(scene: Scene) -> None:
    scene.exchange(scene.copied)
    done = scene.run_script()
    assert (done.returncode, scene.done()) == (77, ["trained-1"])
    assert f"{scene.mine} belongs to another account than at launch: nothing is started" in done.stderr


@pytest.mark.threat(
    "The same folder is exchanged, and in the other the `state` of the run is a link to that of another, private run of yours, "
    "whose brake the job that starts nothing would put on; or a page says that nothing is to be held.",
    "The job script writes and reads there only beside the page of its own launch. Elsewhere it holds the chain alone.",
)
@pytest.mark.parametrize("leads_to", ["another run", "our run"])
def test_a_job_that_starts_nothing_puts_on_no_brake_where_a_stranger_s_link_leads(scene: Scene, leads_to: str) -> None:
    other = scene.home / "other"
    shutil.copytree(scene.run, other)
    (other / "launches/0001/launch.json").write_text(
        json.dumps({"token": "another", "owner": os.geteuid(), "name": "x"})
    )
    led = {"another run": other, "our run": scene.project / "away" / "runs" / "thesis"}[leads_to] / "state"

    def laid() -> None:
        (scene.mine / "runs/thesis/launches").mkdir(parents=True)
        (scene.mine / "runs/thesis/state").symlink_to(led)

    scene.exchange(laid)
    before = sorted(led.rglob("*"))
    queue = scene.home / "queue"
    queue.mkdir()
    more = {"FTSUPERVISE_LOCAL_OF": f"{queue}:1", "FTSUPERVISE_JOB_ID": "local_9_1", "FTSUPERVISE_UNFIT_SECONDS": "0"}
    done = scene.run_script(more)
    assert (done.returncode, scene.done(), os.listdir(queue)) == (77, ["trained-1"], ["hold"])
    assert (sorted(led.rglob("*")) != before) == (leads_to == "our run")
    assert (led / "brake").exists() == (leads_to == "our run")


@pytest.mark.threat(
    "The folder is exchanged, and a page in the other says that holding is only told (`state/observe`), so that each member "
    "would be used up.",
    "It is not believed: the rest of the chain is held.",
)
def test_a_page_of_a_stranger_keeps_no_job_from_holding_its_chain(scene: Scene) -> None:
    def laid() -> None:
        state = scene.mine / "runs/thesis/state"
        state.mkdir(parents=True)
        (state / "observe").write_text('["brake", "exclusion"]')

    scene.exchange(laid)
    queue = scene.home / "queue"
    queue.mkdir()
    more = {"FTSUPERVISE_LOCAL_OF": f"{queue}:1", "FTSUPERVISE_JOB_ID": "local_9_1", "FTSUPERVISE_UNFIT_SECONDS": "0"}
    assert (scene.run_script(more).returncode, os.listdir(queue)) == (77, ["hold"])


@pytest.mark.threat(
    "A stranger puts another folder in the place of the run directory.",
    "A job knows the token of its launch. It starts nothing unless the folder has the same owner as before and a "
    "file of this account with that token.",
)
def test_a_run_directory_that_a_stranger_put_in_the_place_of_ours_is_refused_by_the_next_member(scene: Scene) -> None:
    scene.settings.rename(scene.project / "ftsupervise.yaml")
    scene.exchange(scene.copied)
    words = [
        TYPED,
        "run",
        "--run-dir",
        str(scene.run),
        "--launched",
        token(scene),
        "--",
        "touch",
        f"{scene.home}/setup",
    ]
    done = subprocess.run(words, cwd=scene.home, capture_output=True, text=True, timeout=120)
    assert (done.returncode, scene.done()) == (77, ["trained-1"])
    assert "the run directory was replaced by another" in done.stderr
    by_hand = subprocess.run([*words[:4], *words[6:]], cwd=scene.home, capture_output=True, text=True, timeout=120)
    assert (by_hand.returncode, scene.done()) == (77, ["trained-1"]), "nor in a script of one's own"
    assert f"{scene.run} belongs to nobody" in by_hand.stderr


def token(scene: Scene) -> str:
    for place in (scene.run, scene.project / "away" / "runs" / "thesis"):
        if (place / "launches" / "0001" / "launch.json").exists():
            return str(json.loads((place / "launches" / "0001" / "launch.json").read_text())["token"])
    raise AssertionError("no launch")


@pytest.mark.threat(
    "A stranger puts another directory of the owner's, such as an older run, in the place of the run directory.",
    "That directory holds no file of this launch, so the job starts nothing.",
)
def test_another_directory_of_ones_own_in_the_place_of_the_run_is_told_from_it(scene: Scene) -> None:
    """The stranger can also move there what is ours, such as an older run."""
    older = scene.project / "older" / "runs" / "thesis"
    (older / "launches" / "0001").mkdir(parents=True)
    shutil.copy(scene.settings, scene.project / "older")
    scene.exchange(lambda: (scene.project / "older").rename(scene.mine))
    why = pinned.another(RunDir(scene.run), token(scene))
    assert why.startswith("the run directory was replaced by another"), why


def test_a_copy_by_the_owner_is_the_same_run(scene: Scene) -> None:
    shutil.copytree(scene.run, scene.top / "copy", symlinks=True)
    shutil.rmtree(scene.run)
    shutil.copytree(scene.top / "copy", scene.run, symlinks=True)
    assert pinned.another(RunDir(scene.run), token(scene)) == ""
    assert scene.run_script().returncode == 0
    assert "replaced" not in scene.type("watch", "thesis").stdout


@pytest.mark.threat(
    "The watch reads a run directory that a stranger put in the place of the run's, and reports that all is well.",
    "The account records the directory's owner at launch or at the first look. Another owner is a finding, and "
    "nothing in the directory is trusted.",
)
@pytest.mark.threat(
    "A member who may write above the run puts another directory in its place, to end the chain.",
    "This is not prevented: `launch` names the folder, no job starts there, and the watch says that the directory "
    "was replaced.",
)
def test_the_watch_says_that_the_run_directory_was_replaced_and_believes_nothing_in_it(scene: Scene) -> None:
    scene.type("watch", "thesis")
    scene.exchange(scene.copied)
    for named in ("thesis", str(scene.run)):
        seen = scene.type("watch", named)
        assert f"the run directory was replaced by another: {scene.run} belongs to nobody" in seen.stdout, seen


@pytest.mark.threat(
    "A stranger makes a run directory that everybody may write where the next launch will make one.",
    "`launch` refuses it and names its owner.",
)
def test_a_launch_into_a_folder_that_a_stranger_laid_is_refused(scene: Scene) -> None:
    kept = scene.home / "ftsupervise.yaml"
    kept.write_text(SETTINGS + f"run_dir: {scene.run}\n")
    scene.exchange(scene.copied)
    done = scene.type("launch", str(kept), "--again")
    assert done.returncode == 77, done
    assert f"{scene.run} belongs to nobody" in done.stderr


def test_after_the_owner_laid_another_folder_there_one_launch_goes_on(scene: Scene) -> None:
    shutil.rmtree(scene.run)
    (scene.run / "switches").mkdir(parents=True)
    shutil.copy(scene.settings, scene.run / "run.yaml")
    assert "the run directory was replaced by another" in scene.type("watch", str(scene.settings)).stdout
    (scene.run / "run.yaml").unlink()
    scene.launch()
    assert "thesis: ok" in scene.type("watch", str(scene.settings)).stdout


@pytest.mark.threat(
    "Somebody exchanges the run directory between the gate and the claim, and `attempts` in the new one is a link to "
    "a folder of yours.",
    "ftsupervise makes nothing through a link there, and checks the run directory once more before the command starts.",
)
def test_no_attempt_is_claimed_through_a_link_that_a_stranger_laid(tmp_path: Path) -> None:
    """It is exchanged after the gate has looked: the pages would be made wherever the link leads."""
    run, private = RunDir(tmp_path / "run"), tmp_path / "private"
    private.mkdir(mode=0o700)
    run.staging.mkdir(parents=True)
    run.attempts.symlink_to(private)
    with pytest.raises(NotFound):
        claim(run)
    assert list(private.iterdir()) == []
