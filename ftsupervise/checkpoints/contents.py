"""The files in a checkpoint as they lie there, whatever their names, and whether another account could have put them there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.manifest import FOLDER_NAME, records_beside
from ftsupervise.host import files
from ftsupervise.host.ownership import distrust, is_shared, may_be_changed, stranger

MOST_FILES = 1_000_000


class FileFacts(NamedTuple):
    """One file as it lies there."""

    path: str  # relative, with "/"
    facts: os.stat_result

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.facts.st_mode)


class Contents(NamedTuple):
    """The contents of a checkpoint: files and links by their paths, folders, and other things such as "a FIFO"."""

    files: dict[str, FileFacts]
    folders: dict[str, os.stat_result]
    irregular: dict[str, str]

    def stats(self) -> tuple[os.stat_result, ...]:
        """Return those of all folders and files."""
        return (*self.folders.values(), *(one.facts for one in self.files.values()))


def contents_of(checkpoint: Path) -> Contents:
    """Walk a checkpoint, a folder or one file, without our own folder in it. No link is followed.

    Raises OSError, also when it changes so fast that a folder vanishes meanwhile.
    """
    found = os.lstat(checkpoint)
    if stat.S_ISREG(found.st_mode):
        return Contents({checkpoint.name: FileFacts(checkpoint.name, found)}, {}, {})
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, f"is {_kind(found.st_mode)}, neither a folder nor a file", str(checkpoint))
    seen = Contents({}, {"": found}, {})
    left = [""]
    while left:
        here = left.pop()
        with os.scandir(f"{checkpoint}/{here}") as entries:
            for entry in entries:
                if not here and entry.name == FOLDER_NAME:
                    continue
                path = f"{here}/{entry.name}" if here else entry.name
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    seen.folders[path] = facts
                    left.append(path)
                elif stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
                    seen.files[path] = FileFacts(path, facts)
                else:
                    seen.irregular[path] = _kind(facts.st_mode)
                if len(seen.files) > MOST_FILES:
                    raise OSError(errno.EFBIG, f"holds more than {MOST_FILES} files", str(checkpoint))
    return seen


def leads_inside(checkpoint: Path, path: str) -> bool:
    """Return whether the link ``path`` leads to something within the checkpoint. Raises OSError where it leads nowhere."""
    link = f"{checkpoint}/{path}"
    os.stat(link)  # noqa: PTH116 - it raises where it leads nowhere
    whole, target = os.path.realpath(checkpoint), os.path.realpath(link)
    return os.path.commonpath((whole, target)) == whole


def distrust_folder(folder: Path, accounts: Collection[int] = ()) -> str:
    """Return why a stranger could have put checkpoints into ``folder``, as a clause; "" when none could. Raises
    OSError, EPERM for a stranger's link on the way.

    A folder that a group may write is trusted. What its members have laid there is not, unless it is the group ``members``, in
    the other functions here.
    """
    with files.open_folder(folder, follow=True, flags=os.O_PATH) as fd:  # a person may have linked it
        found = os.fstat(fd)
    return distrust(found, folder, accounts=accounts, group=found.st_gid if is_shared(found) else None)


def distrust_itself(checkpoint: Path, accounts: Collection[int] = (), *, members: int | None = None) -> str:
    """Return why a stranger could have put the checkpoint there, as a clause; "" when none could. It is not looked into: one of
    a stranger may have no end, or let nobody in. Raises OSError."""
    above = os.stat(checkpoint.parent)  # noqa: PTH116
    return distrust_folder(checkpoint.parent, accounts) or _distrust(
        above, os.lstat(checkpoint), f"{checkpoint}", accounts, members
    )


def distrust_contents(
    checkpoint: Path, contents: Contents, accounts: Collection[int] = (), *, members: int | None = None
) -> str:
    """Return why a stranger could have changed the checkpoint, as a clause; "" when none could. Raises OSError.

    The folder above is judged, and each folder, each file, and our own folder in it.
    """
    above = os.stat(checkpoint.parent)  # noqa: PTH116
    if reason := distrust_folder(checkpoint.parent, accounts):
        return reason
    for path, facts in contents.folders.items():
        holder = contents.folders[path.rpartition("/")[0]] if path else above
        if reason := _distrust(holder, facts, f"{checkpoint}/{path}".rstrip("/"), accounts, members):
            return reason
    root = checkpoint if contents.folders else checkpoint.parent
    judged: dict[tuple[int, int, int, int], None] = {}
    for path, one in contents.files.items():
        holder = contents.folders.get(path.rpartition("/")[0], above)
        key = (one.facts.st_uid, one.facts.st_gid, one.facts.st_mode, holder.st_ino)
        if one.is_link or key in judged:  # thousands have the same owner and mode
            continue
        judged[key] = None
        if reason := _distrust(holder, one.facts, f"{root}/{path}", accounts, members):
            return reason
    names = [] if contents.folders else [one.name for one in records_beside(checkpoint)]
    return distrust_record(root, accounts, names, members=members)


def distrust_record(
    root: Path, accounts: Collection[int] = (), names: Collection[str] = (), *, members: int | None = None
) -> str:
    """Return the same for our own folder in ``root`` and the manifests there, or only those of these ``names``; "" also where
    there is none."""
    above = os.stat(root)  # noqa: PTH116
    try:
        folder = os.lstat(root / FOLDER_NAME)
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(folder.st_mode):
        return f"{root / FOLDER_NAME} is {_kind(folder.st_mode)}"
    if reason := _distrust(above, folder, f"{root / FOLDER_NAME}", accounts, members):
        return reason
    for name in names or os.listdir(root / FOLDER_NAME):
        path = f"{root}/{FOLDER_NAME}/{name}"
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(facts.st_mode) and (reason := _distrust(folder, facts, path, accounts, members)):
            return reason
    return ""


def _distrust(
    holder: os.stat_result, found: os.stat_result, path: str, accounts: Collection[int], members: int | None
) -> str:
    """Return why the owner or a writer of ``path`` in ``holder`` is not trusted."""
    reason = stranger(holder, found, accounts, members=holder.st_gid == members)
    if reason:
        return f"{path} is not trusted: {reason}"
    return may_be_changed(holder, found, path)


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file"),
    )
    return next((word for is_kind, word in kinds if is_kind(mode)), "a device")
