"""The manifest of a checkpoint: its files with sizes and digests, and what it is a checkpoint of.

A manifest lies in the checkpoint's own folder and is written last, so a folder with a manifest was whole once. Whether it still
is, verification says. Ranks that write in parallel leave one list each (``rank_lists.py``); rank 0 joins them.

    step-00000100/.ftsupervise/manifest.json       the whole checkpoint: written last, by rank 0
    step-00000100/.ftsupervise/rank-00003.json     the files that rank 3 wrote; removed when they are joined
    .ftsupervise/epoch=3.ckpt.json                 the manifest of a checkpoint that is one file, beside it

The folder begins with a dot, so the loaders of torch, DeepSpeed, Megatron, Lightning and Hugging Face pass it by.

A manifest is one JSON object. Its first line holds all but the files, so that a list of checkpoints reads no more than that;
its last line is the crc32 of all lines before it, so that a flipped bit in the manifest is not taken for one in a file.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.checkpoints.digest import CRC32, CannotJudge, hash_buffer
from ftsupervise.host import files
from ftsupervise.host.ownership import held_to_write, make_folder, page_inside
from ftsupervise.rundir.paths import sync_directory, write_whole
from ftsupervise.rundir.records import decode, encode, parse_object

FOLDER_NAME = ".ftsupervise"
MANIFEST = "manifest.json"
VERSION = 1
LIMIT = 256_000_000  # bytes of a manifest: a million files
_LOOP_FILE = re.compile(r"rank-\d+\.state")
_HEAD = 65_536  # bytes of its first line
_END = b',\n"digest": "'
_FILES = b',\n"files": [\n'


class CheckpointLayout(str, Enum):
    """The program that wrote the folder, by what lies in it. Each has its own sign that it is complete."""

    DCP = "torch-dcp"  # torch.distributed.checkpoint: .metadata, written last
    DEEPSPEED = "deepspeed"  # `latest` beside it names the folder
    MEGATRON = "megatron"  # latest_checkpointed_iteration.txt beside it
    LIGHTNING = "lightning"  # *.ckpt, or a folder of a sharded strategy
    HUGGING_FACE = "hugging-face"  # checkpoint-N with trainer_state.json
    FILES = "files"  # anything else: complete when a manifest says so


class FileEntry(NamedTuple):
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint's root, with "/"; a name that is not UTF-8 has surrogates, as in Python
    size: int  # bytes
    digest: str  # hexadecimal
    link: bool = False  # a symbolic link to another file of the checkpoint: size and digest are those of where it leads


class Manifest(NamedTuple):
    """A checkpoint as it was committed."""

    step: int | None
    files: tuple[FileEntry, ...]  # sorted by path
    algorithm: str  # of the digests: one of digest.ALGORITHMS
    layout: CheckpointLayout = CheckpointLayout.FILES
    world: int | None = None  # ranks that wrote it
    run: str = ""
    attempt: int | None = None
    host: str = ""
    user: str = ""
    at: datetime | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed; reported by the loop: the best K are kept by one of them
    version: int = VERSION
    run_id: str = ""  # see rundir/lineage.py; "": written before runs had one, or of no run
    run_dir: str = ""  # the run directory, as it lay then
    adopted: bool = False  # another program wrote it, and may write it again; ``at`` is then its newest write

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


class ManifestHead(NamedTuple):
    """The first line of a manifest, before its files."""

    step: int | None = None
    algorithm: str = ""
    layout: CheckpointLayout = CheckpointLayout.FILES
    world: int | None = None
    run: str = ""
    attempt: int | None = None
    host: str = ""
    user: str = ""
    at: datetime | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed
    version: int = VERSION
    run_id: str = ""
    run_dir: str = ""
    adopted: bool = False
    listed: int = 0  # files
    size: int = 0  # bytes of all


def root_of(checkpoint: Path) -> Path:
    """Return the folder that the paths in its manifest are relative to: itself, or the folder above where it is one file."""
    return checkpoint.parent if checkpoint.is_file() else checkpoint


def manifest_of(checkpoint: Path) -> Path:
    if checkpoint.is_file():
        return checkpoint.parent / FOLDER_NAME / f"{checkpoint.name}.json"
    return checkpoint / FOLDER_NAME / MANIFEST


def loop_file(checkpoint: Path, rank: int) -> Path:
    """Return the file of a rank in a checkpoint that ``guard.save`` wrote: only one with that of rank 0 can be restored by
    ``guard.restore``."""
    return checkpoint / f"rank-{rank:05d}.state"


def is_loop_file(path: str) -> bool:
    """Return whether a file of a checkpoint, by its path in it, is one of these."""
    return _LOOP_FILE.fullmatch(path) is not None


def records_beside(checkpoint: Path) -> tuple[Path, ...]:
    """Return the pages about a checkpoint of one file, which go where it goes: its manifest, and the list of its copies."""
    page = checkpoint.parent / FOLDER_NAME / f"{checkpoint.name}.json"
    return (page, page.with_suffix(".copies"))


# --------------------------------------------------------------------------------------------------------------- reading


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None where it has none.

    Raises ValueError for a damaged one (CannotJudge, one of them, for one that cannot be understood here), OSError. No
    link is followed, no FIFO waited for, and no path in it leads out of the checkpoint. ``verify`` asks whose it is.
    """
    return _read(manifest_of(checkpoint))


def read_head(checkpoint: Path) -> ManifestHead | None:
    """Return its first line only, for lists; nothing but verification proves it. None where it has none.

    Raises as ``read_manifest`` does.
    """
    path = manifest_of(checkpoint)
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    try:
        line, found, _ = os.read(fd, _HEAD).partition(_FILES)
    finally:
        os.close(fd)
    if not found:
        raise ValueError(f"{path} is damaged: its first line is cut short")
    return _head(line, path)


def _read(path: Path) -> Manifest | None:
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    try:
        raw = files.read_open(fd, LIMIT, path)
    finally:
        os.close(fd)
    return parse_manifest(raw, path)


def _open(path: Path) -> int:
    """Return a descriptor to read a page in our own folder. Raises OSError, also where a link stands in the place of either."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return files.open_regular(path.name, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(folder)


def parse_manifest(raw: bytes, path: Path | str) -> Manifest:
    """Parse the bytes of ``encoded``; ``path`` is for the message. Raises ValueError for a damaged one."""
    body, _, end = raw.rpartition(_END)
    line, found, rest = body.partition(_FILES)
    if not found:
        raise ValueError(f"{path} is damaged: it is cut short")
    head = _head(line, path)
    said = end.partition(b'"')[0].decode("ascii", "replace")
    if hash_buffer(body, CRC32) != said or end != _ending(said)[len(_END) :]:
        raise ValueError(f"{path} is damaged: it does not have its own digest")
    try:
        listed = json.loads(b"[" + rest.removesuffix(b"\n]") + b"]")
        found_files = tuple(_entry(one) for one in listed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if len(found_files) != head.listed:
        raise ValueError(f"{path} is damaged: it lists {len(found_files)} files of {head.listed}")
    if len({one.path for one in found_files}) != len(found_files):  # each of them would be read
        raise ValueError(f"{path} is damaged: it lists a file twice")
    known = {name: value for name, value in head._asdict().items() if name in Manifest._fields}
    return Manifest(files=found_files, **known)


def _head(line: bytes, path: Path | str) -> ManifestHead:
    try:
        head = decode(ManifestHead, parse_object(line + b"}"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if head.version > VERSION:
        raise CannotJudge(f"{path} was written by a newer version of ftsupervise ({head.version})")
    return head


def _entry(raw: Any) -> FileEntry:
    path, size, digest = unescaped(raw["path"]), raw["size"], raw["digest"]
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63 or not isinstance(digest, str):
        raise ValueError(f"{path!r} has no size or no digest")
    if path.startswith("/") or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} leads out of the checkpoint")
    return FileEntry(path, size, digest, raw.get("link") is True)


# --------------------------------------------------------------------------------------------------------------- writing


def write_manifest(checkpoint: Path, manifest: Manifest, *, sync: bool = True) -> None:
    """Write it, whole and durable. From then on the folder is a checkpoint. ``sync`` False: the caller makes file and folders
    durable. Raises OSError."""
    path = manifest_of(checkpoint)
    with record_folder(path.parent) as here:
        write_whole(here / path.name, encoded(manifest), sync=sync, mode=page_inside(here))
    if sync:
        sync_directory(path.parent.parent)


def make_record_folder(folder: Path) -> None:
    """Make our own folder in a checkpoint. Raises OSError, also where a link stands in its place."""
    make_folder(folder)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link: nothing is written through it", str(folder))


@contextmanager
def record_folder(folder: Path) -> Iterator[Path]:
    """Do as ``make_record_folder``, and yield a path that leads to this very folder: others who may write into the checkpoint
    may put a link in its place meanwhile. Raises OSError."""
    make_record_folder(folder)
    with held_to_write(folder) as here:
        yield here


def encoded(manifest: Manifest) -> bytes:
    """Return the bytes of its file."""
    values = {name: value for name, value in manifest._asdict().items() if name in ManifestHead._fields}
    head = ManifestHead(**values, listed=len(manifest.files), size=manifest.size)
    line = json.dumps(encode(head)).encode().removesuffix(b"}")
    body = line + _FILES + b",\n".join(_lines(manifest.files)) + b"\n]"
    return body + _ending(hash_buffer(body, CRC32))  # that everybody can compute, also where xxhash is missing


def _ending(digest: str) -> bytes:
    return _END + digest.encode("ascii", "replace") + b'"}\n'


def _lines(entries: Iterable[FileEntry]) -> Iterable[bytes]:
    for entry in entries:
        link = {"link": True} if entry.link else {}
        one = {"path": escaped(entry.path), "size": entry.size, "digest": entry.digest, **link}
        yield json.dumps(one).encode()


def escaped(path: str) -> str:
    r"""Return a path as JSON can hold it: a byte that is no UTF-8 stands as \xNN, and a backslash twice."""
    path = path.replace("\\", "\\\\")
    return path if path.isascii() else os.fsencode(path).decode("utf-8", "backslashreplace")


def unescaped(text: str) -> str:
    """Undo ``escaped``."""
    if "\\" not in text:
        return text
    parts = re.split(r"\\(\\|x[0-9a-f]{2})", text)
    raw = b"".join(
        b"\\" if index % 2 and part == "\\" else bytes([int(part[1:], 16)]) if index % 2 else part.encode()
        for index, part in enumerate(parts)
    )
    return os.fsdecode(raw)
