"""Whatever is printed for people is there for programs too: this walks click's table, and says how an error is told."""

from __future__ import annotations

import json

import click
import pytest

from ftsupervise.cli.output import asks_for_json, error_line
from tests.neighbours.commands import every_command

# The commands without --json, and why.
WITHOUT = {
    "run": "it becomes the supervisor of another command, whose output it passes on",
    "groups run": "as run",
    "groups member": "as run",
    "sandbox exec": "as run",
    "cron tick": "a clock calls it, and nobody reads it",
    "config schema": "it is JSON",
    "completion": "a script for a shell",
}


def test_every_command_that_prints_for_people_takes_json() -> None:
    without = {name for name, one in every_command() if not any("--json" in option.opts for option in one.params)}
    assert without == WITHOUT.keys()


def test_help_says_in_which_words_json_comes() -> None:
    for name, one in every_command():
        for option in one.params:
            if isinstance(option, click.Option) and "--json" in option.opts:
                assert option.help and ("JSON" in option.help or "programs" in option.help), name


@pytest.mark.parametrize("words", ["status --json", "--json status", "config show --json r", "status --json -- r"])
def test_json_is_asked_for(words: str) -> None:
    assert asks_for_json(words.split())


@pytest.mark.parametrize(
    "words",
    [
        *("status", "run python train.py --json", "run -- x --json", "init -- x --json", "sandbox exec -- x --json"),
        *("groups run --count 4 x --json", "groups member x --json", "save --why x"),
    ],
)
def test_json_of_another_command_is_not_asked_for_here(words: str) -> None:
    assert not asks_for_json(words.split())


def test_an_error_is_one_line_whatever_is_in_it() -> None:
    line = error_line("two\nlines with “quotes”", "", 66)
    assert "\n" not in line
    error = json.loads(line)["error"]
    assert error == {"message": "two\nlines with “quotes”", "hint": None, "exit_code": 66}
