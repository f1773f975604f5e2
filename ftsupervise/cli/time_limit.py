"""A command that a person types answers within fifteen seconds, whatever hangs.

A process that reads a dead mount cannot be woken, and does not even die. So the work of a quick command is done by a child,
and the typed process only passes on its output; a child that is silent for too long is left behind.
Slurm's commands are given up earlier (``host.answer_by``), so that the rest is still printed.

A command that acts (``launch``, ``notify test``, ``cron install`` …) is tried first, as a dry run, by a child whose output is
dropped: if that hangs the command would hang too, so it is not begun. Then it is done by a child as well, which is given up
when nothing in it moves any more: what it writes may lie elsewhere than what it reads.

``BOUNDS`` has every command of the program; docs/commands.md has the same table, and a test compares both with click's.

Standard library only, and little of it: ``kill`` is typed in a hurry.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, NoReturn

from ftsupervise import host
from ftsupervise.errors import NoAnswer
from ftsupervise.host.ready import readable

ANSWER = host.ANSWER
_LAUNCH = 30.0  # seconds for all that ``launch`` asks Slurm before it submits, its dry run included: it is typed once
_TRIAL = 4.0  # … of which for those of the dry run that comes first
_MOST = 60.0  # more of them at most, where the machine is so busy that the child, or what it began, waits for its turn
_TRIED = 30.0  # seconds for a dry run in which something moves: it is slow, and does not hang
_QUIET = 4.0  # seconds in which nothing has moved: it hangs, once ANSWER is over
_LOOK = 0.25  # seconds between two looks at what moves
_PATIENT = 5.0  # seconds after which a person at a terminal is told what is waited for
_GRACE = 0.3
_ASIDE = 1.0  # seconds for a look at the notes of this host
_UNSEEN = 3  # Nagios: could not see


class Bounding(Enum):
    """How a command is kept from hanging with what it reads."""

    LOOKS = "looks, or raises a switch"  # by a child, which is left behind
    ACTS = "is tried first"  # as a dry run; then done by a child, as long as something moves
    WORKS = "is tried first; then its parts have bounds"  # in this process
    STAYS = "its parts have bounds"  # a clock or a job starts it, or it goes on until it is ended


class CommandBound(NamedTuple):
    """``seconds``: within which it answers whatever hangs, with everything else as it usually is."""

    kind: Bounding
    seconds: float = 15.0
    patience: float = 0.0  # seconds without a movement in which its work is given up


_LOOKS = CommandBound(Bounding.LOOKS)
_COPIES = CommandBound(Bounding.WORKS, 150.0)  # the patience of ``checkpoints`` is two minutes
_PROGRAM = CommandBound(Bounding.STAYS, 60.0)
BOUNDS: dict[str, CommandBound] = {
    "init": _LOOKS,
    "launch": CommandBound(Bounding.ACTS, 45.0, 15.0),
    "run": _PROGRAM,
    "watch": _PROGRAM,
    "check": _LOOKS,
    "status": _LOOKS,
    "logs": _LOOKS,
    "diagnose": _LOOKS,
    "list": _LOOKS,
    "forget": _LOOKS,
    "report": _LOOKS,
    "plan": _LOOKS,
    "simulate": _LOOKS,
    "metrics": _LOOKS,
    "kill": _LOOKS,
    "save": _LOOKS,
    "clear": _LOOKS,
    "observe": _LOOKS,
    "cron add": _LOOKS,
    "cron ensure": CommandBound(Bounding.ACTS, 45.0, 15.0),
    "cron install": CommandBound(Bounding.ACTS, 45.0, 15.0),
    "cron list": _LOOKS,
    "cron remove": CommandBound(Bounding.ACTS, 45.0, 15.0),
    "cron run": CommandBound(Bounding.WORKS, 45.0),
    "cron status": _LOOKS,
    "cron tick": _PROGRAM,
    "groups join": _LOOKS,
    "groups leave": _LOOKS,
    "groups member": _PROGRAM,
    "groups run": _PROGRAM,
    "nodes apply": _LOOKS,
    "nodes clear": _LOOKS,
    "nodes exclude": _LOOKS,
    "nodes list": _LOOKS,
    "nodes trust": _LOOKS,
    "checkpoints anew": _LOOKS,
    "checkpoints set-aside": _LOOKS,
    "checkpoints commit": _COPIES,
    "checkpoints list": _LOOKS,
    "checkpoints offload": _COPIES,
    "checkpoints prune": _COPIES,
    "checkpoints restore": _COPIES,
    "checkpoints upkeep": CommandBound(Bounding.STAYS, 150.0),
    "checkpoints verify": _COPIES,
    "alerts ack": _LOOKS,
    "alerts list": _LOOKS,
    "alerts silence": _LOOKS,
    "alerts unsilence": _LOOKS,
    "notify preview": _LOOKS,
    "notify test": CommandBound(Bounding.ACTS, 90.0, 60.0),  # a mail server is waited for within one movement
    "config check": _LOOKS,
    "config schema": _LOOKS,
    "config show": _LOOKS,
    "completion": _LOOKS,
    "help": _LOOKS,
    "version": _LOOKS,
    "doctor": CommandBound(Bounding.LOOKS, 60.0),  # each of its looks has its bound, and it is told before each
    "drill": CommandBound(Bounding.LOOKS, 60.0),  # each of its rows has its bound, and it is told before each
    "sandbox controller": CommandBound(Bounding.WORKS, 60.0),
    "sandbox down": CommandBound(Bounding.WORKS, 60.0),
    "sandbox env": _LOOKS,
    "sandbox exec": _PROGRAM,
    "sandbox list": _LOOKS,
    "sandbox node": CommandBound(Bounding.WORKS, 60.0),
    "sandbox up": CommandBound(Bounding.WORKS, 60.0),
}
_LISTED = frozenset({"alerts", "nodes", "checkpoints"})  # what they do without a second word
_BARE = frozenset(
    {"--all", "--sizes", "--quick", "--sample", "--full", "--again", "--json", "--quiet", "--copied", "--not-copied"}
)
_UNTIL = struct.Struct("<d")  # monotonic seconds; 0: a person is being asked
_ENDED = struct.Struct("<i")  # behind it: 1 + the exit code of the child, once it has said all; 0 before

_board: mmap.mmap | None = None
_began = 0.0  # monotonic seconds: when the dry run of this command began; 0: it had none


def command_of(args: Sequence[str]) -> str:
    """Return the command that ``args`` begin with, as ``BOUNDS`` names it; "" for none of ours."""
    words = [word for word in args if not word.startswith("-")][:2]
    for name in (" ".join(words), *words[:1]):
        if name in BOUNDS:
            return name
    return f"{words[0]} list" if words and words[0] in _LISTED else ""


def bound_of(args: Sequence[str]) -> CommandBound | None:
    """Return the bound of what is typed; None for help, and for nothing of ours."""
    if {"--help", "-h"} & set(args):
        return None
    return BOUNDS.get(command_of(args))


def patience_of(args: Sequence[str]) -> float:
    """Return the seconds without a movement in which a command that acts is given up; 0.0: its parts have their own bounds."""
    found = bound_of(args)
    return 0.0 if found is None else found.patience


def applies(args: Sequence[str]) -> bool:
    """Return whether it is a command that reads and answers, or writes one file and is done."""
    found, name = bound_of(args), command_of(args)
    if found is None or name == "checkpoints prune":  # it compares all of them, be it a dry run
        return False
    if name == "status" and {"--watch", "-w"} & set(args):  # it looks in a child of its own, again and again
        return False
    if name == "report" and "--follow" in args:  # each of its looks is made in a process of its own
        return False
    if name == "report" and "--mail" in args:  # the cron's; each conversation with a mail server has its bound
        return False
    return found.kind is Bounding.LOOKS or "--dry-run" in args


def acts(args: Sequence[str]) -> bool:
    """Return whether a person types it, and whether it sends, submits or runs something.

    ``cron ensure --run`` is typed by running jobs, every few minutes: no person waits for it, and it is not done twice.
    """
    found, name = bound_of(args), command_of(args)
    if found is None:
        return False
    if {"--dry-run", "-n", "--run"} & set(args):
        return name == "checkpoints prune"
    return found.kind in (Bounding.ACTS, Bounding.WORKS)


def try_dry_run(args: Sequence[str]) -> list[str] | None:
    """Try a command that acts as a dry run, in a child. Returns in both: the words of the dry run in the child, None in this
    process when the child has come back. When that hangs, this process ends, with nothing begun."""
    global _began
    _began = time.monotonic()
    pid = os.fork()
    if not pid:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        host.answer_by = time.monotonic() + _TRIAL
        return _dry(args)
    bound = _TrialBound(pid)
    try:
        while _ended(pid) is None:
            if bound.is_over():
                left = _kill(pid, args)
                _end(args, f"no answer within {time.monotonic() - _began:.0f} s{left}", begun=False)
            _tell_who_waits(args, "nothing was submitted yet" if _submits(args) else "nothing was begun yet")
            time.sleep(0.01)
    except KeyboardInterrupt:
        _kill(pid, args)
        os._exit(130)
    return None


class _TrialBound:
    """Tells when a dry run is given up: at ANSWER where nothing in it moves, else at _TRIED."""

    def __init__(self, pid: int) -> None:
        self._pid, self._turns = pid, _Turns(pid)
        self._begin = self._moved = time.monotonic()
        self._seen, self._due = -1, 0.0

    def is_over(self) -> bool:
        now = time.monotonic()
        if now >= self._due:
            from ftsupervise.probe.errand import movements

            self._due = now + _LOOK
            if (seen := movements(self._pid)) != self._seen:
                self._seen, self._moved = seen, now
        moves = now - self._moved < _QUIET
        return self._turns.is_over(self._begin + (max(ANSWER, _TRIED) if moves else ANSWER))


class _Turns:
    """Counts the seconds that a process, and what it has begun, were ready to run without a turn: a busy machine is no hang."""

    def __init__(self, pid: int) -> None:
        self._pid, self._due = pid, time.monotonic() + _LOOK
        self._waited: dict[int, float] = {}  # also of those that have ended

    def is_over(self, until: float) -> bool:
        """Return whether it has had its time, which was ``until`` (monotonic seconds)."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _LOOK
            for pid in (self._pid, *_begun_by(self._pid)):
                self._waited[pid] = max(_waited_for_a_processor(pid), self._waited.get(pid, 0.0))
        late = now - until
        return late > 0 and late > min(_MOST, sum(self._waited.values()))


_told = False


def _tell_who_waits(args: Sequence[str], state: str) -> None:
    """Tell a person at a terminal once, after some seconds, what is waited for, and how far it is."""
    global _told
    if not _told and _began and time.monotonic() - _began > _PATIENT:
        _told = True
        if os.isatty(2):
            os.write(
                2, f"ftsupervise: {_name(args)}: waiting for an answer of Slurm or of a file system; {state}\n".encode()
            )


def limit_slurm(args: Sequence[str]) -> None:
    """Bound Slurm's commands where a person waits for one tick of ``watch`` or for ``cron install``, also behind ``| tee``; not
    where a clock started it."""
    words = [word for word in args if not word.startswith("-")]
    one_look = words[:1] == ["watch"] and not any(word.startswith("--every") for word in args)
    keeps_time = words[:2] in (["cron", "install"], ["cron", "remove"], ["cron", "ensure"])
    if host.answer_by is None and (one_look or keeps_time) and not _by_a_clock(args):
        host.answer_by = (_began or time.monotonic()) + host.SLURM
    if host.answer_by is None and words[:1] == ["launch"] and _began:
        host.answer_by = _began + _LAUNCH


def _by_a_clock(args: Sequence[str]) -> bool:
    """Return whether it is an entry of the cron, a command of a running job, or a quiet check that no terminal began."""
    from ftsupervise.crontab import ENV_SLOT

    if ENV_SLOT in os.environ or "--run" in args:
        return True
    return bool({"--quiet", "-q"} & set(args)) and not _has_terminal()


def _has_terminal() -> bool:
    """Return whether a terminal controls this process.

    One that is piped into ``tee`` has one; cron, a job and a service have none.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _dry(args: Sequence[str]) -> list[str]:
    """Return the dry run that reads what ``args`` would read and does nothing."""
    if args[0] == "sandbox":
        return ["sandbox", "env", *(f"--dir={folder}" for folder in _folders(args))]
    if args[0] == "checkpoints":
        named = (word for before, word in pairwise(args[1:]) if not before.startswith("--") or before in _BARE)
        return ["checkpoints", "list", "--unread", *(word for word in named if not word.startswith("-"))]
    if args[0] != "notify":
        return [*args, "--dry-run"]
    runs = [word for before, word in pairwise(args[1:]) if before != "--receiver"]
    return ["alerts", "list", *(word for word in runs if not word.startswith("-"))]


def _folders(args: Sequence[str]) -> list[str]:
    """Return the value of ``--dir``."""
    after = [word for before, word in pairwise(args) if before == "--dir"]
    return after + [word.partition("=")[2] for word in args if word.startswith("--dir=")]


def go_on_in_a_child(args: Sequence[str], *, patience: float = 0.0) -> None:
    """Go on in a child; this process passes on its output and ends as it does. Returns in the child only.

    The child has ANSWER seconds; with ``patience`` as long as something in it moves within so many.
    """
    global _board
    if (stuck := _stuck(args)) != "":
        _end(args, f"no answer: {stuck}")
    columns = _columns()
    board = mmap.mmap(-1, _UNTIL.size + _ENDED.size)
    _UNTIL.pack_into(board, 0, time.monotonic() + (patience or ANSWER))
    apart = [(1,), (2,)] if not _one_output() else [(1, 2)]  # one pipe keeps the order of what is written
    pipes = [(*os.pipe(), fds) for fds in apart]
    pid = os.fork()
    if pid:
        for _, writer, _ in pipes:
            os.close(writer)
        _wait(args, pid, board, {reader: fds[0] for reader, _, fds in pipes}, _Movement(pid, patience))
    _board = board
    if not patience:
        host.answer_by = time.monotonic() + host.SLURM
    for reader, writer, fds in pipes:
        os.close(reader)
        for fd in fds:
            os.dup2(writer, fd)
        os.close(writer)
    if columns:
        os.environ.setdefault("COLUMNS", str(columns))


def _one_output() -> bool:
    """Return whether the standard output and the standard error lead to one terminal or file.

    The kernel names where they lead without asking a mount that may be dead, as ``fstat`` would.
    """
    try:
        return os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2")  # noqa: PTH115 - no pathlib here
    except OSError:  # one of them is closed
        return False


def end_child(ended: SystemExit) -> None:
    """In the child of ``go_on_in_a_child``: end at once, with that code. Elsewhere nothing."""
    if _board is not None and isinstance(ended.code, (int, type(None))):
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # the reader is gone
            pass
        _ENDED.pack_into(_board, _UNTIL.size, 1 + (ended.code or 0))
        os._exit(ended.code or 0)  # which waits for a thread that hangs on a dead mount


def extend(seconds: float) -> None:
    """Allow this command as long as a part of it that begins now, which has a bound of its own."""
    if _board is not None:
        until = max(_UNTIL.unpack_from(_board)[0], time.monotonic() + seconds)
        _UNTIL.pack_into(_board, 0, until)


def person_is_asked() -> None:
    """Stop the clock while a person answers; ``person_has_answered`` restarts it."""
    if _board is not None:
        _UNTIL.pack_into(_board, 0, 0.0)


def person_has_answered() -> None:
    if _board is not None:
        _UNTIL.pack_into(_board, 0, time.monotonic() + ANSWER)


def _columns() -> int:
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return 0


class _Movement:
    """Tells when nothing has moved in a child for its patience: a process that waits for a dead mount is never scheduled."""

    def __init__(self, pid: int, patience: float) -> None:
        self._pid, self.patience = pid, patience
        self._last, self._until = -1, 0.0

    def over(self, until: float) -> float:
        """Return until when it may go on: ``until``, or later where something has moved."""
        if not self.patience or not until:
            return until
        now = time.monotonic()
        if now >= self._until - self.patience / 2:  # half of the patience is over: look whether it has moved since
            from ftsupervise.probe.errand import movements

            seen = movements(self._pid)
            if seen != self._last:
                self._last, self._until = seen, now + self.patience
        return max(until, self._until)


def _wait(args: Sequence[str], pid: int, board: mmap.mmap, pipes: dict[int, int], movement: _Movement) -> NoReturn:
    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    turns = _Turns(pid)
    try:
        status = None
        while status is None:
            _pass_on(pipes, 0.05)
            status = _ended(pid)
            _tell_who_waits(args, "it is at work")
            until, ended = movement.over(_UNTIL.unpack_from(board)[0]), _ENDED.unpack_from(board, _UNTIL.size)[0]
            if status is None and ended and not _pass_on(pipes, _GRACE):
                status = _ended(pid)
                if status is None:  # it has printed everything, and a part of it hangs
                    _kill(pid, args)
                    os._exit(ended - 1)
            if status is None and until > 0 and turns.is_over(until):
                left = _kill(pid, args)
                _end(args, f"no answer within {movement.patience or ANSWER:.0f} s{left}")
        while _pass_on(pipes, 0.0):
            pass
        os._exit(status)
    except KeyboardInterrupt:
        until = time.monotonic() + 1.0  # it got that signal as well, and may still print something
        while _ended(pid) is None and time.monotonic() < until:
            _pass_on(pipes, 0.02)
        _kill(pid, args)
        os._exit(130)
    except SystemExit as told:
        os.kill(pid, signal.SIGTERM)
        os._exit(int(str(told.code)))
    except BrokenPipeError:
        _kill(pid, args)
        os._exit(141)


def _pass_on(pipes: dict[int, int], seconds: float) -> bool:
    """Write the child's output; return False if there was none."""
    heard = False
    for reader in readable(list(pipes), seconds) if pipes else []:
        part = os.read(reader, 65536)
        if not part:
            os.close(reader)
            del pipes[reader]
            continue
        heard = True
        view = memoryview(part)
        while view:
            view = view[os.write(pipes[reader], view) :]
    if not pipes and seconds:
        time.sleep(min(seconds, 0.0005))
    return heard


def _begun_by(pid: int) -> list[int]:
    """Return the processes below ``pid``; none where the kernel does not list them."""
    found, ahead = list[int](), [pid]
    while ahead and len(found) < 1000:
        one = ahead.pop()
        try:
            threads = os.listdir(f"/proc/{one}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{one}/task/{thread}/children", "rb") as file:  # noqa: PTH123 - many times
                    below = [int(word) for word in file.read().split()]
            except (OSError, ValueError):
                continue
            found += below
            ahead += below
    return found


def _waited_for_a_processor(pid: int) -> float:
    """Return the seconds that a process was ready to run and had no turn; 0.0 where the kernel does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:  # noqa: PTH123 - no pathlib here
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _ended(pid: int) -> int | None:
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    if not done:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _kill(pid: int, args: Sequence[str]) -> str:
    """End the child; return words about it where it does not die."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    until = time.monotonic() + _GRACE
    while time.monotonic() < until:
        if _ended(pid) is not None:
            return ""
        time.sleep(0.01)
    _end_below(pid)
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - ANSWER

    def note() -> str:
        from ftsupervise.probe.errand import Notes

        Notes().write(pid, _key(args), " ".join(args), abandoned=True, since=since)
        return ""

    _aside(note)
    return f"; process {pid} hangs on it and cannot be killed"


def _end_below(pid: int) -> None:
    """End what a child has begun that does not die: it would wait for its parent as long as that hangs."""
    from ftsupervise.host import processes

    processes.send(processes.below(pid), signal.SIGKILL)


def _aside(work: Callable[[], str]) -> str:
    """Return what ``work`` returns, done by a child that is left behind where it hangs: its files may be on the dead place."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = b""
    if readable([reader], _ASIDE):
        said = os.read(reader, 4096)
    os.close(reader)
    until = time.monotonic() + _GRACE
    while _ended(pid) is None and time.monotonic() < until:
        time.sleep(0.002)
    return said.decode("utf-8", "replace")


def _key(args: Sequence[str]) -> str:
    return f"typed {os.environ.get('PWD', '')} {' '.join(args)}"


def _stuck(args: Sequence[str]) -> str:
    """Return words about a child that hangs already.

    ``check`` is asked by programs, again and again: one child hangs on a thing, not one a minute.
    """
    if "check" not in [word for word in args if not word.startswith("-")][:1]:
        return ""

    def look() -> str:
        from ftsupervise.probe.errand import Notes

        note = next((note for note in Notes().stuck() if note.key == _key(args)), None)
        return "" if note is None else f"process {note.pid} has been hanging on it for {note.seconds:.0f} s"

    return _aside(look)


def _end(args: Sequence[str], why: str, *, begun: bool = True) -> NoReturn:
    if _submits(args):
        state = (
            "it may have been submitted; type the same command again later: it looks for the job before it submits"
            if begun
            else "nothing was submitted; type the same command again"
        )
    else:
        state = "the work that was begun may be completed when it answers again" if begun else "nothing was begun"
    code = _UNSEEN if _name(args) == "check" else NoAnswer.exit_code
    message = f"{_name(args)}: {why}: a file system, or Slurm, does not answer"
    hint = f"{state}; sinfo shows whether Slurm does, and ls of a dead mount hangs"
    if "--json" in args:
        from ftsupervise.cli.output import asks_for_json, error_line

        if asks_for_json(args):
            os.write(2, f"{error_line(message, hint, code)}\n".encode())
            os._exit(code)
    os.write(2, f"ftsupervise: {message}\n  {hint}\n".encode())
    os._exit(code)


def _submits(args: Sequence[str]) -> bool:
    return command_of(args) == "launch" and not {"--dry-run", "-n"} & set(args)


def _name(args: Sequence[str]) -> str:
    words = [word for word in args if not word.startswith("-")]
    return " ".join(words[: 2 if words[0] == "cron" else 1])
