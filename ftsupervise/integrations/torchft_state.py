"""Takes and loads the state of a group: a group that joins gets it from a healthy one, and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from ftsupervise.integrations.torchft_package import torch


class Counters:
    """This is torchft's own state: how many steps and batches are committed."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, int]:
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._manager.load_state_dict(state)


class Registered:
    """This is state that something else has registered (DiLoCo: its outer optimizer, and the weights of the last
    synchronisation)."""

    def __init__(self, manager: Any, name: str) -> None:
        self.state_dict = manager._user_state_dicts[name]
        self.load_state_dict = manager._load_state_dict_fns[name]


def functions_of(name: str, one: Any) -> tuple[Callable[[Any], object], Callable[[], Any]]:
    """Return the functions that load it and take it."""
    if isinstance(one, dict):

        def load(state: dict[Any, Any]) -> None:
            one.clear()
            one.update(state)

        return load, lambda: dict(one)
    if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
        return one.load_state_dict, one.state_dict
    raise TypeError(f"ReplicaManager({name}=…): {type(one).__name__} has no state_dict; keep such values in a dict")


def is_sharded(state: Iterable[Any]) -> bool:
    """Return whether it holds a model of FSDP2. Its ``state_dict`` frees the weights that a running pass works with."""
    kind = getattr(import_module("torch.distributed.fsdp"), "FSDPModule", ())
    modules = (part for one in state if isinstance(one, torch.nn.Module) for part in one.modules())
    return any(isinstance(part, kind) for part in modules)
