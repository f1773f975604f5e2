"""Frozen dataclasses <-> JSON values, by their type hints: one place instead of a pair of functions per word.

Known: str, int, float, bool, None, datetime (ISO 8601, UTC), timedelta (seconds), Enum (by name), tuples, dicts with
string keys, ``X | None`` and nested dataclasses. A field that is missing takes its default; one that is unknown is
left out, so that a newer version's file can still be read. Numbers are finite and have 64 bits at most, times a year from
1970 to 2999, so that nothing reckoned with them can overflow; a time without a zone is UTC.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from functools import cache
from typing import Any, TypeVar

# What moves a cursor or turns a line round. It is taken out before it is written (wording.py); what is read may be another's.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
T = TypeVar("T")
Convert = Callable[[Any], Any]


def encode(value: Any) -> Any:
    """A JSON value. Fields that stand at their default are left out: a journal is written every minute."""
    kind: Any = type(value)
    return _encoder(kind)(value)


def decode(kind: type[T], raw: Any) -> T:
    """The inverse of ``encode``. Raises ValueError when ``raw`` does not have that form."""
    try:
        known: Any = kind
        return typing.cast(T, _decoder(known)(raw))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None


@cache
def _encoder(kind: Any) -> Convert:
    """Made once for each type: a storm of 5,000 alerts is encoded several times a tick."""
    if is_dataclass(kind):
        plain = _defaults(typing.cast(Any, kind))

        def whole(value: Any) -> Any:
            out = {}
            for name, default in plain:
                content = getattr(value, name)
                if content != default:
                    out[name] = content if type(content) in _PLAIN else encode(content)
            return out

        return whole
    if issubclass(kind, datetime):
        return lambda value: value.astimezone(timezone.utc).isoformat()
    if issubclass(kind, timedelta):
        return lambda value: value.total_seconds()
    if issubclass(kind, Enum):
        return lambda value: value.name
    if issubclass(kind, (list, tuple)):
        return lambda value: [encode(item) for item in value]
    if issubclass(kind, dict):
        return lambda value: {key: encode(item) for key, item in value.items()}
    return lambda value: value


@cache
def _decoder(kind: Any) -> Convert:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_decoder(arg) for arg in typing.get_args(kind) if arg is not type(None))
        return lambda raw: None if raw is None else inner(raw)
    if origin is tuple:
        item = _decoder(typing.get_args(kind)[0])
        return lambda raw: tuple(item(one) for one in _of(list, raw))
    if origin is dict:
        content = _decoder(typing.get_args(kind)[1])
        return lambda raw: {str(key): content(one) for key, one in _of(dict, raw).items()}
    if is_dataclass(kind):
        return _dataclass_decoder(kind)
    if kind is datetime:
        return _datetime
    if kind is timedelta:
        return lambda raw: timedelta(seconds=_finite(raw))
    if issubclass(kind, Enum):
        return lambda raw: kind[raw]
    if kind is float:
        return _finite
    if kind is int:
        return _integer
    if kind is str:
        return _text
    return lambda raw: _of(kind, raw)


def _dataclass_decoder(kind: Any) -> Convert:
    hints = typing.get_type_hints(kind)
    parts: dict[str, Convert] = {}

    def whole(raw: Any) -> Any:
        if not parts:  # not earlier: a type may contain itself
            parts.update({name: _decoder(hint) for name, hint in hints.items()})
        return kind(**{name: parts[name](content) for name, content in _of(dict, raw).items() if name in parts})

    return whole


def _datetime(raw: Any) -> datetime:
    at = datetime.fromisoformat(_of(str, raw))
    at = at.astimezone(timezone.utc) if at.tzinfo else at.replace(tzinfo=timezone.utc)
    if not 1970 <= at.year <= 2999:
        raise ValueError(f"no time that anything can have happened at: {at.year}")
    return at


def _text(raw: Any) -> str:
    text: str = _of(str, raw)
    return text if text.isascii() and text.isprintable() else _UNSEEN.sub(" ", text)


def _integer(raw: Any) -> int:
    number: int = _of(int, raw)
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number of more than 64 bits")
    return number


def _finite(raw: Any) -> float:
    number = float(_of((int, float), raw))
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _of(kind: Any, raw: Any) -> Any:
    if not isinstance(raw, kind):
        raise ValueError(f"expected {getattr(kind, '__name__', 'a number')}, got {type(raw).__name__}")
    return raw


_PLAIN = frozenset({str, int, float, bool, type(None)})


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (one.name, one.default_factory() if one.default_factory is not MISSING else one.default) for one in fields(kind)
    )
