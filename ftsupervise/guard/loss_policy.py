"""What the guard does about a loss that is no number, or that diverges: it warns, stops the run, or has it go back and go on.

A state whose loss is no number is worth nothing: the loop leaves without saving it, and no snapshot of it is taken. Every rank
judges the losses that it is given; one rank that stops is enough, for the ranks agree on the strongest vote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from ftsupervise.guard.loss_trend import LossTrend
from ftsupervise.rundir.paths import ENV_GUARD
from ftsupervise.truth import DIVERGES, NOT_A_NUMBER, LossTrouble

_LASTING = 3  # losses in a row that are no number: the state is bad, and not only a batch


class LossAction(str, Enum):
    OFF = "off"
    WARN = "warn"
    STOP = "stop"
    RESUME = "resume"

    @property
    def stops(self) -> bool:
        return self in (LossAction.STOP, LossAction.RESUME)


class LossPolicy(NamedTuple):
    """The settings under ``guard.loss``."""

    nonfinite: LossAction = LossAction.WARN
    diverging: LossAction = LossAction.WARN
    tolerate: int = 0  # losses in a row that may be no number
    patience: int = 200  # losses for which it has to stand high


def loss_policy(env: Mapping[str, str]) -> tuple[LossPolicy, list[str]]:
    """The policy that ``ftsupervise run`` put into the environment, and what of it is not understood."""
    given, problems = dict[str, Any](), list[str]()
    for field, default in LossPolicy()._asdict().items():
        name = f"{ENV_GUARD}LOSS_{field.upper()}"
        text = env.get(name, "")
        try:
            if text:
                given[field] = LossAction(text) if isinstance(default, LossAction) else _count(text)
        except ValueError:
            problems.append(f"{name}={text!r} is not understood and not used")
    return LossPolicy(**given), problems


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


class LossWatch:
    """The losses of this rank. ``value`` is the newest one; None before the first.

    ``first_ever``: the first loss of the run where an earlier attempt has reported it; asked for once, when it matters.
    """

    def __init__(
        self, policy: LossPolicy, rank: int, warn: Callable[[str], None], first_ever: Callable[[], float | None]
    ) -> None:
        self._policy, self._rank, self._warn = policy, rank, warn
        self._trend = None if policy.diverging is LossAction.OFF else LossTrend(policy.patience, first_ever)
        self.value: float | None = None
        self.first: float | None = None  # finite
        self.trouble: LossTrouble | None = None  # for the ledger; the first one that stops the run stays
        self._bad = 0  # losses in a row that are no number
        self._since = 0

    @property
    def sound(self) -> bool:
        """May the state be kept? Not while the loss is no number."""
        return not self._bad

    def take(self, loss: float, step: int) -> bool:
        """The loss of ``step``; is there something to tell or to decide? Raises TypeError or ValueError for no number."""
        self.value = value = float(loss)
        if value - value != 0.0:
            return self._take_bad(value, step)
        if self._bad:
            self._recover(value, step)
        if self.first is None:
            self.first = value
        if self._trend is None or (rise := self._trend.add(value, step)) is None:
            return False
        words = f"{rise.now:.4g} at step {step}, {rise.before:.4g} before step {rise.since}"
        return self._report(DIVERGES, rise.since, step, words, self._policy.diverging)

    def _take_bad(self, value: float, step: int) -> bool:
        if not self._bad:
            self._since = step
            if self._trend is not None:
                self._trend.begin_anew()
        self._bad += 1
        words = f"{value} at step {step}" + (f", since step {self._since}" if self._since != step else "")
        action = self._policy.nonfinite
        if action.stops and self._bad > self._policy.tolerate:
            return self._report(NOT_A_NUMBER, self._since, step, words, action)
        if self._bad == 1:
            self._warn(f"{NOT_A_NUMBER}: {words}; no snapshot is taken while it is none")
        if self._bad >= _LASTING and not self._stopping:
            self.trouble = LossTrouble(NOT_A_NUMBER, self._since, step, self._rank, words)
        return self._bad in (1, _LASTING)

    def _recover(self, value: float, step: int) -> None:
        if not self._stopping:
            self.trouble = None
            self._warn(f"the loss is a number again at step {step}: {value:.4g}")
        self._bad = 0

    @property
    def _stopping(self) -> bool:
        return self.trouble is not None and self.trouble.stops

    def _report(self, kind: str, since: int, step: int, words: str, action: LossAction) -> bool:
        if self._stopping:
            return False
        if action.stops:
            self.trouble = LossTrouble(kind, since, step, self._rank, words, action.value)
        else:
            self._warn(f"{kind}: {words}")
        return True
