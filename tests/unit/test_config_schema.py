"""The JSON Schema editors use: it accepts what ``load`` accepts, and says something about every key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ftsupervise.config.json_schema import json_schema
from ftsupervise.config.load import loads
from ftsupervise.config.strict_yaml import parse
from ftsupervise.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("**/ftsupervise.yaml"))
MINIMAL = "name: train-10b\nlaunch:\n  command: python train.py\n"
FULL = """\
name: train-10b
scheduler: slurm
act: {hang: observe, brake: act, exclusion: act, exit_analysis: act, going_back: observe}
share: {group: physics, watch: true, nodes: true, launch: false}
run_dir: /scratch/train-10b
sweep: {seed: ["1"]}
launch:
  command: [python, train.py, --size, 10b]
  resume: --resume {checkpoint}
  finished_by: exit 0
  srun: true
  srun_options: [--kill-on-bad-exit=1, --cpu-bind=none]
  jobs: 20
  chain: daisy
  partition: gpu,spare
  account: physics
  qos: long
  constraint: h100&ib
  reservation: big
  nodes: ${NODES:-16}
  spare_nodes: 1
  tasks_per_node: 8
  cpus_per_task: 12
  gpus_per_node: h100:8
  mem: "0"
  time: "2-00:00:00"
  signal: USR2
  warn: 15m
  exclude: ["node-[1-4,7]", node-9]
  restart:
    {in_place: 5, same_failure: 4, budgets: {node: 20}, back_off: 5s, stop_within: 5m, space_wait: 1m, warm: auto,
     hang: {at_least: 20s, start: 1h, unknown: 20m}}
  distributed: never
  replica_groups: null
  heartbeat: {log: 'step (\\d+)', file: train.log}
  requeue: true
  output: logs/%x-%A_%a.out
  error: logs/%x-%A_%a.err
  ntasks: 128
  min_nodes: 2
  gres: nvme:1
  mem_per_cpu: null
  mem_per_gpu: null
  exclusive: user
  hint: nomultithread
  licenses: a@b:1
  sbatch: [--contiguous, --mail-type=END]
  modules: [cuda/12.4]
  setup: |
    source .venv/bin/activate
    ulimit -c 0
  container: apptainer exec --nv image.sif
  env: {OMP_NUM_THREADS: 8, NCCL_DEBUG: INFO}
  take_along: [HF_TOKEN]
  template: my.sbatch.j2
price: 2.5
nodes: {directory: shared, at_most: 3, health: {command: "true", timeout: 5s, when: [start]}}
guard:
  poll: 2s
  memory: 90%
  gpu_memory: 97%
  stop_before: 5m
  run_for: 40h
  loss: {nonfinite: resume, diverging: stop, tolerate: 2, patience: 100, back: 50}
checkpoints:
  path: ckpt
  pattern: "step-*"
  every: 20m
  verify: full
  torn: tell
  incremental: 10
  adopt: true
  snapshot_every: 4
  snapshot_copies: 1%
  snapshot_wait: 2s
  retain: {last: 3, every: 1000, best: 2, metric: loss, better: low, copied: true, before_full: true}
  offload: {to: [/archive/run, "s3://bucket/run"], rate: 200MB}
watch:
alerts:
cron:
"""


@cache
def the_schema() -> dict[str, Any]:
    """Not at import: each worker imports this file, and one needs it."""
    return json_schema()


def invalid(text: str) -> bool:
    validator = jsonschema.Draft202012Validator(the_schema())
    return any(True for _ in validator.iter_errors(parse(text.encode(), "f").value))


def test_it_is_a_valid_schema_of_draft_2020_12() -> None:
    jsonschema.Draft202012Validator.check_schema(the_schema())
    assert the_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("text", [MINIMAL, FULL], ids=["minimal", "full"])
def test_schema_and_load_accept_the_minimal_and_the_full_file(text: str) -> None:
    assert loads(text, environ={}).name == "train-10b"
    assert not invalid(text)


@pytest.mark.parametrize("warm", ["auto", "[torch, numpy.linalg]", "null", "false", '"off"'])
@pytest.mark.parametrize("hang", ["{unknown: 20m, start: 1h}", "{}", "null", "false", '"off"'])
def test_schema_and_load_accept_all_ways_to_say_it(warm: str, hang: str) -> None:
    text = f"{MINIMAL}  restart: {{warm: {warm}, hang: {hang}}}\n"
    restart = loads(text, environ={}).launch.restart
    assert restart.warm == {"auto": "auto", "[": ("torch", "numpy.linalg")}.get(warm[:1] if warm[0] == "[" else warm)
    assert (restart.hang is None) == (hang[0] != "{")
    assert not invalid(text)


def test_schema_and_load_accept_every_example() -> None:
    for path in EXAMPLES:
        assert loads(path.read_bytes(), path).name, path
        assert not invalid(path.read_text("utf-8")), path


@pytest.mark.parametrize(
    "text",
    [
        "name: x",
        MINIMAL + "  nodes: 0\n",
        MINIMAL + "  nodes: '4'\n",
        MINIMAL + "  chain: dasy\n",
        MINIMAL + "  partition: a b\n",
        MINIMAL + "  zzz: 1\n",
        MINIMAL + "zzz: 1\n",
        MINIMAL + "guard: {memory: 95}\n",
        "name: a b\nlaunch: {command: a}\n",
    ],
)
def test_schema_and_load_refuse_the_same(text: str) -> None:
    assert invalid(text)
    with pytest.raises(ConfigError):
        loads(text, environ={})


def test_the_full_file_really_is_full() -> None:
    written = parse(FULL.encode(), "f").value
    assert set(written) == set(the_schema()["properties"])
    assert set(written["launch"]) == set(the_schema()["$defs"]["Launch"]["properties"])
    assert set(written["share"]) == set(the_schema()["$defs"]["Sharing"]["properties"])
    assert set(written["launch"]["restart"]) == set(the_schema()["$defs"]["Restart"]["properties"])
    assert set(written["checkpoints"]) == set(the_schema()["$defs"]["CheckpointSettings"]["properties"])
    assert set(written["guard"]) == set(the_schema()["$defs"]["GuardSettings"]["properties"])
    assert set(written["guard"]["loss"]) == set(the_schema()["$defs"]["LossSettings"]["properties"])


def keys() -> Iterator[tuple[str, dict[str, Any]]]:
    for where, schema in [("", the_schema()), *the_schema()["$defs"].items()]:
        for key, about in schema.get("properties", {}).items():
            yield f"{where}.{key}", about


def test_every_key_of_the_run_the_launch_and_the_guard_says_what_it_is() -> None:
    def described(about: dict[str, Any]) -> bool:
        if about.get("description") or "const" in about:
            return True
        forms = [about, *about.get("anyOf", ())]
        return any(
            the_schema()["$defs"][form["$ref"].rsplit("/", 1)[1]].get("description") for form in forms if "$ref" in form
        )

    own = [pair for pair in keys() if pair[0].split(".")[0] in ("", "Launch", "GuardSettings")]
    assert len(own) > 30
    assert [key for key, about in own if not described(about)] == []


def test_a_key_with_another_default_than_where_it_was_described_still_says_what_it_is() -> None:
    inherited = [(key, about) for key, about in keys() if key.split(".")[0] in ("Disk", "CriticalDisk")]
    assert len(inherited) > 10
    assert [key for key, about in inherited if "description" not in about] == []


def test_every_file_is_a_path_so_that_it_is_made_absolute() -> None:
    files = [(key, about) for key, about in keys() if key.endswith("_file")]
    assert [key for key, about in files if '"path"' not in repr(about).replace("'", '"')] == []


def test_no_setting_is_made_to_hold_a_secret() -> None:
    from ftsupervise.config.strict_yaml import secret_at

    def words(about: dict[str, Any]) -> bool:
        return any(form.get("type") == "string" for form in [about, *about.get("anyOf", ())])

    holding = [key for key, about in keys() if secret_at((key.split(".")[-1],)) and words(about)]
    assert [key for key in holding if not key.endswith(("_file", "_env"))] == []


def test_defaults_are_in_the_words_of_the_file() -> None:
    guard = the_schema()["$defs"]["GuardSettings"]["properties"]
    assert guard["poll"]["default"] == "1s"
    assert guard["memory"]["default"] == "95%"
    assert "PT" not in repr([about.get("default") for _, about in keys()])
