"""The lighthouse's status page, as it is and as a stranger's server on its port may send it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.replicas.members import LighthousePage, PageNotSeen, QuorumMember, Unseen, look, parse

PAGE = (Path(__file__).parents[1] / "golden" / "lighthouse" / "status.html").read_text("utf-8")
Serve = Callable[[socket.socket], object]


@contextmanager
def server(serve: Serve) -> Iterator[int]:
    """A port at which ``serve`` is called with the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            try:
                with listening.accept()[0] as one:
                    one.recv(65536)
                    serve(one)
            except OSError:
                return

        threading.Thread(target=work, daemon=True).start()
        yield listening.getsockname()[1]


def asked(serve: Serve, within: float = 5.0) -> tuple[LighthousePage | PageNotSeen, float]:
    """What is seen, and in how many seconds."""
    with server(serve) as port:
        began = time.monotonic()
        seen = look("127.0.0.1", port, within)
        return seen, time.monotonic() - began


def sent(text: str | bytes) -> Serve:
    raw = text.encode() if isinstance(text, str) else text
    return lambda one: one.sendall(raw)


def answer(body: str, first: str = "HTTP/1.1 200 OK", more: str = "") -> str:
    return f"{first}\r\ncontent-length: {len(body.encode())}\r\n{more}\r\n{body}"


def test_the_page_of_a_real_lighthouse_is_read() -> None:
    seen, _ = asked(sent(answer(PAGE)))
    assert isinstance(seen, LighthousePage)
    assert seen.quorum == 1
    assert seen.members[0] == QuorumMember("g000:uuid-1", 5, "127.0.0.1:1/s")
    assert {one.group for one in seen.heartbeats} == {"g000", "g001", "g002"} and max(seen.heartbeats).age < 0.04
    assert seen.heard(0.035) == () and len(seen.heard(0.04)) == 3


@pytest.mark.threat(
    "A manager calls itself by HTML, escape sequences or a second page.",
    "It is one name on the page, without tags and printable.",
)
def test_what_a_member_says_of_itself_is_text_and_nothing_else() -> None:
    """The second manager of the recorded page calls itself g001:<b>"x"&amp;, an escape sequence and a second quorum_id."""
    seen = parse(PAGE)
    assert isinstance(seen, LighthousePage) and len(seen.members) == 2
    assert seen.members[1].replica == 'g001:<b>"x"&amp; ?[31m quorum_id: 77 <br>' and seen.members[1].step == 2**62
    assert all(text.isprintable() for one in seen.members for text in (one.replica, one.store))


@pytest.mark.threat(
    "Somebody who reaches the lighthouse tells it more names than are read: groups that come behind them on its page would "
    "count as silent, and a second copy of one that still runs be started.",
    "Such a page is not seen at all.",
)
def test_a_page_with_more_names_than_are_read_says_nothing() -> None:
    begin, item, end = PAGE.partition('  <li class="heartbeat')
    more = "".join(f'{item}">\n g9:{number}: seen 0.1s ago\n</li>\n' for number in range(20_001))
    found = parse(f"{begin}{more}{item}{end}")
    assert isinstance(found, PageNotSeen) and found.kind is Unseen.FULL


def test_an_answer_in_small_pieces_is_put_together() -> None:
    def serve(one: socket.socket) -> None:
        raw = answer(PAGE).encode()
        for at in range(0, len(raw), 700):
            one.sendall(raw[at : at + 700])
            time.sleep(0.01)

    assert isinstance(asked(serve)[0], LighthousePage)


def dribble(one: socket.socket) -> None:
    one.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        one.sendall(b"x")
        time.sleep(0.05)


def flood(one: socket.socket) -> None:
    one.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        one.sendall(b'<div class="member"><b>' * 1000)


@pytest.mark.threat(
    "Another program listens on the lighthouse's port, and answers slowly, without an end, with another service's "
    "words, a redirect or a page that is slow to parse.",
    'A look at the page has one bound for time and one for size, follows nothing, and counts as "could not see".',
)
@pytest.mark.parametrize(
    ("serve", "kind"),
    [
        pytest.param(lambda one: time.sleep(5), Unseen.SILENT, id="it says nothing"),
        pytest.param(dribble, Unseen.SILENT, id="it sends a byte now and then"),
        pytest.param(flood, Unseen.STRANGE, id="it never ends"),
        pytest.param(lambda one: None, Unseen.STRANGE, id="it hangs up"),
        pytest.param(sent(b"\x00\xff" * 500), Unseen.STRANGE, id="it is no HTTP"),
        pytest.param(sent("SSH-2.0-OpenSSH_9.2\r\n"), Unseen.STRANGE, id="it is another service"),
        pytest.param(sent(answer("", "HTTP/1.1 404 Not Found")), Unseen.STRANGE, id="it has no such page"),
        pytest.param(
            sent(answer("", "HTTP/1.1 302 Found", "location: http://127.0.0.1:1/status\r\n")),
            Unseen.STRANGE,
            id="it sends us elsewhere",
        ),
        pytest.param(sent(answer("<html>It works!</html>")), Unseen.STRANGE, id="it is another web server"),
        pytest.param(sent(f"HTTP/1.1 200 OK\r\ncontent-length: {'9' * 400}\r\n\r\n"), Unseen.STRANGE, id="odd length"),
        pytest.param(sent("HTTP/1.1 \x1b[2J\r\n\r\n"), Unseen.STRANGE, id="it clears the screen"),
    ],
)
def test_a_stranger_on_the_port_is_not_believed_and_holds_nobody_up(serve: Serve, kind: Unseen) -> None:
    seen, seconds = asked(serve, within=0.6)
    assert isinstance(seen, PageNotSeen) and seen.kind is kind and seen.why.isprintable()
    assert seconds < 3


def test_nothing_there_is_told_apart_from_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    seen = look("127.0.0.1", port, 1.0)
    assert isinstance(seen, PageNotSeen) and seen.kind is Unseen.REFUSED


@pytest.mark.parametrize("host", ["localhost", "example.invalid", "", "127.0.0.1\r\nX: y"])
def test_a_name_is_never_resolved(host: str) -> None:
    seen = look(host, 80, 1.0)
    assert isinstance(seen, PageNotSeen) and seen.kind is Unseen.CUT


@pytest.mark.threat(
    "A stranger's name on the lighthouse's page is made to be slow to read, and the ranks that train read that page.",
    "The page is read in a time that grows with its length alone.",
)
@pytest.mark.parametrize(
    "bomb",
    [
        '<div class="member' * 220_000,
        '<div class="member"><b>' + "x" * 3_900_000,
        '<div class="member"><b>g</b>' + "<br/>Step:" * 390_000,
        '<li class="heartbeat">' + ": seen " * 500_000 + "</li>",
        "Quorum age:" * 350_000,
        '<li class="heartbeat">g000: seen ' + "9" * 400_000 + "s ago</li>",
        ('<li class="heartbeat">' + " " * 9_900 + "</li>") * 190,
    ],
)
def test_a_page_made_to_be_slow_to_read_is_read_fast(bomb: str) -> None:
    head, middle, tail = PAGE.partition("<h2>Heartbeats</h2>")
    began = time.process_time()
    seen = parse(f"{head}{bomb}{middle}{tail}{bomb}")
    assert isinstance(seen, LighthousePage) or seen.kind is Unseen.FULL
    assert time.process_time() - began < 2


@given(st.integers(0, len(PAGE)), st.integers(0, len(PAGE)), st.text(max_size=40))
def test_a_damaged_page_never_raises(begin: int, end: int, text: str) -> None:
    seen = parse(PAGE[:begin] + text + PAGE[end:])
    assert isinstance(seen, LighthousePage | PageNotSeen)
