"""The report in a real Chromium: no error, no request, the filter and the keys work, and axe-core finds nothing serious."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.report.everything import report_of
from ftsupervise.report.html import page
from ftsupervise.report.week import week_of
from ftsupervise.report.week_page import page as week_page
from ftsupervise.rundir.paths import RunDir
from tests.neighbours import chromium
from tests.neighbours.chromium import Chromium
from tests.neighbours.prepared_runs import ninety_days, prepare
from tests.neighbours.supervised import outside_a_job

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here: apt-get install chromium")
NOW = datetime.now(timezone.utc)
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = Chromium(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The reports of two runs, and that of the week of both."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("hang", "hostile")
    env = outside_a_job(**prepare(folder, NOW, names))

    def write(name: str) -> Path:
        path = folder / f"{name}.html"
        if name == "week":
            path.write_text(week_page(week_of({one: folder / one for one in names}, NOW, env)))
        elif not path.exists():
            path.write_text(page(report_of(RunDir(folder / name), NOW, env)))
        return path

    return write


@pytest.fixture
def at_a_desk(browser: Chromium) -> Chromium:
    browser.size(1200, 900)
    browser.scheme("light")
    return browser


@pytest.mark.parametrize("name", ["hang", "hostile", "week"])
def test_it_opens_without_an_error_and_asks_for_nothing(at_a_desk: Chromium, written: Written, name: str) -> None:
    path = written(name)
    at_a_desk.open(path)
    assert at_a_desk.errors == []
    assert at_a_desk.asked == [path.as_uri()]
    assert name == "week" or at_a_desk.run("document.documentElement.dataset.ready") == "1"
    assert "owned" not in at_a_desk.run("document.title").partition(":")[0]
    assert at_a_desk.run("document.querySelectorAll('img, iframe, object, form[action]').length") == 0


@pytest.mark.threat("A script gets into a report all the same.", "The browser does not run it.")
def test_a_script_that_got_into_the_page_would_not_run(at_a_desk: Chromium, written: Written, tmp_path: Path) -> None:
    path = tmp_path / "injected.html"
    bad = "<script>document.title='owned'</script><svg onload=\"document.title='owned'\"></svg>"
    path.write_text(written("hang").read_text().replace("<main ", f"{bad}<main ", 1))
    at_a_desk.open(path)
    assert at_a_desk.run("document.title") != "owned"
    assert any("Content Security Policy" in words for words in at_a_desk.errors)


def test_the_filter_shows_what_is_wanted_and_the_heads_sort(at_a_desk: Chromium, written: Written) -> None:
    at_a_desk.open(written("hang"))

    def shown() -> list[str]:
        script = "[...document.querySelectorAll('#incidents tbody tr')].filter(r => !r.hidden).map(r => r.id)"
        found: list[str] = at_a_desk.run(script)
        return found

    def put(selector: str, value: str) -> None:
        at_a_desk.run(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    assert shown() == ["attempt-3", "attempt-2", "attempt-1"]
    put("#find", "4160 NODE-21")
    assert shown() == ["attempt-2"]
    assert at_a_desk.run("document.querySelector('#incidents output').textContent") == "1 of 3"
    put("#find", "nothing of the kind")
    assert shown() == []
    put("#find", "")
    at_a_desk.run("document.querySelector('#incidents th button').click()")
    at_a_desk.run("document.querySelector('#incidents th button').click()")
    assert shown() == ["attempt-1", "attempt-2", "attempt-3"]
    assert at_a_desk.run("document.querySelector('#incidents th').getAttribute('aria-sort')") == "ascending"


def test_the_pointer_and_the_keys_read_the_pictures(at_a_desk: Chromium, written: Written) -> None:
    at_a_desk.open(written("hang"))
    place = "(b => [b.x, b.y, b.width, b.height])(document.querySelector('[data-plot={}]').getBoundingClientRect())"
    for plot, words in (
        ("strip", "train for"),
        ("bars", "train"),
        ("step", "step "),
        ("loss", "loss "),
        ("rate", "s a step"),
    ):
        at_a_desk.run(f"document.querySelector('[data-plot={plot}]').scrollIntoView()")
        x, y, wide, high = at_a_desk.run(place.format(plot))
        at_a_desk.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 0.2 * wide, y=y + high / 2)
        assert words in at_a_desk.run("document.getElementById('tip').textContent"), plot
        assert at_a_desk.run("document.getElementById('tip').hidden") is False
    at_a_desk.run("document.querySelector('[data-plot=loss]').focus()")
    for key in ("Home", "ArrowRight"):
        at_a_desk.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert "loss 1" in at_a_desk.run("document.getElementById('heard').textContent"), "the first loss is above 10"


def test_without_scripts_everything_is_there_to_be_read(at_a_desk: Chromium, written: Written) -> None:
    at_a_desk.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        at_a_desk.open(written("hang"))
        text = at_a_desk.call("DOM.getDocument", depth=-1)["root"]
        assert "restarted in place" in json.dumps(text)
    finally:
        at_a_desk.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("name", ["hang", "hostile", "week"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Chromium, written: Written, name: str) -> None:
    for width in (390, 360):
        browser.size(width, 844, phone=True)
        browser.open(written(name))
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.size(1200, 900)


@pytest.mark.parametrize(("name", "scheme"), [("hang", "light"), ("hang", "dark"), ("week", "light")])
def test_axe_finds_no_serious_problem(browser: Chromium, written: Written, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed here")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    browser.scheme(scheme)
    browser.open(written(name))
    browser.run(script)
    found: dict[str, Any] = browser.run("axe.run(document, {resultTypes: ['violations']})")
    said = [
        (one["id"], one["impact"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]
    ]
    assert not [one for one in said if one[1] in ("serious", "critical")], said
    assert len(found["passes"]) > 10


def test_it_prints_on_a_few_pages(at_a_desk: Chromium, written: Written) -> None:
    at_a_desk.open(written("hang"))
    pdf = at_a_desk.pdf()
    assert pdf.startswith(b"%PDF-")
    assert 2 <= pdf.count(b"/Type /Page\n") <= 8, pdf.count(b"/Type /Page\n")


@pytest.mark.parametrize(("faults", "most"), [(200, 600_000), pytest.param(1000, 2_000_000, marks=pytest.mark.slow)])
def test_ninety_days_with_a_thousand_incidents_are_small_and_show_few_rows_at_first(
    at_a_desk: Chromium, tmp_path: Path, faults: int, most: int
) -> None:
    rundir, _ = ninety_days(tmp_path, NOW, faults)
    found = report_of(rundir, NOW, outside_a_job())
    assert len(found.incidents) >= 0.99 * faults
    path = tmp_path / "ninety.html"
    path.write_text(page(found))
    assert path.stat().st_size < most
    at_a_desk.open(path)
    assert at_a_desk.errors == []
    count = "[...document.querySelectorAll('#incidents tbody tr')].filter(r => !r.hidden).length"
    assert at_a_desk.run(count) == 60
    at_a_desk.run("document.querySelector('#incidents button.more').click()")
    assert at_a_desk.run(count) == len(found.incidents)
