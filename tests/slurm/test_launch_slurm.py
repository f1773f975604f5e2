"""launch on real Slurm: one chain and not two, attached where it was told, refused in sbatch's own words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.load import load
from ftsupervise.launch.plan import plan
from ftsupervise.launch.script import render
from ftsupervise.nodes.incidents import Incident, IncidentLog, prepare
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
Until = Callable[..., Any]


@dataclass
class Desk:
    """A folder with an ftsupervise.yaml, and somebody who types there."""

    folder: Path
    sandbox: Sandbox

    def settings(self, text: str) -> None:
        (self.folder / "ftsupervise.yaml").write_text(f"name: {self.folder.name}\n{text}")

    def type(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return typed(*words, folder=self.folder, env={**self.sandbox.env(), **(env or {})})

    def queue(self, what: str = "%i|%T|%E|%x|%D") -> list[str]:
        return sorted(self.sandbox.run(["squeue", "-h", "-n", self.folder.name, "-o", what]).splitlines())

    def end(self) -> None:
        self.sandbox.run(["scancel", "-n", self.folder.name])


@pytest.fixture
def desk(sandbox: Sandbox, short_tmp: Path, request: pytest.FixtureRequest) -> Any:
    folder = short_tmp / re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:45].strip("-")
    folder.mkdir()
    one = Desk(folder, sandbox)
    yield one
    one.end()


def examples() -> list[Path]:
    return sorted((ROOT / "examples").rglob("ftsupervise.yaml"))


@pytest.mark.parametrize("config", examples(), ids=lambda path: path.parent.name)
def test_the_script_of_every_example_is_accepted_by_bash_and_sbatch(
    config: Path, sandbox: Sandbox, make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    run = load(config)
    one = plan(run, kind="slurm", token="t", workdir=config.parent, python=sys.executable)
    if config.parent.name == "replicas":  # four groups and a spare node
        sandbox = make_sandbox(nodes=5)
    path = tmp_path / "train.sbatch"
    path.write_text(render(one, run.launch, one.link(0)))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    done = subprocess.run(
        ["sbatch", "--test-only", str(path)], env=sandbox.env(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_the_keys_that_people_have_in_their_scripts_are_taken_by_slurm_and_the_run_starts(
    desk: Desk, until: Until
) -> None:
    desk.settings(
        "launch:\n  command: sh -c 'echo out; echo err >&2; echo $SLURM_NTASKS ranks'\n  jobs: 1\n  nodes: 2\n  ntasks: 3\n"
        "  mem_per_cpu: 100M\n  exclusive: true\n  hint: nomultithread\n  gres: gpu:1\n"
        "  output: out-%j.txt\n  error: err-%j.txt\n"
    )
    done = desk.type("launch")
    assert done.returncode == 0, done.stderr
    assert re.search(r"output +tail -f \S*out-\*\.txt \S*err-\*\.txt\n", done.stdout), done.stdout
    until(lambda: list(desk.folder.glob("runs/*/attempts/*/end.json")), "the command to end")
    (out,), (err,) = desk.folder.glob("out-*.txt"), desk.folder.glob("err-*.txt")
    assert out.read_text().count("3 ranks") == 3
    assert err.read_text().count("err\n") == 3


def test_a_dry_run_prints_the_script_and_touches_nothing(desk: Desk) -> None:
    desk.settings('launch: {command: "sleep 60", time: "10m", nodes: 2, gpus_per_node: 8}\n')
    done = desk.type("launch", "--dry-run", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0
    assert "#SBATCH --gpus-per-node=8" in done.stdout
    assert [path.name for path in desk.folder.iterdir()] == ["ftsupervise.yaml"]
    assert desk.queue() == []


@pytest.mark.fault(
    "A dry run prints an `--exclude` that the launch then drops.",
    "A dry run asks Slurm as the launch does; the scripts are the same.",
)
def test_a_dry_run_prints_the_very_options_that_a_launch_then_submits(desk: Desk) -> None:
    nodes = desk.sandbox.run(["sinfo", "-h", "-N", "-o", "%N"]).split()
    desk.settings(f"launch: {{command: sleep 60, jobs: 2, nodes: {len(set(nodes))}}}\n")
    place = desk.folder / "runs" / desk.folder.name / "nodes"
    prepare(place)
    now = datetime.now(timezone.utc)  # node-2 has a past, and the partition has no node to spare
    book = IncidentLog("test")
    book.add(Incident("node-2", "hardware", now, "x", f"{n}", n, evidence="Xid 79") for n in (1, 2))
    assert book.write([place]) == ()
    dry = desk.type("launch", "--dry-run")
    assert "node-2 is not excluded: " in dry.stderr, dry.stderr
    assert "--exclude" not in dry.stdout
    done = desk.type("launch")
    assert done.returncode == 0, done.stderr
    script = (desk.folder / "runs" / desk.folder.name / "launches/0001/train.sbatch").read_text()
    token = re.compile(r"\b[0-9a-f]{12}\b")
    assert token.sub("TOKEN", script) == token.sub("TOKEN", dry.stdout)


@pytest.mark.fault(
    "A job that somebody wrapped by hand is running for `status` and gone for `check`.",
    "Both know the job of the newest attempt as the run's, whatever its name.",
)
def test_status_and_check_agree_about_a_job_that_somebody_wrapped_by_hand(desk: Desk, until: Until) -> None:
    desk.settings("launch: {command: sleep 60}\nwatch: {hang: null, disk: null}\n")
    command = f"exec {sys.executable} -m ftsupervise run -- sleep 600"
    script = [
        "sbatch",
        "--parsable",
        "-J",
        "another-name",
        "-D",
        str(desk.folder),
        "-o",
        "/dev/null",
        "--wrap",
        command,
    ]
    job = desk.sandbox.run(script).strip()
    try:
        until(lambda: list(desk.folder.glob("runs/*/attempts/*/start.json")), "the attempt")
        assert json.loads(desk.type("status", ".", "--json").stdout)["verdict"] == "running"
        assert f"RUNNING (job {job})" in desk.type("status", ".").stdout
        done = desk.type("check", "is-running")
        assert f"job {job} is RUNNING" in done.stdout, done.stdout
    finally:
        desk.sandbox.run(["scancel", job])
    until(lambda: "GONE" in desk.type("status", ".").stdout, "the job to be gone")
    assert desk.type("check", "is-running").returncode == 2


def test_a_daisy_chain_is_chained_and_a_second_launch_is_refused(desk: Desk) -> None:
    desk.settings("launch: {command: sleep 60, jobs: 3, chain: daisy}\n")
    said = desk.type("launch")
    assert said.returncode == 0
    ids = re.search(r"as job (\d+) (\d+) (\d+)", said.stdout)
    assert ids, said.stdout
    dependencies = {line.split("|")[0]: line.split("|")[2] for line in desk.queue()}
    assert f"afterany:{ids[1]}" in dependencies[ids[2]]
    assert f"afterany:{ids[2]}" in dependencies[ids[3]]
    again = desk.type("launch")
    assert again.returncode == 75
    assert "in the queue already" in again.stderr
    assert len(desk.queue()) == 3


def test_a_chain_attaches_to_a_job_that_somebody_else_s_script_started(desk: Desk, until: Until) -> None:
    over = desk.folder / "over"
    waits = f"until [ -e {over} ]; do sleep 0.2; done"
    by_hand = desk.sandbox.run(["sbatch", "--parsable", "-J", "by-hand", "--wrap", waits]).strip()
    desk.settings("launch: {command: sleep 60, jobs: 3}\n")
    assert desk.type("launch", "--after", by_hand).returncode == 0
    (line,) = desk.queue()
    assert f"afterany:{by_hand}" in line
    over.touch()
    until(lambda: any("RUNNING" in line for line in desk.queue()), "the first member after the end of the other job")


def test_attaching_to_a_job_that_is_gone_is_refused_because_slurm_would_start_at_once(desk: Desk) -> None:
    desk.settings("launch: {command: sleep 60, jobs: 3}\n")
    done = desk.type("launch", "--after", "999999")
    assert done.returncode == 66
    assert "not in the queue" in done.stderr
    assert desk.queue() == []


def test_nodes_are_excluded_and_spares_are_asked_for(desk: Desk) -> None:
    desk.settings("launch: {command: sleep 60, jobs: 2, nodes: 1, spare_nodes: 1, exclude: [node-3]}\n")
    done = desk.type("launch", "--exclude", "node-2")
    assert "--no-kill" in done.stdout
    first = desk.queue()[0].split("|")
    assert first[3] in ("node-[2-3]", "node-[2,3]")
    assert first[4] == "2"


def test_sbatch_s_own_words_reach_the_person(desk: Desk) -> None:
    desk.settings("launch: {command: sleep 60, partition: nosuch}\n")
    done = desk.type("launch")
    assert done.returncode == 65
    assert "sbatch: error: Batch job submission failed: Invalid partition name specified" in done.stderr
    desk.settings("launch: {command: sleep 60}\n")
    assert desk.type("launch").returncode == 0  # a refused launch stands in nobody's way


def test_launching_from_inside_a_job_takes_nothing_of_it_along(desk: Desk, until: Until) -> None:
    desk.settings('launch: {command: "env > inner.new; mv inner.new inner.env; sleep 60", jobs: 2, srun: false}\n')
    command = f"{sys.executable} -m ftsupervise launch {desk.folder}/ftsupervise.yaml"
    desk.sandbox.run(
        [
            "sbatch",
            "-N2",
            "--cpus-per-task=7",
            "--mem=1234",
            "-J",
            "outer",
            "-o",
            str(desk.folder / "outer.out"),
            "--wrap",
            command,
        ]
    )
    until((desk.folder / "inner.env").exists, "the inner job")
    inner = dict(line.split("=", 1) for line in (desk.folder / "inner.env").read_text().splitlines() if "=" in line)
    assert inner["SLURM_NNODES"] == "1"
    assert "SLURM_CPUS_PER_TASK" not in inner
    assert inner.get("SLURM_MEM_PER_NODE") != "1234"


@pytest.mark.fault("sbatch times out, but its job was accepted", "it is looked up by its token: one chain, not two")
def test_an_sbatch_that_timed_out_but_was_accepted_makes_one_chain_and_not_two(desk: Desk, tmp_path: Path) -> None:
    """A neighbour with a mood: it hands the job in and then says what sbatch says when the answer got lost."""
    sbatch = subprocess.run(
        ["which", "sbatch"], env=desk.sandbox.env(), capture_output=True, text=True, check=True
    ).stdout.strip()
    moody = tmp_path / "bin"
    moody.mkdir()
    (moody / "sbatch").write_text(
        f'#!/bin/sh\n{sbatch} "$@" > /dev/null\necho "sbatch: error: Batch job submission failed: Socket timed out on '
        'send/recv operation" >&2\nexit 1\n'
    )
    (moody / "sbatch").chmod(0o755)
    env = {"PATH": f"{moody}:{desk.sandbox.env()['PATH']}"}
    desk.settings("launch: {command: sleep 60, jobs: 3}\n")
    done = desk.type("launch", env=env)
    assert done.returncode == 0, done.stderr
    assert "accepted after all" in done.stdout
    assert desk.type("launch", env=env).returncode == 75
    assert len({line.split("_")[0] for line in desk.queue()}) == 1


@pytest.mark.fault("launch is killed before it heard back", "the next launch finds the job")
def test_a_launch_that_died_before_it_heard_back_is_found_by_the_next_one(desk: Desk) -> None:
    desk.settings("launch: {command: sleep 60, jobs: 3}\n")
    assert desk.type("launch").returncode == 0
    page = desk.folder / "runs" / desk.folder.name / "launches" / "0001" / "launch.json"
    record = json.loads(page.read_text())
    page.write_text(json.dumps({**record, "state": "submitting", "job_ids": []}))
    done = desk.type("launch")
    assert done.returncode == 0
    assert "found in the queue" in done.stdout
    assert json.loads(page.read_text())["job_ids"] == record["job_ids"]


def test_the_quoted_words_of_a_script_reach_slurm_as_they_were(desk: Desk) -> None:
    for words in ("a b", "it's", 'say "x"', "back\\slash", "100%", "#x", "$(touch c) `x`", "ä&|<>", "x=y"):
        desk.settings(
            f"launch: {{command: sleep 60, jobs: 1, sbatch: [{json.dumps('--wckey=' + words, ensure_ascii=False)}]}}\n"
        )
        run = load(desk.folder / "ftsupervise.yaml")
        one = plan(run, kind="slurm", token="t", workdir=desk.folder, python=sys.executable)
        options = dict(one.link(0))
        options["comment"] = options.pop("wckey")
        path = desk.folder / "x.sbatch"
        path.write_text(render(one, run.launch, options))
        job = desk.sandbox.run(["sbatch", "--parsable", str(path)]).strip()
        found = Slurm(desk.sandbox.env()).describe(job)
        assert found is not None
        assert found.comment == words


@pytest.mark.threat(
    "`scontrol write batch_script`, or the spool of slurmctld, shows a secret of the account that launched.",
    "Neither the script nor the environment of a job holds one.",
)
def test_what_slurm_keeps_of_a_job_holds_no_secret(desk: Desk) -> None:
    """``scontrol write batch_script`` and the spool of slurmctld, in which the script and the environment of a job lie."""
    secret = "xoxb-1234567890-abcdefghijklmnop"
    desk.settings(
        "scheduler: slurm\nlaunch: {command: sleep 600, jobs: 2, sbatch: [--begin=now+1hour]}\n"
        "alerts: {receivers: [slack: {channel: ops, token_env: OUR_TOKEN}]}\n"
    )
    env = {"OUR_TOKEN": secret, "SLACK_BOT_TOKEN": secret, "HARMLESS": "canary-of-the-environment"}
    done = desk.type("launch", env=env)
    assert done.returncode == 0, done.stderr
    (job,) = {line.partition("_")[0] for line in desk.queue("%i")}
    script = desk.sandbox.run(["scontrol", "write", "batch_script", job, "-"])
    assert "#SBATCH" in script and secret not in script
    kept = b"".join(path.read_bytes() for path in (desk.sandbox.directory / "state").rglob("*") if path.is_file())
    assert b"canary-of-the-environment" in kept, "it is where the environment lies"
    assert secret.encode() not in kept


def test_a_chain_longer_than_maxarraysize_is_refused_with_what_to_do_and_a_daisy_chain_is_taken(
    make_sandbox: Callable[..., Sandbox], short_tmp: Path
) -> None:
    folder = short_tmp / "longer"
    folder.mkdir()
    desk = Desk(folder, make_sandbox(nodes=1, overrides=("MaxArraySize=4",)))
    settings = "launch: {command: sleep 600, time: 1h, jobs: 4}\n"
    desk.settings(settings)
    done = desk.type("launch")
    assert done.returncode == 65 and "Invalid job array specification" in done.stderr
    assert "MaxArraySize" in done.stderr and "chain: daisy" in done.stderr and desk.queue() == []
    desk.settings(settings.replace("jobs: 4", "jobs: 4, chain: daisy"))
    assert desk.type("launch").returncode == 0 and len(desk.queue()) == 4
    desk.end()
    desk.settings(settings.replace("jobs: 4", "jobs: 3"))
    assert desk.type("launch", "--again").returncode == 0
    assert any("[1-3%1]" in line or "[2-3%1]" in line for line in desk.queue())
