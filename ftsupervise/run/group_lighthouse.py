"""Starts torchft's lighthouse for the groups, at an address of this host that all their nodes reach, and follows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ftsupervise.host.addresses import LOOPBACK, own_address
from ftsupervise.replicas.groups import name_of
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.lighthouse_page import LighthousePage
from ftsupervise.replicas.stalls import StallBook
from ftsupervise.replicas.stores import StoreWatch
from ftsupervise.replicas.suspects import LiarWatch, SuspectMember, SuspectWatch
from ftsupervise.replicas.torchft_python import find_torchft
from ftsupervise.run.group_options import GroupOptions
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import ENV_AREA
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
        self._timeouts, self._least, self._say = asked.timeouts, asked.least, say
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
        self.moved = self._lighthouse.moved
        self.restarted: float | None = None  # monotonic: torchft may have lost a group's call then
        self.liars: Mapping[str, SuspectMember] = {}  # groups that report steps which no group can have made
        self._suspects, self._liars = SuspectWatch(), LiarWatch()
        names = [LOOPBACK, os.uname().nodename, *allocation.nodes, *map(allocation.address, allocation.nodes)]
        self._stores = StoreWatch(self._lighthouse.page, names)
        area = env.get(ENV_AREA)
        self._stalls = StallBook(
            asked.rundir, [name_of(number) for number in range(asked.count)], Path(area) if area else None
        )

    def follow(self, steps: Mapping[str, int | None]) -> None:
        """Take note of what has happened to it. ``steps``: of each group, the most that its ranks can have
        made."""
        self._lighthouse.keep()
        for event in self._lighthouse.events():
            if event.restart:
                self.restarted = time.monotonic()
        page = self._lighthouse.page()
        if not isinstance(page, LighthousePage):
            return
        now, heartbeat = time.monotonic(), 2 * self._timeouts.heartbeat
        for one in self._suspects.news(now, page, steps, heartbeat, self._stores.silent):
            self._say(one.words)
        before, self.liars = self.liars, self._liars.after(now, page, steps, heartbeat, self._least)
        for name, liar in self.liars.items():
            if name not in before:
                self._say(f"{liar.words}: {name} is ended and started again")

    def heard(self, group: str) -> bool | None:
        """Tell whether a start of this group still sends heartbeats; None where that cannot be seen."""
        return self._lighthouse.heard(group)

    def stop(self) -> None:
        self._stores.close()
        self._stalls.close()
        self._lighthouse.stop()
