"""``ftsupervise checkpoints``: what a person sees and what a script gets."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ftsupervise.checkpoints.manifest import manifest_of, read_manifest
from ftsupervise.cli import ftsupervise
from ftsupervise.errors import NotFound, Refused, UsageError


def typed(*words: str) -> Result:
    return CliRunner().invoke(ftsupervise, ["checkpoints", *words])


def told(*words: str) -> Any:
    return json.loads(typed(*words, "--json").stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of a script; the newest one is not adopted yet."""
    for step in (100, 200, 300):
        one = tmp_path / "ckpt" / f"step-{step}"
        one.mkdir(parents=True)
        (one / "weights").write_bytes(bytes([step % 251]) * 1000)
    for step in (100, 200):
        assert typed("commit", str(tmp_path / "ckpt" / f"step-{step}")).exit_code == 0
    return tmp_path / "ckpt"


def test_the_list_is_newest_first_and_says_which_have_no_manifest(folder: Path) -> None:
    lines = typed("list", str(folder)).output.splitlines()
    assert [line.split()[0] for line in lines] == ["step-300", "step-200", "step-100"]
    assert lines[0].endswith("no manifest")
    assert "step 200" in lines[1] and lines[1].endswith("1 kB  1 file")
    listed = told("list", str(folder))["checkpoints"]
    assert [one["step"] for one in listed] == [300, 200, 100]
    assert [one["path"] for one in listed] == [str(folder / f"step-{step}") for step in (300, 200, 100)]
    assert listed[0]["manifest"] is None and listed[1]["manifest"]["size"] == 1000


def test_verify_looks_back_until_one_is_good(folder: Path) -> None:
    done = typed("verify", str(folder))
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "step-300 is unseen: it has no manifest, and nothing in it says that it is complete",
        "step-200 is verified (every byte): 1 files, 1 kB",
    ]
    assert told("verify", str(folder))["newest"] == str(folder / "step-200")


def test_exit_codes_tell_damaged_from_not_seen(folder: Path) -> None:
    assert typed("verify", str(folder / "step-300")).exit_code == 3
    codes = [typed("verify", str(folder / name)).exit_code for name in ("step-100", "step-200")]
    assert codes == [0, 0]
    (folder / "step-100" / "weights").write_bytes(b"x" * 1000)
    assert typed("verify", str(folder / "step-100")).exit_code == 1
    assert typed("verify", "--sizes", str(folder / "step-100")).exit_code == 0
    assert typed("verify", "--all", str(folder)).exit_code == 1
    assert typed("verify", "--all", "--world", "4", str(folder)).exit_code == 1
    missing = typed("verify", str(folder / "none"))
    assert isinstance(missing.exception, NotFound)


def test_all_that_call_themselves_complete_are_adopted_at_once_and_no_others(folder: Path) -> None:
    done = typed("commit", str(folder))
    assert isinstance(done.exception, Refused) and "step-300 may not be complete" in str(done.exception)
    for step in (400, 500):
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / "__0_0.distcp").write_bytes(b"w")
    (folder / "step-400" / ".metadata").write_bytes(b"__0_0.distcp.")
    raw = bytearray(manifest_of(folder / "step-100").read_bytes())
    raw[0] ^= 1
    manifest_of(folder / "step-100").write_bytes(raw)
    done = typed("commit", str(folder))
    assert done.output.splitlines() == ["step-400 is committed: step 400, 2 files, 14 B, torch-dcp"]
    assert "step-500 is not complete" in str(done.exception)
    assert "step-100" not in str(done.exception), "a damaged manifest is no reason to write another one"
    assert "a damaged manifest" in typed("list", str(folder)).output
    assert typed("commit", str(folder / "step-300")).exit_code == 0
    assert isinstance(typed("commit", "--again", str(folder)).exception, UsageError)


def test_a_metric_and_a_step_are_written_down(folder: Path) -> None:
    several = typed("commit", "--step", "7", str(folder))
    assert isinstance(several.exception, UsageError)
    one = folder.parent / "mine"  # no word of a step
    one.mkdir()
    (one / "rank_3.bin").write_bytes(b"w")
    assert typed("commit", "--step", "7", "--world", "8", "--metric", "loss=2.5", str(one)).exit_code == 0
    made = read_manifest(one)
    assert made is not None and (made.step, made.world, made.metrics) == (7, 8, {"loss": 2.5})
    assert "finite number" in typed("commit", "--again", "--metric", "loss=nan", str(one)).output


def test_a_folder_of_checkpoints_may_have_a_number_in_its_own_name(folder: Path) -> None:
    seventh = folder.rename(folder.parent / "ckpt7")
    assert [one["step"] for one in told("list", str(seventh))["checkpoints"]] == [300, 200, 100]
    other = folder.parent / "ckpt8"  # without any manifest
    for step in (100, 200):
        (other / f"step-{step}").mkdir(parents=True)
        (other / f"step-{step}" / "__0_0.distcp").write_bytes(b"w")
        (other / f"step-{step}" / ".metadata").write_bytes(b"__0_0.distcp.")
    assert [one["step"] for one in told("list", str(other))["checkpoints"]] == [200, 100]
    assert typed("commit", str(other)).exit_code == 0
    assert typed("verify", "--all", str(other)).exit_code == 0
    one = folder.parent / "step-5" / "global_step5"  # of the same step: one checkpoint of DeepSpeed
    one.mkdir(parents=True)
    (one / "mp_rank_00_model_states.pt").write_bytes(b"w")
    (one.parent / "latest").write_text("global_step5")
    assert typed("commit", str(one.parent)).exit_code == 0
    assert manifest_of(one.parent).exists()


def test_a_manifest_is_replaced_only_when_asked(folder: Path) -> None:
    done = typed("commit", str(folder / "step-100"))
    assert isinstance(done.exception, Refused) and "--again" in str(done.exception)
    (folder / "step-100" / "weights").write_bytes(b"x" * 500)
    assert typed("commit", "--again", str(folder / "step-100")).exit_code == 0
    assert typed("verify", str(folder / "step-100")).exit_code == 0


def test_a_run_is_named_as_everywhere_and_its_settings_say_where_they_lie(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = f"name: tr11\nlaunch: {{command: a}}\ncheckpoints: {{path: {folder}, pattern: 'step-[12]*'}}\n"
    (tmp_path / "ftsupervise.yaml").write_text(settings)
    run = tmp_path / "runs" / "tr11"
    (run / "switches").mkdir(parents=True)
    (run / "run.yaml").write_text(settings + f"run_dir: {run}\n")
    monkeypatch.chdir(tmp_path)
    assert [one["step"] for one in told()["checkpoints"]] == [200, 100]
    assert [one["step"] for one in told("list", str(run))["checkpoints"]] == [200, 100]


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(folder: Path) -> None:
    (folder / "step-300" / "weights").write_bytes(os.urandom(3_000_000))
    words = [sys.executable, "-m", "ftsupervise", "checkpoints", "commit", "--again", str(folder / "step-300")]
    master, slave = pty.openpty()
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=slave, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # closed
                break
            if not part:
                break
            shown += part
    os.close(master)
    assert process.returncode == 0
    assert b"MB" in shown and b"\033[2K" in shown and b"?[2K" not in shown, "its codes move it, and are not printed"
    quiet = subprocess.run(words, capture_output=True, check=True)
    assert not quiet.stderr
    assert manifest_of(folder / "step-300").exists()
