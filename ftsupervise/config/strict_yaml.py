"""YAML without its traps, and with the place of every key and value, so that an error can say file:line:column.

YAML 1.1 reads ``time: 20:00:00`` as the number 72000, ``0123`` as 83, ``no`` as false, and keeps the last of two equal
keys without a warning. Here each of those is an error that says what to type. The rest is: mappings with text keys,
lists, text, ``true``/``false``, ``null``, and decimal numbers. No tags, no merge keys, one document, UTF-8, and bounds
on size, depth and alias expansion, so that a hostile file costs milliseconds. Light: PyYAML and nothing else.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

from ftsupervise.secrecy import by_name, kind

SWEEP = "sweep"  # the section whose values are kept as they were typed: 1e-4 is put into a command as it stands
MAX_BYTES = 256 * 1024
MAX_DEPTH = 30
MAX_NODES = 20_000
MAX_CHARACTERS = 1_000_000  # of all text, aliases expanded

KeyPath = tuple[str | int, ...]

# C0 and C1 controls but tab and newline, line separators, surrogates, and what turns the direction of text around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufeff]")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]+(?:[eE][-+]?[0-9]{1,2})?")
_CLOCK = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-9]+)+(?:\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?")
_UNUSUAL = re.compile(r"-?(?:[0-9][0-9_]{0,30}|0[xX][0-9a-fA-F]{1,15}|0[oO][0-7]{1,15}|0[bB][01]{1,60})")  # 010, 1_000
_NUMBER_LIKE = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_POWER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,2}")
_NAMES_ONE = re.compile(r"[_-](?:file|env)$", re.IGNORECASE)
_TRUE = frozenset({"yes", "Yes", "YES", "on", "On", "ON", "True", "TRUE"})
_FALSE = frozenset({"no", "No", "NO", "off", "Off", "OFF", "False", "FALSE"})
_NULL = frozenset({"~", "Null", "NULL"})


class Place(NamedTuple):
    """The place of a value and its key. Lines and columns count from 1."""

    file: str
    line: int
    column: int
    key_line: int
    key_column: int
    variable: str = ""  # the ${VARIABLE} that gave the value
    plain: bool = False  # written without quotes


class Problem(NamedTuple):
    """One problem of a file: its place, its key, and its sentence."""

    file: str
    line: int
    column: int
    path: KeyPath
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {dotted(self.path)}: {self.text}" if self.path else f"{where}: {self.text}"


class Document(NamedTuple):
    """A file as plain values (dict, list, str, int, float, bool, None), the place of each, and the problems."""

    value: Any
    places: dict[KeyPath, Place]
    problems: list[Problem]


def dotted(path: KeyPath) -> str:
    """Return "watch.disk[1].free" for ("watch", "disk", 1, "free")."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            shown = step if re.fullmatch(r"[\w-]{1,60}", step) else ascii(step[:60])
            text += f".{shown}" if text else shown
    return text


def secret_at(path: KeyPath) -> bool:
    """Return whether the last key of ``path`` names a secret, so that its value is never repeated in an error.

    ``password_file`` and ``key_env`` do, too: a person may have put the secret itself there.
    """
    words = [step for step in path if isinstance(step, str)]
    return bool(words) and (by_name(words[-1]) or _NAMES_ONE.search(words[-1]) is not None)


def control_character(text: str) -> str | None:
    """The first character of ``text`` that has no place in a setting, as "U+0007"; None when there is none."""
    match = _CONTROL.search(text)
    return f"U+{ord(match[0]):04X}" if match else None


def plain(text: str) -> object:
    """The value of an unquoted scalar. Raises ValueError, with the text to write instead, where YAML dialects disagree."""
    if text in ("", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and abs(float(text)) < 1e60:
        return float(text)
    if text in _TRUE or text in _FALSE:
        raise ValueError("true" if text in _TRUE else "false")
    if text in _NULL:
        raise ValueError("null")
    if _UNUSUAL.fullmatch(text):
        digits = text.replace("_", "")
        raise ValueError(str(int(digits, 10 if digits.lstrip("-").isdigit() else 0)))
    if _CLOCK.fullmatch(text) or _DATE.fullmatch(text) or _NUMBER_LIKE.fullmatch(text):
        raise ValueError("")
    return text


def parse(raw: bytes, file: str) -> Document:
    """Read one YAML document. Never raises: errors go into ``problems`` (``file`` is only shown)."""
    if len(raw) > MAX_BYTES:
        return _failed(file, f"the file is larger than {MAX_BYTES // 1024} KiB; that is no settings file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        good = raw[: error.start].decode("utf-8", "replace")
        return _failed(file, "not UTF-8 text; save the file as UTF-8", *_position(good, len(good)))
    # A YAML line may end in "\r\n"; a lone "\r", which an editor shows as nothing, may not.
    text = text.replace("\r\n", "\n")
    match = _CONTROL.search(text)
    if match:
        return _failed(file, f"control character U+{ord(match[0]):04X} in the text", *_position(text, match.start()))
    reader = _Loader(text)
    try:
        root = reader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        return _failed(file, _syntax(error), *at)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: an escape beyond U+10FFFF
        mark = reader.get_mark()
        return _failed(file, f"not valid YAML: {str(error).splitlines()[0]}", mark.line + 1, mark.column + 1)
    finally:
        reader.dispose()
    if root is None:
        return Document(None, {}, [])
    return _Conversion(file).document(root)


def _failed(file: str, text: str, line: int = 0, column: int = 0) -> Document:
    return Document(None, {}, [Problem(file, line, column, (), text)])


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's message, or a better one for the most common mistakes."""
    problem = (error.problem or "not valid YAML").strip()
    if isinstance(error, _Refusal):
        return problem
    if "'\\t'" in problem:
        return "a tab here; YAML is indented with spaces"
    if "mapping values are not allowed" in problem:
        return "a second ': ' in one line; put the value in quotes, or fix the indentation"
    if "expected <block end>" in problem:
        return "the indentation does not fit the lines above; keys of one section start in one column"
    if "could not find expected ':'" in problem:
        return "a key without ':'; write 'key: value', with a space after the colon"
    if "but found another document" in problem:
        return "a second document ('---'); one file describes one run"
    if error.context in ("while scanning an alias", "while scanning an anchor"):
        return "'*' and '&' start YAML aliases; put a value that starts with one in quotes"
    if "found undefined alias" in problem:
        return "'*' starts an alias that was never defined; put a value that starts with '*' in quotes"
    if "found character" in problem and "cannot start any token" in problem:
        return "this character cannot start a value; put the value in quotes"
    if problem == "found unexpected end of stream":
        return "a quote or bracket is opened and never closed"
    context = f" ({error.context.strip()})" if error.context else ""
    return f"not valid YAML: {problem}{context}"


class _Loader(yaml.SafeLoader):
    """Composes nodes only; refuses tags, directives and deep nesting while it reads."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - the name and shape are PyYAML's
    _depth = 0

    def compose_document(self) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.version or event.tags:
            _refuse("'%' directives are not used here; remove the line", event.start_mark)
        return super().compose_document()

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            _refuse("YAML tags ('!') are not used here; put a value that starts with '!' in quotes", event.start_mark)
        if self._depth >= MAX_DEPTH:
            _refuse(f"nested more than {MAX_DEPTH} levels deep", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _refuse(text: str, mark: yaml.Mark) -> None:
    raise _Refusal(None, None, text, mark)


class _Refusal(yaml.MarkedYAMLError):
    pass


class _TooMuch(Exception):
    """The file grows too large, or contains itself, when its aliases are expanded."""


class _Conversion:
    """Nodes -> plain values and their places; problems are collected so that all are reported at once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self.nodes = 0
        self.characters = 0

    def document(self, root: yaml.Node) -> Document:
        try:
            value = self.value(root, (), root)
        except _TooMuch as error:
            return _failed(self.file, str(error), 1, 1)
        return Document(value, self.places, self.problems)

    def problem(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        mark: Any = node.start_mark
        self.problems.append(Problem(self.file, mark.line + 1, mark.column + 1, path, text))

    def value(self, node: yaml.Node, path: KeyPath, key: yaml.Node) -> object:
        self.nodes += 1
        self.characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if self.nodes > MAX_NODES or self.characters > MAX_CHARACTERS or len(path) > MAX_DEPTH:
            raise _TooMuch("the file is too large when its aliases ('*') are expanded; write the values out")
        start: Any = node.start_mark
        word: Any = key.start_mark
        unquoted = isinstance(node, yaml.ScalarNode) and node.style is None
        at = (start.line + 1, start.column + 1, word.line + 1, word.column + 1)
        self.places[path] = Place(self.file, *at, plain=unquoted)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), item) for index, item in enumerate(node.value)]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problem(key, path, "a key must be one word, not a list or a mapping")
                continue
            name: str = key.value
            here = (*path, name)
            if name == "<<" and key.style is None:
                self.problem(key, path, "merge keys ('<<') are not used here; write the keys out")
            elif control_character(name) or "\n" in name or "\t" in name or len(name) > 200:
                self.problem(key, path, "a key holds a control character, or more than 200 letters")
            elif name in result:
                first = self.places[here].key_line
                self.problem(key, here, f"given twice; the first one is in line {first}")
            else:
                result[name] = self.value(item, here, key)
        return result

    def scalar(self, node: yaml.Node, path: KeyPath) -> object:
        text: str = node.value
        found = control_character(text)
        if found:
            self.problem(node, path, f"control character {found}; no setting holds one")
            return _CONTROL.sub("?", text)
        if not self.places[path].plain or path[:1] == (SWEEP,):
            return text
        try:
            return plain(text)
        except ValueError as trap:
            last = path[-1] if path else ""
            secret = secret_at(path) or kind(text) != ""
            shown = "..." if secret else text[:60]
            quoted = f'{last}: "{shown}"' if isinstance(last, str) and last else f'"{shown}"'
            known = str(trap) and not secret
            meant = f"{trap}" if known else "" if secret else _written_out(text)
            other = f"write {meant}, or, where text is meant, " if meant else ""
            why = "is read differently by every YAML" if known else "is a number to YAML, not text"
            self.problem(node, path, f"{shown} without quotes {why}; {other}type {quoted}")
            return text


def _written_out(text: str) -> str:
    """Return 1e3 as 1000; "" where that would be long, or it is another kind of number."""
    if not _POWER.fullmatch(text):
        return ""
    number = float(text)
    plain = f"{number:.0f}" if number.is_integer() else f"{number:.6f}".rstrip("0")
    return plain if len(plain) < 20 and float(plain) == number else ""
