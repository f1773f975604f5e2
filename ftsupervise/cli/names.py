"""Arguments that name something: what the shell completes them with. They are asked for while a person is in the middle of a
word, so nothing is imported here before (``completion.py`` has the bound)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.types import StringParamType

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Named(StringParamType):
    """A text that is one of ``names``, or a path too where it may be one of ``files``."""

    def __init__(self, names: Callable[[click.Context], Iterable[str]], *, files: bool = False) -> None:
        self._names, self._files = names, files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        paths = [CompletionItem(incomplete, type="file")] if self._files else []
        if self._files and incomplete.startswith((".", "/", "~")):
            return paths
        return [
            *paths,
            *(CompletionItem(name) for name in dict.fromkeys(self._names(ctx)) if name.startswith(incomplete)),
        ]


def _runs(_ctx: click.Context) -> Iterable[str]:
    from ftsupervise.report.rows import all_runs

    return all_runs()


def _watchdogs(_ctx: click.Context) -> Iterable[str]:
    from ftsupervise.watch.watchdogs import installed

    return installed()


RUN = Named(_runs, files=True)
WATCHDOG = Named(_watchdogs)
