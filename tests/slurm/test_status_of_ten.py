"""``status`` alone says what happened to a run and what to type: ten runs, each really brought into its state on a sandbox.

``tests/story/test_status_alone.py`` has the same states as pages that were written, within seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.conftest import need_root_and
from tests.slurm.ten_runs import ten_runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# name -> how the first line begins, what its lines "do" begin with, in their order, and what else is there
SAID: dict[str, tuple[str, list[str], list[str]]] = {
    "full": (
        r"full: (SILENT|STALLED|HUNG) \(no space is left in \S+/full; .*\)",
        [
            r"make room: no space is left in \S+/full; within launch\.restart\.space_wait .* clear --brake \S+/full",
            r"ftsupervise checkpoints prune --dry-run \S+ --last 2 ",
        ],
        [r"saved     step \d+"],
    ),
    "broken": (
        r"broken: STOPPED \(by the brake: exit 1 \(ModuleNotFoundError\), the same failure twice .*module named 'webdataset'\)",
        [r"ftsupervise diagnose \S+/broken ", r"ftsupervise clear --brake \S+/broken   \(once that is mended"],
        [
            r"queue     2 jobs left, held by the brake \(JobHeldUser\)",
            r"attempt   1-2 ",
            r"b stopped by the brake [\d.]+ %",
            r"watch     (last tick|nobody watches this run)",
        ],
    ),
    "stopped": (
        r"stopped: GONE \(no job of it is in the queue; attempt 1 ended: cancelled or preempted \(SIGTERM\)\)",
        [r"ftsupervise launch \S+/stopped   \(it goes on from step \d+\)$"],
        [r"alert     warning recovery: attempt 1 ended at step", r"h held [\d.]+ %"],
    ),
    "alone": (
        r"alone: RUNNING, its watch is LATE \(job \S+\)",
        [r"ftsupervise watch --every 60s \S+/alone   \(nobody is told"],
        [
            r"watch     last tick [45]\dm ago, the next was due [45]\dm ago: LATE",
            r"rate ",
            r"jobs      this job and 2 jobs behind it run .*more, to about step \d+; for more: ftsupervise launch --after \d+ ",
        ],
    ),
    "still": (
        r"still: HUNG \(no progress for ",
        [r"ftsupervise check hang \S+/still ", r"scancel \S+   \(ends this job; the next one goes on from step 40\)"],
        [r"saved     step 40.*; 19 steps would be made again"],
    ),
    "odd": (
        r"odd: RUNNING(, ALERT loss)?, loss is not a number \(job \S+\)",
        [
            r"scancel \S+   \(ends this job; the next one begins from a checkpoint from before step 31\)",
            r"guard\.loss: \{nonfinite: resume\}",
        ],
        [
            r"loss      loss is not a number: [\d,]+ steps since step 31, about \d\d-\d\d \d\d:\d\d UTC",
            r"saved     step \d+.*; of no use: the loss was no number by then",
        ],
    ),
    "queued": (
        r"queued: WAITING \(PartitionTimeLimit\)",
        [
            r"scancel \d+ ",
            r"correct launch\.time and launch again: it asks for more time than the partition gives, and it never starts",
            r"ftsupervise launch \S+/queued   \(once that is corrected\)$",
            r"scontrol show job \d+ ",
        ],
        [r"queue     3 jobs left"],
    ),
    "done": (r"done: FINISHED, step 60 of 60 \(100 %\)", [], [r"attempt 1 ended: finished"]),
    "over": (
        r"over: GONE \(no job of it .*; attempt 1 ended: rank 0 on \S+ exit 1: KeyError: 'lr_schedule'\)",
        [
            r"ftsupervise diagnose \S+/over ",
            r"ftsupervise launch \S+/over   \(once that is mended; it goes on from step 40\)$",
        ],
        [],
    ),
    "quiet": (
        r"quiet: RUNNING \(its ranks are heard, Slurm does not answer\)",
        [r"scontrol ping "],
        [r"queue     unknown: Slurm did not answer squeue", r"rate "],
    ),
}
_OF_RANKS = ("  rate ", "% of usual")  # shown of a run that moves alone


@pytest.mark.root
@pytest.mark.timeout(1200)
def test_status_alone_says_of_ten_runs_what_happened_and_what_to_type(tmp_path: Path) -> None:
    need_root_and("mount")
    with ten_runs() as one:
        one.prepare()
        said = one.said()
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    check(said)


def check(said: Mapping[str, str]) -> None:
    assert set(said) == set(SAID)
    for name, (first, todo, also) in SAID.items():
        lines = said[name].splitlines()
        assert re.match(first, lines[0]), lines[0]
        does = [line.removeprefix("  do        ") for line in lines if line.startswith("  do ")]
        assert len(does) >= len(todo), said[name]
        assert all(re.match(pattern, words) for pattern, words in zip(todo, does, strict=False)), said[name]
        assert all(re.search(pattern, said[name]) for pattern in also), said[name]
        assert "RUNNING" in lines[0] or not any(words in said[name] for words in _OF_RANKS), said[name]
        assert "if the next attempt fails too" not in said[name], "no next attempt comes by itself"
