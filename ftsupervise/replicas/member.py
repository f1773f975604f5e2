"""Tells a replica group's supervisor how its own group and the others stand to each other.

While too few groups run, those that are left wait for a quorum and make no step: no hang, however long it takes. And a
group for which all others wait is hung long before its own clock says so. Where each group has jobs of its own, the next
lighthouse may have another address, and ranks that were started with the old one do not find it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial

from ftsupervise.host.in_time import Every
from ftsupervise.ranks.hang_monitor import SeenFromOutside
from ftsupervise.replicas.members import LighthousePage, group_of, look
from ftsupervise.replicas.record import LighthouseRecord, lighthouse_address, read_lighthouse
from ftsupervise.replicas.table import read_quorum
from ftsupervise.rundir.paths import RunDir, tell

_EVERY = 0.5  # seconds between two looks
_FRESH = 15.0  # seconds: an older page says nothing about now


class QuorumWatcher:
    """A thread that reads the page, because a file system may hang. A run without groups has none."""

    def __init__(self, rundir: RunDir, attempt: int, lighthouse: str = "") -> None:
        """``lighthouse``: the address that its ranks have, where that may change."""
        self._now = SeenFromOutside()
        self._looking: Every | None = None
        if rundir.whole is not None:
            look = partial(self._look, RunDir(rundir.whole), rundir.root.name, attempt, lighthouse)
            self._looking = Every(_EVERY, look, "watch-quorum")

    def seen(self) -> SeenFromOutside:
        return self._now

    def close(self) -> None:
        if self._looking is not None:
            self._looking.close()

    def _look(self, run: RunDir, group: str, attempt: int, lighthouse: str) -> None:
        if lighthouse and lighthouse_address(run.replicas) not in ("", lighthouse):
            self._now = SeenFromOutside(moved=True)
            return
        page, now = read_quorum(run), datetime.now(timezone.utc)
        if page is None or abs((now - page.at).total_seconds()) > _FRESH:
            self._now = SeenFromOutside()
            return
        hangs = any((one.group, one.attempt) == (group, attempt) for one in page.hung)
        self._now = SeenFromOutside(waits=page.waits and not hangs, hangs=hangs)


# ------------------------------------------------------------------------------------------

# Lets a replica group with a job of its own begin an attempt only when the run's lighthouse answers.
#
# The small job of the lighthouse ends at its time limit, and the next one may wait in the queue. A group that began meanwhile
# would find nobody, fail, and be stopped by its brake for no fault of its own. And the lighthouse counts both of two copies of
# a group, so a job begins only when the copy of an older one reports no more.

_LOOK_EVERY = 1.0  # seconds between two looks
_WITHIN = 2.0  # seconds for its answer
_SILENT = 4.0  # seconds without a heartbeat after which a copy is gone: twice the timeout of the largest runs


def wait_for_lighthouse(group: RunDir, wait: Callable[[float], bool], *, first: bool) -> bool:
    """Wait for the lighthouse; return False when ``wait`` was ended, which has said why.

    ``first``: an older job's copy of the group may still run.
    """
    reported = ""
    while why := reason_to_wait(group, first=first):
        if why != reported:
            tell(None, f"group {group.root.name} waits: {why}")
            reported = why
        if not wait(_LOOK_EVERY):
            return False
    return True


def reason_to_wait(group: RunDir, *, first: bool) -> str:
    """Return why the group does not begin yet; "" when it can. An answer that could not be had is no permission to begin."""
    assert group.whole is not None
    home = RunDir(group.whole).replicas
    try:
        page = read_lighthouse(home)
    except (OSError, ValueError) as error:
        return f"the page of the lighthouse cannot be read: {error}"
    if page is None or page.down_since is not None:
        return f"the run has no lighthouse now: {home}/lighthouse.json"
    seen = look(page.host, page.port, _WITHIN)
    if not isinstance(seen, LighthousePage):
        return f"the lighthouse at {page.address} does not answer: {seen.why}"
    return _older_copy(group.root.name, page, seen) if first else ""


def _older_copy(name: str, page: LighthouseRecord, seen: LighthousePage) -> str:
    if any(group_of(one) == name for one in seen.heard(_SILENT)):
        return f"an older copy of it still reports to the lighthouse at {page.address}"
    if 0 <= (datetime.now(timezone.utc) - page.since).total_seconds() < _SILENT:
        return "the lighthouse is new, and has not heard of an older copy yet if there is one"
    return ""
