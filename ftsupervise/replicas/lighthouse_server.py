"""torchft's lighthouse as a program of 17 MB that listens within 50 ms: ``python -I lighthouse_server.py …``.

The command ``torchft_lighthouse`` imports torch first: 230 MB, and two seconds or more in which all groups wait. The lighthouse
itself needs nothing of it. So this loads the one compiled module of torchft that has it, and nothing else.

It runs in the Python of the training, which has torchft and need not have ftsupervise: standard library only, and any Python
from 3.8. It answers with one JSON object on its standard output, and ends when its standard input does: its supervisor is gone.

    lighthouse_server.py                                              which torchft this Python has
    lighthouse_server.py HOST:PORT MIN JOIN_MS TICK_MS HEARTBEAT_MS   the lighthouse
"""

# ruff: noqa: PTH113, PTH117, PTH118, PTH120 - pathlib costs more to import than all the rest of this program

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MODULE = "_torchft"


def found() -> tuple[str, str]:
    """The compiled module of this Python's torchft, and its version; "" for what is not there."""
    outer = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [entry for entry in outer if os.path.isabs(entry)] + sys.path + _own_site()
    spec = PathFinder.find_spec("torchft", places) or _installed_otherwise()
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for suffix in EXTENSION_SUFFIXES:
            path = os.path.join(folder, _MODULE + suffix)
            if os.path.isfile(path):
                return path, _version(os.path.dirname(folder))
    return "", ""


def _own_site() -> list[str]:
    """The account's own packages, which ``-I`` leaves out and the training finds."""
    if sys.prefix != sys.base_prefix or "PYTHONNOUSERSITE" in os.environ:
        return []
    import site

    folder = site.getusersitepackages()
    return [folder] if os.path.isabs(folder) else []


def _installed_otherwise() -> ModuleSpec | None:
    """Find it by a finder of its own, as a package that is being worked on has."""
    from importlib.util import find_spec

    try:
        return find_spec("torchft")
    except (ImportError, ValueError):
        return None


def _version(folder: str) -> str:
    for name in sorted(os.listdir(folder)):
        if name.startswith(("torchft-", "torchft_nightly-")) and name.endswith(".dist-info"):
            return name[: -len(".dist-info")].partition("-")[2]
    return ""


def answer(**said: object) -> None:
    import json

    os.write(1, json.dumps(said).encode() + b"\n")


def die_with_parent() -> None:
    """Also while this process is stopped, in which it would not see the end of its input."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    except (ImportError, AttributeError, OSError):  # a Python without libffi
        return


def serve(path: str, version: str, words: list[str]) -> NoReturn:
    bind, minimum, join, tick, heartbeat = words
    spec = ModuleSpec(_MODULE, None, origin=path)
    loader = ExtensionFileLoader(_MODULE, path)
    try:
        module: Any = loader.create_module(spec)
        loader.exec_module(module)
        server = module.LighthouseServer(
            bind=bind,
            min_replicas=int(minimum),
            join_timeout_ms=int(join),
            quorum_tick_ms=int(tick),
            heartbeat_timeout_ms=int(heartbeat),
        )
    except Exception as error:  # it is compiled code: whatever it says is told to the supervisor
        answer(problem=str(error)[:500], errno=_errno(str(error)))
        os._exit(1)
    answer(listening=True, version=version)
    while os.read(0, 4096):
        pass
    del server
    os._exit(0)


def _errno(words: str) -> int:
    """98 of "Address already in use (os error 98)"."""
    number = words.rpartition("(os error ")[2].rstrip(")")
    return int(number) if number.isdigit() else 0


def main() -> None:
    words = sys.argv[1:]
    if words:
        die_with_parent()
    path, version = found()
    if not words or not path:
        answer(torchft=path, version=version)
        os._exit(0 if path else 3)
    serve(path, version, words)


if __name__ == "__main__":
    main()
