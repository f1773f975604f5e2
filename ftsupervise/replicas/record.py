"""The supervisor of the lighthouse writes a page for all others, ``RUN/replicas/lighthouse.json``, and takes its turn here.

    replicas/lighthouse.json   the lighthouse, where it is and how often it was restarted
    replicas/starts/NNNN/      one for each supervisor of a lighthouse, claimed by mkdir: the newest one is in charge
    replicas/staging/NNNN/     the page is made here, then renamed; a plain file: sealed (``rundir/fence.py``)

The disk may hang while the lighthouse has to be restarted within a second. So a thread writes and looks, and only it waits.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.errors import NoAnswer, from_os_error
from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import claim_folder, distrust_in, make_folder
from ftsupervise.rundir import fence
from ftsupervise.rundir.records import EPOCH, read_record, write_json

PAGE_NAME = "lighthouse.json"
_STARTS, _STAGING = "starts", "staging"
_KEPT = 100  # restarts that the page lists
_EVERY = 1.0  # seconds between two looks at the run directory
_CLAIM = 60.0  # seconds for the run directory to answer before the first start


class LighthouseRestart(NamedTuple):
    """``down``: seconds without a lighthouse."""

    at: datetime = EPOCH
    why: str = ""
    down: float = 0.0


class LighthouseRecord(NamedTuple):
    """The lighthouse of a run. ``address`` stays the same as long as a group lives that was started with it."""

    host: str = ""  # in numbers
    port: int = 0
    address: str = ""  # "http://HOST:PORT", as the groups get it
    moved: datetime | None = None  # when it began there, after it was at another address; None: it never was
    pid: int = 0
    job: str = ""
    node: str = ""
    since: datetime = EPOCH  # when this process began to listen
    min_replicas: int = 0
    restarts: int = 0  # in the whole run
    generation: int = 0  # which supervisor of a lighthouse wrote this
    boot: str = ""  # the id of the host's boot: else its pid means nothing
    version: str = ""  # of torchft
    down_since: datetime | None = None  # there is none now, and why
    trouble: str = ""
    history: Annotated[tuple[LighthouseRestart, ...], _KEPT] = ()

    def restarted(self, restart: LighthouseRestart, pid: int) -> LighthouseRecord:
        return self._replace(
            pid=pid,
            since=restart.at + timedelta(seconds=restart.down),
            restarts=self.restarts + 1,
            down_since=None,
            trouble="",
            history=(*self.history, restart)[-_KEPT:],
        )


def lighthouse_address(home: Path) -> str:
    """Return the address of the run's lighthouse; "" while it is not known to be there."""
    try:
        page = read_lighthouse(home)
    except (OSError, ValueError):
        return ""
    return page.address if page is not None and page.down_since is None else ""


def read_lighthouse(home: Path) -> LighthouseRecord | None:
    """The page in ``home`` (RUN/replicas); None if there is none. Raises OSError and ValueError: it could not be seen, is
    damaged, or an account wrote it that is not trusted there."""
    path = home / PAGE_NAME
    try:
        whose = home.stat()
    except FileNotFoundError:
        return None
    return read_record(
        LighthouseRecord,
        path,
        limit=200_000,
        distrust=distrust_in(whose, path),
    )


class LighthouseFiles:
    """One supervisor's turn. ``newer``: a later one that has begun, None as long as none is seen."""

    def __init__(self, home: Path, say: Callable[[str], None]) -> None:
        self.home, self.number = home, 0
        self.newer: int | None = None
        self._say, self._area, self._next = say, home, LighthouseRecord()
        self._wake, self._looked, self._over, self._problem = threading.Event(), threading.Event(), False, ""
        self._thread = threading.Thread(target=self._keep, name="lighthouse-page", daemon=True)

    def claim(self) -> LighthouseRecord | None:
        """Take the turn, and return what the one before wrote. Raises an error when the run directory cannot be written, or
        does not answer."""

        def work() -> tuple[LighthouseRecord | None]:
            self._claim()
            return (self._before(),)

        try:
            done = in_time(work, _CLAIM)
        except OSError as error:
            raise from_os_error(error, f"claim the lighthouse in {self.home}") from None
        if done is None:
            raise NoAnswer(f"{self.home} does not answer within {_CLAIM:.0f} s", hint=f"ls {self.home}")
        self._thread.start()
        return done[0]

    def put(self, record: LighthouseRecord) -> None:
        """Write it soon; of several the last."""
        self._next = record
        self._wake.set()

    def look(self, within: float = 0.1) -> None:
        """See now whether a later one has begun; a disk that does not answer in time is not waited for."""
        self._looked.clear()
        self._wake.set()
        self._looked.wait(within)

    def close(self, within: float = 2.0) -> None:
        self._over = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(within)

    def _claim(self) -> None:
        starts, areas = self.home / _STARTS, self.home / _STAGING
        make_folder(starts, parents=True)
        while True:
            self.number = max(fence.last_area(starts), fence.last_area(areas)) + 1
            try:
                claim_folder(starts / f"{self.number:04d}")
                break
            except FileExistsError:
                continue
        for folder in fence.seal(areas, self.number, range(max(1, self.number - 3), self.number)):
            shutil.rmtree(folder, ignore_errors=True)
        area = fence.open_area(areas, self.number)
        if area is None:
            self.newer = self.number + 1
        self._area = area or self.home

    def _before(self) -> LighthouseRecord | None:
        try:
            return read_lighthouse(self.home)
        except (OSError, ValueError) as error:
            self._say(f"the page of the last lighthouse is not used: {error}")
            return None

    def _keep(self) -> None:
        written = self._next
        while True:
            self._wake.wait(_EVERY)
            self._wake.clear()
            self._see()
            record, over = self._next, self._over
            if record is not written and self._write(record):
                written = record
            if over:
                return

    def _write(self, record: LighthouseRecord) -> bool:
        try:
            write_json(self.home / PAGE_NAME, record, area=self._area)
        except OSError as error:
            if fence.is_sealed(self._area):
                return True  # a newer one is in charge
            problem = f"cannot write {self.home / PAGE_NAME}: {error.strerror}"
            if problem != self._problem:
                self._problem = problem
                self._say(problem)
            return False
        self._problem = ""
        return True

    def _see(self) -> None:
        try:
            self.newer = self.newer or fence.newer(self.home / _STARTS, self.number)
        except OSError:  # an unknown ends nothing
            return
        self._looked.set()
