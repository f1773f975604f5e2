"""Settings that another account wrote, or may write: they are looked at, shown, and nothing in them is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftsupervise.config.load import loads
from ftsupervise.errors import ConfigError

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

TYPED = str(Path(sys.executable).with_name("ftsupervise"))
STRANGER, GROUP = 65534, 100  # nobody; users
SETTINGS = """\
name: shared
scheduler: local
launch: {{command: "touch {marks}/command"}}
nodes: {{health: {{command: "touch {marks}/health"}}}}
watch:
  exec: [{{name: evil, command: [touch, {marks}/exec]}}]
  disk: [{{quota: {{command: [touch, {marks}/quota], format: nagios}}}}]
alerts:
  receivers:
    - command: {{argv: [touch, {marks}/receiver]}}
    - file: {{path: {marks}/file}}
"""


class Scene:
    def __init__(self, top: Path) -> None:
        self.top, self.marks, self.run = top, top / "marks", top / "runs" / "shared"
        self.marks.mkdir()
        self.home = top / "home"
        self.home.mkdir(mode=0o700)
        for folder in ("switches", "watch/journal", "watch/watchers", "attempts", "launches", "state", "beats", "logs"):
            (self.run / folder).mkdir(parents=True)
        self.file = self.run / "run.yaml"
        self.file.write_text(SETTINGS.format(marks=self.marks) + f"run_dir: {self.run}\n")

    def type(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(self.home), "FTSUPERVISE_STATE_DIR": str(self.home / "state"), **more}
        return subprocess.run([TYPED, *words], env=env, cwd=self.home, capture_output=True, text=True, timeout=120)

    def done(self) -> list[str]:
        return sorted(path.name for path in self.marks.iterdir())


@pytest.fixture
def scene(top: Path) -> Scene:
    return Scene(top)


def test_ones_own_settings_are_used_whole(scene: Scene) -> None:
    scene.type("watch", str(scene.run))
    assert {"exec", "quota", "receiver", "file"} <= set(scene.done())


@pytest.mark.threat(
    "You watch a run of somebody else whose settings name commands and receivers.",
    "ftsupervise shows them and does not run them, with or without `--no-send`.",
)
@pytest.mark.parametrize("words", [["--no-send"], []])
def test_watching_somebody_elses_run_runs_none_of_their_commands(scene: Scene, words: list[str]) -> None:
    os.chown(scene.file, STRANGER, STRANGER)
    seen = scene.type("watch", str(scene.run), *words)
    assert scene.done() == []
    assert f"{scene.file} belongs to nobody" in seen.stderr
    assert f"watch.exec[0].command: touch {scene.marks}/exec" in seen.stderr, "it is shown"
    assert "--trust" in seen.stderr
    assert "shared" in seen.stdout, "and the run is watched all the same"


@pytest.mark.threat("A group member replaces `run.yaml`.", "The watch runs nothing that it names.")
def test_settings_that_a_group_member_replaced_run_nothing_as_the_watcher(scene: Scene) -> None:
    """The run directory is the group's, so a member can put another file in the place of ours."""
    os.chown(scene.run, 0, GROUP)
    scene.run.chmod(0o2775)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([GROUP])
            os.setgid(GROUP)
            os.setuid(STRANGER)
            text = scene.file.read_text()
            scene.file.unlink()
            scene.file.write_text(text)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert scene.file.stat().st_uid == STRANGER
    scene.type("watch", str(scene.run))
    assert scene.done() == []


@pytest.mark.threat(
    "A group or everybody may write `run.yaml`.",
    "The watch runs nothing that it names, and says who may write it.",
)
@pytest.mark.parametrize(("mode", "who"), [(0o666, "everybody"), (0o664, "the group users")])
def test_settings_that_others_may_write_run_nothing_either(scene: Scene, mode: int, who: str) -> None:
    os.chown(scene.file, 0, GROUP)
    scene.file.chmod(mode)
    for words in (["watch"], ["check", "all"], ["notify", "test"]):
        seen = scene.type(*words, str(scene.run))
        assert scene.done() == []
        assert f"{who} may write {scene.file}" in seen.stderr, words


@pytest.mark.threat(
    "Settings change after you accepted them with `--trust`.",
    "ftsupervise trusts only the text that you accepted.",
)
def test_trust_is_said_once_and_holds_for_what_the_file_says_now(scene: Scene) -> None:
    os.chown(scene.file, STRANGER, STRANGER)
    scene.type("watch", "--trust", str(scene.run))
    assert "exec" in scene.done()
    (scene.marks / "exec").unlink()
    scene.type("watch", str(scene.run))
    assert "exec" in scene.done(), "it is remembered"
    (scene.marks / "exec").unlink()
    scene.file.write_text(scene.file.read_text().replace("marks/exec", "marks/another"))
    scene.type("watch", str(scene.run))
    assert not {"exec", "another"} & set(scene.done()), "another text is another thing"


@pytest.mark.threat(
    "Somebody forges the record of `--trust`.",
    "ftsupervise ignores a record that belongs to another account.",
)
def test_a_mark_of_trust_that_somebody_else_laid_counts_for_nothing(scene: Scene) -> None:
    os.chown(scene.file, STRANGER, STRANGER)
    scene.type("watch", "--trust", str(scene.run))
    (scene.marks / "exec").unlink()
    for mark in (scene.home / "state" / "trusted").iterdir():
        os.chown(mark, STRANGER, -1)
    scene.type("watch", str(scene.run))
    assert "exec" not in scene.done()


@pytest.mark.threat(
    "A receiver in somebody else's settings names your token file and their address.",
    "Messages go to your own receivers instead.",
)
def test_messages_of_somebody_elses_run_go_to_ones_own_receivers(scene: Scene) -> None:
    os.chown(scene.file, STRANGER, STRANGER)
    (scene.home / ".config/ftsupervise").mkdir(parents=True)
    (scene.home / ".config/ftsupervise/config.yaml").write_text(
        f"alerts: {{receivers: [file: {{path: {scene.home}/told}}]}}\n"
    )
    scene.type("watch", str(scene.run))
    assert "shared" in (scene.home / "told").read_text()
    assert scene.done() == []


@pytest.mark.threat(
    "You launch a YAML file that somebody else may write.",
    "`launch` refuses it without `--trust`. `--dry-run` shows it.",
)
def test_launching_what_somebody_else_may_write_is_refused_and_can_be_shown(scene: Scene) -> None:
    mine = scene.top / "ftsupervise.yaml"
    mine.write_text(SETTINGS.format(marks=scene.marks))
    os.chown(mine, STRANGER, STRANGER)
    refused = scene.type("launch", str(mine))
    assert refused.returncode == 77, refused.stderr
    assert "belongs to nobody" in refused.stderr and "--trust" in refused.stderr
    shown = scene.type("launch", "--dry-run", str(mine))
    assert shown.returncode == 0 and f"touch {scene.marks}/command" in shown.stdout
    assert scene.done() == []


@pytest.mark.threat(
    "Others may write the account's own `config.yaml`.",
    "ftsupervise refuses it and prints the chmod to type.",
)
def test_the_accounts_own_settings_that_others_may_write_are_refused(scene: Scene) -> None:
    own = scene.home / ".config/ftsupervise/config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"alerts: {{receivers: [command: {{argv: [touch, {scene.marks}/own]}}]}}\n")
    own.chmod(0o666)
    seen = scene.type("notify", "test", str(scene.run / "run.yaml"))
    assert "own" not in scene.done() or "everybody may write" in seen.stderr
    scene.file.rename(
        scene.top / "ftsupervise.yaml"
    )  # a file that is not as launched: the account's own lies beneath it
    seen = scene.type("watch", str(scene.top / "ftsupervise.yaml"))
    assert f"everybody may write {own}" in seen.stderr and f"chmod go-w {own}" in seen.stderr
    assert "own" not in scene.done()


@pytest.mark.threat(
    "You type `cron install` where the `ftsupervise.yaml` belongs to another account or may be written by others.",
    "`cron install` refuses it, because its receivers and trusted accounts would act as you at every slot. "
    "`--dry-run` shows it.",
)
@pytest.mark.parametrize("owner", [STRANGER, 0])
def test_cron_install_takes_no_receiver_from_settings_that_others_may_write(scene: Scene, owner: int) -> None:
    """It reads the ftsupervise.yaml of the current directory without being told to, and a tick runs its receivers."""
    shared = scene.top / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    file = shared / "ftsupervise.yaml"
    file.write_text(SETTINGS.format(marks=scene.marks) + "cron: {trusted: [nobody], trusted_group: users}\n")
    os.chown(file, owner, GROUP)
    file.chmod(0o644 if owner else 0o664)

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(scene.home), "FTSUPERVISE_STATE_DIR": str(scene.home / "state")}
        argv = [TYPED, "cron", "install", "--backend", "loop", *words]
        return subprocess.run(argv, env=env, cwd=shared, capture_output=True, text=True, timeout=120)

    for words in ([], [str(file)]):
        seen = typed(*words)
        assert seen.returncode == 77, seen.stdout
        assert "nobody" in seen.stderr or "the group users may write" in seen.stderr
        assert not (scene.home / ".config").exists()
    assert "cron install would refuse it" in typed("--dry-run").stderr
    file.unlink()
    assert typed().returncode == 0, "with none there one's own settings count"


@pytest.mark.threat(
    "You watch a run whose settings name a file of yours as the log, with an expression that extracts a part of it.",
    "ftsupervise shows such a log and expression and does not use them. It reads only the run's own output.",
)
@pytest.mark.threat(
    "You watch a run whose settings hold an expression that takes for ever, so that the watch of all your runs stops.",
    "ftsupervise does not use expressions of somebody else's settings.",
)
@pytest.mark.parametrize("watchdog", ["loss", "hang"])
def test_somebody_elses_settings_name_no_file_of_ours_to_read_and_no_expression_to_search_by(
    scene: Scene, watchdog: str
) -> None:
    """What a watchdog finds stands in the journal of the run, which its owner reads; and an expression may take for ever."""
    private = scene.home / "private"
    private.write_text("PIN=48151623\n")
    private.chmod(0o600)
    (scene.run / "logs" / "shared-1.out").write_text("a" * 200 + "\n")
    head = f"name: shared\nscheduler: local\nrun_dir: {scene.run}\nlaunch: {{command: 'true'}}\n"
    for section in (f'{{log: {private}, pattern: "PIN=(\\\\d+)"}}', '{pattern: "(?:a|aa)+(\\\\d)"}'):
        scene.file.write_text(f"{head}watch: {{{watchdog}: {section}}}\n")
        os.chown(scene.file, STRANGER, STRANGER)
        seen = scene.type("watch", str(scene.run))
        assert f"watch.{watchdog}.pattern: " in seen.stderr
        assert "shared" in seen.stdout, "and the run is watched all the same"
    written = b"".join(path.read_bytes() for path in (scene.run / "watch").rglob("*.json"))
    assert written, "there is a journal"
    assert b"48151623" not in written


@pytest.mark.threat(
    "A FIFO that somebody reads, or a file of theirs, lies where a `file` receiver writes.",
    "ftsupervise writes nothing there. The message waits and is reported as not delivered.",
)
@pytest.mark.parametrize("laid", ["FIFO", "file"])
def test_no_message_is_taken_for_delivered_into_what_somebody_else_laid_in_the_file_s_place(
    scene: Scene, laid: str
) -> None:
    shared = scene.top / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    place = shared / "messages.txt"
    head = f"name: shared\nscheduler: local\nrun_dir: {scene.run}\nlaunch: {{command: 'true'}}\n"
    scene.file.write_text(f"{head}alerts: {{receivers: [{{file: {{path: {place}}}}}]}}\n")
    if laid == "FIFO":
        os.mkfifo(place)
    else:
        place.touch()
    place.chmod(0o666)
    os.chown(place, STRANGER, STRANGER)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        seen = scene.type("notify", "test", str(scene.run))
        assert seen.returncode != 0, seen.stdout
        assert str(place) in seen.stdout + seen.stderr
        assert os.read(reader, 1000) == b""
    finally:
        os.close(reader)
    place.unlink()
    assert scene.type("notify", "test", str(scene.run)).returncode == 0
    assert place.read_text().startswith("==== ")


def test_somebody_elses_settings_do_not_stand_for_a_run_of_ours(scene: Scene) -> None:
    """Their limits would resolve its alerts, in its own journal."""
    theirs = scene.top / "theirs"
    for folder in ("switches", "watch/journal"):
        (theirs / folder).mkdir(parents=True)
    (theirs / "run.yaml").write_text(scene.file.read_text())
    os.chown(theirs, STRANGER, STRANGER)
    os.chown(theirs / "run.yaml", STRANGER, STRANGER)
    seen = scene.type("watch", str(theirs))
    assert "the run directory it names is yours" in seen.stdout + seen.stderr
    assert list((scene.run / "watch" / "journal").iterdir()) == []
    assert scene.done() == []
    os.chown(
        scene.file, STRANGER, STRANGER
    )  # but a run of ours that they have launched, because we share it, is watched
    assert "is yours" not in scene.type("watch", str(scene.run)).stderr


@pytest.mark.threat(
    "You watch a run whose settings name your folders as disk, checkpoints or output.",
    "ftsupervise shows a path that leads to a file of yours and does not use it.",
)
@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("launch.output", "launch: {{command: 'true', output: {private}/log-%j}}\nwatch: {{loss: {{}}}}"),
        ("checkpoints.path", "checkpoints: {{path: {private}/none}}"),
        ("watch.disk[1].path", "watch: {{disk: [{{path: /tmp/none-of-ours}}, {{path: {private}}}]}}"),
    ],
)
def test_somebody_elses_settings_name_no_path_of_ours_to_look_at(scene: Scene, key: str, section: str) -> None:
    """Its sizes and numbers would stand in the journal of the run."""
    private = scene.home / "private"
    private.mkdir(mode=0o700)
    (private / "log-7").write_text("loss: 48151623\nstep 48151623\n")
    text = section.format(private=private)
    command = "" if "launch:" in text else "launch: {command: 'true'}\n"
    scene.file.write_text(f"name: shared\nscheduler: local\nrun_dir: {scene.run}\n{command}{text}\n")
    os.chown(scene.file, STRANGER, STRANGER)
    seen = scene.type("watch", str(scene.run), "--no-send")
    assert f"{key}: {private}" in seen.stderr
    assert "which is yours" in seen.stderr
    assert "48151623" not in seen.stdout + seen.stderr
    assert str(private) not in seen.stdout


@pytest.mark.threat(
    "You watch a run whose directory holds links to folders of yours, so that your private runs would be reported as "
    "theirs.",
    "ftsupervise refuses the links.",
)
def test_a_link_in_somebody_elses_run_to_a_folder_of_ours_is_refused(scene: Scene) -> None:
    """The pages of a run of ours would be told as those of theirs."""
    (scene.run / "attempts").rmdir()
    private = scene.home / "attempts"
    (private / "0001").mkdir(parents=True)
    (private / "0001" / "start.json").write_text('{"host": "secret-host"}')
    (scene.run / "attempts").symlink_to(private)
    for path in (scene.run, scene.file):
        os.chown(path, STRANGER, STRANGER)
    seen = scene.type("watch", str(scene.run), "--no-send")
    assert f"{scene.run}/attempts is a link to a folder of yours" in seen.stdout + seen.stderr
    assert "secret-host" not in seen.stdout + seen.stderr


@pytest.mark.threat(
    "Settings of somebody else name a variable, so that a token of the account that looks would stand in a name or a "
    "path.",
    "ftsupervise fills in no variable there.",
)
@pytest.mark.parametrize("words", [["watch"], ["check", "all"], ["status"], ["nodes"], ["save"]])
def test_somebody_elses_settings_do_not_read_the_environment_of_who_looks(scene: Scene, words: list[str]) -> None:
    """The run's name stands in its journal, which its owner reads, and a path is seen by whoever serves it."""
    for key in ("name: a${CANARY}", "name: shared\nlaunch: {command: x, account: 'x-${CANARY}'}"):
        more = "" if "launch" in key else "launch: {command: 'true'}\n"
        scene.file.write_text(f"{key}\nscheduler: local\nrun_dir: {scene.run}\n{more}")
        os.chown(scene.file, STRANGER, STRANGER)
        seen = scene.type(*words, str(scene.file), CANARY="c4n4ry")
        assert "c4n4ry" not in seen.stdout + seen.stderr
        written = b"".join(path.read_bytes() for path in scene.run.rglob("*.json"))
        assert b"c4n4ry" not in written
    if words == ["watch"]:
        assert "${CANARY} is not filled in: others may write this file" in seen.stderr
        trusted = scene.type("watch", str(scene.file), "--trust", CANARY="c4n4ry")
        assert "is not filled in" not in trusted.stderr


@pytest.mark.threat(
    "You type `logs` for the run of somebody else, whose pages name a private file of yours as its output.",
    "It is not shown.",
)
def test_a_run_of_somebody_else_names_no_private_file_of_ours_as_its_output(scene: Scene) -> None:
    secret = scene.home / "notes"
    secret.write_text("what nobody else reads\n")
    secret.chmod(0o600)
    attempt = scene.run / "attempts" / "0001"
    attempt.mkdir()
    page = {
        "number": 1,
        "job_id": "7",
        "started": "2026-01-01T00:00:00+00:00",
        "outputs": [{"path": str(secret), "begin": 0}],
    }
    (attempt / "start.json").write_text(json.dumps(page))
    assert "nobody else" in scene.type("logs", str(scene.run)).stdout, "the page is one that is read"
    for path in (scene.run, *scene.run.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    done = scene.type("logs", str(scene.run))
    assert "nobody else" not in done.stdout
    assert "yours alone" in done.stderr, done.stdout + done.stderr


@pytest.mark.threat(
    "A run of somebody else that you watch beside yours has settings with thousands of unknown keys: to explain them took 14 s "
    "of each tick, and yours was watched once in many.",
    "The first ones are explained, and the others counted.",
)
def test_settings_of_thousands_of_mistakes_are_read_in_a_second() -> None:
    text = "name: theirs\nlaunch:\n  command: x\n" + "".join(f"  nodess{number}: 1\n" for number in range(12_000))
    began = time.process_time()
    with pytest.raises(ConfigError, match="and 11980 more"):
        loads(text)
    assert time.process_time() - began < 3.0
