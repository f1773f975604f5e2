"""Lightning: ``Trainer(callbacks=[LightningGuard()])``, and ``trainer.fit(model, ckpt_path=guard.latest())`` to go on.

    from ftsupervise.integrations.lightning import LightningGuard

    guard = LightningGuard(save_every=500)
    trainer = Trainer(callbacks=[guard], max_epochs=10)
    trainer.fit(model, ckpt_path=guard.latest())

Lightning keeps its loops, optimizers and schedules in its checkpoint, but neither random generators nor the place in the data.
Both are kept here, for all ranks: a run that is interrupted in the middle of an epoch sees the same batches in the same order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from ftsupervise.guard import Decision
from ftsupervise.guard.settings import Voice, warning_signal
from ftsupervise.integrations.needed import needed
from ftsupervise.integrations.training import (
    SupervisedTraining,
    cannot_skip,
    generators,
    newest,
    of_all_ranks,
    set_generators,
    supervised,
)

_lightning = needed("lightning.pytorch", "pytorch_lightning", package="lightning")
_Callback: Any = _lightning.Callback
FILE = "lightning.ckpt"  # in the folder of a checkpoint; a folder where the strategy shards
_END = object()


class LightningGuard(_Callback):  # type: ignore[misc] # Lightning is not installed where mypy runs
    """Saves and stops when ftsupervise asks for it, at the same step on all ranks, and goes on exactly there.

    save_every   optimizer steps between two checkpoints; None: one at each epoch's end. Others are saved when asked for
    keep         checkpoints that stay; None: those that ``checkpoints.retain`` of the run keeps
    finish       False for all but the last ``fit`` of a program: only that one completes the training
    options      of ``Guard``: ``memory``, ``run_for`` …
    """

    def __init__(
        self, *, save_every: int | None = None, keep: int | None = None, finish: bool = True, **options: Any
    ) -> None:
        self._choice = {"save_every": save_every, "keep": keep, **options}
        self._finish = finish
        self._run: SupervisedTraining | None = None
        self._handlers: dict[int, Any] = {}
        self._phase = ExitStack()
        self._step = -1  # optimizer steps that the guard was told of
        self._due = False  # a checkpoint waits for the end of the epoch
        self._validations: float | None = None  # limit_val_batches, while the guard stops the training
        self._began: dict[str, Any] = {}  # the generators when the epoch's batches were drawn up
        self._resumed: dict[str, Any] = {}
        # The generators before a validation, which are put back: one that a stop leaves out would shift what is drawn later
        self._before: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------------ for the user

    @property
    def stopped(self) -> Decision | None:
        """The reason why ``fit`` returned before the training was complete; None where it was not asked to stop."""
        return self._run.stopped if self._run is not None else None

    def latest(self) -> str | None:
        """Return ``ckpt_path`` of the newest checkpoint that is complete and verified; None when there is none. Raises
        OSError.
        """
        rank_zero_only = import_module(f"{_lightning.__name__}.utilities").rank_zero_only
        found = newest(rank := getattr(rank_zero_only, "rank", None) or 0)
        if found.path is None:
            return None
        cannot_skip(found, "Lightning", rank)
        return str(found.path / FILE if (found.path / FILE).exists() else found.path)

    # ------------------------------------------------------------------------------------------------- around the training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        environment: Any = getattr(trainer._accelerator_connector, "cluster_environment", None)
        if stage == "fit" and supervised() and getattr(environment, "auto_requeue", False):
            environment.auto_requeue = (
                False  # the next job of the chain takes over: a requeued one would train beside it
            )
            if trainer.global_rank == 0:
                Voice(0, 1).say(
                    "Lightning's auto_requeue is off in this run: ftsupervise has the next job in the queue"
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._run = SupervisedTraining(trainer.global_rank, trainer.world_size, **self._choice)
        self._handlers = {number: signal.getsignal(number) for number in {warning_signal(os.environ), signal.SIGTERM}}

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_signals_back()
        self._enter("eval")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.close()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_signals_back()
        begun = set(of_all_ranks(str(trainer.ckpt_path or "the beginning")))  # chosen before they could talk
        if len(begun) > 1:
            raise RuntimeError(f"the ranks begin from different checkpoints ({', '.join(sorted(begun))}): start again")
        self._step = trainer.global_step
        if self._run is not None and trainer.estimated_stepping_batches != float("inf"):
            self._run.guard.report(last_step=int(trainer.estimated_stepping_batches))
        self._go_on(trainer)

    def _take_signals_back(self) -> None:
        """Take the signals back: Lightning's handler of SIGTERM raises out of the loop before anything is saved; ours
        waits for the step's end.
        """
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        except ValueError:  # not in the main thread: the guard has said so
            return

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._validations is not None:
            trainer.limit_val_batches = self._validations
        if self._run is not None:
            self._run.ended(trainer.global_step, finished=self._finish)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._phase.close()

    # -------------------------------------------------------------------------------------------------------- each step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._began = generators()
        fit = trainer.fit_loop
        made = trainer.current_epoch == 0 or fit.is_resuming or fit.epoch_loop.restarting  # this epoch's iterator
        if made and not _fetched_by_module(trainer):
            iter(fit._data_fetcher)  # made now, each epoch follows from the generators as they are at its beginning

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run, step = self._run, trainer.global_step
        if _validates(trainer, batch_idx):
            self._before = generators()
        if run is None or step == self._step:  # gradients are accumulated: no optimizer has made a step
            return
        self._step = step
        self._tell_loss(trainer, outputs)
        save = run.step(step)
        if trainer.is_last_batch:
            self._due = self._due or save  # Lightning resumes at an epoch's end from what is saved there
        elif save:
            self._save(trainer)
        if run.stopped is not None:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        due, self._due = self._due, False
        if due or (self._run is not None and self._run.epoch_ends(trainer.global_step)):
            self._save(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._enter("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._phase.close()
            if self._before is not None:
                set_generators(self._before)

    def _enter(self, phase: str) -> None:
        if self._run is not None:
            self._phase.close()
            self._phase.enter_context(self._run.guard.phase(phase))

    def _tell_loss(self, trainer: Any, outputs: Any) -> None:
        """Report the loss as often as Lightning logs: reading it from a GPU waits for the GPU."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._run is not None and loss is not None and self._step % max(1, trainer.log_every_n_steps) == 0:
            self._run.loss(float(loss))

    def _save(self, trainer: Any) -> None:
        run = self._run
        assert run is not None
        with run.checkpoint(trainer.global_step) as folder:
            trainer.save_checkpoint(folder / FILE)
        run.drop_old()

    def _stop(self, trainer: Any) -> None:
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None  # "training will continue" otherwise
        self._validations = trainer.limit_val_batches
        trainer.limit_val_batches = 0  # there is no time for the validation that an early stop runs

    # ---------------------------------------------------------------------------------------------- the place in the data

    def state_dict(self) -> dict[str, Any]:
        """Return a part of each checkpoint that Lightning writes, ours or of a ModelCheckpoint; all ranks call it together."""
        return {"ranks": of_all_ranks({"began": self._began, "now": generators()})} if self._began else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _go_on(self, trainer: Any) -> None:
        """Draw up the epoch's batches as they were, pass over those that were trained on, and put the generators back."""
        ranks, self._resumed = self._resumed.get("ranks", []), {}
        assert self._run is not None
        if len(ranks) != trainer.world_size:  # a fresh start, or another number of ranks: other batches for each
            return
        mine, fit = ranks[trainer.global_rank], trainer.fit_loop
        self._began, self._before = mine["began"], mine["now"]  # a validation may follow that was not over
        progress = fit.epoch_loop.batch_progress
        seen = progress.current.processed if fit.restarting or fit.epoch_loop.restarting else 0
        if 0 < seen < trainer.num_training_batches and not progress.is_last_batch and not _keeps_place(trainer):
            fetcher = fit._data_fetcher
            set_generators(mine["began"])
            _set_epoch(trainer)
            iter(fetcher)
            with self._run.guard.phase("resume"):
                for _ in range(seen):
                    next(fetcher)
                    self._run.beat()
            fetcher.fetched -= seen  # Lightning adds them itself
        set_generators(mine["now"])
        if not _fetched_by_module(trainer):  # Lightning draws up its validation first, and that draws numbers
            fit._data_fetcher.iterator = _starting_from(mine["now"], fit._data_fetcher.iterator)


def _starting_from(saved: dict[str, Any], batches: Iterator[Any]) -> Iterator[Any]:
    set_generators(saved)
    while (batch := next(batches, _END)) is not _END:  # never iter(): it would begin the epoch anew
        yield batch


def _validates(trainer: Any, batch_idx: int) -> bool:
    """Return whether a validation may follow this batch."""
    every = trainer.val_check_batch  # None: by the clock; infinite: at the end of the data
    return bool(trainer.is_last_batch or (every and every != float("inf") and (batch_idx + 1) % every == 0))


def _loaders(trainer: Any) -> list[Any]:
    return list(trainer.fit_loop._combined_loader.flattened)


def _keeps_place(trainer: Any) -> bool:
    """Return whether the loader resumes by itself (torchdata's StatefulDataLoader), or its batches cannot be passed over."""
    by_itself = all(callable(getattr(one, "load_state_dict", None)) for one in _loaders(trainer))
    return by_itself or _fetched_by_module(trainer)


def _fetched_by_module(trainer: Any) -> bool:
    """Return whether ``training_step(dataloader_iter)`` takes its batches itself."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def _set_epoch(trainer: Any) -> None:
    for loader in _loaders(trainer):
        inner = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(inner, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(trainer.current_epoch)


__all__ = ["LightningGuard"]
