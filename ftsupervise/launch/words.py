"""The settings of a run as the words of the batch script: options of ``ftsupervise run``, and of ``ftsupervise groups run``.

It stands alone because the plan can be read without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from ftsupervise.config.grouping import GROUP_SETTINGS
from ftsupervise.config.supervisor import BY_KEY, RETAIN, Form, Setting
from ftsupervise.host import processes

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch, Run

# The supervisor of a run of replica groups supervises the process that starts the groups: it has no ranks of its own,
# no hang detector and nothing to keep warm. Each group's supervisor has these.
_WARN = timedelta(minutes=10)
_OBSERVE = "act.observed"
_WHOLE = (
    *(f"launch.restart.{word}" for word in ("in_place", "same_failure", "back_off", "stop_within")),
    RETAIN,
    _OBSERVE,
)


def warning_lead(launch: Launch) -> timedelta:
    """Return the time from the warning to the limit: ``warn``, else 10 minutes, but at most half the limit."""
    if launch.warn is not None:
        return launch.warn
    return min(_WARN, launch.time / 2) if launch.time else _WARN


def warning_option(launch: Launch) -> str:
    """Return when and by what signal Slurm warns, as in sbatch's --signal: USR1@600."""
    return f"{launch.signal}@{max(1, int(warning_lead(launch).total_seconds()))}"


def _warning(run: Run) -> list[str]:
    return [] if run.launch.signal == "USR1" else ["--warning", warning_option(run.launch)]


def words_of_one(run: Run) -> list[str]:
    """Return the options of the supervisor of a run without replica groups."""
    return [*words_of(run), *_warning(run)]


def words_of_the_whole(run: Run) -> list[str]:
    settings = [BY_KEY[key] for key in _WHOLE]
    none = ("--hang", "off", "--warm", "off", "--snapshot-every", "off", "--distributed", "never")
    return [*words_of(run, settings), *_warning(run), *none]


def in_groups(run: Run, token: str, python: str) -> list[str]:
    """Return the words before the command that start it once for each replica group."""
    return [*processes.own_command("groups", "run", python=python), *_of_the_groups(run, token)]


def in_its_job(run: Run, token: str, python: str, number: int) -> list[str]:
    """Return the same for one group that has a job of its own."""
    member = ("member", "--number", str(number), "--run-dir", str(run.run_dir), "--name", run.name)
    return [*processes.own_command("groups", *member, python=python), *_of_the_groups(run, token)]


def _of_the_groups(run: Run, token: str) -> list[str]:
    """Return the settings of the groups, and those of each one's supervisor."""
    left_out = {RETAIN, *_OF_A_SCRIPT}  # the run's supervisor removes for all groups
    left_out |= set() if _says_when_it_hangs(run) else {_HANG}
    each = [one for one in BY_KEY.values() if one.key not in left_out]
    groups = words_of(run, [one for one in GROUP_SETTINGS if one.key])
    return ["--launched", token, *groups, "--", *words_of(run, each), *_warning(run), "--"]


_HANG = "launch.restart.hang.at_least"
_OF_A_SCRIPT = ("launch.resume", "launch.finished_by")  # without a guard, which every group has


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
    if form is Form.SET:
        return ["on"]
    if form is Form.MODULES:
        return [value if isinstance(value, str) else ",".join(value) or "off"]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
