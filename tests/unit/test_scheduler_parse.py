"""Every odd line Slurm was ever seen to print, as values."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise import hostlist
from ftsupervise.model import Job, JobState
from ftsupervise.scheduler import parse
from ftsupervise.scheduler.slurm import new_format

FORM = parse.SqueueFormat("c0ffee")
ROW = ["88_3", "88", "91", "RUNNING", "ada", "1795242924", "1795300000", "1795242900", "None", "(null)"]


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
    return (
        FORM.record
        + FORM.field.join([*row, "3", "gpu,big", "node-7", "(null)", nodes, directory, comment, name])
        + "\n"
    )


def test_a_running_member_of_an_array_is_read_whole() -> None:
    (job,) = parse.parse_queue(record(), FORM)
    assert (job.id, job.base_id, job.raw_id, job.user, job.state) == ("88_3", "88", "91", "ada", JobState.RUNNING)
    assert job.nodes == ("node-0", "node-1", "node-2")
    assert job.start_time == datetime.fromtimestamp(1795242924, timezone.utc)
    assert (job.reason, job.dependency, job.directory) == ("", "", "/home/ada/run")
    assert (job.nodes_wanted, job.partitions, job.excluded, job.features) == (3, ("gpu", "big"), ("node-7",), "")


def test_an_empty_answer_is_an_empty_queue() -> None:
    assert parse.parse_queue("", FORM) == ()


@pytest.mark.parametrize("text", ["squeue: error: something\n", "\x1ec0ffee:half a record\n"])
def test_what_is_not_a_queue_is_not_taken_for_an_empty_one(text: str) -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        parse.parse_queue(text, FORM)


@given(name=st.text(st.characters(exclude_characters="\0"), max_size=60))
def test_a_job_name_may_hold_anything(name: str) -> None:
    (job,) = parse.parse_queue(record(name=name), FORM)
    assert job.name in (name.removesuffix("\n"), name)  # as it stands: it is cleaned where it is printed


@given(
    name=st.text(st.sampled_from("\x1e\x1f:%\n ab"), max_size=20),
    comment=st.text(st.sampled_from("\x1e\x1f:%\n ab"), min_size=1, max_size=20),
)
def test_a_name_or_comment_made_of_separators_shifts_no_field_and_hides_no_job(name: str, comment: str) -> None:
    odd, ours = parse.parse_queue(record(name=name, comment=comment) + record(), FORM)
    assert (odd.id, odd.comment) == ("88_3", comment)
    assert (ours.name, ours.comment) == ("run", "ftsupervise:run:abc")


def test_the_separators_of_one_question_are_not_those_of_the_next() -> None:
    marks = {new_format().mark for _ in range(100)}
    assert len(marks) == 100
    assert all(len(mark) == 12 and mark.isalnum() for mark in marks)


def members(*rows: tuple[str, str]) -> tuple[Job, ...]:
    return parse.parse_queue("".join(record(c0=job_id, c3=state) for job_id, state in rows), FORM)


@pytest.mark.parametrize(
    ("rows", "speaks"),
    [
        ((("88_1", "CANCELLED"), ("88_2", "FAILED"), ("88_3", "RUNNING"), ("88_[4-10%1]", "PENDING")), "88_3"),
        ((("88_1", "CANCELLED"), ("88_[2-10%1]", "PENDING")), "88_[2-10%1]"),
        ((("88_1", "COMPLETING"), ("88_[2-10%1]", "PENDING")), "88_[2-10%1]"),
        ((("88_1", "FAILED"), ("88_2", "COMPLETING")), "88_2"),
        ((("88_1", "COMPLETED"), ("88_2", "TIMEOUT"), ("88_3", "COMPLETED")), "88_2"),
    ],
)
def test_of_an_array_the_member_that_lives_speaks_for_all(rows: tuple[tuple[str, str], ...], speaks: str) -> None:
    job = parse.most_alive(members(*rows))
    assert job is not None
    assert job.id == speaks
    assert parse.most_alive(()) is None


# What Slurm's commands printed on stderr beside an exit code of 0 or 1, as it was recorded: version, line, is it no answer?
SAID = [
    ("22.05", "squeue: error: Ignoring BackupController value of foo: it has no BackupAddr", False),
    ("24.11", "squeue: error: Ignoring BackupController value of foo: it has no BackupAddr", False),
    ("26.05", "[2026-11-21T08:00:00.123] error: Ignoring BackupController value of foo", False),
    ("22.05", "squeue: error: Invalid user: nosuch", True),
    ("22.05", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
    ("22.05", "slurm_load_jobs error: Socket timed out on send/recv operation", True),
    ("22.05", "slurm_load_jobs error: Protocol authentication error", True),
    ("24.11", "squeue: error: slurm_receive_msg: Zero Bytes were transmitted or received", True),
    ("26.05", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
    ("26.05", "slurm_load_partitions: Unable to contact slurm controller (connect failure)", True),
]


@pytest.mark.parametrize(("version", "line", "blind"), SAID)
def test_a_warning_is_told_from_a_controller_that_was_not_reached(version: str, line: str, blind: bool) -> None:
    (said,) = parse.complaints(line + "\n")
    assert parse.is_no_answer(said) == blind, version


def test_a_warning_is_the_same_warning_whichever_program_prints_it() -> None:
    assert parse.complaints("squeue: error: Ignoring X\n") == parse.complaints(
        "[2026-11-21T08:00:00] error: Ignoring X"
    )
    assert parse.complaints("\n") == frozenset()


# squeue's %r of 22.05, 24.11 and 26.05 (the last three since 24.11), and scontrol's spelling of the same
@pytest.mark.parametrize(
    ("reason", "held"),
    [
        ("JobHeldUser", True),
        ("JobHeldAdmin", True),
        ("JobHoldMaxRequeue", True),
        ("launch failed requeued held", True),
        ("launch_failed_requeued_held", True),
        ("job requeued in held state", True),
        ("launch failure limit exceeded requeued held", True),
        ("user env retrieval failed requeued held", True),
        ("Priority", False),
        ("ReqNodeNotAvail, UnavailableNodes:withheld-1", False),
        ("", False),
    ],
)
def test_a_held_job_is_known_by_every_spelling_of_its_reason(reason: str, held: bool) -> None:
    assert parse.is_held(reason) == held


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


@pytest.mark.parametrize("text", ["N/A", "NONE", "Unknown", "", "0", "²", "2026-11-21T08:00:00", "99999999999999"])
def test_no_time_is_none(text: str) -> None:
    assert parse.parse_epoch(text) is None


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


def test_numbers_with_and_without_a_leading_zero_are_one_group_where_they_are_equally_long() -> None:
    names = [f"node-{number:02}" for number in range(1, 65)]
    assert hostlist.compress_hostlist(names) == "node-[01-64]"
    assert hostlist.compress_hostlist(["n9", "n10", "n11"]) == "n[9-11]"
    mixed = ["n9", "n10", "n09", "n100", "n001"]
    assert set(hostlist.expand_hostlist(hostlist.compress_hostlist(mixed))) == set(mixed)


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


@pytest.mark.parametrize(
    ("parameters", "version", "offered"),
    [
        ("enable_expedited_requeue", "26.05.5", True),
        ("cloud_dns,enable_expedited_requeue,idle_on_node_suspend", "25.11.0", True),
        ("enable_expedited_requeue", "24.11.5", False),
        ("no_enable_expedited_requeue", "26.05.5", False),
        ("(null)", "26.05.5", False),
    ],
)
def test_a_cluster_offers_expedited_requeue_where_its_settings_and_its_version_do(
    parameters: str, version: str, offered: bool
) -> None:
    shown = (
        f"SlurmctldDebug          = info\nSlurmctldParameters     = {parameters}\nSLURM_VERSION           = {version}\n"
    )
    assert parse.offers_expedited_requeue(shown) is offered
    assert not parse.offers_expedited_requeue(shown.replace("SlurmctldParameters", "SlurmdParameters"))


def test_a_job_that_is_to_begin_again_after_the_loss_of_a_node_waits() -> None:
    state = parse.parse_state("EXPEDITING")
    assert state is JobState.EXPEDITING and state.waiting and not state.ended
