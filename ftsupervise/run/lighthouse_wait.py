"""Lets a replica group with a job of its own begin an attempt only when the run's lighthouse answers.

The small job of the lighthouse ends at its time limit, and the next one may wait in the queue. A group that began meanwhile
would find nobody, fail, and be stopped by its brake for no fault of its own. And the lighthouse counts both of two copies of a
group, so a job begins only when the copy of an older one reports no more.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from ftsupervise.replicas.lighthouse_page import LighthousePage, group_of, look
from ftsupervise.replicas.lighthouse_record import LighthouseRecord, read_lighthouse
from ftsupervise.rundir.paths import RunDir, tell

_EVERY = 1.0  # seconds between two looks
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
        if not wait(_EVERY):
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
