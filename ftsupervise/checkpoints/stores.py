"""The places where copies of checkpoints lie: another folder, or an object store by way of fsspec, each with the same
few verbs.

A file is there as a whole or not at all, under its name: a folder gets it by rename, an object store by the end of the
upload. Names are relative, with "/", and come from manifests; ``inside`` refuses one that leads out of the place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ftsupervise.checkpoints.part_files import PartFile, open_part
from ftsupervise.errors import Error, NotFound, UsageError
from ftsupervise.host import files
from ftsupervise.host.ownership import (
    FOLDER,
    PAGE,
    Reach,
    distrust,
    distrust_route,
    held,
    held_or_made,
    is_shared,
    reach,
    reach_on_the_way,
    read_trusted,
)
from ftsupervise.rundir.paths import write_whole
from ftsupervise.secrecy import masked

PIECE = 4 << 20  # bytes that are read or written at once


def inside(name: str) -> str:
    """Return ``name`` if it leads to a file below the place it is used in. Raises ValueError for one that may not."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no path of a file inside a checkpoint")
    return name


class Rights(NamedTuple):
    """The accounts that may reach a file that is made, and the folders that are made for it."""

    file: Reach
    folder: Reach


def rights_of(file: Path, top: Path) -> Rights:
    """Return the rights that a copy of ``file`` may have: never wider than the file, its folder, ``top``, the checkpoint's, and
    what the folders above leave.

    Raises OSError.
    """
    above = (reach(file.parent, follow=True), reach(top, follow=True), reach_on_the_way(top), reach_on_the_way(file))
    own = reach(file) if stat.S_ISREG(file.lstat().st_mode) else Reach(PAGE).within(*above)
    return Rights(Reach(own.mode | 0o600, own.groups), Reach(FOLDER).within(*above))


class Store(Protocol):
    """A place for copies. All methods raise OSError when the place cannot be reached or refuses."""

    url: str  # harmless to show

    def names(self) -> tuple[str, ...]:
        """Return the folders at the top, sorted. Raises OSError; a place that does not exist yet has none."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the files below ``folder``, relative to it, with their sizes in bytes; {} where there is none."""

    def write(self, name: str, pieces: Iterable[bytes], rights: Rights) -> None:
        """Make the file ``name`` of ``pieces``, replacing one that is there. An error in the pieces leaves nothing new."""

    def part(self, name: str, rights: Rights, tag: str) -> PartFile | None:
        """Return the part of the file ``name`` that was written before by the copy ``tag``, or an empty one, to be written on;
        None where the place takes files as a whole only, or another process works at it."""

    def rights(self, name: str) -> Rights:
        """Return the rights of the file ``name`` and of its folder; all, where the place has none. Raises OSError."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the file ``name``, piece by piece. Raises FileNotFoundError."""

    def read_judged(self, name: str, limit: int) -> bytes:
        """Return the small file ``name``, which no other account can have written. Raises NotPermitted."""

    def remove(self, name: str) -> None:
        """Remove the file ``name``; one that is not there is no error."""

    def of_others(self, folder: str) -> bool:
        """Return whether another account has made ``folder``. Raises OSError."""

    def distrusted(self, folder: str) -> str:
        """Return why the contents of ``folder`` are not trusted, as a clause; "" when they are."""


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store at ``url``: a path, ``file:///path``, or an address of fsspec's (``s3://bucket/prefix``,
    ``gs://…``, ``memory://…``).

    Raises UsageError for an address that is none, Error when a package is missing for it.
    """
    text = os.fspath(url)
    protocol, found, rest = text.partition("://")
    if not found:
        return FolderStore(Path(text).expanduser().absolute())
    if protocol == "file":
        if not rest.startswith("/"):
            raise UsageError(
                f"{text} names no absolute path", hint="write file:///scratch/ada/copies, or the path alone"
            )
        return FolderStore(Path(rest))
    return ObjectStore(text)


class FolderStore:
    """Copies in a folder of this machine or of a mounted file system. Others may write there too: each folder is held open
    while it is worked in, and no link of another account leads out of it into what is ours."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def names(self) -> tuple[str, ...]:
        try:
            with held(self.root) as here, os.scandir(here) as found:
                return tuple(sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False)))
        except FileNotFoundError:
            return ()

    def sizes(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        pending = [folder]
        while pending:
            inner = pending.pop()
            try:
                with held(self.root / inner) as here, os.scandir(here) as found:
                    for entry in found:
                        name = f"{inner}/{entry.name}" if inner else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(name)
                        elif entry.is_file(follow_symlinks=False):
                            sizes[name.removeprefix(f"{folder}/")] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
        return sizes

    def write(self, name: str, pieces: Iterable[bytes], rights: Rights) -> None:
        target = self.root / inside(name)
        with held_or_made(target.parent, rights.folder) as here:
            write_whole(here / target.name, pieces, mode=rights.file)

    def part(self, name: str, rights: Rights, tag: str) -> PartFile | None:
        target = self.root / inside(name)
        with ExitStack() as until:
            here = until.enter_context(held_or_made(target.parent, rights.folder))
            file = open_part(here / target.name, rights.file, tag)
            if file is not None:
                file.at_the_end = until.pop_all().close
        return file

    def rights(self, name: str) -> Rights:
        return rights_of(self.root / inside(name), self.root / name.partition("/")[0])

    def read(self, name: str) -> Iterator[bytes]:
        path = self.root / inside(name)
        with held(path.parent) as here:
            yield from file_pieces(here / path.name)

    def read_judged(self, name: str, limit: int) -> bytes:
        path = self.root / inside(name)
        with held(path.parent) as here:
            return read_trusted(here / path.name, limit=limit)

    def remove(self, name: str) -> None:
        path = self.root / inside(name)
        with suppress(FileNotFoundError), held(path.parent) as here:
            (here / path.name).unlink()

    def of_others(self, folder: str) -> bool:
        return (self.root / folder).lstat().st_uid not in (0, os.geteuid())

    def distrusted(self, folder: str) -> str:
        """Return why another account could have exchanged the checkpoint: one that may write the files or rename the
        folders above.

        In a place that is shared with a group its members are trusted.
        """
        top = self.root / folder
        here = self.root.stat()
        group = here.st_gid if is_shared(here) else None
        if reason := distrust_route(top, group=group):
            return reason
        for inner, folders, names in files.walk(top):
            for name in (*folders, *names):
                path = Path(inner, name)
                found = path.lstat()
                if stat.S_ISLNK(found.st_mode):
                    return f"{path} is a symbolic link"
                if reason := distrust(found, path, group=group):
                    return reason
        return ""


class ObjectStore:
    """Copies in an object store, with fsspec and its package for that store. Credentials are the package's own matter:
    environment variables, a profile, the node's role."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise _missing("fsspec", url) from None
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise _missing(str(error), url) from None
        except ValueError as error:
            raise UsageError(
                f"{masked(url)}: {error}", hint="give a path, or an address such as s3://bucket/prefix"
            ) from None
        self._root = self._root.rstrip("/")
        self.url = masked(url).rstrip("/")

    def names(self) -> tuple[str, ...]:
        with _as_os_error(self.url):
            self._fs.invalidate_cache()
            try:
                listed = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return ()
        found = {str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in listed if entry["type"] == "directory"}
        return tuple(sorted(found))

    def sizes(self, folder: str) -> dict[str, int]:
        top = f"{self._root}/{folder}"
        with _as_os_error(self.url):
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        start = len(top.lstrip("/")) + 1
        return {str(name).lstrip("/")[start:]: int(entry["size"]) for name, entry in listed.items()}

    def part(self, name: str, rights: Rights, tag: str) -> PartFile | None:
        return None

    def rights(self, name: str) -> Rights:
        return Rights(Reach(0o666), Reach(0o777))  # the store's own rules say who may read it

    def write(self, name: str, pieces: Iterable[bytes], rights: Rights) -> None:
        path = f"{self._root}/{inside(name)}"
        if not _is_utf8(path):
            raise OSError(errno.EILSEQ, "the name is not UTF-8, so no object can have it", name)
        with _as_os_error(self.url):
            file: Any = self._fs.open(path, "wb", autocommit=False) if self._discards() else self._fs.open(path, "wb")
            try:
                for piece in pieces:
                    file.write(piece)
                file.close()
                if self._discards():
                    file.commit()
            except BaseException:
                self._discard(file, path)
                raise

    def _discards(self) -> bool:
        """Return whether an upload can be given up. S3's can, piece by piece, before its end makes the object."""
        return "s3" in _protocols(self._fs)

    def _discard(self, file: Any, path: str) -> None:
        try:
            if self._discards():
                file.discard()
                file.closed = True  # else it uploads what it holds when it is collected
            else:
                file.close()
                self._fs.rm_file(path)
        except Exception:  # the first error is the one that counts
            return

    def read(self, name: str) -> Iterator[bytes]:
        path = f"{self._root}/{inside(name)}"
        with _as_os_error(self.url), self._fs.open(path, "rb", cache_type="readahead", block_size=PIECE) as file:
            while piece := file.read(PIECE):
                yield piece

    def read_judged(self, name: str, limit: int) -> bytes:
        found = b"".join(islice(self.read(name), limit // PIECE + 1))  # who may write there is not seen
        if len(found) > limit:
            raise ValueError(f"{self.url}/{name} is larger than {limit} bytes")
        return found

    def remove(self, name: str) -> None:
        with _as_os_error(self.url):
            try:
                self._fs.rm_file(f"{self._root}/{inside(name)}")
            except FileNotFoundError:
                return

    def of_others(self, folder: str) -> bool:
        return False

    def distrusted(self, folder: str) -> str:
        """Return "": an account that may write into the store has its credentials, and the store's own rules say who
        that is.
        """
        return ""


def file_pieces(path: Path, *, follow: bool = False) -> Iterator[bytes]:
    """Yield a regular file, piece by piece. Raises OSError as ``files.open_regular`` does."""
    fd = files.open_regular(path, follow=follow)
    try:
        while piece := os.read(fd, PIECE):
            yield piece
    finally:
        os.close(fd)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _protocols(filesystem: Any) -> tuple[str, ...]:
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def _missing(what: str, url: str) -> Error:
    return NotFound(
        f"{masked(url)} needs a package that is not installed ({what})", hint='pip install "ftsupervise[offload]"'
    )


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Turn an error of a store's own package into an OSError with its reason."""
    try:
        yield
    except (OSError, Error, ValueError, GeneratorExit):
        raise
    except Exception as error:
        raise OSError(f"{url}: {masked(f'{type(error).__name__}: {error}')}") from error
