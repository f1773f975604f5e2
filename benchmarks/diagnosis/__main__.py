"""Does ``ftsupervise diagnose`` name the right class and the right rank? Jobs of eight ranks of gloo on a real Slurm, on this
machine, under a real supervisor, in as many random trials as you like.

    python benchmarks/diagnosis [--trials 5] [--scenes skip,read] [--seed 0] [--at-once 3] [--results FILE] [--check]
    python benchmarks/diagnosis --table FILE [--check]

Each scene is a run of its own, and each of its attempts a trial: a random rank does one thing at a random step, before a random
collective. The supervisor notices, takes the evidence, ends the ranks and starts the next attempt from its standby, so that
torch is imported once for each run. Printed is the confusion matrix (what was done against what was said), how often the rank
was right, how often a wrong one was named with high confidence, which must be never, and what PyTorch's own analyzer says of
the same dumps. ``--results`` adds each trial to a file, as it ends; ``--table`` prints what stands in such a file. ``--check``
exits 1 where fewer than 29 of 30 (or that share) were right in any scene, or not all trials were played. Needs torch, Slurm,
and root for the file system that hangs and for the cgroup that is full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from ftsupervise.cli.output import plain
from ftsupervise.diagnosis.gather import of_attempt
from ftsupervise.diagnosis.kept import keep
from ftsupervise.diagnosis.verdict import judge_attempt
from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox, missing, temporary

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 8
TOOL = str(Path(sys.executable).with_name("ftsupervise"))
BOUND = 240.0  # seconds for an attempt to end; of a slow rank, for it to be named
SLOW = 600.0
KEEP = os.environ.get("KEEP_SCENES")  # a folder for the run directories, to look at
NEEDED = 29 / 30
MISSING, MISMATCH = "a rank that did not join a collective", "ranks that called different collectives"
# The scenes, each with the classes of which one is right. A rank that skips a collective and goes on calls another one in its
# place, or none; one that skips it for an evaluation of its own does not join.
SCENES = {
    "skip": (MISSING, MISMATCH),
    "order": (MISMATCH,),
    "size": (MISMATCH,),
    "loader": ("a rank that waits for its data loader",),
    "read": ("a rank that waits for a file system",),
    "stop": ("a rank that is stopped",),
    "lock": ("a rank that waits for itself",),
    "interpreter": ("a rank that computes and reports nothing",),
    "slow": ("a rank that is slow",),
    "segfault": ("a crash",),
    "memory": ("out of host memory",),
    "exception": ("an error in the program",),
}
VARIANTS = {
    "skip": ("goes on", "elsewhere"),
    "lock": ("twice", "queue", "two locks"),
    "interpreter": ("sleeps", "computes"),
    "segfault": ("null", "signal"),
    "exception": ("key", "index", "shapes", "own", "assert"),
}
KINDS, SIZES = ("all_reduce", "all_gather", "broadcast"), (4, 100, 1000, 65536)
FREE = ("all_reduce", "all_gather")  # in which a tensor of another size is noticed


def drawn(scene: str, rng: random.Random) -> dict[str, Any]:
    """Draw a trial: who, when, before which collective of which loop, and how."""
    program = [(rng.choice(KINDS), rng.choice(SIZES)) for _ in range(rng.randint(2, 4))]
    at = rng.randrange(len(program))
    if scene == "order":
        at = rng.randrange(len(program) - 1)
        others = [kind for kind in KINDS if kind != program[at][0]]
        program[at + 1] = rng.choice(others), program[at + 1][1]
    if scene == "size":
        program[at] = rng.choice(FREE), rng.choice(SIZES)
    step, slow = rng.randint(15, 45), scene == "slow"
    return {
        "scene": scene,
        "culprit": rng.randrange(RANKS),
        "step": step,
        "last": step + rng.randint(3, 12),
        "program": program,
        "at": at,
        "variant": rng.choice(VARIANTS.get(scene, ("",))),
        "factor": rng.choice((0.25, 0.5, 1.5, 2.0, 4.0)),
        "pace": rng.uniform(0.6, 1.2) if slow else rng.uniform(0.01, 0.05),
        "after": rng.uniform(0.3, 0.9) if slow else 0.0,
        "workers": rng.randrange(2) if scene == "loader" else 0,
        "loud": rng.randint(1, 20),
    }


class Told(NamedTuple):
    """A trial, and what was said of it. ``torch``: what PyTorch's analyzer made of its dumps, as they are and mended."""

    trial: dict[str, Any]
    said: str
    ranks: tuple[int, ...]
    confidence: str
    headline: str
    seconds: float
    page: bool  # verdict.json says the same
    torch: tuple[str, str] = ("", "")

    @property
    def right(self) -> bool:
        return self.said in SCENES[self.trial["scene"]] and self.ranks == (self.trial["culprit"],)

    @property
    def wrong_and_sure(self) -> bool:
        return self.confidence == "high" and self.ranks not in ((), (self.trial["culprit"],))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--scenes", "--scene", default=",".join(SCENES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3, help="scenes that are played at the same time")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.table is not None:
        return report(read_results(args.table), check=args.check)
    signal.signal(signal.SIGTERM, stop)
    if absent := missing():
        raise SystemExit(f"needs Slurm: apt-get install {' '.join(dict.fromkeys(absent.values()))}")
    found = list[Told]()
    jobs = [part for scene in args.scenes.split(",") for part in parts_of(scene, args.trials, args.seed)]
    with (
        temporary(nodes=2, cpus=RANKS * args.at_once, gpus_per_node=0) as sandbox,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        for some in [pool.submit(told_of, trials, sandbox, args.results, found) for trials in jobs]:
            try:
                some.result()
            except (RuntimeError, OSError) as error:  # the others go on
                print(f"a run came to nothing: {error}", flush=True)
    print()
    code, due = report(found, check=args.check), sum(map(len, jobs))
    if len(found) < due:
        print(f"only {len(found)} of {due} trials were played")
    return code or int(args.check and len(found) < due)


def stop(*_: object) -> None:
    """So that the sandbox goes down."""
    STOPPING.set()
    sys.exit(143)


def parts_of(scene: str, trials: int, seed: int) -> list[list[dict[str, Any]]]:
    """Return the trials of a scene, each list for a run of its own. A slow rank is watched for minutes: several at a time."""
    rng = random.Random(f"{seed} {scene}")
    every = [drawn(scene, rng) for _ in range(trials)]
    share = -(-trials // 6) if scene == "slow" else len(every)
    return [every[at : at + share] for at in range(0, len(every), share)]


def told_of(trials: list[dict[str, Any]], sandbox: Sandbox, results: Path | None, found: list[Told]) -> None:
    for one in play(trials, sandbox):
        if results is not None:
            with results.open("a") as file:
                file.write(json.dumps(one._asdict()) + "\n")
        who, what = one.trial["culprit"], f"{one.trial['scene']} {one.trial['variant']}".strip()
        print(f"{what:24} rank {who}: {one.said}, {one.ranks}, {one.confidence}, {one.seconds:.0f} s"
              f"{'' if one.right else '   <- ' + one.headline[:200]}{'' if one.page else '   <- verdict.json differs'}",
              flush=True)  # fmt: skip
        found.append(one)


def read_results(path: Path) -> list[Told]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Told(**{**row, "ranks": tuple(row["ranks"]), "torch": tuple(row["torch"])}) for row in rows]


class Analyzer:
    """PyTorch's own, in a process of its own that has imported torch once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def says(self, folder: Path) -> tuple[str, str]:
        """Return what it makes of the dumps in ``folder``, as they are and mended; "" where there are none."""
        with self._lock:
            if self._child is None:
                words = [sys.executable, str(HERE / "by_torch.py")]
                self._child = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(json.dumps([str(folder), RANKS]) + "\n")
            self._child.stdin.flush()
            one, other = json.loads(self._child.stdout.readline())
        return one, other


BY_TORCH, STOPPING = Analyzer(), threading.Event()


# ------------------------------------------------------------------------------------------------------------- playing


@contextmanager
def hung_mount(folder: Path) -> Iterator[None]:
    """A file system on ``folder``/mount that hangs as ``folder``/control says."""
    (folder / "mount").mkdir()
    (folder / "control").write_text("")
    words = [sys.executable, str(ROOT / "tests/faults/hung_fuse.py"), str(folder / "mount"), str(folder / "control")]
    fuse = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        (folder / "control").write_text("")
        subprocess.run(["umount", "-l", str(folder / "mount")], check=False)
        fuse.terminate()
        fuse.wait()


@contextmanager
def cgroup() -> Iterator[Path]:
    """A folder in the hierarchy of the cgroups of memory (version 1) in which a rank makes its own."""
    made = Path("/sys/fs/cgroup/memory", f"fts-diagnosis-{os.getpid()}-{random.randrange(10**6)}")
    made.mkdir()
    try:
        yield made
    finally:
        for inner in [*made.iterdir(), made]:
            if inner.is_dir():
                inner.rmdir()


@contextmanager
def place(scene: str) -> Iterator[tuple[Path, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="fts-diagnosis-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        if scene == "read":
            with hung_mount(folder):
                yield folder, {}
        elif scene == "memory":
            with cgroup() as group:
                yield folder, {"OOM_CGROUP": str(group)}
        else:
            yield folder, {}


def play(trials: list[dict[str, Any]], sandbox: Sandbox) -> Iterator[Told]:
    """Play the trials of a scene, an attempt each, and ask for the verdict of each."""
    scene = trials[0]["scene"]
    with place(scene) as (folder, more):
        (folder / "trials.json").write_text(json.dumps(trials))
        env = {**sandbox.env(), "FTSUPERVISE_STATE_DIR": str(folder / "state")}
        hang = {"at_least": "5s", "unknown": "20s", "start": "2m"}
        restart = {"hang": hang, "back_off": "0s", "in_place": 10_000, "same_failure": 0, "warm": ["torch.distributed"]}
        launch = {
            "command": f"{sys.executable} {HERE / 'job.py'} {folder / 'trials.json'}",
            "nodes": 2,
            "tasks_per_node": RANKS // 2,
            "jobs": 1,
            "env": {**more, "TMPDIR": str(folder)},  # killed loaders leave folders there
            "restart": restart,
        }
        nodes = {"at_most": 0}  # each trial leaves its mark on a node
        (folder / "ftsupervise.yaml").write_text(json.dumps({"name": "scene", "launch": launch, "nodes": nodes}))
        typed("launch", folder=folder, env=env)
        run = folder / "runs/scene"
        try:
            until(lambda: "a standby is ready" in log_of(run), 180, f"a standby of {scene}", partial(waits, run, env))
            (folder / "warm").touch()
            for number, trial in enumerate(trials, 2):
                yield _judged(trial, number, folder, env, last=number > len(trials))
        finally:
            typed("kill", "--yes", "runs/scene", folder=folder, env=env)
            (folder / "done").touch()
            if KEEP is not None:
                shutil.copytree(run, f"{KEEP}/{scene}-{folder.name}", symlinks=True, ignore_dangling_symlinks=True)


def _judged(trial: dict[str, Any], number: int, folder: Path, env: dict[str, str], *, last: bool) -> Told:
    run, live = folder / "runs/scene", dict[str, Any]()
    over: datetime | None = None
    attempt = run / f"attempts/{number:04}"
    until(attempt.exists, 60, f"attempt {number}")
    began = time.monotonic()
    end, bound = attempt / "end.json", SLOW if trial["scene"] == "slow" else BOUND
    while not end.exists() and time.monotonic() < began + bound and not STOPPING.is_set():
        time.sleep(0.2)
        if trial["scene"] == "slow" and '"straggler": null' not in progress_of(attempt):
            break
        if trial["scene"] == "read" and time.monotonic() > began + 5 and list(attempt.glob("evidence/rank-*.txt")):
            time.sleep(3)
            (folder / "control").write_text("")  # the kernel ends no process whose question is with the file system
    if trial["scene"] == "slow":  # it goes on: this is asked while it runs
        over = datetime.now(timezone.utc)
        live = asked(folder, env)
        (folder / f"over-{number}").touch()
    until(end.exists, 60, f"the end of attempt {number}")
    found = live or judged(RunDir(run), number)
    if last and not live and found != (again := asked(folder, env, str(number))):
        found["headline"] += f" <- and the command says {again['kind']}, {again['culprits']}"
    one = next(one for one in ledger(RunDir(run)) if one.number == number)
    seconds = ((over or one.ended or one.started) - one.started).total_seconds()
    keep(RunDir(run))  # as the watch has it done
    page = read_page(VerdictPage, attempt)
    same = (
        page is None
        or trial["scene"] == "slow"
        or (page.kind, list(page.culprits)) == (found["kind"], found["culprits"])
    )
    by_torch = BY_TORCH.says(attempt / "evidence/flight")
    return Told(
        trial, found["kind"], tuple(found["culprits"]), found["confidence"], found["headline"], seconds, same, by_torch
    )


def judged(rundir: RunDir, number: int) -> dict[str, Any]:
    """Return what the command says, from the functions that it calls: its own start would cost a second of a processor."""
    attempts = ledger(rundir)
    one = next(one for one in attempts if one.number == number)
    found = judge_attempt(of_attempt(rundir, attempts, one, whole=False, progress=lambda: None))
    return _of(plain(found))


def _of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("kind", "culprits", "confidence", "headline")}


def asked(folder: Path, env: dict[str, str], *attempt: str) -> dict[str, Any]:
    done = typed("diagnose", "runs/scene", *attempt, "--json", folder=folder, env=env)
    try:
        return _of(json.loads(done.stdout))
    except ValueError:
        return {"kind": "no answer", "culprits": [], "confidence": "", "headline": done.stderr[-300:]}


def typed(*words: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([TOOL, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode and words[0] == "launch":
        raise RuntimeError(done.stderr)
    return done


def log_of(run: Path) -> str:
    return "".join(one.read_text(errors="replace") for one in sorted(run.glob("logs/*.out")))


def progress_of(attempt: Path) -> str:
    try:
        return (attempt / "progress.json").read_text()
    except OSError:
        return '"straggler": null'


def waits(run: Path, env: dict[str, str]) -> str:
    """Return what a job that does not begin waits for."""
    asked = ("squeue", "-o", "%i %T %r"), ("sinfo", "-N", "-o", "%N %T %E")
    said = [subprocess.run(words, env=env, capture_output=True, text=True, check=False).stdout for words in asked]
    return "\n".join((*said, log_of(run)[-500:]))


def until(done: Any, seconds: float, what: str, why: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if STOPPING.is_set():
            raise RuntimeError("it is to stop")
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds:.0f} s: {what}\n{why()}")
        time.sleep(0.1)


# -------------------------------------------------------------------------------------------------------------- tables


def report(found: Sequence[Told], *, check: bool) -> int:
    print(table(found))
    scenes = list(dict.fromkeys(one.trial["scene"] for one in found))
    short = [
        scene
        for scene in scenes
        if (some := [one.right for one in found if one.trial["scene"] == scene]) and sum(some) < NEEDED * len(some)
    ]
    wrong = sum(one.wrong_and_sure for one in found)
    differ = sum(not one.page for one in found)
    figure("diagnosis/right", sum(one.right for one in found), "", f"of {len(found)} trials, class and rank")
    figure("diagnosis/wrong-and-sure", wrong, "", f"of {len(found)} trials")
    print(f"\nwrong culprits with high confidence: {wrong}; verdict.json and diagnose differ: {differ}; "
          f"below 29 of 30: {', '.join(short) or 'no scene'}")  # fmt: skip
    return int(check and bool(short or wrong or differ))


def table(found: Sequence[Told]) -> str:
    """Return the confusion matrix: a row for each scene, a column for each class that was said."""
    scenes = [scene for scene in SCENES if any(one.trial["scene"] == scene for one in found)]
    classes = [name for name, _ in Counter(one.said for one in found).most_common()]
    letters = {name: chr(ord("A") + at) for at, name in enumerate(classes)}
    rows = [f"{'what was done':14}" + "".join(f"{letters[name]:>4}" for name in classes)
            + "   of  class  rank  both  wrong and sure  seconds  torchfrtrace: as they are, mended"]  # fmt: skip
    for scene in scenes:
        some = [one for one in found if one.trial["scene"] == scene]
        said = Counter(one.said for one in some)
        cells = "".join(f"{said[name] or '.':>4}" for name in classes)
        kind = sum(one.said in SCENES[scene] for one in some)
        rank = sum(one.ranks == (one.trial["culprit"],) for one in some)
        middle = sorted(one.seconds for one in some)[len(some) // 2]
        theirs = [sum(names(one.torch[at], one.trial["culprit"]) for one in some) for at in (0, 1)]
        rows.append(f"{scene:14}{cells} {len(some):4}{kind:7}{rank:6}{sum(one.right for one in some):6}"
                    f"{sum(one.wrong_and_sure for one in some):16}{middle:9.0f}{theirs[0]:13}, {theirs[1]}")  # fmt: skip
    return "\n".join([*rows, "", *(f"{letter}: {name}" for name, letter in letters.items())])


def names(said: str, culprit: int) -> bool:
    """Return whether PyTorch's analyzer has named this rank alone in the first error that it tells."""
    said = said.partition("collective stack trace:")[0]
    found = re.findall(r"[Cc]ulprit rank (\d+)|missing ranks: \{([\d, ]+)\}", said)
    ranks = {int(word) for pair in found for word in "".join(pair).split(",")}
    return ranks == {culprit}


if __name__ == "__main__":
    sys.exit(main())
