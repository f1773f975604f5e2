"""The recipes in .ci/packaging ask for what pyproject.toml asks for."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.unit.test_layers import ROOT

_RECIPES = ROOT / ".ci/packaging"
_TEXT = (ROOT / "pyproject.toml").read_text("utf-8")
_ONLY_ON_PYPI = {"ahocorasick-rs"}  # ftsupervise works without them


def needed() -> dict[str, tuple[str, str]]:
    """Each package with its first version and the first that is too new."""
    listed = _TEXT.partition("\ndependencies = [")[2].partition("\n]")[0]
    found = re.findall(r'"([\w-]+)>=([\d.]+),<([\d.]+)"', listed)
    return {name: (low, high) for name, low, high in found if name not in _ONLY_ON_PYPI}


def version() -> str:
    return str(re.findall(r'^version = "(.+)"$', _TEXT, re.M)[0])


def test_the_conda_recipe_asks_for_the_same() -> None:
    recipe: dict[str, Any] = yaml.safe_load((_RECIPES / "conda-recipe.yaml").read_text("utf-8"))
    listed = [one.split(" ") for one in recipe["requirements"]["run"] if not one.startswith("python ")]
    assert {name.removeprefix("python-"): bounds for name, bounds in listed} == {
        name: f">={low},<{high}" for name, (low, high) in needed().items()
    }
    assert recipe["context"]["version"] == version()


def test_the_spack_package_asks_for_the_same() -> None:
    text = (_RECIPES / "spack/py-ftsupervise/package.py").read_text("utf-8")
    compile(text, "package.py", "exec")
    found = re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):(\d+)", type=\("build", "run"\)\)', text)
    assert {name: (low, str(int(last) + 1)) for name, low, last in found} == needed()
    assert f'version("{version()}")' in text


def test_the_image_is_made_of_what_the_build_needs() -> None:
    text = (_RECIPES / "ftsupervise.def").read_text("utf-8")
    for source in re.findall(r"^    (\S+) /src/", text, re.M):
        assert (ROOT / source).exists(), source
    assert {"pyproject.toml", "ftsupervise", "templates", "cron"} <= set(re.findall(r"^    (\S+) /src/", text, re.M))
