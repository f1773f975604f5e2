"""The job of ``doctor --probe``: submitted with the run's own options and setup, waited for, and taken away again.

It is no member of the run: its name and its comment are its own, so nothing that looks for the run's jobs finds it. However
this ends, the job is cancelled and the folder removed; where this process was killed, the job ends after a minute, and the
folder that is left is called ``.tmp-doctor-…``. Slurm writes the output there by its name, so no job is submitted where others
could put another folder in its place.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.doctor.inside import BEGUN, NODE, SIGNAL, SWITCH, TOUCHED, BegunPage, MomentPage
from ftsupervise.doctor.seen import NodeSeen, TrialSeen
from ftsupervise.doctor.sights import program_of_python
from ftsupervise.errors import Error, SubmitRejected
from ftsupervise.host.ownership import OWN, SCRIPT, NotTrusted, claim_folder, distrust, held, open_above
from ftsupervise.host.processes import own_command
from ftsupervise.launch.plan import SbatchOptions, plan
from ftsupervise.launch.script import render
from ftsupervise.printable import printable
from ftsupervise.probe import NotSeen, Probe
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import read_record
from ftsupervise.scheduler import SLURM

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.scheduler.slurm import Slurm

NAME = "ftsupervise-doctor"
_NODES = 2  # at most: enough for a port between two
_LIMIT, _LEAD = "1", 30  # minutes of the job, and seconds before their end at which the signal is asked for
_OURS = (
    "job-name", "comment", "output", "error", "open-mode", "signal", "time", "nodes", "ntasks", "array", "dependency", "chdir",
    "requeue", "no-requeue", "no-kill", "mail-type", "mail-user", "begin", "deadline", "time-min",
)  # fmt: skip
_BEHIND = 40.0  # seconds behind its limit for which a job may still end
_POLL = 0.25
_ASK = 3.0  # seconds from one question about the job to the next
_WAITS = 30.0  # seconds that one turn of the wait may take, with a Slurm that is slow


class TrialWait(NamedTuple):
    """How long the job may wait in the queue, and what is told before each turn how long it may take, in seconds."""

    queued: timedelta
    tell: Callable[[float], None]


def options_of(given: SbatchOptions, nodes: int, folder: Path, token: str) -> SbatchOptions:
    """Return the options of the trial job: those of a member, ``given``, but for its time, its name and its size. Pure."""
    return {
        "job-name": NAME,
        "comment": f"{NAME}:{token}",
        "output": f"{str(folder).replace('%', '%%')}/output",
        "signal": f"B:USR1@{_LEAD}",
        "time": str(_LIMIT),
        "nodes": str(nodes),
        "no-requeue": None,
        **{name: value for name, value in given.items() if name not in _OURS},
    }


def try_in_a_job(
    run: Run, workdir: Path, at: Path, slurm: Slurm, probe: Probe, wait: TrialWait
) -> TrialSeen | NotSeen | str:
    """Submit the job, and return what it has seen; a sentence where it ended before it could say anything.

    ``at``: the run directory, or the nearest one above it that is there. Raises NotTrusted where others may put another folder
    in the place of one that is made there, OSError where nothing can be made.
    """
    if not run.share.launch:  # who may launch the run can do more than that
        _require_closed(at)
    folder = at / f".tmp-doctor-{secrets.token_hex(6)}"
    claim_folder(folder, OWN)
    with held(folder) as here:
        return _try(run, workdir, _TrialFolder(folder, here), slurm, probe, wait)


class _TrialFolder(NamedTuple):
    """The folder of the job. ``path``: its name, which the job and Slurm use; ``here``: leads to the one that was made."""

    path: Path
    here: Path


def _require_closed(at: Path) -> None:
    if why := distrust(at.stat(), at) or open_above(at):
        raise NotTrusted(
            f"{why}, and so have the job write into any file of yours: none was submitted",
            hint="take the right to write away (chmod go-w), or name another directory: run_dir:",
        )


def _try(
    run: Run, workdir: Path, folder: _TrialFolder, slurm: Slurm, probe: Probe, wait: TrialWait
) -> TrialSeen | NotSeen | str:
    token, nodes = folder.path.name.rpartition("-")[2], min(_NODES, run.launch.job_nodes)
    job = ""
    try:
        made = plan(run, kind=SLURM, token=token, workdir=workdir, python=sys.executable)
        words = (str(folder.path), str(run.run_dir), program_of_python(run), str(nodes))
        command = tuple(own_command(*words, module="ftsupervise.doctor.inside"))
        options = options_of(made.options, nodes, folder.path, token)
        script = render(
            replace(made, command=command, assignments=()), run.launch, options, packaged="doctor.sbatch.j2"
        )
        path = folder.path / "doctor.sbatch"
        write_whole(folder.here / path.name, script, mode=SCRIPT)
        wait.tell(_WAITS)
        try:
            job = slurm.submit(script, script_path=path, token=token, env=os.environ).job_id
        except SubmitRejected as error:
            return error.message
        return _follow(job, folder, slurm, probe, wait)
    finally:
        _take_away(job, folder, slurm)


def _follow(job: str, folder: _TrialFolder, slurm: Slurm, probe: Probe, wait: TrialWait) -> TrialSeen | NotSeen | str:
    begun: BegunPage | None = None
    touched, ahead, asked, until = 0.0, 0.0, 0.0, monotonic() + wait.queued.total_seconds()
    state = reason = ""
    while monotonic() < until:
        wait.tell(_WAITS)
        if begun is None and (begun := read_record(BegunPage, folder.here / BEGUN)) is not None:
            found = probe.clock_ahead(folder.path)
            ahead = found if isinstance(found, float) else 0.0
            touched = time()
            write_whole(folder.here / TOUCHED, b"")
            until = monotonic() + 60.0 + _BEHIND
        if begun is not None and (folder.here / SIGNAL).exists():
            break
        if monotonic() - asked > _ASK:
            asked = monotonic()
            try:
                found_job = slurm.describe(job)
            except Error:  # it is asked again
                found_job = None
                continue
            if found_job is None or found_job.state.ended:
                state = "is gone" if found_job is None else f"ended ({found_job.state.value})"
                break
            reason = found_job.reason
        sleep(_POLL)
    if begun is None and state:
        said = _last_words(folder.path, probe)
        return f"job {job} {state} before it could look{f': {said}' if said else ''}"
    if begun is None:
        waited = f"job {job} waited for {wait.queued.total_seconds():.0f} s in the queue ({reason or 'no reason'})"
        return NotSeen("trial job", f"{waited}, and was taken out of it")
    return _seen(job, folder.here, begun, touched, ahead)


def _seen(job: str, folder: Path, begun: BegunPage, touched: float, ahead: float) -> TrialSeen:
    switch, came = read_record(MomentPage, folder / SWITCH), read_record(MomentPage, folder / SIGNAL)
    nodes = tuple(
        page for path in sorted(folder.glob(f"{NODE}*.json")) if (page := read_record(NodeSeen, path)) is not None
    )
    there = (
        ahead - begun.ahead
    )  # by which the node's clock is ahead of ours: both were measured against the file server's
    return TrialSeen(
        job=job,
        host=begun.host,
        python=begun.python,
        place=begun.place,
        memory=begun.memory,
        switch_after=None if switch is None else max(0.0, switch.at - there - touched),
        ahead=there,
        signal_lead=None if came is None else (begun.end - came.at if begun.end else float(_LEAD)),
        nodes=nodes,
    )


def _last_words(folder: Path, probe: Probe) -> str:
    found = probe.text(folder / "output")
    lines = found.decode("utf-8", "replace").strip().splitlines() if isinstance(found, bytes) else []
    return printable(lines[-1], 300) if lines else ""


def _take_away(job: str, folder: _TrialFolder, slurm: Slurm) -> None:
    """Cancel the job and remove the folder: each as far as it goes."""
    if job:
        try:
            slurm.cancel(job)
        except Error:  # it ends by itself, after a minute
            pass
    for _ in range(3):  # a task may be about to write its page
        try:
            for name in os.listdir(folder.here):
                os.unlink(folder.here / name)
            folder.path.rmdir()
            return
        except OSError:
            sleep(_POLL)
