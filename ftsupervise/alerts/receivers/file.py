"""Append messages to a file, whole and in one write each: for tests, and for ``tail -f``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftsupervise.alerts.receivers import TryLater
from ftsupervise.alerts.wording import Parcel, render, stamp
from ftsupervise.host import files
from ftsupervise.host.in_time import in_time

if TYPE_CHECKING:
    from pathlib import Path

    from ftsupervise.config.alerting import File

_WITHIN = 10.0  # seconds


def send(parcel: Parcel, settings: File) -> dict[str, str]:
    text = render("alert.text.j2", parcel.alone)
    head = f"==== {stamp(parcel.message.written)}  {parcel.title}  key {parcel.message.id}\n"
    data = f"{head}{text.strip()}\n\n".encode("utf-8", "replace")
    try:
        written = in_time(lambda: _append(settings.path, data), _WITHIN)
    except OSError as error:
        raise TryLater(f"{settings.path}: {error.strerror or error}") from None
    if written is None:
        raise TryLater(f"{settings.path} does not answer within {_WITHIN:.0f} s: its file system hangs")
    if written != len(data):
        raise TryLater(f"{settings.path}: only a part could be written")
    return {}


def _append(path: Path, data: bytes) -> int:
    """Return how many bytes were written. Never into a FIFO or a file of another account: they would reach no person."""
    fd = files.open_append(path)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
