"""The answers in tests/golden/slurm are real Slurm's: the Slurm of this machine gives them to the same scene.

``UPDATE_RECORDED=1`` records them anew. tests/story/test_slurm_versions.py plays those of every version.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import Error
from ftsupervise.sandbox import Sandbox, missing
from tests.neighbours import recorded_slurm
from tests.neighbours.recorded_slurm import FOLDER, Answer, Scene
from tests.neighbours.slurm_questions import ACCOUNTING, QUESTIONS, WITHOUT_CONTROLLER, Question

pytestmark = pytest.mark.slurm


def with_accounting(make_sandbox: Callable[..., Sandbox]) -> tuple[Sandbox, bool]:
    """Make a sandbox that has accounting, where this machine can: MariaDB 11.8 and Slurm 26.05 do not agree."""
    try:
        return make_sandbox(accounting=not missing(accounting=True)), not missing(accounting=True)
    except Error as error:
        if "leave out --accounting" not in (error.hint or ""):
            raise
    return make_sandbox(), False


def differing(
    questions: tuple[Question, ...], env: dict[str, str], version: str, *, accounting: bool
) -> dict[str, tuple[object, object]]:
    asked = [one for one in questions if accounting or not one.what.startswith(ACCOUNTING)]
    pairs = {one.what: (one.ask(env), one.expected(version)) for one in asked}
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


def test_this_slurm_answers_our_questions_as_every_recorded_one(
    make_sandbox: Callable[..., Sandbox], short_tmp: Path, until: Callable[..., Any]
) -> None:
    record = bool(os.environ.get("UPDATE_RECORDED"))
    sandbox, accounting = with_accounting(make_sandbox)
    version = sandbox.run(["scontrol", "--version"]).split()[-1]
    folder = short_tmp / "recorded"
    folder.mkdir()
    scene = Scene(sandbox, folder, until)
    scene.play()
    found: dict[str, tuple[object, object]] = {}
    pages: dict[str, list[Answer]] = {}
    for name, questions in (("", QUESTIONS), ("-without-controller", WITHOUT_CONTROLLER)):
        if name:
            sandbox.controller("kill")
        spied = short_tmp / f"spied{name}"
        spied.mkdir()
        env = recorded_slurm.spies(spied, sandbox.env())
        with recorded_slurm.inside(folder):
            found |= differing(questions, env, version, accounting=accounting)
        pages[name] = recorded_slurm.noted(spied)
    if record:
        system = f"{platform.freedesktop_os_release()['PRETTY_NAME']}\nPython {platform.python_version()}\n"
        pages[""] += [*scene.beside(), Answer("# system", system)]
        for name, answers in pages.items():
            places = {str(sandbox.layout.root): "/lab", str(folder): "/scene"}
            recorded_slurm.write_answers(FOLDER / f"{version}{name}.txt", _at(answers, places))
    assert not found


def _at(answers: list[Answer], places: dict[str, str]) -> list[Answer]:
    """Return them with the paths of this test replaced."""
    for old, new in places.items():
        answers = [
            Answer(one.asked, one.said.replace(old, new), one.complained.replace(old, new), one.code) for one in answers
        ]
    return answers
