"""The directory a sandbox lives in: whose it is, who works on it now, and the environment that leads to it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ftsupervise.errors import AlreadyRunning, NotPermitted, UsageError
from ftsupervise.host import ownership
from ftsupervise.host.users import shown_user
from ftsupervise.sandbox.conf import Layout

ENV_DIRECTORY = "FTSUPERVISE_SANDBOX"  # where `ftsupervise sandbox` looks when no --dir is given

_MOMENT = 1.0  # seconds
_RECORD = 1_000_000  # bytes
_OUTER = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT", "SSTAT_", "SPRIO_", "PMI")


def default_directory() -> Path:
    """Where a sandbox lives unless told otherwise: short (Unix sockets), and the same from every shell of this user."""
    return Path(f"/tmp/ftsupervise-sandbox-{os.getuid()}")


def real(directory: Path | str | None) -> Path:
    """The one name of a directory: processes are recognised by it."""
    return Path(os.path.realpath(default_directory() if directory is None else directory))


def outer_variables(environ: Iterable[str]) -> list[str]:
    """Names of variables that an outer Slurm job, or the user's defaults for Slurm, put into ``environ``."""
    return sorted(name for name in environ if name.startswith(_OUTER))


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without them."""
    return {name: value for name, value in environ.items() if not name.startswith(_OUTER)}


def make(root: Path) -> bool:
    """Make the directory; ours alone, unless we are root (whose jobs may run as others). False if it was there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(0o700)
    except FileExistsError:
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{root} is not a directory") from None
        if found.st_uid != os.geteuid():  # root's may be believed, but nothing can be made there
            raise _not_ours(f"{root} belongs to {shown_user(found.st_uid)}") from None
        _believe(found, root)
        return False
    root.chmod(0o755 if os.getuid() == 0 else 0o700)
    return True


def believed(root: Path, record: str, *more: str) -> bytes:
    """The ``record`` of the sandbox in ``root``, if no stranger owns or may write it, the directory, or ``more`` files in it.

    A sandbox leads to commands: its slurm.conf names plugins, its record a prefix of programs. Raises NotPermitted, and
    FileNotFoundError when there is none.
    """
    try:
        _believe(root.lstat(), root)
        for name in more:
            try:
                _believe((root / name).lstat(), root / name)
            except FileNotFoundError:
                pass
        return ownership.read_trusted(root / record, limit=_RECORD)
    except (NotADirectoryError, FileNotFoundError):
        raise FileNotFoundError(root / record) from None
    except ownership.NotTrusted as error:
        raise _not_ours(error.message.removesuffix(", so nothing in it is believed"), error.hint) from None
    except OSError as error:  # a link or a FIFO in the record's place, a directory that may not be entered
        raise _not_ours(f"{root / record} cannot be believed: {error.strerror}") from None


def _believe(found: os.stat_result, path: Path) -> None:
    reason = ownership.distrust(found, path)
    if reason:
        raise _not_ours(reason, ownership.remedy(found, path) if found.st_uid == os.geteuid() else "")


def _not_ours(reason: str, hint: str = "") -> NotPermitted:
    return NotPermitted(f"this sandbox is not used: {reason}", hint=hint or "use a directory of your own: --dir DIR")


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Nobody else brings this sandbox up or down meanwhile. It is one machine, so a lock can be trusted."""
    try:
        fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield  # the directory is gone; its processes may not be
        return
    try:
        if not _lock(fd, layout.lock):
            raise AlreadyRunning(f"another command is bringing the sandbox in {layout.root} up or down")
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> bool:
    """Whether the lock is ours now: held by nobody else, and still the file of that name (``down`` removes it).

    What was killed just now may have left a child that has not come to its exec, and holds the lock for that moment.
    """
    until = time.monotonic() + _MOMENT
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.02)
        return path.stat().st_ino == os.fstat(fd).st_ino
    except OSError:
        return False


def write_new(path: Path, data: str | bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)  # whatever the umask says
        file.write(data.encode() if isinstance(data, str) else data)


def clear(layout: Layout) -> None:
    """Remove what a sandbox made, and nothing else. Without its record it cannot be said what that is."""
    if layout.record.exists():
        for path in layout.own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def leave(layout: Layout, *, root_too: bool) -> None:
    """The last step of ``down``: the lock, and the directory, if it was ours and nobody keeps files of his own there."""
    layout.lock.unlink(missing_ok=True)
    if root_too and layout.root.exists():
        try:
            layout.root.rmdir()
        except OSError:
            pass
