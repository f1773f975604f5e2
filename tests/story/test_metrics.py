"""Metrics of runs: their text as Prometheus's own parser reads it, and the files for node_exporter."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ftsupervise.model import FailureKind, Job, JobState
from ftsupervise.report.account import Spent
from ftsupervise.report.metrics import METRICS, MOST, STATES, counters_in, text_of
from ftsupervise.report.textfile import RunMetrics, file_name, measure, sweep, write
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import FiringAlert, WatchFound, write_found
from tests.neighbours.stranger import STRANGER
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.story.measured_run import NOW, make_run

ROOT = Path(__file__).parents[2]
RUNNING = (Job("88_2", "88", "t", "ada", JobState.RUNNING, end_time=NOW + timedelta(hours=3)),)


def parsed(text: str) -> dict[str, float]:
    """Series -> value, as Prometheus's own parser reads it. A series that stands there twice is an error."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("run", "user")}
            series = f"{sample.name}{sorted(labels.items())}"
            assert series not in found and {"run", "user"} <= set(sample.labels), series
            found[series] = sample.value
    return found


def of(found: dict[str, float], name: str, **labels: str) -> float | None:
    return found.get(f"ftsupervise_run_{name}{sorted(labels.items())}")


def test_what_status_knows_is_in_the_metrics(tmp_path: Path) -> None:
    run = measure(make_run(tmp_path), RUNNING, "", NOW)
    found = parsed(run.text)
    assert {word: of(found, "state", state=word) for word in STATES} == {word: word == "running" for word in STATES}
    figures = {
        "step": 1200,
        "target_step": 4600,
        "steps_per_second": 0.5,
        "loss": 2.25,
        "ranks": 8,
        "checkpoint_step": 1100,
    }
    figures |= {"attempts_total": 2, "alerts_firing": 1, "nodes_avoided": 0, "brake_on": 0, "members_left": 0}
    assert {name: of(found, name) for name in figures} == figures
    assert of(found, "failures_total", kind="code") == 1
    assert of(found, "alert_firing", watchdog="disk", severity="critical") == 1
    assert of(found, "job_end_timestamp_seconds") == (NOW + timedelta(hours=3)).timestamp()
    kinds = {kind.value: of(found, "time_seconds_total", kind=kind.value) or 0.0 for kind in Spent}
    assert sum(kinds.values()) == pytest.approx(7200, abs=0.1) and kinds["train"] > 5000
    goodput = of(found, "goodput_ratio", bound="least")
    assert goodput == pytest.approx(kinds["train"] / 7200, abs=1e-6)
    assert of(found, "switch_state", switch="kill-switch", state="absent") == 1


def test_what_could_not_be_seen_is_unknown_or_has_no_sample(tmp_path: Path) -> None:
    rundir = make_run(tmp_path)
    (rundir.watch / "found.json").unlink()
    shutil.rmtree(rundir.attempts)
    found = parsed(measure(rundir, None, "squeue: no answer", NOW).text)
    assert of(found, "state", state="unknown") == 1 and of(found, "state", state="gone") == 0
    for name in (
        "members_left",
        "step",
        "loss",
        "alerts_firing",
        "watch_timestamp_seconds",
        "checkpoint_timestamp_seconds",
    ):
        assert of(found, name) is None, name


def test_a_run_of_100000_ranks_and_many_failures_has_no_more_samples_than_a_small_one(tmp_path: Path) -> None:
    small = len(measure(make_run(tmp_path / "a"), RUNNING, "", NOW).samples)
    large = measure(make_run(tmp_path / "b", ranks=100_000, failed=300), RUNNING, "", NOW)
    assert len(large.samples) == small <= MOST
    most = [FiringAlert(f"{n:06x}", "warning", f"dog-{n}", "x", NOW) for n in range(20)]
    write_found(RunDir(large.root), WatchFound(NOW, 500, tuple(most)))
    every = measure(RunDir(large.root), RUNNING, "", NOW).samples
    assert len(every) <= MOST and every[-1].name.endswith("_metrics_timestamp_seconds"), "nothing was cut off"


@pytest.mark.threat("The name of a run closes its label and adds lines to the metrics.", "It stays inside its label.")
def test_a_hostile_name_stays_inside_its_label(tmp_path: Path) -> None:
    rundir = make_run(tmp_path)
    evil = 'a"} 1\\nftsupervise_run_step{run="b'
    rundir.config.write_text(f"name: {evil}\n")
    run = measure(rundir, RUNNING, "", NOW)
    assert len(parsed(run.text)) == len(run.samples)
    (family,) = [one for one in text_string_to_metric_families(run.text) if one.name == "ftsupervise_run_step"]
    assert [sample.labels["run"] for sample in family.samples] == [evil]
    name = file_name("../../etc/passwd\n", "ada")
    assert "/" not in name and "\n" not in name and name != file_name("../../etc/passwd ", "ada")


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed here")
    text = words[-1].read_text() if isinstance(words[-1], Path) and words[1] == "metrics" else None
    argv = [tool, *map(str, words[:-1] if text is not None else words)]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_promtool_finds_nothing_against_the_metrics_nor_the_rules(tmp_path: Path) -> None:
    page = tmp_path / "all.prom"
    page.write_text(measure(make_run(tmp_path), RUNNING, "", NOW).text)
    for done in (promtool("check", "metrics", page), promtool("check", "rules", ROOT / "docs/metrics/rules.yml")):
        assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr


# alert: minutes after which it fires, series that make it fire, series of a healthy run; "a+bxn": a, a+b, … each minute
NIGHTS: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {
    "FtsuperviseRunGone": (15, {'state{state="gone"}': "1+0x60"}, {'state{state="gone"}': "0+0x60"}),
    "FtsuperviseRunUnknown": (20, {'state{state="unknown"}': "1+0x60"}, {'state{state="unknown"}': "0+0x60"}),
    "FtsuperviseBrakeOn": (5, {"brake_on{}": "1+0x60"}, {"brake_on{}": "0+0x60"}),
    "FtsuperviseWatchSilent": (
        45,
        {"watch_timestamp_seconds{}": "0+0x60"},
        {"watch_timestamp_seconds{}": "0+60x60"},
    ),
    "FtsuperviseRunStalled": (
        80,
        {"step{}": "700+0x90", 'state{state="running"}': "1+0x90"},
        {"step{}": "700+1x90", 'state{state="running"}': "1+0x90"},
    ),
    "FtsuperviseRunSlow": (
        70,
        {"steps_per_second{}": "0.5+0x90", "usual_steps_per_second{}": "1+0x90"},
        {"steps_per_second{}": "0.9+0x90", "usual_steps_per_second{}": "1+0x90"},
    ),
    "FtsuperviseNoSuccessor": (
        30,
        {"members_left{}": "0+0x60", "job_end_timestamp_seconds{}": "5400+0x60", 'state{state="running"}': "1+0x60"},
        {"members_left{}": "1+0x60", "job_end_timestamp_seconds{}": "5400+0x60", 'state{state="running"}': "1+0x60"},
    ),
    "FtsuperviseCheckpointOld": (
        300,
        {"checkpoint_timestamp_seconds{}": "0+0x400", 'state{state="running"}': "1+0x400"},
        {"checkpoint_timestamp_seconds{}": "0+59x400", 'state{state="running"}': "1+0x400"},
    ),
    "FtsuperviseGoodputLow": (
        480,
        {'time_seconds_total{kind="train"}': "0+30x500", 'time_seconds_total{kind="restart"}': "0+30x500"},
        {'time_seconds_total{kind="train"}': "0+50x500", 'time_seconds_total{kind="restart"}': "0+10x500"},
    ),
}


def test_each_rule_fires_for_what_it_says_and_for_no_healthy_run(tmp_path: Path) -> None:
    rules = ROOT / "docs/metrics/rules.yml"
    assert {rule["alert"] for rule in yaml.safe_load(rules.read_text())["groups"][0]["rules"]} == set(NIGHTS)
    tests = []
    for name, (after, bad, well) in NIGHTS.items():
        for series, samples in ((bad, [{"labels": f'{{alertname="{name}"}}', "value": 1}]), (well, [])):
            values = [{"series": in_full(one), "values": each} for one, each in series.items()]
            firing = f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{name}"}})'
            asked = {"expr": firing, "eval_time": f"{after}m", "exp_samples": samples}
            tests.append({"interval": "1m", "input_series": values, "promql_expr_test": [asked]})
    page = tmp_path / "tests.yml"
    page.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", page)
    assert done.returncode == 0, done.stdout + done.stderr


def in_full(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    inner = ",".join(filter(None, ('run="r"', 'user="ada"', labels)))
    return f"ftsupervise_run_{name}{{{inner}}}"


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bftsupervise_\w+", expression))


def test_every_metric_of_the_dashboard_and_of_the_rules_is_one_that_we_write(tmp_path: Path) -> None:
    rules = yaml.safe_load((ROOT / "docs/metrics/rules.yml").read_text())
    dashboard = json.loads((ROOT / "docs/metrics/dashboard.json").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    names = set().union(*map(used, expressions))
    text = measure(make_run(tmp_path), RUNNING, "", NOW).text
    assert names and names <= {line.partition("{")[0] for line in text.splitlines()}
    labels = {"run", "user", *(label for metric in METRICS.values() for label in metric.labels)}
    for expression in expressions:
        for inside in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+) *(?:=~|!=|=|!~)", inside)) <= labels, expression
    states = re.findall(r'state="(\w+)"', " ".join(expressions))
    assert set(states) <= {*STATES, "up", "absent", "unknown"}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["title"] and panel["targets"] for panel in panels)


def test_every_metric_is_explained_in_the_manual() -> None:
    rows = re.findall(r"^\| `(ftsupervise_run_\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.M)
    assert dict(rows) == {name: metric.kind for name, metric in METRICS.items()}


def test_counters_never_fall_though_the_account_is_revised(tmp_path: Path) -> None:
    rundir = make_run(tmp_path)
    folder = tmp_path / "textfile"
    folder.mkdir()
    assert write(folder, measure(rundir, RUNNING, "", NOW)) == ""
    (path,) = folder.iterdir()
    before = counters_in(path.read_text())
    page = RunMetrics("train", "ada", rundir.root, 0.0, (), over=False)
    later = NOW + timedelta(minutes=5)  # no step since: what was training turns out to be the time before a fault
    assert write(folder, measure(rundir, RUNNING, "", later)) == ""
    after = counters_in(path.read_text())
    fresh = counters_in(measure(rundir, RUNNING, "", later).text)
    assert any(fresh[series] < before[series] for series in before), "or this test shows nothing"
    assert all(after[series] >= before[series] for series in before)
    assert (
        counters_in("ftsupervise_run_step{} 7\nftsupervise_run_attempts_total{} NaN\nx\n\n") == {} and page.text == ""
    )


def test_the_file_is_readable_for_all_and_whole_whatever_lay_there(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    run = measure(make_run(tmp_path), RUNNING, "", NOW)
    path, mine = folder / file_name(run.name, run.user), tmp_path / "mine"
    mine.write_text("keep\n")
    path.symlink_to(mine)
    os.utime(path, (0, 0), follow_symlinks=False)
    mask = os.umask(0o077)
    try:
        assert write(folder, run) == ""
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o644 and not path.is_symlink() and mine.read_text() == "keep\n"
    assert [one.name for one in folder.iterdir()] == [path.name], "no temporary file is left"
    assert parsed(path.read_text()) == parsed(run.text)
    assert "cannot write" in write(tmp_path / "nowhere", run)


@pytest.mark.threat(
    "Somebody lays a link or a file of theirs in the place of a run's metrics file.",
    "The link is replaced and not followed. A fresh file of another account stays as it is, and the watch says so.",
)
def test_a_second_run_of_that_name_and_a_strangers_file_are_left_alone_while_they_are_fresh(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    one, two = (measure(make_run(tmp_path / name), RUNNING, "", NOW) for name in ("a", "b"))
    path = folder / file_name(one.name, one.user)
    assert write(folder, one) == ""
    assert str(one.root) in write(folder, two) and str(one.root) in path.read_text()
    long_ago = (NOW - timedelta(hours=2)).timestamp()
    os.utime(path, (long_ago, long_ago))
    assert write(folder, two) == "" and str(two.root) in path.read_text()
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
        text = path.read_text()
        assert "is written by" in write(folder, two) and path.read_text() == text


def test_files_of_finished_runs_and_of_those_that_nobody_watches_go(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    rundir = make_run(tmp_path)
    write_json(rundir.finished, {"at": (NOW - timedelta(minutes=5)).isoformat()})
    assert write(folder, measure(rundir, (), "", NOW)) == ""
    (path,) = folder.iterdir()
    assert of(parsed(path.read_text()), "state", state="finished") == 1, "Prometheus is to see the end"
    assert write(folder, measure(rundir, (), "", NOW + timedelta(hours=2))) == ""
    assert not path.exists()
    old, theirs, fresh = (folder / f"{name}.prom" for name in ("ftsupervise-a-b", "other", "ftsupervise-a-c"))
    for one in (old, theirs, fresh):
        one.write_text("# ftsupervise: 0 /gone\n")
    two_days = NOW.timestamp() - 2 * 86400
    for one in (old, theirs):
        os.utime(one, (two_days, two_days))
    sweep(folder)
    assert sorted(one.name for one in folder.iterdir()) == ["ftsupervise-a-c.prom", "other.prom"]


def type_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed(*words, folder=folder, env=outside_a_job(FTSUPERVISE_STATE_DIR=str(folder / "state")))


def test_the_watch_writes_them_at_each_tick_and_metrics_prints_them(tmp_path: Path, until: Callable[..., Any]) -> None:
    rundir = make_run(tmp_path)
    (tmp_path / "textfile").mkdir()
    settings = "name: train\nscheduler: local\nlaunch: {command: 'true'}\nwatch: {metrics: textfile, disk: null}\n"
    (tmp_path / "ftsupervise.yaml").write_text(settings)
    done = type_in(tmp_path, "watch", "--no-send", "--quiet")
    assert "Traceback" not in done.stderr and "cannot write" not in done.stderr, done.stderr
    (path,) = (tmp_path / "textfile").iterdir()
    found = parsed(path.read_text())
    assert of(found, "step") == 1200 and of(found, "state", state="gone") == 1
    assert abs((of(found, "watch_timestamp_seconds") or 0) - datetime.now(timezone.utc).timestamp()) < 60
    printed = type_in(tmp_path, "metrics", str(rundir.root))
    assert printed.returncode == 0 and parsed(printed.stdout).keys() == found.keys(), printed.stderr
    names = tmp_path / "state" / "runs"
    names.mkdir(parents=True, exist_ok=True)
    (names / "train").symlink_to(rundir.root)
    path.unlink()
    done = type_in(tmp_path, "metrics", "--to", "textfile")
    assert done.returncode == 0 and path.exists() and not done.stdout, done.stderr
    refused = type_in(tmp_path, "metrics", "--to", "/proc/nowhere")
    assert refused.returncode == 73 and "cannot write" in refused.stderr
    assert {kind.value for kind in FailureKind} == {
        label for series in found if "failures_total" in series for label in re.findall(r"'kind', '([\w-]+)'", series)
    }
    assert text_of(()) == ""
