"""Messages and their secrets are for the receivers of the settings alone: not for the account that listens at their port while
they are down, nor for a proxy on the way to this very machine; and no password of ~/.netrc is for them. Real accounts, real
sockets."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.record import record
from tests.neighbours.slack import TOKEN, SlackServer
from tests.neighbours.smtp import MailServer
from tests.neighbours.stranger import EVE, GROUP, as_one, become_stranger
from tests.story.alerting_scene import (
    RUN,
    T0,
    bad,
    bot,
    email,
    good,
    journal_in,
    mailbox,
    minutes,
    secret,
    settings,
    tick,
    type_in,
)
from tests.story.forged import generation, lay
from tests.story.test_alerts_webhook import Listener, listener  # noqa: F401 - a fixture

as_others = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")


@contextmanager
def theirs(host: str, port: int = 0) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Another account listens there: the port, and what it has heard so far."""
    ours, ends = os.pipe2(os.O_NONBLOCK)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, port), family=family
    ) as first:  # its port; the account's own socket comes after it
        port = first.getsockname()[1]
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_stranger()
            with socket.create_server((host, port), family=family) as own:
                os.write(begun, b"1")
                while True:
                    os.write(ends, b"connected;" + own.accept()[0].recv(1 << 16))
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"1"

        def heard() -> bytes:
            try:
                return os.read(ours, 1 << 16)
            except BlockingIOError:
                return b""

        yield port, heard
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (ours, ends, ready, begun):
            os.close(fd)


def hook(port: int, folder: Path, host: str = "127.0.0.1") -> dict[str, Any]:
    key = secret(folder, "key", "b34r3r")
    return {"webhook": {"url": f"http://{host}:{port}/hook", "key_file": key, "timeout": "1s"}}


@pytest.mark.threat(
    "A receiver on this very machine (`http://127.0.0.1:9093`, a mail server without TLS) is down, and another account listens "
    "at its port: it would be given the token, and the messages, which would count as delivered.",
    "What goes to this machine in the clear goes to no other person's program. The messages wait, and the account is named.",
)
@pytest.mark.root
@as_others
def test_who_listens_at_the_port_of_a_receiver_is_sent_nothing(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    with theirs("127.0.0.1") as (port, heard):
        slack = {
            "slack": {
                "token_file": secret(tmp_path, "token", TOKEN),
                "channel": "C1",
                "api_url": f"http://127.0.0.1:{port}/",
            }
        }
        receivers = [hook(port, tmp_path), email(port, timeout="1s"), slack]
        _, done = tick(journal, settings(receivers), T0, bad())
        assert (heard(), done.sent) == (b"", ())
        said = " ".join(one.error for one in journal.read().receivers.values())
        assert said.count(f"nobody listens at port {port} of this machine") == 3, said


@pytest.mark.root
@as_others
def test_nobody_is_kept_from_messages_by_who_listens_at_the_other_address(
    tmp_path: Path,
    listener: Listener,  # noqa: F811
) -> None:
    port = listener.server.server_address[1]
    with theirs("::1", port) as (_, heard):
        tick(journal_in(tmp_path), settings([hook(port, tmp_path, "localhost")]), T0, bad())
        assert (heard(), len(listener.heard)) == (b"", 1)


@pytest.mark.threat(
    "A proxy is set for http (`http_proxy`), and a receiver on this very machine has a token.",
    "What is for this machine goes through no proxy.",
)
def test_what_is_for_this_machine_goes_through_no_proxy(
    tmp_path: Path,
    listener: Listener,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Listener()
    try:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        tick(journal_in(tmp_path), settings([hook(listener.server.server_address[1], tmp_path)]), T0, bad())
        assert (len(proxy.heard), len(listener.heard)) == (0, 1)
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()


@pytest.mark.threat(
    "`~/.netrc` has a password for the host of a receiver, or for all hosts (`default`), which would be sent there instead of "
    "the token.",
    "No receiver is sent what its settings do not name.",
)
def test_a_password_of_netrc_goes_to_no_receiver(
    tmp_path: Path,
    listener: Listener,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NETRC", secret(tmp_path, "netrc", "default login me password hunter2"))
    with SlackServer() as slack:
        receivers = [hook(listener.server.server_address[1], tmp_path), bot(slack, tmp_path)]
        tick(journal_in(tmp_path), settings(receivers), T0, bad())
        assert [headers["Authorization"] for headers, _ in listener.heard] == ["Bearer b34r3r"]
        assert len(slack.posts) == 1


def test_a_password_in_the_address_of_a_hook_is_used(tmp_path: Path, listener: Listener) -> None:  # noqa: F811
    address = secret(tmp_path, "address", listener.url.replace("//", "//me:hunter2@"))
    tick(journal_in(tmp_path), settings([{"webhook": {"url_file": address}}]), minutes(0), bad())
    assert listener.heard[0][0]["Authorization"].startswith("Basic ")


class Sayer:
    """Says ``first`` to whoever connects, then ``more`` every ``pause`` seconds, 64 MB at most; counts what it got rid of."""

    def __init__(self, first: bytes, more: bytes, pause: float = 0.0) -> None:
        self.said, self._words = 0, (first, more, pause)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        first, more, pause = self._words
        while True:
            try:
                with self.server.accept()[0] as one:
                    one.settimeout(2)
                    if not first.startswith(b"220"):
                        one.recv(1 << 20)
                    one.sendall(first)
                    while more and self.said < 64_000_000:
                        self.said += one.send(more)
                        time.sleep(pause)
                    one.recv(1)
            except OSError:
                if self.server.fileno() < 0:
                    return


@contextmanager
def sayer(first: bytes, more: bytes, pause: float = 0.0) -> Iterator[Sayer]:
    one = Sayer(first, more, pause)
    try:
        yield one
    finally:
        one.server.shutdown(socket.SHUT_RDWR)
        one.server.close()


def notified(tmp_path: Path, receiver: dict[str, Any]) -> str:
    """Return what ``notify test`` says of that receiver."""
    page = {"name": RUN, "launch": {"command": "true"}, "alerts": {"receivers": [receiver]}}
    (tmp_path / "ftsupervise.yaml").write_text(json.dumps(page))
    result = type_in("notify", "test", str(tmp_path / "ftsupervise.yaml"))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


@pytest.mark.threat(
    "A mail server answers without an end, line by line: a tick of the watch took all memory of the machine (13 GB in 20 s).",
    "A megabyte is read, and the message waits.",
)
@pytest.mark.parametrize("line", [b"220-\r\n", b"220-" + b"x" * 8000 + b"\r\n"])
def test_an_answer_of_a_mail_server_takes_no_memory(tmp_path: Path, line: bytes) -> None:
    with sayer(b"220-", line * (100_000 // len(line))) as server:
        _, done = tick(journal_in(tmp_path), settings([email(server.port, timeout="1s")]), T0, bad())
        assert ["answer has no end" in why for _, why in done.failed] == [True]
        assert server.said < 30_000_000, "what the two sockets and their buffers hold is not read"


@pytest.mark.threat(
    "A server says a little now and then, and nothing that ends: `notify test` waited for ever.",
    "One message is given up after 20 s, by the watch and by every command.",
)
@pytest.mark.parametrize("kind", ["mail", "head", "body"])
def test_who_says_a_little_now_and_then_keeps_nobody_waiting(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftsupervise.alerts.receivers.PATIENCE", minutes(0.02) - T0)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"
    first = {"mail": b"220-hello\r\n", "head": head + b"X-Long: ", "body": head + b"\r\n"}[kind]
    with sayer(first, b"220-hello\r\n", pause=0.1) as server:
        began = time.monotonic()
        receiver = email(server.port, timeout="5s") if kind == "mail" else hook(server.port, tmp_path)
        assert "no answer within" in notified(tmp_path, receiver)
        assert time.monotonic() - began < 20


@pytest.mark.threat(
    "A server answers with half a million brackets, with packed zeros, or names a post by a megabyte that the journal keeps.",
    "No answer is unpacked, and only the beginning of a word is kept.",
)
def test_an_odd_answer_of_a_service_is_only_odd(tmp_path: Path, listener: Listener) -> None:  # noqa: F811
    listener.status, listener.answer = 200, "[" * 500_000
    port = listener.server.server_address[1]
    slack = {
        "slack": {
            "token_file": secret(tmp_path, "token", TOKEN),
            "channel": "C1",
            "api_url": f"http://127.0.0.1:{port}/",
        }
    }
    assert "Slack says [[[" in notified(tmp_path, slack)
    assert listener.heard[0][0]["Accept-Encoding"] == "identity"
    listener.answer = json.dumps({"ok": True, "ts": "1" * 900_000, "channel": "C1"})
    journal = journal_in(tmp_path)
    assert tick(journal, settings([slack]), T0, bad())[1].sent
    assert sum(path.stat().st_size for path in journal.directory.iterdir()) < 100_000


@pytest.mark.threat(
    "The owner of a run that you watch, or a member who shares your watch, writes into its journal that an alert's post stands "
    "in another channel, so that your token posts there, and writes over what stands there already.",
    "Only a post whose receipt was sealed with the token itself is answered to or edited.",
)
@pytest.mark.root
@as_others
def test_no_journal_of_others_leads_a_token_to_another_channel(top: Path, tmp_path: Path) -> None:
    (journal := journal_in(top)).directory.mkdir(parents=True)
    for folder in (journal.directory.parent, journal.directory):
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2775)
    with SlackServer() as slack:
        alerts = settings([bot(slack, tmp_path)])
        tick(journal, alerts, T0, bad())
        for told in (None, slack.posts[0].ts):
            state = journal.read()
            posts = {
                key: replace(one, receipt={**one.receipt, "channel": "C-board", "ts": told or "1.000001"})
                for key, one in state.posts.items()
            }
            number = int(max(journal.directory.glob("*.json")).stem) + 1
            page = generation(replace(state, posts=posts), number, number - 1)
            as_one(EVE, partial(lay, journal.directory, f"{number:08d}", page), umask=0o002)
            tick(journal, alerts, minutes(60), good(minutes(60)))
            tick(journal, alerts, minutes(90), good(minutes(90)))
        asked = [body.get("channel") for _, _, body in slack.requests]
        assert len(slack.posts) > 1 and set(asked) == {"C1"}, asked


@pytest.mark.threat(
    "You watch a run of somebody else beside yours, and its owner writes a message into its journal that makes no mail, "
    "or one that no mail server takes, of 20 MB. Messages of several runs go as one, and none of yours would ever arrive.",
    "What others have written is cut to the size and the characters of ours.",
)
@pytest.mark.root
@as_others
@pytest.mark.parametrize("how", ["half of a pair", "a line break", "20 MB"])
def test_no_message_of_a_stranger_keeps_those_of_others_from_their_receivers(
    top: Path, tmp_path: Path, how: str
) -> None:
    ours = [journal_in(top / f"run-{number}") for number in range(4)]
    theirs_ = journal_in(top / "theirs")
    with MailServer() as server:
        alerts = settings([mailbox(server)])
        for number, journal in enumerate([*ours, theirs_]):
            record(journal, [replace(bad(), run=f"r{number}")], alerts, T0, run_name=f"r{number}")
        state = theirs_.read()
        (waiting,) = state.outbox
        if how == "half of a pair":
            forged = replace(waiting, id="\ud83d")
        elif how == "a line break":
            forged = replace(waiting, notices=(replace(waiting.notices[0], post="a\nBcc: b@c"),))
        else:
            forged = replace(
                waiting, notices=(replace(waiting.notices[0], finding=replace(bad(), detail="x\n" * 6_700_000)),)
            )
        number = int(max(theirs_.directory.glob("*.json")).stem) + 1
        page = generation(replace(state, outbox=(forged,)), number, number - 1)
        for folder in (theirs_.directory.parent.parent, theirs_.directory.parent, theirs_.directory):
            os.chown(folder, pwd.getpwnam(EVE).pw_uid, GROUP)
        as_one(EVE, partial(lay, theirs_.directory, f"{number:08d}", page))
        deliver([theirs_, *ours], alerts, T0)
        assert [journal.read().outbox for journal in ours] == [()] * 4
        assert len(server.mails) == 1


@pytest.mark.threat(
    "The same owner writes two thousand messages into that journal, which your watch would send to you in one tick: it took "
    "minutes, and your mail server would take no more of yours.",
    "Twenty about one run are sent in a tick, and yours beside them.",
)
@pytest.mark.root
@as_others
@pytest.mark.parametrize("in_turn", [True, False])
def test_no_flood_of_messages_of_a_stranger_is_sent(top: Path, tmp_path: Path, in_turn: bool) -> None:
    ours, theirs_ = journal_in(top / "ours"), journal_in(top / "theirs")
    with MailServer() as server:
        alerts = settings([mailbox(server)])
        for number, journal in enumerate((ours, theirs_)):
            record(journal, [replace(bad(), run=f"r{number}")], alerts, T0, run_name=f"r{number}")
        state = theirs_.read()
        (waiting,) = state.outbox
        many = [replace(waiting, id=f"i{number}") for number in range(200)]
        if not in_turn:
            many = [replace(one, run=one.id, left=("me@example.org", one.id)) for one in many]
        number = int(max(theirs_.directory.glob("*.json")).stem) + 1
        page = generation(replace(state, outbox=tuple(many)), number, number - 1)
        for folder in (theirs_.directory.parent.parent, theirs_.directory.parent, theirs_.directory):
            os.chown(folder, pwd.getpwnam(EVE).pw_uid, GROUP)
        as_one(EVE, partial(lay, theirs_.directory, f"{number:08d}", page))
        deliver([theirs_, ours], alerts, T0)
        assert ours.read().outbox == () and len(server.mails) in (20, 21)


@pytest.mark.threat(
    "The same owner writes a critical message there that is due in a hundred years: as long the dead-man is not pinged.",
    "What is due later than quiet hours end is due now.",
)
@pytest.mark.root
@as_others
def test_no_message_of_a_stranger_waits_for_ever(top: Path, tmp_path: Path) -> None:
    theirs_ = journal_in(top)
    alerts = settings([{"file": {"path": str(tmp_path / "told")}}])
    record(theirs_, [bad()], alerts, T0, run_name=RUN)
    state = theirs_.read()
    late = [replace(one, due=minutes(60 * 24 * 36500)) for one in state.outbox]
    number = int(max(theirs_.directory.glob("*.json")).stem) + 1
    page = generation(replace(state, outbox=tuple(late)), number, number - 1)
    for folder in (theirs_.directory.parent.parent, theirs_.directory.parent, theirs_.directory):
        os.chown(folder, pwd.getpwnam(EVE).pw_uid, GROUP)
    as_one(EVE, partial(lay, theirs_.directory, f"{number:08d}", page))
    assert deliver([theirs_], alerts, minutes(1)).critical_waiting == 0
