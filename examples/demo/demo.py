"""The demo that ``make demo`` shows: a real training run on a real Slurm, through a fault, a save switch and a time limit.

    demo.py [--local] [FOLDER]     FOLDER: where it works (.demo in the repository); --local: without Slurm, even where it is

What is real: Slurm (a sandbox on this machine; without Slurm's daemons, `scheduler: local`), the training (NumPy, the digits
that scikit-learn ships, two ranks), the fault (kill -9 of a rank), ftsupervise's own commands, typed as a person would.
What stands in: a mail server and a Slack-like server on this machine (test tools from tests/neighbours), to show the messages.
However it ends, Ctrl-C, a closed terminal or kill -9, its cluster and its chain of jobs end with it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ftsupervise.host import processes  # noqa: E402
from ftsupervise.printable import OUR_TIME  # noqa: E402
from ftsupervise.sandbox import Keeper, missing, outer_variables, temporary  # noqa: E402
from ftsupervise.scheduler.local import Local  # noqa: E402
from tests.neighbours.slack import TOKEN, SlackServer  # noqa: E402
from tests.neighbours.smtp import MailServer  # noqa: E402

STEPS, STEP_TIME = 1000, 0.05
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ
START = time.monotonic()


def paint(code: str, text: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLOUR else text


def say(what: str, text: str, code: str = "0") -> None:
    print(f"{time.monotonic() - START:5.1f}s  {paint(code, what.ljust(9))} {text}", flush=True)


class Shown:
    """The messages of the neighbours, shown as they arrive, and the run's own lines."""

    def __init__(self, mail: MailServer, slack: SlackServer, run: Path) -> None:
        self.mail, self.slack, self.run = mail, slack, run
        self.mails = self.posts = 0
        self.edits: dict[str, int] = {}
        self.read: dict[Path, int] = {}

    def look(self) -> None:
        for mail in self.mail.mails[self.mails :]:
            self.mails += 1
            body = mail.get_body(("plain",))
            text = body.get_content() if body is not None else ""
            say("mail", paint("1", str(mail["Subject"])), "36")
            for line in [line for line in text.splitlines() if line.strip()][1:7]:
                print(f"{'':17}{line}")
        for post in list(self.slack.posts)[self.posts :]:
            self.posts += 1
            self.edits[post.ts] = post.edits
            say("slack", paint("1", " ".join(post.text.split())[:150]), "35")
        for post in list(self.slack.posts):
            if post.edits > self.edits.get(post.ts, 0):
                self.edits[post.ts] = post.edits
                say("slack", f"(the post is edited) {paint('1', ' '.join(post.text.split())[:150])}", "35")
        self._log()

    def _log(self) -> None:
        """Show the training's own output: a line every hundred steps, and all other lines."""
        for path in sorted(self.run.glob("logs/*.out")):
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(self.read.get(path, 0))
                text = file.read()
                whole = text[: text.rfind("\n") + 1]
                self.read[path] = self.read.get(path, 0) + len(whole.encode())
            for line in (re.sub(f"^{OUR_TIME}", "", line) for line in whole.splitlines()):
                step = re.match(r"step (\d+)", line)
                if (
                    not step
                    and line.startswith(("ftsupervise: ", "resumed", "started", "saved", "stopped", "finished"))
                ) or (step and int(step[1]) % 100 == 0):
                    say("train", paint("2", line[:130]), "32")

    def until(self, question: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not question():
            self.look()
            if time.monotonic() > end:
                raise SystemExit(f"demo: {what} did not happen within {seconds:.0f} s; look into {self.run}")
            time.sleep(0.1)
        self.look()


def settings(folder: Path, mail: MailServer, slack: SlackServer, kind: str) -> None:
    """Write the example's own settings, with a fault to survive in two minutes and people to notify."""
    token = folder / "slack-token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    (folder / "ftsupervise.yaml").write_text(f"""\
name: digits
scheduler: {kind}
launch:
  command: {json.dumps(f"{sys.executable} train.py --steps {STEPS} --step-time {STEP_TIME} --save-every 100")}
  nodes: 2
  tasks_per_node: 1
  gpus_per_node: 8
  jobs: 5
  time: "2m"          # a queue with a short time limit ...
  warn: 70s           # ... and a warning before it, so that the run saves and leaves by itself
  restart:
    in_place: 3         # a failure costs seconds: the command starts again in the same job, on the nodes it holds
guard:
  poll: 200ms
alerts:
  receivers:
    - email: {{host: 127.0.0.1, port: {mail.port}, from: ftsupervise@cluster.example, to: [ada@lab.example]}}
    - slack: {{token_file: slack-token, channel: C0TRAINING, api_url: "{slack.api_url}"}}
""")


def typed(folder: Path, env: dict[str, str], *words: str) -> None:
    """Type a command as a person would, and show what it says."""
    say("you type", paint("1", shlex.join(("ftsupervise", *words))), "33")
    argv = processes.own_command(*words)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    for line in (done.stdout + done.stderr).splitlines():
        print(f"{'':17}{paint('2', line)}")
    if done.returncode:
        raise SystemExit(f"demo: that ended with {done.returncode}")


def step_of(run: Path) -> int:
    """Return the newest step in the output of the newest job."""
    logs = sorted(run.glob("logs/*.out"), key=lambda path: path.stat().st_mtime_ns)
    steps = re.findall(r"^step (\d+)", logs[-1].read_text(errors="replace"), re.M) if logs else []
    return int(steps[-1]) if steps else 0


def resumed(run: Path) -> str:
    """Return the training's output since it last resumed; "" before it did."""
    logs = "".join(
        p.read_text(errors="replace") for p in sorted(run.glob("logs/*.out"), key=lambda p: p.stat().st_mtime_ns)
    )
    return logs.rpartition("\nresumed ")[2] if "\nresumed " in logs else ""


def ends(run: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/end.json"))]


def fault(run: Path, victim: int) -> int:
    """Kill a rank with SIGKILL and return its pid, which stands in its beat."""
    pid = int(json.loads((run / "beats" / f"rank-{victim}").read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def play(folder: Path, env: dict[str, str], shown: Shown, ranks: int) -> None:
    run = shown.run
    typed(folder, env, "launch")
    watch = subprocess.Popen(
        processes.own_command("watch", "--every", "2s", "--quiet"),
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    say("you type", paint("1", "ftsupervise watch --every 2s") + paint("2", "   (goes on in the background)"), "33")
    try:
        shown.until(lambda: step_of(run) >= 140, "step 140")
        pid = fault(run, ranks - 1)
        began = time.monotonic()
        say("FAULT", f"rank {ranks - 1} dies: kill -9 {pid}", "31;1")
        shown.until(lambda: resumed(run), "the restart in place")
        took = time.monotonic() - began
        jobs = [json.loads(path.read_text())["job_id"] for path in sorted(run.glob("attempts/*/start.json"))[:2]]
        where = f"in place, in the same job {jobs[0]}" if jobs[0] == jobs[1] else f"in the next job, {jobs[1]}"
        say("RESTART", f"{took:.1f} s later it trains again, {where}", "32;1")
        shown.until(lambda: re.search(r"^step 1[6-9]\d|^step [2-9]\d\d", resumed(run), re.M), "step 160")
        typed(folder, env, "status", ".")
        typed(folder, env, "save", "--why", "that loss looks interesting")
        shown.until(lambda: not (run / "switches" / "save-switch").exists(), "the save switch to be answered")
        say("wait", "the time limit comes next: Slurm warns, the run saves and leaves, the next member goes on", "33")
        shown.until(lambda: (run / "state" / "finished").exists(), "the end of the training", 120)
        shown.until(
            lambda: any("finished" in str(mail["Subject"]).lower() for mail in shown.mail.mails), "the last mail", 30
        )
        shown.until(lambda: not queued(folder, env), "the queued members to leave at the gate", 30)
    finally:
        watch.terminate()
        try:
            watch.wait(20)
        except subprocess.TimeoutExpired:
            watch.kill()


def queued(folder: Path, env: dict[str, str]) -> bool:
    argv = processes.own_command("status", ".", "--json")
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True)
    return bool(json.loads(done.stdout)["jobs"])


def undisturbed(folder: Path, env: dict[str, str], ranks: int) -> str:
    """Return the weights of the same training without any disturbance."""
    alone = folder.parent / "alone"
    shutil.copytree(ROOT / "examples" / "minimal", alone)
    # the variables that mark these processes stay, so that they too end with the demo
    env = {k: v for k, v in env.items() if "SANDBOX" in k or not k.startswith(("FTSUPERVISE_", "SLURM_"))}
    command = [sys.executable, "train.py", "--steps", str(STEPS), "--step-time", "0"]
    processes = [
        subprocess.Popen(
            command,
            cwd=alone,
            env={**env, "RANK": str(rank), "WORLD_SIZE": str(ranks), "FTSUPERVISE_ATTEMPT_DIR": str(alone)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    found = re.search(r"weights (\w+)", texts[0])
    return found[1] if found else "?"


def summary(folder: Path, env: dict[str, str], shown: Shown, ranks: int, kind: str) -> bool:
    run = shown.run
    logs = "".join(path.read_text(errors="replace") for path in sorted(run.glob("logs/*.out")))
    weights = re.findall(r"weights (\w+)", logs)
    reference = undisturbed(folder, env, ranks)
    same = bool(weights) and weights[-1] == reference
    print()
    where = "a real Slurm on this machine" if kind == "slurm" else "scheduler: local"
    print(paint("1", f"  What happened ({where}, {ranks} {'rank' if ranks == 1 else 'ranks'})"))
    for path in sorted(run.glob("attempts/*/end.json")):
        end, start = (json.loads((path.parent / name).read_text()) for name in ("end.json", "start.json"))
        steps = f"steps {end['first_step']} to {end['last_step']}"
        print(f"    attempt {end['attempt']}   job {start['job_id']}   {steps}   {end['words']}")
    print(f"    messages    {len(shown.mail.mails)} mails, {len(shown.slack.posts)} Slack posts")
    print(f"    checkpoints {', '.join(sorted(path.name for path in (run / 'checkpoints').glob('step-*')))}")
    print(f"    weights     {weights[-1] if weights else 'none'}")
    print(f"    undisturbed {reference}   {'equal bit for bit' if same else 'NOT EQUAL'}")
    print(f"    took        {time.monotonic() - START:.0f} s")
    print()
    print('  Now with a run of yours: README.md, "Three steps". Everything above lies in ' + str(run))
    return same


def main(words: list[str]) -> int:
    absent = missing()
    folders = [word for word in words if word != "--local"]
    work = Path(folders[0]).absolute() if folders else ROOT / ".demo"
    kind = "local" if absent or "--local" in words else "slurm"
    shutil.rmtree(work, ignore_errors=True)
    folder = work / "digits"
    shutil.copytree(ROOT / "examples" / "minimal", folder)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    with ExitStack() as stack:
        if kind == "local":
            if absent:
                say(
                    "note",
                    f"no Slurm daemons here ({', '.join(absent)}): the same chain runs on this machine by itself",
                )
            keeper = Keeper().start()
            stack.callback(keeper.release)
            stack.callback(stop_local, folder, work / "state")
            outer = outer_variables(os.environ)
            env = {k: v for k, v in os.environ.items() if k not in outer} | keeper.env
        else:
            sandbox = stack.enter_context(temporary(nodes=4))
            env = sandbox.env()
            said = " ".join(sandbox.run(["sinfo", "-h", "-o", "%D nodes %t"]).split())
            say("sandbox", f"a real Slurm is up: {said}", "34")
        env["FTSUPERVISE_STATE_DIR"] = str(work / "state")
        mail, slack = stack.enter_context(MailServer()), stack.enter_context(SlackServer())
        told = f"a mail server (port {mail.port}) and a Slack-like server: test tools, to show the messages"
        say("neighbour", told, "34")
        settings(folder, mail, slack, kind)
        ranks = 1 if kind == "local" else 2
        shown = Shown(mail, slack, folder / "runs" / "digits")
        play(folder, env, shown, ranks)
        return 0 if summary(folder, env, shown, ranks, kind) else 1


def stop_local(folder: Path, state: Path) -> None:
    """End everything that the demo started, also when it was interrupted."""
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(state)}
    (folder / "runs" / "digits" / "switches" / "kill-switch").touch() if (folder / "runs").exists() else None
    local = Local(env)
    for job in local.queue():
        local.cancel(job.base_id)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
