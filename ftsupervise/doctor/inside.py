"""The program of the job of ``doctor --probe``: it looks around on the nodes and waits for the warning signal.

    start.py -m ftsupervise.doctor.inside FOLDER RUN_DIR PROGRAM NODES     in the place of the batch script
    start.py -m ftsupervise.doctor.inside --node FOLDER ADDRESS PORT       a task of it, one on each node

It writes pages into FOLDER, which the command that submitted it has made beside the run directory, and reads there; it ends
when the signal has come, or the folder is gone. Slurm's time limit, one minute, ends it in any case.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ftsupervise.doctor import here
from ftsupervise.doctor.seen import MemorySeen, NodeSeen, PlaceSeen, PythonSeen
from ftsupervise.host import bounded
from ftsupervise.host.addresses import own_address
from ftsupervise.host.processes import own_command
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.rundir.records import write_json
from ftsupervise.scheduler import ask_slurm_for_the_deadline, deadline_from_environment
from ftsupervise.scheduler.parse import srun

BEGUN, SWITCH, SIGNAL, TOUCHED, NODE = "begun.json", "switch.json", "signal.json", "touched", "node-"
_LOOK = 0.05  # seconds from one look for the touched file to the next
_TASKS = 40.0  # seconds for the tasks on the other nodes
_PYTHON = 20.0  # seconds: an environment on a busy file server takes some to import
_CONNECT = 5.0


class BegunPage(NamedTuple):
    """What the job saw at its start. ``ahead``: seconds by which the file server's clock is ahead of its node's."""

    host: str
    job: str
    place: PlaceSeen
    ahead: float
    end: float  # epoch seconds of its limit, by its own clock; 0.0: not known
    python: PythonSeen | None = None
    memory: MemorySeen | None = None


class MomentPage(NamedTuple):
    """When something came, in epoch seconds of the node's clock."""

    at: float


def main(words: Sequence[str]) -> None:
    """Run either program. ``words``: those behind the module's name."""
    if words[0] == "--node":
        _node(Path(words[1]), words[2], int(words[3]))
    else:
        _job(Path(words[0]), words[1], words[2], int(words[3]))


def _job(folder: Path, run_dir: str, program: str, nodes: int) -> None:
    came: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append(time.time()))
    write_json(folder / BEGUN, _begun(folder, run_dir, program))
    if nodes > 1:
        threading.Thread(target=_ask_the_nodes, args=(folder, nodes), daemon=True).start()
    seen = False
    while not came and folder.is_dir():
        if not seen and _is_there(folder):
            seen = True
            write_json(folder / SWITCH, MomentPage(time.time()))
        time.sleep(_LOOK)
    if came:
        write_json(folder / SIGNAL, MomentPage(came[0]))


def _is_there(folder: Path) -> bool:
    try:
        return TOUCHED in os.listdir(folder)  # a listing sees what a cached look-up misses
    except OSError:
        return False


def _begun(folder: Path, run_dir: str, program: str) -> BegunPage:
    end = deadline_from_environment(os.environ) or ask_slurm_for_the_deadline(os.environ) or 0.0
    memory = None
    try:
        memory = MemorySeen(*here.look_at_memory())
    except (OSError, ValueError):
        pass
    return BegunPage(
        host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        job=os.environ.get("SLURM_JOB_ID", ""),
        place=PlaceSeen(**here.try_place(run_dir)),  # type: ignore[arg-type]
        ahead=_clock_ahead(folder),
        end=end,
        python=PythonSeen(*here.ask_python(program, os.environ, ".", _PYTHON)) if program else None,
        memory=memory,
    )


def _clock_ahead(folder: Path) -> float:
    page = folder / f"clock-{os.getpid()}-{os.uname().nodename}"
    before = time.time()
    write_json(page, MomentPage(before))
    return page.stat().st_mtime - (before + time.time()) / 2


def _ask_the_nodes(folder: Path, nodes: int) -> None:
    """Start a task on each node, which connects to a port here: to be connected is enough. Each connection is closed at
    once: those of other accounts would fill the queue."""
    names = expand_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))
    with socket.socket() as port:
        port.bind(("", 0))
        port.listen(len(names) + 8)
        threading.Thread(target=_close_each, args=(port,), daemon=True).start()
        address = own_address([one for one in names if one != os.environ.get("SLURMD_NODENAME")])
        task = own_command(
            "--node", str(folder), address, str(port.getsockname()[1]), module="ftsupervise.doctor.inside"
        )
        bounded.run(
            [*srun("--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"), *task], timeout=_TASKS
        )
        port.shutdown(socket.SHUT_RDWR)


def _close_each(port: socket.socket) -> None:
    while True:
        try:
            port.accept()[0].close()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                return
            time.sleep(_LOOK)


def _node(folder: Path, address: str, port: int) -> None:
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    sees = (folder / BEGUN).is_file()
    why = ""
    try:
        socket.create_connection((address, port), timeout=_CONNECT).close()
    except OSError as error:
        why = f"{address}:{port}: {error.strerror or error}"
    write_json(folder / f"{NODE}{name}.json", NodeSeen(name, sees, _clock_ahead(folder), why))


if __name__ == "__main__":
    main(sys.argv[1:])
