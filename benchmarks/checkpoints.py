"""What does a trustworthy checkpoint cost? Beside the same bytes written, synced and read by hand, in the same run.

    python benchmarks/checkpoints.py [MB] [--folder DIR] [--check]
    python benchmarks/checkpoints.py 1 8 32 100 512    the commit alone, by the size of the checkpoint
    python benchmarks/checkpoints.py --restore 64 512 2048    the way back into a program alone

Each round writes and reads new files, every row in turn, so that a busy disk is busy for all. ``best`` compares the shortest
times, to which other programs add least; ``median`` is that of the ratios within a round, with the least and the greatest of
them. Seconds are this machine's, the ratios travel. Cold: the pages are dropped before. With torch there are rows for
``torch.save``, DCP, and DCP in the background; with nvidia-resiliency-ext and ml-flashpoint, rows for these.

``--check`` exits 1 where, by ``best``, a commit adds more than 10 % to a synced save, full verification takes more than 1.2
times as long as reading the bytes, or ``guard.restore`` of what is not in memory more than 1.1 times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.checkpoint_peers import loading, peers
from benchmarks.figures import figure
from ftsupervise import Guard
from ftsupervise.checkpoints.digest import threads
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify

ROUNDS, BY_SIZE_ROUNDS, FILES, PIECE = 9, 15, 4, 8 << 20
COMMIT, VERIFY, RESTORE = 1.10, 1.2, 1.10  # the bounds of --check

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError:
    torch = None

Rows = dict[str, Callable[[Path], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mb", type=int, nargs="*", default=[512])
    parser.add_argument("--folder", default="/var/tmp", help="on the disk that is measured")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--restore", action="store_true", help="only the way back into a program, with torch")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="ftsupervise-benchmark-", dir=args.folder))
    os.environ |= {"FTSUPERVISE_CHECKPOINT_DIR": str(place / "ckpt")}
    os.environ.pop("FTSUPERVISE_RUN_DIR", None)
    try:
        if args.restore:
            print(f"{ROUNDS} rounds, {os.cpu_count()} cores, {threads()} threads read")
            kept = [restoring(Path(tempfile.mkdtemp(dir=place)), mb) for mb in args.mb]
            good = all(kept)
        else:
            good = measure(place, args.mb[0]) if len(args.mb) == 1 else by_size(place, args.mb)
    finally:
        shutil.rmtree(place)
    sys.exit(0 if good or not args.check else 1)


def measure(place: Path, mb: int) -> bool:
    size = mb << 20
    print(f"{mb} MB in {FILES} files, {ROUNDS} rounds, {os.cpu_count()} cores, {threads()} threads read")
    with Guard(signals=(), rank=0, world=1) as guard:
        saves = in_turn(place, saving(guard, os.urandom(size // FILES)))
        ratio = table("save, until durable", saves, "write, fsync")
        if torch is not None:
            state = {f"layer-{n}": torch.rand(PIECE // 4) for n in range(size // PIECE)}
            rows = saving_with_torch(guard, state)
            table("save with torch, until durable", in_turn(place, rows), "torch.save, fsync")
            table("the loop is held up", in_turn(place, holding_up(guard, state)), "dcp.async_save")
            others, missing = peers(state)
            rows = {name: row for name, row in rows.items() if name.startswith("torch.save")} | others
            table("save beside other managers, until durable", in_turn(place, rows), "torch.save, fsync")
            print(*missing, sep="\n")
        else:
            print("torch, DCP: not installed (pip install torch)")
    rows = reading(place, size)
    warm = {name: row for name, row in rows.items() if not name.startswith("cold: ")}
    table("read again, warm", in_turn(place, warm), "read the bytes")
    cold = {name.removeprefix("cold: "): row for name, row in rows.items() if name not in warm}
    verified = table("read again, cold", in_turn(place, cold), "read the bytes")
    restored = restoring(place, mb)
    good = ratio["guard.checkpoint"] <= COMMIT and verified["verify --full"] <= VERIFY and restored
    bounds = f"commit {COMMIT:.2f}, verification {VERIFY:.2f}, restore {RESTORE:.2f}"
    print(f"bounds: {bounds}: {'kept' if good else 'NOT kept'}")
    return good


def by_size(place: Path, sizes: list[int]) -> bool:
    print(f"{FILES} files, {BY_SIZE_ROUNDS} rounds; a commit beside the same bytes written and synced by hand")
    print(f"{'MB':>6}{'s by hand':>12}{'guard.checkpoint':>30}{'its files synced':>30}")
    good = True
    with Guard(signals=(), rank=0, world=1) as guard:
        for mb in sizes:
            times = in_turn(place, saving(guard, os.urandom((mb << 20) // FILES)), BY_SIZE_ROUNDS)
            floor, *ours = times.values()
            shown = [f"{min(one) / min(floor):.2f}  {spread(one, floor)}" for one in ours]
            print(f"{mb:>6}{min(floor):>12.4f}" + "".join(f"{one:>30}" for one in shown))
            good = good and min(ours[0]) <= COMMIT * min(floor)
    return good


def in_turn(place: Path, rows: Rows, rounds: int = 0) -> dict[str, list[float]]:
    """Seconds of each row, by round. What a row gives back is called afterwards, off the clock."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range((rounds or ROUNDS) + 1):
        names = list(rows)
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            os.sync()
            target = place / "by-hand"
            before = time.perf_counter()
            rest = rows[name](target)
            took = time.perf_counter() - before
            if callable(rest):
                rest()
            if number:  # the first one warms up
                times[name].append(took)
            for used in (target, place / "ckpt"):
                shutil.rmtree(used, ignore_errors=True)
    return times


def table(title: str, times: dict[str, list[float]], floor: str) -> dict[str, float]:
    """Print it; the ratio of each row's best."""
    print(f"\n{title:<40}{'s':>7}{'best':>8}{'median':>8}")
    found = {}
    for name, ones in times.items():
        found[name] = min(ones) / min(times[floor])
        print(f"{name:<40}{min(ones):>7.3f}{found[name]:>8.2f}{spread(ones, times[floor]):>24}")
        figure(f"checkpoints/{title}/{name}", min(ones), "s", floor, times=found[name])
    return found


def spread(ones: list[float], floor: list[float]) -> str:
    """The median of the ratios within a round, with the least and the greatest."""
    ratios = [one / base for one, base in zip(ones, floor, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# ---------------------------------------------------------------------------------------------------------------- saving


def write(folder: Path, data: bytes, *, sync: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        with (folder / f"part-{number}.bin").open("wb") as file:
            for at in range(0, len(data), PIECE):
                file.write(data[at : at + PIECE])
            if sync:
                file.flush()
                os.fsync(file.fileno())
    if sync:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def saving(guard: Guard, data: bytes) -> Rows:
    def ours(_: Path) -> None:
        with guard.checkpoint(1) as folder:
            write(folder, data, sync=False)

    def ours_synced(_: Path) -> None:
        with guard.checkpoint(1) as folder:
            write(folder, data, sync=True)

    return {
        "write, fsync": lambda target: write(target, data, sync=True),
        "guard.checkpoint": ours,
        "guard.checkpoint, its files synced": ours_synced,
    }


def saving_with_torch(guard: Guard, state: dict[str, Any]) -> Rows:
    from ftsupervise.integrations.torch_dcp import AsyncCheckpoints

    saves = AsyncCheckpoints(guard)

    def plain(target: Path, *, sync: bool = True) -> None:
        target.mkdir(exist_ok=True)
        with (target / "state.pt").open("wb") as file:
            torch.save(state, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if sync:
            sync_folder(target)

    def ours(_: Path) -> None:
        with guard.checkpoint(1) as folder:
            plain(folder, sync=False)

    def ours_dcp(_: Path) -> None:
        with guard.checkpoint(1) as folder:
            dcp.save(state, checkpoint_id=folder, no_dist=True)

    def in_background(_: Path) -> None:
        if not (saves.save(1, state) and saves.wait()):
            sys.exit("AsyncCheckpoints saved nothing")

    return {
        "torch.save, fsync": plain,
        "torch.save in guard.checkpoint": ours,
        "dcp.save": lambda target: dcp.save(state, checkpoint_id=target, no_dist=True),
        "dcp.save in guard.checkpoint": ours_dcp,
        "dcp.async_save": lambda target: dcp.async_save(state, checkpoint_id=target, no_dist=True).result(),
        "AsyncCheckpoints": in_background,
    }


def holding_up(guard: Guard, state: dict[str, Any]) -> Rows:
    """Until the loop goes on. The write is waited for off the clock."""
    from ftsupervise.integrations.torch_dcp import AsyncCheckpoints

    saves = AsyncCheckpoints(guard)

    def ours(_: Path) -> Callable[[], object]:
        saves.save(1, state)
        return saves.wait

    return {
        "dcp.async_save": lambda target: dcp.async_save(state, checkpoint_id=target, no_dist=True).result,
        "AsyncCheckpoints.save": ours,
    }


# --------------------------------------------------------------------------------------------------------------- reading


def reading(place: Path, size: int) -> Rows:
    kept = place / "kept"
    write(kept, os.urandom(size // FILES), sync=True)
    subprocess.run([sys.executable, "-m", "ftsupervise", "checkpoints", "commit", str(kept)], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    files = sorted(kept.glob("part-*"))

    def cold(call: Callable[[], object]) -> Callable[[Path], object]:
        def row(_: Path) -> Callable[[], object]:
            call()
            return drop

        return row

    def drop() -> None:
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def read(path: Path) -> None:
        buffer = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def read_all() -> None:
        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(read, files))

    def ours() -> None:
        found = verify(kept, Scope(Thoroughness.FULL))
        if found.state is not CheckpointState.VERIFIED:
            sys.exit(found.words())

    def sha256sum() -> None:
        subprocess.run(["sha256sum", *map(str, files)], check=True, stdout=subprocess.DEVNULL)

    calls = {"read the bytes": read_all, "verify --full": ours, "sha256sum": sha256sum}
    warm = {name: lambda _, call=call: call() for name, call in calls.items()}
    return {**warm, **{f"cold: {name}": cold(call) for name, call in calls.items()}}  # the first, off the clock, drops


def restoring(place: Path, mb: int) -> bool:
    """Time the return of a state of torch tensors, beside one read of the same bytes, and one read into the same tensors."""
    if torch is None:
        return True
    made = {f"layer-{n}": torch.rand(PIECE // 4) for n in range((mb << 20) // PIECE)}
    into = {name: torch.ones_like(one) for name, one in made.items()}
    home, by_dcp, by_torch, by_nvrx = (place / name for name in ("restored", "dcp", "torch.pt", "nvrx"))
    os.environ["FTSUPERVISE_CHECKPOINT_DIR"] = str(home)
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(**made)
        guard.save(1)
    dcp.save(made, checkpoint_id=by_dcp, no_dist=True)
    torch.save(made, by_torch)
    (file,) = home.glob("step-*/rank-00000.state")

    def read() -> None:
        buffer = bytearray(1 << 20)
        with file.open("rb", buffering=0) as one:
            while one.readinto(buffer):
                pass

    def read_into() -> None:
        with file.open("rb", buffering=0) as one:
            for tensor in into.values():
                one.readinto(memoryview(tensor.numpy()))

    def ours() -> Callable[[], object]:
        with contextlib.redirect_stderr(io.StringIO()):  # it says each time that there is no run
            guard = Guard(signals=(), rank=0, world=1)
            step = guard.restore(**into)
        if step != 1:
            sys.exit("guard.restore has loaded nothing")

        def rest() -> None:
            guard._checkpoints.require_unchanged(now=False)  # the comparison beside the first steps
            guard.close()

        return rest

    def fill(loaded: dict[str, Any]) -> None:
        for name, tensor in into.items():
            tensor.copy_(loaded[name])

    rows: dict[str, Callable[[], object]] = {
        "read the bytes": read,
        "read them into the tensors": read_into,
        "guard.restore": ours,
        "torch.load, copied": lambda: fill(torch.load(by_torch)),
        "torch.load(mmap=True), copied": lambda: fill(torch.load(by_torch, mmap=True)),
        "dcp.load": lambda: dcp.load(into, checkpoint_id=by_dcp, no_dist=True),
    }
    loads, missing = loading(made, by_nvrx)
    rows |= {name: partial(lambda load: fill(load()), load) for name, load in loads.items()}
    print(*missing, sep="\n")

    def drop() -> None:
        gc.collect()  # a page that is mapped is not dropped
        os.sync()
        for path in (one for top in (home, by_dcp, by_torch, by_nvrx) for one in (top, *top.rglob("*"))):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        if left := cached(file):
            print(f"not cold: {left} pages of {file.name} are in memory still (is this a file system in memory?)")

    def row(call: Callable[[], object], *, cold: bool) -> Callable[[Path], object]:
        def run(_: Path) -> Callable[[], object]:
            rest = call()

            def afterwards() -> None:
                if callable(rest):
                    rest()
                if cold:
                    drop()

            return afterwards

        return run

    found = {}
    for word in ("warm", "cold"):
        cold = word == "cold"
        if cold:
            drop()
        print(f"\n{os.getloadavg()[0]:.1f} processes at work on {os.cpu_count()} cores")
        times = in_turn(place, {name: row(call, cold=cold) for name, call in rows.items()})
        found[word] = table(f"restore of {mb} MB, {word}", times, "read the bytes")
    return found["cold"]["guard.restore"] <= RESTORE


def cached(path: Path) -> int:
    """Return how many pages of a file are in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), found)
        del first
        return sum(one & 1 for one in found)


if __name__ == "__main__":
    main()
