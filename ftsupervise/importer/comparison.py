"""Compares the options of a person's job script with those of the job that a launch submits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftsupervise.importer.sbatch import Option, options_of

_WHY = {
    "array": "the chain: one job runs, the others wait",
    "chdir": "the folder of ftsupervise.yaml",
    "comment": "ftsupervise finds its jobs by it",
    "dependency": "ftsupervise launch --after",
    "job-name": "the name of the run",
    "mail-type": "ftsupervise tells people itself",
    "mail-user": "ftsupervise tells people itself",
    "no-requeue": "the next job of the chain goes on",
    "nodes": "one number of nodes for each job",
    "open-mode": "a restart appends to the output",
    "output": "in the run directory",
    "requeue": "the next job of the chain goes on",
    "signal": "the warning before the limit goes to the supervisor, which passes it on",
}
_FORM = {"mem", "mem-per-cpu", "mem-per-gpu", "time", "signal"}


@dataclass(frozen=True)
class Difference:
    """``before`` or ``after`` is "" where the option is not there."""

    option: str
    before: str
    after: str
    why: str


def differences(
    theirs: Sequence[Option], ours: Sequence[str], folder: str = ""
) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
    """Return the names of the options that are the same in both, and the others. ``ours``: as ``--key=value``;
    ``folder``: where sbatch would be typed, at which relative paths start.
    """
    before = {one.name: one for one in theirs}
    after = {one.name: one for text in ours for one in options_of([text])}
    same: list[str] = []
    found: list[Difference] = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old and new and _value(old, folder) == _value(new, folder):
            same.append(name)
        else:
            why = "" if name == "output" and old else _WHY.get(name, "")
            found.append(Difference(name, old.text if old else "", new.text if new else "", why))
    return tuple(same), tuple(found)


def _value(one: Option, folder: str) -> str:
    """Return the value in one form: 64GB is 64G, 24:00:00 is 1-00:00:00."""
    if one.name == "time":
        from ftsupervise.units import format_slurm_time, parse_slurm_time

        try:
            return format_slurm_time(parse_slurm_time(one.value))
        except ValueError:
            return one.value
    if one.name == "signal":
        word, _, seconds = one.value.upper().removeprefix("B:").partition("@")
        return f"{word.removeprefix('SIG')}@{seconds or 60}"
    if one.name in ("output", "error"):
        return one.value.removeprefix(f"{folder.replace('%', '%%')}/").removeprefix("./")
    return one.value.upper().rstrip("B") if one.name in _FORM else one.value
