"""A month in an hour: three people's runs, their crons and their mail, and all that goes wrong in a month.

    python -m benchmarks.month --minutes 60 [--seed 7] [--keep FOLDER]        as root, on Debian with Slurm

Each run is another account's, on one sandbox. Seconds stand for what takes hours in life: the cron ticks every 20 s, a job
lasts six minutes. Faults are drawn from published rates (faults.py). FOLDER gets every mail, post, event and ledger.
The verdict at the end: nothing lost beyond what the settings allow, each trouble told once at its start and once at its
end, no page without a fault, nothing left behind, and the weights those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from benchmarks.month import faults, verdict
from benchmarks.month.owners import PEOPLE, Kept, Person, python_for_all
from ftsupervise.sandbox import temporary
from tests.neighbours.leftovers import end_all_under
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer, readable


def now() -> datetime:
    return datetime.now(timezone.utc)


class Month:
    def __init__(self, world: faults.World, keep: Path, seconds: float) -> None:
        self.world, self.keep, self.seconds = world, keep, seconds
        self.begun, self.end = time.monotonic(), time.monotonic() + seconds
        self.done: list[dict[str, Any]] = []
        self.busy = threading.Lock()
        self.turns = threading.Semaphore(len(world.people))

    def say(self, text: str) -> None:
        line = f"{now():%H:%M:%S} {text}"
        print(line, flush=True)
        with (self.keep / "log.txt").open("a") as file:
            file.write(line + "\n")

    def note(self, name: str, runs: list[str], begun: datetime, said: str) -> None:
        record = {"fault": name, "runs": runs, "from": begun.isoformat(), "to": now().isoformat(), "said": said}
        with self.busy:
            self.done.append(record)
            (self.keep / "faults.json").write_text(json.dumps(self.done, indent=1))
        took = (now() - begun).total_seconds()
        self.say(f"{name:40} {','.join(runs)[:30]:30} {took:5.0f} s  {said}")

    def back(self, one: Person, before: dict[str, int]) -> bool:
        """Does the run train on: each group has made steps since?"""
        return all(one.ranks(group) and one.step(group) > before[group] + 10 for group in one.groups)

    def _act_on(self, name: str, one: Person) -> tuple[str, list[Person]]:
        return faults.OF_A_RUN[name].act(self.world, one), [one]

    def of_a_run(self, one: Person, plan: list[str]) -> None:
        luck = random.Random(f"{one.name}{plan}")
        gap = self.seconds / (len(plan) + 1)
        for number, name in enumerate(plan, 1):
            at = self.begun + gap * (number - 0.5) + luck.uniform(0, gap / 2)
            time.sleep(max(0.0, at - time.monotonic()))
            if time.monotonic() > self.end:
                self.say(f"{name} of {one.run} has no time any more")
                return
            with self.turns:
                self.suffer(name, [one], partial(self._act_on, name, one))

    def of_the_site(self, plan: list[str]) -> None:
        gap = self.seconds / (len(plan) + 1)
        for number, name in enumerate(plan, 1):
            time.sleep(max(0.0, self.begun + gap * number - time.monotonic()))
            if time.monotonic() > self.end:
                self.say(f"{name} has no time any more")
                return
            for _ in self.world.people:
                self.turns.acquire()
            try:
                self.suffer(name, self.world.people, partial(faults.OF_THE_SITE[name].act, self.world))
            finally:
                for _ in self.world.people:
                    self.turns.release()

    def suffer(self, name: str, people: list[Person], act: Callable[[], tuple[str, list[Person]]]) -> None:
        begun, before = now(), {}
        try:
            before = {one.name: {group: one.step(group) for group in one.groups} for one in people}
            said, people = act()
        except Exception as error:
            said = f"COULD NOT: {error!r}"
        for one in people:
            if not self.world.until(partial(self.back, one, before[one.name]), 240, 1):
                said += f"; {one.run} DOES NOT TRAIN"
        self.note(name, [one.run for one in people], begun, said)


def collect(world: faults.World, keep: Path, stop: threading.Event) -> None:
    """Write each message down as it comes, with the time."""
    mails = posts = taken = 0
    with (keep / "mails.txt").open("w") as letters, (keep / "machine.jsonl").open("w") as machine:
        while not stop.wait(0.5):
            for mail in world.mail.mails[mails:]:
                letters.write(f"{now():%H:%M:%S} #{mails + 1} to {mail['To']}\n{readable(mail)}\n\n")
                mails += 1
            for body in world.slack.taken[taken:]:
                taken += 1
                machine.write(json.dumps({"at": now().isoformat(), **body}) + "\n")
                for item in body["items"]:
                    _act_as_told(world, item, keep)
            if len(world.slack.posts) != posts:
                posts = len(world.slack.posts)
                text = "\n".join(post.readable() for post in list(world.slack.posts) if post.channel != "machine")
                (keep / "slack.txt").write_text(text)
            letters.flush()
            machine.flush()


def _act_as_told(world: faults.World, item: dict[str, Any], keep: Path) -> None:
    """Type what an alert says that is to be done, where that is a command: whoever gets it knows no more than it says."""
    one = next((one for one in world.people if one.run == item["run"]), None)
    _, launch, rest = item["do"].partition(
        "ftsupervise launch "
    )  # behind words, where a killed controller has lost the job
    command = launch + rest
    if one is not None and item["reason"] == "fired" and launch:
        # eight jobs are used up in 48 minutes without a fault, and sooner with some
        used_up = lambda: not any(" PENDING" in line for line in one.queue())  # noqa: E731
        if rest.startswith("--after ") and world.until(used_up, 2):
            world.used_up.add(item["dedup_key"])
        done = one.shell(shlex.split(command))
        with (keep / "log.txt").open("a") as file:
            file.write(
                f"{now():%H:%M:%S} {one.name}$ {command}: {done.returncode} {done.stdout[:200]}{done.stderr[:300]}\n"
            )


def small_disk(held: ExitStack, place: Path) -> None:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "month", str(place)], check=True, timeout=30)
    held.callback(subprocess.run, ["umount", "-l", str(place)], check=False, timeout=30)


def _has_begun(one: Person) -> bool:
    return all(one.step(group) > 20 for group in one.groups)


def play(args: argparse.Namespace, keep: Path) -> list[str]:
    luck = random.Random(args.seed)
    top = Path(tempfile.mkdtemp(prefix="ftm-", dir="/tmp"))
    top.chmod(0o755)
    with ExitStack() as held:
        held.callback(shutil.rmtree, top, ignore_errors=True)
        held.callback(end_all_under, top)
        sandbox = held.enter_context(
            temporary(top / "slurm", nodes=11, message_timeout=3, overrides=("UnkillableStepTimeout=180",))
        )
        (top / "slurm" / "munge").chmod(0o711)  # the other accounts may submit
        mail, slack = held.enter_context(MailServer()), held.enter_context(SlackServer())
        bin_ = python_for_all(top)
        ports = {"smtp": mail.port, "slack": slack.api_url, "machine": slack.machine_url}
        people = []
        for name in PEOPLE:
            if name == "cy":
                small_disk(held, top / name)
            else:
                (top / name).mkdir()
            people.append(Person(name, top, bin_, sandbox, ports))
            held.callback(people[-1].close)
        world = faults.World(sandbox, people, mail, slack, luck)
        stop = threading.Event()
        collector = threading.Thread(target=collect, args=(world, keep, stop), daemon=True)
        collector.start()
        for one in people:
            one.prepare()
            one.begin()
        for one in people:
            if not world.until(partial(_has_begun, one), 180):
                raise RuntimeError(f"{one.run} did not begin\n{one.type('status', code=None)}\n{one.log()[-3000:]}")
        month = Month(world, keep, 60 * args.minutes)
        month.say(f"seed {args.seed}, {args.minutes} minutes, in {top}")
        count = args.faults or max(1, round(faults.A_MONTH * args.minutes / 60))
        plans = {one.name: faults.drawn(faults.OF_A_RUN, count, one.kind, luck) for one in people}
        site = faults.drawn(faults.OF_THE_SITE, round(count * 0.6), "", luck)
        for kind in list(faults.OF_A_RUN):  # each once at least, somewhere
            if args.all and not any(kind in plan for plan in plans.values()):
                of = [one for one in people if not faults.OF_A_RUN[kind].only or one.kind in faults.OF_A_RUN[kind].only]
                plans[luck.choice(of).name].insert(0, kind)
        site += [kind for kind in faults.OF_THE_SITE if args.all and kind not in site]
        luck.shuffle(site)
        threads = [threading.Thread(target=month.of_a_run, args=(one, plans[one.name]), daemon=True) for one in people]
        threads.append(threading.Thread(target=month.of_the_site, args=(site,), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        month.say("no more faults; the runs come to their end")
        ends = {}
        for one in people:
            ends[one.name] = max(one.step(group) for group in one.groups) + 75
            one.write("last", str(ends[one.name]))
        for one in people:
            if not world.until(one.rundir.finished.exists, 240, 1):
                month.say(f"{one.run} does not finish")
        time.sleep(45)  # three more ticks: the ends are told
        for one in people:
            for words in (["status"], ["alerts"], ["report", "--out", "report.html"], ["cron", "status"]):
                (keep / f"{one.run}-{'-'.join(words)}.txt").write_text(one.type(*words, code=None))
            shutil.copytree(one.rundir.watch / "events", keep / f"{one.run}-events", dirs_exist_ok=True)
            shutil.copytree(
                one.rundir.root,
                keep / one.run,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("checkpoints", "kept", ".*"),
                symlinks=True,
                ignore_dangling_symlinks=True,
            )
            (keep / f"{one.run}-log.txt").write_text(one.log())
            one.type("cron", "remove")
        for one in people if shutil.which("faketime") else ():
            # what is held for hours is told: quick restarts, the ends of what came and went
            for hours in ("+7h", "+14h"):
                one.shell(["faketime", "-f", hours, "ftsupervise", "watch", "--quiet", "--all"], NO_FAKE_STAT="1")
        time.sleep(3)
        stop.set()
        collector.join(10)
        (keep / "ends.json").write_text(json.dumps(ends))
        (keep / "true.json").write_text(json.dumps(sorted(world.used_up)))
        wrong = judged(keep)
        wrong += verdict.left_behind(top, people, sandbox, json.loads((keep / "faults.json").read_text()))
        return wrong


def judged(keep: Path) -> list[str]:
    """Return what is wrong in what a month has kept."""
    done, ends, true = (json.loads((keep / f"{name}.json").read_text()) for name in ("faults", "ends", "true"))
    return verdict.judge(done, [Kept(name, keep) for name in PEOPLE], keep, ends, true)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=0, help="of each run; default: 25 in 60 minutes")
    parser.add_argument("--all", action="store_true", help="each kind once at least")
    parser.add_argument("--keep", type=Path, default=None, help="where all messages and ledgers are written")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge what a month has kept there once more")
    args = parser.parse_args()
    keep = args.judge or args.keep or Path(tempfile.mkdtemp(prefix="month-"))
    if args.judge and not (keep / "true.json").exists():
        parser.error(f"{keep} has no ends.json and true.json: no month has come to its end there")
    keep.mkdir(parents=True, exist_ok=True)
    wrong = judged(keep) if args.judge else play(args, keep)
    print(f"all messages are in {keep}")
    for line in wrong:
        print(f"WRONG {line}")
    figure("month/faults", len(json.loads((keep / "faults.json").read_text())), "faults")
    figure("month/wrong", len(wrong), "wrong", "in what it has kept" if args.judge else "")
    print("the month has passed" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
