"""The owner of a sandbox may die of anything, SIGKILL too: then its keeper takes the sandbox down.

The keeper is a small process of its own in a session of its own. It reads a pipe whose other end only its owner has: when the
owner reports that it has cleaned up, the keeper exits; when the pipe closes without that report, the owner is dead. Then all
that the owner started ends, found by a mark in its environment (the command, a watch, a chain of ``scheduler: local``), and
then the sandbox, if it is still the one that this owner made, and the folder that it worked in, with what is mounted there.

    python -m ftsupervise.sandbox.keeper MARK OWNER SANDBOX FOLDER     OWNER is the pid; the pipe is standard input; "": none
"""

from __future__ import annotations

import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ftsupervise.errors import AlreadyRunning, Error, NotFound
from ftsupervise.host import processes
from ftsupervise.host.ownership import OWN, claim_folder
from ftsupervise.sandbox.cluster import Sandbox
from ftsupervise.sandbox.place import DAEMONS, MARK, MARK_NODE, MARK_OWNER, default_directory, power_cut, real
from ftsupervise.units import count

_CLEARED = b"cleared"
_GLANCE = 1.0  # seconds between checks of the owner itself
_GRACE = 3.0  # seconds from SIGTERM to SIGKILL
_PATIENCE = 60.0  # seconds in which the dead owner's work must have ended
_UNMOUNTED = 10.0  # seconds for one umount
_POLL = 0.2


@dataclass
class Keeper:
    """The owner's side. ``start`` it before anything that must not outlive this process, ``release`` it after it is gone."""

    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    _pipe: int = -1
    _process: subprocess.Popen[bytes] | None = None

    @property
    def env(self) -> dict[str, str]:
        """Return the variable for the environment of every child: the keeper finds by it what to end."""
        return {MARK_OWNER: self.mark}

    def start(self, sandbox: Path | None = None, folder: Path | None = None) -> Keeper:
        """Keep all processes with the mark, the ``sandbox`` in that directory whose record names it, and ``folder``, which this
        process has made for itself alone. Raises OSError."""
        theirs, self._pipe = os.pipe()  # our end is not inherited: no command of ours holds it open
        words = [self.mark, str(os.getpid()), str(sandbox or ""), str(folder or "")]
        try:
            self._process = subprocess.Popen(
                processes.own_command(*words, module=__name__),
                # not marked itself, by no outer owner either: it must outlive them to do its work
                env={name: value for name, value in os.environ.items() if name != MARK_OWNER},
                cwd="/",
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C, no closed terminal
            )
        finally:
            os.close(theirs)
        return self

    def release(self) -> None:
        """Report that all is cleaned up: the keeper exits without touching anything. Bounded."""
        if self._process is None:
            return
        try:
            os.write(self._pipe, _CLEARED)
        except BrokenPipeError:  # another process ended it
            pass
        os.close(self._pipe)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process = None

    def abandon(self) -> None:
        """Let the keeper clean up now, as if this process had died."""
        if self._process is not None:
            os.close(self._pipe)
            self._process = None


def owner_died(owner: int) -> bool:
    """Wait for the owner, our parent; return whether it has died, or has reported that all is cleaned up."""
    said = b""
    while os.getppid() == owner:  # a child that it forked, and that ran no other program, holds the pipe open too
        if select.select([0], [], [], _GLANCE)[0]:
            part = os.read(0, 64)
            if not part:
                break
            said += part
    return said != _CLEARED


def end_marked(mark: str) -> None:
    """Send SIGTERM to all that the owner started, wait a moment, then SIGKILL to all at once. The mark is unguessable."""
    asked = processes.marked(MARK_OWNER).get(mark, [])
    for process in asked:
        processes.signal_exactly(process, signal.SIGTERM)
        processes.signal_exactly(process, signal.SIGCONT)
    processes.wait_gone(asked, _GRACE)
    power_cut(lambda: processes.marked(MARK_OWNER).get(mark, []), 10)


def end_sandbox(root: Path, mark: str) -> None:
    """Take down what the owner had brought up, or was bringing up, in ``root``; nothing if it is another's by now."""
    try:
        found = Sandbox.at(root)
    except NotFound:  # none, or one whose record is half written
        found = Sandbox.remains(root)
    else:
        if found.owner != mark:
            return
    found.down()


def remove_folder(folder: Path) -> bool:
    """Remove a folder that is this account's alone, with what is mounted in it; return whether it is gone. A process that is
    ending may write there once more: then it is called again."""
    for at in mounts_below(folder):
        subprocess.run(["umount", "--lazy", at], capture_output=True, timeout=_UNMOUNTED, check=False)
    if not mounts_below(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def mounts_below(folder: Path) -> list[str]:
    """Return where something is mounted in ``folder``, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    found = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return sorted((one for one in found if one.startswith(f"{folder}/")), reverse=True)


def clear_up(mark: str, root: Path | None, folder: Path | None = None) -> None:
    """Repeat until two scans, a moment apart, find nothing: a process that is just starting may escape one."""
    end = time.monotonic() + _PATIENCE
    calm = 0
    while calm < 2 and time.monotonic() < end:
        busy = bool(processes.marked(MARK_OWNER).get(mark))
        end_marked(mark)
        if root is not None:
            try:
                end_sandbox(root, mark)
            except NotFound:
                pass
            except Error:  # another command is at it, or a process in state D
                busy = True
        if folder is not None and folder.exists():
            busy |= not remove_folder(folder)
        calm = 0 if busy else calm + 1
        time.sleep(0.5)


def main() -> None:
    mark, owner, sandbox, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the owner's group or session is not meant for its keeper
    if owner_died(int(owner)):
        clear_up(mark, Path(sandbox) if sandbox else None, Path(folder) if folder else None)


# ------------------------------------------------------------ the owners: list the sandboxes, and run one command in one


class NoCommand(Error):
    exit_code = 127  # as in a shell


@dataclass(frozen=True)
class Seen:
    """A sandbox as found on this machine."""

    directory: Path
    controller: bool
    nodes: tuple[str, ...]  # those whose slurmd runs

    @property
    def word(self) -> str:
        if not self.controller and not self.nodes:
            return "dead (ftsupervise sandbox down removes it)"
        nodes = count(len(self.nodes), "node")
        return f"up, {nodes}" if self.controller else f"no controller, {nodes}"


def sandboxes() -> list[Seen]:
    """Return the sandboxes of this account: all whose daemons run, wherever they are, and dead ones in the usual place."""
    import psutil  # here: an interpreter without any package can bring up a sandbox

    usual = default_directory()
    found: dict[Path, list[tuple[str, str]]] = {p: [] for p in usual.parent.glob(f"{usual.name}*") if _ours(p)}
    for one in psutil.process_iter(["name", "environ", "uids"]):
        environ, name = one.info["environ"] or {}, one.info["name"]
        if name in DAEMONS and MARK in environ and one.info["uids"].real == os.getuid():
            found.setdefault(Path(environ[MARK]), []).append((name, environ.get(MARK_NODE, "")))
    return [
        Seen(
            directory,
            any(name == "slurmctld" for name, _ in roles),
            tuple(sorted({node for name, node in roles if name == "slurmd"})),
        )
        for directory, roles in sorted(found.items())
    ]


def _ours(directory: Path) -> bool:
    try:
        return directory.lstat().st_uid == os.getuid() and (directory / "sandbox.json").exists()
    except OSError:  # going, or a stranger's that may not be entered
        return False


@contextmanager
def temporary(directory: Path | str | None = None, **shape: Any) -> Iterator[Sandbox]:
    """Give a sandbox that ends with the block, or with this process however that ends, SIGKILL too.

    So do all processes that are started with its ``env``, down to grandchildren in sessions of their own. Without a
    ``directory`` it gets one with an unguessable name. Raises as ``Sandbox.up`` does.
    """
    root = real(directory) if directory is not None else Path(f"{default_directory()}-{secrets.token_hex(4)}")
    keeper = Keeper().start(root)
    try:
        sandbox = Sandbox.up(root, owner=keeper.mark, **shape)
    except Error:  # it has left nothing
        keeper.release()
        raise
    except BaseException:
        keeper.abandon()
        raise
    try:
        yield sandbox
    finally:
        try:
            end_marked(keeper.mark)
            end_sandbox(root, keeper.mark)
        except NotFound:  # it was taken down from outside
            pass
        except BaseException:
            keeper.abandon()
            raise
        keeper.release()


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Keeper]:
    """Make ``folder`` for this account alone. It ends with the block, or with this process however that ends, SIGKILL too:
    first all processes that were started with the keeper's ``env``, then what is mounted in it, then the folder."""
    keeper = Keeper().start(folder=folder)
    claim_folder(folder, OWN)
    try:
        yield keeper
    finally:
        try:
            end_marked(keeper.mark)
            end = time.monotonic() + _GRACE
            while not remove_folder(folder) and time.monotonic() < end:
                time.sleep(_POLL)
        except BaseException:
            keeper.abandon()
            raise
        if folder.exists():
            keeper.abandon()
        else:
            keeper.release()


def follow(command: Sequence[str], directory: Path | str | None = None, **shape: Any) -> int:
    """Run ``command`` in the sandbox that is up in ``directory``, or in one made for it and taken down after it.

    Returns its exit code, as a shell gives it: 128 + N when signal N ended it. Raises NoCommand (127) when there is no
    such command. SIGTERM and SIGHUP are passed on to it; Ctrl-C reaches it anyway. When this process is killed, the
    sandbox that was made for the command ends, and the command with it.
    """
    child: list[subprocess.Popen[bytes]] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        if child:
            if number != signal.SIGINT:
                child[0].send_signal(number)
        else:
            raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        with ExitStack() as stack:
            # One made for a single command gets a place of its own: two such commands must not share it.
            sandbox = _standing(directory, shape) or stack.enter_context(temporary(directory, **shape))
            try:
                child.append(subprocess.Popen(command, env=sandbox.env()))
                code = child[0].wait()
            except FileNotFoundError:
                raise NoCommand(f"no such command: {command[0]}") from None
            finally:
                for number in numbers:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _standing(directory: Path | str | None, shape: dict[str, Any]) -> Sandbox | None:
    try:
        sandbox = Sandbox.at(directory)
    except NotFound:
        return None
    if not sandbox.alive:
        return None
    other = [name for name, value in shape.items() if getattr(sandbox.shape, name) != value]
    if other:
        raise AlreadyRunning(
            f"the sandbox in {sandbox.directory} is up with other {', '.join(other)}",
            hint=f"take it down first: ftsupervise sandbox down --dir {shlex.quote(str(sandbox.directory))}",
        )
    return sandbox


if __name__ == "__main__":
    main()
