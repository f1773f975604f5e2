"""A checkpoint that another account wrote, or may change, is not resumed from: to load one is to run a program."""

from __future__ import annotations

import json
import os
import pwd
import resource
import shutil
import struct
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.find import checkpoints_in, choose, names_of_other_runs, others_in, sizes_back
from ftsupervise.checkpoints.manifest import FOLDER_NAME, encoded, manifest_of, read_manifest, write_manifest
from ftsupervise.checkpoints.quarantine import QUARANTINE, quarantined, set_aside
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.retain import in_use, leftovers, of_others
from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify
from ftsupervise.config.schema import Sharing
from ftsupervise.guard import Guard
from ftsupervise.launch.folders import make_folders
from ftsupervise.run.start_over import ScriptPlace, resumption
from ftsupervise.rundir.anchor import Anchor
from ftsupervise.rundir.attempt_pages import StartPage, write_page
from ftsupervise.rundir.fence import STAGING
from ftsupervise.rundir.lineage import Lineage, keep_lineage
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.snapshots.doubts import Beside
from ftsupervise.snapshots.kept import KeptPage, anchors
from ftsupervise.truth import LeftCheckpoint
from tests.neighbours.stranger import ADA, EVE, STRANGER, as_one, as_stranger, begin_as, end, one_by_one, type_as
from tests.neighbours.stranger import GROUP as PROJECT
from tests.story.alerting_scene import type_in
from tests.story.test_go_back import Scene

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other accounts")]

GROUP = 100  # users
FULL = Scope(Thoroughness.FULL)
SHARED = FULL._replace(members=PROJECT)  # as a run whose launches are shared with that group


@pytest.fixture
def folder(top: Path) -> Path:
    """Two checkpoints of this account."""
    for step in (1, 2):
        one = top / f"step-{step}" / "sub"
        one.mkdir(parents=True)
        (one / "weights").write_bytes(b"w")
        commit(one.parent)
    return top


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.fault("A checkpoint is what another account wrote, or may change", "the run does not go on from it")
@pytest.mark.parametrize("part", ["", "sub", "sub/weights", FOLDER_NAME, f"{FOLDER_NAME}/manifest.json"])
@pytest.mark.parametrize("how", ["owner", "everybody"])
def test_whatever_part_of_it_is_another_account_s_it_is_passed_over(folder: Path, part: str, how: str) -> None:
    path = folder / "step-2" / part
    if how == "owner":
        given_away(path)
    else:
        path.chmod(0o777)
    choice = choose(folder, FULL)
    assert choice.verdict is not None and choice.verdict.path.name == "step-1"
    assert [one.state for one in choice.passed] == [State.NOT_TRUSTED]
    assert ("belongs to nobody" if how == "owner" else "everybody may write") in choice.passed[0].words()


def test_a_new_checkpoint_of_a_stranger_in_an_open_folder_is_not_the_newest(folder: Path) -> None:
    folder.chmod(0o1777)
    shutil.copytree(folder / "step-2", folder / "step-99")
    for path in (folder / "step-99", *(folder / "step-99").rglob("*")):
        given_away(path)
    choice = choose(folder, FULL)
    assert choice.verdict is not None and choice.verdict.path.name == "step-2"
    folder.chmod(0o777)  # without the sticky bit anybody may exchange any of them
    assert choose(folder, FULL).verdict is None


def test_a_folder_of_a_stranger_holds_nothing_to_resume_from_unless_the_run_is_theirs(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        given_away(path)
    assert choose(folder, FULL).verdict is None
    assert choose(folder, Scope(Thoroughness.FULL, accounts=(STRANGER,))).verdict is not None


def test_in_a_folder_that_its_owner_shares_with_a_group_only_the_group_is_believed(folder: Path) -> None:
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    for path in (folder / "step-2", *(folder / "step-2").rglob("*")):
        given_away(path)
    shared = FULL._replace(members=GROUP)
    seen = verify(folder / "step-2", shared)
    assert seen.state is State.NOT_TRUSTED and "is not in the group users" in seen.words()
    for path in (folder / "step-1", *(folder / "step-1").rglob("*")):
        os.chown(path, 0, GROUP)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    assert verify(folder / "step-1", shared).state is State.VERIFIED


def test_a_manifest_is_not_written_through_a_link_that_a_stranger_laid(folder: Path) -> None:
    theirs = folder / "elsewhere"
    theirs.mkdir()
    shutil.rmtree(folder / "step-2" / FOLDER_NAME)
    (folder / "step-2" / FOLDER_NAME).symlink_to(theirs)
    with pytest.raises(OSError, match="is a link"):
        commit(folder / "step-2")
    assert not list(theirs.iterdir())
    assert verify(folder / "step-2", FULL).state is State.NOT_TRUSTED


def test_a_fifo_in_place_of_a_manifest_or_a_sign_is_not_waited_for(folder: Path) -> None:
    manifest_of(folder / "step-2").unlink()
    os.mkfifo(manifest_of(folder / "step-2"))
    assert verify(folder / "step-2", FULL).state is State.UNSEEN
    os.mkfifo(folder / "latest")
    (folder / "global_step7").mkdir()
    (folder / "global_step7" / "mp_rank_00_model_states.pt").write_bytes(b"w")
    assert verify(folder / "global_step7").state is State.UNSEEN


def test_what_may_not_be_read_is_unseen_and_stops_a_run_that_has_nothing_else(folder: Path) -> None:
    """As an ordinary account: root may read all."""
    shutil.rmtree(folder / "step-1")
    for path in (folder, *folder.rglob("*")):
        given_away(path)
    (folder / "step-2" / "sub" / "weights").chmod(0)

    def look() -> None:
        assert verify(folder / "step-2").good and verify(folder / "step-2", FULL).state is State.UNSEEN
        with pytest.raises(PermissionError):
            choose(folder, FULL)

    as_stranger(look)


@pytest.mark.threat(
    "Somebody who may write beside your folder of checkpoints, as in `/tmp`, puts a `.quarantine` of his own there, "
    "or a link, before a checkpoint is set aside.",
    "A quarantine of another account beside the folder is neither used nor shown; no link of another account is "
    "followed.",
)
@pytest.mark.parametrize("how", ["folder", "link"])
def test_nothing_is_set_aside_into_what_a_stranger_has_put_beside_the_folder_of_accelerate(top: Path, how: str) -> None:
    """The quarantine lies beside a folder ``checkpoints``, and everybody may put something there, as in /tmp."""
    top.chmod(0o1777)
    (mine := top / "private").mkdir(0o700)
    (one := top / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    (one / "model.safetensors").write_bytes(b"w")

    def plant() -> None:
        if how == "link":
            (top / QUARANTINE).symlink_to(mine)
            return
        page = top / QUARANTINE / "checkpoint_9" / FOLDER_NAME / "quarantine.json"
        page.parent.mkdir(parents=True)
        said = {"name": "checkpoint_9", "reason": "forged", "was": str(one.with_name("checkpoint_9"))}
        page.write_text(json.dumps(said))

    as_stranger(plant)
    assert quarantined(one.parent) == (), "what a stranger says of it is not shown"
    put = set_aside(one, "it is torn", datetime.now(timezone.utc))
    assert put == one.parent / QUARANTINE / "checkpoint_3" and (put / "model.safetensors").read_bytes() == b"w"
    assert [found.name for found in quarantined(one.parent)] == ["checkpoint_3"]
    assert list(mine.iterdir()) == []


def test_nothing_is_set_aside_through_a_link_of_a_stranger(top: Path) -> None:
    (folder := top / "out").mkdir()
    folder.chmod(0o1777)
    (mine := top / "private").mkdir(0o700)
    (one := folder / "checkpoint-3").mkdir()
    as_stranger(lambda: (folder / QUARANTINE).symlink_to(mine))
    with pytest.raises(PermissionError, match="so it is not followed"):
        set_aside(one, "it is torn", datetime.now(timezone.utc))
    assert one.is_dir() and list(mine.iterdir()) == []


@pytest.mark.threat(
    "The folder of your checkpoints may be written by everybody (1777), and another account lays one there that lets nobody "
    "in, before you have saved any: what cannot be read may be all that there is, so that the run does not start.",
    "Whose it is is seen before it is read, and nothing of another account holds a start.",
)
def test_what_a_stranger_lets_nobody_into_holds_no_start(top: Path) -> None:
    top.chmod(0o1777)
    as_stranger(lambda: (top / "step-9").mkdir(0o700))
    assert choose(top, FULL).verdict is None, "and what ada may not import is imported"

    def look() -> None:
        seen = choose(top, FULL)
        assert seen.verdict is None and [one.state for one in seen.passed] == [State.NOT_TRUSTED]

    as_one(ADA, look)


@pytest.mark.threat(
    "Another account fills such a folder with a hundred thousand names, so that no checkpoint is found in it any more.",
    "What belongs to others is counted by itself.",
)
def test_a_stranger_who_fills_the_folder_hides_no_checkpoint(folder: Path) -> None:
    folder.chmod(0o1777)

    def fill() -> None:
        for number in range(100_001):
            os.close(os.open(folder / f"{number}.pt", os.O_CREAT | os.O_WRONLY))

    as_stranger(fill)
    found = choose(folder, FULL).verdict
    assert found is not None and found.path.name == "step-2"


def a_rank(of: Path) -> None:
    """A rank of Megatron whose number is far ahead."""
    (of / "iter_0000009" / "mp_rank_00_999999999").mkdir(parents=True)
    (of / "latest_checkpointed_iteration.txt").write_text("9")


def a_state(of: Path) -> None:
    """The same of DeepSpeed."""
    (of / "global_step9").mkdir()
    for number in (0, 999_999_999):
        (of / "global_step9" / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt").touch()
    (of / "latest").write_text("global_step9")


def an_archive(of: Path) -> None:
    """An archive of no bytes on the disk, which says that its directory has 3.9 GB."""
    size = 3_900_000_000
    states = of / "iter_0000009" / "mp_rank_00" / "model_optim_rng.pt"
    states.parent.mkdir(parents=True)
    (of / "latest_checkpointed_iteration.txt").write_text("9")
    with states.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(100 + size)
        file.seek(100 + size)
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, size, 100, 0))


@pytest.mark.threat(
    "Your run saves into a folder of the project that the group may write (umask 002). A member lays a newer checkpoint there, "
    "which your next attempt would unpickle.",
    "Members are believed where the launches are shared with them, whatever the mode of the folder. What the guard saves, "
    "nobody else may write.",
)
@pytest.mark.parametrize("with_whom", ["nobody", "another group", "the group"])
def test_a_member_lays_no_checkpoint_that_a_run_goes_on_from(top: Path, with_whom: str) -> None:
    """``ada`` has made the folder with an umask of 002, as one makes a folder in a project. ``with_whom``: she shares the
    launches."""
    launches_are_shared = with_whom == "the group"
    os.chown(top, 0, PROJECT)
    top.chmod(0o2775)
    run, folder = RunDir(top / "run"), top / "checkpoints"

    def save() -> None:
        make_folders(run, Sharing(launch=with_whom != "nobody"))
        folder.mkdir()
        with Guard(run.root, signals=()) as guard, guard.checkpoint(1) as made:
            (made / "weights").write_bytes(b"ada's")

    def lay() -> None:
        (folder / "step-9").mkdir()
        (folder / "step-9" / "weights").write_bytes(b"eve's")
        commit(folder / "step-9")

    def go_on() -> None:
        found = Guard(run.root, signals=()).latest()
        assert found is not None and found.name == ("step-9" if launches_are_shared else "step-00000001")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(folder))
        as_one(ADA, save, umask=0o002)
        if with_whom == "another group":
            os.chown(run.launches, -1, GROUP)
        as_one(EVE, lay, umask=0o002)
        as_one(ADA, go_on, umask=0o002)
    mine = folder / "step-00000001"
    opened = [one for one in (mine, *mine.rglob("*")) if one.stat().st_mode & 0o022]
    assert bool(opened) is (with_whom != "nobody")


def in_two_days(folder: Path) -> None:
    assert leftovers(None, folder, time.time() + 2 * 86_400) == ()


@pytest.mark.threat(
    "A member lays a folder that lets nobody in among your checkpoints, by a step or as a kept snapshot: no checkpoint is "
    "removed or adopted any more, until the disk is full.",
    "What another account has laid there is passed over.",
)
@pytest.mark.parametrize("mode", [0o2775, 0o1777])
@pytest.mark.parametrize(
    "name", ["step-9", ".snapshot-00000009-0001-abc", ".restoring-9", ".removing-9", QUARANTINE, FOLDER_NAME, STAGING]
)
def test_what_lets_nobody_in_keeps_nothing_from_being_removed(top: Path, python: str, name: str, mode: int) -> None:
    os.chown(top, pwd.getpwnam(ADA).pw_uid, PROJECT)
    top.chmod(mode)

    def save() -> None:
        for step in (1, 2, 3):
            (top / f"step-{step}").mkdir()
            (top / f"step-{step}" / "weights").write_bytes(b"w")
            commit(top / f"step-{step}")

    as_one(ADA, save)
    as_one(EVE, lambda: (top / name).mkdir(0o700))
    for words in (["list"], ["commit"], ["prune", "--last", "2"]):
        said = type_as(ADA, [python, "-I", "-m", "ftsupervise", "checkpoints", *words, str(top)], top, "/", 0o022)
        assert said.code == 0, said.said
    as_one(ADA, lambda: in_two_days(top))
    assert not (top / "step-1").exists() and (top / "step-3").exists()


@pytest.mark.threat(
    "A member of the group with whom you share the folder of your checkpoints lays a few bytes there that stand for billions: "
    "a rank of a high number, or an archive whose directory has gigabytes. Who judges it needs all memory of the machine.",
    "No number in a name is counted up to, and of an archive's directory no more is read than any real one has.",
)
@pytest.mark.parametrize("lay", [a_rank, a_state, an_archive])
def test_what_a_member_lays_takes_no_memory(folder: Path, lay: Callable[[Path], None]) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 0, PROJECT)
    folder.chmod(0o2775)
    as_one(EVE, partial(lay, folder), umask=0o002)

    def look() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert choose(folder, SHARED).verdict is not None
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000

    as_one(ADA, look)


@pytest.mark.threat(
    "A member of that group writes a manifest that names one large file a million times, so that to verify it takes days.",
    "A manifest that lists a file twice is damaged.",
)
def test_no_file_is_read_as_often_as_a_manifest_says(folder: Path) -> None:
    page = manifest_of(folder / "step-2")
    said = read_manifest(folder / "step-2")
    assert said is not None
    page.write_bytes(encoded(said._replace(files=said.files * 2)))
    seen = verify(folder / "step-2", FULL)
    assert seen.state is State.DAMAGED and "lists a file twice" in seen.words()


@pytest.mark.threat(
    "In a folder that everybody may write (1777), another account lays a checkpoint beside yours whose manifest names another "
    "run: `launch` would refuse the folder, and so would each next member of your chain.",
    "Only trusted accounts say whose a folder of checkpoints is.",
)
def test_no_manifest_of_a_stranger_gives_the_folder_to_another_run(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o1777)
    (top := folder / "step-9").mkdir()
    (top / "weights").write_bytes(b"w")
    said = commit(top)
    write_manifest(top, said._replace(run="theirs", run_id="theirs"))
    assert [one.run for one in others_in(folder, "*", RunDir(tmp_path), "mine")] == ["theirs"], "while it is ours"
    for path in (top, *top.rglob("*")):
        given_away(path)
    assert others_in(folder, "*", RunDir(tmp_path), "mine") == ()


@pytest.mark.threat(
    "Another account has laid a checkpoint into such a folder when you type `checkpoints anew`: the command ended at that one, "
    "which you may not move, before it came to yours.",
    "Yours are set aside. The others are not gone on from anyway.",
)
def test_what_a_stranger_has_laid_there_keeps_nobody_from_beginning_anew(folder: Path) -> None:
    folder.chmod(0o1777)
    as_stranger(lambda: (folder / "step-9").mkdir())
    said = type_in("checkpoints", "anew", str(folder))
    assert said.exit_code == 0 and "2 checkpoints" in said.output, said.output
    assert sorted(one.name for one in folder.iterdir()) == [QUARANTINE, "step-9"]


@pytest.mark.threat(
    "The loss of your run was no number, and it goes back to an older checkpoint. Another account has laid two thousand into "
    "the folder, where everybody may write (1777): the next start would look at each as often as there are, for hours.",
    "Each is looked at a few times. Yours are gone on from, and nobody else's is set aside.",
)
def test_no_names_of_a_stranger_hold_a_start_up_that_goes_back(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_GUARD_LOSS_BACK", "4000")
    run = Scene(top, monkeypatch, (4900, 5000))
    run.rundir.checkpoints.chmod(0o1777)
    as_stranger(one_by_one(*((run.rundir.checkpoints / f"step-{step}").mkdir for step in range(600, 1100))))
    run.trouble(4500)
    run.begin()
    began = time.process_time()
    assert run.choose() == "step-00004900" and run.aside() == ["step-00005000"]
    assert time.process_time() - began < 5


@pytest.mark.threat(
    "The loss of your run was no number soon after its beginning, and it begins anew. Another account has laid an older "
    "checkpoint into such a folder, so that the run would wait for a person.",
    "What strangers lay there counts for nothing.",
)
def test_no_name_of_a_stranger_keeps_a_run_from_its_beginning(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_GUARD_LOSS_BACK", "100")
    run = Scene(top, monkeypatch, (95,))
    run.rundir.checkpoints.chmod(0o1777)
    as_stranger(lambda: (run.rundir.checkpoints / "step-10").mkdir())
    run.trouble(90, saved=95)
    run.begin()
    assert run.choose() == "" and run.aside() == ["step-00000095"]


def test_a_run_whose_launches_are_shared_goes_back_behind_what_a_member_has_saved(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs would be loaded at the start after the next one, with the loss that is no number."""
    monkeypatch.setenv("FTSUPERVISE_GUARD_LOSS_BACK", "100")
    run = Scene(top, monkeypatch, (4800,))
    for folder in (run.rundir.launches, run.rundir.checkpoints):
        folder.mkdir(exist_ok=True)
        os.chown(folder, 0, PROJECT)
        folder.chmod(0o2775)

    def lay() -> None:
        for step in (4900, 5000):
            (saved := run.rundir.checkpoints / f"step-{step:08}").mkdir()
            (saved / "state").write_text("w")
            commit(saved)

    as_one(EVE, lay)
    run.trouble(4950)
    run.begin()
    assert run.choose() == "step-00004800"
    assert sorted(run.aside()) == ["step-00004900", "step-00005000"]


@pytest.mark.threat(
    "Your umask lets a group write (002). While a checkpoint is saved, which takes minutes, a member opens a file of it, and "
    "changes it when it is committed and verified: what you save would be damaged, or be unpickled as they want it.",
    "Nobody else comes into a folder that is being saved. It gets its rights with its name.",
)
def test_nobody_has_a_file_of_a_checkpoint_open_to_write(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(top, -1, PROJECT)
    top.chmod(0o2755)
    for name in ("RUN_DIR", "ATTEMPT_DIR"):
        monkeypatch.delenv(f"FTSUPERVISE_{name}", raising=False)
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(top / "checkpoints"))
    umask = os.umask(0o002)
    try:
        with Guard(signals=()) as guard, guard.checkpoint(1) as folder:
            (folder / "sub").mkdir()
            for one in (folder / "weights", folder / "sub" / "weights"):
                one.write_bytes(b"w")
                with pytest.raises(AssertionError):
                    as_one(EVE, partial(os.open, one, os.O_WRONLY))
    finally:
        os.umask(umask)
    saved = top / "checkpoints" / "step-00000001"
    seen = {str(one.relative_to(saved)): one.stat().st_mode & 0o777 for one in (saved, *saved.rglob("*"))}
    folders = dict.fromkeys((".", "sub", FOLDER_NAME), 0o755)
    assert seen == {**folders, **dict.fromkeys(("weights", "sub/weights", f"{FOLDER_NAME}/manifest.json"), 0o644)}
    as_one(EVE, partial(read_manifest, saved))


class ExchangedOnceJudged(FolderStore):
    """The place of the copies, in which a member gives the name of a copy to one of theirs, and back while that is judged."""

    def distrusted(self, folder: str) -> str:
        exchange(self.root, folder)
        found = super().distrusted(folder)
        exchange(self.root, folder)
        return found


def exchange(root: Path, name: str) -> None:
    def do() -> None:
        (root / name).rename(root / "for-a-moment")
        (root / ".aside").rename(root / name)
        (root / "for-a-moment").rename(root / ".aside")

    as_one(EVE, do)


@pytest.mark.threat(
    "A member who may write the place for your copies puts one of theirs in the place of yours, but for the moment in which "
    "its owner is looked at: you bring it back, as a checkpoint of your own, which your next attempt would unpickle.",
    "What is brought back is compared with a manifest that was judged as it was opened.",
)
def test_no_copy_of_a_member_is_brought_back_in_the_place_of_ones_own(folder: Path) -> None:
    (back := folder / "back").mkdir(0o700)
    (copies := folder / "copies").mkdir()
    os.chown(copies, 0, PROJECT)
    copies.chmod(0o2775)
    (folder / "step-2").rename(copies / ".aside")  # that of this account

    def lay() -> None:
        (copies / "step-2").mkdir()
        (copies / "step-2" / "weights").write_bytes(b"eve's")
        commit(copies / "step-2")

    as_one(EVE, lay)
    for copy in copies_in([ExchangedOnceJudged(copies)])[0]:
        if copy.folder == "step-2":
            restore(copy, back, now=lambda: datetime.now(timezone.utc))
    assert not list(back.iterdir())


@pytest.mark.threat(
    "Another account lays a copy of a later step into the place for your copies, or a thousand with manifests of 250 MB, "
    "before you bring your newest back.",
    "The newest of your own is brought back. Of the others no manifest is read.",
)
@pytest.mark.parametrize("mode", [0o2775, 0o1777])
def test_the_copies_of_others_keep_nobody_from_his_own(folder: Path, mode: int) -> None:
    (copies := folder / "copies").mkdir()
    os.chown(copies, 0, PROJECT)
    copies.chmod(mode)
    (folder / "step-2").rename(copies / "step-2")

    def lay() -> None:
        for number in range(1000):
            (page := manifest_of(copies / f"step-{9 + number}")).parent.mkdir(parents=True)
            page.touch()
            os.truncate(page, 250_000_000)

    as_one(EVE, lay)
    began = time.monotonic()
    said = type_in("checkpoints", "restore", "--from", str(copies), "--to", str(folder / "back"))
    assert said.exit_code == 0 and "1,000 of the copies there are not read" in said.output, said.output
    assert (folder / "back" / "step-2").is_dir() and time.monotonic() - began < 20


def forge(copies: Path) -> None:
    """Put a copy without contents in the place of one that is whole."""
    (copies / "step-1").rename(copies / ".gone")
    shutil.copytree(copies / ".gone" / FOLDER_NAME, copies / "step-1" / FOLDER_NAME)
    (copies / "step-1" / "weights").touch()
    os.truncate(copies / "step-1" / "weights", 1)


@pytest.mark.threat(
    "A member who may write the place for your copies puts one with your manifest and files of nothing in the place of yours. "
    "`prune` (`checkpoints.retain.copied`) deletes the checkpoint here, for it has a copy.",
    "A copy counts by a manifest that nobody else can have written.",
)
def test_no_forged_copy_has_a_checkpoint_removed(top: Path, python: str) -> None:
    own, copies = top / "own", top / "copies"
    for place, mode in ((own, 0o755), (copies, 0o2775)):
        place.mkdir()
        os.chown(place, pwd.getpwnam(ADA).pw_uid, PROJECT)
        place.chmod(mode)

    def save() -> None:
        for step in (1, 2, 3):
            (own / f"step-{step}").mkdir()
            (own / f"step-{step}" / "weights").write_bytes(b"w")
            commit(own / f"step-{step}")

    def type_in_as_ada(*words: str) -> str:
        said = type_as(ADA, [python, "-I", "-m", "ftsupervise", "checkpoints", *words, str(own)], own, "/", 0o022)
        assert said.code == 0, said.said
        return said.said

    as_one(ADA, save)
    type_in_as_ada("offload", "--all", "--to", str(copies))
    as_one(EVE, partial(forge, copies))
    type_in_as_ada("prune", "--last", "2", "--copied")
    assert (own / "step-1").exists()
    type_in_as_ada("offload", "--all", "--to", str(copies))
    assert (copies / "step-1~2").exists(), "it is copied once more"
    type_in_as_ada("prune", "--last", "2", "--copied")
    assert not (own / "step-1").exists()


@pytest.mark.threat(
    "Another account makes the folders first that your next copy could have, a thousand, open to you or to nobody.",
    "The copy has another name. Nothing is copied into what others could exchange.",
)
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_nothing_is_copied_into_what_another_account_has_made(folder: Path, mode: int) -> None:
    (copies := folder / "copies").mkdir()
    copies.chmod(0o1777)

    def make_first() -> None:
        for name in ("step-2", *(f"step-2~{number}" for number in range(2, 1000))):
            (copies / name).mkdir(mode)

    as_one(EVE, make_first, umask=0)
    for sent in ("1 B sent", ""):
        said = type_in("checkpoints", "offload", "--to", str(copies), str(folder))
        assert said.exit_code == 0 and sent in said.output, said.output
    assert (copies / "step-2~1000" / "sub" / "weights").exists() and not (copies / "step-2~1001").exists()


@pytest.mark.threat(
    "Another account lays a file like a checkpoint beside yours each hour: the watch would take it for one of the run, which "
    "saves nothing any more, and tell nobody.",
    "What accounts that are not trusted have laid there is no save of the run.",
)
@pytest.mark.parametrize("mode", [0o2775, 0o1777])
def test_what_another_account_lays_there_is_no_save_of_the_run(folder: Path, tmp_path: Path, mode: int) -> None:
    os.chown(folder, 0, PROJECT)
    folder.chmod(mode)
    run = RunDir(tmp_path)
    keep_lineage(run, "mine")
    as_one(EVE, (folder / "last.ckpt").touch)
    assert names_of_other_runs(str(folder), "*", str(run.root), ()) == ["last.ckpt"]
    as_one(EVE, (folder / "step-9").mkdir)
    assert [Path(path).name for path, *_ in sizes_back(str(folder), "*", str(run.root))] == ["step-2"]


def a_restore(folder: Path) -> None:
    (folder / ".restoring-step-1").mkdir()


def another_run_s(folder: Path) -> None:
    (folder / "step-9").mkdir()
    (folder / "step-9" / "weights").write_bytes(b"w")
    write_manifest(folder / "step-9", commit(folder / "step-9")._replace(run="theirs", run_id="theirs"))


def a_snapshot(folder: Path) -> None:
    kept = folder / ".snapshot-00000009-0001-abc"
    kept.mkdir()
    write_json(kept / "snapshot.json", KeptPage(9, 1, 1, beside=Beside(anchor=Anchor("step-1"))))


@pytest.mark.threat(
    "Another account lays the half of a restore, a kept snapshot or a checkpoint of another run beside yours, which says that "
    "an old one of yours is in use: it is never removed, until the disk is full.",
    "What accounts that are not trusted have laid there says nothing of yours.",
)
@pytest.mark.parametrize("lay", [a_restore, another_run_s, a_snapshot])
def test_what_others_lay_keeps_no_checkpoint_in_use(folder: Path, lay: Callable[[Path], None]) -> None:
    folder.chmod(0o1777)
    (folder / "step-3").mkdir()
    (folder / "step-3" / "weights").write_bytes(b"w")
    commit(folder / "step-3")
    as_one(EVE, lambda: lay(folder))
    found = checkpoints_in(folder)
    assert of_others(found, Lineage(id="mine")) == {}
    assert in_use(None, folder, time.time(), anchors(folder)) == {}


@pytest.mark.threat(
    "A member who may write the place for your copies gives your newest one the name of a folder of ours (`.staging`): brought "
    "back, it would take the place of what your run prepares its saves in.",
    "What begins with a dot is no copy.",
)
@pytest.mark.parametrize("name", [STAGING, QUARANTINE])
def test_no_copy_is_brought_back_in_the_place_of_our_own_folders(folder: Path, name: str) -> None:
    (copies := folder / "copies").mkdir()
    os.chown(copies, 0, PROJECT)
    copies.chmod(0o2775)
    shutil.copytree(folder / "step-2", copies / "step-2")
    (folder / STAGING / "0001").mkdir(parents=True)
    (folder / QUARANTINE / "step-1").mkdir(parents=True)
    as_one(EVE, lambda: (copies / "step-2").rename(copies / name))
    type_in("checkpoints", "restore", "--from", str(copies), "--to", str(folder))
    assert (folder / STAGING / "0001").exists() and (folder / QUARANTINE / "step-1").exists()


@pytest.mark.threat(
    "A member who may write the folder in which your loop saves puts a folder of theirs in the place of the one that it writes "
    "into: the save would count as made, and the next start go on from none of it.",
    "Such a save raises.",
)
def test_no_save_counts_in_what_a_member_has_put_in_its_place(top: Path) -> None:
    os.chown(top, 0, PROJECT)
    top.chmod(0o2775)
    (put := top / "put").touch()

    def save() -> None:
        guard = Guard(signals=())
        with guard.checkpoint(1) as made:
            (made / "weights").write_bytes(b"w")
        with pytest.raises(OSError, match="another account"), guard.checkpoint(2) as made:
            put.write_text(str(made))
            while put.exists():
                time.sleep(0.01)
            (made / "weights").write_bytes(b"w")
        found = guard.latest()
        assert found is not None and found.name == "step-00000001"

    def exchange_it() -> None:
        while not (made := put.read_text()):
            time.sleep(0.01)
        Path(made).rename(Path(made).with_name("away"))
        Path(made).mkdir(0o777)
        put.unlink()

    put.chmod(0o666)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(top))
        ada = begin_as(ADA, save, umask=0o002)
        as_one(EVE, exchange_it, umask=0)
        end(ada, ADA)


@pytest.mark.threat(
    "A member gives a checkpoint of your script the name `x --config=theirs ckpt.pt`. Where your command is shell code "
    "(`train.py $FTSUPERVISE_RESUME | tee log`), the shell would take that for options of theirs.",
    "A path that a shell takes apart is given to no shell code; the run says which it is.",
)
@pytest.mark.parametrize(
    ("name", "goes_on"), [("ckpt.pt", True), ("x --config=theirs ckpt.pt", False), ("*.pt", False)]
)
def test_no_name_of_a_checkpoint_adds_options_to_a_command(top: Path, name: str, *, goes_on: bool) -> None:
    os.chown(top, 0, PROJECT)
    top.chmod(0o2775)
    run, out = RunDir(top / "run"), top / "out"

    def save() -> None:
        make_folders(run, None)
        out.mkdir()
        (out / "ckpt.pt").write_bytes(b"weights")
        for number in (1, 2):
            run.attempt(number).mkdir()
            write_page(run.attempt(number), StartPage(number, at=datetime.now(timezone.utc)))
        write_page(run.attempt(1), LeftCheckpoint(str(out / name)))

    def begin(*command: str) -> None:
        place = ScriptPlace(run, run.checkpoints, command, run.attempt(2))
        found = resumption(place, "--resume {checkpoint}", 2)
        taken = goes_on or "-c" not in command
        assert found.words == (("--resume", str(out / name)) if taken else ()), found
        assert ("take the path of the newest checkpoint apart" in found.refused) is not taken

    as_one(ADA, save, umask=0o002)
    as_one(EVE, lambda: (out / "ckpt.pt").rename(out / name))
    as_one(ADA, partial(begin, "bash", "-c", "python train.py $FTSUPERVISE_RESUME | tee log"))
    as_one(ADA, partial(begin, "python", "train.py"))


@pytest.mark.parametrize("mode", [0o2775, 0o1777])
@pytest.mark.parametrize("theirs", [0o755, 0o777])
def test_a_save_says_whose_folder_has_its_name(top: Path, mode: int, theirs: int) -> None:
    os.chown(top, 0, PROJECT)
    top.chmod(mode)

    def save() -> None:
        with pytest.raises(FileExistsError, match=f"belongs to {EVE}"), Guard(signals=()).checkpoint(1) as made:
            (made / "weights").write_bytes(b"w")

    def make_first() -> None:
        (top / "step-00000001").mkdir(theirs)
        (top / "step-00000001" / "x").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(top))
        as_one(EVE, make_first, umask=0)
        as_one(ADA, save, umask=0o002)
    assert (top / "step-00000001" / "x").exists()
