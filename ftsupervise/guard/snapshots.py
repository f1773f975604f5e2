"""Snapshots in the node's memory, as the training loop sees them: the step to begin from, and one more of every few
steps.

It stands alone because it is loaded only where snapshots are asked for.

The supervisor names the step from which all ranks begin ($FTSUPERVISE_SNAPSHOT_STEP): the newest that all of them hold.
Without a supervisor the ranks find it by ``agree``. Newer snapshots are given up before the first step, for those steps
are made again. A snapshot of another world size, a torn one, and one that a later attempt has gone back behind are
never used.

What the ranks do not take (other shapes, other code) is given up once they have begun from something else, and not before:
where nothing else will do either, the next attempt is offered it again.

Nothing here raises into the loop while it trains. Where there can be no snapshots the guard says once why; training
goes on.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.checkpoints.mapped_bytes import MappedBytes
from ftsupervise.guard.loaded_again import LoadedAgain
from ftsupervise.guard.loop_state import LoopState
from ftsupervise.guard.resume import refuse
from ftsupervise.guard.settings import RankContext, Voice, run_owner, whole
from ftsupervise.guard.stop_reasons import StopReasons
from ftsupervise.host.ownership import is_private
from ftsupervise.rundir.attempt_pages import write_page
from ftsupervise.rundir.paths import ENV_GUARD, ENV_RESTART, ENV_SNAPSHOT_KEPT, ENV_SNAPSHOT_STEP, ENV_SNAPSHOTS
from ftsupervise.snapshots import room
from ftsupervise.snapshots.kept import read_trusted
from ftsupervise.snapshots.memory import Copied, Replaced, SnapshotMemory
from ftsupervise.snapshots.room import MOST, NoRoom, rank_file
from ftsupervise.snapshots.slots import ALGORITHMS, SLOTS_ALONE, Compared, SnapshotId, as_bytes, open_slots
from ftsupervise.snapshots.state import CannotKeep, Described
from ftsupervise.truth import NotFrom

if TYPE_CHECKING:
    from ftsupervise.snapshots.wait import CopyWait

# This rank's part of a snapshot that was kept on the disk when its job ended (``snapshots/kept.py``).


class KeptRank:
    """This rank's snapshot, compared with its digest and mapped.

    Raises OSError, ValueError where this rank cannot begin from it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        with open_slots(rank_file(str(folder), rank)) as file:
            header = file.valid(0)
            if header is None:
                raise ValueError(f"{file.path} is damaged")
            if not header.algorithm:
                raise ValueError(f"{file.path} has no digest to compare it with")
            self.id, self._digest, self._algorithm = header.id, header.digest, ALGORITHMS[header.algorithm]
            self.description = file.meta(0, header)
            self._mapped = MappedBytes(file.fd, file.data_at(0), header.data_size)
            self.data = self._mapped.data
            if not self._compare():
                raise ValueError(f"{file.path} is damaged")

    def is_unchanged(self) -> bool:
        """Return whether its bytes still are those that were kept: asked when they have been loaded."""
        return self._compare(aside=True)

    def _compare(self, *, aside: bool = False) -> bool:
        return as_bytes(self._mapped.digest(self._algorithm, aside=aside)) == self._digest


def kept_for(folder: Path, world: int, accounts: Collection[int]) -> SnapshotId:
    """Return what is kept there, by the page that all ranks read. Raises OSError; ValueError for another number of ranks, or
    where others than this account may write. ``accounts``: those that may own the folder above, besides."""
    page = read_trusted(folder, accounts)
    if page.world != world:
        raise ValueError(
            f"{'1 rank' if page.world == 1 else f'{page.world} ranks'} made it, and {world} would begin from it"
        )
    return SnapshotId(page.step, page.attempt)


# ------------------------------------------------------------------------------------------


EVERY = 2  # steps from one snapshot to the next, unless the settings say otherwise
_SLOTS = 16  # at most
_BELOW = 0.05  # of the memory: snapshots stay that far below the share at which the guard leaves
_AGENT_WITHIN = 30.0  # seconds
_ON_DISK = -1  # in the place of a slot


class _SnapshotPace(NamedTuple):
    """Tells how often the settings ask for a snapshot, and whether its copy is waited for."""

    every: int  # steps from one to the next; 0: none
    copied: CopyWait | None  # the copy of each is waited for


class Snapshots:
    """The snapshots of this rank. ``agree``: int -> int, the maximum over all ranks."""

    def __init__(
        self, place: RankContext, agree: Callable[[int], int] | None, voice: Voice, outside: StopReasons
    ) -> None:
        self._place, self._agree, self._voice, self._outside = place, agree, voice, outside
        self._pid = os.getpid()
        self._named = os.environ.get(ENV_SNAPSHOTS, "")
        self._code = ""  # the version of the loop's code, where it names one
        self._pace = _SnapshotPace(
            _setting("SNAPSHOT_EVERY", EVERY, 0, 1_000_000), _wait_for_copies(self._named, place.rank)
        )
        self._loop: LoopState | None = None
        self._memory: SnapshotMemory | None = None
        self._kept: tuple[SnapshotId, KeptRank | None] | None = None  # on the disk; None: it is not there for this rank
        self._why = ""  # there are none
        self.again: LoadedAgain | None = None  # what was loaded from the disk is compared once more
        self._left = False  # those that are there were not taken, and are given up when the loop has begun without them
        # monotonic: the node's agent, which starts beside the first ranks of a job, makes the folder until then
        self._coming_until = time.monotonic() + _AGENT_WITHIN if os.environ.get(ENV_RESTART) == "0" else 0.0
        if self._pace.every:
            self._open()
        else:
            self._why = "the settings say so"

    def _open(self) -> None:
        most = min(MOST, self._outside.memory.limit - _BELOW)
        if not self._named:
            self._why = f"{ENV_SNAPSHOTS} is not set; `ftsupervise run` sets it"
            self._coming_until = 0.0
            return
        folder = room.node_folder(self._named)
        if not is_private(folder):
            self._why = f"{folder} is not there, or is not ours alone (has this container a /dev/shm of its own?)"
            return
        self._coming_until = 0.0
        slots = _setting("SNAPSHOT_SLOTS", SLOTS_ALONE, 2, _SLOTS)
        try:
            self._memory = SnapshotMemory(folder, self._place.rank, self._place.world, slots, most)
            self._memory.find()
        except (OSError, ValueError) as error:
            self._off(f"{folder}: {error}")

    # ------------------------------------------------------------------------------------------ before the first step

    def restore(self, loop: LoopState, one_pass: Callable[[], object] | None) -> int | None:
        """See ``Guard.restore``."""
        self._loop, self._code = loop, loop.code
        ranks = loop.ranks(self._place.rank, self._place.world)
        if self._agree is None and ranks is not None:
            self._agree = lambda vote: max(ranks.of_all(vote))

        def load(found: SnapshotId, slot: int) -> None:
            description, data = self._content(slot)
            loop.load(description, lambda at: data)
            for words in loop.left(description):
                self._voice.once(f"strict=False: {words}")

        return self.begin(loop.why_not, lambda: loop.warm_up(one_pass), load)

    def begin(
        self,
        why_not: Callable[[bytes], str],
        prepare: Callable[[], object],
        load: Callable[[SnapshotId, int], object],
    ) -> int | None:
        """Return the step that all ranks begin from, loaded; None: they have none in memory.

        Raises RuntimeError where this rank cannot begin where the others do.
        """
        if not self._named or not self._pace.every:
            return None
        self._look_on_the_disk()
        held = self._held()
        step = self._chosen([one.step for one in held])
        found, reason, code, misfit = None, "", "", False
        if step is not None:
            found = max((one for one in held if one.step == step), default=None)
            reason, misfit = (
                self._unusable(held, found, why_not) if found else (f"this rank does not hold step {step}", False)
            )
            code = self._other_code(held, found) if found and not reason else ""
        if step is None or not self._all_can(step, found is not None and not reason, reason, code, misfit=misfit):
            self._left = True
            self._note_not_from(step, found, reason or code)
            return None
        assert found is not None
        self._give_up_newer(found)
        prepare()
        try:
            load(found, held[found])
            if found not in self._held():
                raise ValueError("a process of an earlier attempt has written over it")
            if self._kept is not None and self._kept[1] is not None:
                self.again = LoadedAgain(f"the kept snapshot of step {step}", [self._kept[1].is_unchanged])
        except Exception as error:
            raise RuntimeError(f"the snapshot of step {step} could not be loaded: {error}") from error
        return found.step

    def begins_without(self) -> None:
        """Give up what was not taken: the loop has begun from something else, or anew."""
        if self._left:
            self._left = False
            self._give_up_newer(None)

    def _note_not_from(self, step: int | None, found: SnapshotId | None, why: str) -> None:
        """Record, on rank 0, that this attempt does not begin from the snapshot that its supervisor named."""
        said = os.environ.get(ENV_SNAPSHOT_STEP, "")
        if self._place.rank or self._place.attempt_dir is None or not (said.isascii() and said.isdigit()):
            return
        made = found.attempt if found is not None else None
        why = (
            why
            or (self._why if self._named and self._kept is None else "")
            or f"another rank cannot begin from step {step}"
        )
        try:
            write_page(self._place.attempt_dir, NotFrom(int(said), made, why[:2000]))
        except OSError as error:
            self._voice.once(f"cannot write that this attempt did not begin from step {said}: {error.strerror}")

    def _look_on_the_disk(self) -> None:
        """Map an older job's memory from the disk, where it was kept there."""
        folder = os.environ.get(ENV_SNAPSHOT_KEPT, "")
        if folder:
            try:
                self._kept = kept_for(Path(folder), self._place.world, run_owner(self._place)), None
                self._kept = self._kept[0], KeptRank(Path(folder), self._place.rank)
            except (OSError, ValueError) as error:
                self._why = str(error)
                self._voice.once(f"{folder} cannot be used: {error}")

    def _content(self, slot: int) -> tuple[bytes, memoryview]:
        """Return description and data. Raises OSError, ValueError."""
        if slot == _ON_DISK:
            assert self._kept is not None and self._kept[1] is not None
            return self._kept[1].description, self._kept[1].data
        assert self._memory is not None
        return self._memory.description(slot), self._memory.data(slot)

    def _held(self) -> dict[SnapshotId, int]:
        """Return the snapshots that this attempt may begin from, each with its slot."""
        if self._kept is not None:
            return {} if self._kept[1] is None else {self._kept[0]: _ON_DISK}
        newest = self._place.attempt
        try:
            held = {} if self._memory is None else self._memory.held()
        except OSError as error:
            self._off(str(error))
            return {}
        return {one: slot for one, slot in held.items() if newest is None or one.attempt <= newest}

    def _chosen(self, steps: list[int]) -> int | None:
        """Return the step that all ranks begin from: as the supervisor says, else the newest that all of them hold."""
        said = os.environ.get(ENV_SNAPSHOT_STEP, "")
        if (
            os.environ.get(ENV_SNAPSHOT_KEPT, "") and self._kept is None
        ):  # of another number of ranks, as all of them see
            return None
        if said.isascii() and said.isdigit():
            return int(said)
        if self._place.attempt is not None:  # a supervisor, and it has named none
            return None
        if self._agree is None:
            if self._place.world > 1:
                self._voice.once("give Guard(agree=…): the ranks cannot agree on the snapshot to begin from")
                return None
            return max(steps, default=None)
        bound = 1 << 62
        while True:
            lowest = -int(self._agree(-max((step for step in steps if step <= bound), default=-1)))
            if lowest < 0:
                return None
            if not int(self._agree(0 if lowest in steps else 1)):
                return lowest
            bound = lowest - 1

    def _unusable(
        self, held: Mapping[SnapshotId, int], found: SnapshotId, why_not: Callable[[bytes], str]
    ) -> tuple[str, bool]:
        """Return why this rank cannot begin there, "" where it can; and whether that lies in the program as it is now."""
        try:
            memory, slot = self._memory, held[found]
            alone = slot != _ON_DISK and self._place.attempt is None  # else the supervisor or ``KeptRank`` has looked
            compared = memory.compare(slot) if alone and memory is not None else Compared.SAME
            if compared is Compared.UNKNOWN:
                self._voice.once(
                    f"the snapshot of step {found.step} is not verified: it has no digest to compare it with"
                )
            if compared is Compared.DAMAGED:
                return "it is damaged: its bytes are not those that were copied there", False
            misfit = why_not(self._content(slot)[0])
            return misfit, bool(misfit)
        except (OSError, ValueError, LookupError) as error:
            return str(error) or type(error).__name__, False

    def _other_code(self, held: Mapping[SnapshotId, int], found: SnapshotId) -> str:
        """Return that code of another version made it, as a clause; all ranks of an attempt name the same."""
        from ftsupervise.snapshots.state import code_of

        made = code_of(self._content(held[found])[0])
        return "" if made == self._code else f"code {made!r} made it, and this is code {self._code!r}"

    def _all_can(self, step: int, fine: bool, reason: str, code: str, *, misfit: bool) -> bool:
        """Return whether every rank can begin there; no rank can where other ``code`` made it.

        Raises RuntimeError where this one cannot, and has no way to tell the others. Where the program is the reason
        (``misfit``), no further attempt begins before a person has acted.
        """
        if reason or code:
            self._voice.once(f"the snapshot of step {step} cannot be used: {reason or code}")
        if code:
            fine = False
            if self._agree is None:
                return False
        if self._agree is not None:
            return not int(self._agree(0 if fine else 1))
        if not fine and self._place.world > 1:
            words = f"all ranks begin from the snapshot of step {step}, and this one cannot: {reason}"
            if misfit:
                self._note_not_from(step, None, reason)
                refuse(self._place, words, self._voice)
            raise RuntimeError(words)
        return fine

    def _give_up_newer(self, than: SnapshotId | None) -> None:
        if self._memory is not None:
            try:
                self._memory.invalidate_newer(than)
            except OSError as error:
                self._off(str(error))

    # ---------------------------------------------------------------------------------------------------- in the loop

    def take(self, step: Any) -> bool:
        """See ``Guard.snapshot``."""
        if self._loop is None:
            self._voice.once(
                "snapshot(): call restore(model=…, optimizer=…) before the loop: it says what a snapshot holds"
            )
            return False
        return self.is_due(step) and self.write(step, self._loop.describe, self._loop)

    def is_due(self, step: Any) -> bool:
        """Return whether a snapshot would be taken after this step.

        Depends on the step alone, so that all ranks take the same.
        """
        if self._memory is None and time.monotonic() < self._coming_until:
            self._open()
            if self._memory is None:
                return False
        if self._memory is None:
            self._tell_why()
            return False
        number = whole(step)
        return number is not None and number >= 0 and not number % self._pace.every and os.getpid() == self._pid

    def write(self, step: Any, describe: Callable[[], Described], source: Copied, size: int = 0) -> bool:
        """Copy the state that ``describe`` gives, now; False: there is none of this step. ``size``: it may grow to.
        Never raises.
        """
        number, memory = whole(step), self._memory
        if memory is None or number is None or self._outside.attempt.newer is not None or not self._outside.loss.sound:
            return False
        self.begins_without()
        try:
            described = describe()
            if not memory.is_ready_for(described, size):
                return False
            memory.write(number, self._place.attempt or 0, described, source)
            return self._pace.copied is None or self._is_copied(self._pace.copied, number)
        except NoRoom as error:
            self._voice.once(f"no snapshots for now: {error}")
        except (CannotKeep, Replaced) as error:
            self._off(str(error))
        except OSError as error:
            self._voice.once(f"no snapshot of step {number}: {error}")
        except Exception as error:  # law 7
            self._off(f"{type(error).__name__}: {error}")
        return False

    def _is_copied(self, copied: CopyWait, step: int) -> bool:
        """Return whether another node holds it, too: once that is so, or has taken too long."""
        found = copied.wait(step, self._place.attempt or 0)
        if not found and copied.problem:
            self._voice.once(f"snapshots are not on a second node, and not waited for: {copied.problem}")
        return found

    def finished(self) -> None:
        """Remove the snapshots in memory: the run is complete."""
        if self._memory is not None:
            self._memory.remove()
            self._memory = None

    # --------------------------------------------------------------------------------------------- a folder as the state

    @contextmanager
    def staged(self, step: Any, size: int) -> Iterator[Path | None]:
        """See ``Guard.snapshot_folder``. A full memory ends the writing without a snapshot; other errors of the block pass."""
        if not self.is_due(step) or self._memory is None:
            yield None
            return
        with staging(self._memory, size, self._voice.once) as folder:
            yield folder
            if folder is not None:
                state = FolderState(folder, self._code)
                self.write(step, state.describe, state, size)

    def restore_folder(self, into: Path, code: str) -> int | None:
        """See ``Guard.restore``."""
        self._code = code

        def load(found: SnapshotId, slot: int) -> None:
            unpack(*self._content(slot), into)

        return self.begin(why_not, lambda: None, load)

    def _off(self, why: str) -> None:
        self._why, self._memory = why, None
        self._tell_why()

    def _tell_why(self) -> None:
        if self._place.rank == 0 or self._named:
            self._voice.once(f"no snapshots in memory: {self._why}")


def _setting(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(ENV_GUARD + name, "")
    if text == "off":
        return 0
    return min(most, max(least, int(text))) if text.isascii() and text.isdigit() else default


def _wait_for_copies(folder: str, rank: int) -> CopyWait | None:
    try:
        seconds = float(os.environ.get(f"{ENV_GUARD}SNAPSHOT_WAIT", ""))
    except ValueError:  # off, or not set
        return None
    if not folder or not 0 < seconds <= 60:
        return None
    from ftsupervise.snapshots.wait import CopyWait

    return CopyWait(room.node_folder(folder), rank, seconds)


# ------------------------------------------------------------------------------------------

# A folder of files as a snapshot, for loops that have no state dicts: written into the node's memory, copied into a slot.
#
# The files are written into a folder beside the slots, and copied into the slot when the block ends: two copies, where a state
# of tensors takes one. Their names and sizes are the description; nothing of them is interpreted.

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class FolderState:
    """The files below ``folder``, to be copied into a slot."""

    def __init__(self, folder: Path, code: str = "") -> None:
        self._folder, self._code = folder, code

    def describe(self) -> Described:
        """Describe the files. Raises OSError."""
        found = sorted(path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())
        rows = [(path.relative_to(self._folder).as_posix(), path.stat().st_size) for path in found]
        total = sum(size for _, size in rows)
        text = json.dumps({"files": rows, "code": self._code}).encode()
        return Described(text, b"", (), tuple(found), total)

    def places(self, described: Described, buffer: memoryview) -> memoryview:
        return buffer

    def copy(self, described: Described, places: Any) -> None:
        at = 0
        for path, (name, size) in zip(described.values, json.loads(described.description)["files"]):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                end = at + size
                while at < end:
                    done = os.readv(fd, [places[at:end]])
                    if not done:
                        raise OSError(errno.EIO, f"{name} has become shorter")
                    at += done
            finally:
                os.close(fd)


@contextmanager
def staging(memory: SnapshotMemory, size: int, say: Callable[[str], None]) -> Iterator[Path | None]:
    """Give an empty folder in memory with room for ``size`` bytes; None where there is none. It is gone at the end.

    The room is checked before, because a job whose memory is full is killed while it writes.
    """
    folder = memory.staging_folder
    try:
        shutil.rmtree(folder, ignore_errors=True)
        memory.may_take(size)
        folder.mkdir(mode=0o700)
    except OSError as error:
        say(f"no snapshots for now: {error}")
        yield None
        return
    try:
        yield folder
    except OSError as error:
        if error.errno not in _FULL:
            raise
        say(f"no snapshot: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_not(description: bytes) -> str:
    """Return why a snapshot is not one of a folder, as a clause; "" when it is. Raises ValueError for a damaged one."""
    _rows(description)
    return ""


def unpack(description: bytes, buffer: memoryview, into: Path) -> None:
    """Write the files below ``into``. Raises OSError, and ValueError for names that lead elsewhere."""
    at = 0
    for name, size in _rows(description):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(buffer[at : at + size])
        at += size


def _rows(description: bytes) -> list[tuple[str, int]]:
    try:
        rows = [(str(name), int(size)) for name, size in json.loads(description)["files"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError("the loop keeps a folder, and the snapshot holds something else") from None
    for name, size in rows:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or size < 0:
            raise ValueError(f"{name!r} is not the name of a file in a snapshot")
    return rows
