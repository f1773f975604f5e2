"""Walks each public training script through the same days: deaths, a save, standstills, a time limit and an end.

The scheduler is that of this machine, or the sandbox's Slurm, which has time limits and ``scancel`` too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.model import Attempt
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import kept_of, ledger
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from ftsupervise.rundir.switches import read_brake
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.local import Local
from tests.neighbours.public_scripts import PYTHON, PublicScript
from tests.neighbours.smtp import MailServer
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

Until = Callable[..., Any]
_WAIT = 300.0  # seconds for a state: they import torch first
_SLOW = str(Path(__file__).parents[1] / "neighbours" / "slow_loader")
_PAUSE = 7.0  # seconds: less than any bound
_HANG = "{at_least: 10s, unknown: 30s, start: 45s}"


class Stage:
    """One script, launched. ``sandbox`` None: without Slurm."""

    def __init__(
        self, script: PublicScript, folder: Path, state: Path, mail: MailServer, sandbox: Sandbox | None = None
    ) -> None:
        self.script, self.folder, self.sandbox, self.mail = script, folder, sandbox, mail
        whole = outside_a_job() if sandbox is None else sandbox.env()
        given = {**script.env, "OMP_NUM_THREADS": "1"}
        if script.loads == "torch":
            given["SLOW_LOADER"] = str(folder / "slow-loader")
            given["PYTHONPATH"] = ":".join(filter(None, (_SLOW, script.env.get("PYTHONPATH", ""))))
        self.env = {**whole, **given, "FTSUPERVISE_STATE_DIR": str(state)}
        command = script.command.replace("{python}", PYTHON)
        resume = f"  resume: {json.dumps(script.resume)}\n" if script.resume else ""
        where, limit = ("scheduler: local\n", "") if sandbox is None else ("", '  time: "2:00:00"\n')
        (folder / "ftsupervise.yaml").write_text(
            f"name: {script.name}\n{where}launch:\n  command: {json.dumps(command)}\n  jobs: 8\n{limit}{resume}{script.more}"
            f"  env: {json.dumps(given)}\n"
            f"  restart: {{back_off: 0s, in_place: 9, stop_within: 5s, hang: {_HANG}}}\n"
            "alerts:\n  receivers:\n"
            f"    - email: {{host: 127.0.0.1, port: {mail.port}, from: ft@lab.example, to: [ada@lab.example]}}\n"
        )
        self.rundir = RunDir(folder / "runs" / script.name)

    def type(self, *words: str) -> str:
        done = typed(*words, folder=self.folder, env=self.env)
        return done.stdout + done.stderr

    def note(self, what: str) -> None:
        """Write down all that is said of it now, for a person to read: ``words.txt`` in the folder of the script."""
        self.type("watch")
        mails = "\n".join(f"mail: {one['Subject']}\n{one.get_content()}" for one in self.mail.mails)
        self.mail.mails.clear()
        with (self.folder / "words.txt").open("a") as file:
            file.write(f"======== {what}\n{self.type('status', '.')}\n-------- check\n{self.type('check')}\n{mails}\n")

    def attempts(self) -> tuple[Attempt, ...]:
        return ledger(self.rundir)

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.rundir.logs.glob("*.out")))

    def ranks(self, attempt: int) -> list[int]:
        """The processes of the script itself, and not those that start it."""
        marked = processes.marked(ENV_ATTEMPT_DIR).get(str(self.rundir.attempt(attempt)), [])
        mine = [one.pid for one in marked if b"ftsupervise" not in _command(one.pid)]
        if self.sandbox is None:
            return mine
        return [pid for pid in mine if "SLURM_PROCID" in processes.environment(pid) and b"srun" not in _command(pid)]

    def strike(self, attempt: int, number: int) -> None:
        for pid in self.ranks(attempt):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def trains(self, attempt: int) -> bool:
        """Has it made a step; or where it shows none, does it run, with a sign of life?"""
        found = self.attempts()
        if len(found) < attempt or found[attempt - 1].ended is not None:
            return False
        if self.script.steps:
            return (found[attempt - 1].last_step or 0) > 0
        mine = [one for one in read_beats(self.rundir) if one.facts.get("attempt") == str(attempt)]
        return any(one.phase != "start" for one in mine)

    def is_over(self, attempt: int) -> bool:
        found = self.attempts()
        return len(found) >= attempt and found[attempt - 1].ended is not None

    def job(self) -> str:
        """The job of the newest attempt."""
        return self.attempts()[-1].job_id

    def cancel(self) -> None:
        if self.sandbox is None:
            Local().cancel(self.job())
        else:
            self.sandbox.run(["scancel", self.job()])

    def limit(self) -> None:
        """Let the job reach its time limit in a minute or two."""
        assert self.sandbox is not None
        spent = self.sandbox.run(["squeue", "-h", "-j", self.job(), "-o", "%M"]).strip()
        *whole, seconds = (int(part) for part in spent.split(":"))
        minutes = sum(part * 60**at for at, part in enumerate(reversed(whole))) + (seconds > 30)
        self.sandbox.run(["scontrol", "update", f"JobId={self.job()}", f"TimeLimit={minutes + 1}"])

    def end(self) -> None:
        if self.sandbox is None:
            for job in Local().queue():
                Local().cancel(job.base_id)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def walk(stage: Stage, until: Until) -> None:
    """Do all of it. What is asked of each script is the same: see ``test_public_scripts.py``."""
    stage.type("launch")
    for number in (1, 2, 3):
        goes_on(stage, until, number)
        if number == 1:
            until(lambda: saves(stage), "what it saves", _WAIT)
            assert "hears a save, and the switch stays up." in stage.type("save")
            stage.type("clear", "--switch", "save")
        shown_is_true(stage, number)
        stage.note(f"attempt {number} trains")
        stage.strike(number, signal.SIGKILL)
        is_over(stage, until, number, "killed by SIGKILL")
    stands_still(stage, until, 4)
    number = 5
    if stage.script.data:
        the_loader_waits(stage, until, number)
        number += 2
    if stage.script.loads:
        the_loader_sleeps(stage, until, number)
        number += 1
    if stage.sandbox is not None:
        reaches_its_limit(stage, until, number)
        is_cancelled(stage, until, number + 1)
        number += 2
    is_killed(stage, until, number)
    nothing_is_lost(stage)


def killed_in_a_save(stage: Stage, until: Until, number: int, files: int) -> bool:
    """Kill an attempt (SIGKILL) when its second checkpoint holds ``files`` files; return whether the save was cut off."""
    out = stage.folder / "out"
    until(lambda: len(stage.attempts()) == number and stage.ranks(number), f"the processes of attempt {number}", _WAIT)
    begun = max(map(_number, out.glob("checkpoint-*")), default=0)
    saved = until(
        lambda: next((one for one in out.glob("checkpoint-*/trainer_state.json") if _number(one.parent) > begun), None),
        f"a whole checkpoint of attempt {number}",
        _WAIT,
    )
    pids, before = stage.ranks(number), _number(saved.parent)

    def made() -> Path | None:
        found = max(out.glob("checkpoint-*"), key=_number, default=None)
        return found if found is not None and _number(found) > before and len(os.listdir(found)) >= files else None

    until_at_once(made, f"a save of attempt {number}", _WAIT)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    newest = max(out.glob("checkpoint-*"), key=_number)
    is_over(stage, until, number, "killed by SIGKILL")
    return not (newest / "trainer_state.json").exists()


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def until_at_once(question: Callable[[], object], what: str, seconds: float) -> None:
    """Wait for a state that lasts for a few milliseconds."""
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.001)


def goes_on(stage: Stage, until: Until, number: int) -> None:
    """Wait until the attempt trains. One that begins anew is held after the second or third time: a person lets it go on."""

    def looks() -> bool:
        brake = read_brake(stage.rundir)
        if brake is not None:
            assert not stage.script.resumes, brake
            assert brake.failure in ("it does not resume", "killed by SIGKILL", "hang"), brake
            stage.note(f"held before attempt {number}")
            stage.type("clear", "--brake")
        return stage.trains(number)

    until(looks, f"that attempt {number} trains", _WAIT)


def is_over(stage: Stage, until: Until, number: int, words: str) -> Attempt:
    until(lambda: stage.is_over(number), f"the end of attempt {number}", _WAIT)
    found = stage.attempts()[number - 1]
    assert words in found.words, found.words
    stage.note(f"attempt {number} is over: {found.words}")
    return found


def stands_still(stage: Stage, until: Until, number: int) -> None:
    goes_on(stage, until, number)
    stage.strike(number, signal.SIGSTOP)
    is_over(stage, until, number, "hang: rank 0 on ")


def the_loader_waits(stage: Stage, until: Until, number: int) -> None:
    """What the script reads does not answer: the start after attempt ``number`` waits for it, and for nothing else."""
    goes_on(stage, until, number)
    with silent(stage.folder / stage.script.data):
        stage.strike(number, signal.SIGKILL)

        def over() -> bool:
            if read_brake(stage.rundir) is not None:
                assert not stage.script.resumes
                stage.type("clear", "--brake")
            return stage.is_over(number + 1)

        until(over, "that it is found that it waits", _WAIT)
    stage.note("the loader waited")
    assert stage.attempts()[number].words.startswith("hang: "), stage.attempts()[number].words


def the_loader_sleeps(stage: Stage, until: Until, number: int) -> None:
    """In the midst of the training the data do not come. A pause is no hang, where the loader can go on after one."""
    goes_on(stage, until, number)
    if stage.script.loads == "torch":
        asleep = stage.folder / "slow-loader"
        asleep.touch()
        time.sleep(_PAUSE)
        size = len(stage.output())
        asleep.unlink()
        if stage.script.lines:
            until(lambda: len(stage.output()) > size, "that it goes on", _WAIT)
        assert not stage.is_over(number)
        asleep.touch()
        try:
            until(lambda: stage.is_over(number), f"the end of attempt {number}", _WAIT)
        finally:
            asleep.unlink()
    else:
        with silent(stage.folder / stage.script.loads):
            until(lambda: stage.is_over(number), f"the end of attempt {number}", _WAIT)
    found = is_over(stage, until, number, "hang: ")  # the next one has its data by now, however long the notes take
    assert "is stopped" not in found.words


@contextmanager
def silent(data: Path) -> Iterator[None]:
    """Let the file give no answer to any process that opens it."""
    aside = data.with_name(f".{data.name}")
    data.rename(aside)
    os.mkfifo(data)
    try:
        yield
    finally:
        data.unlink()
        aside.rename(data)


def reaches_its_limit(stage: Stage, until: Until, number: int) -> None:
    goes_on(stage, until, number)
    stage.limit()
    found = is_over(stage, until, number, stage.script.warned)
    assert found.failure is None, found.sign


def is_cancelled(stage: Stage, until: Until, number: int) -> None:
    goes_on(stage, until, number)
    stage.cancel()
    is_over(stage, until, number, "cancelled or preempted")


def is_killed(stage: Stage, until: Until, number: int) -> None:
    goes_on(stage, until, number)
    assert "ended by SIGTERM in 5s" in stage.type("kill", "--yes").replace("\n", " ")
    since = time.monotonic()
    until(lambda: stage.is_over(number), "its end", 60)
    assert time.monotonic() - since < 30
    stage.note("the kill switch is up")


def nothing_is_lost(stage: Stage) -> None:
    """Each attempt goes on from what is there, or what was reached is kept; and whether it does is told."""
    found = [one for one in stage.attempts() if one.first_step is not None]
    seen = stage.type("status", ".")
    if stage.script.says:
        assert stage.output().count(stage.script.says) >= 2, "it has gone on each time"
    if stage.script.resumes:
        began = [one.first_step or 0 for one in found]
        assert began == sorted(began) and (not began or began[0] < began[1]), began
        assert "it does not resume" not in seen
        return
    if stage.script.steps:
        assert "it does not resume" in seen
    if any(one.written for one in stage.attempts()):
        assert kept_of(stage.rundir), "what was reached is kept"


def saves(stage: Stage) -> bool:
    """Has it saved, where it does so within a minute?"""
    pattern = stage.script.saves
    return not pattern or any(stage.folder.glob(pattern))


def shown_is_true(stage: Stage, number: int) -> None:
    """The step of the attempt is a number that its output shows, or none is shown. Those of epochs are sums: not looked for."""
    step, output = stage.attempts()[number - 1].last_step, stage.output()
    assert stage.script.steps or step is None, step
    if step is not None and stage.script.shown:
        printed = set(re.findall(stage.script.shown, output, re.M))
        assert str(step) in printed, (step, output[-2000:])
