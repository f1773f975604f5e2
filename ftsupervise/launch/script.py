"""A plan's link as a job script, through Jinja2: pure but for reading the template.

A value that reaches an ``#SBATCH`` line goes through ``sbatch`` (which refuses control characters: quoting does not help
there), one that reaches the shell through ``quote``. StrictUndefined: a misspelt name in somebody's own template is an error.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise import secrecy
from ftsupervise.errors import ConfigError, from_os_error
from ftsupervise.host import ownership
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.launch.plan import Plan, SbatchOptions, word
from ftsupervise.launch.shell_code import ShellWord
from ftsupervise.scheduler.parse import quote
from ftsupervise.version import VERSION

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch


def render(plan: Plan, launch: Launch, options: SbatchOptions, *, packaged: str = "") -> str:
    """The script. ``packaged``: the name of another template of ours than that of a member, in the place of the person's own.

    Raises ConfigError when the template or a value in it is wrong.
    """
    import jinja2

    source, name = (_packaged(packaged), packaged) if packaged else _template(launch.template)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(quote=_shell_quote, sbatch=_sbatch_quote, expanded=_expanded)
    before, after = around_modules(launch.setup or "") if launch.modules else ("", launch.setup or "")
    try:
        fit_node = environment.from_string(_packaged("fit_node.sh.j2")).render(_of_the_node(plan, options))
        script = environment.from_string(source).render(
            name=plan.name,
            token=plan.token,
            version=VERSION,
            options=[word(*one) for one in options.items()],
            fit_node=fit_node,
            assignments="".join(f"{one} " for one in plan.assignments),
            command=plan.command,
            env=launch.env,
            modules=launch.modules,
            setup=launch.setup,
            setup_before_modules=before,
            setup_after_modules=after,
            run_dir=str(plan.run_dir),
            workdir=str(plan.workdir),
            umask=plan.umask,
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


def _of_the_node(plan: Plan, options: SbatchOptions) -> dict[str, object]:
    """Return what the first lines of the script ask of a node, and how they know the members that wait behind this one."""
    mine = options["comment"] or ""
    if plan.chain == "daisy" and plan.members > 1:  # each link has a number of its own
        mine = f"{mine.rpartition('.')[0]}.*"
    return {
        "run_dir": str(plan.run_dir),
        "token": plan.token,
        "python": plan.command[0],
        "needed": (str(plan.workdir), plan.command[0], plan.command[2]),
        "mine": mine,
        "launched": json.dumps(plan.observe),
        "excluded": len(expand_hostlist(options.get("exclude") or "")),
    }


PURGES = re.compile(r"[ \t]*(?:module|ml)[ \t]+(?:-{1,2}[\w-]+[ \t]+)*(?:purge|reset|restore)\b")


def around_modules(setup: str) -> tuple[str, str]:
    """Return the lines of ``launch.setup`` that run before ``launch.modules`` are loaded, and those after.

    Modules come first, so that setup can use them; up to its last ``module purge`` (reset, restore) setup comes before them,
    or it would unload them again.
    """
    lines = setup.splitlines(keepends=True)
    last = max((index for index, line in enumerate(lines, 1) if PURGES.match(line)), default=0)
    return "".join(lines[:last]), "".join(lines[last:])


def _packaged(name: str) -> str:
    from importlib import resources

    return (resources.files("ftsupervise.templates") / name).read_text("utf-8")


def _template(own: Path | None) -> tuple[str, str]:
    if own is None:
        return _packaged("train.sbatch.j2"), "train.sbatch.j2"
    try:
        return ownership.read_trusted(own, follow=True).decode("utf-8"), str(own)
    except OSError as error:
        raise from_os_error(error, f"read the template {own}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{own}: the template is not UTF-8 text") from None


def _shell_quote(value: object) -> str:
    """Quote a word for the job's shell; a ``ShellWord`` stands as the person wrote it, and that shell expands it."""
    text = str(value)
    if "\0" in text:
        raise ValueError(f"a NUL byte cannot stand in a job script: {text!r}")
    return text if isinstance(value, ShellWord) else shlex.quote(text)


_SLURMS = re.compile(r"\$(?:(SLURMD?_\w+)|\{(SLURMD?_\w+)(?::-([\w.,:/+@=-]*))?\})")


def _expanded(value: object) -> str:
    """Quote the value of a variable, but for Slurm's own variables in it, which have their values in the job alone."""
    text, parts, at = str(value), [], 0
    for found in _SLURMS.finditer(text):
        default = "" if found[3] is None else f":-{found[3]}"
        parts += [_shell_quote(text[at : found.start()]) if found.start() > at else ""]
        parts += [f'"${{{found[1] or found[2]}{default}}}"']
        at = found.end()
    return "".join(parts) + (_shell_quote(text[at:]) if at < len(text) or not parts else "")


def _sbatch_quote(value: object) -> str:
    return quote(str(value))
