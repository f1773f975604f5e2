"""Checks that each place answers that a command about checkpoints uses: within a bound before anything is touched, and
meanwhile.

A process that copies to a dead mount hangs in the kernel, where no signal reaches it. So each folder is looked at first
by the children of a ``Probe``. An object store is not asked: its package has time limits of its own. The work itself is
done by a child, and given up when nothing moves in it any more (``probe/errand.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from ftsupervise.cli.output import bar_console, say
from ftsupervise.errors import Cancelled, Error, NoAnswer
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.checkpoints.stores import Store
    from ftsupervise.probe import NotSeen, Probe
    from ftsupervise.probe.errand import WorkProgress

T = TypeVar("T")


class Patient(NamedTuple):
    """The patience with work on checkpoints."""

    seconds: float  # without a movement, after which the work is given up
    quiet: bool = False  # without a bar


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    from ftsupervise.units import parse_duration

    try:
        seconds = parse_duration(value).total_seconds()
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(str(error)) from None
    if seconds < 1:
        raise click.BadParameter("give at least a second, such as 2m")
    return seconds


patience = click.option(
    "--patience", "seconds", default="2m", show_default=True, callback=_seconds, metavar="TIME",
    help="Give up a place in which nothing has moved for this long.",
)  # fmt: skip


def patiently(
    work: Callable[[WorkProgress], T],
    patient: Patient,
    *,
    doing: str,
    places: Iterable[Path | Store],
    total: int | None = None,
) -> T:
    """Do ``work`` in a child; returns or raises what it does. A bar says ``doing`` and the bytes, of ``total``.

    Raises NoAnswer when nothing moves in it any more; the message names the one of ``places`` that does not answer.
    """
    from ftsupervise.probe.errand import Stuck, watched

    used = tuple(places)
    key = f"checkpoints: {' '.join(one.url if not isinstance(one, Path) else str(one) for one in used)}"
    try:
        with bar(doing, total, quiet=patient.quiet or not doing) as moved:
            return watched(work, key=key, patience=patient.seconds, moved=moved, line=lambda text: say(printable(text)))
    except Stuck as error:
        folders = (one if isinstance(one, Path) else getattr(one, "root", None) for one in used)
        must_answer((), *folders, hint=error.message)
        raise
    except ChildProcessError as error:
        raise Error(
            f"the process that did the work was lost: {error}", hint="the same command continues where it stopped"
        ) from None


def must_answer(stores: Iterable[Store], *folders: Path | None, hint: str) -> None:
    """Raise NoAnswer for the first of these places that does not answer. ``hint``: what a person types instead."""
    from ftsupervise.probe import Probe

    with Probe() as probe:
        for folder in (*folders_of(stores), *folders):
            if folder is not None:
                look(probe, folder, hint)


def folders_of(stores: Iterable[Store]) -> tuple[Path, ...]:
    from ftsupervise.checkpoints.stores import FolderStore

    return tuple(store.root for store in stores if isinstance(store, FolderStore))


def look(probe: Probe, folder: Path, hint: str) -> None:
    """Look at the folder, or the nearest one above that exists.

    A refusal is an answer; the command itself reports its meaning.
    """
    seen = _seen(probe, folder.absolute())
    if seen is not None and seen.hung:
        raise NoAnswer(f"{folder} does not answer (mount {seen.what}): {seen.why}", hint=hint)


def _seen(probe: Probe, folder: Path) -> NotSeen | None:
    """Return why it cannot be seen. Of a folder above only the file system is asked: another mount in it may hang."""
    from ftsupervise.probe import Missing, NotSeen

    for here in (folder, *folder.parents):
        space = probe.space(here)
        if isinstance(space, NotSeen):
            return space
        if not isinstance(space, Missing):
            break
    listing = probe.listing(folder, most=1)
    return listing if isinstance(listing, NotSeen) else None


@contextmanager
def bar(word: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """On a terminal, a bar of bytes on the standard error. A person who presses Ctrl-C ends what is under way in good order."""
    import sys

    try:
        if quiet or not sys.stderr.isatty():
            yield lambda done: None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn(word), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        shown = Progress(*columns, console=bar_console(), transient=True)
        task = shown.add_task(word, total=total)

        def advance(done: int) -> None:
            shown.start()  # its thread begins with the first bytes, not before a child is forked that reads them
            shown.advance(task, done)

        try:
            yield advance
        finally:
            shown.stop()
    except KeyboardInterrupt:
        raise Cancelled("stopped; the same command continues where it stopped") from None
