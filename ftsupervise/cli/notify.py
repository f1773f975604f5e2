"""``ftsupervise notify``: prove that a receiver works, and read every message before the night it is needed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.errors import NotFound

if TYPE_CHECKING:
    from ftsupervise.alerts.outbox import Message
    from ftsupervise.config.schema import Run


@click.group()
def notify() -> None:
    """Prove that a receiver works; preview every message."""


@notify.command()
@click.argument("config", required=False)
@click.option("--receiver", "only", multiple=True, help="Only this one; may be given several times.")
def test(config: str | None, only: tuple[str, ...]) -> None:
    """Send a real message through every receiver now. Exit code 1 if one of them did not take it.

    CONFIG is a ftsupervise.yaml, a run directory, or the name of a run; default: ./ftsupervise.yaml.
    """
    from ftsupervise.alerts.receivers import Broken, Parcel, TryLater, Unsendable, sender

    run, now = _run(config), datetime.now(timezone.utc)
    named = run.alerts.named
    for name in only:
        if name not in named:
            raise NotFound(f"no receiver is called {name!r}", hint=f"there are: {', '.join(named) or 'none'}")
    if not named:
        raise NotFound(
            "no receivers are configured", hint="add alerts.receivers to ftsupervise.yaml, e.g. - email: {…}"
        )
    failed = 0
    for name in only or named:
        receiver = named[name]
        parcel = Parcel(_test_message(run, name, now), now, templates=run.alerts.templates)
        try:
            receipt = sender(receiver.kind)(parcel, receiver.settings)
        except (TryLater, Broken, Unsendable) as error:
            failed += 1
            lasting = "will not work until something is changed" if isinstance(error, Broken) else "did not work now"
            click.echo(f"{name}: {lasting}: {error}", err=True)
            continue
        if receipt.get("refused"):
            failed += 1
            click.echo(f"{name}: taken, but not for everybody: {receipt['refused']}", err=True)
        else:
            click.echo(f"{name}: taken")
        _mend(run, name)
    if failed:
        raise click.exceptions.Exit(1)


@notify.command()
@click.argument("config", required=False)
@click.option("--as", "kind", type=click.Choice(["text", "slack", "html"]), default="text", show_default=True)
def preview(config: str | None, kind: str) -> None:
    """Print every message of an incident as it would be sent; send nothing. Your own templates are used, strictly."""
    from jinja2 import TemplateError, TemplateSyntaxError

    from ftsupervise.alerts.sample import incident
    from ftsupervise.alerts.wording import render_strictly, view
    from ftsupervise.errors import ConfigError

    run, now = _run(config), datetime.now(timezone.utc)
    own = run.alerts.templates
    template = f"alert.{kind}.j2"
    own = own if own is not None and (own / template).is_file() else None
    for message in incident(run.name, str(run.run_dir or ""), now):
        seen = view(message, message.created)
        try:
            text = render_strictly(template, seen, own, kind)
        except TemplateError as error:
            line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(
                f"{own}/{template}{line}: {error}", hint="see the built-in template for the names"
            ) from None
        click.echo(f"==== {seen.title}")
        click.echo(text.strip() + "\n")


def _run(argument: str | None) -> Run:
    from ftsupervise.cli.watch import load_settings
    from ftsupervise.config.locate import CONFIG_NAME, find_run

    if argument is None and Path(CONFIG_NAME).is_file():
        return load_settings(Path(CONFIG_NAME))
    if argument is not None and Path(argument).is_file():
        return load_settings(Path(argument))
    return load_settings(find_run(argument).config)


def _test_message(run: Run, receiver: str, now: datetime) -> Message:
    from ftsupervise.alerts.outbox import Message, message_id
    from ftsupervise.model import Finding, Health, Notice, Reason, Severity

    summary = "this is a test: messages of ftsupervise reach you here"
    finding = Finding(run.name, "test", receiver, Health.OK, Severity.INFO, summary, now)
    notice = Notice(key=f"test {now.isoformat()}", reason=Reason.ANNOUNCED, finding=finding, at=now)
    ident = message_id("test", receiver, run.name, (notice,))
    return Message(ident, receiver, run.name, (notice,), created=now, due=now + timedelta(0))


def _mend(run: Run, name: str) -> None:
    """A receiver that was given up and works again is used again at the next tick."""
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.outbox import mend
    from ftsupervise.rundir import RunDir

    if run.run_dir is None or not (RunDir(run.run_dir).watch / "journal").is_dir():
        return
    journal = Journal(RunDir(run.run_dir).watch / "journal")
    journal.change(
        lambda state: mend(state, name) if name in state.receivers and state.receivers[name].broken else state
    )
