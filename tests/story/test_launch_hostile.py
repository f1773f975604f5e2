"""Whatever stands in a name, a path or a value, the rendered script runs the command it was given and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ftsupervise.config.schema import Launch, Run
from ftsupervise.errors import ConfigError
from ftsupervise.launch.plan import plan
from ftsupervise.launch.script import render

CANARY = "canary"
BAIT = [
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"a\ntouch {CANARY}\n#",
    f"a\rtouch {CANARY}",
    f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "',
    f"\\'; touch {CANARY} #",
    f"a && touch {CANARY}",
    f"a | touch {CANARY}",
    f"${{IFS}}touch${{IFS}}{CANARY}",
    f"{{{{ ''.__class__ }}}}$(touch {CANARY})",
    f"%j$(touch {CANARY})%",
    f"a\x00touch {CANARY}",
    f"a\u2028touch {CANARY}",
    f"-x --wrap=touch {CANARY}",
    f"a\\\ntouch {CANARY}",
    f"!{CANARY}",
    "~root/*?[a-z]",
]
hostile = st.one_of(
    st.sampled_from(BAIT),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.builds(lambda a, b: a + b, st.sampled_from(BAIT), st.text("ab $`'\"\\\n;|&<>#!", max_size=8)),
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a ``python`` that writes down its arguments; the canary would appear beside it."""
    folder = tmp_path_factory.mktemp("stage")
    python = folder / "python"
    fit = '[ "$2" != -c ] || { echo fit; exit; }'  # the script's question whether the interpreter starts here
    python.write_text(f'#!/bin/bash\n{fit}\nprintf "%s\\0" "$0" "$@" > "$STAGE/argv"\nenv -0 > "$STAGE/env"\n')
    python.chmod(0o755)
    (folder / "w").mkdir()
    return folder


def played(stage: Path, script: str) -> list[str]:
    """Run the script as Slurm would, and give the arguments of the supervisor it started."""
    path = stage / "train.sbatch"
    path.write_text(script, encoding="utf-8")
    (stage / "argv").unlink(missing_ok=True)
    subprocess.run(["bash", "-n", str(path)], check=True, capture_output=True, timeout=60)
    env = {"PATH": os.environ["PATH"], "STAGE": str(stage)}
    subprocess.run(["bash", str(path)], cwd=stage, env=env, capture_output=True, timeout=60, check=False)
    assert not list(stage.rglob(CANARY)), script
    return (stage / "argv").read_bytes().decode().split("\0")[:-1]


def launch_of(**values: Any) -> Launch:
    return Launch(**{"command": ("python", "train.py"), **values})


@pytest.mark.threat(
    "The settings hold hostile values: names, comments or options with line feeds, quotes or `$()`.",
    "The job script executes none of them.",
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=hostile, where=hostile, word=hostile, value=hostile, extra=hostile, module=hostile, option=hostile)
def test_a_corpus_of_hostile_values_never_executes_a_canary(
    stage: Path, name: str, where: str, word: str, value: str, extra: str, module: str, option: str
) -> None:
    """Each value is refused with a sentence, or arrives at the command unchanged."""
    fields: dict[str, Any] = {"command": ("python", word, value), "env": {"CANARY_VALUE": value}, "modules": (module,)}
    for key, bait in (("partition", option), ("output", extra), ("sbatch", (f"--comment2={extra}",))):
        try:
            launch_of(**{key: bait})
            fields[key] = bait
        except ValidationError:
            pass
    accepted = {}
    for key, field in fields.items():
        try:
            launch_of(**{key: field})
            accepted[key] = field
        except ValidationError:
            pass
    outer: dict[str, Any] = {"name": "tr11", "run_dir": Path("/runs/tr11")}
    for key, field in {"name": name, "run_dir": Path("/runs") / where}.items():
        try:
            Run(**{**outer, key: field}, launch=launch_of())
            outer[key] = field
        except ValidationError:
            pass
    run = Run(**outer, launch=launch_of(**accepted))
    one = plan(run, kind="local", token="t", workdir=stage / "w", python=str(stage / "python"))
    try:
        script = render(one, run.launch, one.link(0))
    except ConfigError as error:
        assert "control characters" in str(error) or "NUL" in str(error)
        return
    argv = played(stage, script)
    assert argv == list(one.command)


def test_shell_code_in_a_command_is_the_users_own_and_runs_in_the_ranks_not_in_the_batch_script(stage: Path) -> None:
    run = Run(name="x", run_dir=Path("/r"), launch=launch_of(command=f"echo $RANK; touch {CANARY}"))
    one = plan(run, kind="local", token="t", workdir=stage, python=str(stage / "python"))
    assert played(stage, render(one, run.launch, one.link(0)))[-3:-1] == ["bash", "-c"]


def test_an_environment_value_arrives_unchanged(stage: Path) -> None:
    run = Run(name="x", run_dir=Path("/r"), launch=launch_of(env={"A": "two words $HOME `x` 'q'"}))
    one = plan(run, kind="local", token="t", workdir=stage, python=str(stage / "python"))
    played(stage, render(one, run.launch, one.link(0)))
    assert b"A=two words $HOME `x` 'q'\0" in (stage / "env").read_bytes()
