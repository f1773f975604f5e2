"""Would the command line take this? Parsed by its own parser, run by nobody."""

from __future__ import annotations

import shlex

import click

from ftsupervise.cli import ftsupervise


def refused(line: str) -> str:
    """Why ``ftsupervise …`` does not parse; "" if it does."""
    words = shlex.split(line, comments=True)
    try:
        if len(words) == 2:  # a command named in passing, without what it is to be given
            ftsupervise.resolve_command(ftsupervise.make_context("ftsupervise", words[1:]), words[1:])
        else:
            _parse(ftsupervise, words[1:])
    except SystemExit as error:  # what is a Nagios plug-in ends by itself
        return f"exit {error.code}"
    except click.exceptions.Exit as error:  # --help
        return f"exit {error.exit_code}" if error.exit_code else ""
    except click.ClickException as error:
        return error.format_message()
    return ""


def _parse(command: click.Command, words: list[str]) -> None:
    ctx = command.make_context(command.name, list(words))
    if isinstance(command, click.Group):
        own = vars(ctx)  # click 8.1 has no underscore before it
        rest = [*(own.get("_protected_args") or own.get("protected_args") or []), *ctx.args]
        if rest:
            _, inner, left = command.resolve_command(ctx, rest)
            assert inner is not None
            _parse(inner, left)
