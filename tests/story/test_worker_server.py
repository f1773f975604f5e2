"""PyTorch's worker server of a rank is asked, and nobody else's: real sockets, with servers that answer in many ways.

What speaks here in place of torch's own server speaks as it does; that one is asked in test_torch_worker_server.py.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from ftsupervise.diagnosis.gather import of_pages
from ftsupervise.ranks.evidence import NotAsked, RankProcess, WorkerServer, server_of, take
from ftsupervise.rundir.heartbeat_page import ENV_PAGES, ENV_SERVERS, server_note

SERVER = """
import encodings.idna, http.server, os, socket, sys, time
where, mood, uid = sys.argv[1:4]
host = sys.argv[5]
class One(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_POST(self):
        name = self.path.rpartition("/")[2]
        if mood == "silent":
            time.sleep(60)
        body = {"ping": b"pong", "fr_trace_json": DUMP, "wait_counter_values": b'{"a": 1}'}.get(name)
        if mood == "evil" and name == "dump_nccl_trace_pickle":
            body = bytes.fromhex(sys.argv[4])
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        if mood == "endless" and name != "ping":
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 65536)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body if mood == "slow" else (body,):
            self.wfile.write(bytes([byte]) if mood == "slow" else byte)
            time.sleep(0.4 if mood == "slow" else 0)
    protocol_version = "HTTP/1.1"
DUMP = b'{"version": "2.10", "entries": [], "pg_config": {}}'
if where.isdigit():
    os.setuid(int(uid) or os.getuid())
    class V6(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6
    kind = V6 if ":" in host else http.server.ThreadingHTTPServer
    one = kind((host, int(where)), One)
    print(one.server_port, flush=True)
else:
    one = http.server.ThreadingHTTPServer(where, One, bind_and_activate=False)
    one.socket = socket.socket(socket.AF_UNIX)
    one.socket.bind(where)
    os.setuid(int(uid) or os.getuid())  # whose it is is seen from who listens
    one.server_activate()
    One.address_string = lambda self: "rank"
    print(0, flush=True)
one.serve_forever()
"""
Serve = Callable[..., WorkerServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    begun: list[Popen[str]] = []

    def one(
        mood: str = "well", *, tcp: bool = False, uid: int = 0, more: str = "", host: str = "127.0.0.1", port: int = 0
    ) -> WorkerServer:
        where = str(port) if tcp else f"{tmp_path}/{len(begun)}.sock"
        words = [sys.executable, "-c", SERVER, where, mood, str(uid), more, host]
        env = {**os.environ, ENV_PAGES: f"{tmp_path}/pages"}
        begun.append(Popen(words, stdout=PIPE, text=True, cwd=tmp_path, env=env))
        stdout = begun[-1].stdout
        assert stdout is not None
        port = int(stdout.readline())
        return WorkerServer(begun[-1].pid, "" if tcp else where, port)

    yield one
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("tcp", [False, True])
def test_it_is_asked_at_its_socket_and_at_its_port(serve: Serve, tcp: bool) -> None:
    server = serve(tcp=tcp)
    assert server.ask("ping", 5.0) == b"pong"
    assert server.dump(5.0).startswith(b'{"version": "2.10"'), "the dump of a build without NCCL"
    with pytest.raises(LookupError):
        server.ask("no_such_handler", 5.0)


@pytest.mark.threat(
    "Another process of the account listens where a rank's worker server should", "it is not asked for anything"
)
@pytest.mark.parametrize("tcp", [False, True])
def test_another_process_at_its_address_is_not_asked(serve: Serve, tcp: bool) -> None:
    server = serve(tcp=tcp)
    with pytest.raises(NotAsked):
        server._replace(pid=os.getpid()).ask("ping", 5.0)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another account")
@pytest.mark.threat(
    "Another account listens where a rank's worker server should", "its uid is seen, and nothing is asked or believed"
)
@pytest.mark.parametrize("tcp", [False, True])
def test_another_accounts_socket_is_not_believed(serve: Serve, tcp: bool) -> None:
    with pytest.raises(NotAsked):
        serve(tcp=tcp, uid=65534).ask("ping", 5.0)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another account")
@pytest.mark.threat(
    "A rank's worker server listens at one address of its host (::1, what `localhost` may mean), and another account at the "
    "same port of another (127.0.0.1)",
    "the rank's own is asked",
)
def test_at_a_port_where_two_listen_the_ranks_own_is_asked(serve: Serve) -> None:
    own = serve(tcp=True, host="::1")
    serve("evil", tcp=True, uid=65534, port=own.port, more=b"of a stranger".hex())
    assert own.dump(5.0).startswith(b'{"version": "2.10"')


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_a_server_that_listens_everywhere_is_asked(serve: Serve, host: str) -> None:
    assert serve(tcp=True, host=host).ask("ping", 5.0) == b"pong"


@pytest.mark.threat(
    "A worker server answers without an end, or a byte at a time", "the answer is given up at its bound"
)
@pytest.mark.parametrize("mood", ["silent", "slow", "endless"])
def test_an_answer_has_a_bound_in_time_and_size(serve: Serve, mood: str) -> None:
    server, began = serve(mood), time.monotonic()
    with pytest.raises(OSError):
        server.ask("fr_trace_json", 1.5, 1_000_000)
    assert time.monotonic() - began < 15


def test_the_evidence_of_a_rank_has_what_its_server_says_and_the_dump(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    page = evidence_of(server, tmp_path)
    assert "it answers, so the process is not stopped" in page and 'wait counters: {"a": 1}' in page
    assert (tmp_path / "evidence" / "flight" / "rank_3").read_bytes().startswith(b'{"version"')
    assert "== load" in next((tmp_path / "evidence").glob("node-*.txt")).read_text()
    os.kill(server.pid, signal.SIGSTOP)
    assert "not asked, the process is stopped" in evidence_of(server, tmp_path)


class Evil:
    def __init__(self, makes: Path) -> None:
        self.makes = makes

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.makes),)


@pytest.mark.threat(
    "A worker server's dump is a pickle that runs a program", "no class in it is loaded, and that is said"
)
def test_a_dump_that_would_run_a_program_is_kept_and_not_loaded(serve: Serve, tmp_path: Path) -> None:
    evidence_of(serve("evil", more=pickle.dumps(Evil(tmp_path / "loaded")).hex()), tmp_path)
    _, flight, unseen = of_pages(tmp_path / "evidence", lambda: None)
    assert flight is None and "which is not loaded" in unseen[0]
    assert not (tmp_path / "loaded").exists()


def evidence_of(server: WorkerServer, folder: Path) -> str:
    """The page of rank 3, whose guard has left a note of where its server listens."""
    into = folder / "evidence"
    pages = folder / "pages"
    pages.mkdir(exist_ok=True)
    server_note(pages, 3).write_text(server.path)
    assert server_of(server.pid, 3, str(pages), {}) == server
    take([RankProcess(3, server.pid)], into, "here")
    return (into / "rank-3.txt").read_text()


def test_the_address_is_that_of_the_environment_or_of_the_guards_note(tmp_path: Path) -> None:
    mine = os.getpid()
    ours, torchs = ENV_SERVERS
    assert server_of(mine, 0, "", {}) is None
    assert server_of(mine, 0, "", {torchs: "w.sock"}) == WorkerServer(mine, f"{Path.cwd()}/w.sock")
    assert server_of(mine, 0, "", {torchs: "/a", ours: "127.0.0.1:4711"}) == WorkerServer(mine, port=4711)
    server_note(tmp_path, 0).write_text("/b/w0.sock")
    assert server_of(mine, 0, str(tmp_path), {torchs: "/a"}) == WorkerServer(mine, "/b/w0.sock")
    assert server_of(mine, 0, "", {torchs: "/" + "x" * 200}) is None, "no socket can have that name"
    assert server_of(mine, 0, "", {ours: "10.0.0.1:80"}) == WorkerServer(mine, f"{Path.cwd()}/10.0.0.1:80")
    with pytest.raises(OSError):
        WorkerServer(mine, f"{tmp_path}/nobody.sock").ask("ping", 1.0)
