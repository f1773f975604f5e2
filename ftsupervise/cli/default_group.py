"""A group of commands that lists when no command of it is named: ``alerts [RUN]``, ``nodes [RUN]``."""

from __future__ import annotations

import click


class DefaultGroup(click.Group):
    """``alerts [RUN]`` lists; ``alerts ack …`` does something. A run called "ack" is named by its path."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)
