"""``ftsupervise drill``: a copy of a small run is really hit, on this machine, and nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import smtplib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.drill.mailbox import Mailbox
from ftsupervise.host import processes
from tests.neighbours import needs
from tests.neighbours.typed import FT, typed

DDP = Path(__file__).parents[2] / "examples" / "replicas" / "ddp.py"
GUARDED = """import json, time
from ftsupervise import Guard

guard = Guard()
newest = guard.latest()
first = json.loads((newest / "state.json").read_text())["step"] + 1 if newest else 1
for step in range(first, 90000):
    time.sleep(0.02)
    decision = guard.step(step)
    if decision.save or step % 500 == 0:
        with guard.checkpoint(step) as folder:
            (folder / "state.json").write_text(json.dumps({"step": step}))
    if decision.stop:
        break
"""
BARE = """import time
for step in range(90000):
    time.sleep(0.02)
    print(f"step {step} loss 0.5", flush=True)
"""


class Desk:
    """A folder with a script and its settings, and a person who drills it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir()
        self.env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(folder / "state"), "TMPDIR": str(self.temporary)}

    def write(self, script: str = GUARDED, more: str = "") -> None:
        (self.folder / "train.py").write_text(script)
        (self.folder / "ftsupervise.yaml").write_text(
            f"name: r\nscheduler: local\nlaunch:\n  command: {sys.executable} train.py\n{more}"
        )

    def drill(self, *words: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
        return typed("drill", *words, folder=self.folder, env=self.env, code=code, seconds=600)

    def left(self) -> list[object]:
        """All that lives, or lies in the temporary folder."""
        mine = processes.marked("TMPDIR").get(str(self.temporary), [])
        return [*mine, *self.temporary.glob("ftsupervise-drill-*")]

    def rows(self, *names: str, code: int) -> dict[str, Any]:
        words = [word for name in names for word in ("--row", name)]
        done = self.drill("--json", *words, code=code)
        assert not self.left() and not (self.folder / "runs").exists()
        found = json.loads(done.stdout)
        assert found["code"] == code and [row["row"] for row in found["rows"]] == list(names)
        return {row["row"]: row for row in found["rows"]}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    made.write()
    yield made
    processes.end_all(lambda: processes.marked("TMPDIR").get(str(made.temporary), []), 10)


def test_a_killed_rank_costs_a_restart_and_nothing_of_the_copy_stays(desk: Desk) -> None:
    found = desk.rows("kill-rank", "lose-node", code=3)
    assert found["lose-node"]["outcome"] == "could not be tried"
    killed = found["kill-rank"]
    assert killed["outcome"] == "pass", killed
    assert killed["told"] == ["mailbox"] and killed["problems"] == []
    assert 0 <= killed["detected"] < killed["recovered"] and killed["steps_lost"] < 500
    assert "killed by SIGKILL" in killed["seen"] and "attempt 2 went on at step" in killed["seen"]


def test_a_drill_whose_time_is_over_ends_and_says_which_rows_it_has_not_tried(desk: Desk) -> None:
    began = time.monotonic()
    done = desk.drill("--within", "8s", "--json", "--row", "stop-rank", "--row", "kill-supervisor", code=3)
    assert time.monotonic() - began < 120, "instead of the minutes that the two may take"
    assert [row["why_not"] for row in json.loads(done.stdout)["rows"]] == [
        "the time of the drill was over (--within gives it more)"
    ] * 2
    assert not desk.left()


def test_a_run_with_attempts_is_refused_until_it_is_really_meant(desk: Desk) -> None:
    (desk.folder / "runs" / "r" / "attempts" / "0001").mkdir(parents=True)
    done = desk.drill(code=75)
    assert "r has 1 attempts in" in done.stderr and "--yes-really" in done.stderr
    assert desk.drill("--yes-really", "--row", "lose-node", code=3).stdout.splitlines()[2].strip() == (
        "this machine is the only node without --on sandbox"
    )


def test_a_folder_with_a_checkpoint_is_refused(desk: Desk) -> None:
    (desk.folder / "model.pt").write_bytes(b"0" * 100)
    done = desk.drill(code=75)
    assert "model.pt is there: the trial could go on from it" in done.stderr
    assert not desk.left()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--row", "kill-rnak"), 64, "did you mean kill-rank?"),
        (("--start", "soon"), 64, "--start: "),
        (("--within", "2d"), 64, "--within: 2d is not between a second and 1d"),
        (("--start", "2d"), 64, "not between a second and 1h"),
        (("nowhere.yaml",), 66, "nowhere.yaml"),
    ],
)
def test_what_makes_no_sense_is_answered_in_one_sentence(
    desk: Desk, words: tuple[str, ...], code: int, said: str
) -> None:
    assert said in desk.drill(*words, code=code).stderr


def test_a_copy_that_does_not_begin_says_what_it_printed(desk: Desk) -> None:
    desk.write("raise SystemExit('no data here')")
    done = desk.drill("--row", "kill-rank", code=3)
    assert (
        "the copy ended before anything was done to it: exit 1; the last line that it printed: no data here"
        in done.stdout
    )


def test_the_rows_are_listed_without_a_run(tmp_path: Path) -> None:
    rows = json.loads(typed("drill", "--list", "--json", folder=tmp_path, code=0).stdout)["rows"]
    assert [row["row"] for row in rows][:2] == ["kill-rank", "stop-rank"]
    assert typed("drill", "--list", folder=tmp_path, code=0).stdout.count("\n") == len(rows)


@pytest.mark.threat(
    "Another account sends mail to the mailbox of a drill, so that the drill believes that people were told.",
    "It takes mail for addresses of an unguessable domain alone.",
)
def test_mail_of_a_stranger_is_not_taken_for_that_of_the_watch() -> None:
    with Mailbox() as box, smtplib.SMTP("127.0.0.1", box.port, timeout=10) as stranger:
        with pytest.raises(smtplib.SMTPRecipientsRefused):
            stranger.sendmail("a@b.org", ["mailbox@drill.invalid"], "Subject: went on\n\n")
        assert [mail.to for mail in box.mails] == []
        stranger.sendmail("a@b.org", [f"mailbox@{box.domain}"], "Subject: went on\n\n")
        assert [(mail.to, mail.subject) for mail in box.mails] == [(("mailbox",), "went on")]
        box.refuses = True
        with pytest.raises(smtplib.SMTPSenderRefused):
            stranger.sendmail("a@b.org", [f"mailbox@{box.domain}"], "Subject: again\n\n")


@pytest.mark.fault(
    "A drill is killed, or its terminal closed, while it works",
    "its copy, its Slurm and its files go within seconds",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "term", "kill"])
def test_a_drill_that_is_ended_leaves_nothing(desk: Desk, until: Callable[..., object], number: int) -> None:
    one = subprocess.Popen(
        # in the background of a shell, tests begin with SIGINT ignored
        ["env", "--default-signal=INT", *FT, "drill", "--row", "kill-rank"],
        cwd=desk.folder,
        env=desk.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: list(desk.temporary.glob("ftsupervise-drill-*/kill-rank/run/beats/rank-*")), "a copy at work")
        os.killpg(one.pid, number)
        one.wait(30)
        until(lambda: not desk.left(), "the end of all of it")
    finally:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait(30)


@pytest.mark.slow
def test_a_guarded_run_passes_each_row_that_needs_no_slurm(desk: Desk) -> None:
    names = ("kill-rank", "stop-rank", "kill-supervisor", "corrupt-checkpoint", "cancel-while-saving", "break-mail")
    found = desk.rows(*names, code=0)
    assert {row["outcome"] for row in found.values()} == {"pass"}, found
    assert "hang" in found["stop-rank"]["seen"]


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_is_told_and_passed_through(desk: Desk) -> None:
    found = desk.rows("fill-disk", code=0)["fill-disk"]
    assert found["outcome"] == "pass" and found["told"] == ["mailbox"], found


@pytest.mark.slow
def test_without_the_guard_it_says_what_to_put_in(desk: Desk) -> None:
    desk.write(BARE)
    found = desk.rows("kill-rank", "corrupt-checkpoint", code=1)
    (killed,) = found["kill-rank"]["problems"]
    assert "it began again at step 0" in killed["why"] and killed["do"].startswith("ftsupervise init --patch train.py")
    assert found["corrupt-checkpoint"]["outcome"] == "could not be tried"


@pytest.mark.slow
def test_with_a_watchdog_off_it_says_which(desk: Desk) -> None:
    desk.write(more="  restart: {hang: null}\n")
    (problem,) = desk.rows("stop-rank", code=1)["stop-rank"]["problems"]
    assert "launch.restart.hang is off" in problem["why"] and "launch.restart.hang: null" in problem["do"]


@pytest.mark.slow
def test_without_a_successor_the_death_of_the_supervisor_is_the_end_of_the_run(desk: Desk) -> None:
    desk.write(more="  jobs: 1\n")
    problems = desk.rows("kill-supervisor", code=1)["kill-supervisor"]["problems"]
    assert any("launch.jobs" in one["do"] for one in problems)


@pytest.mark.torch
@pytest.mark.slow
@needs.torchft
def test_a_lighthouse_that_is_killed_is_replaced_and_no_group_is_started_again(desk: Desk) -> None:
    (desk.folder / "ftsupervise.yaml").write_text(
        f"name: r\nscheduler: local\nlaunch:\n  command: {sys.executable} {DDP} --steps 100000 --step-time 0.3\n"
        "  jobs: 2\n  replica_groups: {count: 3, slowest_step: 20s}\n"
    )
    found = desk.rows("kill-lighthouse", code=0)["kill-lighthouse"]
    assert found["outcome"] == "pass" and 0 <= found["detected"] < found["recovered"], found
