"""What the receivers that speak HTTP share: when to come again, and what an answer means."""

from __future__ import annotations

from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime

from ftsupervise.alerts.outbox import RETRY_AFTER_MOST
from ftsupervise.alerts.receivers import Broken, Doubtful, TryLater, Unsendable


def retry_after(value: str | None, now: datetime) -> timedelta | None:
    """``Retry-After`` as a duration: seconds or a date, never negative, never more than an hour. None: not given."""
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(timedelta(seconds=min(int(text[:12]), 10**9)), RETRY_AFTER_MOST)
    try:
        at = parsedate_to_datetime(text)
        wait = at - now if at.tzinfo else at.replace(tzinfo=now.tzinfo) - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(wait, timedelta(0)), RETRY_AFTER_MOST)


def failure(status: int, why: str, after: str | None, now: datetime) -> Exception:
    """The error that a status other than 2xx stands for. ``why`` has no secrets in it any more.

    Only 410 says by itself that it is for good; a 401, 403 or 404 may come from a proxy or a server that is being set up.
    """
    text = f"HTTP {status}{': ' + why if why else ''}"
    if status == 429 or status >= 500 or status in (408, 425):
        return TryLater(text, after=retry_after(after, now))
    if 300 <= status < 400:
        return Doubtful(f"{text}: it redirects elsewhere, which is not followed; set the new address if it stays so")
    if status in (400, 413, 422):
        return Unsendable(text)
    return Broken(text) if status == 410 else Doubtful(text, after=retry_after(after, now))


def looks_like_a_page(body: str) -> bool:
    """A web page where a machine's answer belongs: somebody's login or error page, with status 200."""
    return body.lstrip("\ufeff \t\r\n").lower().startswith(("<!doctype html", "<html"))
