"""The bounds of each group's hang detector, which have to fit between torchft's timeouts. Pure.

A rank of a healthy group stands still while it waits for the others in an all-reduce, at most the process group's timeout: that
is no hang. And a hung group is ended long before the others end themselves for want of a quorum.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftsupervise.config.supervisor import default
from ftsupervise.replicas.timeouts import Timeouts

_MORE = 2.0  # seconds after an all-reduce has failed, in which the group begins its next step


def hang_bounds(timeouts: Timeouts, settings: Sequence[str]) -> list[str]:
    """Return options of ``ftsupervise run``, without those that ``settings`` has.

    Half of torchft's quorum timeout is the most for a phase that is not known yet, and for the first step.
    """
    most = timeouts.quorum / 2
    bounds = {
        "--hang": min(most, max(float(default("hang.floor")), timeouts.process_group + _MORE)),
        "--hang-unknown": min(most, float(default("hang.unknown"))),
        "--hang-start": min(most, float(default("hang.start"))),
    }
    found = []
    for flag, seconds in bounds.items():
        if not any(word.partition("=")[0] == flag for word in settings):
            found += [flag, f"{seconds:g}"]
    return found
