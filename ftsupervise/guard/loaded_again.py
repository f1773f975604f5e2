"""Compares what was loaded once more, beside the first steps: a page of a mapped file is not held.

It may be thrown out after it was compared and read again from the disk, or another process may write there while the state is
loaded. The comparison runs in a thread, for it takes as long as reading the bytes from memory, and the training need not wait.
But nothing is saved before it is over, and no snapshot is taken: what was not compared goes nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class LoadedInPart:
    """The loop's objects hold a part of a state that was given up: nothing of them is saved. ``name``: of that state."""

    over = True

    def __init__(self, name: str) -> None:
        self._name = name

    def require(self) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"{self._name} was loaded in part only, and no other checkpoint took its place: make the model and all else that "
            "was to be restored anew, or end the program"
        )


class LoadedAgain:
    """The comparison of one state. ``unchanged``: for each file, whether it still is what was compared before."""

    def __init__(self, name: str, unchanged: Sequence[Callable[[], bool]]) -> None:
        self._name, self._why = name, ""
        self._thread = threading.Thread(target=self._run, args=(unchanged,), name="ftsupervise-compare", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Return whether it is known by now."""
        return not self._thread.is_alive()

    def require(self) -> None:
        """Wait for it. Raises RuntimeError where another state than the one that was compared may have been loaded."""
        self._thread.join()
        if self._why:
            raise RuntimeError(
                f"{self._name} changed while it was loaded ({self._why}): this attempt ends, and nothing of it is saved; "
                "the next one compares it again"
            )

    def _run(self, unchanged: Sequence[Callable[[], bool]]) -> None:
        try:
            if not all(one() for one in unchanged):
                self._why = "its bytes are others now"
        except Exception as error:  # what could not be compared is not known to be right
            self._why = str(error) or type(error).__name__
