"""Imports click without two modules that it rarely needs: ``inspect`` and ``uuid`` take a third of its start.

While click is imported, stand-ins have the names of the two. They hand every question on to the real module, which is loaded by
the first one; nobody but click ever sees them. Import this before anything that imports click.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_LATER = ("inspect", "uuid")
_ANNOTATIONS = ("UUID",)  # which click names in annotations alone while it is imported


class LaterModule(ModuleType):
    """A module that is loaded when it is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:  # click is still being imported
            if name in _ANNOTATIONS:
                return type(name, (), {})
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def clean_doc(text: str) -> str:
    """``inspect.cleandoc``, which click asks about the help of each option."""
    if "\n" in text:
        from inspect import cleandoc

        return cleandoc(text)
    return text.expandtabs().lstrip()


def import_click() -> None:
    made = {name: LaterModule(name) for name in _LATER if name not in sys.modules}
    sys.modules.update(made)
    try:
        import click  # noqa: F401
    finally:
        for name, module in made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    if "inspect" in made:
        vars(made["inspect"])["cleandoc"] = clean_doc


if "click" not in sys.modules:
    import_click()
