"""Files that a person or their settings name lie where others may write: no link there leads to another file of that person.

Real accounts: ``ada`` works in a project folder that is her group's, and ``eve`` is in that group. Ada's home is hers alone.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.neighbours.leftovers import end_all_under
from tests.neighbours.patience import wait_until
from tests.neighbours.stranger import ADA, EVE, GROUP, Typed, as_one, type_as

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

KEY = "-----BEGIN PRIVATE KEY-----"
SETTINGS = "name: thesis\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\nwatch: {disk: null, memory: null}\n"
SCRIPT = "#!/bin/bash\n#SBATCH -N1\nexport PROJECT=the-takeover\nsrun python train.py\n"


class Desk:
    def __init__(self, top: Path, python: str) -> None:
        self.top, self.python = top, python
        self.home, self.project = top / "home", top / "project"
        for folder, mode in ((self.home, 0o700), (self.project, 0o2775)):
            folder.mkdir()
            self.give(folder, mode)

    def give(self, path: Path, mode: int) -> Path:
        """Make it ada's, with that mode."""
        os.chown(path, pwd.getpwnam(ADA).pw_uid, GROUP)
        path.chmod(mode)
        return path

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        path.write_text(text)
        return self.give(path, mode)

    def type(self, *words: str, folder: Path | None = None, umask: int = 0o022) -> Typed:
        return type_as(ADA, [self.python, "-I", "-m", "ftsupervise", *words], self.home, folder or self.project, umask)

    def type_and_agree(self, *words: str, before: Callable[[], object]) -> Typed:
        """Type it at a terminal; when it asks, do ``before`` and say yes."""
        here, there = os.openpty()
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "FTSUPERVISE_STATE_DIR": str(self.home / "state")}
        one = subprocess.Popen(
            [self.python, "-I", "-m", "ftsupervise", *words],
            cwd=self.project, env=env, user=ADA, group=GROUP, extra_groups=[], stdin=there, stdout=there, stderr=there,
        )  # fmt: skip
        os.close(there)
        said, asked = b"", False
        try:
            while select.select([here], [], [], 120)[0]:
                try:
                    part = os.read(here, 4096)
                except OSError:  # nobody has the terminal open any more
                    break
                said += part
                if not asked and b"[y/N]" in said:
                    asked = True
                    before()
                    os.write(here, b"y\n")
            assert asked, said
            return Typed(one.wait(60), " ".join(said.decode().split()))
        finally:
            one.kill()
            one.wait(60)
            os.close(here)

    def launch(self) -> Path:
        """Launch the run here, which is over at once; return its directory."""
        done = self.type("launch")
        assert done.code == 0, done.said
        run = self.project / "runs" / "thesis"
        wait_until((run / "attempts" / "0001" / "end.json").exists, "the end of its job")
        return run

    def eve(self, act: Callable[[], object]) -> None:
        as_one(EVE, act)

    def link(self, path: Path, target: Path) -> None:
        """Eve moves what is there out of the way, and lays a link there."""

        def lay() -> None:
            if path.exists():
                path.rename(f"{path}.away")
            path.symlink_to(target)

        self.eve(lay)

    def settings(self, more: str = "", text: str = SETTINGS) -> Path:
        return self.write(self.project / "ftsupervise.yaml", f"{text}{more}\n")

    def folder(self, path: Path, mode: int) -> Path:
        path.mkdir()
        return self.give(path, mode)


@pytest.fixture
def desk(top: Path, python: str) -> Iterator[Desk]:
    yield Desk(top, python)
    wait_until(lambda: end_all_under(top) == 0, "the end of what the test has started")


@pytest.mark.threat(
    "The templates of your messages lie in a folder that a group may write. A member lays a link to a private file of yours "
    "there, by the name of one, so that its contents go out as a message.",
    "A link of another account to what is not theirs is not followed: the built-in template is used, and the message says so.",
)
def test_no_message_is_made_of_a_private_file_that_a_link_in_the_place_of_a_template_leads_to(desk: Desk) -> None:
    said, folder = desk.home / "said", desk.folder(desk.project / "templates", 0o2775)
    desk.settings(f"alerts: {{templates: templates, receivers: [{{file: {{path: {said}}}}}]}}")
    desk.write(folder / "alert.text.j2", "what ada has written\n")
    assert desk.type("notify", "test").code == 0
    assert "what ada has written" in said.read_text(), "her own template is used"
    desk.link(folder / "alert.text.j2", desk.write(desk.home / "key", f"{KEY}\n", 0o600))
    desk.type("notify", "test")
    assert KEY not in said.read_text()
    assert f"{folder}/alert.text.j2 is a link of {EVE} to what belongs to {ADA}" in said.read_text()


@pytest.mark.threat(
    "The file of a secret, or of the certificates by which a mail server is known, lies where others may write. A member of "
    "the group puts a link to another secret of yours in its place, or certificates of theirs.",
    "Neither is used, and nothing is sent. The message names the account.",
)
@pytest.mark.parametrize(("receiver", "name", "is_link"), [
    ("slack: {webhook_file: hook}", "hook", True),
    ("email: {host: 127.0.0.1, port: 9, from: a@b.cd, to: [a@b.cd], security: starttls, ca_file: ca.pem}", "ca.pem", True),
    ("email: {host: 127.0.0.1, port: 9, from: a@b.cd, to: [a@b.cd], security: starttls, ca_file: ca.pem}", "ca.pem", False),
])  # fmt: skip
def test_nothing_is_sent_by_a_secret_or_certificates_that_another_account_has_put_there(
    desk: Desk, receiver: str, name: str, is_link: bool
) -> None:
    desk.settings(f"alerts: {{receivers: [{{{receiver}}}]}}")
    other = desk.write(desk.home / "other", "http://127.0.0.1:9/another-secret\n", 0o600)
    file = desk.project / name
    if is_link:
        desk.link(file, other)
    else:
        desk.eve(lambda: file.write_text("certificates"))
    done = desk.type("notify", "test")
    whose = f"is a link of {EVE} to what belongs to {ADA}" if is_link else f"belongs to {EVE}"
    assert done.code != 0 and f"{file} {whose}" in done.said, done.said


@pytest.mark.threat(
    "A member who may write your project folder puts a link to another ftsupervise.yaml of yours in the place of the one that "
    "lies there: its relative paths then begin in that folder, and so does its command.",
    "A link of another account to what is not theirs is not followed. Nothing is launched, installed, watched or shown.",
)
@pytest.mark.parametrize(
    "words", [["launch"], ["launch", "--dry-run"], ["cron", "install"], ["watch"], ["config", "show"], ["doctor"]]
)
def test_a_link_to_other_settings_of_ones_own_is_not_followed(desk: Desk, words: list[str]) -> None:
    other = desk.write(desk.home / "other.yaml", SETTINGS.replace("'true'", "./train.sh"), 0o600)
    desk.link(desk.project / "ftsupervise.yaml", other)
    done = desk.type(*words)
    assert done.code != 0 and f"ftsupervise.yaml is a link of {EVE} to what belongs to {ADA}" in done.said, done.said
    assert sorted(one.name for one in desk.project.iterdir()) == ["ftsupervise.yaml"]


@pytest.mark.threat(
    "Such a link lies in the place of `launch.template`, and leads to a private script of yours, which would become the job's "
    "and be kept in the run directory.",
    "It is not followed, and nothing is submitted.",
)
def test_no_private_script_becomes_the_script_of_a_job(desk: Desk) -> None:
    desk.settings(text=SETTINGS.replace("jobs: 1", "jobs: 1, template: job.j2"))
    desk.link(desk.project / "job.j2", desk.write(desk.home / "private.sh", SCRIPT, 0o700))
    done = desk.type("launch")
    assert done.code != 0 and f"job.j2 is a link of {EVE} to what belongs to {ADA}" in done.said, done.said
    assert not [one for one in desk.project.rglob("*.sbatch") if "takeover" in one.read_text()]


@pytest.mark.threat(
    "You type `init job.sbatch` for a script of a colleague, which is a link to a private script of yours.",
    "It is not read.",
)
def test_init_reads_no_private_script_that_a_strangers_link_leads_to(desk: Desk) -> None:
    desk.link(desk.project / "job.sbatch", desk.write(desk.home / "private.sh", SCRIPT, 0o700))
    done = desk.type("init", "job.sbatch")
    assert done.code != 0 and f"job.sbatch is a link of {EVE} to what belongs to {ADA}" in done.said, done.said
    assert sorted(one.name for one in desk.project.iterdir()) == ["job.sbatch"]


@pytest.mark.threat(
    "`init` is typed for a job script that only you may read, and writes its commands into an ftsupervise.yaml beside others.",
    "The file may be read by those alone who may read the script; of a job in the queue, and where folders above keep others "
    "out, that is you.",
)
@pytest.mark.parametrize(("mode", "folder", "wanted"), [
    (0o700, "project", 0o600), (0o755, "home", 0o600), (0o755, "project", 0o644), (0o750, "project", 0o640),
])  # fmt: skip
def test_settings_that_init_writes_are_no_wider_than_the_script(
    desk: Desk, mode: int, folder: str, wanted: int
) -> None:
    script = desk.write(desk.top / folder / "job.sbatch", SCRIPT, mode)
    done = desk.type("init", str(script))
    assert done.code == 0 and "the-takeover" in (made := desk.project / "ftsupervise.yaml").read_text(), done.said
    assert made.stat().st_mode & 0o777 == wanted
    with script.open() as given:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(desk.home)}
        argv = [desk.python, "-I", "-m", "ftsupervise", "init", "--force", "-"]
        subprocess.run(argv, stdin=given, cwd=desk.project, env=env, user=ADA, group=GROUP, extra_groups=[], check=True,
                       capture_output=True, timeout=120)  # fmt: skip
    assert made.stat().st_mode & 0o777 & ~mode == 0, "and so it is where the script is standard input"


@pytest.mark.threat(
    "`report` writes what stands in the private directory of a run into a file where everybody may read.",
    "It may be read by those alone who may read the run directory, on the whole way; a report of several runs by those who may "
    "read all of them.",
)
def test_a_report_is_no_wider_than_the_run_directory(desk: Desk) -> None:
    for folder in (desk.home, desk.project):
        settings = desk.write(folder / "ftsupervise.yaml", SETTINGS.replace("thesis", folder.name))
        assert desk.type("launch", str(settings)).code == 0
        wait_until((folder / "runs" / folder.name / "attempts" / "0001" / "end.json").exists, "the end of its job")
    out = desk.folder(desk.top / "out", 0o1777)
    for name, mode in (("home", 0o600), ("project", 0o644)):
        assert desk.type("report", name, folder=out).code == 0
        assert (out / f"report-{name}.html").stat().st_mode & 0o777 == mode
    assert desk.type("report", "--week", "-o", "week.html", folder=out).code == 0
    assert (out / "week.html").stat().st_mode & 0o777 == 0o600


PLAN = ("plan", "thesis", "--mtbf", "1d", "--interval", "1h", "--step", "1s", "--save", "1m")


@pytest.mark.threat(
    "`plan --apply` has asked whether to write your ftsupervise.yaml. While you read, a member who may write its folder puts a "
    "link to a private file of yours in its place.",
    "The file that was read is found again by itself, and its folder is held open while it is replaced. Nothing is written "
    "through the link, or into another file.",
)
@pytest.mark.parametrize("what", ["link", "file"])
def test_what_was_read_is_written_and_nothing_that_was_put_in_its_place(desk: Desk, what: str) -> None:
    settings, precious = desk.settings(), desk.write(desk.home / "precious", KEY, 0o600)
    desk.launch()

    def exchange() -> None:
        settings.rename(f"{settings}.away")
        settings.symlink_to(precious) if what == "link" else settings.write_text("name: eve\n")

    done = desk.type_and_agree(*PLAN, "--apply", before=lambda: desk.eve(exchange))
    why = f"is a link of {EVE}" if what == "link" else "has changed since it was read"
    assert done.code != 0 and why in done.said, done.said
    assert precious.read_text() == KEY and Path(f"{settings}.away").read_text() == f"{SETTINGS}\n"
    assert what == "link" or settings.read_text() == "name: eve\n"


@pytest.mark.threat(
    "You plan the run of somebody else, whose pages name your own ftsupervise.yaml as the one that it was launched from.",
    "`plan --apply` takes the name of a settings file from a launch of this account alone.",
)
def test_no_run_of_a_stranger_changes_ones_own_settings(desk: Desk) -> None:
    settings = desk.settings()
    run, copy = desk.launch(), desk.top / "copy"
    assert json.loads((run / "launches" / "0001" / "launch.json").read_text())["config"] == str(settings)
    shown = desk.folder(desk.top / "eve", 0o2775)
    copy = shown / "thesis"
    desk.eve(lambda: subprocess.run(["cp", "-r", str(run), str(copy)], check=True, timeout=60))
    done = desk.type("plan", str(copy), *PLAN[2:], "--apply", "--yes")
    assert done.code == 77 and f"launch.json belongs to {EVE}, so the ftsupervise.yaml" in done.said, done.said
    assert settings.read_text() == f"{SETTINGS}\n"
    assert desk.type(*PLAN, "--apply", "--yes").code == 0 and "ftsupervise plan" in settings.read_text(), (
        "as her own does"
    )


@pytest.mark.threat(
    "The folder into which you have a report, a picture or settings written lies where others may write, and a member has put "
    "a link to a private folder of yours in its place, where files of these names would be written over.",
    "A file that a person has named is written where no link of another account leads, in a folder that is held open.",
)
def test_nothing_that_was_named_is_written_through_a_strangers_link(desk: Desk) -> None:
    desk.settings()
    desk.launch()
    private, script = desk.folder(desk.home / "www", 0o700), "import torch\nloss.backward()\n"
    for name in ("index.html", "report-thesis.html", "train.py"):
        desk.write(private / name, script, 0o600)
    desk.link(desk.project / "pages", private)
    for words in (
        ["report", "--week", "-o", "pages/", "thesis"],
        ["report", "-o", "pages/new/", "thesis"],
        ["report", "-o", "pages/index.html", "thesis"],
        ["report", "--follow", "-o", "pages", "thesis"],
        ["simulate", "--nodes", "2", "--runs", "1", "--days", "1", "--svg", "pages/index.html"],
        ["simulate", "--nodes", "2", "--runs", "1", "--days", "1", "--trace", "pages/index.html"],
        ["init", "--force", "-o", "pages/index.html", "hostname"],
        ["init", "--patch", "pages/train.py"],
    ):
        done = desk.type(*words)
        assert done.code != 0 and f"is a link of {EVE} to what belongs to {ADA}" in done.said, (words, done.said)
    assert {one.name: one.read_text() for one in private.iterdir()} == dict.fromkeys(
        ("index.html", "report-thesis.html", "train.py"), script
    )


@pytest.mark.threat(
    "You type `kill NAME`, or another command with the name of your run, in a folder where a member has put a directory of "
    "theirs by that name: theirs would be stopped, and yours would train on.",
    "The command refuses, and says which two the name may mean. A path (`./NAME`) means what lies there.",
)
def test_the_name_of_ones_run_means_nothing_that_a_stranger_has_put_here(desk: Desk) -> None:
    desk.settings()
    run = desk.launch()
    here = desk.project / "thesis"

    def put_a_run() -> None:
        (here / "switches").mkdir(parents=True)
        (here / "switches").chmod(0o2777)

    def put_settings() -> None:
        (here / "switches").rmdir()
        here.rmdir()
        here.write_text("name: thesis\nlaunch: {command: x}\n")

    for put in (put_a_run, put_settings):
        desk.eve(put)
        for words in (["kill"], ["save"], ["status"], ["checkpoints", "list"], ["diagnose"], ["config", "show"]):
            done = desk.type(*words, "thesis")
            why = f"thesis is your run in {run}, and what has that name here belongs to {EVE}"
            assert done.code == 77 and why in done.said, (words, done.said)
        assert here.is_file() or not any((here / "switches").iterdir())
    assert desk.type("status", str(run)).code == 0, "a path means what lies there"
    assert desk.type("status", "thesis", folder=desk.home).code == 0, "and elsewhere the name is the run"


@pytest.mark.threat(
    "Only you may read your ftsupervise.yaml (0600), or the template of your job script, and `launch` keeps both in a run "
    "directory that others may read.",
    "`run.yaml` and the script may be read by those alone who may read the file, and a report of the run too. Where launching "
    "or watching is shared, the group may read them.",
)
@pytest.mark.parametrize(("mode", "share", "wanted"), [
    (0o600, "", 0o600), (0o644, "", 0o644), (0o600, "share: {watch: true}", 0o640),
])  # fmt: skip
def test_settings_as_they_were_launched_are_no_wider_than_their_file(
    desk: Desk, mode: int, share: str, wanted: int
) -> None:
    desk.settings(share).chmod(mode)
    run = desk.launch()
    script = run / "launches" / "0001" / "train.sbatch"
    assert (run / "run.yaml").stat().st_mode & 0o777 == wanted
    assert script.stat().st_mode & 0o777 == 0o700 | wanted & 0o044 | (wanted & 0o044) >> 2
    assert desk.type("report", "thesis").code == 0
    assert (desk.project / "report-thesis.html").stat().st_mode & 0o777 == wanted


def test_a_script_is_no_wider_than_its_template(desk: Desk) -> None:
    desk.settings(text=SETTINGS.replace("jobs: 1", "jobs: 1, template: job.j2"))
    desk.write(desk.project / "job.j2", "#!/bin/sh\ntrue\n", 0o600)
    done = desk.type("launch")
    made = list(desk.project.rglob("*.sbatch"))
    assert made and {one.stat().st_mode & 0o777 for one in made} == {0o700}, done.said


@pytest.mark.threat(
    "You diagnose a folder, or a run of somebody else, that leads to private files of yours: links among its logs and in the "
    "place of its evidence, or pages that name a log of yours as the output.",
    "No link of another account is followed, and what is yours alone is not read for a run of others. Both are named.",
)
def test_a_diagnosis_reads_nothing_of_ones_own_for_a_stranger(desk: Desk) -> None:
    private = desk.write(desk.home / "diary.log", "RuntimeError: CUDA out of memory. THE DIARY\n")  # in a home of 0700
    desk.settings(text=SETTINGS.replace("'true'", "'echo RuntimeError: CUDA out of memory; exit 3'"))
    run, shown = desk.launch(), desk.folder(desk.top / "eve", 0o2775)

    def put() -> None:
        (shown / "logs").mkdir()
        (shown / "logs" / "rank-1.log").symlink_to(private)
        (shown / "logs" / "rank-0.log").write_text("ValueError: what eve has written\n")
        subprocess.run(["cp", "-r", str(run), str(shown / "theirs")], check=True, timeout=60)
        for page in (shown / "theirs" / "attempts").glob("*/start.json"):
            page.write_text(page.read_text().replace(str(run / "logs" / "thesis-local-1.out"), str(private)))

    desk.eve(put)
    assert "THE DIARY" in desk.type("diagnose", str(desk.home), folder=desk.home).said, "a folder of her own is read"
    done = desk.type("diagnose", str(shown / "logs"))
    assert "THE DIARY" not in done.said and f"rank-1.log is a link of {EVE}" in done.said, done.said
    done = desk.type("diagnose", str(shown / "theirs"))
    assert "THE DIARY" not in done.said and f"{private} is yours alone" in done.said, done.said
    done = desk.type("logs", str(shown / "theirs"))
    assert done.code != 0 and "THE DIARY" not in done.said and f"{private} is yours alone" in done.said, done.said


@pytest.mark.threat(
    "A stranger gives a link, a checkpoint or a run directory a name that your shell would take for commands (`x;curl …`), and "
    "a message tells you to type something about it.",
    "Each path in a command to type is quoted; a test walks the source for one that is not.",
)
def test_what_a_message_tells_to_type_is_no_command_of_a_stranger(desk: Desk) -> None:
    trap, theirs = desk.project / "x;touch stolen;", desk.project / "y;touch stolen;"
    desk.link(trap, desk.folder(desk.home / "www", 0o700))
    done = desk.type("simulate", "--nodes", "2", "--runs", "1", "--days", "1", "--svg", f"{trap}/picture.svg")
    assert done.code != 0 and f"ls -ld '{trap}'" in done.said, done.said
    desk.eve(lambda: (theirs / "switches").mkdir(parents=True))
    for words in (["check"], ["status"], ["watch", "--no-send"]):
        done = desk.type(*words, str(theirs))
        typed = [line for line in done.said.splitlines() if re.search(r"\b(?:ls -|ftsupervise \w+ [-/'])", line)]
        assert all(f"'{theirs}" in line for line in typed if str(theirs) in line), (words, done.said)


@pytest.mark.threat(
    "You type `diagnose` for a run that goes on. In its place lies a copy of your own that everybody may write, and its newest "
    "attempt is a link into a private folder of yours, where the question to the supervisor would be written and removed.",
    "The folder of the attempt is held open, and a link of another account to what is not theirs is not followed.",
)
def test_no_question_is_left_through_a_strangers_link(desk: Desk) -> None:
    desk.settings()
    run, backup, private = desk.launch(), desk.project / "backup", desk.folder(desk.home / "private", 0o700)
    (run / "attempts" / "0001" / "end.json").unlink()  # it goes on
    copied = ["cp", "-r", str(run), str(backup)]
    subprocess.run(copied, check=True, timeout=60, user=ADA, group=GROUP, extra_groups=[])
    for folder in (backup, backup / "attempts"):
        folder.chmod(0o777)
    begun = json.loads((run / "attempts" / "0001" / "start.json").read_text())
    desk.write(private / "start.json", json.dumps({**begun, "host": "node7", "job_id": "87"}))
    before = private.stat().st_mtime_ns

    def exchange() -> None:
        run.parent.rename(desk.project / "away")
        run.parent.mkdir()
        backup.rename(run)
        (run / "attempts" / "0001").rename(run / "attempts" / "away")
        (run / "attempts" / "0001").symlink_to(private)

    desk.eve(exchange)
    done = desk.type("diagnose", "thesis")
    assert done.code != 0 and f"attempts/0001 is a link of {EVE} to what belongs to {ADA}" in done.said, done.said
    assert private.stat().st_mtime_ns == before, "nothing was made and removed there"


@pytest.mark.threat(
    "You have a report of a run of somebody else, or watch it, and one of its attempts is a link into a private folder of "
    "yours, where the verdict about the attempt would be kept.",
    "The folder of the attempt is held open, and a link of another account to what is not theirs is not followed.",
)
def test_no_verdict_is_kept_through_a_strangers_link(desk: Desk) -> None:
    desk.settings(text=SETTINGS.replace("'true'", "'echo RuntimeError: CUDA out of memory; exit 3'"))
    run, private, shown = (
        desk.launch(),
        desk.folder(desk.home / "private", 0o700),
        desk.folder(desk.top / "eve", 0o2775),
    )
    for page in ("start.json", "end.json"):
        desk.write(private / page, (run / "attempts" / "0001" / page).read_text())

    def put() -> None:
        (shown / "theirs" / "attempts").mkdir(parents=True)
        (shown / "theirs" / "switches").mkdir()
        (shown / "theirs" / "attempts" / "0001").symlink_to(private)

    desk.eve(put)
    for words in (["report", str(shown / "theirs")], ["watch", "--no-send", str(shown / "theirs")]):
        desk.type(*words, folder=desk.home)
    assert sorted(os.listdir(private)) == ["end.json", "start.json"]
