"""The tool lives in one Python and the training in another, where nothing of ours is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ftsupervise import __version__
from ftsupervise.run.guard_folder import add_guard, prepare, with_entry
from ftsupervise.rundir.paths import ENV_VERSION, RunDir
from tests.neighbours.old_python import python39, pythons_before_39
from tests.unit.test_layers import PACKAGE

_SAYS = "import ftsupervise; from ftsupervise import Guard; print(ftsupervise.__version__, ftsupervise.__file__)"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing in it."""
    folder = tmp_path_factory.mktemp("training")
    venv.create(folder, symlinks=True)
    return folder / "bin/python"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir(mode=0o755)
    return RunDir(tmp_path / "run")


def in_training(
    python: Path | str, env: dict[str, str], program: str = _SAYS, cwd: str | Path = "/"
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FTSUPERVISE_", "PYTHONPATH"))}
    return subprocess.run(
        [python, "-c", program], env={**kept, **env}, cwd=cwd, capture_output=True, text=True, timeout=60
    )


def given(rundir: RunDir, **before: str) -> dict[str, str]:
    env, said = dict(before), list[str]()
    add_guard(env, rundir, ("python", "train.py"), said.append)
    assert not said
    return env


def installed(python: Path, version: str) -> Path:
    """Put an ftsupervise of that version where packages are installed."""
    done = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    folder = Path(done.stdout.strip()) / "ftsupervise"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "version.py").read_text()
    (folder / "version.py").write_text(text.replace(f'"{__version__}"', f'"{version}"'))
    return folder


def test_a_training_with_nothing_installed_finds_the_guard(bare: Path, rundir: RunDir) -> None:
    assert "No module named 'ftsupervise'" in in_training(bare, {}).stderr
    done = in_training(bare, given(rundir))
    assert done.stdout.split() == [__version__, str(next(rundir.guard.glob("*/package")) / "ftsupervise/__init__.py")]
    assert not done.stderr


def test_a_training_in_python_3_9_saves_and_goes_on(rundir: RunDir, tmp_path: Path) -> None:
    program = (
        "from ftsupervise import Guard\nguard = Guard()\nnewest = guard.latest()\n"
        "first = int(newest.name[5:]) + 1 if newest else 1\n"
        "for step in range(first, first + 5):\n"
        " if guard.step(step).stop: break\n"
        "with guard.checkpoint(step) as folder: (folder / 'state').write_text(str(step))\n"
        "print(first, step)"
    )
    supervised = [
        sys.executable,
        "-m",
        "ftsupervise",
        "run",
        "--run-dir",
        rundir.root,
        "--name",
        "old",
        "--in-place",
        "0",
        "--",
    ]
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("FTSUPERVISE_", "PYTHONPATH", "SLURM_"))
    }
    for expected in ("1 5", "6 10"):
        done = subprocess.run(
            [*map(str, supervised), python39(), "-c", program],
            env=kept,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert expected in done.stdout.splitlines(), done.stderr


def test_an_installed_one_of_the_same_version_is_taken_and_another_version_is_not(bare: Path, rundir: RunDir) -> None:
    folder = installed(bare, __version__)
    try:
        same = in_training(bare, given(rundir))
        assert same.stdout.split()[1] == str(folder / "__init__.py")
        assert not same.stderr
        installed(bare, "0.0.7")
        other = in_training(bare, given(rundir))
        assert other.stdout.split()[0] == __version__
        assert str(rundir.guard) in other.stdout
        assert other.stderr.splitlines() == [
            f"ftsupervise: {bare} has ftsupervise 0.0.7 and this run's supervisor is {__version__}, whose guard is used"
        ]
        assert not in_training(bare, {**given(rundir), "SLURM_PROCID": "1"}).stderr, "one rank says so for all"
    finally:
        shutil.rmtree(folder)


def test_a_checkout_that_the_person_puts_first_is_taken_and_says_that_it_is_another_version(
    bare: Path, rundir: RunDir, tmp_path: Path
) -> None:
    theirs = tmp_path / "checkout"
    shutil.copytree(PACKAGE, theirs / "ftsupervise", ignore=shutil.ignore_patterns("__pycache__"))
    init = theirs / "ftsupervise/version.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"0.0.7"'))
    env = given(rundir, PYTHONPATH=str(theirs))
    done = in_training(bare, env, "from ftsupervise import Guard; Guard(agree=False)")
    assert (
        f"this guard is ftsupervise 0.0.7 and its supervisor is {__version__}: remove {theirs}/ftsupervise from"
        in done.stderr
    )
    assert env[ENV_VERSION] == __version__


def test_processes_that_the_training_spawns_find_it_too(bare: Path, rundir: RunDir, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing\nfrom ftsupervise import Decision\n"
        "def show(one):\n print(one, flush=True)\n"
        "if __name__ == '__main__':\n"
        " child = multiprocessing.get_context('spawn').Process(target=show, args=(Decision.SAVE,))\n"
        " child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FTSUPERVISE_", "PYTHONPATH"))}
    done = subprocess.run([bare, script], env={**kept, **given(rundir)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "<Decision SAVE>"), done.stderr


def test_a_folder_of_that_name_beside_the_training_hides_nothing(bare: Path, rundir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "ftsupervise/runs").mkdir(parents=True)
    assert in_training(bare, given(rundir), cwd=tmp_path).stdout.split()[0] == __version__


def test_an_interpreter_that_is_too_old_says_so(rundir: RunDir) -> None:
    old = pythons_before_39()
    if not old:
        pytest.skip("no Python before 3.9 on this machine")
    for python in old:
        assert (
            "ImportError: the guard of ftsupervise needs Python 3.9 or newer"
            in in_training(python, given(rundir)).stderr
        )


def test_the_entry_stands_behind_what_the_person_has_and_an_outer_one_gives_way() -> None:
    entry = Path("/r/guard/1.0-abc/path")
    assert with_entry({}, entry) == "/r/guard/1.0-abc/path"
    assert with_entry({"PYTHONPATH": "/a:/b"}, entry) == "/a:/b:/r/guard/1.0-abc/path"
    assert with_entry({"PYTHONPATH": "/a:"}, entry) == "/a::/r/guard/1.0-abc/path", (
        "an empty one is the current directory still"
    )
    assert with_entry({"PYTHONPATH": "/a:/r/guard/0.9-abd/path"}, entry) == "/a:/r/guard/1.0-abc/path"


def test_a_copy_that_was_cut_short_is_completed_and_a_whole_one_left_alone(rundir: RunDir) -> None:
    home = prepare(rundir.guard).parent
    cut, kept = (home / "package/ftsupervise" / name for name in ("guard/guard.py", "guard/settings.py"))
    before = kept.stat().st_ino
    cut.write_bytes(b"")
    (home / "package/ftsupervise/guard/decider.py").unlink()
    assert prepare(rundir.guard).parent == home
    assert cut.read_bytes() == (PACKAGE / "guard/guard.py").read_bytes()
    assert (home / "package/ftsupervise/guard/decider.py").exists()
    assert kept.stat().st_ino == before


@pytest.mark.parametrize("spoil", ["mode", "link", "gone"])
def test_a_restart_takes_the_copy_that_was_made_and_not_one_that_others_could_write(
    rundir: RunDir, tmp_path: Path, spoil: str
) -> None:
    entry = Path(given(rundir)["PYTHONPATH"])
    cut = entry.parent / "package/ftsupervise/guard/guard.py"
    cut.write_text("")  # a whole look would mend it
    assert Path(given(rundir)["PYTHONPATH"]) == entry
    assert cut.read_text() == ""
    if spoil == "mode":
        entry.chmod(0o777)
    elif spoil == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(entry.parent)
        assert Path(given(rundir)["PYTHONPATH"]) == entry
        assert cut.read_text(), "it is made again"
        return
    env, said = dict[str, str](), list[str]()
    add_guard(env, rundir, ("python", "train.py"), said.append)
    assert "PYTHONPATH" not in env and "install it there" in said[0]


def test_where_the_copy_cannot_be_made_nothing_is_said_to_who_has_the_package_anyway(tmp_path: Path) -> None:
    rundir, beside = RunDir(tmp_path / "run"), str(Path(sys.executable).parent)
    (rundir.root).mkdir()
    rundir.guard.write_text("in the way")
    told = {}
    for what, command, path in (
        ("named", (sys.executable, "train.py"), "/usr/bin"),
        ("activated", ("python", "train.py"), f"{beside}:/usr/bin"),
        ("another", ("python", "train.py"), "/usr/bin"),
    ):
        said = list[str]()
        add_guard({"PATH": path}, rundir, command, said.append)
        told[what] = len(said)
    assert told == {"named": 0, "activated": 0, "another": 1}


@pytest.mark.parametrize("spoil", ["mode", "link"])
def test_a_copy_that_others_could_write_is_not_run(rundir: RunDir, tmp_path: Path, spoil: str) -> None:
    folder = prepare(rundir.guard).parent / "package"
    if spoil == "mode":
        folder.chmod(0o775)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    env, said = dict[str, str](), list[str]()
    add_guard(env, rundir, ("python", "train.py"), said.append)
    assert "PYTHONPATH" not in env
    assert "not ours alone to write" in said[0]
