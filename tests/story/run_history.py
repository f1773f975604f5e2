"""Made-up but lifelike histories of runs, and a player that puts one before the real *hang* watchdog, tick by tick.

A history is a row of segments (waiting, starting, training, saving, evaluating, hanging …). What a run shows of itself
depends on how it tells: a guard with phases, a guard without, a log with steps, a log that only grows, or both. The player
writes the very files such a run would have at the moment of a tick, with the times they would have, and no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

from ftsupervise.config.load import loads
from ftsupervise.findings import Finding
from ftsupervise.model import Job, JobState
from ftsupervise.probe import Probe
from ftsupervise.rundir.paths import RunDir
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs import load_watchdog

BEGIN = 1_800_000_000.0
MINUTE, HOUR = 60.0, 3600.0
TICK = 5 * MINUTE
TELLINGS = ("phases", "guard", "log", "growth", "both")
STEP_TIMES = (0.4, 2.0, 11.0, 30.0, 105.0, 240.0)


@dataclass(frozen=True)
class Segment:
    kind: str  # queue start train save eval stall hung completing leaving
    begin: float
    end: float
    step: int  # at its begin
    job: int  # which member of the chain
    attempt: int


@dataclass
class History:
    seed: int
    telling: str
    step_time: float
    log_every: int  # steps
    chatter: bool  # lines that are no progress, also while it hangs
    segments: list[Segment] = field(default_factory=list)
    hung_at: float | None = None
    hung_in: str = ""

    @property
    def end(self) -> float:
        return self.segments[-1].end

    def at(self, t: float) -> Segment:
        return next((s for s in self.segments if s.begin <= t < s.end), self.segments[-1])

    def step_at(self, t: float) -> tuple[int, float]:
        """The newest step and when it was made."""
        s = self.at(t)
        if s.kind != "train":
            return s.step, s.begin
        done = int((t - s.begin) / self.step_time)
        return s.step + done, s.begin + done * self.step_time


def generate(seed: int) -> History:
    """A history that is half the time healthy to its end and half the time hangs somewhere."""
    r = Random(seed)
    step_time = r.choice(STEP_TIMES)
    h = History(
        seed=seed,
        telling=TELLINGS[seed % len(TELLINGS)],
        step_time=step_time,
        log_every=max(1, int(r.choice((10.0, 60.0, 480.0)) / step_time)),
        chatter=r.random() < 0.5,
    )
    builder = _Builder(h, r, tells=h.telling in ("phases", "both"))
    builder.job()
    for _ in range(r.randint(0, 3)):
        builder.train_a_while(r.uniform(0.5, 3.0))
        builder.interrupted()
    builder.train_a_while(r.uniform(2.0, 7.0))
    if r.random() < 0.5:
        builder.hang()
    else:
        builder.end_well()
    return h


class _Builder:
    def __init__(self, history: History, r: Random, *, tells: bool) -> None:
        self.h, self.r, self.tells = history, r, tells
        self.t, self.step, self.saved, self.job_number, self.attempt = BEGIN, 0, 0, 0, 0
        self.save_takes = r.choice((5.0, 40.0, 5 * MINUTE, 20 * MINUTE)) if not tells else r.choice((40.0, 45 * MINUTE))
        self.eval_takes = (
            r.choice((MINUTE, 8 * MINUTE, 25 * MINUTE)) if not tells else r.choice((8 * MINUTE, 48 * MINUTE))
        )
        self.save_every, self.eval_every = r.uniform(20, 180) * MINUTE, r.uniform(60, 180) * MINUTE

    def add(self, kind: str, seconds: float) -> None:
        self.h.segments.append(Segment(kind, self.t, self.t + seconds, self.step, self.job_number, self.attempt))
        if kind == "train":
            self.step += int(seconds / self.h.step_time)
        self.t += seconds

    def job(self) -> None:
        self.job_number += 1
        if self.r.random() < 0.6:
            self.add("queue", self.r.uniform(1, 300) * MINUTE)
        self.start()

    def start(self) -> None:
        self.attempt += 1
        self.add("start", self.r.uniform(0.5, 25) * MINUTE)

    def train_a_while(self, hours: float) -> None:
        until = self.t + hours * HOUR
        next_save, next_eval = self.t + self.save_every, self.t + self.eval_every
        while self.t < until:
            self.add("train", max(self.h.step_time, min(next_save, next_eval, until) - self.t))
            if self.r.random() < 0.3:
                self.add("stall", self.r.uniform(1, 6) * MINUTE)  # the data came late
            if self.t >= next_save:
                self.add("save", self.save_takes * self.r.uniform(0.8, 1.3))
                self.saved, next_save = self.step, self.t + self.save_every
            if self.t >= next_eval:
                self.add("eval", self.eval_takes * self.r.uniform(0.7, 1.2))
                next_eval = self.t + self.eval_every

    def interrupted(self) -> None:
        how = self.r.choice(("requeue", "in place", "next member"))
        self.step = self.saved
        if how == "in place":
            self.start()
        else:
            self.add("completing", self.r.uniform(0.1, 8) * MINUTE)
            self.job()

    def hang(self) -> None:
        where = self.r.choice(("train", "save", "eval", "start"))
        if where == "start":
            self.interrupted()
            self.h.segments.pop()  # it never gets further than this start
            self.t = self.h.segments[-1].end
        elif where != "train":
            self.add("train", 7 * self.h.step_time)
        self.h.hung_at, self.h.hung_in = self.t, where
        self.h.segments.append(
            Segment(f"hung {where}", self.t, self.t + 5 * HOUR, self.step, self.job_number, self.attempt)
        )

    def end_well(self) -> None:
        if self.r.random() < 0.5:
            self.add("leaving", self.r.uniform(1, 45) * MINUTE)
        self.add("completing", 5 * MINUTE)
        self.add("gone", HOUR)


# ----------------------------------------------------------------------------------------------------------- playing


class Player:
    """Plays one history before the watchdog, in ``folder``."""

    def __init__(self, history: History, folder: Path, probe: Probe, *, settings: str = "") -> None:
        self.h, self.probe = history, probe
        self.run = loads(f"name: r\nlaunch: {{command: a}}\nrun_dir: {folder}\n{settings}", folder / "ftsupervise.yaml")
        self.rundir = RunDir(folder)
        for path in (self.rundir.beats, self.rundir.logs, self.rundir.switches, self.rundir.watch, self.rundir.state):
            path.mkdir(parents=True, exist_ok=True)
        self.memory: dict[str, Any] = {}
        self.logged: dict[int, int] = {}

    def ticks(self) -> Iterator[tuple[float, Finding]]:
        t = BEGIN + Random(self.h.seed).uniform(0, TICK)
        check = load_watchdog("hang")
        while t < self.h.end:
            self.put(t)
            look = Look(
                run=self.run,
                rundir=self.rundir,
                now=datetime.fromtimestamp(t, timezone.utc),
                jobs=self.jobs(t),
                memory=self.memory,
                probe=self.probe,
                watchdog="hang",
            )
            self.memory = json.loads(json.dumps(self.memory))  # as it is between two ticks
            look = Look(**{**look.__dict__, "memory": self.memory})
            yield from ((t, finding) for finding in check(look, self.run.watch.hang))
            t += TICK

    def jobs(self, t: float) -> tuple[Job, ...]:
        s = self.h.at(t)
        if s.kind == "gone":
            return ()
        state = {"queue": JobState.PENDING, "completing": JobState.COMPLETING}.get(s.kind, JobState.RUNNING)
        begin = next(x.begin for x in self.h.segments if x.job == s.job and x.kind != "queue")
        start = datetime.fromtimestamp(begin, timezone.utc) + timedelta(0)
        rest = Job(id="7_[9]", base_id="7", name="r", user="me", state=JobState.PENDING)
        return (Job(id=f"7_{s.job}", base_id="7", name="r", user="me", state=state, start_time=start), rest)

    def put(self, t: float) -> None:
        """The files as they are at ``t``."""
        s = self.h.at(t)
        self._attempt(s)
        if s.kind in ("queue", "gone", "completing"):
            return
        if s.kind == "leaving":
            _write(self.rundir.switches / "kill-switch", "", s.begin)
        if self.h.telling in ("phases", "guard", "both"):
            self._beat(s, t)
        if self.h.telling in ("log", "growth", "both"):
            self._log(s, t)

    def _attempt(self, s: Segment) -> None:
        folder = self.rundir.attempt(s.attempt)
        if s.attempt and not folder.exists():
            folder.mkdir(parents=True)
            begin = next(x.begin for x in self.h.segments if x.attempt == s.attempt and x.kind != "queue")
            _write(folder / "start.json", "{}", begin)

    def _beat(self, s: Segment, t: float) -> None:
        if s.kind in ("start", "hung start"):
            return
        step, at = self.h.step_at(t)
        told = self.h.telling in ("phases", "both")
        kind = s.kind.removeprefix("hung ")
        phase = kind if told and kind in ("save", "eval") else "train"
        beat = {"rank": 0, "step": step, "phase": phase, "at": "2026-01-01T00:00:00+00:00", "pid": 1, "host": "n1",
                "facts": {"attempt": str(s.attempt), "every": "10"}}  # fmt: skip
        _write(self.rundir.beats / "rank-0", json.dumps(beat) + "\n", at)

    def _log(self, s: Segment, t: float) -> None:
        path = self.rundir.logs / f"r-7_{s.job}.out"
        begun = next(x for x in self.h.segments if x.attempt == s.attempt and x.kind != "queue")
        if not path.exists():
            _write(path, "loading\n", begun.begin)
        last = self._last_line(s, t)
        new = []
        if last is not None and self.logged.get(s.attempt) != last[0]:
            self.logged[s.attempt] = last[0]
            new.append(f"step {last[0]} | loss 2.1" if self.h.telling != "growth" else f"{last[0] % 7} ok")
        at = last[1] if last is not None else begun.begin
        if self.h.chatter and self.h.telling != "growth":
            new.append("NCCL INFO still waiting")
            at = t - 20
        if new:
            with path.open("a") as file:
                file.write("\n".join(new) + "\n")
            os.utime(path, (at, at))

    def _last_line(self, s: Segment, t: float) -> tuple[int, float] | None:
        """The newest step of this attempt that was logged, and when."""
        every, best = self.h.log_every, None
        for x in self.h.segments:
            if x.attempt == s.attempt and x.kind == "train" and x.begin <= t:
                steps = int((min(t, x.end) - x.begin) / self.h.step_time)
                logged = (x.step + steps) // every * every
                if logged > x.step or (best is None and logged == x.step and steps):
                    best = (logged, x.begin + (logged - x.step) * self.h.step_time)
        return best


def _write(path: Path, text: str, at: float) -> None:
    path.write_text(text)
    os.utime(path, (at, at))
