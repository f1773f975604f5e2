"""The faults of a drill, one function each: what is done to the copy, and what must be seen of it then.

A row gets a copy of its own and returns its result, or raises ``CannotTry``. A new one is a function and a line in ``ROWS``.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.manifest import FOLDER_NAME
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify
from ftsupervise.drill.scene import CannotTry, Scene, kill
from ftsupervise.drill.verdict import (
    RowResult,
    SeenAfter,
    damage_problems,
    disk_problems,
    hang_problems,
    is_guarded,
    judged,
    lighthouse_problems,
    mail_problems,
    slurm_problems,
    torn_problems,
    usual_problems,
)
from ftsupervise.host import processes
from ftsupervise.model import Attempt
from ftsupervise.rundir.fence import STAGING
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_BACK = 60.0  # seconds for a later attempt to train, besides the time that the copy needed for its first step
_LONGEST_HANG = 120.0  # seconds: a row does not wait longer for a hang to be ended
_TRIES = 5  # saves, of which one is to be cut
_BEGINS = 15.0  # seconds for a save to begin
_GLANCE = 0.0005  # seconds: a small save takes a few milliseconds
_FULL = 15.0  # seconds that a disk stays full after people have heard of it, so that a save may fail
_DELIVERED = 90.0  # seconds for a message that was refused to be sent again
_UNREACHABLE = 90.0  # seconds for the news that Slurm does not answer, or answers again
_NOTICED = 60.0  # seconds more for Slurm to notice that a node is gone


class DrillRow(NamedTuple):
    """A fault. ``bound``: seconds that it takes at most, besides two starts of the copy."""

    name: str
    fault: str  # what is done
    must: str  # what must be seen
    play: Callable[[Scene], RowResult]
    bound: float = 200.0
    groups: bool = False  # it is for a run of replica groups with a lighthouse, and for no other

    def unfit(self, run: Run) -> str:
        """Say why it is not for this run; "" where it is."""
        groups = run.launch.replica_groups
        if self.groups:
            return "" if groups is not None and groups.lighthouse != "none" else "the run has no lighthouse"
        return "" if groups is None else "it trains as replica groups, each of which has a ledger of its own"

    def fits(self, run: Run) -> bool:
        return not self.unfit(run)


def _kill_rank(scene: Scene) -> RowResult:
    left = scene.until_it_works()
    at = kill(scene.ranks(left)[-1:])
    seen = scene.follow(at, left, _BACK + scene.place.start)
    return judged("kill-rank", seen, usual_problems(seen, scene.run))


def _stop_rank(scene: Scene) -> RowResult:
    hang = scene.run.launch.restart.hang
    if hang is not None and hang.at_least.total_seconds() > _LONGEST_HANG:
        least = show_duration(round(hang.at_least.total_seconds()))
        raise CannotTry(
            f"launch.restart.hang.at_least is {least}, and the drill waits for {_LONGEST_HANG:.0f} s at most"
        )
    left = scene.until_it_works()
    at = kill(scene.ranks(left)[-1:], signal.SIGSTOP)
    ended = hang is not None and scene.run.act.hang != "observe" and is_guarded(left)
    wait = _BACK + scene.place.start if ended else _BACK
    seen = scene.follow(at, left, wait + (hang.at_least.total_seconds() if hang is not None else 0.0))
    return judged("stop-rank", seen, hang_problems(seen, scene.run))


def _corrupt_checkpoint(scene: Scene) -> RowResult:
    if is_guarded(scene.until_it_works()):
        scene.save()
    found = checkpoints_in(scene.rundir.checkpoints)
    if len(found) < 2:
        raise CannotTry(f"{len(found)} checkpoints lie in $FTSUPERVISE_CHECKPOINT_DIR, and it takes two")
    left = scene.newest()
    assert left is not None
    name = _flip_bits(found[0].path)
    at = kill(scene.ranks(left)[-1:])
    seen = scene.follow(at, left, _BACK + scene.place.start)
    return judged("corrupt-checkpoint", seen, damage_problems(seen, scene.run, name))


def _kill_supervisor(scene: Scene) -> RowResult:
    left = scene.until_it_works()
    at = kill(scene.supervisor())
    seen = scene.follow(at, left, _BACK + scene.place.start)
    return judged("kill-supervisor", seen, usual_problems(seen, scene.run))


def _cancel_while_saving(scene: Scene) -> RowResult:
    if not is_guarded(scene.until_it_works()):
        raise CannotTry("without the guard it is not known when it saves")
    for _ in range(_TRIES):
        left = scene.newest()
        assert left is not None
        if (at := _cut_a_save(scene, left)) is not None:
            break
    else:
        raise CannotTry(f"{_TRIES} saves were over before they could be cut")
    seen = scene.follow(at, left, _BACK + scene.place.start)
    judgements = (verify(one.path, Scope(Thoroughness.FULL)) for one in checkpoints_in(scene.rundir.checkpoints))
    torn = [one.words() for one in judgements if not one.good]
    return judged("cancel-while-saving", seen, torn_problems(seen, scene.run, torn))


def _cut_a_save(scene: Scene, left: Attempt) -> datetime | None:
    """Have the attempt save, kill its ranks in the middle of that, and cancel its job; return when. None: it was quicker."""
    staging = scene.rundir.checkpoints / STAGING / f"{left.number:04d}"
    ranks, before, until = scene.ranks(left), _names(staging), monotonic() + _BEGINS
    scene.ask_to_save()
    while monotonic() < until:
        if not (new := _names(staging) - before):
            sleep(_GLANCE)
            continue
        kill(ranks, signal.SIGSTOP)
        if new & _names(staging):
            at = kill(ranks)
            scene.cancel_member()
            return at
        kill(ranks, signal.SIGCONT)
        return None
    raise CannotTry(f"no save began within {_BEGINS:.0f} s after the save switch was raised")


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _break_mail(scene: Scene) -> RowResult:
    scene.mailbox.refuses = True
    left = scene.until_it_works()
    at = kill(scene.ranks(left)[-1:])
    seen = scene.follow(at, left, _BACK + scene.place.start, mail=False)
    kept = scene.wait(_BACK, scene.messages_kept)
    scene.mailbox.refuses = False
    mails = scene.wait(_DELIVERED, lambda: scene.mailbox.since(at)) or ()
    return judged("break-mail", seen._replace(mails=mails), mail_problems(scene.run, kept=bool(kept), mails=mails))


def _fill_disk(scene: Scene) -> RowResult:
    if os.geteuid() != 0:
        raise CannotTry("it takes root to give the copy a small disk of its own")
    scene.mount()
    left = scene.until_it_works()
    at = scene.fill()
    try:
        with suppress(OSError):  # no switch fits on the disk: it saves when it does
            scene.ask_to_save()
        fired = bool(scene.wait(_BACK, lambda: scene.fires("disk")))
        mails = scene.mails_since(at)
        scene.wait(_FULL, lambda: scene.has_ended(left))
    finally:
        freed = scene.fill(full=False)
    now = scene.newest() or left
    went_on = bool(scene.wait(_BACK + scene.place.start, lambda: scene.trains_on(now)))
    back_at = datetime.now(timezone.utc) if went_on else None
    seen = scene.follow(at, left, (datetime.now(timezone.utc) - freed).total_seconds(), mail=False)
    seen = seen._replace(mails=mails, back_at=back_at)
    return judged("fill-disk", seen, disk_problems(seen, scene.run, fired=fired))


def _take_slurm(scene: Scene) -> RowResult:
    sandbox = scene.place.sandbox
    if sandbox is None:
        raise CannotTry("there is no Slurm on this machine without --on sandbox")
    left = scene.until_it_works()
    sandbox.controller("stop")
    at = datetime.now(timezone.utc)
    try:
        mails = scene.mails_since(at, _UNREACHABLE)
        found = scene.wait(_BACK, lambda: scene.trains_on(left))
        false = scene.fires("is-running")
    finally:
        sandbox.controller("start")
    seen = SeenAfter(at, left, _UNREACHABLE, mails=mails)
    if found and (over := scene.wait(_UNREACHABLE, lambda: not scene.fires("slurm-unreachable"))):
        seen = seen._replace(back_at=datetime.now(timezone.utc) if over else None)
    return judged("take-slurm", seen, slurm_problems(seen, scene.run, went_on=bool(found), false_alarm=false))


def _lose_node(scene: Scene) -> RowResult:
    sandbox = scene.place.sandbox
    if sandbox is None:
        raise CannotTry("this machine is the only node without --on sandbox")
    left = scene.until_it_works()
    node = left.nodes[-1]
    sandbox.node(node, "crash")
    at = datetime.now(timezone.utc)
    try:
        seen = scene.follow(at, left, _BACK + _NOTICED + scene.place.start)
    finally:
        sandbox.node(node, "start")
    return judged("lose-node", seen, usual_problems(seen, scene.run))


def _kill_lighthouse(scene: Scene) -> RowResult:
    left = scene.until_it_works()
    before = scene.wait(scene.place.start, lambda: scene.lighthouse_after(0))
    if before is None or (process := processes.process(before.pid)) is None:
        raise CannotTry("its lighthouse does not run on this machine")
    started = scene.group_attempts()
    at = kill([process])
    again = scene.wait(_BACK, lambda: scene.lighthouse_after(before.restarts + 1))
    detected = max(0.0, (again.since - at).total_seconds()) if again is not None else None
    now = scene.newest() or left
    went_on = bool(scene.wait(_BACK, lambda: scene.trains_on(now)))
    seen = SeenAfter(at, left, _BACK, back_at=datetime.now(timezone.utc) if went_on else None)
    moved = again is not None and again.address != before.address
    lost = tuple(name for name, number in scene.group_attempts().items() if number > started.get(name, number))
    problems = lighthouse_problems(seen, scene.run, back=again is not None, moved=moved, lost=lost)
    seen_words = f"a new one at {again.address}" if again is not None else ""
    return judged("kill-lighthouse", seen, problems)._replace(detected=detected, seen=seen_words)


ROWS = (
    DrillRow("kill-rank", "SIGKILL to a rank", "the run goes on from what it saved", _kill_rank),
    DrillRow("stop-rank", "SIGSTOP to a rank", "it is seen as a hang, ended and started again", _stop_rank, 400.0),
    DrillRow("kill-supervisor", "SIGKILL to `ftsupervise run`", "the next member goes on", _kill_supervisor),
    DrillRow(
        "corrupt-checkpoint",
        "a bit of the newest checkpoint is flipped and a rank killed",
        "the one before is taken, and that is said",
        _corrupt_checkpoint,
    ),
    DrillRow(
        "cancel-while-saving",
        "the ranks are killed in the middle of a save, and the job is cancelled",
        "no torn checkpoint is left or taken",
        _cancel_while_saving,
    ),
    DrillRow(
        "break-mail",
        "the mail server refuses all, and a rank is killed",
        "the message is kept, and delivered later",
        _break_mail,
        400.0,
    ),
    DrillRow(
        "fill-disk", "the disk of the run is full, then not any more", "people hear of it, and it goes on", _fill_disk
    ),
    DrillRow(
        "take-slurm",
        "slurmctld is stopped",
        "it trains on, people hear of Slurm and of no lost job",
        _take_slurm,
        300.0,
    ),
    DrillRow("lose-node", "a power cut on a node", "the run goes on elsewhere", _lose_node, 300.0),
    DrillRow(
        "kill-lighthouse",
        "SIGKILL to the lighthouse of replica groups",
        "a new one takes its place, and no group is started again",
        _kill_lighthouse,
        groups=True,
    ),
)


def _flip_bits(checkpoint: Path) -> str:
    """Flip one bit in the middle of its largest file, with the times and the size that it had; return its name."""
    largest = max(_data(checkpoint), key=lambda path: path.stat().st_size, default=None)
    if largest is None or not (size := largest.stat().st_size):
        raise CannotTry(f"{checkpoint.name} has no bytes to damage")
    times = largest.stat()
    damaged = largest.with_name(f".{largest.name}.drill")
    shutil.copyfile(largest, damaged)  # other checkpoints may share its bytes
    with damaged.open("r+b") as file:
        file.seek(size // 2)
        (byte,) = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    damaged.replace(largest)
    return checkpoint.name


def _data(checkpoint: Path) -> Iterator[Path]:
    if checkpoint.is_file():
        yield checkpoint
        return
    for path in checkpoint.rglob("*"):
        if path.is_file() and FOLDER_NAME not in path.parts:
            yield path
