"""``ftsupervise check``: run the watchdogs once, for a person, a program, or Nagios."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.names import RUN, WATCHDOG
from ftsupervise.cli.output import error_line, plain, say, say_json
from ftsupervise.errors import did_you_mean
from ftsupervise.printable import printable
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.findings import Finding
    from ftsupervise.watch.checks import RunLook

SCHEMA_VERSION = 1
_UNSEEN = 3  # the code of Nagios: could not see
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_COLOURS = ("green", "yellow", "red", "cyan")


class Plugin(click.Command):
    """A command whose every failure ends with 3, because Nagios takes 2 (click's usage error) for a critical finding."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            _tell("ftsupervise check", error.format_message(), "ftsupervise check --help says more", "--json" in args)
            raise SystemExit(_UNSEEN) from None

    def invoke(self, ctx: click.Context) -> Any:
        from ftsupervise.errors import Error, from_os_error

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (Error, OSError) as failed:
            error = failed if isinstance(failed, Error) else from_os_error(failed)
            _tell("ftsupervise", error.message, error.hint, bool(ctx.params.get("as_json")))
            raise SystemExit(_UNSEEN) from None


def _tell(by: str, message: str, hint: str, as_json: bool) -> None:
    if as_json:
        click.echo(error_line(message, hint, _UNSEEN), err=True)
    else:
        say("\n  ".join(filter(None, (f"{by}: {message}", hint))), err=True)


@click.command(cls=Plugin)
@click.argument("watchdog", default="all", type=WATCHDOG)
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object with all findings (several runs: its list runs)."
)
@click.option(
    "--trust", is_flag=True, help="Use settings of another account too, commands included; this is remembered."
)
@click.option("--nagios", is_flag=True, help="One line, as a Nagios plug-in.")
def check(watchdog: str, runs: tuple[str, ...], as_json: bool, trust: bool, nagios: bool) -> None:
    """Run WATCHDOG (or "all") once for RUN. RUN is a directory, an ftsupervise.yaml, or a name; default:
    ./ftsupervise.yaml.

    Nothing is recorded and nobody is notified. Ends with the Nagios codes: 0 ok, 1 warning, 2 critical, 3 could not see
    (or could not be run at all). A named watchdog runs with its defaults where the configuration has it off.

    \b
    ftsupervise check all
    ftsupervise check runs/my-training
    ftsupervise check disk runs/my-training --nagios
    """
    from ftsupervise.cli.config import load_settings
    from ftsupervise.config.find_run import each_run, settings_of
    from ftsupervise.errors import UsageError
    from ftsupervise.watch.watchdogs import installed, is_watchdog, names_of

    if watchdog != "all" and not is_watchdog(watchdog):
        if not _is_run(watchdog):
            wrong = f"no watchdog is called {watchdog!r}{did_you_mean(watchdog, (*installed(), 'all'))}"
            raise UsageError(wrong, hint=f"there are: all, {', '.join(installed())}")
        watchdog, runs = "all", (watchdog, *runs)
    settings = [load_settings(settings_of(run, judged=False), trust=trust) for run in each_run(runs) or (None,)]
    if watchdog != "all":
        settings = [_switched_on(one, watchdog) for one in settings]
    looked = [(one, *_look(one, names_of(one.watch) if watchdog == "all" else [watchdog])) for one in settings]
    every = [finding for _, seen, _ in looked for finding in seen.findings]
    complaints = [sentence for _, _, sentences in looked for sentence in sentences]
    code = verdict(every, complaints)
    if as_json:
        records = [_record(one, seen, sentences) for one, seen, sentences in looked]
        whole = records[0] if len(records) == 1 else {"code": code, "verdict": _WORDS[code].lower(), "runs": records}
        say_json({"schema_version": SCHEMA_VERSION, **whole})
    elif nagios:
        click.echo(one_line(watchdog, every, complaints, code))
    else:
        for one, seen, sentences in looked:
            if len(looked) > 1:
                say(f"{one.name}:")
            _table(seen.findings, sentences)
    raise SystemExit(code)


def _is_run(word: str) -> bool:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.errors import Error, NoAnswer

    try:
        find_run(word)
    except NoAnswer:
        return True
    except Error:
        return Path(word).exists()  # its errors are reported then
    return True


def _switched_on(run: Run, name: str) -> Run:
    """Return the run with watchdog ``name`` on, by its defaults where it was off. Raises UsageError where it has none."""
    from pydantic import ValidationError

    from ftsupervise.config.watchdogs import Watch
    from ftsupervise.errors import UsageError

    key = name.replace("-", "_")
    if getattr(run.watch, key, None) not in (None, ()):
        return run
    try:
        default = getattr(Watch.model_validate({key: [{}] if key in ("disk", "exec") else {}}), key)
    except ValidationError:
        raise UsageError(f"{name} has nothing to run", hint=f"set it in ftsupervise.yaml: watch.{key}") from None
    return run.model_copy(update={"watch": run.watch.model_copy(update={key: default})})


def _look(run: Run, names: Sequence[str]) -> tuple[RunLook, tuple[str, ...]]:
    from ftsupervise.cli.time_limit import ANSWER, extend
    from ftsupervise.probe import Probe
    from ftsupervise.scheduler import kind_of, open_scheduler
    from ftsupervise.scheduler.ownership import own_job_ids
    from ftsupervise.watch.checks import ask, look_at
    from ftsupervise.watch.watchdogs.preflight import complaints

    assert run.run_dir is not None
    now = datetime.now(timezone.utc)
    with Probe(waits=lambda seconds: extend(seconds) if seconds > ANSWER else None) as probe:
        queue = ask(open_scheduler(kind_of(run.scheduler)), _owners(run.run_dir, probe))
        seen = look_at(run, queue, now, own=own_job_ids(os.environ), only=names, probe=probe)
        # gpu reports it in its finding
        keys = tuple(f"watch.{name.replace('-', '_')}" for name in names if name != "gpu")
        return seen, tuple(sentence for sentence in complaints(run, probe, now) if sentence.startswith(keys))


def _owners(run_dir: Path, probe: Any) -> tuple[str, ...]:
    """Return this account, and the owner of the run directory."""
    from ftsupervise.host.ownership import user_name
    from ftsupervise.probe import Entry

    found = probe.look(run_dir)
    uids = {os.getuid(), *([found.uid] if isinstance(found, Entry) else [])}
    return tuple(map(user_name, sorted(uids)))


# ---------------------------------------------------------------------------------------------------------- telling


def code_of(finding: Finding) -> int:
    """The Nagios code of one finding."""
    from ftsupervise.findings import Severity
    from ftsupervise.truth import Health

    if finding.health is Health.BAD:
        return {Severity.CRITICAL: 2, Severity.WARNING: 1}.get(finding.severity, 0)
    return 3 if finding.health is Health.UNKNOWN else 0


def verdict(findings: Sequence[Finding], complaints: Sequence[str] = ()) -> int:
    """Return the worst of them: critical before warning before could-not-see before ok.

    A setting that is wrong is a warning.
    """
    codes = {code_of(finding) for finding in findings} | ({1} if complaints else set())
    return next((code for code in (2, 1, 3) if code in codes), 0)


def one_line(name: str, findings: Sequence[Finding], complaints: Sequence[str], code: int) -> str:
    """Return the line that Nagios shows. A "|" would begin its performance figures."""
    worst = [finding.summary for finding in findings if code_of(finding) == code] if code else []
    said = [*worst, *(complaints if code == 1 else ())] or [f"{count(len(findings), 'check')}, all well"]
    text = "; ".join(said).replace("|", "/").replace("\n", " ")
    return f"{name.upper()} {_WORDS[code]} - {text[:2000]}"


def _record(run: Run, seen: RunLook, complaints: Sequence[str]) -> dict[str, object]:
    code = verdict(seen.findings, complaints)
    return {
        "run": run.name,
        "code": code,
        "verdict": _WORDS[code].lower(),
        "settings": list(complaints),
        "findings": [plain(finding) for finding in seen.findings],
    }


def _table(findings: Sequence[Finding], complaints: Sequence[str]) -> None:
    width = max((len(f.watchdog) for f in findings), default=0)
    for finding in sorted(findings, key=lambda f: (2, 1, 3, 0).index(code_of(f))):
        code = code_of(finding)
        if finding.subject == "watchdog" and code == 0:
            continue  # a working watchdog is not mentioned
        word = click.style(f"{_WORDS[code]:8}", fg=_COLOURS[code], bold=code != 0)
        say(f"{word} {finding.watchdog:{width}}  {printable(finding.summary)}")
        if code in (1, 2):
            labels = ("limit", "why", "look", "do")
            for label, text in zip(labels, (finding.limit, finding.why, finding.look, finding.do), strict=True):
                if text:
                    say(f"         {'':{width}}    {label}: {printable(text)}")
            for line in finding.detail.splitlines():
                say(f"         {'':{width}}    {printable(line)}")
    for sentence in complaints:
        say(click.style("settings", fg="yellow", bold=True) + f" {printable(sentence)}")
