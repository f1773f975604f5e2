"""The four examples share this part, which has nothing to do with replica groups: the data, the network, the options."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn


def started(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 as rows of 64, and their labels: the file scikit-learn ships, without importing it."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this example trains on the digits that scikit-learn ships: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.tensor([[float(word) for word in line.split(",")] for line in file])
    return table[:, :64] / 16, table[:, 64].long()


def slowly(args: argparse.Namespace) -> None:
    """The time that a larger network would compute."""
    time.sleep(args.step_time)


def told(args: argparse.Namespace, manager: Any, loss: torch.Tensor, net: nn.Module) -> None:
    """One line after a step that the groups have committed. With LocalSGD and DiLoCo many iterations make one step."""
    step = manager.current_step()
    if manager.has_committed and step % args.log_every == 0:
        present = f"{manager.num_participants()} of {manager.groups} groups"
        print(f"{manager.group}: step {step}, {present}, loss {loss.item():.4f}, weights {digest(net)}", flush=True)


def digest(net: nn.Module) -> str:
    """The same for the same weights, bit for bit."""
    weights = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in net.parameters()]  # of FSDP
    parts = [part.detach().cpu().contiguous().numpy().tobytes() for part in weights]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-time", type=float, default=0.02, help="seconds each step is slowed by")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument(
        "--sync-every", type=int, default=10, help="steps between two synchronisations (LocalSGD, DiLoCo)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
