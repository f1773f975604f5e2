"""Dumps and logs of whoever wrote them: no harm, a bounded time and memory, a plain sentence, and the verdict of the others."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.diagnosis import flight_recorder
from ftsupervise.diagnosis.flight_recorder import NotADump, Trouble, dump_files, load_dump, read_flight_record

GOOD = {
    "process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "started",
    "input_sizes": [[8]], "input_dtypes": ["Float"], "time_created_ns": 1, "frames": [],
}  # fmt: skip
HOSTILE = 9  # the rank of the hostile dump


def dump(*entries: Any) -> dict[str, Any]:
    return {"pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}}, "entries": list(entries)}


def good_dumps(folder: Path) -> None:
    """Rank 2 did not join."""
    for rank in range(4):
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump(*([] if rank == 2 else [GOOD]))))


class Malicious:
    """A class whose pickle touches a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def laughs(levels: int = 60) -> list[Any]:
    """A list that is small, and longer than the universe when it is written out."""
    found: list[Any] = [1]
    for _ in range(levels):
        found = [found, found]
    return found


def claimed(opcode: bytes, form: str, length: int) -> bytes:
    return b"\x80\x04" + opcode + struct.pack(form, length) + b"abc."


def deep(levels: int = 1_000_000) -> bytes:
    return b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."


def inside(key: str, value: bytes) -> bytes:
    """A dump whose entry has what the opcodes ``value`` make."""
    return b"\x80\x04}X\x07\x00\x00\x00entries]}" + pickle.dumps(key, 2)[2:-1] + value + b"sas."


def colliding(many: int = 400_000) -> bytes:
    """Keys that Python's dictionary puts all into one place: it is quadratic."""
    keys = b"".join(b"\x8a\x0a" + ((2**61 - 1) * one).to_bytes(10, "little") + b"N" for one in range(1, many))
    return b"\x80\x04}(" + keys + b"u."


RAW: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a memo of two milliards": lambda: b"\x80\x04}r\xf0\xff\xff\x7f.",
    "a memo of four milliards": lambda: b"\x80\x04}r\xf0\xff\xff\xff.",
    "bytes of 4 EiB": lambda: claimed(b"\x8e", "<Q", 1 << 62),
    "a text of 4 EiB": lambda: claimed(b"\x8d", "<Q", 1 << 62),
    "bytes of a TiB": lambda: claimed(b"\x96", "<Q", 1 << 40),
    "bytes of 4 GiB": lambda: claimed(b"B", "<I", (1 << 32) - 1),
    "a number of 2 GiB": lambda: claimed(b"\x8b", "<i", (1 << 31) - 1),
    "a frame of 8 EiB": lambda: claimed(b"\x95", "<Q", (1 << 63) - 1),
    "a million levels": deep,
    "a million levels in JSON": lambda: b"[" * 1_000_000,
    "a number of a million digits": lambda: b'{"entries": [' + b"1" * 1_000_000 + b"]}",
    "lists without an end": lambda: b"\x80\x04" + b"]" * 150_000_000,
    "keys that collide": colliding,
}


@pytest.mark.parametrize("kind", RAW)
def test_a_hostile_dump_is_one_sentence_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(flight_recorder, "SECONDS", 2.0)
    good_dumps(tmp_path)
    (tmp_path / f"rank_{HOSTILE}").write_bytes(RAW[kind]())
    found = read_flight_record(dump_files(tmp_path))
    assert found.first is not None and (found.first.trouble, found.first.culprits) == (Trouble.NOT_JOINED, (2,))
    assert len(found.unread) == 1 and found.unread[0].startswith(f"rank_{HOSTILE}: "), found.unread
    assert len(found.unread[0]) < 200


def with_(key: str, value: Any) -> bytes:
    return pickle.dumps(dump({**GOOD, key: value}))


ENTRIES: dict[str, Callable[[], bytes]] = {
    **{f"{key} that is endless when written": partial(with_, key, laughs()) for key in GOOD},
    **{f"{key} of many levels": partial(inside, key, deep(50_000)[2:-1]) for key in GOOD},
    **{f"{key} of a huge number": partial(with_, key, 1 << 100_000) for key in GOOD},
    "ranks without an end": lambda: pickle.dumps({"pg_config": {"0": {"ranks": laughs()}}, "entries": []}),
    "ranks of many levels": lambda: pickle.dumps({"pg_config": {"0": {"ranks": "[" * 1_000_000}}, "entries": []}),
    "a circle": lambda: inside("input_sizes", b"]q\x05h\x05a"),
    "frames that are endless": lambda: pickle.dumps(dump({**GOOD, "frames": [{"filename": laughs(), "line": laughs()}]})),
    "sizes that are endless": lambda: pickle.dumps(dump({**GOOD, "input_sizes": [laughs()]})),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_of_anything_does_no_harm(tmp_path: Path, kind: str) -> None:
    good_dumps(tmp_path)
    (tmp_path / f"rank_{HOSTILE}").write_bytes(ENTRIES[kind]())
    found = read_flight_record(dump_files(tmp_path))
    assert found.unread == () and found.ranks == (0, 1, 2, 3, HOSTILE)
    assert found.first is not None and set(found.first.culprits) <= {2, HOSTILE}, found.first


def test_a_dump_that_was_cut_off_anywhere_is_no_dump(tmp_path: Path) -> None:
    for whole in (pickle.dumps(dump(GOOD, GOOD)), pickle.dumps(dump(GOOD), 2), json.dumps(dump(GOOD)).encode()):
        for length in range(len(whole)):
            (tmp_path / "rank_0").write_bytes(whole[:length])
            with pytest.raises(NotADump):
                load_dump(tmp_path / "rank_0")


def measured(folder: Path, *words: str) -> tuple[dict[str, Any], str, float]:
    """What ``diagnose`` said as JSON and for people, and the MB of the largest of its processes."""
    most = 0.0
    texts = []
    # the peak of a process begins with that of its parent, and that of a test's is large: a small one stands between
    small = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    for more in (["--json"], []):
        argv = [
            sys.executable,
            "-c",
            small,
            sys.executable,
            "-m",
            "ftsupervise",
            "diagnose",
            str(folder),
            *words,
            *more,
        ]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        texts.append(done.stdout)
        most = max(most, int(done.stderr.splitlines()[-1]) / 1000)
    return json.loads(texts[0]), texts[1], most


@pytest.mark.threat(
    "A folder of evidence holds malicious pickles, files of gigabytes, FIFOs, sockets and links",
    "`diagnose` runs nothing of it, names what it could not read, and gives the verdict of the rest in bounded time and memory",
)
def test_a_folder_full_of_traps_gives_the_verdict_of_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    good_dumps(folder)
    mark, secret = tmp_path / "was-run", tmp_path / "secret"
    secret.write_bytes(pickle.dumps(dump(GOOD)))
    (folder / "rank_10").write_bytes(pickle.dumps(dump(Malicious(mark))))
    for name, size in (("rank_11", 2 << 30), ("rank_12", 1 << 40), ("out-1.log", 1 << 30)):
        with (folder / name).open("wb") as file:
            file.truncate(size)  # of nothing, without a line's end
    os.mkfifo(folder / "rank_13")
    os.mkfifo(folder / "out-2.log")
    (folder / "rank_14").symlink_to(secret)
    (folder / "rank_15").symlink_to("/dev/zero")
    (folder / "out-3.log").symlink_to("/dev/zero")
    (folder / "out-4.log").write_bytes(
        b"\x00\x1b]0;owned\x07\x1b[2J\n" + b"\x00" * 5000 + b"\nKeyError: \x1b[31m'x'\n" * 3
    )
    (folder / "rank_16").mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        here = Path.cwd()
        os.chdir(folder)
        try:
            sock.bind("rank_17")
        finally:
            os.chdir(here)
        began = time.monotonic()
        found, said, megabytes = measured(folder, "--whole")
        assert time.monotonic() - began < 120
    assert found["kind"] == "a rank that did not join a collective" and found["culprits"] == [2]
    assert not mark.exists() and megabytes < 700
    assert any("posix.system, which is not loaded" in one for one in found["unseen"])
    assert sum("larger than 256 MiB" in one for one in found["unseen"]) == 2
    assert "\x1b" not in said and "\x00" not in said and "\x07" not in said


def test_a_log_of_tracebacks_that_never_end_takes_a_bounded_time(tmp_path: Path) -> None:
    """Each of forty thousand ranks begins one, and none ends it."""
    for name, label in (("labels.log", "{}: "), ("plain.log", "")):
        lines = (f"{label.format(rank)}Traceback (most recent call last):\n" for rank in range(40_000))
        end = ('  File "train.py", line 7, in step\n', "ValueError: at last\n")
        (tmp_path / name).write_text("".join(lines) + "".join(f"{label.format(39_999)}{line}" for line in end))
    began = time.monotonic()
    found, _, megabytes = measured(tmp_path, "--whole")
    assert time.monotonic() - began < 120 and megabytes < 500
    assert found["kind"] == "an error in the program"
