"""Two ranks of DDP meet a batch that makes their weights no numbers: they go back, leave it out, and train to the end."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from ftsupervise.model import CauseKind
from tests.neighbours.supervised import SupervisedRun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
# A checkpoint every 10 steps, a snapshot every 2. Batch 45 of rank 1 is broken, and the gradients are summed: after it the
# weights of both are no numbers.
TRAIN = """
import os, sys
os.environ.update(WORLD_SIZE="2", RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["FTSUPERVISE_MASTER_PORT"])
child = os.fork()
rank = 0 if child else 1
os.environ["RANK"] = str(rank)
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ftsupervise import Guard

def train():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    place = {"batch": 0}
    guard = Guard(poll=0.02)
    first = guard.restore(model=model, optimizer=optimizer, place=place) or 0
    place["batch"] += guard.skip
    print(f"rank {rank} begins after {first} at batch {place['batch']}", flush=True)
    for step in range(first + 1, 201):
        place["batch"] += 1
        draw = torch.Generator().manual_seed(place["batch"])
        x = torch.randn(8, 16, generator=draw)
        if place["batch"] == 45 and rank == 1:
            x[3] = float("inf")
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guard.loss(loss.item())
        guard.snapshot(step)
        decision = guard.step(step)
        if decision.save or step % 10 == 0:
            guard.save(step)
        if decision.stop:
            print(f"rank {rank} leaves at {step}", flush=True)
            break
    else:
        whole = all(bool(torch.isfinite(one).all()) for one in model.parameters())
        print(f"rank {rank} ends with loss {loss.item():.6f}, whole {whole}", flush=True)
        guard.finished(200)
    guard.close()

dist.init_process_group("gloo")
train()
dist.destroy_process_group()
sys.stdout.flush()
if child:
    os.waitpid(child, 0)
else:
    os._exit(0)
"""


def test_two_ranks_whose_weights_are_no_numbers_any_more_go_back_and_train_to_the_end(run: SupervisedRun) -> None:
    words = ("--in-place", "5", "--back-off", "0", "--warm", "off", "--loss-nonfinite", "resume", "--loss-back", "10")
    code = run.start(*words, "--", sys.executable, "-c", TRAIN).wait(240)
    said = run.members[0].said()
    assert code == 0, said
    first, last = run.attempts()
    assert first.cause is not None and first.cause.kind is CauseKind.NOT_A_NUMBER, said
    assert first.trouble is not None and first.trouble.since == 45, first
    left = {match[1] for match in re.finditer(r"rank \d leaves at (\d+)", said)}
    assert len(left) == 1 and said.count("leaves at") == 2, said
    assert last.resumed is not None and last.resumed.checkpoint == "step-00000030", said
    batch = int(left.pop())
    assert last.resumed.skip == batch - 30
    assert all(f"rank {rank} begins after 30 at batch {batch}" in said for rank in (0, 1)), said
    assert said.count("whole True") == 2 and last.words == "finished", said


def test_a_loss_that_still_has_its_gradient_is_read_without_a_warning(run: SupervisedRun) -> None:
    """``guard.loss(loss)`` is what a loop says whose author has not read that it wants a float."""
    code = """
import warnings, torch
from ftsupervise import Guard
warnings.simplefilter("error")
with Guard() as guard:
    for step in range(1, 4):
        guard.loss(torch.ones((), requires_grad=True) * step)
        guard.step(step)
    guard.finished(3)
"""
    done = run.start(sys.executable, "-c", code)
    assert done.wait(60) == 0, done.said()
    assert run.attempts()[0].first_loss == 1.0 and "takes a number" not in done.said(), done.said()
