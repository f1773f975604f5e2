"""Every command of click's table, with a link or a folder of a stranger in the place of everything that lies around a run.

Nothing is listed here: the commands are those of click, and the places are found by a walk through a project with a finished
run, its account's state, its cron folder and TMPDIR. So a new command and a new page of a run are in here without a line.

Real accounts: ``ada`` types, ``eve`` is in her group and may write her project. What eve lays leads to private copies of ada's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import click
import pytest

from ftsupervise.host import files, ownership
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_json, write_json
from ftsupervise.rundir.switches import clear_switch
from tests.neighbours.commands import every_command
from tests.neighbours.leftovers import end_all_under
from tests.neighbours.patience import wait_until
from tests.neighbours.walked_desk import ADA, EVE, GROUP, Desk, Place

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

LONG = {"drill", "sandbox up", "sandbox exec"}  # they do their work in folders of their own, for minutes
AT_ONCE = 10  # places that are exchanged for one command, where not each is tried by itself


@pytest.fixture
def desk(top: Path, python: str) -> Iterator[Desk]:
    yield Desk(top, python)
    wait_until(lambda: end_all_under(top) == 0, "the end of what the test has started")


def named(desk: Desk, number: int) -> str:
    """Her run, as people name one: by its name, its directory or its settings."""
    return ("thesis", str(desk.run), str(desk.project / "ftsupervise.yaml"))[number % 3]


def tried(desk: Desk, name: str, command: click.Command, places: list[Place], number: int) -> list[str]:
    """One command that ada typed while eve's things lay there, and what came of it."""
    back = [desk.lay(place) for place in places]
    end = desk.type(*desk.words(name, command, named(desk, number)))
    wait_until(lambda: end_all_under(desk.project) + end_all_under(desk.state) == 0, f"the end of what {name} began")
    wrong = desk.broken()
    if end.code is None:
        wrong.append("it does not end")
    if "Traceback" in end.said:
        wrong.append(end.said[-2000:])
    for one in reversed(back):
        one()
    desk.as_made()
    where = ", ".join(f"{place.path.relative_to(desk.top)} ({place.how})" for place in places)
    return [f"{name}, with {where}: {one}" for one in wrong]


def apart(places: list[Place], most: int) -> list[Place]:
    """As many of them as do not lie in each other."""
    found: list[Place] = []
    for one in places:
        inside = any(one.path in (other.path, *other.path.parents) or other.path in one.path.parents for other in found)
        if not inside and len(found) < most:
            found.append(one)
    return found


@pytest.mark.threat(
    "A member of the group lays a link, or a folder of links, in the place of anything that belongs to a run, to the state of "
    "its account or to its cron: each leads to a private one of yours. You type any command that there is.",
    "Each file is opened, and each folder made, where no link of another account leads. Nothing private is written, widened or "
    "removed, and no report or copy says what it says.",
)
def test_no_command_does_anything_in_private_through_what_a_stranger_has_laid(desk: Desk) -> None:
    """Each command meets some of the places, a few at once; ``make soak`` has each by itself."""
    chosen, wrong = Random(26), []
    for number, (name, command) in enumerate(one for one in every_command() if one[0] not in LONG):
        places = desk.places()
        chosen.shuffle(places)
        wrong += tried(desk, name, command, apart(places, AT_ONCE), number)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_command_with_any_one_place(desk: Desk) -> None:
    every = [(command, place) for command in every_command() if command[0] not in LONG for place in desk.places()]
    Random(26).shuffle(every)
    wrong = []
    for number, ((name, command), place) in enumerate(every):
        wrong += tried(desk, name, command, [place], number)
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def crossed(top: Path) -> tuple[Path, Path]:
    """A folder of ada's in which the group may write, where eve has laid the link ``way``; and the private one it leads to."""
    shared, private = top / "shared", top / "private"
    for folder, mode in ((shared, 0o2775), (private, 0o700)):
        folder.mkdir()
        os.chown(folder, ADA.pw_uid, GROUP)
        folder.chmod(mode)
    (private / "switches").mkdir()
    (private / "switches" / "save-switch").touch()
    write_json(private / "page", {"why": "private"})
    os.chown(private / "page", ADA.pw_uid, GROUP)
    (shared / "way").symlink_to(private)
    os.chown(shared / "way", EVE.pw_uid, GROUP, follow_symlinks=False)
    return shared, private


@pytest.mark.threat(
    "A folder of your run, of its journal or of its marks for nodes is exchanged for a link of another account to a private "
    "one of yours, whose pages then stand in a report that others may read.",
    "Where a file that was opened does not lie where its name says, the links on the way are judged as everywhere.",
)
def test_no_page_is_read_or_written_through_a_folder_that_is_a_strangers_link(crossed: tuple[Path, Path]) -> None:
    shared, private = crossed
    for act in (
        lambda: read_json(shared / "way" / "page"),
        lambda: write_json(shared / "way" / "new", {}),
        lambda: os.close(files.create_new(shared / "way" / "new")),
        lambda: os.close(files.open_append(shared / "way" / "new")),
        lambda: ownership.remove_entry(shared / "way" / "page"),
        lambda: clear_switch(RunDir(shared / "way"), "save-switch"),
        lambda: ownership.make_folder(shared / "way" / "made"),
        lambda: ownership.make_folder(shared / "way" / "made" / "deep", parents=True),
    ):
        with pytest.raises(PermissionError, match="is a link of games to what belongs to daemon"):
            act()
    assert sorted(os.listdir(private)) == ["page", "switches"]
    assert os.listdir(private / "switches") == ["save-switch"]


def test_ones_own_link_and_a_folder_that_is_held_are_read_and_written(crossed: tuple[Path, Path]) -> None:
    """The counter-test."""
    shared, private = crossed
    (shared / "mine").symlink_to(private)
    for _ in range(2):
        assert read_json(shared / "mine" / "page") == {"why": "private"}
    with ownership.held(private) as here:
        private.rename(shared / "moved")
        write_json(here / "new", {})
        assert read_json(here / "page") == {"why": "private"}
    assert sorted(os.listdir(shared / "moved")) == ["new", "page", "switches"]


def test_a_container_that_has_only_this_account_reads_through_links_of_root(top: Path, python: str) -> None:
    """Apptainer and rootless Podman show root, and all others, by one number."""
    (top / "disk").mkdir()
    write_json(top / "disk" / "page", {})
    os.chown(top / "disk", ADA.pw_uid, GROUP)
    (top / "home").symlink_to(top / "disk")
    code = "import sys; from ftsupervise.host import files; files.read_bounded(sys.argv[1], 100)"
    inside = ["unshare", "--user", f"--map-user={ADA.pw_uid}", "--"]
    as_ada = partial(
        subprocess.run, capture_output=True, text=True, timeout=60, check=False,
        user=ADA.pw_uid, group=GROUP, extra_groups=[], cwd="/",
    )  # fmt: skip
    if as_ada([*inside, "true"]).returncode:
        pytest.skip("this machine lets accounts make no user namespace")
    done = as_ada([*inside, python, "-c", code, str(top / "home" / "page")])
    assert done.returncode == 0, done.stderr
