"""A real Chromium, driven by its DevTools protocol over a pipe: no port that others could reach, no driver to install."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--font-render-hinting=none", "--remote-debugging-pipe"),
)
# the browser reads its file descriptor 3 and writes 4
_BEGIN = "import os, sys; a, b, *c = sys.argv[1:]; os.dup2(int(a), 3); os.dup2(int(b), 4); os.execv(c[0], c)"


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. ``errors``: what its console and its policy complained of; ``asked``: what it fetched."""

    def __init__(self, folder: Path | None = None) -> None:
        program = find()
        assert program is not None
        self._home = tempfile.mkdtemp(prefix="chromium-", dir=folder)
        down, up = os.pipe(), os.pipe()
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (down[0], up[1]))
        words = [program, *_FLAGS, f"--user-data-dir={self._home}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _BEGIN, str(reads), str(writes), *words],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        for fd in (down[0], up[1], reads, writes):
            os.close(fd)
        self._write, self._read, self._buffer, self._number = down[1], up[0], b"", 0
        self.errors: list[str] = []
        self.asked: list[str] = []
        self._heard: list[str] = []
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        try:
            self._session = ""
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer within 30 seconds."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + 30
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], f"Chromium has not answered: {what}"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._hear(message)
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self._heard.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, path: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self.errors, self.asked, self._heard = [], [], []
        self.call("Page.navigate", url=path.absolute().as_uri())
        until = time.monotonic() + 30
        while "Page.loadEventFired" not in self._heard:
            self._next(until, f"open {path}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        """ "dark" or "light"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, height: int | None = None) -> bytes:
        """The page as a PNG, to ``height`` pixels, or to its end."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(made["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
