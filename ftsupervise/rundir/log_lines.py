"""Steps and losses in the output of a training job, whatever else is in there. Pure, with bounded memory.

A log may be 100 GB long, binary in places, coloured, without a newline for hours (progress bars), cut in the middle of a
character, and have our own lines in it. Only its last piece is read; lines are cut at 4 kB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftsupervise.printable import OUR_TIME

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
LINE = 4096
# begins our own lines, with srun --label too: they are no sign of life of the run
_OURS = re.compile(r"(?:\d+: ?)?" + OUR_TIME + "ftsupervise")


def _not_after(*words: str) -> str:
    """Return a pattern that fails behind one of ``words`` and a separator: "max_", "eval "."""
    return "".join(rf"(?<!{word}[ _/-])" for word in words)


# "step 12", "step: 12/100", "global_step=12", "iteration     12/  500", "[iter 12]", "'step': 12". A number of steps is none:
# "max_steps: 1000", "warmup steps 100", "time per step: 3".
_COUNTS = (
    "max",
    "total",
    "num",
    "warmup",
    "eval",
    "val",
    "test",
    "save",
    "decay",
    "accumulation",
    "logging",
    "per",
    "every",
)
STEP = re.compile(
    rf"(?<![a-z]){_not_after(*_COUNTS, 'train', 'global')}"
    r"(?:global[ _-]?steps?|train[ _-]?step|step|iteration|iter|(?<![_-])(?:step|iteration|iter)s)"
    r"['\"]?\s*[:=#\]]?\s*(\d{1,15})\b(?!\.\d*[1-9])",
    re.I,
)
# "loss: 2.31", "lm loss: 2.31E+00", "train_loss=nan", "'loss': 2.31"; not "eval_loss: 2.9", nor the "inf" of "Loss info"
_OTHER_LOSSES = ("eval", "evaluation", "val", "valid", "validation", "test", "dev", "aux", "z", "balancing", "best")
LOSS = re.compile(
    rf"(?<![a-z]){_not_after(*_OTHER_LOSSES)}(?:lm[ _-]?loss|train[ _-]?loss|loss)"
    r"['\"]?\s*[:=]?\s*([-+]?(?:(?:nan|inf(?:inity)?)\b|\d+\.?\d*(?:e[-+]?\d+)?))",
    re.I,
)


def lines(data: bytes) -> Iterator[str]:
    """Yield the readable text of ``data``, line by line; a carriage return ends one too. Our own lines are left out."""
    for raw in re.split(rb"[\r\n]+", data):
        text = _UNSEEN.sub("", _ANSI.sub("", raw[:LINE].decode("utf-8", "replace"))).strip()
        if text and not _OURS.match(text):
            yield text


def last_step(data: bytes, pattern: re.Pattern[str] = STEP) -> int | None:
    """Return the step in the last line of ``data`` that has one."""
    found = None
    for line in lines(data):
        for match in pattern.finditer(line):
            try:
                found = int(match[1])
            except (ValueError, TypeError):  # the person's own pattern may catch anything
                continue
    return found


def numbers(data: bytes, pattern: re.Pattern[str] = LOSS) -> list[float]:
    """Return all losses in ``data``, NaN and infinities among them."""
    found = []
    for line in lines(data):
        for match in pattern.finditer(line):
            try:
                found.append(float(match[1]))
            except (ValueError, TypeError):
                continue
    return found


def whole(data: bytes, start: int) -> int:
    """Return the position to read from next time: behind the last end of line, so that a number cut in two is read
    again as one.

    A line without an end is not kept for longer than 4 kB.
    """
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return start + max(end, len(data) - LINE)
