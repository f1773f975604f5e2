"""Fixtures of several files of stories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.journal import Journal
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import journal_in
from tests.story.warm_scene import WARM, Standby, clean

Until = Callable[..., Any]


@pytest.fixture
def standby(tmp_path: Path, until: Until) -> Iterator[Callable[..., Standby]]:
    made: list[Standby] = []

    def make(
        *words: str,
        flags: int = 0,
        modules: tuple[str, ...] = ("json",),
        wait: bool = True,
        imports: Path | None = None,
        warm: Path = WARM,
        **env: str,
    ) -> Standby:
        one = Standby(tmp_path, [sys.executable, *words], flags, modules, clean(**env), imports, warm)
        made.append(one)
        if wait:
            until(one.ready, "the standby")
        return one

    yield make
    for one in made:
        one.end()


@pytest.fixture
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one process save in turn, so that no rank but the last can see the commit."""
    monkeypatch.setattr("ftsupervise.guard.checkpoint.COMMIT_WITHIN", 0.0)


@pytest.fixture
def mail() -> Iterator[MailServer]:
    with MailServer() as server:
        yield server


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return journal_in(tmp_path)
