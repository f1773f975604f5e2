"""Every command of the program, as click knows them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ftsupervise.cli import ftsupervise


def every_command() -> list[tuple[str, click.Command]]:
    """Each command of click's table that does something, by its words."""

    def below(command: click.Command, words: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), name)
                assert found is not None
                yield from below(found, f"{words} {name}".strip())
        else:
            yield words, command

    return list(below(ftsupervise, ""))
