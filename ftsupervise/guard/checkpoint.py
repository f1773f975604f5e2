"""Makes checkpoints appear and go through the attempt's own staging folder, by one rename each: whole, and by one
writer.

A newer attempt seals that folder when it begins (``rundir/fence.py``). From then on neither a commit nor a removal of
this attempt has any effect, whatever it had checked before. Without ``ftsupervise run`` no folder is sealed, and the
same calls still give checkpoints that are whole or absent.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.guard.settings import RankContext, Voice, run_owner
from ftsupervise.host import files
from ftsupervise.host.ownership import (
    OWN,
    PAGE,
    SHARED,
    make_folder,
    mode_inside,
    no_wider,
    remove_entry,
    set_file_mode,
    set_mode,
    shown_user,
)
from ftsupervise.rundir import fence
from ftsupervise.rundir.anchor import Anchor, write_anchor
from ftsupervise.rundir.paths import ENV_RUN, sync_directory, write_whole
from ftsupervise.rundir.records import time_of

if TYPE_CHECKING:
    from ftsupervise.checkpoints.commit import Origin
    from ftsupervise.checkpoints.contents import Contents, FileFacts
    from ftsupervise.checkpoints.manifest import FileEntry
    from ftsupervise.guard.loaded_again import LoadedAgain, LoadedInPart
    from ftsupervise.guard.resume import Unread, Wanted
    from ftsupervise.rundir.lineage import Lineage

_REMOVED = ".removed-"  # on its way out
_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE
_AT_FDCWD = -100
COMMIT_WITHIN = 30.0  # seconds behind the barrier in which the other ranks see that rank 0 has committed
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2  # seconds between two looks
_FAILED = "failed"  # beside the lists of the ranks: why rank 0 could not commit
_REASON = 4096  # bytes


class _LoopBeginning:
    """What is known of how this loop began."""

    def __init__(self) -> None:
        self.born = datetime.now(timezone.utc)  # its guard
        self.told = False  # by latest() or restore() what to go on from
        self.anew: datetime | None = None  # when it was told that there is nothing
        self.by_itself = False  # it has asked for the newest of any kind, and loads that itself
        self.unread: Unread | None = None  # what restore() found and cannot load, until latest() is asked for it
        self.first: int | None = None  # its first step


class Checkpoints:
    """The checkpoints of this run, as seen by one attempt. ``superseded`` says whether a newer one is known to have begun."""

    def __init__(self, place: RankContext, superseded: Callable[[], bool], voice: Voice) -> None:
        self.folder = place.checkpoints
        self._area = place.staging or place.checkpoints / fence.STAGING / fence.area_alone(place.world)
        self._superseded, self._voice, self._place = superseded, voice, place
        self._known: Lineage | None = None
        self._kept = False  # the folder's own name is durable
        self._skip: int | None = None  # not asked yet
        self._newest = ""  # name of the checkpoint that this rank has committed last
        self.begins = _LoopBeginning()
        self.again: LoadedAgain | LoadedInPart | None = None  # what the loop has loaded is compared once more
        self._before = 0  # identity of the checkpoint of that name when this rank came into the block
        self._sweeps = place.staging is None and place.rank == 0  # no newer attempt will

    def stage(self, name: str) -> Path:
        """Return an empty folder to write the checkpoint ``name`` into; every rank may ask.

        After the seal it is a path that leads nowhere. Raises ValueError for a name that is a path, OSError when the
        folder cannot be made.
        """
        if not name or name.startswith(".") or "/" in name:
            raise ValueError(f"{name!r} is not a name for a checkpoint: give no path and no leading dot")
        staged = self._area / name
        try:
            self._require_trusted()
            if self._sweeps:
                self._clear(staged)
            make_folder(self._area, parents=True)
            # with an umask of 002 the group could open what is written there, and write it for as long, whatever mode it gets
            make_folder(staged, None if self._is_shared() else OWN)
            # a link of another account in the place of the area may lead to it; rank 0 may delete or commit it meanwhile
            with suppress(FileNotFoundError), files.open_folder(staged):
                pass
        except OSError:
            if not self.over():
                raise
        return staged

    def stage_anew(self, name: str) -> Path:
        """Do the same on one rank, before the others: leftovers of an earlier save of that name are deleted.

        Raises as ``stage`` does.
        """
        staged = self.stage(name)
        self.discard(staged)
        return self.stage(name)

    def discard(self, staged: Path) -> None:
        """Delete a staged checkpoint that is not committed: a disk that is full gets its space back."""
        if not self.over():
            _delete(staged)

    def give_up(self, staged: Path, *, shared: bool = False, why: OSError | None = None) -> None:
        """Delete what was written of a save that failed: a disk that is full gets its space back. Say so once.

        Where others may be writing there (``shared``, or they have left their marks), these are the files that bear this
        rank's number; otherwise rank 0 deletes all. ``why``: behind the barrier, the reason that it leaves to the others.
        """
        if self.over():
            return
        try:
            self._delete_own(staged, shared=shared, behind=why is not None)
            if why is not None and not self._place.rank:
                make_folder(_failed(staged).parent, parents=True)
                _tell_failure(staged, why)
        except OSError:  # the save's own error is what the loop gets to see
            return
        self._voice.once("a checkpoint could not be saved: what was written of it is deleted")

    def _delete_own(self, staged: Path, *, shared: bool, behind: bool) -> None:
        from ftsupervise.checkpoints import rank_lists

        if not self._place.rank and not shared and (behind or not rank_lists.others_write(staged)):
            _delete(staged)
            return
        for one in rank_lists.own_files(staged, self._place.rank) if staged.is_dir() else ():
            _delete(staged / one.path)
        if self._place.rank and not shared:
            rank_lists.fail(staged, self._place.rank)

    def latest(self, world: int | None, *, begun: bool, wanted: Wanted | None = None) -> Path | None:
        """Return the newest one that is good to go on from; None when there is none. Raises OSError where they cannot
        be read, CannotResume where there must be one.

        ``wanted``: what the caller can load; default: any.
        """
        from ftsupervise.guard.resume import Wanted, latest

        found = latest(self._place, world, self._voice, self.over, begun=begun, wanted=wanted or Wanted())
        begins = self.begins
        begins.by_itself = begins.by_itself or wanted is None
        begins.unread = None if begins.by_itself or begun else found.unread
        if not begun:
            begins.told = True
            self._skip = found.skip
            begins.anew = datetime.now(timezone.utc) if found.path is None else None
        return found.path

    def require_unchanged(self, *, now: bool) -> bool:
        """Return whether what the loop has loaded is known to be what was compared; ``now``: do not wait for it. Raises
        RuntimeError where it is not."""
        if self.again is not None:
            if now and not self.again.over:
                return False
            self.again.require()
            self.again = None
        return True

    def require_gone_on(self, step: int | None) -> None:
        """At the first step, or the first save: raise CannotResume where the loop has begun anew over what it had saved."""
        unread, self.begins.unread = self.begins.unread, None
        if unread is None or step is None or (unread.step is not None and step > unread.step):
            return
        from ftsupervise.guard.resume import not_gone_on

        raise not_gone_on(self._place, unread, step, self._voice)

    def _require_trusted(self) -> None:
        """Raise OSError where nothing in the folder would be believed at the next start."""
        from ftsupervise.checkpoints.contents import distrust_folder
        from ftsupervise.host.ownership import remedy

        owner = run_owner(self._place)
        try:
            reason = distrust_folder(self.folder, owner)
        except FileNotFoundError:
            return
        if reason:
            todo = remedy(self.folder.stat(), self.folder)
            raise PermissionError(
                errno.EPERM, f"{reason}, so the next start would not go on from what is saved there (type: {todo})"
            )

    def skip(self) -> int:
        """Return the batches to skip from the checkpoint that this attempt went on from. See ``Guard.skip``."""
        if self._skip is None and self._place.attempt_dir is not None:
            from ftsupervise.guard.resume import skip_of

            self._skip = skip_of(self._place.attempt_dir)  # rank 0 alone has asked for the checkpoint
        return self._skip or 0

    def over(self) -> bool:
        """Return whether it is known that this attempt can no longer save."""
        return self._area.is_file() or self._superseded()

    def list_own(self, staged: Path) -> None:
        """Leave the list of the files that this rank wrote, with their digests, for rank 0; they are durable then.

        Raises OSError, unless a newer attempt has begun.
        """
        from ftsupervise.checkpoints import rank_lists
        from ftsupervise.checkpoints.commit import NotComplete, base_for, entries_of, share

        try:
            own = tuple(rank_lists.own_files(staged, self._place.rank))
            self._close(staged / one.path for one in own)
            shared = share(staged, own, base_for(self.folder, self._place.incremental, self._run()))
            rest = _without(own, shared)
            rank_lists.leave_list(staged, self._place.rank, (*shared, *entries_of(staged, rest)))
            if self._place.rank == 0:  # of a commit of that name before
                _failed(staged).unlink(missing_ok=True)
        except NotComplete as error:
            raise OSError(errno.EBUSY, str(error)) from None
        except OSError:
            if not self.over():
                raise

    def finish(
        self,
        staged: Path,
        step: int | None,
        metrics: Mapping[str, float],
        barrier: Callable[[], object] | None,
        ranks: Collection[int] | None,
        beat: Callable[[], object],
    ) -> bool | None:
        """For each rank, once its part is written: rank 0 commits, behind the barrier where several have written. False: a
        newer attempt has begun. None: this rank saw no commit within COMMIT_WITHIN.

        ``ranks``: those that meet at the barrier; None: all. Raises OSError.
        """
        commits = self._place.rank == 0
        if barrier is None and not commits:
            return self._finish_beside(staged, step, beat)
        if barrier is None:
            from ftsupervise.checkpoints.rank_lists import await_others

            others = await_others(staged, self._place.world, beat)
            if others:
                self.list_own(staged)
            return self.commit(staged, step, metrics, (0, *others) if others else ())
        before = self.identity(staged.name)
        self.list_own(staged)
        barrier()
        if commits:
            return self.commit(staged, step, metrics, range(self._place.world) if ranks is None else ranks)
        return self.is_committed(staged, before, beat)

    def begin(self, name: str, ranks: Collection[int] | None, *, barrier: bool) -> Path:
        """Return the folder that this rank writes its part of the checkpoint ``name`` into.

        What a failed save of that name has left is not in its way. Where no ``barrier`` does, a mark tells rank 0 that this
        rank is there too. ``ranks``: those that enter; None: all. Raises as ``stage`` does.
        """
        try:
            return self._enter(name, ranks, barrier=barrier)
        except FileNotFoundError:
            if barrier or not self._place.rank:
                raise
            return self._enter(name, ranks, barrier=barrier)  # rank 0 has committed it before it saw the mark

    def _enter(self, name: str, ranks: Collection[int] | None, *, barrier: bool) -> Path:
        from ftsupervise.checkpoints import rank_lists
        from ftsupervise.checkpoints.commit import cut_off
        from ftsupervise.guard.heartbeat import age

        place = self._place
        if place.world == 1 and not barrier:  # with one there are others, whatever this rank was told of the world
            return self.stage(name) if self._sweeps else self.stage_anew(name)
        staged = self.stage(name)
        try:
            rank_lists.forget(staged, place.rank)
            if not place.rank and (seconds := age()):
                rank_lists.clear_older(staged, seconds)
            if place.incremental:
                others = (
                    (range(place.world) if ranks is None else ranks)
                    if barrier or rank_lists.others_write(staged)
                    else ()
                )
                cut_off(staged, place.rank, {*others} - {place.rank})
            if place.rank and not barrier:
                self._before = self.identity(staged.name)
                rank_lists.enter(staged, place.rank)
        except OSError:
            if not self.over():
                raise
        return staged

    def _finish_beside(self, staged: Path, step: int | None, beat: Callable[[], object]) -> bool:
        """Leave the list of this rank for rank 0, which has seen its mark and waits. Raises OSError where rank 0 has not."""
        from ftsupervise.checkpoints import rank_lists
        from ftsupervise.checkpoints.contents import contents_of
        from ftsupervise.checkpoints.manifest import read_head
        from ftsupervise.checkpoints.quarantine import set_aside

        try:
            wrote = bool(contents_of(staged).files)
        except FileNotFoundError:
            wrote = False
        if self._place.world == 1 or self.over():
            return not self.over()
        if not wrote:  # rank 0 alone saves, or it has not begun yet
            rank_lists.leave(staged, self._place.rank)
            return True
        target, listed = self.folder / staged.name, True
        try:
            self.list_own(staged)
        except FileNotFoundError:
            listed = False  # rank 0 has committed, or commits, and has not seen the mark
        done = self.is_committed(staged, self._before, beat)
        if done is False or (done and (listed or _is_whole(target))):
            return done
        why = f"rank {self._place.rank} had not written its part"
        head = read_head(target)
        if head is not None and (head.step, head.attempt) == (step, self._place.attempt):
            set_aside(target, why, datetime.now(timezone.utc), area=self._place.staging)
        raise OSError(
            errno.EIO,
            f"{why} when rank 0 committed: where several ranks write, give guard.checkpoint(…, barrier=…)",
            str(target),
        )

    def commit(self, staged: Path, step: int | None, metrics: Mapping[str, float], ranks: Collection[int]) -> bool:
        """Write the manifest of the staged folder, and make it the checkpoint of that name, replacing an existing one.
        ``ranks``: those that left lists. False: a newer attempt has begun.

        Raises OSError when it cannot be done: a rank left no list, something still writes there, the disk is full.
        """
        target = self.folder / staged.name
        try:
            origin = self._origin(step, metrics)
            self._seal(staged, origin, ranks)
            self._show(staged)
            if not self._kept:
                self._kept = _keep_names(self.folder)
            done = self._move(staged, target)
            if done:
                sync_directory(self.folder)
                self._note_newest(Anchor(target.name, step, origin.at))
            return done
        except OSError as error:
            if not self.over():
                _tell_failure(staged, error)
                raise
            self._voice.once(f"this attempt saves nothing any more ({error.strerror})")
            return False

    def _note_newest(self, newest: Anchor) -> None:
        """Note for the supervisor from which checkpoint the snapshots go on now. Without the page it goes by what it sees."""
        self._newest = newest.checkpoint
        if self._place.attempt_dir is not None:
            try:
                write_anchor(self._place.attempt_dir, newest)
            except OSError:
                return

    def identity(self, name: str) -> int:
        """Return an identity of the folder that is the checkpoint ``name`` now; 0: there is none.

        It lists the folder, for a client of a network file system asks the server then. Raises OSError.
        """
        try:
            with os.scandir(self.folder) as entries:
                return next((one.stat(follow_symlinks=False).st_ino for one in entries if one.name == name), 0)
        except FileNotFoundError:
            return 0

    def is_committed(self, staged: Path, before: int, beat: Callable[[], object]) -> bool | None:
        """Wait until rank 0 has committed ``staged``: for the other ranks, behind the barrier.

        ``before``: the ``identity`` before the barrier. False: a newer attempt has begun. None: nothing is seen of it
        here within COMMIT_WITHIN. Raises OSError when rank 0 could not commit it.
        """
        until, pause = time.monotonic() + COMMIT_WITHIN, _FIRST_LOOK
        while self.identity(staged.name) in (0, before):
            if self.over():
                return False
            if why := _told_failure(staged):
                raise OSError(errno.EIO, f"rank 0 could not commit it: {why}", str(self.folder / staged.name))
            if time.monotonic() > until:
                return None
            beat()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        return True

    def _seal(self, staged: Path, origin: Origin, ranks: Collection[int]) -> None:
        """Close all files to other accounts, make them durable, and list them in the manifest.

        Nothing reads them before they have their name, so files, manifest and folders go to the disk together.
        """
        from ftsupervise.checkpoints import rank_lists
        from ftsupervise.checkpoints.commit import (
            NotComplete,
            Syncs,
            base_for,
            digests_of,
            manifest_from,
            require_still,
            share,
            write_shared,
        )
        from ftsupervise.checkpoints.contents import contents_of
        from ftsupervise.checkpoints.layouts import layout_of
        from ftsupervise.checkpoints.manifest import FOLDER_NAME, manifest_of, write_manifest

        contents = contents_of(staged)
        self._require_believed(contents, staged)
        self._close(staged / path for path in (*contents.files, *contents.folders))
        joined = rank_lists.join(staged, contents, ranks)
        base = base_for(self.folder, self._place.incremental, self._run())
        write_shared(staged, base, ())
        shared = share(staged, joined.rest, base)
        contents = contents_of(staged) if shared else contents
        if contents.irregular:
            self._voice.once(
                f"the manifest of {staged.name} leaves out {', '.join(sorted(contents.irregular)[:3])}: no files"
            )
        try:
            with Syncs() as syncs:
                rest = _without(joined.rest, shared)
                entries = (*joined.entries, *shared, *digests_of(staged, rest, syncs))
                pages = write_shared(staged, base, entries)
                write_manifest(staged, manifest_from(entries, origin, layout_of(staged, contents)), sync=False)
                rank_lists.remove_lists(staged)
                for page in (manifest_of(staged), *pages):
                    syncs.file(page)
                for folder in (FOLDER_NAME, *contents.folders):
                    syncs.folder(staged / folder)
            require_still(staged, contents)
        except NotComplete as error:
            raise OSError(errno.EBUSY, str(error)) from None

    def _require_believed(self, contents: Contents, staged: Path) -> None:
        """Raise PermissionError where the next start would not go on from it, for something of another account lies there."""
        if any(not self._is_believed(one) for one in contents.stats()):
            why = "something of another account lies there, so the next start would not go on from it"
            raise PermissionError(errno.EPERM, why, str(staged))

    def _is_believed(self, one: os.stat_result) -> bool:
        return one.st_uid in (0, os.geteuid(), *run_owner(self._place)) or self._is_shared()

    def _clear(self, staged: Path) -> None:
        """Remove what killed saves of this account have left.

        That is all of this name where no other rank may write there already, and all that has not changed for a day.
        """
        from ftsupervise.checkpoints.retain import left_alone, names_in

        if self._place.world == 1 and staged.is_dir() and not staged.is_symlink():
            self._take_away(staged)
        for name in names_in(self._area):
            if name.startswith(_REMOVED):
                _delete(self._area / name)
        for path in left_alone(self.folder, time.time()):
            if path != staged and path.lstat().st_uid == os.geteuid():
                self._take_away(path)

    def _take_away(self, path: Path) -> None:
        aside = path.with_name(f"{_REMOVED}{path.name.removeprefix(_REMOVED)}-{os.getpid()}")
        files.rename(path, aside)
        _delete(aside)

    def _origin(self, step: int | None, metrics: Mapping[str, float]) -> Origin:
        from ftsupervise.checkpoints.commit import Origin

        place, at = self._place, datetime.now(timezone.utc)
        numbers = {str(name): value for name in metrics if (value := float(metrics[name])) - value == 0.0}
        origin = Origin(at, step, place.world, os.environ.get(ENV_RUN, ""), place.attempt, numbers)
        return origin.written_by(self._run())

    def _run(self) -> Lineage | None:
        """Return the run that saves here; None where no supervisor knows of it. Raises OSError."""
        if self._known is None and self._place.rundir is not None:
            from ftsupervise.rundir.lineage import read_lineage

            self._known = read_lineage(self._place.rundir)
        return self._known

    def _is_shared(self) -> bool:
        """Return whether members of the group go on from what is saved here. Raises OSError."""
        from ftsupervise.rundir.lineage import believed_group

        group = believed_group(self._place.rundir)
        return group is not None and mode_inside(self._area) == SHARED and self._area.stat().st_gid == group

    def _require_ours(self, path: Path) -> None:
        """Raise FileExistsError where ``path`` is a checkpoint of another run, OSError where that cannot be seen."""
        from ftsupervise.checkpoints.manifest import read_head
        from ftsupervise.rundir.lineage import Belongs, belongs, whose

        try:
            head = read_head(path)
        except ValueError:  # a damaged manifest names no run
            return
        if head is not None and belongs(self._run(), head, path.parent) in (Belongs.ANOTHERS, Belongs.TAKEN):
            raise FileExistsError(errno.EEXIST, f"is a checkpoint of {whose(head)}, and stays", str(path))

    def _close(self, paths: Iterable[Path]) -> None:
        """Let no other account write a part of the checkpoint, whatever the umask was: the next attempt loads it."""
        if self._is_shared():
            return
        for path in paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # a link, another's file: not ours to close
                continue
            try:
                _close_to_others(fd)
            finally:
                os.close(fd)

    def _show(self, staged: Path) -> None:
        """Give the folder, its manifest and that one's folder the modes that they would have had from the beginning, where the
        file system has any."""
        from ftsupervise.checkpoints.manifest import manifest_of

        if self._is_shared():
            return
        mode, page = mode_inside(self._area) & ~0o022, manifest_of(staged)
        with suppress(OSError):
            fd = files.open_regular(page)
            try:
                set_file_mode(fd, no_wider(PAGE, mode))
            finally:
                os.close(fd)
            for folder in (page.parent, staged):
                set_mode(folder, mode)

    def _require_resumed(self, target: Path) -> None:
        """Raise OSError where a run that began anew would replace what was saved before it.

        It began anew where it was told that there is nothing to go on from, or where it asked nobody and its first step is not
        beyond any checkpoint of its own. A loop that loads by itself what it finds, and is past that step, has gone on.
        """
        from ftsupervise.checkpoints.layouts import step_of
        from ftsupervise.checkpoints.manifest import read_head

        begins = self.begins
        begun = begins.anew if begins.told else begins.born
        if begun is None or (begins.first is None and not begins.told):
            return
        try:
            head = read_head(target)
        except (OSError, ValueError):
            head = None
        at = head.at if head is not None and head.at is not None else time_of(target.stat())
        step = head.step if head is not None and head.step is not None else step_of(target.name)
        if at < begun and not self._went_on(step):
            raise FileExistsError(
                errno.EEXIST,
                "was saved before this loop began, which did not go on from it: it is not replaced (move it away, or type: "
                f"ftsupervise checkpoints anew {shlex.quote(str(self._root()))})",
                str(target),
            )

    def _went_on(self, step: int | None) -> bool:
        """Return whether the loop's first step is beyond ``step``; where nobody was asked, beyond any step that is there."""
        from ftsupervise.checkpoints.layouts import step_of

        first = self.begins.first
        if first is None:
            return False
        steps = [step] if self.begins.told else [step, *map(step_of, os.listdir(self.folder))]
        return any(one is not None and one < first for one in steps)

    def _root(self) -> Path:
        return self.folder if self._place.rundir is None else self._place.rundir.root

    def remove(self, path: Path) -> bool:
        """Remove an old checkpoint. False: a newer attempt has begun and owns it now. Raises OSError, also for one of another
        run."""
        from ftsupervise.checkpoints.manifest import records_beside

        self._require_ours(path)
        aside = self._area / f"{_REMOVED}{path.name}-{os.getpid()}"
        try:
            make_folder(self._area, parents=True)
            done = fence.move(path, aside, self._area)
        except OSError:
            if not self.over():
                raise
            return False
        if done:
            if path.name == self._newest:  # the program itself has done so: nobody takes the run back
                self._note_newest(Anchor())
            for page in records_beside(path) if aside.is_file() else ():
                remove_entry(page)
            _delete(aside)
        return done

    def _refuse_another_account_s(self, target: Path) -> None:
        """Raise FileExistsError where something of another account has the name of the checkpoint."""
        try:
            found = target.lstat()
        except FileNotFoundError:
            return
        if not self._is_believed(found):
            why = f"belongs to {shown_user(found.st_uid)}, and stays: have it moved away, or save elsewhere (checkpoints.path)"
            raise FileExistsError(errno.EEXIST, why, str(target))

    def _move(self, staged: Path, target: Path) -> bool:
        try:
            return fence.move(staged, target, self._area)
        except OSError as error:
            self._refuse_another_account_s(target)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        self._require_ours(target)
        self._require_resumed(target)
        if not _exchange(staged, target):
            raise FileExistsError(
                errno.EEXIST, "is there already, and this file system cannot exchange two", str(target)
            )
        sync_directory(target.parent)  # or a power cut could leave the old one there, whose files are gone
        _delete(staged)
        return True


def _failed(staged: Path) -> Path:
    from ftsupervise.checkpoints.manifest import FOLDER_NAME

    return staged / FOLDER_NAME / _FAILED


def _tell_failure(staged: Path, error: OSError) -> None:
    """Leave the reason to the ranks that wait for the commit. Where there is no room for it they wait within their bound."""
    try:
        write_whole(_failed(staged), str(error)[: _REASON // 4].encode())
    except OSError:
        return


def _told_failure(staged: Path) -> str:
    try:
        return files.read_bounded(_failed(staged), _REASON).decode("utf-8", "replace")
    except OSError:  # there is none, or the folder has just become the checkpoint
        return ""


def _without(found: Iterable[FileFacts], shared: Iterable[FileEntry]) -> tuple[FileFacts, ...]:
    done = {one.path for one in shared}
    return tuple(one for one in found if one.path not in done)


def _keep_names(folder: Path) -> bool:
    """Make the names of the folder and of those above it durable, which a first save may have made. Returns True."""
    device = folder.stat().st_dev
    for above in folder.parents:
        try:
            if above.stat().st_dev != device:
                break
        except OSError:
            break
        sync_directory(above)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False where kernel or file system cannot."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    except (ImportError, AttributeError):
        return False
    number = ctypes.get_errno()
    if code and number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(one))
    return bool(code == 0)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether its manifest lists all files that are in it, with their sizes: no rank's part came too late."""
    from ftsupervise.checkpoints.contents import contents_of
    from ftsupervise.checkpoints.manifest import read_manifest

    try:
        manifest, there = read_manifest(checkpoint), contents_of(checkpoint).files
    except (OSError, ValueError):
        return False
    listed = {one.path: one.size for one in manifest.files} if manifest is not None else {}
    return listed == {path: one.facts.st_size for path, one in there.items()}


def _delete(path: Path) -> None:
    """Delete a folder of ours that is no longer used; the next attempt deletes the rest of it. Others may write the folder of
    the checkpoints: nothing is deleted where a link of theirs leads."""
    if path.is_dir() and not path.is_symlink():
        files.remove_tree(path)
        return
    with suppress(OSError):
        remove_entry(path)


def _close_to_others(fd: int) -> None:
    try:
        found = os.fstat(fd)
        if found.st_mode & 0o022 and found.st_uid == os.geteuid():
            os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o022)
    except OSError:
        return
