"""Writes the pages of reference from what they describe: the commands and their man pages from click, the settings from
their schema, and the Python interface from the source. Run it after a change of one of them; a test compares.

    python docs/write_reference.py
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ftsupervise.cli.help import CommandPage, man_page, page_name, page_of

ROOT = Path(__file__).resolve().parents[1]
_MADE = "<!-- python docs/write_reference.py writes this page -->"


def pages() -> dict[str, str]:
    """Return each page's name and text."""
    return {
        "commands.md": commands(),
        "settings.md": settings(),
        "python.md": interface(),
    }


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> str:
    lines = [
        "# Every command",
        _MADE,
        "",
        "What the commands have in common, their bounds and their exit codes: [Commands](../commands.md). The",
        "same as man pages: `man ftsupervise`, `man ftsupervise-launch`.",
    ]
    for page in _program().below:
        lines += _command(page, 2)
    return "\n".join(lines) + "\n"


def _program() -> CommandPage:
    from ftsupervise.cli import ftsupervise

    return page_of(click.Context(ftsupervise, info_name="ftsupervise"))


def man_pages() -> dict[str, str]:
    """Return each man page's file and text."""
    from ftsupervise.cli import GROUPS

    program = _program()
    return {f"{page_name(one)}.1": man_page(one, GROUPS) for one in (program, *program.below)}


def _command(page: CommandPage, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {page.name}", "", "```", page.usage, "```")
    for one in page.paragraphs:
        yield from ("", "```", one.text, "```") if one.kept else ("", one.text)
    if page.options:
        yield from ("", "| option | meaning |", "|---|---|")
    for option in page.options:
        yield f"| `{_cell(option.names)}` | {_cell(_words(option.meaning))} |"
    for below in page.below:
        yield from _command(below, level + 1)


# ------------------------------------------------------------------------------------------------------------ settings


def settings() -> str:
    from ftsupervise.config.json_schema import json_schema

    schema = json_schema()
    lines = [
        "# Every setting",
        _MADE,
        "",
        "A whole `ftsupervise.yaml` as an example, and how values are written: [Configuration](../configuration.md).",
        *_section("ftsupervise.yaml", "", schema, schema),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, path: str, node: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    if path and "description" in node:
        yield from (_words(node["description"]), "")
    yield from ("| setting | value | default | meaning |", "|---|---|---|---|")
    below: list[tuple[str, dict[str, Any]]] = []
    for name, one in node["properties"].items():
        dotted, inner = f"{path}{name}", _inner(one, schema)
        if inner is not None:
            below.append((dotted, inner))
        needed = name in node.get("required", ())
        default = "needed" if needed else "" if inner is not None else f"`{_default(one.get('default'))}`"
        meaning = one.get("description") or (inner or {}).get("description", "")
        yield f"| `{dotted}` | {_cell(_value(one, schema))} | {_cell(default)} | {_cell(_words(meaning))} |"
    for dotted, inner in below:
        yield from _section(dotted, f"{dotted}.", inner, schema)


def _inner(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a setting is, or a list or table of which its value is."""
    if "$ref" in node:
        found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return found if "properties" in found else None
    below = (*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties"))
    return next((inner for one in below if isinstance(one, dict) and (inner := _inner(one, schema)) is not None), None)


def _value(node: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the values that a setting takes, in words."""
    if "anyOf" in node:
        ways = [_value(one, schema) for one in node["anyOf"]]
        return " or ".join(dict.fromkeys(way for way in ways if way and way != "a variable"))
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return "a variable" if name == "variable" else "the settings below"
    if "enum" in node:
        return ", ".join(f"`{one}`" for one in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    kind = node.get("type")
    if kind == "array":
        return f"a list; each {_value(node['items'], schema)}" if node.get("items") else "a list"
    if kind == "object":
        inner = node.get("additionalProperties")
        return f"a table; each {_value(inner, schema)}" if isinstance(inner, dict) and inner else "a table"
    if kind == "string":
        return (
            "a path"
            if node.get("format") == "path"
            else f"a text, as `{node['examples'][0]}`"
            if node.get("examples")
            else "a text"
        )
    words = {"integer": "a whole number", "number": "a number", "boolean": "`true`, `false`", "null": "`null`"}
    return words.get(str(kind), "")


def _default(value: object) -> str:
    words = json.dumps(value, ensure_ascii=False)
    return words.strip('"') if isinstance(value, str) else words


# ----------------------------------------------------------------------------------------------------- Python interface

_CLASSES = {
    "guard/guard.py": ("Guard",),
    "guard/stop_reasons.py": ("Decision",),
    "interface/run.py": ("Run",),
}
# The values that the methods of ``Run`` return, and those within them that a program asks for most.
_VALUES: dict[str, tuple[str, ...]] = {
    "report/published.py": ("RunStatus", "RunFields"),
    "report/row.py": ("RunRow",),
    "model.py": ("Attempt", "Job"),
    "report/detail.py": ("TimeSpent",),
    "report/checkpoint_list.py": ("CheckpointsSeen",),
    "report/alert_list.py": ("AlertsSeen",),
    "interface/answers.py": ("RaisedSwitch", "RunLaunched"),
}


def interface() -> str:
    lines = [
        "# The Python interface",
        _MADE,
        "",
        "What a training script imports: [The guard](../guard.md) and [Frameworks](../frameworks.md) show how it is used.",
        "What a notebook or a scheduler imports: [Runs from Python](../python.md).",
    ]
    for file, names in _CLASSES.items():
        tree = ast.parse((ROOT / "ftsupervise" / file).read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                lines += of_class(node, f"ftsupervise.{node.name}", 2)
    lines += ["", "## The values that Run returns"]
    for file, those in _VALUES.items():
        text = (ROOT / "ftsupervise" / file).read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in those:
                lines += of_value(node, text, 3)
    for path in sorted((ROOT / "ftsupervise" / "integrations").glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        exported = _exported(tree)
        if exported:
            lines += ["", f"## ftsupervise.integrations.{path.stem}", "", *_doc(tree)]
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name in exported:
                    lines += of_class(node, node.name, 3)
                elif isinstance(node, ast.FunctionDef) and node.name in exported:
                    lines += _function(node, node.name, 3)
    return "\n".join(lines) + "\n"


def _exported(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def of_class(node: ast.ClassDef, title: str, level: int) -> Iterator[str]:
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    yield from ("", f"{'#' * level} {title}", "")
    if made is not None:
        yield from ("```python", _signature(made, node.name), "```", "")
    yield from _doc(node)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and ast.get_docstring(one):
            yield from _function(one, one.name, level + 1)


def of_value(node: ast.ClassDef, text: str, level: int) -> Iterator[str]:
    """A frozen value: its fields as they stand in the source, with what is said of them there."""
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    source = text.splitlines()[fields[0].lineno - 1 : fields[-1].end_lineno]
    yield from ("", f"{'#' * level} {node.name}", "", *_doc(node))
    yield from ("", "```python", *(line.removeprefix("    ") for line in source), "```")
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and ast.get_docstring(one):
            yield from _function(one, one.name, level + 1)


def _function(node: ast.FunctionDef, title: str, level: int) -> Iterator[str]:
    kind = {ast.unparse(one) for one in node.decorator_list}
    shown = node.name if "property" in kind else _signature(node, node.name)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and "property" in kind else ""
    yield from ("", f"{'#' * level} {title}", "", "```python", f"{shown}{result}", "```", "", *_doc(node))


def _signature(node: ast.FunctionDef, name: str) -> str:
    """One line, or a line for each argument where that would be long."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    defaults = [None] * (len(arguments) - len(node.args.kwonlyargs) - len(node.args.defaults)) + node.args.defaults
    words, given = list[str](), [*defaults, *node.args.kw_defaults]
    for number, (one, default) in enumerate(zip(arguments, given, strict=True)):
        if number == 0 and one.arg in ("self", "cls"):
            continue
        if node.args.kwonlyargs and one is node.args.kwonlyargs[0] and node.args.vararg is None:
            words.append("*")
        words.append(ast.unparse(one) + (f" = {ast.unparse(default)}" if default is not None else ""))
    if node.args.vararg is not None:
        words.append(f"*{ast.unparse(node.args.vararg)}")
    if node.args.kwarg is not None:
        words.append(f"**{ast.unparse(node.args.kwarg)}")
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    short = f"{name}({', '.join(words)}){result}"
    return short if len(short) <= 100 else "\n".join([f"{name}(", *(f"    {one}," for one in words), f"){result}"])


def _doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> list[str]:
    """The docstring: a name with two spaces behind it and its meaning is an item of a list, what else is indented a block of
    code."""
    lines: list[str] = []
    block = item = False
    for line in (ast.get_docstring(node) or "").replace("``", "`").splitlines():
        named = re.fullmatch(r"(\w+) {2,}(\S.*)", line)
        if item and line.startswith("  "):
            lines.append(f"  {line.strip()}")
            continue
        if item and named is None and line:
            lines.append("")
        item = named is not None
        inside = not item and (line.startswith("    ") or (block and not line.strip()))
        if inside != block:
            lines += ["```"] if inside else _closed(lines)
            block = inside
        lines.append(
            f"- `{named[1]}`: {named[2]}" if named is not None else line.removeprefix("    ") if block else line
        )
    return lines + _closed(lines) if block else lines


def _closed(lines: list[str]) -> list[str]:
    """The end of a block of code: the empty line stands behind it."""
    while lines and not lines[-1]:
        lines.pop()
    return ["```", ""]


# ---------------------------------------------------------------------------------------------------------------- words


def _words(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    sys.path.insert(0, str(ROOT))
    import_module("ftsupervise.cli.config")  # complains here, and not in the middle, where the package is not installed
    for name, text in pages().items():
        (ROOT / "docs" / "reference" / name).write_text(text, "utf-8")
    for name, text in man_pages().items():
        (ROOT / "docs" / "man" / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
