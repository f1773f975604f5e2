"""The alerts' memory: a directory of generations, safe to be written by several hosts at once, with no lock.

    journal/00000041.json   one whole State: alerts and the messages that wait, in one file
    journal/00000042.json   the next one; the highest whole one is the truth

To commit is to write a temporary file, fsync it, and ``link`` it to the next number. ``link`` never replaces, also not
over NFS: if somebody else was faster it says EEXIST, and the change is made anew on what they wrote. That is a
compare-and-swap, so two watchers, a person who acknowledges and one that was frozen for an hour can all write.

A file that is torn, from a newer version, or from an account that has no business here is never fatal: it is passed over and
reported (``problems``).
When the directory cannot be written (full, read-only, gone), the spare directory on this host takes the generation;
when that cannot be written either, the state lives on in this process and ``unsaved`` says why.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.alerts.outbox import JournalState, Silence
from ftsupervise.errors import CannotWrite
from ftsupervise.findings import Alert, AlertState
from ftsupervise.host import files
from ftsupervise.host.ownership import (
    FOLDER,
    PAGE,
    StrangersLink,
    held,
    in_group,
    is_private,
    is_shared,
    make_folder,
    may_be_changed,
    own_folder,
    private_folder,
    remedy,
    set_file_mode,
    shown_user,
    stranger,
    strangers_link,
)
from ftsupervise.printable import to_type
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import decode, encode

# One generation of the alerts' journal as bytes on a disk: whose it is, whether it is whole, and what it says.
#
# Nothing in a file is believed before its owner is: this account, root, the owner of the run, or a member of the group that
# the folder is shared with. A file that is torn, too large, foreign, from a newer version, or that lies under
# another number than its own raises ValueError or OSError; the journal passes it over and says so.
#
# A silence and an acknowledgement bear the name of the account that wrote the generation in which they first stand, not the
# name in their text: several accounts may share a journal, and each writes whole generations, with all that the others said.

FORMAT = 1
LIMIT = (
    24_000_000  # bytes of a generation; 5,000 alerts are 3, and what is read takes up to thirty times as much memory
)
_HEAD = 1000  # bytes before the state; ours are a few hundred
_ROOM = 65_536  # bytes: with fewer a state may not fit
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
LEAP = 1_000_000  # numbers: no writer of generations makes a file further ahead
_NAME = re.compile(r"\d{8}|[1-9]\d{8,11}")
_Word = tuple[object, ...]  # a silence or an acknowledgement without its author


class Generation(NamedTuple):
    """A whole State, the number in the journal's directory that it was made from, and the account that wrote it."""

    state: JournalState
    base: int
    owner: int


def numbers(directory: Path) -> set[int]:
    """Return the numbers of all generations.

    An NFS listing may be a minute old, so the next numbers are looked up one by one.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return set()
    found = {int(stem) for stem, dot, rest in (name.partition(".") for name in names) if rest == "json" and _fits(stem)}
    following = max(found, default=0) + 1
    while os.path.lexists(f"{directory}/{following:08d}.json"):
        found.add(following)
        following += 1
    return found


def _fits(stem: str) -> bool:
    return bool(_NAME.fullmatch(stem))


class Budget:
    """The bytes of other accounts' generations that one look reads in all: they may make any number of them."""

    def __init__(self) -> None:
        self.left = 2 * LIMIT

    def take(self, found: os.stat_result) -> None:
        """Raise ValueError where that is more than is left. Own files cost nothing."""
        if found.st_uid not in (os.geteuid(), 0):
            if found.st_size > self.left:
                raise ValueError(f"its {found.st_size} bytes are more than are read of other accounts at once")
            self.left -= found.st_size


def read_generation(
    path: Path, number: int, folder: os.stat_result, at: Path, budget: Budget | None = None
) -> Generation:
    """Return the generation ``number`` at ``path``, which lies in ``folder``. ``at``: its path in the folder that is held open.

    Raises OSError, and ValueError with a sentence.
    """
    fd = files.open_regular(at)
    try:
        found = os.fstat(fd)
        why = stranger(folder, found) or may_be_changed(folder, found, path)
        if why:
            raise ValueError(
                f"{why}; {'rm ' + shlex.quote(str(path)) if found.st_uid != os.geteuid() else remedy(found, path)}"
            )
        if found.st_size > LIMIT:
            raise ValueError(f"it has {found.st_size} bytes, and none of ours has more than {LIMIT}")
        _about(os.pread(fd, _HEAD, 0), number)  # of thousands that are not whole, no more is read
        if budget is not None:
            budget.take(found)
        state, base = parse(files.read_open(fd, LIMIT, path), number)
    finally:
        os.close(fd)
    return Generation(state, base, found.st_uid)


def distrust(directory: Path, folder: os.stat_result) -> str:
    """Return why nothing that lies in ``directory`` is trusted, as a clause; "" when each file is checked by itself.

    It may lie in a directory that others may write: then they can put one of their own in its place.
    """
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return f"everybody may write it (chmod go-w {shlex.quote(str(directory))})"
    try:
        above, run = directory.parent.stat(), directory.parent.parent.stat()
    except OSError:
        return ""
    if folder.st_uid in (os.geteuid(), 0, run.st_uid) or (is_shared(above) and in_group(folder.st_uid, above.st_gid)):
        return ""
    return stranger(above, folder)


def render(state: JournalState, number: int, base: int) -> bytes:
    """Return the bytes of a generation. Raises OSError (EFBIG) when there are too many of them to be read again."""
    import errno

    text = json.dumps(encode(state, sparse=True), ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(data).hexdigest()
    head = json.dumps({"format": FORMAT, "generation": number, "base": base, "sha256": digest})
    whole = head[:-1].encode() + b', "state": ' + data + b"}\n"
    if len(whole) > LIMIT:
        raise OSError(
            errno.EFBIG, f"{len(state.alerts)} alerts and {len(state.outbox)} messages are too many for one file"
        )
    return whole


def parse(raw: bytes, number: int | None = None) -> tuple[JournalState, int]:
    """Return the State in a generation's bytes, and the number it was made from.

    Raises ValueError when it is not whole, or when it is not generation ``number`` (an old one under a new name).
    """
    base, digest, begin = _about(raw[:_HEAD], number)
    if not raw.endswith(b"}\n"):
        raise ValueError("not a whole generation")
    body = raw[begin:-2]
    if hashlib.sha256(body).hexdigest() != digest:
        raise ValueError("its checksum does not match")
    try:
        return decode(JournalState, json.loads(body.decode("utf-8", "surrogatepass"))), base
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _about(beginning: bytes, number: int | None) -> tuple[int, object, int]:
    """Return what the first _HEAD bytes of a generation say: the number it was made from, its checksum, and where its state
    begins. Raises ValueError."""
    head, found, _ = beginning.partition(b', "state": ')
    if not found:
        raise ValueError("not a whole generation")
    try:
        about: Any = json.loads(head + b"}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("written by another version")
    if number is not None and about.get("generation") != number:
        raise ValueError(f"it is another generation ({str(about.get('generation'))[:20]}) under this name")
    base = about.get("base", -1)
    if type(base) is not int or not -1 <= base < 10**12:
        raise ValueError("it does not say what it was made from")
    return base, about.get("sha256"), len(head) + len(found)


# ---------------------------------------------------------------------------------------------------------- authors


def signed(line: Sequence[Generation], name: Callable[[int], str], me: int) -> JournalState:
    """Return the State of the last generation in ``line`` (oldest first, without gaps), with the authors that the
    files' owners prove.

    The first is the ground: a sentence in one that ``me`` or root wrote was proved before. In another account's it was
    not, so its sentences are given as the words of that account.
    """
    ground = line[0]
    proved = ground.owner in (me, 0)
    known: dict[_Word, str] = {}
    for key, author in _words(ground.state):
        known[key] = author if proved or author == name(ground.owner) else _says(author, name(ground.owner))
    for generation in line[1:]:
        for key, _ in _words(generation.state):
            known.setdefault(key, name(generation.owner))
    return _with(line[-1].state, known)


def _says(author: str, teller: str) -> str:
    return author if author.endswith(f" (says {teller})") else f"{author} (says {teller})"


def _silence(silence: Silence) -> _Word:
    return (silence.id, silence.pattern, silence.run, silence.start, silence.end, silence.reason)


def _ack(alert: Alert) -> _Word:
    return (alert.id, alert.incident, alert.acked_at, alert.ack_note)


def _words(state: JournalState) -> list[tuple[_Word, str]]:
    acks = [(_ack(alert), alert.acked_by) for alert in state.alerts.values() if alert.acked_by]
    return [*((_silence(one), one.author) for one in state.silences), *acks]


def _with(state: JournalState, known: dict[_Word, str]) -> JournalState:
    alerts = {key: replace(a, acked_by=known[_ack(a)]) if a.acked_by else a for key, a in state.alerts.items()}
    silences = tuple(replace(silence, author=known[_silence(silence)]) for silence in state.silences)
    return replace(state, silences=silences, alerts=alerts)


# ------------------------------------------------------------------------------------------


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
        self.spare = spare if spare is not None else spare_of(self.directory)
        self.keep_for = keep_for
        self.away = away
        self.problems: list[str] = []  # the files that were passed over at the last read, one sentence each
        self.unsaved = ""  # why the last commit is not in the directory itself; "" when it is
        self.latest = JournalState()  # as it was last read or committed here
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
        self.latest = self._adrift if self._adrift is not None else self._newest()[0]
        return self.latest

    def change(self, make: Callable[[JournalState], JournalState]) -> JournalState:
        """Commit ``make(newest)`` and return it. ``make`` is pure: it is called again when another writer was faster.

        Does not raise when nothing can be written: see ``unsaved``.
        """
        self.latest = self._changed(make)
        return self.latest

    def _changed(self, make: Callable[[JournalState], JournalState]) -> JournalState:
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

    def has_room(self) -> bool:
        """Return whether the folder is there and may be written, was read without a problem, and its file system has room for
        a state; False while the spare is in use."""
        if self.problems or self.away or _private(self.spare):
            return False
        try:
            space = os.statvfs(f"{self.directory}/.")
        except OSError:
            return False
        if not os.access(self.directory, os.W_OK | os.X_OK):
            return False
        full = space.f_bavail * space.f_frsize < _ROOM or (space.f_files and not space.f_favail)
        return not full and not space.f_flag & os.ST_RDONLY

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
                self.problems.append(f"passed over all of {directory}: {why}; ls -ld {to_type(directory)}")
            return (JournalState(), 0, -1) if folder is None else self._newest_here(directory, here, folder)

    def _newest_here(self, directory: Path, here: Path, folder: os.stat_result) -> tuple[JournalState, int, int]:
        """Do the same in ``directory``, which is held open as ``here``."""
        before = list(self.problems)
        budget = Budget()  # for those that are passed over
        for _ in range(5):
            self.problems = list(before)
            there = sorted(numbers(here), reverse=True)
            passed = 0
            for number in there:
                path = directory / f"{number:08d}.json"
                try:
                    found = self._read_one(path, number, folder, here, budget)
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

    def _read_one(self, path: Path, number: int, folder: os.stat_result, here: Path, budget: Budget) -> Generation:
        if path not in self._read:
            found = read_generation(path, number, folder, here / path.name, budget)
            self._read = {p: g for p, g in self._read.items() if p.parent != path.parent} | {path: found}
        return self._read[path]

    def _signed(self, directory: Path, number: int, folder: os.stat_result, here: Path) -> JournalState:
        """Return the state of that generation.

        If another account wrote it, its silences and acknowledgements bear the names of the accounts that wrote them,
        as far back as there are generations.
        """
        budget = Budget()
        newest = self._read_one(directory / f"{number:08d}.json", number, folder, here, budget)
        me, line = os.geteuid(), [newest]
        while line[0].owner not in (me, 0) and len(line) <= KEEP:
            number -= 1
            try:
                name = f"{number:08d}.json"
                line.insert(0, read_generation(directory / name, number, folder, here / name, budget))
            except (OSError, ValueError, MemoryError):
                break
        return newest.state if newest.owner in (me, 0) else signed(line, shown_user, me)

    # ------------------------------------------------------------------------------------------------------ writing

    def _commit(self, state: JournalState, highest: int) -> None:
        if self.away:
            raise OSError(errno.ETIMEDOUT, self.away, str(self.directory))
        with ExitStack() as until:
            here, folder, why = until.enter_context(_opened(self.directory))
            if folder is None and not why:
                why = strangers_link(self.directory)
            if folder is None and not why:
                # RUN/watch/journal, but never RUN: when its file system is away, that would be made on the disk beneath
                make_folder(self.directory.parent, FOLDER)
                make_folder(self.directory)
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
        base = -1 if self.away else _reached(self._numbers(directory, held_as), highest)
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
        if not self._still_ahead(number, self._numbers(directory, held_as)):
            target.unlink(missing_ok=True)
            raise Lost
        made = Generation(state, base, os.geteuid())
        self._read = {p: g for p, g in self._read.items() if p.parent != directory} | {directory / target.name: made}
        sync_directory(held_as)
        if number % 4 == 0:
            self._prune(held_as, number)

    def _numbers(self, directory: Path, held_as: Path) -> set[int]:
        """Return the numbers in the journal's own directory. ``directory`` is held open as ``held_as``, and may be that one."""
        if self.away:
            return set()
        if directory == self.directory:
            return numbers(held_as)
        with _opened(self.directory) as (here, folder, _):
            return set() if folder is None else numbers(here)

    def _still_ahead(self, number: int, here: set[int]) -> bool:
        """Return False if the number we took had been taken and pruned long ago, while this process was frozen. ``here``: the
        numbers in the journal's own directory.

        Pruning goes upwards, so then our parent is gone as well.
        """
        aside = numbers(self.spare) if _private(self.spare) else set()
        there = {one for one in here | aside if one <= number + LEAP}
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


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[Path, os.stat_result | None, str]]:
    """Hold the folder open, and yield a path that leads to this very one, its stat (None if there is none that is trusted), and
    why it is not, as a clause. Where others may write above it, they can exchange it at any moment for a link elsewhere.

    A link must be ours, and none of another account on the way may lead to what is not its own: to another run's journal.
    """
    here, found, why = directory, None, ""
    with ExitStack() as until:
        try:
            named = os.lstat(directory)
            if stat.S_ISLNK(named.st_mode) and named.st_uid not in (os.geteuid(), 0):
                why = f"it is a link that {shown_user(named.st_uid)} has made"
            else:
                meant = directory.stat() if stat.S_ISLNK(named.st_mode) else named
                here = until.enter_context(held(directory))
                found = here.stat()
                same = os.path.samestat(meant, found)
                why = distrust(directory, found) if same else "another is being put in its place"
        except StrangersLink as error:
            why = error.clause
        except OSError as error:
            why = "" if error.errno in _NO_FOLDER else error.strerror or ""
        yield here, None if why else found, why


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


def spare_of(directory: Path, own: Path | None = None) -> Path:
    """Return where a journal goes on while its directory cannot be written. ``own``: ``own_folder()``, where it is known."""
    name = hashlib.sha256(str(directory.absolute()).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return (own or own_folder()) / f"journal-{name}"
