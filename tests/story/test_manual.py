"""The manual is true: every block in it is run or compared, every table lists what there is.

``UPDATE_MANUAL=1 pytest tests/story/test_manual.py`` rewrites what the program itself makes (blocks marked ``same=``).
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import draw, draw_rooms
from ftsupervise.alerts.last_day import sample
from ftsupervise.config.load import loads
from ftsupervise.config.strict_yaml import parse
from ftsupervise.config.sweep import names_in
from ftsupervise.rundir import paths
from tests.manual.blocks import CHECKS, ROOT, Block, all_blocks, marked, pages, prose, rewrite, words_of_prose
from tests.manual.drill_screens import drill_screens
from tests.manual.messages import incident
from tests.manual.parse import refused
from tests.manual.plan_screens import plan_screens
from tests.manual.report_screens import report_screens
from tests.manual.status_screens import EVENT, NOW, screens
from tests.manual.tables import CHECKED, Table

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
    texts |= screens() | report_screens(tmp_path_factory.mktemp("report"))
    texts |= plan_screens(tmp_path_factory.mktemp("plan"))
    texts |= drill_screens()
    texts["last-day"] = sample(NOW).text + "\n"
    texts["event-line"] = EVENT.text("login1") + "\n"
    _, _, plugin = (
        (ROOT / "tests/neighbours/readme_package/pyproject.toml").read_text("utf-8").partition("\n[project.entry")
    )
    texts["plug-in"] = f"[project.entry{plugin.partition('[tool.')[0]}".rstrip() + "\n"
    texts["run-directory"] = "RUN/\n" + "".join(f"{line[4:]}\n" for line in tree.split("\n"))
    if os.environ.get("UPDATE_MANUAL"):
        for page in pages():
            rewrite(page, texts)
        draw.write()
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
    every = names_in(parse(text.encode(), str(block))) or ("",)  # of a sweep each run
    assert all(loads(text, run=name).name for name in every)


def test_the_full_example_has_every_setting_there_is() -> None:
    from ftsupervise.config.json_schema import json_schema

    (block,) = marked("load", "all")
    schema = json_schema()
    missing = {path for path in possible(schema, schema) - written(yaml.safe_load(block.text)) if not other_way(path)}
    assert not missing, f"{block}: show {sorted(missing)}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_settings_that_are_named_in_passing_exist(page: Path) -> None:
    there = every_setting()
    named = re.findall(
        r"`((?:launch|nodes|guard|checkpoints|watch|alerts|cron|share)\.[a-z_]+(?:\.[a-z_]+)*)[`:(]", prose(page)
    )
    assert [name for name in named if name not in there] == []


@cache
def every_setting() -> set[str]:
    """Every dotted setting, and what the guard has."""
    from ftsupervise import Guard
    from ftsupervise.config.json_schema import json_schema

    return possible(json_schema(), json_schema()) | {f"guard.{name}" for name in dir(Guard)}


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
    from ftsupervise.host.processes import START
    from ftsupervise.launch.plan import plan
    from ftsupervise.launch.script import render

    (tmp_path / "my.sbatch.j2").write_text(block.text)
    run = loads("name: first\nlaunch: {command: python train.py, template: my.sbatch.j2}", tmp_path / "f.yaml")
    planned = plan(run, kind="slurm", token="t", workdir=tmp_path, python="python")
    script = render(planned, run.launch, planned.link(0))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    assert "#SBATCH --job-name=first\n" in script and f"\nexec python -I {START} run " in script


# ---------------------------------------------------------------------------------------------------------- tables


def section(page: str, heading: str) -> str:
    """The text below a heading of a page, down to the next one of its rank or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", prose(ROOT / page), re.M | re.S)
    assert found, f"{page} has no heading {heading!r}"
    return found[2]


@pytest.mark.parametrize("table", CHECKED, ids=lambda table: f"{table.page}: {table.head}")
def test_a_table_names_all_that_there_is_and_nothing_else(table: Table) -> None:
    shown = table.shown()
    assert shown == table.names() if table.exact else sorted(shown) == sorted(table.names())


def test_the_table_of_rooms_has_each_command_once() -> None:
    from ftsupervise.cli import COMMANDS

    rows = re.findall(r"^\| (`.+?) \|", section("CONTRIBUTING.md", "Find your way: the rooms"), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(COMMANDS)


def test_the_names_a_template_may_use_are_those_it_gets() -> None:
    tree = ast.parse((ROOT / "ftsupervise" / "launch" / "script.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "render"]
    given = {keyword.arg for call in calls for keyword in call.keywords}
    text = section("docs/launching.md", "Write your own template")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M)
    assert set(re.findall(r"\w+", " ".join(rows))) == given


def test_the_words_of_status_are_all_explained() -> None:
    from ftsupervise import report

    words = set(re.findall(r'"([A-Z]{3,})"', inspect.getsource(report))) - {"PENDING"}  # a word of Slurm's
    text = section("docs/troubleshooting.md", "The words of status")
    assert set(re.findall(r"^\| ([A-Z]+) \|", text, re.M)) >= words


# ----------------------------------------------------------------------------------------------------------- prose


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, fragment = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not fragment or fragment in anchors(there), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    return {anchor(line) for line in re.findall(r"^#+ (.*)", prose(page), re.M)}


def anchor(heading: str) -> str:
    """As GitHub makes it; the site makes the same of a heading without punctuation between blanks."""
    made = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    assert "--" not in made, f"{heading!r} has another anchor on GitHub than on the site"
    return made


def manual() -> list[Path]:
    """The pages of docs/ that are written by hand."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"]


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    text = (ROOT / ".ci" / "mkdocs.yml").read_text()
    hook = (ROOT / "docs" / "mkdocs_hook.py").read_text()
    elsewhere = dict(re.findall(r'"([\w-]+\.md)": "([\w/]+\.md)"', hook))
    inside = set((ROOT / "docs").rglob("*.md")) - {ROOT / source for source in elsewhere.values()}
    assert {ROOT / source for source in elsewhere.values()} | set(manual()) == set(pages())
    listed = re.findall(r"[\w/-]+\.md", text.partition("\nnav:\n")[2])
    assert sorted(listed) == sorted([*elsewhere, *(str(page.relative_to(ROOT / "docs")) for page in inside)])


def test_the_first_page_of_the_manual_leads_to_every_other() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / path).resolve() for path in re.findall(r"\]\(([\w./-]+\.md)", index.read_text())}
    assert {*manual(), *(ROOT / "docs" / "reference").glob("*.md")} - {index} <= linked
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", manual(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_begins_with_whom_it_is_for(page: Path) -> None:
    title, blank, whom, *_ = page.read_text().splitlines()
    assert title.startswith("# ") and not blank and re.fullmatch(r"\*For you if .+\.\*", whom)


def test_the_manual_can_be_read() -> None:
    """Two hours of reading: whoever adds a page takes words away elsewhere."""
    words = {str(page.relative_to(ROOT)): words_of_prose(page) for page in (ROOT / "README.md", *manual())}
    assert sum(words.values()) <= 30_000, sorted(words.items(), key=lambda one: -one[1])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


# -------------------------------------------------------------------------------------------------------- pictures


def test_the_pictures_show_what_the_pages_say() -> None:
    old = {name: (ROOT / "docs" / "pictures" / f"{name}.svg").read_text("utf-8") for name in draw.drawn()}
    assert {name for name, svg in draw.drawn().items() if svg != old[name]} == set(), "python docs/draw.py"


@pytest.mark.parametrize("heading", draw.WAYS.values())
def test_the_forms_of_a_value_are_those_of_the_code(heading: str) -> None:
    found = draw.forms(heading)
    assert 3 <= len(found) <= 8
    for form, module, _ in found:
        if form != "text":
            code = (ROOT / "ftsupervise" / module).read_text()
            assert re.search(rf"^class {form}\b", code, re.M), f"docs/design.md, {heading}: {module} defines no {form}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_the_files_and_folders_that_are_named_are_there(page: str) -> None:
    named = re.findall(r"`((?:ftsupervise|tests|docs|examples|benchmarks)/[\w/.-]*)`", prose(ROOT / page))
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_the_map_of_the_rooms_is_that_of_the_code() -> None:
    rooms, down, up = draw_rooms.drawn()
    assert draw_rooms.pictured() == (rooms, down | up), "python docs/draw_rooms.py"
    assert rooms == set(draw_rooms.MEANINGS)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_manual_fits_a_terminal_and_names_no_machine(page: Path) -> None:
    text = page.read_text()
    assert not [name for name in HERE if name in text]
    long = [line for line in prose(page).splitlines() if len(line) > 132 and not line.startswith("|")]
    assert not long
