"""``ftsupervise check``: its table, its JSON, its one line, and above all its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.neighbours.typed import typed

CONFIG = """
name: demo
launch: {{command: "sleep 1"}}
scheduler: local
run_dir: {run}
watch:
  disk: [{{path: {run}}}{disks}]
{more}
"""


def check(tmp_path: Path, *args: str, more: str = "", disks: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "run" / "switches").mkdir(parents=True, exist_ok=True)
    (tmp_path / "ftsupervise.yaml").write_text(CONFIG.format(run=tmp_path / "run", more=more, disks=disks))
    return typed("check", *args, folder=tmp_path, FTSUPERVISE_STATE_DIR=str(tmp_path / "state"), NO_COLOR="1")


PLUGIN = "  exec: [{{name: plug, command: [sh, -c, 'echo some words; exit {code}']}}]"


@pytest.mark.parametrize(
    ("code", "ends", "word"), [(0, 0, "OK"), (1, 1, "WARNING"), (2, 2, "CRITICAL"), (7, 3, "UNKNOWN")]
)
def test_a_plug_ins_code_is_the_commands_code(code: int, ends: int, word: str, tmp_path: Path) -> None:
    done = check(tmp_path, "exec", more=PLUGIN.format(code=code))
    assert (done.returncode, done.stderr) == (ends, "")
    assert done.stdout.startswith(word)
    line = check(tmp_path, "exec", "--nagios", more=PLUGIN.format(code=code)).stdout
    assert line.startswith(f"EXEC {word} - ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("args", [("--nonsense",), ("dsk",), ("disk", "nowhere.yaml"), ("exec",)])
def test_whatever_keeps_it_from_looking_is_three_and_one_sentence(args: tuple[str, ...], tmp_path: Path) -> None:
    done = check(tmp_path, *args)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("ftsupervise")


def test_a_broken_configuration_is_three_too(tmp_path: Path) -> None:
    done = check(tmp_path, "all", more="  memory: {used: 95}")
    assert done.returncode == 3
    assert 'write the share with a percent sign: "95%"' in done.stderr


def test_everything_as_json(tmp_path: Path) -> None:
    done = check(tmp_path, "all", "--json")
    said = json.loads(done.stdout)
    assert said["schema_version"] == 1
    assert said["code"] == done.returncode == 2  # nothing is launched
    by = {(one["watchdog"], one["subject"]): one for one in said["findings"]}
    assert by["is-running", "job"]["health"] == "bad"
    assert by["hang", "progress"]["health"] == "ok"
    assert by["disk", f"{tmp_path}/run space"]["severity"] == "critical"


def test_a_setting_that_is_wrong_in_the_world_is_told_in_words(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "demo-1_1.out").write_text("it 5 of 9\n" * 50)
    (tmp_path / "scratch").mkdir()
    more = "  hang: {pattern: 'Step (\\d+)'}\n  exec: [{name: a, command: [no-such]}]"
    done = check(tmp_path, "all", more=more, disks=f", {{path: {tmp_path}/scrach}}")
    assert f"watch.disk[1].path: {tmp_path}/scrach is not there; did you mean {tmp_path}/scratch?" in done.stdout
    assert "watch.hang.pattern: 'Step (\\\\d+)' matches none of the last 50 lines" in done.stdout
    assert "watch.exec[0].command: no program 'no-such'" in done.stdout
    assert done.returncode == 2


def test_a_watchdog_that_is_off_can_still_be_asked(tmp_path: Path) -> None:
    done = check(tmp_path, "checkpoints")
    assert (done.returncode, done.stderr) == (0, "")
    assert "newest checkpoint: none yet" in done.stdout


def test_no_gpu_library_is_said_plainly(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has NVIDIA's driver")
    done = check(tmp_path, "gpu")
    assert done.returncode == 3
    assert "no NVML here" in done.stdout


def test_nothing_is_written_down(tmp_path: Path) -> None:
    check(tmp_path, "all")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["switches"]
