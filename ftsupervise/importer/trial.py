"""One minute of a run in a sandbox, as proof: it starts, it is interrupted once, and it is seen whether it goes on.

It stands alone because it is the only part of the room that starts something. The Slurm is one of this machine, made for it
and gone with it, and so is the run directory (``launch/rehearsal.py``).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import Error
from ftsupervise.host import files, processes
from ftsupervise.launch.plan import plan
from ftsupervise.launch.rehearsal import is_the_persons, refuse_checkpoints, rehearsal_folder, rehearsed, shape_for
from ftsupervise.launch.submit import prepare, submit
from ftsupervise.model import NOBODY, OUTPUT, Attempt
from ftsupervise.printable import OUR_LINE, OUR_TIME, SLURMS_LINE, printable, printable_lines
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from ftsupervise.rundir.switches import KILL, SAVE, raise_switch
from ftsupervise.scheduler import SLURM
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_LIMIT = timedelta(minutes=3)  # of the job, which a restart in place needs: the trial itself ends it before
_WARN = timedelta(seconds=15)
_START = 40.0  # seconds for the job to begin
_BEFORE = 25.0  # seconds that it works before it is interrupted; less once it has saved
_SAVES = 10.0  # seconds for a save that it was asked for
_AFTER = 30.0  # seconds for the second attempt's first step
_END = 8.0  # seconds for it to leave by itself when it was asked to stop
_POLL = 0.2
_NOT_ITS_OWN = re.compile(rf"^(?:{OUR_LINE}|{SLURMS_LINE})")  # lines that the command has not written
_LARGEST_LOG = 8 << 20  # bytes
_SECOND = re.compile(rf"^{OUR_TIME}ftsupervise: attempt 2 of ", re.M)
# words of programs for where they go on from, and for that they do not
_RESUMES = re.compile(
    r"\b(?:resum\w+|continu\w+|restor\w+|start\w*|load\w+)\b.{0,80}(?:\b(?:from|at|checkpoint|ckpt)\b|\.(?:pth?|ckpt)\b)|"
    r"\bstart(?:ing)? (?:at |from )?(?:epoch|step|iter\w*)\W{0,3}[1-9]", re.I,
)  # fmt: skip
_BEGINS = re.compile(r"\b(?:no|not|none|without|false|scratch|cannot|failed|fresh|anew)\b", re.I)


# Makes the folder of a trial and a sandbox of a shape, gives the environment in which commands see it, and removes both at the
# end, however this process ends.
MakesPlace = Callable[[Path, Mapping[str, int]], AbstractContextManager[Mapping[str, str]]]


class Trial(NamedTuple):
    """The two attempts of a trial. ``left``: the first one when it was interrupted; ``back``: the second one."""

    job: str
    nodes: int
    waited: float  # seconds until the command was started
    left: Attempt | None
    worked: float  # seconds that the first attempt worked
    killed: datetime | None
    back: Attempt | None
    log: bytes
    said: str  # the last line that the command has written


def of_one_minute(run: Run, folder: Path) -> Run:
    """Return the run as it is tried. Raises Refused where the sandbox cannot hold it. Pure."""
    return rehearsed(run, folder, SLURM, limit=_LIMIT, warn=_WARN, jobs=1)


def try_for_a_minute(run: Run, workdir: Path, make: MakesPlace, tell: Callable[[str], None]) -> Trial:
    """Try the run in a sandbox that is made for it. ``tell``: what is going on, for a person who waits.

    Raises Refused where a checkpoint lies in ``workdir``.
    """
    refuse_checkpoints(workdir)
    folder = rehearsal_folder("trial")
    tried = of_one_minute(run, folder)
    tell(
        f"a Slurm with {_nodes(tried.launch.job_nodes)} is made on this machine; {run.name} runs in it for a minute or so"
    )
    with make(folder, shape_for(tried)) as env:
        return _TrialUnderWay(tried, workdir, folder, env, tell).trial()


class _TrialUnderWay:
    def __init__(
        self, run: Run, workdir: Path, folder: Path, env: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._run, self._workdir, self._tell = run, workdir, tell
        self._rundir = RunDir(folder / "run")
        self._env = {**env, "XDG_STATE_HOME": str(folder / "state")}
        self._slurm = Slurm(env)

    def trial(self) -> Trial:
        from ftsupervise.config.load import dump

        token, now = secrets.token_hex(6), datetime.now(timezone.utc)
        planned = plan(self._run, kind=SLURM, token=token, workdir=self._workdir, python=sys.executable)
        prepare(self._rundir, self._run.name, dump(self._run), self._run.share)
        job = submit(planned, self._run.launch, self._slurm, again=True, now=now, env=self._env).job_ids[0]
        began = monotonic()
        first = self._wait(_START, job, lambda: self._attempt(1))
        waited = monotonic() - began
        if first is None:
            return self._seen(job, waited, None, 0.0, None, None)
        self._tell(f"job {job} has started it; it is interrupted once it has saved, or after {_BEFORE:.0f} s")
        left = self._until_it_is_time(job)
        worked = monotonic() - began - waited
        back = killed = None
        if left is not None and left.ended is None:
            killed = datetime.now(timezone.utc)
            self._kill(1)
            back = self._wait(_AFTER, job, self._second) or self._attempt(2)
        self._stop(job)
        return self._seen(job, waited, left, worked, killed, back)

    def _until_it_is_time(self, job: str) -> Attempt | None:
        """Return the first attempt when it is to be interrupted: it has made steps, and saved where it has a guard."""
        until, asked = monotonic() + _BEFORE, 0.0
        while monotonic() < until:
            sleep(_POLL)
            now = self._attempt(1)
            if now is None or now.ended is not None or self._is_over(job):
                return now
            if now.saved is not None or (asked and monotonic() - asked > _SAVES):
                break
            guarded = now.source not in ("", OUTPUT, NOBODY)
            if guarded and not asked and now.last_step is not None and now.last_step > (now.first_step or 0):
                self._switch(SAVE)
                asked = monotonic()
        return self._attempt(1)

    def _second(self) -> Attempt | None:
        found = self._attempt(2)
        return found if found is not None and (found.first_step is not None or found.ended is not None) else None

    def _attempt(self, number: int) -> Attempt | None:
        with suppress(OSError):
            return next((one for one in ledger(self._rundir) if one.number == number), None)
        return None

    def _wait(self, seconds: float, job: str, look: Callable[[], Attempt | None]) -> Attempt | None:
        until = monotonic() + seconds
        while monotonic() < until:
            if (found := look()) is not None:
                return found
            if self._is_over(job):
                return look()
            sleep(_POLL)
        return None

    def _is_over(self, job: str) -> bool:
        try:
            found = self._slurm.describe(job)
        except Error:  # it is asked again
            return False
        return found is None or found.state.ended

    def _switch(self, name: str) -> None:
        now = datetime.now(timezone.utc)
        raise_switch(self._rundir, name, who="init --try", host=os.uname().nodename, why="a trial", now=now)

    def _kill(self, number: int) -> None:
        """Kill what the command runs, as a crash would; srun and our own processes live on to tell of it."""
        mine = processes.marked(ENV_ATTEMPT_DIR).get(str(self._rundir.attempts / f"{number:04d}"), [])
        for one in mine:
            if is_the_persons(one.pid):
                processes.signal_exactly(one, signal.SIGKILL)

    def _stop(self, job: str) -> None:
        """Ask it to stop, then end its job."""
        with suppress(Error, OSError):
            self._switch(KILL)
            until = monotonic() + _END
            while monotonic() < until and not self._is_over(job):
                sleep(_POLL)
            self._slurm.cancel(job)

    def _seen(
        self,
        job: str,
        waited: float,
        left: Attempt | None,
        worked: float,
        killed: datetime | None,
        back: Attempt | None,
    ) -> Trial:
        log = b""
        for path in sorted(self._rundir.logs.glob("*.out")):
            with suppress(OSError):
                log += files.read_bounded(path, _LARGEST_LOG)
        lines = [
            line
            for line in log.decode("utf-8", "replace").splitlines()
            if line.strip() and not _NOT_ITS_OWN.search(line)
        ]
        return Trial(
            job,
            self._run.launch.job_nodes,
            waited,
            left,
            worked,
            killed,
            back,
            log,
            printable(lines[-1], 200) if lines else "",
        )


def report(seen: Trial, log: Path) -> tuple[str, ...]:
    """Return the five lines of a trial. Pure."""
    return (
        f"started      {_started(seen)}",
        f"reached      {_reached(seen)}",
        f"interrupted  {_interrupted(seen)}",
        f"came back    {_came_back(seen)}",
        f"log          {log}",
    )


def is_proof(seen: Trial) -> bool:
    """Return whether nothing speaks against the run: it started, did not fail by itself, and was not seen to begin again."""
    return seen.left is not None and not (seen.left.ended and seen.left.exit_code) and came_back(seen) is not False


def came_back(seen: Trial) -> bool | None:
    """Return whether it went on from what it had reached. None: it was not seen."""
    left, back = seen.left, seen.back
    if left is None or back is None or left.first_step is None or back.first_step is None:
        return None
    return back.first_step > left.first_step


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _started(seen: Trial) -> str:
    if seen.left is None:
        said = f": {seen.said}" if seen.said else ""
        return f"no: job {seen.job} did not start the command{said}"
    return f"yes, on {_nodes(seen.nodes)} of the sandbox, after {show_duration(round(seen.waited))}"


def _reached(seen: Trial) -> str:
    left = seen.left
    if left is None:
        return "nothing"
    worked = f"in {show_duration(round(seen.worked))}"
    if left.ended is not None:
        return f"its end, {worked}: {left.words}{f': {seen.said}' if seen.said and left.exit_code else ''}"
    if left.last_step is None:
        return f"no step was seen {worked}: launch.heartbeat says which number of its output it is (docs/own-script.md)"
    where = "in its output" if left.source == OUTPUT else "by the guard"
    saved = f"; saved at {left.saved:,}" if left.saved is not None else ""
    return f"step {left.last_step:,} {worked}, seen {where}{saved}"


def _interrupted(seen: Trial) -> str:
    if seen.killed is None:
        return "no: it was over by itself" if seen.left is not None else "no"
    if seen.back is None:
        return "its processes were killed, and no second attempt was started"
    pause = seen.back.started - seen.killed
    return f"its processes were killed; attempt 2 began {show_duration(max(0, round(pause.total_seconds())))} later"


def _came_back(seen: Trial) -> str:
    left, back = seen.left, seen.back
    if left is None or left.ended is not None:
        return "it was not interrupted"
    if back is None or back.first_step is None:
        ended = f"; attempt 2 ended: {back.words}" if back is not None and back.ended is not None else ""
        said = resumes_by_its_words(seen.log)
        return f"no step was seen{f', but its output says: {said}' if said else ''}{ended}"
    if came_back(seen):
        return f"yes: it went on at step {back.first_step:,}, and had left at {left.last_step or 0:,}"
    nothing = "" if left.saved is not None or left.written is not None else ", and nothing that it saved was seen"
    return f"no: it began again at step {back.first_step:,}, and had left at {left.last_step or 0:,}{nothing}"


def resumes_by_its_words(log: bytes) -> str:
    """Return the line by which the second attempt says that it goes on, which the first had not written; "" for none."""
    text = printable_lines(log.decode("utf-8", "replace").replace("\r", "\n"))
    second = _SECOND.search(text)
    if second is None:
        return ""
    before = {line.strip() for line in text[: second.start()].splitlines()}
    for line in text[second.end() :].splitlines()[1:]:
        says = _RESUMES.search(line) is not None and _BEGINS.search(line) is None and not _NOT_ITS_OWN.search(line)
        if says and line.strip() not in before:
            return printable(line.strip(), 200)
    return ""
