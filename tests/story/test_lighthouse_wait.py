"""A replica group with a job of its own begins as soon as the run's lighthouse answers, and no older copy reports there."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.host.ownership import make_folder
from ftsupervise.model import Cause, CauseKind
from ftsupervise.replicas.bounds import ENV_LIGHTHOUSE
from ftsupervise.replicas.member import reason_to_wait, wait_for_lighthouse
from ftsupervise.replicas.record import PAGE_NAME, LighthouseRecord
from ftsupervise.rundir.paths import ENV_GROUP, ENV_GROUP_JOB, ENV_SLOWEST_STEP, RunDir
from ftsupervise.rundir.records import write_json
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun
from tests.story.test_lighthouse_page import PAGE, answer, sent, server

NOW = datetime.now(timezone.utc)


def a_run(folder: Path, port: int, **page: object) -> RunDir:
    run = RunDir(folder)
    make_folder(run.replicas)
    record = LighthouseRecord("127.0.0.1", port, f"http://127.0.0.1:{port}", since=NOW - timedelta(hours=1))
    write_json(run.replicas / PAGE_NAME, record._replace(**page))  # type: ignore[arg-type]
    return run


def test_a_group_waits_while_the_run_has_no_lighthouse(tmp_path: Path) -> None:
    assert "has no lighthouse now" in reason_to_wait(RunDir(tmp_path).group("g007"), first=True)
    run = a_run(tmp_path, 1)
    assert "does not answer: nothing listens at port 1" in reason_to_wait(run.group("g007"), first=True)
    a_run(tmp_path, 1, down_since=NOW)
    assert "has no lighthouse now" in reason_to_wait(run.group("g007"), first=False)
    (run.replicas / PAGE_NAME).chmod(0o666)
    assert "cannot be read" in reason_to_wait(run.group("g007"), first=False), (
        "a stranger may have written that address"
    )


def test_a_group_waits_for_the_end_of_its_older_copy_and_for_no_other_group(tmp_path: Path) -> None:
    with server(sent(answer(PAGE))) as port:  # it hears g000, g001 and g002
        run = a_run(tmp_path, port)
        assert "an older copy of it still reports" in reason_to_wait(run.group("g001"), first=True)
    with server(sent(answer(PAGE))) as port:
        assert reason_to_wait(a_run(tmp_path, port).group("g007"), first=True) == ""
    with server(sent(answer(PAGE))) as port:
        assert reason_to_wait(a_run(tmp_path, port).group("g001"), first=False) == "", "its own ranks have just ended"
    with server(sent(answer(PAGE))) as port:
        run = a_run(tmp_path, port, since=datetime.now(timezone.utc))
        assert "the lighthouse is new" in reason_to_wait(run.group("g007"), first=True)


def test_a_group_that_waits_goes_on_by_itself_or_is_asked_to_stop(tmp_path: Path) -> None:
    run, pauses = a_run(tmp_path, 1, down_since=NOW), list[float]()
    with server(sent(answer(PAGE))) as port:

        def then_it_is_there(seconds: float) -> bool:
            pauses.append(seconds)
            a_run(tmp_path, port)
            return True

        assert wait_for_lighthouse(run.group("g007"), then_it_is_there, first=True) and len(pauses) == 1
    a_run(tmp_path, 1, down_since=NOW)
    assert not wait_for_lighthouse(run.group("g007"), lambda seconds: False, first=True)


def test_the_supervisor_of_such_a_group_starts_its_ranks_with_the_address_that_answers(tmp_path: Path) -> None:
    group = RunDir(tmp_path / "run").group("g007")
    for folder in (group.switches, group.state, group.finished.parent, tmp_path / "here"):
        make_folder(folder, parents=True)
    one = SupervisedRun(group.root, tmp_path / "here")
    told = {ENV_GROUP: "g007", ENV_GROUP_JOB: "1", ENV_SLOWEST_STEP: "1", ENV_LIGHTHOUSE: "http://127.0.0.1:1"}
    try:
        member = one.start("sh", "-c", f"echo it is at ${ENV_LIGHTHOUSE}", **told)
        wait_until(lambda: "group g007 waits: the run has no lighthouse now" in member.said(), "it says so")
        assert not one.attempts()
        with server(sent(answer(PAGE))) as port:
            a_run(tmp_path / "run", port)
            assert member.wait(60) == 0, member.said()
        assert f"it is at http://127.0.0.1:{port}" in member.said()
    finally:
        one.close()


def test_the_supervisor_of_such_a_group_starts_its_ranks_again_when_the_lighthouse_is_at_another_address(
    tmp_path: Path,
) -> None:
    """Its hang detector may be patient: the ranks would find nobody at the old address, and that is no failure of theirs."""
    group = RunDir(tmp_path / "run").group("g007")
    for folder in (group.switches, group.state, group.finished.parent, tmp_path / "here"):
        make_folder(folder, parents=True)
    one = SupervisedRun(group.root, tmp_path / "here")
    told = {ENV_GROUP: "g007", ENV_GROUP_JOB: "1", ENV_SLOWEST_STEP: "1", ENV_LIGHTHOUSE: "http://127.0.0.1:1"}
    options = ("--in-place", "5", "--same-failure", "1", "--hang", "3600", "--warm", "off", "--")
    try:
        with server(sent(answer(PAGE))) as old, server(sent(answer(PAGE))) as new:
            a_run(tmp_path / "run", old)
            member = one.start(*options, "sh", "-c", f"echo it is at ${ENV_LIGHTHOUSE}; sleep 1000", **told)
            wait_until(lambda: f"it is at http://127.0.0.1:{old}" in member.said(), "its first attempt")
            a_run(tmp_path / "run", old, down_since=NOW)
            a_run(tmp_path / "run", new)
            wait_until(lambda: f"it is at http://127.0.0.1:{new}" in member.said(), "its second attempt", 30)
        first = one.attempts()[0]
        assert first.cause == Cause(CauseKind.MOVED) and first.failure is None, first
        assert "starting again in place: with that address" in member.said()
    finally:
        one.close()
