"""The command line. This room alone prints and exits; each command group is one module, imported when it is used.

Start-up is part of the promise: ``--help`` costs no more than click, ``kill`` no more than click and YAML.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from ftsupervise.cli.output import did_you_mean, look_at_terminals, may_colour, say
from ftsupervise.errors import Cancelled, Error, UsageError
from ftsupervise.printable import log_line
from ftsupervise.version import VERSION

# name -> (module, attribute, one line for --help). A new command is one line here and one module beside this file.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "init": ("init", "init", "Write an ftsupervise.yaml from a job script that you have; nothing is submitted."),
    "launch": ("launch", "launch", "Submit the run: a chain of jobs, so that a successor is always waiting."),
    "run": ("run", "run", "Supervise a command inside the job (the batch script calls this)."),
    "watch": ("watch", "watch", "Check runs once and notify people of what changed; --every 60s repeats it."),
    "check": ("check", "check", "Run the watchdogs once and print what they find."),
    "status": ("status", "status", "Show how all runs or one run are doing; --watch goes on showing it."),
    "logs": ("logs", "logs", "Show the output of the run, wherever it goes; -f follows it across restarts."),
    "diagnose": ("diagnose", "diagnose", "Say what happened in an attempt: its class, whose it was, by which lines."),
    "list": ("list_runs", "list_runs", "List the runs that this account has launched, for scripts."),
    "forget": ("forget", "forget", "Drop runs from list, status and the watch; nothing of them is deleted."),
    "report": ("report", "report", "Write a run as one HTML page that needs no network, or as Markdown."),
    "plan": ("plan", "plan", "Say which values lose least to failures, what to expect, what would help."),
    "simulate": ("simulate", "simulate", "Play failures against strategies, side by side; or those a run has had."),
    "metrics": ("metrics", "metrics", "Print runs as metrics for Prometheus, or write them for its node_exporter."),
    "kill": ("kill", "kill", "Raise the kill switch: the run saves and stops at its next step."),
    "save": ("save", "save", "Raise the save switch: the run saves a checkpoint and goes on."),
    "clear": ("clear", "clear", "Lower a switch again."),
    "observe": ("observe", "observe", "Have decisions only told and not carried out; --off acts on them again."),
    "cron": ("cron", "cron", "A crontab for clusters without one: install it, drop files in and they run."),
    "groups": ("groups", "groups", "Replica groups: the job script runs them; let one leave, or join again."),
    "nodes": ("nodes", "nodes", "Nodes with incidents: which are excluded and why; exclude, trust, clear."),
    "checkpoints": (
        "checkpoint_upkeep",
        "checkpoints",
        "Checkpoints: list, verify, commit those of other programs, prune, offload, restore.",
    ),
    "alerts": ("alerts", "alerts", "Show what fires, since when, and who was notified; ack and silence."),
    "notify": ("notify", "notify", "Test a receiver; preview every message."),
    "config": ("config", "config", "Check the configuration, print it with its origins, print its schema."),
    "doctor": ("doctor", "doctor", "Look at all that a night depends on, each line with what to type."),
    "sandbox": ("sandbox", "sandbox", "A real Slurm on this machine, for trying things."),
}

# What a command loads twice that is tried first as a dry run: for the trial and for its work, each in a child of this process.
# It is loaded here once for both; the program itself lies on a disk that answers, or this process would not have started.
_SETTINGS = "ftsupervise.config.believed"
_TRIED: dict[str, tuple[str, ...]] = {
    "launch": (
        *(_SETTINGS, "ftsupervise.launch.submit", "ftsupervise.launch.doubts", "ftsupervise.nodes.exclude"),
        *("ftsupervise.alerts.receivers", "ftsupervise.watch.watchdogs.preflight", "jinja2"),
    ),
    "cron install": (_SETTINGS,),
    "notify test": (_SETTINGS,),
    **dict.fromkeys(
        (f"checkpoints {verb}" for verb in ("commit", "offload", "prune", "restore", "verify")),
        (_SETTINGS, "ftsupervise.checkpoints.find"),
    ),
}


class Lazy(click.Group):
    """A group that knows its commands' one-liners and imports a command's module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"ftsupervise.cli.{module}"), attribute)
        gc.enable()  # (``__main__`` had it wait)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS) or "; ftsupervise --help lists the commands"
            raise click.UsageError(f"no such command: {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, "-V", "--version", message="ftsupervise %(version)s")
def ftsupervise() -> None:
    """Keep a long training run on a Slurm cluster alive.

    \b
    ftsupervise init JOB.sbatch    write ftsupervise.yaml from a job script that you have
    ftsupervise launch             submit the run of ./ftsupervise.yaml
    ftsupervise status             show how all runs are doing; "status .": this one in full
    ftsupervise logs -f            follow its output
    ftsupervise watch --every 60s  notify people when something is wrong

    Exit codes: 0 done; 64 usage, 65 a job script that sbatch refuses or init cannot bring over, 66 not found,
    69 Slurm unreachable, 73 cannot write, 74 no answer (a file system hangs), 75 not now (kill switch up),
    77 not permitted, 78 configuration, 100 already running, 130 cancelled. check and watch: Nagios 0-3.
    doctor: 1 something is wrong, 3 something was not seen.
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. No error a person can cause prints a traceback, nothing prints a control character."""
    from ftsupervise.cli import time_limit
    from ftsupervise.cli.output import printable_streams

    colours = look_at_terminals() and may_colour()
    if argv is None and time_limit.applies(sys.argv[1:]):
        time_limit.go_on_in_a_child(sys.argv[1:])  # returns in a child, whose output is no terminal
    elif argv is None and time_limit.acts(sys.argv[1:]):
        for part in _TRIED.get(time_limit.command_of(sys.argv[1:]), ()):
            import_module(part)
        argv = time_limit.try_dry_run(sys.argv[1:])  # returns in a child too, which makes a dry run
        if argv is None and (patience := time_limit.patience_of(sys.argv[1:])):
            time_limit.go_on_in_a_child(sys.argv[1:], patience=patience)  # returns in a child, which does it
    time_limit.limit_slurm(sys.argv[1:] if argv is None else argv)
    try:
        with printable_streams(colours=colours):
            _main(argv, {"color": colours})
    except SystemExit as ended:
        time_limit.end_child(ended)  # a child does not clear up: its parent is waited for
        raise


def _main(argv: list[str] | None, shown: dict[str, Any]) -> NoReturn:
    try:
        code = ftsupervise.main(
            args=argv, prog_name="ftsupervise", standalone_mode=False, terminal_width=_width(), **shown
        )
        sys.stdout.flush()
    except click.exceptions.Abort:
        say("ftsupervise: stopped", err=True)
        code = Cancelled.exit_code
    except click.ClickException as error:
        head = _head(argv)
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2; before it was no error
            click.echo(error.format_message(), err=True)
        elif isinstance(error, click.UsageError) and error.ctx is not None:
            command = error.ctx.command_path
            begin = head.replace("ftsupervise: ", f"{command}: ")
            say(f"{begin}{error.format_message()}\n  {command} --help says more", err=True)
        else:
            say(f"{head}{error.format_message()}", err=True)
        code = UsageError.exit_code
    except Error as error:
        say(f"{_head(argv)}{error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = Cancelled.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    except OSError as error:
        from ftsupervise.errors import from_os_error

        known = from_os_error(error, f"use {error.filename}" if error.filename else "finish")
        say(f"{_head(argv)}{known}", err=True)
        code = known.exit_code
    sys.exit(code if isinstance(code, int) else 0)


def _head(argv: list[str] | None) -> str:
    """The beginning of an error. ``run`` writes into the job's log, where each line of ours begins with its time."""
    in_the_log = (sys.argv[1:] if argv is None else argv)[:1] == ["run"]
    return log_line("") if in_the_log else "ftsupervise: "


def _width() -> int:
    """As click would find it, but click takes ``shutil`` for that, and with it four compression libraries."""
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        columns = 0
    return max(50, min(columns or 80, 80) - 2)
