"""What failed in the continuous integration runs once more, alone. Each test here runs the real thing on a small suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manual.blocks import ROOT

RACE = """
import os
def test_race():
    if not os.path.exists("seen"):
        open("seen", "w").close()
        raise AssertionError("lost")
"""


def run(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    argv = [sys.executable, str(ROOT / ".ci" / "second_chance.py"), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it takes longer to load them than to run the tests
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.fault(
    "A test fails by a race in the continuous integration",
    "it runs once more, alone, and is named `FLAKY` where it passes then",
)
def test_a_race_that_is_won_alone_is_named_and_passes(tmp_path: Path) -> None:
    calm = "".join(f"\ndef test_{n}(): pass\n" for n in range(3))
    done = run(tmp_path, RACE + calm, "-p", "xdist", "-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert "FLAKY: test test_some.py::test_race failed, then passed alone" in lines
    assert any("1 failed, 3 passed" in line for line in lines)  # pytest's own closing lines stay
    assert lines[-1].startswith("=== 4 passed, 1 rerun in ")


def test_what_fails_alone_too_fails(tmp_path: Path) -> None:
    done = run(tmp_path, RACE + "\ndef test_wrong(): assert False\n")
    assert done.returncode == 1
    assert "FAILED again, alone: test_some.py::test_wrong" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("=== 1 failed, 1 passed, 2 rerun in ")


@pytest.mark.fault("More than three tests fail", "no second chance: the whole fails")
def test_more_than_three_failures_are_no_race(tmp_path: Path) -> None:
    four = "import pytest\n@pytest.mark.parametrize('n', range(4))" + RACE.replace("import os\n", "").replace(
        "()", "(n)", 1
    )
    done = run(tmp_path, "import os\n" + four.replace('"seen"', 'f"seen-{n}"'))
    assert done.returncode == 1
    assert "4 tests failed; a second try is for at most 3" in done.stdout
    assert done.stdout.count("test session starts") == 1


def test_a_skip_is_no_pass_the_second_time(tmp_path: Path) -> None:
    text = RACE.replace(
        "def test_race():", "import pytest\ndef test_race():\n    if os.path.exists('seen'): pytest.skip('no')"
    )
    done = run(tmp_path, text)
    assert done.returncode == 1 and "FLAKY" not in done.stdout


def test_a_fixture_that_lost_a_race_has_a_second_chance_too(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.fixture" + RACE.replace("import os\n", "\n").replace("test_race", "hub")
    done = run(tmp_path, f"import os\n{text}\ndef test_it(hub): pass\n")
    assert done.returncode == 0 and "FLAKY: test test_some.py::test_it " in done.stdout


def test_what_cannot_be_collected_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("import no_such_module\n")
    for words in ((), ("-p", "xdist", "-n", "2")):
        done = run(tmp_path, RACE, *words)
        assert done.returncode != 0 and "FLAKY" not in done.stdout
        assert "no_such_module" in done.stdout


def test_the_continuous_integration_types_the_readmes_own_command_with_a_second_chance() -> None:
    """And lint before it, which has none."""
    said = subprocess.run(
        ["make", "-n", "-B", "test", "PYTEST=.ci/second_chance.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert '.venv/bin/python .ci/second_chance.py -m "not slow" -n 6 --dist loadfile' in said
    assert said.index("mypy") < said.index("second_chance")
    run = (ROOT / ".ci" / "run").read_text()
    assert "make test PYTEST=.ci/second_chance.py" in run and "make test-torch PYTEST=.ci/second_chance.py" in run
