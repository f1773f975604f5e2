"""The one way to start a Python of ours: a command line that no other account can influence.

Every ``python -m ftsupervise …`` that is put into a job script, a crontab line or a child process is built here, so that none
runs a stranger's module in the current directory (see ``ftsupervise/start.py``). The environment is left alone: the training
command below it keeps its PYTHONPATH and finds its own modules as before.
"""

from __future__ import annotations

import os
import sys

START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "start.py")  # noqa: PTH100, PTH118, PTH120


def command(*words: str, module: str | None = None, python: str | None = None) -> list[str]:
    """``ftsupervise WORD …``, or another program of this package (``module``: "ftsupervise.ranks"), as a command line.

    ``python``: the interpreter, by its full path; the one that runs this if it is not said.
    """
    program = ["-m", module] if module else []
    return [python or sys.executable, "-I", START, *program, *words]
