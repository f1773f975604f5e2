"""While a run trains, it looks after the cron that watches it, as that cron looks after the run.

A shell of a megabyte beside the attempts types ``ftsupervise cron ensure --run RUN`` once a period, bounded: the supervisor
itself loads no settings, asks no scheduler and sends no mail. It ends with the supervisor, however that ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ftsupervise.host import interpreter
from ftsupervise.host.processes import die_with_parent, end_child

ENV_EVERY = "FTSUPERVISE_KEEPER_SECONDS"
_EVERY = 300
# short sleeps: what is left of one when the shell is killed is gone in seconds
_LOOP = """every=$1; shift
while :; do
  slept=0
  while [ "$slept" -lt "$every" ]; do sleep 1 || exit; slept=$((slept + 1)); done
  timeout --foreground -k 10 120 "$@"
done"""


class CronKeepalive:
    """The shell; nothing where there is no Slurm that a cron could be kept by."""

    def __init__(self, run_dir: Path, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self.pid: int | None = None
        if not env.get("SLURM_JOB_ID"):
            return
        every = env.get(ENV_EVERY, "")
        words = command or interpreter.command("cron", "ensure", "--run", str(run_dir))
        try:
            shell = subprocess.Popen(
                ["sh", "-c", _LOOP, "ftsupervise-keeper", every if every.isdigit() else str(_EVERY), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except OSError:  # no shell, no memory: the run is what counts
            return
        shell.returncode = 0  # reaped with everything else that is ours
        self.pid = shell.pid

    def stop(self) -> None:
        """End it and what it runs."""
        if self.pid is None:
            return
        end_child(self.pid)
        self.pid = None
