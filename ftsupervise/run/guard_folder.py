"""The guard for a training whose Python has no ftsupervise: a copy in the run directory, found by PYTHONPATH.

Python looks there again at each later import, and so does each process that the training starts. So where another account may
put another directory in the place of the run's, the copy lies in this account's own state, ``STATE/guard``.

It stands alone because it writes a copy of ourselves, and knows no run.

    RUN/guard/VERSION-DIGEST/path/ftsupervise/      what PYTHONPATH names: it decides whose guard is taken (guard/by_path.py)
                             package/ftsupervise/   the guard, standard library alone, for Python 3.9 and newer

The tool lives where ``uv tool install`` or pipx put it, and nothing of its packages may stand before the training's own. It is
a copy, because the run directory is what a container has to see anyway. It is made once for each run and version; a file that
is missing or cut short is written again.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import FOLDER, exchanged_by, held_to_write, make_folder, make_own
from ftsupervise.rundir.paths import ENV_VERSION, RunDir, state_dir, write_whole
from ftsupervise.version import VERSION

_PACKAGE = Path(__file__).parents[1]
# What the guard, its integrations and a standby import: tests/unit/test_old_python.py walks it, and holds it to Python 3.9.
ROOMS = ("checkpoints", "guard", "host", "integrations", "rundir", "snapshots", "warm")
PARTS = (
    *("config/__init__.py", "config/supervisor.py", "ranks/__init__.py", "ranks/shm_dir.py", "scheduler/__init__.py"),
    *(f"replicas/{name}.py" for name in ("__init__", "bounds", "members", "sources", "stalls", "table")),
)
_BY_PATH = "guard/by_path.py"
_WITHIN = 60.0  # seconds for the copy, on a file system that may hang
_ROOM, _ROOM_INODES = 32_000_000, 1000  # bytes and inodes that must be free: ten times what the copy takes
_KEPT = 3  # copies: an earlier attempt may still end with the one before

_made: dict[Path, Path] = {}  # by this process: the folder of the copies -> the entry for PYTHONPATH


def copied() -> tuple[str, ...]:
    """Return the files of this package that the copy consists of, relative to it, in order."""
    folders = (_PACKAGE, *(_PACKAGE / room for room in ROOMS))
    whole = {str(path.relative_to(_PACKAGE)) for folder in folders for path in folder.glob("*.py")}
    return tuple(sorted({*whole, *PARTS}))


def add_guard(env: dict[str, str], rundir: RunDir, command: Sequence[str], say: Callable[[str], None]) -> None:
    """Let the command with this environment find our guard after its own PYTHONPATH. Where the copy cannot be made the command
    begins without: it may need none. A restart in this process takes the copy that is there."""
    env[ENV_VERSION] = VERSION
    root = rundir.guard
    try:
        entry = in_time(partial(_entry, root, env), _WITHIN)
        why = "its file system does not answer"
    except OSError as error:
        entry, why = None, error.strerror or str(error)
        why = f"{error.filename}: {why}" if isinstance(error, PermissionError) and error.filename else why
    if entry is not None:
        env["PYTHONPATH"] = with_entry(env, entry)
        if not entry.is_relative_to(root) and not _has_ours(env, command):
            say(
                f"the guard lies in {entry.parents[1]}, which each node has to see: "
                f"others may put another directory in the place of {root.parent}"
            )
    elif not _has_ours(env, command):
        say(
            f"the guard could not be copied to {root}: {why}; where the training's Python has no ftsupervise, "
            "it cannot import it: install it there, or set this right and start again"
        )


def _entry(root: Path, env: Mapping[str, str]) -> Path:
    """Return the entry for PYTHONPATH, of a copy that nobody else can exchange. Raises OSError."""
    if not exchanged_by(root):
        return _copy(root)
    try:
        own = state_dir(env)
    except RuntimeError as error:  # an account of a container, without a home
        raise OSError(errno.ENOENT, str(error), str(root)) from None
    make_own(own)
    if why := exchanged_by(own / root.name):
        raise PermissionError(errno.EPERM, f"{why}, and the training would run what lies there", str(root))
    return _copy(own / root.name, drop=False)  # other runs have theirs there


def _copy(root: Path, *, drop: bool = True) -> Path:
    """Make the copy, or take that of an earlier attempt of this process, if its folders are still ours alone to write."""
    if os.pathsep in str(
        root
    ):  # Python would read two entries there, of which the second may be in the current directory
        raise OSError(errno.EINVAL, f"PYTHONPATH takes no folder with a {os.pathsep!r} in its name")
    entry = _made.get(root)
    if entry is None or not entry.is_dir():
        entry = _made[root] = prepare(root, drop=drop)
    for folder in (root, entry.parent, entry, entry / "ftsupervise"):
        _require_own(folder)
    return entry


def _has_ours(env: Mapping[str, str], command: Sequence[str]) -> bool:
    """Return whether the command's Python is ours by its path: it is named, or its environment is the activated one."""
    beside = str(Path(sys.executable).parent)
    return (
        any(str(Path(word).parent) == beside for word in command) or env.get("PATH", "").split(os.pathsep)[0] == beside
    )


def with_entry(env: Mapping[str, str], entry: Path) -> str:
    """Return PYTHONPATH with ``entry`` behind all that a person has there. One of an outer supervisor gives way. Pure."""
    theirs = env.get("PYTHONPATH", "")
    kept = [one for one in theirs.split(os.pathsep) if not _is_ours(one)] if theirs else []
    return os.pathsep.join((*kept, str(entry)))


def _is_ours(entry: str) -> bool:
    parts = Path(entry).parts
    return parts[-1:] == ("path",) and parts[-3:-2] == ("guard",)


def prepare(root: Path, *, drop: bool = True) -> Path:
    """Make the copy in ``root``, or complete it; return the entry for PYTHONPATH. ``drop``: all but the newest copies go.

    Raises OSError, PermissionError also where another account could have written what the training would run.
    """
    sources = {name: (_PACKAGE / name).stat() for name in copied()}
    told = "\n".join(f"{name} {one.st_size} {one.st_mtime_ns}" for name, one in sources.items())
    home = root / f"{VERSION}-{blake2b(told.encode(), digest_size=6).hexdigest()}"
    fresh = not home.is_dir()
    if fresh:
        _require_room(root.parent)
    make_folder(root, FOLDER)
    with held_to_write(root) as here:  # from here on no other folder can be put in its place, and lose what is in it
        _require_own(root, here.stat())
        _complete(here / home.name, sources)
        if fresh and drop:
            _drop_old(here, here / home.name)
    return home / "path"


def _complete(home: Path, sources: Mapping[str, os.stat_result]) -> None:
    """Make the copy in ``home``, or what is missing of it."""
    wanted = {home / "package" / "ftsupervise" / name: (name, one.st_size) for name, one in sources.items()}
    wanted[home / "path" / "ftsupervise" / "__init__.py"] = (_BY_PATH, sources[_BY_PATH].st_size)
    # Python makes these itself, as wide as the umask of the training has it, and runs what lies there
    compiled = {path.parent / "__pycache__" for path in wanted}
    for folder in (*_folders(home, wanted), *sorted(compiled)):
        make_folder(folder, FOLDER)
        _require_own(folder)
    for path, (name, size) in wanted.items():
        if not _is_whole(path, size):
            write_whole(path, (_PACKAGE / name).read_bytes(), sync=False)


def _require_room(folder: Path) -> None:
    """Raise OSError where the disk is nearly full: the run's own pages need that space more than the copy does."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _ROOM or (found.f_files and found.f_favail < _ROOM_INODES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _folders(home: Path, files: Mapping[Path, object]) -> list[Path]:
    """Return the folders to make, those above before those inside."""
    found = {folder for path in files for folder in path.parents if folder == home or home in folder.parents}
    return sorted(found, key=lambda one: len(one.parts))


def _require_own(folder: Path, found: os.stat_result | None = None) -> None:
    found = folder.lstat() if found is None else found
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        why = "it is not ours alone to write, and the training would run what lies there"
        raise PermissionError(errno.EPERM, why, str(folder))


def _is_whole(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_uid == os.geteuid()


def _drop_old(root: Path, home: Path) -> None:
    """Remove all copies but the newest. Nobody waits for that to succeed."""
    import shutil

    for old in sorted(_others(root, home), reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(old[1], ignore_errors=True)


def _others(root: Path, home: Path) -> Iterator[tuple[int, str]]:
    for entry in os.scandir(root):
        if entry.path != str(home) and entry.is_dir(follow_symlinks=False):
            yield entry.stat(follow_symlinks=False).st_mtime_ns, entry.path
