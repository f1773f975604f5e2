"""An HTTP server that speaks as much of Slack's API as we use: a webhook, chat.postMessage, chat.update. A test tool.

mood "ok"              takes it
mood "429 VALUE"       rate limit with ``Retry-After: VALUE`` ("30", an HTTP date, "" for none)
mood "500" … "404"     that status
mood "error WORD"      HTTP 200 with {"ok": false, "error": WORD}, as Slack says invalid_auth; 403 for a webhook
mood "choke"           takes plain text only: {"ok": false, "error": "invalid_blocks"} for anything with blocks
mood "slow SECONDS"    answers late
mood "redirect URL"    302 to URL
mood "answer N BODY"   status N with BODY, which may be empty or a web page, and the message is not kept
mood "reset"           keeps the message, then resets the connection instead of answering
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

TOKEN = "xoxb-1234-the-neighbour"
HOOK = "/services/T000/B000/neighbourhood"
MACHINE = "/machine"  # takes ftsupervise's own JSON


@dataclass
class Post:
    """One message in the channel, as it stands now."""

    ts: str
    channel: str
    text: str
    blocks: list[dict[str, Any]]
    thread_ts: str = ""
    broadcast: bool = False
    key: str = ""
    colour: str = ""
    edits: int = 0
    history: list[str] = field(default_factory=list)

    def readable(self) -> str:
        text = "\n".join(texts_of(self.blocks) or [self.text])
        text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        where = f"thread of {self.thread_ts}" if self.thread_ts else f"#{self.channel}"
        head = f"┌── slack, {where}{', edited' if self.edits else ''} "
        return "\n".join([head.ljust(69, "─"), *(f"│ {line}" for line in text.split("\n")), "└" + "─" * 68])


class SlackServer:
    """``with SlackServer() as server:``; ``server.posts`` is the channel, ``server.taken`` what our own JSON said, of the
    requests that were answered with 2xx."""

    def __init__(self, *, port: int = 0, loud: bool = False) -> None:
        self.mood = "ok"
        self.posts: list[Post] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []  # refused ones too
        self.taken: list[dict[str, Any]] = []
        self.loud = loud
        self._arrived = threading.Condition()
        self._count = 0
        neighbour = self

        class Handler(_Handler):
            server_neighbour = neighbour

        self._server = _Quiet(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self.api_url = f"http://127.0.0.1:{self.port}/api/"
        self.machine_url = f"http://127.0.0.1:{self.port}{MACHINE}"
        self.webhook_url = f"http://127.0.0.1:{self.port}{HOOK}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> SlackServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int, timeout: float = 10.0) -> list[Post]:
        """The posts, once there are at least ``count``. Raises TimeoutError."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.posts) >= count, timeout):
                raise TimeoutError(f"{len(self.posts)} of {count} posts arrived")
            return list(self.posts)

    def forget(self) -> None:
        with self._arrived:
            self.posts.clear()
            self.requests.clear()

    def keep(self, post: Post) -> None:
        with self._arrived:
            self.posts.append(post)
            self._arrived.notify_all()

    def take(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """What Slack would answer to this request."""
        with self._arrived:
            blocks, colour = blocks_of(body), next((one["color"] for one in body.get("attachments") or []), "")
            wrong = "invalid_blocks" if blocks and self.mood == "choke" else _unacceptable(body, blocks)
            if wrong:
                return {"ok": False, "error": wrong}
            if method == "chat.update":
                post = next((p for p in self.posts if p.ts == body.get("ts")), None)
                if post is None:
                    return {"ok": False, "error": "message_not_found"}
                post.history.append(post.text)
                post.text, post.blocks, post.edits = str(body.get("text", "")), blocks, post.edits + 1
                post.colour = colour
            else:
                self._count += 1
                key = str(((body.get("metadata") or {}).get("event_payload") or {}).get("key", ""))
                post = Post(
                    ts=f"1700000000.{self._count:06d}",
                    channel=str(body.get("channel", "webhook")),
                    text=str(body.get("text", "")),
                    blocks=blocks,
                    thread_ts=str(body.get("thread_ts", "")),
                    broadcast=str(body.get("reply_broadcast", "")).lower() in ("1", "true"),
                    key=key,
                    colour=colour,
                )
                self.posts.append(post)
            self._arrived.notify_all()
            if self.loud:
                print(post.readable(), flush=True)
            return {"ok": True, "ts": post.ts, "channel": post.channel}


def blocks_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """All blocks of a message, those in its attachments too, as people see them from above to below."""
    inner = [block for one in body.get("attachments") or [] for block in one.get("blocks") or []]
    return [*(body.get("blocks") or []), *inner]


def texts_of(blocks: list[dict[str, Any]]) -> list[str]:
    texts = []
    for part in blocks:
        texts += [part["text"]["text"]] if "text" in part else []
        texts += [one["text"].replace("*\n", "* ", 1) for one in part.get("fields", ())]
    return texts


def _unacceptable(body: dict[str, Any], blocks: list[dict[str, Any]]) -> str:
    """Slack's own limits: 50 blocks, header 150, section 3000, text 40000."""
    if not body.get("text") and not blocks:
        return "no_text"
    if len(str(body.get("text", ""))) > 40_000:
        return "msg_too_long"
    limits = {"header": 150, "section": 3000}
    for block in blocks:
        fields = block.get("fields") or []
        if len(fields) > 10 or any(not 0 < len(one.get("text", "")) <= 2000 for one in fields):
            return "invalid_blocks"
        text = (block.get("text") or {}).get("text", "")
        if fields and not text:
            continue
        if not text or len(text) > limits.get(block.get("type", ""), 0):
            return "invalid_blocks"
    return "invalid_blocks" if len(blocks) > 50 else ""


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a bad network in between is what it is here for


class _Handler(BaseHTTPRequestHandler):
    server_neighbour: SlackServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._say(404, {"ok": False, "error": "not_here"})

    def do_POST(self) -> None:
        neighbour, mood = self.server_neighbour, self.server_neighbour.mood
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.headers.get("Content-Type", "")
        body = _form(raw) if "urlencoded" in kind else json.loads(raw or b"{}")
        neighbour.requests.append((self.path, dict(self.headers.items()), body))
        hook = self.path == HOOK
        if mood.startswith("slow "):
            time.sleep(float(mood.split()[1]))
        if mood.startswith("redirect "):
            return self._say(302, {}, {"Location": mood.split()[1]})
        if mood.startswith("answer "):
            status, _, text = mood.removeprefix("answer ").partition(" ")
            return self._answer(int(status), text.encode(), "text/html" if "<" in text else "text/plain", {})
        if mood.startswith("429"):
            value = mood[3:].strip()
            return self._say(429, {"ok": False, "error": "ratelimited"}, {"Retry-After": value} if value else {})
        if mood.isdigit():
            return self._say(int(mood), {"ok": False, "error": f"http_{mood}"})
        if self.path == MACHINE:
            neighbour.taken.append(body)
            neighbour.keep(Post("", "machine", str(body.get("title", "")), [], key=str(body.get("key", ""))))
            return self._hang_up() if mood == "reset" else self._text(202, "")
        if mood.startswith("error "):
            word = mood.split()[1]
            return self._text(403, word) if hook else self._say(200, {"ok": False, "error": word})
        if not hook and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say(200, {"ok": False, "error": "invalid_auth"})
        if not hook and not self.path.startswith("/api/chat."):
            return self._say(404, {"ok": False, "error": "unknown_method"})
        answer = neighbour.take(self.path.rpartition("/")[2] if not hook else "webhook", body)
        if mood == "reset":
            return self._hang_up()
        if hook:
            return self._text(200, "ok") if answer["ok"] else self._text(400, str(answer["error"]))
        return self._say(200, answer)

    def _hang_up(self) -> None:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def _text(self, status: int, text: str) -> None:
        self._answer(status, text.encode(), "text/plain", {})

    def _say(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json; charset=utf-8", headers or {})

    def _answer(self, status: int, data: bytes, kind: str, headers: dict[str, str]) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has gone, as clients do


def _form(raw: bytes) -> dict[str, Any]:
    out: dict[str, Any] = dict(parse_qsl(raw.decode()))
    for name in ("blocks", "metadata", "attachments"):
        if name in out:
            out[name] = json.loads(out[name])
    return out


def main(argv: list[str]) -> None:
    """``python -m tests.neighbours.slack [PORT]``: print messages as they arrive, until interrupted."""
    with SlackServer(port=int(argv[0]) if argv else 0, loud=True) as server:
        print(
            f"Slack-like server (a test tool): api_url {server.api_url} token {TOKEN} webhook {server.webhook_url}",
            flush=True,
        )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
