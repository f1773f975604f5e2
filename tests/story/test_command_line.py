"""What people expect of a command line: groups in the help, whole summaries, help by words, a version, did-you-mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from ftsupervise.cli import COMMANDS, GROUPS, ftsupervise
from ftsupervise.version import VERSION
from tests.neighbours.commands import every_command
from tests.neighbours.typed import typed


def groups_of_commands() -> list[tuple[str, click.Group]]:
    context = click.Context(ftsupervise, info_name="ftsupervise")
    found = [(name, ftsupervise.get_command(context, name)) for name in COMMANDS]
    return [("", ftsupervise), *((name, one) for name, one in found if isinstance(one, click.Group))]


def test_every_command_stands_in_one_group_of_the_help() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    assert [*GROUPS] == ["Run", "Look", "Stop", "Watch", "Set up"]
    shown = typed("--help", code=0).stdout
    places = [shown.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for title, names in GROUPS.items():
        part = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+)", part, re.M) == [*names], "one line for each"


@pytest.mark.parametrize("width", [78, 60])
def test_no_summary_is_cut(width: int) -> None:
    for name, group in groups_of_commands():
        text = group.get_help(click.Context(group, info_name=f"ftsupervise {name}", terminal_width=width))
        assert "..." not in text.partition("Options:")[2], name
        assert width < 78 or all(len(line) <= 80 for line in text.splitlines()), name


def test_help_by_words_is_the_help_of_the_option() -> None:
    for words in ([], ["launch"], ["cron"], ["cron", "install"], ["checkpoints", "set-aside"]):
        said = typed("help", *words, code=0).stdout
        assert said == typed(*words, "--help", code=0).stdout and said.startswith(
            " ".join(["Usage: ftsupervise", *words])
        )


def test_the_version_is_a_command_too() -> None:
    assert typed("version", code=0).stdout == typed("--version", code=0).stdout == f"ftsupervise {VERSION}\n"
    found = json.loads(typed("version", "--json", code=0).stdout)
    assert found["version"] == VERSION and found["python"].count(".") == 2 and Path(found["package"]).is_dir()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("statsu", "'status'"),
        ("cron instal", "'install'"),
        ("config chekc", "'check'"),
        ("help launhc", "'launch'"),
        ("help checkpoints verfy", "'verify'"),
        ("status --jsn", "'--json'"),
        ("checkpoints list --jsn", "'--json'"),
    ],
)
def test_a_misspelt_command_or_option_is_answered_with_the_one_that_is_near(words: str, meant: str) -> None:
    done = typed(*words.split(), code=64)
    assert re.search(rf"[Dd]id you mean {meant}\?", done.stderr), done.stderr
    assert done.stdout == ""


def test_there_are_that_many_commands() -> None:
    """The walk of click's table, on which laws of other tests stand, is the whole of it."""
    assert {name.split()[0] for name, _ in every_command()} == set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "code", "meant"),
    [
        ("status tr12", 66, "'tr11'"),
        ("save tr1", 66, "'tr11'"),
        ("forget tr12", 66, "'tr11'"),
        ("checkpoints list long", 66, "'long-name-of-a-run'"),
        ("check all tr12", 3, "'tr11'"),
        ("watch --only dsik", 64, "'disk'"),
    ],
)
def test_a_misspelt_name_of_a_run_is_answered_with_the_one_that_is_near(
    tmp_path: Path, words: str, code: int, meant: str
) -> None:
    for name in ("tr11", "long-name-of-a-run"):
        (tmp_path / name / "switches").mkdir(parents=True)
        (tmp_path / "state/runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "state/runs" / name).symlink_to(tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    done = typed(*words.split(), folder=tmp_path / "elsewhere", code=code, **env)
    assert f"did you mean {meant}?" in done.stderr, done.stderr
    assert "did you mean" not in typed("status", "xyzzy", folder=tmp_path / "elsewhere", code=66, **env).stderr


def test_a_cron_entry_and_a_ready_made_script_are_too(tmp_path: Path) -> None:
    env: dict[str, Any] = {
        "HOME": str(tmp_path),
        "FTSUPERVISE_STATE_DIR": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    typed("cron", "install", "--backend", "loop", "--dir", "c", folder=tmp_path, code=0, **env)
    done = typed("cron", "add", "watch-al", "--dir", "c", folder=tmp_path, code=66, **env)
    assert "did you mean 'watch-all'?" in done.stderr
    typed("cron", "add", "watch-all", "--dir", "c", folder=tmp_path, code=0, **env)
    done = typed("cron", "run", "wach-all", "--dir", "c", folder=tmp_path, code=66, **env)
    assert "did you mean 'watch-all'?" in done.stderr
