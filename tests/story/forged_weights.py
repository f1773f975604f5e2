"""A stranger who speaks to the managers of a run: MARK LIGHTHOUSE ADDRESS …. It joins nothing. It tells each manager, as a rank
of its group does at each step, where that rank's weights are: at this process, which gives a pickle that runs a program, which
makes MARK."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from torch.distributed._serialization import _streaming_save
from torchft._torchft import ManagerClient

from ftsupervise.replicas.members import LighthousePage, look

MARK, LIGHTHOUSE, *MANAGERS = sys.argv[1:]
WHERE = urlsplit(LIGHTHOUSE)


class Program:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (MARK,)


class Weights(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        print("asked for", self.path, flush=True)
        self.send_response(200)
        self.end_headers()
        _streaming_save({"user": Program()}, self.wfile)


def highest() -> int:
    page = look(str(WHERE.hostname), int(WHERE.port or 0), 2.0)
    steps = [one.step for one in page.members if one.step is not None] if isinstance(page, LighthousePage) else []
    return max(steps, default=0)


def tell(address: str, weights: str) -> None:
    """Again and again: the rank itself tells where its weights are at each step."""
    client = ManagerClient(address, connect_timeout=timedelta(seconds=5))
    while True:
        try:
            client._quorum(
                group_rank=0,
                step=highest(),
                checkpoint_metadata=weights,
                shrink_only=False,
                timeout=timedelta(milliseconds=20),
                init_sync=False,
                commit_failures=0,
            )
        except Exception as error:
            if not isinstance(error, TimeoutError):
                print(type(error).__name__, error, flush=True)
        time.sleep(0.02)


server = ThreadingHTTPServer(("127.0.0.1", 0), Weights)
threading.Thread(target=server.serve_forever, daemon=True).start()
told = [
    threading.Thread(target=tell, args=(one, f"http://127.0.0.1:{server.server_port}/checkpoint/")) for one in MANAGERS
]
for one in told:
    one.start()
print("it tells", *MANAGERS, flush=True)
for one in told:
    one.join()
