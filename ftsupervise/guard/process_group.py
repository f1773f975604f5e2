"""The ranks that torch.distributed knows of, found without importing it: a program that uses it has done so itself."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

from ftsupervise.rundir.paths import ENV_ATTEMPT

_PREFIX = "ftsupervise"
_OURS = ("TCPStore", "FileStore", "HashStore")  # torch's stores that can compare and set

_made: list[tuple[weakref.ref[Any], int]] = []  # the groups that agreements were made for, and how many


class ProcessGroup:
    """The default process group of torch.distributed, with ``world`` > 1 ranks. No reference to it or to its store is kept: a
    program may destroy it at any time."""

    def __init__(self, dist: Any, group: Any) -> None:
        self._dist, self._group = dist, weakref.ref(group)
        self.rank, self.world = int(dist.get_rank()), int(dist.get_world_size())

    @property
    def hosts_the_store(self) -> bool:
        """Return whether the store ends with this process."""
        return self.rank == 0 and not _agent_has_the_store()

    def store(self) -> Any:
        """Return its store. Raises LookupError where there is none any more."""
        group = self._group()
        if group is None or self._dist.group.WORLD is not group:
            raise LookupError("the process group is destroyed")
        return self._dist.distributed_c10d._get_default_store()

    def can_swap(self) -> bool:
        """Return whether it has a store that can compare and set, and that is this group's alone."""
        if _store_outlives_the_group():
            return False
        try:
            store = self.store()
            while isinstance(store, self._dist.PrefixStore):
                store = store.underlying_store
        except Exception:  # whatever a version or a backend raises: mpi has no store
            return False
        return type(store).__name__ in _OURS or any("compare_set" in vars(one) for one in type(store).__mro__[:-3])

    def register(self) -> StoreRegister:
        """Return a new register, the same for all ranks, if each makes as many for this group as the others."""
        return StoreRegister(self, _next_number(self._group))

    def maximum(self, *values: int) -> list[int]:
        """Return the maximum over all ranks of each value; all ranks call it at the same place. Raises what torch does."""
        import torch

        group = self._group()
        if group is None:
            raise LookupError("the process group is destroyed")
        kinds = [device.type for device in group._device_types]
        device = "cpu" if "cpu" in kinds else kinds[0]
        box = torch.tensor(values, dtype=torch.int64, device=device)
        self._dist.all_reduce(box, op=self._dist.ReduceOp.MAX)
        return [int(value) for value in box.tolist()]


class StoreRegister:
    """The value that the ranks of ``group`` share, in the group's own store."""

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self.world = group.world
        self._group = group
        self._prefix = f"{_PREFIX}/{os.environ.get(ENV_ATTEMPT, '')}/{number}"

    def swap(self, expected: str, desired: str) -> str:
        found = self._group.store().compare_set(f"{self._prefix}/agreed", expected, desired)
        return bytes(found).decode("utf-8", "replace")

    def left(self, more: int) -> int:
        return int(self._group.store().add(f"{self._prefix}/left", more))


def find_process_group() -> ProcessGroup | None:
    """Return the program's group, if it has initialised one of more than one rank by now; never raises."""
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return None
    try:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
            return None
        if dist.get_backend() == "fake":
            return None
        return ProcessGroup(dist, dist.group.WORLD)
    except Exception:  # one that is half imported, or taken down in another thread
        return None


def _next_number(group: weakref.ref[Any]) -> int:
    for index, (known, number) in enumerate(_made):
        if known() is group():
            _made[index] = (known, number + 1)
            return number + 1
    _made[:] = [one for one in _made if one[0]() is not None]
    _made.append((group, 1))
    return 1


def _store_outlives_the_group() -> bool:
    """Return whether the store outlives the group.

    torchrun's agents may keep one store over all their restarts, with what former groups agreed on. Nothing tells the
    ranks of one group from those of another there: the agents do not count restarts alike, and not those when a node is
    added.
    """
    return _agent_has_the_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _agent_has_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
