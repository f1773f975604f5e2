"""The settings of a run as the words of the batch script: options of ``ftsupervise run``, and of ``ftsupervise groups run``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from ftsupervise.config.grouping import GROUP_SETTINGS
from ftsupervise.config.supervisor import BY_KEY, Form, Setting
from ftsupervise.host import processes

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

# The supervisor of a run of replica groups supervises the process that starts the groups: it has no ranks of its own,
# no hang detector and nothing to keep warm. Each group's supervisor has these.
_WHOLE = ("in_place", "same_failure", "back_off", "stop_within")


def words_of_the_whole(run: Run) -> list[str]:
    settings = [BY_KEY[f"launch.restart.{word}"] for word in _WHOLE]
    none = ("--hang", "off", "--warm", "off", "--snapshot-every", "off", "--distributed", "never")
    return [*words_of(run, settings), *none]


def in_groups(run: Run, token: str, python: str) -> list[str]:
    """Return the words before the command that start it once for each replica group."""
    groups = run.launch.replica_groups
    assert groups is not None
    own = processes.own_command("groups", "run", "--launched", token, python=python)
    own += words_of(run, [one for one in GROUP_SETTINGS if one.key])
    each = [one for one in BY_KEY.values() if one.key != _HANG or _says_when_it_hangs(run)]
    return [*own, "--", *words_of(run, each), "--"]


def in_its_job(run: Run, token: str, python: str, number: int) -> list[str]:
    """Return the same for one group that has a job of its own."""
    own = processes.own_command(
        "groups", "member", "--number", str(number), "--run-dir", str(run.run_dir), python=python
    )
    words = in_groups(run, token, python)
    at = words.index("run", len(processes.own_command(python=python)))
    return [*own, "--name", run.name, *words[at + 1 :]]


_HANG = "launch.restart.hang.at_least"


def _says_when_it_hangs(run: Run) -> bool:
    """Return whether a hang's bound is given; without one it follows from the timeouts of the groups."""
    hang = run.launch.restart.hang
    return hang is None or hang.at_least != type(hang)().at_least


def words_of(run: Run, settings: Iterable[Setting] = BY_KEY.values()) -> list[str]:
    """Return the settings of ``run`` in the batch script: those that differ from the default, and a few that people
    search for.
    """
    found: list[str] = []
    for setting in settings:
        value = _value(run, setting)
        if value is ...:
            continue
        if value is None and setting.off is not None:
            found += [setting.flag, setting.off] if setting.default is not None else []
        elif value is not None and (setting.always or value != setting.default):
            found += [word for text in _texts(setting.form, value) for word in (setting.flag, text)]
    return found


def _value(run: Run, setting: Setting) -> Any:
    """Return seconds as a number; None where it is null, or its section; ... to leave out a section that is null."""
    value: Any = run
    *sections, last = setting.key.split(".")
    for name in sections:
        value = getattr(value, name)
        if value is None:
            return None if setting.off is not None else ...
    value = getattr(value, f"{last}_" if iskeyword(last) else last)
    return value.total_seconds() if isinstance(value, timedelta) else value


def _texts(form: Form, value: Any) -> list[str]:
    if form is Form.CHOICES:
        return list(value)
    if form is Form.COUNTS:
        return [f"{kind}={number}" for kind, number in value.items()]
    if form is Form.MODULES:
        return [value if isinstance(value, str) else ",".join(value) or "off"]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
