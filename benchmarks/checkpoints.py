"""What does a trustworthy checkpoint cost? Beside the same bytes written, synced and read by hand, in the same run.

    python benchmarks/checkpoints.py [MB] [--folder DIR] [--check]

Each round writes and reads new files, every row in turn, so that a busy disk is busy for all. ``best`` compares the shortest
times, to which other programs add least; ``median`` is that of the ratios within a round, with the least and the greatest of
them. Seconds are this machine's, the ratios travel. Reading is cold: the pages are dropped before. With torch there are rows
for ``torch.save``, DCP, and DCP in the background.

``--check`` exits 1 where, by ``best``, a commit adds more than 10 % to a synced save, or full verification takes more than 1.2
times as long as reading the bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from ftsupervise import Guard
from ftsupervise.checkpoints.digest import threads
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify

ROUNDS, FILES, PIECE = 9, 4, 8 << 20
COMMIT, VERIFY = 1.10, 1.2  # the bounds of --check

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError:
    torch = None  # type: ignore[assignment]

Rows = dict[str, Callable[[Path], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mb", type=int, nargs="?", default=512)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk that is measured")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="ftsupervise-benchmark-", dir=args.folder))
    os.environ |= {"FTSUPERVISE_CHECKPOINT_DIR": str(place / "ckpt")}
    os.environ.pop("FTSUPERVISE_RUN_DIR", None)
    try:
        good = measure(place, args.mb)
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
            table(
                "save with torch, until durable", in_turn(place, saving_with_torch(guard, state)), "torch.save, fsync"
            )
            table("the loop is held up", in_turn(place, holding_up(guard, state)), "dcp.async_save")
        else:
            print("torch, DCP: not installed (pip install torch)")
    reads = in_turn(place, reading(place, size))
    verified = table("read again, cold", reads, "read the bytes")
    peers()
    good = ratio["guard.checkpoint"] <= COMMIT and verified["verify --full"] <= VERIFY
    print(f"bounds: commit {COMMIT:.2f}, verification {VERIFY:.2f}: {'kept' if good else 'NOT kept'}")
    return good


def in_turn(place: Path, rows: Rows) -> dict[str, list[float]]:
    """Seconds of each row, by round. What a row gives back is called afterwards, off the clock."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(ROUNDS + 1):
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
        ratios = [one / base for one, base in zip(ones, times[floor], strict=True)]
        found[name] = min(ones) / min(times[floor])
        spread = f"{median(ratios):>8.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:<40}{min(ones):>7.3f}{found[name]:>8.2f}{spread}")
    return found


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

    drop()
    return {"read the bytes": cold(read_all), "verify --full": cold(ours), "sha256sum": cold(sha256sum)}


def peers() -> None:
    """Checkpoint managers that people use; neither runs on a processor alone as it is shipped."""
    print()
    for name, module, why in (
        ("NVRx LocalCheckpointManager", "nvidia_resiliency_ext", "its tensors must be on a GPU (it asserts is_cuda)"),
        ("ML Flashpoint", "ml_flashpoint", "its default strategy divides by the number of GPUs"),
    ):
        print(f"{name}: {f'not measured, {why}' if find_spec(module) else 'not installed'}")


if __name__ == "__main__":
    main()
