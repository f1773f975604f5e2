"""Find the Python that has torchft: the training command's, which need not be the one that runs ftsupervise.

The lighthouse has to be of the same torchft as the groups. So the interpreters that the command names are asked first, then the
one that PATH names, and ours last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import NotFound
from ftsupervise.host import bounded, files
from ftsupervise.host.begin import on_path
from ftsupervise.rundir.records import as_text, parse_object

SERVER = Path(__file__).with_name("lighthouse_server.py")
_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?")
_WORDS = 64  # of a command that are looked at
_MOST = 4  # interpreters that are asked
_WITHIN = 20.0  # seconds for each: from a cold network file system


class TorchftPython(NamedTuple):
    """An interpreter by its full path, and the version of torchft that it has ("" where that is not written down)."""

    python: str
    version: str = ""


def find_torchft(command: Sequence[str], env: Mapping[str, str]) -> TorchftPython:
    """The first interpreter of ``command`` and ``env`` that has torchft. Raises NotFound, with those that were asked."""
    said: list[str] = []
    for python in _candidates(command, env):
        done = _ask(python, env)
        if isinstance(done, TorchftPython):
            return done
        said.append(f"{python} ({done})")
        if len(said) == _MOST:
            break
    raise NotFound(
        "replica groups need torchft, and no Python of this run has it: " + ", ".join(said),
        hint="in the environment of the training command: pip install 'ftsupervise[torchft]'",
    )


def _ask(python: str, env: Mapping[str, str]) -> TorchftPython | str:
    """It, or why not."""
    try:
        done = bounded.run([python, "-I", str(SERVER)], timeout=_WITHIN, env=env, cwd="/")
    except OSError as error:
        return error.strerror or "it cannot be started"
    if done.timed_out:
        return f"no answer within {_WITHIN:.0f} s"
    try:
        told = parse_object(done.stdout.encode())
    except ValueError:
        return "it cannot say"
    return TorchftPython(python, as_text(told.get("version"), 60)) if told.get("torchft") else "it has none"


def _candidates(command: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    seen = set()
    for python in (*_named(command, env), *_on_path(("python3", "python"), env), sys.executable):
        if python and python not in seen:
            seen.add(python)
            yield python


def _named(command: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """The interpreters that the command names, and those of its programs, as torchrun's."""
    for word in command[:_WORDS]:
        if _PYTHON.fullmatch(_name(word)):
            yield from _on_path((word,), env)
    for word in command[:_WORDS]:
        if not word.startswith("-") and "=" not in word:
            yield from (_shebang(path) for path in _on_path((word,), env))


def _on_path(names: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        if (found := on_path(name, env)) is not None and found.startswith("/"):
            yield found


def _shebang(path: str) -> str:
    """The Python in the first line of a script; "" where it has none."""
    try:
        fd = files.open_regular(path, follow=True)
    except OSError:
        return ""
    try:
        first = os.read(fd, 256)
    except OSError:
        return ""
    finally:
        os.close(fd)
    words = os.fsdecode(first.partition(b"\n")[0]).removeprefix("#!").split() if first.startswith(b"#!") else []
    return words[0] if words and words[0].startswith("/") and _PYTHON.fullmatch(_name(words[0])) else ""


def _name(word: str) -> str:
    return word.rpartition("/")[2]
