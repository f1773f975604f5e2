"""Finds settings that are well written and still wrong, while a person is there to read it: at launch and check.

These can only be found by looking: a path that is not there, a log pattern that never matched, a program that does not
exist. All of it is bounded, and what could not be seen gives no complaint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.errors import PluginUnusable
from ftsupervise.host.begin import on_path
from ftsupervise.host.plugins import WATCHDOGS
from ftsupervise.probe import Missing, Probe
from ftsupervise.rundir import log_lines
from ftsupervise.rundir.paths import RunDir
from ftsupervise.watch.watchdogs import run_signs

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.watch import Look


def complaints(run: Run, probe: Probe, now: datetime | None = None) -> tuple[str, ...]:
    """Return sentences that begin with the key of the setting: "watch.disk[0].path: /scrach is not there …"."""
    from ftsupervise.watch import Look

    assert run.run_dir is not None
    when = now if now is not None else datetime.fromtimestamp(0, timezone.utc)  # only a label here: no age is computed
    look = Look(run=run, rundir=RunDir(run.run_dir), now=when, jobs=None, probe=probe)
    return (*_paths(look), *_patterns(look), *_programs(look), *_of_other_packages(look))


def _of_other_packages(look: Look) -> Iterator[str]:
    from ftsupervise.config.plugged import as_used

    for key, settings in (look.run.watch.model_extra or {}).items():
        try:
            if settings is not None:
                as_used(WATCHDOGS, key, settings)
        except PluginUnusable as error:
            yield f"watch.{key}: {error.message}"


def _paths(look: Look) -> Iterator[str]:
    watch = look.run.watch
    for index, one in enumerate(watch.disk or ()):
        if one.path is not None and isinstance(look.probe.look(one.path), Missing):
            yield f"watch.disk[{index}].path: {one.path} is not there{_close(look, one.path)}"
    if look.run.checkpoints.path is not None:
        path = look.run.checkpoints.path
        if isinstance(look.probe.look(path), Missing) and isinstance(look.probe.look(path.parent), Missing):
            yield f"checkpoints.path: neither {path} nor the directory above it is there{_close(look, path.parent)}"
    for key, log in (
        ("watch.hang.log", watch.hang.log if watch.hang is not None else None),
        ("watch.loss.log", watch.loss.log if watch.loss is not None else None),
    ):
        if log is not None and isinstance(look.probe.look(run_signs.pattern_of(look, log).parent), Missing):
            yield f"{key}: the directory {log.parent} is not there{_close(look, log.parent)}"


def _close(look: Look, path: Path) -> str:
    """Return the name that may have been meant, as a question."""
    from difflib import get_close_matches

    from ftsupervise.probe import Listing

    there = look.probe.listing(path.parent, most=2000)
    close = get_close_matches(path.name, [e.name for e in there.entries], 1) if isinstance(there, Listing) else []
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _patterns(look: Look) -> Iterator[str]:
    """Yield patterns that match nothing, but only where there is enough log that they should have matched."""
    watch = look.run.watch
    asked = (
        ("watch.hang", "step", watch.hang.log if watch.hang else None, watch.hang.pattern if watch.hang else None),
        ("watch.loss", "loss", watch.loss.log if watch.loss else None, watch.loss.pattern if watch.loss else None),
    )
    for key, what, log, pattern in asked:
        if pattern is None:
            continue
        piece = run_signs.read_on(look, log, {})
        if not isinstance(piece, run_signs.Piece):
            continue
        lines = list(log_lines.lines(piece.data))
        if len(lines) >= 20 and not any(re.search(pattern, line) for line in lines):
            yield (
                f"{key}.pattern: {pattern!r} matches none of the last {len(lines)} lines of {piece.path}, "
                f"so no {what} is seen; the last line is {lines[-1][:80]!r}"
            )


def _programs(look: Look) -> Iterator[str]:
    watch = look.run.watch
    asked = [(f"watch.exec[{i}].command", one.command[0]) for i, one in enumerate(watch.exec or ())]
    asked += [
        (f"watch.disk[{i}].quota.command", one.quota.command[0])
        for i, one in enumerate(watch.disk or ())
        if one.quota is not None
    ]
    for key, program in asked:
        if "/" in program:
            if isinstance(look.probe.look(Path(program).absolute()), Missing):
                yield f"{key}: there is no program {program}"
        elif on_path(program) is None:
            yield f"{key}: no program {program!r} on the PATH; write its whole path (the watch may have another PATH)"
    if watch.gpu is not None:
        yield from _gpu(look)


def _gpu(look: Look) -> Iterator[str]:
    from ftsupervise.watch.watchdogs import gpu

    seen = gpu.ask(look.probe)
    if isinstance(seen, str):
        yield f"watch.gpu: {seen}; it sees the GPUs of the node the watch runs on, and no others"
