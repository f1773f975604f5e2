"""Turns the options of ``ftsupervise groups run`` into values, and lets a group leave or join again.

What each group's supervisor is to do stands on a page in the group's directory: values by the names of the options of
``ftsupervise run``, which reads them as if they had been typed (``--settings``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftsupervise.config.grouping import least_of
from ftsupervise.errors import Refused, UsageError, from_os_error
from ftsupervise.host.ownership import FOLDER, make_folder, read_trusted, refuse_link, remove_entry
from ftsupervise.host.processes import own_command
from ftsupervise.probe.errand import no_answer, within
from ftsupervise.replicas.bounds import Timeouts, derive, hang_bounds, problems
from ftsupervise.replicas.table import LEAVE, find_group, name_of, read_table
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ENV_RUN, ENV_RUN_DIR, RunDir, write_whole
from ftsupervise.rundir.records import parse_object, write_json

_ANSWER = 40.0  # seconds for the page of a supervisor's settings to be read


@dataclass(frozen=True)
class GroupOptions:
    """The options of ``ftsupervise groups run``. Times are in seconds."""

    rundir: RunDir
    name: str
    launched: str
    count: int
    nodes_each: int
    least: int
    settings: Mapping[str, Any]  # of each group's ``ftsupervise run``, by parameter, as they would be typed
    command: tuple[str, ...]
    timeouts: Timeouts | None = None  # None: torchft is not used
    slowest_step: float = 0.0
    apart: bool = False  # each group has jobs of its own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(name_of, range(self.count)))

    def prepare(self, number: int) -> Path:
        """Write the page for the supervisor of group ``number``, and return it. Nobody else reads it: it is made of settings
        that may be the account's alone. Raises OSError."""
        page = self._page(number)
        make_folder(page.parent, FOLDER, parents=True)
        write_json(page, self.settings, mode=0o600)
        return page

    def supervisor(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the words that start its supervisor, which reads the page. ``command``: on the group's nodes."""
        own = ("--run-dir", str(self.rundir.group(name_of(number)).root), "--name", f"{self.name}-{name_of(number)}")
        return own_command("run", *own, "--settings", str(self._page(number)), "--", *command)

    def _page(self, number: int) -> Path:
        return self.rundir.group(name_of(number)).state / "settings.json"


def read_settings(page: Path) -> dict[str, object]:
    """Return the settings of a supervisor, by parameter. Raises NoAnswer, NotTrusted, NotFound and other errors that say what
    is wrong with the page."""
    try:
        return dict(within(_ANSWER, lambda: parse_object(read_trusted(page)), key=f"settings in {page}"))
    except TimeoutError:
        raise no_answer(page) from None
    except OSError as error:
        raise from_os_error(error, f"read {page}") from None
    except ValueError as error:
        raise UsageError(f"{page}: {error}") from None


def group_options(
    env: Mapping[str, str], values: Mapping[str, Any], settings: Mapping[str, Any], command: Sequence[str]
) -> GroupOptions:
    """Return the options of ``groups run``. ``values``: by parameter (``config/grouping.py``); ``settings``: those
    of each group's supervisor, by parameter. Raises UsageError, Refused."""
    root = env.get(ENV_RUN_DIR)
    if not root or not env.get(ENV_ATTEMPT_DIR):
        raise UsageError(
            "groups run is the command of a supervised run",
            hint="ftsupervise run --run-dir DIR -- ftsupervise groups run --count 4 -- COMMAND; launch writes it so",
        )
    rundir = RunDir(Path(root).absolute())
    return options_of_groups(rundir, env.get(ENV_RUN) or rundir.root.name, values, settings, command)


def options_of_groups(
    rundir: RunDir, name: str, values: Mapping[str, Any], settings: Mapping[str, Any], command: Sequence[str]
) -> GroupOptions:
    """Return the options for all groups of the run in ``rundir``. Raises UsageError, Refused."""
    if not command:
        raise UsageError("no command for the groups", hint="ftsupervise groups run --count 4 -- COMMAND")
    count, slowest = values["count"], values["slowest_step"]
    if count is None:
        raise UsageError("--count is missing: how many groups are there?", hint="launch writes it into the job script")
    least = least_of(values["min"], count)
    if not count // 2 < least <= count:
        raise UsageError(f"--min {least}: of {count} groups, {count // 2 + 1} to {count} make sense")
    timeouts, launched = None, values["launched"]
    settings = {"nodes_dir": str(rundir.nodes), **settings, "launched": launched}  # a bad node is bad for every group
    if values["lighthouse"] == "torchft":
        timeouts = derive(slowest, values["state_bytes"], count, sync_period=values["sync_period"])
        if wrong := problems(timeouts, slowest, count, values["state_bytes"]):
            raise Refused("the timeouts of the groups do not fit together: " + "; ".join(wrong))
        settings = {**hang_bounds(timeouts), **settings, "snapshot_every": "off"}
    return GroupOptions(
        rundir=rundir,
        name=name,
        launched=launched,
        count=count,
        nodes_each=values["nodes_each"],
        least=least,
        settings=settings,
        command=tuple(command),
        timeouts=timeouts,
        slowest_step=slowest,
        apart=values["in"] == "jobs",
    )


# Leave for good, and join again: a file in the group's own directory, which the process that starts the groups reads.


def let_leave(run: RunDir, group: str) -> str:
    """Mark the group, and return a sentence that says so. Raises NotFound, CannotWrite, NotPermitted."""
    mark = _mark_of(run, group)
    if (table := read_table(run)) is not None and table.place == "jobs":
        raise Refused(
            f"{group} has jobs of its own, and `groups leave` cannot end them yet",
            hint=f"scancel its array: squeue --me shows it as {group}; the others train on",
        )
    try:
        make_folder(mark.parent, parents=True)
        write_whole(mark, "")
    except OSError as error:
        raise from_os_error(error, f"write {mark}") from None
    again = f"ftsupervise groups join {group} {run.quoted()}"
    return f"{group} leaves for good, and the others train on; to let it join again: {again}"


def let_join(run: RunDir, group: str) -> str:
    mark = _mark_of(run, group)
    try:
        there = remove_entry(mark)
    except OSError as error:
        raise from_os_error(error, f"remove {mark}") from None
    if not there:
        return f"{group} has not left"
    return f"{group} joins again as soon as it has nodes"


def _mark_of(run: RunDir, group: str) -> Path:
    """Return the group's mark. Raises NotTrusted where it would be written through a link of another account."""
    mark = find_group(run, group).state / LEAVE
    refuse_link(mark.parent)
    return mark
