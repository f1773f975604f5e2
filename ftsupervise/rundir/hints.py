"""The type hints of a record under Python 3.9, where ``X | None`` cannot be evaluated: it is read as ``Optional[X]``.

It stands alone because no later Python needs it, and none imports it.
"""

from __future__ import annotations

import ast
import sys
import typing
from typing import Any


def read_hints(kind: type) -> dict[str, Any]:
    """Return the fields of ``kind`` with their types, as ``typing.get_type_hints(kind, include_extras=True)`` does."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        scope = {**vars(sys.modules[base.__module__]), "typing": typing}
        for name, hint in vars(base).get("__annotations__", {}).items():
            text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
            found[name] = _evaluated(text, scope) if isinstance(text, str) else text
    return found


def _evaluated(text: str, scope: dict[str, Any]) -> Any:
    tree = _Unions().visit(ast.parse(text, mode="eval"))
    return eval(compile(ast.fix_missing_locations(tree), "<hint>", "eval"), scope)


class _Unions(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Turn ``X | Y`` into ``typing.Union[X, Y]``."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.BitOr):
            return node
        union = ast.Attribute(ast.Name("typing", ast.Load()), "Union", ast.Load())
        return ast.Subscript(union, ast.Tuple([node.left, node.right], ast.Load()), ast.Load())
