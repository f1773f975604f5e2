"""The directory a sandbox lives in: whose it is, who works on it now, and the environment that leads to it."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ftsupervise.errors import AlreadyRunning, NotPermitted, UsageError
from ftsupervise.sandbox.conf import Layout

ENV_DIRECTORY = "FTSUPERVISE_SANDBOX"  # where `ftsupervise sandbox` looks when no --dir is given

_MOMENT = 1.0  # seconds
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


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name; Slurm takes the number
        return str(os.getuid())


def make(root: Path) -> bool:
    """Make the directory; ours alone, unless we are root (whose jobs may run as others). False if it was there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir()
    except FileExistsError:
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory") from None
        if root.stat().st_uid != os.getuid():
            raise NotPermitted(f"{root} belongs to somebody else", hint="use another one: --dir DIR") from None
        return False
    root.chmod(0o755 if os.getuid() == 0 else 0o700)
    return True


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
