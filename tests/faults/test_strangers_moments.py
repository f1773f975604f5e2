"""A member of the group who may write above a run exchanges a folder for a link while something is under way there: between two
looks at one name, behind the look of a gate, or while a copy or a training takes its time.

Real accounts: ``ada`` has a run where her group may write, and a private one in her home. ``eve`` is in that group.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.rank_lists import clear_older
from ftsupervise.checkpoints.retain import A_DAY, REMOVING, keys_in, left_alone, leftovers, remove, sweep
from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.checkpoints.written import drop_older, keep
from ftsupervise.drill.play import keep_what_is_left
from ftsupervise.errors import Error
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.loop_state import LoopState, write_loop_file
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.host.files import remove_tree
from ftsupervise.host.ownership import claim_folder, held, set_mode, strangers_link
from ftsupervise.replicas.sources import ManagerPage, at_work, write_manager
from ftsupervise.run import fencing, gate
from ftsupervise.run.start_over import ScriptPlace, resumption
from ftsupervise.rundir.attempt_pages import StartPage, write_page
from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.switches import KILL, SAVE, clear_answered, look_at_switch
from ftsupervise.truth import Health, LeftCheckpoint
from tests.neighbours.patience import wait_until
from tests.neighbours.stranger import ADA, EVE, GROUP, as_one, begin_as, end, one_by_one

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

NOW = datetime.now(timezone.utc)
for one in (
    "concurrent.futures.thread",
    "encodings.ascii",
    "grp",
):  # another account may be unable to read the library of this interpreter
    import_module(one)

EXCHANGE = 2  # RENAME_EXCHANGE
AT_CWD = -100

TRAINING = """
import os, subprocess, sys, time
import ftsupervise
ftsupervise.Guard()
open(sys.argv[1] + "/begun", "w").close()
while not os.path.exists(sys.argv[1] + "/go-on"):
    time.sleep(0.05)
import ftsupervise.checkpoints.restore
subprocess.run([sys.executable, "-c", "import colorsys"])
"""


class Scene:
    """``run`` where the group may write, and ``private`` in ada's home."""

    def __init__(self, top: Path) -> None:
        self.home, self.project = top / "home", top / "project"
        for folder, mode in ((self.home, 0o700), (self.project, 0o2775)):
            folder.mkdir()
            os.chown(folder, pwd.getpwnam(ADA).pw_uid, GROUP)
            folder.chmod(mode)
        self.run, self.away, self.private = self.project / "run", self.project / "away", self.home / "private"

    def exchange(self) -> None:
        """Eve puts a link to the private run in the place of the other."""
        self.run.rename(self.away)
        self.run.symlink_to(self.private)

    @contextmanager
    def exchanged_all_the_time(self) -> Iterator[None]:
        """Eve exchanges the run for the link and back, as fast as she can."""

        def go_on() -> None:
            link = self.project / "link"
            link.symlink_to(self.private)
            renameat2 = ctypes.CDLL(None).renameat2
            while True:
                renameat2(AT_CWD, os.fsencode(self.run), AT_CWD, os.fsencode(link), EXCHANGE)
                for _ in range(100):
                    pass

        eve = begin_as(EVE, go_on)
        try:
            yield
        finally:
            os.kill(eve, signal.SIGKILL)
            os.waitpid(eve, 0)

    def hers(self) -> dict[str, tuple[int, bytes]]:
        """Everything that lies in the private run, with its mode."""
        found = {str(one.relative_to(self.private)): one for one in sorted(self.private.rglob("*"))}
        return {name: (one.lstat().st_mode, b"" if one.is_dir() else one.read_bytes()) for name, one in found.items()}


def environment(scene: Scene) -> dict[str, str]:
    """That of a training in the first attempt of the run."""
    return {
        "PATH": "/usr/bin:/bin", "HOME": str(scene.home), "FTSUPERVISE_RUN_DIR": str(scene.run), "FTSUPERVISE_ATTEMPT": "1",
        "FTSUPERVISE_ATTEMPT_DIR": str(scene.run / "attempts" / "0001"),
        "FTSUPERVISE_CHECKPOINT_DIR": str(scene.run / "checkpoints"),
        "FTSUPERVISE_STAGING": str(scene.run / "checkpoints" / ".staging" / "0001"),
    }  # fmt: skip


@pytest.fixture
def scene(top: Path) -> Scene:
    return Scene(top)


@pytest.mark.threat(
    "A member of the group lays a chain of links of which each names the next one many times, so that to judge the way takes "
    "for ever: no job starts any more, and `launch` hangs.",
    "Forty links are followed in all, as by the kernel.",
)
def test_a_chain_of_links_that_has_no_end_is_given_up_at_once(scene: Scene) -> None:
    def lay() -> None:
        links = scene.project / "links"
        (links / "l0").mkdir(parents=True)
        for n in range(1, 39):
            (links / f"l{n}").symlink_to("/".join([f"l{n - 1}", *[f"../l{n - 1}"] * 3]))
        scene.run.symlink_to(links / "l38")

    def look() -> None:
        signal.alarm(20)
        for judge in (strangers_link, lambda path: held(path).__enter__()):
            with pytest.raises(OSError, match="Too many levels"):
                judge(scene.run / "switches")

    as_one(EVE, lay)
    as_one(ADA, look)


@pytest.mark.threat(
    "A member who may write above a run exchanges it for a link to another run of yours, again and again, as fast as he can: "
    "between two looks at one name a page would be written over in the other, or a folder there be opened to all.",
    "What is made, renamed or given rights is reached from one open folder, whose way was judged.",
)
@pytest.mark.parametrize("what", ["page", "folder"])
def test_nothing_happens_elsewhere_between_two_looks_at_one_name(scene: Scene, what: str) -> None:
    def make() -> None:
        for run in (scene.run, scene.private):
            (run / "state").mkdir(parents=True)
            (run / "attempts").mkdir()
        for number in range(1, 4001):
            (scene.private / "attempts" / f"{number:04d}").mkdir(mode=0o700)
        (scene.private / "state" / "page.json").write_text("private")

    def work() -> None:
        until, turn = time.monotonic() + 3, 0
        while time.monotonic() < until:
            turn += 1
            with suppress(OSError):
                if what == "page":
                    write_whole(scene.run / "state" / "page.json", "of the run", sync=False)
                else:
                    claim_folder(scene.run / "attempts" / f"{turn % 4000 + 1:04d}", 0o755)

    as_one(ADA, make)
    before = scene.hers()
    with scene.exchanged_all_the_time():
        as_one(ADA, work)
    assert scene.hers() == before


@pytest.mark.threat(
    "The run is exchanged for a link to another run of yours when a member of the chain has passed its gate and claims its "
    "attempt: the staging areas of the other run would be sealed, so that its attempt saves nothing any more, and emptied.",
    "No staging area is sealed, and no folder gets another mode, through a link of another account.",
)
def test_no_staging_area_is_sealed_through_a_link(scene: Scene) -> None:
    def make() -> None:
        for run in (scene.run, scene.private):
            (run / "attempts" / "0001").mkdir(parents=True)
            (run / "attempts" / "0002").mkdir(mode=0o700)
            (run / "staging" / "0001").mkdir(parents=True)
            (run / "staging" / "0001" / "half").write_text("of a page")
            (run / "checkpoints").mkdir()

    def start() -> None:
        said: list[str] = []
        fencing.begin(RunDir(scene.run), 2, {}, said.append)
        assert any("is a link of games" in one for one in said), said
        with pytest.raises(PermissionError):
            set_mode(scene.run / "attempts" / "0002", 0o755)

    as_one(ADA, make)
    before = scene.hers()
    as_one(EVE, scene.exchange)
    as_one(ADA, start)
    assert scene.hers() == before


@pytest.mark.threat(
    "While a checkpoint of your script is kept, which takes minutes, a member exchanges the run for a link to another run of "
    "yours: what that one has kept would be removed.",
    "The folder is held open until the last removal, and a link of another account is not followed.",
)
def test_nothing_that_was_kept_is_removed_through_a_link(scene: Scene) -> None:
    name = "model-step-7.pt"

    def make() -> None:
        for run in (scene.run, scene.private):
            for number in (1, 2, 3):
                (run / "kept" / f"000{number}").mkdir(parents=True, mode=0o700)
                (run / "kept" / f"000{number}" / name).write_bytes(b"kept")
        (scene.home / name).write_bytes(bytes(1 << 20))

    def keep_it() -> None:
        def copied() -> bool:
            (scene.project / "begun").touch()
            wait_until(scene.away.exists, "the exchange")
            return False

        with suppress(OSError):
            keep(LeftCheckpoint(str(scene.home / name), 7, NOW, 1 << 20), scene.run / "kept" / "0003", 60, copied)
        with suppress(OSError):
            drop_older(scene.run / "kept", 3)

    def exchange() -> None:
        wait_until((scene.project / "begun").exists, "the copy to begin")
        scene.exchange()

    as_one(ADA, make)
    before = scene.hers()
    eve = begin_as(EVE, exchange)
    as_one(ADA, keep_it)
    end(eve)
    assert scene.hers() == before


@pytest.mark.threat(
    "A member exchanges the run directory while your training runs, and has modules of theirs lie where the copy of the guard "
    "was: the training, and each Python that it starts, would run them at the next import.",
    "Where another account can put another directory in the place of the run's, the copy lies in your own state directory.",
)
def test_a_training_imports_nothing_from_a_run_that_was_exchanged(scene: Scene, python: str) -> None:
    def replace() -> None:
        shutil.copytree(scene.run, scene.project / "forged", ignore_dangling_symlinks=True)
        planted = f"open({str(scene.project / 'ran')!r}, 'w')\n"
        for part in ("package/ftsupervise/checkpoints/restore.py", "path/colorsys.py"):
            for version in (scene.project / "forged" / "guard").glob("*"):
                (version / part).write_text(planted)
        scene.run.rename(scene.away)
        (scene.project / "forged").rename(scene.run)
        (scene.project / "go-on").touch()

    as_one(ADA, lambda: (scene.home / "train.py").write_text(TRAINING))
    env = {"PATH": "/usr/bin:/bin", "HOME": str(scene.home), "FTSUPERVISE_STATE_DIR": str(scene.home / "state")}
    words = ["run", "--run-dir", str(scene.run), "--", "/usr/bin/python3", f"{scene.home}/train.py", str(scene.project)]
    training = subprocess.Popen(
        [python, "-I", "-m", "ftsupervise", *words],
        cwd=scene.home, env=env, user=ADA, group=GROUP, extra_groups=[], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until((scene.project / "begun").exists, "the training")
        as_one(EVE, replace)
        said = ""
        with suppress(subprocess.TimeoutExpired):
            said = training.communicate(timeout=10)[1]
    finally:
        training.kill()
        training.wait(20)
    assert "Error" not in said, said
    assert not (scene.project / "ran").exists()
    assert list((scene.home / "state" / "guard").glob("*/package/ftsupervise/guard/guard.py"))


@pytest.mark.threat(
    "A member exchanges the run for a link to another run of yours, while the guard looks for switches: it would obey those "
    "that you have raised for the other, and take them down there.",
    "The folder of the switches is read, and a switch taken down, through no link of another account.",
)
def test_no_switch_of_another_run_is_obeyed_or_taken_down_through_a_link(scene: Scene) -> None:
    def make() -> None:
        for run in (scene.run, scene.private):
            (run / "switches").mkdir(parents=True)
            (run / "staging" / "0001").mkdir(parents=True)
        for name in (KILL, SAVE):
            (scene.private / "switches" / name).touch()

    def look() -> None:
        for name in (KILL, SAVE):
            assert look_at_switch(RunDir(scene.run), name)[0].health is Health.UNKNOWN
        raised = (scene.private / "switches" / SAVE).lstat()
        with suppress(OSError):
            clear_answered(RunDir(scene.run), SAVE, (raised.st_ino, raised.st_mtime_ns))

    as_one(ADA, make)
    before = scene.hers()
    as_one(EVE, scene.exchange)
    as_one(ADA, look)
    assert scene.hers() == before


@pytest.mark.threat(
    "A member who may write the folder that you name for what a drill leaves (`drill --keep`) lays a link there, by the name "
    "of a row, into a private folder of yours.",
    "No link of another account is followed, nothing is put into what others may write, and what is kept is yours alone.",
)
def test_what_a_drill_leaves_is_put_where_no_link_leads(scene: Scene) -> None:
    kept = scene.project / "drilled"

    def make() -> None:
        for folder, words in ((scene.home / "copy", "of the drill"), (scene.private, "private")):
            folder.mkdir()
            (folder / "run.yaml").write_text(words)
        scene.private.chmod(0o700)

    def lay() -> None:
        kept.mkdir()
        (kept / "killed-rank").symlink_to(scene.private)
        (kept / "full-disk").mkdir()
        kept.chmod(0o777)

    def drill() -> None:
        for name in ("killed-rank", "full-disk"):
            with pytest.raises(Error):
                keep_what_is_left(scene.home / "copy", kept / name)
        keep_what_is_left(scene.home / "copy", kept / "no-slurm")
        assert (kept / "no-slurm" / "run.yaml").read_text() == "of the drill"
        assert (kept / "no-slurm").stat().st_mode & 0o777 == 0o700

    as_one(ADA, make)
    before = scene.hers(), scene.private.stat().st_mode
    as_one(EVE, lay)
    as_one(ADA, drill)
    assert (scene.hers(), scene.private.stat().st_mode) == before
    assert not list((kept / "full-disk").iterdir())


@pytest.mark.threat(
    "A member who may write the folder into which you bring a checkpoint back has made its half (`.restoring-`) first, and "
    "would exchange what is in it.",
    "A half of another account is refused before anything is brought there.",
)
def test_nothing_is_brought_back_into_a_folder_of_another_account(scene: Scene, python: str) -> None:
    half = scene.project / ".restoring-step-5"
    copy_of_step_5(scene)
    as_one(EVE, one_by_one(half.mkdir, partial(half.chmod, 0o777)))
    assert f"{half} belongs to games" in bring_back(scene, python)
    assert not list(half.iterdir())


@pytest.mark.threat(
    "A member gives a private folder of yours beside your checkpoints the name of such a half: what is no part of the "
    "checkpoint would be deleted in it, and the rest be opened wider.",
    "A restore goes on only in what one has begun, which holds its mark, and says what else lies there.",
)
def test_nothing_is_brought_back_into_another_folder_of_yours(scene: Scene, python: str) -> None:
    half = scene.project / ".restoring-step-5"

    def make() -> None:
        (scene.project / "letters").mkdir(mode=0o700)
        (scene.project / "letters" / "thesis").write_text("three years")

    copy_of_step_5(scene)
    as_one(ADA, make)
    as_one(EVE, lambda: (scene.project / "letters").rename(half))
    assert f"{half} is not what a restore has left" in bring_back(scene, python)
    assert (half / "thesis").read_text() == "three years"
    assert half.stat().st_mode & 0o777 == 0o700


def copy_of_step_5(scene: Scene) -> None:
    """Ada has a copy of it in her home."""
    one = scene.home / "source" / "step-5"
    one.mkdir(parents=True)
    (one / "weights").write_bytes(b"w" * 5)
    commit(one)
    offload(one, FolderStore(scene.home / "copies"), now=lambda: NOW)
    for path in (scene.home / "copies", *(scene.home / "copies").rglob("*")):
        os.chown(path, pwd.getpwnam(ADA).pw_uid, GROUP)


def bring_back(scene: Scene, python: str) -> str:
    """Ada types the command; return what it says."""
    words = [
        "checkpoints",
        "restore",
        "--from",
        str(scene.home / "copies"),
        "--to",
        str(scene.project),
        "--name",
        "step-5",
    ]
    return subprocess.run(
        [python, "-I", "-m", "ftsupervise", *words],
        cwd=scene.home, env={"PATH": "/usr/bin:/bin", "HOME": str(scene.home)}, user=ADA, group=GROUP, extra_groups=[],
        capture_output=True, text=True, timeout=60, check=False,
    ).stderr  # fmt: skip


@pytest.mark.threat(
    "A member exchanges the run directory while your training begins, which takes it many seconds, and has a checkpoint of "
    "theirs lie in it: the guard would take the directory's owner for the run's, and your training would unpickle it.",
    "The owner of a run directory is believed only where the attempt of this very training lies in it.",
)
@pytest.mark.parametrize("attempt", ["copied", "linked", "moved"])
def test_the_guard_goes_on_from_no_checkpoint_of_a_run_that_was_exchanged(
    scene: Scene, python: str, attempt: str
) -> None:
    one = scene.project / "forged" / "checkpoints" / "step-9"
    for folder in (
        one,
        scene.project / "forged" / "attempts",
        scene.run / "attempts" / "0001",
        scene.run / "checkpoints",
    ):
        folder.mkdir(parents=True)
    (one / "weights").write_bytes(b"w" * 5)
    commit(one)
    (scene.project / "other").mkdir()
    for top, who in ((scene.run, ADA), (scene.project / "other", ADA), (scene.project / "forged", EVE)):
        for path in (top, *top.rglob("*")):
            os.chown(path, pwd.getpwnam(who).pw_uid, GROUP)
    (scene.project / "other").chmod(0o2775)

    def exchange() -> None:
        scene.run.rename(scene.away)
        (scene.project / "forged").rename(scene.run)
        attempts = scene.run / "attempts"
        if attempt == "copied":
            (attempts / "0001").mkdir()
        elif attempt == "moved":
            (scene.project / "other").rename(attempts / "0001")
        else:
            attempts.rmdir()
            attempts.symlink_to(scene.away / "attempts")

    as_one(EVE, exchange)
    done = subprocess.run(
        [python, "-I", "-c", "from ftsupervise import Guard; print('goes on from', Guard().latest())"],
        cwd="/", env=environment(scene), user=ADA, group=GROUP, extra_groups=[], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert "step-9" not in done.stdout, done


@pytest.mark.threat(
    "The same with a run of replica groups: a page in the directory of theirs says that their manager is one of the run's, so "
    "that each group would unpickle its weights.",
    "Only pages of the account that trains say where weights may come from.",
)
def test_a_group_takes_no_weights_by_the_word_of_a_run_that_was_exchanged(scene: Scene) -> None:
    def start(address: str) -> None:
        attempt = scene.run / "groups" / "g001" / "attempts" / "0001"
        attempt.mkdir(parents=True)
        write_manager(attempt, 0, ManagerPage(address, "g001:1"))

    def found(*wanted: str) -> None:
        assert {one.address for one in at_work(RunDir(scene.run).group("g000"), 0)} == set(wanted)

    as_one(ADA, partial(start, "http://node-1:1"))
    as_one(ADA, partial(found, "http://node-1:1"))
    as_one(EVE, one_by_one(lambda: scene.run.rename(scene.away), partial(start, "http://evil:1")))
    as_one(ADA, found)


@pytest.mark.threat(
    "The run directory is exchanged between the last look of a start and the choice of what `launch.resume` names: the pages "
    "in theirs say that the script saved a file of theirs, which it would unpickle.",
    "Only files of this account are believed where the attempt that begins does not lie in the run directory.",
)
def test_a_script_goes_on_from_no_file_that_a_run_names_that_was_exchanged(scene: Scene) -> None:
    own, theirs = scene.home / "model-1.pt", scene.project / "model-9.pt"

    def attempts(saved: Path) -> None:
        for number in (1, 2):
            attempt = scene.run / "attempts" / f"000{number}"
            attempt.mkdir(parents=True)
            write_page(attempt, StartPage(number, at=NOW))
        saved.write_bytes(b"weights")
        write_page(scene.run / "attempts" / "0001", LeftCheckpoint(str(saved), 9, NOW, 7))

    def goes_on(words: tuple[str, ...]) -> None:
        run = RunDir(scene.run)
        place = ScriptPlace(run, run.checkpoints, ("true",), run.attempt(2))
        assert resumption(place, "--resume {checkpoint}", 2).words == words

    as_one(ADA, partial(attempts, own))
    as_one(ADA, partial(goes_on, ("--resume", str(own))))
    as_one(EVE, one_by_one(lambda: scene.run.rename(scene.away), partial(attempts, theirs)))
    as_one(ADA, partial(goes_on, ()))


@pytest.mark.threat(
    "While `prune` or `upkeep` deletes the first of several checkpoints, which takes minutes, a member who may write their "
    "folder gives the name of the next one (`.removing-`) to your newest.",
    "Each is looked at once more when its turn comes: only what this removal has taken out is deleted.",
)
def test_what_gets_the_name_of_one_that_is_deleted_meanwhile_stays(scene: Scene) -> None:
    folder = scene.project

    def make() -> None:
        for step in (1, 2, 5):
            (folder / f"step-{step}").mkdir()
            (folder / f"step-{step}" / "weights").write_bytes(b"w" * step)

    def prune() -> None:
        def deleted(size: int) -> None:
            (scene.project / "begun").touch()
            wait_until((scene.project / "done").exists, "the new name")

        judged, names = keys_in(folder), ["step-1", "step-2"]
        assert remove(folder, names, judged) == ("step-1", "step-2")
        sweep(folder, {judged[name] for name in names}, progress=deleted)

    def exchange() -> None:
        wait_until((folder / "begun").exists, "the first removal")
        (folder / f"{REMOVING}step-2").rename(folder / "aside")
        (folder / "step-5").rename(folder / f"{REMOVING}step-2")
        (folder / "done").touch()

    as_one(ADA, make)
    eve = begin_as(EVE, exchange)
    as_one(ADA, prune)
    end(eve)
    assert not (folder / f"{REMOVING}step-1").exists()
    assert (folder / f"{REMOVING}step-2" / "weights").read_bytes() == b"w" * 5


@pytest.mark.threat(
    "A member who may write above a run puts a directory of theirs in its place, or a link to a later run of yours, in which "
    "an attempt of a higher number lies: the training would end at once and save nothing more.",
    "An attempt counts as a newer one only where ours lies beside it.",
)
@pytest.mark.parametrize("by", ["a directory", "the same with ours", "a link"])
def test_a_run_that_was_exchanged_ends_no_attempt(scene: Scene, by: str) -> None:
    def make() -> None:
        for run, numbers in ((scene.run, (1, 2)), (scene.private, (1, 2, 9))):
            for number in numbers:
                (run / "attempts" / f"{number:04d}").mkdir(parents=True)

    def exchange() -> None:
        scene.run.rename(scene.away)
        if by == "a link":
            scene.run.symlink_to(scene.private)
            return
        for number in (9,) if by == "a directory" else (1, 9):
            (scene.run / "attempts" / f"{number:04d}").mkdir(parents=True)

    def look(found: int | None) -> None:
        assert superseded(RunDir(scene.run), 1) == found

    as_one(ADA, make)
    as_one(ADA, partial(look, 2))
    as_one(EVE, exchange)
    as_one(ADA, partial(look, None))


@pytest.mark.threat(
    "A member exchanges the run for a link to another run of yours while your training trains on: its next save would empty "
    "what the other is saving, and write into it.",
    "Nothing is saved through a link of another account.",
)
def test_nothing_is_saved_through_a_link(scene: Scene, python: str) -> None:
    saved = Path("checkpoints", ".staging", "0001", "step-5")

    def make() -> None:
        for run in (scene.run, scene.private):
            (run / "attempts" / "0001").mkdir(parents=True)
            write_page(run / "attempts" / "0001", StartPage(1, at=NOW))
            (run / saved).mkdir(parents=True)
            (run / saved / "half").write_text("of what is being saved")

    as_one(ADA, make)
    before = scene.hers()
    as_one(EVE, scene.exchange)
    words = (
        "from ftsupervise import Guard\nwith Guard().checkpoint(5, 'step-5') as folder: (folder / 'w').write_text('w')"
    )
    done = subprocess.run(
        [python, "-I", "-c", words],
        cwd="/", env=environment(scene), user=ADA, group=GROUP, extra_groups=[], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert "is a link of games" in done.stderr, done
    assert scene.hers() == before


@pytest.mark.parametrize("by", ["a directory", "a link", "a closed one"])
def test_a_directory_in_the_place_of_a_run_is_told_by_its_attempt(scene: Scene, by: str) -> None:
    """Also where nobody has launched the run, so that no token tells it."""

    def start() -> None:
        for number in (1, 2) if scene.run.exists() else (1,):
            attempt = scene.run / "attempts" / f"{number:04d}"
            attempt.mkdir(parents=True, exist_ok=True)
            write_page(attempt, StartPage(number, at=NOW))

    def exchange() -> None:
        scene.run.rename(scene.away)
        if by == "a link":
            scene.run.symlink_to(scene.away)
            return
        start()
        scene.run.chmod(0o700 if by == "a closed one" else 0o777)

    def ask(*, another: bool) -> None:
        assert bool(gate.another_place(RunDir(scene.run), scene.run / "attempts" / "0001", "")) == another

    as_one(ADA, start)
    as_one(ADA, partial(ask, another=False))
    as_one(EVE, exchange)
    as_one(ADA, partial(ask, another=True))


@pytest.mark.threat(
    "A member who may write the folder in which your loop saves lays a link there, where saves are prepared (`.staging`), into "
    "a folder of other checkpoints of yours: that of the name to be saved would be deleted, as what a killed save has left.",
    "Nothing is prepared, and nothing deleted, where a link of another account leads. The save says which link it is.",
)
@pytest.mark.parametrize("area", ["alone", "0001"])
def test_no_save_begins_or_deletes_through_a_link(scene: Scene, area: str) -> None:
    folder = scene.project / "checkpoints"

    def make() -> None:
        (scene.private / "step-1").mkdir(parents=True)
        (scene.private / "step-1" / "weights").write_text("three weeks")
        for one in (folder, folder / ".staging"):
            one.mkdir()
            one.chmod(0o2775)

    def save() -> None:
        staging = None if area == "alone" else folder / ".staging" / area
        place = RankContext(None, None, None, 0, 1, folder, staging=staging)
        checkpoints = Checkpoints(place, lambda: False, Voice(0, 1))
        with pytest.raises(PermissionError, match="is a link of games"):
            checkpoints.begin("step-1", None, barrier=False)
        checkpoints.discard(folder / ".staging" / area / "step-1")

    as_one(ADA, make)
    before = scene.hers()
    as_one(EVE, lambda: (folder / ".staging" / area).symlink_to(scene.private))
    as_one(ADA, save)
    assert scene.hers() == before


@pytest.mark.threat(
    "A member who may write the folder of your checkpoints exchanges our own folder in it for a link, while `prune` removes "
    "checkpoints of one file: manifests of the same names in a private folder of yours would be deleted.",
    "The pages of a checkpoint are removed through no link of another account.",
)
def test_the_pages_of_what_is_pruned_are_removed_through_no_link(scene: Scene) -> None:
    folder = scene.project / "checkpoints"

    def make() -> None:
        for one in (folder, scene.private):
            one.mkdir()
            (one / "step-1.pt").write_text("weights")
            commit(one / "step-1.pt")
        folder.chmod(0o2775)

    def exchange() -> None:
        (folder / ".ftsupervise").rename(folder / "away")
        (folder / ".ftsupervise").symlink_to(scene.private / ".ftsupervise")

    def prune() -> None:
        with held(folder) as here:
            judged = keys_in(here)
            (scene.home / "now").touch()
            wait_until((folder / ".ftsupervise").is_symlink, "eve to exchange it")
            with pytest.raises(PermissionError, match="is a link of games"):
                remove(here, ["step-1.pt"], judged)

    as_one(ADA, make)
    before = scene.hers()
    ada = begin_as(ADA, prune)
    wait_until((scene.home / "now").exists, "ada to judge it")
    as_one(EVE, exchange)
    end(ada, ADA)
    assert scene.hers() == before


@pytest.mark.threat(
    "A member exchanges the folder in which the ranks of your loop prepare a save for a link, while rank 0 removes what an "
    "older launch has left there.",
    "Each folder is held open, and no link of another account is followed.",
)
def test_what_an_older_launch_has_left_is_removed_through_no_link(scene: Scene) -> None:
    def make() -> None:
        (scene.private / "step-1").mkdir(parents=True)
        (scene.private / "step-1" / "weights").write_text("three weeks")
        for name in range(20):
            (scene.run / "step-1" / f"rank-{name}").mkdir(parents=True)

    def clear() -> None:
        for _ in range(12_000):
            with suppress(OSError):
                clear_older(scene.run / "step-1", -100.0)

    as_one(ADA, make)
    before = scene.hers()
    with scene.exchanged_all_the_time():
        as_one(ADA, clear)
    assert scene.hers() == before


@pytest.mark.threat(
    "A member who may write the folder of your checkpoints lays a thousand folders there, one in the other, by the name of "
    "what a save or a restore has left: a day later your loop could save nothing more, and nothing were removed.",
    "What is too deep to be walked counts as not seen, and stays.",
)
def test_folders_too_deep_to_be_walked_stop_neither_a_save_nor_a_removal(scene: Scene) -> None:
    folder = scene.project / "checkpoints"

    def make() -> None:
        for one in (folder, folder / ".staging"):
            one.mkdir()
            one.chmod(0o2775)

    def lay() -> None:
        for top in (folder / ".restoring-step-1", folder / ".staging" / "alone-2" / "step-1"):
            top.mkdir(parents=True)
            at = os.open(top, os.O_RDONLY)
            for _ in range(1500):
                os.mkdir("d", dir_fd=at)
                at, outer = os.open("d", os.O_RDONLY, dir_fd=at), at
                os.close(outer)

    def look() -> None:
        tomorrow = time.time() + 2 * A_DAY
        assert (left_alone(folder, tomorrow), leftovers(None, folder, tomorrow)) == ((), ())
        remove_tree(folder / ".restoring-step-1")

    as_one(ADA, make)
    as_one(EVE, lay)
    as_one(ADA, look)
    subprocess.run(["rm", "-rf", str(folder)], check=True, timeout=60)


@pytest.mark.threat(
    "A member lays the same link when your loop has come into its save: the state of a rank would be written over that of "
    "another checkpoint of yours.",
    "It is written through no link of another account.",
)
def test_the_state_of_a_rank_is_written_through_no_link(scene: Scene) -> None:
    staged = scene.run / "step-1"
    loop = LoopState({"count": {"steps": 1}})
    described = loop.describe()

    def make() -> None:
        for one in (scene.private / "step-1", staged):
            one.mkdir(parents=True)
        (scene.private / "step-1" / "rank-00000.state").write_text("three weeks")

    def write() -> None:
        with pytest.raises(PermissionError, match="is a link of games"):
            write_loop_file(staged, loop, described, (1, 0, 1))

    as_one(ADA, make)
    before = scene.hers()
    as_one(ADA, lambda: write_loop_file(staged, loop, described, (1, 0, 1)))
    as_one(EVE, scene.exchange)
    as_one(ADA, write)
    assert scene.hers() == before
