"""The guard ring: a guest in the training loop that says when to save and when to leave.

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

Standard library only, no network of its own, and nothing here raises into the loop on a bad day.
"""

from ftsupervise.guard.guard import Guard
from ftsupervise.guard.stop_reasons import Decision

__all__ = ["Decision", "Guard"]
