"""Replica groups whose ranks share one copy of the model with FSDP2 (HSDP): FSDP reduces the gradients within a group, and
every rank averages its shard with the same rank of the other groups.

The lines marked GROUPS are what makes replica groups of it; the rest is what any such training has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import arguments, digits, network, slowly, started, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Optimizer  # GROUPS

from ftsupervise.integrations.torchft import ReplicaManager  # GROUPS

BATCH = 32


def main() -> None:
    args = arguments(__doc__)
    started(args)
    images, labels = digits()
    dist.init_process_group("gloo")  # the ranks of this group alone
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = network()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    inner = torch.optim.AdamW(net.parameters(), lr=0.003)
    manager = ReplicaManager(model=net, optimizer=inner)  # GROUPS
    optimizer = Optimizer(manager, inner)  # GROUPS

    for step in manager.steps(args.steps, save_every=args.save_every):  # GROUPS
        mine = (args.seed * 1_000_003 + step * 1009 + manager.index) * ranks + rank
        rows = torch.randint(len(images), (BATCH // ranks,), generator=torch.Generator().manual_seed(mine))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
        slowly(args)
        loss.backward()
        for work in [manager.allreduce(part.grad.to_local()) for part in net.parameters()]:  # GROUPS
            work.wait()
        optimizer.step()
        told(args, manager, loss, net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
