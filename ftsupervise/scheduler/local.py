"""The embedded default: the same chain of jobs on this machine, with time limit and warning signal, without Slurm.

A job is a directory ``STATE/local/N`` and one detached process that runs its members one after the
other. Everything the queue says is read from those directories and checked against the living processes.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.errors import NotPermitted, SchedulerUnavailable, SubmitRejected, from_os_error
from ftsupervise.host import files, processes
from ftsupervise.host.ownership import as_page, make_folder, make_own, user_name
from ftsupervise.host.processes import Process, lives, marked, signal_exactly
from ftsupervise.model import Job, JobState, Submitted
from ftsupervise.printable import to_type
from ftsupervise.rundir.paths import ENV_JOB_ID, state_dir, write_whole
from ftsupervise.rundir.records import as_count, read_record, write_json
from ftsupervise.scheduler import LOCAL, SCHEDULERS
from ftsupervise.scheduler.parse import array_size, directives, most_alive
from ftsupervise.scheduler.slurm import clean_environment
from ftsupervise.units import parse_slurm_time, signal_number

PREFIX = SCHEDULERS[LOCAL].prefix
Marks = Callable[[], dict[str, list[Process]]]
AGAIN = "again"  # in a job's folder: the member that runs is to run once more
ENV_OF = "FTSUPERVISE_LOCAL_OF"  # FOLDER:MEMBER in the environment of every process of a member


class LocalJob(NamedTuple):
    """A job as it was submitted (``job.json``)."""

    name: str
    comment: str
    members: int  # 0: it is no array
    host: str
    workdir: str = ""
    output: str = "%x-%j.out"
    error: str = ""  # "": the same as ``output``
    after: str = ""  # number of the job whose end it waits for
    limit: float | None = None  # seconds of a member
    signal: str = "USR1"
    lead: float = 60.0  # seconds from the signal to the limit
    submitted: float | None = None  # epoch seconds


class LocalState(NamedTuple):
    """The state of a job, as its chain wrote it (``state.json``)."""

    pid: int = 0  # of the chain
    pid_start: int | None = None
    member: int = 0  # the one that runs or has run
    state: JobState = JobState.PENDING
    started: float | None = None  # epoch seconds
    ends: float | None = None
    exit_code: int | None = None

    @property
    def alive(self) -> bool:
        return lives(self.pid, self.pid_start)


def read_job(folder: Path) -> LocalJob | None:
    """Return the job as it was submitted; None if there is none. Raises OSError, and ValueError where it is damaged."""
    return read_record(LocalJob, folder / "job.json", lenient=False)


def read_state(folder: Path) -> LocalState:
    """Return the state of a job. Raises OSError, and ValueError where it is damaged."""
    return read_record(LocalState, folder / "state.json", lenient=False) or LocalState()


def _marked() -> dict[str, list[Process]]:
    return marked(ENV_OF)


def local_root(env: Mapping[str, str]) -> Path:
    return state_dir(env) / "local"


class Local:
    """The port ``Scheduler`` over this machine. Jobs of other machines that share the state directory are not seen."""

    kind = LOCAL

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(os.environ if env is None else env)
        self.root = local_root(self._env).absolute()
        self.warnings: set[str] = set()

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        jobs = []
        marks = functools.cache(_marked)  # one look at the processes, and only if some chain was killed
        try:
            found = sorted((number, p) for p in self.root.iterdir() if (number := as_count(p.name)) is not None)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SchedulerUnavailable(f"the local queue {self.root} cannot be read: {error}") from None
        for _, folder in found:
            jobs += [job for job in self._read(folder, marks) if not job.state.ended]
        return tuple(jobs)

    def find(self, token: str) -> tuple[Job, ...]:
        return tuple(job for job in self.queue() if token in job.comment)

    def describe(self, job_id: str) -> Job | None:
        base, _, member = job_id.removeprefix(PREFIX).partition("_")
        folder = self.root / base
        if as_count(base) is None or not folder.is_dir():
            return None
        jobs = self._read(folder)
        wanted = [job for job in jobs if not member or job.id.endswith(f"_{member}")]
        return most_alive(wanted)

    def submit(self, script: str, *, script_path: Path, token: str, env: Mapping[str, str] | None = None) -> Submitted:
        options = directives(script)
        try:
            limit = parse_slurm_time(options["time"]) if "time" in options else None
        except ValueError as error:
            raise SubmitRejected(f"{script_path}: --time: {error}") from None
        warn_signal, _, lead = options.get("signal", "").removeprefix("B:").partition("@")
        after = options.get("dependency", "").rpartition(":")[2]  # of several the last, which waits for the others
        if after and self.describe(after) is None:
            raise SubmitRejected(f"{script_path}: --dependency: there is no local job {after}")
        base = clean_environment(self._env if env is None else env)
        for key in (ENV_OF, ENV_JOB_ID):  # of the job that this command runs in: a job may end its own
            base.pop(key, None)
        try:
            folder = self._claim()
            number = folder.name
            write_whole(folder / "script", script, mode=0o700)
            job = LocalJob(
                name=options.get("job-name", script_path.name),
                comment=options.get("comment", ""),
                members=array_size(f"_[{options['array']}]") if "array" in options else 0,
                host=os.uname().nodename,
                workdir=options.get("chdir", str(script_path.parent)),
                output=options.get("output", "%x-%j.out"),
                error=options.get("error", ""),
                after=after.removeprefix(PREFIX),
                limit=limit.total_seconds() if limit else None,
                signal=warn_signal or "USR1",
                lead=float(lead or 60),
                submitted=time.time(),
            )
            write_json(folder / "job.json", job, mode=0o600)
            self._start(folder, base)
        except OSError as error:
            raise from_os_error(error, f"write the local queue {self.root}") from None
        return Submitted(f"{PREFIX}{number}")

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        member = job_id.partition("_")[2]
        word = "pending" if only_pending else (f"member {member}" if member else "all")

        def cancel(folder: Path) -> None:
            write_whole(folder / "cancel", word, mode=0o600)
            state = read_state(folder)
            if state.alive:
                os.kill(state.pid, signal.SIGHUP)  # "look at the cancel file now"
            else:  # killed, and its member lives on
                for orphan in chain.from_iterable(self._orphans(folder).values()):
                    signal_exactly(orphan, signal.SIGTERM)

        self._change(job_id, cancel)

    def hold(self, job_id: str) -> None:
        self._change(job_id, lambda folder: write_whole(folder / "hold", "", mode=0o600))

    def release(self, job_id: str) -> None:
        self._change(job_id, lambda folder: (folder / "hold").unlink(missing_ok=True))

    def put_back(self, job_id: str) -> bool:
        self.hold(job_id)
        self._change(job_id, lambda folder: write_whole(folder / AGAIN, "", mode=0o600))
        return True

    def remark(self, job_id: str, comment: str) -> None:
        def write(folder: Path) -> None:
            job = read_job(folder)
            if job is not None:
                write_json(folder / "job.json", job._replace(comment=comment), mode=0o600)

        self._change(job_id, write)

    # -------------------------------------------------------------------------------------------------------- inside

    def _change(self, job_id: str, change: Callable[[Path], object]) -> None:
        base = job_id.removeprefix(PREFIX).partition("_")[0]
        folder = self.root / base
        if as_count(base) is None or not folder.is_dir():
            return
        try:
            change(folder)
        except ProcessLookupError:
            return
        except PermissionError:
            raise NotPermitted(f"job {job_id} belongs to somebody else") from None
        except (OSError, ValueError) as error:
            raise SchedulerUnavailable(f"the local queue {folder} cannot be used: {error}") from None

    def _claim(self) -> Path:
        make_own(self.root.parent)
        make_own(self.root)
        number = 1 + max((as_count(p.name) or 0 for p in self.root.iterdir()), default=0)
        while True:
            folder = self.root / str(number)
            try:
                folder.mkdir(mode=0o700)
                return folder
            except FileExistsError:
                number += 1

    @staticmethod
    def _start(folder: Path, env: Mapping[str, str]) -> None:
        """Start the chain in a session of its own; it outlives this process and this terminal."""
        with os.fdopen(files.open_append(folder / "chain.log", 0o600), "ab") as log:
            child = subprocess.Popen(
                processes.own_command(str(folder), module="ftsupervise.scheduler.local"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while not (folder / "state.json").exists():
            if child.poll() is not None or time.monotonic() > deadline:
                said = (folder / "chain.log").read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise SubmitRejected(f"the local chain did not start: {' '.join(said) or 'no output'}")
            time.sleep(0.01)
        child.returncode = 0  # it outlives this process, which must not wait for its end

    @staticmethod
    def _orphans(folder: Path, marks: Marks = _marked) -> dict[int, list[Process]]:
        """Return the living processes of the job, by member."""
        found = ((mark.removeprefix(f"{folder}:"), pids) for mark, pids in marks().items())
        return {number: pids for member, pids in found if (number := as_count(member)) is not None}

    def _read(self, folder: Path, marks: Marks = _marked) -> list[Job]:
        """Return the job as one or two records: the member that runs, and the rest that waits."""
        try:
            job, state = read_job(folder), read_state(folder)
            held = (folder / "hold").exists()
        except OSError as error:
            raise SchedulerUnavailable(f"the local queue {folder} cannot be read: {error}") from None
        except ValueError as error:
            raise SchedulerUnavailable(
                f"the local queue {folder} cannot be read: {error}",
                hint=f"if that job is over: rm -r {to_type(folder)}",
            ) from None
        if job is None or job.host != os.uname().nodename:
            return []
        alive = state.alive
        if not alive and not state.state.ended and (orphans := self._orphans(folder, marks)):
            # the chain was killed and its member is still saving; the chain may not have been able to write down which
            # one that is
            alive, state = True, state._replace(state=JobState.COMPLETING, member=max(orphans))
            job = job._replace(members=min(1, job.members))
        return _records(folder.name, job, state, alive=alive, held=held)


def _records(number: str, page: LocalJob, state: LocalState, *, alive: bool, held: bool) -> list[Job]:
    base, members, at = f"{PREFIX}{number}", page.members, state.member
    word = state.state
    if not alive and not word.ended:
        word = JobState.NODE_FAIL  # the chain's process is gone: a reboot, or somebody's kill -9
    user = user_name()

    def job(job_id: str, job_state: JobState, reason: str = "", *, started: bool = False) -> Job:
        return Job(
            id=job_id,
            base_id=base,
            raw_id=job_id,
            name=page.name,
            user=user,
            state=job_state,
            reason=reason,
            dependency=f"afterany:{PREFIX}{page.after}" if page.after and not started else "",
            comment=page.comment,
            directory=page.workdir,
            nodes=(page.host,) if started else (),
            submit_time=_time(page.submitted),
            start_time=_time(state.started) if started else None,
            end_time=_time(state.ends) if started else None,
        )

    current = f"{base}_{at}" if members else base
    between = word is JobState.PENDING and at < members  # on hold: one member has ended and the next may not start
    records = [job(current, word, started=True)] if at and not between else []
    if alive and not at:
        waiting = f"{base}_[1-{members}%1]" if members else base
        return [job(waiting, JobState.PENDING, "JobHeldUser" if held else "Dependency" if page.after else "")]
    if alive and members and at < members:
        rest = f"{base}_{members}" if at + 1 == members else f"{base}_[{at + 1}-{members}%1]"
        records.append(job(rest, JobState.PENDING, "JobHeldUser" if held else "JobArrayTaskLimit"))
    return records or [job(current, word)]


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, timezone.utc) if seconds is not None else None


# ------------------------------------------------------------------------------------------

# The detached process behind one local job: members one after the other, each with its limit and its warning.
#
# Like Slurm: the warning signal goes to the batch shell alone, at the limit comes SIGTERM to everything, SIGKILL follows
# after KillWait (30 s), and the next member starts when nothing of the old one is left.

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
                ["/bin/bash", str(self.folder / "script")],
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
