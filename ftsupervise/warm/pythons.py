"""Is a command plainly a Python program, perhaps through srun? Pure. Only then can a standby replace its start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftsupervise.scheduler.parse import is_srun

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SRUN_FLAGS = frozenset("EHIkKlOQsuvXZ")  # srun's short options without a value
_SRUN_LONG_FLAGS = (
    *("contiguous", "disable-status", "exact", "exclusive", "hold", "immediate", "interactive", "kill-on-bad-exit"),
    *("label", "nice", "no-allocate", "no-kill", "overcommit", "overlap", "oversubscribe", "preserve-env", "quiet"),
    *("reboot", "send-libs", "spread-job", "unbuffered", "use-min-nodes", "verbose", "wait-all-nodes", "whole"),
)
_NEVER = ("--multi-prog", "--pty", "--het-group", "--chdir", "--export", "--container", "--no-container", "--propagate")
_FLAGS = frozenset("bBdOPqRsuv")  # Python's options that a standby can be started with


@dataclass(frozen=True)
class PythonCommand:
    """``words`` begins at the interpreter, which stands at ``at`` in the whole; the ``flags`` words after it are its own."""

    at: int
    words: tuple[str, ...]
    flags: int
    srun: bool

    @property
    def python(self) -> str:
        return self.words[0]


def parse(command: Sequence[str]) -> PythonCommand | str:
    """The parsed command, or the reason why no standby can replace its start."""
    if not command:
        return "there is no command"
    srun = is_srun(command)
    if srun and ":" in command:
        return "srun starts several programs"
    at = _after_srun(command) if srun else 0
    if isinstance(at, str):
        return at
    words = tuple(command[at:])
    if not words or not _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return f"the command does not start with python ({words[0] if words else 'srun alone'})"
    flags = _flags(words)
    return flags if isinstance(flags, str) else PythonCommand(at, words, flags, srun)


def _after_srun(command: Sequence[str]) -> int | str:
    """The index at which the command of srun begins."""
    at = 1
    while at < len(command):
        word = command[at]
        if word == "--":
            return at + 1
        if not word.startswith("-") or word == "-":
            return at
        name = word.partition("=")[0]
        long = word.startswith("--")
        if word.startswith("-D") or (long and any(name.startswith(one) or one.startswith(name) for one in _NEVER)):
            return f"srun {name} changes what a rank gets"
        alone = "=" in word or name[2:] in _SRUN_LONG_FLAGS if long else len(word) > 2 or word[1] in _SRUN_FLAGS
        at += 1 if alone else 2
    return at


def _flags(words: tuple[str, ...]) -> int | str:
    """The number of words after ``words[0]`` that are the interpreter's options."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-":
            break
        if not word.startswith("-"):
            return at - 1
        if word.startswith("--"):
            return f"python {word}"
        for place, letter in enumerate(word[1:], 1):
            if letter in "cm":
                return at - 1 if place == 1 else f"python {word}"
            if letter in "WX":
                at += place + 1 == len(word)
                break
            if letter not in _FLAGS:
                return f"python -{letter}"
        at += 1
    return "python reads its program from its input"
