"""Files that a person or their settings name lie where others may write: no link there leads to another file of that person.

Real accounts: ``ada`` works in a project folder that is her group's, and ``eve`` is in that group. Ada's home is hers alone.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.neighbours.leftovers import end_all_under
from tests.neighbours.patience import wait_until

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

ADA, EVE = "daemon", "games"  # every Debian has them
GROUP = pwd.getpwnam(EVE).pw_gid  # of both
KEY = "-----BEGIN PRIVATE KEY-----"
SETTINGS = "name: thesis\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\nwatch: {disk: null, memory: null}\n"
SCRIPT = "#!/bin/bash\n#SBATCH -N1\nexport PROJECT=the-takeover\nsrun python train.py\n"


class Typed(NamedTuple):
    """The end of a command."""

    code: int
    said: str


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
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "FTSUPERVISE_STATE_DIR": str(self.home / "state")}
        done = subprocess.run(
            [self.python, "-I", "-m", "ftsupervise", *words],
            cwd=folder or self.project, env=env, user=ADA, group=GROUP, extra_groups=[], umask=umask,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return Typed(done.returncode, done.stdout + done.stderr)

    def eve(self, act: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(GROUP)
                os.setuid(pwd.getpwnam(EVE).pw_uid)
                act()
                code = 0
            except Exception:  # the end of this process says that it failed
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0, "eve could not do it"

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
