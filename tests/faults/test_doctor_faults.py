"""``doctor`` finds each of the faults that are planted here, says what to type, and says nothing of a desk that is well.

Each is a row: what is planted, the line that it must be, and what must stand in its advice. No other line may be wrong. Those
of Slurm are in tests/slurm/test_doctor_on_slurm.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ftsupervise.cli import ftsupervise
from tests.neighbours.smtp import MailServer
from tests.neighbours.typed import FT, typed

from .conftest import HungMount

pytestmark = pytest.mark.root
NOBODY = 65534


@dataclass
class Desk:
    """A run that is well: its script has the guard, it is launched on this machine, watched, and people are told."""

    folder: Path
    undo: ExitStack
    settings: dict[str, Any] = field(default_factory=dict)
    around: tuple[str, ...] = ()  # words before the command, for one that needs a process of its own

    @property
    def run(self) -> Path:
        return Path(self.settings["run_dir"])

    def write(self, text: str = "") -> None:
        (self.folder / "ftsupervise.yaml").write_text(text or yaml.safe_dump(self.settings))

    def mount(self, options: str, at: Path | None = None) -> Path:
        """A tmpfs, unmounted when the test is over."""
        place = self.folder / "mounted" if at is None else at
        place.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this machine cannot mount a tmpfs: {done.stderr.strip()}")
        self.undo.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
        return place

    def examine(self) -> tuple[int, list[dict[str, str]]]:
        """The exit code and the lines."""
        words = ["doctor", "--json", str(self.folder)]
        if self.around:
            command = [*self.around, *FT, *words]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False)
            return done.returncode, json.loads(done.stdout)["lines"]
        found = CliRunner().invoke(ftsupervise, words)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found.exit_code, json.loads(found.stdout)["lines"]


@pytest.fixture(scope="module")
def cron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cron that has ticked a moment ago, and watches."""
    folder = tmp_path_factory.mktemp("cron") / "cron"
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(folder.parent / "state"), "XDG_CONFIG_HOME": str(folder.parent)}
    for words in (("install", "--backend", "loop"), ("add", "watch-all"), ("tick",)):
        typed("cron", *words, "--dir", folder, folder=folder.parent, env=env, code=0)
    return folder


@pytest.fixture
def desk(tmp_path: Path, cron: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    folder = tmp_path / "desk"
    for one in (folder, folder / "run"):
        one.mkdir(mode=0o755)
    (folder / "train.py").write_text("from ftsupervise import Guard\n")
    monkeypatch.chdir(folder)
    before = os.umask(0o022)
    with ExitStack() as undo, MailServer() as mail:
        undo.callback(os.umask, before)
        made = Desk(folder, undo)
        made.settings = {
            "name": "thesis",
            "scheduler": "local",
            "run_dir": str(folder / "run"),
            "launch": {"command": [sys.executable, "train.py"], "jobs": 3},
            "alerts": {"receivers": [
                {"file": {"path": str(folder / "messages")}},
                {"email": {"host": "127.0.0.1", "port": mail.port, "from": "ada@uni.example", "to": ["ada@uni.example"]}},
            ]},
            "cron": {"directory": str(cron)},
        }  # fmt: skip
        made.write()
        yield made


def test_a_desk_that_is_well_has_nothing_wrong(desk: Desk) -> None:
    code, lines = desk.examine()
    assert [one for one in lines if one["word"] != "ok"] == [] and code == 0
    assert {one["about"] for one in lines} >= {
        "settings",
        "run directory",
        "receiver email",
        "cron",
        "python",
        "memory",
    }
    assert list((desk.folder / "run").iterdir()) == [], "what was tried is gone again"


# ------------------------------------------------------------------------------------------------------ the faults

Plant = Callable[[Desk], None]


def in_run_dir(options: str) -> Plant:
    def plant(desk: Desk) -> None:
        desk.mount(options, desk.run)

    return plant


def full(desk: Desk) -> None:
    place = desk.mount("size=2000m", desk.run)
    subprocess.run(["fallocate", "-l", "1500M", str(place / "ballast")], check=True)


def without_inodes(desk: Desk) -> None:
    place = desk.mount("size=2000m,nr_inodes=40", desk.run)
    for number in range(30):
        (place / str(number)).touch()


def open_to_everybody(desk: Desk) -> None:
    desk.run.chmod(0o777)


def of_another(desk: Desk) -> None:
    os.chown(desk.run, NOBODY, NOBODY)


def settings(**more: Any) -> Plant:
    """Settings that take the place of the desk's: ``launch`` is added to."""

    def plant(desk: Desk) -> None:
        desk.settings["launch"] |= more.pop("launch", {})
        desk.settings |= more

    return plant


def receivers(*given: dict[str, Any]) -> Plant:
    return settings(alerts={"receivers": list(given)})


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def open_secret(desk: Desk) -> None:
    token = desk.folder / "token"
    token.write_text("xoxb-1\n")
    token.chmod(0o644)
    receivers({"slack": {"token_file": str(token), "channel": "#runs"}})(desk)


def silent_slack(desk: Desk) -> None:
    token = desk.folder / "token"
    token.write_text("xoxb-1\n")
    token.chmod(0o600)
    api = f"https://127.0.0.1:{closed_port()}/api/"
    receivers({"slack": {"token_file": str(token), "channel": "#runs", "api_url": api}})(desk)


def cron_with(*words: tuple[str, ...]) -> Plant:
    def plant(desk: Desk) -> None:
        place = desk.folder / "cron"
        for one in words:
            typed("cron", *one, "--dir", place, folder=desk.folder, code=0)
        settings(cron={"directory": str(place)})(desk)

    return plant


INSTALL, TICK = ("install", "--backend", "loop"), ("tick",)


def umask(value: int, **more: Any) -> Plant:
    def plant(desk: Desk) -> None:
        os.umask(value)
        settings(**more)(desk)

    return plant


def plain_script(desk: Desk) -> None:
    (desk.folder / "train.py").write_text("print('step 1')\n")


def bare_python(desk: Desk) -> None:
    venv = desk.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    settings(launch={"command": [str(venv / "bin" / "python"), "train.py"]})(desk)


def other_version(desk: Desk) -> None:
    """An older release lies in its environment."""
    bare_python(desk)
    packages = next((desk.folder / "venv").glob("lib/python*/site-packages")) / "ftsupervise"
    packages.mkdir()
    (packages / "__init__.py").write_text('__version__ = "0.0.1"\n')


def output_into_a_file(desk: Desk) -> None:
    settings(launch={"output": str(desk.folder / "train.py" / "%j.out")})(desk)


def killed(desk: Desk) -> None:
    (desk.run / "switches").mkdir()
    (desk.run / "switches" / "kill-switch").touch()


def finished(desk: Desk) -> None:
    for name in ("switches", "state"):
        (desk.run / name).mkdir()
    (desk.run / "state" / "finished").touch()


def misspelt(desk: Desk) -> None:
    desk.settings["lanuch"] = {}


def shared_memory(how: str) -> Plant:
    """The doctor runs where /dev/shm is another one: in a mount namespace of its own, as a container has it."""

    def plant(desk: Desk) -> None:
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare (util-linux)")
        desk.around = ("unshare", "--mount", "sh", "-c", f'{how} && exec "$@"', "sh")

    return plant


def dead_home_of_copies(desk: Desk) -> None:
    settings(watch={"disk": [{"path": str(desk.folder / "scrach"), "free": "1GB"}]})(desk)


FILE_IN_NOWHERE = {"file": {"path": "/nowhere/at/all/messages"}}
MAIL = {"host": "127.0.0.1", "from": "a@uni.example", "to": ["a@uni.example"]}
FAULTS: dict[str, tuple[Plant, str, str]] = {
    "the run directory is read-only": (in_run_dir("ro"), "run directory", "administrator"),
    "its disk is nearly full": (full, "run directory", "make room"),
    "its disk has no inodes": (without_inodes, "run directory", "df -i"),
    "everybody may write it": (open_to_everybody, "run directory", "chmod go-w"),
    "it is another account's": (of_another, "run directory", "ls -ld"),
    "nobody is told": (receivers(), "receivers", "notify test"),
    "no mail server": (receivers({"email": {**MAIL, "port": closed_port()}}), "receiver email", "notify test"),
    "a token that others read": (open_secret, "receiver slack", "notify test"),
    "Slack is not reached": (silent_slack, "receiver slack", "notify test"),
    "a host of no name": (receivers({"webhook": {"url": "https://nowhere.invalid/x"}}), "receiver webhook", "notify test"),
    "no such program": (receivers({"command": {"argv": ["no-such-program"]}}), "receiver command", "notify test"),
    "messages into no folder": (receivers(FILE_IN_NOWHERE), "receiver file", "notify test"),
    "no cron": (settings(cron={"directory": "/nowhere/cron"}), "cron", "cron install"),
    "a loop that was never started": (cron_with(INSTALL, ("add", "watch-all")), "cron", "cron run --foreground"),
    "a cron that watches nothing": (cron_with(INSTALL, TICK), "cron", "cron add watch-all"),
    "a cron that was removed": (cron_with(INSTALL, ("remove",)), "cron", "cron install"),
    "umask 000": (umask(0o000), "umask", "umask 022"),
    "umask 077 of a shared run": (umask(0o077, share={"watch": True}), "umask", "umask 027"),
    "a group of others": (settings(share={"watch": True, "group": "nogroup"}), "group", "id -Gn"),
    "no guard": (plain_script, "guard", "from ftsupervise import Guard"),
    "no script": (settings(launch={"command": [sys.executable, "trian.py"]}), "script", "launch.command"),
    "no such Python": (settings(launch={"command": ["/nowhere/python", "train.py"]}), "python", "launch.command"),
    "a job's number in a path": (
        settings(launch={"command": f"{sys.executable} train.py --out ckpt-$SLURM_JOB_ID"}), "launch", "config check"
    ),
    "output into no folder": (output_into_a_file, "launch", "config check"),
    "the kill switch is up": (killed, "launch", "ftsupervise clear"),
    "it has finished": (finished, "launch", "rm "),
    "a key that is misspelt": (misspelt, "settings", "config check"),
    "a watched disk that is not there": (dead_home_of_copies, "watchdogs", "check all"),
    "/dev/shm of 64 MB": (shared_memory("mount -t tmpfs -o size=64m tmpfs /dev/shm"), "/dev/shm", "--shm-size"),
    "no /dev/shm": (shared_memory("while umount -l /dev/shm 2>/dev/null; do :; done"), "/dev/shm", "--shm-size"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found_with_what_to_type(desk: Desk, name: str) -> None:
    plant, about, advice = FAULTS[name]
    plant(desk)
    desk.write()
    code, lines = desk.examine()
    bad = [one for one in lines if one["word"] != "ok"]
    assert [(one["about"], one["word"]) for one in bad] == [(about, "wrong")], bad
    assert advice in bad[0]["do"] and code == 1, bad


@pytest.mark.parametrize(("plant", "has"), [(bare_python, "no ftsupervise"), (other_version, "ftsupervise 0.0.1")])
def test_a_python_without_this_release_is_well_because_the_run_gives_it_the_guard(
    desk: Desk, plant: Callable[[Desk], None], has: str
) -> None:
    plant(desk)
    desk.write()
    code, lines = desk.examine()
    (python,) = (one for one in lines if one["about"] == "python")
    assert (
        code == 0 and python["word"] == "ok" and f"which has {has}: the run gives it the guard of " in python["what"]
    ), lines


def test_a_run_directory_that_does_not_answer_is_unseen_and_the_rest_is_seen(desk: Desk, dead_mount: HungMount) -> None:
    (dead_mount.point / "run").mkdir()
    desk.settings["run_dir"] = str(dead_mount.point / "run")
    desk.write()
    dead_mount.hang("all")
    done = typed("doctor", "--json", desk.folder, folder=desk.folder, code=3)
    lines = {one["about"]: one["word"] for one in json.loads(done.stdout)["lines"]}
    assert lines["run directory"] == "unseen" and lines["receiver email"] == lines["python"] == "ok", lines
    dead_mount.answer()
