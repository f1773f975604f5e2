"""The watchdogs, one file each. A new one is a file and a line here (and its section in ``config/watchdogs.py``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ftsupervise.watch import Check

# As people type them. With underscores each is a module here, and a section of the configuration's ``watch``.
WATCHDOGS = (
    "is-running",
    "brake",
    "recovery",
    "watchers",
    "hang",
    "disk",
    "memory",
    "gpu",
    "checkpoints",
    "throughput",
    "loss",
    "exec",
)


def load_watchdog(name: str) -> Check:
    return cast("Check", import_module(f"{__name__}.{name.replace('-', '_')}").check)
