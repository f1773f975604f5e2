"""Whose word the alerts' journal is: generations that real other accounts have laid there. Needs root to become them."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import JournalState, Message, Silence
from ftsupervise.alerts.record import record
from ftsupervise.findings import Notice, Reason
from tests.faults.test_switch_owners import MEMBER, OWNER, STRANGER, as_user
from tests.story.alerting_scene import RUN, T0, bad, good, minutes, settings, tick
from tests.story.forged import generation, lay

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")]

HUSH = Silence("f0f0f0", "*", OWNER, "all is well", T0 - timedelta(hours=1), T0 + timedelta(days=30))
SPAM = Notice("spam", Reason.ANNOUNCED, replace(bad(), summary="click http://evil.example"), T0)
FORGED = JournalState(silences=(HUSH,), outbox=(Message("spam", "file", RUN, (SPAM,), created=T0, due=T0),))


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All that a tick imports: the interpreter of the tests may lie where other accounts cannot read."""
    folder = tmp_path_factory.mktemp("warm")
    alerts = settings([{"file": {"path": str(folder / "told")}}])
    tick(Journal(folder / "journal", spare=folder / "spare"), alerts, T0, bad())


@pytest.fixture
def run() -> Iterator[Path]:
    """A run directory of OWNER's, with a place of OWNER's for what is told and for spare journals."""
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    uid, gid = pwd.getpwnam(OWNER).pw_uid, pwd.getpwnam(OWNER).pw_gid
    os.chown(top, uid, gid)
    top.chmod(0o755)

    def make() -> None:
        for folder in (top / "run" / "switches", top / "run" / "watch" / "journal"):
            folder.mkdir(parents=True)

    as_user(OWNER, make)
    yield top / "run"
    shutil.rmtree(top)


def journal_of(run: Path) -> Journal:
    return Journal(run / "watch" / "journal", spare=run.parent / "spares" / f"{os.geteuid()}")


def watch(run: Path, minute: float, *, well: bool = False) -> list[str]:
    """One tick as OWNER: (what it complains of)."""

    def act() -> list[str]:
        try:
            return one_tick()
        except Exception:  # to be read here, and not to be taken for silence
            return [traceback.format_exc()]

    def one_tick() -> list[str]:
        journal, now = journal_of(run), minutes(minute)
        alerts = settings([{"file": {"path": str(run.parent / "told")}}])
        recorded = record(journal, [good(now) if well else bad(now)], alerts, now, run_name=RUN)
        failed = deliver([journal], alerts, now).failed
        return [*recorded.problems, recorded.unsaved, *(why for _, why in failed)]

    said: list[str] = as_user(OWNER, act)  # type: ignore[assignment]
    assert isinstance(said, list) and not any("Traceback" in words for words in said), said
    return [words for words in said if words]


def told(run: Path) -> str:
    return (run.parent / "told").read_text() if (run.parent / "told").exists() else ""


def attack(run: Path, act: Callable[[Path], object], *, who: str = STRANGER) -> None:
    """``act`` as another account, who may write into the folder as into /tmp; then the folder is as it was."""
    folder = run / "watch" / "journal"
    folder.chmod(0o1777)
    try:
        assert as_user(who, lambda: bool(act(folder)) or True) is True
    finally:
        folder.chmod(0o755)


def forgeries(folder: Path) -> None:
    lay(folder, "00000050", generation(FORGED, 50, 1))
    lay(folder, "00000051", generation(JournalState(), 51, "1e309"))
    lay(folder, "00000052", generation('{"receivers": {"file": {"not_before": "9999-12-31T23:59:59-14:00"}}}', 52))
    lay(folder, "9" * 249, b"")
    lay(folder, "999999999999", generation(FORGED, 999999999999, 1))
    os.mkfifo(folder / "00000053.json")
    (folder / "00000054.json").symlink_to("/dev/zero")
    (folder / "00000055.json").symlink_to(folder / "00000050.json")
    (folder / "00000056.json").mkdir()


@pytest.mark.threat(
    "A stranger lays generations with silences, messages, FIFOs and links into the journal.",
    "ftsupervise trusts and sends none of them, reports their owner, and the alerts go on.",
)
def test_what_a_stranger_lays_into_the_journal_is_told_and_not_believed(run: Path) -> None:
    watch(run, 0, well=True)
    attack(run, forgeries)
    problems = watch(run, 5)
    assert any(f"belongs to {STRANGER}" in words for words in problems)
    assert "3.2 TB free" in told(run), "no silence of theirs holds a message back"
    watch(run, 10, well=True)
    assert "RESOLVED" in told(run) and "evil" not in told(run), "and none of theirs goes out"
    names = {
        path.name for path in (run / "watch" / "journal").iterdir() if path.stat().st_uid == pwd.getpwnam(OWNER).pw_uid
    }
    assert max(names) > "00000056.json", "the journal is still written"


@pytest.mark.threat(
    "A stranger makes the journal's folder before the first tick.",
    "The journal begins beside the stranger's files.",
)
def test_a_journal_of_strangers_alone_is_an_empty_one_and_can_be_begun(run: Path) -> None:
    attack(run, forgeries)
    watch(run, 0)
    watch(run, 5, well=True)
    assert "FIRING" in told(run) and "RESOLVED" in told(run) and "evil" not in told(run)


@pytest.mark.threat("A stranger changes a generation that everybody may write.", "ftsupervise does not trust it.")
def test_what_everybody_may_write_is_believed_of_nobody(run: Path) -> None:
    watch(run, 0)
    journal = run / "watch" / "journal"

    def open_it() -> None:
        for path in journal.iterdir():
            path.chmod(0o666)

    as_user(OWNER, open_it)
    newest = max(journal.glob("*.json"))
    as_user(STRANGER, lambda: newest.write_bytes(generation(FORGED, int(newest.stem), 1)) and None)
    assert any("everybody may write" in words for words in watch(run, 5))
    assert "3.2 TB free" in told(run) and "evil" not in told(run)


@pytest.mark.threat(
    "A stranger puts a folder of their own in the journal's place.",
    "ftsupervise neither trusts nor writes it, and reports it.",
)
def test_a_folder_that_a_stranger_put_in_the_journal_s_place_is_neither_believed_nor_written(run: Path) -> None:
    watch(run, 0, well=True)
    (run / "watch").chmod(0o777)

    def swap() -> None:
        (run / "watch" / "journal").rename(run / "watch" / "old")
        (run / "watch" / "journal").mkdir(mode=0o777)
        (run / "watch" / "journal").chmod(0o777)
        forgeries(run / "watch" / "journal")

    assert as_user(STRANGER, swap) is None
    problems = watch(run, 5)
    assert any(f"belongs to {STRANGER}" in words or "everybody may write" in words for words in problems)
    watch(run, 10, well=True)
    assert told(run).count("3.2 TB free on /scratch, less than 5 TB\n") >= 1 and "evil" not in told(run)
    owner = pwd.getpwnam(OWNER).pw_uid
    assert not [path for path in (run / "watch" / "journal").iterdir() if path.lstat().st_uid == owner]


@pytest.mark.threat(
    "A stranger gives one of the owner's old generations a new number.",
    "ftsupervise does not trust it.",
)
def test_an_old_generation_under_a_new_name_is_not_believed(run: Path) -> None:
    watch(run, 0)
    oldest = min((run / "watch" / "journal").glob("*.json"))
    folder = run / "watch" / "journal"
    folder.chmod(0o777)
    assert as_user(STRANGER, lambda: oldest.rename(folder / "00000099.json") and None) is None
    folder.chmod(0o755)
    watch(run, 5)
    assert "another generation" in told(run)
    assert told(run).count("3.2 TB free on /scratch, less than 5 TB\n") == 1, "nothing is told anew"


# ------------------------------------------------------------------------------------------------- a shared watch


@pytest.fixture
def shared(run: Path) -> Path:
    """The same with a watch that is shared with MEMBER's group, as ``share.watch`` makes it."""
    group = grp.getgrgid(pwd.getpwnam(MEMBER).pw_gid).gr_gid
    for folder in (run / "watch", run / "watch" / "journal"):
        os.chown(folder, -1, group)
        folder.chmod(0o2775)
    return run


def change(run: Path, who: str, make: Callable[[JournalState], JournalState]) -> None:
    def act() -> str:
        journal = journal_of(run)
        journal.change(make)
        return journal.unsaved

    assert as_user(who, act) == ""


def read_by(run: Path, who: str) -> JournalState:
    from ftsupervise.rundir.records import decode, encode

    raw = as_user(who, lambda: json.dumps(encode(journal_of(run).read())))
    return decode(JournalState, json.loads(str(raw)))


@pytest.mark.threat(
    "A member of a shared watch silences an alert in the owner's name.",
    "The silence bears the name of the account that wrote it.",
)
def test_who_silenced_is_the_account_that_wrote_it_whatever_the_text_says(shared: Path) -> None:
    mine = replace(HUSH, id="mine", pattern="gpu", reason="mine")
    watch(shared, 0, well=True)
    change(shared, OWNER, lambda state: replace(state, silences=(mine,)))
    change(shared, MEMBER, lambda state: replace(state, silences=(*state.silences, HUSH)))
    for who in (OWNER, STRANGER):
        authors = {s.id: s.author for s in read_by(shared, who).silences}
        assert authors == {"mine": OWNER, HUSH.id: MEMBER}, who
    watch(shared, 5)
    assert {s.id: s.author for s in read_by(shared, OWNER).silences} == {"mine": OWNER, HUSH.id: MEMBER}
    assert "3.2 TB free" not in told(shared), "a member may silence: that is what was shared"


@pytest.mark.threat(
    "A member of a shared watch acknowledges an alert in the owner's name.",
    "The acknowledgement bears the name of the account that wrote it.",
)
def test_who_acknowledged_is_the_account_that_wrote_it_whatever_the_text_says(shared: Path) -> None:
    watch(shared, 0)

    def forge(state: JournalState) -> JournalState:
        alerts = {k: replace(a, acked_by=OWNER, acked_at=T0, ack_note="fine") for k, a in state.alerts.items()}
        return replace(state, alerts=alerts)

    change(shared, MEMBER, forge)
    assert {a.acked_by for a in read_by(shared, OWNER).alerts.values() if a.acked_at} == {MEMBER}
    watch(shared, 5)
    assert {a.acked_by for a in read_by(shared, STRANGER).alerts.values() if a.acked_at} == {MEMBER}


@pytest.mark.threat(
    "A member removes the history to hide the author of a silence.",
    "ftsupervise shows the author's name as that member's claim: `OWNER (says MEMBER)`.",
)
def test_a_member_that_takes_the_history_away_proves_nothing_by_it(shared: Path) -> None:
    watch(shared, 0, well=True)
    change(shared, MEMBER, lambda state: replace(state, silences=(HUSH,)))

    def take_away() -> None:
        for path in sorted((shared / "watch" / "journal").glob("*.json"))[:-1]:
            path.unlink()

    assert as_user(MEMBER, take_away) is None
    assert [s.author for s in read_by(shared, OWNER).silences] == [f"{OWNER} (says {MEMBER})"]


@pytest.mark.threat(
    "A member writes escape sequences into the shared journal.",
    "The sequences reach neither a terminal nor a receiver.",
)
def test_what_a_member_writes_reaches_no_terminal_as_an_escape(shared: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    notice = Notice("n", Reason.ANNOUNCED, replace(bad(), summary=f"a{evil}b", detail=f"c\n{evil}d"), T0)
    hush = replace(HUSH, pattern=f"gpu{evil}", reason=evil)
    watch(shared, 0, well=True)
    message = Message("m", "file", RUN, (notice,), created=T0, due=T0, note=evil)
    change(shared, MEMBER, lambda state: replace(state, outbox=(message,), silences=(hush,)))
    watch(shared, 5)
    said = told(shared) + "".join(s.pattern + s.reason for s in read_by(shared, OWNER).silences)
    assert "owned" in said and not set(evil) & {"\x1b", "\x07", "\u202e"} & set(said)


def test_two_accounts_that_share_a_watch_tell_each_thing_once(shared: Path) -> None:
    watch(shared, 0)

    def other() -> str:
        journal, now = journal_of(shared), minutes(5)
        alerts = settings([{"file": {"path": str(shared.parent / "told")}}])
        done = record(journal, [bad(now)], alerts, now, run_name=RUN)
        return f"{len(done.notices)} {done.unsaved} {done.problems}"

    assert as_user(MEMBER, other) == "0  ()"
    watch(shared, 10, well=True)
    assert told(shared).count("==== ") == 2


@pytest.mark.threat(
    "A member of a shared watch writes that an alert came back thousands of times today, so that no look reckons to an end.",
    "It counts as often as any alert can.",
)
def test_an_alert_that_came_back_thousands_of_times_is_looked_at(shared: Path) -> None:
    watch(shared, 0)

    def often(state: JournalState) -> JournalState:
        return replace(state, alerts={key: replace(one, came=(T0,) * 3000) for key, one in state.alerts.items()})

    change(shared, MEMBER, often)
    watch(shared, 5)
    assert [len(one.came) for one in read_by(shared, OWNER).alerts.values()] == [3000]
    watch(shared, 10, well=True)


@pytest.mark.threat(
    "An account outside of the group writes into a shared watch.",
    "ftsupervise does not trust the file.",
)
def test_a_stranger_is_not_believed_in_a_shared_watch_either(shared: Path) -> None:
    watch(shared, 0, well=True)
    folder = shared / "watch" / "journal"
    folder.chmod(0o3777)
    assert as_user(STRANGER, lambda: forgeries(folder)) is None
    folder.chmod(0o2775)
    assert any(STRANGER in words for words in watch(shared, 5))
    assert "3.2 TB free" in told(shared) and "evil" not in told(shared)


@pytest.mark.threat(
    "Somebody sets LOGNAME to another name and acknowledges an alert.",
    "ftsupervise writes the account's real name.",
)
def test_the_name_of_who_types_is_not_taken_from_the_environment(run: Path) -> None:
    from ftsupervise.host.ownership import user_name

    def who() -> str:
        os.environ.update(LOGNAME=OWNER, USER=OWNER, LNAME=OWNER, USERNAME=OWNER)
        return user_name()

    assert as_user(STRANGER, who) == STRANGER


class Exchanged(Journal):
    """A member is as fast as can be: ``exchange`` is called between a generation and the removal of the old ones."""

    exchange: Callable[[], object]

    def _still_ahead(self, number: int, here: set[int]) -> bool:
        return number % 4 != 0 or bool(self.exchange()) or True


@pytest.mark.threat(
    "A member of a shared watch exchanges the journal for a link to another journal of yours, in the moment between "
    "a new generation and the removal of the old ones.",
    "The folder is held open from the look at its owner until the last removal, and while it is read.",
)
def test_nothing_of_another_journal_is_pruned_where_a_member_exchanges_the_folder(shared: Path) -> None:
    """A member may rename what lies in ``watch``. The link leads to a journal of the owner's own, which is private."""
    other, journal = shared.parent / "mine" / "journal", shared / "watch" / "journal"

    def make() -> None:
        other.mkdir(parents=True)
        other.parent.chmod(0o700)
        for number in range(1, 30):
            path = other / f"{number:08d}.json"
            path.write_text("mine")
            os.utime(path, (1, 1))

    as_user(OWNER, make)
    before = sorted(os.listdir(other))
    asked, answered = os.pipe(), os.pipe()

    def exchange() -> None:
        os.read(asked[0], 1)
        journal.rename(journal.with_name("aside"))
        journal.symlink_to(other)
        os.write(answered[1], b"1")

    def write() -> int:
        for turn in range(1, 29):
            one = Exchanged(journal, spare=shared.parent / "spares" / "0", keep_for=0)
            one.exchange = lambda turn=turn: turn == 28 and (os.write(asked[1], b"1"), os.read(answered[0], 1))  # type: ignore[misc]
            one.change(lambda state, turn=turn: replace(state, announced_through=turn))  # type: ignore[misc]
        return turn

    pid = os.fork()
    if pid == 0:
        as_user(MEMBER, exchange)
        os._exit(0)
    try:
        assert as_user(OWNER, write) == 28
    finally:
        os.close(asked[1])
        os.waitpid(pid, 0)
    assert journal.is_symlink() and journal.lstat().st_uid == pwd.getpwnam(MEMBER).pw_uid, "she was there"
    assert sorted(os.listdir(other)) == before
    kept = sorted(os.listdir(journal.with_name("aside")))
    assert kept[0] == "00000005.json" and kept[-1] == "00000028.json", "the folder that was judged was worked in"


@pytest.mark.threat(
    "A member of a shared watch lays thousands of generations of 24 MB into the journal, which cost no room: one file with "
    "many names, or files of zeros. Each look at the run's alerts would take minutes.",
    "Their beginning says that they are none, and of all that other accounts have laid two are read at most.",
)
def test_thousands_of_large_generations_of_a_member_hold_no_look(shared: Path) -> None:
    watch(shared, 0)
    folder, names = shared / "watch" / "journal", range(100, 500)

    def lay_them() -> None:
        first = folder / "first"
        first.write_bytes(b'{"format": 1, "more": [' + b"[]," * 7_000_000 + b'[]], "state": {}}\n')
        for number in names[::2]:
            os.link(first, folder / f"{number:08d}.json")
        for number in names[1::2]:  # one that is whole up to its state
            lay(folder, f"{number:08d}", generation("{}", number))
            os.truncate(folder / f"{number:08d}.json", 23_000_000)

    as_user(MEMBER, lay_them)

    def look() -> list[str]:
        journal, begun = journal_of(shared), time.process_time()
        return [f"{len(journal.read().alerts)} {time.process_time() - begun < 2}", *journal.problems]

    said: list[str] = as_user(OWNER, look)  # type: ignore[assignment]
    assert said[0] == "1 True" and len(said) < 20, said
    watch(shared, 5, well=True)
    assert "RESOLVED" in told(shared)
