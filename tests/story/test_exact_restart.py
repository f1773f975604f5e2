"""A loop of torch that is interrupted anywhere goes on with the same bits: weights, losses, random numbers, data."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftsupervise import Guard
from tests.manual.blocks import marked

torch: Any = pytest.importorskip("torch") if importlib.util.find_spec("torch") else None
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(torch is None, reason="torch is not installed: make test-torch"),
]
if torch is not None:
    import numpy as np
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    from ftsupervise.integrations.torch_data import Batches

    class Noisy(Dataset):
        """Fifty samples, each different at each look."""

        def __init__(self) -> None:
            draw = torch.Generator().manual_seed(5)
            self.xs, self.ys = torch.randn(50, 6, generator=draw), torch.randint(0, 3, (50,), generator=draw)

        def __len__(self) -> int:
            return len(self.xs)

        def __getitem__(self, at: int) -> tuple[Any, Any]:
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
            return self.xs[at] + 0.1 * noise, self.ys[at]

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            rows = Noisy()
            return iter(list(zip(rows.xs, rows.ys, strict=True)))


class Shape(NamedTuple):
    """What a loop is made of."""

    workers: int = 0
    stay: bool = False
    amp: str = ""  # autocast to this type, with a scaler for float16
    data: str = "shuffled"
    rate: str = "cosine"


STEPS, SAVE = 30, 4  # 7 batches an epoch


class Loop:
    """One attempt: new objects from other seeds than the attempt before."""

    def __init__(self, shape: Shape, chance: int) -> None:
        seeds = random.Random(chance)
        random.seed(seeds.random())
        np.random.seed(seeds.randrange(1 << 30))
        torch.manual_seed(seeds.randrange(1 << 30))
        self.shape = shape
        self.net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.schedule = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
            if shape.rate == "cosine"
            else torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=shape.amp == "float16", init_scale=2.0**18, growth_interval=3)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.batches = Batches(_loader(shape))
        self.own = torch.Generator().manual_seed(chance)
        self.counters = {"tokens": 0, "scale": 0.0}

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "ema": self.average,
            "batches": self.batches,
            "own": self.own,
            "counters": self.counters,
        }

    def step(self, images: Any, labels: Any) -> float:
        images = images + 0.01 * torch.rand(images.shape, generator=self.own)
        with torch.autocast("cpu", getattr(torch, self.shape.amp or "bfloat16"), enabled=bool(self.shape.amp)):
            loss = nn.functional.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step(*([loss.item()] if self.shape.rate == "plateau" else []))
        self.average.update_parameters(self.net)
        self.counters["tokens"] += images.numel()
        self.counters["scale"] += self.scaler.get_scale()
        return float(loss.item())

    def digest(self) -> str:
        """Of everything that it holds, and of the random numbers to come."""
        sums = hashlib.sha256()
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        for tensor in [*self.net.state_dict().values(), *self.average.state_dict().values(), *moments]:
            sums.update(tensor.detach().numpy().tobytes())
        rest = (self.counters, self.schedule.state_dict(), self.scaler.state_dict(), random.random())
        sums.update(repr((rest, float(np.random.rand()), torch.rand(3), torch.rand(2, generator=self.own))).encode())
        return sums.hexdigest()


def _loader(shape: Shape) -> Any:
    more: dict[str, Any] = {"num_workers": shape.workers, "persistent_workers": shape.stay}
    if shape.data == "stream":
        return DataLoader(Stream(), 8, **more)
    if shape.data == "own generator":
        return DataLoader(Noisy(), 8, shuffle=True, generator=torch.Generator().manual_seed(11), **more)
    if shape.data == "weighted":
        weights = torch.arange(1.0, 51.0).tolist()
        return DataLoader(Noisy(), 8, sampler=torch.utils.data.WeightedRandomSampler(weights, 50), **more)
    if shape.data == "ranks":
        return DataLoader(Noisy(), 5, sampler=torch.utils.data.DistributedSampler(Noisy(), 2, 1), **more)
    if shape.data == "stateful":
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(
            Noisy(), 8, shuffle=True, **more
        )
    return DataLoader(Noisy(), 8, shuffle=True, **more)


def attempt(shape: Shape, checkpoints: Path, until: int, losses: dict[int, float]) -> str:
    """Train from where the attempt before left it up to step ``until``, where it is killed; what it holds then."""
    loop = Loop(shape, 100 + until if any(checkpoints.glob("step-*")) else 1)
    with Guard(signals=()) as guard:
        start = guard.restore(**loop.parts()) or 0
        for step, batch in zip(range(start + 1, until + 1), loop.batches.forever(), strict=False):
            losses[step] = loop.step(*batch)
            if step % SAVE == 0:
                guard.save(step)
    return loop.digest()


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    for name in ("FTSUPERVISE_RUN_DIR", "RANK", "WORLD_SIZE", "SLURM_PROCID", "FTSUPERVISE_SNAPSHOTS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)
    return tmp_path / "ckpt"


SHAPES = {
    "dropout, noise and a shuffled loader": Shape(),
    "two workers": Shape(workers=2),
    "two workers that stay": Shape(workers=2, stay=True),
    "bfloat16": Shape(amp="bfloat16", data="own generator"),
    "float16 and a scaler that skips steps": Shape(amp="float16", data="weighted", rate="plateau"),
    "the sampler of one of two ranks": Shape(data="ranks", workers=2),
    "a stream without indices": Shape(data="stream"),
    "torchdata": Shape(data="stateful"),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_that_is_killed_five_times_ends_with_the_bits_of_an_undisturbed_one(
    checkpoints: Path, shape: Shape
) -> None:
    whole: dict[int, float] = {}
    digest = attempt(shape, checkpoints, STEPS, whole)
    shutil.rmtree(checkpoints)
    pieces: dict[int, float] = {}
    for stop in random.Random(repr(shape)).sample(range(1, STEPS), 5):
        attempt(shape, checkpoints, stop, pieces)
    end = attempt(shape, checkpoints, STEPS, pieces)
    assert pieces == whole
    assert end == digest


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loop_of_the_manual_goes_on_where_it_stopped(checkpoints: Path) -> None:
    (block,) = marked("run", "exact")
    begun = []
    for last in (5, 8):
        loop = Loop(Shape(), 1)
        names = {**loop.parts(), "data": Noisy(), "last": last, "train": lambda batch, loop=loop: loop.step(*batch)}
        exec(block.text, names)
        begun.append((names["start"], names["step"], names["batches"].epoch, names["batches"].taken))
    assert begun == [(None, 5, 2, 1), (5, 8, 3, 2)]  # two batches an epoch


class Killed(Exception):
    """The training ends in the middle of a step."""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loop_over_epochs_of_the_page_about_pytorch_goes_on_from_its_last_save(checkpoints: Path) -> None:
    (block,) = marked("run", "pytorch")
    seen: list[list[float]] = []

    def run(until: int) -> dict[str, Any]:
        def train(batch: Any) -> None:
            if len(seen) == until:
                raise Killed
            seen.append(batch[0].tolist())

        torch.manual_seed(3)
        net = nn.Linear(6, 3)
        names = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "train": train}
        names |= {"loader": DataLoader(Noisy().xs, 1, shuffle=True)}
        exec(block.text, names)
        return names

    with pytest.raises(Killed):
        run(130)
    done = run(530)
    assert done["step"] == 500 and len(seen) == 530  # ten epochs of fifty, and the thirty that were not saved twice
    assert seen[100:130] == seen[130:160]


def test_epochs_go_on_in_the_one_that_was_interrupted(checkpoints: Path) -> None:
    def epochs(stop: tuple[int, int] | None) -> list[tuple[int, list[float]]]:
        torch.manual_seed(3)
        batches, seen = Batches(DataLoader(Noisy().xs, 8, shuffle=True)), list[tuple[int, list[float]]]()
        with Guard(signals=()) as guard:
            guard.restore(batches=batches)
            for epoch in batches.epochs(4):
                for number, batch in enumerate(batches):
                    seen.append((epoch, batch[0].tolist()))
                    if (epoch, number) == stop:
                        guard.save(1)
                        return seen
        return seen

    whole = epochs(None)
    before = epochs((2, 3))
    after = epochs(None)
    assert len(whole) == 28 and len(before) == 18
    assert before + after == whole


def test_a_loader_that_is_not_wrapped_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"Batches\(loader\) of ftsupervise.integrations.torch_data keeps the place"):
        Guard(signals=()).restore(loader=DataLoader(Noisy(), 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", range(100))
def test_soak_any_loop_that_is_killed_anywhere_ends_with_the_same_bits(checkpoints: Path, number: int) -> None:
    chance = random.Random(number)
    data = chance.choice(["shuffled", "own generator", "weighted", "ranks", "stream", "stateful"])
    workers = chance.choice([0, 1, 3]) if data != "stateful" else 0
    stay = bool(workers) and chance.random() < 0.5
    shape = Shape(workers, stay, chance.choice(["", "bfloat16", "float16"]), data, chance.choice(["cosine", "plateau"]))
    test_a_loop_that_is_killed_five_times_ends_with_the_bits_of_an_undisturbed_one(checkpoints, shape)
