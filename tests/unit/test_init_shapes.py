"""``init`` brings a person's job script over, or says in one sentence why not: shapes of public scripts, written anew.

``tests/golden/sbatch`` has each script, and beside it the settings (``.yaml``) or the sentence (``.refused``) that it becomes.
``UPDATE_GOLDEN=1`` writes them anew: read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.config.load import loads
from ftsupervise.config.schema import Run
from ftsupervise.config.strict_yaml import parse
from ftsupervise.config.sweep import names_in
from ftsupervise.errors import Untranslatable
from ftsupervise.importer.comparison import differences
from ftsupervise.importer.sbatch import read_script
from ftsupervise.importer.settings import Draft, ScriptSource, draft
from ftsupervise.importer.yaml_text import yaml_of
from ftsupervise.launch.doubts import job_numbers
from ftsupervise.launch.plan import plan, word
from ftsupervise.launch.script import render
from ftsupervise.scheduler import SLURM

GOLDEN = Path(__file__).parents[1] / "golden" / "sbatch"
SCRIPTS = sorted(GOLDEN.glob("*.sbatch"))
ARGUMENTS = {"arguments": ("10b.yaml", "--small words")}
# The table says of each why: the job's own name and chain, and what ftsupervise does in the place of these options.
LEFT_OUT = {
    "array",
    "chdir",
    "comment",
    "dependency",
    "mail-type",
    "mail-user",
    "open-mode",
    "output",
    "requeue",
    "wait",
}
CHANGED = {"array", "chdir", "comment", "error", "job-name", "open-mode", "output", "signal"}
ADDED = {"array", "chdir", "comment", "job-name", "no-requeue", "nodes", "open-mode", "output", "signal"}


def drafted(script: Path) -> Draft:
    source = ScriptSource("/home/ada/project", f"{script.stem}.sbatch", script.stem, ARGUMENTS.get(script.stem, ()))
    return draft(read_script(script.read_bytes().decode()), source)


def runs_of(script: Path) -> list[Run]:
    """Return the run of a script, or those of its sweep."""
    text, path = yaml_of(drafted(script), script.name), Path("/home/ada/project/ftsupervise.yaml")
    return [loads(text, path, name) for name in names_in(parse(text.encode(), str(path))) or ("",)]


def planned(run: Run) -> tuple[list[str], str]:
    """Return the options of the first job, and its script."""
    made = plan(run, kind=SLURM, token="0" * 12, workdir=Path("/home/ada/project"), python="/usr/bin/python3")
    return [word(*one) for one in made.link(0).items()], render(made, run.launch, made.link(0))


def test_there_are_forty_shapes() -> None:
    assert len(SCRIPTS) >= 40


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_becomes_what_stands_beside_it(script: Path) -> None:
    try:
        kind, text = "yaml", yaml_of(drafted(script), script.name)
    except Untranslatable as error:
        kind, text = "refused", f"{error}\n"
    expected = script.with_suffix(f".{kind}")
    if os.environ.get("UPDATE_GOLDEN"):
        for other in ("yaml", "refused"):
            script.with_suffix(f".{other}").unlink(missing_ok=True)
        expected.write_text(text)
    assert expected.exists(), text
    assert text == expected.read_text()


TRANSLATED = [script for script in SCRIPTS if script.with_suffix(".yaml").exists()]


@pytest.mark.parametrize("script", TRANSLATED, ids=lambda path: path.stem)
def test_its_job_asks_for_what_the_script_asks_for(script: Path) -> None:
    """Partition, ranks, GPUs, memory and whatever else decides what the job gets."""
    given = read_script(script.read_bytes().decode()).options
    for run in runs_of(script):
        options, rendered = planned(run)
        _, others = differences(given, options)
        gone = {found.option for found in others if not found.after and not found.before.endswith("=")}
        assert gone <= LEFT_OUT, others
        assert {found.option for found in others if not found.before} <= ADDED, others
        assert {found.option for found in others if found.before and found.after} <= CHANGED, others
        assert f"#SBATCH --nodes={run.launch.nodes}\n" in rendered


@pytest.mark.parametrize("script", TRANSLATED, ids=lambda path: path.stem)
def test_no_line_is_lost_in_silence(script: Path) -> None:
    """Each line of the script stands in the settings, in the table, or both: comments and blank lines apart."""
    text = script.read_bytes().decode()
    read = read_script(text)
    told: set[int] = set()
    for row in drafted(script).rows:
        first, _, last = row.lines.partition("-")
        told |= set(range(int(first), int(last or first) + 1)) if first else set()
    for number, line in enumerate(text.splitlines(), 1):
        if number > 1 and line.strip() and (not line.startswith("#") or number in {o.line for o in read.options}):
            assert number in told, (number, line)


@pytest.mark.parametrize(
    ("handler", "caught", "signal", "asks"),
    [
        ("kill -INT $PID; wait $PID", "USR1", "INT", False),
        ("kill -s SIGTERM $PID", "10", "TERM", False),
        ("kill $PID", "SIGUSR1 USR2", "TERM", False),
        ("kill -0 $PID; scancel -sINT $SLURM_JOB_ID", "USR1", "INT", False),
        ("kill -2 $PID", "TERM USR1", "INT", True),
        ("kill -INT $PID", "TERM", "USR1", True),
        ("kill -USR1 $PID", "USR1", "USR1", False),
        ("kill -9 $PID; scancel $OTHER; kill $$", "USR1", "USR1", False),
    ],
)
def test_the_warning_comes_as_what_a_handler_gave_the_program(
    handler: str, caught: str, signal: str, asks: bool
) -> None:
    """``asks``: a cancel reaches the program as another signal than before, and nobody but its owner knows if it answers."""
    text = (
        f"#!/bin/bash\n#SBATCH --signal=B:USR1@240\ntrap '{handler}' {caught}\npython train.py &\nPID=$!\nwait $PID\n"
    )
    made = draft(read_script(text), ScriptSource("/home/ada/project"))
    assert made.launch["signal"][0] == signal
    (row,) = [row for row in made.rows if row.lines == "3"]
    assert row.decide == asks
    assert ("launch.signal" in row.words, "SIGTERM itself" in row.words) == (signal != "USR1", asks)


@pytest.mark.parametrize(
    ("line", "chain"),
    [
        ("echo part $SLURM_ARRAY_TASK_ID | tee part.txt", True),
        ("python train.py > out_${SLURM_ARRAY_TASK_ID}.txt 2>&1", True),
        ('python train.py 2>> "logs/$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID.err"', True),
        ("python train.py | tee -a out_$SLURM_ARRAY_TASK_ID.txt", True),
        ('LOG="out_$SLURM_ARRAY_TASK_ID.txt"\nALSO=$LOG\npython train.py >> "$ALSO"', True),
        ("[ -f a.pt ] && scancel --state=PENDING $SLURM_ARRAY_JOB_ID", True),
        ("scontrol show job ${SLURM_ARRAY_JOB_ID} > job.txt", True),
        ("python train.py --fold $SLURM_ARRAY_TASK_ID > out.txt", False),
        ("OUT=run_$SLURM_ARRAY_TASK_ID\npython train.py --out $OUT", False),
        ("OUT=run_$SLURM_ARRAY_TASK_ID\nexport OUT", False),
        ("SEED=$(echo $SLURM_ARRAY_TASK_ID)\npython train.py --seed $SEED", False),
        ("printf -v OUT run_%s $SLURM_ARRAY_TASK_ID", False),
        ("if [ $SLURM_ARRAY_TASK_ID -gt 1 ]; then export RESUME=1; fi", False),
        ("python train.py $(sed -n ${SLURM_ARRAY_TASK_ID}p runs.txt)", False),
    ],
)
def test_an_array_one_at_a_time_is_a_chain_where_its_number_names_logs_alone(line: str, chain: bool) -> None:
    """As a sweep they would train the same epochs at once, in one folder."""
    made = draft(
        read_script(f"#!/bin/bash\n#SBATCH --array=1-20%1\n{line}\npython train.py\n"),
        ScriptSource("/home/ada/project", "run.sh", "run"),
    )
    (row,) = [row for row in made.rows if row.lines == "2"]
    assert (made.launch.get("jobs", (0, ""))[0], made.elements == ()) == ((20, True) if chain else (0, False))
    assert ("this is a chain: take --array out" in row.words, row.decide) == (not chain, not chain)


def rows_of(body: str, options: str = "") -> dict[str, str]:
    """Return what a person has to decide, by its lines."""
    made = draft(read_script(f"#!/bin/bash\n{options}{body}"), ScriptSource("/home/ada/project", "run.sh", "run"))
    return {row.lines: row.words for row in made.rows if row.decide or options}


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        (
            'if [ "$SLURM_RESTART_COUNT" != "" ]; then go=--go; fi\nsrun python train.py $go\n',
            "2",
            "is never set; it runs once in the job: ask if a checkpoint is there (only your program has",
        ),
        (
            "n=$(scontrol show job $SLURM_JOB_ID | grep -o 'Restarts=[0-9]*')\nexport n\nsrun python train.py\n",
            "2",
            "stays 0; it runs once in the job",
        ),
        ("srun python train.py --start $SLURM_RESTART_COUNT\n", "2", "it runs once in the job"),
        ("python train.py --start $SLURM_RESTART_COUNT\n", "2", "is never set; ask for FTSUPERVISE_ATTEMPT"),
        ("python a.py $SLURM_RESTART_COUNT\npython b.py\n", "2", "is never set; ask for FTSUPERVISE_ATTEMPT"),
    ],
)
def test_what_is_said_of_a_count_of_restarts_is_true_where_its_line_went(body: str, line: str, words: str) -> None:
    """The shell of the job runs setup, and expands the words of an srun, before there is an attempt."""
    assert words in rows_of(body)[line]


@pytest.mark.parametrize(
    ("signal", "command", "words"),
    [
        ("TERM@60", "torchrun train.py", "without B: Slurm gave it to steps of srun alone"),
        ("TERM@60", "srun python train.py", "it reached your ranks from Slurm"),
        ("B:TERM@60", "torchrun train.py", "launch.signal, launch.warn"),
    ],
)
def test_what_is_said_of_a_signal_is_true_of_a_script_without_a_step(signal: str, command: str, words: str) -> None:
    said = rows_of(f"{command}\n", f"#SBATCH --signal={signal}\n")["2"]
    assert said.startswith("launch.signal, launch.warn")
    assert words in said
    assert ("reached" in said) == (command.startswith("srun"))


@pytest.mark.parametrize(
    ("test", "most"),
    [
        ("[[ $restarts -lt $max_restarts ]]", "4"),
        ("(( restarts < max_restarts ))", "4"),
        ('[ "${SLURM_RESTART_COUNT:-0}" -le 7 ]', "7"),
        ("[ $code -gt 3 ]", ""),
    ],
)
def test_a_count_of_restarts_that_is_left_out_is_told(test: str, most: str) -> None:
    handler = f"max_restarts=4\nagain() {{\n  if {test}; then\n    scontrol requeue $SLURM_JOB_ID\n  fi\n}}\n"
    said = rows_of(f"{handler}trap again USR1\nsrun python train.py\n").get("4", "")
    assert (f"it stopped after {most} restarts" in said) == bool(most)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("context=$(scontrol show job ${SLURM_JOB_ID})", ()),
        ("left=`squeue -h -j $SLURM_JOB_ID -o %L`", ()),
        ("cd x && echo $SLURM_JOB_ID; true", ()),
        ("python train.py >& log_$SLURM_JOB_ID", ()),
        ("python train.py --seed $SLURM_JOB_ID > log_$SLURM_JOB_ID", ("SLURM_JOB_ID",)),
        ("cd x && cp scontrol.txt out_$SLURM_JOB_ID", ("SLURM_JOB_ID",)),
        ('srun -n 4 --mpi=pmix -o "out_$SLURM_JOB_ID" --error=err_$SLURM_JOB_ID python train.py', ()),
        ("srun python train.py --output=out_$SLURM_JOB_ID", ("SLURM_JOB_ID",)),
        ("srun python -o out_$SLURM_JOB_ID", ("SLURM_JOB_ID",)),
        ("seed=$(echo $SLURM_JOB_ID)", ("SLURM_JOB_ID",)),
        ("python train.py < in_$SLURM_JOB_ID", ("SLURM_JOB_ID",)),
    ],
)
def test_a_number_that_is_only_told_names_nothing(code: str, names: tuple[str, ...]) -> None:
    assert job_numbers(code) == names


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ('srun --output="${OUT}" python train.py', False),
        ('echo "$OUT"\nsrun python train.py 2>&1 | tee -a $OUT', False),
        ("export OUT\nsrun python train.py", True),
        ("srun python train.py --output=$OUT", True),
    ],
)
def test_the_name_of_a_log_needs_no_fixing(use: str, named: bool) -> None:
    assert ("fix the name" in rows_of(f'OUT="${{SLURM_JOB_ID}}.out"\n{use}\n').get("2", "")) == named


def test_no_secret_stands_in_the_settings_or_in_the_table() -> None:
    for name in ("secret", "secret_in_command"):
        one = drafted(GOLDEN / f"{name}.sbatch")
        assert "0123456789abcdef" not in yaml_of(one, name)
        assert "0123456789abcdef" not in repr(one.rows)
