"""Slurm's reasons for a job that waits: which of them never end by waiting, and what is said and advised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftsupervise.scheduler.pending import NEVER, never_starts

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm" / "reasons.txt"
KNOWN = dict(line.split() for line in GOLDEN.read_text("utf-8").splitlines() if not line.startswith("#"))
LIBRARIES = sorted(Path("/usr/lib").glob("*/slurm*/libslurmfull.so"))


@pytest.mark.parametrize("reason", sorted(KNOWN))
def test_each_reason_of_slurm_is_a_wait_or_never_ends(reason: str) -> None:
    found = never_starts(reason)
    assert ("waits" if found is None else "never") == KNOWN[reason], found
    assert never_starts(f"{reason}, as a plug-in says") == found == never_starts(reason.lower())


@pytest.mark.parametrize(
    ("reason", "what", "do"),
    [
        (
            "QOSMaxGRESPerJob",
            "it asks for more GPUs or other gres than its QOS gives",
            "launch.gpus_per_node",
        ),
        ("AssocMaxWallDurationPerJobLimit", "it asks for more time than its account gives", "launch.time"),
        ("QOSMaxCpuMinutesPerJobLimit", "more CPUs, for as long as it may run, than its QOS", "launch.cpus_per_task"),
        ("QOSMinNode", "it asks for less than its QOS demands (nodes)", "launch.nodes or launch.qos"),
        ("AssocGrpGRESMinutes", "the budget of its account is used up", "sshare -l"),
        ("QOSGrpWallLimit", "the budget of its QOS is used up", "launch.qos"),
        ("QOSMaxQuantumPerJob", "it asks for more of a resource than its QOS gives", "correct launch"),
    ],
)
def test_what_it_means_and_what_to_do_is_said(reason: str, what: str, do: str) -> None:
    found = never_starts(reason)
    assert found is not None and what in found[0] and do in found[1]


def test_what_slurm_writes_in_place_of_a_reason_is_known_too() -> None:
    assert never_starts("launch failed requeued held") == NEVER["launch_failed_requeued_held"]
    assert never_starts("") is None


@pytest.mark.skipif(not LIBRARIES, reason="no library of Slurm's on this machine")
def test_no_limit_in_the_library_of_the_slurm_on_this_machine_is_unknown() -> None:
    data = LIBRARIES[0].read_bytes()
    found = {word.decode() for word in re.findall(rb"\x00((?:QOS|Assoc)(?:Max|Min|Grp)[A-Za-z]+)(?=\x00)", data)}
    assert len(found) > 80 and found <= KNOWN.keys()
