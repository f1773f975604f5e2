"""What ``make`` and the continuous integration install is locked: every distribution by its version and its files' hashes."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.manual.blocks import ROOT

LOCKS = sorted((ROOT / ".ci" / "lock").glob("*.txt"))
_ENTRY = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\]+?))? \\\n(?P<hashes>(?: +--hash=\S+.*\n)+)", re.M
)


def settings() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        import tomli as tomllib  # with pytest, there
    else:
        import tomllib
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text()))


def project() -> dict[str, Any]:
    return dict(settings()["project"])


def wanted(extra: str) -> list[Requirement]:
    """What the project and one of its extras name, the extras in it followed."""
    found = []
    for line in project()["optional-dependencies"][extra]:
        one = Requirement(line)
        found += [n for more in one.extras for n in wanted(more)] if one.name == "ftsupervise" else [one]
    return [Requirement(line) for line in project()["dependencies"]] + found


def locked(name: str) -> list[Requirement]:
    text = (ROOT / ".ci" / "lock" / f"{name}.txt").read_text()
    return [
        Requirement(f"{m['name']}=={m['version']}" + (f" ; {m['marker']}" if m["marker"] else ""))
        for m in _ENTRY.finditer(text)
    ]


def here(entries: list[Requirement]) -> dict[str, str]:
    """Name and version of what is for this Python and platform."""
    found = [one for one in entries if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in found}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_line_of_a_lock_is_one_version_with_hashes(path: Path) -> None:
    text = path.read_text()
    rest = [line for line in _ENTRY.sub("", text).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert rest == [] and len(locked(path.stem)) >= 10
    assert set(re.findall(r"--hash=(\w+):", text)) == {"sha256"}
    assert str(ROOT) not in text


@pytest.mark.parametrize("extra", ["demo", "test"])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_what_the_project_names_is_locked_for_every_python_it_supports(extra: str, python: str) -> None:
    """Who changes the dependencies types ``make lock``."""
    where = {"python_version": python, "python_full_version": f"{python}.0"}
    entries = [one for one in locked(extra) if one.marker is None or one.marker.evaluate(where)]
    versions = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in entries}
    assert len(versions) == len(entries), "no distribution twice"
    for one in wanted(extra):
        got = versions.get(canonicalize_name(one.name))
        assert got is not None and one.specifier.contains(got), f"{one}: the lock has {got}; type make lock"
    assert "setuptools" in versions, "the build of ftsupervise itself fetches nothing"


@pytest.mark.threat(
    "The tests install an untested version of a package.",
    "Only the locked versions are installed and run.",
)
def test_what_runs_here_is_what_is_locked() -> None:
    """``make`` takes the lock, not whatever is newest today."""
    other = {}
    for name, want in here(locked("test")).items():
        try:
            got = version(name)
        except PackageNotFoundError:
            got = "not installed"
        if got != want:
            other[name] = (want, got)
    assert not other, "rm -rf .venv, and make it again"


@pytest.mark.fault("A dependency changes its interface in a new major version", "upper bounds in `pyproject.toml`")
@pytest.mark.parametrize("name", ["click", "pydantic", "aiosmtpd", "psutil", "slack-sdk", "requests"])
def test_what_has_changed_its_interface_before_has_an_upper_bound(name: str) -> None:
    [one] = {str(one.specifier) for one in wanted("test") if one.name == name}
    assert "<" in one


@pytest.mark.threat(
    "A package that `make` installs is exchanged at the registry.",
    "Each file must match a hash in `.ci/lock`, and the build fetches nothing.",
)
def test_nothing_is_fetched_beside_the_lock() -> None:
    text = (ROOT / ".ci" / "install").read_text()
    installs = [line for line in text.splitlines() if re.match(r"\s*(pip install)", line)]
    assert len(installs) == 2
    assert "--require-hashes -r" in installs[0] and "--no-deps --no-build-isolation" in installs[1]
    makefile = (ROOT / "Makefile").read_text()
    assert "pip install" not in makefile


def test_every_package_is_in_the_wheel() -> None:
    """An editable install finds a folder that is not listed; one from a wheel lacks it."""
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ftsupervise").rglob("__init__.py")}
    listed = settings()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found | {"ftsupervise.cron", "ftsupervise.templates"})
