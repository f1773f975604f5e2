"""What a group may write is the switches and nothing else, whatever the umask: with real accounts in one group."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftsupervise.host.files import TEMPORARY

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")]

OWNER, MEMBER, STRANGER = "daemon", "games", "nobody"  # every Debian has them
GROUP = pwd.getpwnam(MEMBER).pw_gid  # the group of all of OWNER's processes; MEMBER is in it, STRANGER is not

TRAIN = """
import os, pathlib, time
from ftsupervise import Guard
with Guard() as guard:
    newest = guard.latest()
    first = int(newest.name.removeprefix("step-")) + 1 if newest else 0
    for step in range(first, first + 3):
        guard.step(step)
        with guard.checkpoint(step) as folder:
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model" / "weights").write_text("1")
            (folder / "state").write_text("2")
        guard.saved(step)
    guard.finished(step)
"""

Do = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of OWNER's that all may enter, in the group's name."""
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    os.chown(top, pwd.getpwnam(OWNER).pw_uid, GROUP)
    top.chmod(0o755)
    yield top
    shutil.rmtree(top, ignore_errors=True)  # a job may be ending


@pytest.fixture
def do(place: Path, python: str) -> Iterator[Do]:
    states = {who: Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp")) for who in (OWNER, MEMBER)}
    for who, state in states.items():
        os.chown(state, pwd.getpwnam(who).pw_uid, GROUP)

    def run(who: str, umask: int, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "FTSUPERVISE_TEST_PYTHON": python,
            "FTSUPERVISE_STATE_DIR": f"{states[who]}",
            "FTSUPERVISE_LOCAL_KILL_WAIT": "1",
        }
        group = GROUP if who in (OWNER, MEMBER) else pwd.getpwnam(who).pw_gid
        done = subprocess.run(
            [python, "-m", "ftsupervise", *words],
            cwd=place, env=env, user=who, group=group, extra_groups=[], umask=umask,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    yield run
    for state in states.values():
        shutil.rmtree(state, ignore_errors=True)


def configure(place: Path, owner: str = OWNER, **more: object) -> Path:
    (place / "train.py").write_text(TRAIN)
    command = ["sh", "-c", f'exec "$FTSUPERVISE_TEST_PYTHON" {place}/train.py']
    output = str(place / "runs" / "r" / "logs" / "%u-%A.out")  # two accounts, two local queues
    settings = {"name": "r", "scheduler": "local", "launch": {"command": command, "jobs": 1, "output": output}}
    (place / "ftsupervise.yaml").write_text(json.dumps({**settings, **more}))
    (place / "ftsupervise.yaml").chmod(0o644)
    os.chown(place / "ftsupervise.yaml", pwd.getpwnam(owner).pw_uid, GROUP)
    return place / "runs" / "r"


def wait_for(true: Callable[[], bool], what: Callable[[], object]) -> None:
    until = time.monotonic() + 90
    while not true():
        assert time.monotonic() < until, what()
        time.sleep(0.1)


def open_to_others(root: Path) -> set[str]:
    """Return what below ``root`` (itself: ".") the group or everybody may write, without temporary files, which come and go."""
    below = (Path(at, name) for at, folders, files in os.walk(root) for name in (*folders, *files))
    found = [root, *(path for path in below if not path.name.startswith(TEMPORARY))]
    return {str(path.relative_to(root)) for path in found if path.lstat().st_mode & 0o022 and not path.is_symlink()}


def closed_to_the_group(root: Path) -> set[str]:
    """What the group may not read, but for stacks and temporary files."""
    found = [root, *(Path(at, name) for at, folders, files in os.walk(root) for name in (*folders, *files))]
    needed = {path: stat.S_IRGRP | (stat.S_IXGRP if path.is_dir() else 0) for path in found}
    checkpoints = root / "checkpoints"  # the run's own files in them are the training's
    return {
        str(path.relative_to(root))
        for path, bits in needed.items()
        if path.lstat().st_mode & bits != bits
        and checkpoints not in path.parents
        and path.suffix != ".pyc"  # of the guard
    }


def train(place: Path, do: Do, umask: int) -> Path:
    """A whole life of a run under that umask: launched, trained to the end, watched, its nodes marked."""
    run = place / "runs" / "r"
    do(OWNER, umask, "launch")
    wait_for(
        (run / "state" / "finished").exists,
        lambda: [p.read_text() for p in (*run.glob("logs/*"), *run.glob("attempts/*/end.json"))],
    )
    wait_for(lambda: any(run.glob("attempts/*/end.json")), lambda: sorted(run.rglob("*")))
    do(OWNER, umask, "watch", "runs/r", code=None)
    do(OWNER, umask, "nodes", "exclude", "node-7", "--reason", "loud fan")
    return run


@pytest.mark.threat(
    "A member of the primary group writes into the run (watch, journal, nodes, attempts, checkpoints), because the "
    "owner's umask is 002 or 0.",
    "ftsupervise sets the mode of every folder (0755) and file (0644) whatever the umask. Only `switches/` is 2775. "
    "Each launch sets the modes anew.",
)
@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077, 0o027], ids=lambda u: f"umask {u:03o}")
def test_the_group_may_write_the_switches_and_nothing_else_and_read_all(place: Path, do: Do, umask: int) -> None:
    configure(place)
    run = train(place, do, umask)
    assert open_to_others(run) == {"switches"}
    assert stat.S_IMODE((run / "switches").stat().st_mode) == 0o2775
    closed = closed_to_the_group(run)  # who could open the lock of the events could keep it
    assert {name for name in closed if not name.startswith("watch/events/.")} == set()
    assert run.stat().st_mode & 0o005 == 0o005 & ~umask  # whether others may look is what the umask says
    for seen in ("attempts/0001/end.json", "launches/0001/launch.json", "watch/journal", "nodes/exclude/node-7"):
        assert (run / seen).exists(), seen
    assert any(run.glob("checkpoints/*/model/weights")), sorted(run.rglob("*"))


@pytest.mark.threat(
    "A colleague who may read the run and raise its switches tries to change anything else with our own commands.",
    "The colleague can look (`status`, `check`, `nodes`, `watch --no-send`), and raise and clear switches. The "
    "commands refuse the rest.",
)
@pytest.mark.threat(
    "A colleague who may raise the switches of a run has its hangs left alone, or has decisions carried out that its "
    "owner wants only told (`observe`).",
    "The page lies in `state/`, which the owner alone may write, and those with whom the launches are shared.",
)
def test_a_colleague_looks_and_raises_a_switch_and_can_change_nothing_else(place: Path, do: Do) -> None:
    configure(place)
    run = train(place, do, 0o002)
    for words in (("status",), ("check", "all"), ("nodes",), ("watch", "--no-send")):
        done = do(MEMBER, 0o002, *words, str(run), code=None) if words != ("nodes",) else do(MEMBER, 0o002, "nodes")
        assert done.stdout.strip(), (words, done)
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    do(MEMBER, 0o002, "save", str(run))
    assert (run / "switches" / "save-switch").exists()
    do(MEMBER, 0o002, "clear", str(run))
    for tried in ("watch/watchers/x", "watch/journal/00000009.json", "nodes/exclude/node-1", "state/x", "attempts/9"):
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run(
                ["touch", str(run / tried)],
                user=MEMBER, group=GROUP, extra_groups=[], check=True, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    do(MEMBER, 0o002, "alerts", "silence", "r", "--for", "1h", "--run", str(run), code=None)
    do(MEMBER, 0o002, "nodes", "exclude", "node-1", "--reason", "mine", code=77)
    for words in (("observe",), ("observe", "--off")):
        do(MEMBER, 0o002, *words, str(run), code=77)
    after = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    assert {path for path in after if before.get(path) != after[path]} <= {run / "switches"}


@pytest.mark.threat(
    "Sharing gives others more rights than was intended.",
    "`share:` names each part that is opened. `launch` says which rights that gives, and the next launch closes "
    "parts that are no longer shared.",
)
def test_what_is_shared_is_open_and_nothing_else_and_the_launch_says_what_it_hands_over(place: Path, do: Do) -> None:
    configure(place, share={"watch": True, "nodes": True})
    run = place / "runs" / "r"
    said = do(OWNER, 0o077, "launch").stdout
    assert "may watch beside you" in said and "may exclude, trust and clear nodes" in said
    assert "may launch" not in said
    wait_for((run / "state" / "finished").exists, lambda: sorted(run.rglob("*")))
    words = {f"nodes/{word}" for word in ("exclude", "trust", "cleared", "incidents", "applied")}
    assert open_to_others(run) == {
        *("switches", "nodes", "watch", "watch/journal", "watch/watchers", "watch/events"),
        *words,
    }
    do(MEMBER, 0o077, "nodes", "exclude", "node-1", "--reason", "mine")
    assert "games: mine" in do(OWNER, 0o077, "nodes").stdout
    do(MEMBER, 0o077, "watch", str(run), code=None)
    assert {path.owner() for path in (run / "watch" / "journal").glob("*.json")} == {MEMBER}
    configure(place)  # taken back: the next launch closes what was open
    (run / "state" / "finished").unlink()
    said = do(OWNER, 0o002, "launch", "--again").stdout
    assert "may watch" not in said
    wait_for((run / "attempts" / "0002" / "end.json").exists, lambda: sorted(run.rglob("*")))
    assert open_to_others(run) == {"switches"}


@pytest.mark.threat(
    "A second person launches somebody's run and so decides what its owner runs.",
    "`launch` allows it only if the owner launched the run with `share: {launch: true}`. Otherwise it names the "
    "owner and refuses.",
)
def test_a_second_person_launches_only_what_was_shared_for_it(place: Path, do: Do) -> None:
    configure(place)
    run = train(place, do, 0o002)
    (run / "state" / "finished").unlink()
    configure(place, MEMBER)
    refused = do(MEMBER, 0o002, "launch", "--again", code=77)
    assert "share: {launch: true}" in refused.stderr and "daemon" in refused.stderr
    configure(place, share={"launch": True})
    said = do(OWNER, 0o002, "launch", "--again").stdout
    assert "may launch and continue the run" in said
    wait_for((run / "attempts" / "0002" / "end.json").exists, lambda: sorted(run.rglob("*")))
    (run / "state" / "finished").unlink()
    configure(place, MEMBER, share={"launch": True})
    do(MEMBER, 0o002, "launch", "--again")
    wait_for((run / "attempts" / "0003" / "end.json").exists, lambda: [p.read_text() for p in run.glob("logs/*")])
    assert (run / "attempts" / "0003" / "end.json").owner() == MEMBER
    ended = (run / "attempts" / "0003" / "end.json").read_text()
    logs = "\n".join(p.read_text() for p in run.glob("logs/*"))
    assert json.loads(ended)["exit_code"] == 0, logs
    assert (run / "state" / "finished").exists()


@pytest.mark.threat(
    "`share.group` names a group that does not exist or that the owner is not in.",
    "`launch` refuses before it submits anything.",
)
def test_a_group_one_is_not_in_is_refused_before_anything_is_submitted(place: Path, do: Do) -> None:
    configure(place, share={"group": "shadow", "watch": True})
    refused = do(OWNER, 0o022, "launch", code=None)
    assert refused.returncode and "not in the group shadow" in refused.stderr
    configure(place, share={"group": "nosuchgroup"})
    refused = do(OWNER, 0o022, "launch", code=None)
    assert refused.returncode and "no group is called nosuchgroup" in refused.stderr
    assert not list((place / "runs" / "r" / "launches").glob("*"))


@pytest.mark.threat(
    "The run directory exists already, and others may write it.",
    "`launch` leaves it as it is, and says who may write it and what to type.",
)
def test_a_run_directory_of_ones_own_that_others_may_write_is_told_at_launch(place: Path, do: Do) -> None:
    run = configure(place, run_dir=str(place / "mine")).parent.parent / "mine"
    run.mkdir()
    os.chown(run, pwd.getpwnam(OWNER).pw_uid, GROUP)
    run.chmod(0o2775)
    said = do(OWNER, 0o022, "launch").stdout
    assert "the group games may write" in said and "chmod go-w" in said
    assert open_to_others(run) - {"switches"} == {"."}  # it was there before: its owner's to close
    wait_for(lambda: any(run.glob("attempts/*/end.json")), lambda: sorted(run.rglob("*")))
