"""A sandbox whose nodes are hosts of their own: addresses and host names, a pulled cable, a power cut that no peer hears."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import Error, NotFound, Refused, SchedulerUnavailable
from ftsupervise.host.processes import living, process
from ftsupervise.sandbox import Sandbox
from ftsupervise.sandbox.cluster import Network

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
]

Until = Callable[..., Any]
Make = Callable[..., Sandbox]

WHERE = """
import os, socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.connect((os.environ["PEER"], 9))
print(socket.gethostname(), link.getsockname()[0], socket.gethostbyname(socket.gethostname()))
"""

# A listener on one host, a peer on another: the peer writes down what it hears of the other end, and when.
TALK = """
import os, pathlib, socket, sys, time
role, other, port, note = sys.argv[1:]
if role == "listen":
    with socket.create_server(("", int(port))) as server:
        pathlib.Path(note).write_text("listens")
        held = server.accept()[0]
        time.sleep(300)
for _ in range(200):
    try:
        link = socket.create_connection((other, int(port)), 20)
        break
    except ConnectionRefusedError:  # the listener is not there yet
        time.sleep(0.1)
with link:
    pathlib.Path(note).write_text("connected")
    while True:
        if pathlib.Path(note + ".say").exists():
            link.settimeout(0.1)
            try:
                link.send(b"x")
            except OSError as error:
                pathlib.Path(note).write_text(type(error).__name__)
                break
        link.settimeout(0.1)
        try:
            heard = link.recv(1)
        except TimeoutError:
            continue
        except OSError as error:
            pathlib.Path(note).write_text(type(error).__name__)
            break
        pathlib.Path(note).write_text("end of stream" if not heard else "bytes")
        break
"""


def traces(directory: Path) -> list[str]:
    """Namespaces and interfaces of the sandbox that was in ``directory``."""
    network = Network(directory)
    there = [name for name in os.listdir("/sys/class/net") if name.startswith(network.interface)]
    return [*network.names(), *there, *(["memory"] if network.memory.exists() else [])]


def submit(sandbox: Sandbox, node: str, *words: str) -> str:
    command = ["sbatch", "--parsable", "-o", "/dev/null", "-w", node, "--mem=100", "--wrap"]
    return sandbox.run([*command, " ".join(words)]).strip()


def connected(sandbox: Sandbox, folder: Path, until: Until, *nodes: str) -> list[Path]:
    """Jobs on node-0 that are connected to a job on each of ``nodes``. Returns the files in which they write what they
    hear."""
    (folder / "talk.py").write_text(TALK)
    folder.chmod(0o755)
    python = f"{sys.executable} {folder}/talk.py"
    notes = [folder / f"peer-of-{node}" for node in nodes]
    for node, note in zip(nodes, notes, strict=True):
        submit(sandbox, node, python, "listen", node, "4000", str(folder / f"{node}-listens"))
        submit(sandbox, "node-0", python, "connect", node, "4000", str(note))
    for note in notes:
        until(lambda one=note: one.exists() and one.read_text() == "connected", "the connection")
    return notes


def test_each_node_has_a_host_name_and_an_address_of_its_own(make_sandbox: Make) -> None:
    sandbox = make_sandbox(nodes=3, hosts=True)
    env = {**sandbox.env(), "PEER": f"{sandbox.subnet}.1"}
    done = subprocess.run(
        ["srun", "-N3", sys.executable, "-c", WHERE], env=env, capture_output=True, text=True, timeout=60
    )
    # the own name leads to the loopback interface, as on Debian: it is no address for another host
    assert sorted(done.stdout.splitlines()) == [f"node-{n} {sandbox.subnet}.{n + 2} 127.0.1.1" for n in range(3)], done
    assert Path("/etc/hosts").read_text().count("node-1") == 0, "this machine's own file is as it was"


def test_a_batch_job_starts_ranks_on_all_hosts_which_reach_each_other_by_name(
    make_sandbox: Make, tmp_path: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=3, hosts=True)
    out = tmp_path / "out"
    names = "getent ahostsv4 node-0 node-1 node-2 | cut -d' ' -f1 | sort -u | wc -l"
    sandbox.run(["sbatch", "-N3", "-o", str(out), "--wrap", f'srun sh -c "hostname; {names}" && echo well'])
    until(lambda: out.exists() and "well" in out.read_text(), "the job")
    assert sorted(out.read_text().split()) == ["3", "3", "3", "node-0", "node-1", "node-2", "well"]


def test_a_node_whose_cable_is_pulled_lives_on_unreached_until_it_is_in_again(
    make_sandbox: Make, tmp_path: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=2, hosts=True)
    slurmd = (f"{sandbox.subnet}.3", sandbox.port + 2)

    def answers() -> bool:
        try:
            socket.create_connection(slurmd, 0.5).close()
        except OSError:
            return False
        return True

    [note] = connected(sandbox, tmp_path, until, "node-1")
    [pid] = [m.process.pid for m in sandbox.processes() if m.node == "node-1" and "listen" in words(m.process.pid)]
    assert answers()
    sandbox.node("node-1", "cut")
    assert not answers() and process(pid), "what runs there lives on"
    assert note.read_text() == "connected", "and the other end has heard nothing"
    sandbox.node("node-1", "plug")
    until(answers, "the node again")
    assert note.read_text() == "connected"


@pytest.mark.slow
def test_slurm_calls_a_cut_node_down_and_takes_it_back(make_sandbox: Make, until: Until) -> None:
    sandbox = make_sandbox(nodes=2, hosts=True, slurmd_timeout=1)

    def word() -> str:
        return sandbox.run(["sinfo", "-h", "-n", "node-1", "-o", "%T"]).strip()

    typed = [sys.executable, "-m", "ftsupervise", "sandbox", "node", "node-1", "cut"]
    done = subprocess.run(typed, env=sandbox.env(), capture_output=True, text=True, timeout=60)
    undo = f"ftsupervise sandbox node node-1 plug --dir {sandbox.directory}"
    assert done.stdout == f"node-1: its network cable is out; to undo it: {undo}\n", done
    until(lambda: word().endswith("*"), "a node that does not answer")
    until(lambda: word().startswith("down"), "Slurm's verdict")
    with pytest.raises(SchedulerUnavailable, match=r"not ready within 1 s: .*node-1 down\*") as caught:
        sandbox.wait_ready(1)
    assert f"firewall of this machine may refuse what comes in at {sandbox.network.interface}" in caught.value.hint
    sandbox.node("node-1", "plug")
    until(lambda: word() == "idle", "the node again")
    assert sandbox.run(["srun", "-N2", "echo", "well"]) == "well\nwell\n"


def words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:  # gone
        return ""


def test_a_power_cut_closes_no_connection_while_the_end_of_a_process_does(
    make_sandbox: Make, tmp_path: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=3, hosts=True)
    silent, told = connected(sandbox, tmp_path, until, "node-1", "node-2")
    sandbox.node("node-1", "crash")
    assert not [m for m in sandbox.processes() if m.node == "node-1"]
    [other] = [m.process.pid for m in sandbox.processes() if m.node == "node-2" and "listen" in words(m.process.pid)]
    os.kill(other, signal.SIGKILL)
    until(lambda: told.read_text() == "end of stream", "the end of a process to be heard")
    assert silent.read_text() == "connected", "the power cut is not"
    with pytest.raises(NotFound, match="node-1 has crashed and is not running"):
        sandbox.node("node-1", "plug")

    sandbox.node("node-1", "start")
    sandbox.wait_ready(60)
    assert silent.read_text() == "connected", "nor when the power is back: nobody there knows the connection"
    silent.with_name(f"{silent.name}.say").touch()
    until(lambda: silent.read_text() in ("ConnectionResetError", "BrokenPipeError"), "the new kernel's answer")


def test_a_power_cut_ends_also_what_forgot_where_it_came_from(make_sandbox: Make, until: Until) -> None:
    sandbox = make_sandbox(nodes=2, hosts=True)
    sandbox.run(["srun", "-w", "node-1", "sh", "-c", "(env -i setsid sleep 319 >/dev/null 2>&1 &)"])

    def there() -> list[int]:
        return [m.process.pid for m in sandbox.processes() if m.process.name == "sleep" and m.node == "node-1"]

    [pid] = until(there, "the sleeper")
    sandbox.node("node-1", "crash")
    until(lambda: (seen := process(pid)) is None or seen.gone, "its end")


def test_a_power_cut_takes_the_memory_of_a_host_which_a_restarted_slurmd_finds_again(make_sandbox: Make) -> None:
    sandbox = make_sandbox(nodes=2, hosts=True)
    name = f"kept-{os.getpid()}"

    def on(node: str, *command: str) -> str:
        return sandbox.run(["srun", "-w", node, *command])

    on("node-1", "touch", f"/dev/shm/{name}")
    assert name not in on("node-0", "ls", "/dev/shm") and not Path("/dev/shm", name).exists(), "each has its own"
    sandbox.node("node-1", "stop")
    sandbox.node("node-1", "start")
    sandbox.wait_ready(60)
    assert on("node-1", "ls", "/dev/shm").split() == [name]
    sandbox.node("node-1", "crash")
    sandbox.node("node-1", "start")
    sandbox.wait_ready(60)
    assert on("node-1", "ls", "/dev/shm") == ""


@pytest.mark.threat(
    "Another account makes the folder in `/dev/shm` that a sandbox with hosts would make.",
    "`up --hosts` refuses and names the folder. Nothing in it is touched.",
)
def test_a_folder_of_its_name_in_memory_that_a_stranger_made_is_refused_and_left_alone(
    slurm_installed: None, hosts_allowed: None, short_tmp: Path
) -> None:
    place = short_tmp / "laid"
    laid = Network(place).memory
    (laid / "his").mkdir(parents=True)
    os.chown(laid, 65534, 65534)
    try:
        with pytest.raises(Refused, match=f"{laid} cannot be made: File exists"):
            Sandbox.up(place, nodes=1, hosts=True)
        assert (laid / "his").is_dir() and not Network(place).names() and not place.exists()
    finally:
        shutil.rmtree(laid)


def test_taken_down_it_leaves_no_namespace_and_no_interface(make_sandbox: Make, short_tmp: Path) -> None:
    sandbox = make_sandbox(nodes=2, hosts=True)
    other = make_sandbox(nodes=2, hosts=True)
    assert sandbox.subnet != other.subnet and len(traces(sandbox.directory)) == 5
    sandbox.node("node-1", "crash")
    sandbox.down()
    assert traces(sandbox.directory) == []
    assert len(traces(other.directory)) == 5
    (other.layout.record).unlink()  # without its record it is found by its directory
    Sandbox.remains(other.directory).down()
    assert traces(other.directory) == []


def test_an_up_that_fails_leaves_no_namespace(slurm_installed: None, hosts_allowed: None, short_tmp: Path) -> None:
    place = short_tmp / "failed-hosts"
    with pytest.raises(Error, match="slurmd of node-0 ended"):
        Sandbox.up(place, nodes=2, hosts=True, overrides=("TaskPlugin=task/nonsense",))
    assert traces(place) == [] and not place.exists()


OWNER = """
import sys, time
from ftsupervise.sandbox import temporary
with temporary(sys.argv[1], nodes=3, hosts=True):
    open(sys.argv[2], "w").close()
    time.sleep(300)
"""


@pytest.fixture
def owner() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", OWNER, *words]))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait(30)


@pytest.mark.fault(
    "The owner of a sandbox with hosts is killed while its network is coming up",
    "no namespace and no interface stays",
)
@pytest.mark.parametrize("moment", ["first namespace", "first slurmd", "up"])
def test_when_its_owner_is_killed_its_keeper_removes_the_hosts(
    slurm_installed: None,
    hosts_allowed: None,
    owner: Callable[..., subprocess.Popen[bytes]],
    short_tmp: Path,
    tmp_path: Path,
    until: Until,
    moment: str,
) -> None:
    place, note = short_tmp / f"owned-{len(moment)}", tmp_path / "up"
    mine = owner(str(place), str(note))
    come = {
        "first namespace": lambda: traces(place),
        "first slurmd": lambda: [p for p in living() if p.name == "slurmd" and str(place) in words(p.pid)],
        "up": note.exists,
    }[moment]
    until(come, moment)
    mine.kill()
    mine.wait(30)
    until(lambda: not traces(place) and not place.exists(), "the end of all of it")


def test_an_interface_of_its_name_that_is_another_programs_is_refused_and_left_alone(
    slurm_installed: None, hosts_allowed: None, short_tmp: Path
) -> None:
    place = short_tmp / "foreign"
    name = Network(place).interface
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True, timeout=30)
    try:
        with pytest.raises(Refused, match=f"an interface {name}, which is not this sandbox's"):
            Sandbox.up(place, nodes=1, hosts=True)
        assert Path("/sys/class/net", name).exists() and not place.exists()
    finally:
        subprocess.run(["ip", "link", "del", name], check=False, timeout=30)


def test_without_hosts_there_is_no_cable_to_pull(make_sandbox: Make) -> None:
    sandbox = make_sandbox(nodes=1)
    with pytest.raises(Refused, match="no network cable of its own: this sandbox was made without --hosts"):
        sandbox.node("node-0", "cut")


ORDINARY = """
import os
from ftsupervise.errors import NotPermitted
from ftsupervise.sandbox import cluster
os.setuid(65534)
try:
    cluster.require_hosts()
except NotPermitted as error:
    print(error.message)
"""


def test_an_ordinary_account_is_told_that_hosts_need_root() -> None:
    done = subprocess.run([sys.executable, "-c", ORDINARY], capture_output=True, text=True, timeout=30)
    assert done.stdout == "a sandbox with hosts needs root: it makes network namespaces and interfaces\n", done.stderr
