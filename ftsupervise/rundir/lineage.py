"""Which run a checkpoint belongs to: ``state/lineage.json`` holds an id that is made once and stays when the run directory is
moved or renamed. A copy of a run directory is another run: it lies elsewhere and has another inode, so it has another id.

Two runs may save into one folder, be it only because a settings file was copied with another ``name``. A run never goes on
from another's checkpoints and never removes them, unless a person said so (``ftsupervise launch --take-over``): then it may go
on from them, and they are still not removed. Standard library only: the guard reads this before its first step.
"""

from __future__ import annotations

import errno
import os
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

from ftsupervise.host import files
from ftsupervise.host.ownership import PAGE, distrust_in, is_shared, make_folder
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, read_record, write_json

_PAGE = "lineage.json"
_PATH = 4096  # characters


class Owned(Protocol):
    """What a manifest says about its run; "" where it does not say it."""

    @property
    def run(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    @property
    def run_dir(self) -> str: ...


class TakenOver(NamedTuple):
    """Another run from whose checkpoints this one may go on, because a person said so. ``id`` "": it is known by its name."""

    id: str
    name: str
    at: datetime = EPOCH
    by: str = ""


class Lineage(NamedTuple):
    """A run. ``id`` "": it has none yet, then nothing is known to be another's."""

    id: str = ""
    names: tuple[str, ...] = ()  # the ones it has had
    taken: tuple[TakenOver, ...] = ()
    root: Annotated[str, _PATH] = ""  # the run directory, as it lies now
    checkpoints: Annotated[str, _PATH] = ""  # the folder that nobody else's run has
    inode: int = 0  # of the run directory; 0: not noted. No device: each node numbers a network file system its own way
    copied: tuple[str, ...] = ()  # the ids of the runs that this run directory is a copy of

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else ""


class Belongs(Enum):
    """The run that a checkpoint belongs to, as one run sees it."""

    OURS = "ours"
    TAKEN = "taken over"  # another's, from which this run may go on
    ANOTHERS = "another's"
    UNKNOWN = "unknown"  # nothing says whose it is


def belongs(me: Lineage | None, page: Owned | None, folder: Path) -> Belongs:
    """Return whose a checkpoint in ``folder`` is; ``page``: the head of its manifest, None where it has none.

    A copy of a run directory has the checkpoints that were copied with it. A run directory that was made anew, in the place of
    one that was deleted or moved, is another run: nothing tells the two apart.
    """
    if me is None or not me.id or page is None or not (page.run_id or page.run):
        return Belongs.UNKNOWN
    if page.run_id:
        if page.run_id == me.id or (page.run_id in me.copied and _lies_in(folder, me.root)):
            return Belongs.OURS
        return Belongs.TAKEN if any(one.id == page.run_id for one in me.taken) else Belongs.ANOTHERS
    if page.run in me.names or str(folder) == me.checkpoints:  # written before runs had an id
        return Belongs.UNKNOWN
    return Belongs.TAKEN if any(one.name == page.run for one in me.taken) else Belongs.ANOTHERS


def _lies_in(folder: Path, root: str) -> bool:
    return os.path.realpath(folder).startswith(f"{root}/")


def whose(page: Owned) -> str:
    """Return the run that wrote it, as people call it: ``run a (/runs/a)``."""
    return f"run {page.run or page.run_id}{f' ({page.run_dir})' if page.run_dir else ''}"


def read_lineage(rundir: RunDir) -> Lineage:
    """Return the identity of the run; one without an id where it has none yet. Raises OSError where it cannot be read."""
    root = os.path.realpath(rundir.whole or rundir.root)
    return _here(_noted(rundir), root, _inode(root))._replace(root=root, checkpoints=str(rundir.checkpoints))


def believed_group(rundir: RunDir | None) -> int | None:
    """Return the group from whose members' checkpoints the run goes on: its launches are shared with it; None: from nobody's.
    The mode of the folder that it saves in does not say so, for an umask of 002 opens it to the project. Raises OSError."""
    if rundir is None:
        return None
    try:
        found = os.stat(rundir.launches)  # noqa: PTH116
    except FileNotFoundError:  # nobody has launched it
        return None
    return found.st_gid if is_shared(found) else None


def _noted(rundir: RunDir) -> Lineage:
    """Return the page as it was written."""
    path = rundir.lineage
    try:
        folder = os.stat(path.parent)  # noqa: PTH116
        found = read_record(Lineage, path, distrust=distrust_in(folder, path))
    except FileNotFoundError:
        found = None
    except ValueError as error:
        raise OSError(errno.EIO, f"does not say which run this is: {error}", str(path)) from None
    return found or Lineage()


def _inode(root: str) -> int:
    try:
        return os.stat(root).st_ino  # noqa: PTH116
    except FileNotFoundError:
        return 0


def _here(noted: Lineage, root: str, inode: int) -> Lineage:
    """Return the run whose directory is ``root`` where its page is ``noted``: another one where the page came with a copy.

    A directory that was moved keeps its inode; one that was restored, or whose file system numbers it anew, keeps its path.
    """
    if not (noted.id and noted.inode and inode) or noted.inode == inode or noted.root == root:
        return noted._replace(inode=noted.inode or inode)
    from hashlib import sha256

    anew = sha256(f"{noted.id} {inode} {root}".encode(errors="surrogateescape")).hexdigest()[
        :16
    ]  # the same for all readers
    return noted._replace(id=anew, copied=(*noted.copied, noted.id), inode=inode)


def keep_lineage(rundir: RunDir, name: str) -> Lineage:
    """Give the run an id where it has none, and note its ``name`` and place where they are new; return its identity.

    Raises OSError.
    """
    me = read_lineage(rundir)
    if not me.id:
        make_folder(rundir.lineage.parent, parents=True)
        me = read_lineage(rundir)  # its inode
        _make(rundir, me._replace(id=os.urandom(8).hex(), names=(name,)))
        me = read_lineage(rundir)
    now = me._replace(names=me.names if name in me.names else (*me.names, name))
    if now != _noted(rundir):
        write_json(rundir.lineage, now)
    return now


def take_over(rundir: RunDir, runs: tuple[TakenOver, ...]) -> None:
    """Note that the run may go on from the checkpoints of these ``runs``. Raises OSError."""
    me = read_lineage(rundir)
    known = {(one.id, one.name) for one in me.taken}
    write_json(
        rundir.lineage, me._replace(taken=(*me.taken, *(one for one in runs if (one.id, one.name) not in known)))
    )


def _make(rundir: RunDir, me: Lineage) -> None:
    """Write the page unless another process is faster: its id holds then."""
    folder = rundir.lineage.parent
    fd, temporary = files.create_temporary(folder, _PAGE, PAGE)
    os.close(fd)
    try:
        write_json(Path(temporary), me)
        os.link(temporary, rundir.lineage)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        files.rename(temporary, rundir.lineage)  # a file system without hard links
        return
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
