"""The loop that the page of frameworks shows for JAX and Orbax is run as it stands there, where both are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manual.blocks import marked
from tests.neighbours.supervised import outside_a_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="Orbax is not installed"),
]
BEGIN = """
import os, signal, sys
import jax, jax.numpy as jnp

if sys.argv[2] != "1":
    jax.distributed.initialize(sys.argv[4], int(sys.argv[2]), int(sys.argv[1]))
from jax.sharding import NamedSharding, PartitionSpec

mesh, last = jax.make_mesh((jax.device_count(),), ("data",)), 40
alike = NamedSharding(mesh, PartitionSpec())
state = jax.jit(lambda: {"weights": jnp.zeros(2)}, out_shardings=alike)()


@jax.jit
def update(state, x):
    loss = lambda weights: ((x @ weights - x @ jnp.array([3.0, -1.0])) ** 2).mean()
    weights = state["weights"] - 0.05 * jax.grad(loss)(state["weights"])
    return {"weights": jax.lax.with_sharding_constraint(weights, alike)}


def train(state, step):
    if step == int(sys.argv[3]) and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    key = jax.random.fold_in(jax.random.key(jax.process_index()), step)
    x = jax.random.normal(key, (64, 2))
    return update(state, multihost_utils.host_local_array_to_global_array(x, mesh, PartitionSpec("data")))

"""
END = """
print("from", first, "to", step, bytes(jax.device_get(state["weights"])).hex(), flush=True)
"""


def play(folder: Path, processes: int, stop_at: int = 0) -> str:
    """Run the loop on so many processes; the last one is told to stop at a step. What the first one said at the end."""
    folder.mkdir(exist_ok=True)
    (loop,) = marked("run", "jax")
    (folder / "train.py").write_text(BEGIN + loop.text + END)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    env = outside_a_job(FTSUPERVISE_CHECKPOINT_DIR=str(folder / "checkpoints"), JAX_PLATFORMS="cpu")
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", str(me), str(processes), str(stop_at), place],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for me in range(processes)
    ]  # fmt: skip
    said = [one.communicate(timeout=200) for one in started]
    assert [one.returncode for one in started] == [0] * processes, said
    found = {line for out, _ in said for line in re.findall(r"^from .*$", out, re.M)}
    assert len(found) == 1, said
    return str(found.pop())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_of_jax_that_is_interrupted_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, processes: int
) -> None:
    alone = play(tmp_path / "alone", processes).split()
    assert alone[1:4] == ["1", "to", "40"]
    stopped = play(tmp_path / "again", processes, stop_at=17).split()
    assert 17 <= int(stopped[3]) < 17 + 5
    resumed = play(tmp_path / "again", processes).split()
    assert resumed[1] == str(int(stopped[3]) + 1)
    assert resumed[3:] == alone[3:]
    assert (tmp_path / "again" / "checkpoints" / f"step-{int(stopped[3]):08d}" / "state").is_dir()
    assert not os.listdir(tmp_path / "again" / "checkpoints" / ".staging" / ("alone" if processes == 1 else "alone-2"))
