"""The first words of a report and of ``status`` say how a run is and what to do; its costs add up to all of its time."""

from __future__ import annotations

import json
import re

import click
import pytest

from ftsupervise.cli.status import lines_of
from ftsupervise.report.account import Spent
from ftsupervise.report.html import incident_row, page
from ftsupervise.report.markdown import as_markdown
from ftsupervise.report.plan import plan_rows
from ftsupervise.report.summary import explained, headline, rest_sentence, sentences, tiles
from tests.neighbours.prepared_account import PreparedAccount as Account
from tests.neighbours.prepared_runs import STORIES


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Account:
    return Account(tmp_path_factory.mktemp("account"), STORIES)


@pytest.mark.parametrize(
    ("name", "verdict", "tone", "words", "costliest"),
    [
        ("fine", "RUNNING", "good", "It trains at its usual speed", ("saving checkpoints", "waiting in the queue")),
        (
            "crash-loop",
            "STOPPED",
            "bad",
            "ModuleNotFoundError",
            ("stopped by the brake", "stopped by a person, or not launched", "program error"),
        ),
        ("hang", "HUNG", "bad", "It hangs: no progress for 50m", ("hang", "saving checkpoints")),
        ("slow-node", "SLOW", "watch", "slower than usual: 221 steps an hour", ("slow steps",)),
        ("queue-bound", "WAITING", "watch", "waited in the queue for 8h", ("waiting in the queue",)),
        ("disk-full", "STOPPED", "bad", "no space left on device", ("stopped by the brake", "full disk")),
    ],
)
def test_the_first_words_say_how_it_is_and_the_first_costs_what_cost_most(
    account: Account, name: str, verdict: str, tone: str, words: str, costliest: tuple[str, ...]
) -> None:
    found = account.report(name)
    head = headline(found)
    assert (head.verdict, head.tone) == (verdict, tone), head
    assert words.lower() in head.sentence.lower()
    assert tuple(item.name for item in found.costs[: len(costliest)]) == costliest
    shown = page(found)
    assert head.verdict in shown
    assert list(sentences(found))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fine", "fine: RUNNING (job 100_4), step 23680 of 100000 (24 %)"),
        ("crash-loop", "crash-loop: STOPPED (by the brake: exit 1 (ModuleNotFoundError), the same failure 5 times"),
        ("hang", "hang: HUNG (no progress for 50m"),
        ("slow-node", "slow-node: SLOW (221 steps an hour"),
        ("queue-bound", "queue-bound: WAITING (Priority), step 5288 of 100000 (5 %)"),
        ("disk-full", "disk-full: STOPPED (by the brake: no space left on device at step"),
    ],
)
def test_the_first_line_of_status_says_whether_the_run_is_fine(account: Account, name: str, first: str) -> None:
    lines = [click.unstyle(line) for line in lines_of(account.report(name).detail)]
    assert lines[0].startswith(first), lines[0]
    running = [line for line in lines if line.startswith("  attempt") and " running for " in line]
    assert len(running) == (name in ("fine", "hang", "slow-node")), "also where it runs on another host"


def test_a_hang_that_goes_on_is_one_incident_and_the_first_words_say_what_to_do(account: Account) -> None:
    found = account.report("hang")
    head, going = headline(found), found.incidents[-1]
    assert "furthest behind: rank 163 on node-21" in head.sentence
    assert "scancel 102_1; the next job resumes from step 5,796" in head.next
    assert round(going.lost / 60) == 50
    hang = next(item for item in found.costs if item.name == "hang")
    assert (hang.times, hang.goes_on, hang.nodes) == (3, True, ("node-21",))
    assert "no progress now" not in [item.name for item in found.costs]
    tile = next(tile for tile in tiles(found) if tile.title == "Faults")
    assert (tile.value, tile.tone) == ("3", "bad") and "one not over" in tile.more
    data = re.search(r'id="data">(.*?)</script>', page(found), re.S)
    assert data is not None and json.loads(data[1])["ends"] == {"1": "hang", "2": "hang"}, "the third has not ended"


@pytest.mark.parametrize(
    ("name", "sentence", "brake"),
    [
        (
            "crash-loop",
            "the same failure 5 times without a step: ModuleNotFoundError: No module named 'webdataset'.",
            True,
        ),
        ("disk-full", "No space left on device", True),
        ("hang", "no progress for 50m", False),
        ("slow-node", "slower than usual", False),
    ],
)
def test_what_to_type_next_stands_alone_so_that_it_can_be_copied(
    account: Account, name: str, sentence: str, brake: bool
) -> None:
    found = account.report(name)
    head = headline(found)
    assert sentence in head.sentence and head.sentence.startswith("Stopped by the brake") is brake
    assert "ftsupervise" not in head.sentence + head.next and head.next.endswith(":")
    if brake:
        assert head.command == f"ftsupervise clear --brake {account.folder / name}"
    assert head.command.endswith(str(account.folder / name))
    assert f'<code class="command">{head.command}</code>' in page(found)
    assert f"{head.next.rsplit(' ', 1)[-1]} `{head.command}`" in as_markdown(found)


def test_a_hang_of_the_last_job_is_told_as_such_wherever_the_next_step_is_named(account: Account) -> None:
    found = account.report("hang")
    last = found._replace(detail=found.detail._replace(row=found.detail.row._replace(members_left=0)))
    for report, more in ((found, False), (last, True)):
        (said,) = [line for line in map(click.unstyle, lines_of(report.detail)) if "scancel" in line]
        assert ("no other waits, so launch it again" in said) is more, said
        assert ("no job waits, so launch it again" in headline(report).next) is more
        (jobs,) = [row for row in plan_rows(report) if row.what == "Jobs"]
        assert jobs.worse is more


def test_a_rank_behind_is_told_with_its_steps_and_its_node_is_avoided_from_the_next_job_on(account: Account) -> None:
    detail = account.report("hang").detail
    run = detail.status.run
    assert run.page is not None and run.page.step is not None
    ahead = run.page._replace(ahead=run.page.step + 12)
    later = detail._replace(status=detail.status._replace(run=run._replace(page=ahead)))
    over = detail._replace(status=detail.status._replace(jobs=()))
    at_one, behind, gone = ("\n".join(map(click.unstyle, lines_of(one))) for one in (detail, later, over))
    assert "  progress  rank 163 on node-21 is the furthest behind\n" in at_one
    assert "  progress  rank 163 on node-21 is the furthest behind (12 steps)\n" in behind
    assert "  nodes     avoided from the next job on: node-21\n" in at_one, "the job that runs has it"
    assert "  nodes     avoided: node-21\n" in gone


@pytest.mark.parametrize(
    ("name", "step"), [("crash-loop", 5002), ("disk-full", 5520), ("queue-bound", 5288), ("slow-node", 7714)]
)
def test_a_run_has_its_step_and_the_last_one_also_when_its_newest_attempts_made_none(
    account: Account, name: str, step: int
) -> None:
    found = account.report(name).detail
    assert (found.row.step, found.row.last_step) == (step, 100_000)
    (first, *_) = map(click.unstyle, lines_of(found))
    assert first.endswith(f", step {step} of 100000 ({step / 1000:.0f} %)")


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("fine", ()),
        (
            "crash-loop",
            ("ftsupervise clear --brake {run}   (once that is mended; the jobs that are held start again)",),
        ),
        ("hang", ("ftsupervise check hang {run}   (every sign", "scancel 102_1   (ends this job")),
        ("slow-node", ("ftsupervise check throughput {run}   (its steps an hour", "ftsupervise nodes list {run}")),
        ("queue-bound", ("squeue --start --jobs ",)),
        ("disk-full", ("disk: make room", "ftsupervise clear --brake {run}   (once that is mended;")),
    ],
)
def test_status_says_what_to_do_about_each_state_that_is_not_well(
    account: Account, name: str, typed: tuple[str, ...]
) -> None:
    found = account.report(name).detail
    lines = [click.unstyle(line) for line in lines_of(found, 80, {"disk": "make room on /scratch"})]
    does = [line.removeprefix("  do        ") for line in lines if line.startswith("  do ")]
    assert len(does) == len(typed), does
    for said, begin in zip(does, typed, strict=True):
        assert said.startswith(begin.format(run=found.status.rundir.quoted())), said
    assert any(said.endswith("; look first at rank 317 on node-40)") for said in does) is (name == "slow-node")
    with_log = found._replace(log=found.status.rundir.logs / "out")
    errors = [line for line in lines_of(with_log) if line.startswith("  do ") and "ftsupervise diagnose " in line]
    assert bool(errors) is (name in ("crash-loop", "disk-full"))


def test_what_the_commands_say_to_type_next_leads_on(account: Account) -> None:
    said = account.type("status", cwd=account.folder).stdout.partition("\n\n")[2]
    assert said.startswith("5 runs need a look:\n"), said
    for name in ("hang", "crash-loop", "disk-full", "slow-node", "queue-bound"):
        assert f"  ftsupervise status {name} " in said, "the output of none goes to a file"
    (account.folder / "disk-full/logs/disk-full.out").write_text("OSError: [Errno 28] No space left on device\n")
    try:
        again = account.type("status", cwd=account.folder).stdout
        assert "  ftsupervise diagnose disk-full " in again
        assert "Errno 28" in account.type("logs", "disk-full", "--errors", cwd=account.folder).stdout
    finally:
        (account.folder / "disk-full/logs/disk-full.out").unlink()
    missing = account.type("logs", "crash-loop", "--errors", cwd=account.folder)
    assert missing.returncode == 66
    assert "its last failure, of attempt 6: rank 17 on node-03 exit 1: ModuleNotFoundError" in missing.stderr
    full = account.type("status", "disk-full", cwd=account.folder).stdout
    assert "  do        disk: delete what is not needed, or have the quota raised\n" in full, "as its alert advises"


@pytest.mark.parametrize("name", STORIES)
def test_the_shares_of_the_costs_and_the_sentence_below_them_make_up_100_percent(account: Account, name: str) -> None:
    found = account.report(name)
    section = as_markdown(found).split("## What cost most")[1].split("## ")[0]
    shares = re.findall(r"^(?:\d+\. |In the other |The other )[^(]*\(([0-9.]+) %\)", section, flags=re.M)
    assert len(shares) == len(found.costs) + 1
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.1 * len(shares))


def test_a_stopped_run_is_told_with_the_share_of_all_its_time_and_what_was_held(account: Account) -> None:
    found = account.report("crash-loop")
    first = tiles(found)[0]
    spent = found.detail.account.seconds()
    assert first.value == f"{100 * spent[Spent.TRAIN] / found.detail.account.total:.1f} %"
    assert re.search(
        r"\(65\.9 %\); it was stopped by the brake for 6h and stopped by a person, or not launched, for 40m\.",
        " ".join(sentences(found)),
    )
    assert first.more.startswith("ETTR: Meta 9"), "without the time it was stopped"


def test_the_queue_after_a_planned_end_is_a_cost_of_its_own_wherever_it_stands(account: Account) -> None:
    found = account.report("queue-bound")
    rows = [incident_row(one) for one in found.incidents]
    assert all(row["lost"] < 600 and row["apart"].startswith("then queue ") for row in rows)
    costs = {item.name: item for item in found.costs}
    assert costs["planned restarts"].seconds == pytest.approx(sum(one.lost for one in found.incidents))


def test_the_costs_and_the_training_at_its_usual_speed_are_all_of_the_time(account: Account) -> None:
    for name in STORIES:
        found = account.report(name)
        spent = {kind.value: seconds for kind, seconds in found.detail.account.seconds().items()}
        slow = sum(item.seconds for item in found.costs if item.name == "slow steps")
        costs = sum(item.seconds for item in found.costs) - slow
        assert spent["train"] + costs == pytest.approx(found.detail.account.total, abs=5.0), name
        assert slow <= spent["train"]


def test_a_slow_node_costs_what_the_run_would_have_been_faster_without_it(account: Account) -> None:
    found = account.report("slow-node")
    (slow,) = found.slow
    assert slow.rate / slow.usual == pytest.approx(0.62, abs=0.03)
    assert slow.lost == pytest.approx(9 * 3600 * 0.38, rel=0.1)
    (item,) = [one for one in found.costs if one.name == "slow steps"]
    assert re.fullmatch(r"The costliest: since .* UTC, and still, at 6\d % of its usual speed\.", explained(item))
    assert item.slowest is not None
    over = item._replace(slowest=item.slowest._replace(goes_on=False))
    assert re.match(r"The costliest: from .* UTC to .* UTC, at", explained(over))
    assert "would have taken at its usual speed" in rest_sentence(found)
    assert "it trained at its usual speed" in rest_sentence(account.report("fine"))
    assert not account.report("fine").slow, "checkpoints, restarts and changes of jobs are no slowness"
