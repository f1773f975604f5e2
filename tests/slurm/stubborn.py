"""A rank for the tests of the fence. As the first attempt it writes whatever it can, for ever, deaf and blind: it never sees
that a newer attempt has begun, as if its file system showed it an old directory for ever. As a later one it keeps a book of
what there must be. Every rank stands as rank 0, so that all of them write all there is to write.

    stubborn.py FOLDER    pid-ATTEMPT-RANK, begun, tries-RANK and book.json are made there
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from ftsupervise import Guard
from ftsupervise.guard import stop_reasons
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import SAVE, Brake, clear_answered, look_at_switch, write_brake

HERE = Path(sys.argv[1])
RUN = RunDir(os.environ["FTSUPERVISE_RUN_DIR"])
CHECKPOINTS = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
AREA = Path(os.environ["FTSUPERVISE_STAGING_AREA"])
ATTEMPT, RANK = os.environ["FTSUPERVISE_ATTEMPT"], os.environ["SLURM_PROCID"]


def whole(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_text(text)
    temp.replace(path)


def names() -> dict[str, str]:
    """Who wrote each; "" where nobody did: the old ranks all stand as rank 0, and may commit each other's empty folder."""
    return {one.name: "".join(by.read_text() for by in one.glob("by")) for one in CHECKPOINTS.glob("step-*")}


def old() -> None:
    stop_reasons.newer = lambda *_: None  # type: ignore[attr-defined] # as if no fence were asked
    guard = Guard(rank=0, world=1, poll=0.0, beat_every=0.0, signals=())
    tries = 0
    for count in range(1 << 60):
        after = (HERE / "begun").exists()
        tries += after
        step = random.randint(1, 40)
        try:
            guard.step(count)
            with guard.checkpoint(step) as folder:
                (folder / "by").write_text(ATTEMPT)
            there = list(CHECKPOINTS.glob("step-*"))
            if there and random.random() < 0.3:
                guard.remove(random.choice(there))
            if after:
                guard.saved(
                    step
                )  # takes down what step() has answered; and once more, whatever it has answered before:
                if raised := look_at_switch(RUN, SAVE)[1]:
                    with suppress(OSError):
                        clear_answered(RUN, SAVE, raised, AREA)
                guard.finished(step)
                write_brake(RUN, Brake("exit 1", "made up", 3, 1), AREA)
        except OSError:  # two of us at the same checkpoint; or sealed
            pass
        if after and tries % 10 == 0:
            whole(HERE / f"tries-{RANK}", str(tries))


def new() -> None:
    book = names()
    guard = Guard(rank=0, world=1, poll=3600.0, beat_every=0.0, signals=())
    guard.beat(0, phase="train")
    whole(HERE / "begun", ATTEMPT)
    count = 0
    while not (HERE / "enough").exists():
        count += 1
        name = f"step-{random.randint(1, 40):08d}"
        with guard.checkpoint(count, name) as folder:
            (folder / "by").write_text(ATTEMPT)
        book[name] = ATTEMPT
        if random.random() < 0.3:
            gone = random.choice(list(book))
            assert guard.remove(CHECKPOINTS / gone)
            del book[gone]
        whole(HERE / "commits", str(count))
        time.sleep(0.01)
    whole(HERE / "book.json", json.dumps(book))
    signal.pause()


if __name__ == "__main__":
    if ATTEMPT == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    whole(HERE / f"pid-{ATTEMPT}-{RANK}", str(os.getpid()))
    if ATTEMPT == "1":
        old()
    if RANK == "0":
        new()
    signal.pause()
