"""Sizes, shares and durations as people write them, and back.

``format_x(parse_x(text))`` need not give ``text`` again, but ``parse_x(format_x(value)) == value`` always holds.
Inside the house a size is an ``int`` of bytes, a share is a ``float`` in 0–1, a duration a ``timedelta``.
All parsers raise ``ValueError`` with a sentence that says what to type.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
# Compiled when the first value is read: most commands only show some.
_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,400})?"  # bounded: Python refuses to read numbers of 5000 digits
_SIZE = rf"({_NUMBER})\s*([kmgtp]i?)?b?"
_SHARE = rf"({_NUMBER})\s*%"
_DURATION_PART = rf"({_NUMBER})\s*(ms|s|m|min|h|d|w)"
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SLURM = r"(?:([0-9]{1,12})-)?([0-9]{1,15})(?::([0-9]{1,15}))?(?::([0-9]{1,15}))?"


def _exactly(number: str) -> Fraction:
    from fractions import Fraction  # only who reads a number pays for it

    return Fraction(number)


def _brief(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:50]}..."


def parse_size(text: str | int) -> int:
    """ "4TB" -> 4_000_000_000_000, "512 MiB" -> 536_870_912, 17 -> 17. Bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = re.fullmatch(_SIZE, str(text).strip(), re.I)
    if not match:
        raise ValueError(f'expected a size such as "500GB" or "2TiB", got {_brief(text)}')
    unit = (match[2] or "").lower()
    value = _exactly(match[1]) * (_BINARY.get(unit) or _SIZES[unit])
    if value.denominator != 1:
        raise ValueError(f"{_brief(text)} is not a whole number of bytes")
    return int(value)


def format_size(size: int) -> str:
    """Bytes in the largest unit that stays exact: 4_000_000_000_000 -> "4TB", 1536 -> "1536B"."""
    for unit, factor in sorted([*_SIZES.items(), *_BINARY.items()], key=lambda pair: -pair[1]):
        if unit and size and size % factor == 0:
            return f"{size // factor}{unit.capitalize() if len(unit) > 1 else unit.upper()}B"
    return f"{size}B"


def show_size(size: float) -> str:
    """Bytes for reading, three figures: 2_345_678_901 -> "2.35 GB". Not an inverse of anything."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor * 0.9995:
            return f"{size / factor:.3g} {unit}" if abs(size) < factor * 999.5 else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"


def parse_share(text: str) -> float:
    """ "95%" -> 0.95. A bare number is refused: 95 and 0.95 have both been meant, and both have cost nights."""
    match = re.fullmatch(_SHARE, text.strip()) if isinstance(text, str) else None
    if not match or _exactly(match[1]) > 100:
        raise ValueError(f'expected a share with a percent sign, such as "95%", got {_brief(text)}')
    return float(_exactly(match[1]) / 100)


def format_share(share: float) -> str:
    """0.95 -> "95%", exactly: ``parse_share`` of it gives the same float."""
    from decimal import Decimal

    text = format((Decimal(repr(share)) * 100).normalize(), "f")
    return f"{text}%"


def parse_duration(text: str | int | float) -> timedelta:
    """ "2h", "1h30m", "90 s", "500ms"; Slurm's "2-15:52:19", "20:00:00"; never a bare number. Whole milliseconds."""
    if isinstance(text, str):
        stripped = text.strip()
        if re.fullmatch(rf"(?:{_DURATION_PART}\s*)+", stripped, re.I):
            parts = re.findall(_DURATION_PART, stripped, re.I)
            return _duration(sum((_exactly(n) * _MILLISECONDS[u.lower()] for n, u in parts), _exactly("0")))
        if ":" in stripped or "-" in stripped:
            return parse_slurm_time(stripped)
    typed = (
        "" if isinstance(text, (str, bool)) else f"; type {text}s, {text}m or {text}h" if text else "; type 0s for none"
    )
    raise ValueError(f'expected a duration such as "10m", "2h" or "1-12:00:00" (in quotes), got {_brief(text)}{typed}')


def _duration(milliseconds: Fraction) -> timedelta:
    if milliseconds.denominator != 1:
        raise ValueError("the duration is no whole number of milliseconds")
    try:
        return timedelta(milliseconds=int(milliseconds))
    except OverflowError:
        raise ValueError("the duration is longer than any cluster will live") from None


def format_duration(value: timedelta) -> str:
    """timedelta -> "2d15h52m19s", "10m", "0s"; exact to the millisecond, refuses what it cannot say."""
    total = value // timedelta(milliseconds=1)
    if timedelta(milliseconds=total) != value or total < 0:
        raise ValueError(f"{value!r} cannot be written exactly")
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, total = divmod(total, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"


def show_duration(seconds: float) -> str:
    """Seconds for reading, two units at most: 228_739 -> "2d 15h", 95 -> "1m 35s", 0.25 -> "0.2s"."""
    if not -1e15 < seconds < 1e15:  # infinite, or not a number
        return "an unknown time"
    if seconds < 0:
        return "-" + show_duration(-seconds)
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    total = round(seconds)
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for index, (unit, size) in enumerate(units):
        if total >= size:
            text = f"{total // size}{unit}"
            rest = total % size
            if index + 1 < len(units) and rest // units[index + 1][1]:
                text += f" {rest // units[index + 1][1]}{units[index + 1][0]}"
            return text
    return "0s"


def show_percent(share: float) -> str:
    """A share for reading: 0.0312 -> "3.1 %". It says 0 % and 100 % of nothing else."""
    if share in (0, 1) or 0.0005 <= share < 0.9995:
        return f"{100 * share:.1f} %"
    return "> 99.9 %" if share >= 0.9995 else "< 0.01 %" if share < 0.0001 else f"{100 * share:.2f} %"


def show_rate(rate: float, beside: float | None = None) -> str:
    """Steps a second for reading, or where they are slow seconds a step: 12.5 -> "12.5 steps/s", 0.1 -> "10 s a step". The unit
    is that of ``beside``, a rate that it is compared with."""
    slow = 0 < (beside or rate) < 0.5
    return f"{1 / rate:.3g} s a step" if slow and rate > 0 else f"{max(0.0, rate):.3g} steps/s"


def count(number: int, noun: str) -> str:
    """A number of things for reading: "1 check", "12,000 checks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named(noun: str, names: Sequence[str]) -> str:
    """Things by their names, for reading: "job 88", "jobs 88, 89"."""
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def parse_slurm_time(text: str) -> timedelta:
    """Slurm's own forms: "D-HH:MM:SS", "D-HH:MM", "D-HH", "HH:MM:SS", "MM:SS", "MM". Source: sbatch(1), --time."""
    match = re.fullmatch(_SLURM, text.strip())
    if not match:
        raise ValueError(f'expected a Slurm time such as "20:00:00" or "2-12:00:00", got {_brief(text)}')
    days, a, b, c = (int(g) if g is not None else None for g in match.groups())
    assert a is not None
    if days is not None:
        hours, minutes, seconds = a, b or 0, c or 0
    elif c is not None:
        hours, minutes, seconds = a, b or 0, c
    else:
        hours, minutes, seconds = 0, a, b or 0
    try:
        return timedelta(days=days or 0, hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        raise ValueError("the time is longer than any cluster will live") from None


def format_slurm_time(value: timedelta) -> str:
    """timedelta -> "D-HH:MM:SS" or "HH:MM:SS", whole seconds (Slurm knows no less; rounds up)."""
    total = -(-value // timedelta(seconds=1))
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def signal_number(word: str) -> int:
    """15 of "TERM", "SIGTERM", "term" or "15". Raises ValueError for what is no signal."""
    import signal

    name = word.strip().upper().removeprefix("SIG")
    if name.isascii() and name.isdigit():
        number = int(name)
        if number not in signal.valid_signals():
            raise ValueError(f"there is no signal {word}")
        return number
    found = getattr(signal, f"SIG{name}", None) if name.isalnum() else None
    if not isinstance(found, signal.Signals):
        raise ValueError(f"there is no signal {word}")
    return int(found)


def parse_warning(text: str) -> tuple[int, float | None]:
    """The signal of "TERM@600", as in sbatch's --signal, and the seconds before the end, None where they are left out.
    Raises ValueError."""
    word, at, lead = text.removeprefix("B:").partition("@")
    if at and not (lead.isascii() and lead.isdigit()):
        raise ValueError(f'"{lead}" is no number of seconds: TERM@600')
    return signal_number(word), float(lead) if at else None


def signal_name(number: int) -> str:
    """ "SIGTERM" of 15."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_words(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-6,8" of several."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if listed.isdigit() else 's'} {listed}"


def checkpoint_words(name: str) -> str:
    """Return "checkpoint step-00000100"; a name, or a clause that begins with one, which says that word itself as it is."""
    return name if name.lower().startswith("checkpoint") else f"checkpoint {name}"
