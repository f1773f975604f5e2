"""Groups and access lists that widen what is private: a folder hands its group, or a list, down to all that is made in it.

Real accounts: ``ada`` has a private checkpoint, ``eve`` is in the group to which the other folder belongs, or is on a list.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.checkpoints import previous
from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import open_store
from ftsupervise.checkpoints.written import keep
from ftsupervise.errors import NotPermitted
from ftsupervise.host import ownership
from ftsupervise.nodes import incidents, judging
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import LeftCheckpoint
from tests.neighbours.access_lists import ACCOUNT, GROUP, give_list

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

ADA, EVE = pwd.getpwnam("daemon"), pwd.getpwnam("games")  # every Debian has them
OFFICE, PROJECT = ADA.pw_gid, EVE.pw_gid  # the group that may read the checkpoint, and the one that may not
COMMIT = """
import pathlib, sys
from ftsupervise.checkpoints.commit import commit
one = pathlib.Path(sys.argv[1], "step-5")
(one / "shards").mkdir(parents=True)
(one / "shards" / "weights").write_bytes(b"private" * 1000)
(one / "index").write_bytes(b"private")
commit(one)
"""


def as_one(who: pwd.struct_passwd, act: Callable[[], object]) -> bool:
    """Whether that account can do it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(who.pw_gid)
            os.setuid(who.pw_uid)
            act()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def what_eve_reads(top: Path) -> list[str]:
    """Return the paths that eve can list or read there."""
    found = [top, *top.rglob("*")]

    def read(one: Path) -> None:
        os.listdir(one) if one.is_dir() else one.read_bytes()

    return [str(one.relative_to(top)) for one in found if as_one(EVE, lambda one=one: read(one))]  # type: ignore[misc]


class Desk:
    """Ada's checkpoint, which her office may read and nobody else, and a folder of hers that belongs to the project."""

    def __init__(self, top: Path, python: str) -> None:
        self.top, self.python = top, python
        self.source, self.shared = top / "source", top / "shared"
        for folder, group, mode in ((self.source, OFFICE, 0o755), (self.shared, PROJECT, 0o2755)):
            folder.mkdir()
            os.chown(folder, ADA.pw_uid, group)
            folder.chmod(mode)
        self.as_ada("-c", COMMIT, str(self.source), umask=0o027)
        self.checkpoint = self.source / "step-5"
        assert what_eve_reads(self.checkpoint) == []

    def as_ada(self, *words: str, umask: int = 0o022, refused: str = "") -> None:
        done = subprocess.run(
            [self.python, *words], user=ADA.pw_uid, group=OFFICE, extra_groups=[PROJECT], umask=umask, cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": str(self.top), "FTSUPERVISE_STATE_DIR": str(self.top / "state")},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert "Traceback" not in said and bool(done.returncode) == bool(refused) and refused in said, said

    def type(self, *words: str, refused: str = "") -> None:
        self.as_ada("-m", "ftsupervise", "checkpoints", *words, refused=refused)


@pytest.fixture
def desk(top: Path, python: str) -> Desk:
    return Desk(top, python)


def by_group(desk: Desk) -> None:
    """Nothing more: the folder hands its group down."""


def by_list(desk: Desk) -> None:
    os.chown(desk.shared, ADA.pw_uid, OFFICE)
    give_list(desk.shared, (ACCOUNT, 7, EVE.pw_uid), group=5, others=5, passed_on=True)


def by_a_list_of_the_source(desk: Desk) -> None:
    """The office itself may not read it: one account beside ada may, and the mode shows that as a right of the group."""
    os.chown(desk.shared, ADA.pw_uid, OFFICE)
    for one in (desk.checkpoint, *desk.checkpoint.rglob("*")):
        os.chown(one, -1, PROJECT)
        one.chmod(0o700 if one.is_dir() else 0o600)
        give_list(one, (ACCOUNT, 5, 12345), group=0)
    os.chown(desk.shared, ADA.pw_uid, PROJECT)


@pytest.mark.threat(
    "Your private checkpoint is copied, kept or brought back in a folder that hands its group (set-group-ID) or an "
    "access list down; or its own access list lets one account in, which its mode shows as a right of the group.",
    "What is made has at most the rights of its source for the group that it gets: a right of another group is none "
    "of this one. It gets no access list.",
)
@pytest.mark.parametrize("how", [by_group, by_list, by_a_list_of_the_source])
def test_a_copy_and_what_is_brought_back_are_read_by_no_group_and_no_account_that_may_not_read_the_source(
    desk: Desk, how: Callable[[Desk], None]
) -> None:
    how(desk)
    assert what_eve_reads(desk.checkpoint) == []
    copies, back = desk.shared / "copies", desk.shared / "back"
    for folder in (copies, back):  # they are there, and open
        folder.mkdir()
        os.chown(folder, ADA.pw_uid, -1)
        folder.chmod(0o2755)
        assert as_one(EVE, lambda folder=folder: os.listdir(folder))  # type: ignore[misc]
    desk.type("offload", "--to", str(copies), str(desk.source))
    assert (copies / "step-5" / "shards" / "weights").exists()
    assert what_eve_reads(copies / "step-5") == []
    desk.type("restore", "--from", str(copies), "--name", "step-5", "--to", str(back))
    assert (back / "step-5" / "shards" / "weights").read_bytes() == b"private" * 1000
    assert what_eve_reads(back / "step-5") == []


@pytest.mark.threat(
    "A member of the group who may write the place for your copies lays a link there, by the name that a copy will "
    "have, into a private folder of yours.",
    "A link of another account to what is not theirs is not followed. Each folder of the place is held open while it "
    "is worked in.",
)
def test_no_copy_is_written_through_a_link_that_a_member_laid_in_the_place_of_copies(desk: Desk) -> None:
    """Her place for copies is shared with the project. Eve lays a link there, by the name that the copy will have."""
    desk.shared.chmod(0o2775)
    private = desk.top / "private"
    for folder in (private, private / "shards"):
        folder.mkdir(mode=0o700)
        os.chown(folder, ADA.pw_uid, OFFICE)
    for name in ("index", "shards/weights"):
        (private / name).write_text("precious")
        os.chown(private / name, ADA.pw_uid, OFFICE)
    assert as_one(EVE, lambda: (desk.shared / "step-5").symlink_to(private))
    why = "shared/step-5 is a link of games to what belongs to daemon"
    desk.type("offload", "--to", str(desk.shared), str(desk.source), refused=why)
    assert {(private / name).read_text() for name in ("index", "shards/weights")} == {"precious"}
    assert sorted(str(one.relative_to(private)) for one in private.rglob("*")) == ["index", "shards", "shards/weights"]


@pytest.mark.threat(
    "A member of the group who may write the folder into which you bring a checkpoint back moves the half aside, and "
    "lays a link to a private folder of yours there.",
    "The folder that was made is held open and worked in; what was replaced meanwhile is refused.",
)
def test_nothing_is_removed_through_a_link_that_a_member_puts_in_the_place_of_what_is_brought_back(desk: Desk) -> None:
    """She may write the folder, so she moves ``.restoring-step-5`` away when it has nearly come, and lays a link there."""
    copies, private = desk.top / "copies", desk.top / "private"
    copies.mkdir()
    os.chown(copies, ADA.pw_uid, OFFICE)
    desk.type("offload", "--to", str(copies), str(desk.source))
    for one in (copies, *copies.rglob("*")):
        os.chown(one, 0, OFFICE)  # it is this account that brings it back here
    private.mkdir(mode=0o700)
    (private / "precious").write_text("precious")
    for one in (private, private / "precious"):
        os.chown(one, ADA.pw_uid, OFFICE)
    desk.shared.chmod(0o2775)
    ((copy,), _) = copies_in([open_store(copies)])
    partial, left = desk.shared / ".restoring-step-5", [copy.manifest.size]

    def exchange() -> None:
        partial.rename(partial.with_name("away"))
        partial.symlink_to(private)

    def progress(size: int) -> None:
        left[0] -= size
        if not left[0]:
            assert as_one(EVE, exchange)

    with pytest.raises(NotPermitted, match="was replaced meanwhile"):
        restore(copy, desk.shared, now=lambda: datetime.now(timezone.utc), workers=1, progress=progress)
    assert [one.name for one in private.iterdir()] == ["precious"]
    assert not (desk.shared / "step-5").exists()


def test_a_copy_in_the_same_group_is_still_read_by_it(desk: Desk) -> None:
    os.chown(desk.shared, ADA.pw_uid, OFFICE)
    desk.type("offload", "--to", str(desk.shared / "copies"), str(desk.source))
    assert {one.stat().st_mode & 0o777 for one in (desk.shared / "copies").rglob("*")} == {0o750, 0o640}


@pytest.mark.threat("The same, when your script's checkpoint is kept in the run directory.", "The same.")
@pytest.mark.parametrize("how", [by_group, by_list, by_a_list_of_the_source])
def test_what_is_kept_of_a_script_s_checkpoint_is_read_by_nobody_else(desk: Desk, how: Callable[[Desk], None]) -> None:
    how(desk)
    trusted = {ADA.pw_uid, os.geteuid()}
    kept = keep(
        LeftCheckpoint(str(desk.checkpoint)), desk.shared / "kept", 60, trusted=lambda found: found.st_uid in trusted
    )
    assert (kept.path / "index").read_bytes() == b"private"
    assert what_eve_reads(kept.path) == []


def test_what_is_copied_beside_a_file_of_another_group_is_read_by_no_other(desk: Desk) -> None:
    """A checkpoint of one file that is written over is kept before, in a folder that hands its group down."""
    last = desk.shared / "last.ckpt"
    last.write_bytes(b"private")
    os.chown(last, -1, OFFICE)
    last.chmod(0o640)
    assert what_eve_reads(last) == []
    kept = previous.keep(last, commit(last))
    assert kept is not None and kept.read_bytes() == b"private" and what_eve_reads(kept) == []


@pytest.mark.threat(
    "A list of nodes (`share.nodes`, `nodes.directory`) is shared with a group, and a member exchanges a folder of "
    "it for a link into a private folder of yours, where old files would be removed as incidents of long ago.",
    "The folder is held open, and a link of another account to what is not theirs is not followed.",
)
def test_a_list_of_nodes_that_is_shared_leads_to_no_file_of_ones_own(desk: Desk) -> None:
    """Members may write it, so they exchange its folders for links. Old incidents are removed after each failure."""
    desk.shared.chmod(0o2775)
    private, long_ago = desk.top / "private", (1.0, 1.0)
    private.mkdir(mode=0o700)
    for name in ("thesis.tex", "node-1", "cron-ab12-x"):
        (private / name).write_text("precious")
        os.utime(private / name, long_ago)
        os.chown(private / name, ADA.pw_uid, OFFICE)
    os.chown(private, ADA.pw_uid, OFFICE)

    def lay() -> None:
        for name in ("incidents", "exclude", "trust", "watchers"):
            (desk.shared / name).symlink_to(private)

    assert as_one(EVE, lay)
    now = datetime.now(timezone.utc)
    incidents.forget(desk.shared, now)
    (problem,) = incidents.IncidentLog("me").write([desk.shared])
    assert "is a link of games to what belongs to daemon" in problem
    with pytest.raises(ownership.NotTrusted):
        incidents.set_override(desk.shared, incidents.EXCLUDE, "node-1", who="ada", why="", now=now)
    run = RunDir(desk.top / "run")
    run.root.mkdir()
    run.watch.symlink_to(desk.shared)
    heartbeat_page.remove_watchers(run, "cron-ab12-")
    assert {one.name: one.read_text() for one in private.iterdir()} == dict.fromkeys(
        ("thesis.tex", "node-1", "cron-ab12-x"), "precious"
    )


@pytest.mark.threat(
    "A member who may write a shared list of nodes lays tens of thousands of marks there that are slow to read, or say much: "
    "each start, launch and look would take a minute more, and fill the log of the run.",
    "A page of a mark has a few kB at most, an account is looked up once, and the first problems are told, the others counted.",
)
def test_thousands_of_marks_of_a_member_in_a_list_of_nodes_hold_nobody(desk: Desk) -> None:
    marks, page = 9000, '{"who": [' + "[]," * 21000 + "[]]}"
    for folder in (desk.shared, *(desk.shared / word for word in incidents.WORDS)):
        folder.mkdir(exist_ok=True)
        os.chown(folder, ADA.pw_uid, PROJECT)
        folder.chmod(0o2775)

    def fill() -> None:
        one = desk.shared / incidents.EXCLUDE / "node-0"
        one.write_text(page)
        for number in range(marks):
            os.link(one, desk.shared / incidents.TRUST / f"node-{number}")
            os.close(os.open(desk.shared / incidents.CLEARED / f"-{number}", os.O_CREAT))

    assert as_one(EVE, fill)
    begun = time.process_time()
    found = incidents.read([desk.shared])
    assert time.process_time() - begun < 3.0, "a tenth of that, and ten times that before"
    assert len(found.overrides) == marks + 1 and len(found.problems) < 100


def forge(place: Path, group: int) -> None:
    """A list that somebody has made, in which all nodes of ada's are bad."""
    for word in incidents.WORDS:
        (place / word).mkdir(parents=True)
    (place / incidents.EXCLUDE / "node-1").touch()
    bad = [incidents.Incident("node-2", "health", datetime.now(timezone.utc))] * 3
    log = incidents.IncidentLog("forged")
    log.add(bad)
    assert log.write([place]) == ()
    for one in (place, *place.iterdir()):
        os.chown(one, -1, group)
        one.chmod(0o2775 if group == PROJECT else 0o755)


def bad_nodes(place: Path) -> list[str]:
    """Which nodes are excluded by that list, as ada sees it: her processes are in the office, and in the project."""
    here, there = os.pipe()
    ownership.group_name(PROJECT)  # loads what ada may not read of this interpreter
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(OFFICE)
            os.setgroups([PROJECT])
            os.setuid(ADA.pw_uid)
            found = judging.judge(incidents.read_shared(place), 9, datetime.now(timezone.utc))
            os.write(there, " ".join(sorted(one.name for one in found if one.excluded)).encode())
        except Exception:  # an empty answer is no answer of hers
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(there)
    with open(here) as said:  # noqa: PTH123 - a pipe
        return said.read().split()


@pytest.mark.threat(
    "Your settings name a list of nodes (`nodes.directory`) that is not there yet, or that lies where others may rename it. A "
    "stranger makes a list of that name, in which all nodes are bad, so that no job of yours starts.",
    "A list of another account is believed, and written, only where its owner shares it with a group that both of you are in.",
)
@pytest.mark.parametrize("exchanged", [False, True], ids=["made first", "exchanged"])
def test_whoever_has_made_the_list_of_nodes_is_not_believed_for_that(
    desk: Desk, tmp_path: Path, exchanged: bool
) -> None:
    place, nobody = desk.top / "nodes", pwd.getpwnam("nobody")
    desk.top.chmod(0o777)
    if exchanged:
        place.mkdir()
        assert as_one(nobody, lambda: place.rename(desk.top / "away"))
    assert as_one(nobody, lambda: forge(place, nobody.pw_gid))
    assert bad_nodes(place) == []
    (problem,) = incidents.read_shared(place).problems
    assert f"{place} belongs to nobody, who shares it with no group of yours" in problem
    (problem,) = incidents.IncidentLog("ada").write_shared(place)
    assert "belongs to nobody" in problem and os.listdir(place / incidents.INCIDENTS) == ["forged.json"]


def test_the_list_of_a_colleague_who_shares_it_with_ones_group_counts(desk: Desk) -> None:
    """The counter-test; and in it a folder of a stranger's does not."""
    place, nobody = desk.top / "nodes", pwd.getpwnam("nobody")
    desk.top.chmod(0o777)
    assert as_one(EVE, lambda: forge(place, PROJECT))
    assert bad_nodes(place) == ["node-1", "node-2"]
    for one in (place / incidents.EXCLUDE, place / incidents.EXCLUDE / "node-1"):
        os.chown(one, nobody.pw_uid, nobody.pw_gid)
    assert bad_nodes(place) == ["node-2"]


@pytest.mark.threat(
    "The folder above a run passes on an access list, by which an account outside of the group would remove the "
    "switches of the run.",
    "A folder that the group may write has no access list.",
)
def test_a_folder_for_the_group_is_written_by_nobody_whom_the_folder_above_names(tmp_path: Path) -> None:
    """Switches are removed by whoever may write their folder, and a group that the list keeps out could raise none."""
    give_list(tmp_path, (ACCOUNT, 7, EVE.pw_uid), passed_on=True)
    folder = tmp_path / "switches"
    ownership.make_folder(folder, ownership.SHARED)
    assert ownership.access_list(folder) == () and os.listxattr(folder) == []
    give_list(folder, (ACCOUNT, 7, EVE.pw_uid), group=7, others=5)
    ownership.set_mode(folder, ownership.SHARED)
    assert ownership.access_list(folder) == () and folder.stat().st_mode & 0o7777 == 0o2775


@pytest.mark.threat(
    "An access list lets others write a file that the settings share with a group.",
    "The file is not trusted.",
)
def test_a_page_that_is_shared_with_a_group_and_that_a_list_lets_others_write_is_not_believed(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("x")
    os.chown(page, -1, PROJECT)
    page.chmod(0o664)
    assert ownership.distrust(page.stat(), page, group=PROJECT) == ""
    give_list(page, (GROUP, 6, PROJECT), group=6)
    assert ownership.distrust(page.stat(), page, group=PROJECT) == "", "it names the same group"
    give_list(page, (ACCOUNT, 6, ADA.pw_uid), group=6)
    assert "an access list lets others write" in ownership.distrust(page.stat(), page, group=PROJECT)
