"""The same ranks as replica groups of torchft, one rank each: when one fails the others go on, and no step is made again.

It needs another loop (a quorum before each step, a vote after it), replicas that hold everything, and a lighthouse. Here nobody
starts the lost group again: that is another program's work.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo


class Groups:
    def __init__(self, weights: torch.Tensor) -> None:
        self.rank = int(os.environ["SLURM_PROCID"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        patience = timedelta(seconds=float(os.environ["RECOVERY_GLOO_TIMEOUT"]))
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=patience),
            min_replica_size=1,
            load_state_dict=lambda state: weights.copy_(state["weights"]),
            state_dict=lambda: {"weights": weights},
            replica_id=f"group-{self.rank}",
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
        )

    def reduce(self, grain: torch.Tensor, step: int) -> int | None:
        """The step that was made; None: it was not, and is to be made again."""
        self._manager.start_quorum()
        self._manager.allreduce(grain).wait()
        return self._manager.current_step() if self._manager.should_commit() else None
