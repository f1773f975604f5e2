"""What a drill makes of what it has seen: values in, the result and the advice out."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.load import loads
from ftsupervise.config.schema import Run
from ftsupervise.drill.copied import copied, for_a_row
from ftsupervise.drill.mailbox import Mail
from ftsupervise.drill.play import chosen, code_of
from ftsupervise.drill.verdict import (
    RowOutcome,
    RowResult,
    SeenAfter,
    Shortfall,
    damage_problems,
    disk_problems,
    hang_problems,
    judged,
    lighthouse_problems,
    mail_problems,
    slurm_problems,
    torn_problems,
    usual_problems,
)
from ftsupervise.errors import Refused, UsageError
from ftsupervise.model import GUARD, OUTPUT, Attempt, Cause, CauseKind
from ftsupervise.truth import Resumed

AT = datetime(2026, 11, 28, 1, tzinfo=timezone.utc)
MAIL = Mail(AT + timedelta(seconds=4), ("mail",), "went on")


def run(more: str = "") -> Run:
    return loads(f"name: r\nlaunch: {{command: python train.py, jobs: 5}}\n{more}", Path("/w/ftsupervise.yaml"))


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def attempt(number: int, **more: Any) -> Attempt:
    return Attempt(number, "7", AT - timedelta(seconds=60), **{"first_step": 1, "source": GUARD, **more})


LEFT = attempt(1, last_step=140, saved=100)
KILLED = LEFT._replace(ended=after(0.5), cause=Cause(CauseKind.SIGNAL, signal=9), last_step=142)
BACK = attempt(2, first_step=101)._replace(started=after(1))


def seen(**more: Any) -> SeenAfter:
    whole: dict[str, Any] = {"ended": KILLED, "back": BACK, "back_at": after(3), "mails": (MAIL,)}
    return SeenAfter(AT, LEFT, 60.0, **{**whole, **more})


def test_a_run_that_goes_on_from_what_it_saved_passes_with_its_figures() -> None:
    found = judged("kill-rank", seen(), usual_problems(seen(), run()))
    assert found.outcome is RowOutcome.PASS and found.told == ("mail",) and found.messages == ("went on",)
    assert (found.detected, found.recovered, found.steps_lost) == (0.5, 3.0, 42)
    assert found.seen == "attempt 1: killed by SIGKILL; attempt 2 went on at step 101"


def test_an_end_that_nobody_recorded_is_told_by_the_attempt_after_it() -> None:
    lost = LEFT._replace(ended=after(-5), cause=Cause(CauseKind.LOST))
    assert seen(ended=lost).detected == 1.0


def whys(problems: Any) -> list[str]:
    found = list(problems)
    assert all(one.do for one in found)
    return [one.why for one in found]


@pytest.mark.parametrize(
    ("what", "settings", "why"),
    [
        ({"ended": None, "back": None, "back_at": None}, "", "nothing ended or replaced attempt 1 within 60 s"),
        ({"back": None, "back_at": None}, "", "no later attempt made a step within 60 s"),
        ({"back": BACK._replace(first_step=1)}, "", "it began again at step 1 instead of going on"),
        ({"back": BACK._replace(first_step=51)}, "", "step 100 was saved, and it went on at step 51"),
        ({"mails": ()}, "alerts: {quiet: {}}", "nobody was told"),
    ],
)
def test_each_thing_that_must_be_seen_is_missed_by_name(what: dict[str, Any], settings: str, why: str) -> None:
    assert whys(usual_problems(seen(**what), run(settings))) == [why]


def test_without_a_successor_the_advice_names_the_setting() -> None:
    alone = loads("name: r\nlaunch: {command: c, jobs: 1}\n", Path("/w/ftsupervise.yaml"))
    for ended in (KILLED, LEFT._replace(cause=Cause(CauseKind.LOST))):
        (found,) = usual_problems(seen(ended=ended, back=None, back_at=None), alone)
        assert found == Shortfall(
            "no later attempt made a step within 60 s, and no member waited to take over", "launch.jobs: 2 or more"
        )


def test_of_a_script_without_the_guard_the_advice_is_to_put_it_in() -> None:
    left = LEFT._replace(source=OUTPUT, saved=None)
    (found,) = usual_problems(SeenAfter(AT, left, 60.0, KILLED, BACK._replace(first_step=1), after(3), (MAIL,)), run())
    assert found.do.startswith("ftsupervise init --patch train.py")


def test_a_loop_that_never_saves_is_told_to_save_and_one_that_does_not_load_to_load() -> None:
    for saved, do in ((None, "save with guard.checkpoint()"), (100, "load guard.latest()")):
        hit = SeenAfter(AT, LEFT._replace(saved=saved), 60.0, KILLED, BACK._replace(first_step=1), after(3), (MAIL,))
        (found,) = usual_problems(hit, run())
        assert found.do.startswith(do)


@pytest.mark.parametrize(
    ("settings", "left", "why", "do"),
    [
        ("", LEFT, "not ended within 60 s", "--keep"),
        ("act: observe", LEFT, "a hang is only told (act)", "act: {hang: act}"),
        ("", LEFT._replace(source=OUTPUT), "without the guard a standstill takes 10m", "init --patch train.py"),
    ],
)
def test_a_hang_that_nobody_ends_says_which_setting_or_guard_is_missing(
    settings: str, left: Attempt, why: str, do: str
) -> None:
    (found,) = hang_problems(SeenAfter(AT, left, 60.0), run(settings))
    assert why in found.why and do in found.do


def test_a_watchdog_that_is_off_is_named() -> None:
    off = loads("name: r\nlaunch: {command: c, restart: {hang: null}}\nwatch: {disk: null}\n", Path("/w/f.yaml"))
    (hang,) = hang_problems(SeenAfter(AT, LEFT, 60.0), off)
    assert "launch.restart.hang is off" in hang.why and "launch.restart.hang: null" in hang.do
    (disk,) = disk_problems(seen(), off, fired=False)
    assert "watch.disk is off" in disk.why and "watch.disk: null" in disk.do


def test_an_end_of_another_kind_is_no_hang_that_was_seen() -> None:
    assert whys(hang_problems(seen(), run())) == ["it ended, and not as a hang: killed by SIGKILL"]
    hang = KILLED._replace(cause=Cause(CauseKind.HANG))
    assert not whys(hang_problems(seen(ended=hang), run()))


@pytest.mark.parametrize(
    ("resumed", "why"),
    [
        (Resumed("step-100", 100, passed=("step-200 is damaged: state.npz differs",)), []),
        (Resumed("step-200", 200), ["it went on from step-200, which is damaged"]),
        (Resumed("step-100", 100), ["it went on from step-100, and did not say that step-200 is damaged"]),
        (Resumed(), ["it began anew, though an older whole one lay beside step-200"]),
        (None, ["step-200 was damaged, and nothing compares what the run loads with what it saved"]),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_that_is_said(
    resumed: Resumed | None, why: list[str]
) -> None:
    assert whys(damage_problems(seen(back=BACK._replace(resumed=resumed)), run(), "step-200")) == why


def test_a_torn_checkpoint_fails_the_row_though_the_run_went_on() -> None:
    assert whys(torn_problems(seen(), run(), ["step-200 is damaged: it is short"])) == [
        "a torn checkpoint lies there: step-200 is damaged: it is short"
    ]


def test_mail_that_was_refused_is_kept_and_sent_later() -> None:
    assert not whys(mail_problems(run(), kept=True, mails=(MAIL,)))
    assert whys(mail_problems(run(), kept=True, mails=())) == [
        "the message was kept, and not sent when the mail server took mail again"
    ]
    assert whys(mail_problems(run(), kept=False, mails=())) == ["nobody was told"]


def test_a_disk_that_was_full_is_told_and_trained_on_after() -> None:
    lived = seen(ended=None, back=None)
    assert not whys(disk_problems(lived, run(), fired=True))
    assert lived.detected == 4.0  # by the message
    assert whys(disk_problems(seen(back_at=None)._replace(within=9.0), run(), fired=True)) == [
        "it did not train on within 9 s of having space again"
    ]


def test_a_slurm_that_is_away_stops_no_training_and_makes_no_false_alarm() -> None:
    lived = seen(ended=None, back=None)
    assert not whys(slurm_problems(lived, run(), went_on=True, false_alarm=False))
    assert whys(slurm_problems(lived, run(), went_on=False, false_alarm=True)) == [
        "it stood still while Slurm did not answer",
        "people were told that its job is gone, which nobody could see",
    ]


def test_the_exit_code_says_failed_before_not_tried_and_not_tried_where_it_was_asked_for() -> None:
    passed, failed, missed = (RowResult("r", outcome) for outcome in RowOutcome)
    assert code_of([passed, missed], ()) == 0
    assert code_of([passed, missed], ("r",)) == 3
    assert code_of([missed, missed], ()) == 3
    assert code_of([passed, failed, missed], ("r",)) == 1


def test_a_row_that_is_not_there_is_answered_with_the_near_one() -> None:
    with pytest.raises(UsageError) as refused:
        chosen(["kill-rnak"])
    assert refused.value.hint == "did you mean kill-rank?"
    assert [row.name for row in chosen(["stop-rank", "kill-rank"])] == ["kill-rank", "stop-rank"]
    assert len(chosen([])) == 10 and len(chosen([], run())) == 9, "one is for runs with a lighthouse alone"


def test_the_copy_keeps_command_routes_and_watchdogs_and_reaches_nobody() -> None:
    settings = """
alerts:
  receivers: [{email: {host: mail.example.org, from: a@b.org, to: [ada@b.org]}}, {name: night, file: {path: /w/m}}]
  routes: [{severity: critical, to: [night]}]
  dead_man: {url_env: DEAD_MAN}
watch: {disk: null, metrics: /w/metrics, exec: [{name: x, command: [/bin/x]}]}
checkpoints: {path: /scratch/ckpt}
"""
    made = for_a_row(copied(run(settings), Path("/tmp/d"), "local"), Path("/tmp/d/row/run"), 2525, "d.invalid")
    assert (made.name, made.launch.command, made.run_dir) == ("r-drill", "python train.py", Path("/tmp/d/row/run"))
    dropped = (made.checkpoints.path, made.watch.metrics, made.watch.exec, made.watch.disk, made.alerts.dead_man)
    assert dropped == (None,) * 5
    assert list(made.alerts.named) == ["email", "night"] and made.alerts.routes == run(settings).alerts.routes
    assert {(one.settings.host, one.settings.port) for one in made.alerts.receivers} == {("127.0.0.1", 2525)}
    assert [one.settings.to for one in made.alerts.receivers] == [("email@d.invalid",), ("night@d.invalid",)]


def test_one_member_stays_one() -> None:
    alone = loads("name: r\nlaunch: {command: c, jobs: 1}\n", Path("/w/ftsupervise.yaml"))
    assert copied(alone, Path("/tmp/d"), "local").launch.jobs == 1


def test_of_replica_groups_the_lighthouse_is_killed_and_without_one_they_are_refused() -> None:
    def groups(more: str = "") -> Run:
        text = f"name: r\nlaunch: {{command: c, replica_groups: {{count: 3{more}}}}}\n"
        return loads(text, Path("/w/ftsupervise.yaml"))

    assert [row.name for row in chosen([], groups())] == ["kill-lighthouse"]
    (named,) = chosen(["kill-rank"], groups())
    assert named.unfit(groups()).startswith("it trains as replica groups") and not named.unfit(run())
    with pytest.raises(Refused, match="without a lighthouse"):
        chosen([], groups(", lighthouse: none"))
    stood = seen(back=None, back_at=None)
    assert whys(lighthouse_problems(stood, run(), back=False, moved=False, lost=())) == [
        "no lighthouse came in its place within 60 s"
    ]
    assert whys(lighthouse_problems(stood, run(), back=True, moved=True, lost=("g001",))) == [
        "the groups made no step within 60 s of that",
        "the new one is at another address, so all groups were started again",
    ]
    assert whys(lighthouse_problems(seen(), run(), back=True, moved=False, lost=("g001",))) == [
        "group g001 had to be started again"
    ]
    assert not whys(lighthouse_problems(seen(), run(), back=True, moved=False, lost=()))
