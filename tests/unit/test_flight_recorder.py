"""Dumps of PyTorch's flight recorder, in the form of NCCL's and of gloo's: who keeps whom waiting."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.diagnosis.flight_recorder import (
    FlightRecord,
    NotADump,
    Trouble,
    dump_files,
    load_dump,
    ranks_in,
    read_flight_record,
)

DEFAULT = ("0", "default_pg")
Entry = dict[str, Any]


def call(
    number: int,
    *,
    op: str = "all_reduce",
    sizes: Sequence[Sequence[int]] = ((1000,),),
    done: bool = True,
    group: tuple[str, str] = DEFAULT,
    at: float = 0.0,
    line: int = 42,
    backend: str = "nccl",
) -> Entry:
    """An entry as PyTorch 2.13 writes it. gloo's state stays "scheduled", and ``retired`` says that it is done."""
    state = ("completed" if done else "started") if backend == "nccl" else "scheduled"
    return {
        "record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": f"{backend}:{op}", "time_created_ns": int((100 + number + at) * 1e9),
        "input_sizes": [list(s) for s in sizes],
        "input_dtypes": ["Float"], "output_sizes": [list(s) for s in sizes], "output_dtypes": ["Float"], "state": state,
        "retired": done, "timeout_ms": 600000, "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 2810},
            {"name": "step", "filename": "/home/ada/train.py", "line": line},
        ],
    }  # fmt: skip


def dump(entries: Iterable[Entry], world: int, groups: dict[str, list[int]] | None = None) -> dict[str, Any]:
    known = {"0": list(range(world)), **(groups or {})}
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in known.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def judged(folder: Path, dumps: dict[int, dict[str, Any]], *, as_json: bool = False, **more: Any) -> FlightRecord:
    for rank, one in dumps.items():
        (folder / f"rank_{rank}").write_bytes(json.dumps(one).encode() if as_json else pickle.dumps(one))
    return read_flight_record(dump_files(folder), **more)


def test_of_two_neighbours_the_one_that_did_what_it_had_never_done_is_wrong(tmp_path: Path) -> None:
    """The dumps of two ranks between which gloo aborted a third: with two there is no majority."""
    loop = [("all_gather", 100), ("all_reduce", 4)] * 8
    usual = [call(at, op=op, sizes=[[size]], backend="gloo") for at, (op, size) in enumerate(loop, 1)]
    skipped = [*usual[:-2], call(15, op="all_reduce", sizes=[[4]], backend="gloo")]
    larger = [*usual[:-1], call(16, sizes=[[16]], backend="gloo")]
    for number, wrong in enumerate((skipped, larger)):
        for culprit, other in ((5, 7), (7, 5)):
            folder = tmp_path / f"{number}-{culprit}"
            folder.mkdir()
            found = judged(folder, {culprit: dump(wrong, 8), other: dump(usual[: len(wrong)], 8)}).first
            assert found is not None
            assert (found.trouble, found.culprits, found.sure) == (Trouble.MISMATCH, (culprit,), True)


def all_good(number: int = 20, **more: Any) -> list[Entry]:
    return [call(one, **more) for one in range(1, number + 1)]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_that_did_not_join_is_named(tmp_path: Path, backend: str, as_json: bool) -> None:
    dumps = {rank: dump([*all_good(backend=backend), call(21, done=False, backend=backend)], 4) for rank in (0, 1, 3)}
    dumps[2] = dump(all_good(backend=backend), 4)
    found = judged(tmp_path, dumps, as_json=as_json).first
    assert found is not None and (found.trouble, found.culprits, found.waiting) == (Trouble.NOT_JOINED, (2,), (0, 1, 3))
    assert (found.number, found.collective, found.where, found.sure) == (21, "all_reduce", "train.py:42 step", True)


@pytest.mark.parametrize(
    ("op", "sizes", "said"), [("broadcast", ((1000,),), "broadcast"), ("all_reduce", ((500,),), "[[500]]")]
)
def test_a_rank_that_called_something_else_is_named(tmp_path: Path, op: str, sizes: Any, said: str) -> None:
    dumps = {rank: dump([*all_good(), call(21, done=False)], 4) for rank in (0, 1, 3)}
    dumps[2] = dump([*all_good(), call(21, op=op, sizes=sizes, done=False, line=77)], 4)
    found = judged(tmp_path, dumps).first
    assert found is not None and (found.trouble, found.culprits, found.number) == (Trouble.MISMATCH, (2,), 21)
    assert said in found.text and found.where == "train.py:77 step"


def test_who_waits_in_another_group_is_not_the_culprit(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for 2 in their group, 2 waits for 3 in the group of all: 3 is it."""
    small = ("1", "tensor_parallel")
    dumps = {
        0: dump([call(1, group=small, done=False)], 4, {"1": [0, 1, 2]}),
        1: dump([call(1, group=small, done=False)], 4, {"1": [0, 1, 2]}),
        2: dump([call(1, done=False)], 4, {"1": [0, 1, 2]}),
        3: dump([], 4, {"1": [0, 1, 2]}),
    }
    found = judged(tmp_path, dumps).first
    assert found is not None and found.trouble is Trouble.NOT_JOINED and 3 in found.culprits
    assert 2 not in found.culprits


def test_ranks_that_wait_for_each_other_in_two_groups_are_called_a_circle(tmp_path: Path) -> None:
    """Collectives in different order."""
    left, right = ("1", "a"), ("2", "b")
    members = {"1": [0, 1], "2": [0, 1]}
    dumps = {
        0: dump([call(1, group=left, done=False)], 2, members),
        1: dump([call(1, group=right, done=False)], 2, members),
    }
    found = judged(tmp_path, dumps).first
    assert found is not None and (found.trouble, found.culprits) == (Trouble.CIRCLE, (0, 1))


def test_a_rank_without_a_dump_is_told_and_nothing_is_sure_then(tmp_path: Path) -> None:
    dumps = {rank: dump([*all_good(), call(21, done=False)], 4) for rank in (0, 1, 3)}
    found = judged(tmp_path, dumps)
    assert [(one.trouble, one.culprits, one.sure) for one in found.findings] == [(Trouble.SILENT, (2,), False)]


def test_a_recorder_that_has_forgotten_the_beginning_misses_nothing(tmp_path: Path) -> None:
    """A ring of 2,000 entries: one rank records more, so its oldest entry is younger."""
    dumps = {
        rank: dump([call(one) for one in range(10 + 5 * rank, 60)] + [call(60, done=False)], 3) for rank in (0, 1, 2)
    }
    assert judged(tmp_path, dumps).findings == ()


def test_a_rank_that_is_last_again_and_again_is_a_straggler(tmp_path: Path) -> None:
    dumps = {
        rank: dump([call(one, at=0.9 if rank == 1 else 0.01 * rank) for one in range(1, 30)], 4) for rank in range(4)
    }
    found = judged(tmp_path, dumps).first
    assert found is not None and (found.trouble, found.culprits) == (Trouble.LATE, (1,))
    assert "came last in 29 of 29 collectives, by 0.9 s" in found.text


def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    dumps = {rank: dump([call(1, op="all_to_all", sizes=((rank,),), done=False)], 3) for rank in range(3)}
    assert judged(tmp_path, dumps).findings == ()


def test_gloo_s_dumps_do_not_say_who_is_in_the_group(tmp_path: Path) -> None:
    """2.13: one entry with the key "", whose ranks may be "[]"."""
    dumps = {
        rank: {
            **dump([*all_good(backend="gloo"), call(21, done=False, backend="gloo")], 4),
            "pg_config": {"": {"ranks": "[]"}},
        }
        for rank in (0, 1, 3)
    }
    dumps[2] = {**dump(all_good(backend="gloo"), 4), "pg_config": {"": {"ranks": "[]"}}}
    found = judged(tmp_path, dumps).first
    assert found is not None and (found.trouble, found.culprits) == (Trouble.NOT_JOINED, (2,))


class Malicious:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/fts-pickle-was-run",)


def test_a_hostile_dump_runs_nothing_and_hides_no_other(tmp_path: Path) -> None:
    dumps = {rank: dump([*all_good(), call(21, done=False)], 6) for rank in (0, 1, 3)}
    dumps[2] = dump(all_good(), 6)
    (tmp_path / "rank_4").write_bytes(pickle.dumps({"entries": [Malicious()]}))
    (tmp_path / "rank_5").write_bytes(pickle.dumps(dump(all_good(), 6))[:500])
    found = judged(tmp_path, dumps)
    assert not Path("/tmp/fts-pickle-was-run").exists()
    assert found.first is not None and (found.first.trouble, found.first.culprits) == (Trouble.NOT_JOINED, (2,))
    assert len(found.unread) == 2 and "posix.system, which is not loaded" in found.unread[0]


@pytest.mark.parametrize(
    "raw", [b"", b"\x80", b"{}", b"[1]", b'{"entries": 7}', b"[" * 100_000, b"\x80\x05]\x94(h\x00h\x00e."]
)
def test_what_is_no_dump_is_said_to_be_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "rank_0").write_bytes(raw)
    with pytest.raises(NotADump):
        load_dump(tmp_path / "rank_0")


def test_entries_of_any_kind_do_no_harm(tmp_path: Path) -> None:
    rng = random.Random(3)
    odd: tuple[Any, ...] = (None, -1, 1 << 80, "x", [], {}, 1.5, True, [[1]], "\x1b[2J", ("0",), {"a": 1})
    for turn in range(200):
        entries: list[Any] = [
            {key: rng.choice(odd) if rng.random() < 0.3 else value for key, value in call(number).items()}
            for number in range(5)
        ]
        entries.append(rng.choice(odd))
        config: Any = {rng.choice(("0", "", "x")): rng.choice((*odd, {"ranks": rng.choice(odd)}))}
        (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": entries, "pg_config": config}))
        (tmp_path / "rank_1").write_bytes(pickle.dumps(dump(all_good(5), 2)))
        assert read_flight_record(dump_files(tmp_path)).ranks == (0, 1), turn


def test_a_set_of_ranks_gives_them_back() -> None:
    rng = random.Random(5)
    for _ in range(50):
        some = sorted(rng.sample(range(5000), 40))
        assert ranks_in(sum(1 << rank for rank in some)) == tuple(some)
