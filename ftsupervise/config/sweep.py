"""A file of several runs: ``sweep: {lr: [0.1, 0.01]}``, and ``{lr}`` in the text of the other settings. Pure.

Each combination of the values is a run of its own, with a name, a directory and a chain of its own; what follows a launch knows
no sweep. A value is put in as it was typed. ``${lr}`` stays the shell's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ftsupervise.config.strict_yaml import SWEEP, Document, KeyPath, Problem
from ftsupervise.errors import UsageError

MOST = 200  # runs in one file
_WORD = re.compile(r"[A-Za-z_]\w*")
_TAKEN = {"checkpoint": "launch.resume has {checkpoint} for the newest checkpoint"}


def of_one(document: Document, name: str = "") -> Document:
    """Return the settings of the run ``name`` of the file; of its only one, where none is named. A problem is added where there
    is no sweep that can be read. Raises UsageError where the file has several, or none of that name.
    """
    elements, problems = _elements(document)
    if problems:
        return Document(document.value, document.places, [*document.problems, *problems])
    if not elements:
        return document
    if len(elements) == 1:
        return _filled(document, elements[0])
    at = document.places[(SWEEP,)].file
    names = _names(document, elements)
    if name and name in names:
        return _filled(document, elements[names.index(name)])
    raise UsageError(
        f"{at} has no run called {name}" if name else f"{at} is a sweep of {len(names)} runs",
        hint=f"{'it has' if name else 'name one of them'}: {listed(names)}",
    )


def names_in(document: Document) -> tuple[str, ...]:
    """Return the names of the runs of a sweep, in its order; () for a file of one run, and one that cannot be read."""
    elements, problems = _elements(document)
    return () if problems or len(elements) < 2 else _names(document, elements)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def _names(document: Document, elements: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    name = document.value.get("name")
    return tuple(_put_in(name, one) if isinstance(name, str) else "" for one in elements)


def _elements(document: Document) -> tuple[tuple[dict[str, str], ...], list[Problem]]:
    """Return the values of each run, and what is wrong with them."""
    given = document.value.get(SWEEP) if isinstance(document.value, dict) else None
    if given is None:
        return (), []
    problems: list[Problem] = []
    for path, why in _wrong(given):
        at = document.places[path]
        problems.append(Problem(at.file, at.line, at.column, path, why))
    if problems or not given:
        return (), problems
    if (count := prod(map(len, given.values()))) > MOST:  # before they are made: a stranger's file may name billions
        at, many = document.places[(SWEEP,)], str(count) if count < 10**12 else "billions of"
        return (), [Problem(at.file, at.line, at.column, (SWEEP,), f"{many} runs; one file has {MOST} at most")]
    elements = tuple(dict(zip(given, values, strict=True)) for values in product(*given.values()))
    return elements, _alike(document, elements)


def _wrong(given: Any) -> list[tuple[KeyPath, str]]:
    if not isinstance(given, dict):
        return [((SWEEP,), "expected a list of values for each word, such as {lr: [0.1, 0.01]}")]
    found: list[tuple[KeyPath, str]] = []
    for word, values in given.items():
        here = (SWEEP, word)
        if not _WORD.fullmatch(word):
            found.append((here, "a word of letters, digits and _ was expected, which stands as {word} in the settings"))
        elif word in _TAKEN:
            found.append((here, f"take another word: {_TAKEN[word]}"))
        elif not isinstance(values, list) or not values:
            found.append((here, "expected a list of values, such as [0.1, 0.01]"))
        else:
            found += [
                ((*here, index), "expected one value, a number or a text")
                for index, value in enumerate(values)
                if not isinstance(value, str) or not value
            ]
    return found


def _alike(document: Document, elements: Sequence[Mapping[str, str]]) -> list[Problem]:
    """Return a problem for each key by which two runs would be one: their name, and their directory where it is given."""
    found: list[Problem] = []
    for key in ("name", "run_dir"):
        text = document.value.get(key)
        if isinstance(text, str) and len({_put_in(text, one) for one in elements}) < len(elements):
            at = document.places[(key,)]
            several = [word for word, values in document.value[SWEEP].items() if len(values) > 1]
            like = f"{text.partition('{')[0].rstrip('-')}{''.join(f'-{{{word}}}' for word in several)}"
            why = f"two runs of the sweep have the same one; let each have its own: {key}: {like}"
            found.append(Problem(at.file, at.line, at.column, (key,), why))
    name = document.value.get("name")
    if isinstance(name, str) and "$" in name:  # a run of a sweep is looked for by its name
        at = document.places[("name",)]
        found.append(Problem(at.file, at.line, at.column, ("name",), "the name of a sweep takes no variable"))
    return found


def _filled(document: Document, element: Mapping[str, str]) -> Document:
    """Return the settings with the values of one run in them. What is left of the sweep says which they are."""
    value = {key: item if key == SWEEP else _within(item, element) for key, item in document.value.items()}
    value[SWEEP] = {word: [text] for word, text in element.items()}
    places = {path: place for path, place in document.places.items() if path[:1] != (SWEEP,) or len(path) < 3}
    for word, text in element.items():
        index = document.value[SWEEP][word].index(text)
        places[(SWEEP, word, 0)] = document.places[(SWEEP, word, index)]
    return Document(value, places, document.problems)


def _within(value: Any, element: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _within(item, element) for key, item in value.items()}
    if isinstance(value, list):
        return [_within(item, element) for item in value]
    return _put_in(value, element) if isinstance(value, str) else value


def _put_in(text: str, element: Mapping[str, str]) -> str:
    return re.sub(r"(?<!\$)\{([A-Za-z_]\w*)\}", lambda found: element.get(found[1], found[0]), text)
