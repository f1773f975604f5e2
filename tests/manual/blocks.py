"""The fenced blocks of the manual, and how each says it is checked.

The words after the language in a block's first line are its marks; GitHub shows none of them:

    make                 each line is ``make TARGET`` and the Makefile has the target; its pieces are tested elsewhere
    run=STORY            typed in a shell in the directory of STORY, block after block (console: output compared)
      on=slurm           its output is what one sees on Slurm, and compared there only
      wait=training      first wait until the run of the story trains
      wait=watched       first wait until it trains and the watch has looked at it
      wait=answered      first wait until its save switch is answered
      wait=ended         first wait until none of its jobs is left
    run=STORY file=NAME  written to NAME in the directory of STORY, for the blocks that follow
    parse                each ``ftsupervise`` line is taken by the command line's own parser, but not run
    load                 YAML that loads (name and launch are added if missing); load=all: it has every setting there is
    same=NAME            what the program itself makes (``UPDATE_MANUAL=1 pytest tests/story/test_manual.py`` rewrites it)
    measured             what a benchmark printed on some day; only its columns are compared with what the program prints
    template             a job script's template, rendered and given to ``bash -n``
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("docs", "examples", "benchmarks")
CHECKS = {"make", "run", "parse", "load", "same", "template", "measured"}
_FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    path: Path
    line: int
    language: str
    marks: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the manual that is written by hand."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    below = (path for place in PLACES for path in sorted((ROOT / place).glob("**/*.md")))
    return [*found, *(path for path in below if path.parent.name != "reference")]


def blocks(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    out = []
    for match in _FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        marks = {name: value for name, _, value in (word.partition("=") for word in words)}
        out.append(Block(path, text.count("\n", 0, match.start()) + 1, language, marks, match["text"]))
    return out


def all_blocks() -> list[Block]:
    return [block for path in pages() for block in blocks(path)]


def marked(mark: str, value: str | None = None) -> list[Block]:
    return [b for b in all_blocks() if mark in b.marks and value in (None, b.marks[mark])]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def prose(path: Path) -> str:
    """The page without its fenced blocks and its comments, as it is read."""
    return re.sub(r"<!--.*?-->", "", without_blocks(path.read_text("utf-8")), flags=re.S)


def words_of_prose(path: Path) -> int:
    """How many words a person reads one after the other: blocks and tables are there to look things up."""
    lines = (line for line in prose(path).splitlines() if not line.startswith("|"))
    return sum(bool(re.search(r"\w", word)) for line in lines for word in line.split())


def rewrite(path: Path, texts: dict[str, str]) -> None:
    """Fill every ``same=NAME`` block of the page anew."""

    def fill(match: re.Match[str]) -> str:
        name = next((w[5:] for w in match["info"].split() if w.startswith("same=")), "")
        body = texts.get(name, match["text"])
        return f"{match['fence']}{match['info']}\n{body}{match['fence']}"

    path.write_text(_FENCE.sub(fill, path.read_text("utf-8")), "utf-8")
