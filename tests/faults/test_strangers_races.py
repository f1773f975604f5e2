"""A member of the group exchanges a folder for a link into a private one again and again, between a look at a path and an act.

Real accounts: ``ada`` works in a folder that her group may write, and ``eve`` of that group exchanges a folder of hers there
for a link to another of hers, some hundred thousand times a second (``renameat2``). One round in some hundreds met the moment.
"""

from __future__ import annotations

import codecs
import ctypes
import grp as grp  # what ada's process loads only when it needs it, from where it cannot read
import os
import pwd
import shlex as shlex
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftsupervise.host import files, ownership
from ftsupervise.launch.folders import make_folders
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import RunDir, warn, write_whole
from ftsupervise.rundir.records import write_json

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

ADA, EVE = pwd.getpwnam("daemon"), pwd.getpwnam("games")
GROUP = EVE.pw_gid  # of both
SECONDS = 4.0
EXCHANGE, AT_FDCWD = 2, -100
PRIVATE = "private"
codecs.lookup("ascii")


class Scene:
    """``mine``: a folder of ada's which eve exchanges for a link to ``private``; ``way``: eve's link to whatever lies there."""

    def __init__(self, top: Path) -> None:
        self.shared, self.private = top / "shared", top / "private"
        for folder, mode in ((self.shared, 0o2775), (self.private, 0o700)):
            self.make(folder, mode)
        self.mine, self.link, self.way = (self.shared / name for name in ("mine", "link", "way"))
        self.make(self.mine, 0o755)
        for link, target in ((self.link, self.private), (self.way, self.mine)):
            link.symlink_to(target)
            os.chown(link, EVE.pw_uid, GROUP, follow_symlinks=False)
        self.make(self.private / "folder", 0o700)
        self.make(self.private / "switches", 0o700)
        (self.private / "page").write_text(PRIVATE)
        (self.private / "page").chmod(0o600)
        os.chown(self.private / "page", ADA.pw_uid, GROUP)
        self.before = self.seen()

    def make(self, folder: Path, mode: int) -> None:
        folder.mkdir()
        os.chown(folder, ADA.pw_uid, GROUP)
        folder.chmod(mode)

    def seen(self) -> dict[str, tuple[int, int, str]]:
        """All that is private: its mode, its group and what it says."""
        return {
            str(path.relative_to(self.private)): (
                stat.S_IMODE(path.lstat().st_mode),
                path.lstat().st_gid,
                path.read_text() if path.is_file() else "",
            )
            for path in self.private.rglob("*")
        }

    def clear(self) -> None:
        """Empty ada's folder, whichever name it has now."""
        for name in (self.mine, self.link):
            with suppress(OSError):
                fd = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW)
                _empty(fd)
                os.close(fd)


def _empty(fd: int) -> None:
    for name in os.listdir(fd):
        with suppress(OSError):
            os.unlink(name, dir_fd=fd)
            continue
        inner = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        _empty(inner)
        os.close(inner)
        os.rmdir(name, dir_fd=fd)


def exchange(one: Path, other: Path) -> None:
    """Eve's process: it ends when it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(one), os.fsencode(other)
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(EVE.pw_uid)
    while True:
        if libc.renameat2(AT_FDCWD, a, AT_FDCWD, b, EXCHANGE):
            os._exit(1)


def work(scene: Scene, act: Callable[[Scene], object]) -> None:
    """Ada's process. It leaves at once where something private is not as it was."""
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(ADA.pw_uid)
    os.umask(0o022)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with suppress(OSError, ownership.NotTrusted):
            act(scene)
        if scene.seen() != scene.before:
            print(f"private: {scene.seen()}", file=sys.stderr)
            os._exit(2)
        scene.clear()


def forked(do: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            do()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def rename(on: Scene) -> None:
    write_json(on.shared / "new", {}, sync=False)
    files.rename(on.shared / "new", on.mine / "page")


def set_mode(on: Scene) -> None:
    ownership.make_folder(on.mine / "folder")
    ownership.set_mode(on.mine / "folder", 0o755)


ACTS: dict[str, Callable[[Scene], object]] = {
    "a page is made, and not kept": lambda on: os.close(ownership.as_page(on.way / "page")),
    "a page is written whole": lambda on: write_whole(on.mine / "page", "ours", sync=False),
    "a page is renamed": rename,
    "a page is removed": lambda on: ownership.remove_entry(on.mine / "page"),
    "a folder is made": lambda on: ownership.claim_folder(on.mine / "folder"),
    "folders are made": lambda on: ownership.make_folder(on.mine / "folder" / "deep", parents=True),
    "a folder is made like another": lambda on: ownership.make_like(on.mine / "folder", ownership.Reach(0o755)),
    "a folder gets its mode": set_mode,
    "a run's folders are made": lambda on: make_folders(RunDir(on.mine), None),
    "a page is appended to": lambda on: os.close(files.open_append(on.mine / "page")),
    "a job is warned": lambda on: warn(on.mine, "it ends", lambda text: None),
    "an area is sealed": lambda on: fence.seal(on.mine, 9, [1]),
}


@pytest.fixture
def scene(top: Path) -> Iterator[Scene]:
    yield Scene(top)


@pytest.mark.threat(
    "A member of the group exchanges a folder of yours for a link into a private one, again and again, so that it lies there "
    "between a look and an act: while a page is written, renamed or removed, a folder made or given its mode.",
    "Each is done in the folder that was judged, which is held open. Nothing private is overwritten, removed, or opened wider.",
)
@pytest.mark.parametrize("name", ACTS)
def test_nothing_private_is_changed_by_a_folder_that_is_exchanged_between_a_look_and_the_act(
    scene: Scene, name: str
) -> None:
    eve = forked(lambda: exchange(scene.mine, scene.link))
    try:
        ada = forked(lambda: work(scene, ACTS[name]))
        ended = os.waitstatus_to_exitcode(os.waitpid(ada, 0)[1])
    finally:
        os.kill(eve, signal.SIGKILL)
        eves = os.waitstatus_to_exitcode(os.waitpid(eve, 0)[1])
    assert eves == -signal.SIGKILL, "eve did what she could until the end"
    assert scene.seen() == scene.before
    assert ended == 0
