"""A small run that persons and the machine do things to, and a model that says which state may come back: a random walk.

The run is real: the ledger, the fence, the snapshots in memory, those that are kept on the disk, and a rank in a process of its
own that restores, trains, saves and is killed. Each step mixes a word of its attempt into the state, so that a step made again
is another state. The model knows what was done, and nothing of how it is found out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy
from click.testing import CliRunner

from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.cli import ftsupervise
from ftsupervise.model import Cause, CauseKind, Failure, FailureKind, Reached
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.run import fencing
from ftsupervise.rundir import ledger
from ftsupervise.rundir.lineage import keep_lineage, read_lineage
from ftsupervise.rundir.paths import (
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_GUARD,
    ENV_RESTART,
    ENV_RUN_DIR,
    RunDir,
)
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.snapshots import kept as snapshots_kept
from ftsupervise.snapshots import room
from ftsupervise.snapshots.keeper import KeptSnapshots, SnapshotKeeper, Target
from ftsupervise.snapshots.room import SnapshotPlace
from ftsupervise.truth import NOT_A_NUMBER, LossTrouble

NOW = datetime(2026, 11, 24, tzinfo=timezone.utc)
_BACK = 3  # steps, when the loss is no number


class State(NamedTuple):
    """A state of the loop. ``anchor``: the commit that it goes on from, 0: none."""

    step: int = 0
    token: str = ""
    anchor: int = 0
    shape: int = 3


class Shared:
    """The folder of checkpoints, which several runs may share, as persons have left it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = False  # everybody may write there
        self.runs: list[Walk] = []
        self.rotten: set[str] = set()  # checkpoints of which a bit has flipped
        self.public: set[str] = set()  # checkpoints that everybody may write
        path.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Somebody does what the refusal says."""
        self.opened = False
        self.path.chmod(0o755)
        for name in self.public:
            if (self.path / name).exists():
                (self.path / name).chmod(0o755)
        self.public.clear()

    def is_good(self, name: str) -> bool:
        return not self.opened and name not in self.rotten | self.public

    def now_there(self, name: str, by: Walk, number: int) -> None:
        """A checkpoint has got this name, which was free, or another one's of the same run."""
        for each in self.runs:
            each.there.pop(name, None)
        by.there[name] = number
        self.rotten.discard(name)
        self.public.discard(name)


class Commit(NamedTuple):
    """A checkpoint as it was committed."""

    number: int
    state: State


class Code(NamedTuple):
    """The program as it stands: its own word for its version, how large an array it makes, and whether all must fit."""

    version: str = "v1"
    shape: int = 3
    strict: bool = True


class Rank:
    """The rank of one attempt, in a process of its own that is told what to do."""

    def __init__(self, env: dict[str, str], attempt: int, code: Code) -> None:
        ours, its = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            try:
                ours.close()
                _train(its, env, attempt, code)
            finally:
                os._exit(9)
        its.close()
        self.code = code
        self._talk = ours.makefile("rw")
        self.begun: dict[str, Any] = self._hear()

    def do(self, what: str) -> dict[str, Any]:
        self._talk.write(what + "\n")
        self._talk.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        line = self._talk.readline()
        return dict(json.loads(line)) if line else {"error": "it is dead"}

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._talk.close()
            self.pid = 0


def _train(talk: socket.socket, env: dict[str, str], attempt: int, code: Code) -> None:
    for name in list(os.environ):
        if name.startswith(("FTSUPERVISE_", "SLURM_", "RANK", "WORLD")):
            del os.environ[name]
    os.environ.update(env)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    from ftsupervise import Guard

    with talk.makefile("rw") as words:

        def say(**what: object) -> None:
            words.write(json.dumps(what) + "\n")
            words.flush()

        guard = Guard(signals=(), rank=0, world=1)
        state: dict[str, Any] = {"step": 0, "token": "", "table": numpy.zeros(code.shape)}

        def tell() -> None:
            say(step=state["step"], token=state["token"], shape=len(state["table"]))

        try:
            guard.restore(state=state, code=code.version, strict=code.strict)
        except BaseException as error:  # CannotResume ends the process
            say(error=f"{type(error).__name__}: {error}", step=0, token="")
        else:
            tell()
        for line in words:
            if line == "step\n":
                state["step"] += 1
                state["token"] = hashlib.sha1(f"{state['token']} {state['step']} {attempt}".encode()).hexdigest()
                guard.step(state["step"])
                while not guard.snapshot(state["step"]):
                    pass
                tell()
            elif line == "save\n":
                try:
                    guard.save(state["step"])
                    say()
                except OSError as error:
                    say(error=str(error))


class Walk:
    """One run, and what may come back. Several may share a folder of checkpoints."""

    def __init__(self, root: Path, folder: Shared, top: str, dice: random.Random) -> None:
        self.rundir, self.folder, self.checkpoints = RunDir(root), folder, folder.path
        self.dice, self._top = dice, top
        folder.runs.append(self)
        self.rundir.attempts.mkdir(parents=True)
        self.rundir.beats.mkdir()
        self.rundir.switches.mkdir()
        keep_lineage(self.rundir, root.name)
        (self.rundir.root / "run.yaml").write_text(
            f"name: {root.name}\nscheduler: local\nlaunch: {{command: 'true'}}\nrun_dir: {root}\n"
            f"checkpoints: {{path: {self.checkpoints}}}\n"
        )
        self.code = Code()
        # the model
        self.commits: dict[int, State] = {}  # every one ever made
        self.there: dict[str, int] = {}  # name -> the commit that lies under it
        self.copies: dict[str, int] = {}  # name -> the commit of which somebody has a copy elsewhere
        self.memory: dict[int, tuple[State, int, Code]] = {}  # step -> the snapshot of this job, its attempt, its code
        self.kept: tuple[State, int, Code, frozenset[str]] | None = None  # and what was newer beside it
        self.kept_doubts = self.doubts = 0
        self.offered = False  # the supervisor has named what lies in memory to the attempt
        self.trouble: int | None = None  # since which step the loss of the last attempt was no number
        self.now = State()
        self.began: tuple[str, State] = ("start", State())
        self.saved: int | None = None  # as this job knows
        self.rank: Rank | None = None
        self.acts: list[str] = []
        self.begun = 0
        self._tries = 0  # in a row that could not begin
        self.ever = False  # it has saved since it began
        self._new_job()
        self._begin()

    # ------------------------------------------------------------------------------------------------- the real parts

    def _new_job(self) -> None:
        folder = room.new_folder("walk", self._top)
        wake = lambda: None  # noqa: E731
        self.agents = Agents(self.rundir, Allocation({}), {}, wake, snapshots=SnapshotPlace(folder))
        kept = KeptSnapshots(self.rundir, self.checkpoints)
        self.keeper = SnapshotKeeper(SnapshotPlace(folder), self.agents, "here", kept)
        self.memory, self.saved, self.doubts = {}, None, 0

    def _close_job(self) -> None:
        self.keeper.close()
        self.agents.close()

    def _begin(self) -> None:
        claim = ledger.claim(self.rundir)
        ledger.write_start(claim, {}, ["walk"], datetime.now(timezone.utc), None)
        self.claim = claim
        self.fence = fencing.begin(self.rundir, claim.number, {ENV_CHECKPOINT_DIR: str(self.checkpoints)}, print)
        env = {
            ENV_RUN_DIR: str(self.rundir.root),
            ENV_ATTEMPT: str(claim.number),
            ENV_ATTEMPT_DIR: str(claim.folder),
            ENV_RESTART: "1",
            ENV_CHECKPOINT_DIR: str(self.checkpoints),
            "SLURMD_NODENAME": "here",
            f"{ENV_GUARD}SNAPSHOT_EVERY": "1",
            f"{ENV_GUARD}LOSS_BACK": str(_BACK),
            f"{ENV_GUARD}LOSS_NONFINITE": "resume",
            **self.fence.env(),
        }
        self._log = claim.folder / "run.log"
        env.update(self.keeper.begin(claim, ["here"], self._log))
        self.rank = Rank(env, claim.number, self.code)
        found = self.rank.begun
        self._tries = self._tries + 1 if "error" in found else 0
        assert self._tries < 5, f"it stops again and again: {found['error']}\n" + "\n".join(self.acts[-25:])
        self._judge(found)
        self.first = self.now.step + 1

    def _end(self, failure: Failure | None = None, trouble: LossTrouble | None = None) -> None:
        """End the rank; its supervisor writes down how."""
        self._write_end(failure, trouble)
        self._after(failure, trouble)

    def _write_end(self, failure: Failure | None = None, trouble: LossTrouble | None = None) -> None:
        assert self.rank is not None
        self.rank.kill()
        made = self.now.step >= self.first
        reached = Reached(
            self.first if made else None, self.now.step if made else None, self.saved_now, trouble=trouble
        )
        cause = Cause(CauseKind.EXIT, code=1) if failure else Cause(CauseKind.WARNING)
        ended = ledger.over(self.claim.number, cause, datetime.now(timezone.utc), reached=reached)
        ended = ended._replace(failure=failure)
        ledger.write_end(self.claim.folder, ended)
        self.keeper.ended(ended, ())

    # ------------------------------------------------------------------------------------------------------ the model

    def may(self) -> tuple[str, list[State]]:
        """Which states may come back, and from where: the only right ones."""
        self._look()
        self.offered = False
        good = [self.commits[n] for name, n in self.there.items() if self.folder.is_good(name)]
        disk = sorted(((one.step, one) for one in good), key=lambda one: one[0])
        if self.trouble is not None:
            older = [state for step, state in disk if step < self.trouble]
            return "disk", [*(older or [state for _, state in disk]), State()]
        newest = disk[-1][1] if disk else State()
        best = max(self.memory.values(), default=None, key=lambda one: one[0].step)
        ours = best is not None and self._stands(best[0]) and self.doubts < 2
        if best is not None and ours and (self.saved is None or best[0].step >= self.saved):
            self.offered = True
            return ("memory", [best[0]]) if self._takes(best[0], best[2]) else ("disk", [newest])
        if self.kept is not None and self.kept_doubts < 2 and not self.folder.opened and not self._kept_is_open():
            state, _, code, ahead = self.kept
            newer = [name for name, n in self.there.items() if self.commits[n].step >= state.step and name not in ahead]
            newer = [name for name in newer if self.there[name] != state.anchor]
            if self._stands(state) and not newer and (self.saved is None or state.step > self.saved):
                return ("kept", [state]) if self._takes(state, code) else ("disk", [newest])
        return "disk", [newest]

    def _takes(self, state: State, made_by: Code) -> bool:
        """Whether the program as it is now takes a snapshot of ``state``."""
        return made_by.version == self.code.version and (state.shape == self.code.shape or not self.code.strict)

    def _stands(self, state: State) -> bool:
        return not state.anchor or state.anchor in self.there.values()

    def _look(self) -> None:
        """What lies there now is a fact; what it is, the model knows."""
        names = set(os.listdir(self.checkpoints))
        self.there = {name: number for name, number in self.there.items() if name in names}

    def _judge(self, found: dict[str, Any]) -> None:
        """Compare what came back with what may."""
        source, right = self.may()
        story = "\n".join([*self.acts[-25:], self._log.read_text() if self._log.exists() else ""])
        if found.get("error", "").startswith("CannotResume") and State() in right:
            self._refused(found["error"])
            return
        if found.get("error", "").startswith("RuntimeError") and source == "disk" and self.code.strict:
            assert any(one.step and one.shape != self.code.shape for one in right), f"{found['error']}\n{story}"
            self._does_not_fit()
            return
        assert "error" not in found, f"{found['error']}\n{story}"
        came = (found["step"], found["token"])
        assert came in [(one.step, one.token) for one in right], (
            f"attempt {self.claim.number}: {came} came back, and {source} {right} would be right\n{story}"
        )
        self.begun += 1
        one = next(one for one in right if (one.step, one.token) == came)
        assert found["shape"] == self.code.shape, f"the array has the size {found['shape']}\n{story}"
        assert one.shape == self.code.shape or not one.step or not self.code.strict, f"it does not fit\n{story}"
        one = one._replace(shape=self.code.shape)
        went_back = self.trouble is not None
        assert one.token or went_back or not self.ever, f"it has begun at step 0 over what it had saved\n{story}"
        self.ever = self.ever and not (went_back and not one.token)
        if source == "disk":
            number = next((n for n in self.there.values() if self.commits[n].token == one.token), 0)
            one = one._replace(anchor=number)
            if self.trouble is not None:
                self.kept = None
            elif self.kept is not None and one.step < self.kept[0].step:
                self._behind_kept = True
            self.memory = {}
            self.saved = one.step or None
        else:
            self.memory = {step: each for step, each in self.memory.items() if step <= one.step}
        if source != "memory":
            self.doubts = 0
        self.trouble = None
        self.saved_now: int | None = None
        self.now, self.began = one, (source, one)
        self._look()

    def _after(self, failure: Failure | None, trouble: LossTrouble | None) -> None:
        """What an end says about the snapshot that the attempt began from."""
        source, state = self.began
        others = failure is not None and failure.kind is FailureKind.SIGNAL
        weight = 0 if failure is None else 1 if others else 2
        newest = max(self.memory, default=-1)
        if source == "kept":
            self.kept_doubts += weight
        if source == "memory" and newest == state.step:
            self.doubts += weight
            if self.kept is not None and self.kept[0] == state:
                self.kept_doubts += weight
        elif newest > state.step:
            self.doubts = 0
        if self.kept is not None:
            if self.saved_now is not None and self.saved_now >= self.kept[0].step:
                self.kept = None
            elif self.now.step >= self.first and self.first <= self.kept[0].step:
                self.kept = None  # it was gone back behind
        if trouble is not None:
            self.trouble, self.memory, self.kept = trouble.since, {}, None

    def _refused(self, words: str) -> None:
        """The run has saved, and may use nothing of it: it stops until a person mends that, or says that it begins anew."""
        assert self.commits, "it stops, and has never saved"
        self._stop()
        if self.folder.opened or self.folder.public & self.there.keys():
            assert not self.there or "(type: chmod " in words or "is damaged" in words, words
            self.folder.close()
        else:
            done = CliRunner().invoke(ftsupervise, ["checkpoints", "anew", str(self.rundir.root)])
            assert done.exit_code == 0, f"{done.output} {done.exception!r}"
            self.kept, self.trouble, self.ever, self.memory, self.saved = None, None, False, {}, None
        self._begin()

    def _does_not_fit(self) -> None:
        """The code has changed, and what was saved does not fit it: a person says that it may, or changes the code back."""
        self._stop()
        back = next(size for size in (3, 5) if size != self.code.shape)
        self.code = self.code._replace(strict=False) if self.dice.random() < 0.5 else self.code._replace(shape=back)
        self._begin()

    def _stop(self) -> None:
        """The attempt could not begin: everything is as it was before, and the brake ends the job, or a person is quicker."""
        self.now, self.first, self.saved_now, self.began = State(), 1, None, ("start", State())
        self._write_end(Failure(FailureKind.GIVEN_UP, "exit 93"))
        if not self.offered:
            self.memory = {}
        if self.dice.random() < 0.5:
            self._hand_over()

    # ------------------------------------------------------------------------------------------- what the machine does

    def steps(self) -> None:
        assert self.rank is not None
        for _ in range(self.dice.randint(1, 4)):
            found = self.rank.do("step")
            self.now = State(found["step"], found["token"], self.now.anchor, found["shape"])
            self.memory[self.now.step] = (self.now, self.claim.number, self.rank.code)
            for old in sorted(self.memory)[:-2]:
                del self.memory[old]

    def save(self) -> None:
        assert self.rank is not None
        name = f"step-{self.now.step:08d}"
        if self.now.step < self.first:
            return
        told = self.rank.do("save")
        if "error" in told:
            taken = any(name in each.there for each in self.folder.runs if each is not self)
            assert self.folder.opened or taken, told["error"]
            return
        assert not self.folder.opened, "it has saved where nothing is believed"
        number = len(self.commits) + 1
        self.commits[number] = self.now._replace(anchor=number)
        self.folder.now_there(name, self, number)
        self.now = self.now._replace(anchor=number)
        if self.now.step in self.memory:  # the very state that was saved
            self.memory[self.now.step] = (self.now, *self.memory[self.now.step][1:])
        self.saved = max(self.saved or 0, self.now.step)
        self.saved_now = self.now.step
        self.ever = True

    def kill_a_rank(self) -> None:
        self._end(Failure(FailureKind.SIGNAL, "signal 9"))
        self._begin()

    def crash(self) -> None:
        self._end(Failure(FailureKind.CODE, "exit 1"))
        self._begin()

    def lose_the_loss(self) -> None:
        if self.now.step < self.first:
            return
        at = self.now.step
        trouble = LossTrouble(NOT_A_NUMBER, at, at, 0, f"nan at step {at}", "resume")
        self._end(Failure(FailureKind.NUMBERS, NOT_A_NUMBER), trouble)
        self._begin()

    def kill_the_supervisor(self) -> None:
        """It leaves no end, and its node's memory is gone."""
        assert self.rank is not None
        self.rank.kill()
        start = self.claim.folder / "start.json"
        page = json.loads(start.read_text())
        start.write_text(json.dumps({**page, "pid_start": 1}))
        made = self.now.step >= self.first
        page = {"at": datetime.now(timezone.utc).isoformat(), "ranks": 1, "first": self.first, "ahead": self.now.step}
        (self.claim.folder / "progress.json").write_text(json.dumps({**page, "saved": self.saved_now} if made else {}))
        self._close_job()
        self._after(Failure(FailureKind.SIGNAL, "lost"), None)
        self._new_job()
        self._begin()

    def end_the_job(self) -> None:
        self._end(None)
        self._leave()

    def crash_and_end_the_job(self) -> None:
        self._end(Failure(FailureKind.CODE, "exit 1"))
        self._leave()

    def _leave(self) -> None:
        self._hand_over()
        self._begin()

    def _hand_over(self) -> None:
        """The job ends, and another one follows."""
        assert self.fence.staging is not None
        self.keeper.keep(self.claim, Target(self.fence.staging, monotonic() + 30), self._log)
        self._close_job()
        self._look()
        best = max(self.memory.values(), default=None, key=lambda one: one[0].step)
        ours = best is not None and self._stands(best[0]) and self.doubts < 2
        if best is not None and ours and (self.saved is None or best[0].step > self.saved):
            ahead = frozenset(name for name, n in self.there.items() if self.commits[n].step > best[0].step)
            state, attempt, code = best
            lies = max(
                ((self.commits[n].step, n) for n in self.there.values() if self.commits[n].step <= state.step),
                default=None,
            )
            if lies is not None and (not state.anchor or lies[0] > self.commits[state.anchor].step):
                state = state._replace(anchor=lies[1])  # somebody has brought it back meanwhile: it counts from now on
            self.kept, self.kept_doubts = (state, attempt, code, ahead), self.doubts
        self._new_job()

    # ----------------------------------------------------------------------------------------------- what a person does

    def _newest(self, count: int) -> list[str]:
        self._look()
        return sorted(self.there, reverse=True)[:count]

    def delete_the_newest(self) -> None:
        for name in self._newest(1):
            shutil.rmtree(self.checkpoints / name)

    def delete_several(self) -> None:
        for name in self._newest(self.dice.randint(2, 4)):
            shutil.rmtree(self.checkpoints / name)

    def delete_an_older_one(self) -> None:
        for name in self._newest(3)[2:]:
            shutil.rmtree(self.checkpoints / name)

    def set_the_newest_aside(self) -> None:
        for name in self._newest(1):
            set_aside(self.checkpoints / name, "a person wants it so", NOW)

    def copy_one(self) -> None:
        for name in self._newest(2)[-1:]:
            if not self.folder.is_good(name):
                continue
            copy = self.rundir.root / "copies" / name
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.checkpoints / name, copy)
            self.copies[name] = self.there[name]

    def bring_a_copy_back(self) -> None:
        self._look()
        for name in sorted(self.copies):
            if not (self.checkpoints / name).exists():
                shutil.copytree(self.rundir.root / "copies" / name, self.checkpoints / name)
                self.folder.now_there(name, self, self.copies[name])
                return

    def change_the_code(self) -> None:
        self.code = self.code._replace(version=self.dice.choice(["v1", "v2"]))

    def change_the_shape(self) -> None:
        self.code = Code(self.code.version, self.dice.choice([3, 3, 5]), self.dice.random() < 0.7)

    def open_the_folder(self) -> None:
        self.folder.opened = True
        self.checkpoints.chmod(0o777)

    def open_one(self) -> None:
        for name in self._newest(1):
            (self.checkpoints / name).chmod(0o777)
            self.folder.public.add(name)

    def close_the_folder(self) -> None:
        self.folder.close()

    def flip_a_bit(self) -> None:
        """The machine does that: in the newest one, where its times say nothing."""
        for name in self._newest(1):
            path = self.checkpoints / name / "rank-00000.state"
            facts, raw = path.stat(), bytearray(path.read_bytes())
            raw[self.dice.randrange(len(raw))] ^= 1 << self.dice.randrange(8)
            path.write_bytes(raw)
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            self.folder.rotten.add(name)

    def prune(self) -> None:
        """All that the others have stays, and so do the two newest good ones of this run."""
        self._look()
        theirs = {name for each in self.folder.runs if each is not self for name in each.there}
        mine = [name for name in sorted(self.there, reverse=True) if self.folder.is_good(name)][:2]
        there = theirs & set(os.listdir(self.checkpoints))
        done = CliRunner().invoke(ftsupervise, ["checkpoints", "prune", str(self.rundir.root), "--last", "2"])
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
        assert there | set(mine) <= set(os.listdir(self.checkpoints)), done.output

    def delete_the_kept_snapshot(self) -> None:
        for one in self._kept_now():
            snapshots_kept.remove(one)
            self.kept = None

    def open_the_kept_snapshot(self) -> None:
        for one in self._kept_now():
            one.path.chmod(0o777)
            self.folder.public.add(one.path.name)

    def _kept_now(self) -> list[snapshots_kept.KeptSnapshot]:
        mine = snapshots_kept.all_in(self.checkpoints, read_lineage(self.rundir).id)
        kept = self.kept
        return [one for one in mine if kept is not None and (one.step, one.attempt) == (kept[0].step, kept[1])]

    def _kept_is_open(self) -> bool:
        return any(one.path.name in self.folder.public for one in self._kept_now())

    def close(self) -> None:
        if self.rank is not None:
            self.rank.kill()
        self._close_job()


MACHINE = (
    *("steps",) * 8,
    *("save",) * 4,
    *("kill_a_rank",) * 2,
    *("crash", "lose_the_loss", "kill_the_supervisor", "flip_a_bit"),
)
ENDS = ("end_the_job",) * 3 + ("crash_and_end_the_job",)
PERSONS = (
    *("delete_the_newest", "delete_several", "delete_an_older_one", "set_the_newest_aside"),
    *("copy_one", "bring_a_copy_back", "change_the_code", "delete_the_kept_snapshot"),
    "open_the_kept_snapshot",
    *("change_the_shape", "open_the_folder", "open_one", "close_the_folder", "prune"),
)


def walk(root: Path, top: str, seed: int, acts: int) -> int:
    """Do ``acts`` things at random, and return how often the run began anew. A wrong state fails, with what was done before."""
    dice = random.Random(seed)
    folder = Shared(root / "checkpoints")
    runs = [Walk(root / name, folder, top, dice) for name in "ab"]
    try:
        for number in range(acts):
            one = runs[0] if dice.random() < 0.8 else runs[1]
            act = dice.choice(MACHINE + ENDS + PERSONS)
            for each in runs:
                each.acts.append(f"{number}: {act} of run {'ab'[runs.index(one)]} at step {one.now.step}")
            getattr(one, act)()
        return sum(one.begun for one in runs)
    finally:
        for one in runs:
            one.close()
