"""Mail. Built with EmailMessage, so no header can be injected; one SMTP conversation, every step bounded.

Follow-ups carry References and In-Reply-To, so an incident is one thread. The Message-ID is the dedup key: a mail that
was sent twice because the first answer was lost is the same mail to every mailbox that drops duplicates.
"""

from __future__ import annotations

import smtplib
import ssl
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

from ftsupervise.alerts import secrets
from ftsupervise.alerts.receivers import Broken, Parcel, TryLater, Unsendable
from ftsupervise.alerts.wording import View, render, view

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Email


def compose(parcel: Parcel, settings: Email) -> EmailMessage:
    """The mail as it will be sent."""
    message = parcel.message
    seen: View = view(message, parcel.now)
    mail = EmailMessage()
    domain = settings.from_.rpartition("@")[2]
    mail["From"] = Address("ftsupervise", addr_spec=settings.from_)
    mail["To"] = tuple(Address(addr_spec=to) for to in settings.to)
    mail["Subject"] = _subject(render("alert.subject.j2", seen, own=parcel.templates))
    mail["Date"] = format_datetime(message.created)
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    posts = [f"<{post}@{domain}>" for post in message.posts][:10]
    if posts:
        mail["In-Reply-To"] = posts[-1]
        mail["References"] = " ".join(posts)
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Auto-Response-Suppress"] = "All"
    mail["List-Id"] = "ftsupervise alerts <ftsupervise.alerts>"
    mail["X-Ftsupervise-Key"] = message.id
    if message.worst.word == "critical" and not seen.over:
        mail["Importance"] = "high"
    text = render("alert.text.j2", seen, own=parcel.templates)
    mail.set_content(text[:4000] if message.plain else text, charset="utf-8")
    if settings.html and not message.plain:
        mail.add_alternative(render("alert.html.j2", seen, own=parcel.templates, kind="html"), subtype="html")
    return mail


def _subject(text: str) -> str:
    """One line, and no encoded word: the email package decodes "=?utf-8?q?=0ABcc:_x?=" and writes the line break out."""
    return " ".join(text.split()).replace("=?", "= ?")


def send(parcel: Parcel, settings: Email) -> dict[str, str]:
    """Sent when the server said 250 after the last dot; what goes wrong after that is not a failure."""
    password = secrets.read(settings, "password")
    mail = compose(parcel, settings)
    hidden = [password]
    try:
        server = _connect(settings)
        try:
            if settings.user is not None:
                server.login(settings.user, password)
            refused = server.send_message(mail, settings.from_, list(settings.to))
        finally:
            _leave(server)
    except smtplib.SMTPAuthenticationError as error:
        raise _by_code(error.smtp_code, error.smtp_error, "login", hidden) from None
    except smtplib.SMTPRecipientsRefused as error:
        raise _refused(error.recipients, hidden) from None
    except smtplib.SMTPSenderRefused as error:
        raise _by_code(error.smtp_code, error.smtp_error, f"the sender {settings.from_}", hidden) from None
    except smtplib.SMTPDataError as error:
        if error.smtp_code in (552, 554):  # too large, or taken for spam: this mail, not this receiver
            raise Unsendable(secrets.redact(f"{error.smtp_code} {_text(error.smtp_error)}", hidden)) from None
        raise _by_code(error.smtp_code, error.smtp_error, "the mail", hidden) from None
    except smtplib.SMTPResponseException as error:
        raise _by_code(error.smtp_code, error.smtp_error, "the connection", hidden) from None
    except smtplib.SMTPNotSupportedError as error:
        raise Broken(secrets.redact(f"{settings.host}: {error}", hidden)) from None
    except ssl.SSLCertVerificationError as error:
        raise Broken(f"{settings.host}: its certificate is not to be trusted: {error.verify_message}") from None
    except (OSError, smtplib.SMTPException) as error:
        raise TryLater(secrets.redact(f"{settings.host}: {error or type(error).__name__}", hidden)) from None
    receipt = {"message_id": str(mail["Message-ID"])}
    if refused:
        receipt["refused"] = secrets.redact(
            "; ".join(f"{to}: {code} {_text(why)}" for to, (code, why) in refused.items()), hidden
        )
    return receipt


def _connect(settings: Email) -> smtplib.SMTP:
    security = settings.security or ("starttls" if settings.user is not None else "none")
    port = settings.port or {"tls": 465, "starttls": 587, "none": 25}[security]
    timeout = settings.timeout.total_seconds()
    context = ssl.create_default_context() if security != "none" else None
    if context is not None and settings.ca_file is not None:
        context.load_verify_locations(settings.ca_file)
    if security == "tls":
        return smtplib.SMTP_SSL(settings.host, port, timeout=timeout, context=context)
    server = smtplib.SMTP(settings.host, port, timeout=timeout)
    if security == "starttls":
        try:
            server.starttls(context=context)
        except BaseException:
            server.close()
            raise
    return server


def _leave(server: smtplib.SMTP) -> None:
    try:
        server.quit()
    except (OSError, smtplib.SMTPException):
        server.close()


def _refused(recipients: Any, hidden: list[str]) -> Exception:
    text = "; ".join(f"{to}: {code} {_text(why)}" for to, (code, why) in recipients.items())
    # One that may be taken later is reason enough to come again.
    code = min((code for code, _ in recipients.values()), default=450)
    return _by_code(code, text, "every recipient", hidden)


def _by_code(code: int, text: object, what: str, hidden: list[str]) -> Exception:
    sentence = secrets.redact(f"refused {what}: {code} {_text(text)}", hidden)
    return Broken(sentence) if 500 <= code < 600 else TryLater(sentence)


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
