"""Whose programs cron runs: a real second account drops, overwrites and replaces what it can reach. Needs root to be both."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.config.alerting import Alerts
from ftsupervise.config.schema import Cron
from ftsupervise.crontab import keepalive
from ftsupervise.crontab.entries import find
from ftsupervise.crontab.install import decide, install
from ftsupervise.errors import NotPermitted
from ftsupervise.host import processes
from ftsupervise.truth import Health
from tests.story.cron_folder import NINE, FakeQueue, Folder, make

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")]

STRANGER = "nobody"
MEMBERS = "games"  # a group that this account shares something with


@pytest.fixture
def folder(top: Path) -> Folder:
    return make(top)


def as_stranger(script: str, *words: object, group: str = "nogroup") -> subprocess.CompletedProcess[str]:
    argv = ["/bin/sh", "-c", script, "sh", *map(str, words)]
    return subprocess.run(
        argv, user=STRANGER, group=group, extra_groups=[], capture_output=True, text=True, timeout=60, check=False
    )


def plant(path: Path, witness: Path, *, group: str = "nogroup") -> None:
    """The stranger writes an executable that leaves a witness of who ran it."""
    script = 'printf "#!/bin/sh\\nid -un >> %s\\n" "$2" > "$1" && chmod 755 "$1"'
    done = as_stranger(script, path, witness, group=group)
    assert done.returncode == 0, done.stderr


def passed(folder: Folder) -> str:
    return "; ".join(f"{one.name}: {one.why}" for one in find(folder.cron, folder.installed).passed if one.wanted)


@pytest.mark.threat(
    "A stranger drops an executable into a cron folder that everybody may write (1777).",
    "Cron runs nothing in such a folder, sticky or not, and the alert says so.",
)
def test_what_a_stranger_drops_into_a_sticky_folder_does_not_run_and_is_told(folder: Folder, top: Path) -> None:
    folder.cron.folder("hourly").chmod(0o1777)
    plant(folder.cron.folder("hourly") / "theirs", top / "witness")
    folder.drop("hourly", "mine", f"echo mine >> {top}/witness")
    done = folder.tick(NINE)
    assert done.worked.ran == ()
    assert not (top / "witness").exists()
    assert "everybody may write" in passed(folder)
    assert any("cron passes over hourly/" in words for words in done.notified)


@pytest.mark.threat(
    "A stranger writes a line into a crontab file of mode 0666.",
    "Cron checks the owner and mode of the open file, does not trust it, and runs none of its lines.",
)
def test_a_table_that_everybody_may_write_runs_nothing(folder: Folder, top: Path) -> None:
    folder.cron.crontab.chmod(0o666)
    assert as_stranger('echo "@tick id -un >> $2" > "$1"', folder.cron.crontab, top / "witness").returncode == 0
    assert folder.tick(NINE).worked.ran == ()
    assert not (top / "witness").exists()
    assert "crontab: everybody may write" in passed(folder)


@pytest.mark.threat(
    "A member of a group drops an executable into a cron folder that the group may write.",
    "Cron runs it only if the settings name both the group and the owner of the file.",
)
def test_a_group_writes_the_folders_only_where_the_settings_name_it(folder: Folder, top: Path) -> None:
    place = folder.cron.folder("minutely")
    os.chown(place, 0, grp.getgrnam(MEMBERS).gr_gid)
    place.chmod(0o2775)
    plant(place / "theirs", top / "witness", group=MEMBERS)
    assert folder.tick(NINE).worked.ran == ()
    assert f"the group {MEMBERS} may write" in passed(folder)
    folder.change(trusted_group=MEMBERS)
    assert folder.tick(NINE + timedelta(minutes=5)).worked.ran == ()
    assert f"belongs to {STRANGER}" in passed(folder)  # whose the file is counts by itself
    folder.change(trusted_group=MEMBERS, trusted=(STRANGER,))
    assert folder.tick(NINE + timedelta(minutes=10)).worked.ran == ("minutely/theirs",)
    assert (top / "witness").read_text() == f"{pwd.getpwuid(os.getuid()).pw_name}\n"


@pytest.mark.threat(
    "A file of another account lies in a cron folder.",
    "Cron skips it and reports it, unless `cron.trusted` names the account.",
)
@pytest.mark.parametrize("name", ["theirs", "theirs.slurm"])
def test_a_file_of_somebody_else_runs_only_if_the_settings_name_the_account(
    folder: Folder, top: Path, name: str
) -> None:
    path = folder.drop("minutely", name, f"echo ran >> {top}/witness")
    shutil.chown(path, STRANGER)
    assert folder.tick(NINE).worked.ran == ()
    assert f"belongs to {STRANGER}" in passed(folder)
    folder.change(trusted=(STRANGER,))
    assert folder.tick(NINE + timedelta(minutes=5)).worked.ran == (f"minutely/{name}",)


@pytest.mark.threat(
    "A cron entry is a link through a folder that others may change.",
    "Cron checks every folder and link on the way, and skips the entry.",
)
def test_a_link_through_a_folder_that_others_may_change_is_not_followed(folder: Folder, top: Path) -> None:
    """The file is ours; the stranger can put another one in its place between the look and the start."""
    shared = top / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "inner").mkdir()
    (shared / "inner" / "check").write_text(f"#!/bin/sh\necho ran >> {top}/witness\n")
    (shared / "inner" / "check").chmod(0o755)
    (folder.cron.folder("minutely") / "check").symlink_to(shared / "inner" / "check")
    assert folder.tick(NINE).worked.ran == ()
    assert f"everybody may write {shared}" in passed(folder)
    shared.chmod(0o755)
    assert folder.tick(NINE + timedelta(minutes=5)).worked.ran == ("minutely/check",)


@pytest.mark.threat(
    "Others may write a folder above the cron folder, and so can exchange it.",
    "`cron install` refuses the folder, and an installed cron runs nothing in it.",
)
def test_a_cron_folder_whose_parent_others_may_change_is_refused_at_install_and_runs_nothing_later(
    folder: Folder, top: Path
) -> None:
    folder.drop("minutely", "check", f"echo ran >> {top}/witness")
    top.chmod(0o777)
    assert folder.tick(NINE).worked.ran == ()
    assert f"everybody may write {top}" in passed(folder)
    plan = decide(
        Cron(directory=top / "other", backend="loop"),
        Alerts(),
        alerts_from="x",
        now=NINE,
        env=os.environ,
        python=sys.executable,
    )
    with pytest.raises(NotPermitted, match="everybody may write") as refused:
        install(plan, NINE, None)
    assert "chmod go-w" in refused.value.hint
    top.chmod(0o755)


@pytest.mark.threat(
    "A stranger prepares an installed cron whose PATH leads to their own `squeue`.",
    "Every `cron` command names its owner and runs nothing of it.",
)
def test_a_cron_that_a_stranger_wrote_is_shown_and_nothing_of_it_is_run(folder: Folder, top: Path) -> None:
    """Its PATH has a squeue of theirs, its python a program of theirs."""
    theirs = top / "theirs"
    theirs.mkdir()
    for name in ("squeue", "sbatch", "sinfo", "crontab", "python"):
        (theirs / name).write_text(f"#!/bin/sh\necho {name} >> {top}/witness\n")
        (theirs / name).chmod(0o755)
    environment = {**folder.installed.environment, "PATH": f"{theirs}:/usr/bin:/bin"}
    for backend in ("slurm", "crontab"):
        folder.change(environment=environment, backend=backend, python=str(theirs / "python"))
        shutil.chown(folder.cron.installed, STRANGER)
        for words in (["status"], ["list"], ["ensure"], ["remove"], ["tick"], ["run", "x"], ["install"]):
            argv = processes.own_command("cron", *words, "--dir", str(folder.cron.root))
            done = subprocess.run(argv, cwd=top, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode != 0, (words, done.stdout)
            assert "Traceback" not in done.stderr
            assert f"belongs to {STRANGER}" in done.stderr + done.stdout, words
        shutil.chown(folder.cron.installed, "root")
    shutil.chown(folder.cron.installed, STRANGER)
    found = keepalive.see_to(folder.cron.root, FakeQueue(), NINE)
    assert found.health is Health.UNKNOWN
    assert not (top / "witness").exists()


@pytest.mark.threat(
    "Another account tries to read the settings, secrets or outputs of a cron.",
    "`state/` has mode 0700, settings and secrets have 0600, whatever the umask.",
)
def test_nobody_else_reads_settings_outputs_or_secrets(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://ada:hunter2@proxy:3128")
    umask = os.umask(0o002)
    try:
        folder = make(top)
        folder.drop("minutely", "check", "echo $https_proxy")
        folder.tick(NINE)
    finally:
        os.umask(umask)
    assert folder.output("minutely.check") == "http://ada:hunter2@proxy:3128\n"
    files = [path for path in folder.cron.state.rglob("*") if path.is_file()]
    assert {"installed.json", "secrets.env", "output"} <= {path.name for path in files}
    for path in files:
        assert as_stranger('cat "$1"', path).returncode != 0, path
    assert folder.cron.installed.stat().st_mode & 0o777 == 0o600
    assert folder.cron.secrets.stat().st_mode & 0o777 == 0o600


@pytest.mark.threat(
    "Another account waits for the folder of outputs of a new cron, and opens it in the moment before `state/` is closed: it "
    "could read each output there from then on.",
    "What `state/` holds is made when it is closed.",
)
def test_no_folder_of_a_new_cron_can_be_opened_in_any_moment(top: Path) -> None:
    pid = os.fork()
    if pid == 0:  # an audit hook stays for good
        seen: list[str] = []
        try:
            at_work: list[str] = []

            def look(event: str, _: tuple[object, ...]) -> None:
                if event not in ("os.mkdir", "os.chmod", "os.rename") or at_work:
                    return
                at_work.append(event)
                for state in top.rglob("state"):
                    for one in state.iterdir():
                        seen.extend([str(one)] if as_stranger('ls "$1"', one).returncode == 0 else [])
                at_work.clear()

            sys.addaudithook(look)
            assert make(top).cron.log.is_dir()
        finally:
            os._exit(len(seen) if sys.exc_info()[0] is None else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_colleagues_cron_cannot_be_read_and_it_is_said_whose_it_is(folder: Folder) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the interpreter of the tests may lie where others cannot start it
        account = pwd.getpwnam(STRANGER)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
        try:
            os.write(writer, keepalive.see_to(folder.cron.root, FakeQueue(), NINE, thorough=True).words.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert said == f"cannot tell whether cron is alive: the cron in {folder.cron.root} is root's"
