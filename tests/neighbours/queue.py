"""A queue that waits, for Slurm's own words: squeue, sinfo and scontrol on a PATH, over one JSON file.

What real Slurm does with them is tested in tests/slurm; here it can be made to be away, or to hold what no cluster holds.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from ftsupervise.host.ownership import user_name

_PROGRAM = """#!{python}
import json, re, sys
name, page, words = sys.argv[0].rpartition("/")[2], {page!r}, sys.argv[1:]
state = json.load(open(page))
with open(page + ".asked", "a") as file:
    file.write(" ".join([name, *words]).replace("\\x1e", "").replace("\\x1f", "") + "\\n")
if state["away"]:
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
def listed(nodes):
    return ",".join(nodes) or "(null)"
if name == "sinfo":
    print("\\n".join(f"p*|{{node}}|idle|" for node in state["nodes"]))
elif name == "squeue":
    form = words[words.index("-o") + 1]
    for id, job in state["jobs"].items():
        facts = {{"i": id, "F": id.partition("_")[0], "A": id.partition("_")[0], "T": "PENDING", "D": str(job.get("nodes", 1)),
                 "P": "p", "x": listed(job["excluded"]), "f": "(null)", "r": job.get("reason", "Dependency"),
                 "k": job.get("comment", "ftsupervise:x:t0"), "u": {user!r}, "E": "(null)", "N": "",
                 "j": "x", "Z": "/", **job.get("facts", {{}})}}
        print(re.sub("%([a-zA-Z])", lambda m: facts.get(m[1], "N/A"), form))
elif words[:2] == ["show", "job"]:
    those = (job for id, job in state["jobs"].items() if id.partition("_")[0] == words[-1])
    print("\\n".join(f"JobId={{words[-1]}} Requeue={{int(job.get('requeue', False))}} Restarts=0" for job in those))
elif name == "scontrol":
    given = dict(word.split("=", 1) for word in words[1:])
    state["jobs"][given["JobId"]]["excluded"] = [one for one in given["ExcNodeList"].split(",") if one]
    json.dump(state, open(page, "w"))
"""


class Queue:
    """``jobs``: id -> {excluded: [...], reason: ..., facts: {"T": "RUNNING"}}, with squeue's letters.

    ``env`` is what who asks it needs."""

    def __init__(self, folder: Path, nodes: list[str], jobs: dict[str, dict[str, Any]], *, away: bool = False) -> None:
        self._page = folder / "queue.json"
        self.change(nodes=nodes, jobs=jobs, away=away)
        programs = folder / "bin"
        programs.mkdir()
        for name in ("squeue", "sinfo", "scontrol"):
            path = programs / name
            path.write_text(_PROGRAM.format(python=sys.executable, page=str(self._page), user=user_name()))
            path.chmod(0o755)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        self.env = {**clean, "PATH": f"{programs}:{os.environ['PATH']}"}

    def change(self, **more: Any) -> None:
        """Other ``nodes``, other ``jobs``, or ``away``."""
        state = json.loads(self._page.read_text()) if self._page.exists() else {}
        self._page.write_text(json.dumps({**state, **more}))

    def excluded(self) -> dict[str, list[str]]:
        """The excluded nodes of each job."""
        return {id: job["excluded"] for id, job in json.loads(self._page.read_text())["jobs"].items()}

    def asked(self, name: str) -> int:
        """How often ``name`` was called."""
        try:
            return len(re.findall(rf"^{name} ", Path(f"{self._page}.asked").read_text(), re.M))
        except FileNotFoundError:
            return 0
