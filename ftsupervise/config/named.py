"""Which settings does a command mean? The same words name a run everywhere: its directory, its ``ftsupervise.yaml``, or the
name it was launched under; ``locate.find_run`` has the directory they mean, this module the settings.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ftsupervise.config import sources
from ftsupervise.config.find_run import CONFIG_NAME, find_run, run_dir_of_config
from ftsupervise.errors import ConfigError, Error, NotFound
from ftsupervise.host import files
from ftsupervise.rundir.paths import ENV_RUN_DIR, RunDir


def settings_of(name: str | None) -> Path:
    """The file with the settings of the run ``name``: the one that is named, or beside which it lies, else run.yaml, as it
    was launched. A run that was typed by hand has the ftsupervise.yaml that names its directory, else a run.yaml which is
    read as the defaults and does not exist. Nothing said: the run of this job, else ./ftsupervise.yaml. Raises NotFound,
    ConfigError.
    """
    own = os.environ.get(ENV_RUN_DIR)
    if name is None and own and RunDir(own).config.is_file():
        return RunDir(own).config
    path = Path(name if name is not None else CONFIG_NAME)
    if path.is_file():
        return path
    if name is not None and (path / CONFIG_NAME).is_file():
        return path / CONFIG_NAME
    rundir = find_run(name)
    if rundir.config.is_file():
        return rundir.config
    if kind := files.odd_kind(rundir.config):
        raise ConfigError(
            f"{rundir.config} is {kind}, not a regular file",
            hint=f"look whose it is: ls -ld {shlex.quote(str(rundir.config))}; name its ftsupervise.yaml instead",
        )
    if sources.is_by_hand(rundir.root):
        return _beside(rundir) or rundir.config
    raise NotFound(
        f"{rundir.config} is gone: launch wrote it",
        hint="launch again to have it written, or name its ftsupervise.yaml",
    )


def _beside(rundir: RunDir) -> Path | None:
    """The ftsupervise.yaml here, or where ``runs/NAME`` would have it, if it names this directory."""
    for path in (Path(CONFIG_NAME), rundir.root.parent.parent / CONFIG_NAME):
        try:
            if path.is_file() and run_dir_of_config(path).root.resolve() == rundir.root.resolve():
                return path
        except (Error, OSError):
            continue
    return None


def how_to_launch(rundir: RunDir, after: str = "") -> str:
    """What to type to have the run in the queue again, behind the job ``after`` if there is one."""
    words = ["ftsupervise", "launch", *(("--after", after) if after else ())]
    if not sources.is_by_hand(rundir.root):
        return shlex.join([*words, str(rundir.root)])
    if (beside := _beside(rundir)) is not None:
        return shlex.join([*words, str(beside.absolute())])
    return f"sbatch {f'--dependency=afterany:{after} ' if after else ''}SCRIPT, the one that it was started by"


def launch_file(name: str | None) -> Path:
    """The ftsupervise.yaml that a launch of ``name`` is to use: the one that is named or lies in the directory, else the one
    from which the run was launched last.

    A file is run with this account's rights, so the record that names it has to be ours. Raises NotFound, NotPermitted.
    """
    path = Path(name if name is not None else CONFIG_NAME)
    launched = path.name == "run.yaml" and (path.parent / "switches").is_dir()
    if path.is_file() and not launched:
        return path
    if (path / CONFIG_NAME).is_file():
        return path / CONFIG_NAME
    if name is None:
        raise NotFound(
            f"no run named, and no {CONFIG_NAME} in this directory",
            hint="name the run: its directory, its ftsupervise.yaml, or the name it was launched under",
        )
    return _of_its_launch(find_run(str(path.parent) if launched else name))


def _of_its_launch(rundir: RunDir) -> Path:
    from ftsupervise.errors import from_os_error
    from ftsupervise.host import ownership
    from ftsupervise.rundir.launches import launches

    name = rundir.root.name
    try:
        record = next((one for one in reversed(launches(rundir)) if one.config), None)
        if record is not None:
            page = rundir.launches / f"{record.number:04d}" / "launch.json"
            for place in (page, page.parent, rundir.launches, rundir.root):
                if reason := ownership.distrust(place.stat(), place):
                    raise ownership.NotTrusted(
                        f"{reason}, so the {CONFIG_NAME} that it names is not run", hint="name that file yourself"
                    )
    except OSError as error:
        raise from_os_error(error, f"read the launches of {rundir.root}") from None
    if record is None:
        raise NotFound(
            f"no launch of {name} says where its {CONFIG_NAME} is",
            hint=f"name that file: ftsupervise launch {CONFIG_NAME}",
        )
    if not Path(record.config).is_file():
        raise NotFound(
            f"{name} was launched from {record.config}, which is not there any more", hint=f"name its {CONFIG_NAME}"
        )
    return Path(record.config)
