"""Numbers in the manual that look measured and are not: what each is, with the words around it.

A number with seconds, bytes, per cent, points or times is taken for a measured one. It then quotes docs/figures.md
(``benchmarks/figures.py`` says how), or its words stand here. Words for numbers ("half a second") are not seen, nor are
minutes, hours and days, which nobody measures here. Words that begin with a # are a heading, and all that is below it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.manual.blocks import without_blocks
from tests.matrix import all_rows

# a default, a bound or a rule of ours, which the code has
SETTING: dict[str, tuple[str, ...]] = {
    "docs/checkpoints.md": ("is larger than 16 MB",),
    "docs/commands.md": ("## How long a command may take",),
    "docs/diagnose.md": ("the last 64 MiB of the output", "1 GiB in all"),
    "docs/faq.md": ("At 95 % of the host's",),
    "docs/frameworks/ddp.md": ("ends 5 s before the job does",),
    "docs/frameworks/torchrun.md": ("costs up to 30 s",),
    "docs/guard.md": (
        "within up to 10 s", "no answer for 30 s", "waits for 30 s until", "| 1 s | between two checks",
        "| 2 s | between two beats", "uses 95 % of its memory", "asked every 5 s",
    ),
    "docs/hangs.md": ("takes at most 6 s",),
    "docs/metrics.md": ("At 1 MB a file",),
    "docs/nodes.md": ("(2 % more)",),
    "docs/own-script.md": ("looks every 5 s",),
    "docs/planning.md": ("with 95 %", "two steps and 10 s", "two jobs cost 1 %", "its own 95 % interval", "## The formulas"),
    "docs/python.md": ("for 12 s, a submission after 15 s; Slurm is given 8 s, and 30 s for a launch",),
    "docs/replicas.md": ("## Timeouts", "up to 5 s until our agents"),
    "docs/report.md": ("below 80 % of the run's own",),
    "docs/restarts.md": ("2 GiB besides twice",),
    "docs/sbatch.md": ("KillWait less 5 s",),
    "docs/snapshots.md": ("10 % of the job's memory", "(5 % more below", "SIGTERM 28 s"),
    "docs/status.md": ("less than 70 % of its usual", "again every 30 seconds"),
    "docs/troubleshooting.md": ("less than 70 % of its usual",),
}  # fmt: skip
# Slurm's own, or of the kernel, torch or a file system
SLURM: dict[str, tuple[str, ...]] = {
    "docs/faq.md": ("(30 s).",),
    "docs/launching.md": ("SlurmdTimeout (300 s by default)",),
    "docs/own-script.md": ("the last 8 kB of what it prints",),
    "docs/planning.md": ("comes up to 60 s early",),
    "docs/replicas.md": ("(300 s by default) and", "(30 s), up to"),
    "docs/switches.md": ("60 s by default",),
}
# by others, with its source beside it
PUBLISHED: dict[str, tuple[str, ...]] = {
    "docs/planning.md": ("for a copy at 5 GB/s", "### Published figures"),
}
# of an example: the size of what was measured, or what a reader is shown
CASE: dict[str, tuple[str, ...]] = {
    "benchmarks/recovery/README.md": ("# How long does a fault cost?",),
    "benchmarks/replicas/README.md": ("# What torchft lacks, and what we add",),
    "docs/own-script.md": ("will be 100 % at that pace",),
    "docs/sbatch.md": ("after 1s | |", "step 61 in 4s", "began 3s later"),
    "docs/snapshots.md": ("for 1 MB a rank", "for 16 MB"),
}

LISTED = {
    page: tuple(words for kind in (SETTING, SLURM, PUBLISHED, CASE) for words in kind.get(page, ()))
    for page in {**SETTING, **SLURM, **PUBLISHED, **CASE}
}

_QUOTED = "<!-- (?:figure|times|below): "
_NUMBER = re.compile(
    r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?\s?(?:(?:s|seconds?|ms|µs|ns|[kMGT]i?B|points|times)(?!\w)|%)"
    rf"[*_]*(?!{_QUOTED})"
)
_DATED = re.compile(r"^\*Measured on \d{4}-\d\d-\d\d.*?: .+?\*$", re.M | re.S)


def looks_measured(text: str, listed: Sequence[str]) -> list[str]:
    """The numbers of a page that quote nothing and are in none of the ``listed`` words. Its blocks, what stands in backquotes,
    and the rows that tests have written (tests/matrix.py) are no measurements."""
    spared = {words for words in listed if words.startswith("#")}
    kept, skip = list[str](), False
    for line in read_as(text).splitlines():
        skip = line in spared if line.startswith("#") else skip
        kept += [] if skip else [line]
    return _found("\n".join(kept), [words for words in listed if words not in spared])


def undated(text: str, listed: Sequence[str] = ()) -> list[str]:
    """Those of each section that does not say when and on what it was measured: ``*Measured on 2026-11-23: two cores.*``"""
    parts = re.split(r"^#+ (.*)$", read_as(text), flags=re.M)
    return [
        f"{head}: {number}"
        for head, part in zip(parts[1::2], parts[2::2], strict=True)
        if not _DATED.search(part) and not any(words == f"# {head}" for words in listed)
        for number in _found(part, ())
    ]


def read_as(text: str) -> str:
    rows = {row.line for row in all_rows()}
    kept = "\n".join(line for line in without_blocks(text).splitlines() if line not in rows)
    return re.sub(r"`[^`]*`", "``", kept)


def _found(text: str, listed: Sequence[str]) -> list[str]:
    text = " ".join(text.split())
    spared = [range(at.start(), at.end()) for words in listed for at in re.finditer(re.escape(words), text)]
    found = [one for one in _NUMBER.finditer(text) if not any(one.start() in words for words in spared)]
    return [one[0].rstrip("*_") for one in found]
