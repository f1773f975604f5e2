"""Has confirmed what the output says of our ranks and nodes, before anything is ended for it: output is a hint.

``srun: error: node-1: task 3: Exited with exit code 1`` may be of an evaluation with an srun of its own, or quoted from a log.
So the node is asked at once which tasks of ours live there, and Slurm what it thinks of a node that is said to be lost. This is
done in a thread: an agent that does not answer delays nothing. What nobody confirms ends nothing, and srun itself ends soon
where it is true.

| a line about | is believed when |
|---|---|
| a task of a node | fewer of our tasks live on that node than our step has there, and not that one |
| a node that accepted no task | none of our tasks lives there, and our step should have some |
| a lost node | Slurm says so, or its slurmd does not answer |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.hostlist import expand_counts, expand_hostlist
from ftsupervise.model import Cause, CauseKind
from ftsupervise.ranks.rpc import tasks_of
from ftsupervise.run.exit_analysis import Ours
from ftsupervise.scheduler.parse import is_away

_AGAIN = 0.2  # seconds between two questions about a line that nobody could say anything about
_PAUSE = 0.5  # seconds after a line that was found untrue: others may print thousands
_LONGEST = 30.0  # seconds in which a line is asked about; srun ends by itself meanwhile
_PATIENCE = 1.0  # seconds for the agents' answer
_OTHERS = 2  # more nodes that are asked, because the one that is named may have no task any more
_MOST = 200  # lines that wait to be confirmed


class LivingTask(NamedTuple):
    """A task of an srun, with the layout of its step."""

    step: str
    rank: int
    nodes: str
    tasks: str

    @property
    def number(self) -> int:
        """Return the step's number: steps within a step come later than it."""
        return int(self.step.rpartition(".")[2])


def read_tasks(text: str) -> list[LivingTask]:
    """Parse the answer to "tasks". What is no number there is left out."""
    found = []
    for words in (line.split() for line in text.splitlines()):
        if len(words) == 4 and words[1].isdigit() and words[0].rpartition(".")[2].isdigit():
            found.append(LivingTask(words[0], int(words[1]), words[2], words[3]))
    return found


def tasks_on(layout: LivingTask) -> dict[str, int]:
    """Return node -> how many tasks the step has there; {} where that is unknown."""
    try:
        return dict(zip(expand_hostlist(layout.nodes), expand_counts(layout.tasks), strict=True))
    except ValueError:
        return {}


class HintChecker:
    """The lines about our ranks, of one attempt, and which of them are true."""

    def __init__(
        self,
        ours: Ours,
        folder: Path,
        here: str,
        ask: Callable[[Mapping[str, str], float], dict[str, str]],
        states: Callable[[], Mapping[str, str]],
        wake: Callable[[], None],
    ) -> None:
        """``here``: our own node, whose processes we see ourselves; ``ask``: those of the others, of their agents; ``states``:
        of the nodes, by Slurm."""
        self.ours = ours._replace(lost=frozenset())
        self._folder, self._here, self._ask, self._states, self._wake = folder, here, ask, states, wake
        self._layout: LivingTask | None = (
            None  # of our step, which has the lowest number of all that carry the attempt's mark
        )
        self._waiting: list[tuple[Cause, int, float]] = []  # what was said, where in the output, since when it is known
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self.confirmed: Cause | None = None
        self.settled = 0  # what was said before this place of the output is not true

    def take(self, said: Iterable[Cause], at: int) -> None:
        """Begin to find out whether it is true; ``at``: how far the output was read."""
        new = [(cause, at, monotonic()) for cause in said]
        if not new or self.confirmed is not None:
            return
        with self._lock:
            self._waiting = [*self._waiting, *new][-_MOST:]
            if self._thread is None:
                self._thread = threading.Thread(target=self._check_all, name="confirm", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _check_all(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            with self._lock:
                asked, self._waiting = self._waiting, []
                if not asked:
                    self._thread = None
                    return
            now, unknown = monotonic(), []
            answers = self._tasks([cause.at[0].node for cause, _, _ in asked])
            states = self._states() if any(cause.kind is CauseKind.NODE for cause, _, _ in asked) else {}
            for one in asked:
                true = self._is_true(one[0], answers, states)
                if true:
                    self.confirmed = one[0]
                    self._wake()
                    return
                if true is None and now - one[2] < _LONGEST:
                    unknown.append(one)
            with self._lock:
                self._waiting = [*unknown, *self._waiting][-_MOST:]
                if not unknown:
                    self.settled = max(self.settled, *(at for _, at, _ in asked))
            pause = _AGAIN if unknown else _PAUSE

    def _tasks(self, named: Sequence[str]) -> dict[str, list[LivingTask]]:
        """Return node -> our living tasks there, of the nodes that have answered."""
        mine = sorted(self.ours.nodes or ())
        nodes = {one for name in named for one in (name, name.partition(".")[0]) if one in mine}
        more = [node for node in (self._here, *mine) if node in mine and node not in nodes][:_OTHERS]
        asked = [*nodes, *(() if self._layout is not None else more)]
        found = {node: tasks_of(str(self._folder), node) for node in asked if node == self._here}
        others = {node: f"tasks {self._folder}" for node in asked if node != self._here}
        found.update(self._ask(others, _PATIENCE) if others else {})
        tasks = {node: [one for one in read_tasks(text) if self.ours.has_step(one.step.partition(".")[0])]
                 for node, text in found.items()}  # fmt: skip
        for one in (one for living in tasks.values() for one in living):
            if self._layout is None or one.number < self._layout.number:
                self._layout = one
                self.ours = self.ours._replace(step=one.step, began=True)
        return tasks

    def _is_true(
        self, said: Cause, answers: Mapping[str, Sequence[LivingTask]], states: Mapping[str, str]
    ) -> bool | None:
        """Return whether what was said is true; None while that cannot be known."""
        node = said.at[0].node
        if said.kind is CauseKind.NODE:
            lost = is_away(states.get(node, "")) if states else None
            if lost:
                self.ours = self.ours._replace(lost=(self.ours.lost or frozenset()) | {node})
            return lost
        node = node if node in answers else node.partition(".")[0]
        if node not in answers or self._layout is None:
            return None
        living = {one.rank for one in answers[node] if one.step == self._layout.step}
        should = tasks_on(self._layout).get(node)
        if should is None:
            return False if living else None
        if said.kind is CauseKind.LAUNCH:
            return should > 0 and not living
        return len(living) < should and not living & _ranks(said.at[0].ranks)


def _ranks(text: str) -> set[int]:
    """Return the numbers in Slurm's "0-2,5"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()) and int(last or first) - int(first) < 1_000_000:
            found.update(range(int(first), int(last or first) + 1))
    return found
