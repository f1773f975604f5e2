"""A member of the group who may write the folder above a run puts his own in its place: nothing of his settings is done.

Real accounts: ``ada`` launches and keeps up her runs, ``eve`` is in her group, ``nobody`` is a stranger to both.
"""

from __future__ import annotations

import ast
import fcntl
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import click
import pytest

from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.checkpoints.written import keep
from ftsupervise.cli import checkpoint_upkeep, ftsupervise
from ftsupervise.cli.checkpoints import checkpoints
from ftsupervise.config.believed import load_believed
from ftsupervise.config.load import leaves, loads, values
from ftsupervise.config.strict_yaml import dotted
from ftsupervise.errors import NotPermitted
from ftsupervise.host.ownership import NotTrusted, as_page, held
from ftsupervise.launch.switching import put_up
from ftsupervise.report.reading import read_own
from ftsupervise.rundir import members
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, write_brake
from ftsupervise.truth import LeftCheckpoint
from ftsupervise.watch.tour import EventLine, append
from tests.neighbours.leftovers import end_all_under
from tests.neighbours.patience import wait_until
from tests.neighbours.stranger import ADA, EVE, GROUP, Typed, as_one, begin_as, end, one_by_one, type_as

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

SETTINGS = "name: thesis\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\nwatch: {disk: null, memory: null}\n"
SAVE = """
import pathlib, sys
from ftsupervise.checkpoints.commit import commit
for step in range(1, 6):
    one = pathlib.Path(sys.argv[1], f"step-{step}")
    one.mkdir()
    (one / "weights").write_bytes(b"w" * step)
    commit(one)
"""
ROOT = Path(__file__).parents[2]
# What another account's settings may say: what the run is, what it would ask of Slurm and of its loop, and the limits of its
# watchdogs. No command, no receiver, no path of ours, no expression, and nothing that removes, copies or sends.
SHOWN = (
    *("name", "run_dir", "scheduler", "share", "launch", "sweep", "guard", "price", "nodes.at_most", "watch"),
    *("checkpoints.every", "checkpoints.incremental", "checkpoints.pattern", "checkpoints.verify"),
)
NEVER = ("launch.template", "watch.exec", "watch.metrics", "watch.hang.log", "watch.loss.log", "watch.loss.pattern")
LINKED = ("switches", "state", "nodes", "watch", "groups/g000/state", "groups/g001/state")
READS = {"list", "verify"}  # what only shows
assert checkpoint_upkeep  # it adds its commands to the group
ACTS = sorted({*checkpoints.commands} - READS)


class Project:
    """A project folder in which the group may write, ada's run in it with five checkpoints for her eyes alone, and a folder of
    eve's."""

    def __init__(self, top: Path, python: str) -> None:
        self.top, self.python = top, python
        self.home, self.project, self.eves = top / "home", top / "project", top / "eve"
        for folder, mode, who in ((self.home, 0o700, ADA), (self.project, 0o2775, ADA), (self.eves, 0o777, EVE)):
            folder.mkdir()
            os.chown(folder, pwd.getpwnam(who).pw_uid, GROUP)
            folder.chmod(mode)
        self.run, self.away = self.project / "runs" / "thesis", self.project / "runs" / "away"
        (self.project / "ftsupervise.yaml").write_text(SETTINGS)
        os.chown(self.project / "ftsupervise.yaml", pwd.getpwnam(ADA).pw_uid, GROUP)
        done = self.type("launch", str(self.project / "ftsupervise.yaml"))
        assert done.code == 0, done.said
        wait_until((self.run / "attempts" / "0001" / "end.json").exists, "the end of its job")
        self.save(self.run / "checkpoints")
        (self.project / "runs").chmod(0o2775)
        self.launched = self.run.stat().st_ino
        self.kept = Path(tempfile.mkdtemp(prefix="fts-kept-", dir="/tmp"))
        copy(top, self.kept)

    def as_made(self) -> None:
        """Undo what a test has done. The run keeps the folder that was launched, because its inode tells it from a copy."""
        aside = self.kept.with_name(f"{self.kept.name}-launched")
        for folder, _, _ in os.walk(self.top):
            if os.lstat(folder).st_ino == self.launched:
                Path(folder).rename(aside)
                break
        empty(self.top)
        empty(aside)
        copy(self.kept, self.top)
        copy(self.run, aside)
        shutil.rmtree(self.run)
        aside.rename(self.run)
        assert self.run.stat().st_ino == self.launched

    def save(self, folder: Path) -> None:
        """Ada makes five checkpoints there, for her eyes alone."""
        argv = [self.python, "-c", SAVE, str(folder)]
        subprocess.run(argv, user=ADA, group=GROUP, extra_groups=[], cwd="/", umask=0o077, check=True, timeout=60)

    def type(self, *words: str, umask: int = 0o022, who: str = ADA) -> Typed:
        cwd = self.home if who == ADA else "/"
        return type_as(who, [self.python, "-m", "ftsupervise", *words], self.home, cwd, umask, os.environ["PATH"])

    def own(self, act: Callable[[], object], who: str = ADA) -> None:
        """Do it as that account."""
        as_one(who, act, umask=0)

    def exchange(self, section: str) -> None:
        """Eve renames the run away and puts her own in its place, whose settings have this section of the checkpoints and
        name a third directory, and whose checkpoints are a link to ada's."""

        def do() -> None:
            self.run.rename(self.away)
            for name in ("switches", "launches", "state", "attempts", "watch"):
                (self.run / name).mkdir(parents=True)
            (self.eves / "run").mkdir()
            (self.run / "checkpoints").symlink_to(self.away / "checkpoints")
            (self.run / "run.yaml").write_text(f"{SETTINGS}run_dir: {self.eves}/run\ncheckpoints: {section}\n")

        self.own(do, EVE)

    def adas(self) -> dict[str, int]:
        """Everything in her checkpoints, with its mode."""
        top = self.away / "checkpoints"
        top = top if top.exists() else self.run / "checkpoints"
        return {str(one.relative_to(top)): one.lstat().st_mode for one in top.rglob("*")}


def copy(source: Path, target: Path) -> None:
    """Copy what lies in ``source`` with its owners, modes and times, and give ``target`` those of ``source``."""
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True, timeout=60)


def empty(folder: Path) -> None:
    """Remove all that lies in ``folder``."""
    for one in folder.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()


@pytest.fixture(scope="module")
def made(python: str) -> Iterator[Project]:
    """The project is made once: its launch and its job take longer than most tests here."""
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    project = None
    try:
        project = Project(top, python)
        yield project
    finally:
        end_all_under(top)
        for folder in (top, *((project.kept,) if project else ())):
            shutil.rmtree(folder, ignore_errors=True)  # a job may be ending


@pytest.fixture
def project(made: Project) -> Iterator[Project]:
    """The project as it was made, whatever the test before has done with it."""
    made.as_made()
    yield made
    wait_until(lambda: end_all_under(made.top) == 0, "the end of what the test has started")


def test_what_ones_own_settings_ask_for_is_done(project: Project) -> None:
    """The counter-test: all the others would pass where nothing is ever done."""
    settings = f"{SETTINGS}checkpoints: {{retain: {{last: 2}}, offload: {{to: {project.home}/copies}}}}\n"
    (project.project / "ftsupervise.yaml").write_text(settings)
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0
    done = project.type("checkpoints", "upkeep", "--all")
    assert done.code == 0, done.said
    assert {name for name in os.listdir(project.run / "checkpoints") if name.startswith("step")} == {"step-4", "step-5"}
    assert (project.home / "copies" / "step-5" / "weights").read_bytes() == b"w" * 5


@pytest.mark.threat(
    "A member of the group renames your run away and puts a directory of theirs in its place; its settings tell the "
    "hourly `checkpoints upkeep` to remove all but two checkpoints, and to copy the newest into their folder.",
    "What another account may write names no `retain`, `offload` or `adopt`. The run directory has to be the one "
    "that was launched: its owner, its token and its inode.",
)
@pytest.mark.parametrize("words", [["upkeep", "--all"], ["upkeep", "thesis"], ["upkeep", "{run}"], ["prune", "{run}"]])
def test_the_hourly_upkeep_obeys_no_settings_of_a_stranger(project: Project, words: list[str]) -> None:
    before = project.adas()
    project.exchange(f"{{retain: {{last: 2}}, offload: {{to: {project.eves}}}, adopt: true}}")
    done = project.type("checkpoints", *(word.format(run=project.run) for word in words))
    assert project.adas() == before
    assert os.listdir(project.eves) == ["run"], "nothing was copied"
    assert done.code != 0 and "the run directory was replaced by another" in done.said


@pytest.mark.threat(
    "The same directory lies there when you type a command about checkpoints.",
    "Each that writes, removes or copies refuses it. Only `list` and `verify` look at it.",
)
@pytest.mark.parametrize("verb", ACTS)
def test_no_command_about_checkpoints_acts_in_a_directory_that_was_put_in_the_runs_place(
    project: Project, verb: str
) -> None:
    """Of click's own table: a new command has to show here that it asks, or to stand among those that only show."""
    typed = {
        "prune": ["--last", "2"],
        "offload": ["--to", str(project.home / "copies")],
        "restore": ["--from", str(project.eves / "copies")],
    }
    project.exchange("{}")
    before = project.adas()
    done = project.type("checkpoints", verb, str(project.run), *typed.get(verb, []))
    assert done.code != 0 and "was replaced by another" in done.said, done
    assert project.adas() == before and not (project.home / "copies").exists()


@pytest.mark.threat(
    "A member of the group puts an old copy of your own, with its owner and its token, in the place of the run.",
    "It has another inode, so nothing is removed or copied.",
)
def test_an_old_copy_of_ones_own_in_the_place_of_the_run_is_told_from_it(project: Project) -> None:
    """It has the owner and the token of the run, so only its inode differs."""

    def copied() -> None:
        shutil.copytree(project.run, project.away.with_name("backup"), symlinks=True)

    def exchanged() -> None:
        project.run.rename(project.away)
        project.away.with_name("backup").rename(project.run)

    project.own(copied)
    project.own(exchanged, EVE)
    done = project.type("checkpoints", "prune", "--last", "2", "thesis")
    assert done.code == 77 and "is a copy of the one that was launched" in done.said, done
    assert len(list((project.run / "checkpoints").glob("step-*"))) == 5


@pytest.mark.threat(
    "You keep up the run of somebody else, whose settings name rules and places for copies.",
    "They are shown. Only what you type is done.",
)
def test_settings_of_a_stranger_are_shown_and_what_is_typed_is_done(project: Project) -> None:
    """Eve's own run, which she lets ada keep up: ada's rules count, and no place of eve's."""
    run = project.eves / "runs" / "thesis"

    def make() -> None:
        for name in ("switches", "launches", "state", "attempts", "watch", "checkpoints"):
            (run / name).mkdir(parents=True)
        section = f"{{retain: {{last: 2}}, offload: {{to: {project.eves}/copies}}}}"
        (run / "run.yaml").write_text(f"{SETTINGS}checkpoints: {section}\n")

    project.own(make, EVE)
    for verb in ("prune", "upkeep", "offload"):
        done = project.type("checkpoints", verb, str(run))
        assert done.code != 0 and "belongs to games" in done.said, (verb, done)
        assert "checkpoints.retain" in done.said and "checkpoints.offload" in done.said and "--trust" in done.said
    assert not (project.eves / "copies").exists()
    done = project.type("checkpoints", "prune", "--last", "3", str(run))
    assert "checkpoints verified" in done.said


@pytest.mark.threat(
    "A member of the group puts a link to another folder of yours in the place of the folder of checkpoints.",
    "A link of another account to what is not theirs is not followed.",
)
def test_no_checkpoint_is_removed_through_a_link_that_a_stranger_laid(project: Project) -> None:
    """The run is ada's own, but its checkpoints lie in a folder of the group's, where eve exchanges them for a link."""
    shared, other = project.project / "ckpt", project.home / "other"
    project.own(one_by_one(shared.mkdir, other.mkdir))
    project.save(other)
    settings = f"{SETTINGS}checkpoints: {{path: {shared}, retain: {{last: 2}}}}\n"
    (project.project / "ftsupervise.yaml").write_text(settings)
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0
    project.own(one_by_one(lambda: shared.rename(project.project / "gone"), partial(shared.symlink_to, other)), EVE)
    done = project.type("checkpoints", "upkeep", "thesis")
    assert f"{shared} is a link of games to what belongs to daemon" in done.said
    assert len(list(other.glob("step-*"))) == 5


def two_folders(project: Project) -> tuple[Path, Path]:
    """A run that saves into a folder of the group's, and another folder of ada's beside it. Both have five checkpoints."""
    mine, other = project.project / "ckpt", project.project / "thesis-of-2025"
    project.own(one_by_one(partial(mine.mkdir, 0o755), partial(other.mkdir, 0o755)))
    for folder in (mine, other):
        project.save(folder)
    settings = f"{SETTINGS}checkpoints: {{path: {mine}, retain: {{last: 2}}, offload: {{to: {project.home}/copies}}}}\n"
    (project.project / "ftsupervise.yaml").write_text(settings)
    return mine, other


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("between"))
    second.rename(first)
    first.with_name("between").rename(second)


@pytest.mark.threat(
    "The folder of checkpoints lies below one that the group may write. A member exchanges it for another folder of yours, "
    "which the hourly `checkpoints upkeep` would thin out.",
    "The launch notes which folder the run saves in. Where others may exchange it, another one is neither removed from nor "
    "copied, and the command to type is named.",
)
@pytest.mark.parametrize("when", ["there at launch", "first seen by upkeep"])
def test_no_other_folder_of_ones_own_is_thinned_out_in_the_place_of_the_runs(project: Project, when: str) -> None:
    mine, other = two_folders(project)
    if when != "there at launch":
        project.own(lambda: mine.rename(mine.with_name("later")))
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0
    if when != "there at launch":
        project.own(lambda: mine.with_name("later").rename(mine))
        assert project.type("checkpoints", "prune", "--last", "5", "thesis").code == 0
    project.own(partial(swap, mine, other), EVE)
    for words in (["upkeep", "thesis"], ["prune", "thesis"], ["offload", "--all", "thesis"]):
        done = project.type("checkpoints", *words)
        assert done.code != 0 and f"{mine} is another folder than the one that the run has saved in" in done.said, done
    assert [len(list(folder.glob("step-*"))) for folder in (mine, other)] == [5, 5]
    assert not (project.home / "copies").exists()
    assert "step-5" in project.type("checkpoints", "list", "thesis").said, "what only shows goes on"
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0, "a person has looked"
    done = project.type("checkpoints", "upkeep", "thesis")
    assert [len(list(folder.glob("step-*"))) for folder in (mine, other)] == [2, 5], done


def test_where_nobody_else_could_exchange_it_a_folder_that_was_moved_is_kept_up(project: Project) -> None:
    """The counter-test: its owner copies it to a larger disk, and nobody else may write on the way to it."""
    mine = project.home / "ckpt"
    project.own(partial(mine.mkdir, 0o755))
    project.save(mine)
    settings = f"{SETTINGS}checkpoints: {{path: {mine}, retain: {{last: 2}}}}\n"
    (project.project / "ftsupervise.yaml").write_text(settings)
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0

    def move() -> None:
        shutil.copytree(mine, mine.with_name("larger"))
        shutil.rmtree(mine)
        mine.symlink_to(mine.with_name("larger"))

    project.own(move)
    done = project.type("checkpoints", "upkeep", "thesis")
    assert (done.code, len(list(mine.glob("step-*")))) == (0, 2), done


class Looked(RunDir):
    """A run directory that is exchanged once somebody has found it good, as the first page in it is opened."""

    def __init__(self, root: Path, exchange: Callable[[], None]) -> None:
        super().__init__(root)
        self._exchange: Callable[[], None] | None = exchange

    @property
    def switches(self) -> Path:
        act, self._exchange = self._exchange, None
        if act is not None:
            act()
        return self.root / "switches"

    @switches.setter
    def switches(self, path: Path) -> None:
        """``RunDir`` says where they are."""


@pytest.mark.threat(
    "The run directory is exchanged between the look that found it good and the reading: by `status`, by a watch, or while "
    "`kill` asks whether you are sure.",
    "It is looked at once more after it was read, or written. What was read of another directory is not shown and not sent.",
)
def test_what_is_read_of_a_directory_that_came_in_between_is_not_shown(project: Project) -> None:
    def exchange() -> None:
        project.run.rename(project.away)
        shutil.copytree(project.away, project.run, symlinks=True)

    with pytest.raises(NotTrusted, match="replaced by another while it was read"):
        read_own(Looked(project.run, exchange), datetime.now(timezone.utc))


def test_a_watch_sends_nothing_of_a_directory_that_came_in_between(project: Project) -> None:
    """An ``exec`` watchdog is what gives eve the time."""
    looks, goes = project.home / "looks", project.home / "goes"
    wait = f"touch {looks}; for i in $(seq 600); do [ -e {goes} ] && break; sleep 0.1; done"
    settings = SETTINGS.replace("memory: null", f"memory: null, exec: [{{name: slow, command: [sh, -c, '{wait}']}}]")
    (project.project / "ftsupervise.yaml").write_text(settings)
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(project.type, "watch", "thesis")
        wait_until(looks.exists, "the watch to look at the run")
        project.exchange("{}")
        project.own(goes.touch)
        done = watch.result(60)
    assert "was replaced by another while it was read" in done.said and "thesis: ok" not in done.said, done
    assert not list((project.run / "watch").iterdir()), "nothing was written into it either"


@pytest.mark.parametrize("verb", ["kill", "save"])
def test_a_switch_that_went_up_in_a_directory_that_came_in_between_is_not_said_to_be_up(
    project: Project, verb: str
) -> None:
    project.exchange("{}")  # the moment after the run was found
    rundir = RunDir(project.run)

    def do() -> None:
        os.environ["FTSUPERVISE_STATE_DIR"] = str(project.home / "state")
        os.environ["HOME"] = str(project.home)
        with pytest.raises((NotTrusted, PermissionError, NotPermitted)):
            put_up(rundir, f"{verb}-switch", "")

    project.own(lambda: (project.run / "switches").chmod(0o777), EVE)
    project.own(do)


@pytest.mark.threat(
    "The folder of checkpoints is exchanged between the plan and the removal.",
    "The folder that was judged is held open, and removed from.",
)
def test_a_folder_that_is_held_is_the_one_that_was_judged(project: Project) -> None:
    first = project.home / "first"
    (first / "mine").mkdir(parents=True)
    with held(first) as folder:
        first.rename(project.home / "second")
        first.mkdir()
        assert os.listdir(folder) == ["mine"]


def modes(top: Path) -> dict[str, int]:
    """What its group and others may do with each entry below ``top``, and with itself."""
    return {str(one.relative_to(top)): stat.S_IMODE(one.lstat().st_mode) for one in (top, *top.rglob("*"))}


@pytest.mark.threat(
    "A checkpoint for your eyes alone (0700, 0600) is copied elsewhere or brought back, under whatever umask.",
    "The copy, what is brought back, and the folders made on the way have at most the rights of their source.",
)
@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o600)])
def test_a_copy_and_what_is_brought_back_are_no_wider_than_their_source(
    project: Project, umask: int, folder: int, file: int
) -> None:
    source = project.run / "checkpoints" / "step-5"
    source.chmod(folder)
    (source / "weights").chmod(file)
    copies, back = project.home / "made" / "copies", project.home / "back"
    done = project.type("checkpoints", "offload", "--to", str(copies), "thesis", umask=umask)
    assert done.code == 0, done.said
    shutil.rmtree(source)
    done = project.type("checkpoints", "restore", "--from", str(copies), "thesis", umask=umask)
    assert done.code == 0, done.said
    done = project.type("checkpoints", "restore", "--from", str(copies), "--to", str(back), umask=umask)
    assert done.code == 0, done.said
    for top in (copies.parent, back, source):
        assert top.exists()
        for name, mode in modes(top).items():
            allowed = file if name.endswith("weights") else folder
            assert not mode & 0o077 & ~allowed, (top, name, oct(mode))


@pytest.mark.threat(
    "A member of the group lays a link at `runs/NAME`, or at `runs`, into a private folder of yours, before you "
    "launch.",
    "`launch` refuses a link of another account to what is not theirs.",
)
@pytest.mark.parametrize("laid", ["runs/second", "runs"])
def test_launch_follows_no_link_of_a_stranger_into_a_private_folder(project: Project, laid: str) -> None:
    private = project.home / "private"
    inner = private if laid == "runs/second" else private / "second"

    def make() -> None:
        for name in ("staging/0001", "logs", "state"):
            (inner / name).mkdir(parents=True)
        (inner / "staging" / "0001" / "half").write_text("mine")
        for folder in (private, *private.rglob("*")):
            folder.chmod(0o700 if folder.is_dir() else 0o600)

    def lay() -> None:
        where = project.project / laid
        if where.is_dir():
            where.rename(where.with_name("gone"))
        where.symlink_to(private)

    project.own(make)
    project.own(lay, EVE)
    before = modes(private)
    (project.project / "ftsupervise.yaml").write_text(SETTINGS.replace("thesis", "second"))
    done = project.type("launch", str(project.project / "ftsupervise.yaml"))
    assert done.code == 77 and f"{project.project / laid} is a link of games to what belongs to daemon" in done.said, (
        done
    )
    assert modes(private) == before and (inner / "staging" / "0001" / "half").read_text() == "mine"
    shown = project.type("launch", "--dry-run", str(project.project / "ftsupervise.yaml"))
    assert "launch would refuse at present" in shown.said and "is a link of games" in shown.said


@pytest.mark.threat(
    "Your own link leads to the run, and others may write the folder in which it stands; or a private folder is "
    "there already.",
    "`launch` names that folder too. No folder that was there is opened by a launch.",
)
def test_a_folder_that_was_there_is_not_opened_by_a_launch_and_a_link_hides_no_open_folder(project: Project) -> None:
    """Ada's own link: it is followed, and the folder in which eve could exchange it is named."""
    place = project.home / "place"

    def make() -> None:
        (place / "logs").mkdir(parents=True)
        place.chmod(0o700)
        (place / "logs").chmod(0o700)
        (project.project / "runs" / "second").symlink_to(place)

    project.own(make)
    (project.project / "ftsupervise.yaml").write_text(SETTINGS.replace("thesis", "second"))
    done = project.type("launch", str(project.project / "ftsupervise.yaml"))
    assert done.code == 0, done.said
    assert f"the group games may write {project.project / 'runs'}" in done.said
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE((place / "logs").stat().st_mode) == 0o700


@pytest.mark.threat(
    "`launch.output` lies in a folder that a group or everybody may write, and a link by the name of the next job's "
    "output leads to a private file of yours.",
    "`launch` refuses such a folder, unless the run is shared for launching. Slurm itself follows links: in a sticky "
    "one, as `/tmp`, the kernel's `fs.protected_symlinks` is what keeps it.",
)
def test_no_output_is_written_where_others_may_lay_a_link(project: Project) -> None:
    logs = project.project / "logs"
    project.own(one_by_one(logs.mkdir, partial(logs.chmod, 0o2775)))
    (project.project / "ftsupervise.yaml").write_text(
        SETTINGS.replace("thesis", "second").replace("jobs: 1", f"jobs: 1, output: {logs}/%j.out")
    )
    words = ("launch", str(project.project / "ftsupervise.yaml"))
    done = project.type(*words)
    assert (
        done.code == 77 and f"the group games may write {logs}" in done.said and "leave launch.output out" in done.said
    )
    assert "launch would refuse at present: launch.output" in project.type(*words, "--dry-run").said
    assert not (project.project / "runs" / "second").exists()
    project.own(lambda: logs.chmod(0o755))
    assert project.type(*words).code == 0


@pytest.mark.threat(
    "A new setting acts for whoever watches a run of somebody else, because nobody thought of it; or settings name a "
    "list of nodes.",
    "Every key of the manual's full example is held back or stands in the list of those that are only shown.",
)
def test_every_setting_of_a_stranger_is_one_that_may_only_be_shown(tmp_path: Path) -> None:
    """Of the manual's full example, which has every key: a new setting has to be held back, or to stand in the list here."""
    text = max(
        re.findall(r"```yaml[^\n]*\n(.*?)```", (ROOT / "docs/configuration.md").read_text("utf-8"), re.S), key=len
    )
    path = tmp_path / "ftsupervise.yaml"
    path.write_text(text)
    os.chown(path, pwd.getpwnam(EVE).pw_uid, GROUP)
    found = load_believed(path)
    usual = leaves(values(loads("name: default\nlaunch: {command: default}\n")))
    said = {dotted(key) for key, value in leaves(values(found.run)).items() if usual.get(key) != value}
    assert found.why and said and {key for key in said if not key.startswith(SHOWN) or key.startswith(NEVER)} == set()


@pytest.mark.threat(
    "New code reads a settings file without asking whose it is.",
    "A test walks the source and names it.",
)
def test_whoever_reads_settings_whole_is_known() -> None:
    """Settings of another account come in by ``believed``. Who reads a file without it only shows what it says."""
    whole = {"load", "loads", "loaded"}
    known = {
        "cli/config.py",
        "cli/plan.py",  # checks what it is about to write into a file of its own
        "config/believed.py",
        "report/everything.py",
        "cli/init.py",
    }  # init: what it has written itself
    found = set()
    for path in (ROOT / "ftsupervise").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "ftsupervise.config.load":
                found |= {path.relative_to(ROOT / "ftsupervise").as_posix() for one in node.names if one.name in whole}
    assert found == known


@pytest.mark.threat(
    "You ask by name for the report of a run in whose place a stranger put a directory.",
    "The report says that it was replaced, and lists nothing of it.",
)
def test_a_report_by_name_lists_nothing_of_a_directory_that_was_put_in_the_runs_place(project: Project) -> None:
    project.exchange("{}")
    done = project.type("report", "thesis", "--markdown")
    assert done.code == 77 and "was replaced by another" in done.said


@pytest.mark.threat(
    "You type `status`, `metrics` or `report --week`, and a stranger's directory lies in the place of your run, with "
    "forged pages: an attempt that runs well, or decisions that were only told (`observed/`).",
    "The run is UNKNOWN, because its directory was replaced. Nothing of it is shown.",
)
def test_no_status_shows_a_directory_that_was_put_in_the_runs_place_as_the_run(project: Project) -> None:
    """It is a copy of the run, with a decision that nobody made: all that it says may be forged."""

    def lay() -> None:
        project.run.rename(project.away)
        subprocess.run(
            ["cp", "-r", str(project.away), str(project.run)], stderr=subprocess.DEVNULL, timeout=60, check=False
        )
        (project.run / "attempts" / "0001" / "observed").mkdir()
        told = '{"decision": "hang", "what": "forged", "why": "forged", "at": "2026-11-22T03:00:00+00:00"}'
        (project.run / "attempts" / "0001" / "observed" / "hang.json").write_text(told)

    assert "exit 0" in project.type("status", "thesis").said
    project.own(lay, EVE)
    for words in (
        ["status", "thesis"],
        ["status", "thesis", "--json"],
        ["metrics", "thesis"],
        ["report", "thesis", "--markdown"],
    ):
        done = project.type(*words)
        assert done.code == 77 and "was replaced by another" in done.said and "forged" not in done.said, (words, done)
    for words in (["status"], ["report", "--week", "--markdown"]):
        done = project.type(*words)
        assert done.code == 0 and "was replaced by another" in done.said and "exit 0" not in done.said, (words, done)


def commands_with_a_run() -> Iterator[tuple[str, click.Command]]:
    """Every command of click's table that has an argument for a run."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for word in command.list_commands(click.Context(command)):
                below = command.get_command(click.Context(command), word)
                assert below is not None
                yield from walk(f"{name} {word}".strip(), below)
        elif any(one.name in ("run", "runs", "name") for one in command.params):
            yield name, command

    yield from walk("", ftsupervise)


# ``watch`` and ``check`` say it with the alert, ``forget`` is for what is gone, ``launch`` asks whose the directory is, ``run``
# is typed by a job that has the token, ``cron`` has entries of that name, and a lighthouse's program reads no run.
OTHERWISE = {"watch", "check", "forget", "launch", "run"}


@pytest.mark.threat(
    "You name your run to any other command (`logs`, `alerts`, `checkpoints list`, `kill`, `nodes`, `config show` …), and a "
    "stranger's directory lies in its place.",
    "The command says that it was replaced, shows nothing of it and changes nothing in it.",
)
def test_no_command_that_takes_a_run_takes_a_directory_that_was_put_in_its_place(project: Project) -> None:
    def lay() -> None:
        project.run.rename(project.away)
        subprocess.run(
            ["cp", "-r", str(project.away), str(project.run)], stderr=subprocess.DEVNULL, timeout=60, check=False
        )
        (project.run / "logs" / "forged-1.out").write_text("forged\n")

    project.own(lay, EVE)
    before = sorted((str(one), one.lstat().st_mtime_ns) for one in project.run.rglob("*"))
    seen = set()
    for name, command in commands_with_a_run():
        if name.partition(" ")[0] in (*OTHERWISE, "cron", "sandbox") or name in ("groups run", "groups member"):
            continue
        words = [*name.split(), *typed_for(command)]
        done = project.type(*words)
        assert done.code != 0 and "was replaced by another" in done.said and "forged" not in done.said, (words, done)
        seen.add(name)
    assert {"logs", "checkpoints list", "kill", "save", "clear", "nodes list", "alerts list", "config show"} <= seen
    assert sorted((str(one), one.lstat().st_mtime_ns) for one in project.run.rglob("*")) == before


def typed_for(command: click.Command) -> list[str]:
    """Return the words that a person types behind the command, to name the run."""
    words = []
    for one in command.params:
        if isinstance(one, click.Argument):
            named = one.name in ("run", "runs", "name")
            other = "1" if isinstance(one.type, click.IntRange) else "x"
            words += ["thesis"] if named else [other] * max(1, one.nargs)
        elif one.name == "run":
            words += ["--run", "thesis"]
        elif one.required:
            words += [one.opts[0], "x"]
    return words


@pytest.mark.threat(
    "A directory in the place of your run has `switches`, `state` or `nodes` as links into a private folder of "
    "yours, and you type `save`, `kill`, `clear` or `nodes`.",
    "The command refuses a link of another account to what is not theirs, and writes or removes nothing there.",
)
@pytest.mark.threat(
    "You type `groups leave` or `alerts silence` for a directory in the place of your run, whose `watch` or "
    "`groups/g001/state` is a link into another run of yours.",
    "The command refuses the link, and no journal is written through one.",
)
@pytest.mark.parametrize(
    "words",
    [
        *(["save"], ["kill"], ["clear"], ["clear", "--brake"], ["nodes", "exclude", "node-1"]),
        *(["groups", "leave", "g000"], ["groups", "join", "g001"], ["alerts", "silence", "disk"]),
    ],
)
def test_nothing_that_is_typed_for_a_run_is_written_through_a_link_of_a_stranger(
    project: Project, words: list[str]
) -> None:
    private = project.home / "private"

    def make() -> None:
        for name in LINKED:
            (private / name).mkdir(parents=True)
        (private / "watch" / "journal").mkdir()
        for name in ("switches/kill-switch", "switches/save-switch", "state/brake.json", "groups/g001/state/leave"):
            (private / name).write_text("{}")

    def lay() -> None:
        project.run.rename(project.away)
        for name in ("launches", "attempts"):
            (project.run / name).mkdir(parents=True)
        for name in LINKED:
            (project.run / name).parent.mkdir(parents=True, exist_ok=True)
            (project.run / name).symlink_to(private / name)

    project.own(make)
    project.own(lay, EVE)
    shutil.rmtree(
        project.home / "state" / "watch" / "seen"
    )  # it was launched from another home: no note says what lay there
    before = modes(private)
    more = ["--reason", "x"] if words[0] == "nodes" else []
    done = project.type(*words, str(project.run), *more)
    assert done.code == 77 and "is a link of games to what belongs to daemon" in done.said, done
    assert modes(private) == before


WRITES = (
    *(["save"], ["kill", "--yes"], ["clear"], ["clear", "--brake"], ["clear", "--finished"]),
    *(["observe"], ["observe", "--off"], ["groups", "leave", "g000"], ["groups", "join", "g000"]),
    *(["nodes", "exclude", "node-1", "--reason", "x"], ["alerts", "silence", "disk"], ["watch", "--no-send"]),
    *(["checkpoints", "upkeep"], ["checkpoints", "prune", "--last", "2"], ["forget"]),
)


@pytest.mark.threat(
    "The same directory is a copy of your run in which everybody may write, and only a folder deep in it is a link: "
    "`state/members`, `groups` or a replica group's `state`. You type `clear --brake`, which takes pages away there, "
    "or `kill`.",
    "The folder is held open, and a link of another account to what is not theirs is not followed.",
)
@pytest.mark.parametrize(
    "laid", ["state/members", "groups", "groups/g000", "groups/g000/state", "groups/g000/state/members"]
)
def test_nothing_is_removed_through_a_link_that_lies_deeper_in_a_directory_of_a_stranger(
    project: Project, laid: str
) -> None:
    """The directory in the run's place is a copy of it that everybody may write, but for one folder of it, which is a link."""
    private = project.home / "private"
    brake = Brake(why="it failed", held=("7",))

    def make() -> None:
        for of in (RunDir(project.run), RunDir(project.run).group("g000")):
            (of.state / "members").mkdir(parents=True, exist_ok=True)
            of.attempts.mkdir(exist_ok=True)
            write_brake(of, brake)
        (project.run / laid).mkdir(parents=True, exist_ok=True)
        shutil.copytree(project.run / laid, private)
        (private / "precious").write_text("mine")
        private.chmod(0o700)

    def lay() -> None:
        project.run.rename(project.away)
        subprocess.run(
            ["cp", "-r", str(project.away), str(project.run)], stderr=subprocess.DEVNULL, timeout=60, check=False
        )
        for folder, _, names in os.walk(project.run):
            Path(folder).chmod(0o777)
            for name in names:
                Path(folder, name).chmod(0o666)
        shutil.rmtree(project.run / laid)
        (project.run / laid).symlink_to(private)

    def mine() -> dict[str, str]:
        return {str(one): one.read_text() for one in private.rglob("*") if one.is_file()}

    project.own(make)
    project.own(lay, EVE)
    before = mine()
    for words in WRITES:
        done = project.type(*words, str(project.run))
        assert mine() == before, (words, done)


@pytest.mark.threat(
    "A member of a shared watch puts a link in the place of `watch/watchers` or `watch/events`, so that your watch "
    "says in another run of yours that it is watched.",
    "The link is not followed, and the watch says that it cannot write there.",
)
@pytest.mark.parametrize("name", ["watchers", "events"])
def test_no_watch_writes_through_a_link_that_a_member_laid_into_a_shared_watch(project: Project, name: str) -> None:
    """It leads to the pages of the watch of another run, where a beat would say that one is watched which is not."""
    other, laid = project.home / "other", project.run / "watch" / name
    (project.project / "ftsupervise.yaml").write_text(f"{SETTINGS}share: {{watch: true}}\n")
    done = project.type("launch", "--again", str(project.project / "ftsupervise.yaml"))
    assert done.code == 0, done.said
    project.own(other.mkdir)
    project.own(one_by_one(lambda: laid.rename(laid.with_name("aside")), partial(laid.symlink_to, other)), EVE)
    done = project.type("watch", "--no-send", "thesis")
    assert os.listdir(other) == [], done.said
    assert "cannot write" in done.said and f"{laid} is a link of games to what belongs to daemon" in done.said
    project.own(one_by_one(laid.unlink, lambda: laid.with_name("aside").rename(laid)), EVE)
    done = project.type("watch", "--no-send", "thesis")
    assert "cannot write" not in done.said and (name == "events" or os.listdir(laid)), done.said


TYPED = (
    *(
        ["save"],
        ["kill", "--yes"],
        ["clear"],
        ["forget"],
        ["nodes", "exclude", "node-1"],
        ["alerts", "silence", "disk"],
    ),
    *(["checkpoints", "anew"], ["groups", "leave", "g000"], ["watch"]),
)


@pytest.mark.threat(
    "An `ftsupervise.yaml` of a stranger, or one that others may write, lies where you type `save`, `kill`, `clear`, "
    "`forget`, `nodes exclude` or `alerts silence`, and its `run_dir` is another run of yours.",
    "Such a file leads to no run of yours but one below its own folder.",
)
def test_a_file_of_a_stranger_leads_to_no_run_of_ones_own_in_another_folder(project: Project) -> None:
    """It lies where ada types, or she was told its path: she would stop, forget or silence another run than she means."""
    stranger, mine = project.eves / "ftsupervise.yaml", project.home / "ftsupervise.yaml"
    before = {**modes(project.run), **modes(project.home / "state")}
    for number, words in enumerate(TYPED):
        where = project.run if number else f"../{project.project.name}/runs/thesis"
        project.own(lambda where=where: stranger.write_text(f"{SETTINGS}run_dir: {where}\n"), EVE)  # type: ignore[misc]
        more = ["--reason", "x"] if words[0] == "nodes" else []
        done = project.type(*words, str(stranger), *more)
        assert done.code == 77 and "belongs to games, and the run directory" in done.said, (words, done)
        assert {**modes(project.run), **modes(project.home / "state")} == before
    project.own(lambda: mine.write_text(f"{SETTINGS}run_dir: {project.run}\n"))
    assert project.type("save", str(mine)).code == 77, "everybody may write it"
    mine.chmod(0o644)
    assert project.type("save", str(mine)).code == 0, "her own may"
    launched = project.project / "ftsupervise.yaml"
    launched.chmod(0o664)
    assert project.type("clear", str(launched)).code == 0, "it stands above its run, whose group may clear the switch"


@pytest.mark.threat(
    "Such a file names the folder that `cron remove` or `cron add` would act on.",
    "The command refuses it, and asks for `--dir`.",
)
def test_a_file_of_a_stranger_names_no_cron_folder(project: Project) -> None:
    folder, own = project.eves / "cron", project.home / "cron"
    words = [project.python, "-m", "ftsupervise", "cron", "status"]
    env = {"PATH": os.environ["PATH"], "HOME": str(project.home), "FTSUPERVISE_STATE_DIR": str(project.home / "state")}

    def said(where: Path) -> str:
        done = subprocess.run(
            words, cwd=where, env=env, user=ADA, group=GROUP, extra_groups=[], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    settings = SETTINGS.replace("{", "{{").replace("}", "}}") + "cron: {{directory: {}}}\n"
    project.own(lambda: (project.eves / "ftsupervise.yaml").write_text(settings.format(folder)), EVE)
    assert "belongs to games, so the cron folder that it names is not taken" in said(project.eves)
    project.own(lambda: (project.home / "ftsupervise.yaml").write_text(settings.format(own)))
    assert str(own) in said(project.home)


@pytest.mark.threat(
    "Who can read the events of a run, or a checkpoint that is being restored, opens it and holds its lock, so that "
    "nothing is told or restored any more.",
    "The lock of the events is a file of its own, 0600. What is being restored is 0700 until it is whole.",
)
def test_who_can_read_what_is_brought_back_or_told_can_hold_no_lock_of_it(project: Project) -> None:
    """A lock needs no more than to open a file or a folder to read. Eve would hold it as long as she likes."""
    copies, events = project.home / "copies", project.run / "watch" / "events" / "node-daemon.jsonl"
    project.home.chmod(0o755)
    assert project.type("checkpoints", "offload", "--to", str(copies), "thesis").code == 0
    weights = copies / "step-5" / "weights"
    for one in (*copies.rglob("*"), copies, project.run, *project.run.rglob("*")):
        one.chmod(one.stat().st_mode | 0o055)
    weights.write_bytes(b"broken")  # so that the restore ends in the middle
    words = ("checkpoints", "restore", "--from", str(copies), "--name", "step-5", "--to", str(project.home / "back"))
    assert project.type(*words).code != 0
    partial = project.home / "back" / ".restoring-step-5"

    def hold(path: Path) -> None:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def refused() -> None:
        with pytest.raises(PermissionError):
            hold(partial)

    def tell() -> None:
        append(events, [EventLine(datetime.now(timezone.utc), "thesis", "", "test", "info", summary="told")])

    project.own(refused, EVE)
    project.own(tell)
    assert events.stat().st_mode & 0o004, "she can read it"
    ready, over = os.pipe(), os.pipe()

    def hold_on() -> None:
        hold(events)
        os.write(ready[1], b"1")
        os.read(over[0], 1)

    pid = begin_as(EVE, hold_on)
    try:
        assert os.read(ready[0], 1) == b"1"
        project.own(tell)
    finally:
        os.write(over[1], b"1")
        end(pid)
    assert events.read_text().count("told") == 2
    weights.write_bytes(b"w" * 5)
    assert project.type(*words).code == 0
    assert not partial.exists() and (project.home / "back" / "step-5" / "weights").read_bytes() == b"w" * 5


@pytest.mark.threat(
    "A link of another account lies in the place of `state/members` when a member of the chain begins, behind the "
    "look of its gate.",
    "It prunes and writes nothing through it.",
)
def test_a_member_of_the_chain_prunes_nothing_through_a_link_that_was_laid_behind_its_gate(tmp_path: Path) -> None:
    run, private = RunDir(tmp_path / "run"), tmp_path / "private"
    for folder in (run.state, private):
        folder.mkdir(parents=True)
    for number in range(100):
        (private / f"{number}").touch()
    (run.state / "members").symlink_to(private)
    os.lchown(run.state / "members", pwd.getpwnam(EVE).pw_uid, GROUP)
    with pytest.raises(PermissionError, match="is a link of games to what belongs to root"):
        members.begin(run, "7", datetime.now(timezone.utc), 0)
    assert len(os.listdir(private)) == 100


@pytest.mark.threat(
    "A log or an output of a job is to be appended to a private file that is there already.",
    "It keeps its mode.",
)
def test_a_file_that_is_there_is_appended_to_and_opened_to_nobody(tmp_path: Path) -> None:
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_text("mine")
    private.chmod(0o600)
    for path in (private, new):
        os.close(as_page(path))
    assert [stat.S_IMODE(one.stat().st_mode) for one in (private, new)] == [0o600, 0o644]


PRIVATE = """
import pathlib, sys
from ftsupervise.checkpoints.commit import commit
one = pathlib.Path(sys.argv[1])
(one / "model").mkdir(parents=True)
(one / "model" / "model.pt").write_text("private")
commit(one)
"""


def private_checkpoint(project: Project) -> Path:
    """A checkpoint of ada's that anybody might read, if her home directory did not keep others out."""
    one = project.home / "secret" / "step-9"
    argv = [project.python, "-c", PRIVATE, str(one)]
    subprocess.run(argv, user=ADA, group=GROUP, extra_groups=[], cwd="/", umask=0o022, check=True, timeout=60)
    return one


def all_in(top: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies below a folder, with its mode and its bytes."""
    return {str(one): (one.lstat().st_mode, one.read_bytes() if one.is_file() else b"") for one in top.rglob("*")}


@pytest.mark.threat(
    "A member who may write the folder of your checkpoints, or above it, lays a checkpoint there whose folders are links into "
    "a private one of yours. The hourly `checkpoints upkeep` copies the newest.",
    "No link of another account is followed from a checkpoint into what is not theirs. Nothing is copied, and nothing is "
    "written there.",
)
@pytest.mark.parametrize("laid", ["into it", "above it"])
def test_no_private_checkpoint_is_copied_through_the_links_of_one_that_a_stranger_laid(
    project: Project, laid: str
) -> None:
    secret, folder, copies = private_checkpoint(project), project.project / "ckpt", project.project / "copies"

    def make() -> None:
        for one in (folder, copies):
            one.mkdir()
        folder.chmod(0o2775 if laid == "into it" else 0o755)

    def lay() -> None:
        if laid == "above it":
            folder.rename(folder.with_name("aside"))
            folder.mkdir()
        (folder / "step-9").mkdir()
        for name in ("model", ".ftsupervise"):
            (folder / "step-9" / name).symlink_to(secret / name)

    project.own(make)
    asked = f"{{path: {folder}, offload: {{to: {copies}}}}}"
    (project.project / "ftsupervise.yaml").write_text(f"{SETTINGS}checkpoints: {asked}\n")
    assert project.type("launch", "--again", str(project.project / "ftsupervise.yaml")).code == 0
    project.own(lay, EVE)
    before = all_in(secret)
    done = project.type("checkpoints", "upkeep", "thesis")
    assert all_in(secret) == before
    assert [one for one in copies.rglob("*") if one.is_file()] == [], done
    assert (done.code == 0) == (laid == "into it"), done  # a member's checkpoint there is none of the run's


@pytest.mark.threat(
    "Your command saves into a folder above which others may write. Between two attempts a member puts a link to a private "
    "folder of yours in its place, with a checkpoint of the same name, which would be kept in the run directory.",
    "A link of another account to what is not theirs is not followed. What your own link leads to stays as private as it is.",
)
def test_nothing_private_is_kept_for_the_next_attempt_through_a_link_of_a_stranger(project: Project) -> None:
    secret, out = private_checkpoint(project), project.project / "out"
    kept = project.run / "kept" / "0001"
    left = LeftCheckpoint(str(out / "step-9"), 9, datetime.now(timezone.utc), 7)

    def save() -> None:
        (out / "step-9").mkdir(parents=True, mode=0o755)
        (out / "step-9" / "model.pt").write_text("open")
        assert keep(left, kept, 60).how == "a copy"
        shutil.rmtree(kept)

    def lay() -> None:
        out.rename(out.with_name("aside"))
        out.symlink_to(secret.parent)

    def refuse() -> None:
        with pytest.raises(PermissionError, match="so it is not followed"):
            keep(left, kept, 60)

    def by_my_own() -> None:
        out.unlink()
        out.symlink_to(secret.parent)
        keep(left, kept, 60)

    project.own(save)
    project.own(lay, EVE)
    project.own(refuse)
    assert not kept.exists()
    project.own(by_my_own)
    assert (kept / "step-9" / "model" / "model.pt").read_text() == "private"
    assert not kept.stat().st_mode & 0o077, "nobody else gets there"


@pytest.mark.threat(
    "A member who may write the folder of your checkpoints lays one there in which the folder of our pages is a link into a "
    "private folder of yours, and you set it aside.",
    "The reason is written beside it, and nothing through the link.",
)
@pytest.mark.parametrize("verb", ["set-aside", "anew"])
def test_no_reason_is_written_through_a_link_in_a_checkpoint_of_a_stranger(project: Project, verb: str) -> None:
    mine, folder = project.home / "private", project.project / "ckpt"

    def make() -> None:
        mine.mkdir(0o700)
        (mine / "quarantine.json").write_text("mine")
        (mine / "quarantine.json").chmod(0o600)
        folder.mkdir()
        folder.chmod(0o2775)

    def lay() -> None:
        (folder / "step-7").mkdir()
        (folder / "step-7" / "weights").write_text("w")
        (folder / "step-7" / ".ftsupervise").symlink_to(mine)

    project.own(make)
    project.own(lay, EVE)
    before = all_in(mine)
    done = project.type(
        "checkpoints", verb, str(folder / "step-7" if verb == "set-aside" else folder), "--reason", "odd"
    )
    assert all_in(mine) == before, done
    assert done.code == 0, done
    named = verb == "set-aside"  # a member's is none of the run's, and stays where it is
    assert [one.reason for one in quarantined(folder)] == ([f"odd, by {ADA}"] if named else [])


@pytest.mark.threat(
    "A member who may write the folder of your checkpoints gives a name that is deleted (`.removing-`, `.restoring-`) to your "
    "newest one, or to another folder of yours.",
    "Nothing is deleted there that this very removal has not judged and taken out itself. What has such a name is told, with "
    "what to type.",
)
def test_nothing_is_deleted_for_the_name_that_a_stranger_gave_it(project: Project) -> None:
    folder = project.project / "ckpt"

    def make() -> None:
        folder.mkdir()
        (folder / "precious").mkdir(0o700)
        (folder / "precious" / "thesis.tex").write_text("mine")
        os.utime(folder / "precious", (0, 0))

    def share() -> None:
        folder.chmod(0o2775)

    def lay() -> None:
        (folder / "step-5").rename(folder / ".removing-step-5")
        (folder / "precious").rename(folder / ".restoring-precious")

    project.own(make)
    argv = [project.python, "-c", SAVE, str(folder)]
    subprocess.run(argv, user=ADA, group=GROUP, extra_groups=[], cwd="/", umask=0o022, check=True, timeout=60)
    project.own(share)
    project.own(lay, EVE)
    done = project.type("checkpoints", "prune", str(folder), "--last", "2")
    assert done.code == 0, done
    assert (folder / ".removing-step-5" / "weights").read_bytes() == b"wwwww", done
    assert (folder / ".restoring-precious" / "thesis.tex").exists(), done
    assert "others may write" in done.said and "rm -r" in done.said
    assert sorted(one.name for one in folder.glob("step-*")) == ["step-3", "step-4"], "its own work is done"
