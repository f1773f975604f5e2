"""Does ``ftsupervise diagnose`` name the right class and the right rank? Jobs on a real Slurm on this machine, of gloo.

    python benchmarks/diagnosis [--trials 3] [--ranks 8] [--scenes sleep,read]

In each trial a random rank does one thing. Printed is how often each class was said in each scene, how often the rank was
right, and how often a wrong one was named with high confidence, which must be never. Needs torch, Slurm, and root for the file
system that hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftsupervise.sandbox import Sandbox, missing, temporary

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BOUND = 240.0  # seconds for a job to fail
KEEP = os.environ.get("KEEP_SCENES")  # a folder for the run directories, to look at
# the scene, and the classes of which one is right
SCENES = {
    "sleep": ("a rank that did not join a collective",),
    "loader": ("a rank that waits for its data loader",),
    "read": ("a rank that waits for a file system",),
    "stopped": ("a rank that is stopped",),
    "lock": ("a rank that waits for itself",),
    "interpreter": ("a rank that computes and reports nothing", "a rank that did not join a collective"),
    "loop": ("a rank that computes and reports nothing",),
    "another collective": ("ranks that called different collectives",),
    "size": ("ranks that called different collectives",),
    "segfault": ("a crash",),
    "exception": ("an error in the program",),
}


class Trial(NamedTuple):
    scene: str
    culprit: int
    said: str
    ranks: tuple[int, ...]
    confidence: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sandbox goes down
    if absent := missing():
        raise SystemExit(f"needs Slurm: apt-get install {' '.join(dict.fromkeys(absent.values()))}")
    rng, trials = random.Random(args.seed), list[Trial]()
    for number in range(args.trials):
        for scene in args.scenes.split(","):
            one = play(scene, rng.randrange(args.ranks), args.ranks)
            trials.append(one)
            right = one.said in SCENES[scene] and one.ranks == (one.culprit,)
            print(f"{number + 1:3} {scene:20} rank {one.culprit}: {one.said}, {one.ranks}, {one.confidence}, "
                  f"{one.seconds:.0f} s{'' if right else '   <- not so'}", flush=True)  # fmt: skip
    print("\n" + table(trials))


def play(scene: str, culprit: int, ranks: int) -> Trial:
    """Play one job until its first attempt has ended, and ask for the verdict."""
    with tempfile.TemporaryDirectory(prefix="fts-diagnosis-") as made:
        folder, mount = Path(made), Path(made, "mount")
        mount.mkdir()
        control = folder / "control"
        control.write_text("read")
        words = [sys.executable, str(ROOT / "tests/faults/hung_fuse.py"), str(mount), str(control)]
        fuse = subprocess.Popen(words, stderr=subprocess.DEVNULL) if scene == "read" else None
        try:
            with temporary(nodes=2, cpus=(ranks + 1) // 2, gpus_per_node=0) as sandbox:
                return _judged(scene, culprit, ranks, folder, sandbox)
        finally:
            control.write_text("")
            if fuse is not None:
                subprocess.run(["umount", "-l", str(mount)], check=False)
                fuse.terminate()
                fuse.wait()


def _judged(scene: str, culprit: int, ranks: int, folder: Path, sandbox: Sandbox) -> Trial:
    command = f"{sys.executable} {HERE / 'job.py'} '{scene}' {culprit}"
    launch = {
        "command": command,
        "nodes": 2,
        "tasks_per_node": ranks // 2,
        "jobs": 1,
        "env": {"HUNG_FILE": f"{folder}/mount/log.txt"},
    }
    hang = {"at_least": "6s", "unknown": "30s", "start": "5m"}
    launch["restart"] = {"hang": hang, "back_off": "1s"}
    (folder / "ftsupervise.yaml").write_text(json.dumps({"name": "scene", "launch": launch}))
    env = {**sandbox.env(), "FTSUPERVISE_STATE_DIR": str(folder / "state")}
    tool = str(Path(sys.executable).with_name("ftsupervise"))
    began = time.monotonic()
    done = subprocess.run([tool, "launch"], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"launch: {done.stderr}")
    end = folder / "runs/scene/attempts/0001/end.json"
    while not end.exists() and time.monotonic() < began + BOUND:
        time.sleep(0.2)
    seconds = time.monotonic() - began
    words = [tool, "diagnose", "runs/scene", "1", "--json"]
    asked = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(asked.stdout) if asked.stdout.startswith("{") else {}
    if KEEP is not None:
        subprocess.run(["cp", "-a", str(folder / "runs"), f"{KEEP}/{scene.replace(' ', '-')}-{culprit}"], check=False)
    subprocess.run([tool, "kill", "--yes", "runs/scene"], cwd=folder, env=env, capture_output=True, check=False)
    said, sure = found.get("kind", asked.stderr[:100]), found.get("confidence", "")
    return Trial(scene, culprit, said, tuple(found.get("culprits", ())), sure, seconds)


def table(trials: list[Trial]) -> str:
    """Return the confusion matrix: a row for each scene."""
    rows = ["scene                 class right  rank right  wrong and sure  said"]
    for scene in dict.fromkeys(one.scene for one in trials):
        some = [one for one in trials if one.scene == scene]
        kind = sum(one.said in SCENES[scene] for one in some)
        rank = sum(one.ranks == (one.culprit,) for one in some)
        wrong = sum(one.confidence == "high" and one.ranks not in ((), (one.culprit,)) for one in some)
        said = ", ".join(f"{count} x {name}" for name, count in Counter(one.said for one in some).most_common())
        rows.append(f"{scene:22}{kind:4} of {len(some):<4}{rank:5} of {len(some):<4}{wrong:8}        {said}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
