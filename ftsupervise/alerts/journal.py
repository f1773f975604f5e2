"""The alerts' memory: a directory of generations, safe to be written by several hosts at once, with no lock.

    journal/00000041.json   one whole State: alerts and the messages that wait, in one file
    journal/00000042.json   the next one; the highest whole one is the truth

To commit is to write a temporary file, fsync it, and ``link`` it to the next number. ``link`` never replaces, also not
over NFS: if somebody else was faster it says EEXIST, and the change is made anew on what they wrote. That is a
compare-and-swap, so two watchers, a person who acknowledges and one that was frozen for an hour can all write.

A file that is torn, foreign or from a newer version is never fatal: it is passed over and told (``problems``).
When the directory cannot be written (full, read-only, gone), the spare directory on this host takes the generation;
when that cannot be written either, the state lives on in this process and ``unsaved`` says why.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftsupervise.alerts.codec import decode, encode
from ftsupervise.alerts.outbox import State
from ftsupervise.errors import CannotWrite
from ftsupervise.model import AlertState
from ftsupervise.sharing import FOLDER, PAGE, make_folder, set_file_mode

FORMAT = 1
KEEP = 24  # generations, and …
KEEP_FOR = 600.0  # … every one younger than so many seconds, for those who read or write slowly
READ_LIMIT = 256_000_000
_NAME = re.compile(r"(\d{8,})\.json")


class Lost(Exception):
    """Somebody else committed first."""


class Journal:
    """The generations in one directory. Holds nothing in memory but what could not be saved."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        spare: Path | None = None,
        keep_for: float = KEEP_FOR,
        away: str = "",
    ) -> None:
        """``away``: why ``directory`` must not be touched (its file system hangs); then only the spare is used."""
        self.directory = Path(directory)
        self.spare = spare if spare is not None else _spare_of(self.directory)
        self.keep_for = keep_for
        self.away = away
        self.problems: list[str] = []  # what was passed over at the last read, one sentence each
        self.unsaved = ""  # why the last commit is not in the directory itself; "" when it is
        self._adrift: State | None = None
        self._read: dict[Path, tuple[State, int]] = {}  # the newest ones, parsed: a generation never changes

    def __repr__(self) -> str:
        return f"Journal({str(self.directory)!r})"

    @property
    def home(self) -> str:
        """What tells this journal from others in dedup keys."""
        return str(self.directory.absolute())

    def read(self) -> State:
        """The newest whole state; an empty one when there is none. Never raises for what lies in the directory."""
        return self._adrift if self._adrift is not None else self._newest()[0]

    def change(self, make: Callable[[State], State]) -> State:
        """Commit ``make(newest)`` and give it back. ``make`` is pure: it is called again when somebody else was faster.

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

    def _newest(self) -> tuple[State, int]:
        """(state, highest number seen). The number counts files that could not be read, too: it is taken."""
        self.problems = []
        if self.away:
            return self._newest_in(self.spare)[:2] if _private(self.spare) else (State(), 0)
        state, highest, _ = self._newest_in(self.directory)
        if not _private(self.spare):
            return state, highest
        aside, number, base = self._newest_in(self.spare)
        if number and base == highest:
            return aside, max(number, highest)  # nothing happened in the directory since: the spare goes on from it
        return _with_what_waits_in(aside, state), max(number, highest)

    def _newest_in(self, directory: Path) -> tuple[State, int, int]:
        """(state, highest number, the number in the directory that it was made from)"""
        before = list(self.problems)
        highest = 0
        for _ in range(5):
            self.problems = list(before)
            numbers = sorted(_numbers(directory), reverse=True)
            highest = numbers[0] if numbers else 0
            for number in numbers:
                path = directory / f"{number:08d}.json"
                try:
                    if path not in self._read:
                        parsed = _parse(_read(path))
                        self._read = {p: s for p, s in self._read.items() if p.parent != directory} | {path: parsed}
                    state, base = self._read[path]
                    return state, highest, base
                except FileNotFoundError:
                    break  # pruned between listing and reading: list again
                except (OSError, ValueError, RecursionError) as error:
                    self.problems.append(f"passed over {path.name} in {directory}: {error}")
            else:
                break
        return State(), highest, -1

    def _all_numbers(self) -> set[int]:
        mine = set() if self.away else _numbers(self.directory)
        return mine | (_numbers(self.spare) if _private(self.spare) else set())

    # ------------------------------------------------------------------------------------------------------ writing

    def _commit(self, state: State, highest: int) -> None:
        if self.away:
            raise OSError(errno.ETIMEDOUT, self.away, str(self.directory))
        # RUN/watch/journal, but never RUN: when its file system is away, that would be made on the disk beneath
        make_folder(self.directory.parent, FOLDER)
        make_folder(self.directory)
        self._link(self.directory, state, highest)
        if _private(self.spare):
            for number in _numbers(self.spare):
                if number <= highest:  # it is all in the directory now
                    (self.spare / f"{number:08d}.json").unlink(missing_ok=True)

    def _commit_to_spare(self, state: State, highest: int) -> None:
        self.spare.parent.mkdir(mode=0o700, exist_ok=True)
        self.spare.mkdir(mode=0o700, exist_ok=True)
        if not _private(self.spare):
            raise PermissionError(errno.EPERM, "not a private directory of this account", str(self.spare))
        self._link(self.spare, state, highest)

    def _link(self, directory: Path, state: State, highest: int) -> None:
        number = highest + 1
        base = -1 if self.away else max(_numbers(self.directory), default=0)
        temp = directory / f".tmp-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        target = directory / f"{number:08d}.json"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PAGE)
        try:
            try:
                set_file_mode(fd, PAGE)
                view = memoryview(_render(state, number, base))
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
        self._read = {p: s for p, s in self._read.items() if p.parent != directory} | {target: (state, base)}
        _sync(directory)
        if number % 4 == 0:
            self._prune(directory, number)

    def _still_ahead(self, number: int) -> bool:
        """False if the place we took had been taken and pruned long ago, while this process was frozen.

        Pruning goes upwards, so then our parent is gone as well.
        """
        numbers = self._all_numbers()
        return number - 1 in numbers or (number == 1 and (max(numbers, default=1) == 1 or 2 in numbers))

    def _prune(self, directory: Path, newest: int) -> None:
        oldest_allowed = time.time() - self.keep_for
        for number in sorted(_numbers(directory)):
            path = directory / f"{number:08d}.json"
            try:
                if number > newest - KEEP or os.lstat(path).st_mtime > oldest_allowed:
                    break
                path.unlink()
            except OSError:
                break
        _sweep(directory, oldest_allowed)


def _private(directory: Path) -> bool:
    """A spare in /tmp is believed only if nobody else could have put it there."""
    for path in (directory, directory.parent):
        try:
            found = os.lstat(path)
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return False
    return True


def _numbers(directory: Path) -> set[int]:
    """The generations there are. An NFS listing may be a minute old, so the next numbers are asked for one by one."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return set()
    numbers = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    following = max(numbers, default=0) + 1
    while os.path.lexists(directory / f"{following:08d}.json"):
        numbers.add(following)
        following += 1
    return numbers


def _sweep(directory: Path, before: float) -> None:
    """Temporary files of writers that were killed."""
    try:
        for path in directory.iterdir():
            if path.name.startswith(".tmp-") and os.lstat(path).st_mtime < before:
                path.unlink()
    except OSError:
        pass


def _render(state: State, number: int, base: int) -> bytes:
    body = json.dumps(encode(state), ensure_ascii=False, separators=(",", ":"))
    data = body.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(data).hexdigest()
    head = json.dumps({"format": FORMAT, "generation": number, "base": base, "sha256": digest})
    return head[:-1].encode() + b', "state": ' + data + b"}\n"


def _parse(raw: bytes) -> tuple[State, int]:
    """The State in a generation's bytes, and the number it was made from. Raises ValueError when it is not whole."""
    head, found, rest = raw.partition(b', "state": ')
    if not found or not raw.endswith(b"}\n"):
        raise ValueError("not a whole generation")
    about: Any = json.loads(head + b"}")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"written by another version (format {about.get('format')!r})")
    body = rest[:-2]
    if hashlib.sha256(body).hexdigest() != about.get("sha256"):
        raise ValueError("its checksum does not match")
    return decode(State, json.loads(body.decode("utf-8", "surrogatepass"))), int(about.get("base", -1))


def _with_what_waits_in(aside: State, state: State) -> State:
    """``state`` with the messages that wait in ``aside`` and the alerts that fire there, as far as it knows neither.

    So an alert that was told while the directory was away is told to be over when it is back.
    """
    known = {m.id for m in state.outbox} | set(state.posts)
    lost = tuple(m for m in aside.outbox if m.id not in known)
    firing = {k: a for k, a in aside.alerts.items() if a.state is AlertState.FIRING and k not in state.alerts}
    if not lost and not firing:
        return state
    return replace(state, outbox=(*state.outbox, *lost), alerts={**state.alerts, **firing})


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        raw = file.read(READ_LIMIT + 1)
    if len(raw) > READ_LIMIT:
        raise ValueError(f"larger than {READ_LIMIT} bytes")
    return raw


def _sync(directory: Path) -> None:
    from ftsupervise.rundir import sync_directory

    sync_directory(directory)


def _spare_of(directory: Path) -> Path:
    name = hashlib.sha256(str(directory.absolute()).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ftsupervise-{os.geteuid()}" / f"journal-{name}"
