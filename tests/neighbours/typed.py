"""A command of ours, typed as a person would: in a process of its own, with an end to wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FT = (sys.executable, "-m", "ftsupervise")


def typed(
    *words: str | Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    code: int | None = None,
    answer: str | None = None,
    seconds: float = 120.0,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """``typed("status", run, folder=tmp_path, FTSUPERVISE_STATE_DIR=state)``: what it said, and its exit code.

    ``env``: its whole environment, in place of ours; ``more`` comes on top. ``code``: the exit code that it must have, None:
    any. ``answer``: what a person types into it. Fails where the command shows a traceback.
    """
    done = subprocess.run(
        [*FT, *map(str, words)], cwd=folder, env={**(os.environ if env is None else env), **more}, input=answer,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done
