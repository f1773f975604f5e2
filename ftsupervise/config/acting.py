"""The ``act:`` section: which decisions are carried out, and which are only written down and told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ftsupervise.config.fields import Strict
from ftsupervise.truth import DECISIONS

_Word = Literal["act", "observe"]


class Act(Strict):
    """What is done about each decision: ``act`` carries it out; ``observe`` writes it down and tells people, and does nothing.
    One word for all of them may stand in the place of the section."""

    hang: _Word = "act"
    """A hung command is ended, and started again."""
    brake: _Word = "act"
    """The chain is held after failures without progress, and where a command without the guard has left with 0."""
    exclusion: _Word = "act"
    """Nodes with a bad past, or that a health command refuses, are left out."""
    exit_analysis: _Word = "act"
    """The other ranks are ended when one has died, so that the command starts again at once."""
    going_back: _Word = "act"
    """The run stops for its loss and goes back (guard.loss), and a checkpoint that fails again and again is set aside."""

    @property
    def observed(self) -> tuple[str, ...]:
        """The decisions that are only told."""
        return tuple(one for one in DECISIONS if getattr(self, one) == "observe")


def observing_all() -> Act:
    return Act.model_validate(dict.fromkeys(DECISIONS, "observe"))


def _for_each(value: Any) -> Any:
    return dict.fromkeys(DECISIONS, value) if isinstance(value, str) and value in ("act", "observe") else value


ActOrWord = Annotated[Act, BeforeValidator(_for_each, json_schema_input_type=Act | _Word)]
