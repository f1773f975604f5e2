"""The Trainer of Hugging Face: ``Trainer(callbacks=[HuggingFaceGuard()])``, and ``trainer.train(resume_from_checkpoint=…)``.

    from ftsupervise.integrations.huggingface import HuggingFaceGuard

    guard = HuggingFaceGuard()
    trainer = Trainer(model, args, callbacks=[guard], train_dataset=data)
    trainer.train(resume_from_checkpoint=guard.latest())

The Trainer writes its checkpoints (``checkpoint-500``), when its own arguments say so and when ftsupervise asks. While it
writes one, its ``output_dir`` is the staging folder of this attempt; committed, the checkpoint lies in
``$FTSUPERVISE_CHECKPOINT_DIR``. So ``save_total_limit`` is applied here, after the commit, and never to one of the two newest.
A program that is not supervised, or that pushes its checkpoints to a hub, saves in ``output_dir`` as always.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ftsupervise.guard import Decision
from ftsupervise.integrations.needed import needed
from ftsupervise.integrations.training import (
    SupervisedTraining,
    cannot_skip,
    generators,
    newest,
    set_generators,
    supervised,
)

_Callback: Any = needed("transformers", package="transformers").TrainerCallback
_STATE = "trainer_state.json"


class HuggingFaceGuard(_Callback):  # type: ignore[misc] # Transformers is not installed where mypy runs
    """Saves and stops when ftsupervise asks for it, at the same step on all ranks.

    finish       False for all but the last ``train`` of a program: only that one completes the training
    options      of ``Guard``: ``memory``, ``run_for`` …
    """

    def __init__(self, *, finish: bool = True, **options: Any) -> None:
        self._finish, self._options = finish, options
        self._run: SupervisedTraining | None = None
        self._args: Any = None
        self._phase = ExitStack()
        self._staged: _StagedSave | None = None
        # The generators before an evaluation, which are put back: one that a stop leaves out would shift what is drawn later
        self._before: dict[str, Any] | None = None

    @property
    def stopped(self) -> Decision | None:
        """The reason why ``train`` returned before the training was complete; None where it was not asked to stop."""
        return self._run.stopped if self._run is not None else None

    def latest(self) -> str | None:
        """Return ``resume_from_checkpoint`` of the newest checkpoint that is complete and verified; None when there is
        none.

        Raises OSError. A program that is not supervised looks in the Trainer's ``output_dir``.
        """
        if self._args is None:
            raise RuntimeError(
                "guard.latest() comes after Trainer(callbacks=[guard]): it asks the ranks of the Trainer"
            )
        folder = Path(self._args.output_dir).absolute() if _in_place(self._args) else None
        found = newest(self._args.process_index, folder)
        cannot_skip(found, "the Trainer", self._args.process_index)
        return str(found.path) if found.path is not None else None

    # ------------------------------------------------------------------------------------------------- around the training

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._args = args

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        keep = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
        self._run = SupervisedTraining(args.process_index, args.world_size, keep=keep, **self._options)
        self._run.guard.report(last_step=state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._give_up()
        self._phase.close()
        if self._run is not None:
            self._run.ended(state.global_step, finished=self._finish)

    # -------------------------------------------------------------------------------------------------------- each step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._give_up()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self._run
        assert run is not None
        if run.step(state.global_step):
            control.should_save = True
        if run.stopped is not None:
            control.should_training_stop = True
            control.should_evaluate = False  # there is no time for it
            control.should_save = run.stopped.save
        self._prepare(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._give_up()
        if self.stopped is not None:  # it is saved, and the epoch is not over
            control.should_evaluate = control.should_save = False
        self._prepare(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._run is not None and logs and "loss" in logs:
            self._run.loss(float(logs["loss"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._run is not None:
            self._run.beat()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._phase.close()
        if self._before is not None:
            set_generators(self._before)
            self._stage(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run, staged, self._staged = self._run, self._staged, None
        if run is None:
            return
        if staged is None:
            run.adopt(Path(args.output_dir) / _name(state), state.global_step)
            return
        staged.commit(state)
        best = state.best_model_checkpoint
        run.drop_old(Path(best).name if best else None)

    # ---------------------------------------------------------------------------------------------------------- saving

    def _prepare(self, args: Any, state: Any, control: Any) -> None:
        """Prepare for what follows this hook: an evaluation, a save, or both in this order."""
        self._before = generators() if control.should_evaluate else None
        if self._before is None:
            self._stage(args, state, control)
        elif self._run is not None:
            self._phase.enter_context(self._run.guard.phase("eval"))

    def _stage(self, args: Any, state: Any, control: Any) -> None:
        saves = control.should_save or (
            self._before is not None and args.save_strategy == "best"
        )  # then the evaluation decides
        if saves and self._run is not None and self._staged is None and not _in_place(args):
            self._staged = _StagedSave(self._run, args, state)

    def _give_up(self) -> None:
        """Give up a save that the Trainer has not made after all."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.throw_away()


class _StagedSave:
    """Makes the Trainer write its checkpoint into the staging folder of this attempt, while it is open."""

    def __init__(self, run: SupervisedTraining, args: Any, state: Any) -> None:
        self._block = run.checkpoint(state.global_step, _name(state))
        self._folder = self._block.__enter__()
        self._args, self._output_dir, self._run = args, args.output_dir, run
        args.output_dir = str(self._folder.parent)

    def commit(self, state: Any) -> None:
        """Commit it: every rank has written its part. Raises OSError."""
        self._args.output_dir = self._output_dir
        if state.best_model_checkpoint == str(self._folder):  # its name from now on
            state.best_model_checkpoint = str(self._run.folder / self._folder.name)
            if self._run.rank == 0:
                state.save_to_json(str(self._folder / _STATE))
        self._block.__exit__(None, None, None)

    def throw_away(self) -> None:
        self._args.output_dir = self._output_dir
        nothing = InterruptedError("the Trainer has not saved")
        self._block.__exit__(type(nothing), nothing, None)
        with suppress(OSError):
            self._folder.rmdir()


def _name(state: Any) -> str:
    return f"checkpoint-{state.global_step}"


def _in_place(args: Any) -> bool:
    """Return whether the checkpoints stay in ``output_dir``, where other code looks for them."""
    return not supervised() or bool(args.push_to_hub)


__all__ = ["HuggingFaceGuard"]
