"""One file for each way to reach people, one line here for each file. Other packages bring theirs by an entry point.

A receiver is ``send(parcel, settings) -> receipt``: it returns when the other side has accepted the message,
else raises one of the three errors below. It keeps no state, never sleeps, retries nothing: when to try again is the
outbox's affair. Its errors never carry a secret.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ftsupervise import secrecy
from ftsupervise.alerts.wording import Parcel, one_line
from ftsupervise.errors import PluginUnusable
from ftsupervise.host import ownership, plugins, ports
from ftsupervise.host.links import may_be_root
from ftsupervise.printable import to_type

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts, Receiver
    from ftsupervise.config.schema import Run

MODULES = {
    "email": "ftsupervise.alerts.receivers.email",
    "slack": "ftsupervise.alerts.receivers.slack",
    "webhook": "ftsupervise.alerts.receivers.webhook",
    "apprise": "ftsupervise.alerts.receivers.apprise",
    "command": "ftsupervise.alerts.receivers.command",
    "file": "ftsupervise.alerts.receivers.file",
}


class TryLater(Exception):
    """The message did not arrive, and may another time. ``after``: how long the other side asked us to wait."""

    def __init__(self, why: str, *, after: timedelta | None = None) -> None:
        super().__init__(why)
        self.after = after


class Doubtful(TryLater):
    """The message was refused, perhaps for good and perhaps by an accident on the way: a proxy's page, a 404, a 554 as
    greeting.

    It is tried again like ``TryLater``, and reported through another receiver in the meantime.
    """


class Partly(TryLater):
    """Some recipients have the message.

    ``left``: those to try again, ``waits`` if only because an earlier message must reach them first; ``refused``: the
    recipients that will never take it, and why.
    """

    def __init__(self, why: str, *, left: tuple[str, ...], refused: str = "", waits: bool = False) -> None:
        super().__init__(why)
        self.left, self.refused, self.waits = left, refused, waits


class Broken(Exception):
    """This receiver certainly takes nothing until a person changes something: the service itself names the token or the
    channel as wrong, or our own settings cannot be used."""


class Unsendable(Exception):
    """The receiver is fine, but will never take this very message (too long, a block it does not know)."""


PATIENCE = timedelta(seconds=20)  # for one message, whatever the receiver's own timeouts allow
MOST_READ = 1_000_000  # bytes of what a server says in one conversation
Answer = TypeVar("Answer")


def answered(work: Callable[[], Answer]) -> Answer:
    """Return what ``work`` returns. Raises what it raises, and TryLater where it takes longer than PATIENCE: a client waits
    without an end for a server that says a little now and then."""
    from ftsupervise.host.in_time import in_time

    found = in_time(lambda: (work(),), PATIENCE.total_seconds())
    if found is None:
        raise TryLater(f"no answer within {PATIENCE.total_seconds():.0f}s")
    return found[0]


Send = Callable[[Parcel, Any], dict[str, str]]
NOTHING = (
    "nothing"  # in a receipt: this kind of message is none for this receiver, so nothing was sent and nothing is known
)


def sender(kind: str) -> Send:
    """Return the ``send`` of a kind of receiver; its module and libraries are imported now, not before.

    Call it before there are threads: two that import one package for the first time wait for each other, and one of
    them is given a half-made module.
    """
    import_module("jinja2.sandbox")  # wording.py renders with it
    if kind not in MODULES:
        return _sender_of_plugin(kind)
    send: Send = import_module(MODULES[kind]).send
    return send


def _sender_of_plugin(kind: str) -> Send:
    from ftsupervise.config.plugged import as_used, module_of

    try:
        module = module_of(plugins.RECEIVERS, kind)
    except PluginUnusable as error:
        raise Broken(error.message) from error

    def send(parcel: Parcel, settings: Any) -> dict[str, str]:
        try:
            receipt = module.send(parcel, as_used(plugins.RECEIVERS, kind, settings))
        except PluginUnusable as error:
            raise Broken(error.message) from None
        except SystemExit:
            raise TryLater(f"the receiver {kind} wanted to exit") from None
        kept = receipt.items() if isinstance(receipt, Mapping) else ()
        return {str(name): str(value) for name, value in kept}

    return send


def delivered_to(receiver: Receiver) -> str:
    """Return who or what has a message when ``send`` has returned, without a secret: "delivered to …"."""
    settings: Any = receiver.settings
    if receiver.kind == "email":
        return f"delivered to {settings.host} for {', '.join(settings.to)}"
    if receiver.kind == "slack":
        return f"delivered to Slack{f', channel {settings.channel}' if settings.channel else ''}"
    if receiver.kind == "webhook":
        service = {"pagerduty": "PagerDuty", "alertmanager": "Alertmanager"}.get(settings.shape, "the webhook")
        host = redact(settings.url) if settings.url is not None else ""
        return f"delivered to {service}{f' at {host}' if host else ''}"
    if receiver.kind == "apprise":
        return "delivered to every address, as Apprise says"
    if receiver.kind == "command":
        return f"delivered to {settings.argv[0]}, which ended with 0"
    return f"written to {settings.path}" if receiver.kind == "file" else f"delivered by {receiver.kind}"


def address_of(receiver: Receiver) -> tuple[str, int] | None:
    """Return the host and port that ``send`` would speak to, a proxy's where one stands before it; None: it is a file, a
    program, or addresses of Apprise's, or its module has no ``address``. Raises Broken or TryLater where its secret, or the
    package that brings it, cannot be used.
    """
    found: tuple[str, int] | None = None
    module, settings = _module_of(receiver)
    if hasattr(module, "address"):
        found = module.address(settings)
    elif receiver.kind == "apprise":
        read_secret(settings, "urls")
    return found


def _module_of(receiver: Receiver) -> tuple[ModuleType, Any]:
    """Return the module of a receiver, and its settings as that takes them."""
    if receiver.kind in MODULES:
        return import_module(MODULES[receiver.kind]), receiver.settings
    from ftsupervise.config.plugged import as_used, module_of

    try:
        module = module_of(plugins.RECEIVERS, receiver.kind)
        return module, as_used(plugins.RECEIVERS, receiver.kind, receiver.settings)
    except PluginUnusable as error:
        raise Broken(error.message) from None


# Secrets are read when a message is sent, from a file only its owner can read or from the environment. They live in local
# variables of one function call; every error text leaves through ``redact``.

_SECRET_WITHIN = 5.0  # seconds
_LOOKED_THROUGH = 100_000  # characters of an answer in which secrets are looked for; the rest is cut off
_CREDENTIALS = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@]*@", re.I)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://[^\s/\"'<>?#]+)[^\s\"'<>]*", re.I)


def read_secret(settings: Any, name: str) -> str:
    """Return the secret that ``settings`` names by ``NAME_file`` or ``NAME_env``; "" when it names none.

    Raises Broken with a sentence (never with the secret) when the file or variable is missing, empty, or open to
    others; TryLater when the file system does not answer.
    """
    path: Path | None = getattr(settings, f"{name}_file", None)
    variable: str | None = getattr(settings, f"{name}_env", None)
    if path is not None:
        return _secret_in_file(path, name)
    if variable is not None:
        value = os.environ.get(variable, "").strip()
        if not value:
            raise Broken(f"{name}_env: the environment variable {variable} is not set")
        return value
    return ""


def without_receivers(run: Run) -> tuple[str, ...]:
    """A note if no receiver is configured for the run; () when there is one."""
    if run.alerts.receivers:
        return ()
    first = "alerts: {receivers: [{file: {path: messages.txt}}]}"
    return (f"alerts.receivers is empty: nobody is notified when {run.name} stops; to begin with, write: {first}",)


def missing_secrets(alerts: Alerts) -> tuple[str, ...]:
    """Return a sentence for each secret that is missing or unusable, so that a receiver cannot be reached; never the secret."""
    found = []
    everyone: list[tuple[str, Any]] = []
    for name, receiver in alerts.named.items():
        settings = receiver.settings
        if receiver.kind not in MODULES:
            from ftsupervise.config.plugged import as_used

            try:
                settings = as_used(plugins.RECEIVERS, receiver.kind, settings)
            except PluginUnusable as error:
                found.append(f"alerts.receivers: {name}: {error.message}")
                continue
        everyone.append((f"alerts.receivers: {name}", settings))
    if alerts.dead_man is not None:
        everyone.append(("alerts.dead_man", alerts.dead_man))
    for whose, settings in everyone:
        names = {key.rpartition("_")[0] for key in type(settings).model_fields if key.endswith(("_file", "_env"))}
        for name in sorted(names - {"ca"}):
            try:
                read_secret(settings, name)
            except (Broken, TryLater) as error:
                found.append(f"{whose}: {error}")
    return tuple(found)


def _secret_in_file(path: Path, name: str) -> str:
    from ftsupervise.host.in_time import in_time

    found = in_time(lambda: _read_secret_file(path, name), _SECRET_WITHIN)
    if found is None:
        raise TryLater(
            f"{name}_file: {_shown(path)} does not answer within {_SECRET_WITHIN:.0f} s: its file system hangs"
        )
    return found


def _read_secret_file(path: Path, name: str) -> str:
    try:
        with os.fdopen(ownership.open_judged(path), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o077:
                raise Broken(
                    f"{name}_file: {path} can be read by others (mode {stat.S_IMODE(found.st_mode):04o}); "
                    f"type: chmod 600 {to_type(path)}"
                )
            if found.st_uid not in (os.geteuid(), 0):
                raise Broken(f"{name}_file: {path} belongs to another account (uid {found.st_uid})")
            value = file.read(65_536).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        raise Broken(f"{name}_file: {_missing(path)}") from None
    except ownership.NotTrusted as error:
        raise Broken(f"{name}_file: {error.message}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise Broken(f"{name}_file: {path} is not a regular file") from None
        raise Broken(f"{name}_file: cannot read {path}: {error.strerror or error}") from None
    if not value:
        raise Broken(f"{name}_file: {path} is empty")
    return value


def _shown(path: Path) -> str:
    """Return a name to show without a look at the disk: the path where it surely is one, and not the secret itself."""
    surely = path.is_absolute() and secrecy.like_a_file(str(path)[1:]) and not secrecy.like_an_address(str(path))
    return str(path) if surely else "the file that it names"


def _missing(path: Path) -> str:
    """Return a sentence that there is no such file.

    It shows the name only where it surely is one, and not the secret itself.
    """
    for folder in path.parents:
        if folder.is_dir():
            rest = str(path.relative_to(folder))
            shown = path if secrecy.like_a_file(rest) else f"{folder}/…"
            hidden = "" if shown == path else " (its name is not shown: it may be the secret itself)"
            return f"cannot read {shown}: no such file{hidden}"
    return "no such file"


def redact(text: object, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` in one short line without ``secrets``, however they are encoded, without anything else of that
    form, and with addresses cut at the host.
    """
    out = secrecy.masked(str(text)[:_LOOKED_THROUGH], [part for secret in secrets for part in _parts(secret)])
    out = _URL.sub(r"\1/…", _CREDENTIALS.sub(r"\1", out))
    return one_line(out, 300)


def _parts(secret: str) -> list[str]:
    """Return the parts of a secret that must not be shown, the longest first: libraries cut addresses and show the path
    alone.
    """
    from urllib.parse import urlsplit

    parts = {secret, *secret.split()}
    for word in secret.split():
        if "://" in word:
            url = urlsplit(word)
            parts |= {url.path, url.query, f"{url.path}?{url.query}", url.password or "", url.username or ""}
            parts |= {piece for piece in url.path.split("/") if len(piece) >= 8}
    return sorted((part for part in parts if len(part.strip("/")) >= 4), key=len, reverse=True)


# Whoever listens at a port reads what is sent to this very machine in the clear, and while a service is down, anybody may
# listen at its port from 1024 on. So nothing is sent to the account of another person.

HERE = ("localhost", "127.0.0.1", "::1")
_PEOPLE = 1000  # numbers of accounts below it are those of services, as login.defs has them everywhere


def safe_address(url: str, what: str) -> str:
    """Return ``url`` as it may be used: https, or http to this very machine, where no other person listens. Raises Broken,
    Doubtful."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme == "https":
        return url
    try:
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:
        raise Broken(f"{what}: its address has no such port") from None
    if parts.scheme != "http" or host not in HERE:
        raise Broken(f"{what}: the address must start with https:// (http:// only for this very machine)")
    at = where_ours(host, port)
    if at == host:
        return url
    login, sign, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{login}{sign}{f'[{at}]' if ':' in at else at}:{port}").geturl()


def where_ours(host: str, port: int) -> str:
    """Return ``host``, a name of this very machine; where another person listens at ``port`` of one of its two addresses, the
    other one. Raises Doubtful where there is no other."""
    at = {here: uid for here, uid in ports.listeners_here(port).items() if host in ("localhost", here)}
    others = [uid for uid in at.values() if uid >= _PEOPLE and uid != os.geteuid() and not may_be_root(uid)]
    ours = [here for here, uid in at.items() if uid not in others]
    if others and not ours:
        raise Doubtful(f"{ownership.shown_user(others[0])} listens at port {port} of this machine, and is sent nothing")
    return ours[0] if others else host
