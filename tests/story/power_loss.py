"""What a disk holds after a power cut: the operations of a program are recorded, and played on a disk that drops what was not
synced.

A program runs under ``RECORDER``, which writes each of its operations on files as a line of JSON, in order, and keeps what each
file held when it was synced. ``Disk`` plays these lines. A file's bytes are safe once it was synced, a name once its folder
was; a rename is safe when the folder that it goes to was synced. Of all else, a power cut keeps what it likes.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDER = """
import json, os, runpy, sys, threading
log, place = open(sys.argv[1], "w", buffering=1), os.path.realpath(sys.argv[2])
real_fsync, real_open = os.fsync, os.open

def inside(path):
    path = os.path.realpath(os.path.dirname(os.path.abspath(os.fspath(path)))) + "/" + os.path.basename(os.fspath(path))
    return path if path.startswith(place + "/") or path == place else None

def write(*words):
    log.write(json.dumps(words) + "\\n")

def note(*words):
    with lock:
        flush()
        write(*words)

pending, lock = [], threading.RLock()  # several threads sync

def flush():
    # an operation is heard before it is made: what came of it is seen at the next one, of any thread; it came to nothing when
    # its own thread makes another
    for one in list(pending):
        thread, (word, path, *more) = one
        if os.path.lexists(path) == (word in ("file", "folder", "link")):
            write(word, path, *more)
            pending.remove(one)
        elif thread == threading.get_ident():
            pending.remove(one)

def below(path, at):
    path = os.fsdecode(path)
    return path if at in (-1, None) or os.path.isabs(path) else os.readlink(f"/proc/self/fd/{at}") + "/" + path

def heard(event, args):
    words = ()
    if event == "open":
        path, mode, flags = args
        if isinstance(path, (str, bytes, os.PathLike)) and flags & os.O_ACCMODE != os.O_RDONLY:
            words = ("file", below(path, getattr(within, "folder", None)))
    elif event == "os.rename":
        words = ("rename", below(args[0], args[2]), below(args[1], args[3]))
    elif event == "os.link":
        words = ("link", below(args[1], args[3]), below(args[0], args[2]))
    elif event == "os.mkdir":
        words = ("folder", below(args[0], args[2]))
    elif event in ("os.remove", "os.rmdir"):
        words = ("remove", below(args[0], args[1]))
    if words and all(inside(path) for path in words[1:]):
        with lock:
            flush()
            pending.append((threading.get_ident(), (words[0], *map(inside, words[1:]))))

within = threading.local()  # the open folder in which a file is opened: the event does not name it

def opened(path, flags, mode=0o777, *, dir_fd=None):
    within.folder = dir_fd
    try:
        return real_open(path, flags, mode, dir_fd=dir_fd)
    finally:
        within.folder = None

def fsync(fd):
    real_fsync(fd)
    fd = fd if isinstance(fd, int) else fd.fileno()
    path = os.readlink(f"/proc/self/fd/{fd}")
    if inside(path):
        held = None if os.path.isdir(path) else open(path, "rb").read().decode("latin-1")
        note("sync", path, held)

class Libc:
    # exchanges go past Python
    def __init__(self, name, **more):
        self.real = real_library(name, **more)
    def __getattr__(self, name):
        return getattr(self.real, name) if name != "renameat2" else self.exchange
    def exchange(self, _at, one, _also, other, flag):
        flush()
        code = self.real.renameat2(_at, one, _also, other, flag)
        if not code:
            write("exchange", inside(os.fsdecode(one)), inside(os.fsdecode(other)))
        return code

import ctypes
real_library, ctypes.CDLL = ctypes.CDLL, Libc
sys.addaudithook(heard)
os.fsync, os.open = fsync, opened
sys.recorder_note = note
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class File:
    safe: str = ""  # the bytes that a power cut leaves
    linked: bool = False  # it has several names


@dataclass
class Folder:
    names: dict[str, Node] = field(default_factory=dict)
    safe: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


class Disk:
    """Plays recorded operations below ``root``."""

    def __init__(self, root: Path) -> None:
        self.prefix, self.root = str(root), Folder()

    def play(self, line: list[Any]) -> None:
        word, path, *more = line
        if path == self.prefix and word != "sync":
            return
        if word == "sync":
            self._sync(path, *more)
            return
        parent, name = self._parent(path)
        if word == "file":
            parent.names.setdefault(name, File())
        elif word == "folder":
            parent.names.setdefault(name, Folder())
        elif word == "link":
            node = self._at(more[0])
            assert isinstance(node, File)
            node.linked, parent.names[name] = True, node
        elif word == "remove":
            parent.names.pop(name, None)
        elif word == "rename":
            node = parent.names.pop(name, None)
            if node is not None:
                other, new = self._parent(more[0])
                other.names[new] = node
        elif word == "exchange":
            other, new = self._parent(more[0])
            parent.names[name], other.names[new] = other.names[new], parent.names[name]

    def _sync(self, path: str, held: str | None) -> None:
        node = self._at(path)
        if isinstance(node, File) and held is not None:
            node.safe = held
        if isinstance(node, Folder):
            arrived = [one for name, one in node.names.items() if node.safe.get(name) is not one]
            arrived = [one for one in arrived if isinstance(one, Folder) or not one.linked]
            node.safe = dict(node.names)
            for folder in self._all(self.root):  # a rename is one change: where it came from, the name is gone
                if folder is not node:
                    folder.safe = {n: one for n, one in folder.safe.items() if not any(one is a for a in arrived)}

    def _parts(self, path: str) -> list[str]:
        return [part for part in path.removeprefix(self.prefix).split("/") if part]

    def _at(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in self._parts(path):
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        *above, name = self._parts(path)
        node = self._at("/".join(["", *above]))
        assert isinstance(node, Folder), f"{path} is used before its folder is made"
        return node, name

    def _all(self, node: Node) -> list[Folder]:
        if isinstance(node, File):
            return []
        below = {id(one): one for one in (*node.names.values(), *node.safe.values())}
        return [node, *(found for one in below.values() for found in self._all(one))]

    def cut(self, into: Path, keep: random.Random | None) -> None:
        """Write what a power cut leaves. ``keep`` None: nothing that was not synced; else as it draws, folder by folder."""
        self._write(self.root, into, keep)

    def _write(self, node: Node, into: Path, keep: random.Random | None) -> None:
        if isinstance(node, File):
            into.write_bytes(node.safe.encode("latin-1"))
            return
        into.mkdir(exist_ok=True)
        kept = node.names if keep is not None and keep.random() < 0.5 else node.safe
        for name, one in kept.items():
            self._write(one, into / name, keep)


def recorded(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]
