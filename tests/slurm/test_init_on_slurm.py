"""A person's script under plain sbatch, and the run that ``init`` makes of it: the program cannot tell one from the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.importer.sbatch import read_script
from ftsupervise.sandbox import Sandbox
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# Writes down what a program sees of its start: words, folder, environment, and what its job has got. The supervisor adds
# variables of Python, of torch and of its own (launching.md, hangs.md).
WITNESS = r"""#!/bin/bash
folder=$WITNESS_FOLDER
at=$folder/seen-$(ls $folder/round)-$SLURM_PROCID
{ printf '%s\n' "$@" "in $PWD"
  env -0 | grep -zvE '^(_|SHLVL|OLDPWD|TMPDIR|SLURM\w*|FTSUPERVISE\w*|PYTHON\w*|TORCH\w*)=' | sort -z | tr '\0' '\n'
  env | grep -E '^SLURM_(NTASKS|NNODES|NTASKS_PER_NODE|JOB_NUM_NODES|JOB_PARTITION|MEM_PER_NODE|LOCALID)=' | sort
} > $at.new
of_a_job='NumNodes|NumCPUs|NumTasks|CPUs/Task|TRES|MinMemory\w*|TimeLimit|Partition|TresPer\w*|OverSubscribe|Features|QOS'
scontrol show job -o $SLURM_JOB_ID | grep -oE "($of_a_job)=[^ ]*" > $at.job
mv $at.new $at
"""
SRUN = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=200M
#SBATCH --time=10:00
#SBATCH -o logs/%x-%j.out
#SBATCH --signal=B:USR1@30 --requeue
export WITNESS_FOLDER=$PWD SHOWN="a b"
HIDDEN=0.1
ARGS=(--name "two words" --lr $HIDDEN)
cd src
stop() { echo stop; scontrol requeue $SLURM_JOB_ID; }
trap stop USR1
srun --kill-on-bad-exit=1 --cpu-bind=none ../witness "${ARGS[@]}" $(echo once) *.txt &
wait
echo done
"""
PIPE = """#!/bin/bash -l
#SBATCH --ntasks=1 --nodes=1 --mem=100M
#SBATCH --time=0:10:00
export WITNESS_FOLDER=$PWD
LOGS_PATH=logs
./witness --data $LOGS_PATH 2>&1 | tee -a $LOGS_PATH/main.txt
"""
KEPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=2 --time=10
set -u
export WITNESS_FOLDER=$PWD
first() { srun --ntasks=2 ./witness "$@"; }
first "$1" "${2:-none}"
touch behind-$(ls round)
"""


@pytest.mark.parametrize(
    ("script", "arguments", "ranks", "command"),
    [
        pytest.param(
            SRUN, (), ("0", "1", "2", "3"), r'command: "srun|command: \|', id="an srun with variables of the shell"
        ),
        pytest.param(PIPE, (), ("0",), "srun: false", id="a pipe in the batch shell"),
        pytest.param(KEPT, ("an argument",), ("0", "1"), "bash job.sbatch 'an argument'", id="a script that stays"),
    ],
)
def test_the_program_sees_the_same_words_folder_environment_and_job(
    scene: Callable[..., Scene],
    until: Until,
    script: str,
    arguments: tuple[str, ...],
    ranks: tuple[str, ...],
    command: str,
) -> None:
    here = scene(nodes=2)
    place = here.folder
    for folder in ("logs", "src", "round"):
        (place / folder).mkdir()
    for name in ("b.txt", "a.txt"):
        (place / "src" / name).touch()
    (place / "witness").write_text(WITNESS)
    (place / "witness").chmod(0o755)
    (place / "job.sbatch").write_text(script.replace("#SBATCH", f"#SBATCH -J {here.name}\n#SBATCH", 1))
    (place / "ftsupervise.yaml").unlink(missing_ok=True)

    def seen(name: str) -> list[Path]:
        found = [place / f"seen-{name}-{rank}" for rank in ranks]
        return found if all(one.exists() for one in found) else []

    (place / "round" / "theirs").touch()
    here.sandbox.run(["sbatch", f"--chdir={place}", str(place / "job.sbatch"), *arguments])
    theirs = until(lambda: seen("theirs"), "the job of sbatch", 120)
    until(lambda: not here.queue(), "its end", 120)

    (place / "round" / "theirs").rename(place / "round" / "ours")
    said = here.type("init", "job.sbatch", *arguments)
    text = (place / "ftsupervise.yaml").read_text()
    assert re.search(command, text), text
    (place / "ftsupervise.yaml").write_text(
        text.replace("\nlaunch:\n", '\nlaunch:\n  finished_by: "exit 0"\n  jobs: 2\n')
    )
    here.type("launch")
    ours = until(lambda: seen("ours"), f"the run\n{said}", 120)
    for before, after in zip(theirs, ours, strict=True):
        assert after.read_text() == before.read_text()
        assert after.with_name(f"{after.name}.job").read_text() == before.with_name(f"{before.name}.job").read_text()
    until(lambda: not here.queue(), "the end of the run", 120)
    if script is KEPT:
        assert (place / "behind-theirs").exists()
        assert (place / "behind-ours").exists()


@pytest.mark.parametrize(
    "lines",
    [
        "#SBATCH --job-name=\"a b\" --comment='c # d'  # e",
        '#SBATCH -J a#b\n#SBATCH --comment x\\"y',
        "#SBATCH -Jab --comm=short -t7",
        "#SBATCH --comment='it\\'s' --job-name=a\"b c\"d",
        (
            "#SBATCH --comment=1\n# words\n\n#SBATCH --comment=2\n #SBATCH --comment=3\n##SBATCH --comment=4\n"
            "cd .\n#SBATCH --comment=5"
        ),
        "#SBATCH --tasks-per-node 2 -N1\n#SBATCH --comment=--time=3",
    ],
)
def test_options_are_read_as_sbatch_reads_them(sandbox: Sandbox, tmp_path: Path, lines: str) -> None:
    script = tmp_path / "job.sbatch"
    text = f"#!/bin/bash\n{lines}\ntrue\n"
    script.write_text(text)
    job = sandbox.run(
        ["sbatch", "--hold", "--parsable", f"--chdir={tmp_path}", "--output=/dev/null", str(script)]
    ).strip()
    shown = re.sub(r" +$", "", sandbox.run(["scontrol", "show", "job", job]), flags=re.MULTILINE)
    sandbox.run(["scancel", job])
    given = read_script(text).given
    field = {"job-name": "JobName", "comment": "Comment", "nodes": "NumNodes"}
    for name, option in given.items():
        if name in field:
            assert re.search(rf"(?m)\b{field[name]}={re.escape(option.value)}(?:-1)?(?: \w+=.*)?$", shown), (
                option,
                shown,
            )
    if "time" in given:
        assert "TimeLimit=00:07:00" in shown


RATES = ("0.1", "0.03", "0.01", "0.003", "0.001", "3e-4", "1e-4", "3e-5")
SWEEP = f"""#!/bin/bash
#SBATCH --job-name=NAME --array=0-7 --ntasks=1 --cpus-per-task=1 --time=10
RATES=({" ".join(RATES)})
echo ${{RATES[$SLURM_ARRAY_TASK_ID]}} >> seen-$SLURM_ARRAY_TASK_ID
[ $(wc -l < seen-$SLURM_ARRAY_TASK_ID) = 3 ]  # the first two attempts fail
"""


def test_a_sweep_of_eight_learning_rates_runs_as_eight_runs_and_each_restart_keeps_its_own(
    scene: Callable[..., Scene], until: Until
) -> None:
    """Two attempts of the first job, and one of the second, which takes over: each has the rate of its run."""
    here = scene(nodes=4)
    place = here.folder
    (place / "job.sbatch").write_text(SWEEP.replace("NAME", here.name))
    (place / "ftsupervise.yaml").unlink(missing_ok=True)
    here.type("init", "job.sbatch")
    settings = place / "ftsupervise.yaml"
    quick = '\nlaunch:\n  jobs: 3\n  finished_by: "exit 0"\n  restart: {back_off: "100ms", in_place: 1}\n'
    settings.write_text(settings.read_text().replace("\nlaunch:\n", quick))
    names = [f"{here.name}-{number}" for number in range(8)]
    said = here.type("launch")
    assert [line.partition(":")[0] for line in said.splitlines()[:8]] == names

    def lines(number: int) -> list[str]:
        seen = place / f"seen-{number}"
        return seen.read_text().splitlines() if seen.exists() else []

    until(lambda: all(len(lines(number)) == 3 for number in range(8)), "three attempts of each", 240)
    assert [lines(number) for number in range(8)] == [[rate] * 3 for rate in RATES]
    assert len(list(place.glob("seen-*"))) == 8
    until(lambda: here.type("status", ".").count(" FINISHED ") == 8, "the end of all", 120)
    rows = here.type("status", "ftsupervise.yaml").splitlines()
    assert [row.split()[0] for row in rows if row.startswith(here.name)] == names


def test_a_sweep_is_saved_and_killed_together_and_one_of_its_runs_alone(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=4)
    place = here.folder
    (place / "ftsupervise.yaml").write_text(
        f"name: '{here.name}-{{lr}}'\nsweep: {{lr: [0.10, 1e-4]}}\nlaunch:\n  jobs: 2\n  time: 10m\n"
        "  restart: {stop_within: 1s}\n  command: 'sh -c \"echo {lr} >> seen; exec sleep 300\"'\n"
    )
    here.type("launch")
    until(lambda: (place / "seen").exists() and len((place / "seen").read_text().split()) == 2, "both runs", 120)
    assert sorted((place / "seen").read_text().split()) == ["0.10", "1e-4"]  # as they were typed
    here.type("save", "ftsupervise.yaml")
    runs = [place / "runs" / f"{here.name}-{rate}" for rate in ("0.10", "1e-4")]
    assert all((run / "switches/save-switch").exists() for run in runs)
    here.type("kill", runs[0].name, "--yes")
    assert [(run / "switches/kill-switch").exists() for run in runs] == [True, False]
    here.type("kill", ".", "--yes")
    until(lambda: not here.queue(), "the end of both", 120)


def test_the_script_of_a_job_in_the_queue_is_taken(scene: Callable[..., Scene]) -> None:
    here = scene(nodes=1)
    (here.folder / "ftsupervise.yaml").unlink(missing_ok=True)
    (here.folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --job-name=theirs --nodes=1\nsrun python train.py --epochs 3\n"
    )
    job = here.sandbox.run(
        ["sbatch", "--hold", "--parsable", f"--chdir={here.folder}", str(here.folder / "job.sbatch")]
    ).strip()
    said = here.type("init", "--job", job)
    assert f"the script of job {job} -> ftsupervise.yaml" in said
    text = (here.folder / "ftsupervise.yaml").read_text()
    assert "name: theirs\n" in text
    assert 'command: "srun python train.py --epochs 3"\n' in text
    assert "is not in the queue" in here.type("init", "--force", "--job", "99999", code=66)
