"""Every odd line Slurm was ever seen to print, as values."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise import hostlist
from ftsupervise.model import JobState
from ftsupervise.scheduler import parse

ROW = ["88_3", "88", "91", "RUNNING", "ada", "1795242924", "1795300000", "1795242900", "1-16:00:00", "None", "(null)"]


def record(
    *,
    nodes: str = "node-[0-2]",
    directory: str = "/home/ada/run",
    comment: str = "ftsupervise:run:abc",
    name: str = "run",
    **change: str,
) -> str:
    row = list(ROW)
    for index, value in change.items():
        row[int(index[1:])] = value
    return parse.RECORD + parse.FIELD.join([*row, nodes, directory, comment, name]) + "\n"


def test_a_running_member_of_an_array_is_read_whole() -> None:
    (job,) = parse.parse_queue(record())
    assert (job.id, job.base_id, job.raw_id, job.user, job.state) == ("88_3", "88", "91", "ada", JobState.RUNNING)
    assert job.nodes == ("node-0", "node-1", "node-2")
    assert job.start_time == datetime.fromtimestamp(1795242924, timezone.utc)
    assert job.time_limit == timedelta(days=1, hours=16)
    assert (job.reason, job.dependency, job.directory) == ("", "", "/home/ada/run")


def test_an_empty_answer_is_an_empty_queue() -> None:
    assert parse.parse_queue("") == ()


@pytest.mark.parametrize("text", ["squeue: error: something\n", "\x1ehalf a record\n"])
def test_what_is_not_a_queue_is_not_taken_for_an_empty_one(text: str) -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        parse.parse_queue(text)


@given(name=st.text(st.characters(exclude_characters="\x1e\x1f\0"), max_size=60))
def test_a_job_name_may_hold_anything(name: str) -> None:
    (job,) = parse.parse_queue(record(name=name))
    assert job.name == name.removesuffix("\n") or job.name == name


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 1001", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("COMPLETING", JobState.COMPLETING),
        ("SOMETHING_NEW", JobState.OTHER),
        ("", JobState.OTHER),
    ],
)
def test_states_are_read_and_an_unknown_word_is_no_crash(word: str, state: JobState) -> None:
    assert parse.parse_state(word) is state


@pytest.mark.parametrize("text", ["N/A", "NONE", "Unknown", "", "0", "2026-11-21T08:00:00", "99999999999999"])
def test_no_time_is_none(text: str) -> None:
    assert parse.parse_epoch(text) is None


@pytest.mark.parametrize("text", ["UNLIMITED", "INVALID", "NOT_SET", "Partition_Limit"])
def test_no_limit_is_none(text: str) -> None:
    assert parse.parse_limit(text) is None


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("node-0", ("node-0",)),
        ("node-[0-2,7],gpu3", ("node-0", "node-1", "node-2", "node-7", "gpu3")),
        ("r[1-2]n[08-10]", ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")),
    ],
)
def test_host_lists_are_expanded(text: str, nodes: tuple[str, ...]) -> None:
    assert hostlist.expand_hostlist(text) == nodes


@pytest.mark.parametrize("text", ["node-[0-2", "node-0]", "node-[a-b]", "n[[1]]", "n[0-99999999]"])
def test_a_cut_or_crooked_host_list_is_an_error_and_not_a_wrong_list(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        hostlist.expand_hostlist(text)


@given(
    st.lists(
        st.builds(
            lambda p, n, w: f"{p}{n:0{w}d}", st.sampled_from(["node-", "gpu", "r1n"]), st.integers(0, 300), st.just(3)
        ),
        unique=True,
        max_size=40,
    )
)
def test_a_compressed_host_list_means_the_same_nodes(nodes: list[str]) -> None:
    assert set(hostlist.expand_hostlist(hostlist.compress_hostlist(nodes))) == set(nodes)


@pytest.mark.parametrize(
    ("job_id", "size"),
    [("87", 1), ("88_3", 1), ("88_[3-10%1]", 8), ("58_[2,5-7%2]", 4), ("4_[1-199:2%1]", 100), ("5_[10%1]", 1)],
)
def test_a_pending_rest_knows_how_many_wait(job_id: str, size: int) -> None:
    assert parse.array_size(job_id) == size


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_a_quoted_directive_reads_back_or_is_refused(value: str) -> None:
    try:
        quoted = parse.quote(f"--comment={value}")
    except ValueError as error:
        assert "control characters" in str(error)
        return
    script = f"#!/bin/bash\n#SBATCH {quoted} --hold\necho\n"
    if any(separator in value for separator in "\x85\u2028\u2029"):
        return  # lines for Python, not for sbatch; the corpus on real Slurm has them
    assert parse.directives(script)["comment"] == value


def test_directives_end_at_the_first_command() -> None:
    script = "#!/bin/bash\n# a comment\n#SBATCH --time=10 --nodes=2\n\ntrue\n#SBATCH --nodes=9\n"
    assert parse.directives(script) == {"time": "10", "nodes": "2"}
