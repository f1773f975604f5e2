"""The states of a job and of each of its attempts, and which follows which. Data only: no process is touched here.

``supervisor.py`` holds what is done in each state of the job, ``command.py`` what is done in each state of an attempt.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from ftsupervise.model import Cause

# The job:
#
# PLACE ── BACK_OFF ── CLAIM ── ATTEMPT ── JUDGE ─┬─ restart ── REPLACE ── RECORD ── PAUSE ── CLAIM …
#   │                                             ├─ leave ─── MAKE_WAY ── RECORD ── EXIT
#   └─ no fit nodes ── UNSTARTED ── JUDGE         └─ stop ──── RECORD ── BRAKE ── EXIT


class State(Enum):
    PLACE = "place"  # choose the nodes to start on
    PREDECESSOR = "predecessor"  # no node is fit, and an older attempt may be running: wait for its end
    UNSTARTED = "unstarted"  # no fit nodes: record an attempt that did not start, so that the brake counts it
    BACK_OFF = (
        "back-off"  # look at what became of the members before; a chain that fails waits as a restart in place would
    )
    CLAIM = "claim"
    ATTEMPT = "attempt"  # the command runs
    JUDGE = "judge"
    REPLACE = "replace"  # choose the nodes to restart on
    MAKE_WAY = "make way"  # the next member is to start now
    RECORD = "record"
    BRAKE = "brake"
    PAUSE = "pause"  # before a restart in place
    EXIT = "exit"


class Outcome(Enum):
    DONE = "done"
    NO_NODES = "no nodes"  # too few are fit
    OLDER = "older"  # too few are fit, and an older attempt may be running
    OVER = "over"  # asked to stop, the gate is shut, or another job has taken our place
    RESTART = "restart"
    LEAVE = "leave"
    STOP = "stop"


NEXT: dict[State, dict[Outcome, State]] = {
    State.PLACE: {
        Outcome.DONE: State.BACK_OFF,
        Outcome.OLDER: State.PREDECESSOR,
        Outcome.NO_NODES: State.UNSTARTED,
    },
    State.PREDECESSOR: {Outcome.DONE: State.PLACE, Outcome.OVER: State.EXIT, Outcome.STOP: State.BRAKE},
    State.UNSTARTED: {Outcome.DONE: State.JUDGE, Outcome.OVER: State.EXIT},
    State.BACK_OFF: {Outcome.DONE: State.CLAIM, Outcome.OVER: State.EXIT, Outcome.STOP: State.BRAKE},
    State.CLAIM: {Outcome.DONE: State.ATTEMPT, Outcome.OVER: State.EXIT},
    State.ATTEMPT: {Outcome.DONE: State.JUDGE},
    State.JUDGE: {
        Outcome.RESTART: State.REPLACE,
        Outcome.LEAVE: State.MAKE_WAY,
        Outcome.STOP: State.RECORD,
    },
    State.REPLACE: {
        Outcome.DONE: State.RECORD,
        Outcome.NO_NODES: State.MAKE_WAY,
        Outcome.STOP: State.RECORD,
        Outcome.OVER: State.RECORD,
    },
    State.MAKE_WAY: {Outcome.DONE: State.RECORD},
    State.RECORD: {
        Outcome.RESTART: State.PAUSE,
        Outcome.LEAVE: State.EXIT,
        Outcome.STOP: State.BRAKE,
    },
    State.BRAKE: {Outcome.DONE: State.EXIT},
    State.PAUSE: {Outcome.DONE: State.CLAIM, Outcome.OVER: State.EXIT},
}

# An attempt, from the start of its command until no process of it is left:
#
# STARTING ── RUNNING ─┬───────────────────────── the command ends ─┬─ CLEARING ── ENDED
#               │      ├─ a rank died or hung ── FAILING ─┐         │
#             WARNED ──┼─ it must end ────────── ENDING ──┼─ KILLING┘
#                      └─ SIGTERM and the like ─ STOPPING ┘


class AttemptState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WARNED = "warned"  # the command was asked to save and stop: a rank that stands still is no hang any more
    FAILING = "failing"  # a rank has died or hung: the others have a moment to leave
    ENDING = "ending"  # we have sent SIGTERM, because of something we saw
    STOPPING = "stopping"  # the signal that asks us to stop was passed on
    KILLING = "killing"  # the time to leave is over: SIGKILL
    CLEARING = "clearing"  # the command has ended: the processes it left running are ended
    ENDED = "ended"


class AttemptEvent(Enum):
    STARTED = "the command runs"
    NOT_STARTED = "the command cannot be started"
    WARNING = "Slurm's warning signal"
    STOP = "a signal that asks us to stop, or the one that announces the end, where Slurm says that it is here"
    MUST_END = "a newer attempt has begun, or the command ignores the kill switch"
    RANK_DIED = "a rank has died"
    HUNG = "a rank hangs"
    TIME_UP = "the time to leave is over"
    EXITED = "the command has ended"
    UNKILLABLE = "the command does not end even of SIGKILL"
    CLEARED = "no process is left that can be ended"


_S, _E = AttemptState, AttemptEvent
# In these states the command has a time to leave. A warning is noted in every state, and moves only RUNNING.
_LEAVING = {_E.STOP: _S.STOPPING, _E.TIME_UP: _S.KILLING, _E.EXITED: _S.CLEARING}
AFTER: dict[AttemptState, dict[AttemptEvent, AttemptState]] = {
    _S.STARTING: {_E.STARTED: _S.RUNNING, _E.NOT_STARTED: _S.ENDED},
    _S.RUNNING: {
        _E.WARNING: _S.WARNED,
        _E.STOP: _S.STOPPING,
        _E.MUST_END: _S.ENDING,
        _E.RANK_DIED: _S.FAILING,
        _E.HUNG: _S.FAILING,
        _E.EXITED: _S.CLEARING,
    },
    _S.WARNED: {
        _E.WARNING: _S.WARNED,
        _E.STOP: _S.STOPPING,
        _E.MUST_END: _S.ENDING,
        _E.RANK_DIED: _S.FAILING,
        _E.EXITED: _S.CLEARING,
    },
    _S.FAILING: {_E.WARNING: _S.FAILING, **_LEAVING},
    _S.ENDING: {_E.WARNING: _S.ENDING, **_LEAVING},
    _S.STOPPING: {_E.WARNING: _S.STOPPING, **_LEAVING},
    _S.KILLING: {
        _E.WARNING: _S.KILLING,
        _E.STOP: _S.KILLING,
        _E.EXITED: _S.CLEARING,
        _E.UNKILLABLE: _S.CLEARING,
    },
    _S.CLEARING: {_E.WARNING: _S.CLEARING, _E.STOP: _S.CLEARING, _E.CLEARED: _S.ENDED},
}


class OpenWarning(NamedTuple):
    """A warning that some of the command's processes could not hear when it came: they may be starting."""

    number: int  # the signal
    until: float  # monotonic: they are waited for until then
    again: float  # monotonic: when they are looked at again
    told: frozenset[int] = frozenset()  # processes that have it
    waits: bool = False  # it was said that it waits for a rank


class AttemptProgress(NamedTuple):
    """The progress of an attempt. It is replaced, never changed. Times are monotonic."""

    state: AttemptState = AttemptState.STARTING
    kill_at: float | None = None  # the time of SIGKILL for processes still running; None: no end has begun
    cause: Cause | None = None  # where we end it because of an observation
    by: int = 0  # the signal that asked us to stop
    died_at: float | None = None  # when we first saw that it is over
    warned: bool = False  # by Slurm, at whatever time
    code: int | None = None  # of the command; -N for a signal N
    heard: bool = False  # a process of the command catches the warning
    unheard: OpenWarning | None = None  # a warning that some did not catch when it came

    def after(self, event: AttemptEvent, **facts: Any) -> AttemptProgress:
        """Return the progress in the next state, with the facts of ``event``: there is no other way to another state.

        Raises KeyError for an event that the state lacks.
        """
        warned = self.warned or event is AttemptEvent.WARNING
        return self._replace(state=AFTER[self.state][event], warned=warned, **facts)
