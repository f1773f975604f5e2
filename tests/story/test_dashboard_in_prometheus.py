"""The dashboard's queries in a real Prometheus that has scraped our text files through a real node_exporter."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job

ROOT = Path(__file__).parents[2]
NAMES = ("nine-days", "crash-loop", "hang")
PROMETHEUS, EXPORTER = shutil.which("prometheus"), shutil.which("prometheus-node-exporter")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or EXPORTER is None,
        reason="not installed here: apt-get install prometheus prometheus-node-exporter",
    ),
]


class Panel(NamedTuple):
    title: str
    expression: str


def panels() -> list[Panel]:
    dashboard = json.loads((ROOT / "docs/metrics/dashboard.json").read_text())
    return [Panel(one["title"], target["expr"]) for one in dashboard["panels"] for target in one.get("targets", ())]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Server:
    """A Prometheus with our rules, and the node_exporter that it scrapes each second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = outside_a_job(**prepare(folder / "account", datetime.now(timezone.utc), NAMES))
        self.texts = folder / "textfile"
        self.texts.mkdir(mode=0o755)
        self.write()
        exporter, self._port = free_port(), free_port()
        targets = [{"targets": [f"127.0.0.1:{exporter}"]}]
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "docs/metrics/rules.yml")],
            "scrape_configs": [{"job_name": "node", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        assert PROMETHEUS is not None and EXPORTER is not None
        collector = ("--collector.disable-defaults", "--collector.textfile")
        self._children = [
            self._start(EXPORTER, *collector, f"--collector.textfile.directory={self.texts}", port=exporter),
            self._start(
                PROMETHEUS,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                port=self._port,
            ),
        ]

    def _start(self, *words: str, port: int) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{port}.log").open("wb")
        with log:
            return subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def write(self) -> None:
        """Have ``ftsupervise metrics`` write the text files anew, as a cron does."""
        words = [sys.executable, "-m", "ftsupervise", "metrics", "--to", str(self.texts)]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def ask(self, path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, as Grafana would send it with all accounts and all runs chosen."""
        text = expression.replace("$user", ".*").replace("$run", ".*")
        found: list[dict[str, Any]] = self.ask("query", query=text)["result"]
        return found

    def wait(self, expression: str, within: float = 60.0) -> None:
        until = time.monotonic() + within
        while True:
            try:
                if self.series(expression):
                    return
            except OSError:  # it does not listen yet
                pass
            logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < until, f"no series for {expression}: {logs}"
            time.sleep(0.5)

    def close(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has scraped the runs twice: once more after another attempt of one had failed."""
    found = Server(tmp_path_factory.mktemp("prometheus"))
    try:
        found.wait("count_over_time(ftsupervise_run_attempts_total[1m]) > 1")
        run = RunDir(found.folder / "account" / "crash-loop")
        shutil.copytree(run.attempt(6), run.attempt(7))
        page = json.loads((run.attempt(7) / "start.json").read_text())
        write_json(run.attempt(7) / "start.json", {**page, "attempt": 7})
        found.write()
        found.wait("increase(ftsupervise_run_failures_total[1d]) > 0")
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel.title}-{panel.expression[:60]}")
def test_each_query_of_each_panel_finds_series(server: Server, panel: Panel) -> None:
    found = server.series(panel.expression)
    assert found, panel.expression
    runs = {one["metric"].get("run") for one in found}
    assert runs <= {"train-10b", "crash-loop", "hang"} and None not in runs, "each series says which run it is of"
    now = time.time()
    text = panel.expression.replace("$user", ".*").replace("$run", ".*")
    ranged = server.ask("query_range", query=text, start=f"{now - 30}", end=f"{now}", step="5")
    assert ranged["resultType"] == "matrix" and ranged["result"]


def test_the_variables_offer_the_runs_and_the_accounts(server: Server) -> None:
    dashboard = json.loads((ROOT / "docs/metrics/dashboard.json").read_text())
    queries = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    offered = {}
    for query in queries:
        metric, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        match = metric.replace("$user", ".*")
        offered[label] = server.ask(f"label/{label}/values", **{"match[]": match})
    assert offered["run"] == ["crash-loop", "hang", "train-10b"] and len(offered["user"]) == 1


def test_the_rules_are_loaded_and_healthy(server: Server) -> None:
    server.wait("up == 1")
    until = time.monotonic() + 30
    while True:
        rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] == "ok" for rule in rules) or time.monotonic() > until:
            break
        time.sleep(0.5)
    assert len(rules) >= 9 and {rule["health"] for rule in rules} == {"ok"}
