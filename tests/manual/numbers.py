"""Numbers in the manual that look measured and are not: what each is, with the words around it.

A number with seconds, bytes, per cent, points or times is taken for a measured one. It then quotes docs/figures.md
(``benchmarks/figures.py`` says how), or its words stand here. Words for numbers ("half a second") are not seen, nor are
minutes, hours and days, which nobody measures here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tests.manual.blocks import without_blocks
from tests.matrix import all_rows

SETTING: dict[str, tuple[str, ...]] = {}
SLURM: dict[str, tuple[str, ...]] = {}
PUBLISHED: dict[str, tuple[str, ...]] = {}
CASE: dict[str, tuple[str, ...]] = {}

LISTED = {
    page: tuple(words for kind in (SETTING, SLURM, PUBLISHED, CASE) for words in kind.get(page, ()))
    for page in {**SETTING, **SLURM, **PUBLISHED, **CASE}
}

_NUMBER = re.compile(
    r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?\s?(?:(?:s|seconds?|ms|µs|ns|[kMGT]i?B|points|times)(?!\w)|%)[*_]*(?!<!-- (?:figure|times|below): )"
)
_DATED = re.compile(r"^\*Measured on \d{4}-\d\d-\d\d.*?: .+?\*$", re.M | re.S)


def looks_measured(text: str, listed: Sequence[str]) -> list[str]:
    """The numbers of a page that quote nothing and are in none of the ``listed`` words. Its blocks, what stands in backquotes,
    and the rows that tests have written (tests/matrix.py) are no measurements."""
    return [number for _, number in _found(_read(text), listed)]


def undated(text: str) -> list[str]:
    """Those of each section that does not say when and on what it was measured: ``*Measured on 2026-11-23: two cores.*``"""
    parts = re.split(r"^#+ (.*)$", _read(text), flags=re.M)
    return [
        f"{head}: {number}"
        for head, part in zip(parts[1::2], parts[2::2], strict=True)
        if not _DATED.search(part)
        for _, number in _found(part, ())
    ]


def _read(text: str) -> str:
    rows = {row.line for row in all_rows()}
    kept = "\n".join(line for line in without_blocks(text).splitlines() if line not in rows)
    return re.sub(r"`[^`]*`", "``", kept)


def _found(text: str, listed: Sequence[str]) -> Iterator[tuple[int, str]]:
    text = " ".join(text.split())
    spared = [range(at.start(), at.end()) for words in listed for at in re.finditer(re.escape(words), text)]
    for found in _NUMBER.finditer(text):
        if not any(found.start() in one for one in spared):
            yield found.start(), found[0].rstrip("*_")
