"""Which run does a command mean? Light on purpose: ``kill`` and ``save`` must start in milliseconds, without pydantic.

A run is named by its directory, by its ``ftsupervise.yaml``, or by the name it was launched under on this account
(``STATE/runs/NAME`` is a symbolic link that ``launch`` made). With nothing said: $FTSUPERVISE_RUN_DIR, else the
``ftsupervise.yaml`` of this directory.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ftsupervise.errors import ConfigError, NotFound
from ftsupervise.host import files
from ftsupervise.rundir.paths import ENV_RUN_DIR, ENV_STATE_DIR, RunDir

CONFIG_NAME = "ftsupervise.yaml"


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where this account's own state lives: $FTSUPERVISE_STATE_DIR, $XDG_STATE_HOME/ftsupervise, ~/.local/state/…"""
    if env.get(ENV_STATE_DIR):
        return Path(env[ENV_STATE_DIR])
    base = env.get("XDG_STATE_HOME", "")  # a relative one would be in the current directory
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "ftsupervise"


_PLAIN_NAME = re.compile(r"^name: *([A-Za-z][A-Za-z0-9._-]*) *(?:#.*)?$", re.M)
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def run_dir_of_config(path: Path) -> RunDir:
    """The run directory a configuration file stands for: its ``run_dir``, else ``runs/NAME`` beside it.

    Raises ConfigError as ``load`` would, NotFound and NotPermitted.
    """
    return _plain_run_dir(path) or _strict_run_dir(path)


def _plain_run_dir(path: Path) -> RunDir | None:
    """The answer for a file that has one plain ``name:`` line and no ``run_dir``, without loading YAML; else None.

    Half of what ``kill`` would cost is a YAML parser. Whatever is not quite plain is left to it.
    """
    try:
        text = files.read_bounded(path, 256 * 1024, follow=True).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    names = _PLAIN_NAME.findall(text)
    other_words = re.search(r"run_dir|^[\"'?&*!|>{\[%-]|^\S*name\S* *:(?<!^name:)|\t|\r", text, re.M)
    if len(names) != 1 or other_words or len(re.findall(r"^name\b", text, re.M)) != 1 or names[0].lower() in _RESERVED:
        return None
    return RunDir(path.absolute().parent / "runs" / names[0])


def _strict_run_dir(path: Path) -> RunDir:
    from ftsupervise.config import sources
    from ftsupervise.config.strict_yaml import Problem

    document = sources.fill(sources.read_file(path), os.environ, unfilled=sources.of_strangers(path))
    for problem in document.problems:
        if document.value is None or problem.path in (("name",), ("run_dir",)):
            raise ConfigError(str(problem))
    name, where = document.value.get("name"), document.value.get("run_dir")
    if not isinstance(name, str):
        missing = Problem(str(path), 1, 1, ("name",), "missing")
        raise ConfigError(str(missing), hint='add a line such as "name: my-training-10b"')
    if not isinstance(where, str):
        where = f"runs/{name}"
    return RunDir(path.absolute().parent / (Path(where).expanduser() if Path(where).parts[:1] == ("~",) else where))


def find_run(argument: str | None, *, launched: bool = True) -> RunDir:
    """The run that ``argument`` (a directory, a YAML file, a name, or nothing) means.

    Raises NotFound; also for a run that has no directory yet, unless ``launched`` is False.
    """
    run_dir = _find_run(argument)
    if launched and not run_dir.root.exists():
        raise NotFound(
            f"{run_dir.root.name} has not been launched yet: there is no {run_dir.root}",
            hint=f"ftsupervise launch{f' {shlex.quote(argument)}' if argument else ''}",
        )
    return run_dir


def _find_run(argument: str | None) -> RunDir:
    if argument is None:
        if os.environ.get(ENV_RUN_DIR):
            return RunDir(os.environ[ENV_RUN_DIR])
        if Path(CONFIG_NAME).exists():
            return run_dir_of_config(Path(CONFIG_NAME))
        raise NotFound(
            f"no run named, and no {CONFIG_NAME} in this directory",
            hint="name the run: its directory, its ftsupervise.yaml, or the name it was launched under",
        )
    path = Path(argument)
    if path.is_dir():
        if (path / "switches").is_dir():
            return RunDir(path.absolute())
        if (path / CONFIG_NAME).is_file():
            return run_dir_of_config(path / CONFIG_NAME)
        raise NotFound(
            f"{argument} is no run: it holds neither an {CONFIG_NAME} nor switches/", hint=f"ls {shlex.quote(argument)}"
        )
    if path.is_file():
        return run_dir_of_config(path)
    known = state_dir() / "runs" / argument if "/" not in argument and argument not in ("", ".", "..") else None
    if known is not None and known.is_dir():
        return RunDir(known.resolve())
    if kind := _odd_kind(path):
        raise ConfigError(
            f"{argument} is {kind}, not a regular file",
            hint=f"look whose it is: ls -ld {shlex.quote(argument)}; name the run's directory or its {CONFIG_NAME}",
        )
    raise NotFound(f"no run called {argument!r} here", hint="give the path of its directory or of its ftsupervise.yaml")


def _odd_kind(path: Path) -> str:
    try:
        return files.odd_kind(path)
    except (OSError, ValueError):  # nothing of that name can be there
        return ""


def default_cron_directory(env: Mapping[str, str]) -> Path:
    """Where the cron folder is unless somebody says otherwise: $XDG_CONFIG_HOME/ftsupervise/cron, ~/.config/…"""
    base = env.get("XDG_CONFIG_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path(env.get("HOME") or Path.home()) / ".config"
    return home / "ftsupervise" / "cron"


def cron_directory(argument: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """Which installed cron does a command mean: the one named, $FTSUPERVISE_CRON_DIR, ``cron.directory`` of the
    ftsupervise.yaml here or of the person's own settings, else the usual place.

    A settings file that cannot be read has no say: ``cron status`` is for bad days.
    """
    from ftsupervise.errors import Error

    if argument is not None:
        return argument.expanduser().absolute()
    if env.get("FTSUPERVISE_CRON_DIR"):
        return Path(env["FTSUPERVISE_CRON_DIR"])
    from ftsupervise.config import sources

    for path in (Path(CONFIG_NAME), *sources.outer_files(env)):
        try:
            document = sources.fill(
                sources.read_file(path, may_be_empty=True), env, unfilled=sources.of_strangers(path)
            )
        except Error:
            continue
        if any(problem.path == ("cron", "directory") for problem in document.problems):
            continue
        section = document.value.get("cron") if document.value else None
        where = section.get("directory") if isinstance(section, dict) else None
        if isinstance(where, str):
            return path.absolute().parent / Path(where).expanduser()
    return default_cron_directory(env)
