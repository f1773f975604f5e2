"""What it costs to start a command, as a ratio to ``python -c pass`` in the same run (machines differ, ratios less).

    python benchmarks/cli.py [--rounds 15] [--check]

The bounds are part of the promise: --help and --version at most 4.5 times a bare interpreter; kill, save, clear and status RUN
at most 5.5 times and 16 MB. ``torchrun --help`` stands beside them where torch is installed. ``--check`` exits 1 on a miss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure

ROOT = Path(__file__).resolve().parents[1]
LIGHT, COMMAND, MEGABYTES = 4.5, 5.5, 16.0
BARE = "python -c pass"


def once(argv: list[str], env: dict[str, str], cwd: Path) -> tuple[float, float]:
    """Seconds and peak MB of one process."""
    reader, writer = os.pipe()
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.chdir(cwd)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.execvpe(argv[0], argv, env)
    os.close(writer)
    os.close(reader)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}")
    return seconds, usage.ru_maxrss / 1024


def installed(folder: Path) -> str:
    """An interpreter with ftsupervise laid out as a wheel has it: an editable install makes bare Python slower, and with
    it every ratio better than what users see."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ftsupervise", site / "ftsupervise", ignore=ignore)
    shutil.copytree(ROOT / "templates", site / "ftsupervise" / "templates", ignore=ignore)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def make_run(folder: Path) -> None:
    """A run directory as a launch leaves it, so that status has something to read."""
    (folder / "ftsupervise.yaml").write_text("name: bench\nlaunch:\n  command: 'true'\n")
    run = folder / "runs" / "bench"
    for name in ("switches", "state", "attempts/0001", "launches", "beats", "logs", "watch"):
        (run / name).mkdir(parents=True)
    (run / "run.yaml").write_text("name: bench\n")
    start = '{"attempt": 1, "job_id": "", "at": "2026-11-21T07:00:00+00:00", "host": "n", "nodes": "", "pid": 1}'
    (run / "attempts/0001/start.json").write_text(start)
    for rank in range(8):
        beat = f'{{"rank": {rank}, "step": 7, "phase": "train", "at": "2026-11-21T07:00:00+00:00", "facts": {{}}}}'
        (run / f"beats/rank-{rank}").write_text(beat)


def rows_of(python: str) -> list[tuple[str, list[str], float | None]]:
    """Label, command, and the bound as a multiple of a bare interpreter."""
    ft = [python, "-m", "ftsupervise"]
    rows: list[tuple[str, list[str], float | None]] = [
        (BARE, [python, "-c", "pass"], None),
        ("ftsupervise --version", [*ft, "--version"], LIGHT),
        ("ftsupervise --help", [*ft, "--help"], LIGHT),
        ("ftsupervise status .", [*ft, "status", "."], COMMAND),
        ("ftsupervise status", [*ft, "status"], None),
        ("ftsupervise save", [*ft, "save"], COMMAND),
        ("ftsupervise kill", [*ft, "kill", "--yes"], COMMAND),
        ("ftsupervise clear", [*ft, "clear"], COMMAND),
    ]
    if torchrun := shutil.which("torchrun", path=str(Path(sys.executable).parent)):
        rows.append(("torchrun --help", [torchrun, "--help"], None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = installed(folder / "venv")
        rows = rows_of(python)
        make_run(folder)
        env = {**os.environ, "HOME": name, "FTSUPERVISE_STATE_DIR": f"{name}/state"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling each module anew is not what a start costs
        for _, argv, _ in rows:
            once(argv, env, folder)  # warm
        taken: dict[str, list[tuple[float, float]]] = {label: [] for label, _, _ in rows}
        for _ in range(options.rounds):
            for label, argv, _ in rows:
                taken[label].append(once(argv, env, folder))
    bare = statistics.median(seconds for seconds, _ in taken[BARE])
    print(f"{'command':<24}{'ms':>8}{'x bare':>8}{'bound':>7}{'MB':>7}")
    missed = []
    for label, _, bound in rows:
        # the median of paired ratios: both halves of a pair were taken within the same half second
        ratio = statistics.median(mine / base for (mine, _), (base, _) in zip(taken[label], taken[BARE], strict=True))
        peak = max(megabytes for _, megabytes in taken[label])
        print(f"{label:<24}{ratio * bare * 1000:8.1f}{ratio:8.2f}{bound or '':>7}{peak:7.1f}")
        name = f"cli/{label.removeprefix('ftsupervise ').replace(' .', ' RUN').replace('--', '')}"
        figure(name, ratio * bare * 1000, "ms", BARE, times=ratio)
        figure(f"{name}/memory", peak, "MiB")
        if bound and (ratio > bound or (bound == COMMAND and peak > MEGABYTES)):
            missed.append(label)
    if missed:
        print(f"over the bound: {', '.join(missed)}")
    sys.exit(1 if missed and options.check else 0)


if __name__ == "__main__":
    main()
