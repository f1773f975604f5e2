"""Generations of the journal that nobody of us wrote: whole, with a checksum that matches, and something wrong in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ftsupervise.alerts.outbox import JournalState
from ftsupervise.rundir.records import encode


def generation(state: JournalState | str, number: Any, base: Any = None) -> bytes:
    """The bytes of generation ``number``. ``state`` as text and ``base`` as text go in as they are."""
    text = state if isinstance(state, str) else json.dumps(encode(state))
    data = text.encode()
    made_from = "1" if base is None else base
    digest = hashlib.sha256(data).hexdigest()
    head = f'{{"format": 1, "generation": {number}, "base": {made_from}, "sha256": "{digest}"'
    return head.encode() + b', "state": ' + data + b"}\n"


def lay(directory: Path, name: str, content: bytes) -> Path:
    path = directory / f"{name}.json"
    path.write_bytes(content)
    return path
