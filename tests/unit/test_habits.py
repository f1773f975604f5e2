"""What a stranger meets first agrees: pyproject.toml, Makefile, the forge's workflow, pre-commit, CITATION and templates."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftsupervise import __version__
from ftsupervise.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings the same
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
STEPS = [(name, step) for name, job in WORKFLOW["jobs"].items() for step in job["steps"]]
TRIED = WORKFLOW["jobs"]["quick"]["strategy"]["matrix"]["python"]


def runs_here(command: str) -> bool:
    """Whether each line is a target of the Makefile, or a script of the tree."""
    words = [line.split() for line in command.strip().splitlines()]
    return all((one[0] == "make" and {*one[1:]} <= TARGETS) or (ROOT / one[0]).is_file() for one in words)


@pytest.mark.parametrize("command", [step["run"] for _, step in STEPS if "run" in step])
def test_whatever_the_forge_runs_can_be_typed_here(command: str) -> None:
    assert runs_here(command)
    assert not runs_here("make nothing-of-ours") and not runs_here("pytest tests")


def test_the_forge_lints_tries_the_tests_the_lowest_versions_the_manual_and_the_package() -> None:
    assert {"make lint", "make quick", "make lowest", ".ci/run", "make docs", "make package"} == {
        step["run"] for _, step in STEPS if "run" in step
    }


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    promised = [word.rpartition(" ")[2] for word in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", word)]
    lowest = promised[0]
    assert PROJECT["project"]["requires-python"] == f">={lowest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == lowest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert TRIED[: len(promised)] == promised, "each that is promised is tried"
    forgiven = re.findall(r"'([\d.]+)'", str(WORKFLOW["jobs"]["quick"]["continue-on-error"]))
    assert forgiven == TRIED[len(promised) :], "and only what is not promised may fail"
    used = {step["with"]["python-version"] for _, step in STEPS if "setup-python" in step.get("uses", "")}
    assert used <= {*promised, "${{ matrix.python }}"}
    assert f"(3, {lowest.partition('.')[2]})" in (ROOT / ".ci/make-venv").read_text("utf-8")


def test_pre_commit_runs_what_the_forge_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == ["make lint"], "one owner: the Makefile, and .ci/lock for the versions"
    assert all(repo["repo"] == "local" for repo in config["repos"])


def test_the_tools_of_the_makefile_are_locked() -> None:
    wanted = {re.split(r"[<>=\[ ]", line)[0] for line in PROJECT["project"]["optional-dependencies"]["test"]}
    locked = set(re.findall(r"^([a-z0-9-]+)(?:\[.*\])?==", (ROOT / ".ci/lock/test.txt").read_text("utf-8"), re.M))
    assert {one.lower() for one in wanted - {"ftsupervise"}} <= locked
    assert set(re.findall(r"\$\(BIN\)/(ruff|mypy)\b|-m (coverage|pytest)\b", MAKEFILE)) and {"ruff", "mypy"} <= wanted


def test_every_script_that_the_makefile_names_is_there() -> None:
    named = set(re.findall(r"(?:sh )?(\.ci/[a-z-]+)\b(?!/)", MAKEFILE)) - {".ci/lock"}
    missing = [one for one in named if not (ROOT / one).is_file() and not (ROOT / f"{one}.yml").is_file()]
    assert ".ci/make-lowest" in named and missing == []


def test_contributing_lists_what_can_be_made() -> None:
    told = set(re.findall(r"^make ([a-z-]+) +#", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M))
    assert told == TARGETS - {"slurm", "debian", "compiled", "clean"}


def test_the_version_is_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == PROJECT["project"]["version"] == __version__
    assert cited["license"] == PROJECT["project"]["license"]
    assert cited["keywords"] == PROJECT["project"]["keywords"]


def test_the_templates_ask_for_commands_that_there_are() -> None:
    asked = set()
    for page in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        asked |= set(re.findall(r"ftsupervise ([a-z]+)", page.read_text("utf-8")))
    assert asked >= {"doctor", "status", "config", "logs"}
    assert asked - {*COMMANDS} <= {"could", "doctor"}, "doctor: the template says what to do where it is not there"
