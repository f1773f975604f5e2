"""``plan`` and ``simulate`` as a person types them: about a run with a prepared past, and about none."""

from __future__ import annotations

import json
import math
import os
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.load import load
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

SETTINGS = """\
# the big one
name: train-10b
run_dir: {run}
launch:
  command: python train.py    # 8 ranks a node
  nodes: 64
  spare_nodes: 1              # Bob asked for more
  jobs: 10
  time: "20:00:00"
"""


class Planned:
    """An account with a run that has a past."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = outside_a_job(**prepare(folder / "account", datetime.now(timezone.utc), ["nine-days", "fine"]))
        self.run = folder / "account/train-10b"
        self.settings = folder / "ftsupervise.yaml"
        self.settings.write_text(SETTINGS.format(run=self.run))
        launch = RunDir(self.run).launches / "0001/launch.json"
        launch.write_text(json.dumps({**json.loads(launch.read_text()), "config": str(self.settings)}))

    def type(self, *words: str, code: int = 0, answer: str | None = None) -> str:
        done = typed(*words, folder=self.folder, env=self.env, code=code, answer=answer)
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: str) -> dict[str, Any]:
        return dict(json.loads(self.type(*words, "--json"), parse_constant=pytest.fail))


@pytest.fixture
def account(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


def test_a_run_s_own_past_is_measured_and_what_is_given_stands_in_its_place(account: Planned) -> None:
    found = account.json("plan", "train-10b", "--price", "2", "--cold", "11m")
    inputs = found["inputs"]
    assert found["schema_version"] == 1 and found["name"] == "train-10b"
    assert inputs["mtbf"]["origin"] == "measured" and inputs["mtbf"]["note"] == "of 3 failures"
    assert inputs["mtbf"]["low"] < inputs["mtbf"]["value"] < inputs["mtbf"]["high"]
    assert (inputs["cold"]["origin"], inputs["cold"]["value"]) == ("given", 660.0)
    assert inputs["size"]["origin"] == "assumed"
    # 20 s each 250 steps of 10 s, as the past was made
    assert inputs["save"]["value"] == pytest.approx(20, abs=2)
    assert inputs["interval"]["value"] == pytest.approx(2500, rel=0.05)
    assert inputs["nodes"] == 64 and inputs["limit"] == 72_000
    assert found["now"]["formula"].startswith("τ / (M") and found["spend"]["money"] > 0
    items = {one["name"]: one for one in found["items"]}
    assert items["checkpoint interval"]["key"] == "checkpoints.every"
    assert found["daly"] == pytest.approx(found["searched"], rel=0.05)

    config = RunDir(account.run).config
    config.write_text(config.read_text().replace("price: null", "price: 2.0"))
    own = account.json("plan", "train-10b", "--cold", "11m")["spend"]
    assert own["money"] == found["spend"]["money"], "the run's own settings say the price"


def test_the_simulated_ratio_of_a_run_is_near_the_one_that_it_had(account: Planned) -> None:
    goodput = account.json("status", "train-10b")["time"]["goodput"]["least"]
    assert account.json("plan", "train-10b")["simulated_now"]["ettr"] == pytest.approx(goodput, abs=0.03)
    replayed = account.json("simulate", "train-10b", "--replay", "--with", "spares=2", "--with", "queue=1m")
    ratios = [one["ettr"] for one in replayed["strategies"]]
    assert ratios[0] == pytest.approx(goodput, abs=0.03) and ratios[2] > ratios[0]
    assert replayed["strategies"][0]["faults"] == 3


def test_last_month_with_two_spare_nodes_is_told_in_hours_and_money_and_no_single_replay_claims_to_be_sure(
    account: Planned,
) -> None:
    words = ("simulate", "train-10b", "--replay", "--with", "spares=2", "--price", "2")
    said = account.type(*words)
    assert "3 failures of the run itself, in 8d" in said and "±" not in said
    assert "spares=2:" in said and "node hours of a run train nothing" in said and "at the price given" in said
    for more, black in ((("--replay",), 0), (("--days", "3", "--runs", "5", "--mtbf", "2h"), 2)):
        account.type("simulate", "train-10b", *more, "--with", "spares=2", "--svg", "out.svg")
        assert (account.folder / "out.svg").read_text().count('stroke="#000"') == black, (
            "a bar of the interval, or none"
        )
    whole, last = account.json(*words), account.json(*words, "--last", "5d")
    assert whole["strategies"][0]["certain"] is None
    assert last["seconds"] == 5 * 86400 and last["strategies"][0]["faults"] < 3
    first = whole["strategies"][0]
    assert first["lost_hours"] == pytest.approx(64 * whole["seconds"] / 3600 * (1 - first["ettr"]))
    assert first["lost_money"] == pytest.approx(2 * first["lost_hours"])


def test_a_plan_of_no_run_reads_none_and_says_what_it_assumes(account: Planned) -> None:
    said = account.type("plan", "--gpus", "16384", "--failures", "6.5")
    assert "2,048 nodes, 16,384 GPUs" in said and "1h 48m  given (6.5 failures in 1,000 node-days)" in said
    assert "note: not measured, but assumed: failures that take a node" in said
    assert "Young" in said and "Daly 2006" in said


def test_three_months_of_training_are_planned_to_their_end(account: Planned) -> None:
    words = ("plan", "--gpus", "16384", "--failures", "6.5", "--training", "90d", "--limit", "7d", "--price", "2")
    found = account.json(*words)
    items = {one["name"]: one for one in found["items"]}
    ratio = found["simulated"]["ettr"]
    assert items["time to the last step"]["value"] == pytest.approx(90 * 86400 / ratio)
    assert items["jobs in the chain"]["value"] == math.ceil(90 / ratio / 7)
    hours = 16_384 * 90 * 24 / ratio
    assert f"{hours:,.0f} GPU hours, {2 * hours:,.0f} at the price given" in items["time to the last step"]["why"]
    assert found["simulated"]["strategy"]["spares"] == items["spare nodes"]["value"] == found["planned_spares"] > 0
    assert items["replica groups"]["value"] == 4 and "in place of" in items["replica groups"]["why"]


def test_where_nothing_fails_the_interval_stays_and_nothing_is_called_unknown(account: Planned) -> None:
    said = account.type("plan", "--gpus", "64", "--failures", "0", "--size", "1TB")
    assert "never  given" in said and "nothing fails, so it stays" in said
    assert "unknown" not in said and "best interval: none, because nothing fails" in said


def test_apply_shows_the_change_first_and_writes_it_with_every_comment(account: Planned) -> None:
    before = account.settings.read_text()
    said = account.type("plan", "train-10b", "--apply", code=64)
    assert "no terminal to ask" in said and account.settings.read_text() == before, "nobody was there to say yes"
    said = account.type("plan", "train-10b", "--apply", "--yes")
    assert "-  spare_nodes: 1              # Bob asked for more" in said
    after = account.settings.read_text()
    assert [line for line in before.splitlines() if "#" in line and "spare" not in line] == [
        line for line in after.splitlines() if "#" in line and "spare" not in line and "ftsupervise plan" not in line
    ]
    assert "# Bob asked for more" in after
    assert "launch.time is left to you" in said
    made = load(account.settings, environ=account.env)
    assert made.checkpoints.every is not None and made.launch.warn is not None and made.launch.spare_nodes == 2
    assert made.checkpoints.every.total_seconds() == pytest.approx(2879, rel=0.02)
    assert "says all of that already" in account.type("plan", "train-10b", "--apply", "--yes")


@pytest.mark.root
@pytest.mark.threat(
    "You plan a run that was launched from a settings file of another account.", "`plan --apply` writes nothing there."
)
def test_no_file_of_another_account_is_written(account: Planned) -> None:
    os.chown(account.settings, 65534, 65534)
    before = account.settings.read_text()
    assert "nothing was changed" in account.type("plan", "train-10b", "--apply", "--yes", code=77)
    assert account.settings.read_text() == before


def test_a_picture_and_a_trace_are_written_and_the_same_seed_gives_the_same(account: Planned) -> None:
    words = ("simulate", "--gpus", "64", "--mtbf", "2h", "--days", "3", "--runs", "5")
    account.type(*words, "--with", "interval=20m spares=1", "--svg", "out.svg", "--trace", "trace.txt")
    root = ElementTree.fromstring((account.folder / "out.svg").read_text())
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "as it is" in texts and "interval=20m spares=1" in texts
    lines = (account.folder / "trace.txt").read_text().splitlines()
    assert lines[0] == "# as it is" and lines[1].startswith("# day, what, how long, why")
    assert any("steps made again" in line for line in lines) and not any(line.endswith(" 1 saves") for line in lines)
    one, two = (account.json(*words) for _ in range(2))
    assert one == two
    other = account.json(*words, "--seed", "2")
    assert other["strategies"][0]["ettr"] != one["strategies"][0]["ettr"]
    assert math.fsum(one["strategies"][0]["shares"].values()) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--gpus", "8", "--save", "20"), "--save: expected a duration"),
        (("plan", "--gpus", "8", "--nodes", "1"), "--gpus and --nodes say the same"),
        (("plan", "--gpus", "8", "--mtbf", "1h", "--failures", "3"), "--mtbf and --failures say the same"),
        (("plan", "--gpus", "8", "--apply"), "--apply writes into the settings of a run"),
        (("plan", "--gpus", "8", "--interval", "0s"), "longer than nothing"),
        (("plan", "--gpus", "8", "--risk", "1"), "--risk: expected a share"),
        (("plan", "--gpus", "8", "--lost", "0.5"), "--lost: expected a share"),
        (("plan", "--gpus", "8", "--failures", "nan"), "nan is no number"),
        (("plan", "--gpus", "8", "--price", "inf"), "inf"),
        (("plan", "--gpus", "8", "--limit", "0s"), "a job of 0s trains nothing"),
        (("plan", "--gpus", "8", "--lost", ""), "--lost: expected a share"),
        (("simulate", "--gpus", "8", "--days", "nan"), "nan is no number"),
        (("simulate", "--gpus", "8", "--weibull", "nan"), "nan is no number"),
        (("simulate", "--gpus", "8", "--mtbf", "1ms"), "7,776,000,000 failures, and 2,000,000 can be played"),
        (("simulate", "--gpus", "8", "--with", " "), "--with names a change"),
        (("simulate", "--gpus", "8", "--with", "interval"), "'interval' has no value"),
        (("simulate", "--gpus", "8", "--with", "limit=1s"), "a minute or longer"),
        (("simulate", "--gpus", "8", "--with", "maintenance-every=7d maintenance=8d"), "before the next one begins"),
        (("simulate", "--gpus", "8", "--with", "groups=2 least=3"), "least is at most groups"),
        (("simulate", "--gpus", "8", "--with", "stall=3m"), "stall needs groups"),
        (("simulate", "--gpus", "8", "--new"), "--new changes nothing"),
        (("simulate", "--gpus", "8", "--lemon-factor", "3"), "--lemon-factor needs --lemons"),
        (("simulate", "--gpus", "8", "--rack-failures", "3"), "--rack and --rack-failures go together"),
        (("simulate", "--gpus", "8", "--last", "3d"), "--last is for --replay"),
        (("simulate", "--gpus", "8", "--svg", "x.png"), "--svg writes an SVG"),
        (("simulate", "--gpus", "8", "--with", "spare=2"), "did you mean 'spares'"),
        (("simulate", "--gpus", "8", "--with", "spares=two"), "spares is a count"),
        (("simulate", "--gpus", "8", "--with", "interval=0s"), "interval is longer than nothing"),
        (("simulate", "--gpus", "8", "--replay"), "--replay meets the failures of a run"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_64(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = typed(*words, folder=tmp_path, code=64)
    assert said in done.stderr and len(done.stderr.splitlines()) <= 3


def test_replica_groups_stall_and_are_away_where_nothing_else_is_said(account: Planned) -> None:
    words = ("simulate", "--gpus", "64", "--mtbf", "2h", "--days", "3", "--runs", "5")
    shares = account.json(*words, "--with", "groups=4")["strategies"][1]["shares"]
    assert shares["restart"] > 0.01 and shares["away"] > 0
    said = account.type(*words, "--with", "groups=4")
    assert "8 nodes, a failure every 2h; 5 runs of 3d" in said and "nine of ten" not in said


def test_a_report_has_the_plan_where_it_is_asked_for(account: Planned) -> None:
    account.type("report", "train-10b", "-o", "with.html", "--plan")
    account.type("report", "train-10b", "-o", "without.html")
    text = (account.folder / "with.html").read_text()
    assert "What would help" in text and "as planned" in text and "jobs of twice the time limit" in text
    assert "What would help" not in (account.folder / "without.html").read_text()
    assert "--plan is for the page of one run" in account.type("report", "--week", "--plan", code=64)
