"""The guard in the training loop: it says when to save and when to stop.

    from ftsupervise import Guard

    guard = Guard()
    for step in range(first, last):
        ...train...
        decision = guard.step(step)
        if decision.save:
            with guard.checkpoint(step) as folder:
                ...write into folder...
        if decision.stop:
            break
    else:
        guard.finished(last)

It uses the standard library only, and its own failures never raise into the loop.
"""

from ftsupervise.guard.guard import Guard
from ftsupervise.guard.stop_reasons import Decision

__all__ = ["Decision", "Guard"]
