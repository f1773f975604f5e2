"""What the training's Python imports of us begins in 3.9, needs the standard library alone, and is all in the copy."""

from __future__ import annotations

import ast
import subprocess
import sys
import typing
from functools import cache
from importlib import import_module

import pytest

from ftsupervise.run.guard_folder import copied
from ftsupervise.rundir.records import read_hints
from tests.neighbours.old_python import python39
from tests.unit.test_layers import PACKAGE, ROOT, imports, modules

# Where a training enters: the guard, the integrations, and the standby that waits in its interpreter.
_DOORS = ("guard", "integrations", "warm.client", "warm.standby", "warm.sitecustomize")


def at_run_time(tree: ast.Module) -> ast.Module:
    """The module without what it imports for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    return tree


@cache
def reached() -> frozenset[str]:
    known = modules()
    trees = {name: at_run_time(ast.parse(path.read_text("utf-8"))) for name, path in known.items()}
    seen: set[str] = set()
    todo = [name for name in known if name in _DOORS or name.partition(".")[0] in ("guard", "integrations")]
    while todo:
        if (name := todo.pop()) not in seen and name in known:
            seen.add(name)
            todo += [target for _, target in imports(trees[name], known)]
            todo += [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)]
    return frozenset(seen)


def test_the_copy_holds_all_that_a_training_imports_of_us() -> None:
    needed = {str(modules()[name].relative_to(PACKAGE)) for name in reached()} | {"__init__.py"}
    assert needed <= set(copied()), sorted(needed - set(copied()))
    assert len(needed) > 100


# What came with Python 3.10 and later, as far as it is likely here; the real 3.9 below finds the rest.
_NEWER = {
    *("sys.orig_argv", "types.UnionType", "itertools.pairwise", "itertools.batched", "inspect.get_annotations"),
    *("datetime.UTC", "enum.StrEnum", "typing.Self", "typing.ParamSpec", "typing.TypeAlias", "hashlib.file_digest"),
    *("contextlib.aclosing", "contextlib.chdir", "os.eventfd", "os.splice", "asyncio.timeout", "asyncio.TaskGroup"),
    *("tomllib.load", "typing.assert_never", "typing.override", "operator.call", "statistics.correlation"),
}  # fmt: skip
_NEWER_METHODS = {"bit_count", "add_note", "hardlink_to", "walk_up"}


def too_new(text: str) -> list[str]:
    """Lines of a module that Python 3.9 cannot read or run."""
    try:
        tree = ast.parse(text, feature_version=(3, 9))
    except SyntaxError as error:
        return [f"{error.lineno}: {error.msg}"]
    deferred = any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in tree.body)
    notes = [one for node in ast.walk(tree) for one in _annotations(node)]
    inside = {id(one) for note in notes for one in ast.walk(note)} if deferred else set()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names = {one.arg for one in node.keywords}
            called = ast.unparse(node.func)
            if (called == "zip" and "strict" in names) or (called.endswith("realpath") and "strict" in names):
                found.append(f"{node.lineno}: {called}(strict=)")
            if called.endswith("dataclass") and names & {"slots", "kw_only"}:
                found.append(f"{node.lineno}: dataclass")
        if isinstance(node, ast.Attribute) and (ast.unparse(node) in _NEWER or node.attr in _NEWER_METHODS):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.lineno}: {one.name}" for one in node.names if f"{node.module}.{one.name}" in _NEWER]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and id(node) not in inside and _is_type(node):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _annotations(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.returns] if node.returns else []
    if isinstance(node, (ast.AnnAssign, ast.arg)):
        return [node.annotation] if node.annotation else []
    return []


def _is_type(node: ast.BinOp) -> bool:
    """Return whether ``X | Y`` is a type: None stands in it, or a name of a built-in type."""
    sides = [node.left, node.right]
    if any(isinstance(one, ast.Constant) and one.value is None for one in sides):
        return True
    names = {one.id for one in sides if isinstance(one, ast.Name)}
    return bool(names & {"str", "int", "float", "bytes", "bool", "dict", "list", "tuple", "Path"})


def test_what_a_training_imports_is_written_for_python_3_9() -> None:
    found = {name: lines for name in copied() if (lines := too_new((PACKAGE / name).read_text("utf-8")))}
    # imported by none of the copy's programs at run time: the supervisor's own part of a room
    theirs = {str(modules()[name].relative_to(PACKAGE)) for name in reached()}
    assert not {name: lines for name, lines in found.items() if name in theirs}


@pytest.mark.parametrize(
    "text",
    [
        "match x:\n case 1: pass",
        "zip(a, b, strict=True)",
        "x = sys.orig_argv",
        "from itertools import pairwise",
        "def f(a: int | None): ...",
        "isinstance(a, str | int)",
        "@dataclass(slots=True)\nclass A: ...",
    ],
)
def test_what_is_too_new_is_found(text: str) -> None:
    assert too_new(text)
    assert not too_new("from __future__ import annotations\ndef f(a: int | None) -> str | None:\n return zip(a, b)")


@cache
def records() -> list[type]:
    found: list[type] = []
    for name in sorted(reached()):
        if name.partition(".")[0] in ("rundir", "truth", "model", "guard"):
            module = import_module(f"ftsupervise.{name}")
            found += [one for one in vars(module).values() if isinstance(one, type) and hasattr(one, "_fields")]
    return [kind for kind in dict.fromkeys(found) if _is_page(kind)]


def _is_page(kind: type) -> bool:
    try:
        return bool(typing.get_type_hints(kind))
    except NameError:  # a type is imported for mypy alone: it is no page
        return False


def test_the_types_of_every_record_are_read_alike_in_python_3_9() -> None:
    assert len(records()) > 40
    for kind in records():
        assert read_hints(kind) == typing.get_type_hints(kind, include_extras=True), kind


def test_python_3_9_imports_all_of_it_and_reads_every_record() -> None:
    python = python39()
    names = [
        f"ftsupervise.{name}"
        for name in sorted(reached())
        if not name.startswith(("integrations", "warm.sitecustomize"))
    ]
    kinds = [f"{kind.__module__}:{kind.__qualname__}" for kind in records() if "<" not in kind.__qualname__]
    program = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {names!r}: import_module(name)\n"
        "from ftsupervise.rundir.records import _decoder, _hints\n"
        f"for kind in {kinds!r}:\n"
        " module, _, name = kind.partition(':')\n"
        " made = getattr(import_module(module), name)\n"
        " assert set(_hints(made)) == set(made._fields), kind\n"
        "print(len(sys.modules))"
    )
    done = subprocess.run(
        [python, "-ISBc", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sys.version_info >= (3, 10), "the tool itself needs a newer one"
