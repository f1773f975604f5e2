"""The run directory: everything about one run, readable with ``ls`` and ``cat``, driven with ``touch``.

    RUN/
      README              what this directory is and which switches it has
      run.yaml            the configuration as launched (paths made absolute, no secrets)
      launches/NNNN/      one per submission: train.sbatch (or train-1.sbatch, ...), launch.json (ids, token, options)
      switches/           kill-switch, save-switch: ``touch`` raises, ``rm`` clears; the group may write (``share`` opens more)
      state/              finished (the run is done; queued members burn through), brake (stopped: ftsupervise clear --brake),
                          members/JOB.json (a member that has no attempt yet, or ended without one),
                          lineage.json (the id of this run, by which its checkpoints are known),
                          steps.json (steps and loss over time, some 100 kB at most), last_hours.json (minute by minute),
                          restorable.json (guard.save has saved), anew.json (a person: the run begins anew),
                          observe (a person: these decisions are only told), observed/ (those that were, where no
                          attempt began)
      attempts/NNNN/      one per start of the command, claimed by mkdir: start.json, end.json, progress.json (all ranks as
                          one, every few seconds), run.log (what the supervisor said), resumed.json, warning, deadline,
                          stopped.json, error.json, percent.json and unread.json (what its output shows in place of a
                          step), lost.json (why it left no end), anchor.json (the newest checkpoint it committed),
                          not_from.json (the snapshot it did not begin from), begins.json (from what it begins),
                          written.json (what a script without the guard saved), given.json (what one was given to
                          resume from), copies.json, verdict.json (``diagnose`` of one that failed),
                          imports.json, tracker.json, asked.json (a person asks how the ranks are), evidence/ (of a
                          hang; now/: of that question), observed/ (decisions that were only told)
      kept/NNNN/          what such a script had saved last, kept from a start that may write over it; two of them at most
      staging/NNNN/       shared files of an attempt are made here, then renamed; a plain file: sealed, a newer one has begun
      nodes/              incidents by node; exclude/NODE and trust/NODE: ``touch`` and ``rm``
      beats/              rank-N: one JSON line, rewritten whole by that rank only
      logs/               output of the jobs
      guard/              a copy of the guard, for a training whose Python has no ftsupervise (run/guard_folder.py)
      watch/              journal, outbox and beats of the watches; found.json: what the last tick found, in short;
                          events/: what happened, as JSON lines for log collectors
      checkpoints/        where FTSUPERVISE_CHECKPOINT_DIR points unless the run says otherwise
      groups/gNNN/        a run of replica groups: each group is a run of its own with its own ledger, fence and brake, but
                          has the switches, the finished mark, the launches and the checkpoints of the whole run;
                          state/settings.json: what its supervisor is told;
                          attempts/NNNN/manager-RANK.json: where the others may copy its weights from
      replicas/           of these: lighthouse.json, groups.json (state, nodes and step of each), quorum.json, stalls.json

Laws kept here: files are written whole (temp, fsync, rename), several writers never share one file, readers survive
a file that vanishes or is half there. Standard library only: the guard uses this inside the training loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.host import files
from ftsupervise.host.ownership import PAGE, SHARED, Reach, as_page, held, make_folder, set_file_mode, settle
from ftsupervise.printable import log_line, printable

FINISHED = "finished"
WARNING = "warning"  # in an attempt's directory: the job is about to be ended, and why
DEADLINE = (
    "deadline"  # in an attempt's directory: the end of the job, epoch seconds, where that was moved since it began
)
ERROR_FILE = "error.json"  # in an attempt's directory: the first error, as torchrun's agent writes it
TRACKER = "tracker.json"  # in an attempt's directory: the page of the run in an experiment tracker (tracker.py)
NOT_FROM = "not_from.json"  # in an attempt's directory: the snapshot that it did not go on from
RESUMED = "resumed.json"  # in an attempt's directory: the checkpoint that it went on from
STOPPED = "stopped.json"  # in an attempt's directory: why the guard asked the loop to leave

ENV_RUN_DIR = "FTSUPERVISE_RUN_DIR"
ENV_RUN = "FTSUPERVISE_RUN"
ENV_ATTEMPT = "FTSUPERVISE_ATTEMPT"
ENV_ATTEMPT_DIR = "FTSUPERVISE_ATTEMPT_DIR"
ENV_RESTART = "FTSUPERVISE_RESTART"  # restarts in place made in this job before this attempt: 0, 1, ...
ENV_NODES = "FTSUPERVISE_NODES"  # the nodes chosen for this attempt, as a host list
ENV_MASTER_ADDR = "FTSUPERVISE_MASTER_ADDR"  # the node of rank 0, where the ranks of this attempt meet
ENV_MASTER_PORT = "FTSUPERVISE_MASTER_PORT"  # a TCP port there, of this attempt's own
ENV_NNODES = "FTSUPERVISE_NNODES"  # how many nodes this attempt has
ENV_NODE_RANK = "FTSUPERVISE_NODE_RANK"  # of a rank: which of them it is on
ENV_CHECKPOINT_DIR = "FTSUPERVISE_CHECKPOINT_DIR"
ENV_AREA = "FTSUPERVISE_STAGING_AREA"  # RUN/staging/NNNN of this attempt, see fence.py
ENV_STAGING = "FTSUPERVISE_STAGING"  # the same for its checkpoints
ENV_DEADLINE = "FTSUPERVISE_DEADLINE"  # epoch seconds at which the job is killed, when known
ENV_SNAPSHOTS = "FTSUPERVISE_SNAPSHOTS"  # the folder of the job's snapshots (snapshots/room.py)
ENV_SNAPSHOT_KEPT = "FTSUPERVISE_SNAPSHOT_KEPT"  # where it lies on the disk, if not in memory (snapshots/kept.py)
ENV_SNAPSHOT_STEP = "FTSUPERVISE_SNAPSHOT_STEP"  # STEP/ATTEMPT: the snapshot that this attempt begins from
ENV_STATE_DIR = "FTSUPERVISE_STATE_DIR"
ENV_GROUP = "FTSUPERVISE_GROUP"  # the replica group that this process belongs to: g000, g001, ...
ENV_GROUP_JOB = "FTSUPERVISE_GROUP_JOB"  # set: that group has a job of its own
ENV_MIN_REPLICAS = "FTSUPERVISE_MIN_REPLICAS"  # fewer replica groups do not train on
ENV_SLOWEST_STEP = "FTSUPERVISE_SLOWEST_STEP"  # seconds between two collectives of the slowest replica group, at most
ENV_JOB_ID = "FTSUPERVISE_JOB_ID"  # this job's name at the local scheduler; Slurm's jobs have SLURM_JOB_ID
ENV_WATCHER = (
    "FTSUPERVISE_WATCHER"  # of an entry of the crontab: the name of the watch that it may be, on whichever node
)
ENV_WATCH_EVERY = "FTSUPERVISE_WATCH_EVERY"  # … and the seconds until it runs again
ENV_VERSION = "FTSUPERVISE_VERSION"  # of the supervisor
ENV_GUARD = "FTSUPERVISE_GUARD_"  # + POLL, MEMORY, STOP_BEFORE, RUN_FOR: the guard's settings, from `ftsupervise run`


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this account's own state: $FTSUPERVISE_STATE_DIR, $XDG_STATE_HOME/ftsupervise,
    ~/.local/state/…
    """
    if env.get(ENV_STATE_DIR):
        return Path(env[ENV_STATE_DIR])
    base = env.get("XDG_STATE_HOME", "")  # a relative one would be in the current directory
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "ftsupervise"


GROUPS = "groups"


def whole_run(root: Path) -> Path | None:
    """Return the run directory that a replica group belongs to whose own directory is ``root``; None where that is a
    whole run's.

    It goes by the name alone: there is nothing that another account could put in its place.
    """
    name = root.name
    is_one = name[:1] == "g" and len(name) >= 4 and name[1:].isascii() and name[1:].isdigit()
    return root.parent.parent if is_one and root.parent.name == GROUPS else None


class _Place:
    """A path of a run, made when it is first asked for: a watch of thousands of runs asks for few of them."""

    def __init__(self, below: str, *, shared: bool = False) -> None:
        self.below, self.shared = below, shared

    def __set_name__(self, owner: type[RunDir], name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        made = run.__dict__[self.name] = (run.shared if self.shared else run.root) / self.below
        return made


class RunDir:
    """The paths of one run. Holds no state, opens nothing by itself.

    A replica group shares the switches, the finished mark, the launches and the checkpoints with its run.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = root = Path(root)
        self.whole = whole_run(root)
        self.shared = self.whole or root
        self._quoted = ""

    switches = _Place("switches", shared=True)
    state = _Place("state")
    attempts = _Place("attempts")
    staging = _Place("staging")
    launches = _Place("launches", shared=True)
    nodes = _Place("nodes")
    beats = _Place("beats")
    logs = _Place("logs")
    watch = _Place("watch")
    checkpoints = _Place("checkpoints", shared=True)
    config = _Place("run.yaml")
    finished = _Place(f"state/{FINISHED}", shared=True)
    lineage = _Place("state/lineage.json", shared=True)

    def __repr__(self) -> str:
        return f"RunDir({str(self.root)!r})"

    def quoted(self) -> str:
        """Return ``root`` as a shell takes it."""
        if not self._quoted:
            import shlex

            self._quoted = shlex.quote(str(self.root))
        return self._quoted

    def has_finished(self) -> bool:
        """Return whether the file exists. False where that cannot be read: the run then goes on."""
        try:
            return self.finished.exists()
        except OSError:
            return False

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:04d}"

    def group(self, name: str) -> RunDir:
        """Return the directory of one of its replica groups."""
        return RunDir(self.root / GROUPS / name)

    def group_names(self) -> list[str]:
        """Return the replica groups that have a directory; none where that cannot be read."""
        try:
            found = os.listdir(self.root / GROUPS)
        except OSError:
            return []
        return sorted(name for name in found if self.group(name).whole is not None)

    @property
    def guard(self) -> Path:
        """Return the folder of the guard's copies, which replica groups share."""
        return (self.whole or self.root) / "guard"

    @property
    def replicas(self) -> Path:
        """Return the folder of the pages about all replica groups together."""
        return self.root / "replicas"


def has_switches(root: Path) -> bool:
    """Return whether ``root`` has the folder that makes it a run directory. Raises OSError.

    A member of its group may mount a file system of their own over it (FUSE), into which the kernel lets nobody else look: it
    is there all the same, and the watch has an alert for a run that it cannot look at.
    """
    try:
        return (root / "switches").is_dir()
    except PermissionError:
        with os.scandir(root) as found:
            return any(entry.name == "switches" for entry in found)


def tracked_attempts(newest: int) -> range:
    """Return the attempts whose tracker pages count, the newest first: a later one may not have come so far as to name it."""
    return range(newest, max(0, newest - 5), -1)


def write_whole(
    path: Path,
    data: bytes | str | Iterable[bytes],
    *,
    mode: int | Reach = PAGE,
    sync: bool = True,
    area: Path | None = None,
) -> None:
    """Write a file so that a reader sees the old or the new one, never a half (temp, fsync, rename, fsync directory).

    ``area``: make it there, so that the rename fails once a newer attempt has sealed it (``fence.py``). ``sync`` False
    leaves the two fsyncs out, for files that are rewritten every few minutes and may be lost in a power cut. ``mode`` is
    set whatever the umask, and who reaches its source may reach the file, in the group that it gets.

    Raises OSError; on any failure the old file stays and no temporary is left behind (unless the process is killed
    in between: such leftovers start with ``.tmp-`` and are never read).
    """
    pieces = (data.encode(),) if isinstance(data, str) else (data,) if isinstance(data, bytes) else data
    with ExitStack() as until:  # both folders are held: a link may lie in their place by the time of the rename
        into = until.enter_context(files.open_folder(path.parent, follow=True, flags=os.O_PATH))
        at = into if area is None else until.enter_context(files.open_folder(area, follow=True, flags=os.O_PATH))
        private = 0o600 if isinstance(mode, Reach) else mode
        fd, temp = files.create_temporary(area or path.parent, path.name, private, dir_fd=at)
        temp = os.path.basename(temp)
        try:
            try:
                settle(fd, mode) if isinstance(mode, Reach) else set_file_mode(fd, mode)
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(fd, view) :]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temp, path.name, src_dir_fd=at, dst_dir_fd=into)
        except BaseException:
            try:
                os.unlink(temp, dir_fd=at)
            except OSError:
                pass
            raise
    if sync:
        sync_directory(path.parent)


def write_named(path: Path, data: bytes | str, *, mode: int | Reach = PAGE, sync: bool = True) -> None:
    """Do as ``write_whole`` for a file that a person has named, which may lie where others write: the way there is judged, and
    its folder is held open (``ownership.held``). Raises NotTrusted for a link of another account, OSError.
    """
    with held(path.absolute().parent) as here:
        write_whole(here / path.name, data, mode=mode, sync=sync)


def for_the_group(folder: Path) -> None:
    """Make ``folder`` if it is not there, for the group to write in.

    Other processes may make it at the same moment. Raises OSError.
    """
    make_folder(folder, SHARED, parents=True)  # the directory above decides its group


def sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` durable. A file system that cannot do that is no error."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


# The supervisor's lines: on stderr, which is the job's output, and in the attempt's own log. Neither may fail the command, nor
# hold up who writes them: they may lie on a dead mount, and a signal for the ranks may be next.

Line = Callable[[], object]
_aside: Callable[[Line, Line | None], None] | None = (
    None  # writes a line to the output, and one to a log (run/lines.py)
)


def tell_by(aside: Callable[[Line, Line | None], None] | None) -> None:
    """Have ``aside`` write the lines of this process from here on; None: ``tell`` writes them itself."""
    global _aside
    _aside = aside


def tell(log: Path | None, text: str) -> None:
    """Write ``text`` as one printable line: parts of it come from a job, a health command or Slurm."""
    text = printable(text)
    line, at = log_line(text), datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def to_the_output() -> None:
        print(line, file=sys.stderr, flush=True)

    def to_the_log() -> None:
        if log is not None:
            with os.fdopen(as_page(log), "a", encoding="utf-8") as file:
                file.write(f"{at} {text}\n")

    if _aside is not None:
        _aside(to_the_output, to_the_log if log is not None else None)
        return
    for write in (to_the_output, to_the_log):
        try:
            write()
        except (OSError, ValueError, AttributeError):  # a full disk, or an output that is closed
            pass


def warn(folder: Path, words: str, say: Callable[[str], None], signal: int = 0) -> None:
    """Write the file that asks the guards of an attempt, on any node, to stop. On a full disk an empty file is enough.

    The first line is for people, the second for the ledger: the ``signal`` that asked us, if one did, and the time.
    """
    path, at = folder / WARNING, datetime.now(timezone.utc)
    try:
        write_whole(path, f'{words}\n{{"signal": {int(signal)}, "at": "{at.isoformat()}"}}\n')
    except OSError as error:
        try:
            os.close(as_page(path))
        except OSError:
            say(f"cannot write {path}: {error.strerror}; only the signal is passed on")


def shown(command: tuple[str, ...]) -> str:
    """Return a command in one line that is not too long."""
    import shlex

    text = shlex.join(command)
    return text if len(text) <= 200 else text[:199] + "…"
