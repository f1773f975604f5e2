"""Every command of click's table has a bound, in the program and in the manual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftsupervise.cli.time_limit import BOUNDS, command_of
from tests.neighbours.commands import every_command

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


@pytest.mark.fault("A command is added and nobody thinks of what hangs", "it has a bound, or a test fails")
def test_every_command_of_clicks_table_has_a_bound() -> None:
    assert {name for name, _ in every_command()} == set(BOUNDS)


def test_the_manual_says_the_bound_of_every_command() -> None:
    said = {
        name: (float(seconds), how)
        for names, seconds, how in re.findall(r"^\| (`.+`) \| (\d+) s \| (.+) \|$", PAGE.read_text(), re.M)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert {name: seconds for name, (seconds, _) in said.items()} == {name: one.seconds for name, one in BOUNDS.items()}
    for name, (_, how) in said.items():
        assert how.startswith(BOUNDS[name].kind.value) or f"after {BOUNDS[name].patience:.0f} s" in how, name


def test_what_is_typed_has_the_bound_of_its_command() -> None:
    assert command_of(["alerts", "runs/r"]) == "alerts list"
    assert command_of(["--", "cron", "status", "--json"]) == "cron status"
    assert command_of(["checkpoints"]) == "checkpoints list"
    assert command_of(["status", "runs/r"]) == "status"
    assert command_of(["nothing"]) == ""
