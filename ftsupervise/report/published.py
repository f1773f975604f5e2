"""The form of ``status --json`` for programs: its version, the fields of one run beside those of its row, and the JSON Schema
of both, made from the types themselves. docs/status.schema.json is that schema as a file.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.model import Attempt, Job
from ftsupervise.report.detail import RunDetail, TimeSpent, attempts_of
from ftsupervise.report.groups import GroupsSeen
from ftsupervise.report.row import RunRow
from ftsupervise.rundir.attempt_pages import VerdictPage
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.rundir.tracker import TrackerPage
from ftsupervise.truth import Beat, SwitchState

SCHEMA_VERSION = 4  # another one when a field goes or changes its meaning


class RunFields(NamedTuple):
    """The fields that ``status RUN --json`` has of one run besides its row."""

    jobs: tuple[Job, ...] | None
    blind: str
    ledger: tuple[Attempt, ...]
    not_read: int
    progress: ProgressPage | None
    beats: tuple[Beat, ...]
    switches: tuple[SwitchState, ...]
    finished: bool
    avoided_nodes: tuple[str, ...] | None
    log: Path | None
    groups: GroupsSeen | None
    tracker: TrackerPage | None
    diagnosis: VerdictPage | None  # of the newest attempt, where it failed and a watch or a report has kept it
    time: TimeSpent
    receivers: tuple[str, ...]
    warnings: tuple[str, ...]
    at: datetime


def fields_of(found: RunDetail) -> RunFields:
    seen, run = found.status, found.status.run
    return RunFields(
        jobs=seen.jobs,
        blind=seen.blind,
        ledger=attempts_of(seen),
        not_read=run.not_read,
        progress=run.page,
        beats=run.beats,
        switches=run.switches,
        finished=run.finished,
        avoided_nodes=found.avoided,
        log=found.log,
        groups=found.groups,
        tracker=found.tracker,
        diagnosis=found.diagnosis,
        time=found.time,
        receivers=seen.telling,
        warnings=seen.warnings,
        at=seen.at,
    )


class RunStatus(NamedTuple):
    """One run as ``status RUN`` shows it: ``row`` is its row in the table of all runs, ``fields`` all else that ``--json`` has.

    What is asked most has a name of its own here."""

    row: RunRow
    fields: RunFields

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def at(self) -> datetime:
        """When it was looked."""
        return self.fields.at

    @property
    def verdict(self) -> str:
        """The word with which ``status`` begins: "RUNNING", "HUNG", "WAITING", "FINISHED", "UNKNOWN" …"""
        return self.row.verdict

    @property
    def why(self) -> str:
        """Why it is called so; "" where the word says all."""
        return self.row.why

    @property
    def step(self) -> int | None:
        """The step that all ranks have reached; None: none is known."""
        return self.row.step

    @property
    def saved(self) -> int | None:
        """The step of the newest checkpoint; None: none is known."""
        return self.row.saved

    @property
    def jobs(self) -> tuple[Job, ...] | None:
        """Its jobs in the queue; None: the queue could not be asked, and ``fields.blind`` says why."""
        return self.fields.jobs

    @property
    def finished(self) -> bool:
        """Whether the training has said that it is complete."""
        return self.fields.finished


def status_of(found: RunDetail) -> RunStatus:
    return RunStatus(found.row, fields_of(found))


def json_schema(*, strict: bool = False) -> dict[str, Any]:
    """Return the schema (draft 2020-12). ``strict``: a field that it does not name is an error, and otherwise allowed."""
    made = _Maker(strict)
    row, further = made.object_of(RunRow), made.object_of(RunFields)
    version = {"schema_version": {"const": SCHEMA_VERSION}}
    one = {**row["properties"], **further["properties"]}
    several = {
        "at": _TIME,
        "runs": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/run"}, {"$ref": "#/$defs/row"}]}},
    }
    made.defs["row"] = row
    made.defs["run"] = made.closed(one, [*row["required"], *further["required"]])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftsupervise status --json",
        "description": "One run (status RUN), or several in a list: all runs without a name, or those that were named.",
        "anyOf": [
            made.closed({**version, **one}, ["schema_version", *row["required"], *further["required"]]),
            made.closed({**version, **several}, ["schema_version", "runs"]),
        ],
        "$defs": dict(sorted(made.defs.items())),
    }


_TIME = {"type": "string", "format": "date-time"}
_PLAIN: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Path: {"type": "string"},
    datetime: _TIME,
    timedelta: {"type": "number", "minimum": 0},
}


class _Maker:
    def __init__(self, strict: bool) -> None:
        self.strict, self.defs = strict, dict[str, Any]()

    def closed(self, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
        more = {"additionalProperties": False} if self.strict else {}
        return {"type": "object", "properties": dict(properties), "required": required, **more}

    def object_of(self, kind: Any) -> dict[str, Any]:
        hints = typing.get_type_hints(kind)
        return self.closed({name: self.of(hint) for name, hint in hints.items()}, list(hints))

    def of(self, hint: Any) -> dict[str, Any]:
        if hint in _PLAIN:
            return _PLAIN[hint]
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.of(one) for one in inner]}
        if origin is tuple:
            return {"type": "array", "items": self.of(inner[0])}
        if origin is not None and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(inner[1])}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"enum": [getattr(one, "word", one.value) for one in hint]}
        name = hint.__name__
        if name not in self.defs:
            self.defs[name] = {}  # a type may contain itself
            self.defs[name] = self.object_of(hint)
        return {"$ref": f"#/$defs/{name}"}
