"""Observe before acting: decisions that are made, written down and told, and not carried out.

    RUN/state/observe               which decisions are only observed, as a person has said since the launch
    RUN/attempts/NNNN/observed/     a page for each decision that was: what would have been done, why, and what happened then
    RUN/state/observed/             the same of a member of the chain that began no attempt

A lab that tries us for a week sees what would have been done to its runs, and what became of them without it. Time limits,
switches and saves work as ever, and so does what keeps a saved state from being lost. Light: the guard reads this too.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, NamedTuple, Optional

from ftsupervise.host.in_time import OneAtATime
from ftsupervise.host.ownership import make_folder, remove_entry
from ftsupervise.rundir.paths import RunDir, tell
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import DECISIONS, OnlyTold

_EVERY = 0.5  # seconds between two looks
_READ = 0.25  # seconds for asking, while ranks train: the disk may hang
PLACE = "observed"  # the folder of an attempt
MOST = 64  # pages of an attempt
_RANKS = 8  # pages of them that ranks write: a thousand of them may see the same loss


class Observing(NamedTuple):
    """``RUN/state/observe``."""

    of: Annotated[Optional[tuple[str, ...]], 100] = None  # of ``DECISIONS``; None: the page is damaged
    who: str = ""
    at: Optional[datetime] = None


def read_observing(rundir: RunDir) -> Optional[Observing]:
    """Return what a person has said since the launch; None where nobody has. Raises OSError, ValueError where it is damaged."""
    found = read_record(Observing, _switch(rundir), limit=64_000)
    if found is not None and found.of is None:
        raise ValueError(f"{_switch(rundir)} names no decisions")
    return found and found._replace(of=known(found.of or ()))


def write_observing(rundir: RunDir, of: Collection[str], *, who: str, now: datetime) -> None:
    """Write which decisions are only observed from now on. Raises OSError."""
    write_json(_switch(rundir), Observing(known(of), who, now))


def forget_observing(rundir: RunDir) -> None:
    """Let the settings of the launch count again. Raises OSError."""
    remove_entry(_switch(rundir))


def known(words: Collection[str]) -> tuple[str, ...]:
    """Return the decisions among ``words``, in the order of ``DECISIONS``."""
    return tuple(one for one in DECISIONS if one in words)


def observed_now(rundir: RunDir, launched: Collection[str]) -> tuple[str, ...]:
    """Return the decisions that are only observed. ``launched``: as the launch has it. Raises OSError, ValueError."""
    since = read_observing(rundir)
    return known(launched) if since is None else since.of or ()


def _switch(rundir: RunDir) -> Path:
    return rundir.finished.parent / "observe"  # of the whole run, where this is a replica group


class Observes:
    """Tells which decisions are only observed. While the page cannot be read, or is damaged, as it was before."""

    def __init__(self, rundir: RunDir, launched: Collection[str], every: float = _EVERY) -> None:
        """``every``: seconds between two reads, at least."""
        self._rundir, self._launched, self._last = rundir, known(launched), known(launched)
        self._every, self._due = every, 0.0
        self._read = OneAtATime[tuple[str, ...]]()

    def __call__(self, decision: str) -> bool:
        return decision in self.all()

    def all(self) -> tuple[str, ...]:
        if monotonic() < self._due:
            return self._last
        self._due = monotonic() + self._every
        try:
            found = self._read(partial(observed_now, self._rundir, self._launched), _READ)
        except (OSError, ValueError):
            found = None
        self._last = self._last if found is None else found
        return self._last


# ------------------------------------------------------------------------------------------------ the pages of an attempt


def note(attempt_dir: Path, name: str, one: OnlyTold, *, by_a_rank: bool = False) -> None:
    """Write the page ``name`` of an attempt, unless it has too many. Raises OSError."""
    folder = attempt_dir / PLACE
    make_folder(folder)
    path = folder / f"{name.replace(os.sep, '_')}.json"
    if len(os.listdir(folder)) < (_RANKS if by_a_rank else MOST) or path.exists():
        write_json(path, one, sync=False)


def tell_only(decision: str, what: str, why: str, log: Optional[Path], node: str = "", *, say: bool = True) -> None:
    """Say that a decision is not carried out, and write it down where there is an attempt, once. ``log``: its run.log.

    ``say`` False: that was said before there was an attempt.
    """
    one = OnlyTold(decision, what, why, datetime.now(timezone.utc), node=node, standing=True)
    if log is not None and any((each.what, each.why) == (what, why) for each in read_observed(log.parent)):
        return
    if say:
        tell(log, f"{one.words()}; this decision is only told")
    if log is not None:
        with suppress(OSError):
            note(log.parent, "-".join(filter(None, (decision, what.partition(" ")[0], node))), one)


def tell_alone(rundir: RunDir, job: str, one: OnlyTold) -> None:
    """Say, and write down, what a member of the chain would have done that begins no attempt. ``job``: its own."""
    tell(None, f"{one.words()}; this decision is only told")
    with suppress(OSError):
        note(rundir.state, f"{one.decision}-{job}", one)


def read_observed(attempt_dir: Path) -> tuple[OnlyTold, ...]:
    """Return the decisions of an attempt that were not carried out, oldest first. A page that cannot be read is left out.

    What several ranks have come to, with the same words, is one.
    """
    found = dict[tuple[str, ...], OnlyTold]()
    for one in _pages(attempt_dir / PLACE):
        same = (one.decision, one.what, one.why, one.node)
        first, *more = sorted(filter(None, (found.get(same), one)), key=_when)
        found[same] = first._replace(then=next((each.then for each in (first, *more) if each.then), ""))
    return tuple(sorted(found.values(), key=_when))


def _pages(folder: Path) -> Iterator[OnlyTold]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in sorted(names)[: 2 * MOST]:
        with suppress(OSError, ValueError):
            one = read_record(OnlyTold, folder / name)
            if one is not None and one.decision in DECISIONS and one.at is not None:
                yield one


def observed_alone(rundir: RunDir, launched: Sequence[datetime]) -> tuple[OnlyTold, ...]:
    """Return the decisions that were not carried out where no attempt began, oldest first.

    What member after member comes to is the first of them, once for each launch. ``launched``: when a person has launched.
    """
    found: list[OnlyTold] = []
    pages = sorted(_pages(rundir.state / PLACE), key=_when)
    launched = [as_a_shell_has_it(at) for at in launched]
    for place, one in enumerate(pages):
        since = max((at for at in launched if one.at is not None and at <= one.at), default=None)
        if not one.repeats(
            each for each in pages[:place] if since is None or (each.at is not None and each.at >= since)
        ):
            found.append(one)
    return tuple(found)


def as_a_shell_has_it(launched: datetime) -> datetime:
    """Return the time of a launch in whole seconds, as the shell of a member writes what it decides: one that begins at once
    would have begun before its launch."""
    return launched.replace(microsecond=0)


def _when(one: OnlyTold) -> float:
    return one.at.timestamp() if one.at is not None else 0.0


def phrase(of: Sequence[str]) -> str:
    """Return what does not happen by itself while these are only observed, for people; "" for none."""
    if tuple(of) == DECISIONS:
        return "all decisions are only told: nothing is ended, held or left out, and the run does not go back"
    return f"only told: {', '.join(one.replace('_', ' ') for one in of)}" if of else ""
