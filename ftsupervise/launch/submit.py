"""Carries out a plan so that after any interruption, the same command typed again does not make a second chain.

A launch is a directory ``launches/NNNN`` claimed by mkdir: the script, and ``launch.json`` with the token, written
before sbatch is called. A launch without an answer is searched for by its token before a new one is submitted.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise import host, secrecy
from ftsupervise.checkpoints.find import others_in, others_refused
from ftsupervise.errors import (
    CannotWrite,
    ConfigError,
    Error,
    NotFound,
    NotPermitted,
    Refused,
    SchedulerUnavailable,
    from_os_error,
)
from ftsupervise.host import files
from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import (
    FOLDER,
    OWN,
    PAGE,
    SCRIPT,
    Reach,
    claim_folder,
    distrust,
    make_folder,
    make_own,
    reach,
    shown_user,
    strangers_link,
    user_name,
)
from ftsupervise.launch.folders import make_folders, pin, require_own
from ftsupervise.launch.plan import Plan, output_folders, wants_expedited
from ftsupervise.launch.script import render
from ftsupervise.model import Job
from ftsupervise.nodes.exclude import exclude_alike, write_exclusions
from ftsupervise.probe.errand import within
from ftsupervise.rundir.launches import LaunchRecord, launches, people
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.lineage import TakenOver, keep_lineage
from ftsupervise.rundir.lineage import take_over as note_taken
from ftsupervise.rundir.observing import forget_observing
from ftsupervise.rundir.paths import RunDir, state_dir, write_whole
from ftsupervise.rundir.records import as_counts, write_json
from ftsupervise.scheduler import SLURM, kind_of_job
from ftsupervise.scheduler.ownership import comment, identify, jobs_of_run
from ftsupervise.scheduler.slurm import UMASK, Slurm

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch, Run, Sharing
    from ftsupervise.scheduler import Scheduler

_FRESH = timedelta(minutes=5)
_LOOK = 10.0  # seconds to read whose checkpoints lie in the folder
_ANSWER = 4.0  # seconds for the directory of another run of the same name

README = """\
The run directory of {name}, kept by ftsupervise. Everything here can be read with ls and cat.

  touch switches/save-switch    save a checkpoint at the next step and go on
  touch switches/kill-switch    save and stop at the next step; queued members leave at once until it is removed
  cat attempts/*/end.json       how each attempt ended
  cat launches/*/launch.json    what was submitted, by whom
  touch state/finished          no further member trains
"""


@dataclass(frozen=True)
class Launched:
    """The submitted jobs, or those found submitted already."""

    job_ids: tuple[str, ...]
    number: int
    run_dir: RunDir
    found_again: bool = False
    known_as: str = ""  # on this account: another run may have its name


def prepare(
    run_dir: RunDir, name: str, config_text: str, share: Sharing | None = None, readers: int | Reach = PAGE
) -> None:
    """Make the run directory: its folders (the group may write the switches and what ``share`` says), the settings, a README.
    ``readers``: who may read the settings.

    In a directory with other files (``run_dir: .``), none of them is overwritten.
    """
    try:
        if run_dir.config.is_dir() and not run_dir.config.is_symlink():  # a file or link in its place is replaced
            raise CannotWrite(
                f"{run_dir.config} is a folder, and launch writes the settings there; nothing was submitted",
                hint=f"look at it: ls -la {_quoted(run_dir.config)}; move it away, then launch again",
            )
        # in this order: another launch, at this moment, makes the folder before it writes the file
        if os.path.lexists(run_dir.config) and not run_dir.launches.is_dir():
            raise Refused(
                f"{run_dir.config} is there already, and no launch wrote it",
                hint="name a directory of its own: run_dir: runs/NAME (the default)",
            )
        make_folders(run_dir, share)
        if not os.path.lexists(run_dir.root / "README"):
            write_whole(run_dir.root / "README", README.format(name=name))
        write_whole(run_dir.config, config_text, mode=readers)
        keep_lineage(run_dir, name)
    except OSError as error:
        raise _not_mine(run_dir, from_os_error(error, f"write the run directory {run_dir.root}")) from None


def readers_of(config: Path | None, share: Sharing) -> Reach:
    """Return who may read the settings as they were launched, and the script that is made of them: those who may read the file
    itself, and the group with which launching or watching is shared. Folders above it do not count: the run directory is what
    the group is to see.
    """
    try:
        found = Reach(PAGE) if config is None else Reach(PAGE).within(reach(config, follow=True))
    except OSError:
        found = Reach(OWN & PAGE)
    return Reach(found.mode | 0o040) if share.launch or share.watch else found


def refuse_outputs(run: Run) -> None:
    """Refuse a folder of ``launch.output`` or ``launch.error`` in which others may lay a link by the name of the next job's
    output: Slurm would append to whatever it leads to. Raises NotPermitted.
    """
    if run.share.launch:  # who may launch the run can do more than that
        return
    for folder in output_folders(run):
        try:
            why = strangers_link(folder) or distrust(folder.stat(), folder)
        except OSError:  # it will be made, or that will say why not
            continue
        if why:
            raise NotPermitted(
                f"launch.output: {why}: a link laid there would have Slurm write into another file of yours",
                hint=f"leave launch.output out (the run directory has logs/), or: chmod go-w {_quoted(folder)}",
            )


def _make_output_folders(run: Run) -> None:
    """Make the folders of ``launch.output`` and ``launch.error``. Raises CannotWrite, NotPermitted."""
    for folder in output_folders(run):
        try:
            make_folder(folder, FOLDER, parents=True)
        except OSError as error:
            raise from_os_error(error, f"make {folder}, the folder of the jobs' output") from None


def _not_mine(run_dir: RunDir, error: Error) -> Error:
    """Return the error with a hint, for another account's run that is not shared: only its owner can share it."""
    try:
        owner = run_dir.root.stat().st_uid
    except OSError:
        return error
    if isinstance(error, NotPermitted) and owner != os.geteuid():
        who = shown_user(owner)
        error.hint = f"the run is {who}'s: once {who} has launched it with share: {{launch: true}}, the group may"
    return error


def register(run_dir: RunDir, name: str) -> str:
    """Let ``ftsupervise status NAME`` find the run from anywhere; return the name under which this account knows it.

    A second run of that name is known as NAME@FOLDER, after the folders above it: a run is its directory, and takes no other
    one's place. Best effort: a name is a convenience.
    """
    folder, root = state_dir() / "runs", run_dir.root
    try:
        make_own(state_dir())
        make_folder(folder)
        known = {one.name: one.readlink() for one in folder.iterdir() if one.is_symlink()}
        if (mine := next((one for one in _names(name, root) if known.get(one) == root), "")) != "":
            return mine
        free = next(one for one in _names(name, root) if one not in known or _is_gone(known[one]))
        temp = folder / f".{free}.{os.getpid()}"
        temp.symlink_to(root)
        temp.replace(folder / free)
    except (OSError, StopIteration):
        return name
    return free


def _names(name: str, root: Path) -> Iterator[str]:
    """Yield the names by which the run may be known: NAME, NAME@FOLDER, NAME@ABOVE-FOLDER, ..., short enough for a file."""
    yield name
    above = [re.sub(r"[^A-Za-z0-9._-]", "_", part) for part in root.parent.parts[1:] if part != "runs"]
    for count in range(1, len(above) + 1):
        yield f"{name}@{'-'.join(above[-count:])}"[:200]
    yield f"{name}@{sha256(os.fsencode(root)).hexdigest()[:12]}"


def _is_gone(place: Path) -> bool:
    """Return whether nothing is there; a place that does not answer is not gone."""

    def look() -> bool:
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return False

    try:
        return in_time(look, _ANSWER) is True
    except OSError:
        return False


def check_may_start(run_dir: RunDir, name: str) -> None:
    """Refuse to launch against a kill switch, against the brake, or a finished run."""
    from ftsupervise.rundir.switches import KILL, read_brake, read_switch

    try:
        files.among(run_dir.switches)
        brake = read_brake(run_dir)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, f"read the run directory {run_dir.root}") from None
    switch = read_switch(run_dir, KILL)
    if switch.up:
        by = f", raised by {switch.who}" if switch.who else ""
        why = f" ({switch.why})" if switch.why else ""
        raise Refused(
            f"the kill switch of {name} is up{by}{why}",
            hint=f"talk to them, then: ftsupervise clear {run_dir.quoted()}",
        )
    if switch.problem:
        raise Refused(
            f"the kill switch of {name} cannot be trusted: {switch.problem}", hint=f"ls -la {_quoted(run_dir.switches)}"
        )
    if run_dir.finished.exists():
        raise Refused(
            f"{name} has finished already", hint=f"to train on: rm {_quoted(run_dir.finished)}, then launch again"
        )
    if brake is not None:
        held = ", and the jobs that were held go on" if brake.held else ", then launch again"
        raise Refused(
            f"{name} is stopped by the brake: {brake.words()}",
            hint=f"when that is fixed: ftsupervise clear --brake {run_dir.quoted()}{held}",
        )


def check_checkpoints(run_dir: RunDir, run: Run, take_over: Collection[str] = ()) -> tuple[TakenOver, ...]:
    """Refuse to launch where other runs have saved, but for those that are to be taken over; return these.

    ``take_over``: names or ids. A folder that does not answer keeps no launch back: the run itself asks it again.
    """
    folder = run.checkpoints.path or run_dir.checkpoints
    try:
        found = within(
            _LOOK, lambda: others_in(folder, run.checkpoints.pattern, run_dir, run.name), key=f"runs in {folder}"
        )
    except TimeoutError:
        return ()
    except OSError as error:
        raise from_os_error(error, f"read the checkpoints in {folder}") from None
    taken = tuple(one for one in found if take_over and {one.run, one.run_id} & {*take_over})
    if rest := [one for one in found if one not in taken]:
        raise others_refused(folder, rest, run_dir)
    if unknown := [one for one in take_over if all(one not in (each.run, each.run_id) for each in taken)]:
        raise NotFound(
            f"{folder} holds no checkpoint of another run called {unknown[0]} that may be gone on from",
            hint=f"ftsupervise checkpoints list {_quoted(folder)}   (those of another account have to be copied first: cp -r)",
        )
    return tuple(TakenOver(one.run_id, one.run) for one in taken)


def _note_taken(run_dir: RunDir, others: tuple[TakenOver, ...], now: datetime) -> None:
    if others:
        by = f"{user_name()}@{os.uname().nodename}"
        note_taken(run_dir, tuple(one._replace(at=now, by=by) for one in others))


def check_queue(plan: Plan, scheduler: Scheduler, *, again: bool) -> None:
    """Refuse what would be a second chain, or an attachment to nothing (Slurm takes an unknown id as satisfied)."""
    if plan.after:
        before = scheduler.describe(plan.after)
        if before is None or before.state.ended:
            state = "is not in the queue" if before is None else f"has ended ({before.state.value})"
            raise NotFound(f"job {plan.after} {state}, so nothing can wait for it", hint="launch without --after")
    if again:
        return
    rundir = RunDir(plan.run_dir)
    records = launches(rundir)
    last = newest(rundir)
    known_by = identify(rundir, plan.name, records, last)
    first = not any(record.written for record in records)  # then jobs of its name belong to other runs
    live = jobs_of_run(known_by, scheduler.queue(users=(user_name(), *people(rundir))), certain=first)
    if plan.after:
        base = plan.after.partition("_")[0]
        live = tuple(job for job in live if re.search(rf":{base}(?!\d)", job.dependency))
        if live:
            raise Refused(
                f"a chain of {plan.name} waits for job {base} already: {', '.join(job.id for job in live)}",
                hint=f"attach behind that one: --after {live[-1].base_id}, or start both at once with --again",
            )
    elif live:
        raise Refused(
            f"{plan.name} is in the queue already: {', '.join(job.id for job in live)}",
            hint=_after_a_broken_launch(records, live)
            or "attach another chain behind it with --after JOBID, or submit beside it with --again",
        )
    elif last is not None and last.job_id and last.cause is None and kind_of_job(last.job_id) != plan.kind:
        raise Refused(  # two chains that do not see each other would end each other's attempts, member by member
            f"attempt {last.number} of {plan.name} is at work in job {last.job_id}, which is not in this queue",
            hint=f"end it first: ftsupervise kill {rundir.quoted()}; when status says STOPPED: ftsupervise clear",
        )


def _after_a_broken_launch(records: tuple[LaunchRecord, ...], live: tuple[Job, ...]) -> str:
    """Return the command to type after an interrupted launch, whose chain in the queue is too short; "" if there is none."""
    for record in records:
        links = {int(job.comment.rpartition(".")[2]): job.base_id for job in live if f":{record.token}." in job.comment}
        if record.state == "submitting" and links and record.chain == "groups":
            ended = " ".join(links[one] for one in sorted(links))
            return f"that launch broke off after {len(links)} of its chains: scancel {ended}; then launch again"
        if record.state == "submitting" and links and max(links) < record.members:
            return (
                f"that launch broke off after {max(links)} of {record.members} jobs; in a few minutes, for the rest: "
                f"ftsupervise launch --after {links[max(links)]} --jobs {record.members - max(links)}"
                + (f" {_quoted(Path(record.config))}" if record.config else "")
            )
    return ""


def launch_run(
    plan: Plan,
    run: Run,
    scheduler: Scheduler,
    *,
    again: bool,
    now: datetime,
    env: Mapping[str, str],
    take_over: Collection[str] = (),
) -> Launched:
    """Do the whole launch: check that it may start, adopt an earlier one, make the directory, submit, register its name."""
    from ftsupervise.config.load import dump

    run_dir = RunDir(plan.run_dir)
    require_own(run_dir)
    refuse_outputs(run)
    check_may_start(run_dir, plan.name)
    others = check_checkpoints(run_dir, run, take_over)
    done = unanswered(plan, scheduler)
    if done is None:
        check_queue(plan, scheduler, again=again)
        for index in range(plan.submissions):
            render(
                plan.part(index), run.launch, plan.link(index)
            )  # a template that does not render must not leave half a chain behind
        settings = dump(run)
        if found := secrecy.kind(settings):
            raise ConfigError(
                f"{run_dir.config} would hold {found}, and others may read it",
                hint="take it out of the settings: ftsupervise config show",
            )
        prepare(run_dir, plan.name, settings, run.share, readers_of(plan.config, run.share))
        _make_output_folders(run)
        _note_taken(run_dir, others, now)
        given, _ = without_secrets(env, run)
        done = submit(plan, run.launch, scheduler, again=again, now=now, env=given)
    known_as = register(run_dir, plan.name)
    pin(run_dir, done.number, run.checkpoints.path)
    try:
        forget_observing(run_dir)  # what a person said of the launch before, which counts where this one is refused
    except OSError as error:
        raise from_os_error(
            error, f"remove {run_dir.state / 'observe'} after job {done.job_ids[0]} was submitted"
        ) from None
    return replace(done, known_as=known_as)


def without_secrets(env: Mapping[str, str], run: Run) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return ``env`` without its secrets, and the names of those that the command might have wanted.

    sbatch would write them to Slurm's spool and give them to every process of the job. Left out are the variables that
    a ``*_env`` of the alerts names, and every secret by its name or its value, but for ``launch.take_along``.
    """

    def named(value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(inner, str) and str(key).endswith("_env"):
                    yield inner
                else:
                    yield from named(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                yield from named(inner)

    alerting = frozenset(named(run.alerts.model_dump()))
    left, out = secrecy.without(env, named=alerting, kept=run.launch.take_along)
    return left, tuple(name for name in out if name not in alerting)


def _narrowed(env: Mapping[str, str], plan: Plan, script: str) -> dict[str, str]:
    """Return the environment by which Slurm makes the job's output as one that nobody else can open to write, where the script
    sets the umask of the launch itself: whoever had it open by then could write into it for as long as the job runs."""
    given = {name: value for name, value in env.items() if name != UMASK}
    if plan.umask and f"\numask {plan.umask}" in script:
        given[UMASK] = f"{int(plan.umask, 8) | 0o022:04o}"
    return given


def submit(
    plan: Plan, launch: Launch, scheduler: Scheduler, *, again: bool, now: datetime, env: Mapping[str, str]
) -> Launched:
    """Submit all links of ``plan``. Raises SubmitRejected, SchedulerUnavailable, CannotWrite, Refused."""
    run_dir = RunDir(plan.run_dir)
    number, folder = _claim(run_dir, now)
    try:  # once more under our claim: another launch may have submitted it between our check and our claim
        check_queue(plan, scheduler, again=again)
    except BaseException:
        folder.rmdir()
        raise
    record = _record(plan, number, run_dir.root.stat().st_uid, now)
    ids: list[str] = []
    found_again = False
    host.answer_by = None  # no deadline from here on: an sbatch that is cut off may have been accepted
    try:
        for index in range(plan.submissions):
            options = plan.link(index, ":".join(ids))
            path = folder / ("train.sbatch" if plan.submissions == 1 else f"train-{index + 1}.sbatch")
            script = render(plan.part(index), launch, options)
            write_whole(path, script, mode=_of_a_script(run_dir.config, launch.template))
            write_json(folder / "launch.json", record)
            given = _narrowed(env, plan, script)
            answer = scheduler.submit(script, script_path=path, token=plan.token_of(index), env=given)
            ids.append(answer.job_id)
            _remember_ours(run_dir, answer.job_id, plan.avoided)
            found_again |= answer.found_again
            record = record._replace(job_ids=tuple(ids))
            if plan.chain == "daisy":
                _hold_behind_the_brake(run_dir, scheduler, ids[1:])
        if plan.chain == "daisy" and isinstance(scheduler, Slurm):
            exclude_alike(scheduler, ids)
        write_json(folder / "launch.json", record._replace(state="submitted"))
    except OSError as error:
        raise _half_written(error, folder, ids) from None
    except SchedulerUnavailable:
        raise  # launch.json says "submitting": the next launch looks for the token
    except Exception:
        _record_quietly(folder / "launch.json", record._replace(state="rejected"))
        raise
    return Launched(tuple(ids), number, run_dir, found_again)


def _hold_behind_the_brake(run_dir: RunDir, scheduler: Scheduler, links: Sequence[str]) -> None:
    """Hold the links of a daisy chain that came into the queue when an earlier one had hit the brake, and had held what waited
    then. One that is missed starts, holds the rest, and goes back by itself.
    """
    from ftsupervise.rundir.switches import held_too, read_brake

    try:
        for job in held_too(run_dir, links):
            scheduler.hold(job)
            if read_brake(run_dir) is None:  # released meanwhile, before there was anything to let go
                scheduler.release(job)
    except (Error, OSError):
        return


def _of_a_script(settings: Path, template: Path | None) -> Reach:
    """Return who may read and run a script that was made of these. Raises OSError."""
    found = reach(settings) if template is None else reach(settings).within(reach(template, follow=True))
    return Reach(SCRIPT).within(found._replace(mode=found.mode | found.mode >> 2 & 0o111))


def expedited_requeue(run: Run, kind: str) -> bool | None:
    """Return whether the cluster offers expedited requeue; None where it does not answer. False, unasked, where it is of
    no use."""
    if kind != SLURM or not wants_expedited(run.launch):
        return False
    try:
        return Slurm().expedites()
    except SchedulerUnavailable:
        return None


def _record(plan: Plan, number: int, owner: int, now: datetime) -> LaunchRecord:
    """The launch as the run directory keeps it, before its first submission."""
    return LaunchRecord(
        number,
        token=plan.token,
        at=now,
        by=f"{user_name()}@{os.uname().nodename}",
        scheduler=plan.kind,
        chain=plan.chain,
        members=plan.members,
        after=plan.after,
        config=str(plan.config or ""),
        owner=owner,
        name=plan.name,
        comment=comment(plan.name, plan.token),
        observe=plan.observe,
    )


def _half_written(error: OSError, folder: Path, ids: list[str]) -> Exception:
    known = from_os_error(error, f"write {folder}")
    if ids:
        return CannotWrite(
            f"{known.message}; these were submitted: {', '.join(ids)}", hint=f"scancel {' '.join(ids)}, or let it run"
        )
    return known


def _remember_ours(run_dir: RunDir, job: str, nodes: tuple[str, ...]) -> None:
    """Record the excluded nodes that may be released later. Without the record they stay excluded in this chain."""
    try:
        if nodes:
            write_exclusions(run_dir.nodes, job, nodes)
    except OSError:
        return


def _record_quietly(path: Path, record: LaunchRecord) -> None:
    try:
        write_json(path, record)
    except OSError:
        return


def _claim(run_dir: RunDir, now: datetime) -> tuple[int, Path]:
    """Claim the next launches/NNNN, unless a launch with a lower number is being submitted."""

    try:
        number = 1 + max(as_counts(os.listdir(run_dir.launches)), default=0)
        while True:
            folder = run_dir.launches / f"{number:04d}"
            try:
                claim_folder(folder)
            except FileExistsError:
                number += 1
                continue
            highest = max(as_counts(os.listdir(run_dir.launches)))
            if highest == number:
                break
            folder.rmdir()  # a number that was given back; a launch with a higher number has not seen us
            number = highest + 1
    except OSError as error:
        raise from_os_error(error, f"write {run_dir.launches}") from None
    for other in launches(run_dir):
        if other.number < number and other.state == "submitting" and now - other.at < _FRESH:
            folder.rmdir()
            raise Refused(
                f"{other.by} is launching {run_dir.root.name} right now",
                hint=f"check again in a minute: ftsupervise status {run_dir.quoted()}",
            )
    return number, folder


def unanswered(plan: Plan, scheduler: Scheduler) -> Launched | None:
    """Adopt an earlier launch that got no answer but whose job is in the queue."""
    run_dir = RunDir(plan.run_dir)
    for record in launches(run_dir):
        if record.state != "submitting" or not record.token:
            continue
        found = scheduler.find(comment(plan.name, record.token))
        if not found or record.chain in (
            "daisy",
            "groups",
        ):  # half a daisy chain is in the queue: the check before the launch reported it
            continue
        ids = tuple(dict.fromkeys(job.base_id for job in found))
        path = run_dir.launches / f"{record.number:04d}" / "launch.json"
        _record_quietly(path, record._replace(state="submitted", job_ids=ids))
        return Launched(ids, record.number, run_dir, found_again=True)
    return None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
