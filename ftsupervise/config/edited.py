"""Changes single values in the text of an ``ftsupervise.yaml`` and leaves all else as a person wrote it, comments too. Pure.

It stands alone because it knows the text and no setting: what is written is read again, and where more has changed than was
meant, or not that, nothing is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ftsupervise.config.strict_yaml import KeyPath, dotted, parse
from ftsupervise.errors import Refused
from ftsupervise.printable import to_type

_BY = "  # ftsupervise plan"


def with_values(text: str, wanted: Mapping[KeyPath, str | int], file: str) -> str:
    """Return ``text`` with each value of ``wanted`` at its path. ``file`` is for the error. Raises Refused where the text is
    written in a way that this cannot follow (an alias, a value that comes from elsewhere)."""
    before = _value(text, file)
    for path, value in wanted.items():
        text = _changed(text, path, str(value))
        _set(before, path, value)
    if _value(text, file) != before:
        lines = "; ".join(f"{dotted(path)}: {value}" for path, value in wanted.items())
        raise Refused(f"{file} is written in a way that cannot be changed here", hint=f"write by hand: {lines}")
    return text


def _value(text: str, file: str) -> Any:
    document = parse(text.encode(), file)
    if document.problems or not isinstance(document.value, dict):
        raise Refused(f"{file} has errors", hint=f"ftsupervise config check {to_type(file)}")
    return document.value


def _set(of: dict[str, Any], path: KeyPath, value: str | int) -> None:
    for key in path[:-1]:
        if not isinstance(of.get(str(key)), dict):
            of[str(key)] = {}
        of = of[str(key)]
    of[str(path[-1])] = value


def _changed(text: str, path: KeyPath, value: str) -> str:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, key in enumerate(path):
        found = _pair(node, str(key))
        if found is None:
            return _inserted(text, node, path[depth:], value)
        name, node = found
        if not isinstance(node, yaml.MappingNode) and depth < len(path) - 1:  # "launch:" with nothing, or null
            at = name.end_mark.index + 1
            rest = text[node.end_mark.index :] if node.end_mark.index > at else text[at:]
            indent = " " * (name.start_mark.column + 2)
            return f"{text[:at]}\n{_lines(path[depth + 1 :], value, indent).rstrip(chr(10))}{rest}"
    start, end = node.start_mark.index, node.end_mark.index
    return f"{text[:start]}{value}{text[end:]}" if end > start else f"{text[:start]} {value}{text[end:]}"


def _pair(node: Any, key: str) -> tuple[Any, Any] | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next(((name, value) for name, value in pairs if name.value == key), None)


def _inserted(text: str, node: yaml.Node | None, path: KeyPath, value: str) -> str:
    """Return the text with a key that was not there, as the first one of its section; at the top as the last."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return text  # an empty "{}", or no mapping: it is seen when the text is read again
    if node.flow_style:
        inner = value
        for key in reversed(path[1:]):
            inner = f"{{{key}: {inner}}}"
        at = node.start_mark.index + 1
        return f"{text[:at]}{path[0]}: {inner}, {text[at:]}"
    first = node.value[0][0].start_mark
    indent = " " * first.column
    if not first.column:
        return f"{text.rstrip(chr(10))}\n{_lines(path, value, indent)}"
    at = first.index - first.column
    return f"{text[:at]}{_lines(path, value, indent)}{text[at:]}"


def _lines(path: KeyPath, value: str, indent: str) -> str:
    heads = "".join(f"{indent}{'  ' * depth}{key}:\n" for depth, key in enumerate(path[:-1]))
    return f"{heads}{indent}{'  ' * (len(path) - 1)}{path[-1]}: {value}{_BY}\n"
