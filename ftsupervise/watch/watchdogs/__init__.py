"""The watchdogs, one file each. A new one is a file and a line here (and its section in ``config/watchdogs.py``).

Other packages bring theirs by an entry point: those stand behind ours, and none of them can cost a run the findings of the
others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ftsupervise.errors import PluginUnusable
from ftsupervise.findings import Finding
from ftsupervise.host import plugins

if TYPE_CHECKING:
    from ftsupervise.config.plugged import PluggedWatchdog
    from ftsupervise.config.watchdogs import Watch
    from ftsupervise.watch import Check, Look

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
    "straggler",
    "loss",
    "exec",
)


PLUGIN_WITHIN = 60.0  # seconds for one check by another package's watchdog, which has no other bound


def load_watchdog(name: str) -> Check:
    """Return its function. That of another package is imported when it is called, and raises PluginUnusable then."""
    if name not in WATCHDOGS:
        return partial(_check_by_plugin, name)
    return cast("Check", import_module(f"{__name__}.{name.replace('-', '_')}").check)


def names_of(watch: Watch) -> tuple[str, ...]:
    """Return every watchdog that ``watch`` may have on: ours, and those of other packages that it names."""
    return (*WATCHDOGS, *(key.replace("_", "-") for key in watch.model_extra or ()))


def is_watchdog(name: str) -> bool:
    """Return whether a watchdog is called so, ours or an installed package's. Raises PluginUnusable where two bring it."""
    return name in WATCHDOGS or plugins.find(plugins.WATCHDOGS, name) is not None


def installed() -> tuple[str, ...]:
    """Return the names of all watchdogs, those of installed packages too."""
    return (*WATCHDOGS, *(one.name for one in plugins.installed(plugins.WATCHDOGS)))


def _check_by_plugin(name: str, look: Look, settings: PluggedWatchdog) -> Iterable[Finding]:
    """Call another package's watchdog: bounded, with a memory of its own until it has ended well."""
    from ftsupervise.config.plugged import as_used, module_of
    from ftsupervise.host.in_time import in_time

    module = module_of(plugins.WATCHDOGS, name)
    used, memory = as_used(plugins.WATCHDOGS, name, settings), deepcopy(look.memory)
    found = in_time(lambda: _found(module.check, replace(look, memory=memory), used), PLUGIN_WITHIN)
    if found is None:
        raise PluginUnusable(f"the {name} watchdog did not end within {PLUGIN_WITHIN:.0f} s")
    look.memory.clear()
    look.memory.update(memory)
    return found


def _found(check: Check, look: Look, settings: Any) -> list[Finding]:
    try:
        found = list(check(look, settings))
    except SystemExit as error:  # it would end the tick
        raise PluginUnusable(f"the {look.watchdog} watchdog wanted to exit ({error})") from error
    if wrong := next((one for one in found if not isinstance(one, Finding)), None):
        raise PluginUnusable(f"the {look.watchdog} watchdog gave {type(wrong).__name__}, and not a Finding")
    json.dumps(look.memory)
    return found
