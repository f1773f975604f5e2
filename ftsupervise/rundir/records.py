"""Records: NamedTuples and dataclasses to JSON pages and back, by their type hints, and single values out of foreign pages.

Known are str, int, float, bool, None, datetime (ISO 8601, UTC), timedelta (seconds), Enum (by its value where that is a text,
else by its name), tuples, dicts with string keys, ``X | None`` and records within records. A missing field takes its default;
an unknown one is left out, so that a newer version's page can still be read. Numbers are finite and have 64 bits at most, and
times lie between the years 1970 and 2899 and durations below a century, so that no sum of them overflows.

JSON allows numbers of any length, NaN, infinities by way of 1e309, a thousand brackets and half a surrogate pair. None of that
goes further than here. Standard library only, without dataclasses: the guard, ``status`` and ``kill`` load this at their start.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from ftsupervise.host import files
from ftsupervise.host.links import anew
from ftsupervise.host.ownership import PAGE
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import write_whole

LIMIT = 4_000_000  # bytes of a page
LONGEST = 300  # characters of a text that is shown; Annotated[str, N] allows N
MOST = 1000  # items of a list; Annotated[tuple[X, ...], N] allows N
DEEPEST = 20  # brackets within brackets; ours have four at most
_DIGITS = 18  # of a whole number: it fits into 64 bits
EPOCH = datetime.fromtimestamp(0, timezone.utc)
_LATEST = datetime(2900, 1, 1, tzinfo=timezone.utc)  # far from where sums of times overflow
_CENTURY = 100 * 366 * 86400.0  # seconds
# Characters that move a cursor or turn a line round, and halves of a pair, which nothing can send. Ours are taken out before
# writing (wording.py); a page may be another's.
_UNSEEN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))
_INNER = (dict, list)  # of what JSON gives
_PLAIN = frozenset({str, int, float, bool, type(None)})
T = TypeVar("T")
Exact = Annotated[str, "exact"]  # text that stays as it is: a path, the value of a variable
ExactObject = Annotated[dict[str, Any], "exact"]  # a JSON object that stays as it is
Convert = Callable[[Any], Any]


# ---------------------------------------------------------------------------------------------------------------- pages


def read_record(
    kind: type[T],
    path: str | os.PathLike[str],
    *,
    limit: int = LIMIT,
    distrust: Callable[[os.stat_result], str] | None = None,
    lenient: bool = True,
) -> T | None:
    """Return the record in ``path``; None if there is no such file. Raises as ``read_json`` and ``decode`` do."""
    raw = read_json(path, limit=limit, distrust=distrust)
    return None if raw is None else decode(kind, raw, lenient=lenient)


@anew
def read_json(
    path: str | os.PathLike[str], *, limit: int = LIMIT, distrust: Callable[[os.stat_result], str] | None = None
) -> dict[str, object] | None:
    """Return the object in ``path``; None if there is no such file.

    Raises ValueError if it is there but is not one whole JSON object of finite numbers, or larger than ``limit`` bytes,
    OSError if it cannot be read or is no regular file. Never follows a symbolic link, never waits for a FIFO.
    ``distrust`` says of the opened file why it is not trusted, "" if it is: a ValueError too.
    """
    try:
        fd = files.open_regular(path)
    except FileNotFoundError:
        return None
    try:
        reason = distrust(os.fstat(fd)) if distrust is not None else ""
        raw = b"" if reason else files.read_open(fd, limit, path)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"{path} is larger than {limit} bytes") from None
        raise
    finally:
        os.close(fd)
    if reason:
        raise ValueError(f"{path} is not trusted: {reason}")
    try:
        return parse_object(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_json(
    path: Path,
    value: object,
    *,
    mode: int = PAGE,
    sync: bool = True,
    area: Path | None = None,
    indent: int | None = 1,
) -> None:
    """Write a record, or a dict of what a page knows, as ``write_whole`` does. Raises OSError.

    ``indent`` None is several times as fast: for a large page that only programs read.
    """
    text = json.dumps(encode(value), ensure_ascii=False, default=str, indent=indent) + "\n"
    write_whole(path, text, mode=mode, sync=sync, area=area)


def parse_object(raw: bytes) -> dict[str, object]:
    """Return the JSON object in ``raw``.

    Raises ValueError for anything else, numbers that are not finite or too long, and depth.
    """
    try:
        value = _DECODER.decode(raw.decode("utf-8", "replace"))
        if not isinstance(value, dict):
            raise ValueError("it does not hold a JSON object")
        if b"\\ud" not in raw and b"\\uD" not in raw:  # no half of a pair: all its texts are whole
            _require_shallow(value)
            return value
        return {_whole_text(key): _checked(item, 1) for key, item in value.items()}
    except RecursionError:  # a file of brackets
        raise ValueError("it is nested too deeply") from None


def _require_shallow(value: dict[str, object]) -> None:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [item for one in level for item in (one.values() if type(one) is dict else one) if type(item) in _INNER]
        if not level:
            return
    raise ValueError("it is nested too deeply")


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
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "�", text)


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


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_refuse_constant)


# -------------------------------------------------------------------------------------------------------------- records


def encode(value: Any, *, sparse: bool = False) -> Any:
    """Return ``value`` as JSON has it.

    ``sparse`` leaves out the fields that stand at their default, for a journal of every minute.
    """
    kind: Any = type(value)
    return value if kind in _PLAIN else _encoder(kind, sparse)(value)


def decode(kind: type[T], raw: Any, *, lenient: bool = False) -> T:
    """The inverse of ``encode``. Raises ValueError when ``raw`` does not have that form.

    ``lenient`` is for pages that others write. A damaged field takes its default; without one it is None or "" if its type
    allows that, and otherwise the record is damaged. A damaged item of a list or a dict is left out. A text becomes one line
    of at most LONGEST characters that is harmless to print, a number is taken for a text, and a list ends after MOST items.
    """
    known: Any = kind
    try:
        return typing.cast(T, _decoder(known, lenient)(raw))
    except (*_DAMAGED, RecursionError) as error:
        raise ValueError(f"no {getattr(kind, '__name__', kind)}: {error}") from None


@cache
def _encoder(kind: Any, sparse: bool) -> Convert:
    """Return the encoder, made once for each type: a storm of 5,000 alerts is encoded several times a tick."""
    if fields := _fields(kind):

        def record(value: Any) -> Any:
            pairs = ((name, getattr(value, name), default) for name, default in fields.items())
            return {
                name: item if type(item) in _PLAIN else encode(item, sparse=sparse)
                for name, item, default in pairs
                if not sparse or item != default
            }

        return record
    if issubclass(kind, datetime):
        return lambda value: value.astimezone(timezone.utc).isoformat()
    if issubclass(kind, timedelta):
        return lambda value: value.total_seconds()
    if issubclass(kind, Enum):
        return lambda value: value.value if isinstance(value.value, str) else value.name
    if issubclass(kind, PurePath):
        return str
    if issubclass(kind, (list, tuple)):
        return lambda value: [item if type(item) in _PLAIN else encode(item, sparse=sparse) for item in value]
    if issubclass(kind, Mapping):
        return lambda value: {
            key: item if type(item) in _PLAIN else encode(item, sparse=sparse) for key, item in value.items()
        }
    return lambda value: value


def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields of a record with their defaults (REQUIRED where there is none); {} for other types."""
    if issubclass(kind, tuple):
        defaults = getattr(kind, "_field_defaults", {})
        return {name: defaults.get(name, _REQUIRED) for name in getattr(kind, "_fields", ())}
    if not hasattr(kind, "__dataclass_fields__"):
        return {}
    from dataclasses import MISSING, fields

    made = ((one, one.default if one.default_factory is MISSING else one.default_factory()) for one in fields(kind))
    return {one.name: _REQUIRED if default is MISSING else default for one, default in made}


_REQUIRED = object()


@cache
def _decoder(kind: Any, lenient: bool, bound: int | None = None) -> Convert:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated and args[1] == "exact":
        return lambda raw: _of(typing.get_origin(args[0]) or args[0], raw)
    if origin is Annotated:
        return _decoder(args[0], lenient, args[1])
    if origin in _UNIONS:
        (inner,) = (_decoder(arg, lenient) for arg in args if arg is not type(None))
        return lambda raw: None if raw is None else inner(raw)
    if origin is tuple:
        item, most = _decoder(args[0], lenient), (bound or MOST) if lenient else None
        return lambda raw: tuple(_each(item, _of(list, raw)[:most], lenient))
    if origin is not None:  # a dict, or a Mapping
        name, content = _decoder(str, lenient), _decoder(args[1], lenient)
        return lambda raw: _mapping(name, content, _of(dict, raw), lenient)
    if kind in (Any, object):
        return lambda raw: raw
    if _fields(kind):
        return _record_decoder(kind, lenient)
    if issubclass(kind, Enum):
        return lambda raw: kind.__members__[raw] if raw in kind.__members__ else kind(raw)
    if kind is str:
        return _shown(bound or LONGEST) if lenient else _text
    if issubclass(kind, PurePath):
        return lambda raw: kind(_of(str, raw))
    simple = {datetime: as_time, int: as_whole, float: as_number, timedelta: _as_duration}.get(kind)
    return _valued(simple) if simple is not None else lambda raw: _of(kind, raw)


def _each(convert: Convert, items: Iterable[Any], lenient: bool) -> Iterator[Any]:
    for item in items:
        try:
            yield convert(item)
        except _DAMAGED:
            if not lenient:
                raise


def _mapping(name: Convert, content: Convert, raw: dict[Any, Any], lenient: bool) -> dict[Any, Any]:
    found = {}
    for key, item in raw.items():
        try:
            found[name(key)] = content(item)
        except _DAMAGED:
            if not lenient:
                raise
    return found


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True) if sys.version_info >= (3, 10) else read_hints(kind)


def read_hints(kind: type) -> dict[str, Any]:
    """Return the fields of ``kind`` with their types, as ``typing.get_type_hints(kind, include_extras=True)`` does, where ``X |
    None`` cannot be evaluated, in Python 3.9: it is read as ``Optional[X]``."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        scope = {**vars(sys.modules[base.__module__]), "typing": typing}
        # Python 3.14 makes them when they are asked for, and only then; before, a class without any had its parent's
        own = (
            getattr(base, "__annotations__", {})
            if sys.version_info >= (3, 14)
            else vars(base).get("__annotations__", {})
        )
        for name, hint in own.items():
            text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
            found[name] = _evaluated(text, scope) if isinstance(text, str) else text
    return found


def _evaluated(text: str, scope: dict[str, Any]) -> Any:
    import ast

    class Unions(ast.NodeTransformer):
        def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
            """Turn ``X | Y`` into ``typing.Union[X, Y]``."""
            self.generic_visit(node)
            if not isinstance(node.op, ast.BitOr):
                return node
            union = ast.Attribute(ast.Name("typing", ast.Load()), "Union", ast.Load())
            return ast.Subscript(union, ast.Tuple([node.left, node.right], ast.Load()), ast.Load())

    tree = Unions().visit(ast.parse(text, mode="eval"))
    return eval(compile(ast.fix_missing_locations(tree), "<hint>", "eval"), scope)


def _record_decoder(kind: Any, lenient: bool) -> Convert:
    parts: dict[str, Convert] = {}
    absent: dict[str, object] = {}
    needed: set[str] = set()

    def prepare() -> None:
        for name, hint in _hints(kind).items():
            parts[name] = _decoder(hint, lenient)
            if _fields(kind).get(name) is _REQUIRED:
                if lenient and (hint is str or type(None) in typing.get_args(hint)):
                    absent[name] = "" if hint is str else None
                else:
                    needed.add(name)

    def record(raw: Any) -> Any:
        if not parts:  # not earlier: a type may contain itself
            prepare()
        values: dict[str, Any] = {**absent}
        for name, item in _of(dict, raw).items():
            if name in parts:
                try:
                    values[name] = parts[name](item)
                except _DAMAGED:
                    if not lenient or name in needed:
                        raise
        return kind(**values)

    return record


def _valued(read: Convert) -> Convert:
    """Return ``read``, with a ValueError in place of None."""

    def value(raw: Any) -> Any:
        found = read(raw)
        if found is None:
            raise _misplaced(raw)
        return found

    return value


def _shown(limit: int) -> Convert:
    def text(raw: Any) -> str:
        if (
            type(raw) is str and len(raw) <= limit and raw.isascii() and raw.isprintable()
        ):  # nearly all: a tick reads many
            return raw
        if not _is_text(raw):
            raise _misplaced(raw)
        return printable(str(raw)[: limit + 1], limit)

    return text


def _misplaced(raw: Any) -> ValueError:
    return ValueError(f"{str(raw)[:80]!r} is out of place or out of bounds")


def _text(raw: Any) -> str:
    text: str = _of(str, raw)
    return text if text.isascii() and text.isprintable() else re.sub(_UNSEEN, " ", text)


def _of(kind: Any, raw: Any) -> Any:
    if not isinstance(raw, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(raw).__name__}")
    return raw


# --------------------------------------------------------------------------------------------------------------- values


def as_time(value: object) -> datetime | None:
    """Return a time as our files have it (ISO 8601, UTC unless it says otherwise), in UTC; None for other text, or an
    absurd time.
    """
    text = value if isinstance(value, str) else ""
    try:
        at = datetime.fromisoformat(text[:64])
        at = at.astimezone(timezone.utc) if at.tzinfo else at.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        return None
    return at if EPOCH <= at < _LATEST else None


def _as_duration(value: object) -> timedelta | None:
    seconds = as_number(value)
    return timedelta(seconds=seconds) if seconds is not None and abs(seconds) < _CENTURY else None


def time_of(found: os.stat_result) -> datetime:
    """Return when the file was last written. The owner can set any time; an absurd one is read as 1970."""
    if 0 <= found.st_mtime < _LATEST.timestamp():
        return datetime.fromtimestamp(found.st_mtime, timezone.utc)
    return EPOCH


def as_whole(value: object) -> int | None:
    """Return a whole number of 64 bits; None for all else, true and false too."""
    whole = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return typing.cast(int, value) if whole else None


def as_number(value: object) -> float | None:
    """Return a finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return None
    return float(value)


def _is_text(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def as_text(value: object, limit: int = LONGEST) -> str:
    """Return text or a number as one line that is harmless to print; "" for all else."""
    return printable(str(value)[: limit + 1], limit) if _is_text(value) else ""


def as_counts(names: Iterable[str]) -> list[int]:
    """Return the numbers among ``names``, as of a folder that holds NNNN/."""
    return [number for name in names if (number := as_count(name)) is not None]


def as_count(name: str) -> int | None:
    """Return the number that a file's name is, in plain digits ("0012", never "²"); None for any other name."""
    return int(name) if name.isascii() and name.isdigit() and len(name) <= _DIGITS else None
