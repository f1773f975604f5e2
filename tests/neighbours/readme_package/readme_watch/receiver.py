"""Each message is a file in a folder: ``alerts: {receivers: [{spool: {folder: spool}}]}``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ftsupervise.alerts.receivers import TryLater
from ftsupervise.alerts.wording import Parcel
from ftsupervise.config.fields import Strict


class Settings(Strict):
    """The section ``spool`` of a receiver."""

    folder: Path
    suffix: Literal["txt", "md"] = "txt"


def send(parcel: Parcel, settings: Settings) -> dict[str, str]:
    page = settings.folder / f"{parcel.id}.{settings.suffix}"
    try:
        page.write_text(parcel.title + "\n")
    except OSError as error:
        raise TryLater(f"{page}: {error.strerror}") from None
    return {"page": page.name}
