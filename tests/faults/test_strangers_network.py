"""Another account on the node speaks to the ports of a run, and looks for its memory. Real accounts, real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import smtplib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.drill.mailbox import Mailbox
from ftsupervise.ranks import protocol
from ftsupervise.ranks.protocol import Datagram, RankExit, Seal
from ftsupervise.replicas.record import LighthouseRecord, lighthouse_address
from ftsupervise.replicas.table import QuorumPage, read_quorum, write_quorum
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_json, write_json
from ftsupervise.snapshots import exchange, room
from ftsupervise.snapshots.exchange import CopyServer
from ftsupervise.snapshots.ring import CopyOrder
from tests.neighbours.stranger import as_stranger, become_stranger, one_by_one
from tests.story.agent_scene import Stage

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

Until = Callable[..., Any]
ADA, EVE = "daemon", "games"
FLOOD = 2.0  # seconds
# The node of one account's run: a folder in memory with a rank's file, the port for copies, and its key on its standard input.
NODE = """
import sys
from ftsupervise.snapshots import room
from ftsupervise.snapshots.slots import SlotRoom, create_slots
from ftsupervise.snapshots.exchange import CopyServer
from ftsupervise.snapshots.ring import CopyOrder
key, folder = bytes.fromhex(sys.stdin.readline()), room.new_folder("77")
lock = room.make(folder, "n1")
assert lock is not None
place = room.node_folder(folder, "n1")
file = create_slots(room.rank_file(place, 0), 2, 0, SlotRoom(2, 4096, 4096))
server = CopyServer(place, key, lambda: CopyOrder(0, 0))
print(folder, server.port, flush=True)
sys.stdin.readline()
room.remove_leftovers()
print(*room.ranks_in(sys.argv[1]), flush=True)
sys.stdin.readline()
room.remove(folder, "n1")
"""
# The other account tries this on that folder and that port; it prints a line for each try, with its outcome.
ATTACK = """
import os, sys
from ftsupervise.snapshots import room
from ftsupervise.snapshots.slots import SnapshotId, open_slots
from ftsupervise.snapshots.exchange import fetch
folder, port, planted = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mine = room.new_folder("77")
room.make(mine, "n1")
place = room.node_folder(mine, "n1")
def tried(words, act):
    try:
        print(words, "done", act())
    except Exception as error:
        print(words, type(error).__name__, error)
tried("list", lambda: os.listdir(folder))
tried("open", lambda: open_slots(folder + "/n1/rank-0", write=True))
tried("key", lambda: open(f"/proc/{sys.argv[4]}/environ").read())
tried("memory", lambda: open(f"/proc/{sys.argv[4]}/mem", "rb"))
tried("fetch", lambda: fetch(place, 0, SnapshotId(1, 1), "127.0.0.1", port, os.urandom(32)))
tried("make", lambda: room.make(folder, "n2"))
room.remove(folder, "n1")
room.remove_leftovers()
room.remove(mine, "n1")
os.makedirs(planted + "/n1")
os.close(os.open(planted + "/n1/rank-0", os.O_CREAT | os.O_WRONLY))
os.chmod(planted, 0o777)
"""


def forked(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return pid


@pytest.fixture
def stage() -> Iterator[Stage]:
    one = Stage()
    try:
        yield one
    finally:
        one.close()


def ports_of_all() -> set[int]:
    """Every UDP port of this host, as any account may list them."""
    found = set[int]()
    for table in ("/proc/net/udp", "/proc/net/udp6"):
        for line in Path(table).read_text("utf-8").splitlines()[1:]:
            found.add(int(line.split()[1].rpartition(":")[2], 16))
    return found


@pytest.mark.threat(
    "An account on the node lists all UDP ports, and sends forged reports, deaths, questions and ends to each for "
    "seconds; it looks for the key and for the pages.",
    "The key stands in memory and in an environment that only the owner may read. Nothing is believed, nobody obeys, "
    "and the steps still arrive.",
)
def test_a_flood_of_forged_datagrams_at_every_port_is_neither_believed_nor_keeps_a_step_from_arriving(
    stage: Stage, until: Until
) -> None:
    agent, rank = stage.agent(), stage.rank(0)
    until(lambda: stage.step(0))
    address = stage.pulses.nodes[b"node-1"].address
    assert address is not None

    def attack() -> None:
        for path in (f"/proc/{agent.pid}/environ", f"/proc/{agent.pid}/mem"):  # the key
            with pytest.raises(PermissionError):
                Path(path).read_bytes()
        with pytest.raises(PermissionError):
            os.listdir(stage.base)
        assert {stage.port, address[1]} <= ports_of_all()
        seal, exits = (
            Seal(bytes(32)),
            protocol.pack_exits([RankExit(0, "", rank.pid, 0.0, -9, False, False, True)], 0.0),
        )
        bodies = [
            (protocol.BYE, b""),
            (protocol.ASK, b"kill /tmp"),
            (protocol.COPY, b"x" * 40),
            (protocol.EXIT, exits),
            (protocol.STATES, b"\0" * 200),
            (protocol.HELLO, b"n" * 200),
        ]
        sent = [seal.pack(Datagram(kind, 0, 1, 1, 1, 1 << 40, b"node-1", body)) for kind, body in bodies]
        over = time.monotonic() + FLOOD
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as one:
            while time.monotonic() < over:
                for data in (*sent, os.urandom(1400), b""):
                    for port in (stage.port, address[1]):
                        protocol.send_datagram(one, data, ("::1", port))

    before = stage.step(0)
    as_stranger(attack)
    until(lambda: stage.step(0) > before + 20, "its steps still arrive")
    assert stage.pulses.dropped["forged or damaged"] > 100
    assert stage.pulses.deaths() == []
    assert agent.poll() is None and rank.poll() is None


@pytest.mark.threat(
    "Another account has a run on the same node, finds the folder and the port of your snapshots, asks for one, "
    "cleans up, and lays a folder under your name.",
    "It reads, makes and removes nothing of yours. Each run has a key and a folder of its own, and a folder of "
    "another account is neither read nor removed.",
)
def test_the_snapshots_of_two_accounts_on_one_node_know_nothing_of_each_other(python: str) -> None:
    """Eve knows the folder and the port of ada's run: both can be seen. She has the source, and her own run beside it."""
    planted = f"/dev/shm/ftsupervise-snapshots-{user(ADA)}-77-{os.urandom(8).hex()}"
    try:
        with acting(ADA, [python, "-c", NODE, f"{planted}/n1"], stdin=subprocess.PIPE) as node:
            assert node.stdin is not None and node.stdout is not None
            print(os.urandom(32).hex(), file=node.stdin, flush=True)
            folder, port = node.stdout.readline().split()
            with acting(EVE, [python, "-c", ATTACK, folder, port, planted, str(node.pid)]) as attack:
                said, errors = attack.communicate(timeout=60)
            assert attack.returncode == 0, errors
            ends = dict(line.split(" ", 1) for line in said.splitlines())
            assert all(ends[word].startswith("PermissionError") for word in ("list", "open", "key", "memory")), said
            assert re.match(r"ChannelBroken .* does not know the key of this run", ends["fetch"]), said
            assert ends["make"] == "done None", "no folder in hers"
            assert (Path(folder) / "n1" / "rank-0").stat().st_uid == user(ADA), "and it is still there"
            assert os.listdir(Path(folder)) == ["n1"]
            print(file=node.stdin, flush=True)
            assert node.stdout.readline() == "\n", "what eve laid under ada's name is not read"
            assert os.listdir(planted) == ["n1"], "nor removed"
            print(file=node.stdin, flush=True)
            assert node.wait(60) == 0
        assert not Path(folder).exists()
    finally:
        shutil.rmtree(planted, ignore_errors=True)


@pytest.mark.threat(
    "Somebody who may write `replicas/` puts a lighthouse or a quorum of theirs, or a link, in the place of the run's.",
    "A page of another account is not believed, so no group goes there.",
)
def test_no_lighthouse_and_no_quorum_of_a_stranger_is_believed_where_he_may_write(top: Path) -> None:
    """What the pages say is where the groups of a run meet, and whose weights they copy."""
    home = top / "replicas"
    home.mkdir()
    write_json(home / "lighthouse.json", LighthouseRecord(address="http://10.0.0.1:29510", host="10.0.0.1", port=29510))
    write_quorum(RunDir(top), QuorumPage())
    assert lighthouse_address(home) == "http://10.0.0.1:29510" and read_quorum(RunDir(top)) is not None
    own = sorted(home.iterdir())
    home.chmod(0o777)

    def exchange() -> None:
        for page in own:
            text = page.read_text("utf-8").replace("10.0.0.1", "6.6.6.6")
            page.rename(page.with_suffix(".old"))
            page.write_text(text, encoding="utf-8")

    as_stranger(exchange)
    for mode in (0o777, 0o1777, 0o755):
        home.chmod(mode)
        assert lighthouse_address(home) == "" and read_quorum(RunDir(top)) is None, oct(mode)
    home.chmod(0o777)

    def laid_as_link(page: Path) -> None:
        page.unlink()
        page.symlink_to(page.with_suffix(".old"))

    as_stranger(one_by_one(*(partial(laid_as_link, page) for page in own)))
    home.chmod(0o755)
    assert lighthouse_address(home) == "" and read_quorum(RunDir(top)) is None, "nor through a link of his"


def user(name: str) -> int:
    import pwd

    return pwd.getpwnam(name).pw_uid


def acting(who: str, argv: list[str], **more: Any) -> subprocess.Popen[str]:
    env = {"PATH": os.environ["PATH"], "HOME": "/"}
    return subprocess.Popen(
        argv, user=who, group=who, extra_groups=[], cwd="/", env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **more,
    )  # fmt: skip


@pytest.mark.threat(
    "Another account makes connection after connection to the port where a node takes snapshots, and says nothing on any.",
    "The oldest that has proven nothing goes for each that is too many, and a node of the run is let in.",
)
def test_a_flood_of_connections_holds_few_threads_and_lets_a_node_in() -> None:
    folder, key = room.new_folder("77"), os.urandom(32)
    assert room.make(folder, "n1") is not None
    server = CopyServer(room.node_folder(folder, "n1"), key, lambda: CopyOrder(0, 0))
    began = time.monotonic()

    def flood() -> None:
        become_stranger()
        mute: list[socket.socket] = []
        while time.monotonic() < began + 60:
            one = socket.socket()
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(("127.0.0.1", server.port))
            mute.append(one)
            if len(mute) > 900:
                mute.pop(0).close()
            time.sleep(0.001)

    floods = [forked(flood) for _ in range(3)]
    most, let_in = 0, 0
    try:
        while time.monotonic() < began + 2 * FLOOD or (let_in <= 10 and time.monotonic() < began + 60):
            exchange.connect("127.0.0.1", server.port, key).close()
            most, let_in = max(most, len(os.listdir("/proc/self/task"))), let_in + 1
            time.sleep(0.02)
    finally:
        for one in floods:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
        room.remove(folder, "n1")
    assert let_in > 10
    assert most < 150, "each connection of a stranger has a thread, of which a few may be about to end"


# Speaks as srun does: it runs the task. Another account of the node has seen the port first.
SRUN = """#!{python} -I
import subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith(("--overlap", "--nodes=", "--ntasks"))]
FLOOD = '''import signal, socket, sys
held = []
for _ in range(64):
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
signal.pause()'''
he = subprocess.Popen([sys.executable, "-Ic", FLOOD, *words[-2:]], user={eve}, group={eve}, extra_groups=[],
                      cwd="/", stdout=subprocess.PIPE)
he.stdout.readline()
subprocess.run(words)
he.kill()
"""


@pytest.mark.threat(
    "Another account fills the queue of the port at which `doctor --probe` sees whether the nodes reach each other.",
    "Each connection is closed at once, and the nodes' own come in.",
)
def test_no_flood_of_a_stranger_makes_the_doctor_say_that_nodes_do_not_reach_each_other(
    top: Path, until: Until, python: str
) -> None:
    seen, programs = top / "seen", top / "bin"
    for folder in (seen, programs):
        folder.mkdir()
    (programs / "srun").write_text(SRUN.format(python=python, eve=user(EVE)))
    (programs / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "FTSUPERVISE_DEADLINE": str(time.time() + 60)}
    env |= {"SLURM_JOB_NODELIST": "localhost,n2", "SLURMD_NODENAME": "n2"}
    words = [sys.executable, "-m", "ftsupervise.doctor.inside", str(seen), str(top / "run"), "", "2"]
    with subprocess.Popen(words, env=env) as job:
        page = until(lambda: read_json(seen / "node-n2.json"), 30)
        shutil.rmtree(seen)
        assert job.wait(10) == 0
    assert page["sees"] and page["reached"] == ""


@pytest.mark.threat(
    "Another account makes connection after connection to the mailbox of a drill, so that the drill can open no file.",
    "Of those that have not named its domain the oldest of too many goes, and the watch's mail is taken.",
)
def test_a_flood_of_connections_to_the_mailbox_takes_no_descriptors_of_the_drill() -> None:
    def flood(port: int) -> None:
        become_stranger()
        mute: list[socket.socket] = []
        while True:
            mute.append(socket.socket())
            mute[-1].setblocking(False)
            mute[-1].connect_ex(("127.0.0.1", port))
            if len(mute) > 900:
                mute.pop(0).close()
            time.sleep(0.001)

    with Mailbox() as box:
        he = forked(partial(flood, box.port))
        try:
            time.sleep(FLOOD)
            assert len(os.listdir("/proc/self/fd")) < 200
            with smtplib.SMTP("127.0.0.1", box.port, timeout=10) as watch:
                watch.sendmail("a@b.org", [f"mailbox@{box.domain}"], "Subject: went on\n\n")
            assert [mail.subject for mail in box.mails] == ["went on"]
        finally:
            os.kill(he, signal.SIGKILL)
            os.waitpid(he, 0)
