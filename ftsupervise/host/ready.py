"""Waits until something can be read. ``select.select`` raises for a descriptor above 1023, and a supervisor of many may have
more."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    def fileno(self) -> int: ...


R = TypeVar("R", bound="int | HasFileno")


def readable(of: Iterable[R], seconds: float | None) -> list[R]:
    """Return those of ``of`` that can be read, or have ended, as soon as one can; none after ``seconds`` (None: it waits)."""
    poller, found = select.poll(), dict[int, R]()
    for one in of:
        fd = one if isinstance(one, int) else one.fileno()
        found[fd] = one
        poller.register(fd, select.POLLIN)
    events = poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
    return [found[fd] for fd, _ in events]
