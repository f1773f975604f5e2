"""``ftsupervise cron`` as a person types it: no Slurm here, a crontab that is a neighbour of the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.typed import typed

Until = Callable[..., Any]

CRONTAB = """\
#!/bin/sh
# a neighbour: crontab -l and crontab -, with the table in a file
table={table}
[ -e {table}.broken ] && {{ echo "crontab: your account has expired" >&2; exit 1; }}
case $1 in
-l) [ -e $table ] || {{ echo "no crontab for ada" >&2; exit 1; }}; cat $table;;
-) cat > $table;;
esac
"""


class Desk:
    """Somebody at a terminal with a home and a PATH of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "bin"
        self.bin.mkdir()
        self.env = {**os.environ, "HOME": str(home), "PATH": f"{self.bin}:/usr/bin:/bin", "TZ": "UTC"}
        self.env["PATH"] = str(self.bin)
        for tool in ("sh", "bash", "cat", "env", "sleep", "echo"):
            (self.bin / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")

    @property
    def cron(self) -> Path:
        return self.home / ".config" / "ftsupervise" / "cron"

    def type(self, *words: str, code: int | None = 0) -> str:
        """``code``: the exit code that it must have; None: any."""
        done = typed(*words, folder=self.home, env=self.env, code=code)
        return done.stdout + done.stderr

    def drop(self, folder: str, name: str, body: str) -> Path:
        path = self.cron / f"cron.{folder}" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def give_crontab(self) -> Path:
        table = self.home / "table"
        (self.bin / "crontab").write_text(CRONTAB.format(table=table))
        (self.bin / "crontab").chmod(0o755)
        return table


@pytest.fixture
def desk(own_home: Path) -> Desk:
    return Desk(own_home)


def test_a_dry_run_touches_nothing_and_shows_everything(desk: Desk) -> None:
    said = desk.type("cron", "install", "--backend", "slurm", "--dry-run")
    assert "#SBATCH --cpus-per-task=1" in said
    assert said.count("TZ=UTC0 sbatch --parsable --begin=") == 3
    assert "Slurm was not asked" in said
    assert not desk.cron.exists()


def test_install_picks_what_there_is_and_says_why(desk: Desk) -> None:
    said = desk.type("cron", "install")
    assert "a loop that you start" in said
    assert "neither sbatch nor crontab" in said
    assert sorted(p.name for p in desk.cron.glob("cron.*")) == [
        "cron.daily",
        "cron.hourly",
        "cron.minutely",
        "cron.weekly",
    ]
    assert "was installed already" in desk.type("cron", "install")
    assert (desk.cron / "README").exists()


def test_install_into_a_crontab_and_out_again_leaves_what_was_there(desk: Desk) -> None:
    table = desk.give_crontab()
    table.write_text("0 0 * * * backup\n")
    assert "this machine's crontab" in desk.type("cron", "install")
    desk.type("cron", "install")
    text = table.read_text()
    assert text.startswith("0 0 * * * backup\n")
    assert text.count("cron tick --dir") == 1
    assert text.count("*/5 * * * *") == 1
    command = next(line for line in text.splitlines() if "cron tick" in line).split(" ", 5)[5]
    desk.drop("minutely", "x", "echo ran")
    assert subprocess.run(["/bin/sh", "-c", command], env={"PATH": "/bin"}, check=False).returncode == 0
    assert "minutely/x: ok" in desk.type("cron", "status")
    desk.type("cron", "remove")
    assert table.read_text() == "0 0 * * * backup\n"
    assert "REMOVED" in desk.type("cron", "status")
    assert (desk.cron / "cron.minutely" / "x").exists()


def test_a_crontab_that_refuses_is_told_in_its_own_words(desk: Desk) -> None:
    table = desk.give_crontab()
    table.with_name("table.broken").touch()
    assert "your account has expired" in desk.type("cron", "install", code=1)


def test_a_scrontab_that_is_not_there_is_told(desk: Desk) -> None:
    assert "no scrontab on this machine's PATH" in desk.type("cron", "install", "--backend", "scrontab", code=66)


def test_another_back_end_takes_the_lines_of_the_one_before_away(desk: Desk) -> None:
    table = desk.give_crontab()
    desk.type("cron", "install", "--backend", "crontab")
    assert "cron tick" in table.read_text()
    desk.type("cron", "install", "--backend", "loop")
    assert table.read_text() == ""


def test_list_says_what_runs_when_and_what_is_passed_over(desk: Desk) -> None:
    desk.type("cron", "install")
    assert "nothing yet" in desk.type("cron", "list")
    desk.drop("hourly", "disk.sh", "true")
    desk.drop("daily", "report", "true").chmod(0o644)
    (desk.cron / "crontab").write_text("@hourly sweep --all\n* * nonsense\n")
    said = desk.type("cron", "list")
    assert "hourly/disk.sh" in said
    assert "0 * * * *" in said
    assert "chmod +x report" in said
    assert "sweep --all" in said
    assert "crontab:2" in said


def test_run_by_hand_is_what_a_slot_would_do_and_is_on_record(desk: Desk) -> None:
    desk.type("cron", "install")
    desk.drop("hourly", "check", 'echo "I see $FTSUPERVISE_CRON_ENTRY"; exit 4')
    assert "would run" in desk.type("cron", "run", "check", "--dry-run")
    said = desk.type("cron", "run", "check", code=4)
    assert "I see hourly/check" in said
    status = json.loads(desk.type("cron", "status", "--json", code=2))  # a loop that nobody has started
    (entry,) = status["entries"]
    assert (entry["state"], entry["last"]["code"]) == ("failed", 4)
    assert Path(entry["last"]["output"]).read_text() == "I see hourly/check\n"
    assert "no entry is called" in desk.type("cron", "run", "nothing", code=66)
    assert "name an entry" in desk.type("cron", "run", code=64)


def test_a_failure_is_seen_in_alerts_and_can_be_acknowledged_there(desk: Desk) -> None:
    desk.type("cron", "install")
    (desk.cron / "crontab").write_text("@tick exit 9\n")
    desk.type("cron", "tick")
    said = desk.type("alerts")
    assert "failed: exit code 9" in said
    key = next(line.split()[2] for line in said.splitlines() if line.startswith("firing"))
    assert "acknowledged" in desk.type("alerts", "ack", key, str(desk.cron))


def test_a_loop_in_the_foreground_keeps_time_until_it_is_stopped(desk: Desk, until: Until) -> None:
    desk.type("cron", "install", "--period", "1s")
    (desk.cron / "crontab").write_text("@tick echo x\n")
    argv = [sys.executable, "-m", "ftsupervise", "cron", "run", "--foreground"]
    loops = [subprocess.Popen(argv, cwd=desk.home, env=desk.env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        until(lambda: len(list(desk.cron.glob("state/runs/*/2*/end.json"))) >= 3, "three slots")
        until(lambda: "ALIVE" in desk.type("cron", "status"), "slots in time")
    finally:
        for loop in loops:
            loop.send_signal(signal.SIGTERM)
        said = [loop.communicate(timeout=60)[0] for loop in loops]
    assert [loop.returncode for loop in loops] == [0, 0]
    slots = [line.split()[1] for text in said for line in text.splitlines() if "ran crontab/" in line]
    assert len(slots) == len(set(slots)) >= 3  # two loops, and no slot twice


def test_settings_come_from_the_project_and_from_the_persons_own_file(desk: Desk) -> None:
    own = desk.home / ".config" / "ftsupervise" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("cron: {period: 10m, hourly: '17 * * * *'}\nalerts: {receivers: [{file: {path: heard.txt}}]}\n")
    assert "every 10m" in desk.type("cron", "install") + desk.type("cron", "status", code=2)
    recorded = json.loads((desk.cron / "state" / "installed.json").read_text())
    assert recorded["times"]["hourly"] == "17 * * * *"
    assert recorded["alerts"]["receivers"][0]["file"]["path"] == str(own.parent / "heard.txt")
    (desk.home / "ftsupervise.yaml").write_text("name: x\nlaunch: {command: a}\ncron: {period: 30m}\n")
    desk.type("cron", "install")
    recorded = json.loads((desk.cron / "state" / "installed.json").read_text())
    assert (recorded["period"], recorded["times"]["hourly"]) == (1800, "17 * * * *")
    own.write_text("cron: {perod: 10m}\n")
    assert "config.yaml:1:8" in desk.type("cron", "install", code=78)


def test_a_secret_is_not_recorded(desk: Desk) -> None:
    own = desk.home / ".config" / "ftsupervise" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("cron: {env: [SLACK_TOKEN]}\n")
    assert "secret" in desk.type("cron", "install", code=78)


def test_without_an_install_every_command_says_what_to_type(desk: Desk) -> None:
    for words in (("list",), ("status",), ("remove",), ("ensure",), ("run", "x"), ("tick",)):
        assert "ftsupervise cron install" in desk.type("cron", *words, code=66)


def test_ready_made_scripts_are_added_and_run(desk: Desk) -> None:
    desk.type("cron", "install")
    assert "watch-all" in desk.type("cron", "add")
    (desk.bin / "ls").symlink_to("/bin/ls")
    said = desk.type("cron", "add", "watch-all", "watch-disk")
    assert "cron.minutely/watch-all" in said
    assert "cron.hourly/watch-disk" in said
    assert "there already" in desk.type("cron", "add", "watch-all", code=75)
    assert "no ready-made script" in desk.type("cron", "add", "watch-moon", code=66)
    desk.type("cron", "run", "watch-all")
    assert "minutely/watch-all" in desk.type("cron", "list")


def test_without_slurm_a_dropped_job_script_runs_on_this_machine(desk: Desk, until: Until) -> None:
    desk.type("cron", "install", "--period", "1s")
    path = desk.cron / "cron.hourly" / "report.slurm"
    path.write_text("#!/bin/sh\n#SBATCH --time=5\necho made a report\n")
    desk.type("cron", "run", "report.slurm")

    def over() -> str:
        desk.type("cron", "tick")
        # slots of a second are missed where two commands take longer than that, and status calls it dead
        (entry,) = json.loads(desk.type("cron", "status", "--json", code=None))["entries"]
        return entry["last"]["output"] if entry["state"] == "ok" else ""

    assert Path(until(over, "the end of the local job")).read_text() == "made a report\n"


def test_what_runs_when_is_listed_for_programs_too(desk: Desk) -> None:
    desk.type("cron", "install", "--backend", "loop")
    desk.drop("hourly", "check", "exit 0")
    desk.drop("hourly", "notes.txt", "").chmod(0o644)
    listed = json.loads(desk.type("cron", "list", "--json"))
    (entry,) = listed["entries"]
    assert (entry["name"], entry["runs"]) == ("hourly/check", str(desk.cron / "cron.hourly" / "check"))
    assert datetime.fromisoformat(entry["next"]).minute == 0
    assert [one["name"] for one in listed["passed_over"]] == ["hourly/notes.txt"]
