"""Lets the data loaders of torch sleep while the file ``SLOW_LOADER`` is there: a storage that does not answer.

An interpreter with this folder in its ``PYTHONPATH`` imports it by itself, so that no file of a training script is changed.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_FETCH = "torch.utils.data._utils.fetch"


class Slow(MetaPathFinder):
    """Finds the module that asks a data set for a batch, in the process that trains or in a worker, and changes it."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name == _FETCH else None
        if found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            fetcher: Any = next(it for name, it in vars(module).items() if name.endswith("MapDatasetFetcher"))
            fetch = fetcher.fetch

            def fetch_late(self: object, index: object) -> object:
                while Path(os.environ["SLOW_LOADER"]).exists():
                    time.sleep(1)
                return fetch(self, index)

            fetcher.fetch = fetch_late

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Slow())
