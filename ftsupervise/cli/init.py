"""``ftsupervise init``: write an ftsupervise.yaml that submits the job of a script, and say what became of each line."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.cli.output import say, say_json
from ftsupervise.printable import to_type

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.host.ownership import Reach
    from ftsupervise.importer.comparison import Difference
    from ftsupervise.importer.sbatch import Option, Script
    from ftsupervise.importer.settings import Draft, Row, ScriptSource
    from ftsupervise.importer.training import Training

_LARGEST = 4 << 20  # bytes: sbatch's own bound of a script
_TRIAL = 240.0  # seconds for all of a trial
_OWN = ("--force", "-o", "--output", "--json", "--job")


class _Made(NamedTuple):
    """The settings to be written. ``run``: what they say, of a sweep its first one; ``names``: all of a sweep."""

    path: Path
    draft: Draft
    text: str
    run: Run
    names: tuple[str, ...]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="[JOB.sbatch [ARGUMENTS] | - | COMMAND]", nargs=-1, type=click.UNPROCESSED)
@click.option("--job", metavar="JOBID", help="Take the script of a job that is in the queue.")
@click.option("-o", "--output", metavar="FILE", help="Write there, instead of ./ftsupervise.yaml.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="The table and the comparison, for programs.")
@click.option(
    "--try", "trial", is_flag=True, help="Run what it says for a minute in a Slurm made here; interrupt it once."
)
@click.option("--patch", is_flag=True, help="Put the guard into the training script TRAIN.py; show the difference.")
def init(
    words: tuple[str, ...],
    job: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
    trial: bool,
    patch: bool,
) -> None:
    """Write ./ftsupervise.yaml from a job script, and print what became of each line. Nothing is submitted.

    \b
    ftsupervise init job.sbatch              a script; arguments may follow
    ftsupervise init sbatch -N 2 job.sbatch  as you type it, with options
    ftsupervise init - < job.sbatch          from standard input
    ftsupervise init --job 87                the script of a job in the queue
    ftsupervise init python train.py         a command that has no script
    ftsupervise init --patch train.py        the guard's lines, where their
                                             places are sure; nothing else
    ftsupervise init --try                   try ./ftsupervise.yaml for a minute

    Options of init stand before the script. An array whose elements differ becomes a sweep: a run for each element, all in one
    file, launched and listed together. Exit codes: 0 written; 1 what was tried did not start, failed, or began again at its
    beginning; 64 usage; 65 the script cannot be brought over (the message has the line); 66 no such file or job; 75 the file
    is there already.
    """
    from ftsupervise.errors import Refused, UsageError, from_os_error

    if patch:
        if len(words) != 1 or job or output or force or as_json or trial:
            raise UsageError(
                "--patch takes one training script, and no other option", hint="ftsupervise init --patch train.py"
            )
        _patch(Path(words[0]))
        return
    if trial and as_json:
        raise UsageError("--try prints five lines for people, and no JSON", hint="leave one of them out")
    if trial and not words and not job:
        _try(Path(output or "ftsupervise.yaml"))
        return
    draft, source, options, name, readers = _read(words, job, output)
    made = _made(draft, output, source)
    if not force and os.path.lexists(made.path):
        raise Refused(f"{made.path} is there already", hint="--force writes over it; -o FILE writes another one")
    from ftsupervise.host.ownership import PAGE, Reach
    from ftsupervise.rundir.paths import write_named

    same, others = _compared(options, made)
    looked = _looked(made, source)
    training = looked.training
    rows = (*draft.rows, *_about(looked))
    found = _doubts(made)
    try:
        write_named(made.path, made.text, mode=Reach(PAGE).within(readers))
    except OSError as error:
        raise from_os_error(error, f"write {made.path}") from None
    if as_json:
        _say_json(made, rows, same, others, training)
        return
    _say_table(name, made, rows)
    _say_comparison(same, others)
    _say_training(training)
    for sentence in found:
        say(f"note: {sentence}")
    if trial:
        _try(made.path)
    else:
        _say_next(made)


# -------------------------------------------------------------------------------------------------------------- reading


def _read(
    words: tuple[str, ...], job: str | None, output: str | None
) -> tuple[Draft, ScriptSource, tuple[Option, ...], str, Reach]:
    """Return the draft, where it came from, the options of the script, its name in words, and who may read it."""
    from ftsupervise.errors import UsageError
    from ftsupervise.host.ownership import OWN, PAGE, Reach
    from ftsupervise.importer.sbatch import read_script
    from ftsupervise.importer.settings import ScriptSource, draft, draft_of_command

    if bool(words) == bool(job):
        raise UsageError(
            "name one job script, - or a command" if not words else "--job JOBID stands alone",
            hint="such as ftsupervise init job.sbatch; ftsupervise init --help has the others",
        )
    typed: list[Option] = []
    folder = Path.cwd()
    moved = output is not None and Path(output).absolute().parent != folder
    readers = Reach(PAGE)
    if job:
        text, source = _of_job(job), ScriptSource(str(folder), "", f"job-{job}", (), moved)
        name, readers = f"the script of job {job}", Reach(OWN)  # Slurm shows it to its owner alone
    elif words[0] == "-":
        text, source, name = (
            _text(sys.stdin.buffer.read(_LARGEST + 1), "standard input"),
            ScriptSource(str(folder), moved=moved),
            "standard input",
        )
        source, readers = replace(source, arguments=words[1:]), _readers_of_input()
    else:
        if words[0].rpartition("/")[2] == "sbatch":
            typed, words = _typed(words[1:])
        found = _file(words[0])
        if found is None:
            command = words[0] if len(words) == 1 else shlex.join(words)
            if typed:
                raise UsageError(f"{words[0]} is no file: sbatch takes a script", hint="or --wrap COMMAND")
            return (
                draft_of_command(command, _name_of(command)),
                ScriptSource(str(folder), moved=moved),
                (),
                "the command",
                readers,
            )
        if own := [word for word in words[1:] if word in _OWN]:
            raise UsageError(
                f"{own[0]} stands behind {words[0]}, and so would be an argument of the script",
                hint=f"type {own[0]} before it",
            )
        (text, readers), name = found, words[0]
        source = ScriptSource(str(folder), words[0], Path(words[0]).stem, words[1:], moved)
    script = read_script(text)
    _check_syntax(script)
    script = replace(script, options=(*script.options, *typed))
    return draft(script, source), source, script.options, name, readers


def _readers_of_input() -> Reach:
    """Return who may read the file that is standard input; others too, where it is none."""
    from ftsupervise.host.ownership import PAGE, Reach, reach

    try:
        fd = sys.stdin.fileno()
        return reach(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else Reach(PAGE)
    except (OSError, ValueError):
        return Reach(PAGE)


def _typed(words: tuple[str, ...]) -> tuple[list[Option], tuple[str, ...]]:
    """Return what was typed behind ``sbatch``: its options, the script and its arguments."""
    from ftsupervise.errors import UsageError
    from ftsupervise.importer.sbatch import typed_options

    options, rest = typed_options(words)
    wrapped = [one.value for one in options if one.name == "wrap"]
    if wrapped:
        raise UsageError(
            "a command in --wrap has no script",
            hint=f"type ftsupervise init {wrapped[-1]}, and set its resources in the file",
        )
    if not rest:
        raise UsageError("sbatch is followed by no script", hint="ftsupervise init sbatch OPTIONS JOB.sbatch")
    return options, tuple(rest)


def _file(path: str) -> tuple[str, Reach] | None:
    """Return the text of a job script, and who may read it; None where ``path`` names a command.

    Raises NotFound, UsageError, Untranslatable, NotTrusted.
    """
    from ftsupervise.errors import NotFound, UsageError, from_os_error
    from ftsupervise.host import files, ownership

    at = Path(path)
    if not at.is_file():
        if at.exists():
            raise UsageError(f"{path} is no file")
        if "/" in path or re.search(r"\.(?:sh|bash|sbatch|slurm|job|run|sub)$", path):
            raise NotFound(f"there is no file {path}", hint="check the path")
        return None
    try:
        with os.fdopen(ownership.open_judged(at), "rb") as file:
            text = _text(files.read_open(file.fileno(), _LARGEST, path), path)
            readers = ownership.reach(file.fileno()).within(ownership.reach_on_the_way(at))
    except OSError as error:
        raise from_os_error(error, f"read {path}") from None
    if not text.startswith("#!") and path.endswith(".py"):
        raise UsageError(
            f"{path} is a program, and no job script", hint=f"type ftsupervise init python {to_type(path)}"
        )
    return text, readers


def _text(data: bytes, name: str) -> str:
    from ftsupervise.errors import Untranslatable

    if len(data) > _LARGEST:
        raise Untranslatable(f"{name} is larger than a job script may be (4 MB)")
    if b"\0" in data:
        raise Untranslatable(f"{name} is no text: it holds a NUL byte")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Untranslatable(f"{name}: line {line} is no UTF-8 text") from None


def _of_job(job: str) -> str:
    from ftsupervise.errors import UsageError
    from ftsupervise.scheduler import is_job_id
    from ftsupervise.scheduler.slurm import Slurm

    if not is_job_id(job):
        raise UsageError(f"--job takes a job id such as 87, not {job!r}", hint="squeue --me lists yours")
    return Slurm().batch_script(job)


def _check_syntax(script: Script) -> None:
    """Raise Untranslatable for a script that its own shell cannot read."""
    from ftsupervise.errors import Untranslatable
    from ftsupervise.host import bounded

    if script.interpreter[0].rpartition("/")[2] not in ("bash", "sh"):
        return
    try:
        done = bounded.run(["bash", "-n"], timeout=5, stdin=script.text)
    except OSError:
        return  # without bash nothing is said
    if found := re.search(r"line ([0-9]+): (.*)", done.stderr if done.code else ""):
        raise Untranslatable(f"line {found[1]}: {found[2].strip()} (says bash -n)", hint="mend the script first")


def _name_of(command: str) -> str:
    from ftsupervise.importer.training import script_in

    word = script_in(command) or command.split()[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(word).stem).strip("-._")[:100] or "run"


# ---------------------------------------------------------------------------------------------------- writing, comparing


def _made(draft: Draft, output: str | None, source: ScriptSource) -> _Made:
    from ftsupervise.config.load import loads
    from ftsupervise.config.strict_yaml import parse
    from ftsupervise.config.sweep import names_in
    from ftsupervise.errors import ConfigError, Untranslatable
    from ftsupervise.importer.settings import ELEMENT
    from ftsupervise.importer.yaml_text import yaml_of

    path = Path(output or "ftsupervise.yaml")
    text = yaml_of(draft, source.path or "what was given to it")
    names = names_in(parse(text.encode("utf-8", "surrogatepass"), str(path)))
    try:
        run = loads(text, path.absolute(), names[0] if names else "")
    except ConfigError as error:
        raise Untranslatable(
            _in_the_script(str(error), draft), hint="change the line, or say it in ftsupervise.yaml by hand"
        ) from None
    for key in ("setup", "command"):
        before, after = str(draft.launch.get(key, ("", ""))[0]), getattr(run.launch, key) or ""
        before = before.replace(f"{{{ELEMENT}}}", str(draft.elements[0])) if draft.elements else before
        if after.rstrip("\n") != before.rstrip("\n"):
            raise Untranslatable(
                f"the lines of launch.{key} cannot be written as YAML without a change", hint="keep them in a file"
            )
    return _Made(path, draft, text, run, names)


def _in_the_script(said: str, draft: Draft) -> str:
    """Return an error of the settings with the line of the script that it is about."""
    first = said.split("\n")[0]
    for row in draft.rows:
        key = re.match(r"launch\.(\w+)", row.words)
        if row.lines and key and f"launch.{key[1]}" in first:
            return f"line {row.lines}: {row.text}: {first.partition(f'launch.{key[1]}: ')[2] or first}"
    return first


def _compared(options: tuple[Option, ...], made: _Made) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
    from ftsupervise.importer.comparison import differences
    from ftsupervise.launch.plan import plan, word
    from ftsupervise.scheduler import SLURM

    planned = plan(made.run, kind=SLURM, token="0" * 12, workdir=made.path.absolute().parent, python=sys.executable)
    return differences(options, [word(*one) for one in planned.link(0).items()], str(made.path.absolute().parent))


class _FoundTraining(NamedTuple):
    """The program that trains, as it was found. ``path``: of its script, "" where the command names none; ``command``: the
    code that starts it, with its variables put in; ``training``: None where no such file is here.
    """

    path: str
    command: str
    training: Training | None


def _looked(made: _Made, source: ScriptSource) -> _FoundTraining:
    """Look for the script that trains."""
    from ftsupervise.importer.body import BodyKind
    from ftsupervise.importer.training import look_at, script_in, spelled_out
    from ftsupervise.probe import Probe

    launch = made.run.launch
    command = launch.command if isinstance(launch.command, str) else shlex.join(launch.command)
    known = {
        "PWD": ".",
        "SLURM_SUBMIT_DIR": ".",
        **{name: os.environ[name] for name in ("HOME", "USER") if name in os.environ},
    }
    with Probe() as probe:
        if source.path and made.draft.body.form is BodyKind.SCRIPT:
            held = probe.text(Path(source.path).absolute())
            command = held.decode("utf-8", "replace") if isinstance(held, bytes) else command
        command = "\n".join(line for line in command.splitlines() if not line.lstrip().startswith("#"))
        command = spelled_out(command, f"{launch.setup or ''}\n{command}", known)
        path = script_in(command)
        if not path:
            return _FoundTraining("", command, None)
        folders = [
            Path(match)
            for match in re.findall(r"(?m)^\s*cd\s+([\w./+-]+)\s*(?:$|[;&|])", f"{launch.setup or ''}\n{command}")
        ]
        for folder in (*reversed(folders), Path()):
            at = Path(os.path.normpath(folder / path))
            data = probe.text(at.absolute())
            if isinstance(data, bytes) and data:
                return _FoundTraining(path, command, look_at(str(at), data.decode("utf-8", "replace")))
    return _FoundTraining(path, command, None)


def _about(looked: _FoundTraining) -> tuple[Row, ...]:
    from ftsupervise.importer.settings import Row
    from ftsupervise.importer.training import told_to_resume

    training = looked.training
    if (training is not None and training.guarded) or told_to_resume(looked.command):
        return ()
    words = "nothing says where to go on from: does it find its newest checkpoint by itself? Else launch.resume, or the guard"
    if training is None:
        where = "not here, and so not looked at" if looked.path else "no Python file is named in it"
        return (Row("", looked.path or "the program", f"{where}; {words}", decide=True),)
    return (Row("", training.path, words, decide=True),)


def _doubts(made: _Made) -> tuple[str, ...]:
    from ftsupervise.launch.doubts import doubts
    from ftsupervise.probe import Probe

    with Probe() as probe:
        found = doubts(made.run, made.path.absolute().parent, probe.text)
    return tuple(one for one in found if "differs in each job" not in one)  # (the table has their lines)


# ------------------------------------------------------------------------------------------------------------- printing


def _say_table(name: str, made: _Made, rows: tuple[Row, ...]) -> None:
    from ftsupervise.config.sweep import listed

    runs = f", {len(made.names)} runs: {listed(made.names)}" if made.names else ""
    say(f"{name} -> {made.path}{runs}")
    say()
    width = min(46, max((len(row.text) for row in rows), default=9) + 2)
    say(f"  {'line':<7} {'yours':<{width}} where it went, or why it is not needed")
    for row in rows:
        mark = "!" if row.decide else " "
        text = row.text if len(row.text) < width else f"{row.text[: width - 2]}…"
        say(f"{mark} {row.lines or '-':<7} {text:<{width}} {row.words}")
    if any(row.decide for row in rows):
        say("! you decide")
    say()


def _say_comparison(same: tuple[str, ...], others: tuple[Difference, ...]) -> None:
    say(
        f"The options of the job: {len(same)} are the same{f' ({chr(44).join(same)})' if same else ''}. The others:".replace(
            ",", ", "
        )
    )
    for one in others:
        for sign, text in (("-", one.before), ("+", one.after)):
            if text:
                say(f"  {sign} {text}{f'  ({one.why})' if one.why and (sign == '+' or not one.after) else ''}")
    say()


def _say_training(training: Training | None) -> None:
    if training is None or training.guarded:
        return
    from ftsupervise.importer.patch import CannotPlace, diff, with_guard

    framework = f" ({training.framework})" if training.framework else ""
    say(
        f"{training.path}{framework} has no guard. With it the run saves before the limit and on request, and hangs are seen:"
    )
    try:
        made = with_guard(training.text)
    except CannotPlace as error:
        for line in training.lines:
            say(f"    {line}")
        say(f"  You place them ({training.page}): {error}.")
    else:
        for line in diff(training.text, made.text, training.path).splitlines():
            say(f"    {line}")
        for note in made.notes:
            say(f"  note: {note}")
        say(f"  ftsupervise init --patch {shlex.quote(training.path)}    writes these lines into it")
    say("  Without the guard the script is supervised all the same (docs/own-script.md).")
    say()


def _try(path: Path) -> None:
    """Run what the file says for a minute in a sandbox, and say in five lines what was seen."""
    import signal

    from ftsupervise.cli import time_limit
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.config.find_run import names_in
    from ftsupervise.errors import NotFound
    from ftsupervise.host.ownership import make_own
    from ftsupervise.importer.trial import is_proof, report, try_for_a_minute
    from ftsupervise.rundir.paths import state_dir, write_whole
    from ftsupervise.sandbox import missing

    hint = f"look at it: ftsupervise launch --dry-run {shlex.quote(str(path))}"
    run = settings_to_act_on(path, "init --try", run=(names_in(path) or ("",))[0], dry_run=False, hint=hint)
    time_limit.extend(_TRIAL)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the sandbox is taken down
        signal.signal(number, _leave)
    if lacking := missing():
        packages = " ".join(dict.fromkeys(lacking.values()))
        raise NotFound("this machine has no Slurm to make a sandbox of", hint=f"apt-get install {packages}")
    seen = try_for_a_minute(run, path.absolute().parent, _place, lambda words: say(words, err=True))
    log = state_dir() / "trial.log"
    make_own(log.parent)
    write_whole(log, seen.log, mode=0o600)
    for line in report(seen, log):
        say(line)
    if not is_proof(seen):
        raise SystemExit(1)


@contextmanager
def _place(folder: Path, shape: Mapping[str, int]) -> Iterator[Mapping[str, str]]:
    from ftsupervise.sandbox import temporary, temporary_folder

    with temporary_folder(folder), temporary(None, **shape) as sandbox:
        yield sandbox.env()


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _patch(path: Path) -> None:
    """Put the guard into the script, and show the difference. One that has it is left as it is."""
    from ftsupervise.config.own_file import read_own, write_back
    from ftsupervise.errors import Untranslatable
    from ftsupervise.importer.patch import CannotPlace, diff, with_guard
    from ftsupervise.importer.training import look_at

    script = read_own(path, limit=_LARGEST, links=False)
    training = look_at(str(path), script.text)
    if training.guarded:
        say(f"{path} names ftsupervise already: it is left as it is")
        return
    try:
        made = with_guard(script.text)
    except CannotPlace as error:
        for line in training.lines:
            say(f"    {line}")
        raise Untranslatable(
            f"{path}: the guard's lines cannot be placed surely: {error}; nothing was written",
            hint=f"place those above yourself: {training.page} says where each goes",
        ) from None
    for line in diff(script.text, made.text, str(path)).splitlines():
        say(line)
    write_back(script, made.text)
    for note in made.notes:
        say(f"note: {note}")
    say(f"{path} has the guard now")


def _say_next(made: _Made) -> None:
    named = "" if str(made.path) == "ftsupervise.yaml" else f" {shlex.quote(str(made.path))}"
    say("Nothing was submitted. Next:")
    where = "" if str(made.path) == "ftsupervise.yaml" else f" -o {shlex.quote(str(made.path))}"
    say(f"  ftsupervise init --try{where}          runs it for a minute in a Slurm made on this machine, as proof")
    say(f"  ftsupervise launch --dry-run{named}    prints the job script")
    after = f" --after {made.draft.after}" if made.draft.after else ""
    say(f"  ftsupervise launch{after}{named}")


def _say_json(
    made: _Made,
    rows: tuple[Row, ...],
    same: tuple[str, ...],
    others: tuple[Difference, ...],
    training: Training | None,
) -> None:
    say_json(
        {
            "schema_version": 1,
            "files": [str(made.path)],
            "runs": list(made.names or (made.run.name,)),
            "rows": [{"lines": one.lines, "text": one.text, "words": one.words, "decide": one.decide} for one in rows],
            "same": list(same),
            "different": [
                {"option": one.option, "before": one.before, "after": one.after, "why": one.why} for one in others
            ],
            "training": None
            if training is None
            else {"path": training.path, "framework": training.framework, "guard": training.guarded},
        }
    )
