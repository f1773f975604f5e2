"""The deadline of a typed command: every question it asks must be answered before.

It is apart from ``bounded.py``, which obeys it, because a fast command must not import that.
"""

from __future__ import annotations

until: float | None = None  # monotonic seconds; None: no person waits, and each question has its own bound
