"""The common part of the hooks for Lightning, the Hugging Face Trainer and Accelerate: ranks, generators, and the
checkpoints.

A framework owns its loop and its checkpoints' contents. The guard owns when one is saved, where it lies and when it
counts. All ranks write into a staging folder of this attempt, and rank 0 commits it by one rename, with the manifest.
So an attempt that is over commits nothing, and ``guard.latest()`` never sees half of one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.checkpoints.commit import NotComplete, Origin, commit
from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.retain import Candidate, Retention, in_use, kind_of, of_others, plan
from ftsupervise.checkpoints.verify import Scope, verify
from ftsupervise.guard import Decision, Guard, settings
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.resume import CannotResume
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.integrations.needed import needed
from ftsupervise.rundir.lineage import Lineage, believed_group, read_lineage
from ftsupervise.rundir.paths import ENV_RUN, ENV_RUN_DIR
from ftsupervise.snapshots.kept import anchors

torch, dist = needed("torch", package="torch"), needed("torch.distributed", package="torch")
_NUMPY = "numpy.random"


def supervised() -> bool:
    """Return whether ``ftsupervise run`` supervises this process."""
    return bool(os.environ.get(ENV_RUN_DIR))


class SupervisedTraining:
    """The guard of one rank in a framework's loop, from the first step to the end.

    ``save_every``: steps between two checkpoints that nobody asked for; None: one at each epoch's end. ``keep``: how many stay;
    None: those that the settings of the run keep. ``stopped``: the decision that ended the loop before the training was over.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        save_every: int | None = None,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.world = rank, world
        self.guard = Guard(rank=rank, world=world, **options)
        self.stopped: Decision | None = None
        self._save_every, self._keep, self._over = save_every, keep, False
        self._saved: int | None = None
        self._context = settings.place(os.environ, None, rank, world)
        wandb = getattr(sys.modules.get("wandb"), "run", None)  # what the framework's own logger has begun
        if isinstance(url := getattr(wandb, "url", None), str):
            self.guard.report(url=url)
        self._voice = Voice(rank, world)
        started = settings.place(os.environ, None, None, None).world
        if started > world:
            self._voice.once(
                f"{started} ranks were started, and each of them trains on {world}: say so to the framework (devices=)"
            )

    def step(self, step: int) -> bool:
        """Make a step, after each optimizer step; return whether a checkpoint is to be saved.

        ``stopped`` says that the loop is to end after it.
        """
        decision = self.guard.step(step)
        if decision.stop:
            self.stopped = decision
        due = self._save_every and step % self._save_every == 0
        return decision.save or bool(due and not decision.stop)

    def epoch_ends(self, step: int) -> bool:
        """Return whether a checkpoint is to be saved there."""
        return self._save_every is None and self.stopped is None and step != self._saved

    @property
    def folder(self) -> Path:
        """Return the folder of committed checkpoints."""
        return self._context.checkpoints

    def loss(self, value: float) -> None:
        if not self._over:
            self.guard.loss(value)

    def beat(self) -> None:
        if not self._over:
            self.guard.beat()

    def checkpoint(
        self, step: int, name: str | None = None, metrics: Mapping[str, float] | None = None
    ) -> AbstractContextManager[Path]:
        """Give a folder to write into, which is committed at the end of the block; every rank enters. Raises OSError."""
        self._saved = step
        return self.guard.checkpoint(step, name, barrier=dist.barrier if _together() else None, metrics=metrics)

    def adopt(self, checkpoint: Path, step: int) -> None:
        """Adopt ``checkpoint``, which the framework has written where it lies; every rank calls it.

        Rank 0 writes its manifest, unless a newer attempt has begun.
        """
        if _together():
            dist.barrier()
        if not self.guard.may_save():
            return
        if self.rank == 0:
            origin = Origin(None, step, self.world, os.environ.get(ENV_RUN, ""), self._context.attempt)
            try:
                commit(checkpoint, origin.written_by(self._run()))
            except (NotComplete, OSError) as error:
                self._voice.once(f"{checkpoint} has no manifest: {error}")
        self.guard.saved(step)

    def drop_old(self, spare: str | None = None) -> None:
        """Remove the oldest checkpoints, on rank 0 after a commit, as far as the rules of ``ftsupervise checkpoints
        prune`` allow.

        Never one of the two newest that are verified, none in use, none without a manifest, and not ``spare``.
        """
        if self._keep is None or self.rank != 0:
            return
        folder, now = self._context.checkpoints, time.time()
        try:
            used, run = in_use(self._context.rundir, folder, now, anchors(folder)), self._run()
            scope = Scope(members=believed_group(self._context.rundir))
            found = checkpoints_in(folder, members=scope.members)
        except OSError:  # it cannot be seen which are in use: none goes
            return
        if spare:
            used[spare] = "the best so far"
        spared = of_others(found, run)
        rows = [
            Candidate(
                one.path.name,
                one.step,
                one.at.timestamp(),
                None,
                _verified(one.path, scope),
                {},
                False,
                used.get(one.path.name, ""),
                spared.get(one.path.name, ""),
                kind_of(one),
            )
            for one in found
        ]
        for old in plan(rows, Retention(last=self._keep)).remove:
            self.guard.remove(folder / old.name)

    def _run(self) -> Lineage | None:
        return None if self._context.rundir is None else read_lineage(self._context.rundir)

    def ended(self, step: int, *, finished: bool) -> None:
        """Note that the loop is over: ``finished`` says that the training is complete, unless the guard has ended it."""
        self._over = True
        if finished and self.stopped is None:
            self.guard.finished(step)
        else:
            self.guard.close()


def _verified(path: Path, scope: Scope) -> bool | None:
    verdict = verify(path, scope)
    return None if not verdict.manifest or verdict.error else verdict.good


class Newest(NamedTuple):
    """The checkpoint to go on from; None: there is none. ``skip``: steps whose batches are to be left out then."""

    path: Path | None
    skip: int = 0


def newest(rank: int, folder: Path | None = None) -> Newest:
    """Return the result of ``guard.latest()``, before there is a guard.

    Where the ranks can already talk, all take that of rank 0. ``folder``: where to look; default: where the guard
    commits. Raises OSError where the checkpoints cannot be read: to begin anew then would cost all steps; CannotResume
    where the run has saved and may use nothing of it.
    """
    context = settings.place(os.environ, None, rank, None)
    if folder is not None:
        context = context._replace(checkpoints=folder)
    if not _together():
        return _look(context)
    found: list[Any] = [None]
    if rank == 0:
        try:
            found[0] = tuple(_look(context))
        except OSError as error:
            found[0] = error
        except CannotResume as error:
            found[0] = error.words
    dist.broadcast_object_list(found)
    if isinstance(found[0], OSError):
        raise found[0]
    if isinstance(found[0], str):
        raise CannotResume(found[0])
    return Newest(*found[0])


def _look(context: RankContext) -> Newest:
    checkpoints = Checkpoints(context, lambda: False, Voice(context.rank, context.world))
    return Newest(checkpoints.latest(None, begun=False), checkpoints.skip())


def cannot_skip(found: Newest, framework: str, rank: int) -> None:
    """Say that the batches on which the loss went wrong are trained on again."""
    if found.skip and rank == 0:
        Voice(0, 1).say(f"{framework} has no way to skip the batches of {found.skip} steps: they are trained on again")


def _together() -> bool:
    """Return whether there are other ranks, and this one can talk to them."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


# ------------------------------------------------------------------------------------------------------------ generators


def generators() -> dict[str, Any]:
    """Return the state of the global random generators of Python, NumPy and torch.

    It consists of tensors and plain values only: ``torch.load(weights_only=True)`` reads it.
    """
    kind, keys, *rest = import_module(_NUMPY).get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.tensor([int(key) for key in keys], dtype=torch.int64), *rest],
        "torch": _torch_framework().rng_state(),
    }


def set_generators(saved: Mapping[str, Any]) -> None:
    """Undo ``generators``: set the state again."""
    version, inner, gauss = saved["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, *rest = saved["numpy"]
    import_module(_NUMPY).set_state((kind, keys.tolist(), *rest))
    _torch_framework().set_rng_state(saved["torch"])


def _torch_framework() -> Any:
    return import_module("ftsupervise.integrations.torch").FRAMEWORK


def of_all_ranks(own: Any) -> list[Any]:
    """Return the values of all ranks, by rank: a collective, which every rank calls."""
    if not _together():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
