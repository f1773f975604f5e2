"""Which Python has torchft, and at which address of this host its lighthouse is reached."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ftsupervise.errors import NotFound
from ftsupervise.host.addresses import own_address, resolve
from ftsupervise.replicas.torchft_python import find_torchft
from tests.neighbours import needs


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(find_spec("torchft") is not None, reason="this Python has torchft")
def test_without_torchft_those_that_were_asked_are_named_and_what_to_type(tmp_path: Path) -> None:
    bare = program(tmp_path / "python3", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    odd = program(tmp_path / "python3.99", "#!/bin/sh\necho what?\n")
    with pytest.raises(NotFound) as found:
        find_torchft(["srun", bare, odd, "train.py"], {"PATH": "relative:/nowhere"})
    assert f"no Python of this run has it: {bare} (it has none), {odd} (it cannot say), {sys.executable}" in str(
        found.value
    )
    assert found.value.hint.endswith("pip install 'ftsupervise[torchft]'")


@pytest.mark.torch
@needs.torchft
def test_the_python_of_the_training_is_asked_before_all_others(tmp_path: Path) -> None:
    """By its name in the command, or by the first line of its program, as torchrun's."""
    mine = program(tmp_path / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    launcher = program(tmp_path / "torchrun", f"#!{mine}\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for command in (
        ["srun", "-n4", "python3", "train.py"],
        [launcher, "train.py"],
        ["torchrun", "--nnodes=1", "train.py"],
    ):
        found = find_torchft(command, env)
        assert (found.python, found.version) == (mine, "0.2.0")


def test_the_address_of_this_host_is_the_one_from_which_others_are_reached() -> None:
    assert own_address(["127.0.0.1"]) == own_address(["127.0.0.5", "127.0.0.1"]) == "127.0.0.1"
    assert resolve("10.1.2.3") == "10.1.2.3" and resolve("::1") == "::1" and resolve("no such name") == ""
