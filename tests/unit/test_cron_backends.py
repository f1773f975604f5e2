"""Our lines in somebody's table, the environment that is recorded, and what install decides."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.config.alerting import Alerts
from ftsupervise.config.schema import Cron
from ftsupervise.crontab.chain import completed, job_limit
from ftsupervise.crontab.install import InstallPlan, decide
from ftsupervise.crontab.installation import recorded
from ftsupervise.crontab.keepalive import every, with_block
from ftsupervise.errors import ConfigError, UsageError

NOW = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)


def plan(tmp_path: Path, env: dict[str, str] | None = None, **settings: object) -> InstallPlan:
    cron = Cron(**{"directory": tmp_path / "cron", "backend": "slurm", **settings})  # type: ignore[arg-type]
    return decide(cron, Alerts(), alerts_from="x", now=NOW, env=env or {"PATH": "/bin"}, python="/venv/bin/python")


@pytest.mark.parametrize(
    ("minutes", "fields"), [(1, "* * * * *"), (5, "*/5 * * * *"), (60, "0 * * * *"), (120, "0 */2 * * *")]
)
def test_a_period_as_five_fields(minutes: int, fields: str) -> None:
    assert every(timedelta(minutes=minutes)) == fields


@pytest.mark.parametrize("seconds", [10, 90, 7 * 60, 5 * 3600])
def test_a_period_that_five_fields_cannot_say_is_refused(seconds: int) -> None:
    with pytest.raises(UsageError, match="cannot say every"):
        every(timedelta(seconds=seconds))


def test_our_block_comes_and_goes_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    theirs = "MAILTO=ada\n0 0 * * * backup\n"
    made = plan(tmp_path, directory=tmp_path / "a b%", backend="crontab")
    ours, chain = made.lines, made.installed.id
    table = with_block(theirs, chain, ours)
    assert table.startswith(theirs)
    assert "\n*/5 * * * * /venv/bin/python " in table
    assert f" cron tick --dir '{tmp_path}/a b\\%' >/dev/null 2>&1\n" in table
    assert with_block(table, chain, ours) == table
    assert with_block(table, chain, "") == theirs
    assert with_block("0 0 * * * no newline", chain, "") == "0 0 * * * no newline\n"
    assert with_block(table, "beef", "") == table


def test_scrontab_gets_its_options_before_the_line(tmp_path: Path) -> None:
    lines = plan(tmp_path, backend="scrontab", mem="50M").lines.splitlines()
    assert {"#SCRON --time=00:12:00", "#SCRON --mem=50M"} <= set(lines[1:-2])
    assert all(line.startswith("#SCRON --") for line in lines[1:-2])
    assert "#SCRON --no-requeue" not in lines
    assert lines[-2].startswith("*/5 * * * * /venv/bin/python ")


def test_the_environment_keeps_what_is_known_to_be_harmless_and_finds_this_ftsupervise() -> None:
    env = {
        "PATH": "/usr/bin:/venv/bin",
        "HOME": "/home/ada",
        "LC_ALL": "C",
        "SLURM_JOB_ID": "5",
        "SLURM_CONF": "/etc/slurm.conf",
        "AWS_SECRET_ACCESS_KEY": "x",
        "MINE": "1",
        "FTSUPERVISE_RUN_DIR": "/run",
    }
    assert recorded(env, ("MINE",), "/venv/bin/python") == {
        "PATH": "/venv/bin:/usr/bin",
        "HOME": "/home/ada",
        "LC_ALL": "C",
        "SLURM_CONF": "/etc/slurm.conf",
        "MINE": "1",
    }


def test_the_job_of_a_slot_is_the_smallest_there_is_and_says_so(tmp_path: Path) -> None:
    made = plan(tmp_path, partition="spare", account="physics")
    for option in ("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=500M", "--partition=spare", "--no-requeue"):
        assert f"#SBATCH {option}\n" in made.script
    assert "gpu" not in made.script.lower()
    assert any("1 CPU, 500M of memory, no GPU, at most 12m" in note for note in made.notes)


def test_the_job_may_run_longer_than_its_entries(tmp_path: Path) -> None:
    assert job_limit(timedelta(minutes=10)) == timedelta(minutes=12)
    assert job_limit(timedelta(seconds=90)) == timedelta(minutes=4)


def test_one_folder_is_one_chain_whoever_decides_and_whenever(tmp_path: Path) -> None:
    assert plan(tmp_path).installed.id == plan(tmp_path, period=timedelta(hours=1)).installed.id
    assert plan(tmp_path).installed.id != plan(tmp_path / "other").installed.id


def test_what_is_on_the_path_decides_and_the_reason_is_said(tmp_path: Path) -> None:
    empty = plan(tmp_path, env={"PATH": str(tmp_path)}, backend="auto").installed
    assert empty.backend == "loop"
    assert "neither sbatch nor crontab" in empty.why
    for name in ("crontab", "sbatch", "scrontab"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert plan(tmp_path, env={"PATH": str(tmp_path)}, backend="auto").installed.backend == "slurm"
    (tmp_path / "sbatch").unlink()
    assert plan(tmp_path, env={"PATH": str(tmp_path)}, backend="auto").installed.backend == "crontab"


def test_a_folder_time_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cron\.daily: bad hour"):
        plan(tmp_path, daily="0 25 * * *")


def test_an_install_that_nobody_hears_of_says_so(tmp_path: Path) -> None:
    assert any("nobody is notified" in note for note in plan(tmp_path).notes)


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ("", False),
        ("#SBATCH --output=logs/x-%j.out", False),
        ("#SBATCH -o x.out", False),
        ("#SBATCH --output=/scratch/x-%j.out", True),
        ("#SBATCH -N1 -o /scratch/x.out", True),
        ("#SBATCH --output /scratch/x.out", True),
    ],
)
def test_a_job_script_keeps_an_output_file_only_if_it_is_an_absolute_path(own: str, kept: bool) -> None:
    text = f"#!/bin/sh\n{own}\n#SBATCH --comment=mine\necho\n"
    made, output = completed(text, ("--partition=p",), "ours", Path("/c/run"))
    assert bool(output) == kept
    assert ("--output=/c/run/output" in made) != kept
    assert made.index("--comment=mine") < made.index("--comment=ours") < made.index("echo")
    assert made.index("--partition=p") < made.index("--comment=mine")
