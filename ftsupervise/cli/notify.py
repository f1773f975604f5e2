"""``ftsupervise notify``: test a receiver, and preview every message before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.cli.command_group import CommandGroup
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import plain, say_json
from ftsupervise.errors import NotFound, did_you_mean

if TYPE_CHECKING:
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.outbox import Message
    from ftsupervise.config.schema import Run


@click.group(cls=CommandGroup)
def notify() -> None:
    """Test a receiver; preview every message."""


@notify.command()
@click.argument("config", metavar="[RUN]", required=False, type=RUN)
@click.option("--receiver", "only", multiple=True, help="Only this one; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def test(config: str | None, only: tuple[str, ...], as_json: bool) -> None:
    """Send a real message through every receiver now. Exit code 1 if one of them did not accept it.

    A pager (PagerDuty, Alertmanager) gets an alert of severity info, and its end.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    run, now = _run(config), datetime.now(timezone.utc)
    named = run.alerts.named
    for name in only:
        if name not in named:
            raise NotFound(
                f"no receiver is called {name!r}{did_you_mean(name, named)}",
                hint=f"there are: {', '.join(named) or 'none'}",
            )
    if not named:
        raise NotFound(
            "no receivers are configured", hint="add alerts.receivers to ftsupervise.yaml, e.g. - email: {…}"
        )
    tried = []
    for name in only or named:
        tried.append(one := _try(run, name, now))
        if not as_json:
            for line in one.lines():
                click.echo(line, err=not one.delivered)
    if as_json:
        records = [plain(one) for one in tried]
        say_json({"schema_version": 1, "run": run.name, "receivers": records})
    if not all(one.delivered for one in tried):
        raise click.exceptions.Exit(1)


class _Tried(NamedTuple):
    """The answer of one receiver. ``to``: who or what accepted the message, in words; ``why``: why not everybody has it;
    ``before``: its earlier trouble.
    """

    receiver: str
    delivered: bool
    to: str = ""
    why: str = ""
    before: str = ""
    in_use_again: bool = False

    def lines(self) -> Iterator[str]:
        yield f"{self.receiver}: {self.why or self.to}"
        if self.before:
            again = (
                "; it is in use again, and its waiting messages go out at the next tick" if self.in_use_again else ""
            )
            yield f"{self.receiver}: {self.before}{again}"


def _try(run: Run, name: str, now: datetime) -> _Tried:
    from ftsupervise.alerts.receivers import Broken, Partly, TryLater, Unsendable, answered, delivered_to, sender
    from ftsupervise.alerts.wording import Parcel

    receiver = run.alerts.named[name]
    before = _held(run, name, now)
    to, refused = delivered_to(receiver), ""
    for message in _test_messages(run, name, now):
        try:
            parcel = Parcel(message, now, templates=run.alerts.templates)
            receipt = answered(partial(sender(receiver.kind), parcel, receiver.settings))
        except Partly as error:
            refused = "; ".join(part for part in (error.refused, f"{error} (a watch tries again)") if part)
        except (TryLater, Broken, Unsendable) as error:
            return _Tried(name, False, why=f"{_lasting(error)}: {error}", before=before)
        else:
            refused = receipt.get("refused", "")
            to += f" ({receipt['answer']})" if receipt.get("answer") and "(" not in to else ""
    _free(run, name, now)
    why = f"delivered, but not to everybody: {refused}" if refused else ""
    return _Tried(name, not refused, to, why, before, in_use_again=bool(before))


def _lasting(error: Exception) -> str:
    from ftsupervise.alerts.receivers import Broken, Doubtful

    if isinstance(error, Broken):
        return "will not work until something is changed"
    if isinstance(error, Doubtful):
        return "refused; if it keeps refusing, something must be changed"
    return "did not work now"


@notify.command()
@click.argument("config", metavar="[RUN]", required=False, type=RUN)
@click.option("--as", "kind", type=click.Choice(["text", "slack", "html"]), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def preview(config: str | None, kind: str, as_json: bool) -> None:
    """Print every message of an incident as it would be sent; send nothing. Your own templates are used, strictly.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml; -: the standard input.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    from ftsupervise.alerts.last_day import sample, sample_facts
    from ftsupervise.alerts.wording import Parcel, incident, render_strictly
    from ftsupervise.errors import ConfigError

    run, now = _run(config), datetime.now(timezone.utc)
    own = run.alerts.templates
    template = f"alert.{kind}.j2"
    own = own if own is not None and (own / template).is_file() else None
    records = []
    for message in incident(run.name, str(run.run_dir or ""), now):
        at = message.created
        parcel = Parcel(message, at, templates=own, day=sample(at), facts=sample_facts(at))
        try:
            text = render_strictly(template, parcel, kind)
        except TemplateError as error:
            line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(
                f"{own}/{template}{line}: {error}", hint="see the built-in template for the names"
            ) from None
        records.append({"title": parcel.title, "text": text.strip()})
        if not as_json:
            click.echo(f"==== {parcel.title}")
            click.echo(text.strip() + "\n")
    if as_json:
        say_json({"schema_version": 1, "as": kind, "messages": records})


def _run(argument: str | None) -> Run:
    from ftsupervise.cli.config import STDIN, load_settings, load_typed
    from ftsupervise.config.find_run import settings_of

    return load_typed() if argument == STDIN else load_settings(settings_of(argument))


def _test_messages(run: Run, name: str, now: datetime) -> Iterator[Message]:
    """Yield one message for people; for a pager, which has no use for news, an alert and its end."""
    from ftsupervise.alerts.outbox import Message, message_id, source_of
    from ftsupervise.alerts.step import alert_id
    from ftsupervise.findings import Finding, Notice, Reason, Severity
    from ftsupervise.truth import Health

    summary = "this is a test: messages of ftsupervise reach you here"
    settings = run.alerts.named[name].settings
    pager = getattr(settings, "shape", "json") in ("pagerduty", "alertmanager")
    finding = Finding(run.name, "test", name, Health.BAD if pager else Health.OK, Severity.INFO, summary, now)
    ident, number = alert_id(finding) if pager else "", int(now.timestamp())
    for reason in (Reason.FIRED, Reason.RESOLVED) if pager else (Reason.ANNOUNCED,):
        key = f"test {reason.value} {now.isoformat()}"
        notice = Notice(key, reason, finding, now, alert_id=ident, since=now if pager else None, incident=number)
        source = source_of(str(run.run_dir or ""))
        message = message_id("test", name, run.name, (notice,))
        yield Message(message, name, run.name, (notice,), created=now, due=now, source=source)


def _journals(run: Run) -> list[Journal]:
    """The journals in which messages of this run may wait: its own, and this account's."""
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.rundir.paths import RunDir, state_dir
    from ftsupervise.watch.checks import journal_of

    if run.run_dir is None:
        return []
    folders = (RunDir(run.run_dir).watch / "journal", state_dir() / "watch" / "journal", journal_of(run, state_dir()))
    return [Journal(folder) for folder in folders if folder.is_dir()]


def _held(run: Run, name: str, now: datetime) -> str:
    """Return the trouble of this receiver so far, and what waits for it; "" if there is none."""
    from ftsupervise.alerts.self_monitor import standing

    return "; ".join(words for journal in _journals(run) if (words := standing(journal.read(), name, now)))


def _free(run: Run, name: str, now: datetime) -> None:
    """Note that it works: no earlier failure and no fast clock holds its messages any more."""
    from ftsupervise.alerts.outbox import free

    for journal in _journals(run):
        journal.change(lambda state: free(state, name, now))
