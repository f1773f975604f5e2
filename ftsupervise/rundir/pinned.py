"""Checks that the folder under a run's name is still the one that was launched.

An account that may write a folder above a run can rename the run away and put another in its place. But no stranger can
make a folder of the same owner in which this account's own page, ``launches/NNNN/launch.json``, holds the token of the
launch. The token comes from a place where no stranger writes: a job has it in its command line, and the watch has it in the
account's state directory.

For a job and for the watch a copy or a restore by the owner is the same run. Without its ``launches/`` it is another: launch
it again. What deletes, copies or overwrites for a run (``require``) asks for the inode too, because a stranger may put an old
copy of the owner's own in the place of the run. The device is not asked for: each node numbers a network file system its own
way.

The folder of its checkpoints may lie elsewhere, below a folder that others may write. Its inode is noted by the launch, or by
the first command that acts on it.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from ftsupervise.errors import NotFound, NotPermitted
from ftsupervise.host.files import open_folder
from ftsupervise.host.ownership import (
    NotTrusted,
    distrust,
    in_group,
    is_shared,
    make_folder,
    make_own,
    open_above,
    read_trusted,
    remove_entry,
    shown_user,
    strangers_link,
)
from ftsupervise.printable import to_type
from ftsupervise.rundir.attempt_pages import NAMES, StartPage
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import as_counts, decode, parse_object, read_record, write_json

_LONGEST_MARK = 120  # bytes; the name of a file has 255 at most
ANOTHER = "the run directory was replaced by another"


class Pin(NamedTuple):
    """An account's note of a run directory: its owner, and the token of the account's last launch there ("" if none)."""

    owner: int
    token: str
    run_dir: str = ""
    inode: int = 0  # 0: not noted
    over: bool = False  # when it was last seen, it had finished, or a person had stopped it
    saves_in: str = ""  # the folder of its checkpoints, absolute
    saves_inode: int = 0  # of that folder; 0: not noted


# -------------------------------------------------------------------------------------------------------------- in a job


def another(rundir: RunDir, token: str) -> str:
    """Return why the folder at ``rundir`` is not the one that this account's launch ``token`` was made in, as a
    sentence; "" when it is.

    Raises OSError where that cannot be seen, FileNotFoundError where there is no such folder.
    """
    if link := strangers_link(rundir.root):
        return f"{ANOTHER}: {link}"
    owner = rundir.root.stat().st_uid
    for number in sorted(_numbers(rundir), reverse=True):
        page = rundir.launches / f"{number:04d}" / "launch.json"
        try:
            record = decode(LaunchRecord, parse_object(read_trusted(page)), lenient=True)
        except (NotTrusted, FileNotFoundError, NotADirectoryError, ValueError):  # another's, or none
            continue
        if record.token == token:
            return _another_owner(rundir, owner, record.owner)
    return f"{ANOTHER}: {rundir.root} belongs to {shown_user(owner)} and holds no launch {token}"


def seen_with(rundir: RunDir, attempt: Path | None) -> os.stat_result | None:
    """Return the facts of the run directory in which our own ``attempt`` lies, with its first page; None where it does not:
    another account has put another directory there, whose owner is not that of the run. Raises OSError."""
    with ExitStack() as until:
        root = at = until.enter_context(open_folder(rundir.root, follow=True))
        if attempt is not None:
            try:
                for name in (rundir.attempts.name, attempt.name):
                    at = until.enter_context(open_folder(name, dir_fd=at))
                page = os.stat(NAMES[StartPage], dir_fd=at, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if distrust(page, attempt):
                return None
        return os.fstat(root)


def identity(root: Path) -> tuple[int, int]:
    """Return what tells this folder from one that is put in its place: its inode and its owner. Raises OSError."""
    found = root.stat()
    return found.st_ino, found.st_uid


def require_still(rundir: RunDir, before: tuple[int, int]) -> None:
    """Raise NotTrusted where the folder at ``rundir`` is not the one that it was ``before`` it was judged and read. What cannot
    be seen is not judged here."""
    try:
        now = identity(rundir.root)
    except OSError:
        return
    if now != before:
        raise NotTrusted(f"{ANOTHER} while it was read: {rundir.root}", hint=hint(rundir))


def hint(rundir: RunDir) -> str:
    return f"check its owner: ls -ld {rundir.quoted()}; if you put it there yourself, launch again"


def refuse(rundir: RunDir, token: str) -> None:
    """Raise NotFound or NotTrusted unless this is the folder that was launched. A folder that cannot be seen is not
    judged here.

    Without a ``token`` (a job script of one's own) its owner must be this account, root, or share it with this
    account's group.
    """
    try:
        why = another(rundir, token) if token else _strangers(rundir)
    except (FileNotFoundError, NotADirectoryError):
        if token:
            raise NotFound(
                f"the run directory {rundir.root} is not there: its file system is not mounted here, or it was moved",
                hint="mount it or move it back; or launch again",
            ) from None
        return
    except OSError:
        return
    if why:
        raise NotTrusted(f"{why}; nothing is started", hint=hint(rundir))


def is_strangers(rundir: RunDir) -> bool:
    """Return whether the folder belongs to an account that does not share it. Then waiting does not help."""
    try:
        return bool(_strangers(rundir))
    except OSError:
        return False


def _strangers(rundir: RunDir) -> str:
    if link := strangers_link(rundir.root):
        return f"the run directory is not followed: {link}"
    found = rundir.root.stat()
    if found.st_uid in (os.geteuid(), 0) or (is_shared(found) and in_group(os.geteuid(), found.st_gid)):
        return ""
    return f"the run directory {rundir.root} belongs to {shown_user(found.st_uid)}, who does not share it with you"


def _another_owner(rundir: RunDir, owner: int, noted: int | None) -> str:
    if noted is None or owner == noted:
        return ""
    return (
        f"{ANOTHER}: {rundir.root} belongs to {shown_user(owner)}, and the one that was launched to {shown_user(noted)}"
    )


def _numbers(rundir: RunDir) -> list[int]:
    try:
        return as_counts(os.listdir(rundir.launches))
    except (FileNotFoundError, NotADirectoryError):
        return []


# --------------------------------------------------------------------------------------------------- in an account's state


def page_of(state: Path, root: Path) -> Path:
    """Return the page on which an account notes the owner of a run directory; ``root`` is its absolute path."""
    return state / "watch" / "seen" / mark_of(root)


def mark_of(root: Path) -> str:
    """Return what the run directory ``root`` is called in an account's state directory: its path, as it stands in a URL; of a
    long one the end, and a digest."""
    mark = quote(os.fsencode(root), safe="")
    if len(mark) <= _LONGEST_MARK:
        return mark
    from hashlib import sha256  # loads OpenSSL: 3 ms and 4 MB

    return f"{mark[-_LONGEST_MARK // 2 :]}-{sha256(os.fsencode(root)).hexdigest()}"


def note(state: Path, root: Path, token: str = "") -> None:
    """Note the owner and the inode of the run directory ``root``, and the token of this launch. Raises OSError.

    It is noted by its path as it was typed, and by what that resolves to: another day it may be found by either.
    """
    found = root.stat()
    make_own(state)
    for place in dict.fromkeys((root, root.resolve())):
        page = page_of(state, place)
        make_folder(page.parent, parents=True)
        write_json(page, Pin(found.st_uid, token, str(place), found.st_ino), sync=False)


def note_over(state: Path, root: Path, over: bool) -> None:
    """Note whether the run is over: a directory that vanishes then is missed by nobody. Raises OSError."""
    pin = noted(state, root)
    if pin is None and not page_of(state, root).exists():
        note(state, root)
        pin = noted(state, root)
    if pin is not None and pin.over != over:
        write_json(page_of(state, root), pin._replace(over=over), sync=False)


def gone_for_good(state: Path, root: Path) -> bool:
    """Return whether a run that was over is not there any more. Its settings went with it, or name nothing. May hang."""
    pin = noted(state, root)
    if pin is None or not pin.over:
        return False
    try:
        root.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def forget(state: Path, root: Path) -> None:
    """Forget the run directory: nobody misses it any more. Raises OSError."""
    remove_entry(page_of(state, root))


def noted(state: Path, root: Path) -> Pin | None:
    """Return the note of ``root``; None when there is none that can be read."""
    try:
        return read_record(Pin, page_of(state, root), limit=64_000)
    except (OSError, ValueError):
        return None


def another_than_noted(rundir: RunDir, pin: Pin) -> str:
    """Return why the folder at ``rundir`` is not the one of ``pin``, as a sentence; "" when it is.

    Raises OSError as ``another``.
    """
    return _another_owner(rundir, rundir.root.stat().st_uid, pin.owner) or (
        another(rundir, pin.token) if pin.token else ""
    )


def require(state: Path, rundir: RunDir, *, copies: bool = False) -> None:
    """Raise NotTrusted unless the folder at ``rundir`` is the very one that this account has launched there, if it has launched
    one: what deletes, copies or overwrites for a run asks this. ``copies``: a copy or a restore by its
    owner will do, to be read. Raises OSError where that cannot be seen.
    """
    for root in dict.fromkeys((rundir.whole or rundir.root, (rundir.whole or rundir.root).resolve())):
        try:
            pin = read_record(Pin, page_of(state, root), limit=64_000)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise OSError(errno.EIO, f"does not say which run directory was launched: {error}", str(root)) from None
        if pin is None:
            continue
        here = RunDir(root)
        why = another_than_noted(here, pin)
        if not (why or copies) and pin.inode not in (0, root.stat().st_ino):
            why = f"{ANOTHER}: {root} is a copy of the one that was launched"
        if why:
            raise NotTrusted(f"{why}; nothing is done with it", hint=hint(here))


def note_checkpoints(state: Path, rundir: RunDir, folder: Path) -> None:
    """Note that the run saves in ``folder``, as it is now; one that is not there yet is noted later. Raises OSError."""
    root = rundir.whole or rundir.root
    try:
        inode = folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        inode = 0
    for place in dict.fromkeys((root, root.resolve())):
        pin = noted(state, place)
        if pin is not None:
            pin = pin._replace(saves_in=str(folder), saves_inode=inode)
            write_json(page_of(state, place), pin, sync=False)


def require_checkpoints(state: Path, rundir: RunDir, folder: Path, seen: os.stat_result | None = None) -> None:
    """Raise NotTrusted where others may have exchanged the folder of its checkpoints, and it is another one than was noted.
    Where none was noted, this one is. ``seen``: the facts of the open folder in which something is done. Raises OSError.
    """
    root = rundir.whole or rundir.root
    pin = noted(state, root)
    if (
        pin is None or not folder.is_absolute() or folder.is_relative_to(root)
    ):  # in that one, which is asked for by itself
        return
    if not pin.saves_inode or pin.saves_in != str(folder):
        note_checkpoints(state, rundir, folder)
        return
    try:
        inode = (seen or folder.stat()).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return
    if inode != pin.saves_inode and (why := open_above(folder)):
        raise NotTrusted(
            f"{folder} is another folder than the one that the run has saved in, and {why}; nothing is done with it",
            hint=f"look at it: ls -la {to_type(folder)}; if you put it there yourself, launch again, "
            f"or: rm {to_type(page_of(state, root))}",
        )


def require_own(state: Path, rundir: RunDir) -> None:
    """Refuse to launch into a run directory of another account. Raises NotPermitted, OSError."""
    try:
        why = _strangers(rundir)
        pin = noted(state, rundir.root)
        why = why or (_another_owner(rundir, rundir.root.stat().st_uid, pin.owner) if pin is not None else "")
    except FileNotFoundError:
        return
    if why:
        raise NotPermitted(
            f"{why}; nothing was submitted",
            hint="a run of theirs: once they have launched it with share: {launch: true}, the group may; "
            f"else name another (run_dir), or have it moved away: ls -ld {rundir.quoted()}"
            + (f"; if it is as it should be: rm {to_type(page_of(state, rundir.root))}" if pin is not None else ""),
        )
