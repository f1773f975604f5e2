"""ftsupervise keeps long training runs on Slurm clusters alive.

A training script imports the guard of its loop, and a notebook, a scheduler or a test the runs::

    from ftsupervise import Guard
    from ftsupervise import Run

What is imported for the guard is the standard library only, and of that little: a rank on a loaded file system should not pay
for what it never uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftsupervise.version import VERSION as __version__

if TYPE_CHECKING:
    from ftsupervise.errors import Error
    from ftsupervise.guard.guard import Guard
    from ftsupervise.guard.stop_reasons import Decision
    from ftsupervise.interface.run import Run

__all__ = ["Decision", "Error", "Guard", "Run", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("Guard", "Decision"):
        from ftsupervise import guard

        return getattr(guard, name)
    if name == "Run":
        from ftsupervise.interface.run import Run

        return Run
    if name == "Error":
        from ftsupervise.errors import Error

        return Error
    raise AttributeError(f"module 'ftsupervise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
