"""The command of one attempt: what is to be run, and how it is being ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ftsupervise.model import Cause, Claim
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.run import exit_analysis
from ftsupervise.run.events import SignalQueue
from ftsupervise.run.settings import Options
from ftsupervise.warm.manager import Warm


class Ending(NamedTuple):
    """How the command is being ended. Times are monotonic."""

    kill_at: float  # SIGKILL for what is then left
    cause: Cause | None = None  # where we end it for what we saw
    by: int = 0  # the signal that told us to stop
    died_at: float | None = None  # when we first saw that it is over


class Touched(NamedTuple):
    """From ``at`` (monotonic) on a death may be our own doing; the command's output until then."""

    at: float
    output: str


@dataclass(frozen=True)
class CommandSpec:
    """What is to be run, and with what."""

    options: Options
    mine: Claim
    command: tuple[str, ...]
    end: float | None  # of the job, epoch seconds
    ears: SignalQueue
    warm: Warm
    agents: Agents | None = None
    # SIGKILL for what no signal of ours reaches: the ranks on other nodes
    kill_ranks: Callable[[], bool] = lambda: True

    @property
    def restarts(self) -> bool:
        return self.options.budgets.in_place > 0 and exit_analysis.may_end_with_a_rank(self.command)

    @property
    def ends_with_a_rank(self) -> bool:
        return exit_analysis.ends_with_a_rank(self.command)
