"""What we say is for people: no code reads a sentence of ours back. The sentences are those that ``words()`` renders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ftsupervise.model import Cause, CauseKind, Failure, FailureKind, NodeRanks, Standstill, ended

PACKAGE = Path(__file__).parents[2] / "ftsupervise"
AT = (NodeRanks("node-1", "2"), NodeRanks("node-2", "5-7"))
TEXT = "…"  # another's words

FULL = Cause(CauseKind.HANG, AT, more=3, signal=9, code=3, phase="train", step=30, waited=9.1, text=TEXT)
CAUSES = (
    *(FULL._replace(kind=kind) for kind in CauseKind),
    Cause(CauseKind.SUPERSEDED, text="attempt 2"),
    *(Cause(kind, code=137, signal=15) for kind in CauseKind),
    *(FULL._replace(how=how) for how in Standstill),
    *(ended(code, "node-1", "2") for code in (None, 0, 3, -9, -15)),
    Cause(CauseKind.EXIT, AT, code=3, left=137, then=Cause(CauseKind.LOST), late=True),
    Cause(CauseKind.NODE, text=TEXT, then=Cause(CauseKind.EXIT, code=1)),
)
SENTENCES = tuple(cause.words() for cause in CAUSES) + tuple(
    Failure(kind, sign, error="ValueError").words() for kind in FailureKind for sign in ("exit 1", "no space left")
)
WORDS = {kind.value for kind in (*CauseKind, *Standstill)} | {
    "then",
    "ended",
    "killed",
    "SIGTERM",
    "SIGKILL",
    "SIGSEGV",
}
WORDS -= {"unknown", "other"}  # words of Slurm's, too
_TAKES_APART = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit"),
    *("find", "rfind", "index", "rindex", "count", "replace", "compile", "search", "match", "fullmatch", "findall"),
    *("finditer", "sub"),
}


def of_ours(text: str) -> bool:
    """Does a part of it that says something, two words or a word that is a whole cause, occur in a sentence of ours?"""
    if text.strip(" :,;()^$") in WORDS:
        return True
    pieces = (piece.strip(" ,") for piece in re.findall(r"[A-Za-z][A-Za-z ,]+", text))
    return any(" " in one and re.search(rf"\b{one}\b", sentence) for one in pieces for sentence in SENTENCES)


def literals(node: ast.AST, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """The strings in an expression, those of constants among them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from literals(constants[node.id], {})
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for item in node.elts:
            yield from literals(item, constants)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from literals(part.value if isinstance(part, ast.FormattedValue) else part, constants)


def taken_apart(tree: ast.AST, constants: Mapping[str, ast.expr]) -> Iterator[tuple[int, str]]:
    """(line, literal) wherever a text is searched for a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES_APART:
            for given in node.args:
                yield from ((node.lineno, text) for text in literals(given, constants))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            several = isinstance(node.comparators[0], (ast.Tuple, ast.List, ast.Set, ast.Dict))
            yield from ((node.lineno, text) for text in ([] if several else literals(node.left, constants)))


def module_constants(trees: Mapping[str, ast.Module]) -> dict[str, ast.expr]:
    """Names at the top of any module that stand for text: one module's may be imported by another."""
    found: dict[str, ast.expr] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
    return found


def parsed() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def test_no_code_reads_a_sentence_of_ours_back() -> None:
    trees = parsed()
    constants = module_constants(trees)
    wrong = [
        f"{name}:{line}: {text!r}"
        for name, tree in trees.items()
        for line, text in taken_apart(tree, constants)
        if of_ours(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        'words.startswith("hang")',
        '"node failure" in death or "launch failed" in death',
        'NO_STEP = "srun could not create a step"\ndeath.startswith(NO_STEP)',
        'last.cause.endswith(", and it did not leave in time")',
        '_ASKED = ("finished", "kill switch")\nwords.startswith(_ASKED)',
        're.compile(r"^superseded by attempt")',
        '"SIGTERM" in words',
        '"then" not in cause',
        'told.startswith(f"{TOLD}killed by SIGKILL")',
    ],
)
def test_one_who_does_is_found(code: str) -> None:
    tree = ast.parse(code)
    assert any(of_ours(text) for _, text in taken_apart(tree, module_constants({"x": tree})))


def test_every_kind_of_cause_has_words_of_its_own() -> None:
    plain = [Cause(kind, text=kind.name).words() for kind in CauseKind]
    assert all(plain) and len(set(plain)) == len(plain)
