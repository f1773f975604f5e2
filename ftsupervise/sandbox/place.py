"""The directory of a sandbox: its owner, its lock, and the environment that leads to it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.errors import AlreadyRunning, NotFound, NotPermitted, UsageError
from ftsupervise.host import files, ownership, processes
from ftsupervise.host.begin import path_folders
from ftsupervise.host.ownership import shown_user
from ftsupervise.host.processes import Process
from ftsupervise.sandbox.conf import Layout

ENV_DIRECTORY = "FTSUPERVISE_SANDBOX"  # where `ftsupervise sandbox` looks when no --dir is given

_MOMENT = 1.0  # seconds
_RECORD = 1_000_000  # bytes
_OUTER = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT", "SSTAT_", "SPRIO_", "PMI")


def default_directory() -> Path:
    """Return the default directory of a sandbox: short (Unix sockets), and the same from every shell of this user."""
    return Path(f"/tmp/ftsupervise-sandbox-{os.getuid()}")


def real(directory: Path | str | None) -> Path:
    """Return the one name of a directory: processes are recognised by it."""
    return Path(os.path.realpath(default_directory() if directory is None else directory))


def outer_variables(environ: Iterable[str]) -> list[str]:
    """Return names of variables that an outer Slurm job, or the user's defaults for Slurm, put into ``environ``."""
    return sorted(name for name in environ if name.startswith(_OUTER))


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without them."""
    return {name: value for name, value in environ.items() if not name.startswith(_OUTER)}


def make(root: Path) -> bool:
    """Make the directory; ours alone, unless we are root (whose jobs may run as others). Returns False if it was there."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(0o700)
    except FileExistsError:
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{root} is not a directory") from None
        if found.st_uid != os.geteuid():  # root's directory is trusted, but nothing can be created there
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
        raise _not_ours(error.message.removesuffix(", so nothing in it is trusted"), error.hint) from None
    except OSError as error:  # a link or a FIFO in the record's place, a directory that may not be entered
        raise _not_ours(f"{root / record} cannot be trusted: {error.strerror}") from None


def _believe(found: os.stat_result, path: Path) -> None:
    reason = ownership.distrust(found, path)
    if reason:
        raise _not_ours(reason, ownership.remedy(found, path) if found.st_uid == os.geteuid() else "")


def _not_ours(reason: str, hint: str = "") -> NotPermitted:
    return NotPermitted(f"this sandbox is not used: {reason}", hint=hint or "use a directory of your own: --dir DIR")


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Lock the sandbox so that no other command brings it up or down. It is one machine, so a lock can be trusted."""
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
    """Return whether the lock is ours now, and still the file of that name (``down`` removes it).

    A process killed just now may have left a child before its exec, which holds the lock for that moment.
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


def folder(path: Path, mode: int) -> None:
    """Make a folder of a sandbox with this ``mode``, whatever the umask says. Others may enter a sandbox of root's, or one in a
    folder that was there: what answers whoever reaches its socket (munged, the database) stands in one of 0700."""
    path.mkdir(0o700)
    path.chmod(mode)


def write_new(path: Path, data: str | bytes, mode: int) -> None:
    fd = files.create_new(path, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)  # whatever the umask says
        file.write(data.encode() if isinstance(data, str) else data)


def clear(layout: Layout) -> None:
    """Remove the files that a sandbox made, and no others. Without its record they are not known."""
    if layout.record.exists():
        for path in layout.own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def leave(layout: Layout, *, root_too: bool) -> None:
    """The last step of ``down``: remove the lock, and the directory, if it was ours and holds no other files."""
    layout.lock.unlink(missing_ok=True)
    if root_too and layout.root.exists():
        try:
            layout.root.rmdir()
        except OSError:
            pass


# The processes of this machine that belong to a sandbox are found, and ended without ever hitting a stranger.
#
# Nothing is looked up in pid files: they lie after a crash, and process numbers are used again. A process belongs to
# a sandbox when its environment names that sandbox's slurm.conf *and* it is a Slurm daemon, a Slurm command, or runs
# in a job (SLURMD_NODENAME is one of the sandbox's nodes); and so do all descendants of its daemons and jobs. A shell in
# which a person typed ``eval "$(ftsupervise sandbox env)"`` names the slurm.conf too, and is left alone.

MARK = "FTSUPERVISE_SANDBOX_DAEMON"  # directory of the sandbox, in the environment of its daemons
MARK_OWNER = "FTSUPERVISE_SANDBOX_OWNER"  # in the environment of processes that end with their owner (keeper.py)
MARK_NODE = "FTSUPERVISE_SANDBOX_NODE"  # the node, in the environment of slurmd and what it starts

DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "slurmdbd", "mariadbd", "mysqld"}
_FORGETFUL = {"slurmscriptd"}  # overwrites the environment it was started with, all but SLURM_CONF
COMMANDS = {"srun", "sbatch", "salloc", "scancel", "squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "sattach"}
COMMANDS |= {"sbcast", "sdiag", "sprio", "sshare", "sstat", "strigger"}
_STARTERS = {"ip", "nsenter", "unshare", "sh"}  # make hosts, and become the slurmd there


@dataclass(frozen=True)
class Member:
    """A process of a sandbox, and the node it plays on ("" for those of the whole cluster)."""

    process: Process
    node: str


def members(conf: Path, nodes: Collection[str], hosts: Mapping[tuple[int, int], str] | None = None) -> list[Member]:
    """Return every process of the sandbox with this slurm.conf, except ourselves and our ancestors.

    ``hosts``: its nodes by the device and number of their network namespaces. All that runs in one belongs to that node.
    """
    seen = {process.pid: process for process in processes.living()}
    found: dict[int, Member] = {}
    for process in seen.values():
        node = _place(process, processes.environment(process.pid), str(conf), nodes)
        if not node and hosts:
            node = hosts.get(_network(process.pid), node)
        if node is not None:
            found[process.pid] = Member(process, node)
    for process, origin in _descendants(seen, set(found)):
        found[process.pid] = Member(process, found[origin].node)
    return [member for pid, member in found.items() if pid not in _callers(seen)]


def _place(process: Process, environ: dict[str, str], conf: str, nodes: Collection[str]) -> str | None:
    """Return the node a process plays on, "" if it serves the whole cluster, None if it is none of ours."""
    if process.name == "slurmstepd" and "SLURM_CONF" not in environ:
        return _by_log(process.pid, Path(conf).parent / "log")
    if environ.get("SLURM_CONF") != conf:
        return None
    job_node = environ.get("SLURMD_NODENAME")
    if job_node in nodes:
        return job_node
    if process.name in DAEMONS and (MARK in environ or process.name in _FORGETFUL):
        return environ.get(MARK_NODE, "")
    if process.name in _STARTERS and MARK in environ:
        return environ.get(MARK_NODE, "")
    return "" if process.name in COMMANDS else None


def _network(pid: int) -> tuple[int, int]:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116 - one for each process of this machine
    except OSError:  # gone, or another account's
        return 0, 0
    return found.st_dev, found.st_ino


def _by_log(pid: int, logs: Path) -> str | None:
    """Return the node of a slurmstepd by its open log: in Slurm 24.11 it runs with an empty environment."""
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            opened = Path(str(fd.readlink()).removesuffix(" (deleted)"))
            if opened.parent == logs and opened.suffix == ".log":
                return opened.stem
    except OSError:  # gone, or another account's
        pass
    return None


def _descendants(seen: dict[int, Process], roots: set[int]) -> Iterator[tuple[Process, int]]:
    """Yield descendants of ``roots`` that are no roots themselves, each with the nearest root above it.

    A command's children are not followed: the child of ``salloc`` is the user's own shell.
    """
    for process in seen.values():
        if process.pid in roots:
            continue
        above = process.parent
        while above not in roots and above in seen and above > 1:
            above = seen[above].parent
        if above in roots and seen[above].name not in COMMANDS:
            yield process, above


def _callers(seen: dict[int, Process]) -> set[int]:
    callers, pid = set[int](), os.getpid()
    while pid not in callers and pid > 0:
        callers.add(pid)
        pid = seen[pid].parent if pid in seen else 0
    return callers


def power_cut(choose: Callable[[], Collection[Process]], seconds: float) -> list[Process]:
    """End all processes that ``choose`` names, as if at one moment; returns those that did not end within ``seconds``.

    All are stopped before any is killed: else one lives to report another's death, and the controller sees a failed job
    instead of a lost node. The youngest is killed first: a stopped child that loses its parent is woken by the kernel (SIGHUP,
    SIGCONT). The scan repeats until two in a row find no new process: /proc is read entry by entry, and a
    process that forks and ends meanwhile, or was just being started, can escape one scan.
    """
    end = time.monotonic() + seconds
    while True:
        held = _stop_all(choose, end)
        for process in sorted(held, key=lambda one: (one.start, one.pid), reverse=True):
            processes.signal_exactly(process, signal.SIGKILL)
        left = processes.wait_gone(held, max(0.5, end - time.monotonic()))
        if not held or left or time.monotonic() >= end:
            return left


def _stop_all(choose: Callable[[], Collection[Process]], end: float) -> list[Process]:
    held: dict[tuple[int, int], Process] = {}
    calm = 0
    while calm < 2 and time.monotonic() < end:
        new = [p for p in choose() if (p.pid, p.start) not in held]
        for process in new:
            processes.signal_exactly(process, signal.SIGSTOP)
            held[process.pid, process.start] = process
        calm = 0 if new else calm + 1
    return list(held.values())


# ------------------------------------------------------------------------------------------

# The paths of the programs that a sandbox needs on this machine, and the packages to install when they are missing.
#
# Two places are searched: a prefix into which packages were unpacked without being installed (``dpkg -x``), and the
# usual directories. Daemons live in sbin, which an ordinary user's PATH leaves out.

# program -> Debian's package
NEEDED = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmstepd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "srun": "slurm-client",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
ACCOUNTING |= {"sacctmgr": "slurm-client"}
_USUAL = ("/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin")


def search_path(prefix: str = "") -> str:
    """Return PATH for the sandbox: the prefix first, then the caller's own, then the directories of daemons.

    Entries that mean the current directory are left out: any account may have put a ``munged`` there.
    """
    return ":".join(dict.fromkeys([*_inside(prefix), *path_folders(), *_USUAL]))


def find_program(name: str, prefix: str = "") -> str | None:
    """Return the program's path. Debian installs NAME-wlm and a link NAME to it; ``dpkg -x`` leaves only NAME-wlm."""
    for path in (":".join(_inside(prefix)), search_path()):
        found = shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path) if path else None
        if found:
            return found
    return None


def _inside(prefix: str) -> list[str]:
    return [f"{prefix}/usr/bin", f"{prefix}/usr/sbin", f"{prefix}/bin", f"{prefix}/sbin"] if prefix else []


def missing(prefix: str = "", *, accounting: bool = False) -> dict[str, str]:
    """Return the programs that a sandbox needs and this machine lacks, each with its Debian package."""
    return absent_programs(NEEDED | (ACCOUNTING if accounting else {}), prefix)


def absent_programs(wanted: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Return those of the ``wanted`` programs, each with its package, that this machine lacks."""
    return {name: package for name, package in wanted.items() if find_program(name, prefix) is None}


def require_programs(prefix: str = "", *, accounting: bool = False) -> None:
    """Raise NotFound, in one sentence with what to install, unless everything is there."""
    if prefix and not Path(prefix).is_dir():
        raise NotFound(f"there is no directory {prefix} (--prefix)")
    absent = missing(prefix, accounting=accounting)
    if absent:
        packages = " ".join(dict.fromkeys(absent.values()))
        what = "accounting in a sandbox" if set(absent) <= set(ACCOUNTING) else "a sandbox"
        where = f" (nor under {prefix})" if prefix else ""
        raise NotFound(
            f"{what} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not on this machine{where}",
            hint=f"install them: sudo apt-get install {packages}"
            f"   (without root: apt-get download, dpkg -x each into a directory DIR, then --prefix DIR)",
        )


def plugins(prefix: str) -> str:
    """Return Slurm's plugin directory under ``prefix``; "" for installed packages, which know their own."""
    if not prefix:
        return ""
    for found in sorted(Path(prefix).glob("usr/lib*/**/auth_munge.so")):
        return str(found.parent)
    raise NotFound(f"no Slurm plugins under {prefix}", hint="unpack slurm-wlm-basic-plugins there too (dpkg -x)")


def libraries(prefix: str, before: str = "") -> str:
    """Return LD_LIBRARY_PATH for programs under ``prefix``, ahead of its value ``before``."""
    beside = Path(plugins(prefix))
    parts = [str(beside), str(beside.parent), *before.split(":")]
    return ":".join(dict.fromkeys(part for part in parts if part))
