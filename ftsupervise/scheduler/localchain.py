"""The detached process behind one local job: members one after the other, each with its limit and its warning.

Like Slurm: the warning signal goes to the batch shell alone, at the limit comes SIGTERM to everything, SIGKILL follows
after KillWait (30 s), and the next member starts when nothing of the old one is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from ftsupervise.host.modes import as_page, make_folder
from ftsupervise.host.procfs import identity
from ftsupervise.model import JobState
from ftsupervise.rundir.paths import ENV_JOB_ID
from ftsupervise.rundir.records import as_count, write_json
from ftsupervise.scheduler.local import ENV_OF, PREFIX, LocalState, marked, read_job, read_state

_PR_SET_PDEATHSIG = 1
_Process = tuple[int, int]  # its number and its start
_KILL_WAIT = float(os.environ.get("FTSUPERVISE_LOCAL_KILL_WAIT", "30"))


class Chain:
    """Runs the members of the job in ``folder``. Its only file is state.json; ``cancel`` is written by others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = folder.name
        job = read_job(folder)
        if job is None:
            raise SystemExit(f"{folder} holds no job")
        self.job = job
        self.state = LocalState(os.getpid(), identity(os.getpid()))

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
        signal.signal(signal.SIGHUP, lambda *_: None)  # interrupts the sleep; what is asked stands in the cancel file
        try:  # the one page that must be there: a chain that nobody can see or cancel must not run
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
            if self.cancelled() == f"member {member}":
                (self.folder / "cancel").unlink(missing_ok=True)
        return self.write(state=JobState.CANCELLED if self.cancelled() == "all" else last)

    def _wait_for_other_job(self) -> bool:
        """afterany: until the other chain's process is gone or says it has ended. False when cancelled meanwhile."""
        after = self.job.after.partition("_")[0]
        while after:
            if self.cancelled() in ("all", "pending"):
                return False
            try:
                other = read_state(self.folder.parent / after)
            except (OSError, ValueError):
                other = LocalState()
            if identity(other.pid) != other.pid_start or (other.state.ended and other.member):
                break
            time.sleep(0.2)
        return True

    def _wait_while_held(self) -> None:
        if (self.folder / "hold").exists():
            self.write(state=JobState.PENDING)
        while (self.folder / "hold").exists() and self.cancelled() not in ("all", "pending"):
            time.sleep(0.2)

    def _member(self, member: int) -> JobState:
        members = self.job.members
        job_id = f"{PREFIX}{self.number}" + (f"_{member}" if members else "")
        limit = self.job.limit
        mark = f"{self.folder}:{member}"  # job ids begin at 1 in every state directory; a folder is there once
        env = {**os.environ, ENV_JOB_ID: job_id, ENV_OF: mark, "FTSUPERVISE_LOCAL_MEMBER": str(member)}
        if limit is not None:
            env["FTSUPERVISE_DEADLINE"] = str(int(time.time() + limit))
        now = time.time()
        # before there is anybody: a member that lives is never one that waits, should this process be killed meanwhile
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
                preexec_fn=_tell_me_when_you_die(),
            )
            os.close(output)
            os.close(error)
        except OSError as why:
            print(f"{job_id} could not be started: {why}", flush=True)
            return JobState.FAILED
        verdict = self._follow(shell, mark, member, limit)
        self.write(state=JobState.COMPLETING, exit_code=shell.returncode)
        _end_all(mark)
        return verdict

    def _follow(self, shell: subprocess.Popen[bytes], mark: str, member: int, limit: float | None) -> JobState:
        """Until the batch shell has ended: by itself, by cancellation, or at its limit."""
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
        """A file of the job's, to append to. sbatch's patterns: %x name, %j and %A job, %a member, %% percent."""
        values = {"x": self.job.name, "j": f"{PREFIX}{self.number}" + (f"_{member}" if member else "")}
        values |= {"A": f"{PREFIX}{self.number}", "a": str(member or 0), "%": "%", "u": str(os.getuid())}
        pieces = pattern.split("%")
        name, rest, index = pieces[0], pieces[1:], 0
        while index < len(rest):
            if rest[index] == "" and index + 1 < len(rest):  # "%%"
                name += "%" + rest[index + 1]
                index += 2
            else:
                letter = rest[index][:1]
                name += values.get(letter, f"%{letter}") + rest[index][1:]
                index += 1
        path = Path(self.job.workdir) / name
        make_folder(path.parent, parents=True)
        if str(path) == os.devnull:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return as_page(path)


def _signal_shell(shell: subprocess.Popen[bytes], name: str) -> None:
    number = as_count(name)
    named = getattr(signal, f"SIG{name.removeprefix('SIG')}", signal.SIGUSR1)
    shell.send_signal(named if number is None else number)


def _tell_me_when_you_die() -> Callable[[], None]:
    """For a child before its exec: SIGTERM when this process is killed, so that the training saves and leaves."""
    import ctypes

    libc, parent = ctypes.CDLL(None), os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _processes(mark: str) -> list[int]:
    return marked().get(mark, [])


def _signal_all(mark: str, number: int) -> None:
    for pid in _processes(mark):
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def _terminate(shell: subprocess.Popen[bytes], mark: str) -> None:
    _signal_all(mark, signal.SIGTERM)
    _signal_all(mark, signal.SIGCONT)
    deadline, left = time.monotonic() + _KILL_WAIT, set[_Process]()
    while time.monotonic() < deadline:
        left = _living(mark, left)
        if not left and shell.poll() is not None:
            break
        time.sleep(0.1)
    _end_all(mark, left)
    try:
        shell.wait(5)
    except subprocess.TimeoutExpired:
        print(f"{mark}: the batch shell {shell.pid} does not die", flush=True)


def _end_all(mark: str, left: Set[_Process] = frozenset()) -> None:
    """SIGKILL whatever the member left behind, for at most five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (left := _living(mark, left)):
        _signal_all(mark, signal.SIGKILL)
        time.sleep(0.05)


def _living(mark: str, known: Set[_Process]) -> set[_Process]:
    """Processes with ``mark``, and those ``known`` that still live: one that is dying has no environment any more, and may
    still hold what the next member needs."""
    seen = known | {(pid, start) for pid in _processes(mark) if (start := identity(pid)) is not None}
    return {(pid, start) for pid, start in seen if identity(pid) == start}


if __name__ == "__main__":
    Chain(Path(sys.argv[1])).main()
