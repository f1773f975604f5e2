"""A program of the user's own: the text on its standard input, what it is about in its environment.

No shell: what strangers named arrives as text, never as code. Exit code 0 means taken; 75 (EX_TEMPFAIL) and everything
else means "try again", but 64, 65, 77 and 78 (EX_USAGE, EX_DATAERR, EX_NOPERM, EX_CONFIG), by which it says that it will
never work. A program that is not there or cannot be run (126, 127) may be on a file system that is away for a moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from ftsupervise.alerts import secrets
from ftsupervise.alerts.receivers import Broken, Doubtful, Parcel, TryLater
from ftsupervise.alerts.wording import render, view

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Command


def send(parcel: Parcel, settings: Command) -> dict[str, str]:
    message = parcel.message
    seen = view(message, parcel.now)
    environment = {
        **os.environ,
        "FTSUPERVISE_ALERT_KEY": message.id,
        "FTSUPERVISE_ALERT_RUN": message.run,
        "FTSUPERVISE_ALERT_SEVERITY": seen.severity,
        "FTSUPERVISE_ALERT_TITLE": seen.title,
        "FTSUPERVISE_ALERT_STATE": ",".join(dict.fromkeys(item.reason for item in seen.items)),
    }
    try:
        child = subprocess.Popen(
            settings.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise Doubtful(f"{settings.argv[0]}: no such program") from None
    except OSError as error:
        raise TryLater(f"{settings.argv[0]}: {error.strerror or error}") from None
    try:
        text = render("alert.text.j2", seen, own=parcel.templates).encode("utf-8", "replace")
        _, errors = child.communicate(text, timeout=settings.timeout.total_seconds())
    except subprocess.TimeoutExpired:
        _end(child)
        raise TryLater(f"{settings.argv[0]}: took longer than {settings.timeout.total_seconds():g}s") from None
    if child.returncode == 0:
        return {}
    why = secrets.redact(f"{settings.argv[0]}: exit {child.returncode}: {errors.decode('utf-8', 'replace')[-500:]}")
    if child.returncode in (64, 65, 77, 78):
        raise Broken(why)
    raise Doubtful(why) if child.returncode in (126, 127) else TryLater(why)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the program and what it started; one that cannot be killed is left, not waited for."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(0.5)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass
    for pipe in (child.stdin, child.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass
