"""On a real GPU: killed, hung and short of memory, a training goes on to the same bits, and what happened is told as it was."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ftsupervise.model import CauseKind, FailureKind
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

torch = pytest.importorskip("torch") if importlib.util.find_spec("torch") else None
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(torch is None, reason="torch is not installed: make test-torch"),
    pytest.mark.skipif(torch is not None and not torch.cuda.is_available(), reason="no GPU that torch can use"),
]
ENV = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}

# Half precision with a scaler, dropout, a generator of its own on the GPU. The file named by its argument holds "step what"
# lines: what befalls the loop at that step, once.
TRAIN = """
import hashlib, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from ftsupervise import Guard

faults, steps = Path(sys.argv[1]), int(sys.argv[2])
ddp = len(sys.argv) > 3
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
wide = 512
net = nn.Sequential(nn.Linear(wide, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Dropout(0.1),
                    nn.Linear(wide, wide), nn.ReLU(), nn.Dropout(0.1), nn.Linear(wide, 10)).cuda()
loop = net
if ddp:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    loop = nn.parallel.DistributedDataParallel(net, device_ids=[0])
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=3)
draw = torch.Generator(device="cuda").manual_seed(1)

def befalls(step):
    lines = faults.read_text().splitlines() if faults.exists() else []
    for line in lines:
        at, what = line.split()
        if int(at) == step:
            faults.write_text("".join(other + chr(10) for other in lines if other != line))
            return what
    return ""

def one_pass():
    loop(torch.zeros(64, wide, device="cuda")).sum().backward()

with Guard(poll=0.05, beat_every=0.05) as guard:
    start = guard.restore(model=net, optimizer=optimizer, scaler=scaler, draw=draw, warm_up=one_pass if ddp else None) or 0
    print("from", start, flush=True)
    for step in range(start + 1, steps + 1):
        x = torch.randn(64, wide, device="cuda", generator=draw)
        y = torch.randint(0, 10, (64,), device="cuda", generator=draw)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(loop(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        what = befalls(step)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "spin":  # a kernel that does not end, as a collective that waits for a dead peer
            torch.cuda._sleep(10**14)
            torch.cuda.synchronize()
        elif what == "oom":
            torch.zeros(1 << 50, device="cuda")
        elif what == "fill":
            torch.cuda.empty_cache()
            kept = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.97), dtype=torch.uint8, device="cuda")
        elif what == "reserve":  # given back to torch, not to the driver: not short of memory
            torch.empty(int(torch.cuda.mem_get_info()[0] * 0.97), dtype=torch.uint8, device="cuda")
        elif what == "assert":  # a fault that poisons the context: all CUDA calls fail from here on
            torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]
            torch.cuda.synchronize()
        decision = guard.step(step)
        guard.loss(loss)
        guard.snapshot(step)
        if decision.save:
            guard.save(step)
        if decision.stop:
            print("leaves at", step, flush=True)
            break
        time.sleep(0.005)
    else:
        sums = hashlib.sha256()
        moments = [one for state in optimizer.state.values() for one in state.values()]
        for tensor in [*net.state_dict().values(), *moments, torch.rand(3, device="cuda"), torch.rand(3)]:
            sums.update(tensor.detach().cpu().numpy().tobytes())
        print("end", sums.hexdigest(), scaler.get_scale(), flush=True)
        guard.finished(steps)
"""


def trained(
    run: SupervisedRun, *faults: str, steps: int = 200, ddp: bool = False, options: tuple[str, ...] = ()
) -> str:
    """Train to the end, with these faults on the way. Returns what the job printed."""
    (run.folder / "train.py").write_text(TRAIN)
    (run.folder / "faults").write_text("".join(f"{one}\n" for one in faults))
    words = [sys.executable, "train.py", "faults", str(steps), *(["ddp"] if ddp else [])]
    member = run.start("--in-place", "10", "--back-off", "0", *options, "--", *words, **ENV)
    code = member.wait(180)
    assert code == 0, member.said() + run.log()
    return member.said()


def digest(said: str) -> str:
    return said.rpartition("\nend ")[2].partition("\n")[0]


@pytest.fixture
def undisturbed(tmp_path: Path) -> str:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    one = SupervisedRun(folder / "run", folder)
    try:
        return digest(trained(one))
    finally:
        one.close()


@pytest.mark.parametrize("warm", ["off", "torch"])
def test_a_loop_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    run: SupervisedRun, undisturbed: str, warm: str
) -> None:
    said = trained(run, "60 kill", "61 kill", "130 kill", options=("--warm", warm))
    assert digest(said) == undisturbed
    begun = [int(one) for one in re.findall("^from ([0-9]+)$", said, re.M)]
    assert len(begun) == 4 and all(at - 3 < start <= at for at, start in zip((60, 61, 130), begun[1:], strict=True)), (
        begun
    )


def test_a_group_with_nccl_ends_with_the_bits_of_an_undisturbed_one(run: SupervisedRun, tmp_path: Path) -> None:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    one = SupervisedRun(folder / "run", folder)
    try:
        expected = digest(trained(one, ddp=True))
    finally:
        one.close()
    assert digest(trained(run, "60 kill", "130 kill", ddp=True)) == expected


def test_a_kernel_that_never_ends_is_a_hang_and_the_next_attempt_ends_with_the_same_bits(
    run: SupervisedRun, undisturbed: str
) -> None:
    said = trained(run, "150 spin", options=("--hang", "3"))
    assert digest(said) == undisturbed
    first = run.attempts()[0]
    assert first.failure is not None and first.failure.kind is FailureKind.HANG, first


def test_a_tensor_too_large_is_told_as_memory_of_the_gpu(run: SupervisedRun, undisturbed: str) -> None:
    assert digest(trained(run, "60 oom")) == undisturbed
    first = run.attempts()[0]
    assert first.failure is not None and first.failure.kind is FailureKind.MEMORY, first
    assert first.failure.sign == "GPU out of memory" and "CUDA out of memory" in first.failure.detail, first


def test_a_fault_that_poisons_the_device_for_the_process_costs_one_attempt(
    run: SupervisedRun, undisturbed: str
) -> None:
    said = trained(run, "60 assert")
    assert digest(said) == undisturbed
    assert "device-side assert" in run.attempts()[0].why(), run.attempts()[0]


def test_a_gpu_that_is_short_of_memory_makes_the_loop_save_and_leave_and_a_reserve_does_not(run: SupervisedRun) -> None:
    said = trained(run, "60 reserve", "2000 fill", steps=3000, options=("--guard-gpu-memory", "0.9"))
    first, last = run.attempts()
    assert last.words == "finished", last
    assert first.saved is not None and first.saved > 2000 and f"leaves at {first.saved}" in said, said
    assert first.cause is not None and first.cause.kind is CauseKind.GPU_MEMORY and "memory of GPU 0" in first.words, (
        first
    )
    assert "memory of GPU 0" in typed("status", run.rundir.root).stdout
