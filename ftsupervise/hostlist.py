"""Slurm's short form for many nodes: "node-[0-2,7],gpu3". Pure; raises instead of giving a wrong list."""

from __future__ import annotations

import re

_PIECE = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_MOST = 200_000  # nodes in all; the largest cluster has a tenth of it
_LONGEST = 300  # characters of a name; DNS allows 253
_LIMIT = 4_000_000  # characters of a list


def expand_hostlist(text: str) -> tuple[str, ...]:
    """ "node-[0-2,7],gpu3" -> node-0 node-1 node-2 node-7 gpu3. Raises ValueError for what is not a host list, and for more
    than 200,000 nodes, before any is made."""
    if len(text) > _LIMIT:
        raise ValueError(f"not a host list: {len(text)} characters")
    names: list[str] = []
    for part in _split_outside_brackets(text):
        names += _expand(part, _MOST - len(names))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """ "2(x3),1" (SLURM_TASKS_PER_NODE) -> 2 2 2 1. Raises ValueError for what is no such list, or too long."""
    found: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if not match or len(found) + times > _MOST:
            raise ValueError(f"not a list of counts: {text[:100]!r}")
        found += [int(match[1])] * times
    return tuple(found)


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character not in "[],":
            continue
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"not a host list: {text[:100]!r}")
        if character == "," and not depth:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError(f"not a host list (it was cut?): {text[:100]!r}")
    parts.append(text[start:])
    return [part for part in (p.strip() for p in parts) if part]


def _expand(part: str, most: int) -> list[str]:
    """Return the names of one part, the last bracket running fastest; ``most`` are allowed."""
    names, count = [""], 1
    for fixed, brackets in _PIECE.findall(part):
        ranges = [_range(item, part) for item in brackets.split(",")] if brackets or f"{fixed}[]" in part else []
        if ranges:
            count *= sum(last - first + 1 for first, last, _ in ranges)
        if count > most:
            raise ValueError(f"not a host list: {part[:100]!r} has too many nodes")
        if len(names[0]) + len(fixed) > _LONGEST:
            raise ValueError(f"not a host list: {part[:100]!r} has a name of more than {_LONGEST} characters")
        ends = [f"{fixed}{n:0{width}d}" for first, last, width in ranges for n in range(first, last + 1)] or [fixed]
        names = [name + end for name in names for end in ends]
    return names


def _range(item: str, part: str) -> tuple[int, int, int]:
    """ "007-012" -> 7, 12 and the width 3."""
    match = _RANGE.fullmatch(item)
    if not match:
        raise ValueError(f"not a host list: {part[:100]!r}")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ValueError(f"not a host list: {part[:100]!r} counts down")
    return first, last, len(match[1])


def compress_hostlist(nodes: tuple[str, ...] | list[str]) -> str:
    """node-0 node-1 node-2 -> "node-[0-2]"; the shortest form Slurm takes, in the order of the names."""
    found = {node: _NUMBERED.fullmatch(node) for node in dict.fromkeys(nodes)}
    padded = {(match[1], len(match[2])) for match in found.values() if match is not None and match[2][0] == "0"}
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for node, match in found.items():
        if match is None:
            plain.append(node)
            continue
        size = match[1], len(match[2])  # node-10 belongs to node-09, but not to node-9
        groups.setdefault(size if size in padded else (match[1], 0), []).append(int(match[2]))
    texts = []
    for (prefix, width), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        spans = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
        single = len(spans) == 1 and "-" not in spans[0]
        texts.append(f"{prefix}{spans[0]}" if single else f"{prefix}[{','.join(spans)}]")
    return ",".join([*texts, *plain])
