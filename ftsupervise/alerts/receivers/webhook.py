"""Sends an HTTP POST to any service that takes one: our own JSON, PagerDuty Events v2, Alertmanager v2 (shapes are
templates).

PagerDuty takes one event for each alert, so a message of several is several requests; each carries the dedup key that
joins trigger and resolve, so sending one twice is harmless. Redirects are not followed: they would carry the key along.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import requests
from requests.utils import get_auth_from_url, get_environ_proxies, select_proxy
from urllib3.exceptions import HTTPError

from ftsupervise.alerts.outbox import RETRY_AFTER_MOST
from ftsupervise.alerts.receivers import (
    HERE,
    MOST_READ,
    NOTHING,
    Broken,
    Doubtful,
    TryLater,
    Unsendable,
    read_secret,
    redact,
    safe_address,
)
from ftsupervise.alerts.wording import ENDS, Item, Parcel, one_line, render

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Webhook

# For all receivers that speak HTTP: one request, when to try again, and the meaning of an answer.


class Answer(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]  # in any case
    body: str  # its beginning


def post_json(
    url: str,
    body: Any,
    within: timedelta,
    *,
    bearer: str = "",
    headers: Mapping[str, str] | None = None,
    hidden: Iterable[str] = (),
) -> Answer:
    """Make one request with the JSON of ``body``: no redirect is followed, nothing is tried twice, at most a megabyte is read.

    ``within``: for the connection, and between two parts of the answer. Raises TryLater, with none of ``hidden`` in its words,
    where no answer came; Unsendable for more than half a megabyte.
    """
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    if len(data) > _LARGEST:
        raise Unsendable(f"{len(data)} bytes are too many")
    told = {"User-Agent": "ftsupervise", "Content-Type": "application/json; charset=utf-8", **(headers or {})}
    told["Accept-Encoding"] = "identity"  # what is packed may be a thousand times larger
    if bearer:
        told["Authorization"] = f"Bearer {bearer}"
    seconds = within.total_seconds()
    try:
        with post(url, data, told, seconds) as answer:
            said = answer.raw.read(MOST_READ, decode_content=False).decode("utf-8", "replace")
            return Answer(answer.status_code, answer.reason or "", answer.headers, said)
    except (requests.RequestException, HTTPError, OSError) as error:
        raise TryLater(f"{type(error).__name__}: {redact(_cause(error), hidden)}") from None


def post(url: str, data: bytes, headers: Mapping[str, str], seconds: float) -> requests.Response:
    """Make one request, of which only the head of the answer is read. No redirect is followed, no password of ~/.netrc goes
    along in the place of what the settings name, and what is for this very machine goes through no proxy."""
    login = get_auth_from_url(url)
    return requests.post(
        url,
        data=data,
        headers=headers,
        timeout=(seconds, seconds),
        allow_redirects=False,
        stream=True,
        auth=login if any(login) else _as_it_is,
        proxies=dict.fromkeys(("http", "https", "all"), "") if _is_here(url) else None,
    )


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in HERE


def object_in(body: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is; None for any other."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, or brackets within brackets
        return None
    return found if isinstance(found, dict) else None


def _cause(error: BaseException) -> str:
    """Return the innermost reason: the outer ones of requests repeat the whole address."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return getattr(error, "strerror", None) or str(error)


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
    """Return the error that a status other than 2xx stands for. ``why`` has no secrets in it any more.

    Only 410 means by itself that it is for good; a 401, 403 or 404 may come from a proxy or a server that is being set
    up.
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
    """Return whether it is a web page where a machine's answer belongs: a login or error page, with status 200."""
    return body.lstrip("\ufeff \t\r\n").lower().startswith(("<!doctype html", "<html"))


PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
_LARGEST = 512_000  # bytes of a body: PagerDuty's own limit
_SHOWN = 300  # characters of it


def send(parcel: Parcel, settings: Webhook) -> dict[str, str]:
    """Send the message. It is delivered when every request was answered with 2xx, and not with a web page.

    Returns the service's own word, where it has one. News, which is no alert, is not for a pager: then nothing is sent.
    """
    key, url = read_secret(settings, "key"), _url(settings)
    bodies = compose(parcel, settings)
    if not bodies and settings.shape != "json":
        return {NOTHING: "it is no alert"}
    said = ""
    for body in bodies:
        if settings.shape == "pagerduty":
            body["routing_key"] = key
        said = _post(url, body, key if settings.shape != "pagerduty" else "", settings, parcel)
    return {"answer": _word(said)} if settings.shape == "pagerduty" and _word(said) else {}


def _url(settings: Webhook) -> str:
    """Return the address that is posted to. Raises Broken, TryLater."""
    url = (str(settings.url) if settings.url is not None else read_secret(settings, "url")) or PAGERDUTY
    return url if settings.plain_http and url.startswith("http://") else safe_address(url, "url (or set plain_http)")


def compose(parcel: Parcel, settings: Webhook) -> list[Any]:
    if settings.shape == "pagerduty":
        items = [item for item in parcel.items if item.reason != "announced"]
        return [_json(parcel, settings, item=item, action=_action(item)) for item in items]
    body = _json(parcel, settings)
    return [body] if body else []


def _action(item: Item) -> str:
    return "resolve" if item.reason in {reason.value for reason in ENDS} else "trigger"


def _json(parcel: Parcel, settings: Webhook, **more: Any) -> Any:
    """Return the template's text as the JSON value it must be; everything in it went through ``tojson``."""
    own = settings.template
    if own is not None:
        text = render(own.name, replace(parcel, templates=own.parent), kind="json", **more)
    else:
        text = render(f"alert.{settings.shape}.j2", parcel, kind="json", **more)
    try:
        return json.loads(text)
    except ValueError as error:
        raise Broken(f"the webhook's template does not make JSON: {error}") from None


def _word(said: str) -> str:
    """Return what PagerDuty calls its answer, such as "Event processed"; "" where it is none of its own."""
    answer = object_in(said) or {}
    return one_line(str(answer.get("message") or answer.get("status") or ""), 100)


def _refusal(said: str) -> str:
    """Return why PagerDuty did not process the event, although it answered with 2xx; "" if it did, or did not say."""
    status = (object_in(said) or {}).get("status", "success")
    return "" if status == "success" else f"{status}: {_word(said)}"


def address(settings: Webhook) -> tuple[str, int]:
    """Return the host and port of the service, or of the proxy before it. Raises Broken, TryLater."""
    read_secret(settings, "key")
    return behind_a_proxy(_url(settings))


def behind_a_proxy(url: str) -> tuple[str, int]:
    """Return the host and port to which a request for ``url`` goes, of the proxy if there is one. Raises Broken."""
    proxy = None if _is_here(url) else select_proxy(url, get_environ_proxies(url))
    parts = urlsplit(proxy or url)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        port = 0
    if not parts.hostname or not port:
        raise Broken("its address is no URL with a host")
    return parts.hostname, port


def _post(url: str, body: Any, bearer: str, settings: Webhook, parcel: Parcel) -> str:
    """Post ``body`` and return the beginning of the answer."""
    hidden = [bearer, url, str(body.get("routing_key", "")) if isinstance(body, dict) else ""]
    key = {"Idempotency-Key": parcel.message.id}
    answer = post_json(url, body, settings.timeout, bearer=bearer, headers=key, hidden=hidden)
    said = answer.body[:_SHOWN]
    if answer.status < 300 and looks_like_a_page(said):
        raise Doubtful(f"HTTP {answer.status}, but with a web page: {redact(said, hidden)}")
    if answer.status >= 300:
        why = redact(said or answer.reason, hidden)
        raise failure(answer.status, why, answer.headers.get("Retry-After"), parcel.now)
    if settings.shape == "pagerduty" and (refusal := _refusal(answer.body)):
        raise Doubtful(f"HTTP {answer.status}, but {redact(refusal, hidden)}")
    return answer.body
