"""Somebody who may rename the run directory lays links where old attempts are sealed. Nothing they lead to is touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.run import fencing
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.stranger import as_stranger

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder of the group in which two people work, and what one of them keeps elsewhere."""
    place = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    place.chmod(0o777)
    (place / "mine" / "0001").mkdir(parents=True)
    (place / "mine" / "0001" / "thesis").write_text("three years")
    (place / "mine").chmod(0o700)
    yield place
    shutil.rmtree(place)


def a_run_of_the_strangers(top: Path, *links: tuple[str, str]) -> RunDir:
    """The run directory that now stands under the name of ours. ``links``: name below it, target below ``top``."""
    run = RunDir(top / "run")

    def make() -> None:
        os.umask(0)
        for folder in (run.attempts, run.checkpoints, run.switches):
            folder.mkdir(parents=True)
        for name, target in links:
            (run.root / name).parent.mkdir(parents=True, exist_ok=True)
            (run.root / name).symlink_to(top / target)

    as_stranger(make)
    return run


def begin(run: RunDir) -> tuple[fencing.FenceToken, list[str]]:
    said: list[str] = []
    found: list[Path] = []
    hold = fencing.begin(run, 3, {}, said.append)
    for areas in (run.staging, run.checkpoints / fence.STAGING):
        try:
            found += fence.seal(areas, 3, (1, 2))
        except OSError:
            continue
    fencing.sweep(found)
    return hold, said


@pytest.mark.threat(
    "Somebody who may rename the run directory puts a link in the place of its staging areas, which are emptied and "
    "deleted at the next attempt.",
    "ftsupervise does not follow links there. The log says that old attempts cannot be sealed.",
)
@pytest.mark.parametrize("name", ["staging", "checkpoints/.staging"])
def test_a_link_in_the_place_of_the_staging_areas_is_not_swept(top: Path, name: str) -> None:
    run = a_run_of_the_strangers(top, (name, "mine"))
    hold, said = begin(run)
    assert os.listdir(top / "mine") == ["0001"]
    assert (top / "mine" / "0001" / "thesis").read_text() == "three years"
    assert None in (hold.area, hold.staging)
    assert any("cannot be sealed" in words and "Not a directory" in words for words in said)


@pytest.mark.threat(
    "Somebody puts a link in the place of one old staging area, or of one that is being sealed.",
    "ftsupervise leaves the link alone and does not touch its target.",
)
@pytest.mark.parametrize("name", ["staging/0001", "staging/.sealed-0001-by-2-7-0", "staging/.swept-0001-by-2-7-0"])
def test_a_link_in_the_place_of_an_old_staging_area_is_not_swept(top: Path, name: str) -> None:
    run = a_run_of_the_strangers(top, (name, "mine/0001"))
    hold, _ = begin(run)
    assert (top / "mine" / "0001" / "thesis").read_text() == "three years"
    assert hold.area is not None, "and the attempt has its own"
