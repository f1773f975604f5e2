"""What a script without a guard has reached is not destroyed by a start from the beginning, and the start is told.

Nobody knows of such a script whether it resumes, before it has. Until then the newest checkpoint of the attempt before is kept
(``checkpoints/written.py``), and where an attempt begins is compared with what was reached (``rundir/starting_over.py``).
"""

from __future__ import annotations

import math
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ftsupervise.checkpoints.contents import contents_of
from ftsupervise.checkpoints.layouts import place_in_name, step_of
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.suspicion import may_come_of_a_checkpoint
from ftsupervise.checkpoints.torn import Torn, find_torn, last_written, torn
from ftsupervise.checkpoints.written import CopyStopped, drop_older, find_written, is_own, is_whole_by, keep
from ftsupervise.host.in_time import PendingCall
from ftsupervise.host.ownership import stranger
from ftsupervise.model import GUARD, Attempt
from ftsupervise.probe.errand import within
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import TornPage, read_page, write_page
from ftsupervise.rundir.beginnings import begun_anew
from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.observing import tell_only
from ftsupervise.rundir.paths import RunDir, tell
from ftsupervise.rundir.pinned import seen_with
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.rundir.records import time_of
from ftsupervise.rundir.starting_over import ADVICE, not_resumed, resumes, since_a_person
from ftsupervise.truth import BACK, GivenCheckpoint, LeftCheckpoint, PercentReached, TornSave

_SYSTEM = frozenset(("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr"))
_SEARCH = 5.0  # seconds
_COPY = 120.0  # seconds for the bytes of one checkpoint
_LOOK = 0.2  # seconds between two looks whether it is done
_SLACK = 1.0  # seconds by which the times of a file system may be off
_RECENT = 50  # attempts whose checkpoint may be gone on from
_BRIEF = 2.0  # seconds: a command that ended sooner has trained nothing
_SHELLS = ("bash", "sh", "dash", "ksh", "zsh")


class ScriptPlace(NamedTuple):
    """Where a run may save, and what it runs."""

    rundir: RunDir
    checkpoints: Path
    command: tuple[str, ...]
    attempt: Path | None = None  # of ours, by which the run directory is told from another that is put in its place
    job: str = ""  # its number

    def folders(self) -> list[Path]:
        """Return the folders to search: that of the checkpoints, those that the command names, the working folder. No training
        saves among the programs of a machine."""
        words = [part for word in self.command for part in _split(word)]
        named = [Path(text) for word in words for text in (word, word.partition("=")[2]) if text]
        there = [path for path in named if path.is_dir() and not _of_the_system(path.resolve())]
        return [self.checkpoints, *there, Path.cwd()]

    def ours(self) -> list[Path]:
        """Return what lies in the run directory, which no script has saved, but for the folder of the checkpoints."""
        return [path for path in self.rundir.root.glob("*") if path != self.rundir.checkpoints]

    def trusted(self) -> Callable[[os.stat_result], bool]:
        """Return the check whether the owner of a file is trusted in the run directory: what is gone on from may be unpickled.
        Raises OSError."""
        whose = seen_with(self.rundir, self.attempt)
        return is_own if whose is None else lambda found: not stranger(whose, found)

    def takes_apart(self, path: Path) -> bool:
        """Return whether the command is shell code, which would take the path for several words: a name that somebody may have
        given to a file of ours would add options to the program."""
        return _is_code(self.command) and shlex.quote(str(path)) != str(path)

    def is_torn(self, path: Path) -> bool:
        """Return whether it says itself, or by those beside it, that its save was cut off. Raises OSError."""
        return torn(path, self.trusted()) is not None

    def may_go_on_from(self, path: Path) -> bool:
        """Return whether it is there, is not torn, and its owner is trusted, with all that lies in it. Raises OSError where
        that cannot be seen."""
        try:
            if self.takes_apart(path):
                return False
            trusted = self.trusted()
            return trusted(path.lstat()) and is_whole_by(path, trusted) and torn(path, trusted) is None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def has_strangers(self, path: Path) -> bool:
        """Return whether its owner is trusted, and something of an account that is not lies in it. Raises OSError where that
        cannot be seen."""
        try:
            trusted = self.trusted()
            return trusted(path.lstat()) and not is_whole_by(path, trusted)
        except (FileNotFoundError, NotADirectoryError):
            return False


def _split(word: str) -> list[str]:
    """Return the words of shell code, or the word."""
    try:
        return shlex.split(word, comments=True)
    except ValueError:
        return word.split()


def note_written(place: ScriptPlace, one: Attempt) -> LeftCheckpoint | None:
    """Find what an attempt without a guard has saved since its first step, and write its page. None: nothing was found, or it
    has a guard, which says itself what it saves. Never raises."""
    if one.source == GUARD or one.resumed is not None or one.saved is not None:
        return None
    if one.written is not None:
        return one.written
    began, now = one.started.timestamp() + (one.ready or 0.0) - _SLACK, time.time()
    until = now if one.ended is None else one.ended.timestamp() + _SLACK
    if until - began < _BRIEF and one.last_step is None:
        return None
    try:
        found = within(
            _SEARCH,
            lambda: find_written(place.folders(), began, until, place.ours(), place.trusted(), place.is_torn),
            key="checkpoints of a script",
        )
        if isinstance(found, LeftCheckpoint):
            found = _of_its_job(found, place.job, one.job_id)
            write_page(place.rundir.attempt(one.number), found)
            return found
    except (OSError, TimeoutError):  # the search is a hint
        pass
    return None


def _of_its_job(found: LeftCheckpoint, job: str, member: str) -> LeftCheckpoint:
    """Return it without the step that is a number of its job, or of the array of ``member`` ("117_3"), and with the word that
    its folder has the job's own number."""
    path = Path(found.path)
    folders = path.parts if path.is_dir() else path.parent.parts
    step = None if not place_in_name(path.name) and str(found.step) in (job, *member.split("_")) else found.step
    return found._replace(
        by_job=bool(job) and any(re.search(rf"(?<!\d){job}(?!\d)", name) for name in folders), step=step
    )


def of_this_launch(rundir: RunDir, before: int | None = None) -> list[Attempt]:
    """Return the attempts that count for where it begins: a person who launches again, or releases the brake, has looked."""
    try:
        found = list(islice(ledger.backwards(rundir, before), ledger.NEWEST))
        return since_a_person(found[::-1], rundir)
    except OSError:
        return []


def keep_before(place: ScriptPlace, number: int, wait: Callable[[float], bool], say: Callable[[str], object]) -> bool:
    """Keep the newest checkpoint of the attempt before ``number``, unless the run has shown that it resumes. Return False when
    ``wait`` was ended meanwhile."""
    try:
        last = next(ledger.backwards(place.rundir, number), None)
    except OSError:
        return True
    if last is None or last.source == GUARD:
        return True
    before, written = of_this_launch(place.rundir, number), last.written
    known = resumes(before)
    if not known or last.ended is None:  # lost with its job: nobody has looked what it saved
        written = note_written(place, last)
    if known and (written is None or not _has_strangers(place, Path(written.path))):
        return True
    if written is None or (written.kept and os.path.lexists(written.kept)):
        return True
    best = max((*before, last), key=lambda one: one.last_step if one.last_step is not None else -1)
    work = _Keeping(place, last.number, written, best.number)
    until = time.monotonic() + 2 * _COPY
    while not work.copying.is_over() and time.monotonic() < until:
        if not wait(_LOOK):
            work.stop.set()
            return False
    work.stop.set()
    say(work.words or f"{written.path} could not be kept before this start: its file system does not answer")
    return True


def _has_strangers(place: ScriptPlace, path: Path) -> bool:
    """Return whether something of an account that is not trusted lies in a checkpoint of this one."""

    try:
        return bool(within(_SEARCH, lambda: place.has_strangers(path)))
    except (OSError, TimeoutError):
        return False


class _Keeping:
    """Keeps one checkpoint, in a thread: its file system may hang."""

    def __init__(self, place: ScriptPlace, number: int, written: LeftCheckpoint, best: int) -> None:
        self.stop, self.words = threading.Event(), ""
        self._args = (place, number, written, best)
        self.copying = PendingCall(self._run, "keep")

    def _run(self) -> None:
        place, number, written, best = self._args
        rundir, folder = place.rundir, place.rundir.root / ledger.KEPT
        try:
            kept = keep(written, folder / f"{number:04d}", _COPY, self.stop.is_set, place.trusted())
            write_page(rundir.attempt(number), written._replace(kept=str(kept.path), how=kept.how))
            self.words = (
                f"{written.path} is kept until this attempt has shown that it resumes: {kept.path} ({kept.how})"
            )
            drop_older(folder, best)
        except CopyStopped:
            return
        except OSError as error:
            self.words = f"{written.path} could not be kept before this start: {error.strerror or error}"


def tell_a_start_over(place: ScriptPlace, number: int, say: Callable[[str], object]) -> None:
    """Say that attempt ``number`` has begun anew, as soon as its first step, or percentage, is known. Never raises."""
    try:
        attempts = list(islice(ledger.backwards(place.rundir, number + 1), ledger.NEWEST))
        found, again = not_resumed(attempts[::-1], place.rundir)
    except OSError:
        return
    if found and found[-1].attempt == number:
        say(f"{found[-1].words()}; {found[-1].why(' '.join(place.command))}; {ADVICE}")
    elif again is not None and again.attempt == number:
        say(f"{again.words()}; {ADVICE}")


class FirstStep:
    """Passes the progress on, and calls ``tell`` once: when the first step is known, or a percentage, or at the end.

    ``folder``: of the attempt. The thread that asks for the progress may wait for its file system.
    """

    def __init__(self, seen: Callable[[], ProgressPage | None], tell: Callable[[], object], folder: Path) -> None:
        self._seen, self._tell, self._folder = seen, [tell], folder

    def __call__(self) -> ProgressPage | None:
        page = self._seen()
        if (
            self._tell
            and page is not None
            and (page.first is not None or read_page(PercentReached, self._folder) is not None)
        ):
            self.over()
        return page

    def over(self) -> None:
        if self._tell:
            self._tell.pop()()


# Words for a script that has to be told to resume: ``launch.resume``.

ENV_RESUME = "FTSUPERVISE_RESUME"  # the words, for shell code; "" where there is nothing to resume from


class Resumption(NamedTuple):
    """What is added to a command that begins where there is something to go on from."""

    words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    refused: str = ""  # why the command is not to begin: it would begin anew over what a person can set right


def resumption(place: ScriptPlace, asked: str, number: int) -> Resumption:
    """Return ``launch.resume`` for the newest checkpoint that attempt ``number`` finds; empty where there is none."""
    if not asked:
        return Resumption()
    try:
        before = list(islice(ledger.backwards(place.rundir, number, begun_anew(place.rundir) + 1), _RECENT))
        before = before if seen_with(place.rundir, place.attempt) is not None else []
    except OSError:
        before = []
    path, refused = newest_left(place, before)
    if path is None:
        return Resumption((), ((ENV_RESUME, ""),), refused)
    _note_given(place.rundir.attempt(number), path)
    filled = [word.replace("{checkpoint}", str(path)) for word in shlex.split(asked)]
    variables, words = list[tuple[str, str]](), list[str]()
    for word in filled:
        name, equals, value = word.partition("=")
        if equals and not words and name.isidentifier():
            variables.append((name, value))
        else:
            words.append(word)
    return Resumption(tuple(words), (*variables, (ENV_RESUME, shlex.join(words))))


def _note_given(folder: Path, path: Path) -> None:
    """Write down in the ``folder`` of an attempt what it is to go on from: where it begins there, it resumes. A copy that was
    kept is as old as what it is of."""
    try:
        at = within(_SEARCH, lambda: time_of(path.stat()))
        step = step_of(path.name) if place_in_name(path.name) else None  # a folder may have the number of a job
        write_page(folder, GivenCheckpoint(str(path), step, at))
    except (OSError, TimeoutError):  # where it begins is judged by what was left alone
        pass


def _why_not_anew(place: ScriptPlace, left: Sequence[Path]) -> str:
    """Return why a command is not to begin where something of these is there, and may not be gone on from; "" where nothing is.
    Raises OSError."""
    for path in left:
        shown = shlex.quote(str(path))
        if place.takes_apart(path) and os.path.lexists(path):
            return (
                f"launch.command is shell code, which would take the path of the newest checkpoint apart: {shown}. Look who "
                "has named it so, and give it a name of letters and digits, or make launch.command one program"
            )
        if place.has_strangers(path):
            return (
                f"{path} is this run's, but another account has laid something into it, and there is no clean copy: nothing is "
                f"loaded from it, and the run does not begin anew. Look: ls -lR {shown}; "
                "remove what is not yours, or move it away to begin anew"
            )
        found = torn(path, place.trusted()) if os.path.lexists(path) else None
        if found is not None:
            return (
                f"{path} is torn: {found.why}, and there is no whole one: the run does not begin anew over it. To begin anew: "
                f"ftsupervise checkpoints set-aside {shown}"
            )
    return ""


def newest_left(place: ScriptPlace, before: Sequence[Attempt]) -> tuple[Path | None, str]:
    """Return what the newest attempt wrote whose checkpoint is there, or has been kept; else the newest in its folder. What is
    torn, or belongs to an account that is not trusted in the run directory, is passed over. Where nothing else is there: why
    the command is not to begin.

    ``before``: the newest first.
    """
    texts = [text for one in before if one.written is not None for text in (one.written.path, one.written.kept) if text]

    def look() -> tuple[str, str]:
        from ftsupervise.checkpoints.find import checkpoints_in

        noted = next((text for text in texts if place.may_go_on_from(Path(text))), "")
        # where somebody has taken the newest away, what lies beside it may be newer than the one before
        if noted and noted != texts[0]:
            beside = find_written([Path(texts[0]).parent], 0.0, math.inf, (), place.trusted(), place.is_torn)
            newer = beside is not None and beside.at is not None and beside.at > time_of(Path(noted).stat())
            noted = beside.path if beside is not None and newer and place.may_go_on_from(Path(beside.path)) else noted
        there = () if noted else checkpoints_in(place.checkpoints)
        found = noted or next((str(one.path) for one in there if place.may_go_on_from(one.path)), "")
        own = [*map(Path, texts), *(one.path for one in there)] if not found else []
        return found, _why_not_anew(place, own)

    try:
        found, refused = within(_SEARCH, look)
        return Path(found) if found else None, refused
    except (OSError, TimeoutError):  # what was noted was judged then; to begin anew would cost all steps
        return next((path for path in map(Path, texts) if not place.takes_apart(path)), None), ""


def _of_the_system(path: Path) -> bool:
    inside = path.parts[1:2]
    return not inside or (inside[0] in _SYSTEM and path.parts[1:3] != ("dev", "shm"))


def loads_at_once(place: ScriptPlace, spent: Sequence[Attempt]) -> str:
    """Return the newest checkpoint of a program with a loader of its own, where none of the attempts ``spent`` came as far as a
    step; "" where one did, asked the guard, or ended in another way than a program does that cannot use what it has loaded."""
    stepped = any(one.last_step is not None or one.resumed is not None or one.percent is not None for one in spent)
    if stepped or not all(map(may_come_of_a_checkpoint, spent)):
        return ""
    if left := next((one.path for one in spent[-1].torn if not one.aside), ""):
        return left
    if spent[-1].given is not None:
        return spent[-1].given.path
    try:
        path = within(_SEARCH, lambda: last_written(place.folders(), place.ours(), place.trusted()))
    except (OSError, TimeoutError):  # the brake says the rest
        return ""
    return "" if path is None else str(path)


def with_words(command: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Return the command with the words added; shell code takes them from the variable."""
    return (*command, *(() if _is_code(command) else words))


def _is_code(command: Sequence[str]) -> bool:
    return any(Path(word).name in _SHELLS for word in command) and "-c" in command


# ------------------------------------------------------------------------------------------

# Before an attempt begins: the checkpoint that the one before left torn is named, and moved out of the loader's way.
#
# A program that loads by its own rules takes its newest checkpoint, whole or not. One whose save was cut off crashes each
# attempt anew until the brake holds the chain, though an older whole one lies beside it. It is moved only where nothing is
# guessed: its layout is known, an older one of its kind is whole, an attempt of this run was at work when it was last written,
# and all of it belongs to this account. It is moved as ``checkpoints set-aside`` does it, and never deleted.

_SEARCH_TORN = 10.0  # seconds
_QUIET = 1.0  # seconds in which nobody may write into it
_SLACK_TORN = 10.0  # seconds by which the clock of a file system may differ from ours


class TornPolicy(NamedTuple):
    """It says what may be done about a torn checkpoint."""

    moves: bool  # ``checkpoints.torn`` says so
    observes: Callable[[str], bool]  # whether a decision is only told


def look_before(place: ScriptPlace, number: int, policy: TornPolicy, wait: Callable[[float], bool]) -> bool:
    """Name what is torn before attempt ``number`` begins, and set aside what may be. Return False when ``wait`` was ended.

    Nothing is done for a program that asks the guard for its checkpoint, which passes over what is torn, nor after an attempt
    that left with 0. Never raises for a file system: what cannot be seen stays as it is.
    """
    folder = place.rundir.attempt(number)
    try:
        before = list(islice(ledger.backwards(place.rundir, number), _RECENT))
    except OSError:
        return True
    if not before or _asks_guard(before[0]) or before[0].exit_code == 0 or place.rundir.whole is not None:
        return True
    found = [(one, attempt) for one in _search(place) if (attempt := _during(before, one.at)) is not None]
    if not found:
        return True
    if not wait(_QUIET):
        return False
    same = {(one.path, one.signature) for one in _search(place)}
    told = []
    for one, attempt in found:
        if (one.path, one.signature) not in same:  # somebody writes into it
            continue
        if one.passed_over:
            tell(folder / "run.log", f"{one.path.name} is not whole: {one.why}; its loader goes on from {one.named}")
            continue
        whole = "" if one.whole is None else str(one.whole.absolute())
        save = TornSave(str(one.path.absolute()), one.why, attempt, whole)
        if policy.moves and policy.observes(BACK) and not _obstacle(one):
            tell_only(BACK, f"set {one.path.name} aside", f"{save.path}: {save.words()}", folder / "run.log")
            continue
        told.append(_treat(place, number, one, save, moves=policy.moves))
        tell(folder / "run.log", f"{told[-1].words()}; {told[-1].then()}")
    if told:
        try:
            write_page(folder, TornPage(tuple(told)))
        except OSError:  # the log has it
            pass
    return True


def _asks_guard(one: Attempt) -> bool:
    """Return whether its loop asked the guard for a checkpoint, or took snapshots, which only ``guard.restore`` brings back."""
    return one.resumed is not None or one.begins is not None


def _search(place: ScriptPlace) -> tuple[Torn, ...]:
    def look() -> tuple[Torn, ...]:
        return find_torn(place.folders(), place.ours(), place.trusted())

    try:
        found: tuple[Torn, ...] = within(_SEARCH_TORN, look, key="torn checkpoints")
    except (OSError, TimeoutError):
        return ()
    return found


def _during(newest_first: Sequence[Attempt], at: float) -> int | None:
    """Return the attempt that was at work at ``at``, in epoch seconds; None: none was, and another program wrote it."""
    after: datetime | None = None
    for one in newest_first:
        end = one.ended or after
        if one.started.timestamp() - _SLACK_TORN <= at and (end is None or at <= end.timestamp() + _SLACK_TORN):
            return one.number
        after = one.started
    return None


def _obstacle(one: Torn) -> str:
    """Return why it is not moved, as a clause; "" where it may be."""
    if one.whole is None:
        return "its loader has no other to take"
    if one.tracker:
        return f"{one.tracker} beside it names it: write the name of the whole one in there too"
    return ""


def _treat(place: ScriptPlace, number: int, one: Torn, save: TornSave, *, moves: bool) -> TornSave:
    """Set it aside where that may be done; return what became of it."""
    why = _obstacle(one) or ("" if moves else "checkpoints.torn says tell")
    if one.whole is None and (kept := _kept(place, Path(save.path))):
        why = f"{why}; from an earlier attempt: cp -rT {quote(kept)} {quote(save.path)}"
    newer = superseded(place.rundir, number)
    if why or newer is not None:
        return save._replace(stays=why or f"attempt {newer} has begun")

    def move() -> str:
        if not all(map(is_own, contents_of(one.path).stats())):
            return ""
        return str(set_aside(Path(save.path), save.words(), datetime.now(timezone.utc)))

    try:
        aside = within(_SEARCH_TORN, move)
    except OSError as error:
        return save._replace(stays=error.strerror or str(error))
    except TimeoutError:
        return save._replace(stays="its file system does not answer")
    return save._replace(aside=aside, stays="" if aside else "something in it belongs to another account")


def _kept(place: ScriptPlace, path: Path) -> str:
    """Return the newest whole copy of that name which was kept of an earlier attempt; "" where there is none."""

    def look() -> str:
        copies = (Path(one.kept) for _, one in ledger.kept_of(place.rundir) if Path(one.path).absolute() == path)
        return next((str(copy) for copy in copies if place.may_go_on_from(copy)), "")

    try:
        return str(within(_SEARCH_TORN, look))
    except (OSError, TimeoutError):
        return ""
