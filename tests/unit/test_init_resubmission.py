"""Which scripts submit themselves again, by whatever name: the second job would train beside the chain, into the same files."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ftsupervise.errors import Untranslatable
from ftsupervise.importer.ends import AfterZero
from ftsupervise.importer.resubmission import Submits, Whose
from ftsupervise.importer.sbatch import read_script
from ftsupervise.importer.settings import Draft, Row, ScriptSource, draft


def drafted(body: str, options: str = "") -> Draft:
    text = f"#!/bin/bash\n{options}{body}"
    return draft(read_script(text), ScriptSource("/home/ada/project", "jobs/run.sh", "run"))


def row_of(made: Draft, line: str) -> Row:
    """Return what was said of that line, but for numbers of the job and arguments that it has too."""
    return next(row for row in made.rows if row.lines == line and " is another one in each job" not in row.words)


HANDLER = """{before}
on_term() {{
  cp -r out /archive
  {submits}
  exit 0
}}
trap on_term TERM
python train.py
"""
ITSELF = [
    ('SCRIPT_PATH="/home/ada/project/jobs/run.sh"', 'sbatch "$SCRIPT_PATH"'),
    ('SCRIPT_PATH=$(readlink -f "$0")', 'sbatch "$SCRIPT_PATH"'),
    ("SCRIPT_PATH=`realpath $0`", "sbatch --dependency=afterany:$SLURM_JOB_ID ${SCRIPT_PATH}"),
    ('export ME="${BASH_SOURCE[0]}"', "sbatch $ME"),
    ("ME=$(scontrol show job $SLURM_JOB_ID | awk -F= '/Command=/{print $2}')", 'sbatch "$ME"'),
    ("ME=$(squeue -h -j $SLURM_JOB_ID -o %o)", "sbatch $ME"),
    ('A=$(readlink -f "$0"); B="$A"; C=${B}', "jid=$(sbatch --parsable $C)"),
    ('D=$(cd "$(dirname "$0")" && pwd)', 'sbatch "$D/run.sh"'),
    ('D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "$0")"', 'sbatch "$D"'),
    ("OPTS='-p gpu'; ME=$0", 'sbatch $OPTS "$ME"'),
    ("", "sbatch --begin=now+60 \\\n    $0"),
    ("", 'ssh login "cd $PWD && sbatch jobs/run.sh"'),
    ("", "cat $0 | sbatch"),
    ("", "sbatch < $0"),
    ("", "sbatch --wrap='bash jobs/run.sh'"),
    ('NEXT="sbatch $0"', "eval $NEXT"),
    ("", "scontrol requeue $SLURM_JOB_ID"),
    ("ME=$(scontrol show jobid $SLURM_JOB_ID | grep -oP 'Command=\\K.*')", 'sbatch "$ME"'),
    ("cp $0 /scratch/next.sh", "sbatch /scratch/next.sh"),
    ('COPY="next.sh"; cp "$0" "$COPY"', 'sbatch "$COPY"'),
    ("", "scontrol write batch_script $SLURM_JOB_ID again.sh; sbatch again.sh"),
]


@pytest.mark.parametrize(("before", "submits"), ITSELF)
def test_a_handler_that_submits_its_own_script_and_works_is_refused(before: str, submits: str) -> None:
    """Whatever it calls itself: beside the chain it would be a second training in the same folder."""
    with pytest.raises(Untranslatable, match="puts the job into the queue again"):
        drafted(HANDLER.format(before=before, submits=submits))


@pytest.mark.parametrize(
    ("before", "submits", "asks"),
    [
        ("", "sbatch eval.sh", "is that meant"),
        ("D=$(dirname $0)", 'sbatch "$D/eval.sh"', "is that meant"),
        ("D=${0%/*}", "sbatch $D/eval_$SLURM_JOB_ID.sh", "is that meant"),
        ("NEXT=eval.sh", "sbatch --job-name=$SLURM_JOB_NAME $NEXT", "is that meant"),
        ("", "sbatch --wrap='python eval.py'", "is that meant"),
        ("", "find jobs -name '*.sh' -exec sbatch {} +", "does this submit the script itself?"),
        ("", "ls jobs/*.sh | xargs -n 1 sbatch", "does this submit the script itself?"),
        ("", 'sbatch "$@"', "does this submit the script itself?"),
        ("source env.sh", "sbatch $SCRIPT", "does this submit the script itself?"),
        ("NEXT=$(cat next)", "sbatch $NEXT", "does this submit the script itself?"),
        ("", "sbatch jobs/r$KIND.sh", "does this submit the script itself?"),
    ],
)
def test_what_else_a_kept_script_submits_is_asked_about(before: str, submits: str, asks: str) -> None:
    made = drafted(HANDLER.format(before=before, submits=submits))
    assert made.launch["command"][0] == "bash jobs/run.sh"
    row = row_of(made, "5")
    assert row.decide
    assert asks in row.words


def test_a_word_that_is_only_told_submits_nothing() -> None:
    """A message that speaks of sbatch is not the line that a person has to take out."""
    with pytest.raises(Untranslatable, match="line 6: sbatch"):
        drafted(HANDLER.format(before="", submits='echo "Resubmitting via sbatch $0 [$(date)]"\n  sbatch "$0"'))


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (
            'echo "again: sbatch $0"; sbatch $0 >> again.log',
            'echo "again: sbatch $0"; exit 1',
        ),
        ("sbatch eval.sh && scontrol requeue $SLURM_JOB_ID", "sbatch eval.sh && exit 1"),
        ("sbatch --nice \\\n    $0", "exit 1"),
    ],
)
def test_the_end_stands_in_the_place_of_the_submission_alone(code: str, left: str) -> None:
    made = drafted(f"python a.py\nif ! python b.py; then\n  {code}\nfi\n")
    command = str(made.launch["command"][0]).replace("jobs/run.sh", "$0")
    assert f"  {left}\nfi\n" in command.replace("/home/ada/project/$0", "$0")


@pytest.mark.parametrize(
    "code",
    [
        "(cd jobs && sbatch run.sh)",
        "ssh login sbatch $0",
        "exec sbatch $0",
        "sbatch $0 | tee -a again.log",
        "job=$(sbatch $0)",
    ],
)
def test_an_exit_that_would_not_end_the_script_is_not_put_there(code: str) -> None:
    """In a subshell or a pipe it ends that alone, and the script would train on as if nothing had happened."""
    with pytest.raises(Untranslatable, match="would not end the script"):
        drafted(f"python a.py\nif ! python b.py; then\n  {code}\nfi\n")


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ("sbatch eval.sh", "the other job that it submits"),
        ("sbatch $NEXT", "if what it submits is this script"),
        ("sbatch $0", "not needed"),
    ],
)
def test_another_job_behind_the_training_is_not_left_out_in_silence(behind: str, words: str) -> None:
    row = row_of(drafted(f"srun python train.py\n{behind}\n"), "3")
    assert words in row.words
    assert row.decide == (behind != "sbatch $0")


def test_a_script_without_a_file_has_no_name_to_know() -> None:
    assert [one.whose for one in Submits("sbatch run.sh\n", "").found("sbatch run.sh\n")] == [Whose.UNKNOWN]


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/csh\npython train.py\nif ($status == 3) sbatch $0\n",
        "#!/usr/bin/env python3\nimport subprocess\nsubprocess.run(['sbatch', __file__])\n",
        "#!/usr/bin/env python3\nimport subprocess\nsubprocess.run(['scontrol', 'requeue', job])\n",
    ],
)
def test_a_script_of_another_language_that_submits_itself_is_refused_too(text: str) -> None:
    with pytest.raises(Untranslatable, match=r"line 3: .* puts the job into the queue again"):
        draft(read_script(text), ScriptSource("/home/ada/project", "jobs/run.sh", "run"))


ANSWERS = [  # of lines behind the training: settled by the exit with 0, by a condition (it is asked), or by nothing
    ("if [[ $? -eq 124 ]]; then\n  sbatch jobs/run.sh\nfi", "exit 0"),
    ("[ $? -eq 124 ] && sbatch $0", "exit 0"),
    ("rc=$?\necho $rc\nif (( rc == 99 || rc == 143 )); then scontrol requeue $SLURM_JOB_ID; fi", "exit 0"),
    ('[ "$?" == "9" ] && scontrol requeue $SLURM_JOB_ID', "exit 0"),
    ("rc=$?\nif [ $rc -eq 0 ]; then echo done; exit 0; fi\nscontrol requeue $SLURM_JOB_ID", "exit 0"),
    (
        "rc=$?\nif [ $rc -eq 0 ]; then\n  exit 0\nelif [ $rc -eq 99 ]; then\n  sbatch $0\nelse\n  echo no\nfi",
        "exit 0",
    ),
    ("code=$?\ncase $code in\n  0) echo done;;\n  85|99) sbatch $0;;\nesac", "exit 0"),
    ("[ $? -ne 0 ] && [ -f more ] && sbatch $0", "exit 0"),
    ('rc=$?; test "$rc" != 0 && sbatch $0', "exit 0"),
    ("rc=$?\n[ $rc -gt 100 ] || exit $rc\nsbatch $0", "exit 0"),
    ("[ -f out/DONE ] || sbatch $0", "asked"),
    ("if [ ! -f out/DONE ]; then\n  sbatch $0\nfi", "asked"),
    ("if [ $? -eq 124 ] || [ ! -f out/DONE ]; then sbatch $0; fi", "asked"),
    ("rc=$?\nrc=$(date +%S)\n[ $rc -eq 124 ] && sbatch $0", "asked"),
    ("hostname\n[ $? -eq 124 ] && sbatch $0", "asked"),
    ("rc=$?\n[ -f code ] && rc=124\n[ $rc -eq 124 ] && sbatch $0", "asked"),
    ("while [ -f more ]; do sbatch $0; break; done", "asked"),
    ("if [ $? -eq 0 ]; then sbatch $0; fi", "nothing"),
    ("sbatch $0", "nothing"),
    ("if [ $? -eq 124 ]; then sbatch $0; fi\nsbatch $0", "nothing"),
]


@pytest.mark.parametrize(("behind", "answer"), ANSWERS)
def test_the_scripts_own_word_on_its_end_is_kept(behind: str, answer: str) -> None:
    made = drafted(f"srun python train.py\n{behind}\n")
    assert made.launch["command"][0] == "srun python train.py"
    assert made.launch.get("finished_by", ("ask", ""))[0] == ("exit 0" if answer == "exit 0" else "ask")
    words = [(row.words, row.decide) for row in made.rows if "the next job of the chain waits" in row.words]
    assert words
    assert any("at an exit with 0 this submits nothing: launch.finished_by" in one for one, _ in words) == (
        answer == "exit 0"
    )
    assert any(decide and "on a condition" in one for one, decide in words) == (answer == "asked")


@pytest.mark.parametrize(
    ("code", "may_submit", "may_not"),
    [
        ("(( $? == 124 )) && sbatch x", False, True),
        ("rc=$?; if (( rc <= 0 )); then sbatch x; fi", True, False),
        ("rc=$?; if ((rc)); then sbatch x; fi", False, True),
        ("if [ $? -ne 0 ]; then echo; fi; [ $? -ne 0 ] || sbatch x", True, True),
        ("(exit 3); sbatch x", True, False),
        ("exit 0 | cat; sbatch x", True, False),
        ("rc=1; [ -f a ] && rc=0; [ $rc -eq 0 ] || sbatch x", True, True),
        ("case $? in [1-9]*) sbatch x;; esac", True, True),
        ("case $? in 0) exit;; esac; sbatch x", False, True),
    ],
)
def test_the_ways_behind_an_exit_with_0(code: str, may_submit: bool, may_not: bool) -> None:
    found = AfterZero(code, [code.index("sbatch")])
    assert (found.may_submit, found.may_not) == (may_submit, may_not)


def test_a_script_that_submits_itself_first_has_no_end_of_its_own() -> None:
    made = drafted("sbatch -d afterany:$SLURM_JOB_ID $0\nsrun python train.py\n[ $? -eq 124 ] && sbatch $0\n")
    assert "finished_by" not in made.launch


@pytest.mark.parametrize("submits", ["scontrol requeue $SLURM_JOB_ID", "sbatch $0"])
def test_nothing_is_submitted_by_the_statement_that_trains(submits: str) -> None:
    """An if around the one srun became the command as it stood, and put the job back beside its chain."""
    made = drafted(f"if ! srun python train.py; then\n  {submits}\nfi\n")
    assert made.launch["command"][0] == "if ! srun python train.py; then\n  exit 1\nfi\n"
    assert made.launch["finished_by"][0] == "exit 0"


def test_what_submits_before_the_first_training_does_not_end_the_script_there() -> None:
    made = drafted("if [ -z $LAST ]; then sbatch -d afterany:1 $0; fi\npython a.py\npython b.py\n")
    assert made.launch["command"][0] == "python a.py\npython b.py\n"
    assert "finished_by" not in made.launch


@pytest.mark.parametrize(("left", "code"), [(0, 0), (124, 1), (3, 3)])
def test_a_last_test_that_does_not_hold_is_no_failure_of_the_training(left: int, code: int, tmp_path: Path) -> None:
    made = drafted("bash a.sh\nbash b.sh\n[ $? -eq 124 ] && sbatch $0\n")
    (tmp_path / "a.sh").write_text("exit 0\n")
    (tmp_path / "b.sh").write_text(f"exit {left}\n")
    assert subprocess.run(["bash", "-c", str(made.launch["command"][0])], cwd=tmp_path).returncode == code


def test_a_sentence_about_sbatch_in_another_language_is_asked_about() -> None:
    text = '#!/usr/bin/env python3\n"""\nType sbatch jobs/run.sh to begin.\n"""\nimport train\n'
    made = draft(read_script(text), ScriptSource("/home/ada/project", "jobs/run.sh", "run"))
    assert row_of(made, "3").decide


def test_hostile_scripts_are_read_in_time() -> None:
    began = time.monotonic()
    for body in (
        "$(" * 20_000,
        "a=$(scontrol show job " * 2000,
        "sbatch $(dirname " * 5000,
        "trap '" + 'sbatch "' * 5000,
    ):
        Submits(body, "run.sh").found(body)
    drafted("srun python train.py\necho " + "a-" * 50_000 + "\n" + "[ $? -eq 1 ] && " * 500 + "sbatch $0\n")
    assert time.monotonic() - began < 20
