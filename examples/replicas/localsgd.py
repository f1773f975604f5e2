"""Replica groups with LocalSGD: each trains by itself, and every few steps they average their weights.

The lines marked GROUPS are what makes replica groups of it; the rest is what any such training has.
"""

from __future__ import annotations

import torch
from common import arguments, digits, network, slowly, started, told
from torch import nn
from torchft.local_sgd import LocalSGD  # GROUPS

from ftsupervise.integrations.torchft import ReplicaManager  # GROUPS

BATCH = 32


def main() -> None:
    args = arguments(__doc__)
    started(args)
    images, labels = digits()
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    seen = {"batches": 0}
    manager = ReplicaManager(use_async_quorum=False, model=net, optimizer=optimizer, seen=seen)  # GROUPS

    with LocalSGD(manager, net, optimizer, sync_every=args.sync_every):  # GROUPS
        for _ in manager.steps(args.steps // args.sync_every, save_every=args.save_every):  # GROUPS
            batch = torch.Generator().manual_seed(args.seed * 1_000_003 + seen["batches"] * 1009 + manager.index)
            rows = torch.randint(len(images), (BATCH,), generator=batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
            slowly(args)
            loss.backward()
            seen["batches"] += 1
            optimizer.step()  # synchronises when it is due
            told(args, manager, loss, net)


if __name__ == "__main__":
    main()
