"""The place of a training loop in its data: which epoch, how many batches of it, and from which random numbers it was shuffled.

A new DataLoader begins at the first batch. ``Batches`` goes on in the middle of an epoch: the sampler starts from the random
state that it had at the beginning of that epoch, and the indices of the batches that were trained on are passed over. Their
data is not loaded. What the data set draws at random comes out the same too: in the training process from the generators that
a snapshot or checkpoint brings back, and in worker processes because each batch there is seeded by its place.

``StatefulDataLoader`` of torchdata has a state of its own, which is kept as it is.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib import import_module
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Batches:
    """The batches of ``loader``, epoch after epoch, with a place in them that ``guard.restore(batches=…)`` brings back.

    ``for batch in batches`` is one epoch, or the rest of the epoch in which the run stopped; ``epochs`` and ``forever`` lead
    through all of them. A batch counts when the loop has been given it: take snapshots and checkpoints after its step, before
    the next one is drawn. A sampler with ``set_epoch`` (DistributedSampler) is told the epoch.

    epoch    the number of the epoch, from 0
    taken    how many batches of it the loop was given

    A data set without indices (IterableDataset) is read again up to the place, unless the loader has a state of its own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = self.taken = 0
        self._stateful = callable(getattr(loader, "state_dict", None))
        self._samplers = _samplers(loader)
        self._generators = _generators(loader, self._samplers)
        self._source, self._order = loader, None
        if not self._stateful and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            self._source, self._order = _with_order(loader, self._generators, self._samplers)
        self._open = False  # the epoch has begun
        self._goes_on = False  # and the loop has not taken a batch since it was restored
        self._began: dict[str, Any] | None = None  # with these random states, unless the order knows them
        self._last = 0  # batches of the epoch that ended

    def __len__(self) -> int:
        return len(self.loader)

    def epochs(self, count: int) -> Iterator[int]:
        """``for epoch in batches.epochs(10)``: the numbers of the epochs to make, the one that was interrupted first. An epoch
        that the loop leaves early, without leaving this loop, is over."""
        while self.epoch < count:
            now = self.epoch
            yield now
            if self.epoch == now:
                self._over()

    def forever(self) -> Iterator[Any]:
        """Batch after batch, for a loop that counts steps: ``for step, batch in zip(range(start + 1, last + 1),
        batches.forever())``."""
        while True:
            yield from self
            if not self._last:
                raise ValueError("the loader has no batches")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._again() if self._goes_on else self._anew():
            self.taken += 1
            yield batch
        self._last = self.taken
        self._over()

    def state_dict(self) -> dict[str, Any]:
        began = (self._order.began if self._order is not None else None) or self._began
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "open": self._open,
            "began": began if self._open else None,
            "generators": [one.get_state() for one in self._generators],
            "replicas": self._replicas(),
            "loader": self.loader.state_dict() if self._stateful and self._open else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.taken = int(state["epoch"]), int(state["taken"])
        self._open = self._goes_on = bool(state["open"])
        self._began = state["began"]
        if self._order is not None:
            self._order.began = None
        saved, replicas = state["replicas"], self._replicas()
        if saved and replicas and saved != replicas:  # the samples that all of them have seen together
            self.taken = self.taken * saved // replicas
        for one, before in zip(self._generators, state["generators"]):
            one.set_state(before)
        if self._stateful and state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])

    # ------------------------------------------------------------------------------------------------------------ epochs

    def _over(self) -> None:
        self.epoch, self.taken, self._open, self._goes_on, self._began = self.epoch + 1, 0, False, False, None

    def _set_epoch(self) -> None:
        for one in self._samplers:
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(self.epoch)
                return

    def _anew(self) -> Iterator[Any]:
        """Return the iterator of an epoch from its beginning."""
        self._set_epoch()
        self.taken, self._open, self._began = 0, True, None
        if self._order is not None:
            self._order.expect(self.epoch)
        elif not self._stateful:
            self._began = _random_states(self._generators)
        return self._batches()

    def _again(self) -> Iterator[Any]:
        """Return the iterator of the rest of the epoch.

        Making one draws random numbers; these were drawn before the restart, so the generators stay as they were
        restored.
        """
        self._goes_on = False
        self._set_epoch()
        now = _random_states(self._generators)
        if self._order is not None:
            self._order.expect(self.epoch, self.taken, self._began)
            batches = self._batches()
            drawn = self._order.began is not None
            _set_random_states(now, () if drawn else self._generators)
            return batches
        if self._stateful:
            batches = self._batches()
            _set_random_states(now, ())
            return batches
        if self._began is not None:
            _set_random_states(self._began, self._generators)
        batches = self._batches()
        if self.taken:
            warnings.warn(
                f"{type(getattr(self.loader, 'dataset', self.loader)).__name__} has no indices: {self.taken} batches are "
                "read again and dropped; torchdata's StatefulDataLoader, with a data set that has a state_dict, goes on at "
                "once",
                stacklevel=3,
            )
            for _ in islice(batches, self.taken):
                pass
        _set_random_states(now, ())
        return batches

    def _batches(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._source)
        return batches

    def _replicas(self) -> int | None:
        """Return how many ranks share the epoch."""
        return next(
            (one.num_replicas for one in self._samplers if isinstance(getattr(one, "num_replicas", None), int)), None
        )


class _Order:
    """The indices of an epoch, in place of the loader's own sampler: passes over those that were trained on.

    The loader may ask for its iterator twice and use the second one, and its workers draw ahead: all is done at the first draw.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator], *, workers: bool, rank: int) -> None:
        self._sampler, self._generators, self._workers, self._rank = sampler, generators, workers, rank
        self.began: dict[str, Any] | None = None  # the random states before the first draw of this epoch
        self._epoch = self._skip = 0
        self._again: dict[str, Any] | None = None

    def expect(self, epoch: int, skip: int = 0, began: dict[str, Any] | None = None) -> None:
        """Expect the epoch that begins next, from ``began`` and behind ``skip`` batches where it goes on."""
        self._epoch, self._skip, self._again, self.began = epoch, skip, began, None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        now = _random_states(self._generators)
        skip, again, self._skip, self._again = self._skip, self._again, 0, None
        self.began = again or now
        if again is not None:
            _set_random_states(again, self._generators)
        indices: Iterator[Any] = iter(self._sampler)
        if again is not None:
            for _ in islice(indices, skip):
                pass
            if not skip:  # the first draw was made all the same
                indices = chain(list(islice(indices, 1)), indices)
            _set_random_states(now, ())
        if self._workers:
            seed = self._seed()
            yield from (_Numbered(index, seed, number) for number, index in enumerate(indices, skip))
        else:
            yield from indices

    def _seed(self) -> int:
        """Return the seed of this epoch, on this rank."""
        assert self.began is not None
        digest = blake2b(repr((self._epoch, self._rank)).encode(), digest_size=8)
        for one in (self.began["torch"], *self.began["generators"]):
            digest.update(one.numpy().tobytes())
        return int.from_bytes(digest.digest(), "big")


class _Numbered:
    """The indices of one batch, on their way to a worker process. It finds them there without this wrapper; by then its
    generators are seeded for this batch, so that its data does not depend on the batches that the worker has loaded before."""

    __slots__ = ("_index", "_number", "_seed")

    def __init__(self, index: Any, seed: int, number: int) -> None:
        self._index, self._seed, self._number = index, seed, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._index, self._seed, self._number)


def _arrived(index: Any, seed: int, number: int) -> Any:
    """Seed the worker, which loads this batch next."""
    if get_worker_info() is not None:
        digest = blake2b(f"{seed}:{number}".encode(), digest_size=16).digest()
        random.seed(digest)
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if "numpy" in sys.modules:
            words = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 16, 4)]
            import_module("numpy.random").seed(words)
    return index


def _with_order(loader: Any, generators: list[torch.Generator], samplers: list[Any]) -> tuple[Any, _Order]:
    """Return a copy of the loader that asks our order for its indices. The loader itself stays as it is."""
    mine = copy.copy(loader)
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    rank = next((one.rank for one in samplers if isinstance(getattr(one, "rank", None), int)), 0)
    order = _Order(getattr(loader, name), generators, workers=loader.num_workers > 0, rank=rank)
    mine.__dict__[name] = order  # its __setattr__ refuses
    mine.__dict__["_iterator"] = None  # of workers that stay
    return mine, order


def _samplers(loader: Any) -> list[Any]:
    batch = getattr(loader, "batch_sampler", None)
    found = (batch, getattr(batch, "sampler", None), getattr(loader, "sampler", None))
    return list({id(one): one for one in found if one is not None}.values())


def _generators(loader: Any, samplers: list[Any]) -> list[torch.Generator]:
    found = (getattr(one, "generator", None) for one in (loader, *samplers))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _random_states(generators: list[torch.Generator]) -> dict[str, Any]:
    """Return the states of the generators that a sampler may draw from, in this process."""
    found = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "generators": [one.get_state() for one in generators],
    }
    if "numpy" in sys.modules:
        found["numpy"] = import_module("numpy.random").get_state(legacy=False)
    return found


def _set_random_states(saved: Mapping[str, Any], generators: list[torch.Generator] | tuple[()]) -> None:
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved:
        import_module("numpy.random").set_state(saved["numpy"])
    for one, before in zip(generators, saved["generators"]):
        one.set_state(before)


__all__ = ["Batches"]
