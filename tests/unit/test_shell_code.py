"""What ``launch.command`` is, as a shell would read it: lines from people's own job scripts among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch, Run
from ftsupervise.errors import ConfigError
from ftsupervise.launch.doubts import doubts
from ftsupervise.launch.plan import train_command
from ftsupervise.launch.script import around_modules
from ftsupervise.launch.shell_code import Kind, ShellWord, understand


@pytest.mark.parametrize(
    "code",
    [
        "srun python train.py --x $Y",
        "exec srun --nodes=$SLURM_NNODES python train.py *.yaml",
        "time srun python train.py",
        "env X=1 srun python train.py",
        "PYTHONPATH=. OMP_NUM_THREADS=$N /usr/bin/srun python train.py",
        "srun \\\n  --ntasks=2 \\\n  python train.py \\\n  --lr 1e-3\n",
        "# what it does\nsrun python train.py  # and why",
        "srun bash -c 'echo $SLURM_PROCID; python train.py | tee log'",
        "srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'",
        'CUDA_VISIBLE_DEVICES=0,1 srun $torchrun --nnodes $nnodes \\\n  --rdzv_id $RANDOM train.py "$@"',
        "srun -l --output=out-%t.log --multi-prog ranks.conf",
    ],
)
def test_one_srun_is_ours_to_start(code: str) -> None:
    assert understand(code).kind is Kind.SRUN


@pytest.mark.parametrize(
    "code",
    [
        "srun python train.py --x $Y | tee log",
        "srun python train.py &\nwait",
        "if [ -f latest ]; then srun python train.py --resume; else srun python train.py; fi",
        "for seed in 1 2; do srun python train.py $seed; done",
        "source env.sh && srun python train.py",
        "timeout 10h srun python train.py",
        "bash -c 'srun python train.py'",
        "head=$(srun --nodes=1 hostname) python train.py",
        "head=`srun hostname`",
        "cat > hosts <<END\nwords 'of it\nEND\nsrun python train.py",
        'eval "srun $ARGS"',
        "srun python prepare.py\nsrun python train.py",
        "srun python train.py > log 2>&1",
        "srun python 'train.py",
        'cmd="srun --label \\\n  python train.py $ARGS"\necho $cmd\n$cmd',
        "export LAUNCH='/usr/bin/srun -l'; $LAUNCH python train.py",
        "nodes=( $( srun hostname | sort -u ) )\npython train.py ${nodes[0]}",
    ],
)
def test_code_that_calls_srun_otherwise_gets_no_srun_around_it(code: str) -> None:
    assert understand(code).kind is Kind.AROUND
    words = train_command(Launch(command=code), "slurm")
    assert words[:2] == ["bash", "-c"] and words[2].endswith(code)


@pytest.mark.parametrize(
    "code",
    [
        "python train.py --launcher srun | tee log",
        "echo 'not srun'; python train.py $X",
        "python train.py $X  # srun comes from ftsupervise",
        "cat > note <<'END'\nsrun python train.py\nEND\npython train.py",
    ],
)
def test_the_word_srun_elsewhere_is_no_srun(code: str) -> None:
    assert understand(code).kind is Kind.CODE
    assert train_command(Launch(command=code), "slurm")[:3] == ["srun", "--kill-on-bad-exit=1", "bash"]


def test_what_a_shell_expands_stays_as_it_is_written_and_the_rest_loses_its_quotes() -> None:
    found = understand("""A=$B srun --comment='a b' python t.py "it's $X" $Y '$Z' "a b" """)
    assert found.assignments == ("A=$B",)
    assert found.words[1:] == ("--comment='a b'", "python", "t.py", '"it\'s $X"', "$Y", "$Z", '"a b"')
    assert [isinstance(word, ShellWord) for word in found.words[1:]] == [True, False, False, True, True, False, True]


def test_a_container_stands_behind_the_options_of_the_persons_own_srun() -> None:
    launch = Launch(command="srun -n 2 python t.py $X", container="apptainer exec --bind $PWD image.sif")
    assert train_command(launch, "slurm") == [
        *("srun", "--kill-on-bad-exit=1", "-n", "2"),
        *("apptainer", "exec", "--bind", "$PWD", "image.sif", "python", "t.py", "$X"),
    ]
    with pytest.raises(ConfigError, match=r"calls srun inside shell code, which launch.container cannot reach"):
        train_command(launch.model_copy(update={"command": "srun python t.py | tee log"}), "slurm")


def doubted(tmp_path: Path, **launch: Any) -> tuple[str, ...]:
    def read(path: Path) -> object:
        return path.read_bytes() if path.is_file() else None

    return doubts(Run(name="x", run_dir=tmp_path, launch=Launch(**launch)), tmp_path, read)


def test_a_script_that_calls_srun_inside_ours_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/bash\n# srun\nexport A=1\nsrun --label python train.py\n")
    (said,) = doubted(tmp_path, command="bash train.sh --fast")
    assert "train.sh calls srun itself" in said and "srun: false" in said
    assert doubted(tmp_path, command="./train.sh $X") != ()
    assert doubted(tmp_path, command="bash train.sh", srun=False) == ()
    (tmp_path / "train.sh").write_text("#!/bin/bash\n# srun is not called here\npython train.py\n")
    assert doubted(tmp_path, command="bash train.sh") == ()


@pytest.mark.parametrize(
    "launch",
    [
        {"command": "python train.py --seed $SLURM_ARRAY_TASK_ID"},
        {"command": "python train.py --save ckpt-${SLURM_JOB_ID:-0}"},
        {"command": "python train.py", "env": {"CKPT": "/scratch/$SLURM_ARRAY_JOB_ID"}},
    ],
)
def test_a_number_that_differs_in_each_job_is_told(tmp_path: Path, launch: Any) -> None:
    (said,) = doubted(tmp_path, **launch)
    assert "differs in each job of the chain" in said
    for harmless in ("--n $SLURM_JOB_NUM_NODES $SLURM_JOB_IDS", "--rdzv_id $SLURM_JOB_ID", "\necho job $SLURM_JOB_ID"):
        assert doubted(tmp_path, command=f"python train.py {harmless}") == ()
    own = "export SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_COUNT=8\npython train.py --seed $SLURM_ARRAY_TASK_ID"
    assert doubted(tmp_path, command=own) == ()


def test_a_script_behind_a_launcher_and_its_options_is_looked_at_for_the_guard(tmp_path: Path) -> None:
    commands = (
        "srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --rdzv_id=7 train.py --epochs 3",
        "OUT=out\ntorchrun --standalone --nproc-per-node 8 train.py --out $OUT",
        "python train.py",
    )
    for command in commands:
        (tmp_path / "train.py").write_text("print(1)\n")
        (said,) = doubted(tmp_path, command=command)
        assert said.startswith("train.py has no guard"), command
        (tmp_path / "train.py").write_text("from ftsupervise import Guard\n")
        assert doubted(tmp_path, command=command) == ()


def test_modules_are_loaded_before_setup_or_behind_its_last_purge() -> None:
    assert around_modules("source venv/bin/activate\n") == ("", "source venv/bin/activate\n")
    setup = "cd /x\nmodule --force purge\nml reset\nsource a\n"
    assert around_modules(setup) == ("cd /x\nmodule --force purge\nml reset\n", "source a\n")


@pytest.mark.parametrize("opens", ["$(", "${", "$(("])
def test_brackets_nested_without_an_end_are_code_that_is_not_understood(opens: str) -> None:
    assert understand(f"srun python train.py {opens * 50_000}").kind is understand("srun python train.py $(").kind
