"""Groups of commands: their summaries are whole sentences, and a misspelt command is answered with the one that is near."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.names import RUN
from ftsupervise.errors import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_WHOLE = 1_000_000  # characters: click cuts a summary that is longer


def summary_of(command: click.Command) -> str:
    """Return what a list of commands says about ``command``: its first sentence, whole."""
    return command.get_short_help_str(_WHOLE)


def no_such_command(word: str, known: Iterable[str], ctx: click.Context) -> click.UsageError:
    """Return the error about a command that there is not, with the closest one of ``known``."""
    hint = did_you_mean(word, known) or f"; {ctx.command_path} --help lists the commands"
    return click.UsageError(f"no such command: {word!r}{hint}", ctx)


class CommandGroup(click.Group):
    """``cron install``: a word and commands behind it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary_of(one)) for name, one in named if one is not None and not one.hidden])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if (
            args
            and not args[0].startswith("-")
            and self.get_command(ctx, args[0]) is None
            and not ctx.resilient_parsing
        ):
            raise no_such_command(args[0], [n for n, one in self.commands.items() if not one.hidden], ctx)
        return super().resolve_command(ctx, args)


class DefaultGroup(CommandGroup):
    """``alerts [RUN]`` lists; ``alerts ack …`` does something. A run called "ack" is named by its path."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asked_by_the_shell = (
            not args and ctx.resilient_parsing
        )  # what may stand here: a command, or what ``list`` takes
        if not asked_by_the_shell and (not args or args[0] not in (*self.commands, "-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        listing = self.commands["list"]
        of_list = click.Context(listing, info_name="list", parent=ctx, resilient_parsing=True)
        runs = [] if incomplete.startswith("-") else RUN.shell_complete(of_list, listing.params[0], incomplete)
        return [*runs, *super().shell_complete(ctx, incomplete), *listing.shell_complete(of_list, incomplete)]
