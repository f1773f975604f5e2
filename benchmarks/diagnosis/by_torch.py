"""Asks PyTorch's own analyzer about the dumps in a folder: a folder a line on standard input, an answer a line, as JSON.

The answers are two: of the dumps as they are, and of the dumps mended so that it can read those of gloo, whose names of groups
and whose states are not those that it asks for.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder import fr_trace


def mended(dump: dict[str, Any], ranks: int) -> dict[str, Any]:
    entries = [
        {**one, "state": "completed"} if one.get("retired") and one["state"] == "scheduled" else one
        for one in dump.get("entries", ())
    ]
    groups = {one["process_group"][0]: one["process_group"][1] for one in entries}
    config = {name: {"name": name, "desc": text, "ranks": str(list(range(ranks)))} for name, text in groups.items()}
    return {**dump, "entries": entries, "pg_config": config}


def said_of(dumps: dict[int, dict[str, Any]]) -> str:
    with tempfile.TemporaryDirectory(prefix="fts-dumps-") as folder:
        for rank, dump in dumps.items():
            entries = [
                {"frames": [], **one, "process_group": tuple(one["process_group"])} for one in dump.get("entries", ())
            ]
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps({**dump, "entries": entries, "rank": rank}))
        said = io.StringIO()
        handler = logging.StreamHandler(said)
        logging.getLogger().addHandler(handler)
        try:
            with redirect_stdout(said), redirect_stderr(said):
                fr_trace.main([folder, "-p", "rank_"])
        except (Exception, SystemExit) as error:
            return f"{said.getvalue()[-2000:]}\n{type(error).__name__}: {error}"
        finally:
            logging.getLogger().removeHandler(handler)
    return said.getvalue()[:3000]


def loaded(path: Path) -> dict[str, Any]:
    """Return a dump: JSON where a worker server gave it, a pickle where the guard left it."""
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(raw) if raw[:1] == b"{" else pickle.loads(raw)
    return found


for line in sys.stdin:
    folder, many = json.loads(line)
    dumps = {int(one.name.rpartition("_")[2]): loaded(one) for one in sorted(Path(folder).glob("rank_*"))}
    answers = (
        [said_of(dumps), said_of({rank: mended(dump, many) for rank, dump in dumps.items()})] if dumps else ["", ""]
    )
    sys.stdout.write(json.dumps(answers) + "\n")
    sys.stdout.flush()
