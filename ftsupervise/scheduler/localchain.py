"""The detached process behind one local job: members one after the other, each with its limit and its warning.

Like Slurm: the warning signal goes to the batch shell alone, at the limit comes SIGTERM to everything, SIGKILL follows
after KillWait (30 s), and the next member starts when nothing of the old one is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.host.modes import as_page, make_folder
from ftsupervise.model import JobState
from ftsupervise.rundir.paths import ENV_JOB_ID
from ftsupervise.rundir.records import write_json
from ftsupervise.scheduler.local import AGAIN, ENV_OF, PREFIX, LocalState, read_job, read_state
from ftsupervise.units import signal_number

_ENDING = 5.0  # seconds for what a member left behind to be gone after SIGKILL
_KILL_WAIT = float(os.environ.get("FTSUPERVISE_LOCAL_KILL_WAIT", "30"))


class LocalChain:
    """Runs the members of the job in ``folder``. Its only file is state.json; ``cancel`` is written by others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = folder.name
        job = read_job(folder)
        if job is None:
            raise SystemExit(f"{folder} holds no job")
        self.job = job
        self.state = LocalState(os.getpid(), processes.identity(os.getpid()))

    def write(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        try:
            write_json(self.folder / "state.json", self.state, mode=0o600)
        except OSError as error:  # a full disk must not end the training
            print(f"state not written: {error}", flush=True)

    def cancelled(self) -> str:
        try:
            return (self.folder / "cancel").read_text("utf-8").strip()
        except OSError:
            return ""

    def main(self) -> None:
        signal.signal(signal.SIGHUP, lambda *_: None)  # interrupts the sleep; the request stands in the cancel file
        try:  # the one file that must be written: a chain that cannot be seen or cancelled must not run
            write_json(self.folder / "state.json", self.state, mode=0o600)
        except OSError as error:
            raise SystemExit(f"{self.folder} cannot be written: {error.strerror}") from None
        last = JobState.COMPLETED
        if not self._wait_for_other_job():
            return self.write(state=JobState.CANCELLED)
        for member in range(1, max(1, self.job.members) + 1):
            self._wait_while_held()
            if self.cancelled() in ("all", "pending"):
                break
            if self.cancelled() == f"member {member}":
                continue
            last = self._member(member)
            while self._back_in_the_queue():
                last = self._member(member)
            if self.cancelled() == f"member {member}":
                (self.folder / "cancel").unlink(missing_ok=True)
        return self.write(state=JobState.CANCELLED if self.cancelled() == "all" else last)

    def _wait_for_other_job(self) -> bool:
        """Wait as afterany does: until the other chain's process is gone or says it has ended.

        Returns False when cancelled meanwhile.
        """
        after = self.job.after.partition("_")[0]
        while after:
            if self.cancelled() in ("all", "pending"):
                return False
            try:
                other = read_state(self.folder.parent / after)
            except (OSError, ValueError):
                other = LocalState()
            if processes.identity(other.pid) != other.pid_start or (other.state.ended and other.member):
                break
            time.sleep(0.2)
        return True

    def _wait_while_held(self) -> None:
        if (self.folder / "hold").exists():
            self.write(state=JobState.PENDING)
        while (self.folder / "hold").exists() and self.cancelled() not in ("all", "pending"):
            time.sleep(0.2)

    def _back_in_the_queue(self) -> bool:
        """Return whether the member that has just ended had put itself back, and may run again now."""
        again = self.folder / AGAIN
        if not again.exists():
            return False
        self._wait_while_held()
        again.unlink(missing_ok=True)
        return not self.cancelled()

    def _member(self, member: int) -> JobState:
        members = self.job.members
        job_id = f"{PREFIX}{self.number}" + (f"_{member}" if members else "")
        limit = self.job.limit
        mark = f"{self.folder}:{member}"  # job ids begin at 1 in every state directory; a folder is there once
        env = {**os.environ, ENV_JOB_ID: job_id, ENV_OF: mark, "FTSUPERVISE_LOCAL_MEMBER": str(member)}
        if limit is not None:
            env["FTSUPERVISE_DEADLINE"] = str(int(time.time() + limit))
        now = time.time()
        # written before the start: if this process is killed now, a living member is not taken for a waiting one
        self.write(member=member, state=JobState.RUNNING, started=now, ends=now + limit if limit else None)
        try:
            patterns = (self.job.output, self.job.error or self.job.output)
            output, error = (self._file(pattern, member if members else None) for pattern in patterns)
            shell = subprocess.Popen(
                ["bash", str(self.folder / "script")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error,
                cwd=self.job.workdir,
                env=env,
                start_new_session=True,
                preexec_fn=processes.die_with_parent(),  # the training saves and leaves when we are killed
            )
            os.close(output)
            os.close(error)
        except OSError as why:
            print(f"{job_id} could not be started: {why}", flush=True)
            return JobState.FAILED
        verdict = self._follow(shell, mark, member, limit)
        self.write(state=JobState.COMPLETING, exit_code=shell.returncode)
        processes.end_all(lambda: _members(mark), _ENDING)
        return verdict

    def _follow(self, shell: subprocess.Popen[bytes], mark: str, member: int, limit: float | None) -> JobState:
        """Wait until the batch shell has ended: by itself, by cancellation, or at its limit."""
        started = time.monotonic()
        warned = limit is None
        while True:
            try:
                code = shell.wait(0.2)
                return JobState.COMPLETED if code == 0 else JobState.FAILED
            except subprocess.TimeoutExpired:
                pass
            elapsed = time.monotonic() - started
            if not warned and limit is not None and elapsed >= limit - self.job.lead:
                warned = True
                _signal_shell(shell, self.job.signal)
            over = limit is not None and elapsed >= limit
            if over or self.cancelled() in ("all", f"member {member}"):
                _terminate(shell, mark)
                return JobState.TIMEOUT if over else JobState.CANCELLED

    def _file(self, pattern: str, member: int | None) -> int:
        """Open a file of the job's, to append to. sbatch's patterns: %x name, %j and %A job, %a member, %% percent."""
        values = {"x": self.job.name, "j": f"{PREFIX}{self.number}" + (f"_{member}" if member else "")}
        values |= {"A": f"{PREFIX}{self.number}", "a": str(member or 0), "%": "%", "u": str(os.getuid())}
        path = Path(self.job.workdir) / re.sub("%(.)", lambda found: values.get(found[1], found[0]), pattern)
        make_folder(path.parent, parents=True)
        if str(path) == os.devnull:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return as_page(path)


def _signal_shell(shell: subprocess.Popen[bytes], name: str) -> None:
    shell.send_signal(signal_number(name))


def _terminate(shell: subprocess.Popen[bytes], mark: str) -> None:
    """Send SIGTERM to all processes of the member, and SIGKILL to those that are left after KillWait."""
    left = _members(mark)
    for one in left:
        processes.signal_exactly(one, signal.SIGTERM)
        processes.signal_exactly(one, signal.SIGCONT)
    deadline = time.monotonic() + _KILL_WAIT
    while time.monotonic() < deadline and (left or shell.poll() is None):
        time.sleep(0.1)
        left = processes.wait_gone({*left, *_members(mark)}, 0)
    processes.end_all(lambda: _members(mark), _ENDING, left)
    try:
        shell.wait(5)
    except subprocess.TimeoutExpired:
        print(f"{mark}: the batch shell {shell.pid} does not die", flush=True)


def _members(mark: str) -> list[processes.Process]:
    return processes.marked(ENV_OF).get(mark, [])


if __name__ == "__main__":
    LocalChain(Path(sys.argv[1])).main()
