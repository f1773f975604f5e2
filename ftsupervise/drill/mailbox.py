"""The mail server of a drill: it takes what the run's receivers would have got, or refuses it while mail is broken.

Only this machine reaches it, and each conversation has a bound. Other accounts of this machine reach it too: what is not for
the unguessable domain of its addresses is not taken, so nobody can say in the place of the watch that people were told, and of
conversations that have not named it the oldest of too many is ended.
"""

from __future__ import annotations

import secrets
import socketserver
import threading
from datetime import datetime, timezone
from email import message_from_bytes, policy
from socket import socket
from types import TracebackType
from typing import NamedTuple

from ftsupervise.host.ports import Unproven

_PATIENCE = 10.0  # seconds for the next line of a conversation
_LONGEST = 10_000  # bytes of a line
_LARGEST = 4 << 20  # bytes of a mail


class Mail(NamedTuple):
    """A mail that was taken. ``to``: the receivers that it was for, by their names in the settings."""

    at: datetime
    to: tuple[str, ...]
    subject: str


class _Conversation(socketserver.StreamRequestHandler):
    timeout = _PATIENCE

    def handle(self) -> None:
        box = self.server.mailbox  # type: ignore[attr-defined]
        to: list[str] = []
        self._say("220 drill")
        while line := self.rfile.readline(_LONGEST):
            verb, text = line[:4].upper(), line.decode("ascii", "replace")
            if verb == b"QUIT":
                self._say("221 2.0.0 bye")
                return
            if verb == b"MAIL" and box.refuses:
                box.refused += 1
                self._say("451 4.3.0 refused by the drill")
            elif verb == b"RCPT":
                name, _, domain = text.partition("<")[2].partition(">")[0].partition("@")
                known = secrets.compare_digest(domain, box.domain)
                to += [name] if known else []
                if known:
                    self.server.unproven.remove(self.request)  # type: ignore[attr-defined]
                self._say("250 2.1.5 taken" if known else "550 5.1.1 nobody of that name")
            elif verb == b"DATA" and not to:
                self._say("503 5.5.1 for nobody")
            elif verb == b"DATA":
                self._say("354 go on")
                box.take(tuple(to), self._text())
                to = []
                self._say("250 2.0.0 taken")
            else:
                self._say("250 drill")

    def _text(self) -> bytes:
        lines, size = list[bytes](), 0
        while (line := self.rfile.readline(_LONGEST)) not in (b".\r\n", b""):
            size += len(line)
            if size < _LARGEST:
                lines.append(line)
        return b"".join(lines)

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
    mailbox: Mailbox

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.unproven = Unproven()

    def process_request(self, request: socket, client_address: object) -> None:  # type: ignore[override]
        self.unproven.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket) -> None:  # type: ignore[override]
        self.unproven.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Leave a conversation that broke off: its sender tries again."""


class Mailbox:
    """``with Mailbox() as box``: mail for names at ``box.domain``, through ``box.port`` of this machine, is in ``box.mails``,
    oldest first."""

    def __init__(self) -> None:
        self.domain = f"{secrets.token_hex(16)}.invalid"
        self.refuses = False
        self.refused = 0  # conversations
        self.mails: tuple[Mail, ...] = ()
        self._lock = threading.Lock()
        self._listener = _Listener()
        self._listener.mailbox = self
        self.port: int = self._listener.server_address[1]

    def __enter__(self) -> Mailbox:
        threading.Thread(target=self._listener.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def take(self, to: tuple[str, ...], data: bytes) -> None:
        subject = " ".join(str(message_from_bytes(data, policy=policy.default)["Subject"] or "").split())
        with self._lock:
            self.mails = (*self.mails, Mail(datetime.now(timezone.utc), to, subject))

    def since(self, at: datetime) -> tuple[Mail, ...]:
        """Return what was taken after ``at``."""
        return tuple(mail for mail in self.mails if mail.at > at)
