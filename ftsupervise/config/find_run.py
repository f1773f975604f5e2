"""Find the run that a command means. Light on purpose: ``kill`` and ``save`` must start in milliseconds, without pydantic.

A run is named by its directory, by its ``ftsupervise.yaml``, or by the name it was launched under on this account
(``STATE/runs/NAME`` is a symbolic link that ``launch`` made). With nothing said: $FTSUPERVISE_RUN_DIR, else the
``ftsupervise.yaml`` of this directory.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise import host
from ftsupervise.errors import ConfigError, Error, NoAnswer, NotFound, did_you_mean
from ftsupervise.host import files, ownership
from ftsupervise.host.in_time import in_time
from ftsupervise.rundir.paths import ENV_RUN_DIR, RunDir, has_switches, state_dir

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.config.strict_yaml import Document

CONFIG_NAME = "ftsupervise.yaml"
WITHIN = 4.0  # seconds that a person waits until the place of a run answers


_PLAIN_NAME = re.compile(r"^name: *([A-Za-z][A-Za-z0-9._-]*) *(?:#.*)?$", re.M)
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def run_dir_of_config(path: Path) -> RunDir:
    """The run directory a configuration file stands for: its ``run_dir``, else ``runs/NAME`` beside it.

    A file that another account wrote, or may write, leads to no run of this account but one below its own folder: what is typed
    there would act on another run than the one that is meant. Raises ConfigError as ``load`` would, NotFound and NotPermitted;
    UsageError for a sweep, which has several.
    """
    return _plain_run_dir(path) or _strict_run_dir(path, "")


def _plain_run_dir(path: Path) -> RunDir | None:
    """Return the answer for a file that has one plain ``name:`` line and no ``run_dir``, without loading YAML; else
    None.

    A YAML parser would be half the cost of ``kill``. Lines that are not quite plain are left to it.
    """
    try:
        fd = ownership.open_judged(path)
        try:
            text = files.read_open(fd, 256 * 1024, path).decode("utf-8")
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError):
        return None
    names = _PLAIN_NAME.findall(text)
    other_words = re.search(r"run_dir|^[\"'?&*!|>{\[%-]|^\S*name\S* *:(?<!^name:)|\t|\r", text, re.M)
    if len(names) != 1 or other_words or len(re.findall(r"^name\b", text, re.M)) != 1 or names[0].lower() in _RESERVED:
        return None
    return RunDir(path.absolute().parent / "runs" / names[0])


def names_in(path: Path) -> tuple[str, ...]:
    """Return the names of the runs in a configuration file that is a sweep; () for a file of one run. Raises as
    ``run_dir_of_config`` does."""
    if _plain_run_dir(path) is not None:
        return ()
    from ftsupervise.config import sources, sweep

    return sweep.names_in(sources.read_file(path))


def _strict_run_dir(path: Path, run: str) -> RunDir:
    from ftsupervise.config.strict_yaml import Problem

    document, why = _judged(path, os.environ, run=run)
    for problem in document.problems:
        if document.value is None or problem.path in (("name",), ("run_dir",)):
            raise ConfigError(str(problem))
    name, where = document.value.get("name"), document.value.get("run_dir")
    if not isinstance(name, str):
        missing = Problem(str(path), 1, 1, ("name",), "missing")
        raise ConfigError(str(missing), hint='add a line such as "name: my-training-10b"')
    if not isinstance(where, str):
        where = f"runs/{name}"
    found = RunDir(path.absolute().parent / (Path(where).expanduser() if Path(where).parts[:1] == ("~",) else where))
    below = os.path.normpath(found.root).startswith(f"{os.path.abspath(path.parent).rstrip('/')}/")  # noqa: PTH100
    if why and not below and _is_ours(found.root):
        raise ownership.NotTrusted(
            f"{why}, and the run directory that it names is yours, in another folder",
            hint=f"if you mean that run, name it itself: {_quoted(str(found.root))}",
        )
    return found


def _judged(
    path: Path, environ: Mapping[str, str], *, may_be_empty: bool = False, run: str = ""
) -> tuple[Document, str]:
    """Return what the file says of ``run``, and why another account could have written that, as a clause; "" where none
    could."""
    from ftsupervise.config import sources, sweep
    from ftsupervise.config.strict_yaml import parse

    text, found = sources.read_bytes(path)
    why = ownership.distrust(found, path)
    document = sweep.of_one(sources.checked(parse(text, str(path)), path, may_be_empty=may_be_empty), run)
    return sources.fill(document, environ, unfilled=str(path) if why else ""), why


def _is_ours(root: Path) -> bool:
    try:
        return root.stat().st_uid == os.geteuid()
    except OSError:
        return False


def each_run(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return ``arguments``, and in the place of a sweep its runs that have been launched, as their directories. Nothing said:
    those of the sweep in this directory, else (). Raises NotFound for a sweep of which none has been launched; else as
    ``find_run``.
    """
    if not arguments and os.environ.get(ENV_RUN_DIR):
        return ()
    found: list[str] = []
    for argument in arguments or (CONFIG_NAME,):
        _require_answer(argument)
        refuse_namesake(argument)
        path = Path(argument) / CONFIG_NAME if Path(argument).is_dir() else Path(argument)
        if has_switches(path.parent) or not path.is_file() or not (names := names_in(path)):
            found.append(argument)
            continue
        places = [_strict_run_dir(path, name).root for name in names]
        for place in places:
            require_run_dir(place)
        there = [str(place) for place in places if place.exists()]
        if not there:
            raise NotFound(
                f"no run of {argument} has been launched yet", hint=f"ftsupervise launch {_quoted(argument)}"
            )
        found += there
    return tuple(found) if arguments or found != [CONFIG_NAME] else ()


def find_run(argument: str | None, *, launched: bool = True, judged: bool = True) -> RunDir:
    """Return the run that ``argument`` (a directory, a YAML file, a name, or nothing) means.

    Raises NotFound; also for a run that has no directory yet, unless ``launched`` is False. NoAnswer: a person waits, and its
    file system does not answer. NotTrusted: another directory lies there than this account has launched, or first watched;
    unless the caller judges that itself (``judged`` False).
    """
    _require_answer(argument)
    refuse_namesake(argument)
    found = _find_launched(argument, launched)
    if judged:
        require_same(found)
    return found


def refuse_namesake(argument: str | None) -> None:
    """Raise NotTrusted where a name means a run of this account, and another account has put something by that name here: what
    is typed would be done to theirs, and the person would believe that it was done to the run. A path means what lies there.
    """
    if argument is None or "/" in argument or argument in ("", ".", ".."):
        return
    try:
        known = (state_dir() / "runs" / argument).readlink()
        here = Path(argument).lstat()
    except (OSError, ValueError):  # it is no name of a run, or nothing is here
        return
    if here.st_uid in (os.geteuid(), 0) or known == Path(argument).absolute():
        return
    raise ownership.NotTrusted(
        f"{argument} is your run in {known}, and what has that name here belongs to {ownership.shown_user(here.st_uid)}",
        hint=f"name the one that you mean: {_quoted(str(known))}, or ./{_quoted(argument)}",
    )


def require_same(rundir: RunDir) -> None:
    """Raise NotTrusted where another directory lies in the place of the run. What cannot be seen in time is not judged here."""
    from ftsupervise.rundir import pinned

    with suppress(OSError):
        in_time(lambda: pinned.require(state_dir(), rundir, copies=True), WITHIN)


def _require_answer(argument: str | None) -> None:
    """Raise NoAnswer where a person waits and the place that ``argument`` means does not answer. One look of a thread, which
    needs next to no processor: a machine that is busy, or settings that take long to read, are no dead mount."""
    if host.answer_by is None:
        return
    places = [Path(argument or os.environ.get(ENV_RUN_DIR) or CONFIG_NAME)]
    places += [state_dir() / "runs" / argument] if argument and "/" not in argument else []
    _require_places(places, argument or "")


def require_run_dir(root: Path | None) -> None:
    """Raise NoAnswer where a person waits and the run directory, which settings name, does not answer."""
    if root is not None and host.answer_by is not None:
        _require_places([root], "")


def _require_places(places: Sequence[Path], named: str) -> None:
    assert host.answer_by is not None
    seconds = min(WITHIN, max(1.0, host.answer_by - time.monotonic()))
    silent = places[0]

    def look() -> bool:
        nonlocal silent
        for silent in places:
            _is_there(silent)
        return True

    if in_time(look, seconds) is None:
        raise NoAnswer(
            f"{named or silent.absolute()} does not answer within {seconds:.0f} s: its file system hangs",
            hint=f"nothing was done; try again when this answers: ls {_quoted(str(silent))}",
        )


def _is_there(place: Path) -> bool:
    try:
        return place.exists()
    except (OSError, ValueError):
        return False


def _find_launched(argument: str | None, launched: bool) -> RunDir:
    run_dir = _find_run(argument)
    require_run_dir(run_dir.root)
    if launched and not run_dir.root.exists():
        raise NotFound(
            f"{run_dir.root.name} has not been launched yet: there is no {run_dir.root}",
            hint=f"ftsupervise launch{f' {_quoted(argument)}' if argument else ''}",
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
        found = RunDir(path.absolute())
        if has_switches(path) or (found.whole is not None and found.switches.is_dir()):
            return found
        if (path / CONFIG_NAME).is_file():
            return run_dir_of_config(path / CONFIG_NAME)
        raise NotFound(
            f"{argument} is not a run directory: it holds neither an {CONFIG_NAME} nor switches/",
            hint=f"ls {_quoted(argument)}",
        )
    if path.is_file():
        return run_dir_of_config(path)
    known = state_dir() / "runs" / argument if "/" not in argument and argument not in ("", ".", "..") else None
    if known is not None and known.is_dir():
        return RunDir(
            known.parent / known.readlink()
        )  # as it was launched: what it leads to now is judged by who uses it
    if known is not None and known.is_symlink():
        gone = known.parent / known.readlink()
        raise NotFound(
            f"the run directory of {argument} is not there: {gone}",
            hint=f"its file system is not mounted here, or it was moved: findmnt -T {_quoted(str(gone))}",
        )
    if kind := _odd_kind(path):
        raise ConfigError(
            f"{argument} is {kind}, not a regular file",
            hint=f"check its owner: ls -ld {_quoted(argument)}; name the run's directory or its {CONFIG_NAME}",
        )
    if path.is_absolute():
        raise NotFound(
            f"there is no run at {argument}: it does not exist",
            hint=f"its file system is not mounted here, or it was moved: findmnt -T {_quoted(argument)}",
        )
    raise NotFound(
        f"no run called {argument!r} here{_near(argument)}",
        hint="give the path of its directory or of its ftsupervise.yaml",
    )


def _near(argument: str) -> str:
    """Return a clause that names the run of this account whose name is near; "" where none is, or where that is not seen."""
    try:
        return did_you_mean(argument, (name for name in os.listdir(state_dir() / "runs") if not name.startswith(".")))
    except OSError:
        return ""


def _quoted(argument: str) -> str:
    import shlex

    return shlex.quote(argument)


def _odd_kind(path: Path) -> str:
    try:
        return files.odd_kind(path)
    except (OSError, ValueError):  # nothing of that name can be there
        return ""


def default_cron_directory(env: Mapping[str, str]) -> Path:
    """The default cron folder: $XDG_CONFIG_HOME/ftsupervise/cron, ~/.config/…"""
    base = env.get("XDG_CONFIG_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path(env.get("HOME") or Path.home()) / ".config"
    return home / "ftsupervise" / "cron"


def cron_directory(argument: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """Find the installed cron that a command means: the one named, $FTSUPERVISE_CRON_DIR, ``cron.directory`` of the
    ftsupervise.yaml here or of the person's own settings, else the usual place.

    A settings file that cannot be read is ignored: ``cron status`` is for bad days. Raises NotTrusted where another account may
    write the one that says where.
    """
    if argument is not None:
        return argument.expanduser().absolute()
    if env.get("FTSUPERVISE_CRON_DIR"):
        return Path(env["FTSUPERVISE_CRON_DIR"])
    from ftsupervise.config import sources

    for path in (Path(CONFIG_NAME), *sources.outer_files(env)):
        try:
            document, why = _judged(path, env, may_be_empty=True)
        except Error:
            continue
        if any(problem.path == ("cron", "directory") for problem in document.problems):
            continue
        section = document.value.get("cron") if document.value else None
        where = section.get("directory") if isinstance(section, dict) else None
        if isinstance(where, str) and why and env.get(sources.ENV_SITE_CONFIG) != str(path):
            raise ownership.NotTrusted(
                f"{why}, so the cron folder that it names is not taken",
                hint=f"name it yourself: --dir {_quoted(where)}",
            )
        if isinstance(where, str):
            return path.absolute().parent / Path(where).expanduser()
    return default_cron_directory(env)


# The settings that a command means. The same words name a run everywhere: its directory, its ``ftsupervise.yaml``, or
# the name it was launched under. ``find_run`` finds the directory, the functions below find the settings.


def settings_of(name: str | None, *, bounded: bool = True, judged: bool = True) -> Path:
    """The file with the settings of the run ``name``: the one that is named, or beside which it lies, else run.yaml, as it
    was launched. A run that was typed by hand has the ftsupervise.yaml that names its directory, else a run.yaml which is
    read as the defaults and does not exist. Nothing said: the run of this job, else ./ftsupervise.yaml. Raises NotFound,
    ConfigError; NoAnswer and NotTrusted as ``find_run`` does, unless the caller has a bound of its own (``bounded`` False) or
    judges what lies there (``judged`` False).
    """
    if bounded:
        _require_answer(name)
    refuse_namesake(name)
    own = os.environ.get(ENV_RUN_DIR)
    if name is None and own and RunDir(own).config.is_file():
        return RunDir(own).config
    path = Path(name if name is not None else CONFIG_NAME)
    if path.is_file():
        return path
    if name is not None and (path / CONFIG_NAME).is_file():
        return path / CONFIG_NAME
    rundir = _find_launched(name, True)
    if judged:
        require_same(rundir)
    if rundir.config.is_file():
        return rundir.config
    if kind := files.odd_kind(rundir.config):
        raise ConfigError(
            f"{rundir.config} is {kind}, not a regular file",
            hint=f"check its owner: ls -ld {_quoted(str(rundir.config))}; name its ftsupervise.yaml instead",
        )
    from ftsupervise.config import sources

    if sources.is_by_hand(rundir.root):
        return _beside(rundir) or rundir.config
    raise NotFound(
        f"{rundir.config} is gone; launch had written it",
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
    """The command to put the run into the queue again, behind the job ``after`` if there is one."""
    import shlex

    from ftsupervise.config import sources

    words = ["ftsupervise", "launch", *(("--after", after) if after else ())]
    if not sources.is_by_hand(rundir.root):
        return shlex.join([*words, str(rundir.root)])
    if (beside := _beside(rundir)) is not None:
        return shlex.join([*words, str(beside.absolute())])
    return f"sbatch {f'--dependency=afterany:{after} ' if after else ''}SCRIPT, the one that it was started by"


class ToLaunch(NamedTuple):
    """``runs``: of a sweep, the names of those that are meant; ("",) for a file of one run."""

    path: Path
    runs: tuple[str, ...]


def to_launch(name: str | None) -> ToLaunch:
    """The ftsupervise.yaml that a launch of ``name`` is to use: the one that is named or lies in the directory, with all its
    runs; else the one here, where it is a sweep with a run of this name; else the one from which the run was launched last.

    A file is run with this account's rights, so the record that names it has to be ours. Raises NotFound, NotPermitted;
    NoAnswer as ``find_run`` does.
    """
    _require_answer(name)
    refuse_namesake(name)
    path = Path(name if name is not None else CONFIG_NAME)
    launched = path.name == "run.yaml" and has_switches(path.parent)
    if not path.is_file():
        path = path / CONFIG_NAME
    if path.is_file() and not launched:
        return ToLaunch(path, names_in(path) or ("",))
    if name is None:
        raise NotFound(
            f"no run named, and no {CONFIG_NAME} in this directory",
            hint="name the run: its directory, its ftsupervise.yaml, or the name it was launched under",
        )
    here = Path(CONFIG_NAME)
    if here.is_file() and name in names_in(here):
        return ToLaunch(here, (name,))
    rundir = _find_launched(str(path.parent) if launched else name, True)
    path = settings_of_launch(rundir, "run")
    return ToLaunch(path, (rundir.root.name,) if names_in(path) else ("",))


def settings_of_launch(rundir: RunDir, done: str, *, hint: str = "") -> Path:
    """Return the ftsupervise.yaml from which the run was launched last: by a record that no other account could have written,
    because this account's rights are used with that file. ``done``: what is to be done with it; ``hint``: what a person can do
    instead. Raises NotTrusted, NotFound.
    """
    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir.launches import launches

    name = rundir.root.name
    try:
        record = next((one for one in reversed(launches(rundir)) if one.config), None)
        if record is not None:
            page = rundir.launches / f"{record.number:04d}" / "launch.json"
            for place in (page, page.parent, rundir.launches, rundir.root):
                if reason := ownership.distrust(place.stat(), place):
                    raise ownership.NotTrusted(
                        f"{reason}, so the {CONFIG_NAME} that it names is not {done}",
                        hint=hint or "name that file yourself",
                    )
    except OSError as error:
        raise from_os_error(error, f"read the launches of {rundir.root}") from None
    if record is None:
        raise NotFound(
            f"no launch of {name} says where its {CONFIG_NAME} is",
            hint=hint or f"name that file: ftsupervise launch {CONFIG_NAME}",
        )
    if not Path(record.config).is_file():
        raise NotFound(
            f"{name} was launched from {record.config}, which no longer exists", hint=hint or f"name its {CONFIG_NAME}"
        )
    return Path(record.config)


# The files that the jobs of a run write to.


def outputs(run: Run) -> tuple[str, ...]:
    """The files that the jobs write to, as paths in which * stands for what differs from job to job."""
    assert run.run_dir is not None
    launch = run.launch
    files = [f"{run.run_dir}/logs/*" if launch.output is None else starred(launch.output, run.name)]
    if launch.error is not None:
        files.append(starred(launch.error, run.name))
    return tuple(dict.fromkeys(files))


def starred(pattern: str, name: str) -> str:
    """Return sbatch's pattern as a shell's: the name filled in, "%%" a percent sign, any other "%" and its letter a star."""

    def meant(match: re.Match[str]) -> str:
        return {"%%": "%", "%x": name}.get(match[0], "*")

    return re.sub(r"\*+", "*", re.sub(r"%%|%\d*[A-Za-z]", meant, pattern))
