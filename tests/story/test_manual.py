"""The manual is true: every block in it is run or compared, every table lists what there is.

``UPDATE_MANUAL=1 pytest tests/story/test_manual.py`` rewrites what the program itself makes (blocks marked ``same=``).
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftsupervise.config.load import loads
from ftsupervise.rundir import paths
from tests.manual.blocks import CHECKS, ROOT, Block, all_blocks, marked, pages, prose, rewrite
from tests.manual.messages import incident
from tests.manual.parse import refused

MANUAL = prose(ROOT / "README.md")
HERE = (str(ROOT), os.path.expanduser("~/"), "/tmp/")  # noqa: PTH111 - as the shell would


def ids(some: list[Block]) -> list[str]:
    return [str(block) for block in some]


# ---------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("block", all_blocks(), ids=ids(all_blocks()))
def test_every_block_says_how_it_is_checked(block: Block) -> None:
    assert len(CHECKS & block.marks.keys()) == 1, f"{block}: mark it with one of {sorted(CHECKS)}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_no_code_hides_from_the_tests_in_an_indented_block(page: Path) -> None:
    hidden = re.findall(r"(?:^|\n)\n {4,}[^\s*-].*", prose(page))
    assert not hidden, "make it a fenced block with a mark"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the program makes for the blocks marked ``same=``."""
    texts = incident(tmp_path_factory.mktemp("night"))
    tree = (paths.__doc__ or "").partition("    RUN/\n")[2].partition("\n\n")[0]
    texts["run-directory"] = "RUN/\n" + "".join(f"{line[4:]}\n" for line in tree.split("\n"))
    if os.environ.get("UPDATE_MANUAL"):
        for page in pages():
            rewrite(page, texts)
    return texts


@pytest.mark.parametrize("name", sorted({block.marks["same"] for block in marked("same")}))
def test_what_is_shown_is_what_the_program_makes(made: dict[str, str], name: str) -> None:
    for block in marked("same", name):
        ids_gone = [re.sub(r"\b[0-9a-f]{8}\b", "ID", text) for text in (block.text, made[name])]
        assert ids_gone[0] == ids_gone[1], f"{block}: UPDATE_MANUAL=1 pytest {__file__} rewrites it"


@pytest.mark.parametrize("block", marked("make"), ids=ids(marked("make")))
def test_make_has_the_targets_that_are_named(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in block.text.splitlines():
        target = re.match(r"make (\w+)", line)
        assert target and re.search(rf"^{target[1]}:", makefile, re.M), f"{block}: {line}"


def test_what_make_demo_runs_is_there_and_compiles() -> None:
    recipe = re.search(r"^demo:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    script = next(word for word in recipe[1].split() if word.endswith(".py"))
    compile((ROOT / script).read_text(), script, "exec")


@pytest.mark.parametrize("block", marked("parse"), ids=ids(marked("parse")))
def test_the_command_line_takes_what_is_shown(block: Block) -> None:
    for line in block.text.splitlines():
        assert not refused(line), f"{block}: {line}: {refused(line)}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_command_line_takes_what_is_named_in_passing(page: Path) -> None:
    for line in re.findall(r"`(ftsupervise [^`]+)`", prose(page)):
        assert not refused(line), f"{line}: {refused(line)}"


def yaml_blocks() -> list[Block]:
    return [block for block in all_blocks() if block.language == "yaml"]


@pytest.mark.parametrize("block", yaml_blocks(), ids=ids(yaml_blocks()))
def test_the_settings_that_are_shown_load(block: Block) -> None:
    text = block.text
    if not re.search(r"^name:", text, re.M):
        text = "name: example\n" + text
    if not re.search(r"^launch:", text, re.M):
        text += "launch: {command: python train.py}\n"
    assert loads(text).name


def test_the_full_example_has_every_setting_there_is() -> None:
    from ftsupervise.config.json_schema import json_schema

    (block,) = marked("load", "all")
    schema = json_schema()
    missing = {path for path in possible(schema, schema) - written(yaml.safe_load(block.text)) if not other_way(path)}
    assert not missing, f"{block}: show {sorted(missing)}"


def possible(node: Any, schema: dict[str, Any], path: str = "") -> set[str]:
    """Every dotted setting a JSON Schema allows; items of a list have the path of the list."""
    if not isinstance(node, dict):
        return set()
    if "$ref" in node:
        return possible(schema["$defs"][node["$ref"].rpartition("/")[2]], schema, path)
    found: set[str] = set()
    for name, inner in node.get("properties", {}).items():
        found |= {f"{path}{name}"} | possible(inner, schema, f"{path}{name}.")
    for inner in (*node.get("anyOf", ()), *node.get("allOf", ()), node.get("items")):
        found |= possible(inner, schema, path)
    return found


def written(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(written(item, path) for item in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({f"{path}{name}"} | written(inner, f"{path}{name}.") for name, inner in value.items()))


def other_way(path: str) -> bool:
    """A watchdog's own interval is shown once; of the ways to name a secret, one is."""
    return path.endswith(".every") or re.search(r"_(file|env)$", path) is not None


@pytest.mark.parametrize("block", marked("template"), ids=ids(marked("template")))
def test_the_job_script_of_ones_own_renders(block: Block, tmp_path: Path) -> None:
    from ftsupervise.host.interpreter import START
    from ftsupervise.launch.plan import plan
    from ftsupervise.launch.render import render

    (tmp_path / "my.sbatch.j2").write_text(block.text)
    run = loads("name: first\nlaunch: {command: python train.py, template: my.sbatch.j2}", tmp_path / "f.yaml")
    planned = plan(run, kind="slurm", token="t", workdir=tmp_path, python="python")
    script = render(planned, run.launch, planned.link(0))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    assert "#SBATCH --job-name=first\n" in script and f"\nexec python -I {START} run " in script


# ---------------------------------------------------------------------------------------------------------- tables


def test_the_table_of_commands_lists_them_all() -> None:
    from ftsupervise.cli import COMMANDS

    table = re.findall(r"^\| `ftsupervise (\w+)` \|", MANUAL, re.M)
    assert sorted(table) == sorted(COMMANDS), "README.md, Commands: one line for each"


def test_the_table_of_exit_codes_lists_them_all() -> None:
    import ftsupervise.errors as errors

    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.Error)}
    section = MANUAL.partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.M)} == codes | {0}


def test_the_table_of_watchdogs_lists_them_all() -> None:
    from ftsupervise.watch.watchdogs import WATCHDOGS

    section = MANUAL.partition("## Watchdogs")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z-]+) \|", section, re.M)[1:] == list(WATCHDOGS)


def test_the_table_of_receivers_lists_them_all() -> None:
    from ftsupervise.config.alerting import KINDS

    section = MANUAL.partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z-]+) \|", section, re.M)[1:] == list(KINDS)


def test_the_guard_is_described_with_all_its_arguments_and_methods() -> None:
    from ftsupervise import Guard

    section = MANUAL.partition("## The guard")[2].partition("\n## ")[0]
    rows = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    arguments = set(inspect.signature(Guard).parameters)
    methods = {name for name, _ in inspect.getmembers(Guard, inspect.isfunction) if not name.startswith("_")}
    assert not {name for name in arguments | methods if not re.search(rf"`{name}\b", rows)}


def test_the_names_a_template_may_use_are_those_it_gets() -> None:
    tree = ast.parse((ROOT / "ftsupervise" / "launch" / "render.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "render"]
    given = {keyword.arg for call in calls for keyword in call.keywords}
    section = MANUAL.partition("**A job script of your own:**")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == given


def test_the_words_of_status_are_all_explained() -> None:
    from ftsupervise.report import status

    words = set(re.findall(r'"([A-Z]{3,})"', inspect.getsource(status))) - {"PENDING"}  # a word of Slurm's
    section = MANUAL.partition("## At 3 a.m.")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([A-Z]+) \|", section, re.M)) >= words


# ----------------------------------------------------------------------------------------------------------- prose


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    headings = {anchor(line) for line in re.findall(r"^#+ (.*)", prose(page), re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (page.parent / target).exists(), target


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_manual_fits_a_terminal_and_names_no_machine(page: Path) -> None:
    text = page.read_text()
    assert not [name for name in HERE if name in text]
    long = [line for line in prose(page).splitlines() if len(line) > 132 and not line.startswith("|")]
    assert not long
