"""Looks at what a night depends on. Each look has its bound; what does not answer in it is ``NotSeen``, and the rest goes on.

Nothing is judged here (examinations.py), nothing is sent, and nothing stays: a file that tries a directory is removed again.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ftsupervise import host
from ftsupervise.doctor import here
from ftsupervise.doctor.examinations import CHECKPOINTS, RUN_DIRECTORY, STATE
from ftsupervise.doctor.seen import (
    AccountSeen,
    ClusterSeen,
    CronSeen,
    MemorySeen,
    PlaceSeen,
    PythonSeen,
    ReceiverSeen,
    ScriptSeen,
    Sights,
)
from ftsupervise.errors import Error, Refused, SchedulerUnavailable
from ftsupervise.host.begin import on_path
from ftsupervise.host.in_time import in_time
from ftsupervise.host.local_disks import is_local
from ftsupervise.launch.doubts import doubts, leaves_with_0, without_guard
from ftsupervise.launch.shell_code import program_words, understand
from ftsupervise.probe import Missing, Mount, NotSeen, Probe, Space
from ftsupervise.probe.errand import within
from ftsupervise.rundir.paths import RunDir, state_dir
from ftsupervise.scheduler import LOCAL, SLURM
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.version import VERSION
from ftsupervise.watch.watchdogs.preflight import complaints

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Receiver
    from ftsupervise.config.schema import Run

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
_LOOK = 8.0  # seconds for a look at files
_PYTHON = 6.0  # seconds
_REACH = 4.0  # seconds for all receivers, which are tried at the same time
T = TypeVar("T")


class ToExamine(NamedTuple):
    """What is to be looked at. ``run``: None without settings, or where none can be used (``unread``); ``trusted``: they
    are this account's own, so that what they name may be run."""

    run: Run | None
    workdir: Path
    kind: str  # of the scheduler
    trusted: bool
    env: Mapping[str, str]
    unread: bool = False


def look(asked: ToExamine, now: datetime, probe: Probe, tell: Callable[[float], None]) -> Sights:
    """Look at everything but what only a job sees (trial.py). ``tell`` is told before each look how long it may take, in
    seconds."""
    run, slurm = asked.run, asked.kind == SLURM
    absent = _absent_commands(asked.env) if slurm else ()
    cluster = (
        look_at_cluster(Slurm(asked.env)) if slurm and not absent else None
    )  # first: Slurm's commands share a bound
    cron = None
    if not asked.unread:  # they may name another cron
        tell(_LOOK)
        scheduler = Slurm(asked.env) if isinstance(cluster, ClusterSeen) else None
        cron = _bounded("the cron folder", lambda: _cron(run, scheduler, now, asked.env))
    of_run: dict[str, Any] = {}
    places = _places(run, probe)
    if run is not None:
        tell(_REACH + _LOOK + _PYTHON)
        of_run = {
            "receivers": reach(run),
            "script": _bounded("the run directory", lambda: _script(run, asked.workdir)),
            "python": _python(asked, run),
            "watchdogs": complaints(run, probe, now),
        }
    return Sights(
        slurm=slurm,
        here=os.uname().nodename,
        version=VERSION,
        missing_commands=absent,
        cluster=cluster,
        places=places,
        cron=cron,
        account=_account(),
        memory=_memory() if asked.kind == LOCAL else None,
        **of_run,
    )


def _bounded(what: str, work: Callable[[], T], seconds: float = _LOOK) -> T | NotSeen:
    """Do it in a child that may hang. Errors of ours and of the disk are what could not be seen."""
    try:
        found: T = within(seconds, work, key=f"doctor: {what}")
        return found
    except (TimeoutError, OSError) as error:
        return NotSeen(what, f"{what}: {error.strerror or error}")
    except Error as error:
        return NotSeen(what, error.message)


# ------------------------------------------------------------------------------------------------------------ Slurm


def _absent_commands(env: Mapping[str, str]) -> tuple[str, ...]:
    found = in_time(lambda: tuple(one for one in COMMANDS if on_path(one, env) is None), _LOOK)
    return () if found is None else found


def look_at_cluster(slurm: Slurm) -> ClusterSeen | NotSeen:
    """Ask the controller; the first question that it does not answer is the last."""
    try:
        settings, partitions, hosts = slurm.settings(), slurm.partition_limits(), slurm.node_hosts()
    except Error as error:
        return NotSeen("Slurm", error.message)
    if not settings.has_accounting:
        return ClusterSeen(settings, partitions, hosts, None)
    try:
        return ClusterSeen(settings, partitions, hosts, slurm.limits())
    except SchedulerUnavailable as error:
        return ClusterSeen(settings, partitions, hosts, NotSeen("limits", error.message))


# ------------------------------------------------------------------------------------------------------ directories


def _places(run: Run | None, probe: Probe) -> dict[str, PlaceSeen | NotSeen]:
    wanted = {STATE: state_dir()}
    if run is not None and run.run_dir is not None:
        wanted = {RUN_DIRECTORY: run.run_dir, **wanted}
        if run.checkpoints.path is not None:
            wanted[CHECKPOINTS] = run.checkpoints.path
    return {name: place_of(path, probe) for name, path in wanted.items()}


def place_of(path: Path, probe: Probe) -> PlaceSeen | NotSeen:
    """Try a directory, with its room, its clock and its mount."""
    mount = probe.mount(path)
    if isinstance(mount, NotSeen):
        return mount
    tried = probe.call(path, "doctor.here:try_place", str(path), bound=probe.bound)
    if not isinstance(tried, dict):
        return tried if isinstance(tried, NotSeen) else NotSeen(str(path), "it is not there")
    found = PlaceSeen(**tried)
    space, ahead = probe.space(found.at), probe.clock_ahead(found.at) if not found.trouble else 0.0
    mount = probe.mount(found.at) if isinstance(mount, Missing) else mount
    kind = mount.kind if isinstance(mount, Mount) and is_local(mount.kind) and found.local_kind else ""
    return found._replace(
        local_kind=kind,
        space=space if isinstance(space, Space) else None,
        ahead=ahead if isinstance(ahead, float) else None,
    )


# ----------------------------------------------------------------------------------------------------------- people


def reach(run: Run) -> tuple[ReceiverSeen, ...]:
    """Try whether each receiver can be reached: its secret, its server or its file. Nothing is sent."""
    from ftsupervise.alerts.receivers import Broken, sender

    named, found = run.alerts.named, dict[str, ReceiverSeen]()
    for one in named.values():  # before there are threads, which would wait for each other's imports
        with suppress(Broken):  # said below, with its name
            sender(one.kind)

    def try_one(name: str) -> None:
        found[name] = _receiver(name, named[name])

    threads = [threading.Thread(target=try_one, args=(name,), daemon=True) for name in named]
    for thread in threads:
        thread.start()
    until = monotonic() + _REACH
    for thread in threads:
        thread.join(max(0.0, until - monotonic()))
    late = {name: ReceiverSeen(name, "", f"no answer within {_REACH:.0f} s", late=True) for name in named}
    return tuple((late | dict(found)).values())


def _receiver(name: str, receiver: Receiver) -> ReceiverSeen:
    from ftsupervise.alerts.receivers import Broken, Doubtful, TryLater, address_of, redact

    address = None
    try:
        address = address_of(receiver)
        if address is not None:
            where = f"{address[0]}:{address[1]} answers"
            socket.create_connection(address, timeout=_REACH).close()
        else:
            where = _other(receiver)
    except (Broken, Doubtful) as error:
        return ReceiverSeen(name, "", str(error))
    except TryLater as error:
        return ReceiverSeen(name, "", str(error), late=True)
    except OSError as error:
        at = f"{address[0]}:{address[1]}" if address is not None else receiver.kind
        return ReceiverSeen(name, "", f"{at} cannot be reached: {error.strerror or error}")
    except Exception as error:  # the code of another package, which costs it no more than this line
        return ReceiverSeen(name, "", f"{receiver.kind}: {type(error).__name__}: {redact(error)}")
    return ReceiverSeen(name, where)


def _other(receiver: Receiver) -> str:
    """Look at a receiver that names no server. Raises Broken."""
    from ftsupervise.alerts.receivers import Broken

    settings: Any = receiver.settings
    if receiver.kind == "command":
        if on_path(settings.argv[0]) is None:
            raise Broken(f"there is no program {settings.argv[0]}, or it cannot be run")
        return f"{settings.argv[0]} is there"
    if receiver.kind == "file":
        folder = settings.path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK) or settings.path.is_dir():
            raise Broken(f"{settings.path} cannot be written: {folder} is not there, or not yours to write")
        return f"{settings.path} can be written"
    return "its addresses are set" if receiver.kind == "apprise" else "its settings can be used"


def _cron(run: Run | None, scheduler: Slurm | None, now: datetime, env: Mapping[str, str]) -> CronSeen:
    from ftsupervise.crontab.installation import CronDir, default_directory, dir_option, read_installed
    from ftsupervise.crontab.status import gather

    named = None if run is None else run.cron.directory
    cron = CronDir(default_directory(env) if named is None else named)
    installed = read_installed(cron)
    if installed is None:
        return CronSeen("ABSENT", "", str(cron.root), dir_option(cron))
    seen = gather(cron, installed, scheduler if installed.backend == "slurm" else None, now)
    watches = any(
        "watch" in one.entry.name or "ftsupervise watch" in f"{one.entry.argv} {one.entry.stdin}"
        for one in seen.entries
    )
    passed = tuple(f"{one.name}: {one.why}" for one in seen.passed if one.wanted)
    return CronSeen(seen.verdict, installed.backend, str(cron.root), dir_option(cron), watches, passed[:3], seen.blind)


# -------------------------------------------------------------------------------------------------- account, script


def _account() -> AccountSeen:
    from ftsupervise.host.ownership import group_name

    umask = os.umask(0o077)
    os.umask(umask)
    names = in_time(lambda: frozenset(group_name(gid) for gid in {*os.getgroups(), os.getegid()}), _LOOK)
    return AccountSeen(umask, names or frozenset())


def _script(run: Run, workdir: Path) -> ScriptSeen:
    from ftsupervise.launch.submit import check_may_start

    assert run.run_dir is not None
    scripts = [
        word for word in program_words(understand(run.launch.command)) if word.endswith(".py") and "$" not in word
    ]
    missing = next((word for word in scripts if not (workdir / word).exists()), "")
    refusal, remedy = "", ""
    try:
        check_may_start(RunDir(run.run_dir), run.name)
    except Refused as error:
        refusal, remedy = error.message, error.hint
    plain = not without_guard(run, workdir, _read)
    return ScriptSeen(
        doubts=doubts(run, workdir, _read),
        unguarded=tuple(leaves_with_0(run, workdir, _read)),
        missing=missing,
        uses_guard=bool(scripts) and not missing and plain,
        refusal=refusal,
        remedy=remedy,
    )


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(65_536)
    except OSError:
        return None


def program_of_python(run: Run) -> str:
    """Return the word of the command that starts a Python, such as "python" or "/opt/venv/bin/python3"; "" for none."""
    words = program_words(understand(run.launch.command))
    return next((word for word in words if Path(word).name.startswith("python") and not word.endswith(".py")), "")


def _python(asked: ToExamine, run: Run) -> PythonSeen | NotSeen | None:
    program, launch = program_of_python(run), run.launch
    if not program:
        return None
    if launch.setup or launch.modules or launch.container or "$" in program:
        return NotSeen("python", "launch.setup, modules or container choose the Python, and only a job has them")
    if not asked.trusted:
        return NotSeen("python", "the settings are another account's, so nothing that they name is run")
    env = {**asked.env, **{key: str(value) for key, value in launch.env.items() if "$" not in str(value)}}
    before, host.answer_by = host.answer_by, None  # that bound is for Slurm's commands, which may have taken all of it
    try:
        return PythonSeen(*here.ask_python(program, env, str(asked.workdir), _PYTHON))
    finally:
        host.answer_by = before


def _memory() -> MemorySeen | NotSeen:
    try:
        return MemorySeen(*here.look_at_memory())
    except (OSError, ValueError) as error:
        return NotSeen("memory", str(error))
