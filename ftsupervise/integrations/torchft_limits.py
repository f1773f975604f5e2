"""This rank's group and how long it may wait: what ``ftsupervise launch`` tells it, checked before torchft begins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from ftsupervise.errors import ConfigError
from ftsupervise.model import CauseKind
from ftsupervise.replicas.timeouts import ENV_PROCESS_GROUP, Timeouts, derive, majority, problems
from ftsupervise.rundir.paths import ENV_GROUP_JOB, ENV_MIN_REPLICAS, ENV_SLOWEST_STEP
from ftsupervise.truth import GPU_MEMORY, HOST_MEMORY, SUPERSEDED, TOLD_TO_STOP

ENV_LIGHTHOUSE, ENV_GROUP, ENV_GROUPS = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
_OF_TORCHFT = {
    "manager": "TORCHFT_TIMEOUT_SEC",
    "quorum": "TORCHFT_QUORUM_TIMEOUT_SEC",
    "retries": "TORCHFT_QUORUM_RETRIES",
}
_SLOWEST = 3.0  # seconds, where nothing is said: the timeouts are the shortest ones
_OWN = (GPU_MEMORY, HOST_MEMORY, SUPERSEDED)  # causes to stop that concern one group alone
# the same for a group with a job of its own: the end of that job is no affair of the others, which train on in theirs
_OF_ITS_JOB = (CauseKind.RUN_TIME, CauseKind.TIME_LIMIT, CauseKind.WARNING, CauseKind.TOLD)
LEAVING = TOLD_TO_STOP  # a group that a person lets leave is told so by its supervisor


class GroupLimits(NamedTuple):
    """``minimum``: groups that take part in every step. ``patience``: seconds in a quorum after which the other groups may have
    gone. ``own_causes``: reasons to stop that do not concern the other groups."""

    lighthouse: str
    group: str
    groups: int
    minimum: int
    timeouts: Timeouts
    slowest_step: float
    patience: float
    own_causes: tuple[str, ...]

    @property
    def number(self) -> int:
        """The group's number, from 0: "g007" is 7."""
        digits = re.search(r"\d+$", self.group)
        return int(digits[0]) if digits else 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> GroupLimits:
        """Raises ConfigError, with what to set."""
        lighthouse = env.get(ENV_LIGHTHOUSE, "")
        if not lighthouse:
            raise ConfigError(
                f"{ENV_LIGHTHOUSE} is not set: this program trains in replica groups. Start it with `ftsupervise launch` and "
                "launch.replica_groups in ftsupervise.yaml, or set the address of a torchft_lighthouse"
            )
        groups = int(_number(env, ENV_GROUPS, 1))
        slowest = _number(env, ENV_SLOWEST_STEP, _SLOWEST)
        wanted = derive(slowest, groups=groups)
        told = {name: _number(env, variable, getattr(wanted, name)) for name, variable in _OF_TORCHFT.items()}
        found = wanted._replace(
            process_group=_number(env, ENV_PROCESS_GROUP, wanted.process_group),
            manager=told["manager"],
            quorum=told["quorum"],
            retries=int(told["retries"]),
        )
        if wrong := problems(found, slowest, groups):
            raise ConfigError("the timeouts of the replica groups do not fit together: " + "; ".join(wrong))
        return cls(
            lighthouse=lighthouse,
            group=env.get(ENV_GROUP) or "g000",
            groups=groups,
            minimum=int(_number(env, ENV_MIN_REPLICAS, majority(groups))),
            timeouts=found,
            slowest_step=slowest,
            patience=found.join + found.process_group,
            own_causes=(*_OWN, *(one.value for one in _OF_ITS_JOB if env.get(ENV_GROUP_JOB))),
        )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise ConfigError(f"{name}={text!r} is no number from 0 on")
    return value
