"""The manifest of a checkpoint: its files with sizes and digests, and what it is a checkpoint of.

A manifest lies in the checkpoint's own folder and is written last, so a folder with a manifest was whole once. Whether it still
is, verification says. Ranks that write in parallel leave one manifest each; rank 0 joins them.

    step-00000100/.ftsupervise/manifest.json       the whole checkpoint: written last, by rank 0
    step-00000100/.ftsupervise/rank-00003.json     the files that rank 3 wrote

The folder begins with a dot, so the loaders of torch, DeepSpeed, Megatron, Lightning and Hugging Face pass it by.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.rundir.records import Exact, read_record

FOLDER_NAME = ".ftsupervise"
MANIFEST = "manifest.json"
VERSION = 1
LIMIT = 256_000_000  # bytes of a manifest: a million files


class CheckpointLayout(str, Enum):
    """The program that wrote the folder, by what lies in it. Each has its own sign that it is complete."""

    DCP = "torch-dcp"  # torch.distributed.checkpoint: .metadata, written last
    DEEPSPEED = "deepspeed"  # `latest` beside it names the folder
    MEGATRON = "megatron"  # latest_checkpointed_iteration.txt beside it
    LIGHTNING = "lightning"  # *.ckpt, or a folder of a sharded strategy
    HUGGING_FACE = "hugging-face"  # checkpoint-N with trainer_state.json
    FILES = "files"  # anything else: complete when a manifest says so


class FileEntry(NamedTuple):
    """One file of a checkpoint."""

    path: Exact  # relative to the checkpoint's folder, with "/"
    size: int  # bytes
    digest: str  # hexadecimal


class Manifest(NamedTuple):
    """A checkpoint as it was committed."""

    step: int | None
    files: Annotated[tuple[FileEntry, ...], 1_000_000]  # sorted by path
    algorithm: str  # of the digests: "xxh3_128" or "crc32"
    layout: CheckpointLayout = CheckpointLayout.FILES
    world: int | None = None  # ranks that wrote it
    run: str = ""
    attempt: int | None = None
    host: str = ""
    user: str = ""
    at: datetime | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed; reported by the loop: the best K are kept by one of them
    version: int = VERSION

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


def manifest_of(checkpoint: Path) -> Path:
    return checkpoint / FOLDER_NAME / MANIFEST


def read_manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it has none. Raises ValueError for a damaged one, OSError."""
    return read_record(Manifest, manifest_of(checkpoint), limit=LIMIT, lenient=False)
