"""The output of many ranks read as one: the failure that came first, whoever was louder."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from ftsupervise.diagnosis import first_failure as module
from ftsupervise.diagnosis.first_failure import CHUNK, FirstFailure, LogFile, first_failure
from ftsupervise.diagnosis.vocabulary import FailureClass, Role

STEP = "2026-11-27 20:36:{:02d},000 INFO rank {} step {} loss 2.31\n"
TOLD = (
    "[rank{0}]:[E1127 20:59:{0:02d}.123456 ProcessGroupNCCL.cpp:632] [Rank {0}] "
    "Watchdog caught collective operation timeout\n"
)


def traceback(said: str, label: str = "", at: str = "/home/ada/train.py") -> str:
    lines = (
        "Traceback (most recent call last):",
        f'  File "{at}", line 42, in step',
        "    loss = model(batch)",
        '  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl',
        "    return forward_call(*args, **kwargs)",
        said,
    )
    return "".join(f"{label}{line}\n" for line in lines)


def read(folder: Path, texts: dict[int, str], processes: int = 1) -> FirstFailure:
    for rank, text in texts.items():
        (folder / f"rank-{rank}.log").write_text(text)
    return first_failure(
        [LogFile(folder / f"rank-{rank}.log", rank) for rank in sorted(texts)], year=2026, processes=processes
    )


def test_one_rank_fails_and_all_others_report_it_louder(tmp_path: Path) -> None:
    texts = {rank: STEP.format(1, rank, 1) + TOLD.format(rank) * 50 for rank in range(8)}
    texts[5] = STEP.format(2, 5, 1) + traceback("KeyError: 'tokens'")
    found = read(tmp_path, texts)
    assert found.first is not None and found.first.rank == 5
    assert (found.first.kind, found.first.text) == (FailureClass.USER_CODE, "KeyError: 'tokens'")
    assert found.first.where == "train.py:42 step"
    told = next(one for one in found.groups if one.first.role is Role.FOLLOWER)
    assert (told.times, told.ranks) == (350, (0, 1, 2, 3, 4, 6, 7))


def test_without_ahocorasick_the_same_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        rank: STEP.format(1, rank, 1) + TOLD.format(rank) * 3 + traceback(f"KeyError: {rank}") for rank in range(3)
    }
    texts[1] += "".join(
        f"sample {number} of the error of {word} in the finances\n" for number, word in enumerate("abcdef")
    )
    with_it = read(tmp_path, texts)
    monkeypatch.setitem(sys.modules, "ahocorasick_rs", None)
    monkeypatch.setattr(module, "places_of_anchors", module.places_of_anchors.__wrapped__)  # asks anew
    assert read(tmp_path, texts) == with_it and len(with_it.groups) == 2


def test_of_two_causes_the_earlier_one_counts(tmp_path: Path) -> None:
    late = STEP.format(40, 0, 9) + traceback("OSError: [Errno 28] No space left on device")
    soon = STEP.format(3, 1, 9) + traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    found = read(tmp_path, {0: late, 1: soon})
    assert found.first is not None and (found.first.rank, found.first.kind) == (1, FailureClass.GPU_MEMORY)


def test_equal_tracebacks_of_many_ranks_are_one_group(tmp_path: Path) -> None:
    texts = {rank: STEP.format(rank, rank, 1) + traceback(f"ValueError: bad row {rank * 17}") for rank in range(30)}
    found = read(tmp_path, texts)
    assert [(one.times, len(one.ranks)) for one in found.groups] == [(30, 30)]
    assert found.first is not None and found.first.rank == 0


@pytest.mark.parametrize("label", ["{}: ", "[rank{}]: ", "[default{}]:"])
def test_ranks_that_write_between_each_other_s_lines_are_told_apart(tmp_path: Path, label: str) -> None:
    """srun --label, PyTorch and torchrun: three tracebacks, line by line in turn."""
    said = {
        0: "RuntimeError: Connection closed by peer",
        1: "ZeroDivisionError: division by zero",
        2: "RuntimeError: Broken pipe",
    }
    lines = {rank: traceback(text, label.format(rank)).splitlines(keepends=True) for rank, text in said.items()}
    mixed = "".join(one for turn in zip(*lines.values(), strict=True) for one in turn)
    (tmp_path / "out.log").write_text(mixed)
    found = first_failure([LogFile(tmp_path / "out.log")], year=2026)
    assert found.first is not None and (found.first.rank, found.first.text) == (
        1,
        "ZeroDivisionError: division by zero",
    )
    assert {one.first.rank for one in found.groups if one.first.role is Role.FOLLOWER} == {0, 2}


@pytest.mark.parametrize(
    "said", ["_of_its_own.<locals>.BadBatch: batch 44 is empty", "data.BadBatch", "StopTraining: loss is flat"]
)
def test_an_exception_of_the_program_need_not_be_called_an_error(tmp_path: Path, said: str) -> None:
    closed = "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2431"
    texts = traceback(closed, "[rank0]: ") + traceback(said, "[rank5]: ") + traceback(closed, "[rank7]: ")
    found = read(tmp_path, {0: texts})
    assert found.first is not None and found.first.rank == 5
    assert (found.first.kind, found.first.text) == (FailureClass.USER_CODE, said)


@pytest.mark.parametrize("at", range(1, 6))
def test_slurm_and_we_write_in_the_middle_of_a_traceback(tmp_path: Path, at: int) -> None:
    lines = traceback("data.BadBatch: batch 44 is empty").splitlines(keepends=True)
    lines[at:at] = [
        "srun: error: node-3: task 0: Exited with exit code 1\n",
        "srun: launch/slurm: _step_signal: Terminating StepId=89.2\n",
        "slurmstepd-node-4: error: *** STEP 89.2 ON node-4 CANCELLED AT 2026-11-29T15:17:24 ***\n",
        "srun: error: node-4: task 1: Terminated\n",
        "2026-11-29T15:17:24Z ftsupervise: SIGTERM: passed on to the command\n",
    ]
    found = read(tmp_path, {0: "".join(lines)})
    assert found.first is not None and found.first.where == "train.py:42 step"
    assert (found.first.kind, found.first.text) == (FailureClass.USER_CODE, "data.BadBatch: batch 44 is empty")
    assert any(one.first.text.endswith("task 1: Terminated") for one in found.groups), "what Slurm says is read too"


def test_a_line_of_somebody_else_within_a_traceback_is_no_exception(tmp_path: Path) -> None:
    cut = traceback("INFO: step 44 is done") + traceback("step 45: loss 2.31") + traceback("loss: 2.31")
    assert read(tmp_path, {0: cut}).first is None


def test_an_exception_that_a_program_quotes_is_none(tmp_path: Path) -> None:
    quoted = "retrying after ValueError: bad row\nValueError: this is in a table of the manual\n"
    assert read(tmp_path, {0: quoted}).groups == ()


def test_what_ends_in_the_middle_of_a_traceback_is_left_out(tmp_path: Path) -> None:
    cut = traceback("ValueError: x").splitlines(keepends=True)[:3]
    assert read(tmp_path, {0: "".join(cut)}).first is None


@pytest.mark.parametrize("before", [0, 1, 57, 4095])
def test_a_traceback_across_two_blocks_is_read_whole(tmp_path: Path, before: int) -> None:
    filler = STEP.format(1, 0, 1)
    text = filler * ((CHUNK - before) // len(filler)) + traceback("IndexError: list index out of range") + filler * 1000
    found = read(tmp_path, {0: text})
    assert found.first is not None and found.first.where == "train.py:42 step"
    assert found.first.at is not None and found.read == len(text)


def test_several_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftsupervise.diagnosis.first_failure.LARGE", 1)
    rng = random.Random(7)
    texts = {rank: STEP.format(rng.randrange(60), rank, 1) + traceback(f"ValueError: row {rank}") for rank in range(12)}
    assert read(tmp_path, texts, processes=2) == read(tmp_path, texts, processes=1)


def test_bytes_that_are_no_text_and_lines_without_an_end_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(bytes(range(256)) * 4000 + b"error " * 900_000)
    (tmp_path / "b.log").write_bytes(b"\x1b[31mTraceback (most recent call last):\n" * 3000)
    found = first_failure(
        [LogFile(tmp_path / "a.log"), LogFile(tmp_path / "b.log"), LogFile(tmp_path / "none")], year=2026
    )
    assert found.first is None and len(found.unseen) == 1 and "none" in found.unseen[0]


def test_no_more_than_the_part_of_a_file_is_read_that_is_the_attempt_s(tmp_path: Path) -> None:
    old, mine, new = traceback("ValueError: old"), traceback("ValueError: mine"), traceback("ValueError: new")
    (tmp_path / "out.log").write_text(old + mine + new)
    found = first_failure([LogFile(tmp_path / "out.log", begin=len(old), end=len(old) + len(mine))], year=2026)
    assert [one.first.text for one in found.groups] == ["ValueError: mine"]
