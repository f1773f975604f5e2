"""Which files count, and what is added to a job script."""

from __future__ import annotations

import stat

import pytest

from ftsupervise.crontab.chain import with_directives
from ftsupervise.crontab.entries import EntryKind, PassedOver, judge

FILE = stat.S_IFREG | 0o755


@pytest.mark.parametrize("name", ["disk", "check.sh", "fs-watchdog.py", "a_b-1.2"])
def test_an_executable_runs_also_with_a_dot_in_its_name(name: str) -> None:
    assert judge(name, FILE, executable=True) is EntryKind.EXECUTABLE


@pytest.mark.parametrize("name", ["slurm-status.slurm", "x.sbatch"])
def test_a_job_script_is_submitted_whether_it_is_executable_or_not(name: str) -> None:
    assert judge(name, FILE, executable=True) is EntryKind.JOB
    assert judge(name, stat.S_IFREG | 0o644, executable=False) is EntryKind.JOB


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("disk", stat.S_IFREG | 0o644, "chmod +x disk"),
        (".disk.swp", FILE, "hidden"),
        ("disk~", FILE, "left behind"),
        ("disk.bak", FILE, "left behind"),
        ("disk.dpkg-old", FILE, "left behind"),
        ("disk,v", FILE, "left behind"),
        ("my disk", FILE, "letters, digits"),
        ("d", stat.S_IFDIR | 0o755, "directory"),
        ("fifo", stat.S_IFIFO | 0o755, "regular"),
        ("disk", stat.S_IFREG | 0o777, "chmod o-w disk"),
        ("x.slurm", stat.S_IFREG | 0o666, "chmod o-w"),
    ],
)
def test_what_is_passed_over_says_why(name: str, mode: int, says: str) -> None:
    passed = judge(name, mode, executable=bool(mode & 0o100))
    assert isinstance(passed, PassedOver)
    assert says in passed.why


def test_a_readme_is_passed_over_without_an_alert_and_a_forgotten_chmod_is_not() -> None:
    for name, wanted in (("README.md", False), ("disk", True)):
        passed = judge(name, stat.S_IFREG | 0o644, executable=False)
        assert isinstance(passed, PassedOver)
        assert passed.wanted == wanted


def test_our_lines_stand_around_those_of_the_script() -> None:
    script = "#!/bin/bash\n\n#SBATCH --mem=1G\n# words\n#SBATCH -o x\necho\n#SBATCH --late\n"
    assert with_directives(script, ("--first",), ("--last",)) == (
        "#!/bin/bash\n#SBATCH --first\n\n#SBATCH --mem=1G\n# words\n#SBATCH -o x\n#SBATCH --last\necho\n#SBATCH --late\n"
    )


def test_a_script_of_comments_only_is_still_one() -> None:
    assert with_directives("#!/bin/sh", (), ("--last",)) == "#!/bin/sh\n#SBATCH --last\n"


@pytest.mark.parametrize("text", ["", "echo\n", "#SBATCH --x\n"])
def test_what_has_no_interpreter_is_no_script(text: str) -> None:
    with pytest.raises(ValueError, match="#!/bin/bash"):
        with_directives(text, (), ())
