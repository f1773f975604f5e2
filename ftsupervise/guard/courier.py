"""Carries a rank's questions to the store that all ranks share, in a thread of its own.

A store whose server is stopped gives no answer and no error, and the loop must not wait for it without a bound.

The thread sleeps until it is asked. While the training goes on that is once in half a second at most.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Protocol

from ftsupervise.guard.frontier import Frontier, parse
from ftsupervise.guard.stop_reasons import Decision

_LOOK_EVERY = 0.02  # seconds between two checks whether all ranks have left
_CLOSE_WITHIN = 1.0  # seconds that the end of the loop may wait for a store that does not answer


class Register(Protocol):
    """The one value that ``world`` ranks share, and a counter of those that have left. An error of it means that it is gone."""

    world: int

    def swap(self, expected: str, desired: str) -> str:
        """Replace ``expected`` ("" where there is none yet) by ``desired``; return the value afterwards."""

    def left(self, more: int) -> int:
        """Count ``more`` ranks as having left; return how many have."""


class Question(NamedTuple):
    """``up_to``: the steps that should be passed, unless those up to ``enough`` are by then. ``wish``: a decision to name a
    step for, and the step that this rank has made. ``closes``: the step that it makes now as it is named."""

    enough: int = 0
    up_to: int = 0
    wish: tuple[Decision, int] | None = None
    closes: int = 0


class Courier:
    """``known``: what the ranks have agreed on, as far as this one knows. ``gone``: why it can learn no more."""

    def __init__(self, register: Register, rank: int) -> None:
        self.known = Frontier()
        self.gone = ""
        self.busy = False  # asked, and not answered yet
        self._register, self._rank = register, rank
        self._turn = threading.Condition()
        self._asked = False
        self._question = Question()
        self._leaving = self._counted = False
        self._linger: float | None = None  # seconds, once the loop is over
        self._text = ""  # of ``known``, as it is in the store
        self._thread = threading.Thread(target=self._run, name="ftsupervise-agreement", daemon=True)
        self._thread.start()

    def ask(self, enough: int, up_to: int, wish: tuple[Decision, int] | None = None) -> None:
        """Have the steps up to ``up_to`` passed, unless those up to ``enough`` are by then. ``wish``: a decision to name a step
        for, and the step that this rank has made. Returns at once."""
        with self._turn:
            asked = self._question
            enough, up_to = max(enough, asked.enough), max(up_to, asked.up_to)
            self._question = Question(enough, up_to, wish or asked.wish, asked.closes)
            self._asked = self.busy = True
            self._turn.notify_all()

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until ``step`` may be made; False: there was no answer within ``seconds``, or there will be none."""
        with self._turn:
            self._turn.wait_for(lambda: self.known.passed >= step or self.gone, seconds)
            return self.known.passed >= step

    def close_step(self, step: int, seconds: float) -> Frontier:
        """Note that this rank does now what is named for ``step``; return that, as far as it can be learned within
        ``seconds``.
        """
        with self._turn:
            self._question = self._question._replace(closes=max(step, self._question.closes))
            self._asked = self.busy = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self.known.closed >= step or self.gone, seconds)
            return self.known

    def leave(self) -> None:
        """Note that this rank asks no more: it knows that all stop. Returns at once."""
        with self._turn:
            self._leaving = True
            self._turn.notify_all()

    def close(self, linger: float) -> None:
        """End: the loop is over.

        Where this process holds the store, it waits ``linger`` seconds at most until all others have left too, so that
        none of them asks in vain.
        """
        with self._turn:
            if self._linger is None:
                self._linger, self._leaving = linger, True
                self._turn.notify_all()
        self._thread.join(_CLOSE_WITHIN + linger)

    # ---------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            linger: float | None = None
            while linger is None:
                with self._turn:
                    self._turn.wait_for(
                        lambda: self._asked or self._leaving != self._counted or self._linger is not None
                    )
                    asked, self._asked, linger = self._asked, False, self._linger
                    question, self._question = self._question, self._question._replace(wish=None)
                if asked:
                    known, text = self._exchange(question)
                    with self._turn:
                        self.known, self._text, self.busy = known, text, self._asked
                        self._turn.notify_all()
                if self._leaving and not self._counted:
                    self._counted = True
                    self._register.left(1)
            self._end("the loop is over")
            self._wait_for_the_others(linger)
        except Exception as error:  # law 7: whatever the store raises, the loop goes on without it
            self._end(f"{type(error).__name__}: {error}".partition("\n")[0][:200])

    def _end(self, why: str) -> None:
        with self._turn:
            self.gone = self.gone or why
            self._turn.notify_all()

    def _exchange(self, question: Question) -> tuple[Frontier, str]:
        expected = self._text
        while True:
            desired = parse(expected)
            if question.wish is not None:
                desired = desired.wish(question.wish[0], self._rank, question.wish[1])
            if desired.passed < question.enough:
                desired = desired.up_to(question.up_to)
            desired = desired.close(question.closes)
            text = desired.text()
            found = self._register.swap(expected, text)
            if found == text:
                return desired, text
            if found == expected:
                raise LookupError("what the ranks have agreed on is gone from the store")
            expected = found

    def _wait_for_the_others(self, linger: float) -> None:
        end = time.monotonic() + linger
        while linger and self._register.left(0) < self._register.world and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
