"""Accelerate: one object beside the ``Accelerator``, whose ``epochs`` and ``batches`` the loop goes through.

    from ftsupervise.integrations.accelerate import AccelerateGuard

    guard = AccelerateGuard(accelerator, save_every=500)
    for epoch in guard.epochs(3):
        for batch in guard.batches(loader):
            with accelerator.accumulate(model):
                ...

When the loop asks for the next batch, the one before is done: the guard is asked there, and ``accelerator.save_state`` is
called there. What ``epochs`` finds at first is loaded by ``accelerator.load_state``, and ``batches`` passes over those of the
epoch that were trained on, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftsupervise.guard import Decision
from ftsupervise.integrations.needed import needed
from ftsupervise.integrations.training import SupervisedTraining, generators, newest, of_all_ranks, set_generators

needed("accelerate", package="accelerate")
_END = object()


class AccelerateGuard:
    """Saves and stops when ftsupervise asks for it, at the same step on all ranks, and goes on exactly there.

    accelerator  make this object right after it; it registers itself for its checkpoints
    save_every   optimizer steps between two checkpoints; None: one at each epoch's end. Others are saved when asked for
    keep         checkpoints that stay; None: those that ``checkpoints.retain`` of the run keeps
    options      of ``Guard``: ``memory``, ``run_for`` …
    """

    def __init__(
        self, accelerator: Any, *, save_every: int | None = None, keep: int | None = None, **options: Any
    ) -> None:
        self.accelerator = accelerator
        self.steps = 0  # optimizer steps made
        self.epoch = 0  # the number of the epoch, from 0
        self._seen = 0  # batches of it that the loop was given
        self._loader: Any = None
        self._began: dict[str, Any] = {}  # the generators when the epoch's batches were drawn up
        self._resumed: Mapping[str, Any] | None = None  # this rank's generators, until the first batch
        rank, world = accelerator.process_index, accelerator.num_processes
        self._run = SupervisedTraining(rank, world, save_every=save_every, keep=keep, **options)
        accelerator.register_for_checkpointing(self)

    @property
    def stopped(self) -> Decision | None:
        """The reason why the loops ended before the training was complete; None where they were not asked to stop."""
        return self._run.stopped

    def epochs(self, count: int) -> Iterator[int]:
        """``for epoch in guard.epochs(3)``, after ``accelerator.prepare``: loads the newest checkpoint, and gives the numbers
        of the epochs that are still to be made. When all are made, the training is complete. Raises OSError where the
        checkpoints cannot be read."""
        self.resume()
        while self.epoch < count and self.stopped is None:
            now = self.epoch
            yield now
            if self.epoch == now and self.stopped is None:  # the loop has left this epoch early
                self._epoch_over()
        self._run.ended(self.steps, finished=True)

    def batches(self, loader: Any) -> Iterator[Any]:
        """``for batch in guard.batches(loader)``: the epoch's batches, or those that are left of it."""
        self._loader = loader
        saved, self._resumed = self._resumed, None
        if saved is None:
            self._seen, self._began = 0, self._generators()
        batches = iter(self._drawn_up(loader, saved))
        batch = next(batches, _END)
        if saved is not None:
            self._set_generators(saved["now"])
        while batch is not _END:
            self._seen += 1
            yield batch
            self._after_batch()
            if self.stopped is not None:
                return
            batch = next(batches, _END)
        if self._run.epoch_ends(self.steps):
            self.save()
        self._epoch_over()

    def loss(self, value: float) -> None:
        """Give the loss to the *loss* watchdog: a float that you have at hand anyway."""
        self._run.loss(value)

    def save(self) -> None:
        """Save now, on every rank. Raises OSError."""
        naming = self.accelerator.project_configuration
        before = naming.automatic_checkpoint_naming, naming.iteration
        naming.automatic_checkpoint_naming = False  # it would name another folder
        try:
            with self._run.checkpoint(self.steps) as folder:
                self.accelerator.save_state(str(folder))
        finally:
            naming.automatic_checkpoint_naming, naming.iteration = before
        self._run.drop_old()

    def resume(self) -> int:
        """Load the newest checkpoint that is complete and verified, if there is one, and return its steps.

        ``epochs`` calls it.
        """
        found = newest(self._run.rank)
        if found.path is not None:
            self.accelerator.load_state(str(found.path))
            self._seen += found.skip * self.accelerator.gradient_accumulation_steps
        return self.steps

    def finished(self) -> None:
        """Say that the training is complete, where the loop leaves ``epochs`` early."""
        self._run.ended(self.steps, finished=True)

    # ---------------------------------------------------------------------------------------------------- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return a part of what ``accelerator.save_state`` writes; all ranks call it together."""
        mine = {"began": self._began, "now": self._generators()}
        return {"step": self.steps, "epoch": self.epoch, "seen": self._seen, "ranks": of_all_ranks(mine)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.epoch, self._seen = state["step"], state["epoch"], state["seen"]
        if len(state["ranks"]) == self._run.world:
            self._resumed = state["ranks"][self._run.rank]
            self._began = self._resumed["began"]
        else:
            self._seen = 0

    # -------------------------------------------------------------------------------------------------------- each batch

    def _drawn_up(self, loader: Any, saved: Mapping[str, Any] | None) -> Any:
        """Return the loader in the order of this epoch, from the first batch that is left."""
        left = loader
        if saved is not None:
            self._set_generators(saved["began"])
            if self._seen and not getattr(loader, "use_stateful_dataloader", False):  # that one knows its place
                left = self.accelerator.skip_first_batches(loader, self._seen)
        for one in (loader, left):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(self.epoch)
        return left

    def _after_batch(self) -> None:
        if not self.accelerator.sync_gradients:  # they are accumulated: no step was made
            return
        self.steps += 1
        if self._run.step(self.steps):
            self.save()

    def _epoch_over(self) -> None:
        self.epoch += 1
        self._seen = 0

    def _generators(self) -> dict[str, Any]:
        own = getattr(self._loader, "synchronized_generator", None)  # Accelerate gives the sampler one of its own
        return {**generators(), "sampler": own.get_state() if own is not None else None}

    def _set_generators(self, saved: Mapping[str, Any]) -> None:
        set_generators(saved)
        own = getattr(self._loader, "synchronized_generator", None)
        if own is not None and saved["sampler"] is not None:
            own.set_state(saved["sampler"])


__all__ = ["AccelerateGuard"]
