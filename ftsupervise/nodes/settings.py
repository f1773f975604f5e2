"""How a run judges its nodes, and where it lies what is known of them: the one reader of the settings for it."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.config.supervisor import default
from ftsupervise.errors import ConfigError, NotFound
from ftsupervise.rundir.paths import RunDir
from ftsupervise.units import parse_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_SHARE = 0.02  # of the run's nodes that may be excluded, when it has fewer spares


class Scoring(NamedTuple):
    """How incidents become exclusions."""

    half_life: float = default("care.half_life")  # seconds after which an incident counts half
    exclude_at: float = default("care.exclude_at")
    at_most: int = 1  # nodes excluded because of their score; a person's own exclusions come besides


def margin(nodes: int, spares: int) -> int:
    """How many nodes a run may exclude by itself: its spares, or 2 % of its nodes, at least one."""
    return max(spares, ceil(_SHARE * nodes), 1)


def of_run(run: Run) -> tuple[Scoring, list[Path]]:
    """By the settings of ``run``; the places begin with the run's own."""
    assert run.run_dir is not None
    given, most = run.nodes, margin(run.launch.nodes, run.launch.spare_nodes)
    scoring = Scoring(
        given.half_life.total_seconds(), given.exclude_at, most if given.at_most is None else given.at_most
    )
    return scoring, [RunDir(run.run_dir).nodes, *([given.directory] if given.directory else [])]


def of_run_dir(rundir: RunDir) -> tuple[Scoring, list[Path]]:
    """As the run was launched, read in a hurry: without the schema. The defaults without a launch. Raises ConfigError."""
    given, launch, usual = _section(rundir, "nodes"), _section(rundir, "launch"), Scoring()
    try:
        most = margin(int(launch.get("nodes", 1)), int(launch.get("spare_nodes", 0)))
        scoring = Scoring(
            parse_duration(given["half_life"]).total_seconds() if given.get("half_life") else usual.half_life,
            float(given.get("exclude_at", usual.exclude_at)),
            most if given.get("at_most") is None else int(given["at_most"]),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{rundir.config}: nodes: {error}", hint="launch writes that file; launch again") from None
    return scoring, [rundir.nodes, *([Path(given["directory"])] if given.get("directory") else [])]


def _section(rundir: RunDir, name: str) -> dict[str, Any]:
    """A section of the run.yaml that launch wrote; {} for a run that no launch has made."""
    from ftsupervise.config import sources

    try:
        text = sources.read_file(rundir.config)
        document = sources.fill(text, os.environ, unfilled=sources.of_strangers(rundir.config))
    except NotFound:
        return {}
    found = document.value.get(name) if isinstance(document.value, dict) else None
    return found if isinstance(found, dict) else {}
