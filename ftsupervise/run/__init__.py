"""``ftsupervise run -- COMMAND``: supervise the command inside the job's allocation.

Each attempt passes the gate, is recorded in the ledger, receives Slurm's signals and ends in bounded time. Restarts in place
are a loop of attempts (``supervisor.py``). The exit code is that of the last attempt's command.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftsupervise.config.supervisor import SETTINGS, default
from ftsupervise.nodes.selector import NodePolicy
from ftsupervise.ranks.hang_detector import HangLimits
from ftsupervise.run.decide import Budgets
from ftsupervise.rundir.paths import RunDir
from ftsupervise.units import signal_name
from ftsupervise.warm.restarts import WarmSettings


@dataclass(frozen=True)
class Options:
    """The options of ``ftsupervise run``. Times are in seconds."""

    rundir: RunDir
    command: tuple[str, ...]
    name: str
    launched: str = ""  # the token of the launch whose job this is; "" in a script of one's own
    forward: str = "auto"  # the warning signal: "auto", "always" or "never"; the file is written in any case
    warning: int = signal.SIGUSR1  # before the end of the job, by Slurm
    lead: float | None = None  # that long before it; None: not known
    grace: float | None = default("grace")  # between our passing on a SIGTERM and SIGKILL; None: by Slurm's KillWait
    space_wait: float = default("space_wait")  # for a full disk, before an attempt and after the last one
    stop_within: float = default("stop_within")  # for a command to stop after the kill switch was raised
    look_every: float = 1.0  # between two checks of the kill switch and the fence
    checkpoints: str | None = None  # folder for them, unless the environment names one; None: in the run directory
    snapshot_copies: float = default("snapshot_copies")  # share of a node's cores; 0: none
    torn: str = default("torn")  # "set-aside" or "tell": what becomes of a checkpoint whose save was cut off
    retain: str = "off"  # "on": what checkpoints.retain does not keep is removed while the run trains
    distributed: str = default("distributed")  # "auto" or "never": the names that torch.distributed reads
    resume: str = ""  # words for a command that has a checkpoint to go on from, with {checkpoint}; "": none
    finished_by: str = "mark"  # what an exit with 0 means that no guard explains: "ask", "exit 0" or "mark"
    heartbeat_log: str = ""  # the regular expression that finds steps in a log; "": none is read
    heartbeat_file: Path | None = None  # that log, or without one a file that the command touches
    price: float | None = None  # of a GPU for an hour
    observe: tuple[str, ...] = ()  # decisions that are only told, unless a person has said otherwise since
    warm: WarmSettings = field(default_factory=WarmSettings)
    guard: Mapping[str, str] = field(default_factory=dict)  # POLL, MEMORY, STOP_BEFORE, RUN_FOR, VERIFY
    budgets: Budgets = field(default_factory=Budgets)
    care: NodePolicy = field(default_factory=NodePolicy)
    hang: HangLimits | None = field(default_factory=HangLimits)  # None: hangs are not detected
    end_hung: bool = False  # end a hung command; otherwise it is only reported


def options_of(rundir: RunDir, command: tuple[str, ...], name: str, values: Mapping[str, Any]) -> Options:
    """Return the options from ``values`` by parameter (``config/supervisor.py``), as the flags give them; None: not given."""
    parts: dict[str, dict[str, Any]] = {"": {}, "hang": {}, "budgets": {}, "care": {}, "guard": {}}
    for setting in SETTINGS:
        part, _, word = setting.value.rpartition(".")
        if values[setting.parameter] is not None:
            parts[part][word] = values[setting.parameter]
    if "warning" in parts[""]:
        parts[""]["warning"], parts[""]["lead"] = parts[""]["warning"]
    told = parts[""].get("warning", signal.SIGUSR1)
    if "heartbeat_file" in parts[""]:
        parts[""]["heartbeat_file"] = Path(parts[""]["heartbeat_file"]).expanduser().absolute()
    hang, care, budgets = parts["hang"], parts["care"], Budgets(**parts["budgets"])
    if "directory" in care:
        care["directory"] = Path(care["directory"]).expanduser().absolute()
    return Options(
        rundir,
        command,
        name,
        **parts[""],
        budgets=budgets,
        care=NodePolicy(**care),
        hang=None if hang.get("floor") == "off" else HangLimits(**hang),
        end_hung="floor" in hang or budgets.in_place > 0,
        guard={
            **({"SIGNAL": signal_name(told)} if told != signal.SIGUSR1 else {}),
            **{key: str(value) for key, value in parts["guard"].items()},
            **({"OBSERVE": ",".join(parts[""]["observe"])} if parts[""].get("observe") else {}),
            "QUARANTINE_AFTER": str(budgets.set_aside_after),
            "LOSS_BACK": str(budgets.loss_back),
        },
    )
