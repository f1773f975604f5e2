"""A ping to an outside service that calls somebody when the pings stop: the watch of the watch.

Speaks healthchecks.io's form: URL for success, URL/start, URL/fail, URL/log. It is sent only after a tick that could see
and left nothing critical undelivered; a watch that cannot see or cannot send must look dead to the outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ftsupervise.alerts import secrets
from ftsupervise.alerts.deliver import Delivered
from ftsupervise.alerts.receivers import Broken

if TYPE_CHECKING:
    from ftsupervise.config.alerting import DeadMan

Kind = Literal["success", "start", "fail", "log"]


def verdict(*, could_see: bool, delivered: Delivered, why_blind: str = "") -> tuple[Kind, str]:
    """What to tell the service after a tick: "success", or "log" (which does not count as a sign of life) and why."""
    if not could_see:
        return "log", f"this tick could not see: {why_blind or 'no reason given'}"
    if delivered.critical_waiting:
        return "log", f"{delivered.critical_waiting} critical messages could not be delivered yet"
    return "success", f"{len(delivered.sent)} messages sent, {delivered.waiting} waiting"


def ping(settings: DeadMan, kind: Kind = "success", text: str = "") -> str:
    """Send one ping. "" when the service took it, else why not (without secrets). Never raises, never waits long."""
    import requests

    address = ""
    try:
        address = secrets.check(secrets.read(settings, "url"), "dead_man.url").rstrip("/")
        suffix = "" if kind == "success" else f"/{kind}"
        seconds = settings.timeout.total_seconds()
        with requests.post(
            address + suffix,
            data=secrets.redact(text).encode(),
            timeout=(seconds, seconds),
            allow_redirects=False,
            stream=True,
            headers={"Content-Type": "text/plain; charset=utf-8", "User-Agent": "ftsupervise"},
        ) as answer:
            return "" if answer.status_code < 300 else f"the dead-man service answered HTTP {answer.status_code}"
    except Broken as error:
        return str(error)
    except (requests.RequestException, OSError, ValueError) as error:
        return secrets.redact(f"the dead-man service: {type(error).__name__}: {error}", [address])


def after_tick(settings: DeadMan | None, *, could_see: bool, delivered: Delivered, why_blind: str = "") -> str:
    """The whole of it, for the end of a watch tick. "" when there was nothing to do or it went well."""
    if settings is None:
        return ""
    kind, text = verdict(could_see=could_see, delivered=delivered, why_blind=why_blind)
    return ping(settings, kind, text)
