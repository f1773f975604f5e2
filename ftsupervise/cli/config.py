"""``ftsupervise config``: check the settings, print them with their origins, print their JSON Schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.command_group import CommandGroup
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, plain, say
from ftsupervise.errors import ConfigError

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.launch.plan import Plan

_ASKING = 5.0  # seconds for what Slurm is asked
_LOOK = 5.0  # seconds for the newest attempt of the run
STDIN = "-"
_AS_STDIN = Path("standard input")  # relative paths in it start in the current directory
# Options of each job that are the same for every run, or that other lines tell.
_NOT_ASKED = frozenset(
    {"array", "chdir", "comment", "error", "job-name", "no-requeue", "open-mode", "output", "requeue", "signal"}
)


@click.group(cls=CommandGroup)
def config() -> None:
    """Check the settings, print them with their origins, print their JSON Schema.

    \b
    A setting is taken from the first of these that has it:
      ftsupervise.yaml                          the run's own
      $XDG_CONFIG_HOME/ftsupervise/config.yaml  yours: alerts, watch, guard, cron,
                                                launch.account, launch.partition
      /etc/ftsupervise/config.yaml              the site's: the same; or the file
                                                $FTSUPERVISE_SITE_CONFIG names
      the default                               ftsupervise config schema
    """


@config.command(short_help="Check the file.")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@JSON
def check(runs: tuple[str, ...], as_json: bool) -> None:
    """Check the file. All its errors are printed at once, a line each; exit code 78.

    Three lines say what launch would submit. RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml;
    -: the standard input.

    \b
    ftsupervise config check
    ftsupervise config check runs/train-10b.yaml
    sed s/nodes:.*/nodes: 8/ ftsupervise.yaml | ftsupervise config check -
    """
    from ftsupervise.alerts.receivers import without_receivers
    from ftsupervise.config.sweep import listed

    wrong, fine = list[str](), list[dict[str, object]]()
    for run in runs or (None,):
        try:
            path, names, every = _named(run)
            planned = [_plan(found, path) for found in every]
            doubts = [sentence for plan, found in zip(planned, every, strict=True) for sentence in _doubts(plan, found)]
        except ConfigError as error:
            wrong.append(str(error))
            continue
        first = every[0]
        submits = what_it_submits(planned[0], first)
        about = (*_requeued(first), *what_is_seen(first))
        steps = [sentence for found in every for sentence in no_step_found(found)]
        notes = tuple(dict.fromkeys((*doubts, *steps, *without_receivers(first))))
        if as_json:
            about = tuple(sentence.strip() for sentence in about)
            of = {"path": path, "run": first.name, "directory": first.run_dir, "sweep": names}
            fine.append({**of, "submits": submits, "about": about, "notes": notes})
            continue
        said = f"Run {first.name}, in {first.run_dir}"
        say(f"{path}: fine. {f'A sweep of {len(names)} runs: {listed(names)}' if names else said}")
        for label, words in submits.items():
            say(f"  {'each run ' if names and label == 'submits' else ''}{label}: {words}")
        for sentence in about:
            say(sentence)
        for sentence in notes:
            say(f"note: {sentence}", err=True)
    if as_json and (fine or not wrong):
        answer(files=fine)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _named(name: str | None) -> tuple[Path, tuple[str, ...], list[Run]]:
    """Return where the settings stand that ``name`` means, the names of the runs where it is a sweep, and the settings of each
    run; "-": the standard input, as if it lay here."""
    from ftsupervise.config.find_run import names_in, settings_of
    from ftsupervise.config.load import load

    if name == STDIN:
        return _AS_STDIN, (), [load_typed()]
    path = settings_of(name)
    names = tuple(names_in(path))
    return path, names, [load(path, one) for one in names or ("",)]


def load_typed() -> Run:
    """Return the settings in the standard input."""
    from ftsupervise.config.load import load

    return load(_AS_STDIN, text=typed_settings())


def typed_settings() -> bytes:
    """Return what stands in the standard input; the bound of the command waits for it."""
    import sys

    from ftsupervise.cli import time_limit
    from ftsupervise.config.strict_yaml import MAX_BYTES

    time_limit.person_is_asked()
    try:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    finally:
        time_limit.person_has_answered()


def _plan(run: Run, path: Path) -> Plan:
    """Return what would be submitted. Raises ConfigError where launch would refuse it."""
    import sys

    from ftsupervise.launch.plan import plan
    from ftsupervise.scheduler import LOCAL, SLURM

    kind = LOCAL if run.scheduler == LOCAL else SLURM  # the file may be checked where there is no Slurm
    try:
        return plan(run, kind=kind, token="0" * 12, workdir=path.absolute().parent, python=sys.executable)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None


def _doubts(planned: Plan, run: Run) -> tuple[str, ...]:
    """Return what a person has to know before this run is launched."""
    from ftsupervise.launch.doubts import doubts
    from ftsupervise.probe import Probe

    with Probe() as probe:
        return (*planned.notes, *doubts(run, planned.workdir, probe.text))


def what_it_submits(planned: Plan, run: Run) -> dict[str, str]:
    """Return what ``launch`` would submit: how many jobs, what each asks for, and what each starts."""
    from ftsupervise.printable import printable
    from ftsupervise.scheduler import LOCAL
    from ftsupervise.units import count

    jobs = count(planned.members, "job")
    several = planned.members > 1
    chain = {
        "array": f"an array of {jobs}, one at a time" if several else "one job",
        "daisy": f"{jobs}, each behind the one before" if several else "one job",
        "groups": f"the lighthouse, then {len(planned.groups)} groups, each {jobs}{', one at a time' if several else ''}",
    }[planned.chain]
    here = planned.kind == LOCAL
    options = (planned.groups[0] if planned.groups else planned).options
    asked = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items() if name not in _NOT_ASKED]
    command = " ".join(run.launch.command.split() if isinstance(run.launch.command, str) else run.launch.command)
    return {
        "submits": f"{chain}, {'on this machine' if here else 'to Slurm'}",
        "each asks for": "nothing: this machine has no queue" if here else " ".join(map(printable, sorted(asked))),
        "each starts": printable(command, 200),
    }


def _requeued(run: Run) -> tuple[str, ...]:
    """Return what Slurm does with a member that has lost a node, and why; () on another scheduler."""
    import time

    from ftsupervise import host
    from ftsupervise.launch.plan import requeue_of
    from ftsupervise.launch.submit import expedited_requeue
    from ftsupervise.scheduler import SLURM, is_configured, kind_of

    if run.scheduler == "auto" and not is_configured(os.environ):  # finding out takes seconds where there is no cluster
        return ()
    kind, before = kind_of(run.scheduler), host.answer_by
    if kind != SLURM:
        return ()
    host.answer_by = before or time.monotonic() + _ASKING
    try:
        choice = requeue_of(run.launch, expedites=expedited_requeue(run, kind))
    finally:
        host.answer_by = before
    return (f"  {choice.option}: {choice.why}",)


def what_is_seen(run: Run) -> tuple[str, ...]:
    """Return what is seen of a command that may have no guard, and what is not: two lines."""
    asked = run.launch.heartbeat
    where = f"{asked.file}" if asked is not None and asked.file is not None else "its output"
    return (
        f"  without the guard, seen: steps in {where}; processes on its nodes that are stopped or stand still",
        "  without the guard, not seen: a loop that spins, which rank is behind, a save on demand",
    )


def no_step_found(run: Run) -> tuple[str, ...]:
    """Say that the newest attempt of the run showed no step; () where it did, or cannot be seen in time."""
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.ledger import newest
    from ftsupervise.rundir.paths import RunDir

    if run.run_dir is None:
        return ()
    rundir = RunDir(run.run_dir)
    try:
        last = within(_LOOK, lambda: newest(rundir), key="newest attempt")
    except (OSError, TimeoutError):
        return ()
    return (f"attempt {last.number}: {last.unread}",) if last is not None and last.unread else ()


@config.command(short_help="Every setting as it will be used.")
@click.argument("run", required=False, type=RUN)
@click.option("--origin", is_flag=True, help="Say where each setting comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(run: str | None, origin: bool, as_json: bool) -> None:
    """Print every setting as it will be used, defaults included. No secret is ever in it.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml; -: the standard input.

    \b
    ftsupervise config show
    ftsupervise config show --origin | grep launch.time
    """
    import json

    from ftsupervise.config.find_run import settings_of, to_launch
    from ftsupervise.config.json_schema import lines, shown, shown_yaml
    from ftsupervise.config.load import load, origins
    from ftsupervise.errors import NotFound

    name, text = "", typed_settings() if run == STDIN else None
    try:
        path = settings_of(run) if text is None else _AS_STDIN
    except NotFound:  # a run of the sweep here that has not been launched
        path, (name, *_) = to_launch(run)
    settings = load(path, name, text=text)
    where = origins(path, name, text=text) if origin else {}
    if as_json:
        whole = {"schema_version": 1, "config": plain(shown(settings)), **({"origins": where} if origin else {})}
        click.echo(json.dumps(whole, ensure_ascii=False, indent=2))
    elif origin:
        for line in lines(settings, where):
            say(line)
    else:
        click.echo(shown_yaml(settings), nl=False)


@config.command(short_help="The JSON Schema, for editors.")
def schema() -> None:
    """Print the JSON Schema of ftsupervise.yaml, for editors.

    \b
    ftsupervise config schema > ftsupervise.schema.json
    # first line of ftsupervise.yaml:
    # yaml-language-server: $schema=./ftsupervise.schema.json
    """
    import json

    from ftsupervise.config.json_schema import json_schema

    click.echo(json.dumps(json_schema(), ensure_ascii=False, indent=2))


def settings_to_act_on(path: Path, verb: str, *, run: str = "", dry_run: bool, trust: bool = False, hint: str) -> Run:
    """The settings in ``path``, of ``run`` where it is a sweep, with which ``verb`` acts as this account. Raises
    NotTrusted for those that somebody else may write, unless they are only to be shown."""
    from ftsupervise.config.believed import load_believed, load_to_act
    from ftsupervise.config.find_run import require_run_dir
    from ftsupervise.config.load import load

    if dry_run and (why := load_believed(path, run=run, trust=trust, watched=False).why):
        say(f"note: {why}: {verb} would refuse it", err=True)
        found = load(path, run)
    else:
        found = load_to_act(path, f"{verb} would run the commands in it as you", run=run, trust=trust, hint=hint)
    require_run_dir(found.run_dir)
    return found


def load_settings(path: Path, *, trust: bool = False) -> Run:
    """The settings in ``path`` as far as they are trusted; commands in another account's file are only shown."""
    from ftsupervise.config.believed import load_believed
    from ftsupervise.config.find_run import require_run_dir

    found = load_believed(path, trust=trust)
    require_run_dir(found.run.run_dir)
    for line in found.sentences(path):
        say(line, err=True)
    return found.run
