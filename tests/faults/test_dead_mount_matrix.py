"""A mount that hangs, at every depth and in every place a tick looks at: the other run is watched within its period.

The file system is a real one (FUSE); the command is the one that people and crontabs type. ``bad`` lies on it, or what is asked
of it does; ``good`` lies elsewhere and must be looked at, written down and told as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.neighbours.patience import wait_until

from .conftest import HungMount

pytestmark = pytest.mark.root

PERIOD = 60.0  # seconds: cron.minutely
SCRIPT = Path(__file__).parents[2] / "cron" / "cron.minutely" / "watch-all"


@dataclass(frozen=True)
class Case:
    """``hangs``: what the mount does not answer; ``lies``: what lies on it; ``by``: how the runs are named."""

    name: str
    lies: str
    hangs: str
    by: str


ROOT, SETTINGS, STATE, DISK = "run directory", "settings", "state", "disk"
QUICK = [
    Case("the data of the settings file", SETTINGS, "read:/bad.yaml", "yaml"),
    Case("writing into the run directory", ROOT, "write:/bad/watch", "name"),
    Case("the state directory, from the crontab", STATE, "all", "cron"),
]
SLOW = [
    Case("the whole run directory, by YAML", ROOT, "all", "yaml"),
    Case("the whole run directory, by directory", ROOT, "all", "directory"),
    Case("the whole run directory, by name", ROOT, "all", "name"),
    Case("one directory of the run", ROOT, "all:/bad/launches", "name"),
    Case("the data of a page of the run", ROOT, "read:/bad/watch", "directory"),
    Case("the watched disk", DISK, "statfs getattr", "yaml"),
    Case("the settings file", SETTINGS, "all:/bad.yaml", "yaml"),
    Case("the state directory, by name", STATE, "all", "name"),
    Case("the data of the state directory", STATE, "read", "directory"),
    Case("writing into the state directory", STATE, "write", "yaml"),
    Case("the whole run directory, from the crontab", ROOT, "all", "cron"),
]
CASES = [*(pytest.param(case, id=case.name) for case in QUICK),
         *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW)]  # fmt: skip


class Desk:
    """Two runs that were launched by this account, and whoever watches both."""

    def __init__(self, folder: Path, mount: HungMount, lies: str) -> None:
        self.folder, self.mount = folder, mount
        place = {"run directory": folder / "backing"}.get(lies, folder)
        self.state = mount.point if lies == STATE else folder / "state"
        state = folder / "backing" if lies == STATE else self.state
        self.yaml = {"good": folder / "good.yaml", "bad": folder / "bad.yaml"}
        self.root = {"good": folder / "good", "bad": (mount.point if lies == ROOT else folder) / "bad"}
        disk = mount.point if lies == DISK else folder
        if lies == SETTINGS:
            self.yaml["bad"] = mount.point / "bad.yaml"
        (state / "runs").mkdir(parents=True)
        (folder / "tmp").mkdir()
        for name, real in (("good", folder / "good"), ("bad", place / "bad")):
            for part in ("switches", "watch", "beats", "logs", "launches", "state", "attempts"):
                (real / part).mkdir(parents=True)
            text = (
                f"name: {name}\nscheduler: slurm\nlaunch: {{command: a}}\nrun_dir: {self.root[name]}\n"
                f"watch: {{disk: [{{path: {disk if name == 'bad' else folder}}}]}}\n"
                f"alerts: {{receivers: [{{file: {{path: {folder}/{name}.txt}}}}]}}\n"
            )
            (real / "run.yaml").write_text(text)
            at = folder / "backing" if lies == SETTINGS and name == "bad" else folder
            (at / f"{name}.yaml").write_text(text)
            (state / "runs" / name).symlink_to(self.root[name])
        bin_dir = folder / "bin"
        bin_dir.mkdir()
        for name in ("squeue", "sbatch"):  # a queue in which nothing is
            (bin_dir / name).write_text("#!/bin/sh\n")
            (bin_dir / name).chmod(0o755)
        (bin_dir / "ftsupervise").write_text(f'#!/bin/sh\nexec {sys.executable} -m ftsupervise "$@"\n')
        (bin_dir / "ftsupervise").chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "TMPDIR": str(folder / "tmp"),
            "FTSUPERVISE_STATE_DIR": str(self.state),
        }

    def tick(self, by: str) -> tuple[str, float]:
        """What one tick said, and how long it took."""
        names = ("bad", "good")  # the one that hangs is named first
        argv = ["sh", str(SCRIPT)]
        if by != "cron":
            words = [str({"yaml": self.yaml[name], "directory": self.root[name], "name": name}[by]) for name in names]
            argv = [sys.executable, "-m", "ftsupervise", "watch", *words]
        said = self.folder / "said"
        with said.open("w") as out:
            began = time.monotonic()
            process = subprocess.Popen(argv, env=self.env, stdout=out, stderr=out, start_new_session=True)
            try:
                process.wait(2 * PERIOD)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                pytest.fail(f"the tick hangs: {said.read_text()}")
        assert "Traceback" not in said.read_text(), said.read_text()
        return said.read_text(), time.monotonic() - began

    def looked_at(self) -> datetime | None:
        """When somebody last looked at the good run."""
        pages = [path for path in (self.root["good"] / "watch").glob("watchers/*") if path.is_file()]
        return max((datetime.fromisoformat(json.loads(page.read_text())["at"]) for page in pages), default=None)

    def left_behind(self) -> int:
        """Living children that were abandoned."""
        notes = [json.loads(path.read_text()) for path in (self.folder / "tmp").glob("ftsupervise-*/probe/[0-9]*.json")]
        return sum(note["abandoned"] and Path(f"/proc/{note['pid']}/fd").exists() for note in notes)


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path, dead_mount: HungMount) -> Iterator[Desk]:
    yield Desk(tmp_path, dead_mount, request.param)


def _parametrised() -> pytest.MarkDecorator:
    both = [pytest.param(c.values[0].lies, c.values[0], id=c.id, marks=c.marks) for c in CASES]  # type: ignore[union-attr]
    return pytest.mark.parametrize(("desk", "case"), both, indirect=["desk"])


@pytest.mark.fault(
    "A mount hangs under one of the watched runs: all of it, one directory, the data of a page, or writing",
    "the child that looks is given up after some seconds, the run is told not to answer, every other run is watched "
    "within its period",
)
@pytest.mark.fault(
    "The file with a run's settings hangs, or its data does",
    "the run is watched by the settings it had, or told; the others are watched",
)
@pytest.mark.fault(
    "The home directory with the watch's own state hangs",
    "names are looked up in what this host remembers, alerts are kept on this host until it answers",
)
@_parametrised()
def test_a_mount_that_hangs_stops_nobody_else_s_tick(desk: Desk, case: Case) -> None:
    desk.tick(case.by)
    before = desk.looked_at()
    assert before is not None
    desk.mount.hang(*case.hangs.split())
    first, seconds = desk.tick(case.by)
    after = desk.looked_at()
    assert after is not None
    assert after > before, f"the good run was not looked at:\n{first}"
    assert seconds < PERIOD, f"{seconds:.0f} s:\n{first}"
    assert "not answer" in first, first
    children = desk.left_behind()
    second, seconds = desk.tick(case.by)
    again = desk.looked_at()
    assert again is not None
    assert again > after, f"the good run was not looked at a second time:\n{second}"
    assert seconds < PERIOD, f"{seconds:.0f} s:\n{second}"
    assert desk.left_behind() <= children + 1, "each tick leaves more children behind"
    assert desk.left_behind() <= 3
    desk.mount.answer()
    wait_until(lambda: "not answer" not in desk.tick(case.by)[0], "the storage to be seen well again", 60)


@pytest.mark.slow
@pytest.mark.parametrize("desk", [ROOT], indirect=True)
def test_a_watch_that_goes_on_looks_at_the_others_again_and_again_and_ends_when_it_is_told_to(desk: Desk) -> None:
    names = [str(desk.yaml[name]) for name in ("bad", "good")]
    argv = [sys.executable, "-m", "ftsupervise", "watch", "--every", "2s", *names]
    with (desk.folder / "said").open("w") as out:
        process = subprocess.Popen(argv, env=desk.env, stdout=out, stderr=out)
    try:
        wait_until(lambda: desk.looked_at() is not None, "the first tick", 60)
        desk.mount.hang("all")
        seen = {desk.looked_at()}

        def looked_at_again() -> bool:
            seen.add(desk.looked_at())
            return len(seen) > 4

        wait_until(looked_at_again, "four more looks at the good run", PERIOD)
        assert "the storage of" in (desk.folder / "said").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.fault(
    "Many runs lie on one dead mount",
    "each is given up by itself, at the same time: they do not add up to more than the watch's period",
)
@pytest.mark.parametrize("desk", [ROOT], indirect=True)
def test_many_runs_on_one_dead_mount_do_not_add_up(desk: Desk) -> None:
    """Nine runs hang, each in the data of one of its pages, so that no look at the mount itself can tell."""
    backing, more = desk.folder / "backing", []
    for number in range(8):
        name = f"bad-{number}"
        for part in ("switches", "watch", "launches"):
            (backing / name / part).mkdir(parents=True)
        (backing / name / "watch" / "memory.json").write_text("{}")
        path = desk.folder / f"{name}.yaml"
        path.write_text(f"name: {name}\nscheduler: slurm\nlaunch: {{command: a}}\nrun_dir: {desk.mount.point}/{name}\n")
        more.append(path)
    (backing / "bad" / "watch" / "memory.json").write_text("{}")
    desk.mount.hang("read")
    argv = [
        sys.executable,
        "-m",
        "ftsupervise",
        "watch",
        *map(str, more),
        str(desk.yaml["bad"]),
        str(desk.yaml["good"]),
    ]
    began = time.monotonic()
    done = subprocess.run(argv, env=desk.env, capture_output=True, text=True, timeout=2 * PERIOD, check=False)
    assert time.monotonic() - began < PERIOD, done.stdout
    assert desk.looked_at() is not None
    assert done.stdout.count("fired: the storage of") == 9, done.stdout + done.stderr
