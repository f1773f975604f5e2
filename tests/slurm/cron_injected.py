"""The faults that a chain and a cluster of chains have to live through. A fault says whether it could be injected."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from ftsupervise.crontab import history
from ftsupervise.crontab.installation import need_installed
from ftsupervise.rundir.records import read_json
from tests.slurm.cron_lab import Lab, OneCron, now


def processes_of(job: str, cluster: str) -> list[int]:
    """Everything that a job of this cluster started on this machine, but Slurm's own step daemon."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={cluster}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def kill_job(one: OneCron, job: str) -> bool:
    told = 0
    for pid in processes_of(job, one.env["SLURM_CONF"]):
        try:
            os.kill(pid, signal.SIGKILL)
            told += 1
        except OSError:
            continue
    return told > 0


# ------------------------------------------------------------------------------------------------- faults of one chain


def killed_at_once(one: OneCron) -> bool:
    """SIGKILL at its very start, before it can have queued its successor."""
    until = time.monotonic() + 4 * one.period
    while time.monotonic() < until:
        job = one.wait_running(1)
        if job and kill_job(one, job):
            return True
    return False


def killed_after_it_queued(one: OneCron) -> bool:
    """SIGKILL as soon as the slot's successors are in the queue, before or while the entries run."""
    seen = set(history.slots(one.cron))
    until = time.monotonic() + max(3 * one.period, 60)
    while time.monotonic() < until:
        fresh = [at for at in history.slots(one.cron) if at not in seen]
        if fresh and history.is_ensured(one.cron, fresh[-1], 0):
            if sum(kill_job(one, job) for job in one.running()) > 0:
                return True
            seen = set(history.slots(one.cron))  # it was over before we came
        time.sleep(0.01)
    return False


def killed_somewhere(one: OneCron) -> bool:
    until = time.monotonic() + 4 * one.period
    while time.monotonic() < until:
        job = one.wait_running(1)
        time.sleep(random.uniform(0, 0.6))
        if job and kill_job(one, job):
            return True
    return False


def successor_cancelled(one: OneCron) -> bool:
    pending = one.pending()
    if pending:
        one.sandbox.run(["scancel", random.choice(pending)])
    return bool(pending)


def running_cancelled(one: OneCron) -> bool:
    job = one.wait_running(3 * one.period)
    if job:
        one.sandbox.run(["scancel", job])
    return bool(job)


def requeued(one: OneCron) -> bool:
    """--no-requeue refuses it; somebody who insists gets it all the same, and the slot is claimed already."""
    job = one.wait_running(3 * one.period)
    if not job:
        return False
    subprocess.run(["scontrol", "update", f"JobId={job}", "Requeue=1"], env=one.env, capture_output=True, check=False)
    done = subprocess.run(["scontrol", "requeue", job], env=one.env, capture_output=True, text=True, check=False)
    return done.returncode == 0


def installed_by_two(one: OneCron) -> bool:
    """Two people type install at the same moment, with the chain alive or just cancelled."""
    if random.random() < 0.5:
        for job in one.pending():
            one.sandbox.run(["scancel", job])
    argv = [sys.executable, "-m", "ftsupervise", "cron", "install"]
    both = [
        subprocess.Popen(argv, cwd=one.home, env=one.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [child.communicate(timeout=180)[0] for child in both]
    assert [child.returncode for child in both] == [0, 0], said
    return True


def everything_cancelled_and_a_run_notices(one: OneCron) -> bool:
    """scancel of the whole chain: a run's own job, looking once a period, brings it back."""
    from ftsupervise.crontab.keepalive import look_after
    from ftsupervise.truth import Health

    bound = time.monotonic() + 60
    while (jobs := one.jobs()) and time.monotonic() < bound:  # a tick that dies slowly may hand one more in
        for job in jobs:
            one.sandbox.run(["scancel", job])
        time.sleep(0.1)
    until = time.monotonic() + 6 * one.period
    while time.monotonic() < until:
        found = look_after(one.cron.root, one.slurm(), now(), run="train")
        assert found is not None
        assert found.health is not Health.BAD, found.summary
        if "brought back" in found.summary:
            return True
        time.sleep(one.period)
    return False


def entry_hangs(one: OneCron) -> bool:
    """A script that hears nothing and has children that hear nothing: ended at its bound, at the next slots skipped."""
    path = one.cron.folder("minutely") / "hang"
    ready = one.home / "hanging"
    ready.unlink(missing_ok=True)
    temp = one.home / "hang.new"
    temp.write_text(f"#!/bin/sh\ntrap '' TERM HUP INT\nsetsid sleep 7777 &\ntouch {ready}\nsleep 7777\n")
    temp.chmod(0o755)
    installed = need_installed(one.cron)
    assert installed.limit < timedelta(seconds=60)
    temp.replace(path)
    until = time.monotonic() + 90
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.1)
    path.unlink()
    return ready.exists()


# ---------------------------------------------------------------------------------------------- faults of the cluster


def controller_down(lab: Lab, seconds: float) -> None:
    lab.sandbox.controller("kill")
    time.sleep(seconds)
    lab.sandbox.controller("start")
    lab.sandbox.wait_ready(60)


def controller_hangs(lab: Lab, seconds: float) -> None:
    lab.sandbox.controller("pause")
    time.sleep(seconds)
    lab.sandbox.controller("cont")
    lab.sandbox.wait_ready(60)


def nodes_crash(lab: Lab) -> None:
    """The node on which a tick runs, or else any, loses its power for a while."""
    nodes = lab.sandbox.run(["squeue", "-h", "-t", "RUNNING", "-o", "%N"]).split()
    node = nodes[0] if nodes else f"node-{lab.luck.randrange(lab.sandbox.shape.nodes)}"
    lab.sandbox.node(node, "crash")
    time.sleep(lab.luck.uniform(0, 2 * lab.period))
    lab.sandbox.node(node, "start")


def scheduler_late(lab: Lab, periods: float) -> None:
    """Nothing starts for more slots than there are spares; then all that is overdue starts at once."""
    lab.sandbox.run(["scontrol", "update", "PartitionName=prod", "State=DOWN"])
    time.sleep(periods * lab.period)
    lab.sandbox.run(["scontrol", "update", "PartitionName=prod", "State=UP"])


def time_limit_reached(one: OneCron) -> bool:
    """Slurm ends a tick whose script goes on for too long; its limit loop runs every 30 s."""
    job = ""
    until = time.monotonic() + 120
    while time.monotonic() < until and not job:
        busy = [one.cron.runs / "minutely.long" / "last" / "start.json"]
        record = read_json(busy[0]) if busy[0].exists() else None
        job = str(record.get("tick_job")) if record and str(record.get("tick_job")) in one.running() else ""
        time.sleep(0.2)
    if not job:
        return False
    one.sandbox.run(["scontrol", "update", f"JobId={job}", "TimeLimit=1"])
    while job in one.running() and time.monotonic() < until + 60:
        time.sleep(0.5)
    return one.sandbox.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]).strip() == "TIMEOUT"
