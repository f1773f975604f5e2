"""A sandbox that is taken down leaves no process and no file, whatever happened before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import AlreadyRunning, Error, NotFound, Refused, UsageError
from ftsupervise.host.processes import environment, identity, living
from ftsupervise.sandbox import Sandbox, Shape, sandboxes
from ftsupervise.sandbox.place import members

pytestmark = pytest.mark.slurm

Until = Callable[..., Any]


@pytest.fixture
def place(slurm_installed: None, short_tmp: Path, request: pytest.FixtureRequest) -> Any:
    """A directory name of this test's own; whatever the test leaves in it is taken away."""
    directory = short_tmp / f"d{abs(hash(request.node.name)) % 10**8}"
    yield directory
    try:
        Sandbox.remains(directory).down()
    except NotFound:
        pass
    shutil.rmtree(directory, ignore_errors=True)


def traces(directory: Path) -> list[str]:
    """Everything on this machine that speaks of the directory: processes by what they were started with, files."""
    found = [str(directory)] if directory.exists() else []
    for process in living():
        try:
            told = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            opened = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        said = [*environment(process.pid).values(), *opened, told.decode("utf-8", "replace")]
        if process.pid != os.getpid() and any(str(directory) in text for text in said):
            found.append(f"{process.pid} {process.name}")
    return found


def test_a_sandbox_in_which_nothing_ran_leaves_nothing(place: Path) -> None:
    with Sandbox.up(place, nodes=2) as sandbox:
        assert sandbox.alive and traces(place)
    assert traces(place) == []


def test_jobs_and_what_they_put_in_the_background_end_with_it(place: Path, until: Until) -> None:
    sandbox = Sandbox.up(place, nodes=2)
    body = "sleep 301 & (setsid sleep 302 &) ; env -i sleep 303 & srun sleep 304"
    sandbox.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", body])

    def sleeping() -> list[int]:
        return [m.process.pid for m in sandbox.processes() if m.process.name == "sleep"]

    until(lambda: len(sleeping()) == 5, "the background, the detached, the nameless, and two ranks")
    pids = sleeping()
    sandbox.down()
    assert traces(place) == [] and not set(pids) & {one.pid for one in living()}


def test_waiting_commands_end_with_it_but_not_the_shell_they_gave(place: Path, until: Until) -> None:
    sandbox = Sandbox.up(place, nodes=1)
    command = ["salloc", "-n1", "sleep", "305"]
    with subprocess.Popen(command, env=sandbox.env(), stderr=subprocess.DEVNULL, start_new_session=True) as salloc:

        def shell() -> list[int]:
            return [p.pid for p in living() if p.parent == salloc.pid and p.name == "sleep"]

        [mine] = until(shell, "the command that salloc runs")
        sandbox.down()
        assert salloc.wait(10) == -signal.SIGKILL
        assert identity(mine) is not None
        os.kill(mine, signal.SIGKILL)


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_controller_that_hangs_or_is_dead_does_not_matter(place: Path, how: Any) -> None:
    sandbox = Sandbox.up(place, nodes=2)
    sandbox.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 300"])
    sandbox.controller(how)
    sandbox.node("node-1", how)
    sandbox.down()
    assert traces(place) == []


def test_when_its_files_are_gone_its_processes_are_still_found(place: Path) -> None:
    Sandbox.up(place, nodes=2)
    aside = place.rename(place.with_name("aside"))
    shutil.rmtree(aside, ignore_errors=True)  # its daemons still write there
    assert place in [seen.directory for seen in sandboxes()]
    Sandbox.remains(place).down()
    assert traces(place) == []
    with pytest.raises(NotFound, match="there is no sandbox in"):
        Sandbox.remains(place)


def test_when_its_record_is_damaged_it_can_still_be_taken_down(place: Path) -> None:
    sandbox = Sandbox.up(place, nodes=1)
    sandbox.layout.record.write_text('{"shape"')
    with pytest.raises(NotFound, match="not whole"):
        Sandbox.at(place)
    Sandbox.remains(place).down()
    assert [trace for trace in traces(place) if trace != str(place)] == []
    assert not place.exists() or not any(place.iterdir())


def test_an_up_that_fails_half_way_leaves_nothing(place: Path) -> None:
    with pytest.raises(Error, match=r"slurmctld ended: .*select/nonsense"):
        Sandbox.up(place, overrides=("SelectType=select/nonsense",))
    assert traces(place) == []
    with pytest.raises(Error, match=r"slurmd of node-0 ended(?: with exit code 1)?: .*task/nonsense"):
        Sandbox.up(place, nodes=2, overrides=("TaskPlugin=task/nonsense",))
    assert traces(place) == []
    with pytest.raises(Error, match=r"not ready within \d+ s: node-0 inval.*, node-1 inval"):
        Sandbox.up(place, nodes=2, timeout=5, overrides=("SlurmdParameters=l3cache_as_socket",))
    assert traces(place) == []


@pytest.mark.parametrize("daemon", ["munged", "slurmctld", "slurmd"])
def test_an_up_that_was_killed_half_way_is_cleared_by_down(place: Path, daemon: str, until: Until) -> None:
    command = [sys.executable, "-m", "ftsupervise", "sandbox", "up", "--dir", str(place)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as up:
        until(lambda: daemon in "".join(traces(place)) or up.poll() is not None, daemon)
        up.kill()
    Sandbox.remains(place).down()
    assert [trace for trace in traces(place) if trace != str(place)] == []
    assert not place.exists() or not any(place.iterdir())


def test_an_up_over_what_an_earlier_one_left_begins_anew(place: Path, until: Until) -> None:
    first = Sandbox.up(place, nodes=3)
    for member in members(first.layout.slurm_conf, first.shape.node_names):
        with suppress(ProcessLookupError):  # it has ended with another of them
            os.kill(member.process.pid, signal.SIGKILL)
    until(lambda: not first.alive, "the end")
    assert place.exists()
    with Sandbox.up(place, nodes=1) as second:
        assert second.run(["sinfo", "-h", "-o", "%D"]).strip() == "1"
    assert traces(place) == []


def test_a_second_up_in_the_same_place_is_refused_and_harms_nothing(place: Path) -> None:
    with Sandbox.up(place, nodes=1) as first:
        with pytest.raises(AlreadyRunning, match="a sandbox is up in"):
            Sandbox.up(place, nodes=2)
        assert first.run(["srun", "echo", "well"]) == "well\n"


def test_of_two_ups_at_the_same_moment_one_wins(place: Path) -> None:
    ends: list[object] = []

    def one() -> None:
        try:
            ends.append(Sandbox.up(place, nodes=1))
        except AlreadyRunning as error:
            ends.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    [winner] = [end for end in ends if isinstance(end, Sandbox)]
    assert len(ends) == 2 and winner.run(["srun", "echo", "well"]) == "well\n"
    winner.down()
    # The one that made the directory may have been the loser: then it stays, empty.
    assert [trace for trace in traces(place) if trace != str(place)] == []
    assert not place.exists() or not any(place.iterdir())


def test_a_directory_with_other_things_in_it_is_not_touched(place: Path) -> None:
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "mine").touch()
    with pytest.raises(Refused, match=r"holds other things \(bin\)"):
        Sandbox.up(place)
    with pytest.raises(NotFound, match="there is no sandbox in"):
        Sandbox.remains(place)
    assert sorted(place.rglob("*")) == [place / "bin", place / "bin" / "mine"]


def test_what_people_put_beside_its_files_stays(place: Path) -> None:
    sandbox = Sandbox.up(place, nodes=1)
    (place / "job.sh").write_text("mine")
    sandbox.down()
    assert [path.name for path in place.iterdir()] == ["job.sh"]
    assert traces(place) == [str(place)]


def test_a_directory_that_was_there_before_is_emptied_and_stays(place: Path) -> None:
    place.mkdir()
    Sandbox.up(place, nodes=1).down()
    assert list(place.iterdir()) == []


@pytest.mark.threat(
    "A sandbox is to be made in a directory that others may change.",
    "The command refuses before it makes anything.",
)
def test_a_hostile_directory_is_refused_before_anything_is_made(short_tmp: Path, slurm_installed: None) -> None:
    before = sorted(short_tmp.iterdir())
    for name in ("a b", "a,b", "x" * 70, "a%n"):
        with pytest.raises(UsageError, match="cannot live in"):
            Sandbox.up(short_tmp / name)
    (short_tmp / "link").symlink_to(short_tmp / ("y" * 70))
    with pytest.raises(UsageError, match="characters are too many"):
        Sandbox.up(short_tmp / "link")
    (short_tmp / "link").unlink()
    assert sorted(short_tmp.iterdir()) == before


def test_taking_it_down_twice_is_fine(place: Path) -> None:
    sandbox = Sandbox.up(place, nodes=1)
    sandbox.down()
    sandbox.down()
    assert traces(place) == []


def test_a_sandbox_is_the_same_for_whoever_knows_its_directory(place: Path) -> None:
    with Sandbox.up(place, nodes=2, cpus=8, overrides=("MaxArraySize=50",)) as first:
        assert Sandbox.at(place) == first
        assert first.shape == Shape(nodes=2, cpus=8, overrides=("MaxArraySize=50",))
