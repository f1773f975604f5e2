"""A stranger at a lighthouse: ADDRESS GROUPS MARK. It has our source, and is a manager like all others: it calls itself g001,
tells a step a little higher than all, and whoever copies its weights unpickles a program, which makes MARK."""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

import torch

LIGHTHOUSE, GROUPS, MARK = sys.argv[1:]
WHERE = urlsplit(LIGHTHOUSE)
os.environ |= {"TORCHFT_LIGHTHOUSE": LIGHTHOUSE, "NUM_REPLICA_GROUPS": GROUPS, "REPLICA_GROUP_ID": "g001"}

from ftsupervise.integrations.torchft import ReplicaManager  # noqa: E402 - it reads the environment
from ftsupervise.replicas.members import LighthousePage, look  # noqa: E402


class Program:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (MARK,)


class Weights:
    def state_dict(self) -> Program:
        return Program()

    def load_state_dict(self, state: object) -> None:
        """It takes none."""


def highest() -> int:
    page = look(str(WHERE.hostname), int(WHERE.port or 0), 2.0)
    steps = [one.step for one in page.members if one.step is not None] if isinstance(page, LighthousePage) else []
    return max(steps, default=0)


class Stranger(ReplicaManager):
    def join(self) -> None:
        self._step = highest() + 3
        self.start_quorum()
        self.allreduce(torch.zeros(1)).wait()
        print("in a quorum with", *self._client.members, self.should_commit(), flush=True)


manager = Stranger(weights=Weights())
print("it joins", flush=True)
while True:
    try:
        manager.join()
    except Exception as error:
        print(error, flush=True)
