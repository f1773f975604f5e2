"""A plan's link as a job script, through Jinja2: pure but for reading the template.

A value that reaches an ``#SBATCH`` line goes through ``sbatch`` (which refuses control characters: quoting does not help
there), one that reaches the shell through ``quote``. StrictUndefined: a misspelt name in somebody's own template is an error.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise import __version__, secrecy
from ftsupervise.errors import ConfigError, from_os_error
from ftsupervise.host import ownership
from ftsupervise.launch.plan import Plan
from ftsupervise.scheduler.parse import quote

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch


def render(plan: Plan, launch: Launch, options: tuple[str, ...]) -> str:
    """The script. Raises ConfigError when the template or a value in it is wrong."""
    import jinja2

    source, name = _template(launch.template)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(quote=_shell_quote, sbatch=_sbatch_quote)
    try:
        script = environment.from_string(source).render(
            name=plan.name,
            token=plan.token,
            version=__version__,
            options=options,
            command=plan.command,
            env=launch.env,
            modules=launch.modules,
            setup=launch.setup,
            run_dir=str(plan.run_dir),
            workdir=str(plan.workdir),
            own_workdir=plan.own_workdir,
            launch=launch,
        )
    except jinja2.TemplateError as error:
        line = f":{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"{name}{line}: {error}", hint="docs/launching.md lists the names that a template may use"
        ) from None
    except ValueError as error:
        raise ConfigError(f"the job script cannot be rendered: {error}") from None
    if not script.startswith("#!"):
        raise ConfigError(f"{name}: a job script starts with #!", hint='begin the template with "#!/bin/bash"')
    if found := secrecy.kind(script) or secrecy.assigned(script):
        raise ConfigError(
            f"{name}: the job script would hold {found}, and Slurm shows it to others",
            hint='read the secret where the job runs: export NAME="$(cat ~/.name)"',
        )
    return script


def _template(own: Path | None) -> tuple[str, str]:
    if own is None:
        from importlib import resources

        return (resources.files("ftsupervise.templates") / "train.sbatch.j2").read_text("utf-8"), "train.sbatch.j2"
    try:
        return ownership.read_trusted(own, follow=True).decode("utf-8"), str(own)
    except OSError as error:
        raise from_os_error(error, f"read the template {own}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{own}: the template is not UTF-8 text") from None


def _shell_quote(value: object) -> str:
    text = str(value)
    if "\0" in text:
        raise ValueError(f"a NUL byte cannot stand in a job script: {text!r}")
    return shlex.quote(text)


def _sbatch_quote(value: object) -> str:
    return quote(str(value))
