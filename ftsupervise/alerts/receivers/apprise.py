"""Reaches all other services that people use (Telegram, Matrix, ntfy, Teams …) through Apprise, an extra.

Apprise says only yes or no for each address, so every no is "try later"; an address it does not understand is broken.
It remembers nothing and sleeps between requests to one service, which our own bound on a delivery covers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ftsupervise.alerts.receivers import Broken, TryLater, read_secret, redact
from ftsupervise.alerts.wording import Parcel, render, without_mentions

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Apprise

apprise: Any
try:
    import apprise
except ImportError:  # an extra
    apprise = None


def send(parcel: Parcel, settings: Apprise) -> dict[str, str]:
    """Send the message. It is delivered when Apprise says so of every address."""
    if apprise is None:
        raise Broken("Apprise is not installed; type: pip install 'ftsupervise[apprise]'")
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it logs addresses
    urls = read_secret(settings, "urls").split()
    box = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False, secure_logging=True))
    for number, url in enumerate(urls, 1):
        if not box.add(url):
            raise Broken(f"address {number} of {len(urls)} is not one that Apprise understands")
    text = render("alert.text.j2", parcel.alone, kind="chat")
    kind = "success" if parcel.over else {"critical": "failure", "warning": "warning"}.get(parcel.severity, "info")
    title = without_mentions(parcel.title)
    try:
        taken = box.notify(body=text, title=title, notify_type=kind, body_format="text", interpret_escapes=False)
    except Exception as error:  # a plug-in of Apprise may raise anything
        raise TryLater(redact(f"{type(error).__name__}: {error}", urls)) from None
    if not taken:
        raise TryLater(f"Apprise could not deliver to all of {len(urls)} addresses (it does not say why)")
    return {}
