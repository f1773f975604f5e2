"""Sends mail. It is built with EmailMessage, so no header can be injected; one SMTP conversation, every step bounded.

Each recipient counts by itself: one that was deferred (greylisting, a full mailbox) gets the mail later, the others not
again. Follow-ups carry References and In-Reply-To, so an incident is one thread. The Message-ID is the dedup key: a
mail that was sent twice because the first answer was lost is the same mail to every mailbox that drops duplicates.
"""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Iterable
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from ftsupervise.alerts.receivers import (
    HERE,
    MOST_READ,
    Broken,
    Doubtful,
    Partly,
    TryLater,
    Unsendable,
    answered,
    read_secret,
    redact,
    where_ours,
)
from ftsupervise.alerts.wording import Parcel, in_short, render
from ftsupervise.host import ownership

if TYPE_CHECKING:
    from pathlib import Path

    from ftsupervise.config.alerting import Email


_HEADER = 100  # characters of a header line: "Subject: " with 78 behind it would be folded right behind its colon
PLAIN = 4000  # characters of a mail whose text the server has refused before: a longer one is sent in short


def compose(parcel: Parcel, settings: Email) -> EmailMessage:
    """Return the mail as it will be sent."""
    message = parcel.message
    mail = EmailMessage()
    domain = settings.from_.rpartition("@")[2]
    mail["From"] = Address("ftsupervise", addr_spec=settings.from_)
    mail["To"] = tuple(Address(addr_spec=to) for to in settings.to)
    mail["Subject"] = _subject(render("alert.subject.j2", parcel))
    mail["Date"] = format_datetime(message.written)
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    posts = [f"<{post}@{domain}>" for post in message.posts][:10]
    if posts:
        mail["In-Reply-To"] = posts[-1]
        mail["References"] = " ".join(posts)
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Auto-Response-Suppress"] = "All"
    mail["List-Id"] = "ftsupervise alerts <ftsupervise.alerts>"
    mail["X-Ftsupervise-Key"] = message.id
    if message.worst.word == "critical" and not parcel.over:
        mail["Importance"] = "high"
    text = render("alert.text.j2", parcel)
    if message.plain and len(text) > PLAIN:  # if it were cut off, the last of several would be missing
        text = in_short(parcel)
    mail.set_content(text, charset="utf-8")
    wanted = parcel.day is not None if settings.html is None else settings.html
    if wanted and not message.plain:
        mail.add_alternative(render("alert.html.j2", parcel, kind="html"), subtype="html")
    mail.policy = mail.policy.clone(max_line_length=_HEADER)  # for the bodies, which are encoded by now, it was 78
    return mail


def _subject(text: str) -> str:
    """Return one line, with no encoded word: the email package decodes "=?utf-8?q?=0ABcc:_x?=" and writes the line
    break out.
    """
    return " ".join(text.split()).replace("=?", "= ?")


def send(parcel: Parcel, settings: Email) -> dict[str, str]:
    """Send the mail. It is sent when the server said 250 after the last dot; an error after that is not a failure.

    Raises Partly when some recipients have it and others are to be tried again.
    """
    wanted = tuple(to for to in settings.to if not parcel.message.left or to in parcel.message.left)
    behind = tuple(to for to in wanted if to in parcel.owed)
    to = tuple(one for one in wanted if one not in behind)
    if not to:  # the remaining ones are no recipients any more, or wait for an earlier mail
        if not behind:
            return {}
        if not parcel.message.left:  # no recipient has it
            raise TryLater("an earlier mail to all of its recipients waits")
        raise Partly("an earlier mail to them waits", left=behind, waits=True)
    password = read_secret(settings, "password")
    mail = compose(parcel, settings)
    hidden = [password]
    try:
        refused = _converse(mail, settings, to, password)
    except smtplib.SMTPAuthenticationError as error:
        raise _by_code(error.smtp_code, error.smtp_error, "login", hidden, certain=_LOGIN) from None
    except smtplib.SMTPRecipientsRefused as error:
        answers = dict(error.recipients)
        if not parcel.message.left:  # so no recipient has it
            raise _refused(answers, behind, hidden) from None
        refused = answers
    except smtplib.SMTPSenderRefused as error:
        if error.smtp_code == _TOO_LARGE:  # its size is said with the sender
            raise Unsendable(redact(f"{error.smtp_code} {_text(error.smtp_error)}", hidden)) from None
        raise _by_code(error.smtp_code, error.smtp_error, f"the sender {settings.from_}", hidden) from None
    except smtplib.SMTPDataError as error:
        if 500 <= error.smtp_code < 600:  # too large, or taken for spam: this mail, not this receiver
            raise Unsendable(redact(f"{error.smtp_code} {_text(error.smtp_error)}", hidden)) from None
        raise _by_code(error.smtp_code, error.smtp_error, "the mail", hidden) from None
    except smtplib.SMTPResponseException as error:
        raise _by_code(error.smtp_code, error.smtp_error, "the connection", hidden, certain=()) from None
    except smtplib.SMTPNotSupportedError as error:
        raise Doubtful(redact(f"{settings.host}: {error}", hidden)) from None
    except ssl.SSLCertVerificationError as error:
        raise Doubtful(f"{settings.host}: its certificate is not to be trusted: {error.verify_message}") from None
    except (OSError, smtplib.SMTPException) as error:
        raise TryLater(redact(f"{settings.host}: {error or type(error).__name__}", hidden)) from None
    later = {
        one: why for one, why in refused.items() if why[0] not in _CERTAIN
    }  # a full mailbox, 552, is emptied again
    gone = _answers(((one, why) for one, why in refused.items() if one not in later), hidden)
    if later or behind:
        why = _answers(later.items(), hidden) or "an earlier mail to them waits"
        raise Partly(why, left=(*later, *behind), refused=gone, waits=not later)
    receipt = {"message_id": str(mail["Message-ID"])}
    return {**receipt, "refused": gone} if gone else receipt


def post(mail: EmailMessage, settings: Email) -> str:
    """Send a mail that reports no alert, once. Returns the recipients that were refused, and why. Raises TryLater, Broken."""
    password = read_secret(settings, "password")
    try:
        refused = answered(partial(_converse, mail, settings, settings.to, password))
    except (OSError, smtplib.SMTPException, TryLater) as error:
        raise TryLater(redact(f"{settings.host}: {error or type(error).__name__}", [password])) from None
    return _answers(refused.items(), [password])


class _BoundedClient(smtplib.SMTP):
    """A client that reads no more than MOST_READ: smtplib keeps each line of an answer, and an answer may have no end."""

    def getreply(self) -> tuple[int, bytes]:
        if self.file is None and self.sock is not None:
            self.file = _Lines(self.sock.makefile("rb"))
        return super().getreply()


class _BoundedTLSClient(_BoundedClient, smtplib.SMTP_SSL):
    pass


class _Lines:
    """Reads what a server says, line by line. Raises OSError once that is more than MOST_READ."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, MOST_READ

    def readline(self, most: int) -> bytes:
        line = self._file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise OSError("its answer has no end")
        return line

    def close(self) -> None:
        self._file.close()


def _converse(mail: EmailMessage, settings: Email, to: tuple[str, ...], password: str) -> dict[str, Any]:
    """Hold one SMTP conversation and return the recipients that were refused. Raises what smtplib raises."""
    server = _connect(settings)
    try:
        if settings.user is not None:
            server.login(settings.user, password)
        return dict(server.send_message(mail, settings.from_, to))
    finally:
        _leave(server)


def address(settings: Email) -> tuple[str, int]:
    """Return the mail server's host and port. Raises Broken, TryLater."""
    read_secret(settings, "password")
    return _host(settings), _port(settings)


def _host(settings: Email) -> str:
    """Return the host that is connected to. Raises Doubtful where another account listens there, and no certificate says so."""
    here = _security(settings) == "none" and settings.host in HERE
    return where_ours(settings.host, _port(settings)) if here else settings.host


def _port(settings: Email) -> int:
    return settings.port or {"tls": 465, "starttls": 587, "none": 25}[_security(settings)]


def _security(settings: Email) -> str:
    return settings.security or ("starttls" if settings.user is not None else "none")


def _connect(settings: Email) -> smtplib.SMTP:
    security, port = _security(settings), _port(settings)
    timeout = settings.timeout.total_seconds()
    context = ssl.create_default_context() if security != "none" else None
    if context is not None and settings.ca_file is not None:
        context.load_verify_locations(cadata=_authorities(settings.ca_file))
    if security == "tls":
        return _BoundedTLSClient(settings.host, port, timeout=timeout, context=context)
    server = _BoundedClient(_host(settings), port, timeout=timeout)
    if security == "starttls":
        try:
            server.starttls(context=context)
        except BaseException:
            server.close()
            raise
    return server


def _authorities(path: Path) -> str:
    """Return the certificates in ``ca_file``: who may write them decides to whom the password and the messages go.

    Raises Broken, OSError.
    """
    try:
        return ownership.read_trusted(path, follow=True).decode(
            "ascii", "ignore"
        )  # what is no certificate is a comment
    except ownership.NotTrusted as error:
        raise Broken(f"ca_file: {error.message}: {error.hint}") from None


def _leave(server: smtplib.SMTP) -> None:
    try:
        server.quit()
    except (OSError, smtplib.SMTPException):
        server.close()


_TOO_LARGE = 552
_LOGIN = (534, 535, 538)  # the password is wrong, or this way to log in is not allowed
_CERTAIN = (550, 551, 553)  # there is no such sender, mailbox or name, and the error is no accident on the way


def _refused(recipients: dict[str, Any], behind: tuple[str, ...], hidden: list[str]) -> Exception:
    """Return the error for a mail that no recipient took. If one may take it later, it is tried again."""
    text = _answers(recipients.items(), hidden)
    codes = [code for code, _ in recipients.values()]
    if behind or any(not 500 <= code < 600 for code in codes):
        return TryLater(f"refused every recipient: {text}")
    doubtful = next((code for code in codes if code not in _CERTAIN), _CERTAIN[0])
    return _by_code(doubtful, text, "every recipient", hidden)


def _by_code(code: int, text: object, what: str, hidden: list[str], *, certain: Iterable[int] = _CERTAIN) -> Exception:
    sentence = redact(f"refused {what}: {code} {_text(text)}", hidden)
    if code in certain:
        return Broken(sentence)
    return Doubtful(sentence) if 500 <= code < 600 else TryLater(sentence)


def _answers(recipients: Iterable[tuple[str, Any]], hidden: list[str]) -> str:
    return redact("; ".join(f"{to}: {code} {_text(why)}" for to, (code, why) in recipients), hidden)


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
