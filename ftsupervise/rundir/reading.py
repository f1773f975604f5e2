"""Values out of pages that somebody else may have written: what is damaged or hostile is None or a ValueError, and small.

JSON allows numbers of any length, NaN, infinities by way of 1e309, a thousand brackets, half a surrogate pair; ISO 8601 allows
times that cannot be compared with now. None of that goes further than here. Standard library only: the guard uses this.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from math import isfinite

from ftsupervise.printable import printable

DEEPEST = 20  # brackets within brackets; ours have four at most
LONGEST = 300  # characters of a text that is shown
_DIGITS = 18  # of a whole number: it fits into 64 bits
_NUMBER = re.compile(rf"[0-9]{{1,{_DIGITS}}}")
_LONE = re.compile("[\ud800-\udfff]")
_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_LATEST = datetime(2900, 1, 1, tzinfo=timezone.utc)  # far from where sums of times overflow


def parse_object(raw: bytes) -> dict[str, object]:
    """The JSON object in ``raw``. Raises ValueError for anything else, numbers that are not finite or too long, and depth."""
    try:
        value = json.loads(
            raw.decode("utf-8", "replace"), parse_float=_float, parse_int=_int, parse_constant=_refuse_constant
        )
        if not isinstance(value, dict):
            raise ValueError("it does not hold a JSON object")
        return {_whole_text(key): _checked(item, 1) for key, item in value.items()}
    except RecursionError:  # a file of brackets
        raise ValueError("it is nested too deeply") from None


def _checked(value: object, depth: int) -> object:
    if isinstance(value, str):
        return _whole_text(value)
    if not isinstance(value, (dict, list)):
        return value
    if depth >= DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_checked(item, depth + 1) for item in value]
    return {_whole_text(key): _checked(item, depth + 1) for key, item in value.items()}


def _whole_text(text: str) -> str:
    return text if text.isascii() else _LONE.sub("�", text)


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"it holds a number that is not finite ({text[:20]})")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS + 1:
        raise ValueError(f"it holds a number of {len(text)} digits")
    return int(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"it holds {text}, which is no number")


def as_time(value: object) -> datetime | None:
    """A time as our files have it (ISO 8601, UTC unless it says otherwise), in UTC; None for what is none, or absurd."""
    text = value if isinstance(value, str) else ""
    try:
        at = datetime.fromisoformat(text[:64])
        at = at.astimezone(timezone.utc) if at.tzinfo else at.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        return None
    return at if _EPOCH <= at < _LATEST else None


def time_of(found: os.stat_result) -> datetime:
    """When the file was last written. The owner can set any time; an absurd one is read as 1970."""
    if 0 <= found.st_mtime < _LATEST.timestamp():
        return datetime.fromtimestamp(found.st_mtime, timezone.utc)
    return _EPOCH


def as_whole(value: object) -> int | None:
    """A whole number; None for all else, true and false too."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """A finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return None
    return float(value)


def as_text(value: object, limit: int = LONGEST) -> str:
    """Text or a number as one line that is harmless to print; "" for what is neither."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return printable(str(value)[: limit + 1], limit)


def as_texts(value: object, most: int = 1000) -> tuple[str, ...]:
    """A list of texts or numbers, the first ``most`` of them; () for anything else."""
    return tuple(as_text(item) for item in value[:most]) if isinstance(value, list) else ()


def as_count(name: str) -> int | None:
    """The number that a file's name is, in plain digits ("0012", never "²"); None for any other name."""
    return int(name) if _NUMBER.fullmatch(name) else None
