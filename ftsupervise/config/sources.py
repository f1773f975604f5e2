"""The files that a setting may come from, and the filling in of ``${VARIABLE}``, before any check.

Project file over the person's own file over the site's file; mappings are merged key by key, lists and values
replace. Each value keeps the place it was written at. The two outer files may only hold what is not about one run.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftsupervise.config import sweep
from ftsupervise.config.strict_yaml import (
    MAX_BYTES,
    Document,
    KeyPath,
    Place,
    Problem,
    control_character,
    parse,
    plain,
    secret_at,
)
from ftsupervise.errors import ConfigError, NotFound, from_os_error
from ftsupervise.host import ownership

ENV_SITE_CONFIG = "FTSUPERVISE_SITE_CONFIG"
SITE_CONFIG = "/etc/ftsupervise/config.yaml"
LAUNCHED = "run.yaml"  # the settings as launched: complete, so no other file adds to them
SECTIONS = ("launch", "guard", "watch", "alerts", "cron")

# The keys in files that are not about one run; () stands for the whole section.
_SHARED: dict[str, tuple[str, ...]] = {
    "alerts": (),
    "watch": (),
    "guard": (),
    "cron": (),
    "launch": ("account", "partition"),
}

_WHOLE = re.compile(r"\$+\{[^{}]*\}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
_PART = re.compile(r"(?P<dollars>\$+)(?P<rest>\{[^{}]*\}|[A-Za-z_][A-Za-z0-9_]*)")
_SLURMS_OWN = re.compile(r"\$\{?(SLURMD?_\w+)")
_IN_THE_JOB = re.compile(r"\$\{\w+(?::-[\w.,:/+@=-]*)?\}")

# Text that a shell reads on the node: its variables are the shell's, and are left to it. Lists are no shell code.
SHELL: frozenset[KeyPath] = frozenset(
    {("launch", "command"), ("launch", "setup"), ("launch", "container"), ("nodes", "health", "command")}
)
_INLINE = re.compile(r"-[a-z]*c")  # bash -c, sh -ec, python -c: the next word of the list is code


def read(
    path: Path, environ: Mapping[str, str], text: bytes | None = None, *, strangers: bool = False, run: str = ""
) -> Document:
    """Return the project file with the person's and the site's beneath it, variables filled in. Problems are collected.

    ``text``: the text of the project file, when it was read already. ``run``: which one of a sweep. ``strangers``: another
    account wrote it, so no variable of this account is filled in there, because its writer would see the value in names and
    paths. Raises NotFound, NotPermitted or ConfigError where a file cannot be read at all, UsageError for a sweep of which no
    run is named.
    """
    merged = _sections(read_file(path) if text is None else checked(parse(text, str(path)), path))
    if merged.value is None:
        return merged
    merged = sweep.of_one(merged, run)
    problems = list(merged.problems)
    complete = path.name == LAUNCHED and not is_by_hand(path.parent)
    if not complete:
        merged = _over_outer_files(merged, environ, problems)
    return fill(Document(merged.value, merged.places, problems), environ, unfilled=str(path) if strangers else "")


def _over_outer_files(merged: Document, environ: Mapping[str, str], problems: list[Problem]) -> Document:
    """``merged`` laid over the person's own file and the site's; their problems are added to ``problems``."""
    for beneath in outer_files(environ):
        if not os.path.lexists(beneath):
            continue
        outer = _sections(read_outer_file(beneath, environ))
        problems += outer.problems
        if outer.value is not None:
            merged = _over(merged, _shared_only(outer, problems))
    return merged


def read_outer(environ: Mapping[str, str], keys: tuple[str, ...]) -> Document:
    """Return the sections ``keys`` of the person's own file and the site's only, for matters of no single run."""
    problems: list[Problem] = []
    merged = _over_outer_files(Document({}, {}, []), environ, problems)
    value = {key: merged.value[key] for key in keys if key in merged.value}
    return fill(Document(value, merged.places, problems), environ)


def fill(document: Document, environ: Mapping[str, str], *, unfilled: str = "") -> Document:
    """The document with each ``${VARIABLE}`` replaced; in the file ``unfilled`` each is a problem."""
    document = _sections(document)
    if document.value is None:
        return document
    places, problems = dict(document.places), list(document.problems)
    return Document(_expand(document.value, (), places, problems, environ, unfilled), places, problems)


def outer_files(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """The person's own file and the site's, whether they exist or not."""
    base = environ.get("XDG_CONFIG_HOME", "")  # a relative one would be in the current directory
    folder = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME", "~")).expanduser() / ".config"
    return folder / "ftsupervise/config.yaml", Path(environ.get(ENV_SITE_CONFIG) or SITE_CONFIG)


def read_file(path: Path, *, may_be_empty: bool = False) -> Document:
    """One file, parsed; its value is a mapping or None. Never blocks on a FIFO, never reads more than the limit."""
    return checked(parse(read_bytes(path)[0], str(path)), path, may_be_empty=may_be_empty)


def read_outer_file(path: Path, environ: Mapping[str, str]) -> Document:
    """The person's own file or the site's. Raises NotTrusted when another may have written it: receivers and commands of
    all runs come from there."""
    named = environ.get(ENV_SITE_CONFIG) == str(path)  # this account's environment has chosen the file
    text, found = read_bytes(path)
    ownership.require(found, path, accounts={found.st_uid} if named else (), group=found.st_gid if named else None)
    return checked(parse(text, str(path)), path, may_be_empty=True)


def of_strangers(path: Path) -> str:
    """Return ``path`` where another account may have written the file, else "": for ``fill``."""
    try:
        return str(path) if ownership.distrust(path.stat(), path) else ""
    except OSError:
        return str(path)


def read_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    """The text of a settings file, not more than the limit and one byte, and the stat of the open file.

    Never blocks on a FIFO. Raises NotFound, NotPermitted, NotTrusted for a link of another account, ConfigError.
    """
    try:
        with os.fdopen(ownership.open_judged(path), "rb") as file:
            return file.read(MAX_BYTES + 1), os.fstat(file.fileno())
    except FileNotFoundError:
        if path.name == LAUNCHED and is_by_hand(path.parent):
            return _of_a_run_by_hand(path.parent), path.parent.stat()
        raise NotFound(f"{path}: no such file", hint="give the path of an ftsupervise.yaml, or write one") from None
    except OSError as error:
        if error.errno == errno.EINVAL and path.is_dir():
            raise ConfigError(f"{path} is a directory", hint=f"give the file in it: {path}/ftsupervise.yaml") from None
        if error.errno == errno.EINVAL:
            raise ConfigError(f"{path} is not a file that can be read", hint="give the path of a text file") from None
        raise from_os_error(error, f"read {path}") from None
    except ValueError:  # a NUL in the name
        raise NotFound(f"cannot read {str(path)!r}: no file can have this name") from None


def is_by_hand(root: Path) -> bool:
    """Return whether it is the directory of a run that ``ftsupervise run`` was typed for, without a launch or settings
    of its own.
    """
    from ftsupervise.rundir.paths import has_switches

    return has_switches(root) and not any(os.path.lexists(root / name) for name in ("launches", LAUNCHED))


def _of_a_run_by_hand(root: Path) -> bytes:
    """The default settings for such a run, named like its directory, in the letters that a run may have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", root.absolute().name)
    name = name if name[:1].isalpha() else f"run-{name}"
    return json.dumps({"name": name, "run_dir": ".", "launch": {"command": ["unknown"], "jobs": 1}}).encode()


def checked(document: Document, path: Path, *, may_be_empty: bool = False) -> Document:
    """The document if its top is a mapping, else one with a problem. Raises ConfigError for an empty one, unless allowed."""
    if document.value is None and not document.problems:
        if may_be_empty:
            return document
        raise ConfigError(f"{path}: the file is empty", hint='begin with "name: my-run" and "launch:" with a command')
    if document.value is not None and not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single word or number"
        text = f"the file holds {kind}; it must hold 'key: value' lines, first 'name: ...'"
        return Document(None, {}, [Problem(str(path), 1, 1, (), text)])
    return document


def _sections(document: Document) -> Document:
    """Drop empty sections, such as ``watch:`` with every line below it commented out."""
    if document.value is None:
        return document if document.problems else Document({}, {}, [])
    kept = {key: value for key, value in document.value.items() if value is not None or key not in SECTIONS}
    return Document(kept, document.places, document.problems)


def _shared_only(document: Document, problems: list[Problem]) -> Document:
    """The keys that an outer file may have; each other one is a problem."""
    kept: dict[str, Any] = {}
    for key, value in document.value.items():
        allowed = _SHARED.get(key)
        if allowed == () or (allowed and not isinstance(value, dict)):
            kept[key] = value
            continue
        inside = value if allowed else {None: None}
        for name in inside:
            if allowed and name in allowed:
                kept.setdefault(key, {})[name] = value[name]
                continue
            path = (key,) if name is None else (key, name)
            at = document.places[path]
            text = "belongs in the ftsupervise.yaml of a run; this file may hold alerts, watch, guard, cron, "
            text += "launch.account and launch.partition"
            problems.append(Problem(at.file, at.key_line, at.key_column, path, text))
    return Document(kept, document.places, [])


def _over(above: Document, below: Document) -> Document:
    """``above`` merged over ``below``, key by key."""
    places: dict[KeyPath, Place] = {}

    def take(value: Any, path: KeyPath, source: dict[KeyPath, Place]) -> Any:
        if path in source:
            places[path] = source[path]
        if isinstance(value, dict):
            return {key: take(item, (*path, key), source) for key, item in value.items()}
        if isinstance(value, list):
            return [take(item, (*path, index), source) for index, item in enumerate(value)]
        return value

    def merge(upper: dict[str, Any], lower: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        if path in above.places:
            places[path] = above.places[path]
        result: dict[str, Any] = {}
        for key in [*upper, *(key for key in lower if key not in upper)]:
            here = (*path, key)
            if isinstance(upper.get(key), dict) and isinstance(lower.get(key), dict):
                result[key] = merge(upper[key], lower[key], here)
            elif key in upper:
                result[key] = take(upper[key], here, above.places)
            else:
                result[key] = take(lower[key], here, below.places)
        return result

    return Document(merge(above.value, below.value, ()), places, above.problems)


# ----------------------------------------------------------------------------------------------------- ${VARIABLE}


def escape(text: str, *, shell: bool = False) -> str:
    """The opposite of filling in: a text that loads as itself even if ``$NAME`` or ``${NAME}`` stands in it.

    ``shell``: it stands where a shell reads it (``reads_shell``), and only a whole ``${NAME}`` would be filled in.
    """
    if shell:
        return f"${text}" if _WHOLE.fullmatch(text) else text
    return _PART.sub(lambda match: f"${match[0]}", text)


def reads_shell(path: KeyPath, before: object = None) -> bool:
    """Return whether the text at ``path`` is shell code. ``before``: the item before it, where it is one of a list."""
    if path and isinstance(path[-1], int):
        return isinstance(before, str) and _INLINE.fullmatch(before) is not None
    return path in SHELL


def _expand(
    value: Any,
    path: KeyPath,
    places: dict[KeyPath, Place],
    problems: list[Problem],
    environ: Mapping[str, str],
    unfilled: str,
    before: object = None,
) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, (*path, key), places, problems, environ, unfilled) for key, item in value.items()}
    if isinstance(value, list):
        items = zip([None, *value], value, strict=False)
        return [
            _expand(item, (*path, i), places, problems, environ, unfilled, last) for i, (last, item) in enumerate(items)
        ]
    if not isinstance(value, str) or "$" not in value:
        return value
    whole = _WHOLE.fullmatch(value) is not None
    filling = _Filling(path, places[path], environ, whole=whole, unfilled=unfilled)
    if whole:
        filled = filling.part(value)
    elif reads_shell(path, before):
        return value
    else:
        filled = _PART.sub(lambda match: filling.part(match[0]), value)
    problems += filling.problems
    if filling.problems or not filling.variable:
        return filled
    place = places[path]
    places[path] = place._replace(variable=filling.variable)
    if not place.plain or not whole:
        return filled
    try:
        return plain(filled) if filled else ""
    except ValueError:
        return filled


class _Filling:
    """The variables of one value: filled in, or a problem each."""

    def __init__(self, path: KeyPath, place: Place, environ: Mapping[str, str], *, whole: bool, unfilled: str) -> None:
        self.path, self.place, self.environ = path, place, environ
        self.strangers = bool(unfilled) and place.file == unfilled
        self.secret = secret_at(path)
        self.file = self.secret and str(path[-1]).lower().endswith("file") and not whole  # a path below a variable's
        self.variable = ""  # the first one that was filled in
        self.problems: list[Problem] = []

    def part(self, text: str) -> str:
        """The value of ``$NAME``, ``${NAME}``, ``${NAME:-default}`` or ``$$…``."""
        if text.startswith("$$"):
            return text[1:]
        if slurms := _SLURMS_OWN.match(text):
            return self._slurms_own(text, slurms[1])
        if self.secret and not self.file:
            return text  # no setting holds a secret: the error about that comes later, without a look at the variable
        if not text.startswith("${") and self.secret:
            return self._problem(text, "a variable without braces is not filled in; write ${NAME}")
        if not text.startswith("${"):
            name = text[1:]
            return self._problem(text, f"{text} is not filled in; write ${{{name}}}, or ${text} for these characters")
        match = _VARIABLE.fullmatch(text)
        if not match:
            return self._problem(
                text, "write ${NAME} or ${NAME:-default}; text that begins with '${' is written with '$${'"
            )
        name, default = match[1], match[2]
        if self.strangers:
            return self._problem(
                text, f"${{{name}}} is not filled in: others may write this file, and would see what it holds"
            )
        filled = self.environ.get(name)
        if default is not None:
            filled = filled or default
        if filled is None:
            return self._problem(
                text, f"${{{name}}} is not set in the environment; export {name}, or write ${{{name}:-default}}"
            )
        found = control_character(filled)
        if found:
            return self._problem(text, f"${{{name}}} holds the control character {found}")
        self.variable = self.variable or name
        return filled

    def _slurms_own(self, text: str, name: str) -> str:
        """A variable of Slurm's has its value in the job: the job script expands it in ``launch.env``."""
        if self.path[:2] == ("launch", "env"):
            if text.startswith("${") and not _IN_THE_JOB.fullmatch(text):
                return self._problem(
                    text, f"write ${name}, ${{{name}}} or ${{{name}:-default}} for Slurm's own variable"
                )
            return text
        ways = {"command": "write the command as text, which the job's shell reads", "output": "write %j or %A_%a"}
        way = ways.get(str(self.path[1]) if self.path[:1] == ("launch",) and len(self.path) > 1 else "")
        return self._problem(
            text, f"{name} has a value in the job only; {way or 'only launch.env and shell code can use it'}"
        )

    def _problem(self, text: str, words: str) -> str:
        self.problems.append(Problem(self.place.file, self.place.line, self.place.column, self.path, words))
        return text
