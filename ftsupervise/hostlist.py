"""Slurm's short form for many nodes: "node-[0-2,7],gpu3". Pure; raises instead of giving a wrong list."""

from __future__ import annotations

import re

_BRACKET = re.compile(r"\[([^\]]*)\]")
_MAX_NODES = 200_000


def expand_hostlist(text: str) -> tuple[str, ...]:
    """ "node-[0-2,7],gpu3" -> node-0 node-1 node-2 node-7 gpu3. Raises ValueError for what is not a host list."""
    return tuple(name for part in _split_outside_brackets(text) for name in _expand(part))


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
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


def _expand(part: str) -> list[str]:
    match = _BRACKET.search(part)
    if not match:
        return [part]
    names: list[str] = []
    for item in match[1].split(","):
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"not a host list: {part[:100]!r}")
        first, last = int(low), int(high) if dash else int(low)
        if last - first > _MAX_NODES:
            raise ValueError(f"not a host list: {part[:100]!r} has too many nodes")
        for number in range(first, last + 1):
            rest = f"{part[: match.start()]}{number:0{len(low)}d}{part[match.end() :]}"
            names += _expand(rest)
    return names


def compress_hostlist(nodes: tuple[str, ...] | list[str]) -> str:
    """node-0 node-1 node-2 -> "node-[0-2]"; the shortest form Slurm takes, in the order of the names."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for node in dict.fromkeys(nodes):
        match = re.fullmatch(r"(.*?)(\d+)", node)
        if match:
            groups.setdefault((match[1], len(match[2]) if match[2].startswith("0") else 0), []).append(int(match[2]))
        else:
            plain.append(node)
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
