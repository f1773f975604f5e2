"""The way of a job through its attempts: named states, and which one follows which. Data: what is done in
each stands in ``supervisor.py``.

PLACE ── BACK_OFF ── CLAIM ── ATTEMPT ── JUDGE ─┬─ restart ── REPLACE ── RECORD ── PAUSE ── CLAIM …
  │                                             ├─ leave ─── MAKE_WAY ── RECORD ── EXIT
  └─ no fit nodes ── UNSTARTED ── JUDGE         └─ stop ──── RECORD ── BRAKE ── EXIT
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    PLACE = "place"  # which nodes does it start on?
    PREDECESSOR = "predecessor"  # none is fit, and an older attempt may be at work: its end is waited for
    UNSTARTED = "unstarted"  # no fit nodes: an attempt that is none, so that the brake counts it
    BACK_OFF = "back-off"  # a new member of a chain that fails waits as a restart in place would
    CLAIM = "claim"
    ATTEMPT = "attempt"  # the command runs
    JUDGE = "judge"
    REPLACE = "replace"  # which nodes does it start on again?
    MAKE_WAY = "make way"  # the next member is to start now
    RECORD = "record"
    BRAKE = "brake"
    PAUSE = "pause"  # before a restart in place
    EXIT = "exit"


class Outcome(Enum):
    DONE = "done"
    NO_NODES = "no nodes"  # too few are fit
    OLDER = "older"  # so, and an older attempt may be at work
    OVER = "over"  # told to leave, the gate is shut, or another job has taken our place
    RESTART = "restart"
    LEAVE = "leave"
    STOP = "stop"


NEXT: dict[State, dict[Outcome, State]] = {
    State.PLACE: {
        Outcome.DONE: State.BACK_OFF,
        Outcome.OLDER: State.PREDECESSOR,
        Outcome.NO_NODES: State.UNSTARTED,
    },
    State.PREDECESSOR: {Outcome.DONE: State.PLACE, Outcome.OVER: State.EXIT},
    State.UNSTARTED: {Outcome.DONE: State.JUDGE, Outcome.OVER: State.EXIT},
    State.BACK_OFF: {Outcome.DONE: State.CLAIM, Outcome.OVER: State.EXIT},
    State.CLAIM: {Outcome.DONE: State.ATTEMPT, Outcome.OVER: State.EXIT},
    State.ATTEMPT: {Outcome.DONE: State.JUDGE},
    State.JUDGE: {
        Outcome.RESTART: State.REPLACE,
        Outcome.LEAVE: State.MAKE_WAY,
        Outcome.STOP: State.RECORD,
    },
    State.REPLACE: {Outcome.DONE: State.RECORD, Outcome.NO_NODES: State.MAKE_WAY},
    State.MAKE_WAY: {Outcome.DONE: State.RECORD},
    State.RECORD: {
        Outcome.RESTART: State.PAUSE,
        Outcome.LEAVE: State.EXIT,
        Outcome.STOP: State.BRAKE,
    },
    State.BRAKE: {Outcome.DONE: State.EXIT},
    State.PAUSE: {Outcome.DONE: State.CLAIM, Outcome.OVER: State.EXIT},
}
