"""Files on disk become settings: paths, layers, variables, origins."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.config.find_run import find_run
from ftsupervise.config.load import dump, load, loads, origins
from ftsupervise.errors import ConfigError, NotFound

MINIMAL = "name: x\nlaunch: {command: a}\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with nothing in it, and a project directory beside it."""
    (tmp_path / "home/.config/ftsupervise").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    return tmp_path / "home"


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "FTSUPERVISE_SITE_CONFIG": str(home / "site.yaml")}


@pytest.fixture
def project(home: Path) -> Path:
    return home.parent / "project/ftsupervise.yaml"


def own(home: Path) -> Path:
    return home / ".config/ftsupervise/config.yaml"


def test_a_name_and_a_command_are_enough(project: Path, environ: dict[str, str]) -> None:
    project.write_text(MINIMAL)
    run = load(project, environ=environ)
    assert run.run_dir == project.parent / "runs/x"
    assert run.launch.jobs == 10
    assert run.guard.memory == 0.95


def test_relative_paths_start_at_the_file_and_end_absolute(
    project: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_text("name: x\nrun_dir: out/x\nlaunch: {command: a, template: ../t.j2}\n")
    monkeypatch.chdir(project.parent.parent)
    run = load(Path("project/ftsupervise.yaml"), environ=environ)
    assert run.run_dir == project.parent / "out/x"
    assert run.launch.template is not None
    assert run.launch.template.is_absolute()
    assert run.launch.template.resolve() == (project.parent.parent / "t.j2").resolve()


def test_the_light_commands_find_the_same_run_directory(
    project: Path, environ: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {**environ, "WHERE": "/somewhere/else"}.items():
        monkeypatch.setenv(variable, value)
    for line in (
        "",
        "run_dir: out\n",
        "run_dir: /a/b\n",
        "run_dir: ~/r\n",
        "run_dir: '~'\n",
        "run_dir: ${WHERE}\n",
        "run_dir: ${NO:-q}\n",
    ):
        project.write_text(MINIMAL + line)
        assert find_run(str(project), launched=False).root == load(project).run_dir, line


def test_the_home_of_somebody_else_is_written_out(project: Path) -> None:
    project.write_text(MINIMAL + "run_dir: ~nobody-of-this-name/x\n")
    with pytest.raises(ConfigError, match="only one's own home directory is written with '~'"):
        load(project)
    assert find_run(str(project), launched=False).root == project.parent / "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    "text", ["- a", "x: 1", "name: 5", "name: yes", "run_dir: ${NOT_SET_AT_ALL}\nname: x", "a: b: c", ""]
)
def test_the_light_commands_say_what_is_wrong_with_the_file(project: Path, text: str) -> None:
    project.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_run(str(project))
    assert str(project) in caught.value.message


def test_the_projects_file_wins_over_ones_own_over_the_sites_key_by_key(
    project: Path, home: Path, environ: dict[str, str]
) -> None:
    (home / "site.yaml").write_text("launch: {account: site, partition: site}\nguard: {memory: 50%, poll: 7s}\n")
    own(home).write_text("launch: {account: own}\nguard: {memory: 60%, run_for: 3h}\n")
    project.write_text(MINIMAL + "guard: {memory: 70%}\n")
    run = load(project, environ=environ)
    assert (run.launch.partition, run.launch.account) == ("site", "own")
    assert run.guard.memory == 0.7
    assert run.guard.poll == timedelta(seconds=7)
    where = origins(project, environ=environ)
    assert where["guard.memory"] == f"{project}:3:17"
    assert where["guard.run_for"] == f"{own(home)}:2:31"
    assert where["guard.poll"] == f"{home}/site.yaml:2:28"
    assert where["launch.jobs"] == "default"
    assert where["run_dir"] == "default"


def test_xdg_config_home_moves_ones_own_file(project: Path, home: Path, environ: dict[str, str]) -> None:
    (home / "xdg/ftsupervise").mkdir(parents=True)
    (home / "xdg/ftsupervise/config.yaml").write_text("launch: {account: own}\n")
    project.write_text(MINIMAL)
    assert load(project, environ={**environ, "XDG_CONFIG_HOME": str(home / "xdg")}).launch.account == "own"


def test_the_outer_files_may_not_say_what_only_a_run_can_know(
    project: Path, home: Path, environ: dict[str, str]
) -> None:
    own(home).write_text("name: x\nlaunch:\n  account: a\n  nodes: 3\n")
    project.write_text(MINIMAL)
    with pytest.raises(ConfigError) as caught:
        load(project, environ=environ)
    first, second = caught.value.message.splitlines()
    assert first.startswith(f"{own(home)}:1:1: name: belongs in the ftsupervise.yaml of a run")
    assert second.startswith(f"{own(home)}:4:3: launch.nodes: belongs in the ftsupervise.yaml of a run")


def test_a_mistake_in_an_outer_file_is_told_with_its_own_name(
    project: Path, home: Path, environ: dict[str, str]
) -> None:
    (home / "site.yaml").write_text("guard:\n  memory: 95\n  pol: 3s\n")
    project.write_text(MINIMAL)
    with pytest.raises(ConfigError) as caught:
        load(project, environ=environ)
    first, second = caught.value.message.splitlines()
    assert first.startswith(f"{home}/site.yaml:2:11: guard.memory: write the share")
    assert second == f"{home}/site.yaml:3:3: guard: unknown key 'pol'; did you mean 'poll'?"


def test_empty_outer_files_and_empty_sections_are_no_trouble(
    project: Path, home: Path, environ: dict[str, str]
) -> None:
    own(home).write_text("# nothing yet\n")
    (home / "site.yaml").write_text("guard:\n#  poll: 1s\n")
    project.write_text(MINIMAL + "watch:\nalerts:\n#  repeat: 1h\n")
    assert load(project, environ=environ).name == "x"


def test_the_settings_as_launched_are_whole_and_no_other_file_has_a_say(
    project: Path, home: Path, environ: dict[str, str]
) -> None:
    own(home).write_text("launch: {account: then}\n")
    project.write_text(MINIMAL)
    run = load(project, environ=environ)
    launched = project.parent / "run.yaml"
    launched.write_text(dump(run))
    own(home).write_text("launch: {account: now, nonsense: 1}\n")
    assert load(launched, environ=environ) == run


# ---------------------------------------------------------------------------------------------------- ${VARIABLE}


@pytest.mark.parametrize(
    ("written", "environ", "nodes", "account"),
    [
        ("nodes: ${N}", {"N": "4"}, 4, None),
        ("nodes: ${N:-3}", {}, 3, None),
        ("nodes: ${N:-3}", {"N": ""}, 3, None),
        ('account: "${N}"', {"N": "4"}, 1, "4"),
        ("account: ${N}", {"N": "0123"}, 1, "0123"),
        ("account: ${N}", {"N": "yes"}, 1, "yes"),
    ],
)
def test_a_variable_stands_for_a_whole_value(
    written: str, environ: dict[str, str], nodes: int, account: str | None
) -> None:
    run = loads(f"name: x\nlaunch:\n  command: a\n  {written}\n", environ=environ)
    assert (run.launch.nodes, run.launch.account) == (nodes, account)


def test_a_variable_inside_shell_code_is_the_shells() -> None:
    run = loads("name: x\nlaunch:\n  command: train --out ${OUT}/x\n  setup: export A=${B:-c}\n", environ={})
    assert run.launch.command == "train --out ${OUT}/x"
    assert run.launch.setup == "export A=${B:-c}"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("run_dir: ${SCRATCH}/runs/x", "/scratch/ada/runs/x"),
        ("run_dir: /s/${WHO:-nobody}/${WHO:-x}", "/s/nobody/x"),
        ("run_dir: /s/$$SCRATCH", "/s/$SCRATCH"),
    ],
)
def test_a_variable_is_filled_in_wherever_it_stands(written: str, said: str) -> None:
    run = loads(f"name: x\nlaunch: {{command: a}}\n{written}\n", environ={"SCRATCH": "/scratch/ada"})
    assert str(run.run_dir) == said


@pytest.mark.fault(
    "`$SCRATCH` in a path makes a directory of that name, and nobody notices.",
    "`${NAME}` is filled in wherever it stands; `$NAME` without braces is refused with what to write.",
)
@pytest.mark.parametrize(
    "written",
    [
        "run_dir: $SCRATCH/runs",
        "launch: {command: a, output: /logs/$USER/%x.out}",
        "launch: {command: [python, --out, $SCRATCH/x]}",
        "launch: {command: a, env: {A: $SCRATCH}}",
        "launch: {command: a, sbatch: [--export=A=$SCRATCH]}",
        "watch: {disk: [{path: $SCRATCH}]}",
        "watch: {exec: [{name: x, command: [check, $SCRATCH]}]}",
        "alerts: {receivers: [{file: {path: $SCRATCH/messages}}]}",
        "alerts: {receivers: [{slack: {token_file: $SCRATCH/token, channel: C0}}]}",
        "cron: {directory: $SCRATCH/cron}",
    ],
)
def test_a_variable_without_braces_is_never_silently_literal(written: str) -> None:
    text = f"name: x\n{written}\n" + ("" if written.startswith("launch") else "launch: {command: a}\n")
    with pytest.raises(ConfigError, match=r"not filled in; write \$\{\w+\}"):
        loads(text, environ={"SCRATCH": "/scratch/ada", "USER": "ada"})


def test_the_code_that_a_list_hands_to_a_shell_is_the_shells() -> None:
    run = loads("name: x\nlaunch: {command: [bash, -lc, 'echo $A ${B}']}\n", environ={})
    assert run.launch.command == ("bash", "-lc", "echo $A ${B}")


@pytest.mark.threat(
    "A variable that holds a secret is given as the whole name of a secret's file, and would be written to `run.yaml`.",
    "ftsupervise refuses it without reading or printing its value.",
)
def test_a_whole_variable_never_stands_for_the_file_of_a_secret() -> None:
    with pytest.raises(ConfigError, match="may hold the secret itself") as caught:
        text = "alerts: {receivers: [{slack: {token_file: '${TOKEN}', channel: C0}}]}\n"
        loads(MINIMAL + text, environ={"TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["output", "error"])
def test_a_relative_file_of_the_jobs_starts_at_the_settings_file(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "100%"
    run = loads(f"name: x\nlaunch: {{command: a, {key}: logs/%x-%j.out}}\n", folder / "ftsupervise.yaml")
    assert getattr(run.launch, key) == f"{tmp_path}/100%%/logs/%x-%j.out"
    assert getattr(loads(dump(run), Path("/elsewhere/run.yaml")).launch, key) == getattr(run.launch, key)


def test_two_dollars_write_one() -> None:
    assert loads("name: x\nlaunch: {command: '$${TRAIN}'}\n", environ={}).launch.command == "${TRAIN}"


@pytest.mark.parametrize(
    ("written", "environ", "sentence"),
    [
        ("${NO}", {}, "5:6: launch.qos: ${NO} is not set in the environment; export NO, or write ${NO:-default}"),
        ("${A-b}", {}, "5:6: launch.qos: write ${NAME} or ${NAME:-default}"),
        ("${A}", {"A": "a\nb"}, "5:6: launch.qos: expected a name of letters"),
        ("${A}", {"A": "a\x07"}, "5:6: launch.qos: ${A} holds the control character U+0007"),
        (
            "${A}",
            {"A": "7"},
            '5:6: launch.qos: expected text, got 7 (from ${A}); write "${A}" in quotes if text is meant',
        ),
    ],
)
def test_a_variable_that_does_not_fit_is_told_with_its_place(
    written: str, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f"name: x\nlaunch:\n  command: a\n  qos:\n     {written}\n", environ=environ)
    assert caught.value.message.startswith(f"ftsupervise.yaml:{sentence}")


def test_what_a_variable_holds_is_never_looked_at_for_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        loads(MINIMAL + "alerts:\n  password: ${PW}\n  token: ${NOT_SET}\n", environ={"PW": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "password_env: PW" in str(caught.value)
    assert "token_env: NOT_SET" in str(caught.value)


def test_an_origin_names_the_variable(project: Path, environ: dict[str, str]) -> None:
    project.write_text("name: x\nlaunch: {command: a}\nrun_dir: ${WHERE}\n")
    assert origins(project, environ={**environ, "WHERE": "/a"})["run_dir"] == f"$WHERE ({project}:3:10)"


# --------------------------------------------------------------------------------------------- files that are none


def test_a_fifo_a_device_and_a_broken_link_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=r"is not a file|is a directory"):
            load(path)
    for path in (tmp_path / "link", tmp_path / "no", tmp_path / "fifo/x", Path("a\0b")):
        with pytest.raises(NotFound):
            load(path)


def test_a_name_of_300_letters_is_said_to_be_too_long(tmp_path: Path) -> None:
    from ftsupervise.errors import Error

    with pytest.raises(Error, match="name too long"):
        load(tmp_path / ("x" * 300))
