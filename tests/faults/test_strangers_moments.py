"""A member of the group who may write above a run exchanges a folder for a link while something is under way in it: between
two looks at one name, or while a copy takes its time.

Real accounts: ``ada`` has a run where her group may write, and a private one in her home. ``eve`` is in that group.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.checkpoints import written
from ftsupervise.checkpoints.written import drop_older, keep
from ftsupervise.host.ownership import NotTrusted, claim_folder, held, make_folder, strangers_link
from ftsupervise.rundir.paths import RunDir
from ftsupervise.run import fencing
from ftsupervise.truth import LeftCheckpoint

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

ADA, EVE = "daemon", "games"  # every Debian has them
GROUP = pwd.getpwnam(EVE).pw_gid  # of both


def become(who: str) -> None:
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(pwd.getpwnam(who).pw_uid)
    os.umask(0o022)


def begin(who: str, act: Callable[[], object]) -> int:
    """Let that account begin to do it; return the process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become(who)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def end(pid: int) -> None:
    assert os.waitpid(pid, 0)[1] == 0, "it could not be done"


def as_one(who: str, act: Callable[[], object]) -> None:
    end(begin(who, act))


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

    def all_of(self, top: Path) -> dict[str, int]:
        """Everything that lies there, with its mode."""
        return {str(one.relative_to(top)): one.lstat().st_mode for one in sorted(top.rglob("*"))}


@pytest.fixture
def scene(top: Path) -> Scene:
    return Scene(top)


def test_a_chain_of_links_that_has_no_end_is_given_up_at_once(scene: Scene) -> None:
    """Each link names the one below it several times: the depth is small, and the number of steps is not."""

    def lay() -> None:
        links = scene.project / "links"
        (links / "l0").mkdir(parents=True)
        for n in range(1, 39):
            (links / f"l{n}").symlink_to("/".join([f"l{n - 1}", *[f"../l{n - 1}"] * 3]))
        scene.run.symlink_to(links / "l38")

    def look() -> None:
        for look_there in (strangers_link, lambda path: held(path).__enter__()):
            before = time.process_time()
            with pytest.raises(OSError, match="Too many levels"):
                look_there(scene.run / "switches")
            assert time.process_time() - before < 1

    as_one(EVE, lay)
    looking = begin(ADA, look)
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until and os.waitid(os.P_PID, looking, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.05)
        assert os.waitid(os.P_PID, looking, os.WEXITED | os.WNOHANG | os.WNOWAIT), "it still looks"
    finally:
        os.kill(looking, 9)
        ended = os.waitpid(looking, 0)[1]
    assert ended == 0


def test_no_staging_area_is_sealed_through_a_link(scene: Scene) -> None:
    def make() -> None:
        for run in (scene.run, scene.private):
            for number in (1, 2):
                (run / "attempts" / f"000{number}").mkdir(parents=True)
            (run / "staging" / "0001").mkdir(parents=True)
            (run / "staging" / "0001" / "half").write_text("of a page")
            (run / "checkpoints").mkdir()

    as_one(ADA, make)
    before = scene.all_of(scene.private)
    said: list[str] = []
    as_one(EVE, scene.exchange)  # behind the look of the gate, and the claim
    as_one(ADA, lambda: fencing.begin(RunDir(scene.run), 2, {}, said.append))
    time.sleep(0.5)
    assert scene.all_of(scene.private) == before


def test_nothing_that_was_kept_is_removed_through_a_link(scene: Scene) -> None:
    """Eve exchanges the run while the bytes are copied."""

    def make() -> None:
        for run in (scene.run, scene.private):
            run.mkdir()
            for number in (1, 2, 3):
                (run / "kept" / f"000{number}").mkdir(parents=True, mode=0o700)
                (run / "kept" / f"000{number}" / "model-step-7.pt").write_bytes(b"kept")
        (scene.home / "model-step-7.pt").write_bytes(bytes(20 << 20))

    as_one(ADA, make)
    before = scene.all_of(scene.private)

    def keep_it() -> None:
        left = LeftCheckpoint(str(scene.home / "model-step-7.pt"), 7, datetime.now(timezone.utc), 20 << 20)
        asked = []

        def stopped() -> bool:
            if not asked:
                asked.append(True)
                (scene.project / "begun").touch()
                while not scene.away.exists():
                    time.sleep(0.01)
            return False

        try:
            keep(left, scene.run / "kept" / "0003", 60, stopped)
        except OSError:
            pass
        try:
            drop_older(scene.run / "kept", 3)
        except OSError:
            pass

    def exchange() -> None:
        while not (scene.project / "begun").exists():
            time.sleep(0.01)
        scene.exchange()

    hers = begin(EVE, exchange)
    as_one(ADA, keep_it)
    end(hers)
    assert scene.all_of(scene.private) == before
