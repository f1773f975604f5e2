"""Values flow down, and no circle of imports closes: this walks them all, those for types included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from ftsupervise.cli import COMMANDS
from ftsupervise.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftsupervise"

# The rooms from the ground up: a room imports from those before it, and from none behind it.
ROOMS = (
    # words: files beside the rooms
    *("version", "errors", "units", "hostlist", "printable", "secrecy", "truth", "model", "findings"),
    *(
        "host",
        "rundir",
        "probe",
        "checkpoints",
        "scheduler",
        "config",
        "nodes",
        "snapshots",
        "guard",
        "ranks",
        "warm",
        "replicas",
        "integrations",
    ),
    *(
        "alerts",
        "watch",
        "launch",
        "importer",
        "crontab",
        "report",
        "planning",
        "diagnosis",
        "sandbox",
        "doctor",
        "drill",
        "run",
    ),
    *("interface", "cli", "start", "__main__"),
)
# Edges do not import each other: they meet in a story.
APART = (("probe", "scheduler"), ("sandbox", "scheduler"), ("guard", "config"))
# Arrows that are still to be turned, each with the file it is in.
TO_BE_TURNED: set[tuple[str, str]] = set()
CIRCLES_TO_BE_OPENED: tuple[set[str], ...] = ()


def modules() -> dict[str, Path]:
    """Every module but the package itself, by its name without "ftsupervise."."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def parsed() -> dict[str, ast.Module]:
    """Every module but the package itself, by its name."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in modules().items()}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """``parsed`` once for all tests of this file."""
    return parsed()


def imports(tree: ast.Module, known: Iterable[str]) -> list[tuple[int, str]]:
    """Every module of ours that a module imports, wherever and whatever for, with its line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    ours = [(line, name.removeprefix("ftsupervise.")) for line, name in found if name.startswith("ftsupervise.")]
    known = set(known)
    return [(line, name if name in known else name.rpartition(".")[0]) for line, name in ours]


def arrows(trees: Mapping[str, ast.Module]) -> Mapping[str, list[tuple[int, str]]]:
    return {
        name: [(line, target) for line, target in imports(tree, trees) if target in trees and target != name]
        for name, tree in trees.items()
    }


def circles(succ: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Tarjan's strongly connected components of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in succ[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(set(stack[at:]))
            del stack[at:]

    for name in succ:
        if name not in index:
            visit(name)
    return [one for one in found if len(one) > 1]


def test_every_module_stands_in_a_room() -> None:
    assert {name.split(".")[0] for name in modules()} == set(ROOMS)


def test_values_flow_down(trees: dict[str, ast.Module]) -> None:
    wrong, seen = [], set()
    for name, targets in arrows(trees).items():
        mine = name.split(".")[0]
        for line, target in targets:
            theirs = target.split(".")[0]
            if mine == theirs:
                continue
            if ROOMS.index(theirs) > ROOMS.index(mine) or (mine, theirs) in APART or (theirs, mine) in APART:
                seen.add((name, theirs))
                if (name, theirs) not in TO_BE_TURNED:
                    wrong.append(f"{modules()[name].relative_to(ROOT)}:{line}: {mine} imports {theirs}")
    assert not wrong, "\n".join(wrong)
    assert seen == TO_BE_TURNED, "an arrow that is turned is taken off the list"


def test_no_circle_of_imports_closes(trees: dict[str, ast.Module]) -> None:
    found = circles({name: [target for _, target in targets] for name, targets in arrows(trees).items()})
    assert sorted(map(sorted, found)) == sorted(map(sorted, CIRCLES_TO_BE_OPENED))


def test_no_room_imports_the_package_around_it(trees: dict[str, ast.Module]) -> None:
    """The package hands on the guard, so that would close a circle: ``from ftsupervise import __version__`` did."""
    wrong = [
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "ftsupervise"
        for alias in node.names
        if alias.name not in trees
    ]
    assert not wrong


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [{"a", "b", "c"}]


def test_only_the_command_line_prints_or_exits(trees: dict[str, ast.Module]) -> None:
    allowed = {
        "scheduler/local.py",
        "rundir/paths.py",
        "guard/settings.py",
        "probe/server.py",
        "watch/watchdogs/gpu.py",
    }  # programs of their own
    wrong = []
    for name, path in modules().items():
        relative = str(path.relative_to(PACKAGE))
        if relative.startswith("cli/") or relative in allowed:
            continue
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit", "click.echo"):
                wrong.append(f"{relative}:{node.lineno}")
    assert not wrong


BROAD = {"Exception", "BaseException"}


def broad_without_a_reason(text: str, tree: ast.Module) -> Iterator[int]:
    """Lines that catch every exception, raise none again, and do not say why in a comment."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)} if node.type else BROAD
            raises = any(isinstance(one, ast.Raise) for one in node.body)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught, raises = {ast.unparse(one) for one in node.args}, False
        else:
            continue
        if caught & BROAD and not raises and "  # " not in lines[node.lineno - 1]:
            yield node.lineno


def test_whatever_catches_everything_says_why(trees: dict[str, ast.Module]) -> None:
    found = {
        name: lines
        for name, path in modules().items()
        if (lines := [*broad_without_a_reason(path.read_text("utf-8"), trees[name])])
    }
    assert not found
    for text, lines in {
        "try: ...\nexcept Exception:\n pass\nwith suppress(Exception): ...": [2, 4],
        "try: ...\nexcept Exception:  # whatever it is\n pass": [],
    }.items():
        assert list(broad_without_a_reason(text, ast.parse(text))) == lines


SLURM = {"squeue", "sbatch", "scontrol", "srun", "scancel", "sinfo", "sacct", "salloc"}


def starts(tree: ast.AST) -> list[int]:
    """Lines in which a command of Slurm's is written as one to be started: first in a list, or alone as an argument."""
    words = [node.elts[:1] for node in ast.walk(tree) if isinstance(node, ast.List)]
    words += [node.args[:1] for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [one.lineno for first in words for one in first if isinstance(one, ast.Constant) and one.value in SLURM]


def test_slurm_is_asked_in_the_room_of_the_scheduler_alone(trees: dict[str, ast.Module]) -> None:
    """The sandbox, which makes a Slurm, asks its own."""
    others = {name: tree for name, tree in trees.items() if name.split(".")[0] not in ("scheduler", "sandbox")}
    assert not [f"{name}:{line}" for name, tree in others.items() for line in starts(tree)]
    assert starts(trees["scheduler.slurm"])


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import ftsupervise", {"click", "yaml", "subprocess", "socket", "dataclasses"}),
        (
            "from ftsupervise import Guard; Guard",
            {"click", "yaml", "dataclasses", "psutil", "pydantic", "requests", "jinja2"},
        ),
        (
            "from ftsupervise import Run; Run('x')",
            {"click", "yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk", "ftsupervise.guard"},
        ),
        ("import ftsupervise.cli", {"yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk"}),
        ("import ftsupervise.cli.kill", {"yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk"}),
        (
            "from ftsupervise.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            {"shutil", "lzma", "dataclasses"},
        ),
        ("import ftsupervise.scheduler", {"dataclasses", "subprocess"}),
        ("import ftsupervise.config.find_run, ftsupervise.rundir.switches", {"yaml", "dataclasses", "pydantic"}),
        ("import ftsupervise.cli.status", {"yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk"}),
        ("import ftsupervise.cli.nodes", {"yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk"}),
        ("import ftsupervise.cli.run", {"yaml", "psutil", "pydantic", "requests", "jinja2", "slack_sdk"}),
    ],
)
def test_a_start_loads_only_what_it_needs(code: str, forbidden: set[str]) -> None:
    probe = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    # an editable install puts its finder, and what that imports, into every interpreter
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*{n.split('.')[0] for n in sys.modules})"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert not (set(done.stdout.split()) - set(bare.stdout.split())) & forbidden


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("launch", "ftsupervise.launch.submit"),
        *((words, "ftsupervise.config.load") for words in ("cron install", "notify test", "checkpoints prune")),
    ],
)
def test_what_is_tried_first_is_loaded_once_for_the_trial_and_the_work(tmp_path: Path, words: str, part: str) -> None:
    """Each of the two has a process of its own, and has what this one has loaded before it begins the first."""
    probe = f"""import os, sys
forks = []
def look(event, _):
    if event == "os.fork":
        forks.append(event)
        if len(forks) == 1:
            os.write(2, str({part!r} in sys.modules).encode() + b"\\n")
sys.addaudithook(look)
sys.argv = ["ftsupervise", *{words.split()!r}]
from ftsupervise.cli import main
main()"""
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[0] == "True", done.stderr


def test_each_verb_has_a_file_of_its_name_and_a_row_in_the_table_of_rooms() -> None:
    files = {path.stem for path in (PACKAGE / "cli").glob("*.py")}
    assert {verb + {"list": "_runs"}.get(verb, "") for verb in COMMANDS} <= files  # (``list`` is a name of Python's)
    table = re.findall(r"^\| (`.*?`) \| `ftsupervise/", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(table))) == sorted(COMMANDS)


def test_each_file_in_the_table_of_decisions_is_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| decision |")[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", table)
    assert len(named) > 15 and [name for name in named if not (PACKAGE / name).is_file()] == []


def test_a_command_runs_with_its_garbage_collected() -> None:
    probe = """import ftsupervise.__main__, gc; from ftsupervise.cli import ftsupervise as group; print(gc.isenabled())
group.get_command(None, 'watch'); print(gc.isenabled())"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_package_shows_what_there_is_and_hands_out_each_of_it() -> None:
    probe = """import sys, ftsupervise; print(*dir(ftsupervise))
from ftsupervise import Guard, Decision; print("ftsupervise.interface" in sys.modules)
print(*(getattr(ftsupervise, name) for name in dir(ftsupervise)), hasattr(ftsupervise, "Rum"))"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    names, loaded, values = done.stdout.splitlines()
    assert names == "Decision Error Guard Run __version__" and loaded == "False"
    assert re.sub(r"<\w+ 'ftsupervise\.([\w.]+)'>", r"\1", values) == (
        f"guard.stop_reasons.Decision errors.Error guard.guard.Guard interface.run.Run {VERSION} False"
    )


def test_importing_the_package_loads_the_standard_library_only() -> None:
    probe = """import sys; before = set(sys.modules); from ftsupervise import Guard; Guard()
print(*sorted({n.split('.')[0] for n in set(sys.modules) - before}))"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) - {"ftsupervise"} <= set(sys.stdlib_module_names)


def frozen(node: ast.ClassDef) -> bool:
    """Is it a value: a NamedTuple, a frozen dataclass, a section of the settings?"""
    how = [ast.unparse(one) for one in (*node.bases, *node.decorator_list)]
    return any(one in ("NamedTuple", "Strict", "Section") or "frozen=True" in one for one in how)


def attributes(node: ast.ClassDef) -> set[str]:
    """What it declares, and what its methods assign to ``self``."""
    declared = {
        one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return declared | {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def test_no_class_has_more_attributes_than_one_can_keep_in_mind(trees: dict[str, ast.Module]) -> None:
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not {node.name for node in classes if not frozen(node) and len(attributes(node)) > 15}
    assert sum(frozen(node) for node in classes) > 100
    one, two = ast.parse("class A:\n x: int\n def f(self): self.y = self.z\n@dataclass(frozen=True)\nclass B: ...").body
    assert isinstance(one, ast.ClassDef) and attributes(one) == {"x", "y"} and not frozen(one)
    assert isinstance(two, ast.ClassDef) and frozen(two)


def named_twice(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Classes of one name, wherever they stand, with their modules."""
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def many_arguments(tree: ast.Module) -> set[str]:
    """Functions and methods with more than eight, ``self`` not counted."""
    found = set()
    for scope in ast.walk(tree):
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(one.arg not in ("self", "cls") for one in given) > 8:
                    found.add(f"{scope.name}.{node.name}" if isinstance(scope, ast.ClassDef) else node.name)
    return found


# ``ftsupervise.Run`` is the run itself, for programs of others; in the rooms the word is that of its settings.
OUTSIDE_TOO = {"Run": ["config.schema", "interface.run"]}


def test_a_class_name_has_one_meaning(trees: dict[str, ast.Module]) -> None:
    assert named_twice(trees) == OUTSIDE_TOO
    assert named_twice({"a": ast.parse("class One: ..."), "b": ast.parse("def f():\n class One: ...")})


# The only one that may: its docstring says why.
MANY_ARGUMENTS = {"guard.guard": {"Guard.__init__"}}


def test_no_function_takes_more_than_eight_arguments(trees: dict[str, ast.Module]) -> None:
    every = {name: many_arguments(tree) for name, tree in trees.items()}
    assert {name: found for name, found in every.items() if found} == MANY_ARGUMENTS


# Theirs that begin with an underscore, and are public all the same.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_quorum"}


def private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where something private of another one is read, replaced or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ftsupervise"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "sys"):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            given = (one.value for one in node.args if isinstance(one, ast.Constant))
            names = [one.rpartition(".")[2] for one in given if isinstance(one, str)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if re.match("_[^_]", name) and name not in PUBLIC)


def test_tests_touch_nothing_private() -> None:
    """Where one has to, a seam is missing: a clock, a bound or a value that can be given."""
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if lines := [f"{line}: {name}" for line, name in private(ast.parse(path.read_text("utf-8")))]:
            found[str(path.relative_to(ROOT / "tests"))] = lines
    assert not found
    assert list(private(ast.parse("from ftsupervise.a import _b\nself.c._d\nsetattr(e, '_f', 1)"))) == [
        *((1, "_b"), (2, "_d"), (3, "_f"))
    ]


def offers(module: str, name: str) -> bool:
    """Can ``name`` be imported from ``module``? Of one whose framework is not installed here, its text says so."""
    if not module.startswith("ftsupervise.integrations."):
        return hasattr(import_module(module), name)
    defined = ast.parse(modules()[module.removeprefix("ftsupervise.")].read_text("utf-8")).body
    passed_on = {alias.name for one in defined if isinstance(one, ast.ImportFrom) for alias in one.names}
    return name in {getattr(one, "name", "") for one in defined} | passed_on


def test_imports_that_stand_in_texts_can_be_made() -> None:
    """Programs that tests and the manual write down, which no type checker reads."""
    written = re.compile(r"from (ftsupervise[\w.]*) import (\w+(?:, \w+)*)")
    texts = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    texts += [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.*")]
    found = {
        (module, name)
        for path in texts
        if path.suffix in (".py", ".md", ".sh")
        for module, names in written.findall(path.read_text("utf-8"))
        for name in names.split(", ")
    }
    every = {"ftsupervise", *(f"ftsupervise.{name}" for name in modules())}
    wrong = {
        f"from {module} import {name}"
        for module, name in found
        if f"{module}.{name}" not in every and (module not in every or not offers(module, name))
    }
    assert len(found) > 300 and not wrong


def test_a_start_compiles_no_pattern_that_it_may_not_need() -> None:
    probe = """import re, sys
import ftsupervise.cli.status, ftsupervise.config.find_run, ftsupervise.report.detail
ours = [module for name, module in sys.modules.items() if name.startswith("ftsupervise")]
print(*(f"{one.__name__}.{name}" for one in ours for name, value in vars(one).items() if isinstance(value, re.Pattern)))
print("shlex" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "ftsupervise.config.find_run._PLAIN_NAME\nFalse\n", "compile it where it is used"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_git_keeps_nothing_that_it_is_told_to_ignore() -> None:
    """A link to somebody's environment once stood in the tree, where each fresh clone makes its own."""
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""


def single_importers(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """Each module that exactly one other imports, from its own room, with that one; not those that a table or a command line
    loads by name as well."""
    who: dict[str, set[str]] = {name: set() for name in trees}
    for name, targets in arrows(trees).items():
        for _, target in targets:
            who[target].add(name)
    texts = {node.value for tree in trees.values() for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    found = {name: min(ones) for name, ones in who.items() if len(ones) == 1}
    return {
        name: one
        for name, one in found.items()
        if name.rpartition(".")[0] in (one.rpartition(".")[0], one) and not is_a_door(name, trees[name], texts)
    }


def is_a_door(name: str, tree: ast.Module, texts: Collection[str]) -> bool:
    """Whether it is a program, or a table names it: a command, a watchdog, a receiver, a scheduler."""
    own = name.rpartition(".")[2].replace("_", "-")
    by_words = name.startswith(("cli.", "watch.watchdogs.", "alerts.receivers.")) and own in texts
    program = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
    return program or by_words or f"ftsupervise.{name}" in texts


def test_a_file_for_one_other_file_says_why_it_stands_alone(trees: dict[str, ast.Module]) -> None:
    alone = single_importers(trees)
    silent = [name for name in alone if "stands alone" not in " ".join((ast.get_docstring(trees[name]) or "").split())]
    assert not silent, "bring it home, or say in its head why it stands alone:\n" + "\n".join(
        f"{name} <- {alone[name]}" for name in silent
    )
    assert len(alone) <= 14, "an idea is one file: " + ", ".join(alone)
