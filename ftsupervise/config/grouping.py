"""Declares the settings of replica groups, each once, as ``supervisor.py`` does, and without pydantic as well.

``ftsupervise groups run`` makes its options from this table.
"""

from __future__ import annotations

from typing import Any

from ftsupervise.config.supervisor import Form, Setting

_GROUPS = "launch.replica_groups"
MAJORITY = "majority"

GROUP_SETTINGS = (
    Setting(
        "--launched", "", "launched", Form.TOKEN, "",
        help="The launch that this job belongs to, for each group's supervisor.",
    ),
    Setting(
        "--count", f"{_GROUPS}.count", "count", Form.COUNT, ..., least=2, most=999, always=True,
        help="How many groups train. Two cannot outvote one that hangs: three are better.",
    ),
    Setting(
        "--nodes-each", f"{_GROUPS}.nodes_each", "nodes_each", Form.COUNT, 1, least=1, most=100_000, always=True,
        help="Nodes of each group. The job holds count times so many, and launch.spare_nodes, to take the place of lost ones.",
    ),
    Setting(
        "--min", f"{_GROUPS}.min", "least", Form.COUNT, MAJORITY, least=1, most=999, off=MAJORITY, always=True,
        help="With fewer groups the run waits, and goes on by itself. majority means more than half of them, so that no two "
        "parts ever train apart.",
    ),
    Setting(
        "--in", f"{_GROUPS}.in", "place", Form.CHOICE, "allocation", choices=("allocation", "jobs"), always=True,
        help="allocation: all groups in one job, each started again there by itself. jobs: a chain of jobs for each group, "
        "which may wait in the queue while the others train, and a small one for the lighthouse.",
    ),
    Setting(
        "--lighthouse", f"{_GROUPS}.lighthouse", "lighthouse", Form.CHOICE, "torchft", choices=("torchft", "none"), always=True,
        help="torchft: its lighthouse is started and watched. none: the groups need none, or find another's by "
        "TORCHFT_LIGHTHOUSE.",
    ),
    Setting(
        "--slowest-step", f"{_GROUPS}.slowest_step", "slowest_step", Form.SECONDS, 5.0, above=0, most=86_400, always=True,
        help="The longest healthy time between two collectives of the slowest group, with its evaluations and saves. All "
        "timeouts are derived from it: longer, and a hang costs the others more; shorter than a step, and none is ever made.",
    ),
    Setting(
        "--sync-period", f"{_GROUPS}.sync_period", "sync_period", Form.SECONDS, 0.0, least=0, most=86_400,
        help="The time between two synchronisations of LocalSGD or DiLoCo; 0s: the groups meet in every step.",
    ),
    Setting(
        "--state-bytes", f"{_GROUPS}.state", "state_bytes", Form.COUNT, 0, least=0,
        help="Bytes that a group copies from another one when it comes back: weights and optimizer, on one rank.",
    ),
)  # fmt: skip
GROUP_KEYS = {setting.key: setting for setting in GROUP_SETTINGS if setting.key}


def least_of(asked: Any, count: int) -> int:
    """Return the fewest groups that train on. ``asked`` is a number, or "majority"."""
    return count // 2 + 1 if asked in (None, MAJORITY) else int(asked)
