"""The lighthouse in a job of its own: there for as long as groups of the run may ask it, in whatever jobs they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from ftsupervise.errors import AlreadyRunning
from ftsupervise.replicas.lighthouse import SupervisedLighthouse
from ftsupervise.replicas.lighthouse_page import LighthousePage
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, read_switch

_EVERY = 1.0  # seconds between two looks
_SILENCE = 60.0  # seconds without a heartbeat, once the run is over, after which no group asks any more


def serve(rundir: RunDir, lighthouse: SupervisedLighthouse, over: threading.Event, say: Callable[[str], None]) -> None:
    """Until ``over``, or the run has finished or is to stop and no group reports any more. Raises AlreadyRunning when a later
    lighthouse of the run has begun, and what its start raises."""
    try:
        lighthouse.start()
        silent_since: float | None = None
        while not over.wait(_EVERY):
            lighthouse.keep()
            lighthouse.events()  # they are in the log of this job already
            if lighthouse.superseded is not None:
                raise AlreadyRunning(f"another lighthouse of {rundir.root} has begun: this one has ended")
            if not _may_end(rundir, lighthouse):
                silent_since = None
                continue
            silent_since = monotonic() if silent_since is None else silent_since
            if monotonic() - silent_since >= _SILENCE:
                say("the run is over and no group reports any more: the lighthouse ends")
                return
    finally:
        lighthouse.stop()


def _may_end(rundir: RunDir, lighthouse: SupervisedLighthouse) -> bool:
    page = lighthouse.page()
    if not isinstance(page, LighthousePage) or page.heard(_SILENCE):
        return False
    return rundir.has_finished() or read_switch(rundir, KILL).up
