"""Four replica groups under ``ftsupervise groups run`` on this machine: for what needs neither nodes nor a queue."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.replicas.scene import NAMES, Stamps
from ftsupervise.host import processes
from ftsupervise.rundir.paths import RunDir


class LocalRun(NamedTuple):
    child: subprocess.Popen[bytes]
    stamps: Stamps
    rundir: RunDir
    out: Path

    def said(self) -> str:
        return self.out.read_text(errors="replace")[-2000:]


@contextmanager
def local_run(*command: str, slowest_step: str = "3", **env: str) -> Iterator[LocalRun]:
    """``command`` in each group. Whatever is left of it is ended, and its files are removed."""
    folder = Path(tempfile.mkdtemp(prefix="fts-groups-", dir="/tmp"))
    stamps = Stamps(folder / "events")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "FTSUPERVISE_", "TORCH"))}
    kept |= {
        "BENCH_EVENTS": str(stamps.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    kept |= {"FTSUPERVISE_STATE_DIR": str(folder / "state"), "PYTHONWARNINGS": "ignore", **env}
    us = [sys.executable, "-m", "ftsupervise"]
    words = [*us, "run", "--run-dir", str(folder / "run"), "--hang", "off", "--warm", "off", "--"]
    words += [*us, "groups", "run", "--count", str(len(NAMES)), "--slowest-step", slowest_step, "--"]
    words += ["--in-place", "99", "--back-off", "0", "--", *command]
    out = folder / "out"
    with out.open("wb") as file:
        child = subprocess.Popen(words, cwd=folder, env=kept, stdout=file, stderr=file)
    try:
        yield LocalRun(child, stamps, RunDir(folder / "run"), out)
    finally:
        _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        for pid in (*processes.below(child.pid), child.pid):
            processes.send([pid], signal.SIGKILL)
        child.wait()
