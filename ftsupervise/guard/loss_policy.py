"""Decides what the guard does about a loss that is no number, or that diverges: warn, stop the run, or go back and go on.

A state whose loss is no number is worth nothing: the loop leaves without saving it, and no snapshot of it is taken. Every rank
judges the losses that it is given; one rank that stops is enough, for the ranks agree on the strongest vote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, SupportsFloat

from ftsupervise.guard.held_back import HeldBack
from ftsupervise.guard.settings import whole
from ftsupervise.rundir.paths import ENV_GUARD
from ftsupervise.truth import DIVERGES, NOT_A_NUMBER, LossTrouble

# Judges whether the loss diverges, by medians of blocks of losses, because single losses jump.
#
# A loss that rises is nothing by itself: the warm-up, a bad batch, a spike that recovers and a learning rate that is
# raised again all do it. It diverges when it has stood high for ``patience`` losses, does not come back, and "high" is
# beyond all three of ten times the noise of the blocks before, a quarter of what the training had gained since its first
# loss, a quarter of where the loss stood. Pure, and cheap: a loss costs one append, the statistics are made once in a
# block.

_BLOCKS = 16  # the patience in blocks; the same number has to be known before anything is judged
_PAST = 64  # blocks that say where the loss stood
_NOISE = 10.0
_GAIN = _LEVEL = 0.25
_COMES_BACK = 0.8  # the second half of a rise stands this much lower than the first: it recovers
_AGAIN = 8  # blocks after which level and noise are computed again: they cost more than all else
_MAD = 1.4826  # of a normal distribution: from the median of the deviations to one standard deviation


class LossRise(NamedTuple):
    """A loss that went up and stays up."""

    since: Any  # the step of the first block that stood high, as it was given
    now: float
    before: float


class LossTrend:
    """Takes finite losses in their order. ``first_ever`` is asked when a loss looks like diverging: the first loss of the run,
    where an earlier process has seen it; None: none has, or it is not known."""

    def __init__(self, patience: int, first_ever: Callable[[], float | None] = lambda: None) -> None:
        self._size = max(1, patience // _BLOCKS)
        self._first_ever = first_ever
        self._asked = False
        self._block: list[float] = []
        self._begins: Any = None  # step of the first loss in the block
        self._past: deque[float] = deque(maxlen=_PAST)
        self._high: deque[float] = deque(maxlen=_BLOCKS)  # the newest blocks that stand high, one after the other
        self._since: Any = None
        self._before = self._noise = 0.0
        self._fresh = 0  # more blocks for which these two hold
        self._highest: float | None = None  # of the blocks of this process: where the training came from

    def add(self, value: float, step: Any) -> LossRise | None:
        """Return the rise, when this loss makes it certain; None otherwise, and again None while it goes on in the same way."""
        block = self._block
        if not block:
            self._begins = step
        block.append(value)
        if len(block) < self._size:
            return None
        middle = median(block)
        block.clear()
        return self._judge(middle)

    def begin_anew(self) -> None:
        """Forget the earlier rise: the loss is no number any more, or it was reported."""
        self._block.clear()
        self._high.clear()

    def _judge(self, middle: float) -> LossRise | None:
        past = self._past
        if len(past) < _BLOCKS:
            self._highest = middle if self._highest is None else max(middle, self._highest)
            past.append(middle)
            return None
        if self._fresh == 0:
            self._fresh = _AGAIN
            self._before = median(past)
            self._noise = _MAD * median([abs(one - self._before) for one in past])
        before = self._before
        if not self._is_high(middle - before, before):
            self._fresh -= 1
            self._high.clear()
            past.append(middle)
            return None
        if not self._high:
            self._since = self._begins
        self._high.append(middle)
        if len(self._high) < _BLOCKS or self._comes_back(before) or self._is_little(middle - before, before):
            return None
        self.begin_anew()
        past.clear()  # what comes now is judged against itself
        self._fresh = 0
        return LossRise(self._since, middle, before)

    def _is_high(self, rise: float, before: float) -> bool:
        gained = max(0.0, (self._highest or 0.0) - before)
        return rise > max(_NOISE * self._noise, _GAIN * gained, _LEVEL * abs(before))

    def _comes_back(self, before: float) -> bool:
        rises = [one - before for one in self._high]
        half = len(rises) // 2
        return median(rises[half:]) < _COMES_BACK * median(rises[:half])

    def _is_little(self, rise: float, before: float) -> bool:
        """Return whether it is not high at all, by the run's first loss."""
        if not self._asked:
            self._asked = True
            first = self._first_ever()
            if first is not None and first - first == 0.0:
                self._highest = max(first, self._highest if self._highest is not None else first)
        return not self._is_high(rise, before)


def median(values: Iterable[float]) -> float:
    """Return the upper one of two medians; ``statistics`` takes longer to import than the guard."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


# ------------------------------------------------------------------------------------------


_MOST_WARNINGS, _MOST_OF_OTHERS = 10, 2  # of rank 0, and of each other one
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
    """Return the policy that ``ftsupervise run`` put into the environment, and the parts of it that are not understood."""
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


def _python_number(loss: SupportsFloat) -> float:
    """Return the number that a tensor, an array or a number is. torch warns where ``float()`` is asked of a loss that has
    a gradient, and not where ``item()`` is.
    """
    item = getattr(loss, "item", None)
    return float(item() if item is not None else loss)


class LossWatch:
    """The losses of this rank. ``value`` is the newest one; None before the first.

    ``first_ever``: the first loss of the run where an earlier attempt has reported it; asked for once, when it matters.
    """

    def __init__(
        self,
        policy: LossPolicy,
        rank: int,
        warn: Callable[[str], None],
        first_ever: Callable[[], float | None],
        held_back: HeldBack | None = None,
    ) -> None:
        self._policy, self._rank, self._warn, self._held_back = policy, rank, warn, held_back
        self._trend = None if policy.diverging is LossAction.OFF else LossTrend(policy.patience, first_ever)
        self.value: float | None = None
        self.first: float | None = None  # finite
        self.trouble: LossTrouble | None = None  # for the ledger; the first one that stops the run stays
        self._ahead = 0  # 1: the loop gives the loss before it calls step()
        self._bad = 0  # losses in a row that are no number
        self._since: int | None = None  # the step of the first of them
        self._warned = 0

    @property
    def sound(self) -> bool:
        """Return whether the state may be kept: not while the loss is no number."""
        return not self._bad

    def take(self, loss: float, last: Any, step: Any = None) -> bool:
        """Take a loss; return whether there is something to report or to decide.

        ``last``: the step that the loop came to, None before the first; ``step``: the one that the loss is of, where
        the loop says so. Raises TypeError or ValueError for no number.
        """
        value = loss if type(loss) is float else _python_number(loss)
        if self.value is None and last is None:
            self._ahead = 1
        self.value = value
        if value - value != 0.0:
            return self._take_bad(value, self._number(last, step))
        if self._bad:
            self._recover(value, self._number(last, step))
        if self.first is None:
            self.first = value
        if self._trend is None or (rise := self._trend.add(value, last)) is None:
            return False
        at, since = self._number(last, step), self._number(rise.since, None)
        words = f"{rise.now:.4g} at step {at}, {rise.before:.4g} before step {since}"
        return self._report(LossTrouble(DIVERGES, since, at, self._rank, words, self._policy.diverging.value))

    def settle(self, step: int | None) -> None:
        """Note that the loop stops after ``step``. That names the step of a loss that came before the first one."""
        if self.trouble is not None:
            since = self.trouble.since
            self.trouble = self.trouble._replace(since=step if since is None else since, step=step)

    def action(self, cause: str) -> str:
        """Return what the settings say about this cause; "" where it is none of the loss."""
        of = {NOT_A_NUMBER: self._policy.nonfinite, DIVERGES: self._policy.diverging}
        return of[cause].value if cause in of else ""

    def _number(self, last: Any, step: Any) -> int | None:
        if step is not None:
            return whole(step)
        number = whole(last)
        return None if number is None else number + self._ahead

    def _take_bad(self, value: float, step: int | None) -> bool:
        if not self._bad:
            self._since = None
            if self._trend is not None:
                self._trend.begin_anew()
        self._bad += 1
        if self._since is None:
            self._since = step
        words = str(value) if step is None else f"{value} at step {step}"
        words += f", since step {self._since}" if self._since != step else ""
        action = self._policy.nonfinite
        found = LossTrouble(NOT_A_NUMBER, self._since, step, self._rank, words, action.value)
        if action.stops and self._bad > self._policy.tolerate:
            if self._stopping or not self._only_told(found):
                return self._report(found)
            self.trouble = found._replace(observed=True)
            return self._bad in (1, _LASTING)
        if self._bad == 1:
            self._say(f"{NOT_A_NUMBER}: {words}; no snapshot is taken meanwhile")
        if self._bad >= _LASTING and not self._stopping:
            self.trouble = found._replace(then=LossAction.WARN.value)
        return self._bad in (1, _LASTING)

    def _recover(self, value: float, step: int | None) -> None:
        self._bad = 0
        if not self._stopping:
            self.trouble = None
            words = f"the loss is a number again at step {step}: {value:.4g}"
            self._say(words)
            if self._held_back is not None:
                self._held_back.over(words)

    @property
    def _stopping(self) -> bool:
        return self.trouble is not None and self.trouble.stops

    def _report(self, found: LossTrouble) -> bool:
        if self._stopping:
            return False
        if found.stops and not self._only_told(found):
            self.trouble = found
        elif not found.stops:
            self._say(f"{found.kind}: {found.words}")
        return True

    def _only_told(self, found: LossTrouble) -> bool:
        """Return whether a stop is not carried out, which is said once."""
        before = self.trouble is not None and self.trouble.observed
        if self._held_back is None or not self._held_back(found):
            return False
        if not before:
            self._say(f"{found.kind}: {found.words}; that the run stops for it is only told")
        return True

    def _say(self, text: str) -> None:
        """Print a line, but let neither a loss that comes and goes nor ten thousand ranks with the same one fill the log."""
        self._warned += 1
        most = _MOST_WARNINGS if self._rank == 0 else _MOST_OF_OTHERS
        if self._warned <= most:
            self._warn(text + ("; further ones are not reported" if self._warned == most else ""))
