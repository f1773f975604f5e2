"""The ``alerts:`` section: the receivers, the alerts each one gets, when, and how often.

No setting holds a secret: passwords, tokens and webhook addresses are named by a file or an environment variable and
read when a message is sent.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, model_validator

from ftsupervise.config.fields import Duration, Matching, Positive, SecretFile, SecretVariable, Strict, wrong_at
from ftsupervise.config.plugged import reading_of, settings_as_kept
from ftsupervise.host.plugins import RECEIVERS, WATCHDOGS, installed

Clock = Annotated[str, Matching(r"([01]\d|2[0-3]):[0-5]\d", "a time of day in quotes", "22:00")]
Address = Annotated[str, Matching(r"[^@\s<>,;]+@[^@\s<>,;]+", "a mail address", "me@example.org")]
Url = Annotated[
    str, Matching(r"https?://[^\s@/]+(/\S*)?", "an address without a password in it", "https://example.org/x")
]


def _not_more_than_all(value: str) -> str:
    bad, total = (int(part) for part in value.split(" of "))
    if bad > total:
        raise ValueError(
            f"{bad} of the last {total} checks can never be bad; write {total} of {bad}, or {total} of {total}"
        )
    return value


Checks = Annotated[
    str,
    Matching(r"[1-9]\d? of [1-9]\d?", "a number of bad checks among the last checks", "2 of 3"),
    AfterValidator(_not_more_than_all),
]
Pause = Annotated[Duration, Positive]  # null, where there is to be none
Word = Annotated[str, Matching(r"[A-Za-z0-9_.-]{1,40}", "a short name", "night-shift")]
SeverityWord = Literal["info", "warning", "critical"]
DayWord = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _one_of(model: Strict, *names: str, needed: bool) -> None:
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) > 1:
        raise wrong_at((given[1],), f"{' and '.join(given)} exclude each other; keep one")
    if needed and not given:
        raise ValueError(f"missing: one of {', '.join(names)} (a secret itself never stands in this file)")


class Email(Strict):
    """Mail through an SMTP server."""

    host: str
    """The mail server."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Default 25; 587 with ``security: starttls``, which a user brings; 465 with ``tls``."""
    from_: Address = Field(alias="from")
    """The sender."""
    to: tuple[Address, ...] = Field(min_length=1)
    """The recipients."""
    security: Literal["none", "starttls", "tls"] | None = None
    """Default: starttls when there is a user to log in, else none."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's own."""
    user: str | None = None
    """The account at the mail server, where it wants one."""
    password_file: SecretFile | None = None
    """A file with its password: yours, readable by you alone."""
    password_env: SecretVariable | None = None
    """The environment variable that holds its password."""
    html: bool | None = None
    """Send the mail as HTML besides the plain text, which has everything too; null: where the last day of the run is drawn."""
    timeout: Annotated[Duration, Positive] = timedelta(seconds=10)
    """The time to wait for its answer."""

    @model_validator(mode="after")
    def _login(self) -> Email:
        _one_of(self, "password_file", "password_env", needed=self.user is not None)
        if self.user is not None and self.security == "none":
            raise wrong_at(("security",), "a password is never sent in the clear; use starttls or tls")
        return self


class Slack(Strict):
    """Slack, by an incoming webhook or, better, by a bot token (posts are edited and threads kept)."""

    webhook_file: SecretFile | None = None
    """A file with the address of the webhook: yours, readable by you alone."""
    webhook_env: SecretVariable | None = None
    """The environment variable that holds the address of the webhook."""
    token_file: SecretFile | None = None
    """A file with the bot token: yours, readable by you alone."""
    token_env: SecretVariable | None = None
    """The environment variable that holds the bot token."""
    channel: str | None = None
    """Needed with a token: the channel's id, such as "C0123456789", or its name."""
    api_url: Url = "https://slack.com/api/"
    """Another address than Slack's own, for a service that speaks as Slack does."""
    mention: str | None = None
    """Put before critical messages, in Slack's own form: "<!channel>", "<@U012AB3CD>"."""
    timeout: Annotated[Duration, Positive] = timedelta(seconds=10)
    """The time to wait for its answer."""

    @model_validator(mode="after")
    def _way(self) -> Slack:
        _one_of(self, "webhook_file", "webhook_env", "token_file", "token_env", needed=True)
        if (self.token_file or self.token_env) and not self.channel:
            raise ValueError("missing: channel (a token may post to many)")
        return self


class Webhook(Strict):
    """An HTTP POST: our own JSON, PagerDuty Events v2, Alertmanager v2, or a template of yours."""

    url: Url | None = None
    """Its address, where that is no secret."""
    url_file: SecretFile | None = None
    """A file with its address: yours, readable by you alone."""
    url_env: SecretVariable | None = None
    """The environment variable that holds its address."""
    shape: Literal["json", "pagerduty", "alertmanager"] = "json"
    """The form of what is posted: our own JSON, an event of PagerDuty, or alerts as Alertmanager takes them."""
    key_file: SecretFile | None = None
    """PagerDuty's routing key, or for other shapes the token of ``Authorization: Bearer``."""
    key_env: SecretVariable | None = None
    """The environment variable that holds that key, or token."""
    plain_http: bool = False
    """Allow http:// to other machines, where the network is your own."""
    template: Path | None = None
    """A Jinja template of your own for what is posted."""
    timeout: Annotated[Duration, Positive] = timedelta(seconds=10)
    """The time to wait for its answer."""

    @model_validator(mode="after")
    def _way(self) -> Webhook:
        pagerduty = self.shape == "pagerduty"
        _one_of(self, "url", "url_file", "url_env", needed=not pagerduty)
        _one_of(self, "key_file", "key_env", needed=pagerduty)
        return self


class Apprise(Strict):
    """All other services, through Apprise (``pip install 'ftsupervise[apprise]'``); one URL a line."""

    urls_file: SecretFile | None = None
    """A file with them: yours, readable by you alone."""
    urls_env: SecretVariable | None = None
    """The environment variable that holds them."""

    @model_validator(mode="after")
    def _way(self) -> Apprise:
        _one_of(self, "urls_file", "urls_env", needed=True)
        return self


class Command(Strict):
    """A program of yours: the message is on its standard input, its subject in FTSUPERVISE_ALERT_* variables."""

    argv: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments."""
    timeout: Annotated[Duration, Positive] = timedelta(seconds=20)
    """The time after which it is ended."""


class File(Strict):
    """A file to append to; for tests, and for ``tail -f``."""

    path: Path
    """The file; it is made where there is none."""


KINDS = ("email", "slack", "webhook", "apprise", "command", "file")


class Receiver(Strict):
    """One way to reach people: exactly one of the kinds, and a name if there are several of a kind."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})  # of other packages

    name: Word | None = None
    """The name that routes use; default: its kind."""
    email: Email | None = None
    """Mail, through an SMTP server."""
    slack: Slack | None = None
    """Posts in a Slack channel."""
    webhook: Webhook | None = None
    """POST requests to an address of yours, PagerDuty or Alertmanager."""
    apprise: Apprise | None = None
    """The services that Apprise knows."""
    command: Command | None = None
    """A program of yours, started for each message."""
    file: File | None = None
    """A file that messages are appended to."""

    @model_validator(mode="after")
    def _one_kind(self, info: ValidationInfo) -> Receiver:
        settings_as_kept(Receiver, RECEIVERS, self.model_extra, info)
        given = [kind for kind in self._kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"a receiver is exactly one of {', '.join(KINDS)}; got {got}")
        return self

    @property
    def _kinds(self) -> tuple[str, ...]:
        return (*KINDS, *(self.model_extra or ()))

    @property
    def kind(self) -> str:
        return next(kind for kind in self._kinds if getattr(self, kind) is not None)

    @property
    def settings(self) -> Any:
        """The settings of its kind."""
        return getattr(self, self.kind)


class Rule(Strict):
    """The delays of one watchdog's alerts; missing keys are as in ``alerts:``."""

    hold: Duration | None = None
    """The same as ``alerts.hold``, for this watchdog."""
    clear: Duration | None = None
    """The same as ``alerts.clear``, for this watchdog."""
    repeat: Pause | None = None
    """The same as ``alerts.repeat``, for this watchdog."""
    escalate_after: Pause | None = None
    """The same as ``alerts.escalate_after``, for this watchdog."""
    checks: Checks | None = None
    """The same as ``alerts.checks``, for this watchdog."""


class Route(Strict):
    """The first route whose conditions all hold says which receivers are notified; without a match, all are."""

    severity: SeverityWord | None = None
    """This or worse."""
    watchdog: tuple[str, ...] = ()
    """The watchdogs whose alerts it is for; default: all."""
    run: tuple[str, ...] = ()
    """Names, with * and ? as in the shell."""
    hours: tuple[Clock, Clock] | None = None
    """From and to, in ``alerts.timezone``: ["22:00", "07:00"]."""
    days: tuple[DayWord, ...] = ()
    """The days on which it holds; default: all."""
    escalated: bool | None = None
    """true: only alerts that were not acknowledged for ``escalate_after``; false: all others."""
    to: tuple[Word, ...]
    """Receivers; an empty list notifies no one (the alert still shows in ``ftsupervise alerts``)."""


class QuietHours(Strict):
    """Alerts less severe than ``below`` wait for the end of these hours; they are not lost."""

    hours: tuple[Clock, Clock] = ("22:00", "07:00")
    """The beginning and the end of these hours, in ``alerts.timezone``."""
    below: SeverityWord = "critical"
    """Alerts of this severity, or a worse one, are sent at any hour."""


class DeadMan(Strict):
    """An outside service (healthchecks.io or your own) that calls when the pings stop."""

    url_file: SecretFile | None = None
    """A file with its address: yours, readable by you alone."""
    url_env: SecretVariable | None = None
    """The environment variable that holds its address."""

    @model_validator(mode="after")
    def _way(self) -> DeadMan:
        _one_of(self, "url_file", "url_env", needed=True)
        return self


def _no_watchdog(name: str, info: ValidationInfo) -> str:
    """Return why no alert can have ``name``; "" if one can."""
    from difflib import get_close_matches

    from ftsupervise.config.watchdogs import GENERAL, Watch
    from ftsupervise.findings import BESIDES

    names = (*(key.replace("_", "-") for key in Watch.model_fields if key not in GENERAL), *BESIDES)
    wanted = name.replace("_", "-").lower()
    if wanted in names or reading_of(info).may_miss or any(one.name == wanted for one in installed(WATCHDOGS)):
        return ""
    close = get_close_matches(wanted, names, 1)
    return f"no watchdog is called {name!r}; " + (
        f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
    )


class Alerts(Strict):
    """The receivers, the alerts that each one gets, when, and how often."""

    receivers: tuple[Receiver, ...] = ()
    """The ways to reach people."""
    hold: Duration = timedelta(0)
    """A finding must be bad for this long before people are notified."""
    clear: Duration = timedelta(0)
    """A finding must be good for this long before the alert is resolved; longer where it comes and goes."""
    checks: Checks = "1 of 1"
    """How many of the last checks must be bad to make an alert."""
    repeat: Pause | None = timedelta(hours=4)
    """Time between two reminders of an alert that goes on; null: none."""
    escalate_after: Pause | None = None
    """An alert that is not acknowledged for this long is sent again, as escalated."""
    watchdogs: dict[str, Rule] = Field(default={})
    """Other delays for the alerts of single watchdogs."""
    routes: tuple[Route, ...] = ()
    """Rules that say which receivers hear of which alert; without any, all receivers hear of all."""
    quiet: QuietHours | None = None
    """Hours in which only the worst is sent."""
    timezone: str | None = None
    """For hours and days, such as "Europe/Berlin"; default: this machine's own."""
    dead_man: DeadMan | None = None
    """An outside service that notices when the watch itself has died."""
    templates: Path | None = None
    """A directory whose alert.*.j2 stand in for the built-in ones."""
    weekly_report: tuple[str, ...] | None = None
    """Receivers of kind email that ``ftsupervise report --week --mail`` writes to; default: all of them."""

    @model_validator(mode="after")
    def _names(self, info: ValidationInfo) -> Alerts:
        names = [receiver.name for receiver in self.receivers if receiver.name]
        for index, receiver in enumerate(self.receivers):
            if receiver.name and names.count(receiver.name) > 1:
                raise wrong_at(("receivers", index, "name"), f"two receivers are called {receiver.name!r}")
        for index, route in enumerate(self.routes):
            for name in route.to:
                if name not in self.named:
                    known = ", ".join(self.named) or "none"
                    raise wrong_at(("routes", index, "to"), f"no receiver is called {name!r}; there are: {known}")
            for name in route.watchdog:
                if unknown := _no_watchdog(name, info):
                    raise wrong_at(("routes", index, "watchdog"), unknown)
        for index, name in enumerate(self.weekly_report or ()):
            if name not in self.named or self.named[name].kind != "email":
                known = ", ".join(one for one, receiver in self.named.items() if receiver.kind == "email") or "none"
                raise wrong_at(("weekly_report", index), f"no email receiver is called {name!r}; there are: {known}")
        for name in self.watchdogs:
            if unknown := _no_watchdog(name, info):
                raise wrong_at(("watchdogs", name), unknown)
        if self.timezone is not None:
            from zoneinfo import ZoneInfo

            try:
                ZoneInfo(self.timezone)
            except (KeyError, ValueError, OSError):
                raise wrong_at(("timezone",), f'unknown time zone {self.timezone!r}; such as "Europe/Berlin"') from None
        return self

    @property
    def named(self) -> dict[str, Receiver]:
        """Return receivers by name: their own, else their kind ("email", "email-2" …)."""
        out: dict[str, Receiver] = {}
        taken = {receiver.name for receiver in self.receivers if receiver.name}
        for receiver in self.receivers:
            name, number = receiver.name or receiver.kind, 1
            while not receiver.name and (name in out or name in taken):
                number += 1
                name = f"{receiver.kind}-{number}"
            out[name] = receiver
        return out
