"""A run whose environment names its page in a tracker: status and messages show it, and its restarts are marked there."""

from __future__ import annotations

import json
import sys

from ftsupervise.alerts.receivers import email as mail
from ftsupervise.alerts.receivers import slack, webhook
from ftsupervise.alerts.wording import Parcel, incident
from ftsupervise.rundir.tracker import TrackerPage, read_tracker, write_tracker
from tests.neighbours.slack import blocks_of, texts_of
from tests.neighbours.supervised import SupervisedRun
from tests.story.alerting_scene import T0, email, settings

# Fails once. Each rank would mark the restart; only rank 0 does. The callback of the last attempt fails.
TRAIN = """
import os, sys, time
from ftsupervise import Guard
guard = Guard(beat_every=0.1, poll=0.1, rank=0, world=1)
other = Guard(beat_every=0.1, poll=0.1, rank=1, world=2)
marks = open("marks", "a", buffering=1)
guard.on_restart(lambda again: marks.write(again.words() + "\\n"))
other.on_restart(lambda again: marks.write("rank 1\\n"))
guard.on_restart(lambda again: again.nothing)
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
for step in range(1, 6):
    guard.step(step)
    time.sleep(0.05)
if attempt == 1:
    sys.exit(7)
guard.report(url="https://tensorboard.lab/run?token=k" if attempt == 2 else "file:///etc/passwd")
if attempt == 2:
    sys.exit(7)
guard.finished(5)
"""


def test_status_shows_the_page_and_the_callback_is_called_once_for_each_restart(run: SupervisedRun) -> None:
    env = {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "p", "WANDB_RUN_ID": "ab12", "WANDB_API_KEY": "k3y"}
    words = ("--in-place", "5", "--back-off", "0", "--", sys.executable, "-c", TRAIN)
    one = run.start(*words, **env)
    assert one.wait(60) == 0, one.said()
    assert read_tracker(run.rundir, 1) == TrackerPage("https://wandb.ai/lab/p/runs/ab12", "W&B")
    assert read_tracker(run.rundir, 2) == TrackerPage("https://tensorboard.lab/run", "tracker")
    assert read_tracker(run.rundir, 3) == TrackerPage("https://wandb.ai/lab/p/runs/ab12", "W&B"), (
        "the bad one is left out"
    )
    assert "that is no plain http or https address" in one.said()
    marks = (run.folder / "marks").read_text().splitlines()
    assert len(marks) == 2 and marks[0].startswith("attempt 2 goes on where attempt 1 ended at step 5: exit 7")
    assert "on_restart: AttributeError" in one.said()
    assert "k3y" not in "".join(path.read_text() for path in run.rundir.attempts.glob("*/tracker.json"))


def test_a_page_that_a_stranger_may_write_is_not_shown_nor_is_one_of_long_ago(run: SupervisedRun) -> None:
    for number in (1, 2, 9):
        run.rundir.attempt(number).mkdir(parents=True)
    write_tracker(run.rundir.attempt(1), TrackerPage("https://example.org/a", "W&B"))
    assert read_tracker(run.rundir, 2) == TrackerPage("https://example.org/a", "W&B")
    assert read_tracker(run.rundir, 9) is None
    page = run.rundir.attempt(1) / "tracker.json"
    page.chmod(0o666)
    assert read_tracker(run.rundir, 2) is None
    page.chmod(0o644)
    page.write_text(json.dumps({"url": "javascript:alert(1)", "kind": "<b>"}))
    assert read_tracker(run.rundir, 2) is None


def test_messages_name_the_page() -> None:
    link = "https://wandb.ai/lab/p/runs/ab12?a&b".partition("?")[0] + "&x=1"
    message = list(incident("train", "/r", T0))[1]
    parcel = Parcel(message, T0, tracker=link)
    alerts = settings(
        [email(25, html=True), {"slack": {"webhook_env": "HOOK"}}, {"webhook": {"url": "https://h.org/"}}]
    )
    by_mail, by_slack, by_hook = (one.settings for one in alerts.receivers)
    plain, page = (part.get_content() for part in mail.compose(parcel, by_mail).iter_parts())
    assert f"tracker  {link}\n" in plain
    escaped = link.replace("&", "&amp;")
    assert f'<a href="{escaped}">{escaped}</a>' in page
    texts = texts_of(blocks_of(slack.compose(parcel, by_slack)))
    assert f"<{escaped}|Its page in the experiment tracker>" in texts
    (body,) = webhook.compose(parcel, by_hook)
    assert body["tracker"] == link
