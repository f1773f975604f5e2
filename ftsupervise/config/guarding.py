"""The ``guard:`` section: the guard's checks inside the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from ftsupervise.config.fields import Duration, Off, Positive, Share, Strict, declared, off_is_null

_LossAction = Literal["warn", "stop", "resume"]


class LossSettings(Strict):
    """The reaction when the loss that the loop gives to ``guard.loss()`` is no number, or diverges."""

    nonfinite: _LossAction = declared("guard.loss.nonfinite")
    diverging: Annotated[_LossAction | None, off_is_null(_LossAction | None | Off)] = declared("guard.loss.diverging")
    tolerate: int = declared("guard.loss.tolerate")
    patience: int = declared("guard.loss.patience")
    back: int = declared("guard.loss.back")
    tries: int = declared("guard.loss.tries")


class GuardSettings(Strict):
    """The checks of the guard inside the training loop."""

    poll: Annotated[Duration, Positive] = declared("guard.poll")
    memory: Share | None = declared("guard.memory")
    gpu_memory: Share | None = declared("guard.gpu_memory")
    stop_before: Annotated[Duration, Positive] | None = declared("guard.stop_before")
    run_for: Annotated[Duration, Positive] | None = declared("guard.run_for")
    loss: LossSettings = LossSettings()
    """A loss that is no number, or that diverges."""
