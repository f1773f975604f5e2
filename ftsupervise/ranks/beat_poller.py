"""Beats of the run directory as pulses, for nodes that we do not hear from: any shared file system, no network, slower.

A thread of its own, since a file system may hang. Clocks of hosts differ, so that what counts is when we saw a beat change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from ftsupervise.rundir.beats import read_beats
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Beat, RankState

_EVERY = 2.0  # seconds
_SHARE = 10  # a reading that takes T is repeated after 10 T at the earliest


class BeatPoller:
    """Reads while ``needed()`` and hands what it read to ``put``."""

    def __init__(
        self,
        rundir: RunDir,
        needed: Callable[[], bool],
        attempt: Callable[[], int],
        put: Callable[[list[RankState]], None],
    ) -> None:
        self._rundir, self._needed, self._attempt, self._put = rundir, needed, attempt, put
        self._known: dict[int, tuple[Beat, float, float]] = {}  # rank -> its beat, when it and its step were new to us
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="slow-beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(0.5)

    def _go(self) -> None:
        pause = _EVERY
        while not self._over.wait(pause):
            pause = _EVERY
            if not self._needed():
                continue
            began = monotonic()
            try:
                found = read_beats(self._rundir)
            except OSError:
                continue
            pause = max(_EVERY, _SHARE * (monotonic() - began))
            self._put(self.pulses(found, self._attempt(), monotonic()))

    def pulses(self, beats: tuple[Beat, ...], attempt: int, now: float) -> list[RankState]:
        """Those of ``attempt``, with the times at which they were first seen as they are."""
        known, self._known = self._known, {}
        for beat in beats:
            if beat.facts.get("attempt") != str(attempt):
                continue
            before = known.get(beat.rank)
            at = stepped = now
            if before is not None and before[0].pid == beat.pid:
                at = before[1] if before[0].at == beat.at else now
                stepped = before[2] if before[0].step == beat.step else now
            self._known[beat.rank] = (beat, at, stepped)
        return [
            RankState(beat.rank, beat.host, beat.step, beat.phase, stepped, at, now, beat.pid)
            for beat, at, stepped in self._known.values()
        ]
