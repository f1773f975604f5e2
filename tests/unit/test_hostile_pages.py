"""Any bytes in any page: it is skipped or told in one sentence, in bounded memory and time, and no reader fails."""

from __future__ import annotations

import json
import os
import resource
import stat
import time
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.nodes import exclude, incidents, judging
from ftsupervise.report import output
from ftsupervise.run import exit_analysis
from ftsupervise.rundir import heartbeat_page, launches, ledger, switches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_json
from ftsupervise.rundir.switches import KILL, read_switch

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)

PAGES = (
    "attempts/0001/start.json",
    "attempts/0001/end.json",
    "attempts/0001/error.json",
    "attempts/0001/warning",
    "launches/0001/launch.json",
    "nodes/incidents/w.json",
    "nodes/exclude/node-1",
    "nodes/cleared/node-1",
    "nodes/applied/7",
    "state/brake",
    "state/released",
    "state/finished",
    "beats/rank-0",
    "watch/watchers/other",
    "switches/kill-switch",
)


def read_all(run: RunDir) -> list[str]:
    """What each reader makes of the run, as text; and what is done with it: sums of times, judging, words."""
    known = incidents.read([run.nodes])
    found = [
        repr(ledger.ledger(run)),
        repr([(one, NOW - one.at, one.at.astimezone()) for one in launches.launches(run)]),
        repr(launches.people(run)),
        repr((known, judging.judge(known, 1, NOW), exclude.our_exclusions(run.nodes, "7"))),
        repr(
            [
                (one, one.late_by(NOW), NOW + (one.every or timedelta()))
                for one in heartbeat_page.look_at_watchers(run)[0]
            ]
        ),
        repr([(one, NOW - one.at) for one in heartbeat_page.read_beats(run)]),
        repr((read_switch(run, KILL), exit_analysis.root_error(run.attempt(1) / "error.json"))),
        repr((switches.counts_from(run), switches.still_held(run), switches.read_brake(run))),
    ]
    if on := switches.read_brake(run):
        found.append(on.words())
    return found


_HARD: list[Any] = [
    "n[1-", "n[0-99999][0-99999]", "n[0-9]" * 40, "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00",
    "2026-11-21T03:00:00", "\x1b]0;x\x07", "²", "\ud800", 10**17, -(10**17), 10**250, 1e308, -1e308, None, True, [], {},
]  # fmt: skip
_KEYS = [
    "at", "every", "host", "node", "incidents", "kind", "until", "nodes", "who", "why", "attempt", "held", "step", "rank",
    "facts", "job_ids", "members", "by", "message", "times", "exit_code", "pid", "pid_start", "boot_id", "ready", "detail",
]  # fmt: skip
values = st.recursive(
    st.one_of(st.sampled_from(_HARD), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(_KEYS), values, max_size=12)
pages = st.one_of(st.binary(max_size=200), objects.map(lambda page: json.dumps(page).encode()))
_TIMES = b'{"at": "9999-12-31T23:59:59-14:00", "every": 1e309, "incidents": [{"node": "n", "at": "9999-12-31T23:59:59-14:00"}]}'


@pytest.mark.threat(
    "A file holds arbitrary bytes: NaN, 1e309, 250 digits, a time without zone, the year 9999, brackets, half a "
    "surrogate pair.",
    "One parser turns them into finite numbers, times in UTC and printable text. It skips the rest or reports it in "
    "a sentence.",
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(page=pages)
@example(page=b'{"nodes": "n[1-"}')
@example(page=b'{"nodes": "n[0-99999][0-99999]"}')
@example(page=_TIMES)
@example(page=b'{"at": "2026-11-21T03:00:00", "every": NaN, "rank": 0, "step": Infinity}')
@example(page=b'{"attempt": ' + b"7" * 250 + b', "rank": 0, "every": -1e308}')
@example(page=b'{"every": 1e308, "at": "2026-11-21T03:00:00Z"}')
@example(page=b"[" * 100_000)
@example(page=b'{"at": ' + b"[" * 500 + b"]" * 500 + b"}")
@example(page=b'{"who": "\\ud800", "why": "\\ud800", "by": "\\ud800"}')
def test_any_bytes_in_any_page_are_skipped_or_told(tmp_path: Path, page: bytes) -> None:
    run = RunDir(tmp_path / "run")
    for name in PAGES:
        (run.root / name).parent.mkdir(parents=True, exist_ok=True)
        (run.root / name).write_bytes(page)
    for text in read_all(run):
        text.encode()  # no half of a surrogate pair: it could not be written or sent


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1_000_000_000)


@pytest.mark.threat(
    "A FIFO, a link to `/dev/zero`, a folder or a file of 1 GB lies in the place of a file.",
    "ftsupervise reads only regular files, never waits, and stops at its bound.",
)
@pytest.mark.parametrize(
    "lay", [_fifo, _endless, Path.mkdir, _huge], ids=["FIFO", "link to /dev/zero", "folder", "1 GB"]
)
@pytest.mark.parametrize("name", PAGES)
def test_no_fifo_device_folder_or_gigabyte_in_place_of_a_page_holds_a_reader(
    tmp_path: Path, name: str, lay: Callable[[Path], None]
) -> None:
    run = RunDir(tmp_path / "run")
    (run.root / name).parent.mkdir(parents=True)
    lay(run.root / name)
    began = time.monotonic()
    tracemalloc.start()
    try:
        read_all_but_errors(run)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 10
    assert peak < 50_000_000


def read_all_but_errors(run: RunDir) -> None:
    """A mark that cannot be read is an OSError, which its callers tell: a brake that is not seen is not off."""
    try:
        read_all(run)
    except OSError:
        assert (run.state).is_dir()


@pytest.mark.threat(
    "Folders among attempts and launches are named with digits of other scripts (²).",
    "Only plain digits count as a number.",
)
def test_a_folder_of_names_that_look_like_numbers_holds_only_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("²", "٣", "1" * 40, "0002", "x", "-1", "1_0"):
        (run.attempts / name).mkdir(parents=True)
        (run.launches / name).mkdir(parents=True)
    assert ledger.numbers(run) == [2]
    assert [one.number for one in launches.launches(run)] == [2]


@pytest.mark.threat(
    "`watch/watchers` holds 50,000 files.",
    "ftsupervise reads 200 of them, its own first, and a finding says so.",
)
def test_fifty_thousand_watcher_files_are_bounded_and_said(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    place = heartbeat_page.watcher_folder(run)
    place.mkdir(parents=True)
    for number in range(50_000):
        os.close(os.open(place / f"w{number}", os.O_CREAT | os.O_WRONLY))
    run.watch.chmod(0o755)
    heartbeat_page.write_watcher(run, NOW, timedelta(minutes=1))
    began = time.monotonic()
    known, odd = heartbeat_page.look_at_watchers(run)
    assert time.monotonic() - began < 5
    assert "of which 200 are read" in odd
    assert len(known) <= heartbeat_page.MOST_WATCHERS


@pytest.mark.threat(
    "A stranger's file in `nodes/` excludes nodes, or a file in `watch/watchers` claims to be a watch.",
    "A file is trusted only from the folder's owner, this account, root, and group members if the folder is shared.",
)
def test_what_a_stranger_wrote_into_nodes_or_watchers_is_not_believed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    run = RunDir(tmp_path / "run")
    incidents.prepare(run.nodes)
    run.watch.mkdir()
    incidents.set_override(run.nodes, incidents.EXCLUDE, "node-1", who="ada", why="ecc", now=NOW)
    incidents.set_override(run.nodes, incidents.EXCLUDE, "node-2", who="ada", why="forged", now=NOW)
    book = incidents.IncidentLog("w")
    book.add([incidents.Incident("node-3", "hardware", NOW)])
    book.write([run.nodes])
    heartbeat_page.write_watcher(run, NOW, None)
    for path in (
        run.nodes / "exclude" / "node-2",
        run.nodes / "incidents" / "w.json",
        heartbeat_page.watcher_folder(run) / heartbeat_page.own_watcher(),
    ):
        os.chown(path, 65534, 65534)
    known = incidents.read([run.nodes])
    assert [mark.node for mark in known.overrides] == ["node-1"]
    assert known.incidents == ()
    assert heartbeat_page.watchers(run) == ()
    assert any("node-2" in text and "nobody" in text and "not obeyed" in text for text in known.problems), (
        known.problems
    )
    assert any("w.json" in text and "nobody" in text for text in known.problems)


@pytest.mark.threat(
    "A group member edits the mark of a node that was made with umask 002.",
    "The mark counts, and its text is ignored.",
)
def test_what_a_group_could_have_written_into_a_mark_is_not_read_but_the_mark_stands(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give files to a group")
    run = RunDir(tmp_path / "run")
    incidents.prepare(run.nodes)
    mark = run.nodes / "exclude" / "node-1"
    mark.write_text(json.dumps({"who": "ada", "until": "2020-01-01T00:00:00+00:00"}))
    os.chown(mark, -1, 100)
    mark.chmod(0o664)
    (found,) = incidents.read([run.nodes]).overrides
    assert (found.who, found.until) == ("", None)


@pytest.mark.threat(
    "A host list such as `n[0-99999][0-99999]` would fill the memory.",
    "The nodes are counted first. A list of more than 200,000 is refused.",
)
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="n0129[]-,²٣ ", max_size=40))
@example("n[0-99999][0-99999]")
@example("n[0-199999],m[0-199999]")
@example("n[²]")
@example("[0-9]" * 2000)
@example("x" * 1_000_000)
def test_any_text_is_a_list_of_hosts_or_a_value_error_and_never_large(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        names = expand_hostlist(text)
    except ValueError:
        names = ()
    assert len(names) <= 200_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}", fullmatch=True), max_size=30))
def test_a_list_of_hosts_comes_back_from_its_short_form(names: list[str]) -> None:
    assert set(expand_hostlist(compress_hostlist(names))) == set(names)


def test_a_page_is_a_regular_file_of_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "page.json"
    for bad in ('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e309}', '{"a": ' + "9" * 250 + "}", "[]", "", '{"a": "'):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"page\.json"):
            read_json(path)
    path.write_text('{"a": 1e300, "b": -123456789012345678, "c": [{"d": "\\u00e9"}]}')
    assert read_json(path) == {"a": 1e300, "b": -123456789012345678, "c": [{"d": "é"}]}
    assert stat.S_ISREG(path.stat().st_mode)


@pytest.mark.threat(
    "A line of a log is made to be slow to search (20,000 characters took `logs --errors` a minute), or begins with "
    "a number of thousands of digits.",
    "The search takes a time that grows with the length alone, and a longer number is none of a rank.",
)
def test_no_line_of_a_log_is_slow_to_search_and_no_number_in_it_stops_its_reader() -> None:
    lines = ["a." * 10_000, "9" * 19_000 + ": x", "x" * 20_000 + " failed", "1: KeyError"]
    began = time.process_time()
    assert list(output.telling(lines)) == [lines[2], lines[3]]
    assert time.process_time() - began < 1.0
    assert list(output.of_rank(lines, 1)) == [lines[3]]
