"""Writes the table of docs/versions.md from what each version of Slurm answered: the recordings in tests/golden/slurm.

PYTHONPATH=. python docs/write_versions.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.neighbours import recorded_slurm
from tests.neighbours.recorded_slurm import Answer

PAGE = Path(__file__).with_name("versions.md")
_BETWEEN = re.compile(r"(?<=<!-- PYTHONPATH=. python docs/write_versions.py -->\n).*?(?=\n<!-- end -->)", re.S)
_TIME = re.compile(r"2026-[-T:\d]+")
Answers = dict[str, Answer]


def page() -> str:
    """Return the page with the table that the recordings make."""
    return _BETWEEN.sub(lambda _: table(), PAGE.read_text("utf-8"))


def table() -> str:
    versions = recorded_slurm.versions()
    known = [recorded_slurm.read_answers(recorded_slurm.FOLDER / f"{version}.txt") for version in versions]
    lines = [f"| | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    rows = [[what, *map(told, known)] for what, told in ROWS]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in differing)]
    )


def _system(answers: Answers) -> str:
    return re.sub(r"GNU/Linux | LTS|\(\w+\)", "", answers["# system"].said.splitlines()[0]).strip()


def _python(answers: Answers) -> str:
    return answers["# system"].said.splitlines()[1].removeprefix("Python ")


def _variable(name: str) -> Callable[[Answers], str]:
    return lambda answers: _yes(name in answers["# variables of an array member"].said.split())


def _field(name: str) -> Callable[[Answers], str]:
    return lambda answers: _yes(f" {name}=" in answers["scontrol show job -o 5"].said)


def _submitted(*options: str) -> Callable[[Answers], str]:
    def told(answers: Answers) -> str:
        answer = answers[f"sbatch --parsable --hold {' '.join(options)} /dev/stdin"]
        if answer.code == 0:
            return "taken"
        return "refused: " + re.split(r"error:\s*|sbatch:\s*|failed:\s*", answer.complained.splitlines()[0])[-1].strip(
            "/ "
        )

    return told


def _cancelled(answers: Answers) -> str:
    line = next(one for one in answers["# output of a job that was cancelled"].said.splitlines() if "*** JOB" in one)
    return f"`{_TIME.sub('TIME', line)}`"


def _accounting(answers: Answers) -> str:
    return next((f"`{one.said.splitlines()[2]}`" for asked, one in answers.items() if asked.startswith("sacct ")), "")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


ROWS: tuple[tuple[str, Callable[[Answers], str]], ...] = (
    ("recorded on", _system),
    ("its Python", _python),
    ("`scrontab` is there", lambda answers: _yes("scrontab" in answers["# programs"].said)),
    ("a job knows when it ends (`SLURM_JOB_END_TIME`)", _variable("SLURM_JOB_END_TIME")),
    ("`scontrol show job` has the command line of `sbatch`", _field("SubmitLine")),
    ("`sbatch --requeue=expedite`, where the cluster has not allowed it", _submitted("--requeue=expedite")),
    ("`sbatch --nodes=50`, of 4 nodes", _submitted("--nodes=50")),
    ("`sbatch --dependency=afterany:999`, a job that nobody has", _submitted("--dependency=afterany:999")),
    ("a job's output when it is cancelled", _cancelled),
    ("`sacct` of a job that was cancelled", _accounting),
)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
