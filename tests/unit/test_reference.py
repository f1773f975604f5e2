"""The pages of reference are what the commands, the settings and the source say, and nothing stands there without a meaning."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs import write_reference as reference
from ftsupervise.cli.time_limit import BOUNDS

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", ["commands.md", "settings.md", "python.md"])
def test_a_page_of_reference_is_what_its_source_says(name: str) -> None:
    assert (PAGES / name).read_text("utf-8") == reference.pages()[name], "type: python docs/write_reference.py"


def test_every_command_stands_there_and_every_option_and_setting_has_a_meaning() -> None:
    commands, settings = reference.commands(), reference.settings()
    headings = {line.lstrip("# ") for line in commands.splitlines() if line.startswith("##")}
    assert headings >= set(BOUNDS) - {"cron tick", "sandbox exec"}, "but for those that nobody types"
    for line in (commands + settings).splitlines():
        if line.startswith("| "):
            assert line.removesuffix("|").rpartition("|")[2].strip(), line


def test_a_docstring_is_shown_as_it_is_meant() -> None:
    text = '''
class One:
    """Does it.

        code()

    Then:

    first    what it is,
             and more
    second   another

    The rest.
    """

    def __init__(self, first: int, *, second: str = "x") -> None: ...
    def go(self, far: float = 1.0, *ways: str, **more: int) -> bool:
        """Return whether."""
    def _hidden(self) -> None:
        """Not shown."""
'''
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    shown = list(reference.of_class(node, "One", 2))
    assert "One(first: int, *, second: str = 'x')" in shown
    assert shown[shown.index("Does it.") :][:10] == [
        *("Does it.", "", "```", "code()", "```", ""),
        *("Then:", "", "- `first`: what it is,", "  and more"),
    ]
    assert "go(far: float = 1.0, *ways: str, **more: int) -> bool" in shown
    assert "_hidden" not in "\n".join(shown)
