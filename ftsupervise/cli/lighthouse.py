"""``ftsupervise groups lighthouse``: torchft's lighthouse in a job of its own, for groups that have jobs of their own."""

from __future__ import annotations

import os
from typing import Any

import click

from ftsupervise.cli.run import option_of
from ftsupervise.config.grouping import GROUP_SETTINGS

_OPTIONS = ("count", "least", "slowest_step", "sync_period", "state_bytes")


def _lighthouse(run_dir: str | None, host: str, command: tuple[str, ...], **values: Any) -> None:
    """Keep the lighthouse of a run's replica groups running, at one address of this host.

    The groups find it in RUN/replicas/lighthouse.json. COMMAND is that of the training: its Python is looked at, for the
    lighthouse has to be of the same torchft. It is started again within a second when it dies, and at the same address. It ends
    when the run has finished, or its kill switch is up, and no group reports any more; with 100 when a later one has begun.
    """
    import signal
    import threading
    from pathlib import Path

    from ftsupervise.config.find_run import find_run
    from ftsupervise.config.grouping import least_of
    from ftsupervise.host.addresses import own_address, resolve
    from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
    from ftsupervise.replicas.lighthouse_job import serve
    from ftsupervise.replicas.timeouts import derive
    from ftsupervise.replicas.torchft_python import find_torchft
    from ftsupervise.rundir import ledger
    from ftsupervise.rundir.paths import RunDir, tell
    from ftsupervise.scheduler.allocation import Allocation

    env, over = os.environ, threading.Event()
    rundir = RunDir(Path(run_dir).absolute()) if run_dir else find_run(None, launched=False)
    here, count = env.get("SLURMD_NODENAME", ""), values["count"]
    slurms = resolve(Allocation(env).address(here)) if here and not host else ""
    place = LighthousePlace(
        home=rundir.replicas,
        host=resolve(host) if host else slurms or own_address(()),
        groups=count,
        least=least_of(values["min"], count),
        timeouts=derive(values["slowest_step"], values["state_bytes"], count, sync_period=values["sync_period"]),
        job=ledger.job_id(env),
        node=here or os.uname().nodename,
    )
    if not place.host:
        raise click.BadParameter(f"{host} is no address, and no name that can be resolved", param_hint="--host")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warning before the end: the groups still need it to save
        signal.signal(number, signal.SIG_IGN)
    python = find_torchft(command, env).python
    serve(
        rundir,
        SupervisedLighthouse(place, python, lambda words: tell(None, words)),
        over,
        lambda words: tell(None, words),
    )


lighthouse = click.Command(
    "lighthouse",
    callback=_lighthouse,
    help=_lighthouse.__doc__,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    params=[
        click.Option(
            ["--run-dir"], metavar="DIR", help="The run's directory; default: $FTSUPERVISE_RUN_DIR, ./ftsupervise.yaml."
        ),
        click.Option(
            ["--host"],
            default="",
            metavar="ADDRESS",
            help="Of this host, as the groups reach it; default: as Slurm does.",
        ),
        *(option_of(setting) for setting in GROUP_SETTINGS if setting.value in _OPTIONS),
        click.Argument(["command"], nargs=-1, type=click.UNPROCESSED),
    ],
)
