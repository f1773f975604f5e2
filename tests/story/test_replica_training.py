"""Four replica groups train with torchft: each example, with a group killed while it computes, and the weights compared.

Two or three groups hide faults that four have: there every group is the neighbour of every other.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.checkpoints.find import checkpoints_in
from tests.manual.blocks import ROOT, marked
from tests.neighbours.patience import wait_until
from tests.neighbours.replicas import Forker, Groups

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
EXAMPLES = ROOT / "examples" / "replicas"
OTHERS = ("g000", "g002", "g003")
TIMEOUT = 10.0  # seconds: of the process group, which a survivor would wait for without an abort


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    one = Forker()
    yield one
    one.close()


def groups(forker: Forker, folder: Path, name: str, *options: str, steps: int = 5000, ranks: int = 1) -> Groups:
    words = ("--steps", str(steps), "--log-every", "1", "--save-every", "20", "--step-time", "0.04", *options)
    return Groups(forker, folder, EXAMPLES / f"{name}.py", *words, ranks=ranks)


def differ(found: Groups) -> list[int]:
    return [step for step, of in found.weights().items() if len(set(of.values())) > 1]


def newest(found: Groups, name: str) -> int:
    return max((one.step for one in found.told() if one.group == name), default=0)


@pytest.mark.parametrize("name", ["ddp", "hsdp", pytest.param("localsgd", marks=pytest.mark.slow), "diloco"])
def test_a_group_that_is_killed_while_it_computes_costs_the_others_one_step_and_comes_back_with_their_weights(
    tmp_path: Path, forker: Forker, name: str
) -> None:
    with groups(forker, tmp_path, name, "--sync-every", "3", ranks=2 if name == "hsdp" else 1) as found:
        found.start()
        found.until_all_at(4, present=4)
        at, step = time.monotonic(), newest(found, "g000")
        found.kill("g001")
        found.until_all_at(step + 3, present=3, names=OTHERS)
        stalls = {one: found.stall(at, one) for one in OTHERS}
        assert max(stalls.values()) < TIMEOUT - 2, stalls
        found.start("g001")
        found.until_all_at(step + 6, present=4)
        found.raise_switch("kill-switch")
        assert found.until_ended() == {one: [0] * found.ranks for one in found.names}
        assert differ(found) == []
        last = {newest(found, one) for one in found.names}
        assert len(last) == 1, "all groups stop at one step"
        assert checkpoints_in(tmp_path / "checkpoints")[0].step == last.pop(), "one of them has saved it"


@pytest.mark.fault(
    "A replica group is stopped in the middle of a reduction, and continued later",
    "the others see its silence at the lighthouse and go on within two seconds; what it sends later reaches no "
    "weights, and it takes theirs",
)
@pytest.mark.parametrize("name", ["ddp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_a_group_that_is_stopped_costs_the_others_seconds_and_not_the_timeout_and_what_it_sends_later_reaches_nobody(
    tmp_path: Path, forker: Forker, name: str
) -> None:
    with groups(forker, tmp_path, name, ranks=2 if name == "hsdp" else 1) as found:
        found.start()
        found.until_all_at(4, present=4)
        for _ in range(2):
            at, step = time.monotonic(), newest(found, "g000")
            found.send("g001", signal.SIGSTOP)
            found.until_all_at(step + 5, present=3, names=OTHERS)
            stalls = {one: found.stall(at, one) for one in OTHERS}
            print(stalls)
            assert max(stalls.values()) < TIMEOUT - 3, stalls
            found.send("g001", signal.SIGCONT)
            found.until_all_at(newest(found, "g000") + 5, present=4)
        assert any("g001 sends no heartbeats to the lighthouse any more" in found.out(one) for one in OTHERS)
        found.raise_switch("kill-switch")
        assert found.until_ended() == {one: [0] * found.ranks for one in found.names}
        assert differ(found) == []


APART = """
        if step == 20 and manager.group == "g001" and not apart:
            apart.append(manager._commit)
            manager._commit = 4711
            torch.nn.utils.vector_to_parameters(torch.zeros(sum(map(torch.numel, net.parameters()))), net.parameters())
"""


def test_a_group_that_has_made_its_last_step_without_the_others_copies_their_weights(
    tmp_path: Path, forker: Forker
) -> None:
    """As after a network that failed in the last moment of a step: the same number of steps, and other weights."""
    text = (EXAMPLES / "ddp.py").read_text()
    loop = next(line for line in text.splitlines() if "manager.steps(" in line)
    (tmp_path / "ddp.py").write_text(text.replace(loop, f"    apart = []\n{loop}{APART}"))
    shutil.copy(EXAMPLES / "common.py", tmp_path)
    with Groups(forker, tmp_path, tmp_path / "ddp.py", "--steps", "5000", "--log-every", "1") as found:
        found.start()
        found.until_all_at(40, present=4)
        found.raise_switch("kill-switch")
        assert found.until_ended() == {one: [0] for one in found.names}
        assert "g001 has made step 20 without the others: it copies the weights of one of them" in found.out("g001")
        assert not any("without the others" in found.out(one) for one in OTHERS)
        assert differ(found) == []


def test_groups_that_all_died_go_on_together_from_the_newest_checkpoint_and_finish_at_one_step(
    tmp_path: Path, forker: Forker
) -> None:
    with groups(forker, tmp_path, "ddp", steps=60) as found:
        found.start()
        wait_until(lambda: len(checkpoints_in(tmp_path / "checkpoints")) > 1, "two checkpoints", 60)
        for one in found.names:
            found.kill(one)
        found.until_ended()
        saved = checkpoints_in(tmp_path / "checkpoints")[0].step
        assert saved is not None
        before = {one: found.out(one).count("\n") for one in found.names}
        found.start()
        assert found.until_ended() == {one: [0] for one in found.names}
        for one in found.names:
            first = next(line for line in found.out(one).splitlines()[before[one] :] if " loss " in line)
            assert f"step {saved + 1}," in first
        assert {newest(found, one) for one in found.names} == {60}
        assert checkpoints_in(tmp_path / "checkpoints")[0].step == 60
        assert [step for step in differ(found) if step > saved] == []


def test_the_program_that_the_manual_shows_trains_in_four_groups(tmp_path: Path, forker: Forker) -> None:
    (block,) = marked("run", "replicas")
    (tmp_path / "train.py").write_text(block.text.replace("10_000", "12").replace("500", "5"))
    with Groups(forker, tmp_path, tmp_path / "train.py") as found:
        found.start()
        assert found.until_ended() == {one: [0] for one in found.names}
        assert found.rundir.finished.exists()
        assert [one.step for one in checkpoints_in(tmp_path / "checkpoints")] == [12, 10, 5]


@pytest.mark.slow
def test_a_lighthouse_that_is_killed_and_started_again_keeps_no_group_out(tmp_path: Path, forker: Forker) -> None:
    with groups(forker, tmp_path, "ddp") as found:
        found.start()
        found.until_all_at(4, present=4)
        found.lighthouse.send_signal(signal.SIGKILL)
        found.lighthouse.wait()
        time.sleep(1)
        found.lighthouse = found.start_lighthouse()
        step = newest(found, "g000")
        found.until_all_at(step + 5, present=4)
        assert differ(found) == []
