"""Starts the sandbox's daemons. Each start is bounded, and a failure shows the daemon's own last words.

Daemons get a small environment of their own: not one variable of an outer Slurm job may reach them. They carry a mark
in it, by which they are found again whatever happens to our files.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.errors import Error
from ftsupervise.sandbox import conf
from ftsupervise.sandbox.conf import Layout, Shape
from ftsupervise.sandbox.hosts import Network
from ftsupervise.sandbox.place import MARK, MARK_NODE, find_program, libraries, search_path

_KEPT = ("HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR")


class PortTaken(Error):
    """Another process took one of our ports between the check and the start. Worth another try."""


def environment(layout: Layout, shape: Shape, **more: str) -> dict[str, str]:
    """Return the whole environment of a daemon."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {"PATH": search_path(shape.prefix), "SLURM_CONF": str(layout.slurm_conf), MARK: str(layout.root)}
    if shape.prefix:
        env["LD_LIBRARY_PATH"] = libraries(shape.prefix)
    return env | more


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row, below those that the kernel assigns."""
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        ephemeral = 32768
    top = (ephemeral if ephemeral > 12000 + count else 60000) - count
    for _ in range(200):
        first = random.randrange(10000, top)
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise Error(f"no {count} free ports in a row on this machine", hint="ss -ltn shows the listening processes")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def link(layout: Layout, shape: Shape) -> None:
    """Make links with the names that the daemons expect: slurmctld acts by its own name."""
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        target = find_program(name, shape.prefix)
        assert target is not None, name  # require_programs came first
        (layout.bin / name).symlink_to(target)


def start_munged(layout: Layout, shape: Shape, seconds: float) -> None:
    program = find_program("munged", shape.prefix) or "munged"
    key, socket_, log = layout.munge / "key", layout.munge_socket, layout.munge / "log"
    # --force: its checks of the directories above are for a machine's one key, not for one made a moment ago.
    command = [program, "--force", f"--key-file={key}", f"--socket={socket_}", f"--log-file={log}"]
    command += [f"--pid-file={layout.munge}/pid", f"--seed-file={layout.munge}/seed", "--num-threads=2"]
    _start({"munged": command}, layout, environment(layout, shape), seconds, log)


def start_slurmdbd(layout: Layout, env: dict[str, str], seconds: float) -> None:
    _start({"slurmdbd": [str(layout.bin / "slurmdbd")]}, layout, env, seconds, layout.logs / "slurmdbd.log")


def start_slurmctld(layout: Layout, shape: Shape, seconds: float, *, clean: bool = False) -> None:
    """Start slurmctld and return when it listens. ``clean`` forgets all jobs and states of nodes from earlier."""
    command = [str(layout.bin / "slurmctld"), *(["-c"] if clean else [])]
    _start({"slurmctld": command}, layout, environment(layout, shape), seconds, layout.logs / "slurmctld.log")


def start_slurmds(
    layout: Layout, shape: Shape, nodes: Sequence[str], seconds: float, network: Network | None = None
) -> None:
    """Start slurmd of each node, on the node's own host where there is a ``network`` of hosts."""
    commands = {}
    for node in nodes:
        (layout.spool / node).mkdir(exist_ok=True)
        before = network.enter(node, layout.hosts / node) if network else []
        commands[node] = [*before, str(layout.bin / "slurmd"), "-N", node, "-d", str(layout.bin / "slurmstepd")]
    _start(commands, layout, environment(layout, shape), seconds, layout.logs / "{name}.log", node_mark=True)


def _start(
    commands: Mapping[str, Sequence[str]],
    layout: Layout,
    env: dict[str, str],
    seconds: float,
    log: Path,
    *,
    node_mark: bool = False,
) -> None:
    """Start daemons that go to the background by themselves; return when all of them have."""
    end = time.monotonic() + seconds
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            own = env | {MARK_NODE: name} if node_mark else env
            with (layout.logs / f"{name}.start").open("wb") as words:
                running[name] = subprocess.Popen(
                    command,
                    env=own,
                    cwd=layout.root,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    umask=0o022,
                    start_new_session=True,
                )
        for name, process in running.items():
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _failed(name, f"did not come up within {seconds:.0f} s", layout, log) from None
            if code:
                raise _failed(name, f"ended with exit code {code}", layout, log)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait(5)


def _failed(name: str, how: str, layout: Layout, log: Path) -> Error:
    own_log = Path(str(log).format(name=name))
    said = last_words(layout.logs / f"{name}.start") or last_words(own_log)
    who = f"slurmd of {name}" if own_log != log else name
    return explained(f"{who} {how}" + (f": {said}" if said else ""), said + last_words(own_log, 2000))


def gave_up(name: str, log: Path) -> Error:
    """Return the error for a daemon that went to the background and ended there."""
    said = last_words(log)
    return explained(f"{name} ended: {said}", said)


def explained(message: str, said: str) -> Error:
    """Return the error for a daemon's last output, with a hint where it is known."""
    if "already in use" in said:
        return PortTaken(message)
    if "Invalid user for SlurmUser nobody" in said:
        return Error(message, hint="Slurm 26.05 does not run as the account nobody: use an account of a person")
    if "5027" in said and "@var := concat" in said:
        return Error(
            f"the slurmdbd of this machine ends with its MariaDB (known of Slurm 26.05 and MariaDB 11.8): {message}",
            hint="leave out --accounting: all but sacct works",
        )
    return Error(message)


def last_words(log: Path, most: int = 300) -> str:
    """Return the last lines of a log on one line; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * most))
            text = file.read(4 * most).decode("utf-8", "replace")
    except OSError:
        return ""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[-most:]


# A database and slurmdbd for a sandbox, so that ``sacct`` works. It costs seconds and 100 MB: not the default.


def start_accounting(layout: Layout, shape: Shape, seconds: float) -> None:
    """Start the database first, then slurmdbd; return when slurmdbd answers. munged must be up already."""
    end = time.monotonic() + seconds
    env = environment(layout, shape)
    _install(layout, shape, env, seconds)
    socket = layout.database / "sock"
    database = _database(layout, shape, env, socket)
    _wait_until(socket.exists, end, database, layout.database / "err.log", "mariadbd")
    env["MYSQL_UNIX_PORT"] = str(socket)
    program = find_program("slurmdbd", shape.prefix) or "slurmdbd"
    (layout.bin / "slurmdbd").symlink_to(program)
    start_slurmdbd(layout, env, max(1.0, end - time.monotonic()))
    ask = [find_program("sacctmgr", shape.prefix) or "sacctmgr", "-i", "-Q", "add", "cluster", conf.CLUSTER]
    _wait_until(_Answer(ask, env, layout), end, database, layout.logs / "slurmdbd.log", "slurmdbd")


def _install(layout: Layout, shape: Shape, env: dict[str, str], seconds: float) -> None:
    layout.database.mkdir()
    program = find_program("mariadb-install-db", shape.prefix) or "mariadb-install-db"
    log = layout.database / "install.log"
    command = [program, "--no-defaults", *_as_root(), *_based(program, shape), f"--datadir={layout.database}/data"]
    command += ["--auth-root-authentication-method=normal", "--skip-test-db"]
    with log.open("wb") as words:  # its errors; its other output is advice for a real installation
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise Error(f"mariadb-install-db did not end within {seconds:.0f} s") from None
    if done.returncode:
        raise Error(f"mariadb-install-db ended with exit code {done.returncode}: {last_words(log)}")


def _database(layout: Layout, shape: Shape, env: dict[str, str], socket: Path) -> subprocess.Popen[bytes]:
    program = find_program("mariadbd", shape.prefix) or "mariadbd"
    command = [program, "--no-defaults", *_as_root(), *_based(program, shape), f"--datadir={layout.database}/data"]
    command += [f"--socket={socket}", f"--pid-file={layout.database}/pid", f"--log-error={layout.database}/err.log"]
    # slurmdbd complains, and at times refuses, below these
    command += ["--skip-networking", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
    return subprocess.Popen(
        command,
        env=env,
        cwd=layout.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        umask=0o077,
        start_new_session=True,
    )


def _as_root() -> list[str]:
    return ["--user=root"] if os.getuid() == 0 else []


def _based(program: str, shape: Shape) -> list[str]:
    """Return the options that tell an unpacked MariaDB its own path; an installed one knows it."""
    inside = shape.prefix and program.startswith(f"{shape.prefix}/")
    return [f"--basedir={shape.prefix}/usr"] if inside else []


@dataclass
class _Answer:
    """Return whether slurmdbd answers ``ask``. Raises Error with its last output once it has ended."""

    ask: list[str]
    env: dict[str, str]
    layout: Layout
    absent: int = 0  # scans in a row without it: a process that forks and ends can escape one

    def __call__(self) -> bool:
        import psutil  # here: an interpreter without any package can bring up a sandbox

        if _succeeds(self.ask, self.env):
            return True
        lives = any(
            one.info["name"] == "slurmdbd" and (one.info["environ"] or {}).get(MARK) == str(self.layout.root)
            for one in psutil.process_iter(["name", "environ"])
        )
        self.absent = 0 if lives else self.absent + 1
        if self.absent == 10:
            raise gave_up("slurmdbd", self.layout.logs / "slurmdbd.log")
        return False


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _wait_until(done: Callable[[], bool], end: float, database: subprocess.Popen[bytes], log: Path, name: str) -> None:
    while not done():
        if database.poll() is not None:
            raise Error(f"mariadbd ended with exit code {database.returncode}: {last_words(log)}")
        if time.monotonic() >= end:
            raise Error(f"{name} did not answer in time: {last_words(log)}")
        time.sleep(0.05)
