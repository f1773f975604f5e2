"""Whatever a person gets wrong: one clear sentence, the documented exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.printable import OUR_TIME

CONFIG = "name: tr11\nscheduler: local\nlaunch: {command: sleep 60, jobs: 2}\n"


def typed(folder: Path, *words: str, user: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    state = folder / "state"
    whole = {**os.environ, "FTSUPERVISE_STATE_DIR": str(state), **env}
    done = subprocess.run(
        [sys.executable, "-m", "ftsupervise", *words],
        cwd=folder, env=whole, user=user, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    nagios = words[0] == "watch" and 0 < done.returncode < 3
    assert done.returncode == 0 or nagios or re.match(f"{OUR_TIME}ftsupervise", done.stderr), done.stderr
    return done


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder every user may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "ftsupervise.yaml").write_text(CONFIG)
        yield path


@pytest.fixture
def small(folder: Path) -> Iterator[Path]:
    """A file system with room for three small files."""
    mount = folder / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=4", "none", str(mount)], check=True, timeout=30)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["launch", "nowhere.yaml"], 66, "nowhere.yaml"),
        (["status", "no-such-run"], 66, "no run called 'no-such-run'"),
        (["status", "/nowhere/no-such-run"], 66, "there is no run at /nowhere/no-such-run: it does not exist"),
        (["status", "."], 66, "has not been launched yet"),
        (["status"], 66, "has not been launched yet"),
        (["kill", "--yes"], 66, "has not been launched yet"),
        (["watch", "/nonexistent/dir"], 66, "/nonexistent/dir"),
        (["watch", "--every", "60"], 64, '"10m"'),
        (["watch", "--only", "hangs"], 64, "no watchdog is called 'hangs'"),
        (["launch", "--after", "job 5; rm -rf x"], 64, "--after takes a job id"),
        (["launch", "--exclude", "$(touch x)"], 64, "--exclude takes node names"),
        (["launch", "--scheduler", "pbs"], 64, "pbs"),
        (["lunch"], 64, "did you mean 'launch'?"),
        (["launch", "--dry-rum"], 64, "--dry-run"),
        (["run"], 64, "COMMAND"),
        (["sandbox", "node", "node-0", "explode"], 64, "explode"),
    ],
)
def test_a_wrong_word_gets_one_sentence_and_the_documented_code(
    folder: Path, words: list[str], code: int, sentence: str
) -> None:
    done = typed(folder, *words)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert not (folder / "runs").exists()


def test_bad_yaml_says_where(folder: Path) -> None:
    (folder / "ftsupervise.yaml").write_text("name: x\nlaunch:\n  command: a\n  time: 20:00:00\n")
    done = typed(folder, "launch")
    assert done.returncode == 78
    assert "ftsupervise.yaml:4:9: launch.time: 20:00:00 without quotes" in done.stderr


def test_slurm_asked_for_where_there_is_none(folder: Path) -> None:
    done = typed(folder, "launch", "--scheduler", "slurm", PATH="/nonexistent")
    assert done.returncode == 69
    assert "there is no squeue" in done.stderr
    assert "scheduler: local" in done.stderr


@pytest.mark.root
def test_a_full_disk_under_the_run_directory_submits_nothing(folder: Path, small: Path) -> None:
    (folder / "ftsupervise.yaml").write_text(CONFIG + "run_dir: small/run\n")
    done = typed(folder, "launch")
    assert done.returncode == 73, done.stderr
    assert "No space left on device" in done.stderr
    assert not (folder / "state" / "local").exists()


@pytest.mark.root
def test_an_unreadable_run_directory_is_said_to_be_that(folder: Path) -> None:
    for name in ("switches", "state", "attempts", "launches", "beats", "logs", "watch"):
        (folder / "runs/tr11" / name).mkdir(parents=True)
    (folder / "runs/tr11/switches").chmod(0o700)
    assert as_nobody(folder, "status", ".") == (77, True)
    assert as_nobody(folder, "launch") == (77, True)
    assert as_nobody(folder, "kill", "--yes") == (77, True)


def as_nobody(folder: Path, *words: str) -> tuple[int, bool]:
    """The exit code, and whether one sentence said "Permission denied". In a forked child, because the interpreter itself
    may lie where another user cannot reach it."""
    import ftsupervise.cli.config
    import ftsupervise.cli.kill
    import ftsupervise.cli.launch
    import ftsupervise.cli.status
    import ftsupervise.config.find_run
    import ftsupervise.launch.submit
    import ftsupervise.report
    import ftsupervise.run.gate
    import ftsupervise.scheduler.local  # noqa: F401 - all that could not be imported later
    from ftsupervise.cli import main
    from ftsupervise.config.load import load

    load(folder / "ftsupervise.yaml")
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            sys.stderr = os.fdopen(os.dup(said.fileno()), "w", buffering=1)  # not what pytest captures
            os.chdir(folder)
            os.environ["FTSUPERVISE_STATE_DIR"] = "/nonexistent"
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            code = 99
            try:
                main(list(words))
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read().decode()
    assert "Traceback" not in text, text
    return code, "Permission denied" in text and text.startswith("ftsupervise: ")


def test_a_tick_whose_journal_cannot_be_written_does_not_end_well(folder: Path) -> None:
    assert typed(folder, "launch").returncode == 0
    journal = folder / "runs" / "tr11" / "watch" / "journal"
    try:
        shutil.rmtree(journal)
        journal.write_text("in the way")
        for _ in range(2):
            done = typed(folder, "watch")
            assert done.returncode == 2, done.stdout
            assert "bad: alert-journal: the alerts' journal cannot be written" in done.stdout
    finally:
        typed(folder, "kill", "--yes")


@pytest.mark.parametrize("words", [[], ["config"], ["sandbox"]])
def test_a_command_that_needs_another_word_shows_its_help_as_it_is(folder: Path, words: list[str]) -> None:
    argv = [sys.executable, "-m", "ftsupervise", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).lstrip()
    assert said.startswith("Usage: ftsupervise"), said
    assert "--help says more" not in said
