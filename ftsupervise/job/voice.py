"""The job ring's lines: on stderr, which is the job's output, and in the attempt's own log. Neither may fail the command."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path


def tell(log: Path | None, text: str) -> None:
    try:
        print(f"ftsupervise: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass
    if log is None:
        return
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(timezone.utc).isoformat(timespec='milliseconds')} {text}\n")
    except OSError:
        return


def shown(command: tuple[str, ...]) -> str:
    """A command in one line that is not too long."""
    import shlex

    text = shlex.join(command)
    return text if len(text) <= 200 else text[:199] + "…"
