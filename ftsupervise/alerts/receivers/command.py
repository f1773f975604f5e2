"""Starts a program of the user's own: the text is on its standard input, the subject of the message in its environment.

No shell is used: names that strangers chose arrive as text, never as code. Exit code 0 means delivered; 75 (EX_TEMPFAIL)
and everything else means "try again", but 64, 65, 77 and 78 (EX_USAGE, EX_DATAERR, EX_NOPERM, EX_CONFIG), by which it
says that it will never work. A program that is not there or cannot be run (126, 127) may be on a file system that is
away for a moment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftsupervise.alerts.receivers import Broken, Doubtful, TryLater, redact
from ftsupervise.alerts.wording import Parcel, render
from ftsupervise.host import bounded
from ftsupervise.host.begin import on_path
from ftsupervise.host.in_time import in_time

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Command


_WITHIN = 5.0  # seconds for the file of the program to answer


def send(parcel: Parcel, settings: Command) -> dict[str, str]:
    environment = {
        **os.environ,
        "FTSUPERVISE_ALERT_KEY": parcel.id,
        "FTSUPERVISE_ALERT_RUN": parcel.run,
        "FTSUPERVISE_ALERT_SEVERITY": parcel.severity,
        "FTSUPERVISE_ALERT_TITLE": parcel.title,
        "FTSUPERVISE_ALERT_STATE": ",".join(dict.fromkeys(item.reason for item in parcel.items)),
    }
    program, bound = settings.argv[0], settings.timeout.total_seconds()
    if in_time(lambda: _looked_at(program), _WITHIN) is None:  # its start would wait too, and could not be given up
        raise TryLater(f"{program} does not answer within {_WITHIN:.0f} s: its file system hangs")
    text = render("alert.text.j2", parcel.alone).encode("utf-8", "replace").decode()
    try:
        done = bounded.run(settings.argv, timeout=bound, env=environment, stdin=text, output_limit=0)
    except FileNotFoundError:
        raise Doubtful(f"{program}: no such program") from None
    except OSError as error:
        raise TryLater(f"{program}: {error.strerror or error}") from None
    if done.code is None:
        raise TryLater(f"{program}: took longer than {bound:g}s")
    if done.code == 0:
        return {}
    why = redact(f"{program}: exit {done.code}: {done.stderr[-500:]}")
    if done.code in (64, 65, 77, 78):
        raise Broken(why)
    raise Doubtful(why) if done.code in (126, 127) else TryLater(why)


def _looked_at(program: str) -> bool:
    """Read a byte of it, as the kernel does to begin it. A hung file system gives no answer; what is wrong otherwise is told
    when it is begun."""
    try:
        fd = os.open(on_path(program) or program, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(os.read(fd, 1))
    except OSError:
        return False
    finally:
        os.close(fd)
