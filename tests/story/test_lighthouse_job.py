"""The lighthouse in a job of its own, ``ftsupervise groups lighthouse``, and groups in other jobs that look for it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.addresses import own_address, resolve
from ftsupervise.host.processes import own_command
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.lighthouse_job import find_lighthouse, serve
from ftsupervise.replicas.timeouts import derive
from ftsupervise.rundir.paths import RunDir
from tests.neighbours import needs
from tests.neighbours.managers import Group
from tests.neighbours.supervised import Program, outside_a_job

Until = Callable[..., Any]
NAMES = ("g000", "g001", "g002")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def job(folder: Path, stack: ExitStack, *words: str) -> Program:
    argv = own_command("groups", "lighthouse", "--run-dir", str(folder / "run"), "--count", "3")
    argv += words if "--" in words else (*words, "--", sys.executable, "train.py")
    one = Program(argv, folder, outside_a_job(), folder / f"out-{len(words)}")
    stack.callback(one.end)
    return one


@pytest.mark.torch
@needs.torchft
def test_groups_in_other_jobs_find_it_and_slurms_warning_does_not_end_it(
    tmp_path: Path, stack: ExitStack, until: Until
) -> None:
    one = job(tmp_path, stack, "--host", "127.0.0.1")
    found = find_lighthouse(tmp_path / "run" / "replicas", 60.0, threading.Event())
    assert found is not None and found.min_replicas == 2 and found.version == "0.2.0"
    groups = [Group(tmp_path, found.address, name) for name in NAMES]
    for group in groups:
        stack.callback(group.end)
    one.send_signal(signal.SIGUSR1)
    until(lambda: all(any(step.members == 3 for step in group.steps()) for group in groups), "a quorum of all groups")
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 0
    assert find_lighthouse(tmp_path / "run" / "replicas", 0.0, threading.Event()) is None, (
        "its page is left, and it is not"
    )


@pytest.mark.torch
@needs.torchft
def test_a_second_one_ends_the_first_with_the_code_for_that(tmp_path: Path, stack: ExitStack) -> None:
    first = job(tmp_path, stack)
    first.until_said("listens at")
    job(tmp_path, stack, "--host", "127.0.0.1").until_said("listens at")
    assert first.wait(60) == 100 and "another lighthouse of" in first.said()


@pytest.mark.slow
@pytest.mark.torch
@needs.torchft
def test_it_stays_for_the_last_groups_when_the_run_has_finished_and_ends_after_them(
    tmp_path: Path, stack: ExitStack, until: Until
) -> None:
    rundir, said = RunDir(tmp_path / "run"), list[str]()
    place = LighthousePlace(rundir.replicas, "127.0.0.1", 3, 2, derive(1.0))
    lighthouse = SupervisedLighthouse(place, sys.executable, said.append)
    serving = threading.Thread(
        target=serve, args=(rundir, lighthouse, threading.Event(), said.append, 1.5), daemon=True
    )
    serving.start()
    until(lambda: lighthouse.address, "it listens")
    groups = [Group(tmp_path, lighthouse.address, name) for name in NAMES]
    for group in groups:
        stack.callback(group.end)
    until(lambda: lighthouse.heard("g002"), "the groups report")
    rundir.state.mkdir(parents=True)
    rundir.finished.touch()
    serving.join(3)
    assert serving.is_alive()
    for group in groups:
        group.end()
    serving.join(60)
    assert not serving.is_alive() and "no group reports any more" in said[-1]


@pytest.mark.skipif(find_spec("torchft") is not None, reason="this Python has torchft")
def test_without_torchft_it_says_which_pythons_were_asked_and_what_to_type(tmp_path: Path, stack: ExitStack) -> None:
    empty = tmp_path / "python3"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    empty.chmod(0o755)
    one = job(tmp_path, stack, "--", str(empty))
    assert one.wait(60) == 66
    assert f"no Python of this run has it: {empty} (it has none)" in one.said()
    assert "pip install 'ftsupervise[torchft]'" in one.said()


def test_the_address_of_this_host_is_the_one_from_which_others_are_reached() -> None:
    assert own_address(["127.0.0.1"]) == own_address(["127.0.0.5", "127.0.0.1"]) == "127.0.0.1"
    assert resolve("10.1.2.3") == "10.1.2.3" and resolve("::1") == "::1" and resolve("no such name") == ""
    assert not own_address(()).startswith("127.") or own_address(()) == "127.0.0.1"
