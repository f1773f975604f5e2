"""Which commands a standby can stand in for."""

from __future__ import annotations

import pytest

from ftsupervise.warm.restarts import PythonCommand, WarmSettings, parse_command, parse_setting


@pytest.mark.parametrize(
    ("text", "python", "flags"),
    [
        ("python train.py", 0, 0),
        ("/opt/venv/bin/python3.12 -u -X dev -Wignore train.py --x -c", 0, 4),
        ("srun python -m torch.thing --epochs 3", 1, 0),
        ("srun -N 2 --ntasks=4 --kill-on-bad-exit=1 -K1 python -uB train.py", 6, 1),
        ("srun --nodes 2 --gres gpu:8 -l --label -u python -c pass", 8, 0),
        ("srun -- python train.py", 2, 0),
        ("/usr/bin/srun -n4 python -W error train.py", 2, 2),
    ],
)
def test_pythons_own_start_is_found(text: str, python: int, flags: int) -> None:
    found = parse_command(tuple(text.split()))
    assert isinstance(found, PythonCommand), found
    assert (found.at, found.flags) == (python, flags)
    assert found.srun == ("srun" in text)


@pytest.mark.parametrize(
    "text",
    [
        "bash train.sh", "torchrun train.py", "python", "python -", "python -I train.py", "python -uE train.py", "srun",
        "python -S train.py", "python -i train.py", "srun --multi-prog plan", "srun --export=NONE python train.py",
        "srun -D /tmp python train.py", "srun --chdir /tmp python x.py", "srun apptainer exec x.sif python train.py",
        "srun --container-image=x.sqsh python train.py", "srun --no-container-entrypoint python x.py",
        "srun --exp=NONE python train.py", "srun -n1 python a.py : -n8 python b.py",
        "python --version", "srun --pty python train.py", "env A=b python train.py", "python3-dbg x.py",
    ],
)  # fmt: skip
def test_what_is_not_plainly_pythons_start_is_left_alone(text: str) -> None:
    assert isinstance(parse_command(tuple(text.split())), str)


def test_the_setting() -> None:
    assert parse_setting("off") == WarmSettings()
    assert parse_setting("auto") == WarmSettings(True)
    assert parse_setting("torch,numpy.random") == WarmSettings(True, ("torch", "numpy.random"))
    for wrong in ("", "torch,", "a b", "os;x"):
        with pytest.raises(ValueError, match="not the name of a module"):
            parse_setting(wrong)
