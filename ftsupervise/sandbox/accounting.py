"""A database and slurmdbd for a sandbox, so that ``sacct`` works. It costs seconds and 100 MB: not the default."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.errors import Error
from ftsupervise.sandbox import conf, daemons, programs
from ftsupervise.sandbox.conf import Layout, Shape
from ftsupervise.sandbox.members import MARK


def start(layout: Layout, shape: Shape, seconds: float) -> None:
    """Database first, then slurmdbd; back when slurmdbd answers. munged must be up already."""
    end = time.monotonic() + seconds
    env = daemons.environment(layout, shape)
    _install(layout, shape, env, seconds)
    socket = layout.database / "sock"
    database = _database(layout, shape, env, socket)
    _until(socket.exists, end, database, layout.database / "err.log", "mariadbd")
    env["MYSQL_UNIX_PORT"] = str(socket)
    program = programs.find("slurmdbd", shape.prefix) or "slurmdbd"
    (layout.bin / "slurmdbd").symlink_to(program)
    daemons.start_slurmdbd(layout, env, max(1.0, end - time.monotonic()))
    ask = [programs.find("sacctmgr", shape.prefix) or "sacctmgr", "-i", "-Q", "add", "cluster", conf.CLUSTER]
    _until(_Answer(ask, env, layout), end, database, layout.logs / "slurmdbd.log", "slurmdbd")


def _install(layout: Layout, shape: Shape, env: dict[str, str], seconds: float) -> None:
    layout.database.mkdir()
    program = programs.find("mariadb-install-db", shape.prefix) or "mariadb-install-db"
    log = layout.database / "install.log"
    command = [program, "--no-defaults", *_as_root(), *_based(program, shape), f"--datadir={layout.database}/data"]
    command += ["--auth-root-authentication-method=normal", "--skip-test-db"]
    with log.open("wb") as words:  # its complaints; what it prints otherwise is advice for a real installation
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
        raise Error(f"mariadb-install-db ended with exit code {done.returncode}: {daemons.last_words(log)}")


def _database(layout: Layout, shape: Shape, env: dict[str, str], socket: Path) -> subprocess.Popen[bytes]:
    program = programs.find("mariadbd", shape.prefix) or "mariadbd"
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
    """Tell an unpacked MariaDB where it is; an installed one knows."""
    inside = shape.prefix and program.startswith(f"{shape.prefix}/")
    return [f"--basedir={shape.prefix}/usr"] if inside else []


@dataclass
class _Answer:
    """Whether slurmdbd answers ``ask``. Raises Error with its last words once it has ended: there is nothing to wait for."""

    ask: list[str]
    env: dict[str, str]
    layout: Layout
    absent: int = 0  # looks in a row without it: a process that forks and ends can slip through one

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
            raise daemons.gave_up("slurmdbd", self.layout.logs / "slurmdbd.log")
        return False


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _until(done: Callable[[], bool], end: float, database: subprocess.Popen[bytes], log: Path, name: str) -> None:
    while not done():
        if database.poll() is not None:
            raise Error(f"mariadbd ended with exit code {database.returncode}: {daemons.last_words(log)}")
        if time.monotonic() >= end:
            raise Error(f"{name} did not answer in time: {daemons.last_words(log)}")
        time.sleep(0.05)
