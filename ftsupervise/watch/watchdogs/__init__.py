"""The watchdogs, one file each. A new one is a file and a line here (and its section in ``config/watchdogs.py``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ftsupervise.watch import Watchdog

# name as people type it -> module and class; its settings are ``watch.NAME`` with underscores
WATCHDOGS: dict[str, tuple[str, str]] = {
    "is-running": ("is_running", "IsRunning"),
    "brake": ("brake", "Brake"),
    "recovery": ("recovery", "Recovery"),
    "watchers": ("watchers", "Watchers"),
    "hang": ("hang", "Hang"),
    "disk": ("disk", "Disk"),
    "memory": ("memory", "Memory"),
    "gpu": ("gpu", "Gpu"),
    "checkpoints": ("checkpoints", "Checkpoints"),
    "throughput": ("throughput", "Throughput"),
    "loss": ("loss", "Loss"),
    "exec": ("exec", "Exec"),
}


def load_watchdog(name: str) -> Watchdog:
    module, attribute = WATCHDOGS[name]
    return cast("Watchdog", getattr(import_module(f"{__name__}.{module}"), attribute)())
