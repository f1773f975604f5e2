"""Checkpoints come and go through the attempt's own staging folder, by one rename each: whole, and by one writer.

A newer attempt seals that folder when it begins (``rundir/fence.py``). From then on neither a commit nor a removal of this
attempt has any effect, whatever it had checked before. Without ``ftsupervise run`` no folder is sealed, and the same calls
still give checkpoints that are whole or absent.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.host.modes import SHARED, make_folder, mode_inside
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import ENV_GUARD, sync_directory

_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE
_AT_FDCWD = -100


class Checkpoints:
    """The checkpoints of this run, as seen by one attempt. ``superseded`` says whether a newer one is known to have begun."""

    def __init__(self, place: RankContext, superseded: Callable[[], bool], voice: Voice) -> None:
        self.folder = place.checkpoints
        self._area = place.staging or place.checkpoints / fence.STAGING / "alone"
        self._superseded, self._voice, self._place = superseded, voice, place

    def stage(self, name: str) -> Path:
        """An empty folder to write the checkpoint ``name`` into; every rank may ask. After the seal: a path that leads nowhere.

        Raises ValueError for a name that is a path, OSError when the folder cannot be made.
        """
        if not name or name.startswith(".") or "/" in name:
            raise ValueError(f"{name!r} is not a name for a checkpoint: give no path and no leading dot")
        staged = self._area / name
        try:
            make_folder(staged, parents=True)
        except OSError:
            if not self.over():
                raise
        return staged

    def latest(self, world: int | None) -> Path | None:
        """The newest one that is good to go on from; None when there is none. Raises OSError where they cannot be read."""
        from ftsupervise.checkpoints.find import choose
        from ftsupervise.checkpoints.verify import Scope, Thoroughness

        owner = () if self._place.rundir is None else (self._place.rundir.root.stat().st_uid,)
        try:
            thoroughness = Thoroughness(self._place.verify)
        except ValueError:
            self._voice.once(f"{ENV_GUARD}VERIFY={self._place.verify!r} is not understood: every byte is verified")
            thoroughness = Thoroughness.FULL
        choice = choose(self.folder, Scope(thoroughness, world, owner))
        if self._place.rank == 0:
            for one in choice.passed:
                self._voice.once(f"checkpoint {one.words()}; it is passed over")
        return choice.verdict.path if choice.verdict is not None else None

    def over(self) -> bool:
        """Is it known that this attempt can no longer save?"""
        return self._area.is_file() or self._superseded()

    def commit(self, staged: Path) -> bool:
        """Make the staged folder the checkpoint of that name, replacing an existing one. False: a newer attempt has begun.

        Synced first, as far as this process wrote it. Raises OSError when it cannot be done.
        """
        target = self.folder / staged.name
        try:
            _sync(staged)
            done = self._move(staged, target)
            if done:
                sync_directory(self.folder)
            return done
        except OSError as error:
            if not self.over():
                raise
            self._voice.once(f"this attempt saves nothing any more ({error.strerror})")
            return False

    def remove(self, path: Path) -> bool:
        """Remove an old checkpoint. False: a newer attempt has begun and owns it now. Raises OSError."""
        aside = self._area / f".removed-{path.name}-{os.getpid()}"
        try:
            make_folder(self._area, parents=True)
            done = fence.move(path, aside, self._area)
        except OSError:
            if not self.over():
                raise
            return False
        if done:
            _delete(aside)
        return done

    def _move(self, staged: Path, target: Path) -> bool:
        try:
            return fence.move(staged, target, self._area)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not _exchange(staged, target):
            raise FileExistsError(
                errno.EEXIST, "is there already, and this file system cannot exchange two", str(target)
            )
        _delete(staged)
        return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False where kernel or file system cannot."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    except (ImportError, AttributeError):
        return False
    number = ctypes.get_errno()
    if code and number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(one))
    return bool(code == 0)


def _delete(path: Path) -> None:
    """Delete a folder of ours that is no longer used; the next attempt deletes the rest of it."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _close_to_others(fd: int) -> None:
    """Let no other account write the checkpoint, whatever the umask was: the next attempt loads it."""
    try:
        found = os.fstat(fd)
        if found.st_mode & 0o022 and found.st_uid == os.geteuid():
            os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o022)
    except OSError:
        return


def _sync(folder: Path) -> None:
    shared = mode_inside(folder.parent) == SHARED
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            try:
                fd = os.open(Path(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # a link, another's file: not ours to sync
                continue
            try:
                if not shared:
                    _close_to_others(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
        if not shared:
            _close_folder(root)
        sync_directory(Path(root))


def _close_folder(folder: str) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _close_to_others(fd)
    finally:
        os.close(fd)
