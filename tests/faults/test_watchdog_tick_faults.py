"""Real ticks while storage hangs: at most one child is left behind, the other runs are watched on time, and the process
ends by itself. The alert comes once, and once more when it is over."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

from .conftest import HungMount
from .test_probe_hung_mount import probes_on

pytestmark = pytest.mark.root


class Watching:
    """``ftsupervise watch`` over one run on good storage and, if asked, one whose directory lies on bad storage."""

    def __init__(self, folder: Path, configs: list[Path]) -> None:
        self.folder, self.configs = folder, configs
        (folder / "tmp").mkdir()
        self.env = {**os.environ, "TMPDIR": str(folder / "tmp"), "FTSUPERVISE_STATE_DIR": str(folder / "state")}

    def tick(self) -> tuple[str, float]:
        began = time.monotonic()
        done = typed("watch", *self.configs, "--no-send", env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr, time.monotonic() - began


@pytest.fixture
def configs(tmp_path: Path, hung_mount: HungMount) -> Iterator[list[Path]]:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    disks = f"disk: [{{path: {hung_mount.point}}}, {{}}]"
    good.write_text(
        f"name: good\nlaunch: {{command: a}}\nscheduler: local\nrun_dir: {tmp_path}/good\nwatch: {{{disks}}}\n"
    )
    bad.write_text(f"name: bad\nlaunch: {{command: a}}\nscheduler: local\nrun_dir: {hung_mount.point}/run\n")
    for part in ("switches", "watch", "beats", "logs"):
        (tmp_path / "good" / part).mkdir(parents=True)
    yield [good, bad]


@pytest.mark.fault(
    "Storage hangs for hours and is watched by minutes",
    "one child is left behind, not one a tick; all is told well again when it answers",
)
@pytest.mark.parametrize("ticks", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_ticks_over_hung_storage(hung_mount: HungMount, configs: list[Path], tmp_path: Path, ticks: int) -> None:
    watching = Watching(tmp_path, configs)
    hung_mount.hang("statfs", "getattr", "readdir", "open")
    told = [watching.tick() for _ in range(ticks)]
    assert probes_on(hung_mount) <= 1
    text = "\n".join(words for words, _ in told)
    assert text.count("bad: fired: the storage of") == 1, text
    assert text.count(f"good: fired: {hung_mount.point} has not answered") == 1, text
    assert all("good: bad: is-running" in words for words, _ in told), told[-1][0]  # looked at each time
    later = sorted(seconds for _, seconds in told[1:])
    assert later[len(later) // 2] < 20  # the abandoned child is not waited for again
    hung_mount.answer()
    wait_until(lambda: "bad: resolved: the storage of" in watching.tick()[0], "the storage to be told well again", 60)
    assert probes_on(hung_mount) == 0
