"""Measure what it costs to read what thousands of ranks left: dumps of NCCL's flight recorder, and logs.

    python benchmarks/diagnosis_scale.py [--full] [--dumps 512] [--entries 2000] [--logs 128] [--megabytes 10] [--keep FOLDER]
        [--torch PYTHON] [--check]

``--full`` takes 4,096 dumps and 1,024 logs of 10 MB. The dumps are made by a program, in the form that PyTorch 2.13 documents
(pickles of protocol 2, times of their own for each rank, twelve frames an entry): one group of all ranks and one of eight ranks
each, in turn, and one rank that did not join the last collective. The logs are real files, each of its own rank, as training
writes them (every line has other numbers) and as programs print what they read (no line is like another); in each kind one
rank fails, and all others report it in thousands of lines. ``ftsupervise diagnose`` reads each folder
as a person types it, once all of it and once the last part, and must name the rank.

Printed are seconds by the clock, processor seconds of all its processes, and the most memory of all of them at one time; the
floors are ``cat`` of the same bytes to nowhere, and for dumps one process that does no more than load each pickle. ``--torch``
names a Python whose PyTorch has ``torch.distributed.flight_recorder``: its analyzer gets the same dumps. ``--check`` exits 1
where a rank was not found, where a folder took a minute, or where 2 GB of memory were not enough.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from benchmarks.memory import family, pss

SECONDS, MEMORY = 60.0, 2e9  # of the goal
GROUP = 8  # ranks of a small group
_FRAMES = 12
_BEGAN = 1_790_000_000_000_000_000  # nanoseconds since 1970
_EVERY = 50_000_000  # nanoseconds between two collectives
_LOADS = """import gc, os, pickle, sys
gc.disable()
for name in sorted(os.listdir(sys.argv[1])):
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        pickle.load(file)
"""
DIAGNOSE = [sys.executable, "-m", "ftsupervise", "diagnose", "--json"]


class Cost(NamedTuple):
    seconds: float
    processor: float
    memory: float  # bytes: the most at one time of all its processes
    said: str = ""


# ------------------------------------------------------------------------------------------------------------ the dumps


def dump_of(rank: int, ranks: int, entries: int, *, joined: bool) -> bytes:
    """Return the dump of a rank, as the ranks of its small group have it: its own times are put in afterwards."""
    small = rank // GROUP
    own = list(range(small * GROUP, min(ranks, (small + 1) * GROUP)))
    groups = [("0", "default_pg"), (str(1 + small), f"tensor_parallel_{small}")]
    config = {
        name: {"name": name, "desc": desc, "ranks": str(members)}
        for (name, desc), members in zip(groups, (list(range(ranks)), own), strict=True)
    }
    found: list[dict[str, Any]] = []
    for number in range(1, entries + 1 - (not joined)):
        last, whole = number == entries, number % 2 == entries % 2
        sizes = [[4096, 1024]] if whole else [[8, 2048, 512]]
        found.append({
            "frames": [
                {"name": f"call_{depth}", "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/module.py"
                 if depth < _FRAMES - 2 else "/home/ada/train.py", "line": 1750 + depth}
                for depth in range(_FRAMES)
            ],
            "record_id": number, "pg_id": int(not whole), "process_group": groups[not whole],
            "collective_seq_id": (number + 1) // 2, "p2p_seq_id": 0, "op_id": number,
            "profiling_name": "nccl:all_reduce" if whole else "nccl:_all_gather_base",
            "time_created_ns": _BEGAN + number * _EVERY, "duration_ms": 1.25,
            "input_sizes": sizes, "input_dtypes": ["BFloat16"], "output_sizes": sizes, "output_dtypes": ["BFloat16"],
            "state": "started" if last else "completed",
            "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
            "retired": not last, "timeout_ms": 600000, "is_p2p": False,
        })  # fmt: skip
    status = {
        "last_enqueued_collective": entries,
        "last_started_collective": entries,
        "last_completed_collective": entries - 1,
    }
    return pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": {"0": status}, "entries": found}, 2)


def write_dumps(folder: Path, small: int, ranks: int, entries: int, culprit: int) -> None:
    """Write the dumps of a small group. Each time is a number of eight bytes at a place of its own."""
    raw = {joined: bytearray(dump_of(small * GROUP, ranks, entries, joined=joined)) for joined in (True, False)}
    for rank in range(small * GROUP, min(ranks, (small + 1) * GROUP)):
        one, rng, at = raw[rank != culprit], random.Random(rank), 0
        for number in range(1, entries + (rank != culprit)):
            due = _BEGAN + number * _EVERY
            if rank == small * GROUP or rank == culprit:
                at = one.index(b"\x8a\x08" + struct.pack("<q", due), at) + 2
                _PLACES.setdefault((small, rank == culprit), []).append(at)
            struct.pack_into("<q", one, _PLACES[small, rank == culprit][number - 1], due + rng.randrange(20_000_000))
        (folder / f"rank_{rank}").write_bytes(one)


_PLACES: dict[tuple[int, bool], list[int]] = {}

# ------------------------------------------------------------------------------------------------------------- the logs

_FAILS = """Traceback (most recent call last):
  File "/home/ada/train.py", line 212, in <module>
    main()
  File "/home/ada/train.py", line 142, in step
    batch = tokens[index]
KeyError: 'tokens of shard 17'
"""
_TOLD = (
    "[rank{rank}]:[E1127 20:59:59.123456789 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600051 milliseconds\n"
)


def training_line(rng: random.Random, rank: int, number: int) -> str:
    at = f"2026-11-27 {number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02},{number % 1000:03}"
    return (
        f"{at} INFO rank {rank:04} step {number} loss {2 + rng.random():.4f} grad_norm {rng.random():.3f} "
        f"lr {rng.random() / 1000:.2e} tokens/s {rng.randrange(10**5)} memory {rng.random() * 80:.1f} GiB\n"
    )


def other_line(rng: random.Random, rank: int, number: int) -> str:
    return f"{rank:04} sample {number}: " + " ".join(rng.choices(_WORDS, k=12)) + "\n"


_RNG = random.Random(1)
_WORDS = ["".join(_RNG.choices("abcdefghilmnoprstuvw", k=_RNG.randrange(2, 10))) for _ in range(20_000)]
LINES = {"training": training_line, "every line another": other_line}


def write_log(folder: Path, kind: str, rank: int, size: int, culprit: int) -> None:
    rng, one = random.Random(rank), LINES[kind]
    begin = "".join(one(rng, rank, number) for number in range(20_000))  # a few MB that come again and again
    told = "".join(_TOLD.format(rank=rank, n=number) for number in range(2000))
    own = _FAILS if rank == culprit else told
    often, rest = divmod(size - len(own), len(begin))
    with (folder / f"rank-{rank:04}.log").open("w", encoding="ascii") as file:
        for _ in range(often):
            file.write(begin)
        file.write(f"{begin[:rest]}\n{own}")


# ----------------------------------------------------------------------------------------------------------- measuring


def measured(words: Sequence[str], *, quiet: bool = True) -> Cost:
    """Run a command: what it, and all that it began, cost."""
    began, most = time.monotonic(), 0.0
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(words, stdout=said, stderr=subprocess.DEVNULL if quiet else None)
        while True:
            done, status, used = os.wait4(child.pid, os.WNOHANG)
            if done:
                break
            most = max(most, sum(map(pss, family(child.pid))))
            time.sleep(0.1)
        child.returncode = os.waitstatus_to_exitcode(status)
        took = time.monotonic() - began
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    if child.returncode:
        text = f"it ended with code {child.returncode}"
    return Cost(took, used.ru_utime + used.ru_stime, most, text)


def row(name: str, cost: Cost, floor: Cost | None = None, slug: str = "") -> None:
    ratio = f"{cost.processor / floor.processor:7.1f}" if floor is not None and floor.processor else f"{'':7}"
    print(f"  {name:46}  {cost.seconds:7.1f}  {cost.processor:9.1f}  {cost.memory / 1e6:7.0f}  {ratio}", flush=True)
    if slug and floor is not None:
        times = cost.processor / floor.processor if floor.processor else None
        figure(f"diagnosis-scale/{slug}", cost.seconds, "s")
        figure(f"diagnosis-scale/{slug}/processor", cost.processor, "s", "the floor's", times=times)
        figure(f"diagnosis-scale/{slug}/memory", cost.memory / 1e6, "MB")


def head(title: str) -> None:
    print(f"\n{title}; load {os.getloadavg()[0]:.1f}")
    print(f"  {'':46}  {'seconds':>7}  {'processor':>9}  {'MB':>7}  {'x floor':>7}")


def is_right(cost: Cost, culprit: int) -> bool:
    try:
        found = json.loads(cost.said)
    except ValueError:
        print(f"    nothing was said: {cost.said[:200]}")
        return False
    right = bool(found["culprits"] == [culprit])
    if not right:
        print(f"    wrong, it was rank {culprit}: {found['headline'][:200]}")
    return right


def _bytes_in(folder: Path) -> float:
    return sum(one.stat().st_size for one in folder.iterdir()) / 1e9


def cat(folder: Path) -> Cost:
    return measured(["sh", "-c", 'cat "$0"/* >/dev/null', str(folder)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--dumps", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--logs", type=int, default=128)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--torch")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.full:
        given.dumps, given.logs, given.megabytes = 4096, 1024, 10
    with tempfile.TemporaryDirectory(prefix="fts-scale-") as made:
        root = given.keep or Path(made)
        well = dumps(root / "dumps", given.dumps, given.entries, given.torch) if given.dumps else True
        for kind in LINES if given.logs else ():
            well = logs(root / kind.replace(" ", "-"), kind, given.logs, given.megabytes * 1_000_000) and well
    return int(given.check and not well)


def dumps(folder: Path, ranks: int, entries: int, torch: str | None) -> bool:
    culprit = ranks * 2 // 3
    if not folder.exists():
        folder.mkdir(parents=True)
        with ProcessPoolExecutor(2) as pool:
            small = range((ranks + GROUP - 1) // GROUP)
            list(pool.map(write_dumps, *zip(*((folder, one, ranks, entries, culprit) for one in small), strict=True)))
    head(f"{ranks:,} dumps of {entries:,} collectives, {_bytes_in(folder):.1f} GB")
    row("floor: cat", cat(folder))
    floor = measured([sys.executable, "-c", _LOADS, str(folder)])
    row("floor: each pickle loaded, one process", floor)
    ours = measured([*DIAGNOSE, str(folder)])
    row("ftsupervise diagnose", ours, floor, f"dumps-{ranks}")
    if torch is not None:
        row(
            "torchfrtrace",
            measured([torch, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "rank_"]),
            floor,
        )
    return is_right(ours, culprit) and ours.seconds < SECONDS and ours.memory < MEMORY


def logs(folder: Path, kind: str, ranks: int, size: int) -> bool:
    culprit, well = ranks * 3 // 5, True
    if not folder.exists():
        folder.mkdir(parents=True)
        with ProcessPoolExecutor(2) as pool:
            list(pool.map(write_log, *zip(*((folder, kind, one, size, culprit) for one in range(ranks)), strict=True)))
    head(f"{ranks:,} logs, {kind}, {_bytes_in(folder):.1f} GB")
    floor = cat(folder)
    row("floor: cat", floor)
    for words in (["--whole"], []):
        ours = measured([*DIAGNOSE, str(folder), *words])
        slug = f"logs-{ranks}-{kind}{'-whole' if words else ''}"
        row(" ".join(["ftsupervise diagnose", *words]), ours, floor, slug)
        well = is_right(ours, culprit) and ours.seconds < SECONDS and ours.memory < MEMORY and well
    return well


if __name__ == "__main__":
    sys.exit(main())
