"""The job script of a slot: the same file for every slot, which comes as its argument. Pure but for reading the template."""

from __future__ import annotations

import shlex

from ftsupervise import __version__
from ftsupervise.crontab.place import CronDir
from ftsupervise.host import interpreter
from ftsupervise.scheduler.parse import quote


def command(cron: CronDir, python: str) -> tuple[str, ...]:
    """What a back end runs at each slot."""
    return tuple(interpreter.command("cron", "tick", "--dir", str(cron.root), python=python))


def script(cron: CronDir, python: str, options: tuple[str, ...]) -> str:
    """The text of ``state/tick.sbatch``. Raises ValueError for what cannot stand in a job script."""
    from importlib import resources

    import jinja2

    source = (resources.files("ftsupervise.templates") / "cron.sbatch.j2").read_text("utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(quote=lambda text: shlex.quote(str(text)), sbatch=lambda text: quote(str(text)))
    return environment.from_string(source).render(
        options=options,
        directory=str(cron.root),
        state=str(cron.state),
        log=str(cron.log),
        version=__version__,
        command=command(cron, python),
    )
