"""What the job ring is asked for: the door fills it in, every part reads its own."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from ftsupervise.job.decide import Budgets
from ftsupervise.job.hang import Patience
from ftsupervise.job.nodes import Care
from ftsupervise.job.warm import Wanted
from ftsupervise.rundir import RunDir


@dataclass(frozen=True)
class Options:
    """What ``ftsupervise run`` was asked for. Seconds."""

    rundir: RunDir
    command: tuple[str, ...]
    name: str
    forward: str = "auto"  # the warning signal: "auto", "always" or "never"; the file is written in any case
    warning: int = signal.SIGUSR1
    grace: float = 25.0  # between our passing on a SIGTERM and SIGKILL; Slurm's own KillWait is 30 s
    space_wait: float = 600.0  # for a full disk, before an attempt and after the last one; for the mount of a launched run
    launched: bool = False  # the run directory was made by ``launch`` and is never made anew
    stop_within: float = 600.0  # what a command gets to leave after the kill switch was raised
    look_every: float = 1.0  # between two looks at the kill switch and the fence
    warm: Wanted = field(default_factory=Wanted)
    guard: Mapping[str, str] = field(default_factory=dict)  # POLL, MEMORY, STOP_BEFORE, RUN_FOR
    budgets: Budgets = field(default_factory=Budgets)
    care: Care = field(default_factory=Care)
    hang: Patience | None = field(default_factory=Patience)  # None: hangs are not looked for
    end_hung: bool = False  # end a hung command; otherwise it is only told
