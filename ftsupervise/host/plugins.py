"""Watchdogs and receivers of other packages, by entry points: which are installed, and their modules.

A plug-in runs as the account that watches or notifies, so only a package of this interpreter's own site-packages counts. A
folder on PYTHONPATH and the current directory bring none, and no module from there stands in for a package's own. Nothing
is looked up before a name is asked for that is none of ours.
"""

from __future__ import annotations

import json
import site
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import PluginUnusable
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from importlib.metadata import Distribution  # 10 ms, which only a start pays that asks for a name

WATCHDOGS, RECEIVERS = "ftsupervise.watchdogs", "ftsupervise.receivers"
_WHAT = {WATCHDOGS: "watchdog", RECEIVERS: "receiver"}


class EntryPlugin(NamedTuple):
    """An entry point of an installed package."""

    group: str
    name: str  # as people type it: with "-"
    package: str  # "name version"
    module: str
    source: str = ""  # of a package that was installed to be edited: the folder it lies in

    def __str__(self) -> str:
        return f"the {_WHAT[self.group]} {self.name} of the package {self.package}"


@cache
def installed(group: str) -> tuple[EntryPlugin, ...]:
    """Return every plug-in of ``group``, by name."""
    from importlib.metadata import distributions

    found = {
        EntryPlugin(
            group, entry.name.replace("_", "-"), f"{one.metadata['Name']} {one.version}", entry.module, _source(one)
        )
        for one in distributions(path=list(_folders()))
        for entry in one.entry_points.select(group=group)
    }
    return tuple(sorted(found))


def find(group: str, name: str) -> EntryPlugin | None:
    """Return the plug-in called ``name`` ("_" is "-"), None where no package brings it. Raises PluginUnusable where two do."""
    found = [one for one in installed(group) if one.name == name.replace("_", "-")]
    if len(found) > 1:
        packages = " and ".join(one.package for one in found)
        raise PluginUnusable(
            f"the {_WHAT[group]} {name} is brought by {packages}", hint="uninstall all of these packages but one"
        )
    return found[0] if found else None


def load(plugin: EntryPlugin) -> ModuleType:
    """Import the module of a plug-in. Raises PluginUnusable with a sentence, whatever the module does."""
    from importlib.util import find_spec

    top = plugin.module.partition(".")[0]
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise _unusable(plugin, f"there is no module {top}")
    for place in spec.submodule_search_locations or [spec.origin or ""]:
        if not any(place.startswith(f"{folder}/") for folder in (*_folders(), *filter(None, [plugin.source]))):
            raise _unusable(plugin, f"its module {top} would come from {place}, and not from the package")
    try:
        return import_module(plugin.module)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise _unusable(plugin, f"{type(error).__name__}: {error}") from error


def _unusable(plugin: EntryPlugin, why: str) -> PluginUnusable:
    said = printable(" ".join(f"{plugin} cannot be loaded: {why}".split()), 500)
    return PluginUnusable(said, hint=f"repair or uninstall the package; this Python is {sys.executable}")


def _folders() -> Iterator[str]:
    """Yield the folders of installed packages: this interpreter's own, and the account's where ftsupervise lies there too."""
    account, ours = site.getusersitepackages(), str(Path(__file__).parents[2])
    for folder in (*site.getsitepackages(), *([account] if account == ours else [])):
        if folder in sys.path:
            yield folder


def _source(one: Distribution) -> str:
    """Return the folder of a package that was installed to be edited, "" for another. Source: PEP 610."""
    from urllib.parse import unquote, urlsplit

    try:
        page = json.loads(one.read_text("direct_url.json") or "{}")
        editable = page.get("dir_info", {}).get("editable") is True
        return unquote(urlsplit(page["url"]).path).rstrip("/") if editable else ""
    except (ValueError, KeyError, AttributeError, TypeError):
        return ""
