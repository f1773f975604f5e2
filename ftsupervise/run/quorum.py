"""Tells a replica group's supervisor how its own group and the others stand to each other.

While too few groups run, those that are left wait for a quorum and make no step: no hang, however long it takes. And a
group for which all others wait is hung long before its own clock says so. Where each group has jobs of its own, the next
lighthouse may have another address, and ranks that were started with the old one do not find it.
"""

from __future__ import annotations

import threading
from datetime import datetime, timezone

from ftsupervise.ranks.hang_monitor import SeenFromOutside
from ftsupervise.replicas.groups import read_quorum
from ftsupervise.replicas.lighthouse_record import lighthouse_address
from ftsupervise.rundir.paths import RunDir

_EVERY = 0.5  # seconds between two looks
_FRESH = 15.0  # seconds: an older page says nothing about now


class QuorumWatcher:
    """A thread that reads the page, because a file system may hang. A run without groups has none."""

    def __init__(self, rundir: RunDir, attempt: int, lighthouse: str = "") -> None:
        """``lighthouse``: the address that its ranks have, where that may change."""
        self._now = SeenFromOutside()
        self._over = threading.Event()
        if rundir.whole is not None:
            where = (RunDir(rundir.whole), rundir.root.name, attempt, lighthouse)
            threading.Thread(target=self._look_on, args=where, name="watch-quorum", daemon=True).start()

    def seen(self) -> SeenFromOutside:
        return self._now

    def close(self) -> None:
        self._over.set()

    def _look_on(self, run: RunDir, group: str, attempt: int, lighthouse: str) -> None:
        while not self._over.wait(_EVERY):
            if lighthouse and lighthouse_address(run.replicas) not in ("", lighthouse):
                self._now = SeenFromOutside(moved=True)
                continue
            page, now = read_quorum(run), datetime.now(timezone.utc)
            if page is None or abs((now - page.at).total_seconds()) > _FRESH:
                self._now = SeenFromOutside()
                continue
            hangs = any((one.group, one.attempt) == (group, attempt) for one in page.hung)
            self._now = SeenFromOutside(waits=page.waits and not hangs, hangs=hangs)
