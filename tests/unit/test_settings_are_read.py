"""A setting that nothing reads is a promise that nobody keeps: ``watch.every`` was one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import BaseModel

from ftsupervise.config.alerting import KINDS
from ftsupervise.config.fields import Section
from ftsupervise.config.grouping import GROUP_KEYS
from ftsupervise.config.load import Account
from ftsupervise.config.schema import Run
from ftsupervise.config.supervisor import BY_KEY
from ftsupervise.config.watchdogs import GENERAL
from ftsupervise.truth import DECISIONS
from tests.unit.test_layers import parsed

Models = frozenset[str]
NONE: Models = frozenset()


@cache
def sections() -> Mapping[str, type[BaseModel]]:
    """Every section of the settings by the name of its class."""
    found: dict[str, type[BaseModel]] = {}
    todo: list[type[BaseModel]] = [Run, Account]
    while todo:
        model = todo.pop()
        if model.__name__ not in found:
            found[model.__name__] = model
            below = set(re.findall(r"\w+", " ".join(str(field.annotation) for field in model.model_fields.values())))
            todo += [one for one in every_section(BaseModel) if one.__name__ in below]
    return found


def every_section(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in base.__subclasses__():
        if one.__module__.startswith("ftsupervise.config."):
            yield one
        yield from every_section(one)


def named_in(annotation: ast.expr | None, aliases: Mapping[str, str]) -> Models:
    """The sections that a type names: ``tuple[Disk, ...] | None`` holds a Disk."""
    words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
    return frozenset(aliases[word] for word in words if word in aliases)


def aliases_of(tree: ast.Module) -> dict[str, str]:
    """The sections that a module has imported, by their names there."""
    imported = [one for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names]
    own = {node.name: node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name in sections()}
    return own | {one.asname or one.name: one.name for one in imported if one.name in sections()}


class Reads(ast.NodeVisitor):
    """Finds the settings that a module reads, (section, key). The section of each expression is followed from where a type
    names it (an argument, a field, what a function returns) over the settings below it."""

    def __init__(self, aliases: Mapping[str, str], returned: Mapping[str, Models], held: Mapping[str, Models]) -> None:
        self.found: set[tuple[str, str]] = set()
        self._aliases, self._returned, self._held = aliases, returned, held
        self._named: dict[str, Models] = {}
        self.words: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = dict(self._named)
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._named |= {one.arg: named_in(one.annotation, self._aliases) for one in given}
        self.generic_visit(node)
        self._named = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._name(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._named[node.target.id] = named_in(node.annotation, self._aliases)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._name(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._name(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._name(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for one in node.generators:  # they name what stands before them
            self.visit(one)
        self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        """``getattr`` of a section may read each key of it whose name stands in the module."""
        if getattr(node.func, "id", "") == "getattr":
            of = self.section_of(node.args[0])
            self.found |= {(one, key) for one in of for key in fields(one) if key in self.words}
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found |= {(one, node.attr) for one in self.section_of(node.value) if node.attr in fields(one)}
        self.generic_visit(node)

    def section_of(self, node: ast.expr) -> Models:
        if isinstance(node, ast.Name):
            return self._named.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            before = self.section_of(node.value)
            below = [fields(one)[node.attr] for one in before if node.attr in fields(one)]
            return frozenset().union(*below) if before else self._held.get(node.attr, NONE)
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            of = self.section_of(called.value) if isinstance(called, ast.Attribute) else NONE
            return self._returned.get(name, NONE) or of | frozenset().union(*map(self.section_of, node.args))
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return frozenset().union(*map(self.section_of, parts))

    def _name(self, target: ast.expr, value: ast.expr) -> None:
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
        if isinstance(target, ast.Tuple):
            for n, one in enumerate(target.elts):
                self._name(one, value.elts[n] if both and isinstance(value, ast.Tuple) else value)
        elif isinstance(target, ast.Name):
            self._named[target.id] = self.section_of(value)


@cache
def fields(section: str) -> Mapping[str, Models]:
    """The keys of a section, each with the sections that it holds."""
    found = sections()[section].model_fields
    return {
        key: frozenset(re.findall(r"\w+", str(field.annotation))) & sections().keys() for key, field in found.items()
    }


def settings_read(trees: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    """Those that the package reads besides where they are declared and judged."""
    returned, held = dict[str, Models](), dict[str, Models]()

    def know(where: dict[str, Models], name: str, what: Models) -> None:
        where[name] = where.get(name, NONE) | what

    for tree in trees.values():
        aliases = aliases_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
                know(held if is_property else returned, node.name, named_in(node.returns, aliases))
                given = {one.arg: named_in(one.annotation, aliases) for one in node.args.args + node.args.kwonlyargs}
                for target, value in pairs(node):
                    if isinstance(target, ast.Attribute) and isinstance(value, ast.Name):
                        know(held, target.attr, given.get(value.id, NONE))
            elif isinstance(node, ast.AnnAssign):
                name = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
                know(held, name, named_in(node.annotation, aliases))
    found: set[tuple[str, str]] = set()
    for name, tree in trees.items():
        if name not in DECLARE:
            reads = Reads(aliases_of(tree), returned, held)
            texts = [
                one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            reads.words = {
                word for text in texts if re.fullmatch(r"[\w.]+", text) for word in (text, text.rpartition(".")[2])
            }
            reads.visit(tree)
            found |= reads.found
    return found


def pairs(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a function assigns, each with its value."""
    for node in (one for one in ast.walk(function) if isinstance(one, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


DECLARE = ("config.schema", "config.watchdogs", "config.alerting", "config.acting", "config.fields", "config.plugged")


def read_by_themselves(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """What a section hands out itself, by a method or a property; its validators only judge."""
    classes = [node for name in DECLARE for node in trees[name].body if isinstance(node, ast.ClassDef)]
    for node in (one for one in classes if one.name in sections()):
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        for method in (one for one in methods if "validator" not in "".join(map(ast.unparse, one.decorator_list))):
            given = [one.attr for one in ast.walk(method) if isinstance(one, ast.Attribute)]
            yield from ((node.name, key) for key in fields(node.name) if key in given)


def read_by_the_supervisor() -> Iterator[tuple[str, str]]:
    """The settings of the tables that ``launch`` walks by their keys, and the sections around them."""
    for setting in (*BY_KEY.values(), *GROUP_KEYS.values()):
        section = "Run"
        for word in setting.key.split("."):
            key = word if word in fields(section) else f"{word}_"
            if key not in fields(section):  # a property, such as act.observed
                break
            yield section, key
            section = next(iter(fields(section)[key]), "")


# Read by a name that is put together, or on an object whose type nobody names.
BY_NAME = {
    "watch.checks": {
        (name, "every") for name, one in sections().items() if issubclass(one, Section)
    },  # getattr(settings, …)
    "watch.watchdogs": {("Watch", key) for key in fields("Watch") if key not in GENERAL},
    "alerts.receivers": {
        *((name, key) for name in sections() for key in fields(name) if key.endswith(("_file", "_env"))),
        *(("Receiver", kind) for kind in KINDS),
    },
    "crontab.install": {("Cron", f"{word}ly") for word in ("minute", "hour", "week")} | {("Cron", "daily")},
    "config.sweep": {("Run", "sweep")},  # out of the document, before there are settings
    "config.acting": {("Act", decision) for decision in DECISIONS},
}


def unread(trees: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    every = {(name, key) for name in sections() for key in fields(name)}
    by_name = set[tuple[str, str]]().union(*BY_NAME.values())
    return every - settings_read(trees) - {*read_by_themselves(trees)} - {*read_by_the_supervisor()} - by_name


def test_every_setting_is_read_by_something() -> None:
    assert not unread(parsed()), "delete it, or have what it promises done"


def test_a_setting_whose_name_others_have_too_is_found_where_nothing_reads_it() -> None:
    """Each of its neighbours has a ``timeout`` that is read, and ``every`` is a word everywhere."""
    lines = """from ftsupervise.config.alerting import Command, Email as Settings
from ftsupervise.config.schema import Run
class Look:
 run: Run
def send(settings: Settings, look: Look) -> None:
 print(settings.timeout, *(one.command for one in look.run.alerts.receivers), look.every)
"""
    assert settings_read({"one": ast.parse(lines)}) == {
        *(("Email", "timeout"), ("Receiver", "command"), ("Run", "alerts"), ("Alerts", "receivers"))
    }
