"""Another account lays Python modules into the folder where somebody works. None of them runs as that person."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.scheduler.local import Local
from tests.neighbours.stranger import as_stranger

ROOT = Path(__file__).parents[2]
TYPED = str(Path(sys.executable).with_name("ftsupervise"))  # the console script, as people type it
STRANGER = 65534
MODULES = (
    "click",
    "signal",
    "yaml",
    "json",
    "sitecustomize",
    "usercustomize",
    "ftsupervise",
    "runpy",
    "pkgutil",
    "gc",
    "re",
)
GROUPS = ("ftsupervise", "ftsupervise.watchdogs", "ftsupervise.receivers", "ftsupervise.schedulers", "fsspec.specs")
TRAP = """import os
os.close(os.open({mark!r} + "-" + __name__, os.O_CREAT | os.O_WRONLY, 0o666))
"""


class Trap:
    """A folder that everybody may write, with a stranger's modules in it, and the marks of those that ran."""

    def __init__(self, top: Path) -> None:
        self.folder, self.marks = top / "shared", top / "marks"
        for folder in (self.folder, self.marks):
            folder.mkdir()
            folder.chmod(0o1777)
        script = TRAP.format(mark=str(self.marks / "ran"))
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(STRANGER)
                os.setuid(STRANGER)
                for name in MODULES:
                    (self.folder / f"{name}.py").write_text(script)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert (self.folder / "click.py").stat().st_uid == STRANGER

    def sprung(self) -> list[str]:
        return sorted(path.name for path in self.marks.iterdir())


@pytest.fixture
def trap(top: Path) -> Trap:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another account")
    return Trap(top)


def environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more


def wait_for_the_end(until: Callable[..., Any]) -> None:
    until(lambda: not Local().queue(), "the end of the chain")


@pytest.mark.root
def test_the_trap_is_a_real_one(trap: Trap) -> None:
    subprocess.run([sys.executable, "-m", "click"], cwd=trap.folder, env=environment(), check=False, timeout=60)
    assert "ran-__main__" in trap.sprung() or "ran-click" in trap.sprung()


@pytest.mark.threat(
    "A group member or a stranger lays `click.py`, `signal.py`, `yaml.py` or `sitecustomize.py` into the folder from "
    "which a run is launched.",
    "The job, its agents, its keeper and the local queue start with a safe module path and import none of them.",
)
@pytest.mark.root
def test_a_job_on_this_machine_runs_no_code_of_the_folder_it_was_launched_from(
    trap: Trap, until: Callable[..., Any]
) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: local\nlaunch: {command: [sh, -c, 'touch trained'], jobs: 1, time: 1m}\n"
        "nodes: {directory: nodes}\n"
    )
    (trap.folder / "nodes").mkdir()
    subprocess.run([TYPED, "launch"], cwd=trap.folder, env=environment(), check=True, capture_output=True, timeout=60)
    until((trap.folder / "trained").exists, "the training")
    wait_for_the_end(until)
    for words in (["status", "mine"], ["watch", "--no-send", "mine"], ["nodes", "mine"], ["check", "mine"]):
        subprocess.run(
            [TYPED, *words], cwd=trap.folder, env=environment(), check=False, capture_output=True, timeout=60
        )
    assert trap.sprung() == []


@pytest.mark.threat(
    "PATH has an empty or relative entry, as behind a stray colon, and where you type a command a stranger has laid "
    "programs called `scontrol`, `squeue`, `sbatch` or `bash`.",
    "What ftsupervise itself asks of this machine is looked for in the absolute entries of PATH alone. The command of a run is "
    "found as a shell finds it.",
)
@pytest.mark.root
@pytest.mark.parametrize("path", [":", ":/usr/bin:/bin", "bin:.:/usr/bin:/bin"])
@pytest.mark.parametrize(
    "words", [["init", "-o", "{out}", "job.sbatch"], ["doctor"], ["status"], ["watch", "mine.yaml"]]
)
def test_no_program_that_a_stranger_laid_into_the_current_directory_is_run(
    trap: Trap, path: str, words: list[str]
) -> None:
    def lay() -> None:
        (trap.folder / "bin").mkdir(mode=0o755)
        for folder in (trap.folder, trap.folder / "bin"):
            for name in (
                "squeue",
                "sbatch",
                "scontrol",
                "sinfo",
                "srun",
                "scancel",
                "sacct",
                "bash",
                "sh",
                "timeout",
                "quota",
            ):
                program = folder / name
                program.write_text(f"#!/bin/sh\n: > {trap.marks}/ran-{name}\n")
                program.chmod(0o755)
        (trap.folder / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N1\nsrun python train.py\n")

    as_stranger(lay)
    (trap.folder / "mine.yaml").write_text(
        "name: mine\nlaunch: {command: [sh, -c, ':']}\nwatch: {exec: [{name: quota, command: [quota]}]}\n"
    )
    state = trap.folder.parent / "state"
    env = environment(PATH=path, FTSUPERVISE_STATE_DIR=str(state), HOME=str(trap.folder.parent))
    typed = [word.format(out=trap.folder.parent / "out.yaml") for word in words]
    done = subprocess.run([TYPED, *typed], cwd=trap.folder, env=env, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    assert trap.sprung() == []


@pytest.mark.threat(
    "You type `doctor` where a stranger has laid a `ftsupervise.py`. The script of your training lies in another folder.",
    "The training's Python is asked in `/`, so it imports nothing from there.",
)
@pytest.mark.root
def test_the_question_of_doctor_to_the_python_of_a_training_runs_no_code_of_the_folder(trap: Trap) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: local\nlaunch: {command: 'python3 src/train.py', jobs: 1}\n"
    )
    (trap.folder / "src").mkdir()
    (trap.folder / "src" / "train.py").write_text("import ftsupervise\n")
    env = environment(FTSUPERVISE_STATE_DIR=str(trap.folder.parent / "state"), HOME=str(trap.folder.parent))
    argv = [TYPED, "doctor", "--json"]
    done = subprocess.run(argv, cwd=trap.folder, env=env, capture_output=True, text=True, timeout=120)
    lines = {one["about"]: one for one in json.loads(done.stdout)["lines"]}
    assert lines["python"]["word"] == "ok", "it was asked"
    assert trap.sprung() == []


@pytest.mark.threat(
    "A distribution with entry points (a plug-in) lies in the current directory.",
    "A watchdog or receiver of another package is looked for in the interpreter's own site-packages alone, and only under a "
    "name that is none of ours; what the packages find is not on the module path.",
)
@pytest.mark.root
def test_no_plug_in_that_a_stranger_laid_into_the_current_directory_is_loaded(trap: Trap) -> None:
    """Entry points are found on the module path by fsspec, for the places of copies; by us in site-packages."""

    def lay() -> None:
        info = trap.folder / "planted-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("".join(f"[{group}]\nplanted = planted:Any\n" for group in GROUPS))
        (trap.folder / "planted.py").write_text((trap.folder / "click.py").read_text())

    as_stranger(lay)
    checkpoint = trap.folder.parent / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.pt").write_text("weights")
    place = ("--to", "planted://bucket")
    for words in (["checkpoints", "adopt", str(checkpoint)], ["checkpoints", "offload", *place, str(checkpoint)]):
        done = subprocess.run([TYPED, *words], cwd=trap.folder, env=environment(), capture_output=True, timeout=60)
        assert b"Traceback" not in done.stderr
    assert done.returncode != 0 and trap.sprung() == []
    settings = trap.folder.parent / "ftsupervise.yaml"
    settings.write_text("name: mine\nlaunch: {command: a}\nwatch: {planted: {}}\n")
    argv = [TYPED, "config", "check", str(settings)]
    done = subprocess.run(argv, cwd=trap.folder, env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 78 and b"unknown key 'planted'" in done.stderr and trap.sprung() == []
    asks = "import sys; sys.path.append(''); import fsspec; fsspec.filesystem('planted')"
    subprocess.run([sys.executable, "-I", "-c", asks], cwd=trap.folder, check=False, capture_output=True, timeout=60)
    assert trap.sprung() == ["ran-planted"], "it is a real one"


def test_one_module_of_ours_looks_for_entry_points() -> None:
    words = ("entry_points", "iter_entry_points", "pkg_resources", "importlib_metadata")
    found = [
        path.name for path in (ROOT / "ftsupervise").rglob("*.py") if any(w in path.read_text("utf-8") for w in words)
    ]
    assert found == ["plugins.py"]


SEARCHED = (
    "head",
    "sleep",
    "date",
    "tr",
    "grep",
    "timeout",
    "nice",
    "uname",
    "find",
    "wc",
    "mkdir",
    "ls",
    "sed",
    "cut",
    "mv",
)


def lay_programs(trap: Trap) -> None:
    for name in SEARCHED:
        program = trap.folder / name
        program.write_text(f'#!/bin/sh\n: > {trap.marks}/ran-{name}\nexec /usr/bin/{name} "$@"\n')
        program.chmod(0o755)


@pytest.mark.threat(
    "PATH has an empty entry, your command begins with a path, and a stranger has laid programs that a shell of ours could run "
    "(`head`, `sleep`, `grep`) into the project folder.",
    "The job script, and the shells beside a run, look for theirs in the absolute entries of PATH alone. The command keeps its "
    "PATH.",
)
@pytest.mark.root
@pytest.mark.parametrize("setup", ["", "exit 3"])
def test_no_shell_of_a_job_runs_a_program_that_a_stranger_laid_into_its_folder(
    trap: Trap, until: Callable[..., Any], setup: str
) -> None:
    as_stranger(partial(lay_programs, trap))
    command = [sys.executable, "-c", "import os, time; time.sleep(2); open('it', 'w').write(os.environ['PATH'])"]
    (trap.folder / "mine.yaml").write_text(
        f"name: mine\nscheduler: local\nlaunch: {{command: {json.dumps(command)}, jobs: 1, time: 1m, setup: '{setup}'}}\n"
        "checkpoints: {retain: {last: 2}}\n"
    )
    path = ":/usr/bin:/bin"
    env = environment(PATH=path, FTSUPERVISE_UNFIT_SECONDS="0")
    subprocess.run(
        [TYPED, "launch", "mine.yaml"], cwd=trap.folder, env=env, check=True, capture_output=True, timeout=60
    )
    wait_for_the_end(until)
    assert setup or (trap.folder / "it").read_text() == path
    assert not setup or "launch.setup ended with 3" in next((trap.folder / "runs/mine/logs").iterdir()).read_text()
    assert trap.sprung() == []


@pytest.mark.root
def test_nor_does_the_shell_that_ends_what_a_killed_supervisor_has_left(trap: Trap, until: Callable[..., Any]) -> None:
    as_stranger(partial(lay_programs, trap))
    tells = "import os, time; open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new', 'pid'); time.sleep(60)"
    argv = [TYPED, "run", "--run-dir", str(trap.folder / "run"), "--", sys.executable, "-c", tells]
    with subprocess.Popen(
        argv, cwd=trap.folder, env=environment(PATH=":/usr/bin:/bin"), stderr=subprocess.DEVNULL
    ) as one:
        until((trap.folder / "pid").exists, "the command")
        pid = (trap.folder / "pid").read_text()
        for supervisor in supervisors_above(int(pid)):
            os.kill(supervisor, signal.SIGKILL)
        one.wait(60)
        until(
            lambda: not Path(f"/proc/{pid}/environ").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(),
            "its end",
        )
    assert trap.sprung() == []


def supervisors_above(pid: int) -> Iterator[int]:
    """Yield the processes above it that are ``ftsupervise run``, outermost last."""
    while b"run\0--run-dir" in Path(f"/proc/{(pid := parent(pid))}/cmdline").read_bytes():
        yield pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.threat(
    "You press TAB behind `./ftsupervise`, where a stranger has laid a program of that name: bash would run it to complete "
    "the word.",
    "Your own `ftsupervise` is asked, whatever path was typed.",
)
@pytest.mark.root
def test_a_press_of_tab_runs_no_program_that_a_stranger_laid_there(trap: Trap) -> None:
    def lay() -> None:
        program = trap.folder / "ftsupervise"
        program.write_text(f"#!/bin/sh\n: > {trap.marks}/ran-ftsupervise\n")
        program.chmod(0o755)

    as_stranger(lay)
    press = (  # as bash calls it: $1 is the word that was typed
        'eval "$(ftsupervise completion bash)"; COMP_WORDS=(./ftsupervise statu); COMP_CWORD=1; '
        '_ftsupervise_completion ./ftsupervise; echo "${COMPREPLY[@]}"'
    )
    env = environment(PATH=f"{Path(TYPED).parent}:/usr/bin:/bin")
    for _ in range(20):  # on a busy machine the answer is too late at times, and empty
        done = subprocess.run(
            ["bash", "-c", press], cwd=trap.folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert trap.sprung() == []
        if done.stdout == "status\n":
            return
    raise AssertionError(done.stdout + done.stderr)


@pytest.mark.threat(
    "PYTHONPATH has an empty or relative entry, which means the current directory.",
    "The interpreters that we start ignore such entries. The command keeps its PYTHONPATH.",
)
@pytest.mark.root
@pytest.mark.parametrize("path", [":/nowhere", "/nowhere:", ".", ""])
def test_an_entry_of_pythonpath_that_means_the_current_directory_brings_nothing_into_the_job(
    trap: Trap, until: Callable[..., Any], path: str
) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: local\n"
        "launch: {command: [sh, -c, 'echo \"$PYTHONPATH\" > it; mv it seen'], jobs: 1, time: 1m}\n"
    )
    argv = [
        TYPED,
        "launch",
        str(trap.folder / "ftsupervise.yaml"),
    ]  # typed elsewhere: what Python loads there is theirs
    subprocess.run(argv, cwd="/", env=environment(PYTHONPATH=path), check=True, capture_output=True, timeout=60)
    until((trap.folder / "seen").exists, "the training")
    wait_for_the_end(until)
    kept, ours = (trap.folder / "seen").read_text().strip().rsplit(":", 1) if path else ("", "")
    assert kept == path, "the command keeps its own"
    assert not path or "/guard/" in ours
    assert trap.sprung() == []


@pytest.mark.threat(
    "A `sitecustomize.py` lies in the current directory of a warm standby.",
    "The standby's module path has no empty entry.",
)
@pytest.mark.root
@pytest.mark.parametrize("path", ["", None])
def test_a_standby_imports_nothing_from_the_current_directory(trap: Trap, path: str | None) -> None:
    place = trap.folder.parent / "place"
    orders = json.dumps({"place": str(place), "imports": None, "modules": ["no_such_module_anywhere"]})
    (trap.folder.parent / "train.py").write_text("raise SystemExit(7)\n")
    start = str(ROOT / "ftsupervise" / "warm" / "sitecustomize.py")
    argv = [sys.executable, "-IS", start, orders, "0", "--", sys.executable, str(trap.folder.parent / "train.py")]
    env = environment(**({} if path is None else {"PYTHONPATH": path}))
    child = subprocess.Popen(
        argv, cwd=trap.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert child.stdout is not None
        said = child.stdout.readline()
        assert json.loads(said)["node"], said
        assert trap.sprung() == []
    finally:
        child.kill()
        child.communicate()


@pytest.mark.fault(
    "The safe path of ours changes what the training command imports",
    "it does not: no variable and no flag reaches the command",
)
@pytest.mark.parametrize("words", [["train.py"], ["-m", "mine.train"]])
def test_the_command_finds_its_own_modules_as_without_us(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    told = (
        "import json, os, sys\nimport beside\n"
        "json.dump([sys.path[0], sys.flags.safe_path if hasattr(sys.flags, 'safe_path') else False, sys.flags.isolated,"
        " os.environ.get('PYTHONSAFEPATH')], open('told', 'w'))\n"
    )
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(told)
    (tmp_path / "mine" / "train.py").write_text(told)
    argv = [TYPED, "run", "--run-dir", str(tmp_path / "run"), "--warm", "off", "--", sys.executable, *words]
    subprocess.run(argv, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=60)
    assert json.loads((tmp_path / "told").read_text()) == [str(tmp_path), False, 0, None]


# ------------------------------------------------------------------------------------------------- it cannot be forgotten


def starts_of_interpreters(path: Path) -> Iterator[str]:
    """Lists and tuples that begin with a Python and do not leave the current directory out."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
            words = [ast.unparse(word) for word in node.elts]
            spread = isinstance(node.elts[0], ast.Starred)
            if not spread and re.search(r"\bsys\.executable\b|\bpython\b", words[0]) and words[1][:3] != "'-I":
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.threat(
    "A developer starts an interpreter in a new place and forgets the safe path.",
    "A test walks the source and names the line.",
)
def test_every_interpreter_of_ours_is_started_by_the_one_function() -> None:
    allowed = {
        "sys.executable, 'train.py'": "examples/demo: the training itself",
    }
    files = [*(ROOT / "ftsupervise").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = [line for path in files if path.name != "processes.py" for line in starts_of_interpreters(path)]
    assert [line for line in found if not any(word in line for word in allowed)] == []


def test_no_template_and_no_script_of_ours_starts_a_module_by_its_name() -> None:
    files = [
        path for folder in ("templates", "cron", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix not in (".pyc", ".png")
        for line in path.read_text("utf-8", "replace").splitlines()
        if re.search(r"python[\d.]*\s+(?:-\w+\s+)*-[mc]\s+ftsupervise|-m ftsupervise", line)
    ]
    assert wrong == []
