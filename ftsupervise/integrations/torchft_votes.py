"""The groups agree with each commit on one number, whose maximum counts: to save now, or the step at which all stop.

    stop at step N    N << 8 | vote     proposed two steps ahead, and repeated until then, so that a group that fails to commit
                                        the step in which it was decided hears of it in the next one
    save              vote              at the end of this step

Within a group all ranks first take the maximum of theirs. A reason that concerns one group alone (its memory, a newer attempt
that has taken its place) does not stop the others: that group leaves, and comes back with the weights of a healthy one.

Beside the number each group tells in which meeting its last step was made. A group whose network fails in the last moment of a
step may hold it for made while the others throw it away and make it anew. When they meet again with the same number of steps,
their weights differ, and torchft copies none: no step is behind. Then nothing is committed, and the fewer copy from the more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.guard.stop_reasons import Decision, as_vote, from_vote
from ftsupervise.truth import SUPERSEDED

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
