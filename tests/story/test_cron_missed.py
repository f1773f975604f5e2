"""What is said of missed slots, of a back end that nobody started, of lines that scancel disabled, of drained nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.crontab import keepalive
from ftsupervise.crontab.install import remove
from ftsupervise.crontab.status import gather
from ftsupervise.truth import Health
from tests.story.cron_folder import NINE, Folder, make
from tests.story.test_cron_commands import Desk
from tests.story.test_cron_tick import alerts_to

P5 = timedelta(minutes=5)

SCRONTAB = """\
#!/bin/sh
# a neighbour: scrontab -l and scrontab -, with the table in a file
case $1 in
-l) cat {table};;
-) cat > {table};;
esac
"""


@pytest.fixture
def desk(own_home: Path) -> Desk:
    return Desk(own_home)


def heard(folder: Path) -> str:
    return (folder / "heard").read_text() if (folder / "heard").exists() else ""


# ---------------------------------------------------------------------------------------------------- missed slots


@pytest.mark.fault(
    "Slots are missed, and cron install is typed again before the next one",
    "the tick after them tells how many and since when",
)
@pytest.mark.parametrize("again", [False, True])
def test_missed_slots_are_told_also_after_install_was_typed_again(tmp_path: Path, again: bool) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    folder.tick(NINE)
    if again:  # because somebody noticed that no slot came
        make(tmp_path, alerts=alerts_to(tmp_path / "heard"), now=NINE + P5 * 4 + timedelta(minutes=2))
    told = folder.tick(NINE + P5 * 5).notified
    assert [words for words in told if "4 slots in a row had no tick" in words], told
    assert "since    2026-11-21 09:05 UTC" in heard(tmp_path), "the first that was missed, not the tick that told of it"
    folder.tick(NINE + P5 * 6)
    assert heard(tmp_path).count("[RESOLVED]") == 1
    seen = gather(folder.cron, folder.installed, None, NINE + P5 * 6)
    assert len(seen.slots.missed) == 4


def test_slots_are_not_missed_while_the_cron_was_taken_away(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    folder.tick(NINE)
    remove(folder.cron, folder.installed, NINE + P5, None)
    make(tmp_path, alerts=alerts_to(tmp_path / "heard"), now=NINE + P5 * 10)
    assert folder.tick(NINE + P5 * 10).notified == ()


def test_slots_before_the_first_tick_of_all_are_missed_too(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    make(tmp_path, alerts=alerts_to(tmp_path / "heard"), now=NINE + timedelta(minutes=19))
    assert any("slots in a row had no tick" in words for words in folder.tick(NINE + P5 * 4).notified)


# -------------------------------------------------------------------------------------------------- never started


def verdict(folder: Folder, minutes: float) -> str:
    return gather(folder.cron, folder.installed, None, NINE + timedelta(minutes=minutes)).verdict


@pytest.mark.fault(
    "Nobody starts the loop that cron was installed with",
    "status says UNSTARTED with the command to type, exit code 2, and never ALIVE",
)
def test_a_loop_that_nobody_has_started_is_not_alive_however_often_it_is_installed(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert verdict(folder, 1) == "UNSTARTED"
    found = keepalive.see_to(folder.cron.root, folder.queue, NINE)
    assert found.health is Health.UNKNOWN
    assert "its loop has not been started" in found.words
    assert f"--dir {folder.cron.root}" in found.words
    folder.tick(NINE)
    assert verdict(folder, 1) == "ALIVE"
    make(tmp_path, now=NINE + timedelta(minutes=30))  # the loop was stopped, and install typed again
    assert verdict(folder, 31) == "DEAD"
    assert keepalive.see_to(folder.cron.root, folder.queue, NINE + timedelta(minutes=31)).health is Health.BAD


@pytest.mark.fault(
    "Another back end is installed where one has ticked a minute ago",
    "the ticks of the old one are no sign of life of the new one",
)
def test_the_ticks_of_one_back_end_are_no_sign_of_life_of_another(tmp_path: Path) -> None:
    folder = make(tmp_path, backend="slurm")
    folder.tick(NINE, slot=NINE, job_id="1")
    make(tmp_path, backend="loop", now=NINE + timedelta(minutes=2))
    assert verdict(folder, 3) == "UNSTARTED"
    folder.tick(NINE + P5)
    assert verdict(folder, 6) == "ALIVE"


@pytest.mark.fault("The queue cannot be read before the first slot of a chain", "status says UNKNOWN")
def test_a_chain_whose_queue_cannot_be_read_is_not_alive_before_its_first_slot(tmp_path: Path) -> None:
    folder = make(tmp_path, backend="slurm")
    folder.queue.down = "connect failure"
    seen = gather(folder.cron, folder.installed, folder.queue, NINE + timedelta(minutes=1))
    assert seen.verdict == "UNKNOWN"
    folder.queue.down = ""
    assert gather(folder.cron, folder.installed, folder.queue, NINE + timedelta(minutes=1)).verdict == "ALIVE"


@pytest.mark.fault(
    "Somebody replaces the whole crontab",
    "status says that the lines are gone, and ensure puts them back",
)
def test_a_line_in_a_crontab_waits_for_its_first_slot_and_is_dead_without_one(desk: Desk) -> None:
    table = desk.give_crontab()
    desk.type("cron", "install", "--backend", "crontab")
    assert "WAITING, no slot yet" in desk.type("cron", "status")
    table.write_text("0 0 * * * backup\n")  # somebody replaced the whole table
    said = desk.type("cron", "status", code=2)
    assert "DEAD" in said and "no longer in your crontab" in said
    assert "were put back" in desk.type("cron", "ensure")
    assert table.read_text().startswith("0 0 * * * backup\n# begin ftsupervise")
    assert "WAITING" in desk.type("cron", "status")


# -------------------------------------------------------------------------------------------------- disabled lines


def disabled(table: str) -> str:
    """What scrontab -l of 24.11 and 26.05 prints after the job of our lines was cancelled, as it was recorded."""
    lines = table.splitlines()
    ours = range(lines.index(next(line for line in lines if line.startswith("# begin"))) + 1, len(lines) - 1)
    return "\n".join(f"#DISABLED: {line}" if n in ours else line for n, line in enumerate(lines)) + "\n"


@pytest.mark.fault(
    "scancel of a job of scrontab disables its lines",
    "status says so, ensure puts them back, remove takes them away",
)
def test_lines_that_scancel_has_disabled_are_seen_and_put_back(desk: Desk) -> None:
    table = desk.home / "scron-table"
    table.write_text("0 0 * * * theirs\n")
    (desk.bin / "scrontab").write_text(SCRONTAB.format(table=table))
    (desk.bin / "scrontab").chmod(0o755)
    desk.type("cron", "install", "--backend", "scrontab")
    whole = table.read_text()
    assert f"#SCRON --chdir={desk.cron}/state\n" in whole
    table.write_text(disabled(whole))
    said = desk.type("cron", "status", code=2)
    assert "DEAD" in said and "disabled, as scancel does" in said
    assert json.loads(desk.type("cron", "status", "--json", code=2))["lost_lines"]
    assert "were put back" in desk.type("cron", "ensure")
    assert table.read_text() == whole
    table.write_text(disabled(whole))
    desk.type("cron", "remove")
    assert table.read_text() == "0 0 * * * theirs\n"


def test_the_marks_around_our_lines_are_found_if_they_were_disabled_too(tmp_path: Path) -> None:
    folder = make(tmp_path)
    installed = replace(folder.installed, backend="scrontab", id="c0de")
    ours = keepalive.our_block(folder.cron, installed)
    off = "".join(f"#DISABLED: {line}\n" for line in ours.splitlines())
    assert keepalive.with_block(f"0 0 * * * a\n{off}", "c0de", ours) == f"0 0 * * * a\n{ours}"


# --------------------------------------------------------------------------------------------------- drained nodes


def test_a_controller_that_is_down_for_one_slot_is_no_alert_and_for_two_it_is(tmp_path: Path) -> None:
    """Three jobs wait ahead: nobody need act on the first one."""
    folder = make(tmp_path, backend="slurm", alerts=alerts_to(tmp_path / "heard"))
    folder.tick(NINE, slot=NINE, job_id="1")
    told = []
    for number, down in enumerate(("connect failure", "", "connect failure", "connect failure", ""), 1):
        folder.queue.down = down
        told.append(folder.tick(NINE + P5 * number, slot=NINE + P5 * number, job_id=str(1 + number)).notified)
    assert [[words.partition(":")[0] for words in one] for one in told] == [[], [], [], ["fired"], ["resolved"]]
    assert "the queue could not be read" in told[3][0]


@pytest.mark.fault(
    'Slurm drains nodes ("Duplicate jobid") after its controller was killed',
    "the next tick tells which, and when they are back; ensure and status name them",
)
def test_nodes_that_slurm_drained_after_its_controller_was_killed_are_told_and_so_is_their_return(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path, backend="slurm", alerts=alerts_to(tmp_path / "heard"))
    folder.tick(NINE, slot=NINE, job_id="1")
    folder.queue.down = "Unable to contact slurm controller"
    folder.tick(NINE + P5, slot=NINE + P5, job_id="2")
    folder.queue.down, folder.queue.drained_nodes = "", ("node-1", "node-2")
    told = folder.tick(NINE + P5 * 2, slot=NINE + P5 * 2, job_id="3").notified
    assert any('drained node-[1-2] ("Duplicate jobid"' in words for words in told), told
    assert "scontrol update nodename=node-[1-2] state=resume" in heard(tmp_path)
    assert folder.tick(NINE + P5 * 3, slot=NINE + P5 * 3, job_id="4").notified == ()
    folder.queue.drained_nodes = ()
    told = folder.tick(NINE + P5 * 4, slot=NINE + P5 * 4, job_id="5").notified
    assert any(words.startswith("resolved: cron: Slurm has drained") for words in told), told


def test_a_dead_chain_and_status_say_which_nodes_were_drained(tmp_path: Path) -> None:
    folder = make(tmp_path, backend="slurm")
    folder.queue.drained_nodes = ("node-3",)
    later = NINE + timedelta(hours=1)
    said = keepalive.see_to(folder.cron.root, folder.queue, later).words
    assert "no slot for 1h" in said and "drained node-3" in said
    assert gather(folder.cron, folder.installed, folder.queue, later).drained == ("node-3",)
