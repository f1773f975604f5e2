"""Every command that there is, with every place of its run, its account and its shell on a mount that hangs.

The commands are those of click's table, so a new one is in here without a line: it answers within the bound that it has in
``time_limit.BOUNDS``, leaves no process, and says what it said before when the mount answers again.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from ftsupervise.cli import time_limit
from ftsupervise.host import processes
from tests.neighbours.commands import every_command
from tests.neighbours.patience import wait_until, waited_for_a_processor
from tests.neighbours.typed import typed

from .conftest import HungMount

pytestmark = pytest.mark.root

AT_ONCE = 6  # commands that are typed at the same time: they wait, and hardly work
SLACK = 3.0  # seconds on a busy machine, beside the wait for a processor


@dataclass(frozen=True)
class DeadPlace:
    """``lies``: the part of a desk that lies on the mount; ``hangs``: what the mount does not answer, below DESK."""

    name: str
    lies: str
    hangs: str = "all"


PLACES = [
    DeadPlace("the run directory", "run"),
    DeadPlace("one directory of the run", "run", "all:DESK/r/launches"),
    DeadPlace("the data of the pages of the run", "run", "read:DESK/r/watch"),
    DeadPlace("writing into the run directory", "run", "write:DESK/r"),
    DeadPlace("the settings file", "settings"),
    DeadPlace("the data of the settings file", "settings", "read"),
    DeadPlace("the state directory", "state"),
    DeadPlace("the data of the state directory", "state", "read"),
    DeadPlace("writing into the state directory", "state", "write"),
    DeadPlace("the watched disk", "disk", "statfs getattr"),
    DeadPlace("the cron folder", "cron"),
    DeadPlace("the file of a receiver", "messages"),
    DeadPlace("the secrets of the receivers", "secrets"),
    DeadPlace("the templates of the messages", "templates"),
    DeadPlace("the programs of the watchdogs and receivers", "plugins"),
    DeadPlace("the directory of the metrics", "metrics"),
    DeadPlace("the shared incidents of the nodes", "incidents"),
    DeadPlace("the logs of the job", "logs"),
    DeadPlace("the target of the offload", "copies"),
    DeadPlace("the checkpoints", "checkpoints"),
    DeadPlace("the account's own settings", "config"),
    DeadPlace("TMPDIR", "tmp"),
    DeadPlace("HOME", "home"),
    DeadPlace("the working directory", "work"),
]
WORDS = {  # what is typed for a parameter that has no default; "" for none
    "action": {"sandbox controller": "stop", "sandbox node": "crash"},
    "command": "true",
    "group": "g000",
    "key": "abc",
    "name": {"sandbox node": "node-1", "cron run": "minutely/nothing"},
    "names": {
        "cron add": "watch-all",
        **dict.fromkeys(("nodes clear", "nodes exclude", "nodes trust"), "node-1"),
    },
    "pattern": "*",
    "shell": "bash",
    "silence_id": "abc",
    "watchdog": "all",
    "words": {"init": "SCRIPT"},
}
OPTIONS: dict[str, list[str]] = {
    "cron": ["--dir", "CRON"],
    "sandbox": ["--dir", "SANDBOX"],
    "sandbox list": [],
    "alerts silence": ["--for", "1h"],
    "nodes exclude": ["--for", "1h"],
    "cron install": ["--backend", "loop"],
    "checkpoints upkeep": ["--patience", "5s"],
    "launch": ["--scheduler", "slurm"],
    "run": ["--run-dir", "RUN", "--space-wait", "2"],
    "groups member": [
        *("--number", "0", "--run-dir", "RUN", "--name", "r", "--count", "3", "--lighthouse", "none"),
        *("--", "--space-wait", "2", "--"),
    ],
    "sandbox up": ["--prefix", "NOTHING"],
    "sandbox exec": ["--prefix", "NOTHING"],
    "kill": ["--yes"],
    "drill": ["--on", "local", "--row", "lose-node"],  # all of it but a copy: that row needs a Slurm
}


def _install_cron(folder: Path, real: dict[str, Path], seen: dict[str, Path]) -> None:
    """A cron as ``cron install`` leaves it; it is made once, and copied."""
    first = folder / "first-cron"
    places = {name: first / name for name in ("home", "config", "state", "tmp", "cron")}
    if not first.exists():
        env = {**os.environ, "HOME": str(places["home"]), "XDG_CONFIG_HOME": str(places["config"])}
        env |= {"FTSUPERVISE_STATE_DIR": str(places["state"]), "TMPDIR": str(places["tmp"])}
        for place in places.values():
            place.mkdir(parents=True)
        words = ("cron", "install", "--backend", "loop", "--dir", places["cron"])
        typed(*words, folder=first, env=env, code=0)
        entry = places["cron"] / "cron.minutely" / "nothing"
        entry.write_text("#!/bin/sh\n")
        entry.chmod(0o755)
    shutil.copytree(places["cron"], real["cron"], dirs_exist_ok=True)
    record = real["cron"] / "state" / "installed.json"
    text = record.read_text()
    for name, place in places.items():
        text = text.replace(str(place), str(seen[name]))
    record.write_text(text)


def _commit_checkpoint(folder: Path, *places: Path) -> None:
    """A checkpoint with its manifest in each of ``places``; it is made once, and copied."""
    first = folder / "first-checkpoint"
    if not first.exists():
        (first / "step-10").mkdir(parents=True)
        (first / "step-10" / "model.bin").write_bytes(os.urandom(100_000))
        typed(
            "checkpoints", "commit", "step-10", folder=first, code=0, FTSUPERVISE_STATE_DIR=str(folder / "first-state")
        )
    for place in places:
        shutil.copytree(first, place)


class Desk:
    """One run, launched by this account, and a shell in a folder of its own: as a person types one command there."""

    def __init__(self, folder: Path, mount: HungMount | None, lies: str, name: str) -> None:
        self.folder, self.mark = folder / name, f"{folder.name}-{name}-{os.urandom(4).hex()}"
        self.below = f"/{name}"  # of the mount
        self.mounted = (folder if mount is None else mount.point) / name
        real: dict[str, Path] = {}
        seen: dict[str, Path] = {}
        for part in dict.fromkeys(place.lies for place in PLACES):
            on_mount = mount is not None and part == lies
            real[part] = (folder / "backing" / name if on_mount else self.folder) / part
            seen[part] = (mount.point / name if on_mount else self.folder) / part  # type: ignore[union-attr]
            real[part].mkdir(parents=True)
        self.seen = seen
        self.run = seen["run"] / "r"
        for part in ("switches", "watch/journal", "beats", "logs", "launches/0001", "state", "attempts", "nodes"):
            (real["run"] / "r" / part).mkdir(parents=True)
        (real["run"] / "r/launches/0001/launch.json").write_text(
            '{"state": "submitted", "scheduler": "slurm", "job_ids": ["7"]}'
        )
        (real["run"] / "r/watch/memory.json").write_text("{}")
        text = (
            f"name: r\nscheduler: slurm\nrun_dir: {self.run}\n"
            f"launch: {{command: a, output: {seen['logs']}/%x-%j.out}}\n"
            f"nodes: {{directory: {seen['incidents']}}}\n"
            f"checkpoints: {{path: {seen['checkpoints']}/here, offload: {{to: {seen['copies']}/there}}}}\n"
            f"watch: {{metrics: {seen['metrics']}, disk: [{{path: {seen['disk']}}}],"
            f" exec: [{{name: ours, timeout: 5s, command: [{seen['plugins']}/check]}}]}}\n"
            f"alerts:\n  templates: {seen['templates']}\n  receivers:\n"
            f"  - file: {{path: {seen['messages']}/told.txt}}\n"
            f"  - command: {{argv: [{seen['plugins']}/send]}}\n"
            f"  - webhook: {{url_file: {seen['secrets']}/url}}\n"
        )
        for name in ("check", "send"):
            (real["plugins"] / name).write_text("#!/bin/sh\n")
            (real["plugins"] / name).chmod(0o755)
        (real["secrets"] / "url").write_text("http://127.0.0.1:9/nobody-listens\n")
        (real["secrets"] / "url").chmod(0o600)
        (real["logs"] / "r-7.out").write_text("a line\n")
        for place in (real["settings"], real["work"]):
            (place / "ftsupervise.yaml").write_text(text)
        (real["work"] / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
        (real["run"] / "r/run.yaml").write_text(text)
        (real["state"] / "runs").mkdir()
        (real["state"] / "runs" / "r").symlink_to(self.run)
        (real["copies"] / "there").mkdir()
        _commit_checkpoint(folder, real["checkpoints"] / "here")
        _install_cron(folder, real, seen)
        (real["config"] / "ftsupervise").mkdir()
        (real["config"] / "ftsupervise/config.yaml").write_text("alerts: {repeat: 1h}\n")
        self.settings = seen["settings"] / "ftsupervise.yaml"
        programs = self.folder / "bin"
        programs.mkdir()
        for name in ("squeue", "sbatch", "scontrol", "sinfo", "scancel"):  # a queue in which nothing is
            (programs / name).write_text("#!/bin/sh\n" + ("echo 8\n" if name == "sbatch" else ""))
            (programs / name).chmod(0o755)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_", "XDG_"))},
            "PATH": f"{programs}:/usr/bin:/bin",
            "TMPDIR": str(seen["tmp"]),
            "HOME": str(seen["home"]),
            "FTSUPERVISE_STATE_DIR": str(seen["state"]),
            "XDG_CONFIG_HOME": str(seen["config"]),
            "FTSUPERVISE_TEST_MARK": self.mark,
        }
        if lies == "home":  # its state and settings are where they are without a word
            for name in ("FTSUPERVISE_STATE_DIR", "XDG_CONFIG_HOME"):
                del self.env[name]
        self.by_name = lies in ("state", "home")
        self.unnamed = lies == "work"

    def words(self, name: str, command: click.Command) -> list[str]:
        """What a person types who means this desk's run."""
        group = name.split()[0]
        options = [word for key in (group, name) for word in OPTIONS.get(key, [])] if OPTIONS.get(name) != [] else []
        said: list[str] = []
        for one in command.params:
            if not isinstance(one, click.Argument):
                continue
            known = WORDS.get(str(one.name), "")
            word = known.get(name, "") if isinstance(known, dict) else known
            if one.name in ("run", "runs", "config") and not self.unnamed:
                word = "r" if self.by_name else str(self.settings if name != "config check" else self.run)
            said += [word] if isinstance(word, str) and word else []
        places = {"CRON": str(self.seen["cron"]), "SANDBOX": str(self.folder / "sandbox"), "RUN": str(self.run)}
        places["NOTHING"] = str(self.folder / "bin")
        places["SCRIPT"] = str(self.seen["work"] / "job.sbatch")
        return [*name.split(), *(places.get(word, word) for word in (*options, *said))]

    def sit_down(self) -> subprocess.Popen[str]:
        """A shell in the working directory, which waits for what is typed: it was there before the mount died."""
        program = shutil.which("ftsupervise", path=str(Path(sys.executable).parent))
        assert program is not None
        shell = 'echo here; read -r go; out=$1; shift; exec "$@" > "$out" 2>&1'
        one = subprocess.Popen(
            ["sh", "-c", shell, "sh", str(self.folder / "said"), program, *self.typed],
            cwd=self.seen["work"], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert one.stdout is not None
        assert one.stdout.readline() == "here\n", "it sits there"
        return one

    typed: tuple[str, ...] = ()

    def answer(self, shell: subprocess.Popen[str], bound: float) -> tuple[int | None, float]:
        """(exit code, seconds) of what is typed into ``shell``; None as code: it does not come back."""
        began, busy = time.monotonic(), waited_for_a_processor()
        assert shell.stdin is not None
        shell.stdin.write("\n")
        shell.stdin.close()
        while True:
            try:
                shell.wait(0.2)
            except subprocess.TimeoutExpired:
                passed = time.monotonic() - began
                if passed <= bound + min(60.0, waited_for_a_processor() - busy):
                    continue
                os.killpg(shell.pid, signal.SIGKILL)
                return None, passed
            return shell.returncode, time.monotonic() - began

    @property
    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    def left(self) -> list[processes.Process]:
        """Return the living processes that were begun here: their environment, or a path among their words, names this desk."""
        mark = f"FTSUPERVISE_TEST_MARK={self.mark}".encode()
        found = []
        for one in processes.living():
            try:
                begun = mark in Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{one.pid}/cmdline").read_bytes()
                if begun or any(f"{place}/".encode() in words for place in (self.folder, self.mounted)):
                    found.append(one)
            except OSError:
                continue
        return found


# Words about a place that does not answer, but for those of an alert that is over.
BLIND = re.compile(r"^(?!.*\bresolved: ).*?((not|no) answer|hangs\b|Traceback)", re.M)
BEFORE: dict[tuple[object, ...], tuple[set[int | None], set[str]]] = {}


def before(folder: Path, lies: str, name: str, command: click.Command) -> tuple[set[int | None], set[str]]:
    """The codes of a command where nothing hangs, and its words of BLIND: the second time may differ, as with ``launch``."""
    desk = Desk(folder, None, lies, f"well-{name}".replace(" ", "-"))
    key = (name, desk.by_name, desk.unnamed, lies == "home")  # where a home of its own knows no run by name
    if key not in BEFORE:
        desk.typed = tuple(desk.words(name, command))
        codes, words = BEFORE[key] = set(), set()
        for _ in range(2):
            codes.add(desk.answer(desk.sit_down(), 100)[0])
            words.update(found[1] for found in BLIND.finditer(desk.said))
    return BEFORE[key]


def hangs_at(place: DeadPlace, desks: Sequence[Desk]) -> list[str]:
    return [word.replace("DESK", desk.below) for desk in desks for word in place.hangs.split()]


def type_all(
    folder: Path, mount: HungMount, place: DeadPlace, commands: Sequence[tuple[str, click.Command]]
) -> list[str]:
    """Type each at a desk of its own while the place hangs, and once more when it answers; return what was wrong."""
    desks = [(name, command, Desk(folder, mount, place.lies, name.replace(" ", "-"))) for name, command in commands]
    for name, command, desk in desks:
        desk.typed = tuple(desk.words(name, command))
    shells = [desk.sit_down() for _, _, desk in desks]
    wrong = []
    mount.hang(*hangs_at(place, [desk for _, _, desk in desks]))
    try:
        bounds = [time_limit.BOUNDS[name].seconds + SLACK for name, _ in commands]
        with ThreadPoolExecutor(len(desks)) as people:
            asked = zip(desks, shells, bounds, strict=True)
            ends = list(people.map(lambda one: one[0][2].answer(one[1], one[2]), asked))
        for (name, _, desk), (code, seconds), bound in zip(desks, ends, bounds, strict=True):
            told = f"{name}, {place.name}: {{}}; it ended with {code} after {seconds:.0f} s: {desk.said[-600:]}"
            if code is None:
                wrong.append(told.format(f"no answer within {bound:.0f} s"))
            elif "Traceback" in desk.said:
                wrong.append(told.format("a traceback"))
            left = [one for one in desk.left() if one.state != "D"]
            if code is not None and left:
                wrong.append(told.format(f"{left} go on though they could be ended"))
    finally:
        mount.answer()
    for name, command, desk in desks:
        wait_until(lambda desk=desk: not desk.left(), f"the end of all that {name} began", 30)  # type: ignore[misc]
        code, _ = desk.answer(desk.sit_down(), 100)
        codes, words = before(folder, place.lies, name, command)
        if code not in codes:
            wrong.append(f"{name}, {place.name} answers again: it ends with {code}, not {codes}: {desk.said[-600:]}")
        elif {found[1] for found in BLIND.finditer(desk.said)} - words:
            wrong.append(f"{name}, {place.name} answers again, and it says that it does not: {desk.said[-900:]}")
    return wrong


# The supervisor of a job whose own working directory hangs waits as its command would: that has the same one.
WAITS = {("run", "work"), ("groups member", "work")}
SOME = (
    "watch",
    "check",
    "doctor",
    "status",
    "launch",
    "notify test",
    "cron tick",
    "cron run",
    "alerts list",
    "groups leave",
)
QUICKLY = {  # one command for each place that had hung it, or had left something behind
    "tmp": SOME,
    "home": SOME,
    "messages": ("notify test",),
    "logs": ("config check",),
    "cron": ("cron tick",),
}


@pytest.mark.fault(
    "`TMPDIR` or the home directory lies on a dead mount",
    "nothing of ours is looked for there but by a child: commands, ticks and launches go on, or answer within their "
    "bound",
)
@pytest.mark.fault(
    "The file of a receiver lies on a dead mount",
    "`notify test` gives it ten seconds and names it; the other receivers are tried",
)
@pytest.mark.parametrize("place", [pytest.param(place, id=place.name) for place in PLACES if place.lies in QUICKLY])
def test_some_commands_answer_with_a_place_of_the_account_on_a_dead_mount(
    tmp_path: Path, dead_mount: HungMount, place: DeadPlace
) -> None:
    only = QUICKLY.get(place.lies, SOME)
    assert type_all(tmp_path, dead_mount, place, [one for one in every_command() if one[0] in only]) == []


@pytest.mark.fault(
    "The run directory hangs when a job starts",
    "the job says so, hears its signals and waits for it as for a mount (`launch.restart.space_wait`); after that it "
    "leaves with 74 and the chain is held",
)
def test_a_job_whose_run_directory_hangs_at_its_start_says_so_and_ends(tmp_path: Path, dead_mount: HungMount) -> None:
    assert type_all(tmp_path, dead_mount, PLACES[0], [one for one in every_command() if one[0] == "run"]) == []


@pytest.mark.fault(
    "The folder of `launch.output` does not answer when a file of settings is checked",
    "`config check` names it",
)
def test_config_check_names_the_folder_of_an_output_that_does_not_answer(tmp_path: Path, dead_mount: HungMount) -> None:
    desk = Desk(tmp_path, dead_mount, "logs", "config-check")
    desk.typed = ("config", "check", str(desk.settings))
    shell = desk.sit_down()
    dead_mount.hang("all")
    code, seconds = desk.answer(shell, 15 + SLACK)
    assert code == 0, f"{seconds:.0f} s: {desk.said}"
    assert f"launch.output: {desk.seen['logs']} does not answer" in desk.said


@pytest.mark.fault(
    "The secret of a receiver, its program or your own templates lie on a dead mount",
    "each is given five seconds and named; the other receivers are tried, and the built-in templates are used",
)
@pytest.mark.parametrize(
    ("lies", "named"),
    [
        ("secrets", "webhook: did not work now: url_file: the file that it names does not answer within 5 s"),
        ("plugins", "plugins/send does not answer within 5 s: its file system hangs"),
        ("templates", "command: delivered to"),
    ],
)
def test_what_a_receiver_needs_hangs_and_the_other_receivers_are_tried(
    tmp_path: Path, dead_mount: HungMount, lies: str, named: str
) -> None:
    desk = Desk(tmp_path, dead_mount, lies, "notify-test")
    desk.typed = ("notify", "test", str(desk.settings))
    shell = desk.sit_down()
    dead_mount.hang("all")
    code, seconds = desk.answer(shell, 45)
    assert code == 1, f"{seconds:.0f} s: {desk.said}"
    assert named in desk.said
    assert "file: written to" in desk.said and "\nwebhook: " in desk.said, "each of them is tried"
    if lies == "templates":
        told = (desk.seen["messages"] / "told.txt").read_text()
        assert "your own alert.text.j2 cannot be used: TimeoutError" in told


@pytest.mark.fault(
    "Any place of a run, its account or its shell hangs, whatever command is typed",
    "it answers within the bound that docs/commands.md says, leaves nothing that could be ended, and is right again "
    "afterwards",
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", [pytest.param(place, id=place.name) for place in PLACES])
def test_every_command_answers_within_its_bound_with_every_place_on_a_dead_mount(
    tmp_path: Path, dead_mount: HungMount, place: DeadPlace
) -> None:
    commands = [one for one in every_command() if (one[0], place.lies) not in WAITS]
    wrong = [
        words
        for begin in range(0, len(commands), AT_ONCE)
        for words in type_all(tmp_path, dead_mount, place, commands[begin : begin + AT_ONCE])
    ]
    assert wrong == [], "\n\n".join(wrong)
