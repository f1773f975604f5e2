"""The guard itself: what the training loop calls.

A step in which nothing is due costs one comparison with the clock; see decider.py for the others.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

from ftsupervise.guard import settings
from ftsupervise.guard.checkpoint import COMMIT_WITHIN, Checkpoints
from ftsupervise.guard.decider import Decider
from ftsupervise.guard.heartbeat import Heart
from ftsupervise.guard.settings import RankContext, Voice, whole
from ftsupervise.guard.side_thread import SideThread
from ftsupervise.guard.stop_reasons import Decision
from ftsupervise.truth import SAVE

if TYPE_CHECKING:
    from ftsupervise.guard.loop_state import LoopCheckpoints
    from ftsupervise.guard.snapshots import Snapshots

# Links a run to its page in an experiment tracker: the page's address is recorded, and a restart is marked there.

_NAMES = ("WANDB_", "MLFLOW_", "FTSUPERVISE_TRACKER_URL")  # without them a guard that starts imports nothing for this


class Restarted(NamedTuple):
    """This attempt, and the one that it follows."""

    attempt: int
    before: int
    why: str  # the earlier one ended; "" where that is not known
    step: int | None  # the last one that it made
    ended: datetime | None

    def words(self) -> str:
        """Return "attempt 3 goes on where attempt 2 ended at step 118: exit 1"."""
        step = f" at step {self.step}" if self.step is not None else ""
        return f"attempt {self.attempt} goes on where attempt {self.before} ended{step}{f': {self.why}' if self.why else ''}"


def note_page(place: RankContext, voice: Voice, url: str | None = None) -> None:
    """Record the page of this run: ``url``, or the address that the environment names. Rank 0 alone does. Never raises."""
    if place.rank != 0 or place.attempt_dir is None:
        return
    if url is None and not any(name.startswith(_NAMES) for name in os.environ):
        return
    from ftsupervise.rundir.tracker import TrackerPage, from_environment, safe_url, write_tracker

    if url is None:
        page = from_environment(os.environ)
    else:
        shown = safe_url(str(url))
        page = TrackerPage(shown, "W&B" if "wandb" in shown else "tracker") if shown else None
        if page is None:
            voice.later("report(url=…): that is no plain http or https address, so it is not shown")
    if page is None:
        return
    try:
        write_tracker(place.attempt_dir, page)
    except OSError as error:
        voice.later(f"cannot record the page of the tracker: {error.strerror}")


def tell_restart(place: RankContext, voice: Voice, callback: Callable[[Restarted], object], side: SideThread) -> None:
    """Call ``callback`` on rank 0 of an attempt that is not the first.

    An error in it is printed, and costs the loop nothing.
    """
    if place.rank != 0 or place.rundir is None or place.attempt is None or place.attempt < 2:
        return
    try:
        known = side.answer("ledger", partial(_restart, place.attempt, place))
        callback(known or Restarted(place.attempt, place.attempt - 1, "", None, None))
    except Exception as error:  # the tracker's trouble is not the training's
        voice.say(f"on_restart: {type(error).__name__}: {error}")


def _restart(attempt: int, place: RankContext) -> Restarted:
    from ftsupervise.rundir.ledger import backwards

    try:
        before = next(backwards(place.rundir, attempt), None) if place.rundir is not None else None
    except OSError:
        before = None
    if before is None:
        return Restarted(attempt, attempt - 1, "", None, None)
    return Restarted(attempt, before.number, before.why(), before.last_step, before.ended)


# ------------------------------------------------------------------------------------------


_CONTINUE = Decision.CONTINUE
_monotonic = time.monotonic


class Guard:
    """Ask ``step(step)`` once per training step what to do: CONTINUE, SAVE or STOP.

    run_dir      the run's directory; default $FTSUPERVISE_RUN_DIR, which ``ftsupervise run`` sets. Without one there
                 are no switches and no beats, and only signals and the limits given here count.
    agree        how the ranks leave at the same step. By default they agree through torch.distributed, where the program
                 has initialised it by its first ``step()``. Every rank must call ``step()`` equally often then, with
                 any numbers. Otherwise give a function int -> int, the maximum over all ranks (a collective): every
                 rank calls it once in ``agree_every`` steps, and what it raises goes to the caller. A loop with a
                 collective of its own can carry ``vote()`` on it. ``False``: each rank decides alone.
    poll         seconds between two checks of switches and limits, at most one. A slow file system stretches it.
    memory       share (0-1) of the host's or the job's memory at which to save and stop.
    gpu_memory   the same for the GPUs that this process computes on.
    stop_before  seconds before the job's end at which to save and stop, besides Slurm's own signal.
    run_for      seconds after which to save and stop, whatever the job's limit.
    signals      what counts as Slurm's warning; default: that of ``launch.signal`` (SIGUSR1), and SIGTERM (preemption, scancel,
                 the time limit).

    Raises ValueError for arguments that make no sense; nothing else, and nothing at all once constructed. It takes more
    arguments than other functions here, because each is a setting that a person may write in a training script by its name.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        agree: Callable[[int], int] | Literal[False] | None = None,
        agree_every: int = 1,
        poll: float | timedelta | None = None,
        memory: float | None = None,
        gpu_memory: float | None = None,
        stop_before: float | timedelta | None = None,
        run_for: float | timedelta | None = None,
        signals: tuple[int, ...] | None = None,
        rank: int | None = None,
        world: int | None = None,
        beat_every: float = 2.0,
    ) -> None:
        limits, problems = settings.limits(os.environ, poll, memory, stop_before, run_for, gpu_memory)
        self._place = place = settings.place(os.environ, run_dir, rank, world)
        signals = (settings.warning_signal(os.environ), signal.SIGTERM) if signals is None else signals
        self._agree = agree or None
        self._voice = Voice(place.rank, place.world)
        self._decider = Decider(place, limits, signals, self._voice, agree, agree_every)
        self._outside = self._decider.outside
        self._heart = Heart(place, beat_every, self._voice, self._outside.attempt.superseded, self._decider.side)
        self._checkpoints = Checkpoints(place, self._decider.superseded, self._voice)
        self._in_memory: Snapshots | None = None
        self._heart.losses, self._heart.more_facts = self._outside.loss, self._outside.memory.facts
        self._loop: LoopCheckpoints | None = None  # what restore() named
        self._page = self._heart.page
        if self._page is not None:
            self._outside.signals.on_told = self._page.told
        self._decider.listen([*problems, *settings.other_version(os.environ, place.rank)])
        note_page(place, self._voice)

    # ------------------------------------------------------------------------------------------- in the training loop

    def step(self, step: int, agreed: int | None = None) -> Decision:
        """Call after each step with its number. ``agreed`` is the maximum of all ranks' ``vote()``, if the loop
        carried it. With nothing due this costs some 100 ns and no system call. SAVE is said once per raised switch.
        """
        self._heart.step = step
        now = _monotonic()
        if self._page is not None:
            self._page.step(step, now)
        decider = self._decider
        agreement = decider.agreement
        if agreement is None:
            if now < decider.next and agreed is None:
                decider.stepped = now
                return _CONTINUE
        else:
            agreement.count = count = agreement.count + 1
            if count <= agreement.free and now < decider.next and agreed is None:
                decider.stepped = now
                return _CONTINUE
        if self._checkpoints.begins.unread is not None:
            self._checkpoints.require_gone_on(step)
        if self._checkpoints.again is not None:
            self._checkpoints.require_unchanged(now=True)
        return decider.decide(step, agreed, self._heart)

    def check(self) -> Decision:
        """Return what this rank knows by now: what all ranks will do at a step to come, else its own reason. Ask anywhere,
        as often as you like, before the first step too: in a wait for data, in a long evaluation. As cheap as ``step()``.

        Other ranks may know more or less at this moment, and it is no order: the one that counts comes from ``step()``, at
        which all leave together. So do on it what one rank may do alone (wait no longer, leave out what is optional). The
        reason itself goes to the others at once. It waits for no other rank, answers no save switch and never raises.
        """
        return self._decider.check(self._heart)

    def vote(self) -> int:
        """This rank's vote for a collective the loop runs anyway; the maximum over all ranks goes to ``step(…, agreed)``.

        Take it last before the collective, so that what happened during the step is answered at its end.
        """
        return self._decider.vote(self._heart)

    @contextmanager
    def checkpoint(
        self,
        step: int,
        name: str | None = None,
        *,
        barrier: Callable[[], object] | None = None,
        ranks: Collection[int] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Iterator[Path]:
        """``with guard.checkpoint(step) as folder:`` write into ``folder``; at the end of the block it becomes
        ``$FTSUPERVISE_CHECKPOINT_DIR/NAME`` (``step-00000100``), whole and by one rename, and ``saved(step)`` is called.

        Several ranks may write one checkpoint: each enters the block, and rank 0 commits when ``barrier``, which each calls
        once after its part, says that all have written theirs. Without a barrier it waits for the others where one has entered
        before it is through; a rank that comes later raises. Where rank 0 alone saves, it alone enters, with no barrier.
        ``ranks``: which ones enter, where not all do. ``metrics``: what it is worth (``{"loss": 2.31}``), for the manifest.

        Before the barrier each rank takes the digests of its files while these are synced, and rank 0 joins them into the
        manifest. Where a rank has left none, the checkpoint is torn and the commit fails. The other ranks wait behind the
        barrier until rank 0 has committed, and raise when it could not; after 30 s they go on and do not say ``saved``.

        Nothing is committed when the block raises. Once a newer attempt has begun nothing is either: a rank that Slurm has
        lost sight of runs on beside its successor, and what it stages is thrown away; the next ``step()`` says STOP.
        Raises OSError when the checkpoint cannot be staged or committed (a full disk). What was written of it is deleted at
        once, so that the next save finds the space that this one has taken.
        """
        self._checkpoints.require_unchanged(now=False)
        with self.phase(SAVE):
            name = name or f"step-{whole(step) or 0:08d}"
            staged = self._checkpoints.begin(name, ranks, barrier=barrier is not None)
            try:
                yield staged
            except Exception:  # a write into a sealed folder fails in as many ways as there are libraries
                if not self._checkpoints.over():
                    self._checkpoints.give_up(staged, shared=barrier is not None)
                    raise
                self._is_over()
                return
            self._checkpoints.begins.first = whole(self._heart.facts.get("first"))
            try:
                done = self._checkpoints.finish(staged, whole(step), metrics or {}, barrier, ranks, self.beat)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._checkpoints.give_up(staged, why=None if barrier is None else error)
                raise
        if done:
            self.saved(step)
        elif done is None:
            self._voice.say(
                f"step {step}: rank 0 has not committed it within {COMMIT_WITHIN:.0f} s, as far as this rank sees"
            )
        else:
            self._is_over()

    def latest(self, world: int | None = None) -> Path | None:
        """The newest checkpoint that is complete and verified; None when there is none, and the training begins anew.

        Compared with its manifest are the sizes of all files and the digests of small ones, or more where
        ``checkpoints.verify`` says so. ``world``: the number of ranks that must have written it; default: any. What is passed
        over is said once on stderr, by rank 0.

        Call it on one rank and tell the others, or they may choose differently while another job removes one. Raises OSError
        where the checkpoints cannot be read: to begin anew then would cost all steps.
        """
        found = self._checkpoints.latest(world, begun=self._heart.step is not None)
        if self._in_memory is not None:
            self._in_memory.begins_without()
        return found

    def restore(
        self,
        *,
        warm_up: Callable[[], object] | None = None,
        folder: str | Path | None = None,
        code: str = "",
        strict: bool = True,
        **state: object,
    ) -> int | None:
        """``start = guard.restore(model=model, optimizer=optimizer)`` before the loop: it says what each ``snapshot()`` and
        ``save()`` hold. It loads the newest snapshot that all ranks hold in memory, or else the newest good checkpoint that
        ``save()`` wrote, the same on all ranks, and returns its step. None: there is neither. Where ``checkpoint()`` wrote what
        lies there, load it yourself then: ``latest()`` names it. A loop that does not, and begins at an older step, is stopped.

        state    objects with ``state_dict`` and ``load_state_dict``; dicts, lists, arrays and generators, which are changed in
                 place. The global generators of random numbers are kept without being named.
        warm_up  a forward and backward pass, run twice before the state is loaded: DistributedDataParallel sums the gradients
                 of its first pass in another order, so that without it the run goes on with other last bits.
        code     a word for the version of your code (``code="v2"``): a snapshot that code of another version made is not
                 loaded, and the run goes on from a checkpoint
        strict   False: what was saved with another shape or by code that named other keys is left out, and each difference is
                 said once; what is left out stays as the program made it. By default all of it must fit
        folder   of a loop that uses ``snapshot_folder``: where to write the files of the snapshot

        Raises TypeError for what has no state (a number: keep it in a dict), OSError where the checkpoints cannot be read, and
        RuntimeError where this loop cannot load what all ranks begin from.
        """
        if folder is not None:
            start = self._snapshots().restore_folder(Path(folder), code)
            self._checkpoints.again = self._snapshots().again
            return start
        from ftsupervise.guard.loop_state import LoopCheckpoints, LoopState

        loop = LoopState(state, code, strict=strict)
        self._loop = LoopCheckpoints(loop, self._place, self._checkpoints, self._voice, self._agree, self.beat)
        start = self._snapshots().restore(loop, warm_up)
        self._checkpoints.again = self._snapshots().again
        if start is not None:
            return start
        begun = self._heart.step is not None
        start = self._loop.restore(lambda wanted: self._checkpoints.latest(None, begun=begun, wanted=wanted), warm_up)
        self._snapshots().begins_without()
        return start

    def save(
        self,
        step: int,
        *,
        barrier: Callable[[], object] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Call on every rank: save what ``restore()`` named as the checkpoint of ``step``. When it returns, the checkpoint is
        committed. What ranks of torch.distributed hold alike is written once.

        ``barrier``: where several ranks run without torch.distributed and without ``agree``. ``metrics``: see ``checkpoint()``.
        Raises OSError, on all ranks, when it cannot be saved (a full disk), and TypeError for a state of an unknown kind.
        """
        loop, number = self._loop, whole(step)
        if loop is None or number is None:
            raise ValueError(
                "guard.save(step): call restore(model=…, optimizer=…) before the loop: it says what is saved"
            )
        self._checkpoints.require_gone_on(number)
        self._checkpoints.require_unchanged(now=False)
        if loop.is_together():
            with self.phase("save"):
                done = loop.save(number, metrics or {})
            if done:
                self.saved(number)
            else:
                self._is_over()
            return
        agree = self._agree
        if self._place.world > 1 and barrier is None:
            if agree is None:
                raise ValueError(
                    "guard.save(): ranks without torch.distributed need Guard(agree=…) or save(…, barrier=…)"
                )
            barrier = lambda: agree(0)  # noqa: E731
        with self.checkpoint(number, barrier=barrier if self._place.world > 1 else None, metrics=metrics) as folder:
            loop.write(folder, number)
        loop.note_saved(number)

    def snapshot(self, step: int) -> bool:
        """Call after each step, on every rank, before the next one's first collective: every few steps it copies the state
        into the node's memory, which takes as long as one copy of its bytes. With ``checkpoints.snapshot_wait`` it waits until
        another node holds the copy. False: none of this step, or not on another node. Never raises."""
        return self._is_unchanged() and self._snapshots().take(step)

    @contextmanager
    def snapshot_folder(self, step: int, size: int) -> Iterator[Path | None]:
        """For loops without torch: ``with guard.snapshot_folder(step, size) as folder:`` gives an empty folder in memory to
        write ``size`` bytes into, at most; None when no snapshot is due."""
        if not self._is_unchanged():
            yield None
            return
        with self._snapshots().staged(step, size) as folder:
            yield folder

    def _is_unchanged(self) -> bool:
        """Return whether what was loaded is known to be what was compared; ``step`` and ``save`` raise where it is not."""
        try:
            return self._checkpoints.again is None or self._checkpoints.require_unchanged(now=True)
        except RuntimeError:
            return False

    def _snapshots(self) -> Snapshots:
        if self._in_memory is None:
            from ftsupervise.guard.snapshots import Snapshots

            self._in_memory = Snapshots(self._place, self._agree, self._voice, self._outside)
        return self._in_memory

    def remove(self, checkpoint: str | os.PathLike[str]) -> bool:
        """Take an old checkpoint away; False, and nothing is done, when a newer attempt has begun. Raises OSError."""
        return self._checkpoints.remove(Path(checkpoint).absolute())

    def may_save(self) -> bool:
        """Ask right before a checkpoint of your own making is committed (renamed, its marker written): False when a newer
        attempt has begun. It may begin right after; ``checkpoint()`` has no such gap. Where the run directory does not answer
        within a second, it is True: an unknown costs no checkpoint.
        """
        if not self._decider.superseded():
            return True
        self._is_over()
        return False

    def _is_over(self) -> None:
        self._decider.superseded()
        who = f"attempt {self._outside.attempt.newer}" if self._outside.attempt.newer else "a newer attempt"
        self._voice.once(f"{who} has begun: this attempt saves nothing any more")
        self._decider.wake()

    def saved(self, step: int) -> None:
        """Call when the checkpoint of ``step`` is committed: takes down the save switch it answers, and no other."""
        if not self.may_save():
            return
        self._heart.saved(step)
        self._outside.clock.saved()
        self._decider.take_down(self._outside.switches.hand_over())

    def finished(self, step: int) -> None:
        """Call when the training is complete: no further member of the chain will train. Gives the signals back."""
        if self._heart.ending is not None:
            self._heart.ending.forget()
        if not self.may_save():
            self.close()
            return
        self._heart.step = step
        self._heart.change_phase("finished")
        self._decider.finish(step)
        if self._in_memory is not None:
            self._in_memory.finished()
        self.close()

    def report(self, *, last_step: int | None = None, url: str | None = None) -> None:
        """Say once after which step the training is complete, and where its page in a tracker is (W&B, MLflow, TensorBoard)."""
        if last_step is not None:
            self._heart.last_step(last_step)
        if url is not None:
            self._decider.side.do("tracker", partial(note_page, self._place, self._voice, url))
            self._voice.say_held()

    def on_restart(self, callback: Callable[[Restarted], object]) -> None:
        """Call ``callback(restart)`` now, on rank 0, if this attempt follows another: to mark it in a tracker. Never raises."""
        tell_restart(self._place, self._voice, callback, self._decider.side)

    def loss(self, value: float, step: int | None = None) -> None:
        """Give the loss of this step, before or after ``step()``, each step or now and then; ``step`` where it is an older
        one's. What follows from a loss that is no number or that diverges is in the settings: ``guard.loss``. Costs less than
        2 us, and does not synchronise: give a float, the caller decides when to read it from the GPU."""
        if self._heart.take_loss(value, step):
            self._decider.wake()

    @property
    def skip(self) -> int:
        """Batches that the loop should skip now, after ``latest()``: those from the step it goes on from to where the loss
        was no number or diverged. 0 in any other case."""
        return self._checkpoints.skip()

    def beat(self, step: int | None = None, *, phase: str | None = None) -> None:
        """Report that the process is alive outside ``step()``: in a long save, an evaluation, a compilation. Rate-limited."""
        if step is not None:
            self._heart.step = step
        if phase is not None and phase != self._heart.phase:
            self._heart.change_phase(phase)
        self._heart.beat(_monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """``with guard.phase("eval"):`` — the beats say so, so that a slow evaluation is not taken for a hang."""
        before = self._heart.phase
        self._heart.change_phase(name)
        try:
            yield
        finally:
            self._heart.change_phase(before)

    def close(self) -> None:
        """Give the signals back, write the last beat. Called by ``finished()`` and at the end of a ``with`` block.

        Rank 0 waits up to 3 s for the other ranks here, if they agreed through a store that ends with its process."""
        self._close(in_order=True)

    def _close(self, *, in_order: bool) -> None:
        if self._heart.ending is not None:
            self._heart.ending.leaves()
        self._outside.signals.ignore()
        self._heart.beat_now()
        self._decider.close(in_order=in_order)
        self._outside.memory.close()

    def __enter__(self) -> Guard:
        if self._heart.ending is not None:
            self._heart.ending.forget()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._heart.ending is not None:
                self._heart.ending.passes(error)
            try:
                self._heart.facts["error"] = f"{kind.__name__}: {error}"[:200]
            except Exception:  # an error that cannot say what it is goes on as it is
                self._heart.facts["error"] = kind.__name__
        self._close(in_order=kind is None)
