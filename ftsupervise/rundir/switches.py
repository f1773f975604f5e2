"""Switches: files in RUN/switches that anyone in the directory's group can ``touch``, and the check of their owners.

Standard library only, and no file in a switch's place can block a read: the guard reads it inside the training loop.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.errors import from_os_error
from ftsupervise.host import files
from ftsupervise.host.ownership import held, held_to_write, in_group, remove_entry, shown_user
from ftsupervise.rundir.paths import STOPPED, RunDir, sync_directory
from ftsupervise.rundir.records import as_text, parse_object, read_record, time_of, write_json
from ftsupervise.truth import Health, SwitchState

KILL = "kill-switch"
SAVE = "save-switch"
SWITCH_LIMIT = 64 * 1024  # bytes; a switch that is longer is none
_ANSWERED = ".answered-"
Identity = tuple[int, int]  # inode and mtime in ns: identify one raising of a switch


def read_switch(rundir: RunDir, name: str) -> SwitchState:
    """Return the state of the switch ``name`` (KILL or SAVE). Never raises, never blocks on the file in its place.

    A plain file is enough; who and why come from its JSON, else from its owner, mtime and first line. A file that may
    not be obeyed (not a regular file, linked twice, huge, or owned by somebody outside the directory's group) leaves
    the switch down and stands in ``problem``. UNKNOWN means the directory could not be read.
    """
    return look_at_switch(rundir, name)[0]


def look_at_switch(rundir: RunDir, name: str) -> tuple[SwitchState, Identity | None]:
    """Return ``read_switch``, and which raising it is, so that only the one that was answered is taken down.

    The dedicated directory is opened afresh and listed: on NFS a missing name may be cached for a minute.
    """
    with ExitStack() as until:
        try:
            directory = until.enter_context(files.open_folder(rundir.switches, follow=True))
        except OSError as error:
            return SwitchState(name, Health.UNKNOWN, problem=f"cannot read {rundir.switches}: {error.strerror}"), None
        try:
            if not files.among(directory, (name,)):
                return SwitchState(name, Health.OK), None
            return _judge_switch(directory, name)
        except FileNotFoundError:  # lowered while we read it
            return SwitchState(name, Health.OK), None
        except OSError as error:
            return SwitchState(name, Health.UNKNOWN, problem=f"cannot read {name}: {error.strerror}"), None


def _judge_switch(directory: int, name: str) -> tuple[SwitchState, Identity | None]:
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    problem = _switch_problem(os.fstat(directory), found)
    if problem:
        return SwitchState(name, Health.OK, problem=f"{name} is {problem}; it is not obeyed"), None
    owner = shown_user(found.st_uid)
    said = _read_switch_text(directory, name)
    who = said.get("who") or owner
    if who != owner:
        who = f"{who} (the file is {owner}'s)"
    if said.get("host"):
        who = f"{who} on {said['host']}"
    since = time_of(found)
    state = SwitchState(name, Health.BAD, who=who, why=said.get("why", ""), since=since)
    return state, (found.st_ino, found.st_mtime_ns)


def _switch_problem(directory: os.stat_result, found: os.stat_result) -> str:
    """Return why ``found`` is not accepted as a switch; "" if it is."""
    kinds = ((stat.S_ISLNK, "symbolic link"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISDIR, "directory"))
    for is_kind, word in kinds:
        if is_kind(found.st_mode):
            return f"a {word}"
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_nlink != 1:
        return "a file with a second hard link"
    if found.st_size > SWITCH_LIMIT:
        return f"{found.st_size} bytes long"
    if directory.st_mode & stat.S_IWOTH and not directory.st_mode & stat.S_ISVTX:
        return "in a directory everybody may write (chmod o-w switches)"
    if found.st_uid not in (0, directory.st_uid) and not in_group(found.st_uid, directory.st_gid):
        return f"owned by {shown_user(found.st_uid)}, who is not in the directory's group"
    return ""


def _read_switch_text(directory: int, name: str) -> dict[str, str]:
    """Return who, host and why from the file, made printable. Its first line is the why if it is no JSON."""
    try:
        data = files.read_bounded(name, SWITCH_LIMIT, dir_fd=directory)
    except OSError:  # raised, but its content is unreadable, or another file lies there by now: it is up all the same
        return {}
    try:
        raw = parse_object(data)
    except ValueError:
        raw = {"why": data.decode("utf-8", "replace").strip().partition("\n")[0]}
    return {key: text for key in ("who", "host", "why") if (text := as_text(raw.get(key)))}


def raise_switch(rundir: RunDir, name: str, *, who: str, host: str, why: str, now: datetime) -> None:
    """Raise a switch and record who did it and why. Raises OSError when it cannot be written."""
    write_json(rundir.switches / name, {"who": who, "host": host, "why": why, "since": now.isoformat()})


def clear_switch(rundir: RunDir, name: str) -> bool:
    """Lower a switch; return False if it was not up. Raises OSError when it may not be removed."""
    if not remove_entry(rundir.switches / name):
        return False
    sync_directory(rundir.switches)
    return True


def clear_answered(rundir: RunDir, name: str, answered: Identity, area: Path | None = None) -> bool:
    """Take down the switch only if it is the one that was ``answered``; return False if it is gone or was raised anew.

    It is renamed first and checked again, so that a touch between the check and the removal is not lost. ``area``: it
    is taken there, which fails once a newer attempt has sealed it (``fence.py``): the switch is the newer's to answer.
    """
    try:
        with held_to_write(rundir.switches) as here, held_to_write(area or rundir.switches) as into:
            place, aside = here / name, into / f"{_ANSWERED}{name}-{os.uname().nodename}-{os.getpid()}"
            if _identity(place) != answered:
                return False
            os.rename(place, aside)
            if _identity(aside) != answered:
                try:
                    os.link(aside, place)  # it was touched just now: put it back unless there is a new one
                except FileExistsError:
                    pass
                os.unlink(aside)
                return False
            os.unlink(aside)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def put_back(rundir: RunDir, swept: Path) -> bool:
    """Raise a save switch again that a sealed attempt was just lowering: it is unknown whether it was answered.

    ``swept``: the former contents of its staging area. Returns True if there was one. Raises OSError.
    """
    for name in os.listdir(swept):
        if name.startswith(f"{_ANSWERED}{SAVE}"):
            try:
                os.link(swept / name, rundir.switches / SAVE)
            except FileExistsError:  # raised anew
                pass
            os.unlink(swept / name)
            return True
    return False


def _identity(path: Path) -> Identity:
    found = path.lstat()
    return found.st_ino, found.st_mtime_ns


# The brake: a mark in the run directory that says the chain is stopped, why, and how to go on.
#
#     RUN/state/brake           there: no member starts. JSON: what failed, how often, at which step, since when
#     RUN/state/brake-released  which attempt was the last one when a person released it: failures before it do not count;
#                               and the jobs that are still to be let go
#
# Light (standard library): the gate, ``status`` and the watch read it.

BRAKE = "brake"
LEFT = "it left with 0"  # a brake that asks a question: is the run finished?
RELEASED = "brake-released"
Mark = TypeVar("Mark", "Brake", "Released", "Finished", "Stopped")


class Brake(NamedTuple):
    """The reason why the chain was stopped."""

    failure: str = "stopped by hand"  # the failure as the ledger counts it
    why: str = "no reason given"  # one sentence
    times: int = 0
    attempt: int = 0  # the last one
    step: int | None = None
    detail: str = ""  # the line of the output that says most
    held: tuple[str, ...] = ()  # jobs put on hold
    at: str = ""
    loads: str = ""  # the checkpoint that a program with a loader of its own takes, where none came as far as a step

    @property
    def asks(self) -> bool:
        """Return whether nothing has failed: a person has to say whether the run is finished."""
        return self.failure == LEFT

    def what_to_type(self, run: str) -> str:
        """Return what releases it. ``run``: the run directory, as a shell takes it."""
        if self.asks:
            return f"finished: ftsupervise clear --finished {run}; not finished: ftsupervise clear --brake {run}"
        first = f"{self.first()}; " if self.loads else ""
        return f"{first}fix the cause, then: ftsupervise clear --brake {run}"

    def first(self) -> str:
        """Return what to type before it is released, as a clause; "" where nobody knows."""
        return f"where it crashes on {Path(self.loads).name}: {self.set_aside()}" if self.loads else ""

    def set_aside(self) -> str:
        """Return the command that sets aside what the program loads; "" where that is not known."""
        from shlex import quote  # here: a quick command has no need of it

        return f"ftsupervise checkpoints set-aside {quote(self.loads)}" if self.loads else ""

    def words(self) -> str:
        step = f" at step {self.step}" if self.step is not None else ""
        detail = f": {self.detail}" if self.detail else ""
        where = f"; see attempts/{self.attempt:04d}/evidence, and launch.restart.hang if it was only slow"
        last = f" (attempt {self.attempt})" if self.attempt else ""
        began = f"; none came as far as a step, and {self.loads} is what it loads" if self.loads else ""
        return f"{self.failure}{step}, {self.why}{last}{detail}{began}{where if self.failure == 'hang' else ''}"


class Released(NamedTuple):
    """The record of a released brake."""

    attempt: int = 0  # the last one that does not count
    who: str = ""
    at: str = ""
    held: tuple[str, ...] = ()  # jobs that are still to be let go


def read_brake(rundir: RunDir) -> Brake | None:
    """Return the brake when it is on; None when it is not. A mark made with ``touch`` is a brake too. Raises OSError."""
    return _read(Brake, rundir.state / BRAKE)


def _read(kind: type[Mark], path: Path) -> Mark | None:
    try:
        return read_record(kind, path, limit=64_000)
    except ValueError:
        return kind()


def write_brake(rundir: RunDir, brake: Brake, area: Path | None = None) -> None:
    """Write the brake. Raises OSError; also when ``area``, the attempt's own, has been sealed by a newer one (``fence.py``)."""
    write_json(rundir.state / BRAKE, brake, area=area)


def release_brake(rundir: RunDir, *, who: str, now: datetime) -> Brake | None:
    """Release the brake; earlier failures no longer count. Returns the brake that was on, None if none was. Raises OSError,
    and NotTrusted where a link of another account leads elsewhere.

    The jobs that it held stand in ``still_held`` until each has been released, however often that takes.
    """
    from ftsupervise.rundir.ledger import numbers  # here: a quick command has no need of the ledger
    from ftsupervise.rundir.members import forget_all

    with ExitStack() as until:
        try:
            state = until.enter_context(held(rundir.state))
        except FileNotFoundError:
            return None
        found = _read(Brake, state / BRAKE)
        if found is not None:
            jobs = tuple(dict.fromkeys([*_released(state).held, *found.held]))
            last = max(numbers(rundir), default=0)
            write_json(state / RELEASED, Released(last, who, now.isoformat(), jobs))
            forget_all(rundir)
        try:
            os.unlink(state / BRAKE)
        except FileNotFoundError:
            return None
        sync_directory(state)
    return found


def _released(state: Path) -> Released:
    return _read(Released, state / RELEASED) or Released()


def still_held(rundir: RunDir) -> tuple[str, ...]:
    """Return jobs that are still on hold because of a released brake. Raises OSError."""
    return _released(rundir.state).held


def let_go(rundir: RunDir, job: str) -> None:
    """Note that the job has been released. Raises OSError, NotTrusted."""
    with held(rundir.state) as state:
        before = _released(state)
        write_json(state / RELEASED, before._replace(held=tuple(one for one in before.held if one != job)))


def held_too(rundir: RunDir, jobs: Iterable[str]) -> tuple[str, ...]:
    """Note that the brake, if it is on, holds these jobs too; return those that it had not held. Raises OSError, NotTrusted."""
    with held(rundir.state) as state:
        on = _read(Brake, state / BRAKE)
        late = () if on is None else tuple(job for job in jobs if job not in on.held)
        if on is not None and late:
            write_json(state / BRAKE, on._replace(held=(*on.held, *late)))
    return late


def nothing_held(rundir: RunDir) -> None:
    """Note that none of the jobs that the brake held waits any more; the brake stays on. Raises OSError, NotTrusted."""
    with held(rundir.state) as state:
        on, before = _read(Brake, state / BRAKE), _released(state)
        if on is not None and on.held:
            write_json(state / BRAKE, on._replace(held=()))
        if before.held:
            write_json(state / RELEASED, before._replace(held=()))


def counts_from(rundir: RunDir) -> int:
    """Return the first attempt whose failures count. Raises OSError."""
    return _released(rundir.state).attempt + 1


# The guard records two things of its loop: that the training is complete, and why the loop stopped before that.


class Finished(NamedTuple):
    """``RUN/state/finished``: no further member of the chain trains."""

    step: int | None = None
    attempt: int | None = None
    host: str = ""
    at: datetime | None = None


class Stopped(NamedTuple):
    """``stopped.json`` in the folder of an attempt. ``cause`` is one of the guard's causes, ``reason`` says it to people."""

    cause: str = ""
    reason: str = ""
    step: int | None = None
    at: datetime | None = None
    then: str = ""  # what the settings say about a loss that stopped it: "stop", "resume"
    told: datetime | None = None  # when SIGTERM came, by the clock of its machine
    boot: str = ""  # which machine's


def write_finished(rundir: RunDir, mark: Finished, area: Path | None = None) -> None:
    """Write the mark. Raises OSError; also when ``area``, the attempt's own, has been sealed by a newer one."""
    write_json(rundir.finished, mark, area=area)


def read_finished(rundir: RunDir) -> Finished | None:
    """Return the mark of a finished run; None if there is none. One made with ``touch`` has the file's time. Raises OSError."""
    mark = _read(Finished, rundir.finished)
    return mark if mark is None or mark.at is not None else mark._replace(at=time_of(rundir.finished.stat()))


def read_stopped(attempt_dir: Path) -> Stopped:
    """Return why the guard made the loop stop; empty if it did not, or where that cannot be read. Never raises."""
    try:
        return _read(Stopped, attempt_dir / STOPPED) or Stopped()
    except OSError:
        return Stopped()


def reason_not_to_start(rundir: RunDir) -> str:
    """Return one sentence, or "" when the command may start. Raises NotPermitted, CannotWrite, NotFound when it cannot read."""
    try:
        files.among(rundir.switches)
        finished = rundir.finished.name in os.listdir(rundir.finished.parent)
        braked = rundir if rundir.whole is None or (rundir.state / BRAKE).exists() else RunDir(rundir.whole)
        brake = read_brake(braked)
    except OSError as error:
        raise from_os_error(error, f"look into the run directory {rundir.root}") from None
    if finished:
        return f"the run has finished{_at_step(rundir)}: nothing to do (to train on, remove {rundir.finished})"
    switch = read_switch(rundir, KILL)
    if switch.up:
        why = f": {switch.why}" if switch.why else ""
        whole = RunDir(rundir.whole or rundir.root).quoted()  # a replica group has the switches of its run
        return f"the kill switch is up, raised by {switch.who}{why}; nothing is started (ftsupervise clear {whole})"
    if brake is not None:
        return (
            f"stopped by the brake: {brake.words()}; nothing is started (ftsupervise clear --brake {braked.quoted()})"
        )
    return ""


def _at_step(rundir: RunDir) -> str:
    try:
        mark = read_finished(rundir)
    except OSError:
        return ""
    return f" at step {mark.step}" if mark is not None and mark.step is not None else ""
