"""Settings of another account: the trusted part, and the part that is only shown.

A settings file is its reader's own when ``ownership`` accepts it. Of any other file only the run itself is trusted: its name,
its directory and the limits of its watchdogs; nothing that makes this account act: no command,
no receiver (which may name this account's secrets and any address), no template, no cron, no other log than the run's own no
variable of this account's environment and no regular expression: what is found in a file goes into a journal that others
read. For the same reason no path that leads to something of this account, be it only its size. For messages the account's own
receivers stand in. ``--trust`` accepts the whole file as it is now; a changed file is another account's again.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ftsupervise.config import sources
from ftsupervise.config.alerting import Alerts
from ftsupervise.config.load import load_account, loaded
from ftsupervise.config.schema import Run
from ftsupervise.errors import from_os_error
from ftsupervise.host import files, ownership
from ftsupervise.host.ownership import make_own
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import state_dir

# watchdogs that read a log: any file of this account, by an expression that may take for ever
_READERS = ("hang", "loss")


class Believed(NamedTuple):
    """The settings as they may be used.

    ``why`` they are not all trusted, "" if they are; ``held``: the settings that are not used, each with its key.
    """

    run: Run
    why: str = ""
    held: tuple[str, ...] = ()

    def sentences(self, path: Path) -> tuple[str, ...]:
        """The message for a person: the owner of the settings, the unused ones, and the command to use them."""
        if not self.held:
            return ()
        head = f"{printable(self.why)}, so these settings of it are shown and not used:"
        where = printable(shlex.quote(str(path)))
        tail = f"to use them as they are now: ftsupervise watch --trust {where} (it is remembered for this text)"
        return (head, *(f"  {line}" for line in self.held), tail)


def load_to_act(path: Path, deed: str, *, run: str = "", trust: bool = False, hint: str = "") -> Run:
    """The settings in ``path`` by which this account deletes, copies, overwrites, sends or runs something: its own, or those
    that it has accepted (``--trust``). ``deed``: what would be done, behind "and".

    Raises NotTrusted for those that another account wrote or may write, else as ``load_believed``.
    """
    found = load_believed(path, run=run, trust=trust, watched=False)
    if found.why:
        hint = hint or f"look at it: ftsupervise config show {shlex.quote(str(path))}"
        raise ownership.NotTrusted(f"{found.why}, and {deed}", hint=hint)
    return found.run


def load_believed(
    path: Path,
    *,
    run: str = "",
    trust: bool = False,
    watched: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Believed:
    """The settings in ``path``, without those by which another account would make this one act.

    ``run``: which one of a sweep; ``trust``: accept the file as it is now, and remember that. Raises as ``load`` does,
    CannotWrite with ``trust``, and NotTrusted for a file of another account by whose limits a run of this account would be
    ``watched``.
    """
    given = os.environ if environ is None else environ
    text, found = sources.read_bytes(path)
    why, mark = ownership.distrust(found, path), _mark(path, found, text, given)
    trusted = not why or trust or _is_ours(mark)
    document = sources.read(path, given, text, strangers=not trusted, run=run)
    settings = loaded(document, path, strangers=not trusted)
    if why and trust:
        _remember(mark)
    if trusted:
        return Believed(settings)
    if watched and found.st_uid != os.geteuid() and _is_another_of_ours(settings.run_dir, path):
        raise ownership.NotTrusted(
            f"{why}, and the run directory it names is yours",
            hint=f"to look at that run by its own settings: ftsupervise watch {shlex.quote(str(settings.run_dir))}",
        )
    places = dict.fromkeys((settings.run_dir, *([path.absolute().parent] if path.name == sources.LAUNCHED else [])))
    if link := next(filter(None, map(_link_to_ours, places)), None):
        raise ownership.NotTrusted(
            f"{link} is a link to a folder of yours, and the run is another account's, so nothing in it is read",
            hint=f"look at it: ls -l {shlex.quote(str(link))}",
        )
    ours = tuple(_paths_of_ours(settings))
    held = (*_held(settings), *(f"{key}: {printable(path, 300)}, which is yours" for key, path in ours))
    return Believed(_harmless(settings, given, frozenset(key for key, _ in ours)), why, held)


def _harmless(run: Run, environ: Mapping[str, str], ours: frozenset[str]) -> Run:
    """Return ``run`` with nothing in it that acts: the account's own receivers and cron stand in.

    ``ours``: keys of paths left out.
    """
    own = load_account(environ=environ)
    kept = [one for index, one in enumerate(run.watch.disk or ()) if f"watch.disk[{index}].path" not in ours]
    disks = tuple(one.model_copy(update={"quota": None}) for one in kept)
    changed: dict[str, object] = {
        "exec": None,
        "metrics": own.watch.metrics,
        **({"disk": disks or None} if run.watch.disk else {}),
    }
    for name in _READERS:
        section = getattr(run.watch, name)
        changed[name] = section and section.model_copy(update={"log": None, "pattern": None})
    changed |= dict.fromkeys(run.watch.model_extra or ())  # other packages' watchdogs: what they read is not known
    watch = run.watch.model_copy(update=changed)
    nodes = run.nodes.model_copy(update={"health": None, "directory": None})
    output = {key: None for key in ("output", "error") if f"launch.{key}" in ours}
    launch = run.launch.model_copy(update={"template": None, **output})
    harmless = {"watch": watch, "nodes": nodes, "launch": launch, "alerts": own.alerts, "cron": own.cron}
    path = None if "checkpoints.path" in ours else run.checkpoints.path
    harmless["checkpoints"] = run.checkpoints.model_copy(
        update={"path": path, "adopt": False, "retain": None, "offload": None}
    )
    return run.model_copy(update=harmless)


def _is_another_of_ours(run_dir: Path | None, path: Path) -> bool:
    """Return whether a run of this account would be watched, and its alerts resolved, by another account's limits."""
    try:
        ours = run_dir is not None and run_dir.stat().st_uid == os.geteuid()
        return ours and run_dir is not None and run_dir.resolve() != path.resolve().parent
    except OSError:
        return False


def _paths_of_ours(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each path in the settings that this account owns and would read."""
    root = str(run.run_dir)
    found = [(f"launch.{key}", getattr(run.launch, key)) for key in ("output", "error")]
    found += [(f"watch.disk[{index}].path", one.path) for index, one in enumerate(run.watch.disk or ())]
    found.append(("checkpoints.path", run.checkpoints.path))
    for key, path in found:
        if path is not None and _is_ours_at(os.path.join(root, path)):  # noqa: PTH118 - not to be normalized
            yield key, str(path)


def _is_ours_at(path: str) -> bool:
    """Return whether the file at the path, or its folder, belongs to this account.

    Of a pattern the folders count. A path that cannot be seen counts as ours.
    """
    here = Path(path.partition("%")[0] if "%" in path else path)
    for place in (here, *here.parents):
        try:
            return place.stat().st_uid == os.geteuid()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return True


def _link_to_ours(run_dir: Path | None) -> Path | None:
    """Return a link in another account's run directory to a folder of this account, whose pages would be read as the run's."""
    try:
        if run_dir is None or run_dir.stat().st_uid == os.geteuid():
            return None
        with os.scandir(run_dir) as found:
            links = [Path(one.path) for one in found if one.is_symlink()]
    except OSError:
        return None
    return next((link for link in links if link.exists() and link.stat().st_uid == os.geteuid()), None)


def _held(run: Run) -> Iterator[str]:
    for index, one in enumerate(run.watch.exec or ()):
        yield f"watch.exec[{index}].command: {_shown(one.command)}"
    for index, disk in enumerate(run.watch.disk or ()):
        if disk.quota is not None:
            yield f"watch.disk[{index}].quota.command: {_shown(disk.quota.command)}"
    for name in _READERS:
        section = getattr(run.watch, name)
        for key in ("log", "pattern") if section else ():
            if getattr(section, key) is not None:
                yield f"watch.{name}.{key}: {printable(str(getattr(section, key)), 300)}"
    for name, section in (run.watch.model_extra or {}).items():
        if section is not None:
            yield f"watch.{name}: {printable(section.model_dump_json(by_alias=True, exclude_unset=True), 300)}"
    if run.watch.metrics is not None:
        yield f"watch.metrics: {printable(str(run.watch.metrics), 300)}"
    if run.nodes.directory is not None:
        yield f"nodes.directory: {printable(str(run.nodes.directory), 300)}"
    if run.nodes.health is not None:
        yield f"nodes.health.command: {printable(run.nodes.health.command, 300)}"
    for name, receiver in run.alerts.named.items():
        argv = getattr(receiver.settings, "argv", None)
        about = f": {_shown(argv)}" if argv else f" ({receiver.kind})"
        yield f"alerts.receivers {name}{about}"
    rest = run.alerts.model_copy(update={"receivers": ()})
    if rest != Alerts():
        changed = [key for key in Alerts.model_fields if getattr(rest, key) != getattr(Alerts(), key)]
        yield f"alerts: {', '.join(changed)}"
    for key in ("adopt", "retain", "offload"):
        if asked := getattr(run.checkpoints, key):
            said = asked if asked is True else asked.model_dump_json(exclude_unset=True)
            yield f"checkpoints.{key}: {printable(str(said), 300)}"
    if run.launch.template is not None:
        yield f"launch.template: {printable(str(run.launch.template), 300)}"


def _shown(argv: tuple[str, ...]) -> str:
    return printable(shlex.join(argv), 300)


# ------------------------------------------------------------------------------------------------------------ --trust


def _mark(path: Path, found: os.stat_result, text: bytes, environ: Mapping[str, str]) -> Path:
    """Return the mark in this account's state that ``--trust`` has accepted the file, of this owner and with this text."""
    what = f"{path.absolute()}\0{found.st_uid}\0".encode("utf-8", "surrogateescape") + text
    return state_dir(environ) / "trusted" / hashlib.sha256(what).hexdigest()


def _is_ours(mark: Path) -> bool:
    try:
        for place in (mark.parent, mark):
            if ownership.distrust(place.lstat(), place):
                return False
    except OSError:
        return False
    return True


def _remember(mark: Path) -> None:
    try:
        make_own(mark.parent.parent)
        make_own(mark.parent)
        fd, temporary = files.create_temporary(mark.parent, mark.name, 0o600)
        os.close(fd)
        Path(temporary).replace(mark)
    except OSError as error:
        raise from_os_error(error, f"write {mark.parent}") from None
