"""A run is named by the same words everywhere: its directory, its ``ftsupervise.yaml``, its project's directory, its name."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ftsupervise.cli import ftsupervise
from ftsupervise.errors import Error
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.local import Local
from tests.neighbours.typed import typed

SETTINGS = """\
name: tr11
scheduler: local
launch: {command: sleep 600, jobs: 1, output: "out/%x-%j.txt"}
watch: {hang: null, disk: null}
alerts: {receivers: [{file: {path: messages.txt}}]}
"""
COMMANDS = [
    ("status", "{}"),
    ("status", "--json", "{}"),
    ("save", "{}"),
    ("clear", "{}"),
    ("alerts", "{}"),
    ("alerts", "--json", "{}"),
    ("nodes", "{}"),
    ("nodes", "--json", "{}"),
    ("nodes", "trust", "--no-apply", "node-1", "{}"),
    ("checkpoints", "{}"),
    ("checkpoints", "list", "--json", "{}"),
    ("check", "is-running", "{}"),
    ("watch", "--only", "is-running", "{}"),
    ("config", "check", "{}"),
    ("config", "show", "{}"),
    ("notify", "preview", "{}"),
    ("launch", "--dry-run", "{}"),
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A project whose run has been launched, and an environment that knows it by name."""
    place = tmp_path_factory.mktemp("desk")
    project = place / "my project"
    project.mkdir()
    (project / "ftsupervise.yaml").write_text(SETTINGS)
    env = {"FTSUPERVISE_STATE_DIR": str(place / "state"), "HOME": str(place)}
    done = type_in(place, env, "launch", str(project))
    assert done.returncode == 0, done.stderr
    yield project, env
    local = Local({**os.environ, **env})
    for job in local.queue():
        local.cancel(job.base_id)


def type_in(place: Path, env: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    return typed(*words, folder=place, **env)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_takes_every_way_to_name_a_run(
    launched: tuple[Path, dict[str, str]], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, env = launched
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(project.parent)
    ways = [project / "ftsupervise.yaml", project, project / "runs/tr11", project / "runs/tr11/run.yaml", "tr11"]
    for way in ways:
        assert typed_here(*(word.format(way) for word in words)) == (0, ""), way
    code, said = typed_here(*words[:-1], "nosuchrun")
    assert code in (66, 3)
    assert "no run called 'nosuchrun' here" in said
    monkeypatch.chdir(project)
    assert typed_here(*words[:-1]) == (0, ""), "with nothing said it is the run of this directory"


@pytest.mark.parametrize("words", ["status", "kill --yes", "save", "check is-running", "launch"])
def test_a_run_whose_directory_is_not_there_is_known_and_its_place_is_named(
    launched: tuple[Path, dict[str, str]], words: str
) -> None:
    project, env = launched
    run, away = project / "runs" / "tr11", project / "runs" / "away"
    run.rename(away)
    try:
        done = type_in(project.parent, env, *words.split(), "tr11")
    finally:
        away.rename(run)
    assert done.returncode == (3 if words.startswith("check") else 66)
    assert f"the run directory of tr11 is not there: {run}" in done.stderr, "it said: did you mean 'tr11'?"
    assert f"findmnt -T {shlex.quote(str(run))}" in done.stderr


def test_check_takes_a_run_without_the_word_all(launched: tuple[Path, dict[str, str]]) -> None:
    project, env = launched
    every, named = (
        json.loads(type_in(project.parent, env, "check", *words, "--json").stdout)
        for words in (("all", "tr11"), ("tr11",))
    )
    assert named["run"] == "tr11"
    assert {one["watchdog"] for one in named["findings"]} == {one["watchdog"] for one in every["findings"]}
    unknown = type_in(project.parent, env, "check", "dsik")
    assert unknown.returncode == 3 and "no watchdog is called 'dsik'; did you mean 'disk'?" in unknown.stderr


def typed_here(*words: str) -> tuple[int, str]:
    """The exit code and the error, in this process, which has imported everything already."""
    done = CliRunner().invoke(ftsupervise, list(words))
    if isinstance(done.exception, Error):
        return done.exception.exit_code, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output if done.exit_code else ""


def commands(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        found = group.get_command(ctx, name)
        assert found is not None
        yield (*above, name), found
        if isinstance(found, click.Group):
            yield from commands(found, *above, name)


def test_every_argument_that_names_a_run_is_called_run_and_explained_in_the_same_words() -> None:
    seen = 0
    for words, command in commands(ftsupervise):
        if words[0] == "cron":
            continue
        for argument in (p for p in command.params if isinstance(p, click.Argument)):
            if argument.name in ("run", "runs", "config", "path"):
                seen += 1
                assert argument.make_metavar(click.Context(command)).strip("[].") == "RUN", words
                parent = ftsupervise.get_command(click.Context(ftsupervise), words[0])
                texts = " ".join(f"{command.help} {parent.help if parent else ''}".split())
                assert "a directory, an ftsupervise.yaml, or a name" in texts, words
    assert seen > 15


def test_whatever_lists_something_does_so_for_programs_too() -> None:
    listing = {words for words, command in commands(ftsupervise) if words[-1] in ("list", "status", "show", "env")}
    listing |= {("check",)}
    assert len(listing) >= 7
    for words, command in commands(ftsupervise):
        if words in listing:
            assert any("--json" in option.opts for option in command.params), words


def words_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with the key it stands at."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from words_in(item, name if isinstance(name, str) else key)
    if isinstance(value, str):
        yield key, value


def test_json_has_one_spelling_for_one_word(launched: tuple[Path, dict[str, str]]) -> None:
    project, env = launched
    type_in(project, env, "watch", "--no-send", "tr11")
    seen: dict[str, set[str]] = {}
    for words in (
        ("status", "tr11"),
        ("alerts", "tr11"),
        ("check", "all", "tr11"),
        ("nodes", "tr11"),
        ("sandbox", "list"),
    ):
        found = json.loads(type_in(project, env, *words, "--json").stdout)
        assert isinstance(found["schema_version"], int)
        for key, word in words_in(found):
            seen.setdefault(key, set()).add(word)
    assert seen["health"] <= {"ok", "bad", "unknown"} and seen["severity"] <= {"info", "warning", "critical"}
    assert seen["verdict"] <= {"running", "ok", "warning", "critical", "unknown"}


def test_help_fits_a_terminal_of_80_columns() -> None:
    for words, command in commands(ftsupervise):
        ctx = click.Context(command, info_name=" ".join(("ftsupervise", *words)), terminal_width=78)
        long = [line for line in command.get_help(ctx).splitlines() if len(line) > 80]
        assert not long, words


def test_a_run_is_launched_again_by_its_name_from_anywhere_with_its_settings_as_they_are_now(
    launched: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    project, env = launched
    done = type_in(tmp_path, env, "launch", "--dry-run", "tr11")
    assert f'#SBATCH "--chdir={project}"\n' in done.stdout, done.stdout
    (project / "ftsupervise.yaml").write_text(SETTINGS.replace("sleep 600", "sleep 601"))
    try:
        assert "sleep 601" in type_in(tmp_path, env, "launch", "--dry-run", "tr11").stdout
    finally:
        (project / "ftsupervise.yaml").write_text(SETTINGS)


@pytest.mark.threat(
    "A run directory that another account owns or may write names the settings file that `launch NAME` would submit.",
    "The launch record is trusted only if it and the folders above it belong to this account or root. Otherwise "
    "`launch` asks for the file by name.",
)
@pytest.mark.root
def test_a_run_directory_of_somebody_else_does_not_choose_what_is_launched(tmp_path: Path) -> None:
    theirs = RunDir(tmp_path / "theirs")
    for folder in (theirs.switches, theirs.launches / "0001"):
        folder.mkdir(parents=True)
    (tmp_path / "evil.yaml").write_text("name: theirs\nscheduler: local\nlaunch: {command: touch /tmp/pwned}\n")
    record = {"state": "submitted", "token": "t", "config": str(tmp_path / "evil.yaml"), "job_ids": ["1"]}
    (theirs.launches / "0001/launch.json").write_text(json.dumps(record))
    for path in (theirs.launches / "0001/launch.json", theirs.launches / "0001", theirs.launches, theirs.root):
        os.chown(path, 65534, 65534)
    done = type_in(tmp_path, {}, "launch", str(theirs.root))
    assert done.returncode == 77
    assert "belongs to nobody" in done.stderr and "name that file yourself" in done.stderr


@pytest.mark.fault(
    "One of several runs on a command line is misspelt, and the others are stopped already.",
    "All are found before anything is done to one.",
)
def test_of_several_runs_nothing_is_done_to_one_while_another_is_not_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "switches").mkdir(parents=True)
    assert type_in(tmp_path, {}, "save", "a", "b", "nosuchrun").returncode == 66
    assert not list(tmp_path.glob("*/switches/*"))
    done = type_in(tmp_path, {}, "save", "a", "b")
    assert done.returncode == 0
    assert len(list(tmp_path.glob("*/switches/save-switch"))) == 2
    refused = type_in(tmp_path, {}, "kill", "a", "b", "--confirm", "a")
    assert refused.returncode == 64 and "these runs are called a and b" in refused.stderr
    found: Any = json.loads(type_in(tmp_path, {}, "status", "--json", "a", "b").stdout)
    assert [(one["name"], one["verdict"]) for one in found["runs"]] == [("a", "new"), ("b", "new")]


def test_the_hints_of_a_launch_name_the_output_that_the_settings_name(launched: tuple[Path, dict[str, str]]) -> None:
    project, env = launched
    record = json.loads((project / "runs/tr11/launches/0001/launch.json").read_text())
    assert record["config"] == str(project / "ftsupervise.yaml")
    (project / "two").mkdir()
    two = SETTINGS.replace("tr11", "two").replace("jobs: 1,", "jobs: 1, error: err-%j.txt,")
    (project / "two/ftsupervise.yaml").write_text(two)
    done = type_in(project / "two", env, "launch")
    assert "  output         tail -f out/two-*.txt err-*.txt\n" in done.stdout, done.stdout
    type_in(project / "two", env, "kill", "--yes")


@pytest.mark.fault(
    "A chain is launched and nobody is notified when it stops, because no receiver is configured.",
    "`launch`, `watch` and `config check` say so.",
)
def test_a_chain_with_no_receiver_says_so(tmp_path: Path) -> None:
    env = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS.partition("alerts:")[0])
    words = "alerts.receivers is empty: nobody is notified when tr11 stops"
    assert words in type_in(tmp_path, env, "config", "check").stderr
    assert words in type_in(tmp_path, env, "launch", "--dry-run").stderr
    try:
        assert words in type_in(tmp_path, env, "launch").stdout
        assert words in type_in(tmp_path, env, "watch", "--only", "is-running").stderr
    finally:
        local = Local({**os.environ, **env})
        for job in local.queue():
            local.cancel(job.base_id)
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    assert words not in type_in(tmp_path, env, "config", "check").stderr


@pytest.fixture
def by_hand(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A run that nobody launched: ``ftsupervise run`` was typed in a job script of their own."""
    env = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = type_in(tmp_path, env, "run", "--run-dir", "runs/by hand", "--", "true")
    assert done.returncode == 0, done.stderr
    return tmp_path / "runs/by hand", env


@pytest.mark.parametrize("words", [one for one in COMMANDS if one[0] != "launch"], ids=" ".join)
def test_every_command_takes_the_directory_of_a_run_that_was_wrapped_by_hand(
    by_hand: tuple[Path, dict[str, str]], words: tuple[str, ...]
) -> None:
    folder, env = by_hand
    done = type_in(folder.parent, env, *(word.format(folder) for word in words))
    expected = {"check": 2, "watch": 2}.get(words[0], 0)  # nothing runs or waits
    assert done.returncode == expected, done.stdout + done.stderr


def test_check_and_status_agree_about_a_run_that_was_wrapped_by_hand(by_hand: tuple[Path, dict[str, str]]) -> None:
    folder, env = by_hand
    checked = json.loads(type_in(folder.parent, env, "check", "all", str(folder), "--json").stdout)
    assert checked["run"] == "by-hand"
    job = next(one for one in checked["findings"] if one["watchdog"] == "is-running")
    assert "no job of this run" in job["summary"]
    assert "ftsupervise launch" not in job["do"] and "sbatch" in job["do"]
    assert "no job of this run" in type_in(folder.parent, env, "status", str(folder)).stdout


def test_the_settings_beside_which_a_wrapped_run_lies_are_used_and_the_command_of_the_hint_works(
    by_hand: tuple[Path, dict[str, str]],
) -> None:
    folder, env = by_hand
    settings = folder.parent.parent / "ftsupervise.yaml"
    settings.write_text("name: wrapped\nrun_dir: runs/by hand\nscheduler: local\nlaunch: {command: sleep 1, jobs: 1}\n")
    checked = json.loads(type_in(folder.parent, env, "check", "is-running", str(folder), "--json").stdout)
    assert checked["run"] == "wrapped"
    hint = checked["findings"][0]["do"].partition("then: ")[2]
    words = shlex.split(hint)
    assert words[:2] == ["ftsupervise", "launch"]
    assert type_in(folder.parent, env, *words[1:], "--dry-run").returncode == 0


@pytest.mark.threat(
    "Somebody removes the settings of a launched run, so that it is watched by defaults.",
    "Defaults are used only for a directory that no launch has made.",
)
def test_a_launched_run_whose_settings_are_gone_is_not_taken_for_one_by_hand(
    launched: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    project, env = launched
    there = tmp_path / "r"
    shutil.copytree(project / "runs/tr11", there, ignore=shutil.ignore_patterns("run.yaml"))
    done = type_in(tmp_path, env, "check", "all", str(there))
    assert done.returncode == 3 and "run.yaml is gone" in done.stderr, done.stderr


@pytest.mark.threat(
    "A FIFO lies where a command looks for the settings of a run (`watch PATH/run.yaml`).",
    "The command names the FIFO and says how to find its owner. It does not wait.",
)
@pytest.mark.parametrize("command", ["watch", "check all", "status", "config check", "notify preview"])
def test_a_fifo_in_the_place_of_the_settings_is_named(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    done = type_in(tmp_path, {"HOME": str(tmp_path)}, *command.split(), str(tmp_path / "run.yaml"))
    assert done.returncode in (78, 3), done.stderr
    assert "is a FIFO, not a regular file" in done.stderr, done.stderr


def test_config_show_with_origins_fits_eighty_columns_a_setting_a_line(tmp_path: Path) -> None:
    (tmp_path / "ftsupervise.yaml").write_text("name: r\nlaunch: {command: sleep 1}\n")
    lines = type_in(tmp_path, {"HOME": str(tmp_path)}, "config", "show", "--origin").stdout.splitlines()
    assert len(lines) > 50 and all("  # " in line for line in lines)
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80


def test_notify_says_for_programs_what_each_receiver_did(tmp_path: Path) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: r\nlaunch: {command: sleep 1}\nalerts:\n  receivers:\n    - file: {path: messages.txt}\n"
        "    - command: {argv: [sh, -c, exit 1]}\n"
    )
    env = {"HOME": str(tmp_path), "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    done = type_in(tmp_path, env, "notify", "test", "--json")
    assert done.returncode == 1
    told = {one["receiver"]: one for one in json.loads(done.stdout)["receivers"]}
    assert told["file"]["delivered"] is True and told["file"]["why"] == ""
    assert told["command"]["delivered"] is False and told["command"]["why"]
    seen = json.loads(type_in(tmp_path, env, "notify", "preview", "--json").stdout)["messages"]
    assert len(seen) > 2 and all(one["title"] and one["text"] for one in seen)


def test_run_without_a_run_says_which_option_names_one(tmp_path: Path) -> None:
    """Its arguments are the command: the other commands' "name the run" leads nowhere."""
    done = type_in(tmp_path, {"HOME": str(tmp_path), "FTSUPERVISE_RUN_DIR": ""}, "run", "--", "true")
    assert done.returncode == 66
    assert "ftsupervise run --run-dir runs/NAME -- COMMAND" in done.stderr
