"""Checkpoint managers that people use, as rows of ``benchmarks/checkpoints.py`` and ``snapshots.py``: each saves the same
tensors into a folder, and loads them again.

Neither makes its files durable, for both keep copies on other nodes instead; so each row syncs them by hand. Both are made for
GPUs. What is replaced here to run on a processor alone is said beside the row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = dict[str, Callable[[Path], object]]


def peers(state: dict[str, Any]) -> tuple[Rows, list[str]]:
    """The rows of those that are installed and run, and a line for each of the others."""
    rows: Rows = {}
    missing = []
    for name, make in (("NVRx LocalCheckpointManager", nvrx), ("ML Flashpoint", flashpoint)):
        try:
            row = make(state)
            trial = Path(f"/var/tmp/ftsupervise-peer-{os.getpid()}")
            row(trial)
            shutil.rmtree(trial, ignore_errors=True)
            rows[f"{name}, fsync"] = row
        except ImportError as error:
            missing.append(f"{name}: not installed ({error})")
        except Exception as error:  # it does not run here: the others do
            missing.append(f"{name}: does not run here ({type(error).__name__}: {error})")
    return rows, missing


def sync_all(folder: Path) -> None:
    for here, _, names in os.walk(folder):
        for path in (*(Path(here, name) for name in names), Path(here)):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def loading(state: dict[str, Any], place: Path) -> tuple[dict[str, Callable[[], dict[str, Any]]], list[str]]:
    """The loads of what was saved into ``place``, and a line for each that is not there."""
    try:
        nvrx(state)(place)
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    except ImportError as error:
        return {}, [f"NVRx LocalCheckpointManager: not installed ({error})"]
    except Exception as error:  # it does not run here: the others do
        return {}, [f"NVRx LocalCheckpointManager: does not run here ({type(error).__name__}: {error})"]

    def load() -> dict[str, Any]:
        manager = LocalCheckpointManager(str(place), session_id="benchmark")
        if manager.find_latest() != 1:
            raise RuntimeError("NVRx has found nothing")
        found: dict[str, Any] = manager.load()[0].state_dict
        return found

    return {"NVRx LocalCheckpointManager, copied": load}, []


def nvrx(state: dict[str, Any], *, sync: bool = True) -> Callable[[Path], object]:
    """nvidia-resiliency-ext asserts that tensors are on a GPU, so its state dict is made here without that, and copies them as
    it would from a GPU."""
    import torch
    import torch.distributed as dist
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
        dict_list_map_inplace,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class OnTheProcessor(BasicTensorAwareStateDict):
        def __init__(self, tensors: dict[str, Any]) -> None:
            self.state_dict, self._is_hollow = tensors, False

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            dict_list_map_inplace(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, self.state_dict)

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            return

    OnTheProcessor.__qualname__ = OnTheProcessor.__name__  # it is pickled by its name
    globals()[OnTheProcessor.__name__] = OnTheProcessor

    def row(target: Path) -> None:
        manager = LocalCheckpointManager(str(target), session_id="benchmark")
        manager.save(OnTheProcessor(dict(state)), 1, is_async=False)
        if sync:
            sync_all(target)

    return row


def flashpoint(state: dict[str, Any]) -> Callable[[Path], object]:
    """ml-flashpoint divides by the number of GPUs in its strategies, so its saver is called itself."""
    from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
    from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId, CheckpointObjectId
    from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver, ObjectWriteBucket
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    size = sum(one.nbytes for one in state.values()) + (8 << 20)
    saver = DefaultMLFlashpointCheckpointSaver(
        lambda: 0, lambda: 0, lambda: None, CheckpointObjectManager(), None, initial_buffer_size_bytes=size
    )

    def row(target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        container = CheckpointContainerId(f"{target}/step-1_ckpt")
        saver.initialize_checkpoint(container)
        items = [(WriteItem(MetadataIndex(name), WriteItemType.TENSOR), one) for name, one in state.items()]
        part = "__0_0_src0.distcp"
        bucket = ObjectWriteBucket(CheckpointObjectId.from_container(container, part), part, [], items)
        saver.write_data(container, [bucket], replicate_after_write=False)
        waited = saver.finalize_checkpoint(container)
        if waited is not None:
            waited.wait()
        sync_all(target)

    return row
