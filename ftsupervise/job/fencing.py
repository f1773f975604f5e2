"""The job ring's side of the fence: seal what older attempts write through, open what ours will, sweep when there is time.

Bounded: a checkpoint file system that hangs is waited for, told, and not waited for any longer. What cannot be sealed holds
no run up: then only the guard's look for a newer attempt stands between the two, and the log says so.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftsupervise import fence, switches
from ftsupervise.ledger import numbers
from ftsupervise.rundir import ENV_CHECKPOINT_DIR, ENV_DESK, ENV_STAGING, RunDir

_PATIENCE = 60.0  # seconds for one file system


@dataclass(frozen=True)
class Hold:
    """What attempt ``number`` writes through. None: there is none, and its writes have no fence but the guard's look."""

    number: int
    desk: Path | None
    staging: Path | None

    def env(self) -> dict[str, str]:
        found = {ENV_DESK: self.desk, ENV_STAGING: self.staging}
        return {key: str(path) for key, path in found.items() if path is not None}


def begin(rundir: RunDir, number: int, env: Mapping[str, str], say: Callable[[str], None]) -> Hold:
    """Seal every older attempt's desk and staging folder, and open those of attempt ``number``."""
    swept: list[Path] = []
    try:
        known = numbers(rundir)
    except OSError:
        known = []
    desk = _one("the run directory", lambda: rundir.desks, number, known, swept, say)
    for folder in swept:
        try:
            if switches.put_back(rundir, folder):
                say("an older attempt was just taking the save switch down: it is up again")
        except OSError as error:
            say(f"cannot look at what an older attempt left in {folder}: {error.strerror}")
    checkpoints = Path(env.get(ENV_CHECKPOINT_DIR) or rundir.checkpoints).absolute()
    staging = _one("the checkpoints", lambda: fence.staging(rundir, checkpoints), number, known, swept, say)
    if swept:
        threading.Thread(target=_sweep, args=(swept,), name="sweep", daemon=True).start()
    return Hold(number, desk, staging)


def _one(
    what: str,
    place: Callable[[], Path],
    number: int,
    known: Iterable[int],
    swept: list[Path],
    say: Callable[[str], None],
) -> Path | None:
    """Seal and open in one place, in bounded time; the desk, None when there can be none."""
    found: list[Path | None] = []
    trouble: list[OSError] = []

    def work() -> None:
        try:
            desks = place()
            try:
                swept.extend(fence.seal(desks, number, known))
            except OSError as error:
                trouble.append(error)
            found.append(fence.open_desk(desks, number))
        except OSError as error:
            trouble.append(error)

    worker = threading.Thread(target=work, name="seal", daemon=True)
    worker.start()
    worker.join(_PATIENCE)
    if worker.is_alive():
        say(f"{what} cannot be sealed against older attempts: no answer within {_PATIENCE:.0f} s")
    for error in trouble:
        say(f"{what} cannot be sealed against older attempts: {error.strerror}: {error.filename or ''}".rstrip(": "))
    return found[0] if found else None


def _sweep(folders: list[Path]) -> None:
    """Delete what older attempts staged and did not commit: maybe terabytes. What stays, the next attempt deletes."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
