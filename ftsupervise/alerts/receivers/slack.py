"""Sends to Slack, through slack-sdk: Block Kit with a text fallback, in an attachment that has the colour of its state.

With a bot token a post is edited when its alert is over, and later news (repeats, escalations, the end) go into its
thread. An incoming webhook can do neither: it gets a post for each. Rate limits and outages are left to the outbox.

slack-sdk knows the methods and what their answers mean; the request itself is the one that the other receivers make: urllib, as
slack-sdk uses it, would follow a redirect with the token, and read an answer of any length.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError
from slack_sdk.web import SlackResponse

from ftsupervise.alerts.outbox import Message
from ftsupervise.alerts.receivers import (
    Broken,
    Doubtful,
    Unsendable,
    read_secret,
    redact,
    safe_address,
)
from ftsupervise.alerts.receivers.webhook import behind_a_proxy, failure, object_in, post_json
from ftsupervise.alerts.wording import ENDS, Parcel, in_short, render, slack_escape
from ftsupervise.findings import Reason

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Slack

HEADER, SECTION, FIELD, BLOCKS, TEXT = 150, 2900, 1900, 45, 3000
_RED, _YELLOW, _BLUE, _GREEN, _GREY = "#c62828", "#f9a825", "#1565c0", "#2e7d32", "#757575"
_CHOKED = (
    "invalid_blocks",
    "invalid_blocks_format",
    "msg_too_long",
    "no_text",
    "invalid_payload",
    "too_many_attachments",
)
# Slack's own words for failures that no second try changes. Any other answer may come from something between us and
# Slack.
_FINAL = frozenset(
    {
        "account_inactive",
        "action_prohibited",
        "cant_broadcast_message",
        "channel_is_archived",
        "channel_not_found",
        "enterprise_is_restricted",
        "invalid_auth",
        "invalid_token",
        "is_archived",
        "messages_tab_disabled",
        "missing_scope",
        "no_active_hooks",
        "no_permission",
        "no_service",
        "no_team",
        "not_allowed_token_type",
        "not_authed",
        "not_in_channel",
        "org_login_required",
        "posting_to_general_channel_denied",
        "restricted_action",
        "restricted_action_read_only_channel",
        "team_access_not_granted",
        "team_disabled",
        "token_expired",
        "token_revoked",
        "user_not_found",
    }
)
_PASSING = ("ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout")
_GONE = ("message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found")
_SILENT = logging.Logger("ftsupervise.slack", logging.CRITICAL + 1)  # slack-sdk logs bodies and headers


def address(settings: Slack) -> tuple[str, int]:
    """Return the host and port of Slack, or of the proxy before it. Raises Broken, TryLater."""
    webhook = read_secret(settings, "webhook")
    if not webhook:
        read_secret(settings, "token")
    return behind_a_proxy(safe_address(webhook, "webhook") if webhook else safe_address(settings.api_url, "api_url"))


def send(parcel: Parcel, settings: Slack) -> dict[str, str]:
    """Post the message. Slack must answer ok. Receipt (with a token): ``ts``, ``channel``, and a ``seal`` over them."""
    webhook, token = read_secret(settings, "webhook"), read_secret(settings, "token")
    return _by_webhook(parcel, settings, webhook) if webhook else _by_token(parcel, settings, token)


# ------------------------------------------------------------------------------------------------------- two ways


def _by_webhook(parcel: Parcel, settings: Slack, address: str) -> dict[str, str]:
    address = safe_address(address, "webhook")
    answer = post_json(address, compose(parcel, settings), settings.timeout, hidden=[address])
    said = answer.body.strip()
    if answer.status == 200 and said == "ok":
        return {}
    why = redact(said, [address])
    if said in _CHOKED:
        raise Unsendable(why)
    if said in _FINAL:
        raise Broken(f"Slack says {said} (HTTP {answer.status})")
    if answer.status < 300:
        raise Doubtful(f"HTTP {answer.status}, but not Slack's ok: {why or 'an empty answer'}")
    raise failure(answer.status, why, answer.headers.get("Retry-After"), parcel.now)


class _Client(WebClient):
    """Slack's methods by name; each call is one request of ours."""

    def __init__(self, token: str, settings: Slack) -> None:
        base = safe_address(settings.api_url, "api_url").rstrip("/") + "/"
        super().__init__(token, base_url=base, logger=_SILENT)
        self._within = settings.timeout

    def api_call(self, api_method: str, *, json: dict[str, Any] | None = None, **_: Any) -> SlackResponse:
        """Raises SlackApiError where Slack refuses, Doubtful where the answer is not one of Slack's, TryLater for none."""
        url, token = self.base_url + api_method, str(self.token)
        given = {name: value for name, value in (json or {}).items() if value is not None}
        answer = post_json(url, given, self._within, bearer=token, hidden=[token])
        response = SlackResponse(
            client=self,
            http_verb="POST",
            api_url=url,
            req_args={},
            data=_object(answer.body),
            headers=dict(answer.headers),
            status_code=answer.status,
        )
        response.validate()  # type: ignore[no-untyped-call]
        return response


def _object(body: str) -> dict[str, Any]:
    """Return the answer; of one that is not Slack's its beginning, as an error that Slack does not know."""
    found = object_in(body)
    return {"ok": False, "error": body[:300].strip() or "an empty answer"} if found is None else found


def _by_token(parcel: Parcel, settings: Slack, token: str) -> dict[str, str]:
    client = _Client(token, settings)
    try:
        posted = [post for post in parcel.earlier if _is_sealed(post, token)]
        for one in posted:
            _edit(client, parcel, one, settings)
        first, where = _place(parcel.message, posted)
        answer = client.chat_postMessage(
            channel=first.get("channel") or settings.channel or "",
            unfurl_links=False,
            unfurl_media=False,
            metadata={"event_type": "ftsupervise_alert", "event_payload": {"key": parcel.message.id}},
            **compose(parcel, settings),
            **where,
        )
    except SlackApiError as error:
        raise _meaning(error, token, parcel) from None
    receipt = {"ts": str(answer.get("ts", "")), "channel": str(answer.get("channel", ""))}
    return {**receipt, "seal": _seal(parcel.message.id, receipt, token)}


def _is_sealed(post: Message, token: str) -> bool:
    """Return whether the receipt was given to who has this token: others may write a journal that is shared, or that of a run
    of theirs, and would have the token post, and write over posts, where they say."""
    return hmac.compare_digest(post.receipt.get("seal", "").encode(), _seal(post.id, post.receipt, token).encode())


def _seal(post: str, receipt: dict[str, str], token: str) -> str:
    said = "\0".join((post, receipt.get("channel", ""), receipt.get("ts", "")))
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()[:32]


def _place(message: Message, posted: list[Message]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (receipt of the post it answers to, options): news go to the channel, follow-ups into the thread.

    A thread notifies only its followers, so an escalation shows in the channel as well.
    """
    reasons = {notice.reason for notice in message.notices}
    if not posted or message.origins or reasons & {Reason.FIRED, Reason.ANNOUNCED}:
        return {}, {}
    louder = {"reply_broadcast": True} if Reason.ESCALATED in reasons else {}
    return posted[0].receipt, {"thread_ts": posted[0].receipt["ts"], **louder}


def _edit(client: Any, parcel: Parcel, post: Message, settings: Slack) -> None:
    """Edit the earlier post to show its alerts as they are now.

    Doing it twice does no harm, so neither does a crash half-way.
    """
    ends = {n.alert_id: n for n in parcel.message.notices if n.reason in ENDS}
    now_over = {**parcel.ended, **{ident: end.at for ident, end in ends.items()}}
    if not now_over.keys() & {n.alert_id for n in post.notices}:
        return
    notices = tuple(replace(n, times=ends[n.alert_id].times) if n.alert_id in ends else n for n in post.notices)
    edited = replace(parcel, message=replace(post, notices=notices), over_by_now=now_over)
    try:
        client.chat_update(channel=post.receipt["channel"], ts=post.receipt["ts"], **compose(edited, settings))
    except SlackApiError as error:
        if _word(error) not in _GONE:  # the post was deleted: the reply still says that it is over
            raise


def _meaning(error: SlackApiError, token: str, parcel: Parcel) -> Exception:
    word, status = _word(error), error.response.status_code
    why = redact(word or error, [token])
    if word in _FINAL:
        return Broken(f"Slack says {why}")
    if status != 200:
        return failure(status, why, error.response.headers.get("Retry-After"), parcel.now)
    if word in _CHOKED:
        return Unsendable(why)
    if word in _PASSING:
        return failure(429, why, error.response.headers.get("Retry-After"), parcel.now)
    return Doubtful(f"Slack says {why}")


def _word(error: SlackApiError) -> str:
    return str(error.response.get("error") or "")


# -------------------------------------------------------------------------------------------------------- the body


def compose(parcel: Parcel, settings: Slack) -> dict[str, Any]:
    """Return ``text`` and ``blocks`` within Slack's limits."""
    loud = settings.mention and parcel.severity == "critical" and not parcel.over and not parcel.over_by_now
    text = _fit((f"{settings.mention} " if loud else "") + slack_escape(parcel.title), TEXT)
    if parcel.message.plain:
        return {"text": _fit(slack_escape(in_short(parcel)), TEXT), "attachments": []}
    paragraphs = re.split(r"\n\s*\n", render("alert.slack.j2", parcel, kind="slack").strip())
    sections = [_section(_fit(part.strip("\n"), SECTION)) for part in paragraphs if part.strip()]
    if fields := _fields(parcel):
        sections.insert(min(len(parcel.notes) + 1, len(sections)), {"type": "section", "fields": fields})
    if len(sections) > BLOCKS:
        sections = [*sections[:BLOCKS], _section("…")]
    header = {"type": "header", "text": {"type": "plain_text", "text": _cut(parcel.title, HEADER), "emoji": False}}
    if parcel.tracker:
        sections.append(_section(f"<{slack_escape(parcel.tracker)}|Its page in the experiment tracker>"))
    if parcel.day is not None:  # a code block, so that its characters stand in columns
        sections.append(_section(_fit(f"```{slack_escape(parcel.day.narrow.text)}```", SECTION)))
    mention = [_section(settings.mention)] if loud and settings.mention else []
    colour = {"color": _colour(parcel), "fallback": text, "blocks": sections}
    return {"text": text, "blocks": [header, *mention], "attachments": [colour]}


def _fields(parcel: Parcel) -> list[dict[str, str]]:
    """Return what is read at a glance, side by side: of a single alert its numbers, and how the run is now."""
    only = parcel.items[0] if len(parcel.items) == 1 and not parcel.more else None
    pairs = []
    if only is not None and only.reason not in ("resolved", "unwatched", "announced") and not only.over:
        since = f"{only.since} ({only.age})" if only.age else only.since
        pairs = [("Value", only.value), ("Limit", only.limit), ("Since", since)]
    pairs += [(name if name.isupper() else name.capitalize(), text) for name, text in parcel.facts]
    return [
        {"type": "mrkdwn", "text": _fit(f"*{name}*\n{slack_escape(text)}", FIELD)} for name, text in pairs[:10] if text
    ]


def _colour(parcel: Parcel) -> str:
    if parcel.over:
        watched = all(item.reason != "unwatched" for item in parcel.items)
        news = all(item.reason == "announced" for item in parcel.items)
        return _BLUE if news else _GREEN if watched else _GREY
    return {"critical": _RED, "warning": _YELLOW}.get(parcel.severity, _BLUE)


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _fit(text: str, limit: int) -> str:
    """Cut mrkdwn so that no entity is torn and no code span is left open."""
    if len(text) <= limit:
        return text
    cut = re.sub(r"&[a-z]{0,3}$", "", text[: limit - 2])
    return cut + "…" + ("`" if cut.count("`") % 2 else "")
