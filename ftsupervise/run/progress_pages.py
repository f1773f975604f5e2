"""The progress of an attempt as its supervisor sees it: all ranks as one page, with what is done about a hang; and each rank
as it is at this moment, for a person who asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.host.in_time import Every
from ftsupervise.model import GUARD, OUTPUT
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.ranks.hang_detector import JITTER, HangVerdict
from ftsupervise.ranks.hang_monitor import cause_of
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.ranks.straggler import StragglerDetector
from ftsupervise.ranks.taking import take_evidence, with_processes
from ftsupervise.rundir import live_look
from ftsupervise.rundir.live_look import LiveAnswer, LiveQuestion, RankNow
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.progress import (
    ProgressPage,
)
from ftsupervise.truth import RankState

_BEHIND = 2  # steps: a rank this far behind the first one is named


class OnHang(NamedTuple):
    """The supervisor does this about a hang. ``does``: one of ``ON_HANG``. ``at``, in monotonic seconds: the present standstill
    is a hang from then on."""

    does: str = ""
    at: float | None = None


def seen_by(
    table: RankTable,
    left: HangVerdict | None = None,
    on_hang: Callable[[], OnHang] = OnHang,
    stragglers: StragglerDetector | None = None,
) -> ProgressPage | None:
    """Return the progress of the ranks as they last reported; None where none has. ``left``: a hang that was left alone.
    ``stragglers``: has seen for whom the others wait."""
    states, tally = table.newest(), table.tally()
    if not states:
        return None
    now, at = time.monotonic(), time.time()
    stepping = [one for one in states if one.step is not None]
    slow = min(stepping, key=lambda one: one.step or 0, default=None)
    ahead = max((one.step for one in stepping if one.step is not None), default=None)
    left_at = (one.step for one in table.exits)
    ahead = max((step for step in (ahead, tally.last, *left_at) if step is not None), default=None)
    step = slow.step if slow is not None and len(stepping) == len(states) else None
    behind = slow is not None and ahead is not None and ahead - (slow.step or 0) >= _BEHIND
    hang = on_hang()
    goes_on = left is None or any(max(one.stepped, one.beaten) > left.since + JITTER for one in states)
    return ProgressPage(
        at=datetime.fromtimestamp(at, timezone.utc),
        ranks=len(states),
        step=step,
        ahead=ahead,
        slowest=f"rank {slow.rank}{f' on {slow.node}' if slow.node else ''}" if behind and slow is not None else "",
        phase=Counter(one.phase for one in states).most_common(1)[0][0],
        stepped=round(now - max(one.stepped for one in stepping), 3) if stepping else None,
        first=tally.first,
        first_at=None if tally.first_at is None else round(at - (now - tally.first_at), 3),
        active_at=None if tally.active is None else round(at - (now - tally.active), 3),
        saved=tally.saved,
        saving=round(tally.saving, 3),
        loss=tally.loss,
        last_step=tally.last_step,
        hung="" if left is None or goes_on else cause_of(left).hang_words(),
        on_hang=hang.does,
        hang_at=None if hang.at is None else round(at + (hang.at - now), 3),
        straggler=stragglers.found(now, datetime.fromtimestamp(at, timezone.utc)) if stragglers is not None else None,
        source="" if tally.first is None else OUTPUT if all(one.read for one in states) else GUARD,
    )


# ------------------------------------------------------------------------------------------

# Answers a person who asks how the ranks are at this moment (``rundir/live_look.py``): their stacks are taken, and nothing is
# ended. A thread of its own does it, which gives way to every other question to the nodes.

_EVERY = 1.0  # seconds between two looks for a question
_COST = 20  # a look that takes T is followed by a pause of 20 T at least
_ASKED = 256  # ranks whose stacks are taken: those that differ from the others first
_BY_ONE_NODE = 64


class LiveLooks:
    """Answers for one attempt, in the folder ``attempt``, from its start to ``close``. ``seen``: all its ranks as one."""

    def __init__(self, attempt: Path, agents: Agents, seen: Callable[[], ProgressPage | None]) -> None:
        self._attempt, self._agents, self._seen = attempt, agents, seen
        self._took = 0.0  # by the last look for a question
        self._looking = Every(lambda _: max(_EVERY, _COST * self._took), self._look, "live-looks")

    def close(self) -> None:
        """End it. An answer that is being taken is not waited for."""
        self._looking.close()

    def _look(self) -> None:
        began = monotonic()
        try:
            question = live_look.take_question(self._attempt)
        except OSError:
            return
        finally:
            self._took = monotonic() - began
        if question is not None:
            try:
                self._answer(question)
            except (OSError, RuntimeError):  # a full disk, no more threads: the person is told that there was no answer
                return

    def _answer(self, question: LiveQuestion) -> None:
        folder = live_look.begin_answer(self._attempt)
        chosen = worth_a_look(self._states())
        taken = take_evidence(self._agents.ask_in_passing, chosen, folder, goes_on=True)
        for name, text in taken.unwritten.items():
            write_whole(folder / name, text, sync=False)
        states, now = self._states(), monotonic()
        ranks = tuple(sorted((_rank_now(one, now) for one in states), key=lambda one: one.rank))
        found = LiveAnswer(question.id, datetime.now(timezone.utc), ranks, len(chosen), taken.silent, self._seen())
        live_look.answer(self._attempt, found)

    def _states(self) -> list[RankState]:
        agents = self._agents
        return with_processes(
            agents.ask_in_passing, agents.table.newest(), self._attempt.absolute(), agents.answering()
        )


def worth_a_look(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that are asked for their stacks, those first that are not where the most are. Pure."""
    common = Counter((one.step, one.phase, one.state) for one in states)
    found: list[RankState] = []
    nodes: Counter[str] = Counter()
    for one in sorted(states, key=lambda one: (common[(one.step, one.phase, one.state)], one.rank)):
        if one.pid and one.state not in ("X", "Z") and nodes[one.node] < _BY_ONE_NODE:
            nodes[one.node] += 1
            found.append(one)
        if len(found) == _ASKED:
            break
    return found


def _rank_now(one: RankState, now: float) -> RankNow:
    stepped, beaten, heard = (round(max(0.0, now - at), 3) for at in (one.stepped, one.beaten, one.seen))
    return RankNow(one.rank, one.node, one.step, one.phase, stepped, beaten, heard, one.state, one.pid, one.read)
