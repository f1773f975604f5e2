"""The three people of the month: an account each, with a home, a run, settings and a crontab of its own."""

from __future__ import annotations

import base64
import json
import os
import pickle
import pwd
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftsupervise.model import Attempt
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox
from tests.neighbours.slack import TOKEN

ROOT = Path(__file__).resolve().parents[2]
PERIOD = 20  # seconds from one tick of a cron to the next: the hours of a month

# name of the person -> (their run, the settings of its launch as YAML)
PEOPLE: dict[str, tuple[str, dict[str, Any]]] = {
    "ana": ("groups", {"nodes": 1, "spare_nodes": 1, "replica_groups": {"count": 3, "lighthouse": "none"}}),
    "bo": ("snapshots", {"nodes": 2, "spare_nodes": 1}),
    "cy": (
        "plain",
        {
            "nodes": 1,
            "restart": {"stop_within": "15s"},  # nothing in it hears the kill switch
            "resume": "--resume {checkpoint}",
            "finished_by": "exit 0",
        },
    ),
}


def python_for_all(top: Path) -> Path:
    """An interpreter that every account may start, and which finds what this one finds."""
    env = top / "env"
    base = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    subprocess.run([base, "-m", "venv", "--without-pip", str(env)], check=True, timeout=60)
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (lib,) = (env / "lib").glob("python3*/site-packages")
    (lib / "month.pth").write_text(f"import site; site.addsitedir({ours!r})\n{ROOT}\n")
    script = env / "bin" / "ftsupervise"
    script.write_text(f"#!{env}/bin/python\nfrom ftsupervise.__main__ import main\nmain()\n")
    script.chmod(0o755)
    return env / "bin"


def make_account(name: str, home: Path) -> pwd.struct_passwd:
    subprocess.run(["useradd", "-M", "-U", "-s", "/bin/sh", "-d", str(home), name], check=True, timeout=30)
    return pwd.getpwnam(name)


def remove_account(name: str) -> None:
    subprocess.run(["userdel", "-f", name], check=False, timeout=30, capture_output=True)


class _Eyes:
    """A process of the person's account that reads the run (eyes.py)."""

    def __init__(self, who: pwd.struct_passwd, bin_: Path, rundir: RunDir) -> None:
        self._turn = threading.Lock()
        self._child = subprocess.Popen(
            [f"{bin_}/python", "-m", "benchmarks.month.eyes", str(rundir.root)],
            cwd="/", env={"PATH": "/usr/bin:/bin"}, user=who.pw_uid, group=who.pw_gid, extra_groups=[],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, what: str, group: str) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        with self._turn:
            self._child.stdin.write(f"{what} {group}\n")
            self._child.stdin.flush()
            return pickle.loads(base64.b64decode(self._child.stdout.readline()))

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(10)


class Kept:
    """A person's run, as it lies in ``runs``, or in what a month has kept."""

    def __init__(self, name: str, runs: Path) -> None:
        self.name = name
        self.kind, self.settings = PEOPLE[name]
        self.run = f"{self.kind}-{name}"
        self.rundir = RunDir(runs / self.run)
        self.groups = [f"g{number:03}" for number in range(3)] if self.kind == "groups" else [""]

    def attempts(self, group: str = "") -> tuple[Attempt, ...]:
        return ledger(self.rundir.group(group) if group else self.rundir)

    def log(self) -> str:
        places = [self.rundir.logs, *(self.rundir.group(name).logs for name in self.groups if name)]
        return "".join(path.read_text(errors="replace") for place in places for path in sorted(place.glob("*.out")))


class Person(Kept):
    """One account and its run. Everything that is done is typed by that account."""

    def __init__(self, name: str, top: Path, bin_: Path, sandbox: Sandbox, ports: Mapping[str, Any]) -> None:
        self.sandbox, self.bin, self.ports = sandbox, bin_, ports
        self.account = f"{top.name}-{name}"  # another month may be played beside it
        self.home = top / name
        super().__init__(name, self.home / "runs")
        self.who = make_account(self.account, self.home)
        self.home.chmod(0o755)
        os.chown(self.home, self.who.pw_uid, self.who.pw_gid)
        self.eyes = _Eyes(self.who, bin_, self.rundir)

    @property
    def env(self) -> dict[str, str]:
        env = {key: value for key, value in self.sandbox.env().items() if not key.startswith(("XDG_", "PYTHON"))}
        own = {"HOME": str(self.home), "USER": self.account, "LOGNAME": self.account, "TZ": "UTC", "COLUMNS": "100"}
        return env | own | {"PATH": f"{self.bin}:{env['PATH']}", "FTSUPERVISE_SITE_CONFIG": "/nonexistent"}

    def shell(self, words: list[str], seconds: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.home, env=self.env | more, user=self.who.pw_uid, group=self.who.pw_gid, extra_groups=[],
            umask=0o022, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def type(self, *words: str, code: int | None = 0, **more: str) -> str:
        done = self.shell(["ftsupervise", *words], 120, **more)
        said = done.stdout + done.stderr
        if "Traceback" in said or code not in (None, done.returncode):
            raise RuntimeError(f"{self.name}$ ftsupervise {' '.join(words)}: {done.returncode}\n{said}")
        return said

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        place = self.home / path
        place.write_text(text)
        place.chmod(mode)
        os.chown(place, self.who.pw_uid, self.who.pw_gid)

    def prepare(self) -> None:
        self.write("token", TOKEN, 0o600)
        for name, place in (("loops.py", ROOT / "benchmarks/month"), ("group.py", ROOT / "examples/minimal")):
            self.write(name, (place / name).read_text())
        launch = {
            "command": f"{self.bin}/python loops.py {self.kind}",
            "tasks_per_node": 1, "jobs": 8, "time": "6:00", "warn": "1m", "exclusive": True,
            **self.settings,
            "restart": {
                "back_off": "1s",
                "hang": {"at_least": "10s", "start": "90s"},
                **self.settings.get("restart", {}),
            },
        }  # fmt: skip
        settings: dict[str, Any] = {
            "name": self.run,
            "launch": launch,
            "guard": {"poll": "500ms"},
            **({"checkpoints": {"path": "out", "pattern": "checkpoint_*.pth"}} if self.kind == "plain" else {}),
            "watch": {
                "every": f"{PERIOD}s",
                "is_running": {"pending_for": "40s", "group_away_for": "60s"},
                "hang": {"at_least": "30s"},
                "recovery": {"start": "90s"},
                "disk": [{"free": "8MB", "critical": {"free": "2MB"}, "left": None, "checkpoints": None}],
            },
            "alerts": {
                "repeat": "10m",
                "receivers": [
                    {"email": {"host": "127.0.0.1", "port": self.ports["smtp"], "from": "ft@lab.org",
                               "to": [f"{self.name}@lab.org"], "security": "none"}},
                    {"slack": {"token_file": str(self.home / "token"), "channel": f"C{self.name}",
                               "api_url": self.ports["slack"]}},
                    {"webhook": {"url": self.ports["machine"], "shape": "json", "plain_http": True}},
                ],
            },
            "cron": {"directory": "cron", "period": f"{PERIOD}s", "limit": "60s", "spares": 3, "mem": "50M",
                     "minutely": "@tick"},
        }  # fmt: skip
        if self.kind != "groups":  # they save in a form of their own
            settings["watch"]["checkpoints"] = {"cadence": "15s", "late": 5, "settle": "5s"}
        self.write("ftsupervise.yaml", json.dumps(settings, indent=1))

    def begin(self) -> None:
        self.type("launch")
        self.type("cron", "install")
        self.type("cron", "add", "watch-all")

    def close(self) -> None:
        self.eyes.close()
        remove_account(self.account)

    # ------------------------------------------------------------------------------------------------- what can be seen

    def attempts(self, group: str = "") -> tuple[Attempt, ...]:
        return self.eyes.ask("ledger", group)  # type: ignore[no-any-return]

    def ranks(self, group: str = "") -> dict[int, int]:
        """rank -> pid of those of the newest attempt that have made a step."""
        attempts = self.attempts(group)
        if not attempts or attempts[-1].ended is not None:
            return {}
        number = str(attempts[-1].number)
        beats = [one for one in self.eyes.ask("beats", group) if one.facts.get("attempt") == number and one.step]
        return {one.rank: one.pid for one in beats if Path(f"/proc/{one.pid}").exists()}

    def step(self, group: str = "") -> int:
        return max((one.step or 0 for one in self.eyes.ask("beats", group)), default=0)

    def queue(self) -> list[str]:
        words = ["squeue", "-h", "-u", self.account, "-n", self.run, "-o", "%i %T %N"]
        return self.sandbox.run(words).splitlines()

    def job(self) -> str:
        return next((line.split()[0] for line in self.queue() if " RUNNING" in line), "")
