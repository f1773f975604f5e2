"""A rank of a replica group decides by these rules, which need no torchft: limits, votes, doubtful steps, and who stands.

It stands alone because it can be read, and tested, where torchft is not installed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from math import inf
from statistics import median
from typing import NamedTuple

from ftsupervise.errors import ConfigError
from ftsupervise.guard.stop_reasons import Decision, as_vote, from_vote
from ftsupervise.model import CauseKind
from ftsupervise.replicas.bounds import ENV_PROCESS_GROUP, Timeouts, derive, majority, problems
from ftsupervise.replicas.stalls import MOST_SEEN, GroupStall
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


# ------------------------------------------------------------------------------------------

# The groups agree with each commit on one number, whose maximum counts: to save now, or the step at which all stop.
#
#     stop at step N    N << 8 | vote     proposed two steps ahead, and repeated until then: a group that fails to commit the
#                                         step in which it was decided hears of it in the next one
#     save              vote              at the end of this step
#
# Within a group all ranks first take the maximum of theirs. A reason that concerns one group alone (its memory, a newer attempt
# that has taken its place) does not stop the others: that group leaves, and comes back with the weights of a healthy one.
#
# Beside the number each group tells in which meeting its last step was made. A group whose network fails in the last moment of
# a step may hold it for made while the others throw it away and make it anew. When they meet again with the same number of
# steps, their weights differ, and torchft copies none: no step is behind. Then nothing is committed, and the fewer copy from
# the more.

_AHEAD = 2  # steps
_BITS = 8
_VOTE = (1 << _BITS) - 1


class Agreed(NamedTuple):
    """``number``: the greatest of all groups, ``own``: this group's reason to leave by itself, as a vote; 0: none."""

    number: int = 0
    own: int = 0

    @property
    def stop_at(self) -> int:
        """The step at which all groups stop; 0: none is decided."""
        return self.number >> _BITS

    def vote(self, step: int) -> int:
        """Return what ``guard.step(step, agreed)`` is to hear after the commit that made ``step``."""
        if self.own and (from_vote(self.own).cause == SUPERSEDED or self._saves or self.stop_at):
            return self.own
        if not self.stop_at or step >= self.stop_at:
            return self.number & _VOTE
        return 0

    @property
    def _saves(self) -> bool:
        return not self.stop_at and bool(from_vote(self.number & _VOTE))

    def to_come(self) -> int:
        """Return what is kept, and given to a group that joins: a stop that is decided."""
        return self.number if self.stop_at else 0


def propose(vote: int, step: int, decided: int, own: tuple[str, ...]) -> tuple[int, int]:
    """The number for all groups, and this group's own reason to leave, from the rank's vote after ``step``.

    ``decided``: a stop that is decided already. ``own``: the causes that concern this group alone.
    """
    wish = from_vote(vote)
    if wish.stop and wish.cause in own:
        save = 0 if wish.cause == SUPERSEDED else as_vote(Decision(1, wish.cause))  # all of them may run out of memory
        return max(decided, save), vote
    if decided:
        return decided, 0
    return (step + _AHEAD) << _BITS | vote if wish.stop else vote, 0


def differ(commits: Sequence[int]) -> bool:
    """Return whether the groups have made their last step in different meetings. 0: that group cannot tell."""
    return len(set(commits) - {0}) > 1


def has_to_copy(commits: Sequence[int], own: int) -> bool:
    """Return whether the group whose last step was made in the meeting ``own`` copies the weights of another one. The step that
    most groups have made counts; of two with as many, the one of the first group. All groups see the same ``commits``."""
    known = Counter(one for one in commits if one)
    return own != 0 and own != max(known, key=lambda one: known[one])


# ------------------------------------------------------------------------------------------

# A group doubts a step that no group can have made, and does not take the weights of the one that reports it.
#
# torchft believes the highest step that any manager reports: all others throw their own weights away for those. A group whose
# counter is broken, or that has loaded a checkpoint of another run, would so replace the training of all. A group that has made
# steps with the others knows better: a step needs the minimum of groups, so one that fewer of them report, and that is far
# beyond what the others can have made since it met them, was never committed.
#
# A group that has made no step yet believes what it hears: at a cold start all go on from the latest checkpoint that one of
# them has. A doubt costs little where it is wrong: that group waits, is started again, and believes. Pure.

_FAR = 100  # steps that a group may always be behind
_FASTER = 10  # times as fast as ever before the others may have been without it
_PACES = 100  # steps whose times are remembered
_FASTEST = 0.001  # seconds


class ToldStep(NamedTuple):
    """A quorum says this of the highest step: which it is, how many members report it, and who one of them is."""

    step: int
    tellers: int
    teller: str = ""


class StepDoubt:
    """The steps that this group has committed with the others. ``least``: groups without which none is. Times: one clock, in
    seconds, that goes on while the machine sleeps."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._step: int | None = None
        self._at, self._paces = 0.0, deque[float](maxlen=_PACES)

    def committed(self, step: int, at: float) -> None:
        if self._step is not None and step == self._step + 1:
            self._paces.append(max(_FASTEST, at - self._at))
        self._step, self._at = step, at

    def furthest(self, at: float) -> float:
        """The step that the others can have come to by now; infinite where this group has made too few to know."""
        if self._step is None or not self._paces:
            return inf
        return self._step + _FAR + _FASTER * max(0.0, at - self._at) / min(self._paces)

    def of(self, told: ToldStep, at: float) -> str:
        """Say why the step is not believed; "" where it is."""
        if told.tellers >= self._least or told.step <= self.furthest(at):
            return ""
        who = told.teller or "a group"
        return (
            f"{who} reports step {told.step}, and the last step that this group has made with the others is {self._step}: its "
            "weights are not taken, and the step waits until that group is gone"
        )


def told_by(quorum: object) -> ToldStep:
    """Read it from torchft's answer to a group that asked for a quorum."""
    ids: Sequence[str] = getattr(quorum, "replica_ids", ())
    rank: int | None = getattr(quorum, "recover_src_replica_rank", None)
    teller = ids[rank].partition(":")[0] if rank is not None and 0 <= rank < len(ids) else ""
    return ToldStep(int(getattr(quorum, "max_step", 0)), int(getattr(quorum, "max_world_size", 0)), teller)


# ------------------------------------------------------------------------------------------

# A group notes each time that its next step came late because another group was lost, for replicas/stalls.py.
#
# Only a group that was there all the time can say how long the others stood still: one that skips steps was away itself. Pure.

_WAITED = 1.0  # seconds in a quorum, from which a late step of unknown cause is a stall
_LATE = 3.0  # times the usual time of a step
_USUAL = 30  # steps


class _Commit(NamedTuple):
    at: float  # epoch seconds
    step: int
    starts: frozenset[str]  # of groups that took part: "g002:3f0c…"


class StallRecorder:
    """``stalls``: oldest first."""

    def __init__(self) -> None:
        self.stalls: list[GroupStall] = []
        self._last: _Commit | None = None
        self._usual = deque[float](maxlen=_USUAL)
        self._lost = 0

    def failed(self) -> None:
        """A step was tried in vain."""
        self._lost += 1

    def committed(self, step: int, starts: Iterable[str], waited: float, at: float) -> bool:
        """``step`` is committed, with these starts of groups. ``waited``: seconds in its quorum. Has ``stalls`` changed?"""
        now, last, lost = _Commit(at, step, frozenset(starts)), self._last, self._lost
        self._last, self._lost = now, 0
        changed = self._came_back(now)
        if last is None or step != last.step + 1:
            return changed
        seconds = max(0.0, at - last.at)
        usual = median(self._usual) if self._usual else seconds
        gone = {_name(start) for start in last.starts - now.starts}
        late = waited >= _WAITED and seconds > _LATE * usual
        if not gone and not lost and not late:
            self._usual.append(seconds)
            return changed
        stall = GroupStall(_time(last.at), round(seconds, 3), step, lost, tuple(sorted(gone)))
        self.stalls = [*self.stalls, stall][-MOST_SEEN:]
        self._came_back(now)  # it may have been started again before the others met
        return True

    def _came_back(self, now: _Commit) -> bool:
        """Note of each stall when all that it lost take part again."""
        here, changed = {_name(start) for start in now.starts}, False
        for number, one in enumerate(self.stalls):
            if one.gone and one.back is None and here.issuperset(one.gone):
                self.stalls[number] = one._replace(back=_time(now.at), missed=max(0, now.step - one.step))
                changed = True
        return changed


def _name(start: str) -> str:
    return start.partition(":")[0]


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)
