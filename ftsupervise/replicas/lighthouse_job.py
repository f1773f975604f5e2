"""The lighthouse in a job of its own: there for as long as groups of the run may ask it, in whatever jobs they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from ftsupervise.errors import AlreadyRunning
from ftsupervise.replicas.lighthouse import SupervisedLighthouse
from ftsupervise.replicas.lighthouse_page import LighthousePage, look
from ftsupervise.replicas.lighthouse_record import LighthouseRecord, read_lighthouse
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, read_switch

_EVERY = 1.0  # seconds between two looks
SILENCE = 60.0  # seconds without a heartbeat, once the run is over, after which no group asks any more


def serve(
    rundir: RunDir,
    lighthouse: SupervisedLighthouse,
    over: threading.Event,
    say: Callable[[str], None],
    silence: float = SILENCE,
) -> None:
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
            if not _may_end(rundir, lighthouse, silence):
                silent_since = None
                continue
            silent_since = monotonic() if silent_since is None else silent_since
            if monotonic() - silent_since >= silence:
                say("the run is over and no group reports any more: the lighthouse ends")
                return
    finally:
        lighthouse.stop()


def _may_end(rundir: RunDir, lighthouse: SupervisedLighthouse, silence: float) -> bool:
    page = lighthouse.page()
    if not isinstance(page, LighthousePage) or page.heard(silence):
        return False
    return rundir.has_finished() or read_switch(rundir, KILL).up


def find_lighthouse(home: Path, within: float, over: threading.Event) -> LighthouseRecord | None:
    """The lighthouse that another job of the run keeps running, once it answers; None when none has within so many seconds,
    or ``over``. It may have to wait in the queue itself."""
    until = monotonic() + within
    while True:
        try:
            record = read_lighthouse(home)
        except (OSError, ValueError):  # it could not be seen
            record = None
        if record is not None and isinstance(look(record.host, record.port, _EVERY), LighthousePage):
            return record
        if monotonic() >= until or over.wait(_EVERY):
            return None
