"""When a person waits for this very command: until when whatever it asks must have answered.

Apart from ``bounded.py``, which obeys it, because a command that is typed in a hurry must not import that.
"""

from __future__ import annotations

until: float | None = None  # monotonic seconds; None: nobody waits, and each thing has its own bound
