"""A mail server on this machine that takes everything, unless its mood says otherwise. A test tool.

mood "ok"            takes the mail
mood "VERB CODE"     answers e.g. "451" at "MAIL", "RCPT", "DATA", "EHLO" (and HELO), "AUTH", "STARTTLS", "." (the end)
mood "hang ."        takes the data and never answers
mood "reset ."       takes and keeps the mail, then resets the connection instead of saying 250
mood "reset QUIT"    resets after 250, at QUIT
mood "refuse NAME"   550 for recipients that start with NAME, others are fine
mood "later NAME"    450 for them, as greylisting does
mood "greet CODE"    answers that instead of 220 when somebody connects
mood "greet TEXT"    says something that is no SMTP at all
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session, syntax


class _Server(SMTP):
    """aiosmtpd with a mood in front of each verb."""

    def __init__(self, neighbour: MailServer, **options: Any) -> None:
        self.neighbour = neighbour
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Requiring AUTH while not requiring TLS")
            super().__init__(neighbour, **options)

    async def push(self, status: Any) -> None:
        mood = self.neighbour.mood
        if mood.startswith("greet ") and isinstance(status, str) and status.startswith("220 "):
            words = mood.removeprefix("greet ")
            status = f"{words} 5.3.2 no service here today" if words.isdigit() else words
        await super().push(status)

    async def _moody(self, verb: str) -> bool:
        mood = self.neighbour.mood
        if mood == f"hang {verb}":
            await asyncio.sleep(3600)
        if mood == f"reset {verb}":
            self.neighbour.reset(self.transport)
            return True
        if mood.startswith(f"{verb} "):
            await super().push(f"{mood.split()[1]} 4.3.0 the mood of the day")
            return True
        return False

    @syntax("HELO hostname")
    async def smtp_HELO(self, hostname: str) -> None:
        if not await self._moody("EHLO"):
            await super().smtp_HELO(hostname)

    @syntax("EHLO hostname")
    async def smtp_EHLO(self, hostname: str) -> None:
        if not await self._moody("EHLO"):
            await super().smtp_EHLO(hostname)

    @syntax("MAIL FROM: <address>", extended=" [SP <mail-parameters>]")
    async def smtp_MAIL(self, arg: str | None) -> None:
        if not await self._moody("MAIL"):
            await super().smtp_MAIL(arg)

    @syntax("RCPT TO: <address>", extended=" [SP <mail-parameters>]")
    async def smtp_RCPT(self, arg: str | None) -> None:
        if not await self._moody("RCPT"):
            await super().smtp_RCPT(arg)

    @syntax("DATA")
    async def smtp_DATA(self, arg: str | None) -> None:
        if not await self._moody("DATA"):
            await super().smtp_DATA(arg)

    @syntax("STARTTLS", when="tls_context")
    async def smtp_STARTTLS(self, arg: str | None) -> None:
        if not await self._moody("STARTTLS"):
            await super().smtp_STARTTLS(arg)

    @syntax("AUTH <mechanism>")
    async def smtp_AUTH(self, arg: str | None) -> None:
        if not await self._moody("AUTH"):
            await super().smtp_AUTH(arg)

    @syntax("QUIT")
    async def smtp_QUIT(self, arg: str | None) -> None:
        if not await self._moody("QUIT"):
            await super().smtp_QUIT(arg)


class MailServer:
    """``with MailServer() as server:`` listens on ``server.port``; ``server.mails`` has what arrived, oldest first."""

    def __init__(
        self,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None,
        loud: bool = False,
    ) -> None:
        self.mood = "ok"
        self.mails: list[EmailMessage] = []
        self.raw: list[bytes] = []
        self.recipients: list[list[str]] = []
        self.logins: list[str] = []
        self._tls, self._login, self._loud = tls, login, loud
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._arrived = threading.Condition()

    def __enter__(self) -> MailServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._socket.close()

    def wait(self, count: int, timeout: float = 10.0) -> list[EmailMessage]:
        """The mails, once there are at least ``count``. Raises TimeoutError."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.mails) >= count, timeout):
                raise TimeoutError(f"{len(self.mails)} of {count} mails arrived")
            return list(self.mails)

    def forget(self) -> None:
        with self._arrived:
            for kept in (self.mails, self.raw, self.recipients):
                kept.clear()

    def reset(self, transport: Any) -> None:
        """Close with RST instead of FIN."""
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        transport.abort()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        options: dict[str, Any] = {"enable_SMTPUTF8": True, "tls_context": self._tls}
        if self._login:
            options.update(authenticator=self._authenticate, auth_required=True, auth_require_tls=self._tls is not None)
        self._loop.run_until_complete(self._loop.create_server(lambda: _Server(self, **options), sock=self._socket))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _authenticate(self, server: Any, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        ok = isinstance(data, LoginPassword) and self._login == (data.login.decode(), data.password.decode())
        self.logins.append(mechanism)
        return AuthResult(success=ok, handled=ok)

    # aiosmtpd's hooks

    async def handle_RCPT(
        self, server: _Server, session: Session, envelope: Envelope, address: str, options: Any
    ) -> str:
        if self.mood.startswith("refuse ") and address.startswith(self.mood.split()[1]):
            return "550 5.1.1 no such person here"
        if self.mood.startswith("later ") and address.startswith(self.mood.split()[1]):
            return "450 4.2.0 greylisted, come again"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: _Server, session: Session, envelope: Envelope) -> str:
        mood = self.mood
        if mood == "hang .":
            await asyncio.sleep(3600)
        if mood.startswith(". "):
            return f"{mood.split()[1]} the mood of the day"
        content = envelope.content if isinstance(envelope.content, bytes) else str(envelope.content).encode()
        mail = message_from_bytes(content, policy=policy.default)
        with self._arrived:
            self.raw.append(content)
            self.mails.append(mail)
            self.recipients.append(list(envelope.rcpt_tos))
            self._arrived.notify_all()
        if self._loud:
            print(readable(mail), flush=True)
        if mood == "reset .":
            self.reset(server.transport)
        return "250 2.0.0 taken"


def readable(mail: EmailMessage) -> str:
    """A mail as a person sees it."""
    body = mail.get_body(("plain",))
    text = body.get_content() if body is not None else ""
    lines = [
        f"{name}: {' '.join(str(mail[name]).split())}"
        for name in ("From", "To", "Subject", "Date", "Message-ID", "In-Reply-To")
        if mail[name]
    ]
    return "\n".join(
        ["┌── mail " + "─" * 60, *(f"│ {line}" for line in [*lines, "", *text.rstrip().split("\n")]), "└" + "─" * 68]
    )


def certificate(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """A throw-away certificate for localhost: (the server's context, the file a client trusts). Needs openssl(1)."""
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert


def main(argv: list[str]) -> None:
    """``python -m tests.neighbours.smtp [PORT]``: print mail as it arrives, until interrupted."""
    with MailServer(port=int(argv[0]) if argv else 0, loud=True) as server:
        print(f"mail server (a test tool) listens on 127.0.0.1:{server.port}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
