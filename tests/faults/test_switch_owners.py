"""Who may raise a switch: owner x mode x sticky, with real accounts. Needs root to become them."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.alerts.journal import Journal
from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.sources import is_by_hand
from ftsupervise.launch.plan import plan
from ftsupervise.launch.submit import check_queue, prepare
from ftsupervise.model import Job
from ftsupervise.rundir.launches import people
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import KILL, SAVE, read_switch
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.truth import Health, SwitchState
from tests.neighbours.patience import wait_until
from tests.neighbours.stranger import begin_as

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")]

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)
OWNER, MEMBER, STRANGER = (
    "daemon",
    "games",
    "nobody",
)  # accounts every Debian has; MEMBER's own group is the directory's


@pytest.fixture
def rundir(top: Path) -> RunDir:
    """A run of OWNER's whose switches belong to MEMBER's group."""
    run = RunDir(top / "run")
    for folder in (run.switches, run.beats):
        folder.mkdir(parents=True)
    os.chown(run.beats, pwd.getpwnam(OWNER).pw_uid, -1)
    os.chown(run.switches, pwd.getpwnam(OWNER).pw_uid, grp.getgrgid(pwd.getpwnam(MEMBER).pw_gid).gr_gid)
    run.switches.chmod(0o2770)
    return run


def as_user(name: str, act: Callable[[], object]) -> object:
    """Fork, become ``name``, do it; what it gave, or the name of what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            account = pwd.getpwnam(name)
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            os.umask(0o022)
            os.write(writer, json.dumps(act()).encode())
        except OSError as error:
            os.write(writer, json.dumps(type(error).__name__).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def seen_by(name: str, rundir: RunDir, switch: str = KILL) -> SwitchState:
    def look() -> list[str]:
        state = read_switch(rundir, switch)
        return [state.health.value, state.who, state.problem]

    found = as_user(name, look)
    assert isinstance(found, list), found
    health, who, problem = found
    return SwitchState(switch, Health(health), who=who, problem=problem)


@pytest.mark.parametrize("who", [OWNER, MEMBER, "root"])
def test_the_owner_the_group_and_root_may(rundir: RunDir, who: str) -> None:
    assert as_user(who, lambda: (rundir.switches / KILL).touch()) is None
    state = seen_by(OWNER, rundir)
    assert state.up, state
    assert state.who == who


@pytest.mark.threat(
    "An account outside of the group raises a switch.",
    "The account can neither write nor list `switches/`.",
)
def test_a_stranger_cannot_raise_it_nor_look(rundir: RunDir) -> None:
    assert as_user(STRANGER, lambda: (rundir.switches / KILL).touch()) == "PermissionError"
    state = seen_by(STRANGER, rundir)
    assert state.health is Health.UNKNOWN


@pytest.mark.threat("Somebody moves a stranger's file into `switches/`.", "The guard does not obey it.")
def test_a_strangers_file_that_was_moved_here_is_not_obeyed(rundir: RunDir) -> None:
    (rundir.switches / KILL).touch()
    os.chown(rundir.switches / KILL, pwd.getpwnam(STRANGER).pw_uid, -1)
    state = seen_by(OWNER, rundir)
    assert not state.up
    assert "owned by nobody, who is not in the directory's group" in state.problem


def test_an_owner_nobody_knows_here_is_not_obeyed_and_named_by_number(rundir: RunDir) -> None:
    (rundir.switches / KILL).touch()
    os.chown(rundir.switches / KILL, 54321, -1)
    assert "uid 54321" in seen_by(OWNER, rundir).problem


def test_in_a_sticky_directory_for_all_only_the_group_is_obeyed(rundir: RunDir) -> None:
    rundir.switches.chmod(0o1777)
    as_user(STRANGER, lambda: (rundir.switches / KILL).touch())
    as_user(MEMBER, lambda: (rundir.switches / SAVE).touch())
    assert not seen_by(OWNER, rundir, KILL).up
    assert seen_by(OWNER, rundir, SAVE).up


@pytest.mark.threat("Everybody may write `switches/`.", "The guard obeys no file in it.")
def test_in_a_directory_for_all_without_sticky_nobody_is_obeyed(rundir: RunDir) -> None:
    as_user(OWNER, lambda: (rundir.switches / KILL).touch())
    rundir.switches.chmod(0o777)
    assert "everybody may write" in seen_by(OWNER, rundir).problem


def test_a_switch_kept_private_by_a_member_still_counts(rundir: RunDir) -> None:
    def raise_privately() -> None:
        os.close(os.open(rundir.switches / KILL, os.O_CREAT | os.O_WRONLY, 0o600))

    as_user(MEMBER, raise_privately)
    assert seen_by(OWNER, rundir).up


def test_the_training_answers_and_removes_a_save_switch_of_another_member(rundir: RunDir) -> None:
    as_user(MEMBER, lambda: (rundir.switches / SAVE).touch())

    def train() -> list[object]:
        guard = Guard(rundir.root, poll=0, signals=())
        decision = guard.step(1)
        guard.saved(1)
        return [int(decision), os.listdir(rundir.switches)]

    assert as_user(OWNER, train) == [1, []]


def test_the_jobs_of_a_run_are_its_owners_and_those_of_whoever_launched_it(rundir: RunDir) -> None:
    """A colleague in the group who asks only for his own jobs sees none, and launches a second chain beside the first."""
    owner = pwd.getpwnam(OWNER).pw_uid
    os.chown(rundir.root, owner, -1)
    for number, by in enumerate((f"{MEMBER}@login-1", f"{OWNER}@login-1", "left-us-long-ago@login-1", "a,b", ""), 1):
        folder = rundir.launches / f"{number:04d}"
        folder.mkdir(parents=True)
        write_json(folder / "launch.json", {"state": "submitted", "by": by})
    assert people(rundir) == (OWNER, MEMBER)
    asked: list[str] = []

    class Queue(Slurm):
        def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
            asked.extend(users)
            return ()

    run = Run(name="run", run_dir=rundir.root, launch=Launch(command="true"))
    chain = plan(run, kind="slurm", token="t", workdir=rundir.root, python="python3")
    check_queue(chain, Queue({}), again=False)
    assert {OWNER, MEMBER} <= set(asked)


def test_a_colleague_in_the_group_can_watch_beside_the_owner(rundir: RunDir) -> None:
    """Told as the README says: chgrp -R GROUP RUN && chmod -R g+rwX RUN, once after the launch."""
    run = RunDir(rundir.root.parent / "launched")
    os.umask(0o022)
    prepare(run, "launched", "name: launched\n")
    subprocess.run(["chown", "-R", f"{OWNER}:{MEMBER}", str(run.root)], check=True)
    subprocess.run(["chmod", "-R", "g+rwX", str(run.root)], check=True)

    def watched(who: str) -> object:
        def look() -> str:
            journal = Journal(run.watch / "journal", spare=run.watch / "no-spare" / "here")
            journal.change(lambda state: replace(state, announced={**state.announced, who: NOW}))
            write_json(run.watch / "watchers" / who, {"at": NOW.isoformat()})
            return journal.unsaved

        return as_user(who, look)

    assert [watched(who) for who in (OWNER, MEMBER, OWNER)] == ["", "", ""]
    assert set(Journal(run.watch / "journal").read().announced) == {OWNER, MEMBER}


@pytest.mark.threat(
    "A member puts a FIFO in the place of a switch between the look at it and its reading, again and again, so that the look "
    "fails and the thread that watches the switches ends.",
    "What is read has to be a regular file once it is open.",
)
def test_a_fifo_that_takes_a_switchs_place_while_it_is_read_fails_no_look(rundir: RunDir) -> None:
    def exchanges() -> None:
        switch, other = rundir.switches / KILL, rundir.switches / "other"
        switch.write_text("a reason")
        os.mkfifo(other)
        os.open(other, os.O_RDWR)  # somebody writes there, and says nothing
        exchange = ctypes.CDLL(None).renameat2
        while not exchange(-100, os.fsencode(switch), -100, os.fsencode(other), 2):  # RENAME_EXCHANGE
            pass

    member = begin_as(MEMBER, exchanges)
    try:
        wait_until(lambda: (rundir.switches / "other").exists(), "the member")
        until, seen = time.monotonic() + 5, set()
        while time.monotonic() < until:
            seen.add(read_switch(rundir, KILL).health)
    finally:
        os.kill(member, signal.SIGKILL)
        os.waitpid(member, 0)
    assert seen == {Health.OK, Health.BAD}


@pytest.mark.threat(
    "A member mounts a file system of their own (FUSE) over `switches/` where the watch runs: the kernel lets nobody else look "
    "into it, and so the whole run is not watched.",
    "The switches are unknown, and the watch says that the run cannot be watched, and why.",
)
def test_a_mount_of_a_member_over_the_switches_leaves_it_a_run_that_is_told_of(rundir: RunDir) -> None:
    assert is_by_hand(rundir.root)
    member, libc = pwd.getpwnam(MEMBER), ctypes.CDLL(None, use_errno=True)
    # as fusermount does it for the member, who may write the folder
    with Path("/dev/fuse").open("r+b", buffering=0) as fuse:
        options = f"fd={fuse.fileno()},rootmode=40000,user_id={member.pw_uid},group_id={member.pw_gid}".encode()
        if libc.mount(b"member", os.fsencode(rundir.switches), b"fuse", 6, options):
            pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
        try:
            seen = seen_by(OWNER, rundir)
            is_a_run = as_user(OWNER, lambda: is_by_hand(rundir.root))
        finally:
            libc.umount2(os.fsencode(rundir.switches), 2)
    assert (seen.health, is_a_run) == (Health.UNKNOWN, True)
