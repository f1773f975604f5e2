"""All rows of a drill, one after another, in a folder and a Slurm that end with this process, however that ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.drill.copied import copied
from ftsupervise.drill.rows import ROWS, DrillRow
from ftsupervise.drill.scene import LEAVES, TIME_IS_OVER, CannotTry, DrillPlace, Scene
from ftsupervise.drill.verdict import RowOutcome, RowResult
from ftsupervise.errors import Error, Refused, SchedulerUnavailable, UsageError, from_os_error
from ftsupervise.host.ownership import OWN, Reach, held_or_made, require
from ftsupervise.launch.rehearsal import refuse_checkpoints, rehearsal_folder, shape_for
from ftsupervise.probe.errand import within
from ftsupervise.rundir.ledger import numbers
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import outer_variables, temporary, temporary_folder
from ftsupervise.scheduler import LOCAL, SLURM, kind_of, open_scheduler

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

SANDBOX = "sandbox"
_LOOK = 10.0  # seconds to read the attempts of the run
_BOOT = 60.0  # seconds for the sandbox


class DrillOrder(NamedTuple):
    """The choices for one drill."""

    rows: tuple[str, ...] = ()  # none: all
    on: str = SANDBOX
    start: float = 120.0  # seconds for the first step of a copy
    within: float = 3600.0  # seconds for all rows together
    really: bool = False  # also for a run that has attempts or a job
    keep: Path | None = None  # what each copy leaves is put there


def chosen(names: Sequence[str], run: Run | None = None) -> tuple[DrillRow, ...]:
    """Return the rows of these names, in the order of the table; where none is named, all that ``run`` can be drilled by.
    Raises UsageError, and Refused where none can."""
    from difflib import get_close_matches

    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            raise UsageError(f"the drill has no row {name!r}", hint=hint)
    found = tuple(row for row in ROWS if row.name in names or (not names and (run is None or row.fits(run))))
    if not found and run is not None:
        raise Refused(
            f"{run.name} trains as replica groups without a lighthouse, and the drill looks at runs of one copy",
            hint="drill a copy of the file without launch.replica_groups",
        )
    return found


def refuse_what_matters(run: Run) -> None:
    """Raise Refused where the run has attempts, or a job of its name is in the queue, or that cannot be seen."""
    hint = "the drill works on a copy, with a run directory of its own; --yes-really does it all the same"
    assert run.run_dir is not None
    directory = run.run_dir
    try:
        found = within(_LOOK, lambda: numbers(RunDir(directory)))
    except FileNotFoundError:
        found = []
    except (TimeoutError, OSError):
        raise Refused(f"{directory} could not be read, so nobody knows whether {run.name} matters", hint=hint) from None
    if found:
        raise Refused(f"{run.name} has {len(found)} attempts in {directory}: it may be a run that matters", hint=hint)
    try:
        jobs = [job.id for job in open_scheduler(kind_of(run.scheduler)).queue() if job.name == run.name]
    except SchedulerUnavailable as error:
        raise Refused(f"the queue could not be asked for jobs of {run.name}: {error.message}", hint=hint) from None
    if jobs:
        raise Refused(f"job {jobs[0]} is called {run.name}: it may be a run that matters", hint=hint)


def drill(
    run: Run, workdir: Path, order: DrillOrder, tell: Callable[[str], None], extend: Callable[[float], None]
) -> Generator[RowResult]:
    """Play the rows, and yield the result of each. ``tell``: what is going on, for a person who waits; ``extend``: called with
    the seconds that the next part takes at most.

    Raises Refused where the run matters, or where a checkpoint lies in ``workdir``.
    """
    rows, until = chosen(order.rows, run), monotonic() + order.within
    if not order.really:
        refuse_what_matters(run)
        refuse_checkpoints(workdir)
    with _place(run, workdir, order, tell, extend) as made:
        place = made._replace(until=until)
        for row in rows:
            tell(f"{row.name}: {row.fault}")
            extend(min(row.bound + 2 * order.start, max(0.0, until - monotonic()) + LEAVES))
            yield _played(row, place, order.keep)


def _played(row: DrillRow, place: DrillPlace, keep: Path | None) -> RowResult:
    if why := row.unfit(place.run):
        return RowResult(row.name, RowOutcome.NOT_TRIED, why_not=why)
    if monotonic() >= place.until:
        return RowResult(row.name, RowOutcome.NOT_TRIED, why_not=TIME_IS_OVER)
    try:
        with Scene(place, row.name) as scene:
            try:
                return row.play(scene)
            finally:
                if keep is not None:
                    keep_what_is_left(scene.rundir.root, keep / row.name)
    except CannotTry as why:
        return RowResult(row.name, RowOutcome.NOT_TRIED, why_not=str(why))
    except Error as error:  # of the sandbox, or of a launch
        return RowResult(row.name, RowOutcome.NOT_TRIED, why_not=error.message)
    except OSError as error:
        return RowResult(row.name, RowOutcome.NOT_TRIED, why_not=str(error))


def keep_what_is_left(root: Path, place: Path) -> None:
    """Copy what the copy of a row has left, without its checkpoints, for this account's eyes alone. Raises CannotWrite,
    NotPermitted."""
    left_out = shutil.ignore_patterns("checkpoints", "guard")
    try:
        with held_or_made(place, Reach(OWN)) as here:
            require(here.stat(), place)
            for one in set(root.iterdir()) - {root / name for name in left_out(str(root), os.listdir(root))}:
                if (
                    one.is_dir() and not one.is_symlink()
                ):  # never the folder itself, which would get the mode of its source
                    shutil.copytree(one, here / one.name, ignore=left_out, dirs_exist_ok=True)
                else:
                    shutil.copy2(one, here / one.name)
    except OSError as error:
        raise from_os_error(error, f"write {place}") from None


@contextmanager
def _place(
    run: Run, workdir: Path, order: DrillOrder, tell: Callable[[str], None], extend: Callable[[float], None]
) -> Iterator[DrillPlace]:
    """Make the folder of the drill, and its Slurm where it has one."""
    folder = rehearsal_folder("drill")
    with ExitStack() as stack:
        keeper = stack.enter_context(temporary_folder(folder))
        if order.on == LOCAL:
            outer = outer_variables(os.environ)
            env = {name: value for name, value in os.environ.items() if name not in outer} | keeper.env
            yield DrillPlace(copied(run, folder, LOCAL), workdir, folder, env, None, order.start)
            return
        made = copied(run, folder, SLURM)
        shape = shape_for(made, spare=1)
        tell(f"a Slurm of {shape['nodes']} nodes is made on this machine")
        extend(_BOOT)
        sandbox = stack.enter_context(temporary(None, **shape))
        yield DrillPlace(made, workdir, folder, sandbox.env(), sandbox, order.start)


def code_of(results: Iterable[RowResult], asked: Sequence[str]) -> int:
    """Return the exit code: 1 where a row failed; 3 where none did, and one that was asked for by name, or all of them, could
    not be tried; else 0."""
    found = tuple(results)
    if any(one.outcome is RowOutcome.FAIL for one in found):
        return 1
    missed = [one for one in found if one.outcome is RowOutcome.NOT_TRIED]
    return 3 if missed and (asked or len(missed) == len(found)) else 0
