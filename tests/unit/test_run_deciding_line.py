"""The line that decides: what people read beside the cause."""

from __future__ import annotations

import json
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, ended
from ftsupervise.run.exit_analysis import Ours, Output, failure, plain, root_error
from ftsupervise.watch.tour import events

NOW = datetime(2026, 11, 22, 3, tzinfo=timezone.utc)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OURS = "2026-11-22T03:00:00Z ftsupervise"  # not the time of day: each worker of a run has to name the test alike
STACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'


@pytest.mark.fault(
    "People read exit 1 and have to look for why",
    "The line of the output that decides (an ECC error, the exception, no output) goes with the cause into status, "
    "alerts and end.json",
)
@pytest.mark.parametrize(
    ("code", "death", "output", "detail"),
    [
        (1, None, f"step 3\n{STACK}{ECC}\n", ECC),
        (-6, ended(-6, "n1", "3"), f"[rank3]: {STACK.splitlines()[0]}\nXid 79, fallen off the bus\n", "Xid 79"),
        (1, None, f"{STACK}ValueError: no such shape\nsrun: error: n0: task 0: Exited with exit code 1\n", "ValueError: no"),
        (1, None, f"{STACK}mine.Diverged: loss is 1e9\n", "mine.Diverged: loss is 1e9"),
        (1, None, "0: Traceback (most recent call last):\n0:   File\n0: KeyError: 'x'\n", "KeyError: 'x'"),
        (127, None, "bash: line 2: trian.py: command not found\n", "bash: line 2: trian.py: command not found"),
        (-6, None, "terminate called after throwing an instance of 'c10::Error'\n  what():  NCCL\n", "terminate called after"),
        (3, None, "step 41\nstep 42\n", "step 42"),
        (3, None, f"{OURS}: a\nftsupervise: b\nsrun: error: n0: task 0: Exited with exit code 3\n\n", "no output"),
        (1, None, "Traceback (most recent call last):\n0: Traceback (most recent call last):\nsrun: error: x\n", ""),
        (1, None, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n', ""),
        (-9, None, "step 41\n", ""),
        (3, None, None, ""),
    ],
)  # fmt: skip
def test_the_line_that_decides_goes_with_the_failure(
    code: int, death: Cause | None, output: str | None, detail: str
) -> None:
    found = failure(code, Cause(CauseKind.EXIT, code=code), death=death, output=output)
    assert found is not None
    assert found.detail.startswith(detail) and bool(found.detail) == bool(detail)


def test_the_name_of_the_failure_does_not_change_with_its_line() -> None:
    """Or the brake would take three times the same for three failures."""
    exits = [Cause(CauseKind.EXIT, code=n) for n in range(4)]
    signs = {getattr(failure(3, exits[3], output=f"step {n}\n"), "sign", "") for n in range(3)}
    assert signs == {"exit 3"}
    kind = failure(1, exits[1], output=f"{STACK}{ECC}\n")
    assert kind is not None and (kind.kind, kind.words()) == (FailureKind.CODE, "exit 1 (RuntimeError)")


def test_people_read_the_cause_with_its_line_once() -> None:
    failed = Failure(FailureKind.CODE, "exit 1", ECC)
    one = Attempt(
        1, "88_1", NOW, ended=NOW, cause=Cause(CauseKind.EXIT, code=1), failure=failed, last_step=4, host="n0"
    )
    assert one.why() == f"exit 1: {ECC}"
    assert one._replace(cause=Cause(CauseKind.OTHER, text=f"exit 1 ({ECC})")).why() == f"exit 1 ({ECC})"
    assert one._replace(failure=None).why() == "exit 1"
    two = one._replace(number=2, first_step=5, failure=None, cause=None, ended=None)
    assert f"(exit 1: {ECC})" in events([one, two], finished_at=None)[-1].finding.summary


def test_what_a_job_prints_is_plain_text_before_it_is_searched() -> None:
    said = (
        b"\x1b[31mValueError\x1b[0m: \x1b]0;owned\x07bad \xc2\x9b2J\xc2\x85\rstep 9\r\nMemoryError\r\n\x1b(B\x00end\n"
    )
    text = plain(said)
    assert text.splitlines()[0] == "ValueError: bad ?2J?"
    assert text.splitlines()[1:] == ["step 9", "MemoryError", "?(B?end"]


def test_the_output_of_a_job_is_plain_and_one_that_cannot_be_seen_is_not_empty(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        seen = Output(file.fileno())
        assert seen.since() == ""
        file.write(b"\x1b[2Jloss\n")
        file.flush()
        assert seen.since() == "loss\n"
    with Path("/dev/null").open("wb") as nowhere:
        assert Output(nowhere.fileno()).since() is None


@pytest.mark.parametrize("bar", [b"#" * 64, b"step 7 #####\r", b"\xe2\x96\x88" * 20])
def test_output_without_a_newline_is_not_kept_and_what_srun_says_behind_it_is_still_found(
    bar: bytes, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as file:
        seen = Output(file.fileno())
        tracemalloc.start()
        try:
            for _ in range(64):
                file.write(bar * (200_000 // len(bar)))
                assert not seen.next_hints(Ours())
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 3_000_000  # of 13 MB
        file.write(b"\rsrun: error: node-0: task 3: Kil")
        assert not seen.next_hints(Ours())
        file.write(b"led\n")
        found = next(iter(seen.next_hints(Ours())), None)
    assert found is not None and found.words() == "rank 3 on node-0 killed by SIGKILL"


@pytest.mark.threat(
    "A rank writes control characters into its error file.",
    "They are replaced when the file is read.",
)
def test_the_error_file_of_a_rank_is_printable(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: \x1b[2Jbad\nmore"}}))
    assert root_error(path) == "ValueError: ?[2Jbad"
