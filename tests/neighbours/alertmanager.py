"""A real Alertmanager on this machine, alone, whose ``resolve_timeout`` is short. A test tool."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")


class Alertmanager:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v2/alerts"

    def firing(self) -> list[dict[str, Any]]:
        """The alerts that it holds to be active now."""
        answer = requests.get(self.url, params={"active": "true"}, timeout=10)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found


@contextmanager
def alertmanager(folder: Path, resolve_timeout: str = "2s") -> Iterator[Alertmanager]:
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    (folder / "am.yml").write_text(
        f"global: {{resolve_timeout: {resolve_timeout}}}\nroute: {{receiver: none}}\nreceivers: [{{name: none}}]\n"
    )
    words = [PROGRAM, f"--config.file={folder}/am.yml", f"--storage.path={folder}/data", "--cluster.listen-address="]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        one, until = Alertmanager(port), time.monotonic() + 60
        while True:
            try:
                one.firing()
                break
            except requests.RequestException:
                assert server.poll() is None and time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.1)
        yield one
    finally:
        server.terminate()
        server.wait(30)
