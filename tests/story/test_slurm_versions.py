"""Every recorded version of Slurm is understood alike: its own answers, played back to the commands that ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from docs import write_versions
from tests.neighbours import recorded_slurm
from tests.neighbours.slurm_questions import ACCOUNTING, QUESTIONS, WITHOUT_CONTROLLER, Question

VERSIONS = recorded_slurm.versions()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The environment in which a recorded version answers."""
    made: dict[str, dict[str, str]] = {}

    def play(version: str) -> dict[str, str]:
        if version not in made:
            made[version] = recorded_slurm.players(version, tmp_path_factory.mktemp(version) / "bin")
        return made[version]

    return play


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.what)
def test_an_answer_means_the_same_in_every_version(
    question: Question, version: str, played: Callable[[str], dict[str, str]]
) -> None:
    if question.what.startswith(ACCOUNTING) and not recorded_slurm.has_accounting(version):
        pytest.skip(f"no accounting could be recorded of {version}")
    with recorded_slurm.inside(Path("/")):
        assert question.ask(played(version)) == question.expected(version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("question", WITHOUT_CONTROLLER, ids=lambda one: one.what)
def test_a_controller_that_is_down_is_no_answer_in_any_version(
    question: Question, version: str, played: Callable[[str], dict[str, str]]
) -> None:
    with recorded_slurm.inside(Path("/")):
        assert question.ask(played(f"{version}-without-controller")) == question.expected(version)


def test_the_page_of_the_versions_is_what_was_recorded() -> None:
    text = write_versions.PAGE.read_text("utf-8")
    assert text == write_versions.page(), "type: PYTHONPATH=. python docs/write_versions.py"


def test_every_version_that_the_manual_promises_was_recorded() -> None:
    assert [version.rpartition(".")[0] for version in VERSIONS] == ["22.05", "23.11", "24.11", "25.11", "26.05"]
