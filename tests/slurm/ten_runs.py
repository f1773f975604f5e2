"""Ten runs in ten states, each really brought there on a sandbox: what happened to them is asked of ``status`` alone.

``python -m tests.slurm.ten_runs FOLDER`` writes what ``status`` says of each into FOLDER/NN.txt, and which it is into KEY.md.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random

import yaml

from ftsupervise.rundir.heartbeat_page import read_beats, watchers, write_watcher
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.watched import read_found, write_found
from ftsupervise.sandbox import Sandbox, temporary
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import FT, typed

TEN = {  # name of the run -> its state
    "full": "standing on a full disk",
    "broken": "braked",
    "stopped": "cancelled",
    "alone": "watch dead",
    "still": "hung",
    "odd": "NaN",
    "queued": "waiting for ever",
    "done": "finished",
    "over": "gone",
    "quiet": "controller paused",
}
WATCHED = ("alone", "still", "quiet")  # from a terminal of their own; the others are looked at once, as a crontab does
_EXTRA: dict[str, dict[str, object]] = {  # beside one node, one rank and three jobs
    "broken": {"launch": {"restart": {"same_failure": 2, "back_off": "1s"}}},
    "still": {
        "launch": {"tasks_per_node": 2, "restart": {"hang": None}},
        "watch": {"hang": {"at_least": "10s", "quiet": "15s", "times": 2}},
    },
    "queued": {"launch": {"partition": "short", "time": "2:00:00"}},
    "over": {"launch": {"jobs": 1, "restart": {"in_place": 0}}},
}
LOOP = """
import json, os, sys, time
from ftsupervise import Guard
how, rank = sys.argv[1], int(os.environ.get("SLURM_PROCID", 0))
if how == "broken":
    import webdataset
guard = Guard(agree=False)
newest, first = guard.latest(), 1
if newest is not None:
    first = json.loads((newest / "state.json").read_text())["step"] + 1
last = 60 if how == "done" else 100_000
guard.report(last_step=last)
for step in range(first, last + 1):
    time.sleep(0.2)
    if how == "still" and step == 60:
        time.sleep(100_000 if rank == 1 else 0)
        while True:
            time.sleep(0.05)
    if how == "over" and step == 50:
        raise KeyError("lr_schedule")
    loss = float("nan") if how == "odd" and step > 30 else 2.0 + 40 / (step + 10)
    guard.loss(loss)
    print(f"step {step} loss {loss:.4f}", flush=True)
    decision = guard.step(step)
    if rank == 0 and (decision.save or step % 20 == 0 or step == last):
        with guard.checkpoint(step) as folder:
            (folder / "state.json").write_text(json.dumps({"step": step, "weights": "w" * 1000}))
    if decision.stop:
        break
else:
    guard.finished(last)
"""


class TenRuns:
    """The ten runs in one account. ``sandbox``: a cluster of their own; ``small``: a small disk, on which one of them lies."""

    def __init__(self, folder: Path, sandbox: Sandbox, small: Path) -> None:
        self.folder, self.sandbox, self.small = folder, sandbox, small
        self.watches: dict[str, subprocess.Popen[bytes]] = {}
        state = {"FTSUPERVISE_STATE_DIR": str(folder / "state"), "FTSUPERVISE_SITE_CONFIG": "/nonexistent"}
        self.env: Mapping[str, str] = {**sandbox.env(), **state, "COLUMNS": "80"}

    def rundir(self, name: str) -> RunDir:
        return RunDir(self.small / name if name == "full" else self.folder / "runs" / name)

    def type(self, *words: str) -> str:
        return typed(*words, folder=self.folder, env=self.env, seconds=180).stdout

    def status(self, name: str) -> str:
        return self.type("status", str(self.rundir(name).root))

    def launch(self, name: str) -> None:
        (self.folder / "loop.py").write_text(LOOP)
        more = _EXTRA.get(name, {})
        command = f"{sys.executable} {self.folder}/loop.py {name}"
        plain = {"command": command, "nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "jobs": 3, "time": "20:00"}
        settings = {"name": name, "run_dir": str(self.rundir(name).root), **more}
        settings["launch"] = {**plain, **dict(more.get("launch", {}))}  # type: ignore[call-overload]
        settings["guard"] = {"poll": "500ms"}
        settings["alerts"] = {"receivers": [{"file": {"path": str(self.folder / "messages.txt")}}]}
        place = self.folder / name
        place.mkdir()
        (place / "ftsupervise.yaml").write_text(yaml.safe_dump(settings))
        typed("launch", folder=place, env=self.env, seconds=180, code=0)

    def watch(self, name: str) -> None:
        """As in a terminal of its own."""
        words = [*FT, "watch", "--every", "15s", str(self.rundir(name).root)]
        with (self.folder / f"watch-{name}.txt").open("wb") as out:
            self.watches[name] = subprocess.Popen(words, cwd=self.folder, env=self.env, stdout=out, stderr=out)

    def step(self, name: str) -> int:
        return max((beat.step or 0 for beat in read_beats(self.rundir(name))), default=0)

    def end(self) -> None:
        for one in self.watches.values():
            one.send_signal(signal.SIGCONT)
            one.terminate()
        for one in self.watches.values():
            one.wait(30)

    # ---------------------------------------------------------------------------------------------------- their states

    def prepare(self) -> None:
        """Bring all but ``quiet`` to its state; the controller answers until ``pause``."""
        nodes = ",".join(self.sandbox.shape.node_names)
        self.sandbox.run(["scontrol", "create", "PartitionName=short", f"Nodes={nodes}", "MaxTime=60"])
        for name in TEN:
            self.launch(name)
            if name in WATCHED:
                self.watch(name)
        for name in ("full", "stopped", "alone", "quiet", "odd", "still"):
            self._until(lambda name=name: self.step(name) >= 40, f"{name} trains")
        self.sandbox.run(["scancel", "-n", "stopped"])
        self._kill_the_watch("alone")
        fill(self.small)
        self._until(lambda: "STOPPED" in self.status("broken"), "broken is braked")
        self._until(lambda: self.status("done").startswith("done: FINISHED"), "done is finished")
        for name in ("stopped", "over"):
            self._until(lambda name=name: self.status(name).startswith(f"{name}: GONE"), f"{name} has left the queue")
        self._until(lambda: self.status("still").startswith("still: HUNG"), "still hangs")
        self._until(lambda: not self.status("full").startswith("full: RUNNING"), "full stands")
        for name in set(TEN) - set(WATCHED):
            self.type("watch", str(self.rundir(name).root))

    def make_room(self) -> None:
        """The disk has space again, and the run on it goes on by itself."""
        before = self.step("full")
        (self.small / "others").unlink()
        self._until(lambda: self.step("full") > before, "full goes on")

    def pause(self) -> None:
        self.sandbox.controller("pause")
        self._until(lambda: "does not answer" in self.status("quiet").splitlines()[0], "the controller is missed")

    def said(self) -> dict[str, str]:
        """Return what ``status`` says of each, once they are prepared. The controller answers again when it returns."""
        found = {name: self.status(name) for name in TEN if name != "quiet"}
        self.make_room()
        self.pause()
        found["quiet"] = self.status("quiet")
        self.sandbox.controller("cont")
        return found

    def _kill_the_watch(self, name: str) -> None:
        """Its node loses power; the test does not wait for 47 minutes but lets its page say so."""
        one = self.watches.pop(name)
        one.kill()
        one.wait(30)
        (page,) = watchers(self.rundir(name))
        before = timedelta(minutes=47)
        for path in (self.rundir(name).watch / "watchers").iterdir():
            path.unlink()
        write_watcher(self.rundir(name), page.at - before, page.every)
        found = read_found(self.rundir(name))
        assert found is not None
        write_found(self.rundir(name), found._replace(at=found.at - before))

    def _until(self, true: object, what: str) -> None:
        wait_until(true, what, 240)  # type: ignore[arg-type]


def fill(place: Path) -> None:
    """Fill the disk, as another user does."""
    with (place / "others").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


@contextmanager
def small_disk(point: Path) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "small", str(point)], check=True, timeout=30)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False, timeout=30)


@contextmanager
def ten_runs() -> Iterator[TenRuns]:
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    with ExitStack() as held:
        held.callback(shutil.rmtree, top, ignore_errors=True)
        small = held.enter_context(small_disk(top / "small"))
        sandbox = held.enter_context(temporary(top / "slurm", nodes=2))
        one = TenRuns(top, sandbox, small)
        held.callback(one.end)
        yield one


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    names = list(TEN)
    Random(28).shuffle(names)
    with ten_runs() as one:
        one.prepare()
        said = one.said()
    for number, name in enumerate(names, 1):
        (out / f"{number:02}.txt").write_text(said[name])
    key = "".join(f"- {number:02}: {TEN[name]}\n" for number, name in enumerate(names, 1))
    (out / "KEY.md").write_text(f"# Which is which\n\n{key}")


if __name__ == "__main__":
    main()
