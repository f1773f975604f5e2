"""The child that may hang, so that its parent never does.

It answers questions about one device (one mounted file system) over its stdin and stdout, one at a time, and may block
for ever in any of them: its parent waits with a bound, kills it, and abandons it if it does not die. It is started as
a plain script without site-packages, so it costs about as much as ``python -c pass``, and imports nothing it can do
without.

It never touches a device other than its own on purpose: a path that leads elsewhere (a nested mount, a symbolic link)
is answered with "elsewhere", and the parent asks the child of that device.

Frames both ways: four bytes of length, then ``marshal`` (both ends are the same interpreter).
"""

# pathlib costs more to import than all the rest of this child
# ruff: noqa: PTH100, PTH115, PTH116, PTH118, PTH120, PTH123

from __future__ import annotations

import errno
import marshal
import os
import stat
import sys
import time
from itertools import islice

TYPE_CHECKING = False  # importing typing costs as much as all the rest of this child
if TYPE_CHECKING:
    from typing import Any

TEMPORARY = ".ftsupervise-clock-"
Table = list[tuple[str, str, str, str]]  # (mount point, device "major:minor", kind, source), in the order of mounting


class Elsewhere(Exception):
    """The path leads to another device, which the argument names."""


# ----------------------------------------------------------------------------------------------------------- mounts


def read_mounts(source: str = "/proc/self/mountinfo") -> Table:
    """Return the mount table. Reading it does not touch the mounted file systems."""
    with open(source, "rb") as file:
        return parse_mounts(file.read())


def parse_mounts(text: bytes) -> Table:
    """Parse the mount table.

    Source: proc(5), /proc/PID/mountinfo: field 3 is the device, field 5 the mount point; behind a "-" kind and source.
    """
    table = []
    for line in text.splitlines():
        fields = line.split(b" ")
        if len(fields) > 5:
            kind, source = (fields[fields.index(b"-", 6) + 1 :] if b"-" in fields[6:] else [])[:2] or (b"", b"")
            table.append((_plain(fields[4]), fields[2].decode(), kind.decode(), _plain(source)))
    return table


def _plain(field: bytes) -> str:
    if b"\\" in field:
        for code in (b" ", b"\t", b"\n", b"\\"):
            field = field.replace(b"\\%03o" % code[0], code)
    return os.fsdecode(field)


class Mounts:
    """The device of a path, by the mount table alone, without touching the path."""

    def __init__(self, table: Table) -> None:
        # a later mount on the same point hides the earlier one, as it does in the kernel
        self.device = {point: device for point, device, *_ in table}

    def point(self, path: str) -> str:
        """Return the mount point an absolute, normalised path lies under."""
        while path not in self.device and path != "/":
            path = path[: path.rfind("/")] or "/"
        return path

    def of(self, path: str) -> str:
        return self.at(self.point(path))

    def at(self, point: str) -> str:
        return self.device.get(point, "0:0")


def real(path: str, mounts: Mounts, mine: str) -> str:
    """Return ``path`` with its symbolic links followed, as long as it stays on the device ``mine``. Raises Elsewhere.

    Components that are missing are left as they are: the question itself will say so.
    """
    for _ in range(40):
        if mounts.of(path) != mine:
            raise Elsewhere(path)
        target = _first_link(path, mounts)
        if target is None:
            return path
        path = target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _first_link(path: str, mounts: Mounts) -> str | None:
    """Return ``path`` with the first symbolic link below its mount point followed; None if there is none."""
    done = mounts.point(path)
    rest = [part for part in path[len(done) :].split("/") if part]
    for index, part in enumerate(rest):
        here = done.rstrip("/") + "/" + part
        try:
            if not stat.S_ISLNK(os.lstat(here).st_mode):
                done = here
                continue
            link = os.readlink(here)
        except OSError:
            return None
        return os.path.normpath("/".join([link if link.startswith("/") else done + "/" + link, *rest[index + 1 :]]))
    return None


# -------------------------------------------------------------------------------------------------------- questions


def _facts(info: os.stat_result) -> tuple[int, int, float, int, int, int, int]:
    return (info.st_mode, info.st_size, info.st_mtime, info.st_ino, info.st_uid, info.st_nlink, info.st_dev)


def space(path: str) -> tuple[int, int, int, int]:
    """Return what users of the file system can have, and what is used, in bytes; its inodes, and those that are free."""
    s = os.statvfs(path)
    unit = s.f_frsize or s.f_bsize
    used = (s.f_blocks - s.f_bfree) * unit
    return used + s.f_bavail * unit, used, s.f_files, s.f_favail


def look(path: str) -> tuple[int, int, float, int, int, int, int]:
    return _facts(os.stat(path, follow_symlinks=False))


def listing(path: str, most: int) -> tuple[list[tuple[str, tuple[Any, ...]]], bool]:
    """Return entries with their facts, at most ``most`` of them, and whether there were more."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(found) >= most:
                return found, True
            try:
                found.append((entry.name, _facts(entry.stat(follow_symlinks=False))))
            except FileNotFoundError:
                continue
    return found, False


def _open_regular(path: str) -> int:
    """Return a descriptor of a regular file. Never waits for the other end of a FIFO, never follows a last link."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def _read(fd: int, offset: int, most: int) -> bytes:
    parts = []
    while most > 0:
        part = os.pread(fd, min(most, 1 << 20), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        most -= len(part)
    return b"".join(parts)


def tail(path: str, inode: int, offset: int, most: int) -> tuple[tuple[Any, ...], int, bytes]:
    """Return (facts, where the bytes begin, at most ``most`` bytes up to the end).

    Goes on at ``offset`` if the file is still the one with ``inode`` and has not shrunk below it, else begins anew;
    bytes further back than ``most`` from the end are skipped.
    """
    fd = _open_regular(path)
    try:
        info = os.fstat(fd)
        start = offset if info.st_ino == inode and offset <= info.st_size else 0
        start = max(start, info.st_size - most)
        return _facts(info), start, _read(fd, start, min(most, info.st_size - start))
    finally:
        os.close(fd)


def text(path: str, most: int) -> bytes:
    """Return the first ``most`` bytes, also of files that claim to be empty (/proc, /sys)."""
    fd = _open_regular(path)
    try:
        return _read(fd, 0, most)
    finally:
        os.close(fd)


def texts(path: str, prefix: str, files: int, most: int) -> list[tuple[str, float, bytes]]:
    """Return (name, mtime, first ``most`` bytes) of the ``files`` newest regular files whose name starts with ``prefix``."""
    entries, _ = listing(path, 200_000)
    named = [(facts[2], name) for name, facts in entries if name.startswith(prefix) and stat.S_ISREG(facts[0])]
    named.sort(reverse=True)
    answer = []
    for mtime, name in named[:files]:
        try:
            answer.append((name, mtime, text(os.path.join(path, name), most)))
        except OSError:  # replaced or removed between the listing and the read: it will be there next time
            continue
    return answer


def tree(path: str, most: int) -> tuple[int, int, float, bool, list[str]]:
    """Return (bytes, files, newest mtime, more than ``most`` entries, names of the empty files, ten at most) below ``path``."""
    info = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        return info.st_size, 1, info.st_mtime, False, [path] if info.st_size == 0 else []
    size = files = seen = 0
    newest = info.st_mtime
    empty: list[str] = []
    todo = [path]
    while todo:
        folder = todo.pop()
        entries, _ = listing(folder, most)
        for name, (mode, length, mtime, *_rest) in entries:
            seen += 1
            if seen > most:
                return size, files, newest, True, empty
            if stat.S_ISDIR(mode):
                todo.append(folder + "/" + name)
            elif stat.S_ISREG(mode):
                size, files, newest = size + length, files + 1, max(newest, mtime)
                if length == 0 and len(empty) < 10:
                    empty.append(name)
    return size, files, newest, False, empty


def clock(path: str) -> tuple[float, float]:
    """Return (the file server's time, this node's time), from a file made and removed again.

    ``utime`` without times lets the server fill in its own clock, where a create alone may carry the client's.
    """
    name = f"{path}/{TEMPORARY}{os.getpid()}-{os.urandom(8).hex()}"  # others write there too: none of them can take it first
    before = time.time()
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"\n")
        os.utime(fd)
    finally:
        os.close(fd)
        server_time = os.stat(name).st_mtime
        os.unlink(name)
    return server_time, (before + time.time()) / 2


def processes(roots: list[int], most: int) -> list[tuple[int, int, int, str, int, int]]:
    """Return (pid, parent, start in clock ticks, state, resident bytes, of these its own) of ``roots`` and all below
    them.

    Own bytes are RssAnon + RssShmem: pages of mapped files come and go with the page cache and are no leak. ``stat``
    and ``status`` are read because neither waits for a lock of a process in state D, as ``cmdline`` and ``maps`` do.
    """
    _find_our_package()
    from ftsupervise.host import processes as host  # here: this one question is worth what it costs to import

    known = {one.pid: one for one in islice(host.living(), most)}
    wanted = {pid for pid in roots if pid in known}
    while below := {pid for pid, one in known.items() if one.parent in wanted} - wanted:
        wanted |= below
    found = [known[pid] for pid in sorted(wanted)]
    return [(one.pid, one.parent, one.start, one.state, one.resident, host.own_bytes(one.pid)) for one in found]


def call(module: str, name: str, args: tuple[Any, ...]) -> Any:
    """Call a function of ours. It needs no package besides the standard library, and its answer is plain values."""
    from importlib import import_module

    _find_our_package()
    return getattr(import_module(f"ftsupervise.{module}"), name)(*args)


def _find_our_package() -> None:
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if ours not in sys.path:
        sys.path.append(ours)


def _program(name: str) -> str:
    """Return the path of a program, which is looked for in the absolute folders of PATH alone, as host/begin.py does."""
    if "/" in name:
        return name
    places = [f"{folder}/{name}" for folder in os.get_exec_path() if folder.startswith("/")]
    for place in places:
        if os.access(place, os.X_OK):
            return place
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def run(argv: list[str], env: dict[str, str], bound: float, most: int) -> tuple[int, bytes, bytes, bool]:
    """Return (exit code or minus the signal, first ``most`` bytes of stdout, of stderr, ended by the bound)."""
    import select
    import signal

    out_r, out_w = os.pipe2(os.O_CLOEXEC)
    err_r, err_w = os.pipe2(os.O_CLOEXEC)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out_w, 1), (os.POSIX_SPAWN_DUP2, err_w, 2)]
    pid = os.posix_spawn(_program(argv[0]), argv, env, file_actions=actions, setpgroup=0, setsigdef=[signal.SIGPIPE])
    for fd in (out_w, err_w, null):
        os.close(fd)
    texts_of: dict[int, bytes] = {out_r: b"", err_r: b""}
    open_ends = [out_r, err_r]
    until = time.monotonic() + bound
    status: int | None = None
    while (status is None or open_ends) and time.monotonic() < until:
        for fd in select.select(open_ends, [], [], 0.02 if status is None else 0.0)[0]:
            part = os.read(fd, 65536)
            texts_of[fd] += part[: most - len(texts_of[fd])]
            if not part:
                open_ends.remove(fd)
        if status is None:
            done, code = os.waitpid(pid, os.WNOHANG)
            if (
                done
            ):  # processes that it left running may hold the pipes open; half a second is given for the last output
                status, until = os.waitstatus_to_exitcode(code), min(until, time.monotonic() + 0.5)
    for fd in open_ends:  # read the output that is there already, even at the bound
        while len(texts_of[fd]) < most and select.select([fd], [], [], 0)[0] and (part := os.read(fd, 65536)):
            texts_of[fd] += part[: most - len(texts_of[fd])]
    if status is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
        status = os.waitstatus_to_exitcode(ended[1])
    late = status is None
    if late:
        status = _end(pid, os.killpg)
    for fd in (out_r, err_r):
        os.close(fd)
    return status or 0, texts_of[out_r], texts_of[err_r], late


def _end(pid: int, killpg: Any) -> int:
    import signal

    killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # may block for ever: this child exists for that


# --------------------------------------------------------------------------------------------------------- the loop

_OF_PATHS = {f.__name__: f for f in (space, look, listing, tail, text, texts, tree, clock)}
_OTHERS = {f.__name__: f for f in (processes, call, run)}


def answer(name: str, args: tuple[Any, ...], mounts: Mounts, mine: str) -> tuple[Any, ...]:
    """Return ("ok", answer), ("errno", number, words), ("elsewhere", path) or ("failed", words). Never raises."""
    try:
        if name in _OTHERS:
            return ("ok", _OTHERS[name](*args))
        return ("ok", _OF_PATHS[name](real(args[0], mounts, mine), *args[1:]))
    except Elsewhere as there:
        return ("elsewhere", str(there))
    except OSError as error:
        return ("errno", error.errno or 0, error.strerror or str(error))
    except Exception as error:  # if one odd file ended this child, it would end each next one
        return ("failed", f"{type(error).__name__}: {error}")


def _exactly(count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(0, count - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts


def main(mine: str) -> None:
    os.chdir("/")
    mounts = Mounts(read_mounts())
    while True:
        name, args = marshal.loads(_exactly(int.from_bytes(_exactly(4), "big")))
        payload = marshal.dumps(answer(name, args, mounts, mine))
        view = memoryview(len(payload).to_bytes(4, "big") + payload)
        while view:
            view = view[os.write(1, view) :]


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
