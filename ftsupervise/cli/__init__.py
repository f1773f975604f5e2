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

from ftsupervise.cli.output import asks_for_json, error_line, look_at_terminals, may_colour, say, show_through_a_pager
from ftsupervise.errors import Cancelled, Error, UsageError
from ftsupervise.printable import log_line
from ftsupervise.version import VERSION

# name -> (module, attribute, one line for --help). A new command is one line here, its name in GROUPS, and one module beside
# this file.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "init": ("init", "init", "Write an ftsupervise.yaml from a job script that you have."),
    "launch": ("launch", "launch", "Submit a chain of jobs, so that a successor always waits."),
    "run": ("run", "run", "Supervise a command inside the job (its script calls this)."),
    "watch": ("watch", "watch", "Check runs and notify people of what changed."),
    "check": ("check", "check", "Run the watchdogs once and print what they find."),
    "status": ("status", "status", "Show how all runs, or one run, are doing."),
    "logs": ("logs", "logs", "Show the output of a run, wherever it goes."),
    "diagnose": ("diagnose", "diagnose", "Say what happened in an attempt, and by which lines."),
    "list": ("list_runs", "list_runs", "List the runs of this account, for scripts."),
    "forget": ("forget", "forget", "Drop runs from the lists and the watch; deletes nothing."),
    "report": ("report", "report", "Write a run as one HTML page, or as Markdown."),
    "plan": ("plan", "plan", "Say which values lose least to failures, and what would help."),
    "simulate": ("simulate", "simulate", "Play failures against strategies, side by side."),
    "metrics": ("metrics", "metrics", "Print runs as metrics for Prometheus, or write them."),
    "kill": ("kill", "kill", "Have a run save and stop at its next step."),
    "save": ("save", "save", "Have a run save a checkpoint and go on."),
    "clear": ("clear", "clear", "Lower a switch again, or release the brake."),
    "observe": ("observe", "observe", "Have decisions only told, and not carried out."),
    "cron": ("cron", "cron", "Run scripts by the clock on clusters without a crontab."),
    "groups": ("groups", "groups", "Replica groups: run them, let one leave or join again."),
    "nodes": ("nodes", "nodes", "Nodes with incidents: list, exclude, trust, clear."),
    "checkpoints": ("checkpoint_upkeep", "checkpoints", "List checkpoints, verify, prune, copy, bring them back."),
    "alerts": ("alerts", "alerts", "Show what fires and who was notified; ack, silence."),
    "notify": ("notify", "notify", "Send a test message; preview every message."),
    "config": ("config", "config", "Check the settings, print them, print their schema."),
    "doctor": ("doctor", "doctor", "Look at all that a night depends on."),
    "drill": ("drill", "drill", "Break a copy of the run on purpose, and see what happens."),
    "sandbox": ("sandbox", "sandbox", "Start a real Slurm on this machine, for trying things."),
    "completion": ("completion", "completion", "Print the script with which a shell completes all this."),
    "help": ("help", "show_help", "Show the help of a command."),
    "version": ("version", "version", "Print the version."),
}

# The groups of ``--help``, in the order of a run's life. Every command stands in one of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Run": ("launch", "run", "groups", "checkpoints", "nodes"),
    "Look": ("status", "logs", "diagnose", "list", "report", "metrics", "plan", "simulate"),
    "Stop": ("save", "kill", "clear", "observe", "forget"),
    "Watch": ("watch", "check", "alerts", "notify", "cron"),
    "Set up": ("init", "config", "doctor", "drill", "sandbox", "completion", "help", "version"),
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


_BRIEF = ("save", "kill", "clear")  # these are over before anything that they make is garbage


class Lazy(click.Group):
    """A group that knows its commands' one-liners and imports a command's module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, summary = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"ftsupervise.cli.{module}"), attribute)
        command.short_help = summary
        if cmd_name not in _BRIEF:
            gc.enable()  # (``__main__`` had it wait)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from ftsupervise.cli.command_group import no_such_command

            raise no_such_command(args[0], COMMANDS, ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        verbs = [
            CompletionItem(name, help=line) for name, (_, _, line) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", COMMANDS[name][2]) for name in names])


@click.command(
    cls=Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="ftsupervise help VERB says more about one of them, and help VERB SUBVERB about a command of a group.",
)
@click.option(
    "--no-pager", is_flag=True, expose_value=False, help="Print long output, and start no pager ($PAGER, or less)."
)
@click.version_option(VERSION, "-V", "--version", message="ftsupervise %(version)s")
def ftsupervise() -> None:
    """Keep a long training run on a Slurm cluster alive.

    \b
    ftsupervise init JOB.sbatch    write its settings from a job script
    ftsupervise launch             submit the run of ./ftsupervise.yaml
    ftsupervise status             show all runs; "status .": this one in full
    ftsupervise logs -f            follow its output
    ftsupervise watch --every 60s  notify people when something is wrong

    Exit codes: 0 done; 64 usage, 65 a job script that sbatch refuses or init cannot bring over, 66 not found,
    69 Slurm unreachable, 73 cannot write, 74 no answer (a file system hangs), 75 not now (kill switch up),
    77 not permitted, 78 configuration, 100 already running, 130 cancelled. check and watch: Nagios 0-3.
    doctor: 1 something is wrong, 3 something was not seen. drill: 1 a row failed, 3 it could not be tried.
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. No error a person can cause prints a traceback, nothing prints a control character."""
    from ftsupervise.cli import time_limit
    from ftsupervise.cli.output import printable_streams

    if "_FTSUPERVISE_COMPLETE" in os.environ:
        from ftsupervise.cli.completion import answer_the_shell

        answer_the_shell(ftsupervise)
    colours = look_at_terminals() and may_colour()
    if argv is None and sys.argv[1:2] == ["--no-pager"]:
        del sys.argv[1]
    elif argv is None:
        show_through_a_pager(
            time_limit.command_of(sys.argv[1:]), sys.argv[1:]
        )  # returns in a child, where there is one
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
        code = _tell(Cancelled("stopped"), argv)
    except click.ClickException as error:
        code = UsageError.exit_code
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2; before it was no error
            click.echo(error.format_message(), err=True)
        else:
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else ""
            hint = f"{path} --help says more" if path else ""
            _tell(UsageError(error.format_message(), hint=hint), argv, by=path)
    except Error as error:
        code = _tell(error, argv)
    except KeyboardInterrupt:
        code = Cancelled.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    except OSError as error:
        from ftsupervise.errors import from_os_error

        code = _tell(from_os_error(error), argv)
    sys.exit(code if isinstance(code, int) else 0)


def _tell(error: Error, argv: list[str] | None, *, by: str = "") -> int:
    """Print an error, and return its exit code: a sentence, or an object where JSON was asked for. ``by``: the command, where
    its words are wrong. ``run`` writes into the job's log, where each line of ours begins with its time.
    """
    words = sys.argv[1:] if argv is None else argv
    if asks_for_json(words):
        click.echo(error_line(error.message, error.hint, error.exit_code), err=True)
    else:
        head = log_line("") if words[:1] == ["run"] else f"{by or 'ftsupervise'}: "
        say(f"{head}{error}", err=True)
    return error.exit_code


def _width() -> int:
    """As click would find it, but click takes ``shutil`` for that, and with it four compression libraries."""
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(1).columns
    except (ValueError, OSError):
        columns = 0
    return max(50, min(columns or 80, 80) - 2)
