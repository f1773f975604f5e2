"""Who ends the command when ``ftsupervise run`` itself is killed and can no longer do it.

Slurm ends a job whose batch script is gone, with all its processes; on this machine, in an interactive allocation, or with a
script that goes on after it, nobody would, and a command that is deaf to SIGTERM would train on for ever. A shell of a
megabyte waits at a pipe that ends with the supervisor, however that ends. It then tells all that inherited the attempt's
environment to leave, whatever they did with sessions and groups, and ends what has not left within the grace.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ftsupervise.host.processes import SHELL_MARKED, end_child
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

# The last line read is what to end, "" if nothing is. Zombies have no environment, so they are not waited for.
_SHELL = f"""trap '' TERM INT HUP QUIT; grace=$1; mark=
while IFS= read -r line; do mark=$line; done
[ -n "$mark" ] || exit 0
tell() {{
  pids=$({SHELL_MARKED})
  [ -n "$pids" ] && kill -s "$1" $pids 2>/dev/null
  [ -n "$pids" ]
}}
tell CONT; tell TERM
while [ "$grace" -gt 0 ] && tell 0; do sleep 1; grace=$((grace - 1)); done
tries=50
while [ "$tries" -gt 0 ] && tell KILL; do sleep 0.1; tries=$((tries - 1)); done
"""


class OrphanReaper:
    """The shell. ``grace``: seconds between SIGTERM and SIGKILL."""

    def __init__(self, grace: float) -> None:
        self.pid: int | None = None
        read, self._write = os.pipe2(os.O_CLOEXEC)
        try:
            shell = subprocess.Popen(
                ["sh", "-c", _SHELL, "ftsupervise-minder", f"{grace:.0f}"],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                start_new_session=True,
            )
        except OSError:  # no shell, no memory: the run is what counts
            return
        finally:
            os.close(read)
        shell.returncode = 0  # reaped with everything else that is ours
        self.pid = shell.pid

    def mind(self, attempt_dir: Path | None) -> None:
        """From now on this attempt's processes are to be ended when we die; None: nobody's."""
        text = f"{ENV_ATTEMPT_DIR}={attempt_dir}" if attempt_dir is not None else ""
        try:
            os.write(self._write, (text if "\n" not in text else "").encode() + b"\n")
        except OSError:  # somebody has ended it
            return

    def stop(self) -> None:
        if self._write < 0:
            return
        os.close(self._write)
        self._write = -1
        if self.pid is None:
            return
        end_child(self.pid)
        self.pid = None
