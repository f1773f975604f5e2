"""Watchers as real processes that can be killed at any instant: a server that forks one for each tick.

Forked, because a thousand schedules of ticks would spend an hour in imports. A child counts the calls that leave the
process (files opened for writing, links, connections, bytes sent: Python's own audit events) and kills itself with
SIGKILL at the n-th, or is killed from outside after some milliseconds.

    {"now": ISO, "children": [{"dir", "config", "looks": {"a": true, "b": null}, "kill_at", "kill_after"}]}  ->  [true, false]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TEMPLATES = (
    ("alert.text.j2", "text"),
    ("alert.subject.j2", "text"),
    ("alert.slack.j2", "slack"),
    ("alert.json.j2", "json"),
)
LEAVING = ("os.link", "os.remove", "socket.connect", "smtplib.send", "http.client.send")


class Watchers:
    """``with Watchers() as watchers:`` then ``watchers.tick(now, children)``: which of them lived to the end."""

    def __enter__(self) -> Watchers:
        command = [sys.executable, "-m", "tests.story.alerting_forks"]
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()

    def tick(self, now: datetime, children: list[dict[str, Any]]) -> list[bool]:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps({"now": now.isoformat(), "children": children}) + "\n")
        self._server.stdin.flush()
        lived: list[bool] = json.loads(self._server.stdout.readline())
        return lived


def _child(now: datetime, about: dict[str, Any]) -> None:
    from ftsupervise.alerts.deliver import deliver
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.record import record
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.findings import Finding, Severity
    from ftsupervise.truth import Health

    if about.get("kill_at") is not None:
        _die_at(int(about["kill_at"]))
    random.seed(about["seed"])
    home = Path(about["dir"])
    journal = Journal(home / "journal", spare=home / "private" / "spare")
    alerts = Alerts.model_validate_json(Path(about["config"]).read_text())
    healths = {True: Health.BAD, False: Health.OK, None: Health.UNKNOWN}
    findings = [
        Finding(home.name, "disk", name, healths[look], Severity.CRITICAL, f"{name} is full", now)
        for name, look in about["looks"].items()
    ]
    record(journal, findings, alerts, now, run_name=home.name)
    deliver([journal], alerts, now)
    if journal.problems or journal.unsaved:
        raise AssertionError(journal.problems or journal.unsaved)


def _die_at(count: int) -> None:
    left = [count]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        leaves = event in LEAVING or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT)
        if leaves:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _fork(now: datetime, about: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _child(now, about)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], after: list[float | None]) -> list[bool]:
    start = time.monotonic()
    ends: dict[int, int] = {}
    while len(ends) < len(pids):
        for pid, limit in zip(pids, after, strict=True):
            if pid in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = status
            elif limit is not None and time.monotonic() - start > limit:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    if any(os.WIFEXITED(s) and os.WEXITSTATUS(s) for s in ends.values()):
        raise AssertionError("a watcher raised")
    return [ends[pid] == 0 for pid in pids]


def main() -> None:
    import ftsupervise.alerts.receivers.email
    import ftsupervise.alerts.receivers.slack
    import ftsupervise.alerts.receivers.webhook
    import ftsupervise.alerts.record
    import ftsupervise.config.alerting  # noqa: F401
    from ftsupervise.alerts.wording import Parcel, incident, render

    message = next(incident("warm", "", datetime.now().astimezone()))
    for template, kind in _TEMPLATES:
        render(template, Parcel(message, message.created), kind=kind)
    __import__("slack_sdk.webhook")
    for line in sys.stdin:
        order = json.loads(line)
        now = datetime.fromisoformat(order["now"])
        pids = [_fork(now, about) for about in order["children"]]
        print(json.dumps(_wait(pids, [about.get("kill_after") for about in order["children"]])), flush=True)


if __name__ == "__main__":
    main()
