"""The trials as people read them: one table for each fault, medians with their ranges. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.figures import figure
from benchmarks.recovery.launchers import Launcher
from benchmarks.recovery.scene import WORDS, Trial

HEAD = (
    f"{'':30} {'n':>5} {'detect':>7} {'stop':>6} {'start':>6} {'redo':>6} {'first new step':>22} {'/ cold':>7} {'redone':>6} "
    f"{'stood':>6}"
)


def tables(trials: Sequence[Trial], launchers: Sequence[Launcher], faults: Sequence[str], bound: float) -> str:
    parts = [_LEGEND.format(bound=bound)]
    for fault in faults:
        parts.append(f"\n{WORDS[fault]}\n{HEAD}\n")
        for launcher in launchers:
            mine = [one for one in trials if one.fault == fault and one.launcher == launcher.name]
            if mine:
                parts.append(_row(launcher.words, mine, bound))
    return "".join(parts)


_LEGEND = """\
Seconds, medians. detect: from the fault to the end of the first surviving rank. stop: until no old rank lives. start: until the
first step of the next attempt. redo: until its first step that is new. "first new step": all of it, with its range.
/ cold: the same divided by the same run's time from the launch to its first step. n: how many of how many came back
within {bound:.0f} s. stood: from the last step of the old ranks to the first new one (ranks may live on after their slurmd).
"""


def say_figures(trials: Sequence[Trial], launchers: Sequence[Launcher], faults: Sequence[str]) -> None:
    """Each launcher's time to its first new step, beside ours at its defaults, and the steps that were made again."""
    for fault in faults:
        back = {
            one.name: [each for each in trials if (each.launcher, each.fault) == (one.name, fault)] for one in launchers
        }
        ours = _middle(back.get("ftsupervise", ()), lambda one: one.new)
        for name, mine in back.items():
            if (new := _middle(mine, lambda one: one.new)) is None:
                continue
            times = new / ours if ours and name != "ftsupervise" else None
            figure(f"recovery/{fault}/{name}", new, "s", "ftsupervise", times=times)
            figure(f"recovery/{fault}/{name}/redone", _middle(mine, lambda one: one.redone) or 0, "steps")
            if (first := _middle(mine, lambda one: one.first)) is not None:
                figure(f"recovery/{fault}/{name}/first-step", first, "s")


def _row(words: str, mine: Sequence[Trial], bound: float) -> str:
    back = [one for one in mine if one.new is not None]
    count = f"{len(back)}/{len(mine)}"
    if not back:
        seen = _middle(mine, lambda one: one.acts)
        note = next((one.note for one in mine if one.note), f"> {bound:.0f} s")
        return f"{words:30} {count:>5} {_show(seen):>7} {'':>6} {'':>6} {'':>6} {note:>22}\n"
    new = sorted(one.new for one in back if one.new is not None)
    cells = (
        _middle(back, lambda one: one.acts),
        _middle(back, lambda one: _less(one.down, one.acts)),
        _middle(back, lambda one: _less(one.first, one.down)),
        _middle(back, lambda one: _less(one.new, one.first)),
    )
    ratio = _middle(back, lambda one: one.new / one.cold if one.new and one.cold else None)
    redone = _middle(back, lambda one: one.redone)
    stood = _middle(back, lambda one: one.stall)
    whole = f"{median(new):.2f} ({new[0]:.2f}-{new[-1]:.2f})"
    shown = " ".join(f"{_show(cell):>{width}}" for cell, width in zip(cells, (7, 6, 6, 6), strict=True))
    return f"{words:30} {count:>5} {shown} {whole:>22} {_show(ratio):>7} {redone or 0:>6.0f} {_show(stood):>6}\n"


def _less(later: float | None, sooner: float | None) -> float | None:
    return None if later is None or sooner is None else later - sooner


def _middle(some: Iterable[Trial], what: Callable[[Trial], float | None]) -> float | None:
    seen = [value for one in some if (value := what(one)) is not None]
    return median(seen) if seen else None


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
