"""Did the kernel kill one of the job's processes for its memory? The cgroups above us count, and may be read by anybody."""

from __future__ import annotations

import re
from pathlib import Path

_LEVELS = 4  # Slurm nests job, step and task; the job's own count, or that of a limited parent, is what we look for
_COUNT = re.compile(r"^oom_kill (\d+)$", re.M)


class OomKillCounter:
    """Counts when it is made; ``more()`` says whether there were more since. Without cgroups: never."""

    def __init__(self, proc: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> None:
        self._files = _files(proc, Path(mount))
        self._before = self._count()

    def more(self) -> bool:
        now = self._count()
        return any(now.get(path, 0) > count for path, count in self._before.items())

    def _count(self) -> dict[Path, int]:
        found = {}
        for path in self._files:
            try:
                match = _COUNT.search(path.read_text("ascii", "replace"))
            except OSError:
                continue
            if match:
                found[path] = int(match[1])
        return found


def _files(proc: str, mount: Path) -> list[Path]:
    """memory.events (v2) and memory.oom_control (v1) of our cgroup and those above it, but for the root."""
    try:
        text = Path(proc).read_text("utf-8", "replace")
    except OSError:
        return []
    found: list[Path] = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, name = mount, "memory.events"
        elif "memory" in controllers.split(","):
            base, name = mount / "memory", "memory.oom_control"
        else:
            continue
        folder = base / path.lstrip("/")
        for _ in range(_LEVELS):
            if folder == base or base not in folder.parents:
                break
            if "/job_" in str(folder):  # what died in a cgroup above the job's own may be somebody else's
                found.append(folder / name)
            folder = folder.parent
    return found
