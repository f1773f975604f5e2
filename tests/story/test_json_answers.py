"""Commands that act answer programs too: one JSON object on the standard output, an error as one line on the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.scheduler.local import Local
from tests.neighbours.typed import typed

SETTINGS = """\
name: tr11
scheduler: local
launch: {command: sleep 600, jobs: 2, output: "out/%x-%j.txt"}
watch: {hang: null, disk: null}
alerts: {receivers: [{file: {path: messages.txt}}]}
"""


class Desk:
    """A project with a launched run, and an account of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = str(folder / "state")
        self.env: dict[str, Any] = {"FTSUPERVISE_STATE_DIR": state, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        (folder / "ftsupervise.yaml").write_text(SETTINGS)

    def answer(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The one object that a command prints, which is all that it prints there."""
        done = typed(*words, "--json", folder=self.folder, code=code, **self.env)
        found: dict[str, Any] = json.loads(done.stdout)
        assert isinstance(found["schema_version"], int)
        return found

    def error(self, *words: str, code: int) -> dict[str, Any]:
        done = typed(*words, folder=self.folder, code=code, **self.env)
        assert done.stdout == ""
        found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])["error"]
        assert found["exit_code"] == code and found["message"]
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    local = Local({**os.environ, **found.env})
    for job in local.queue():
        local.cancel(job.base_id)


def test_a_run_is_launched_watched_saved_and_killed_by_a_program(desk: Desk) -> None:
    planned = desk.answer("launch", "--dry-run")
    (of,) = planned["runs"]
    assert planned["dry_run"] is True and of["members"] == 2 and "sleep 600" in of["scripts"][0]
    (done,) = desk.answer("launch")["runs"]
    assert (done["run"], done["scheduler"], done["found_again"]) == ("tr11", "local", False) and done["job_ids"]
    again = desk.error("launch", "--json", code=75)
    assert "already" in again["message"] and again["hint"]
    directory = done["directory"]
    assert desk.answer("config", "check")["files"][0]["run"] == "tr11"
    tick = desk.answer("watch", "--no-send")
    assert tick["code"] == 0 and tick["runs"][0]["run"] == "tr11"
    assert desk.answer("metrics")["runs"][0]["samples"]
    assert desk.answer("observe")["runs"][0]["observed"]
    saved = desk.answer("save")
    assert saved["switch"] == "save" and saved["runs"][0]["raised"] is True
    assert desk.answer("save")["runs"][0]["raised"] is False
    refused = desk.error("kill", "--json", code=64)
    assert "no terminal to ask" in refused["message"] and "--yes" in refused["hint"]
    killed = desk.answer("kill", "--yes")
    assert killed["runs"][0]["raised"] is True and killed["runs"][0]["directory"] == directory
    lowered = desk.answer("clear")["runs"][0]
    assert {"kill", "save"} >= set(lowered["lowered"]) > set()
    marked = desk.answer("nodes", "exclude", "node-[1-2]", "--for", "1h", "--no-apply")
    assert marked["nodes"] == ["node-1", "node-2"] and marked["until"] and marked["slurm"] is None
    assert desk.answer("nodes", "clear", "node-1", "--no-apply")["mark"] == "cleared"
    silence = desk.answer("alerts", "silence", "disk")["silence"]
    assert silence["pattern"] == "disk"
    assert [one["id"] for one in desk.answer("alerts", "unsilence", silence["id"])["ended"]] == [silence["id"]]
    files = desk.answer("report")["files"]
    assert len(files) == 1 and Path(files[0]).is_file()


def test_checkpoints_are_set_aside_for_a_program(desk: Desk) -> None:
    for step in (1, 2):
        folder = desk.folder / f"ck/step-{step}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(os.urandom(1000))
    put = desk.answer("checkpoints", "set-aside", str(desk.folder / "ck/step-2"))["put"]
    assert Path(put).is_dir()
    assert len(desk.answer("checkpoints", "anew", str(desk.folder / "ck"))["set_aside"]) == 1


def test_the_cron_answers_programs(desk: Desk) -> None:
    where = ["--dir", str(desk.folder / "cron")]
    assert desk.answer("cron", "install", "--backend", "loop", "--dry-run", *where)["dry_run"] is True
    assert desk.answer("cron", "install", "--backend", "loop", *where)["changed"] is True
    assert {one["name"] for one in desk.answer("cron", "add")["scripts"]} >= {"watch-all"}
    assert Path(desk.answer("cron", "add", "watch-all", *where)["added"][0]["path"]).is_file()
    entry = desk.folder / "cron/cron.hourly/mine"
    entry.write_text("#!/bin/sh\necho said\nexit 3\n")
    entry.chmod(0o755)
    ran = desk.answer("cron", "run", "mine", *where, code=3)
    assert ran["code"] == 3 and "said" in "".join(one.read_text() for one in Path(ran["output"]).glob("out*"))
    assert desk.answer("cron", "remove", *where)["cancelled"] == []


def test_the_lines_of_a_log_come_with_their_attempt(desk: Desk) -> None:
    (desk.folder / "ftsupervise.yaml").write_text(SETTINGS.replace("sleep 600", "echo hello; sleep 600"))
    typed("launch", folder=desk.folder, code=0, **desk.env)
    from tests.neighbours.patience import wait_until

    def lines() -> list[str]:
        done = typed("logs", "--json", folder=desk.folder, **desk.env)
        return (
            [line for part in json.loads(done.stdout)["parts"] for line in part["lines"]] if not done.returncode else []
        )

    wait_until(lambda: "hello" in lines(), "the line of the command", 60)
    assert desk.error("logs", "--json", "--follow", code=64)["message"].startswith("--json is for the lines")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("status nosuchrun --json", 66, "no run called 'nosuchrun'"),
        ("check all nosuchrun --json", 3, "no run called 'nosuchrun'"),
        ("check --jsn --json", 3, "No such option"),
        ("statsu --json", 64, "did you mean 'status'"),
        ("cron instal --json", 64, "did you mean 'install'"),
        ("nodes exclude ] --json", 64, "]"),
    ],
)
def test_an_error_is_an_object_where_json_was_asked_for(desk: Desk, words: str, code: int, says: str) -> None:
    assert says in desk.error(*words.split(), code=code)["message"]


@pytest.mark.fault(
    "A program that asked for JSON names settings with errors", "it hears of all of them in one JSON object"
)
def test_errors_in_settings_come_in_one_object(desk: Desk) -> None:
    (desk.folder / "ftsupervise.yaml").write_text("name: r\nlaunch: {command: a, nodse: 2, tiem: 3}\n")
    message = desk.error("config", "check", "--json", code=78)["message"]
    assert "nodse" in message and "tiem" in message


def test_help_and_version_are_there_for_programs(desk: Desk) -> None:
    found = desk.answer("help", "cron")
    assert {one["name"] for one in found["below"]} >= {"cron install", "cron status"}
    assert all(option["meaning"] for one in found["below"] for option in one["options"])
    assert desk.answer("version")["version"]
