"""The pages about replica groups, where their directory stops answering for a while."""

from __future__ import annotations

import os
import threading
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.replicas.disk import GroupReading, RunDirReader
from ftsupervise.replicas.job import GroupPages, NodesSeen
from ftsupervise.replicas.options import GroupOptions
from ftsupervise.replicas.process import GroupProcess
from ftsupervise.replicas.table import GroupState, read_table
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL
from ftsupervise.scheduler.allocation import Allocation
from tests.neighbours.patience import wait_until

from .conftest import HungMount

pytestmark = [pytest.mark.root, pytest.mark.slow]
NOW = datetime(2026, 11, 23, 3, 0, tzinfo=timezone.utc)


class Pages:
    def __init__(self, mount: HungMount, behind: Path) -> None:
        self.run, self.behind, self.said = RunDir(mount.point / "run"), RunDir(behind / "run"), list[str]()
        for folder in (self.behind.replicas, self.behind.switches, self.behind.state):
            folder.mkdir(parents=True)
        self.groups = [GroupProcess(f"g00{n}", n, self.run.group(f"g00{n}"), (), NOW) for n in range(3)]
        asked = GroupOptions(self.run, "tr11", "", 3, 1, 2, {}, ("true",))
        self.pages = GroupPages(asked, self.groups, NodesSeen(Allocation({}), self.run), self.said.append, None)
        self.move(GroupState.RUNNING)
        self.pages.write("")
        mount.hang("all:/run")
        self.pages.write("", last=False)  # its table is young: this one is not written again
        self.move(GroupState.WAITING)
        self.pages.write("")  # and this one hangs

    def move(self, state: GroupState) -> None:
        for group in self.groups:
            group.move(state, "", NOW)

    def states(self) -> set[GroupState]:
        table = read_table(self.behind)
        assert table is not None
        return {row.state for row in table.groups}


def test_the_last_page_of_the_groups_is_written_behind_an_older_one_that_hung(
    dead_mount: HungMount, tmp_path: Path
) -> None:
    one = Pages(dead_mount, tmp_path / "backing")
    assert one.states() == {GroupState.RUNNING}
    one.move(GroupState.OVER)
    later = threading.Timer(1.5, dead_mount.answer)
    later.start()
    one.pages.write("ended", last=True)
    later.join()
    assert one.states() == {GroupState.OVER}
    assert not any("could not be written" in text for text in one.said)


def test_a_last_page_that_cannot_be_written_is_told(dead_mount: HungMount, tmp_path: Path) -> None:
    one = Pages(dead_mount, tmp_path / "backing")
    one.move(GroupState.OVER)
    one.pages.write("ended", last=True)
    assert f"could not be written: {one.run.replicas} does not answer" in one.said[-1]
    assert one.states() == {GroupState.RUNNING}


def test_what_was_read_before_the_directory_hung_starts_no_group_after_it(
    dead_mount: HungMount, tmp_path: Path
) -> None:
    one = Pages(dead_mount, tmp_path / "backing")
    disk, known = RunDirReader(one.run, one.said.append), [(one.run.group("g000"), GroupReading(), 0)]
    dead_mount.answer()
    assert disk.read(known) is not None and not disk.over
    dead_mount.hang("all:/run/groups")  # the switch is read before the groups are
    (one.behind.root / "groups" / "g000").mkdir(parents=True)
    assert disk.read(known) is None
    (one.behind.switches / KILL).touch()
    dead_mount.answer()
    wait_until(lambda: disk.read(known) is not None, "it answers")
    assert "kill switch" in disk.over, "the first answer is of now"


def test_a_log_that_opens_too_late_is_closed_again(dead_mount: HungMount, tmp_path: Path) -> None:
    one = Pages(dead_mount, tmp_path / "backing")
    group, logs = one.groups[0], str(one.run.group("g000").logs)
    with pytest.raises(OSError, match="does not answer"):
        group.start(["true"], {}, "tr11", NOW, 0.0)
    dead_mount.answer()
    log = one.behind.root / "groups" / "g000" / "logs" / "tr11.out"
    wait_until(log.is_file, "the log is opened after all")
    wait_until(lambda: not [one for one in _open_files() if one.startswith(logs)], "and closed")


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(str(Path(f"/proc/self/fd/{number}").readlink()))
        except OSError:
            continue
    return found


class TwoNodes(Allocation):
    """Slurm loses one of them after the first answer."""

    def __init__(self) -> None:
        super().__init__({"SLURM_JOB_ID": "88", "SLURM_JOB_NODELIST": "node-[0-1]"})
        self.asked = 0

    def how_they_are(self, *, ended: bool = False) -> dict[str, str]:
        self.asked += 1
        return {"node-0": "mixed", "node-1": "mixed" if self.asked < 2 else "down*"}


def test_a_lost_node_is_seen_while_the_run_directory_does_not_answer(dead_mount: HungMount, tmp_path: Path) -> None:
    one, slurm = Pages(dead_mount, tmp_path / "backing"), TwoNodes()
    nodes = NodesSeen(slurm, one.run)
    wait_until(lambda: slurm.asked, "Slurm is asked")
    assert not nodes.lost()
    wait_until(lambda: nodes.lost() == {"node-1"}, "and again, though the past of the nodes cannot be read")
    nodes.close()
