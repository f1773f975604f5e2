"""Values flow down: doors to stories to edges to pure code to words. This walks the imports and says where they do not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftsupervise"

# What a module may import besides its own room: the rooms of lower layers, by name.
WORDS = {"model", "jobs", "truth", "errors", "units", "hostlist", "printable", "secrecy"}
FILES = {
    "host",
    "rundir",
    "sharing",
    "reading",
    "switches",
    "beats",
    "pages",
    "ledger",
    "records",
    "fence",
    "brake",
    "blame",
    "procfs",
    "bounded",
    "haste",
    "deadline",
    "watchers",
    "imports",
    "shared",
    "hostmemory",
}  # edge: files and host
PURE = {"config", "scheduler.parse", "alerts.step", "launch.plan", "launch.render"}
EDGES = {"scheduler", "probe", "alerts.receivers", "node", "warm"}
STORIES = {"launch", "job", "watch", "alerts", "crontab", "report", "sandbox"}
DOORS = {"cli", "guard", "integrations", "__main__", "start"}

# Arrows between rooms of one layer that are wanted, each with its reason.
WANTED = {
    ("warm", "node"): "a standby holds its place in shared memory as the agents do theirs",
    ("__main__", "cli"): "python -m ftsupervise",
    ("start", "__main__"): "the same, with a safe module path",
    ("__main__", "start"): "what is imported from here on is not the current directory's",
    ("watch", "alerts"): "the tick tells what it found",
    ("watch", "probe"): "watchdogs look through the bounded eyes",
    ("report", "watch"): "status asks which jobs are the run's",
    ("launch", "config"): "settings in",
    ("crontab", "alerts"): "a failing entry is an alert",
    ("launch", "crontab"): "launch makes sure that the watch chain is alive",
    ("job", "crontab"): "chain and run keep each other alive",
    ("crontab", "job"): "an entry is ended with all its children, as an attempt is",
}


def room(module: str) -> str:
    """ "ftsupervise.alerts.receivers.slack" -> "alerts.receivers", "ftsupervise.rundir" -> "rundir"."""
    parts = module.split(".")[1:]
    for depth in (2, 1):
        name = ".".join(parts[:depth])
        if name in WORDS | FILES | PURE | EDGES | STORIES | DOORS:
            return name
    return parts[0] if parts else ""


def layer(name: str) -> int:
    for level, rooms in enumerate((WORDS, FILES, PURE, EDGES, STORIES, DOORS)):
        if name in rooms:
            return level
    raise AssertionError(f"{name} is in no layer: name it in this test")


def imports(path: Path) -> list[tuple[int, str]]:
    """Every ftsupervise module a file imports at run time (not under TYPE_CHECKING), with its line."""
    found: list[tuple[int, str]] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*deeper.split("."))).with_suffix(".py").exists()
                found.append((node.lineno, deeper if is_module else node.module))
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text("utf-8")))
    return [(line, name) for line, name in found if name.split(".")[0] == "ftsupervise" and name != "ftsupervise"]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_values_flow_down() -> None:
    wrong = []
    for path in modules():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        mine = room(name)
        for line, target in imports(path):
            theirs = room(target)
            if not theirs or theirs == "templates" or mine.split(".")[0] == theirs.split(".")[0]:
                continue
            up = layer(theirs) > layer(mine)
            beside = layer(theirs) == layer(mine) and layer(mine) >= 3 and (mine, theirs) not in WANTED
            if mine in DOORS and theirs in DOORS and mine not in ("__main__", "start"):
                up = True
            if up or beside:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {mine} imports {theirs}")
    assert not wrong, "\n".join(wrong)


def test_every_room_stands_in_a_layer() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms <= STORIES | EDGES | PURE | DOORS | FILES


def test_only_the_command_line_prints_or_exits() -> None:
    allowed = {
        "scheduler/localchain.py",
        "job/voice.py",
        "guard/voice.py",
        "probe/server.py",
        "watch/watchdogs/nvml.py",
    }  # programs of their own
    wrong = []
    for path in modules():
        relative = str(path.relative_to(PACKAGE))
        if relative.startswith("cli/") or relative in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit", "click.echo"):
                wrong.append(f"{relative}:{node.lineno}")
    assert not wrong


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import ftsupervise", {"click", "yaml", "subprocess", "socket", "dataclasses"}),
        (
            "from ftsupervise import Guard; Guard",
            {"click", "yaml", "dataclasses", "psutil", "pydantic", "requests", "jinja2", "rich"},
        ),
        ("import ftsupervise.cli", {"yaml", "psutil", "pydantic", "requests", "jinja2", "rich", "slack_sdk"}),
        ("import ftsupervise.cli.switches", {"yaml", "psutil", "pydantic", "requests", "jinja2", "rich", "slack_sdk"}),
        (
            "from ftsupervise.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            {"shutil", "lzma", "dataclasses"},
        ),
        ("import ftsupervise.scheduler", {"dataclasses", "subprocess"}),
        ("import ftsupervise.cli.status", {"yaml", "psutil", "pydantic", "requests", "jinja2", "rich", "slack_sdk"}),
        ("import ftsupervise.cli.nodes", {"yaml", "psutil", "pydantic", "requests", "jinja2", "rich", "slack_sdk"}),
        ("import ftsupervise.cli.run", {"yaml", "psutil", "pydantic", "requests", "jinja2", "rich", "slack_sdk"}),
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


def test_a_command_runs_with_its_garbage_collected() -> None:
    probe = """import ftsupervise.__main__, gc; from ftsupervise.cli import ftsupervise as group; print(gc.isenabled())
group.get_command(None, 'watch'); print(gc.isenabled())"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_importing_the_package_loads_the_standard_library_only() -> None:
    probe = """import sys; before = set(sys.modules); from ftsupervise import Guard; Guard()
print(*sorted({n.split('.')[0] for n in set(sys.modules) - before}))"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) - {"ftsupervise"} <= set(sys.stdlib_module_names)


def test_files_stay_short_enough_to_be_seen_whole() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
        if (lines := len(path.read_text("utf-8").splitlines())) > 400
    }
    assert not long
