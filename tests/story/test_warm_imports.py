"""What a standby imports, and what it leaves out: a fork carries no thread, and no connection twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ftsupervise.ranks import shm_dir
from tests.story.warm_scene import WARM, Standby, script

LEAVES = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "process": "import subprocess; child = subprocess.Popen(['sleep', '600'])",
    "socket": "import socket; s = socket.socket()",
    "device": "f = open('/dev/zero')",
    "file": "f = open(__file__)",
}


def test_a_module_that_leaves_something_a_fork_cannot_carry_is_not_imported(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name, text in LEAVES.items():
        (own / f"leaves_{name}.py").write_text(text)
    (own / "harmless.py").write_text("")
    modules = ("json", *(f"leaves_{name}" for name in LEAVES), "harmless")
    told = "import sys; print(*sorted(n for n in sys.modules if n.startswith(('leaves', 'harmless'))))"
    one = standby(script(tmp_path, told), modules=modules, PYTHONPATH=str(own))
    assert one.run().stdout == "harmless\n"
    skipped = next(fact["skipped"] for fact in one.facts() if "skipped" in fact)
    assert set(skipped) == {f"leaves_{name}" for name in LEAVES}


POOL = """
import os, threading, time
over = threading.Event()
def work():
    over.wait()
    time.sleep(0.1)  # the last of it: without a turn on a busy machine
threading.Thread(target=work, daemon=True).start()
os.register_at_fork(before=over.set)
"""


def test_a_pool_that_ends_its_threads_before_a_fork_is_imported(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "pool.py").write_text(POOL)
    one = standby(script(tmp_path, "import sys; print('pool' in sys.modules)"), modules=("pool",), PYTHONPATH=str(own))
    assert one.run().stdout == "True\n", one.facts()


def test_of_a_standby_that_gives_up_nothing_stays(standby: Callable[..., Standby], tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    names = tuple(f"leaves_{n}" for n in range(6))
    for name in names:
        (own / f"{name}.py").write_text(LEAVES["socket"])
    one = standby(script(tmp_path, "pass"), modules=names, wait=False, PYTHONPATH=str(own))
    assert one.process.wait(60) == 0
    assert "leaves_5 opened or started descriptor" in one.facts()[-1]["refused"]
    assert "started cold: no standby here" in one.run().stderr
    shm_dir.clear(str(one.place))
    assert not one.place.exists()


LISTS = """
import sys
from ftsupervise import Guard
from ftsupervise.guard.heartbeat import write_imports
write_imports(sys.argv[1], 1, 2.0)
"""
LOOKS = """
import sys
print("ftsupervise.guard.guard" in sys.modules)
from ftsupervise import Guard
print(sorted(n for n in sys.modules if n.startswith(("ftsupervise.warm", "ftsupervise.ranks"))))
print(Guard)
"""


def listed(folder: Path) -> Path:
    """What a rank with a guard lists at its first step."""
    subprocess.run([sys.executable, "-c", LISTS, str(folder / "imports.json")], cwd="/", check=True, timeout=60)
    return folder / "imports.json"


def test_a_rank_begins_with_its_guard_imported_and_without_what_the_standby_needs(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, LOOKS), imports=listed(tmp_path))
    assert one.run().stdout == "True\n[]\n<class 'ftsupervise.guard.guard.Guard'>\n", one.facts()


def test_a_program_that_brings_its_own_ftsupervise_gets_that_one(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    own = tmp_path / "ftsupervise"
    own.mkdir()
    (own / "__init__.py").write_text("Guard = 'its own'")
    one = standby(script(tmp_path, LOOKS), imports=listed(tmp_path))
    assert one.run().stdout == "False\n[]\nits own\n", one.facts()


def test_no_package_of_the_tools_own_environment_stands_in_for_one_of_the_job(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    """The tool's site-packages: another numpy, and a backport of a module that the standby itself needs from Python."""
    tool, job = tmp_path / "tool", tmp_path / "job"
    shutil.copytree(WARM.parent, tool / "ftsupervise", ignore=shutil.ignore_patterns("__pycache__"))
    job.mkdir()
    for folder, text in ((tool, "the tool's"), (job, "the job's")):
        (folder / "numpy.py").write_text(f"whose = {text!r}\n")
    (tool / "torch.py").write_text("whose = 'of the tool alone'\n")
    for name in ("dataclasses", "ctypes", "traceback"):
        (tool / f"{name}.py").write_text("raise ImportError('a backport for a Python of long ago')\n")
    told = (
        "import sys, numpy, dataclasses, ctypes; print(numpy.whose, [one for one in sys.path if one.endswith('/tool')])"
    )
    told += "; print('torch' in sys.modules)"
    warm = tool / "ftsupervise" / "warm"
    one = standby(script(tmp_path, told), modules=("numpy", "torch"), warm=warm, PYTHONPATH=str(job))
    done = one.run()
    assert done.stdout == "the job's []\nFalse\n", (done, one.said.read_text())
    assert "started cold" not in done.stderr
