"""Replica groups with DistributedDataParallel: in every step the groups average their gradients, and one may fail at any time.

The lines marked GROUPS are what makes replica groups of it; the rest is what any such training has.
"""

from __future__ import annotations

import torch
from common import arguments, digits, network, slowly, started, told
from torch import nn
from torchft import Optimizer  # GROUPS

from ftsupervise.integrations.torchft import DistributedDataParallel, ReplicaManager  # GROUPS

BATCH = 32


def main() -> None:
    args = arguments(__doc__)
    started(args)
    images, labels = digits()
    net = network()
    inner = torch.optim.AdamW(net.parameters(), lr=0.003)
    manager = ReplicaManager(model=net, optimizer=inner)  # GROUPS
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)  # GROUPS

    for step in manager.steps(args.steps, save_every=args.save_every):  # GROUPS
        batch = torch.Generator().manual_seed(args.seed * 1_000_003 + step * 1009 + manager.index)
        rows = torch.randint(len(images), (BATCH,), generator=batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        slowly(args)
        loss.backward()
        optimizer.step()
        told(args, manager, loss, net)


if __name__ == "__main__":
    main()
