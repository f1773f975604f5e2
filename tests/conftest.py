"""What all tests share: a state directory and a home of their own,
a supervised run, and a way to wait for a state instead of a time."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun

# Python would look for garbage in what pytest collects, and find none: a fifth of the time of collecting, in each worker.
gc.disable()

# an example may have no turn for a while on a busy machine: that is no failure
settings.register_profile("patient", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason why tests did not run, and how many and where; not one for each test."""
    skipped: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid.rpartition("/")[0])
    for reason, places in skipped.items():
        where = ", ".join(sorted(set(places)))
        terminalreporter.write_line(f"{len(places)} tests in {where} did not run: {reason}", yellow=True)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several workers some wait while others compute: files of all folders take turns, and what only computes
    (``unit``) comes last, where it fills the processors while the last long files end."""
    if not hasattr(config, "workerinput"):
        return
    files = {path: path.parent for path in dict.fromkeys(item.path for item in items)}
    of_folder = Counter(files.values())
    seen: Counter[Path] = Counter()
    turn = {}
    for path, folder in files.items():
        turn[path] = (folder.name == "unit", seen[folder] / of_folder[folder])
        seen[folder] += 1
    items.sort(key=lambda item: turn[item.path])


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing a test does reads or writes the developer's own settings, state or running job."""
    home = tmp_path_factory.mktemp("home")
    for key in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "FTSUPERVISE_RUN_DIR", "FTSUPERVISE_STATE_DIR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PAGER", "cat")  # at a terminal nothing waits for a key
    monkeypatch.setenv("FTSUPERVISE_SITE_CONFIG", str(home / "no-site-config.yaml"))
    return home


@pytest.fixture(autouse=True)
def no_subreaper() -> Iterator[None]:
    """What a test runs in this process may make it the parent of all orphans below; it would gather corpses for the rest."""
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.fixture(scope="session")
def until() -> Callable[..., object]:
    """``until(question, what="…", seconds=60)``: the first true answer."""
    return wait_until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    """A run in ``tmp_path / "run"``: ``run.start("--in-place", "5", "--", "train")``."""
    with closing(SupervisedRun(tmp_path / "run", tmp_path)) as one:
        yield one
