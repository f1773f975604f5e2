"""Questions to this machine that are asked here and, by the job of ``--probe``, on the nodes. Each caller has a bound for them.

Standard library only, with plain values for an answer: some are asked in a child that loads nothing else (``Probe.call``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_QUESTION = (
    "import importlib.util, sys; found = importlib.util.find_spec('ftsupervise'); "
    "print(sys.executable, '%d.%d.%d' % sys.version_info[:3], found and __import__('ftsupervise').__version__ or '-')"
)


def try_place(path: str) -> dict[str, object]:
    """Make a file in ``path``, or in the nearest directory above it that is there, as a run does: exclusively, with fsync, and
    renamed. Return ``PlaceSeen`` without ``space`` and ``ahead``. Raises OSError where nothing of it can be looked at."""
    from ftsupervise.host.local_disks import lies_here
    from ftsupervise.host.ownership import distrust, shown_user

    at = path
    while not Path(at).is_dir() and at != "/":
        at = os.path.dirname(at)  # noqa: PTH120
    found = Path(at).stat()
    there = at == path
    trouble, full = "", False
    try:
        trouble = _write_as_a_run(at)
    except OSError as error:
        trouble, full = f"{getattr(error, 'step', 'make a file')}: {error.strerror or error}", error.errno in _FULL
    mine = found.st_uid == os.geteuid()
    return {
        "path": path,
        "there": there,
        "at": at,
        "trouble": trouble,
        "full": full,
        "stranger": distrust(found, at, accounts=(found.st_uid,)) if there else "",
        "owner": "" if mine or not there else shown_user(found.st_uid),
        "local_kind": "here" if lies_here(at) else "",
    }


def _write_as_a_run(folder: str) -> str:
    """Return what is odd about the file system of ``folder``, as a clause; "" where it does as it should. Raises OSError."""
    name = f"{folder}/.tmp-doctor-{os.getpid()}-{os.urandom(8).hex()}"
    renamed, new = f"{name}.renamed", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    step, made = "make a file", list[str]()
    try:
        fd = os.open(name, new, 0o600)
        made.append(name)
        try:
            step = "write"
            os.write(fd, b"ftsupervise\n" * 400)
            step = "fsync"
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.close(os.open(name, new, 0o600))
        except FileExistsError:
            pass
        else:
            return "a file was made exclusively that was there already"
        step = "rename"
        os.rename(name, renamed)
        made[:] = [renamed]
        step = "read"
        fd = os.open(renamed, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            whole = os.read(fd, 100_000) == b"ftsupervise\n" * 400
        finally:
            os.close(fd)
        return "" if whole else "a file does not hold what was written to it"
    except OSError as error:
        error.step = step  # type: ignore[attr-defined]
        raise
    finally:
        for one in made:
            try:
                os.unlink(one)
            except OSError:  # its trouble is the one that is told
                continue


def ask_python(program: str, env: Mapping[str, str], folder: str, seconds: float) -> tuple[str, str, str, str, bool]:
    """Return the path, version, and version of ftsupervise ("" where it finds none) of the Python that ``program`` starts in
    ``folder``, why it did not answer, and whether it only was not done in ``seconds``; never raises for what it does.

    It is asked in "/": for a question in ``folder`` Python would take what lies there for its modules, and a training whose
    script lies elsewhere never does.
    """
    from ftsupervise.host import bounded

    named = os.path.join(os.path.abspath(folder), program) if "/" in program else program  # noqa: PTH100, PTH118
    try:
        done = bounded.run([named, "-c", _QUESTION], timeout=seconds, env=env, cwd="/", output_limit=4000)
    except OSError as error:
        return program, "", "", f"{error.strerror or error}", False
    words = done.stdout.split()
    if done.code != 0 or len(words) < 3:
        return program, "", "", done.words(), done.timed_out
    return " ".join(words[:-2]), words[-2], "" if words[-1] == "-" else words[-1], "", False


def look_at_memory() -> tuple[int, int, int | None]:
    """Return the bytes free and in all of the tightest limit on this process, and those free in /dev/shm; None: there is none.

    Raises OSError or ValueError where that cannot be seen.
    """
    from ftsupervise.host.memory import SHARED_MEMORY, HostMemory

    memory = HostMemory()
    try:
        free, total = min(memory.rooms(active=False))
    finally:
        memory.close()
    try:
        found = os.statvfs(SHARED_MEMORY)
        shared = found.f_bavail * found.f_frsize if os.path.ismount(SHARED_MEMORY) else None
    except OSError:
        shared = None
    return free, total, shared
