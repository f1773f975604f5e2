"""FIFOs, links and folders that another account laid in the place of what we write and read: none of them holds us."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.find_run import run_dir_of_config
from ftsupervise.errors import Error
from ftsupervise.host import files, processes
from ftsupervise.nodes import selector
from ftsupervise.report import run_name
from ftsupervise.run import gate
from ftsupervise.rundir import heartbeat_page, paths
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_json, write_json
from ftsupervise.scheduler.local import Local
from ftsupervise.truth import Beat
from tests.neighbours.stranger import as_stranger, one_by_one
from tests.neighbours.supervised import SupervisedRun

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]

TYPED = str(Path(sys.executable).with_name("ftsupervise"))
NOW = datetime(2026, 11, 22, 3, 0, tzinfo=timezone.utc)


def within(seconds: float, act: Callable[[], object]) -> object:
    """What ``act`` gave or raised; fails when it is held. The thread is left behind then, as a test can do no more."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(act())
        except (OSError, ValueError, Error) as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert answers, "it is held"
    return answers[0]


def old_names(folder: Path, name: str, pids: range) -> list[Path]:
    """The temporary names that could be guessed: the name, the host and a process id."""
    host = os.uname().nodename
    return [folder / f".tmp-{name}-{host}-{pid}" for pid in pids]


def lay_fifos(paths: list[Path]) -> None:
    as_stranger(one_by_one(*(partial(os.mkfifo, path) for path in paths)))
    assert paths[0].exists()


def coming_pids() -> range:
    """A guess of the process ids of the next few hundred processes, as anybody can make it."""
    newest = int(Path("/proc/loadavg").read_text().split()[-1])
    return range(newest, newest + 400)


@pytest.mark.threat(
    "A stranger lays FIFOs at the temporary names of a watch.",
    "Temporary names are unguessable and are created with O_EXCL.",
)
def test_fifos_laid_for_the_temporary_files_of_a_watch_do_not_hold_it(top: Path) -> None:
    run = RunDir(top / "run")
    for folder in (run.switches, run.launches, run.watch / "journal", run.watch / "watchers"):
        folder.mkdir(parents=True)
    run.config.write_text(
        f"name: held\nscheduler: local\nlaunch: {{command: 'true'}}\nrun_dir: {run.root}\nwatch: {{memory: {{}}}}\n"
    )
    run.watch.chmod(0o1777)
    (run.watch / "watchers").chmod(0o1777)
    pids = coming_pids()
    lay_fifos(old_names(run.watch, "memory.json", pids))
    lay_fifos(old_names(run.watch / "watchers", heartbeat_page.own_watcher(), pids))
    done = subprocess.run([TYPED, "watch", "--no-send", str(run.root)], capture_output=True, text=True, timeout=60)
    assert (run.watch / "watchers" / heartbeat_page.own_watcher()).is_file(), done.stderr


@pytest.mark.threat(
    "A stranger lays FIFOs at the temporary names of `nodes/incidents`.",
    "`ftsupervise run` ends in time.",
)
def test_fifos_laid_for_the_troubles_of_nodes_do_not_hold_a_run_beyond_its_end(
    top: Path, until: Callable[..., Any]
) -> None:
    """The name of a run's page, and of its temporary file, is made of what everybody sees in /proc."""
    run = RunDir(top / "run")
    for folder in (run.switches, run.nodes / "incidents"):
        folder.mkdir(parents=True)
    (run.nodes / "incidents").chmod(0o1777)
    go, begun = top / "go", top / "begun"
    options = ("--in-place", "1", "--back-off", "0", "--warm", "off")
    health = ("--health", "exit 2", "--health-when", "failure")  # a trouble of this node, to be written down
    command = f"touch {begun}; until [ -e {go} ]; do sleep 0.1; done; exit 3"
    with closing(SupervisedRun(run.root, top)) as supervised:
        child = supervised.start(*options, *health, "--", "sh", "-c", command)
        until(begun.exists, "the command")
        host, pid = os.uname().nodename, child.supervisor
        name = f"{run.root.name}.none.{host}.{pid}.{processes.identity(pid)}.json"
        lay_fifos([run.nodes / "incidents" / one for one in (f".tmp-{name}-{host}-{pid}", f".tmp-{name}")])
        go.touch()
        assert child.wait(90) == 3
        assert (run.nodes / "incidents" / name).is_file(), "the name was the right one"


@pytest.mark.threat(
    "A FIFO, a link or a folder lies in the place of a file that ftsupervise writes.",
    "ftsupervise replaces it or reports an error. It never follows it or waits for it.",
)
def test_what_we_write_replaces_a_fifo_or_a_link_and_follows_none(top: Path) -> None:
    top.chmod(0o1777)
    target = top / "precious"
    target.write_text("mine")
    fifo, link = partial(os.mkfifo, top / "fifo"), partial((top / "link").symlink_to, target)
    as_stranger(one_by_one(fifo, link, (top / "folder").mkdir))
    for name in ("fifo", "link"):
        assert within(10, lambda name=name: write_json(top / name, {"a": 1})) is None  # type: ignore[misc]
        assert read_json(top / name) == {"a": 1}
    assert isinstance(within(10, lambda: write_json(top / "folder", {})), OSError)
    assert target.read_text() == "mine"
    assert not [path for path in top.iterdir() if path.name.startswith(".tmp-")]


def test_a_beat_and_the_gate_are_not_held_by_what_lies_in_their_place(top: Path) -> None:
    run = RunDir(top / "run")
    for folder in (run.beats, run.attempts, run.switches):
        folder.mkdir(parents=True)
    beat = Beat(rank=0, step=1, phase="", at=NOW, pid=os.getpid(), host="x", facts={})
    run.beats.chmod(0o1777)
    run.attempts.chmod(0o1777)
    lay_fifos([run.beats / f".tmp-rank-0-{os.getpid()}", run.beats / "rank-0"])
    lay_fifos(old_names(run.attempts, "room", range(os.getpid(), os.getpid() + 1)))
    assert within(10, lambda: heartbeat_page.write_beat(run, beat)) is None
    assert within(10, lambda: gate.prepare(run)) is None
    assert [one.step for one in heartbeat_page.read_beats(run)] == [1]


@pytest.mark.threat(
    "FIFOs (with or without a writer), links to `/dev/zero` or folders lie in the place of every file that "
    "ftsupervise reads.",
    "ftsupervise skips each of them at once.",
)
@pytest.mark.parametrize("kind", ["fifo", "a fifo with a writer", "link to /dev/zero", "folder"])
def test_what_lies_in_the_place_of_a_page_is_passed_over_at_once(top: Path, kind: str) -> None:
    run = RunDir(top / "run")
    attempt = run.attempt(1)
    places = [
        run.config,
        run.launches / "0001" / "launch.json",
        attempt / "warning",
        attempt / "start.json",
        attempt / "end.json",
        run.beats / "rank-0",
        run.watch / "watchers" / "somebody",
        top / "ftsupervise.yaml",
        top / "script.sh",
    ]
    writers = []
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.parent.chmod(0o1777)
        if "fifo" in kind:
            as_stranger(lambda place=place: os.mkfifo(place, 0o666))  # type: ignore[misc]
        elif kind == "folder":
            as_stranger(lambda place=place: place.mkdir())  # type: ignore[misc]
        else:
            as_stranger(lambda place=place: place.symlink_to("/dev/zero"))  # type: ignore[misc]
        if "writer" in kind:
            writers.append(os.open(place, os.O_RDWR | os.O_NONBLOCK))
    run.switches.mkdir()
    try:
        assert within(10, lambda: run_name(run)) == "run"
        assert len(within(10, lambda: launches(run))) == 1  # type: ignore[arg-type]
        assert within(10, lambda: heartbeat_page.read_beats(run)) == ()
        assert within(10, lambda: heartbeat_page.watchers(run)) == ()
        assert isinstance(within(10, lambda: run_dir_of_config(top / "ftsupervise.yaml")), Error)
        within(10, lambda: ledger(run))
        assert within(10, lambda: selector.text_of(["bash", str(top / "script.sh")])) == f"bash\n{top / 'script.sh'}"
        within(10, lambda: paths.tell(top / "script.sh", "said"))
        for words in (["status"], ["watch", "--no-send"]):
            subprocess.run([TYPED, *words, str(run.root)], capture_output=True, timeout=60)
    finally:
        for fd in writers:
            os.close(fd)


@pytest.mark.threat(
    "A link, a FIFO, a foreign file or a second hard link lies where a local job writes its output.",
    "The job writes through none of them and says so.",
)
@pytest.mark.parametrize("kind", ["link", "fifo", "file", "second name"])
def test_the_output_of_a_local_job_goes_through_nothing_that_a_stranger_laid(
    top: Path, until: Callable[..., Any], kind: str
) -> None:
    folder = top / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    precious = top / "precious"
    precious.write_text("mine\n")
    place = folder / "job.out"
    if kind == "second name":
        os.link(precious, place)
    else:
        lay: dict[str, Callable[[], object]] = {
            "link": lambda: place.symlink_to(precious),
            "fifo": lambda: os.mkfifo(place),
            "file": lambda: place.write_text("theirs\n"),
        }
        as_stranger(lay[kind])
    (folder / "ftsupervise.yaml").write_text(
        f"name: told\nscheduler: local\nrun_dir: {top}/run\n"
        f"launch: {{command: echo SAID, jobs: 1, time: 1m, output: {place}}}\n"
    )
    subprocess.run([TYPED, "launch"], cwd=folder, check=True, capture_output=True, timeout=60)
    until(lambda: not Local().queue(), "the end of the chain")
    assert precious.read_text() == "mine\n"
    if kind == "file":
        assert place.read_text() == "theirs\n", "and nothing of ours is told to its owner"


@pytest.mark.threat(
    "Others may write the templates of messages, or a FIFO lies in their place.",
    "ftsupervise uses the built-in templates, and the message says so.",
)
def test_templates_of_messages_that_a_stranger_may_write_are_not_used(top: Path) -> None:
    from ftsupervise.alerts.wording import own_template
    from ftsupervise.host.ownership import NotTrusted

    template = top / "alert.text.j2"
    template.write_text("hello\n")
    found = own_template(top, "alert.text.j2")
    assert found is not None and found[0] == "hello\n" and found[2]()
    assert own_template(top, "../../etc/passwd") is None
    template.chmod(0o666)
    with pytest.raises(NotTrusted, match="everybody may write"):
        own_template(top, "alert.text.j2")
    template.unlink()
    os.mkfifo(template)
    assert isinstance(within(10, lambda: own_template(top, "alert.text.j2")), OSError)


def test_an_append_is_refused_where_it_would_reach_another_file(top: Path) -> None:
    began = time.monotonic()
    (top / "mine").write_text("")
    (top / "link").symlink_to("mine")
    os.mkfifo(top / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(OSError):
            files.open_append(top / name)
    os.close(files.open_append(top / "mine"))
    assert time.monotonic() - began < 10
