"""``ftsupervise init`` as it is typed: what it writes, prints and refuses."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.importer.trial import Trial, report, resumes_by_its_words
from ftsupervise.model import Attempt
from tests.neighbours.typed import typed

SCRIPT = """#!/bin/bash
#SBATCH --job-name=train-10b --nodes=4 --signal=B:USR1@120
#SBATCH --output=logs/%x-%j.out --mail-user=ada@example.org
module load cuda/12.4
OUT=out/$SLURM_JOB_ID
srun python train.py --out $OUT
echo done
"""
SWEEP = """#!/bin/bash
#SBATCH --job-name=vit --array=1-3
python train.py --lr 0.$SLURM_ARRAY_TASK_ID
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    (tmp_path / "train.py").write_text("import torch\nfrom torch.nn.parallel import DistributedDataParallel\n")
    return tmp_path


def test_it_writes_the_settings_and_says_of_each_line_where_it_went(folder: Path) -> None:
    done = typed("init", "job.sbatch", folder=folder, code=0)
    rows = [line for line in done.stdout.splitlines() if line[:1] in " !" and line[2:3].isdigit()]
    assert any(row.startswith("  6 ") and "launch.command" in row for row in rows), done.stdout
    assert any(row.startswith("! 5 ") and "SLURM_JOB_ID is another one in each job" in row for row in rows)
    assert any(row.startswith("  7 ") and "left out" in row for row in rows)
    for line in (
        "- --mail-user=ada@example.org",
        "+ --array=1-10%1",
        "train.py (DDP) has no guard",
        "Nothing was submitted.",
    ):
        assert line in done.stdout
    assert 'command: "srun python train.py --out $OUT"' in (folder / "ftsupervise.yaml").read_text()
    assert not (folder / "runs").exists()
    rendered = typed("launch", "--dry-run", "--scheduler", "slurm", folder=folder, code=0).stdout
    assert "#SBATCH --nodes=4\n" in rendered
    assert "\nmodule load cuda/12.4\n" in rendered
    assert "srun --kill-on-bad-exit=1 python train.py --out $OUT\n" in rendered


def test_it_writes_over_nothing_unless_it_is_told(folder: Path) -> None:
    (folder / "ftsupervise.yaml").write_text("mine\n")
    refused = typed("init", "job.sbatch", folder=folder, code=75)
    assert refused.stderr.startswith("ftsupervise: ftsupervise.yaml is there already\n")
    assert (folder / "ftsupervise.yaml").read_text() == "mine\n"
    typed("init", "-o", "other.yaml", "job.sbatch", folder=folder, code=0)
    assert (folder / "ftsupervise.yaml").read_text() == "mine\n"
    assert (folder / "other.yaml").read_text().startswith("# Made by ftsupervise init from job.sbatch")
    typed("init", "--force", "job.sbatch", folder=folder, code=0)
    assert "name: train-10b" in (folder / "ftsupervise.yaml").read_text()


def test_an_array_becomes_a_sweep_a_run_for_each_element_in_one_file(folder: Path) -> None:
    (folder / "job.sbatch").write_text(SWEEP)
    done = typed("init", "job.sbatch", folder=folder, code=0)
    assert [one.name for one in folder.glob("*.yaml")] == ["ftsupervise.yaml"]
    assert "job.sbatch -> ftsupervise.yaml, 3 runs: vit-1, vit-2, vit-3\n" in done.stdout
    assert done.stdout.endswith("  ftsupervise launch\n")
    every = typed("launch", "--dry-run", "--scheduler", "slurm", folder=folder, code=0).stdout
    assert [every.count(f"#SBATCH --job-name=vit-{number}\n") for number in (1, 2, 3)] == [1, 1, 1]
    one = typed("launch", "--dry-run", "--scheduler", "slurm", "vit-2", folder=folder, code=0).stdout
    assert "#SBATCH --job-name=vit-2\n" in one
    assert "-- env SLURM_ARRAY_TASK_ID=2 " in one
    assert "vit-3" not in one


def test_it_takes_what_sbatch_takes_and_a_command(folder: Path) -> None:
    typed("init", "-", folder=folder, answer=SCRIPT, code=0)
    assert "  nodes: 4\n" in (folder / "ftsupervise.yaml").read_text()
    typed("init", "--force", "sbatch", "-N", "2", "--time=30", "job.sbatch", "--epochs", "3", folder=folder, code=0)
    text = (folder / "ftsupervise.yaml").read_text()
    assert "  nodes: 2\n" in text
    assert 'time: "00:30:00"' in text
    assert "set -- --epochs 3\n" in text
    typed("init", "--force", "python", "train.py", "--lr", "3e-4", folder=folder, code=0)
    text = (folder / "ftsupervise.yaml").read_text()
    assert "name: train\n" in text
    assert 'command: "python train.py --lr 3e-4"\n' in text


def test_a_program_gets_the_table_as_json(folder: Path) -> None:
    told = json.loads(typed("init", "--json", "job.sbatch", folder=folder, code=0).stdout)
    assert told["files"] == ["ftsupervise.yaml"]
    assert {"lines": "6", "text": "srun python train.py --out $OUT"}.items() <= told["rows"][-2].items() | told["rows"][
        -3
    ].items()
    assert told["training"] == {"path": "train.py", "framework": "DDP", "guard": False}
    assert "nodes" in told["same"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 64, "name one job script, - or a command"),
        (["none.sbatch"], 66, "there is no file none.sbatch"),
        (["train.py"], 64, "train.py is a program, and no job script"),
        (["--job", "x y"], 64, "--job takes a job id such as 87"),
        (["job.sbatch", "--force"], 64, "--force stands behind job.sbatch"),
        (["sbatch", "--nodes=2"], 64, "sbatch is followed by no script"),
        (["sbatch", "--nodez=2", "--time", "job.sbatch"], 64, "sbatch is followed by no script"),
        (["binary.sh"], 65, "it holds a NUL byte"),
        (["latin.sh"], 65, "line 2 is no UTF-8 text"),
        (["broken.sh"], 65, "line 3: syntax error"),
        (["shape.sh"], 65, "line 2: --constraint=a;b: "),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else None,
)
def test_bad_input_gets_one_sentence_and_a_code(folder: Path, words: list[str], code: int, said: str) -> None:
    (folder / "binary.sh").write_bytes(b"#!/bin/bash\n\0\n")
    (folder / "latin.sh").write_bytes(b"#!/bin/bash\n# \xe9\n")
    (folder / "broken.sh").write_text("#!/bin/bash\nif true; then\n")
    (folder / "shape.sh").write_text("#!/bin/bash\n#SBATCH --constraint=a;b\nsrun python train.py\n")
    done = typed("init", *words, folder=folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not list(folder.glob("*.yaml"))


def test_the_training_of_a_script_that_stays_as_it_is_is_found_whatever_shell_it_names(folder: Path) -> None:
    (folder / "all.sh").write_text(
        "#!/bin/sh\n#SBATCH --array=1-2\nargs=$(sed -n ${SLURM_ARRAY_TASK_ID}p runs.txt)\npython3 train_eval.py $args\n"
    )
    (folder / "train_eval.py").write_text("import torch\n")
    done = typed("init", "all.sh", folder=folder, code=0)
    assert "train_eval.py" in done.stdout.split("the script's commands")[1]
    assert "no Python file is named in it" not in done.stdout


def test_a_trial_without_a_step_quotes_the_line_by_which_the_second_attempt_says_that_it_goes_on() -> None:
    own = "2026-11-29T15:47:00Z ftsupervise: attempt {} of r: bash -c 'resume from here'\n"
    first = own.format(1) + "No checkpoint found in /x: starting from scratch\nLoading data from /data\nstart epoch 1\n"
    second = own.format(2) + "Loading data from /data\nResuming from /x/epoch01.pth\nstart epoch 2\n"
    began = datetime(2026, 11, 29, 15, 47, tzinfo=timezone.utc)
    left, back = Attempt(1, "1", began), Attempt(2, "1", began)
    seen = Trial("1", 1, 2.0, left, 20.0, began, back, (first + second).encode(), "start epoch 2")
    (line,) = (one for one in report(seen, Path("log")) if one.startswith("came back"))
    assert line == "came back    no step was seen, but its output says: Resuming from /x/epoch01.pth"
    assert resumes_by_its_words((first + own.format(2) + "start epoch 2\n").encode()) == "start epoch 2"
    anew = first + own.format(2) + "Not resuming from /x\nstart epoch 1\n"
    assert resumes_by_its_words(anew.encode()) == ""
