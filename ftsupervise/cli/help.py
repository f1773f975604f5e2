"""``ftsupervise help VERB``: what ``VERB --help`` prints."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ftsupervise.cli.command_group import no_such_command


@click.command("help")
@click.argument("verbs", nargs=-1, metavar="[VERB [SUBVERB]]")
@click.pass_context
def show_help(ctx: click.Context, verbs: tuple[str, ...]) -> None:
    """Show the help of ftsupervise, of a command, or of a command of a group.

    \b
    ftsupervise help
    ftsupervise help launch
    ftsupervise help cron install
    """
    assert ctx.parent is not None
    click.echo(_context_of(ctx.parent, verbs).get_help())


def _context_of(root: click.Context, verbs: Sequence[str]) -> click.Context:
    """Return the context in which the command is that ``verbs`` name. Raises click.UsageError where there is none."""
    found = root
    for word in verbs:
        group = found.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"it has no commands of its own, so {word!r} names none", found)
        command = group.get_command(found, word)
        if command is None:
            raise no_such_command(word, group.list_commands(found), found)
        found = click.Context(command, info_name=word, parent=found)
    return found
