"""Walks a module's source: each call, with the function that it stands in."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Each call with the function that it stands in."""

    def below(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                yield function, child
            yield from below(child, inside)

    yield from below(tree, "")
