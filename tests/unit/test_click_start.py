"""click is imported without what it rarely needs, and works as it always does."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from ftsupervise.cli.click_start import clean_doc

PROGRAM = """
import sys
import ftsupervise.cli
early = {"inspect", "uuid", "platform"} & set(sys.modules)
assert not early, early
import click, inspect, uuid
assert inspect.signature and inspect.__file__ and uuid.uuid4().version == 4
known = str(uuid.uuid4())
assert click.UUID.convert(known, None, None) == uuid.UUID(known)
assert isinstance(click.UUID.convert(uuid.UUID(known), None, None), uuid.UUID)
try:
    click.UUID.convert("7", None, None)
except click.BadParameter:
    pass
else:
    raise AssertionError("no UUID")

@click.command()
@click.option("--size", default=lambda: 7, show_default=True, help="A size.")
def one(size):
    \"\"\"Do it.

      Indented, and
      joined.
    \"\"\"

from click.testing import CliRunner
shown = CliRunner().invoke(one, ["--help"]).output
assert "Do it." in shown and "Indented, and joined." in shown and "A size." in shown, shown
"""


def test_click_starts_without_inspect_and_uuid_and_has_them_when_it_needs_them() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["", "a", "  a b ", "\ta", "one\n  two\n    three\n", "\n\n  a\n  b\n\n"])
def test_a_help_text_is_cleaned_as_inspect_does_it(text: str) -> None:
    assert clean_doc(text) == inspect.cleandoc(text)
