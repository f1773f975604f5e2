"""The man pages are what click's table says, and whoever reads man pages reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from docs import write_reference as reference
from ftsupervise.cli import COMMANDS
from ftsupervise.cli.help import CommandPage, OptionLine, Paragraph, man_page

PAGES = Path(__file__).parents[2] / "docs" / "man"


def test_there_is_a_page_for_the_program_and_for_each_command_and_it_is_what_its_source_says() -> None:
    made = reference.man_pages()
    assert {*made} == {"ftsupervise.1", *(f"ftsupervise-{name}.1" for name in COMMANDS)}
    assert {one.name: one.read_text("utf-8") for one in PAGES.glob("*.1")} == made, (
        "type: python docs/write_reference.py"
    )


def test_a_page_has_the_commands_of_its_group_with_their_options() -> None:
    page = reference.man_pages()["ftsupervise-cron.1"]
    assert "\n.SS cron install\n" in page and "\\-\\-backend" in page and "cron tick" not in page


@pytest.mark.parametrize("words", [["groff", "-man", "-ww", "-Tutf8", "-P-c"], ["mandoc", "-T", "lint", "-W", "error"]])
def test_a_reader_of_man_pages_complains_of_none(words: list[str]) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} here: apt-get install {words[0]}")
    for page in sorted(PAGES.glob("*.1")):
        done = subprocess.run([*words, page], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and done.stderr == "", page.name
        assert words[0] == "mandoc" or "--help" not in done.stdout.partition("NAME")[0]


def test_dots_and_quotes_of_a_text_stay_what_they_are() -> None:
    odd = ".dots 'quotes' \\slashes --and -dashes …"
    page = CommandPage(
        "odd", "ftsupervise odd", "Odd.", (Paragraph(odd), Paragraph(odd, kept=True)), (OptionLine("-x", odd),)
    )
    text = man_page(page, {})
    assert not any(line.startswith((".dots", "'")) for line in text.splitlines())
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here: apt-get install groff")
    words = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=True)
    assert " ".join(done.stdout.split()).count(odd) == 3, done.stdout
