"""``ftsupervise report --follow``: a page stays true while the run goes on, is not to be seen, and is over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.report.everything import report_of
from ftsupervise.report.following import FollowedPage, PageLife
from ftsupervise.report.html import page
from ftsupervise.report.week import week_of
from ftsupervise.report.week_page import page as page_of_all
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Finished, write_finished
from tests.neighbours import chromium
from tests.neighbours.chromium import Chromium
from tests.neighbours.patience import wait_until
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import Program, outside_a_job
from tests.neighbours.typed import FT, typed

NOW = datetime.now(timezone.utc)
in_a_browser = pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here: apt-get install chromium")
Follow = Callable[..., Program]


class Desk:
    """Runs with a past, and the account that has launched them."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.pages = folder, folder / "pages"
        self.env = outside_a_job(**prepare(folder, NOW, names))

    def said(self, name: str) -> str:
        """What the page ``name`` says of itself; "" before it is there."""
        try:
            text = (self.pages / name).read_text()
        except FileNotFoundError:
            return ""
        assert text.rstrip().endswith("</html>"), "a page is whole at each moment"
        return " ".join(re.findall(r'<p class="(?:sub|alarm)" (?:id="follow"|role="status")>([^<]*)</p>', text))


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Begin ``report --follow``; whatever was begun is ended after the test."""
    begun: list[Program] = []

    def begin(desk: Desk, *words: str) -> Program:
        heard = ("env", "--default-signal=INT,HUP")  # in the background of a shell, tests begin with these ignored
        argv = [*heard, *FT, "report", *words, "--follow", "--every", "5s", "-o", str(desk.pages)]
        begun.append(Program(argv, desk.folder, desk.env, desk.folder / f"followed-{len(begun)}"))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def test_a_followed_page_is_renewed_until_the_run_is_over_and_the_last_one_says_so(
    tmp_path: Path, follow: Follow
) -> None:
    desk = Desk(tmp_path, "hang")
    one = follow(desk, "hang")
    wait_until(lambda: "Renewed every" in desk.said("report-hang.html"), "the first page")
    first = (desk.pages / "report-hang.html").stat()
    wait_until(lambda: (desk.pages / "report-hang.html").stat().st_ino != first.st_ino, "the next page")
    assert "last page" not in desk.said("report-hang.html")
    rundir = RunDir(tmp_path / "hang")
    write_finished(rundir, Finished(99, 3, "node-01", NOW))
    assert one.wait(180) == 0
    assert desk.said("report-hang.html") == "It is over, and this is the last page: nothing renews it any more."
    assert one.said().splitlines()[-1].endswith("report-hang.html: it is FINISHED: this is the last page")
    assert "refresh" not in (desk.pages / "report-hang.html").read_text()
    assert not list(desk.pages.glob(".tmp-*"))


@pytest.mark.fault(
    "The run directory of a followed report is not to be seen for a while",
    "`report --follow` goes on: the page keeps what was seen last and says since when nothing newer is, and it is renewed when "
    "the run is seen again",
)
def test_a_page_says_since_when_nothing_could_be_seen_and_goes_on_afterwards(tmp_path: Path, follow: Follow) -> None:
    desk = Desk(tmp_path, "fine")
    follow(desk, "fine")
    wait_until(lambda: "Renewed every" in desk.said("report-fine.html"), "the first page")
    (tmp_path / "fine").rename(tmp_path / "away")
    said = wait_until(lambda: _with(desk, "report-fine.html", "it cannot be seen in full"), "the page to say so")
    since = re.search(r"Since (\S+ \S+) UTC it cannot be seen in full: .*fine", said)
    assert since and "What stands below was seen at" in said, said
    again = wait_until(lambda: _later(desk, "report-fine.html", said), "the next page")
    assert since[0][:30] == again[again.index("Since") :][:30], "it says since when, not since the last look"
    (tmp_path / "away").rename(tmp_path / "fine")
    wait_until(lambda: "cannot be seen" not in desk.said("report-fine.html"), "the run to be seen again")


def _with(desk: Desk, name: str, words: str) -> str:
    said = desk.said(name)
    return said if words in said else ""


def _later(desk: Desk, name: str, before: str) -> str:
    path = desk.pages / name
    stamp = path.stat().st_ino
    wait_until(lambda: path.stat().st_ino != stamp, "a newer page")
    return desk.said(name)


def test_a_queue_that_does_not_answer_is_told_with_its_begin_and_is_no_end(tmp_path: Path, follow: Follow) -> None:
    desk = Desk(tmp_path, "hang")
    queue = next(Path(one) for one in desk.env["PATH"].split(":") if (Path(one) / "squeue").exists())
    follow(desk, "hang")
    wait_until(lambda: "Renewed every" in desk.said("report-hang.html"), "the first page")
    (queue / "squeue").rename(queue / "away")
    (queue / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    (queue / "squeue").chmod(0o755)
    said = wait_until(lambda: _with(desk, "report-hang.html", "cannot be seen in full"), "the page to say so")
    assert "Unable to contact slurm controller" in said and "What stands below" not in said
    (queue / "away").rename(queue / "squeue")
    wait_until(lambda: "cannot be seen" not in desk.said("report-hang.html"), "the queue to answer again")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_it_leaves_a_page_that_says_that_it_is_not_renewed(
    tmp_path: Path, follow: Follow, number: signal.Signals
) -> None:
    desk = Desk(tmp_path, "fine")
    one = follow(desk, "fine")
    wait_until(lambda: "Renewed every" in desk.said("report-fine.html"), "the first page")
    one.until_said("renewed every 5 s")
    one.send_signal(number)
    assert one.wait(30) == (130 if number is signal.SIGINT else 128 + number)
    assert "Nobody follows it since" in desk.said("report-fine.html")
    assert "Traceback" not in one.said()


def test_the_page_of_all_runs_leads_to_each_and_back(tmp_path: Path, follow: Follow) -> None:
    desk = Desk(tmp_path, "hang", "fine")
    follow(desk, "--week")
    wait_until(lambda: "Renewed every" in desk.said("index.html"), "the page of all")
    text = (desk.pages / "index.html").read_text()
    for name in ("hang", "fine"):
        assert f'<a href="report-{name}.html">{name}</a>' in text
        assert '<a href="index.html">All runs</a>' in (desk.pages / f"report-{name}.html").read_text()


def test_a_run_that_is_launched_anew_is_followed_again_and_the_account_is_for_ever(
    tmp_path: Path, follow: Follow
) -> None:
    desk = Desk(tmp_path, "hang")
    one = follow(desk, "--week")
    wait_until(lambda: "Renewed every" in desk.said("report-hang.html"), "its page")
    write_finished(RunDir(tmp_path / "hang"), Finished(99, 3, "node-01", NOW))
    wait_until(lambda: "last page" in desk.said("report-hang.html"), "its last page", 180)
    assert one.poll() is None and "Renewed every" in desk.said("index.html"), "other runs may begin"
    RunDir(tmp_path / "hang").finished.unlink()
    wait_until(lambda: "Renewed every" in desk.said("report-hang.html"), "it to be followed again", 180)


def test_a_week_of_named_runs_ends_with_them(tmp_path: Path, follow: Follow) -> None:
    desk = Desk(tmp_path, "hang", "fine")
    for name in ("hang", "fine"):
        write_finished(RunDir(tmp_path / name), Finished(99, 3, "node-01", NOW))
    one = follow(desk, "--week", "hang", "fine")
    assert one.wait(180) == 0
    assert one.said().splitlines()[-1].endswith("index.html: all 2 runs are over: these are the last pages")
    for name in ("index.html", "report-hang.html", "report-fine.html"):
        assert "this is the last page" in desk.said(name)


def test_a_week_in_a_folder_has_the_page_of_each_run_without_following(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "hang", "fine")
    shutil.rmtree(tmp_path / "fine")
    done = typed("report", "--week", "-o", "out/", folder=tmp_path, env=desk.env, code=0)
    assert sorted(os.listdir(tmp_path / "out")) == ["index.html", "report-hang.html"]
    assert 'href="report-hang.html"' in (tmp_path / "out" / "index.html").read_text()
    assert "Renewed" not in (tmp_path / "out" / "index.html").read_text()
    assert "index.html: " in done.stdout
    typed("report", "hang", "-o", "out", folder=tmp_path, env=desk.env, code=0)
    assert '"index.html"' not in (tmp_path / "out" / "report-hang.html").read_text(), "alone it leads nowhere"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fine", "--follow"), "--follow renews pages in a folder"),
        (("fine", "--follow", "-o", "-"), "--follow renews pages in a folder"),
        (("fine", "--follow", "-o", "out", "--every", "1s"), "--every: 1s is not between 5s and 1d"),
        (("fine", "--follow", "-o", "out", "--every", "soon"), "--every: "),
        (("fine", "--follow", "--markdown", "-o", "out"), "--follow renews pages in a folder"),
        (("nobody", "--follow", "-o", "out"), "no run called 'nobody' here"),
        (("fine", "--follow", "-o", "fine/run.yaml"), "cannot make the folder"),
    ],
)
def test_what_cannot_be_followed_is_said_in_a_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    desk = Desk(tmp_path, "fine")
    done = typed("report", *words, folder=tmp_path, env=desk.env)
    assert done.returncode in (64, 66, 1, 73) and said in done.stderr, done.stderr


# ------------------------------------------------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = Chromium(tmp_path_factory.mktemp("chromium"))
    found.size(1200, 900)
    yield found
    found.close()


@pytest.fixture
def written(tmp_path: Path, browser: Chromium) -> Iterator[Callable[..., Path]]:
    """A page of the run, or of all, as one that is followed. After the test the browser shows none that loads itself again."""
    env = outside_a_job(**prepare(tmp_path, NOW, ("hang",)))

    def write(
        life: PageLife = PageLife.RENEWED, *, every: float = 1.0, ago: timedelta = timedelta(0), title: str = ""
    ) -> Path:
        about = FollowedPage(life, datetime.now(timezone.utc) - ago, every)
        text = page(report_of(RunDir(tmp_path / "hang"), NOW, env), about, "index.html")
        (tmp_path / "page.html").write_text(text.replace("<title>hang", f"<title>{title}hang"))
        week = page_of_all(week_of({"hang": tmp_path / "hang"}, NOW, env), {"hang": "page.html"}, about)
        (tmp_path / "index.html").write_text(week.replace("<title>", f"<title>{title}"))
        return tmp_path / "page.html"

    yield write
    browser.call("Page.navigate", url="about:blank")
    wait_until(lambda: browser.run("location.href + document.readyState") == "about:blankcomplete", "an empty page")


def until_title(browser: Chromium, begin: str) -> None:
    wait_until(lambda: str(browser.run("document.title")).startswith(begin), f"a page that begins with {begin}", 30)


@in_a_browser
@pytest.mark.parametrize("name", ["page.html", "index.html"])
def test_an_open_page_loads_itself_again_without_a_network_and_stays_where_it_was(
    browser: Chromium, written: Callable[..., Path], name: str
) -> None:
    path = written(title="old ").with_name(name)
    browser.open(path)
    browser.run("scrollTo(0, 300)")
    at = browser.run("scrollY")
    assert at > 100
    written(title="new ")
    until_title(browser, "new ")
    assert browser.errors == [] and path.as_uri() in browser.asked
    assert {url for url in browser.asked if not url.startswith(path.parent.as_uri())} == set()
    wait_until(lambda: abs(browser.run("scrollY") - at) < 5, "the place where the reader was", 10)


@in_a_browser
def test_it_does_not_load_again_under_the_hands_of_a_reader(browser: Chromium, written: Callable[..., Path]) -> None:
    browser.open(written(title="old "))
    browser.run(
        "(e => { e.value = 'node'; e.dispatchEvent(new Event('input', {bubbles: true})); })(document.querySelector('#find'))"
    )
    written(title="new ")
    browser.run("new Promise(done => setTimeout(done, 3500))")
    assert (
        browser.run("document.title").startswith("old ")
        and browser.run("document.querySelector('#find').value") == "node"
    )
    browser.run(
        "(e => { e.value = ''; e.dispatchEvent(new Event('input', {bubbles: true})); })(document.querySelector('#find'))"
    )
    until_title(browser, "new ")


@in_a_browser
def test_a_page_that_is_no_longer_renewed_does_not_look_fresh(browser: Chromium, written: Callable[..., Path]) -> None:
    hidden = "document.getElementById('stale').hidden"
    browser.open(written(every=60.0))
    assert browser.run(hidden) is True
    browser.open(written(every=60.0, ago=timedelta(minutes=10)))
    assert browser.run(hidden) is False
    for life in (PageLife.OVER, PageLife.LEFT):
        browser.open(written(life))
        assert browser.run("document.getElementById('stale')") is None
        assert browser.run("document.getElementById('follow').textContent").endswith("any more.")
        assert browser.run("document.querySelectorAll('noscript').length") == 0


@in_a_browser
def test_without_scripts_the_browser_renews_it_all_the_same(browser: Chromium, written: Callable[..., Path]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(written(title="old "))
        written(title="new ")

        def title() -> str:
            return json.dumps(browser.call("DOM.getDocument", depth=4)["root"])

        wait_until(lambda: "new hang" in title(), "the newer page", 30)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@in_a_browser
def test_a_click_leads_from_all_runs_to_one_and_back(browser: Chromium, written: Callable[..., Path]) -> None:
    browser.open(written(every=60.0).with_name("index.html"))
    browser.run("document.querySelector('#runs th a').click()")
    until_title(browser, "hang")
    browser.run("document.querySelector('header a[href=\"index.html\"]').click()")
    until_title(browser, "Training runs")


@in_a_browser
@pytest.mark.parametrize("name", ["page.html", "index.html"])
def test_a_followed_page_fits_the_narrowest_phone_and_axe_finds_nothing(
    browser: Chromium, written: Callable[..., Path], name: str
) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed here")
    browser.size(360, 740, phone=True)
    try:
        browser.open(written(every=60.0, ago=timedelta(minutes=10)).with_name(name))
        assert browser.run("document.documentElement.scrollWidth") <= 360
        browser.run((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
        found: dict[str, Any] = browser.run("axe.run(document, {resultTypes: ['violations']})")
        assert not [one["id"] for one in found["violations"] if one["impact"] in ("serious", "critical")]
    finally:
        browser.size(1200, 900)
