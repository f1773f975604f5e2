"""Starts torchft's lighthouse for the groups, at an address of this host that all their nodes reach, and follows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

from ftsupervise.host.addresses import LOOPBACK, own_address
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.lighthouse_page import LighthousePage
from ftsupervise.replicas.stores import StoreWatch
from ftsupervise.replicas.suspects import SuspectWatch
from ftsupervise.replicas.torchft_python import find_torchft
from ftsupervise.run.group_options import GroupOptions
from ftsupervise.rundir import ledger
from ftsupervise.scheduler.allocation import Allocation


class GroupLighthouse:
    """The lighthouse of one run. Making one raises an error where there is no torchft, no port, or no answer from the run
    directory."""

    def __init__(
        self,
        asked: GroupOptions,
        env: Mapping[str, str],
        allocation: Allocation,
        say: Callable[[str], None],
        *,
        apart: bool = False,
    ) -> None:
        """``apart``: the groups are in other jobs, wherever those run."""
        assert asked.timeouts is not None
        self._timeouts, self._say = asked.timeouts, say
        here = env.get("SLURMD_NODENAME", "")
        others = [allocation.address(node) or node for node in allocation.nodes if node != here]
        place = LighthousePlace(
            home=asked.rundir.replicas,
            host=own_address(others) if others or apart else LOOPBACK,
            groups=asked.count,
            least=asked.least,
            timeouts=asked.timeouts,
            job=ledger.job_id(env),
            node=here or os.uname().nodename,
        )
        python = find_torchft(asked.command, env).python
        self._lighthouse = SupervisedLighthouse(place, python, say, env=env)
        self._lighthouse.start()
        self.address = self._lighthouse.address
        self.moved = datetime.now(timezone.utc) if self._lighthouse.moved else None
        self.restarted: float | None = None  # monotonic: torchft may have lost a group's call then
        self._suspects = SuspectWatch()
        names = [LOOPBACK, os.uname().nodename, *allocation.nodes, *map(allocation.address, allocation.nodes)]
        self._stores = StoreWatch(self._lighthouse.page, names)

    def follow(self, steps: Mapping[str, int | None]) -> None:
        """Take note of what has happened to it. ``steps``: of each group, the most that its ranks can have
        made."""
        self._lighthouse.keep()
        for event in self._lighthouse.events():
            if event.restart:
                self.restarted = time.monotonic()
        page = self._lighthouse.page()
        if isinstance(page, LighthousePage):
            news = self._suspects.news(time.monotonic(), page, steps, 2 * self._timeouts.heartbeat, self._stores.silent)
            for one in news:
                self._say(one.words)

    def heard(self, group: str) -> bool | None:
        """Tell whether a start of this group still sends heartbeats; None where that cannot be seen."""
        return self._lighthouse.heard(group)

    def stop(self) -> None:
        self._stores.close()
        self._lighthouse.stop()
