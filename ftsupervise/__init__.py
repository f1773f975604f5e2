"""ftsupervise keeps long training runs on Slurm clusters alive.

This module is all a training script imports::

    from ftsupervise import Guard

It loads the standard library only, and of that little: a rank on a loaded file system should not pay for
command-line tools it never uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftsupervise.version import VERSION as __version__

if TYPE_CHECKING:
    from ftsupervise.guard.guard import Guard
    from ftsupervise.guard.stop_reasons import Decision

__all__ = ["Decision", "Guard", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("Guard", "Decision"):
        from ftsupervise import guard

        return getattr(guard, name)
    raise AttributeError(f"module 'ftsupervise' has no attribute {name!r}")
