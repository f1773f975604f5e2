"""Using a sandbox from outside: list them, and run one command in one."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ftsupervise.errors import AlreadyRunning, Error, NotFound
from ftsupervise.sandbox.cluster import Sandbox
from ftsupervise.sandbox.keeper import Keeper, end_marked, end_sandbox
from ftsupervise.sandbox.place import DAEMONS, MARK, MARK_NODE, default_directory, real


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
        nodes = f"{len(self.nodes)} node{'' if len(self.nodes) == 1 else 's'}"
        return f"up, {nodes}" if self.controller else f"no controller, {nodes}"


def sandboxes() -> list[Seen]:
    """Sandboxes of this account: all whose daemons run, wherever they are, and dead ones in the usual place."""
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
    """A sandbox that ends with the block, or with this process however that ends, SIGKILL too.

    So does all that is started with its ``env``, down to grandchildren in sessions of their own. Without a ``directory`` it
    gets one with an unguessable name. Raises as ``Sandbox.up`` does.
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


def follow(command: Sequence[str], directory: Path | str | None = None, **shape: Any) -> int:
    """Run ``command`` in the sandbox that is up in ``directory``, or in one made for it and taken down after it.

    Its exit code, as a shell gives it: 128 + N when signal N ended it. Raises NoCommand (127) when there is none such.
    SIGTERM and SIGHUP are passed on to it; Ctrl-C reaches it anyway. When this process is killed, the sandbox that was made
    for the command ends, and the command with it.
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
