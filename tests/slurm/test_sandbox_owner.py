"""A sandbox made for a command or a demo dies with its owner, however that dies: real signals, and every process counted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.processes import environment, living
from ftsupervise.sandbox import sandboxes
from ftsupervise.sandbox.place import MARK, MARK_OWNER
from tests.manual.blocks import ROOT

pytestmark = pytest.mark.slurm

Until = Callable[..., Any]
ENDINGS = [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]
KINDS = ("slurm", "local")  # of the demo


def running(place: Path | str) -> list[str]:
    """Daemons by the sandbox's mark, and all that was started in it."""
    found = []
    for process in living():
        env = environment(process.pid)
        named = (env.get(MARK), env.get("FTSUPERVISE_SANDBOX"), env.get("SLURM_CONF", "").removesuffix("/slurm.conf"))
        if str(place) in named:
            found.append(f"{process.pid} {process.name}")
    return found


def _heed_signals() -> None:
    """Whoever runs these tests in the background, or with nohup, ignores some of them, and children take that over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def begun(slurm_installed: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an owner, in a session of its own as a terminal's shell would have it."""
    owners: list[subprocess.Popen[str]] = []

    def start(*words: str, **more: Any) -> subprocess.Popen[str]:
        quiet: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "preexec_fn": _heed_signals,
        } | more
        owners.append(subprocess.Popen([sys.executable, *words], start_new_session=True, text=True, **quiet))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()
        owner.wait(30)


COMMAND = """
sbatch -N2 -o /dev/null --wrap 'srun sleep 308'
setsid sleep 309 &
nohup sleep 310 &
until squeue -h -t R | grep -q .; do sleep 0.1; done
touch "$1"
sleep 311
"""


@pytest.mark.fault(
    "`ftsupervise sandbox -- COMMAND` is ended by SIGKILL, SIGTERM or SIGHUP",
    "its keeper ends the command, what that left in the background, and the cluster with its jobs",
)
@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_sandbox_for_one_command_ends_with_its_owner(
    begun: Callable[..., subprocess.Popen[str]], short_tmp: Path, until: Until, number: signal.Signals, tmp_path: Path
) -> None:
    place = short_tmp / f"own-{number.name}"
    words = ("-m", "ftsupervise", "sandbox", "--dir", str(place), "--nodes", "2", "--", "sh", "-c", COMMAND, "sh")
    owner = begun(*words, str(tmp_path / "at-work"))
    until(lambda: (tmp_path / "at-work").exists(), "a job at work")
    # five daemons, a job on two nodes, the command and what it left in the background
    until(lambda: len(running(place)) > 9, "all of them")
    owner.send_signal(number)
    owner.wait(60)
    until(lambda: not running(place), "the end of all of it")
    until(lambda: not place.exists(), "its directory to be gone")


@pytest.mark.fault(
    "The terminal in which a sandbox was made for a command is closed",
    "the command and the cluster end",
)
def test_it_ends_when_its_terminal_is_closed(
    begun: Callable[..., subprocess.Popen[str]], short_tmp: Path, until: Until
) -> None:
    place = short_tmp / "terminal"
    ours, theirs = os.openpty()
    words = ("-m", "ftsupervise", "sandbox", "--dir", str(place), "--nodes", "1", "--", "sleep", "314")
    owner = begun(
        *words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    )
    os.close(theirs)
    until(lambda: [one for one in running(place) if one.endswith("sleep")], "the command")
    os.close(ours)
    owner.wait(60)
    until(lambda: not running(place) and not place.exists(), "the end of all of it")


FORKED = """
import os, sys, time
from pathlib import Path
from ftsupervise.sandbox import temporary
with temporary(sys.argv[1], nodes=1):
    child = os.fork()
    if child == 0:
        time.sleep(300)
        os._exit(0)
    Path(sys.argv[2]).write_text(str(child))
    time.sleep(300)
"""


@pytest.mark.fault(
    "The owner of a sandbox is killed and a child that it forked lives on",
    "the keeper looks at the owner itself, too",
)
def test_a_child_that_the_owner_forked_does_not_keep_it_up(
    begun: Callable[..., subprocess.Popen[str]], short_tmp: Path, until: Until, tmp_path: Path
) -> None:
    """It has all that the owner had open, the keeper's pipe too."""
    place, note = short_tmp / "forked", tmp_path / "child"
    owner = begun("-c", FORKED, str(place), str(note))
    child = int(until(lambda: note.exists() and note.read_text(), "the child"))
    try:
        owner.kill()
        owner.wait(30)
        until(lambda: not running(place) and not place.exists(), "the end of the cluster")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.fault("It is killed while its cluster is coming up", "nothing of the cluster stays")
def test_one_that_is_killed_while_it_brings_its_sandbox_up_leaves_nothing(
    begun: Callable[..., subprocess.Popen[str]], short_tmp: Path, until: Until
) -> None:
    for n, first in enumerate(("munged", "slurmctld", "slurmd")):
        place = short_tmp / f"half-{n}"
        owner = begun("-m", "ftsupervise", "sandbox", "--dir", str(place), "--nodes", "3", "--", "sleep", "312")
        until(lambda p=place, f=first: [one for one in running(p) if one.endswith(f)], first)
        owner.kill()
        owner.wait(30)
        until(lambda p=place: not running(p) and not p.exists(), f"the end of what was up when it had {first}")


@pytest.mark.fault("Somebody has made another sandbox in its folder when the owner dies", "that one is left alone")
def test_a_sandbox_that_somebody_else_made_there_since_is_left_alone(
    begun: Callable[..., subprocess.Popen[str]], short_tmp: Path, until: Until
) -> None:
    place = short_tmp / "again"
    command = [sys.executable, "-m", "ftsupervise", "sandbox"]
    owner = begun("-m", "ftsupervise", "sandbox", "--dir", str(place), "--nodes", "1", "--", "sleep", "313")
    until(lambda: [one for one in running(place) if one.endswith("sleep")], "the command")
    subprocess.run([*command, "down", "--dir", str(place)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    subprocess.run(
        [*command, "up", "--dir", str(place), "--nodes", "1"], check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    try:
        daemons = [one for one in running(place) if one.endswith(("slurmd", "slurmctld", "munged"))]
        owner.kill()
        owner.wait(30)
        until(lambda: not [one for one in running(place) if one.endswith("sleep")], "the end of the command")
        keepers = [p for p in living() if b"sandbox.keeper" in (c := cmdline(p.pid)) and str(place).encode() in c]
        until(lambda: not [p for p in keepers if Path(f"/proc/{p.pid}").exists()], "the end of the keeper")
        assert set(daemons) <= set(running(place))
    finally:
        subprocess.run([*command, "down", "--dir", str(place)], timeout=60, check=False, stdout=subprocess.DEVNULL)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def of(mark: str) -> list[str]:
    return [f"{p.pid} {p.name}" for p in living() if environment(p.pid).get(MARK_OWNER) == mark]


@dataclass
class Demo:
    """A demo that trains, and what it has started."""

    process: subprocess.Popen[str]
    run: Path
    number: signal.Signals

    def trains(self) -> bool:
        return any((self.run / "beats").glob("rank-*"))

    def mark(self) -> str:
        [mark] = {
            environment(p.pid)[MARK_OWNER] for p in living()
            if p.parent == self.process.pid and MARK_OWNER in environment(p.pid)
        }  # fmt: skip
        return mark


@pytest.mark.fault(
    "`make demo` is ended by SIGKILL, SIGTERM, SIGHUP or Ctrl-C, on Slurm or with `scheduler: local`",
    "its cluster, its chain of jobs and its watch end with it",
)
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        pytest.param("slurm", [signal.SIGKILL, signal.SIGINT], id="slurm"),
        pytest.param("local", [signal.SIGTERM, signal.SIGHUP], id="local"),
        *(pytest.param(kind, [*ENDINGS, signal.SIGINT], id=f"{kind}, all", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_the_demo_leaves_nothing_running(
    begun: Callable[..., subprocess.Popen[str]], tmp_path: Path, until: Until, kind: str, numbers: list[signal.Signals]
) -> None:
    """One for each signal, beside each other: each leaves the others alone. A demo takes five seconds of a processor."""
    demos = []
    for number in numbers:
        folder = tmp_path / number.name
        words = [*(["--local"] if kind == "local" else []), str(folder)]
        process = begun(str(ROOT / "examples" / "demo" / "demo.py"), *words)
        demos.append(Demo(process, folder / "digits" / "runs" / "digits", number))
    for demo in demos:
        until(demo.trains, f"the demo for {demo.number.name} to train", 180)
    for demo in demos:
        mark, number = demo.mark(), demo.number
        places = {environment(int(one.split()[0])).get("FTSUPERVISE_SANDBOX", "") for one in of(mark)} - {""}
        assert len(of(mark)) >= 3 and len(places) == (kind == "slurm")
        demo.process.send_signal(number)
        assert demo.process.wait(60) == (130 if number == signal.SIGINT else -number)
        until(lambda m=mark: not of(m), "the end of the chain and the watch")
        until(
            lambda p=places: not any(running(place) or Path(place).exists() for place in p),
            "the end of the cluster",
        )
        assert not {Path(place) for place in places} & {seen.directory for seen in sandboxes()}
