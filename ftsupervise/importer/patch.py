"""Puts the guard's lines into a training script, where their places are sure. Pure: text in, text out.

A Trainer of Lightning or of Hugging Face gets the callback, the loops of Accelerate are wrapped, and of a plain loop only one
form is known: ``for step in range(…)`` with the backward pass in it and an ``if`` that saves every so many steps. Everything
else is for a person, and the reason is told. The rest of the text stays as it is, byte for byte.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HUGGING_FACE = ("transformers", "trl")
_LIGHTNING = ("lightning", "pytorch_lightning")
_POSITIONAL = 4  # of a Trainer: the callbacks of Hugging Face's come later
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CannotPlace(Exception):
    """The lines cannot be placed surely; the text says why, as a clause with its line."""


@dataclass(frozen=True)
class Edit:
    """``text`` is put in at byte ``at``, in the place of ``instead`` bytes."""

    at: int
    text: str
    instead: int = 0


@dataclass(frozen=True)
class Patch:
    """``text``: of the script with the guard in it; ``notes``: what is left to a person, as sentences."""

    text: str
    notes: tuple[str, ...] = ()


def with_guard(text: str) -> Patch:
    """Return the script with the guard's lines. Raises CannotPlace."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise CannotPlace(f"Python cannot read it ({error})") from None
    script = _Script(text, tree)
    if "ftsupervise" in text:
        raise CannotPlace("it names ftsupervise already")
    if taken := next((one for one in ast.walk(tree) if _names(one) in ("guard", "decision")), None):
        raise CannotPlace(f"line {_line(taken)}: it has a name {_names(taken)} of its own")
    edits, notes = _placed(script)
    made = script.edited(edits)
    try:
        compile(made, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise CannotPlace(f"Python could not read the result ({error})") from None
    return Patch(made, notes)


def diff(before: str, after: str, path: str) -> str:
    """Return the unified diff of the two, as ``patch -p0`` takes it."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, path, path, n=2)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Script:
    """The text with its lines in bytes, in which ``ast`` counts."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.tree = tree
        self._bytes = text.encode("utf-8")
        self._starts = [0]
        for line in text.encode("utf-8").splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.end_of_line = "\r\n" if "\r\n" in text else "\n"
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def part(self, first: int, last: int) -> str:
        return self._bytes[first:last].decode("utf-8")

    def indent(self, node: ast.stmt) -> str:
        """Return the blanks before the statement. Raises CannotPlace where it is not the first one of its line."""
        before = self.part(self._starts[node.lineno - 1], self.start(node))
        if before.strip(" \t\f\ufeff"):
            raise CannotPlace(f"line {node.lineno}: two statements stand in one line")
        return before.lstrip("\ufeff")

    def before(self, node: ast.stmt, line: str) -> Edit:
        indent = self.indent(node)
        return Edit(self._starts[node.lineno - 1], f"{indent}{line}{self.end_of_line}")

    def behind(self, node: ast.stmt, lines: Sequence[str], like: ast.stmt | None = None) -> Edit:
        """Put ``lines`` behind the last line of ``node``, as far in as ``like`` is."""
        assert node.end_lineno is not None
        indent = self.indent(like or node)
        at = self._starts[node.end_lineno]
        text = "".join(f"{indent}{line}{self.end_of_line}" for line in lines)
        rest = self.part(self.end(node), at)
        if rest.strip() and not rest.lstrip().startswith("#"):
            raise CannotPlace(f"line {node.end_lineno}: two statements stand in one line")
        return Edit(at, text if rest.endswith("\n") else f"{self.end_of_line}{text}")

    def around(self, node: ast.expr, before: str, after: str) -> list[Edit]:
        return [Edit(self.start(node), before), Edit(self.end(node), after)]

    def edited(self, edits: Sequence[Edit]) -> str:
        """Return the text with the edits in it; those at one place in their order."""
        parts, at = list[bytes](), 0
        for one in sorted(edits, key=lambda edit: edit.at):
            parts += [self._bytes[at : one.at], one.text.encode()]
            at = one.at + one.instead
        return b"".join((*parts, self._bytes[at:])).decode("utf-8")

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def loops_around(self, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the loops around the node, the nearest one first, within its function."""
        while (up := self.parents.get(node)) is not None and not isinstance(up, _SCOPES):
            if isinstance(up, _LOOPS):
                yield up
            node = up

    def imported(self, packages: Sequence[str]) -> tuple[dict[str, str], set[str]]:
        """Return the names that were imported from these packages, as name -> original, and the modules themselves."""
        names: dict[str, str] = {}
        modules: set[str] = set()
        for one in ast.walk(self.tree):
            if isinstance(one, ast.ImportFrom) and (one.module or "").partition(".")[0] in packages:
                names |= {alias.asname or alias.name: alias.name for alias in one.names}
            elif isinstance(one, ast.Import):
                ours = [alias for alias in one.names if alias.name.partition(".")[0] in packages]
                modules |= {alias.asname or alias.name for alias in ours}
        return names, modules

    def import_line(self, line: str) -> Edit:
        """Put an import behind the imports at the top."""
        last: ast.stmt | None = None
        for one in self.tree.body:
            if isinstance(one, (*_SCOPES, *_LOOPS, ast.With)):
                break
            if isinstance(one, ast.Import | ast.ImportFrom):
                last = one
        if last is None:
            raise CannotPlace("no import stands at its top")
        return self.behind(last, [line])


def _placed(script: _Script) -> tuple[list[Edit], tuple[str, ...]]:
    names, modules = script.imported(_LIGHTNING)
    if names or modules:
        return _lightning(script, names, modules)
    names, modules = script.imported(_HUGGING_FACE)
    if calls := _trainers(script, names, modules):
        return _hugging_face(script, calls)
    names, _ = script.imported(("accelerate",))
    if "Accelerator" in names.values():
        return _accelerate(script, names)
    return _plain(script)


# ----------------------------------------------------------------------------------------------- Lightning, Hugging Face


def _lightning(script: _Script, names: dict[str, str], modules: set[str]) -> tuple[list[Edit], tuple[str, ...]]:
    if "LightningCLI" in names.values() or any(_name_of(one.func) == "LightningCLI" for one in _calls(script.tree)):
        raise CannotPlace("LightningCLI makes its Trainer: trainer.callbacks in its settings takes LightningGuard")
    calls = _trainers(script, names, modules)
    where = "from ftsupervise.integrations.lightning import LightningGuard"
    edits, variable = _callback(script, calls, "LightningGuard()", where)
    return edits + _resumes(script, variable, "fit", "ckpt_path"), _after(script, variable, "fit")


def _hugging_face(script: _Script, calls: Sequence[ast.Call]) -> tuple[list[Edit], tuple[str, ...]]:
    where = "from ftsupervise.integrations.huggingface import HuggingFaceGuard"
    edits, variable = _callback(script, calls, "HuggingFaceGuard()", where)
    return edits + _resumes(script, variable, "train", "resume_from_checkpoint"), _after(script, variable, "train")


def _trainers(script: _Script, names: dict[str, str], modules: set[str]) -> list[ast.Call]:
    """Return the calls that make a Trainer of that framework, also one of a class of the script's own."""
    known = {name for name, original in names.items() if original.endswith("Trainer")}
    for one in ast.walk(script.tree):
        if isinstance(one, ast.ClassDef) and any(_is_one(base, known, modules) for base in one.bases):
            known.add(one.name)
    return [one for one in _calls(script.tree) if _is_one(one.func, known, modules)]


def _is_one(node: ast.expr, known: set[str], modules: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in known
    return isinstance(node, ast.Attribute) and node.attr.endswith("Trainer") and ast.unparse(node.value) in modules


def _callback(script: _Script, calls: Sequence[ast.Call], guard: str, line: str) -> tuple[list[Edit], str]:
    """Return the edits that give the callback to the only Trainer, and the variable that holds it."""
    if len(calls) != 1:
        said = f"it makes {len(calls)} of them" if calls else "it makes none by itself"
        raise CannotPlace(f"one Trainer gets the callback, and {said}")
    call, made = calls[0], script.statement(calls[0])
    target = made.targets[0] if isinstance(made, ast.Assign) and len(made.targets) == 1 else None
    if not isinstance(target, ast.Name) or not isinstance(made, ast.Assign) or made.value is not call:
        raise CannotPlace(f"line {call.lineno}: its Trainer is not put into a variable")
    if len(call.args) > _POSITIONAL or any(isinstance(one, ast.Starred) for one in call.args):
        raise CannotPlace(f"line {call.lineno}: the callbacks may stand among the arguments without a name")
    given = {one.arg: one.value for one in call.keywords}
    if None in given and "callbacks" not in given:
        raise CannotPlace(f"line {call.lineno}: the callbacks may stand in **{ast.unparse(given[None])}")
    edits = [script.import_line(line), script.before(made, f"guard = {guard}")]
    callbacks = given.get("callbacks")
    if callbacks is None:
        edits.append(_argument(script, call, "callbacks=[guard]"))
    elif isinstance(callbacks, ast.List):
        edits.append(Edit(script.start(callbacks) + 1, "guard, " if callbacks.elts else "guard"))
    else:
        edits += script.around(callbacks, "[guard, *(", " or [])]")
    return edits, target.id


def _argument(script: _Script, call: ast.Call, text: str) -> Edit:
    """Put one more argument into a call."""
    inside = [*call.args, *(one.value for one in call.keywords)]
    if not inside:
        return Edit(script.end(call) - 1, text)
    last = max(script.end(one) for one in inside)
    rest = script.part(last, script.end(call) - 1)
    closed = rest.find(")") if rest.strip(" \t\r\n,") and "#" not in rest else -1  # an argument in brackets of its own
    if closed < 0 and ")" in rest.partition("#")[0]:
        raise CannotPlace(f"line {call.lineno}: where the arguments of this call end cannot be told")
    return Edit(last + (closed + 1 if closed >= 0 else 0), f", {text}")


def _resumes(script: _Script, variable: str, method: str, key: str) -> list[Edit]:
    """Return the edits by which the only call of ``method`` goes on from the guard's newest checkpoint."""
    found = _methods(script, variable, method)
    if len(found) != 1:
        raise CannotPlace(f"{variable}.{method} is called {len(found)} times, and it is not known which one trains")
    call = found[0]
    given = {one.arg: one.value for one in call.keywords}
    if None in given:
        raise CannotPlace(f"line {call.lineno}: {key} may stand in **{ast.unparse(given[None])}")
    before = given.get(key) or (call.args[0] if method == "train" and call.args else None)
    if isinstance(before, ast.Name | ast.Attribute | ast.Constant):
        return script.around(before, "guard.latest() or ", "")
    if before is not None:
        return script.around(before, "guard.latest() or (", ")")
    if method == "fit" and len(call.args) > _POSITIONAL:
        raise CannotPlace(f"line {call.lineno}: {key} may stand among the arguments without a name")
    return [_argument(script, call, f"{key}=guard.latest()")]


def _methods(script: _Script, variable: str, method: str) -> list[ast.Call]:
    return [
        one
        for one in _calls(script.tree)
        if isinstance(one.func, ast.Attribute)
        and one.func.attr == method
        and isinstance(one.func.value, ast.Name)
        and one.func.value.id == variable
    ]


def _after(script: _Script, variable: str, method: str) -> tuple[str, ...]:
    """Return what is left to a person: what runs behind the training also runs when it was only asked to stop."""
    call = _methods(script, variable, method)[0]
    later = [
        one
        for one in _calls(script.tree)
        if one.lineno > call.lineno
        and isinstance(one.func, ast.Attribute)
        and isinstance(one.func.value, ast.Name)
        and one.func.value.id == variable
    ]
    if not later:
        return ()
    first = ast.unparse(later[0].func)
    return (f"{first} behind it runs after a stop, too: put it under `if not guard.stopped:`",)


# ------------------------------------------------------------------------------------------------------------ Accelerate


def _accelerate(script: _Script, names: dict[str, str]) -> tuple[list[Edit], tuple[str, ...]]:
    classes = {name for name, original in names.items() if original == "Accelerator"}
    made = [one for one in _calls(script.tree) if _name_of(one.func) in classes]
    statement = script.statement(made[0]) if len(made) == 1 else None
    if not isinstance(statement, ast.Assign) or statement.value is not made[0]:
        raise CannotPlace(f"one Accelerator in a variable is expected, and it makes {len(made)}")
    target = statement.targets[0]
    variable = target.id if isinstance(target, ast.Name) else ""
    for one in _calls(script.tree):
        if isinstance(one.func, ast.Attribute) and one.func.attr in ("load_state", "skip_first_batches"):
            raise CannotPlace(f"line {one.lineno}: it goes on from checkpoints of its own ({one.func.attr})")
    batches, epochs = _two_loops(script, _methods(script, variable, "backward"))
    loader = batches.iter
    if isinstance(loader, ast.Call) and _name_of(loader.func) in ("enumerate", "tqdm") and loader.args:
        loader = loader.args[0]
    if not isinstance(loader, ast.Name):
        raise CannotPlace(f"line {batches.lineno}: the loop over the batches is not one over a variable")
    count = epochs.iter
    if not (isinstance(count, ast.Call) and _name_of(count.func) == "range" and len(count.args) == 1):
        raise CannotPlace(f"line {epochs.lineno}: the loop over the epochs is not one over range(EPOCHS)")
    edits = [
        script.import_line("from ftsupervise.integrations.accelerate import AccelerateGuard"),
        script.behind(statement, [f"guard = AccelerateGuard({variable})"]),
        *script.around(loader, "guard.batches(", ")"),
        Edit(script.start(count), "guard.epochs", len("range")),
    ]
    return edits, ()


def _two_loops(script: _Script, backward: Sequence[ast.Call]) -> tuple[ast.For, ast.For]:
    """Return the loop over the batches and the one over the epochs."""
    if len(backward) != 1:
        raise CannotPlace(f"its backward pass stands in {len(backward)} places")
    around = list(script.loops_around(backward[0]))
    if len(around) != 2 or not all(isinstance(one, ast.For) for one in around):
        raise CannotPlace(f"line {backward[0].lineno}: a loop over batches in one over epochs is expected around it")
    inner, outer = around
    assert isinstance(inner, ast.For) and isinstance(outer, ast.For)
    return inner, outer


# ------------------------------------------------------------------------------------------------------------ a plain loop


def _plain(script: _Script) -> tuple[list[Edit], tuple[str, ...]]:
    loop, step = _loop(script)
    _leaves(script, loop)
    save = _saves(loop, step)
    last = loop.body[-1]
    step_line = f"decision = guard.step({step})"
    edits = [
        script.import_line("from ftsupervise import Guard"),
        script.before(loop, "guard = Guard()"),
        script.before(save, step_line),
        *script.around(save.test, "decision.save or (", ")"),
        script.behind(save.body[-1], [f"guard.saved({step})"]),
    ]
    inside = script.indent(save.body[-1])
    unit = inside.removeprefix(script.indent(save)) or "    "
    stop = [f"if decision.stop:{script.end_of_line}{script.indent(last)}{unit}break"]
    edits.append(script.behind(last, stop))
    assert isinstance(loop.iter, ast.Call)
    last_step = _before(loop.iter.args[1] if len(loop.iter.args) > 1 else loop.iter.args[0])
    edits.append(
        script.behind(loop, [f"else:{script.end_of_line}{script.indent(loop)}{unit}guard.finished({last_step})"])
    )
    return edits, ("these lines load no checkpoint: the script has to find its newest one by itself",)


def _loop(script: _Script) -> tuple[ast.For, str]:
    """Return the loop over the steps, and the variable that counts them."""
    passes = [one for one in _calls(script.tree) if isinstance(one.func, ast.Attribute) and one.func.attr == "backward"]
    loops = [list(script.loops_around(one)) for one in passes]
    outer = {id(around[-1]): around[-1] for around in loops if around}
    if len(outer) != 1:
        found = f"it has {len(outer)}" if passes else "no .backward() is in it"
        raise CannotPlace(f"one loop around the backward pass is expected, and {found}")
    (loop,) = outer.values()
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and _name_of(loop.iter.func) == "range"
    if not isinstance(loop, ast.For) or not counted or not isinstance(loop.target, ast.Name):
        raise CannotPlace(f"line {loop.lineno}: the loop is not of the form `for step in range(…)`")
    if loop.orelse:
        raise CannotPlace(f"line {loop.lineno}: the loop has an else of its own")
    for around in loops:
        between = around[:-1]
        if any(not _accumulates(one) for one in between):
            raise CannotPlace(
                f"line {between[0].lineno}: the optimizer makes its steps in this loop, which stands in another one, and no "
                "variable counts them over both"
            )
    return loop, loop.target.id


def _before(end: ast.expr) -> str:
    """Return the code of the step before ``end``, at which a range stops."""
    if isinstance(end, ast.Constant) and isinstance(end.value, int):
        return str(end.value - 1)
    adds = isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add)
    if isinstance(end, ast.BinOp) and adds and isinstance(end.right, ast.Constant) and end.right.value == 1:
        return ast.unparse(end.left)
    return (
        f"{ast.unparse(end)} - 1"
        if isinstance(end, ast.Name | ast.Attribute | ast.Call)
        else f"({ast.unparse(end)}) - 1"
    )


def _accumulates(loop: ast.stmt) -> bool:
    """Return whether the loop inside only accumulates gradients: no optimizer makes a step in it."""
    return not any(isinstance(one.func, ast.Attribute) and one.func.attr == "step" for one in _calls(loop))


def _leaves(script: _Script, loop: ast.For) -> None:
    """Raise CannotPlace where a pass of the loop may end before its last line."""
    for one in ast.walk(loop):
        if isinstance(one, ast.Break | ast.Continue) and next(script.loops_around(one)) is loop:
            word = "break" if isinstance(one, ast.Break) else "continue"
            raise CannotPlace(f"line {one.lineno}: a {word} leaves out what would stand at the end of the loop")
        if isinstance(one, ast.Return | ast.Yield):
            raise CannotPlace(f"line {one.lineno}: the loop is left here, too")


def _saves(loop: ast.For, step: str) -> ast.If:
    """Return the ``if`` that saves every so many steps."""
    found = [
        one for one in loop.body if isinstance(one, ast.If) and any("save" in _name_of(c.func) for c in _calls(one))
    ]
    if len(found) != 1:
        said = f"{len(found)} of them" if found else "none"
        raise CannotPlace(f"an `if` in the loop that saves every so many steps is expected, and there is {said}")
    save = found[0]
    terms = save.test.values if isinstance(save.test, ast.BoolOp) and isinstance(save.test.op, ast.And) else [save.test]
    every = any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in ast.walk(save.test))
    others = [one for one in terms if not any(isinstance(n, ast.Name) and n.id == step for n in ast.walk(one))]
    if save.orelse or not every or others:
        why = f"on {ast.unparse(others[0])}, too" if others else "on more than the step"
        raise CannotPlace(f"line {save.lineno}: whether it saves depends {why}")
    return save


# ---------------------------------------------------------------------------------------------------------- names, calls


def _calls(node: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))
