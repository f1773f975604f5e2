"""The tables of the manual whose rows a test compares with the program: nothing is missing there, and nothing is made up.

``CHECKED`` names each by its page and its head. The words beside a name are a person's. The tables of bounds, metrics, forms,
of the words of status and of the names of a template have tests of their own, which know more than names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import NamedTuple, get_args

from tests.manual.blocks import ROOT, prose

WORDS = r"`\.?([\w-]+)"  # in the first cell of a row


class Table(NamedTuple):
    """``names``: what the rows name; ``form`` finds a row's names in its first cell. ``exact``: the order counts too."""

    page: str
    head: str
    names: Callable[[], list[str]]
    form: str = WORDS
    exact: bool = False

    def rows(self) -> list[str]:
        lines = prose(ROOT / self.page).splitlines()
        begin = lines.index(self.head) + 2
        end = next((n for n in range(begin, len(lines)) if not lines[n].startswith("|")), len(lines))
        return lines[begin:end]

    def shown(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows() for name in re.findall(self.form, row.split(" | ")[0])))


def _commands() -> list[str]:
    from ftsupervise.cli import COMMANDS

    return list(COMMANDS)


def _exit_codes() -> list[str]:
    import ftsupervise.errors as errors

    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.Error)}
    return [str(code) for code in codes | {0}]


def _watchdogs() -> list[str]:
    from ftsupervise.watch.watchdogs import WATCHDOGS

    return list(WATCHDOGS)


def _receivers() -> list[str]:
    from ftsupervise.config.alerting import KINDS

    return list(KINDS)


def _guard_methods() -> list[str]:
    from ftsupervise import Guard

    return [name for name in vars(Guard) if not name.startswith("_") and callable(getattr(Guard, name))] + ["skip"]


def _guard_arguments() -> list[str]:
    from ftsupervise import Guard

    return list(inspect.signature(Guard).parameters)


def _lines_of_doctor() -> list[str]:
    """What may be wrong or unseen, but for what the trial job finds: the names that the examinations give to their lines."""
    from ftsupervise.doctor import examinations

    places = {examinations.RUN_DIRECTORY, examinations.STATE, examinations.CHECKPOINTS, "settings"}
    of_the_trial = ("trial", "_of_the_switch", "_of_the_nodes")
    module = ast.parse(inspect.getsource(examinations))
    parts = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name not in of_the_trial]
    calls = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    made = [call.args for call in calls if ast.unparse(call.func) == "Examined" and ast.unparse(call.args[0]) != "OK"]
    return [*places, *{str(args[1].value) for args in made if isinstance(args[1], ast.Constant)}]


def _columns() -> list[str]:
    from ftsupervise.cli.status_rows import COLUMNS

    return [column.title for column in COLUMNS if column.title != "RUN"]


def _kinds_of_time() -> list[str]:
    from ftsupervise.report.account import Spent

    return [kind.value for kind in Spent]


def _options_of_logs() -> list[str]:
    from ftsupervise.cli.logs import logs

    shown = [one for one in logs.params if one.param_type_name == "option"]
    return [name for one in shown for name in (["-n"] if one.name == "lines" else sorted(one.opts))]


def _decisions() -> list[str]:
    from ftsupervise.config.acting import Act

    return list(Act.model_fields)


def _checkpoint_states() -> list[str]:
    from ftsupervise.checkpoints.verify import CheckpointState

    return [state.value for state in CheckpointState]


def _back_ends() -> list[str]:
    from ftsupervise.config.schema import Cron

    return [name for name in get_args(Cron.model_fields["backend"].annotation) if name != "auto"]


def _shares() -> list[str]:
    from ftsupervise.config.schema import Sharing

    return [name for name in Sharing.model_fields if name != "group"]


CHECKED = (
    Table("README.md", "| command | what it does |", _commands, r"^\| `ftsupervise (\w+)`"),
    Table("docs/commands.md", "| code | meaning |", _exit_codes, r"^\| (\d+)"),
    Table(
        "docs/watchdogs.md",
        "| watchdog | asks | on unless you say otherwise |",
        _watchdogs,
        r"^\| ([\w-]+)",
        exact=True,
    ),
    Table("docs/alerts.md", "| receiver | how it sends |", _receivers, r"^\| ([\w-]+)", exact=True),
    Table("docs/guard.md", "| method | what it does |", _guard_methods, r"`(\w+)(?=[(`])"),
    Table("docs/guard.md", "| argument | default | meaning |", _guard_arguments),
    Table("docs/status.md", "| column | meaning |", _columns, r"^\| ([A-Z%/ ]+)$", exact=True),
    Table("docs/status.md", "| kind | meaning |", _kinds_of_time, r"^\| (\w+)", exact=True),
    Table("docs/status.md", "| option | what it does |", _options_of_logs, r"`(-{1,2}\w+)"),
    Table("docs/doctor.md", "| line | wrong where |", _lines_of_doctor, r"(?:^\| |, )([\w /]+?)(?=,|$)"),
    Table("docs/observe.md", "| decision | acts | observes |", _decisions, exact=True),
    Table("docs/checkpoints.md", "| state | meaning |", _checkpoint_states, r"(?:^\| |, )([\w' ]+?)(?=,|$)"),
    Table("docs/crontab.md", "| back end | keeps time with | used |", _back_ends),
    Table("docs/switches.md", "| `share:` | opens | what it hands over |", _shares),
)
