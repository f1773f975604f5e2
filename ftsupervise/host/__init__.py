"""This machine: file ownership, safe creation and reading of files, processes, and the start of our interpreters."""

from __future__ import annotations

# The deadline of a typed command, in monotonic seconds: every question it asks is answered before. None: no person waits, and
# each question has its own bound. It stands here because a fast command must not import ``bounded``, which obeys it.
answer_by: float | None = None

# The bounds of whoever asks about a run, at a prompt or from Python. (``launch`` is given more for Slurm: launch/order.py.)
ANSWER = 12.0  # seconds
SLURM = 8.0  # … of which for Slurm's commands, all together
