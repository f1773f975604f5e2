"""The training of the predicted runs: steps of 50 ms, a checkpoint every ``PREDICTION_EVERY`` steps that takes half a second.

With ``PREDICTION_SNAPSHOTS`` it takes snapshots in memory; with ``PREDICTION_PEERS`` it is a replica group, which goes on from
the step that the others have reached, as it would from their state. Two ranks wait for each other, as a collective does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ftsupervise import Guard

STEP, SAVE = 0.05, 0.5
EVERY = int(os.environ.get("PREDICTION_EVERY", "0"))
SNAPSHOTS = bool(os.environ.get("PREDICTION_SNAPSHOTS"))
PEERS = os.environ.get("PREDICTION_PEERS", "")
RANK = int(os.environ.get("SLURM_PROCID", "0"))


_MEET = 10  # steps


class Pair:
    """Two ranks of which neither gets ahead of the other."""

    def __init__(self) -> None:
        folder = Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"])
        self._mine, self._other = folder / f"pair-{RANK}", folder / f"pair-{1 - RANK}"

    def meet(self, step: int) -> None:
        self._mine.with_suffix(".part").write_text(str(step))
        self._mine.with_suffix(".part").replace(self._mine)
        while not self._other.exists() or int(self._other.read_text()) < step - _MEET:
            time.sleep(0.02)


def main() -> None:
    pair = Pair() if os.environ.get("SLURM_STEP_NUM_TASKS") == "2" else None
    state = {"step": 0}
    mine = Path(PEERS, os.environ.get("FTSUPERVISE_GROUP", "g")) if PEERS else None
    time.sleep(0.5)  # what a real one loads
    with Guard(poll=0.2, beat_every=0.5, agree=False) as guard:
        if SNAPSHOTS:
            guard.restore(state=state)
        elif mine is None:
            newest = guard.latest()
            state["step"] = int(newest.name.rpartition("-")[2]) if newest is not None else 0
        else:
            mine.parent.mkdir(exist_ok=True)
            state["step"] = max((int(one.read_text() or 0) for one in mine.parent.iterdir()), default=0)
        while True:
            state["step"] = step = state["step"] + 1
            time.sleep(STEP)
            if pair is not None and not step % _MEET:
                pair.meet(step)
            if mine is not None:
                mine.write_text(str(step))
            if SNAPSHOTS:
                guard.snapshot(step)
            decision = guard.step(step)
            if mine is None and (decision.save or (EVERY and step % EVERY == 0)):
                with guard.phase("save"):
                    time.sleep(SAVE)
                    if SNAPSHOTS:
                        guard.save(step)
                    elif not RANK:
                        with guard.checkpoint(step) as folder:
                            (folder / "state.txt").write_text(str(step))
            if decision.stop:
                return


main()
