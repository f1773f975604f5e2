"""scrontab and crontab, where a cluster has them: our lines in a block of the person's own table, and nothing else touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from shlex import join

from ftsupervise.crontab import chain
from ftsupervise.crontab.installation import CronDir, Installed, user_name
from ftsupervise.errors import CannotWrite, Error, NotFound, UsageError
from ftsupervise.host import bounded
from ftsupervise.units import format_slurm_time

TABLES = ("crontab", "scrontab")
_BEGIN, _END = "# begin ftsupervise cron ", "# end ftsupervise cron "
_TIMEOUT = 60.0
_NOT_FOR_SCRON = ("--no-requeue",)  # Slurm itself requeues such a job for its next time


def block(cron: CronDir, installed: Installed) -> str:
    """Our lines, between marks; "" for another back end. Raises UsageError for a period that five fields cannot say."""
    if installed.backend not in TABLES:
        return ""
    command = join(chain.command(cron, installed)).replace("%", "\\%")
    options = chain.directives(cron, installed) if installed.backend == "scrontab" else ()
    head = [f"#SCRON {option}" for option in options if option not in _NOT_FOR_SCRON]
    line = f"{every(installed.period)} {command} >/dev/null 2>&1"
    return "\n".join([_BEGIN + installed.id, *head, line, _END + installed.id]) + "\n"


def every(period: timedelta) -> str:
    """ "*/5 * * * *" for 5m, "* * * * *" for 1m, "0 */2 * * *" for 2h."""
    minutes, rest = divmod(period, timedelta(minutes=1))
    if not rest and minutes and (60 % minutes == 0 or (minutes % 60 == 0 and 24 % (minutes // 60) == 0)):
        if minutes == 1:  # scrontab does not take */1
            return "* * * * *"
        if minutes < 60:
            return f"*/{minutes} * * * *"
        return "0 * * * *" if minutes == 60 else f"0 */{minutes // 60} * * *"
    raise UsageError(
        f"a table of five fields cannot say every {format_slurm_time(period)}",
        hint="use a period that divides an hour or a day in whole minutes, such as 5m",
    )


def with_block(table: str, chain: str, ours: str) -> str:
    """``table`` with our block in place of the one it had; with ``ours`` empty, without it."""
    rest = _block_of(chain).sub("", table)
    if rest and not rest.endswith("\n"):
        rest += "\n"
    return rest + ours


def put(installed: Installed, ours: str) -> None:
    """Our block in the person's table is ``ours`` from now on; "" takes it away. Raises as ``read``, and CannotWrite."""
    if installed.backend not in TABLES:
        return
    table = read(installed)
    wanted = with_block(table, installed.id, ours)
    if wanted == table:
        return
    done = _run([installed.backend, "-"], installed.environment, stdin=wanted)
    if done.code != 0:
        raise CannotWrite(f"{installed.backend} did not take the table: {done.words()}", hint="nothing was changed")


def lost(installed: Installed) -> str:
    """What has become of our lines in the person's table; "" when they are there, were removed, or are in a table that cannot
    be seen from here, as another account's or another machine's.

    ``scancel`` of a job of scrontab's puts ``#DISABLED:`` before the lines it came from. Raises as ``read`` does.
    """
    program = installed.backend
    elsewhere = program == "crontab" and installed.note.get("host") != os.uname().nodename
    if program not in TABLES or elsewhere or installed.removed or installed.owner != user_name():
        return ""
    match = _block_of(installed.id).search(read(installed))
    if match is None:
        return f"its lines are no longer in your {program}"
    lines = [line for line in match[0].splitlines()[1:-1] if not line.startswith("#SCRON")]
    if any(line.startswith("#DISABLED") for line in lines) or not any(line[:1] not in ("#", "") for line in lines):
        return f"its lines in your {program} are disabled, as scancel does it"
    return ""


def _block_of(chain: str) -> re.Pattern[str]:
    off = r"^(?:#DISABLED: )*"
    return re.compile(rf"{off}{re.escape(_BEGIN + chain)}\n.*?{off}{re.escape(_END + chain)}\n?", re.M | re.S)


def read(installed: Installed) -> str:
    """The person's table; "" when there is none. Raises NotFound where the cluster has no such program, Error."""
    program = installed.backend
    done = _run([program, "-l"], installed.environment)
    said = done.stderr + done.stdout
    if done.code == 0:
        return done.stdout
    if re.search(r"no crontab", said, re.I):
        return ""
    if re.search(r"not enabled|disabled|not supported|Unknown command|not allowed", said, re.I):
        raise NotFound(f"{program} is there and not in use here: {done.words()}", hint="--backend slurm, or loop")
    raise Error(f"{program} -l failed: {done.words()}", hint="nothing was changed")


def _run(argv: list[str], env: Mapping[str, str], stdin: str | None = None) -> bounded.CompletedCommand:
    try:
        return bounded.run(argv, timeout=_TIMEOUT, env=env, stdin=stdin)
    except (FileNotFoundError, PermissionError):
        raise NotFound(f"there is no {argv[0]} on this machine's PATH", hint="--backend slurm, or loop") from None
