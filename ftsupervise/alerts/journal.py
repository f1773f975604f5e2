"""The alerts' memory: a directory of generations, safe to be written by several hosts at once, with no lock.

    journal/00000041.json   one whole State: alerts and the messages that wait, in one file
    journal/00000042.json   the next one; the highest whole one is the truth

To commit is to write a temporary file, fsync it, and ``link`` it to the next number. ``link`` never replaces, also not
over NFS: if somebody else was faster it says EEXIST, and the change is made anew on what they wrote. That is a
compare-and-swap, so two watchers, a person who acknowledges and one that was frozen for an hour can all write.

A file that is torn, from a newer version, or from an account that has no business here is never fatal: it is passed over and
reported (``problems``). What one generation may say, and whose word it is: ``generations.py``.
When the directory cannot be written (full, read-only, gone), the spare directory on this host takes the generation;
when that cannot be written either, the state lives on in this process and ``unsaved`` says why.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ftsupervise.alerts import generations
from ftsupervise.alerts.generations import LEAP, Generation, numbers, render, signed
from ftsupervise.alerts.outbox import JournalState
from ftsupervise.errors import CannotWrite
from ftsupervise.findings import AlertState
from ftsupervise.host import files
from ftsupervise.host.modes import FOLDER, PAGE, make_folder, set_file_mode
from ftsupervise.host.ownership import (
    NotTrusted,
    held,
    is_private,
    own_folder,
    private_folder,
    shown_user,
    strangers_link,
)
from ftsupervise.rundir.paths import sync_directory

KEEP = 24  # generations, and …
KEEP_FOR = 600.0  # … every one younger than so many seconds, for slow readers and writers
TOLD = 5  # number of passed-over files that are named


class Lost(Exception):
    """Another writer committed first."""


class Journal:
    """The generations in one directory. It keeps in memory only what could not be saved."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        spare: Path | None = None,
        keep_for: float = KEEP_FOR,
        away: str = "",
    ) -> None:
        """``away`` says why ``directory`` must not be touched (its file system hangs); then only the spare is used."""
        self.directory = Path(directory)
        self.spare = spare if spare is not None else _spare_of(self.directory)
        self.keep_for = keep_for
        self.away = away
        self.problems: list[str] = []  # the files that were passed over at the last read, one sentence each
        self.unsaved = ""  # why the last commit is not in the directory itself; "" when it is
        self._adrift: JournalState | None = None
        self._read: dict[Path, Generation] = {}  # the newest ones, parsed: a generation never changes

    def __repr__(self) -> str:
        return f"Journal({str(self.directory)!r})"

    @property
    def home(self) -> str:
        """Return the part of dedup keys that tells this journal from others."""
        return str(self.directory.absolute())

    def read(self) -> JournalState:
        """Return the newest whole state; an empty one when there is none. Never raises for the contents of the directory."""
        return self._adrift if self._adrift is not None else self._newest()[0]

    def change(self, make: Callable[[JournalState], JournalState]) -> JournalState:
        """Commit ``make(newest)`` and return it. ``make`` is pure: it is called again when another writer was faster.

        Does not raise when nothing can be written: see ``unsaved``.
        """
        for attempt in range(200):
            if attempt:
                time.sleep(min(0.002 * attempt, 0.05) * (0.5 + os.getpid() % 97 / 97))  # others are writing right now
            if self._adrift is not None:
                highest, old = self._newest()[1], self._adrift
            else:
                old, highest = self._newest()
            new = make(old)
            if new is old and self._adrift is None:
                return old
            try:
                self._commit(new, highest)
            except Lost:
                continue
            except OSError as error:
                self.unsaved = f"{self.directory}: {error.strerror or error}"
                try:
                    self._commit_to_spare(new, highest)
                except Lost:
                    continue
                except OSError:
                    self._adrift = new
                return new
            self.unsaved, self._adrift = "", None
            return new
        raise CannotWrite(
            f"cannot write {self.directory}: others kept being faster", hint="is something writing there in a loop?"
        )

    # ------------------------------------------------------------------------------------------------------ reading

    def _newest(self) -> tuple[JournalState, int]:
        """Return (state, highest number seen). The number counts files that could not be read, too: it is taken."""
        self.problems = []
        if self.away:
            return self._newest_in(self.spare)[:2] if _private(self.spare) else (JournalState(), 0)
        state, highest, _ = self._newest_in(self.directory)
        if not _private(self.spare):
            return state, highest
        aside, number, base = self._newest_in(self.spare)
        if number and base == highest:
            return aside, max(number, highest)  # nothing happened in the directory since: the spare goes on from it
        return _with_what_waits_in(aside, state), max(number, highest)

    def _newest_in(self, directory: Path) -> tuple[JournalState, int, int]:
        """Return (state, highest number that is taken, the number in the directory that it was made from)."""
        with _opened(directory) as (here, folder, why):
            if why:
                self.problems.append(f"passed over all of {directory}: {why}; ls -ld {directory}")
            return (JournalState(), 0, -1) if folder is None else self._newest_here(directory, here, folder)

    def _newest_here(self, directory: Path, here: Path, folder: os.stat_result) -> tuple[JournalState, int, int]:
        """Do the same in ``directory``, which is held open as ``here``."""
        before = list(self.problems)
        for _ in range(5):
            self.problems = list(before)
            there = sorted(numbers(here), reverse=True)
            passed = 0
            for number in there:
                path = directory / f"{number:08d}.json"
                try:
                    found = self._read_one(path, number, folder, here)
                    state = self._signed(directory, number, folder, here)
                    return state, _reached(there, number), found.base
                except FileNotFoundError:
                    break  # pruned between listing and reading: list again
                except (OSError, ValueError, MemoryError) as error:
                    passed += 1
                    if passed <= TOLD:
                        self.problems.append(f"passed over {path.name} in {directory}: {error}")
            else:
                return JournalState(), _reached(there, 0), -1
        return JournalState(), _reached(there, 0), -1

    def _read_one(self, path: Path, number: int, folder: os.stat_result, here: Path) -> Generation:
        if path not in self._read:
            found = generations.read(path, number, folder, here / path.name)
            self._read = {p: g for p, g in self._read.items() if p.parent != path.parent} | {path: found}
        return self._read[path]

    def _signed(self, directory: Path, number: int, folder: os.stat_result, here: Path) -> JournalState:
        """Return the state of that generation.

        If another account wrote it, its silences and acknowledgements bear the names of the accounts that wrote them,
        as far back as there are generations.
        """
        newest = self._read_one(directory / f"{number:08d}.json", number, folder, here)
        me, line = os.geteuid(), [newest]
        while line[0].owner not in (me, 0) and len(line) <= KEEP:
            number -= 1
            try:
                name = f"{number:08d}.json"
                line.insert(0, generations.read(directory / name, number, folder, here / name))
            except (OSError, ValueError, MemoryError):
                break
        return newest.state if newest.owner in (me, 0) else signed(line, shown_user, me)

    def _all_numbers(self) -> set[int]:
        here = numbers(self.directory) if not self.away and _folder(self.directory)[0] else set()
        return here | (numbers(self.spare) if _private(self.spare) else set())

    # ------------------------------------------------------------------------------------------------------ writing

    def _commit(self, state: JournalState, highest: int) -> None:
        if self.away:
            raise OSError(errno.ETIMEDOUT, self.away, str(self.directory))
        why = strangers_link(self.directory)
        if not why:
            # RUN/watch/journal, but never RUN: when its file system is away, that would be made on the disk beneath
            make_folder(self.directory.parent, FOLDER)
            make_folder(self.directory)
        with ExitStack() as until:
            here, folder = self.directory, None
            if not why:
                here, folder, why = until.enter_context(_opened(self.directory))
            if folder is None:
                why = f"{why or 'it is not there'}, so nothing is written there"
                raise PermissionError(errno.EPERM, why, str(self.directory))
            self._link(self.directory, here, state, highest)
        if _private(self.spare):
            for number in numbers(self.spare):
                if number <= highest:  # all of it is in the directory now
                    (self.spare / f"{number:08d}.json").unlink(missing_ok=True)

    def _commit_to_spare(self, state: JournalState, highest: int) -> None:
        if private_folder(self.spare) is None:
            raise PermissionError(errno.EPERM, "not a private directory of this account", str(self.spare))
        self._link(self.spare, self.spare, state, highest)

    def _link(self, directory: Path, held_as: Path, state: JournalState, highest: int) -> None:
        """Write the next generation into ``directory``, which is held open as ``held_as``."""
        number = highest + 1
        here = numbers(self.directory) if not self.away and _folder(self.directory)[0] else set()
        base = -1 if self.away else _reached(here, highest)
        temp = held_as / f".tmp-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        target = held_as / f"{number:08d}.json"
        fd = files.create_new(temp, PAGE)
        try:
            try:
                set_file_mode(fd, PAGE)
                view = memoryview(render(state, number, base))
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(temp, target)
            except FileExistsError:
                # NFS may say EEXIST to a link that it made: the answer was lost and the request sent twice.
                if temp.stat().st_nlink != 2:
                    raise Lost from None
        finally:
            try:
                os.unlink(temp)
            except OSError:
                pass
        if not self._still_ahead(number):
            target.unlink(missing_ok=True)
            raise Lost
        made = Generation(state, base, os.geteuid())
        self._read = {p: g for p, g in self._read.items() if p.parent != directory} | {directory / target.name: made}
        sync_directory(held_as)
        if number % 4 == 0:
            self._prune(held_as, number)

    def _still_ahead(self, number: int) -> bool:
        """Return False if the number we took had been taken and pruned long ago, while this process was frozen.

        Pruning goes upwards, so then our parent is gone as well.
        """
        there = {one for one in self._all_numbers() if one <= number + LEAP}
        return number - 1 in there or (number == 1 and (max(there, default=1) == 1 or 2 in there))

    def _prune(self, directory: Path, newest: int) -> None:
        oldest_allowed = time.time() - self.keep_for
        for number in sorted(numbers(directory)):
            path = directory / f"{number:08d}.json"
            try:
                if number > newest - KEEP or os.lstat(path).st_mtime > oldest_allowed:
                    break
                path.unlink()
            except OSError:
                break
        _sweep(directory, oldest_allowed)


def _private(directory: Path) -> bool:
    """Return whether a spare in /tmp can be trusted: only if no other account could have put it there."""
    return is_private(directory) and is_private(directory.parent)


def _folder(directory: Path) -> tuple[os.stat_result | None, str]:
    """Return the folder's stat (None if there is none that is trusted) and why it is not, as a clause. A link must be ours, and
    no link of another account on the way may lead to what is not its own: to the journal of another run."""
    try:
        found = os.lstat(directory)
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in (os.geteuid(), 0):
                return None, f"it is a link that {shown_user(found.st_uid)} has made"
            found = directory.stat()
        if link := strangers_link(directory):
            return None, link
    except OSError:
        return None, ""
    if not stat.S_ISDIR(found.st_mode):
        return None, ""
    why = generations.distrust(directory, found)
    return (None, why) if why else (found, "")


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[Path, os.stat_result | None, str]]:
    """Hold the folder open, and yield a path that leads to this very one, its stat (None if there is none that is trusted), and
    why it is not. Where others may write above it, they can exchange it at any moment for a link to another journal."""
    found, why = _folder(directory)
    here = directory
    with ExitStack() as until:
        if found is not None:
            try:
                here = until.enter_context(held(directory))
                if not os.path.samestat(found, here.stat()):
                    found, why = None, "another is being put in its place"
            except NotTrusted as error:
                found, why = None, error.message
            except OSError as error:
                found, why = None, "" if error.errno == errno.ENOENT else error.strerror or ""
        yield here, found, why


def _reached(there: Iterable[int], whole: int) -> int:
    """Return the highest number that is taken: also by a file that could not be read, but not by one that lies absurdly
    far ahead.
    """
    return max((one for one in there if one <= whole + LEAP), default=0)


def _sweep(directory: Path, before: float) -> None:
    """Remove temporary files of writers that were killed."""
    try:
        for path in directory.iterdir():
            if path.name.startswith(".tmp-") and os.lstat(path).st_mtime < before:
                path.unlink()
    except OSError:
        pass


def _with_what_waits_in(aside: JournalState, state: JournalState) -> JournalState:
    """Return ``state`` with the waiting messages and the firing alerts of ``aside`` that it does not know.

    So the end of an alert that was sent while the directory was away is sent when it is back.
    """
    known = {m.id for m in state.outbox} | set(state.posts)
    lost = tuple(m for m in aside.outbox if m.id not in known)
    firing = {k: a for k, a in aside.alerts.items() if a.state is AlertState.FIRING and k not in state.alerts}
    if not lost and not firing:
        return state
    return replace(state, outbox=(*state.outbox, *lost), alerts={**state.alerts, **firing})


def _spare_of(directory: Path) -> Path:
    name = hashlib.sha256(str(directory.absolute()).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return own_folder() / f"journal-{name}"
