"""What the benchmark of recoveries says about trials, and what its page says about the benchmark. Pure."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks.recovery.__main__ import arguments
from benchmarks.recovery.launchers import LAUNCHERS
from benchmarks.recovery.scene import FAULTS, Trial
from benchmarks.recovery.table import HEAD, tables
from tests.manual.blocks import ROOT, marked

OURS = LAUNCHERS[0]


def test_the_parts_add_up_to_the_whole_and_the_ratio_is_to_the_same_runs_own_start() -> None:
    trial = Trial(
        OURS.name, "SIGKILL", cold=4.0, acts=0.1, down=0.3, process=0.6, first=3.0, new=3.5, redone=10, stall=3.55
    )
    row = tables([trial], [OURS], ["SIGKILL"], 60).splitlines()[-1]
    assert row.split()[2:] == ["1/1", "0.10", "0.20", "2.70", "0.50", "3.50", "(3.50-3.50)", "0.88", "10", "3.55"]


def test_what_did_not_come_back_is_counted_and_has_no_time() -> None:
    back = Trial(OURS.name, "SIGKILL", cold=4.0, acts=0.1, down=0.3, first=3.0, new=3.5, redone=10)
    text = tables([back, Trial(OURS.name, "SIGKILL", cold=4.0)], [OURS], ["SIGKILL"], 60)
    assert " 1/2 " in text
    assert "> 60 s" in tables([Trial(OURS.name, "SIGKILL", cold=4.0)], [OURS], ["SIGKILL"], 60)


def test_the_commands_its_page_shows_are_taken() -> None:
    for block in marked("run", "recovery"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            assert words[:2] == ["python", "benchmarks/recovery"]
            args = arguments(words[2:])
            assert set(args.faults.split(",")) <= {fault.replace(" ", "") for fault in FAULTS}
            assert set(filter(None, args.launchers.split(","))) <= {one.name for one in LAUNCHERS}


def test_the_figures_its_page_shows_have_the_columns_it_prints() -> None:
    for block in marked("measured"):
        assert HEAD in block.text.splitlines(), block


def test_what_is_to_be_installed_for_torch_can_be() -> None:
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)  # Python 3.10 has no tomllib
    for block in marked("run", "install-torch"):
        extras = re.search(r"\.\[([\w,]+)\]", block.text)
        assert extras and set(extras[1].split(",")) <= set(known)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.name)
def test_a_launcher_is_ours_or_has_a_script(launcher: object) -> None:
    assert launcher.ours != bool(launcher.script)  # type: ignore[attr-defined]
