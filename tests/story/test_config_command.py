"""``ftsupervise config``: what it prints and the code it ends with, as a person sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.neighbours.typed import typed

MINIMAL = "name: x\nlaunch: {command: a}\n"


@pytest.fixture
def environ(own_home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(own_home)}


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory every user may enter, which pytest's own are not."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def config(*arguments: str | Path, environ: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return typed("config", *arguments, folder=cwd, env=environ)


def test_check_says_fine_and_where_the_run_lives(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(MINIMAL)
    done = config("check", environ=environ, cwd=tmp_path)
    assert done.returncode == 0
    assert "\nnote: alerts.receivers is empty: nobody is notified when x stops" in f"\n{done.stderr}"
    first, *submits, seen, not_seen = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in submits] == ["  submits", "  each asks for", "  each starts"]
    assert first == f"ftsupervise.yaml: fine. Run x, in {tmp_path}/runs/x"
    assert "without the guard, seen: steps in its output" in seen
    assert "without the guard, not seen: a loop that spins" in not_seen


@pytest.mark.parametrize(
    ("hang", "noted"),
    [
        ("{at_least: 1h}", True),
        ("{at_least: 5m}", True),
        ("{at_least: 4m}", False),
        ("{start: 1h}", False),
        ("null", False),
    ],
)
def test_check_says_where_the_other_groups_end_themselves_before_a_hung_one_is_ended(
    tmp_path: Path, environ: dict[str, str], hang: str, noted: bool
) -> None:
    launch = f"{{command: python train.py, nodes: 1, replica_groups: {{count: 4}}, restart: {{hang: {hang}}}}}"
    (tmp_path / "ftsupervise.yaml").write_text(f"name: x\nlaunch: {launch}\n")
    done = config("check", environ=environ, cwd=tmp_path)
    assert done.returncode == 0
    sentence = "note: launch.restart.hang.at_least: the other groups end themselves when they have waited 10m"
    assert (sentence in done.stderr) is noted, done.stderr


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (None, 66, "no ftsupervise.yaml in this directory"),
        (b"", 78, "the file is empty"),
        (b"# only a comment\n", 78, "the file is empty"),
        (b"- a\n- b\n", 78, "the file holds a list; it must hold 'key: value' lines"),
        (b"hello", 78, "the file holds a single word or number"),
        (b"\x7fELF\x00\x01", 78, "control character U+007F in the text"),
        (b"name: caf\xe9\n", 78, "ftsupervise.yaml:1:10: not UTF-8 text"),
        (b"x" * 300_000, 78, "larger than 256 KiB"),
        (
            b"name: x\nlaunch: {comand: a}\n",
            78,
            "ftsupervise.yaml:2:10: launch: unknown key 'comand'; did you mean 'command'?",
        ),
    ],
)
def test_a_file_that_is_none_gets_one_sentence_and_the_documented_code(
    tmp_path: Path, environ: dict[str, str], content: bytes | None, code: int, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "ftsupervise.yaml").write_bytes(content)
    done = config("check", environ=environ, cwd=tmp_path)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_directory_stands_for_the_settings_in_it(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "project").mkdir()
    done = config("check", "project", environ=environ, cwd=tmp_path)
    assert done.returncode == 66
    assert "project is not a run directory: it holds neither an ftsupervise.yaml nor switches/" in done.stderr
    (tmp_path / "project/ftsupervise.yaml").write_text(MINIMAL)
    assert config("check", "project", environ=environ, cwd=tmp_path).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become a second user")
def test_a_file_of_somebody_else_that_may_not_be_read_ends_with_77(
    open_directory: Path, environ: dict[str, str]
) -> None:
    from ftsupervise.config.load import load
    from ftsupervise.errors import NotPermitted

    path = open_directory / "ftsupervise.yaml"
    path.write_text(MINIMAL)
    path.chmod(0o600)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setresuid(65534, 65534, 65534)
            load(path, environ=environ)
        except NotPermitted as error:
            code = error.exit_code if "Permission denied" in error.message else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77


def test_show_prints_what_loads_as_the_same(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(MINIMAL + "guard: {memory: 90%}\n")
    shown = config("show", environ=environ, cwd=tmp_path).stdout
    (tmp_path / "again.yaml").write_text(shown)
    assert 'memory: "90%"' in shown
    assert config("show", "again.yaml", environ=environ, cwd=tmp_path).stdout == shown


def test_show_tells_where_each_setting_comes_from(tmp_path: Path, environ: dict[str, str]) -> None:
    own = Path(environ["HOME"]) / ".config/ftsupervise/config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("launch:\n  account: physics\n")
    (tmp_path / "ftsupervise.yaml").write_text("name: x\nlaunch: {command: a}\nrun_dir: ${WHERE}\n")
    done = config("show", "--origin", environ={**environ, "WHERE": "/w"}, cwd=tmp_path)
    lines = dict(line.split("  # ", 1) for line in done.stdout.splitlines())
    origin = {text.split(":")[0]: where for text, where in lines.items()}
    assert origin["name"] == "ftsupervise.yaml:1:7"
    assert origin["run_dir"] == "$WHERE (ftsupervise.yaml:3:10)"
    assert origin["launch.account"] == f"{own}:2:12"
    assert origin["launch.jobs"] == "default"


def test_show_as_json_has_a_version_and_every_setting(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(MINIMAL)
    answer = json.loads(config("show", "--json", "--origin", environ=environ, cwd=tmp_path).stdout)
    assert answer["schema_version"] == 1
    assert answer["config"]["launch"]["command"] == "a"
    assert answer["origins"]["launch.command"] == "ftsupervise.yaml:2:19"


def test_no_command_ever_prints_a_secret(tmp_path: Path, environ: dict[str, str]) -> None:
    text = MINIMAL + "alerts:\n  password: hunter2\n  webhook: ${HOOK}\n  token: 0x17ABCDEF\n"
    (tmp_path / "ftsupervise.yaml").write_text(text)
    for command in (["check"], ["show"], ["show", "--origin"], ["show", "--json"]):
        done = config(*command, environ={**environ, "HOOK": "canary-hook"}, cwd=tmp_path)
        assert done.returncode == 78
        for secret in ("hunter2", "canary-hook", "17ABCDEF"):
            assert secret not in done.stdout + done.stderr


def test_show_hides_a_password_inside_an_address(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(MINIMAL.replace("}", ", env: {PROXY: 'http://me:hunter2@proxy:80/'}}"))
    for command in (["show"], ["show", "--origin"], ["show", "--json"]):
        done = config(*command, environ=environ, cwd=tmp_path)
        assert done.returncode == 0
        assert "hunter2" not in done.stdout
        assert "proxy:80" in done.stdout


def test_schema_is_json_on_stdout(tmp_path: Path, environ: dict[str, str]) -> None:
    done = config("schema", environ=environ, cwd=tmp_path)
    assert json.loads(done.stdout)["title"] == "ftsupervise.yaml"


def test_the_settings_are_only_loaded_by_those_who_need_them() -> None:
    code = "import sys, ftsupervise.cli.config, ftsupervise.config.find_run, ftsupervise.config.sources as _; "
    code += "print([m for m in ('pydantic', 'rich', 'jinja2', 'requests') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
