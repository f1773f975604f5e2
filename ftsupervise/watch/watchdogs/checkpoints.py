"""Checks that checkpoints come when they should, whole and of the usual size: a run may look alive and save nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ftsupervise.checkpoints.verify import CheckpointState
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.host import files
from ftsupervise.printable import to_type
from ftsupervise.probe import Entry, Missing, NotSeen, Space, Tree
from ftsupervise.rundir.heartbeat_page import SAVE_FAILED
from ftsupervise.rundir.records import as_text
from ftsupervise.truth import Health
from ftsupervise.units import checkpoint_words, show_duration, show_size
from ftsupervise.watch.watchdogs.own_checkpoints import finished, folder_of
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK
from ftsupervise.watch.watchdogs.run_signs import newest_beats, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import CheckpointsSection as Settings
    from ftsupervise.watch import Look

# The checkpoints that exist: how large, how often, how fresh. Sizes are remembered, so that a tree of a hundred
# thousand files is walked once and not at every tick.

_GOOD = (CheckpointState.VERIFIED.value, CheckpointState.COMPLETE.value)
_AGAIN = 3600.0  # seconds after which a checkpoint that is known is verified again
VERIFY_WITHIN = 60.0  # seconds for a verification of sizes
_WALKS = 2  # trees measured anew in one check
_SMALLEST = 0.5  # share of the usual size: what is smaller lacks files, or ends in the middle of one
_SAVES = 60  # saves whose times are remembered


@dataclass(frozen=True)
class Written:
    """One checkpoint. ``size`` in bytes and ``files`` are None until it was measured; ``empty`` names of empty files."""

    name: str
    mtime: float
    size: int | None
    files: int | None
    empty: tuple[str, ...] = ()


def written(look: Look, memory: dict[str, Any], *, newest: int = 4) -> tuple[Written, ...] | Missing | NotSeen:
    """Return the ``newest`` checkpoints with their sizes and all others without, oldest first. ``memory`` keeps the sizes."""
    entries = finished(look, memory)
    if isinstance(entries, (Missing, NotSeen)):
        return entries
    folder = folder_of(look)
    memory["made"] = _made(look, entries, memory.get("made"))
    known: dict[str, list[Any]] = memory.get("sizes", {})
    sizes: dict[str, list[Any]] = {}
    walks = 0
    for entry in entries[-newest:][::-1]:
        before = known.get(entry.name)
        if before is not None and before[0] == entry.mtime and before[4] >= 2:
            sizes[entry.name] = before
        elif walks < _WALKS:
            walks += 1
            _measure(look, folder, entry, before, sizes)
    memory["sizes"] = sizes
    return tuple(_one(entry, sizes.get(entry.name)) for entry in entries)


def _made(look: Look, entries: tuple[Entry, ...], known: list[list[Any]] | None) -> list[list[Any]]:
    """Return the saves that are known, oldest first, as [a word for it, when, the name]; also those that were removed since.

    A folder is one save, whatever others write into it later; a file is one each time that it is written. What retention has
    left is no row of saves, so at the first look only those count that it cannot have thinned out.
    """
    saves = [[f"{one.name} {one.inode}{'' if one.is_dir else f' {one.mtime}'}", one.mtime, one.name] for one in entries]
    if not known:
        retain = look.run.checkpoints.retain
        return saves[-_SAVES if retain is None else -retain.last :]
    words, newest = {word for word, *_ in known}, known[-1][1]
    return [*known, *(one for one in saves if one[1] > newest and one[0] not in words)][-_SAVES:]


def _measure(look: Look, folder: Path, entry: Entry, before: list[Any] | None, sizes: dict[str, list[Any]]) -> None:
    """Walk one checkpoint; it is settled when two walks at two checks gave the same."""
    tree = look.once(f"the size of {entry.name}", lambda: look.probe.tree(folder / entry.name))
    if isinstance(tree, Tree) and not tree.more:
        same = before is not None and before[1:3] == [tree.size, tree.files]
        sizes[entry.name] = [
            entry.mtime,
            tree.size,
            tree.files,
            list(tree.empty),
            before[4] + 1 if same and before else 1,
        ]


def _one(entry: Entry, size: list[Any] | None) -> Written:
    if size is None:
        return Written(entry.name, entry.mtime, entry.size if entry.is_file else None, 1 if entry.is_file else None)
    return Written(entry.name, entry.mtime, size[1], size[2], tuple(size[3]))


def usual_size(ones: tuple[Written, ...]) -> int | None:
    """The median size, the newest (which may still be growing) left out if there are others."""
    sizes = [one.size for one in (ones[:-1] or ones) if one.size]
    return int(median(sizes)) if sizes else None


def usual_cadence(times: Sequence[float]) -> float | None:
    """The median time between two saves, in seconds; None while there are fewer than three."""
    gaps = [after - before for before, after in pairwise(times) if after > before]
    return median(gaps[-20:]) if len(gaps) >= 2 else None


WORDS = {
    "age": Words(
        "If the run fails now, all that time must be trained again.",
        "ls -lt {folder}",
        "ftsupervise save, and see whether a checkpoint appears",
    ),
    "size": Words(
        "The run may not be able to go on from it.",
        "ls -lt {folder}",
        "keep the previous one; look at the log of the save",
        Severity.CRITICAL,
    ),
    "whole": Words(
        "The run would lose the steps since the previous checkpoint.",
        "ftsupervise checkpoints verify {run_dir}",
        "look at the log of the save, and at the disk",
    ),
    "save": Words(
        "The loop trains on, but nothing since the previous checkpoint is saved.",
        "ls -lt {folder}",
        "look at the log of the save, and at the disk; then ftsupervise save",
    ),
}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    ones = written(look, look.memory)
    if isinstance(ones, NotSeen):
        for subject in ("age", "size", "whole"):
            yield _finding(look, subject, None, f"checkpoints {ones.words}")
        return
    now = server_now(look)
    yield from _saves(look, now)
    yield _age(look, settings, () if isinstance(ones, Missing) else ones, now)
    if isinstance(ones, Missing) or not ones:
        return
    if _disk_is_full(look):  # what does not fit is torn: one alert says so
        for subject in ("size", "whole"):
            yield _finding(look, subject, None, "checkpoints are not judged while their disk is full")
        return
    yield _size(look, settings, ones, now)
    yield from _whole(look, settings, ones, now)


def _disk_is_full(look: Look) -> bool:
    """Return whether nothing fits on the file system of the checkpoints any more, and *disk* watches that."""
    there = look.probe.space(folder_of(look))
    if not isinstance(there, Space) or there.free >= files.NO_ROOM:
        return False
    folder = look.entry(folder_of(look))
    watched = (look.entry(one.path or look.rundir.root) for one in look.run.watch.disk or ())
    return isinstance(folder, Entry) and any(isinstance(one, Entry) and one.device == folder.device for one in watched)


def _saves(look: Look, now: float) -> Iterator[Finding]:
    """Report what the guard says about saves in the background; no finding where the loop makes none."""
    beats, blind = newest_beats(look, now)
    told = [(beat.rank, beat.facts[SAVE_FAILED]) for beat, _ in beats if SAVE_FAILED in beat.facts]
    if blind and look.memory.get("background"):
        yield _finding(look, "save", None, f"saves in the background not seen: {blind}")
    if not told:
        return
    look.memory["background"] = True
    failed = [(rank, why) for rank, why in told if why]
    text = (
        f"not saved: {failed[0][1]} (as rank {failed[0][0]} says)"
        if failed
        else "the newest save in the background is committed"
    )
    yield _finding(look, "save", bool(failed), text)


def _age(look: Look, settings: Settings, ones: tuple[Written, ...], now: float) -> Finding:
    """Judge the age by the declared or the usual cadence; the time the run spent waiting in the queue does not count."""
    # nobody asks for its jobs any more, so none would be seen to wait
    if isinstance(look.entry(look.rundir.finished), Entry):
        return _finding(look, "age", False, "the run has finished")
    at_work = look.jobs is None or any(job.state in AT_WORK for job in look.jobs)
    spent, before = look.memory.get("at_work", 0.0), look.memory.get("looked")
    made = look.memory.get("made", []) if ones else []
    if made and look.memory.get("newest") != made[-1][0]:
        spent = max(0.0, now - made[-1][1]) if look.memory.get("newest") is None else 0.0
        look.memory["newest"] = made[-1][0]
    elif before is not None:
        spent += _worked(look, before, now, at_work)
    look.memory.update(at_work=spent, looked=now)
    times = [at for _, at, _ in look.memory.get("made", [])]
    cadence = settings.cadence.total_seconds() if settings.cadence is not None else usual_cadence(times)
    name = made[-1][2] if made else "none yet"
    if cadence is None:
        return _finding(look, "age", False, f"newest checkpoint: {name}; too few to know their cadence")
    limit = settings.late * cadence
    since = f"{show_duration(max(0.0, now - made[-1][1]))} old" if made else "no checkpoint"
    usual = show_duration(cadence)
    text = f"newest {checkpoint_words(name)}: {since}, {show_duration(spent)} of it at work; one is usual every {usual}"
    return _finding(look, "age", spent > limit, text, value=show_duration(spent), limit=show_duration(limit))


def _worked(look: Look, before: float, now: float, at_work: bool) -> float:
    """Return for how many of the seconds between two looks an attempt was at work, by the ledger: there may have been no tick
    for hours, while the run waited in the queue. Of a run without a ledger all of them count where it is at work now."""
    try:
        attempts = look.attempts
    except OSError:
        attempts = ()
    if not attempts:
        return max(0.0, now - before) if at_work else 0.0
    found, until = 0.0, now if at_work else before  # an attempt whose end nobody wrote was over when the next one began
    for one in reversed(attempts):
        begun, ended = one.started.timestamp(), one.ended.timestamp() if one.ended is not None else until
        found += max(0.0, min(ended, now) - max(begun, before))
        if begun <= before:
            break
        until = begun
    return found


def _size(look: Look, settings: Settings, ones: tuple[Written, ...], now: float) -> Finding:
    newest, usual = ones[-1], usual_size(ones)
    if newest.size is None:
        return _finding(look, "size", None, f"{checkpoint_words(newest.name)} could not be measured")
    young = now - newest.mtime < settings.settle.total_seconds()
    files = [one.files for one in ones[:-1] if one.files]
    wrong = []
    if newest.size == 0:
        wrong.append("is empty")
    elif usual is not None and newest.size < _SMALLEST * usual:
        wrong.append(f"is {show_size(newest.size)} where {show_size(usual)} are usual")
    if files and newest.files is not None and newest.files < median(files) and not _known_whole(look, newest):
        wrong.append(f"has {newest.files} files where {median(files):.0f} are usual")
    before = next((one for one in reversed(ones[:-1]) if one.size), None)
    if newest.empty and not (before and before.empty):
        wrong.append(f"has empty files ({', '.join(newest.empty[:3])})")
    text = " and ".join(wrong) if wrong else f"is {show_size(newest.size)}"
    if wrong and young:
        text += f", but may not be complete yet ({show_duration(now - newest.mtime)} old)"
    return _finding(look, "size", bool(wrong) and not young, f"{checkpoint_words(newest.name)} {text}")


def _known_whole(look: Look, newest: Written) -> bool:
    """Return whether its manifest, or a sign of its own, says that nothing is missing: fewer ranks write fewer files."""
    seen = _verdicts(look, newest)
    return not isinstance(seen, str) and any(
        Path(one["path"]).name == newest.name and one["state"] in _GOOD for one in seen
    )


def _whole(look: Look, settings: Settings, ones: tuple[Written, ...], now: float) -> Iterator[Finding]:
    """Check that the newest checkpoint is the one that was committed, and if not, from which one the run would go on.

    Of a run whose checkpoints have no manifest and no sign of their own it is only said that nothing is against them.
    """
    seen = _verdicts(look, ones[-1])
    if isinstance(seen, str):
        yield _finding(look, "whole", None, seen)
        return
    good = next((one for one in seen if one["state"] in _GOOD), None)
    own = good is None and not any(one["manifest"] for one in seen)  # not a known form: it may be torn, never whole
    if own and (not seen or _says_nothing(seen[0])):
        yield _finding(look, "whole", False, _silent(look, ones[-1].name))
        return
    silent = next((one for one in seen if own and _says_nothing(one)), None)
    wanting = [one for one in seen if one["state"] not in _GOOD and not (own and _says_nothing(one))]
    settled = [one for one in wanting if _settled(one, ones, settings, now)]
    if good is not None and not settled:
        yield _finding(look, "whole", False, f"{checkpoint_words(Path(good['path']).name)} is {good['state']}")
        return
    blind = all(one["state"] == CheckpointState.UNSEEN.value for one in settled)
    wrong = "; ".join(
        f"{Path(one['path']).name} is {one['state']}: {'; '.join(one['wrong'][:1])}" for one in settled[:3]
    )
    rest = f"the run would go on from {Path(good['path']).name}" if good else "no checkpoint is good to go on from"
    if silent is not None:
        rest = f"nothing says that {Path(silent['path']).name} before it is torn"
    old = _too_old(good, settings, ones, now) if good else ""
    rest += f", and none newer was good for {old}" if old else ""
    severity = Severity.WARNING if (good or silent) and not old else Severity.CRITICAL
    text = f"{checkpoint_words(wrong)}; {rest}" if settled else f"the newest checkpoint may not be complete yet; {rest}"
    bad = None if blind and settled else bool(settled)
    yield _finding(look, "whole", bad, text, severity=severity)


def _silent(look: Look, name: str) -> str:
    """Return that nothing is against the newest; of one that has the name of a torn one that it is another."""
    moved = any(Path(torn.path).name == name for one in look.attempts for torn in one.torn if torn.aside)
    anew = f"{checkpoint_words(name)} was saved anew, and nothing says that it is torn"
    return anew if moved else f"nothing says that {checkpoint_words(name)} is torn"


def _too_old(good: dict[str, Any], settings: Settings, ones: tuple[Written, ...], now: float) -> str:
    """Return the age of the newest good one where ``late`` newer ones have come and none is good; "" otherwise."""
    at = next((one.mtime for one in ones if one.name == Path(good["path"]).name), None)
    if at is None or sum(one.mtime > at for one in ones) < settings.late:
        return ""
    return show_duration(now - at)


def _settled(one: dict[str, Any], ones: tuple[Written, ...], settings: Settings, now: float) -> bool:
    """Return whether there has been time enough to write it. One that was not there a moment before has only begun."""
    mtime = next((each.mtime for each in ones if each.name == Path(one["path"]).name), now)
    return now - mtime >= settings.settle.total_seconds()


def _says_nothing(one: dict[str, Any]) -> bool:
    return one["state"] == CheckpointState.UNSEEN.value and not one["manifest"] and not one["error"]


def _verdicts(look: Look, newest: Written) -> list[dict[str, Any]] | str:
    """Return the verdicts by sizes, newest first, up to the first good one; a sentence where there are none.

    They are asked for again when there is a newer checkpoint, and now and then.
    """
    known = look.memory.get("verdicts", {})
    asked = look.now.timestamp()
    if known.get("of") == [newest.name, newest.mtime] and 0 <= asked - known.get("at", 0.0) < _AGAIN:
        return list(known["seen"])
    folder, pattern, root = folder_of(look), look.run.checkpoints.pattern, str(look.rundir.root)
    got = look.probe.call(folder, "checkpoints.find:sizes_back", str(folder), pattern, root, bound=VERIFY_WITHIN)
    if isinstance(got, (Missing, NotSeen)):
        return got.sentence if isinstance(got, NotSeen) else "checkpoints cannot be verified: their folder is gone"
    seen = [_plain_verdict(*one) for one in got]
    look.memory["verdicts"] = {"of": [newest.name, newest.mtime], "at": asked, "seen": seen}
    return seen


def _plain_verdict(path: str, state: str, wrong: list[str], manifest: bool, error: int) -> dict[str, Any]:
    """Return the verdict in the form in which the watchdog remembers it; the names in it are another's text."""
    texts = [as_text(text) for text in wrong]
    return {"path": as_text(path), "state": state, "wrong": texts, "manifest": manifest, "error": error}


def _finding(look: Look, subject: str, bad: bool | None, summary: str, **more: Any) -> Finding:
    names = {"folder": to_type(folder_of(look))}
    return look.finding(subject, Health.of(bad), summary, WORDS[subject], names=names, **more)
