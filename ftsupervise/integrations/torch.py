"""Keeps torch's values in snapshots and checkpoints: tensors are copied as they are, without pickle, each into a view
over its place.

The guard loads this module when the program has loaded torch and asks for a snapshot. What it copies takes about as
long as one memcpy of the same bytes; ``torch.save`` into the same memory takes 7 to 11 times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch

from ftsupervise.snapshots.state import CannotKeep, StoredArray
from ftsupervise.snapshots.wait import LARGE, Copies

_NAMES = {one: str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
_TYPES = {name: one for one, name in _NAMES.items()}
_KEPT = (torch.Tensor, torch.nn.Parameter)  # and none of their subclasses, which may be more than their bytes


class TorchArrays:
    """Dense tensors of any device, type and memory order. See ``memory_state.Arrays``."""

    kind = "torch"

    def owns(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def describe(self, value: torch.Tensor) -> StoredArray:
        if type(value) not in _KEPT or value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CannotKeep(value)
        size = value.numel() * value.element_size()
        return StoredArray(self.kind, _NAMES[value.dtype], tuple(value.shape), _dense(value), size)

    def memory(self, value: torch.Tensor) -> Hashable:
        if not value.numel():
            return id(value)
        return value.data_ptr(), value.dtype, value.shape, value.stride()

    def view(self, buffer: Any, stored: StoredArray) -> torch.Tensor:
        dtype = _TYPES[stored.dtype]
        if not stored.size:
            return torch.empty(stored.shape, dtype=dtype)
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=stored.size, offset=stored.offset)
        return raw.view(dtype).as_strided(stored.shape, stored.strides)

    def address(self, value: torch.Tensor, stored: StoredArray) -> int:
        plain = value.is_cpu and not value.is_conj() and not value.is_neg() and value.stride() == stored.strides
        return value.data_ptr() if plain else 0

    def copy(self, views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(views), list(values))

    def clone(self, view: torch.Tensor, stored: StoredArray, copies: Copies) -> torch.Tensor:
        if stored.size < LARGE:
            return view.clone(memory_format=torch.preserve_format)
        made = torch.empty_strided(stored.shape, stored.strides, dtype=view.dtype)
        copies.add(made.data_ptr(), view.data_ptr(), stored.size, made, view)
        return made

    def load(self, live: Any, saved: torch.Tensor, copies: Copies) -> bool:
        if not self.owns(live) or live.shape != saved.shape or live.dtype != saved.dtype:
            return False
        _copy_in_turn(live, saved, copies)
        return True

    def word(self, value: object) -> tuple[str, str] | None:
        if isinstance(value, torch.dtype):
            return "dtype", _NAMES[value]
        if isinstance(value, torch.device):
            return "device", str(value)
        if isinstance(value, torch.Size):
            return "size", ",".join(map(str, value))
        return None

    def from_word(self, kind: str, text: str) -> Any:
        try:
            if kind == "dtype":
                return _TYPES[text]
            return torch.device(text) if kind == "device" else torch.Size(int(part) for part in text.split(",") if part)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"the description of a snapshot is damaged: {error}") from None


class ShardArrays(TorchArrays):
    """The part of a distributed tensor (DTensor) that this rank holds, as FSDP2 and tensor parallelism shard them."""

    kind = "torch-shard"

    def owns(self, value: object) -> bool:
        return _is_sharded(value)

    def describe(self, value: torch.Tensor) -> StoredArray:
        return super().describe(_local(value))._replace(kind=self.kind)

    def memory(self, value: torch.Tensor) -> Hashable:
        return super().memory(_local(value))

    def address(self, value: torch.Tensor, stored: StoredArray) -> int:
        return super().address(_local(value), stored)

    def copy(self, views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        super().copy(views, [_local(value) for value in values])

    def load(self, live: Any, saved: torch.Tensor, copies: Copies) -> bool:
        return _is_sharded(live) and super().load(_local(live), saved, copies)

    def word(self, value: object) -> tuple[str, str] | None:
        return None


def _is_sharded(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a program that has such tensors has loaded it
    return module is not None and isinstance(value, module.DTensor)


def _local(value: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: all of it, unless it is sharded."""
    with torch.no_grad():
        return value.to_local() if _is_sharded(value) else value


def _copied_later(live: torch.Tensor, saved: torch.Tensor, copies: Copies) -> bool:
    """Add the copy of ``saved``, dense and in this process's memory, to ``copies``. False: ``live`` is small, lies on another
    device or in another order."""
    plain = live.is_cpu and not live.is_conj() and not live.is_neg() and live.stride() == saved.stride()
    if not plain or saved.nbytes < LARGE:
        return False
    copies.add(live.data_ptr(), saved.data_ptr(), saved.nbytes, live, saved)
    return True


def _copy_in_turn(live: torch.Tensor, saved: torch.Tensor, copies: Copies) -> None:
    def copy() -> None:
        with torch.no_grad():
            live.copy_(saved)

    alike = live.shape == saved.shape and live.dtype == saved.dtype
    if not (alike and _copied_later(live, saved, copies)):
        copies.later(saved.data_ptr(), saved.nbytes, copy)


def _dense(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``torch.empty_like(value)``: its own where it fills its memory without holes, as
    channels_last does.
    """
    if value.is_contiguous():
        return tuple(value.stride())
    return tuple(torch.empty_like(value, device="meta", memory_format=torch.preserve_format).stride())


class TorchFramework:
    """torch's values in a snapshot besides tensors, and how its objects are loaded."""

    name = "torch"
    arrays = (ShardArrays(), TorchArrays())

    def rng_state(self) -> dict[str, Any]:
        """Return the generators of the processor and of each GPU in use."""
        found: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def set_rng_state(self, saved: Mapping[str, Any]) -> None:
        torch.set_rng_state(saved["cpu"])
        if "cuda" in saved and torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), saved["cuda"]):
                torch.cuda.set_rng_state(state, device)

    def seed(self, seed: int) -> None:
        """Seed the generators of the processor and of all GPUs."""
        torch.manual_seed(seed)

    def misfits(self, target: object, saved: Mapping[str, tuple[tuple[int, ...], str] | None]) -> dict[str, str]:
        """Return the tensors of a module that are not as they were saved: name -> a clause. ``saved``: shapes and types."""
        if not isinstance(target, torch.nn.Module):
            return {}
        live = {
            key: (tuple(_local(one).shape), _NAMES[one.dtype]) if isinstance(one, torch.Tensor) else None
            for key, one in target.state_dict().items()
        }
        found = {
            key: f"{key!r} is in {'the loop' if key in live else 'what was saved'} only"
            for key in sorted(live.keys() ^ saved.keys())
        }
        for key, one in live.items():
            other = saved.get(key)
            if one is None or not isinstance(other, tuple) or one == other:
                continue
            if one[0] != other[0]:
                found[key] = f"{key!r} has the shape {one[0]} in the loop, and {other[0]} in what was saved"
            else:
                found[key] = f"{key!r} has the type {one[1]} in the loop, and {other[1]} in what was saved"
        return found

    def lenient(self, target: object, state: Any) -> Callable[[Any], object] | None:
        """Take what does not fit the shapes of ``target`` out of ``state``; return how the rest is loaded (None: as ever)."""
        if isinstance(target, torch.nn.Module):
            for key, live in target.state_dict().items():
                if isinstance(live, torch.Tensor) and key in state and state[key].shape != _local(live).shape:
                    del state[key]
            return partial(target.load_state_dict)
        if isinstance(target, torch.optim.Optimizer):
            parameters = [_local(one) for group in target.param_groups for one in group["params"]]
            for index, entries in list(state["state"].items()):
                if index < len(parameters) and any(_other_shape(parameters[index], one) for one in entries.values()):
                    del state["state"][index]
        return None

    def copies(self, target: object) -> bool:
        """Return whether its ``load_state_dict`` copies the tensors that it is given.

        Then it is given those in the slot themselves.
        """
        return isinstance(target, torch.nn.Module)

    def own(self, target: object) -> frozenset[str]:
        """Return the names whose tensors a module copies when it is loaded; others it may keep as they are."""
        assert isinstance(target, torch.nn.Module)
        parameters = (name for name, _ in target.named_parameters(remove_duplicate=False))
        buffers = (name for name, _ in target.named_buffers(remove_duplicate=False))
        return frozenset((*parameters, *buffers))

    def adopt(self, target: object, state: Any, copies: Copies) -> None:
        """Turn the saved parts of sharded tensors into what ``load_state_dict`` of ``target`` takes. What it would only copy is
        added to ``copies``, and stands for itself in ``state``."""
        if isinstance(target, torch.nn.Module):
            plain = _only_copied(target)
            for key, live in target.state_dict().items():
                saved = state.get(key)
                if _is_sharded(live) and key in state:
                    _copy_in_turn(_local(live), state[key], copies)
                    state[key] = live
                elif key in plain and type(live) is type(saved) is torch.Tensor:
                    alike = live.shape == saved.shape and live.dtype == saved.dtype
                    if alike and _copied_later(live, saved, copies):
                        state[key] = live
        elif isinstance(target, torch.optim.Optimizer):
            parameters = [one for group in target.param_groups for one in group["params"]]
            for index, entries in state["state"].items():
                if _is_sharded(parameters[index]):
                    entries.update({name: _like(parameters[index], one) for name, one in entries.items()})

    def is_bound(self, target: object, state: Any, own: Set[int]) -> bool:
        """Return whether a rank kept a part of ``target`` for itself.

        ``state`` has numbers in place of the arrays; ``own`` are those that differ from rank 0's. Buffers may differ:
        DistributedDataParallel hands on those of rank 0.
        """
        if isinstance(target, torch.nn.Module):
            return any(state.get(name) in own for name, _ in target.named_parameters(remove_duplicate=False))
        return isinstance(target, torch.optim.Optimizer) and bool(own)

    def forget_gradients(self, target: object) -> None:
        """Drop the gradients of a warm-up pass, which belong to no step."""
        if isinstance(target, torch.nn.Module):
            target.zero_grad(set_to_none=True)

    def better(self, target: object) -> str:
        """Return what to name in place of ``target``, which has no state; "" when torch knows nothing better."""
        if isinstance(target, torch.utils.data.DataLoader):
            return "Batches(loader) of ftsupervise.integrations.torch_data keeps the place in the data"
        return ""

    # ------------------------------------------------------------------------------------------------------- between ranks

    def rank_and_world(self) -> tuple[int, int] | None:
        """Return the rank and the size of the default process group; None where there is none."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def from_rank_0(self, value: Any) -> Any:
        """Return what rank 0 gave, on every rank."""
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def of_all(self, value: Any) -> list[Any]:
        """Return what each rank gave, by rank. When it returns, all have come here."""
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, value)
        return found


def _only_copied(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the tensors with which ``load_state_dict`` does nothing but to copy them."""
    usual, found = torch.nn.Module, set[str]()
    for name, one in module.named_modules():
        if one._load_state_dict_pre_hooks or type(one).load_state_dict is not usual.load_state_dict:
            return frozenset()
        if type(one)._load_from_state_dict is usual._load_from_state_dict:
            found.update(f"{name}.{key}" if name else key for key in (*one._parameters, *one._buffers))
    return frozenset(found)


def _other_shape(parameter: Any, moment: Any) -> bool:
    """Return whether a moment is that of a parameter of another shape."""
    return isinstance(moment, torch.Tensor) and moment.dim() == parameter.dim() > 0 and moment.shape != parameter.shape


def _like(parameter: Any, value: Any) -> Any:
    """Return a moment of a sharded parameter, sharded as it is; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != _local(parameter).shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return type(parameter.data).from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


FRAMEWORK = TorchFramework()
