"""The page of an attempt that found checkpoints whose save was cut off (``checkpoints/torn.py``)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import TornSave

_PAGE = "torn.json"


class _TornPage(NamedTuple):
    torn: Annotated[tuple[TornSave, ...], 100] = ()


def write_torn(folder: Path, torn: Sequence[TornSave]) -> None:
    """Write which checkpoints were torn when the attempt of ``folder`` began. Raises OSError."""
    write_json(folder / _PAGE, _TornPage(tuple(torn)), sync=False)


def read_torn(folder: Path) -> tuple[TornSave, ...]:
    """Return them; () where there were none, or the page cannot be read."""
    if not os.path.lexists(folder / _PAGE):
        return ()
    try:
        found = read_record(_TornPage, folder / _PAGE)
    except (OSError, ValueError):
        return ()
    return () if found is None else found.torn
