"""Append messages to a file, whole and in one write each: for tests, and for ``tail -f``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftsupervise.alerts.receivers import Parcel, TryLater
from ftsupervise.alerts.wording import render, stamp, view
from ftsupervise.host import files

if TYPE_CHECKING:
    from ftsupervise.config.alerting import File


def send(parcel: Parcel, settings: File) -> dict[str, str]:
    seen = view(parcel.message, parcel.now)
    text = render("alert.text.j2", seen, own=parcel.templates)
    head = f"==== {stamp(parcel.message.created)}  {seen.title}  key {parcel.message.id}\n"
    try:
        # never a FIFO or a file of another account: a message written there would reach no person
        fd = files.open_append(settings.path)
        try:
            data = f"{head}{text.strip()}\n\n".encode("utf-8", "replace")
            if os.write(fd, data) != len(data):
                raise TryLater(f"{settings.path}: only a part could be written")
        finally:
            os.close(fd)
    except OSError as error:
        raise TryLater(f"{settings.path}: {error.strerror or error}") from None
    return {}
