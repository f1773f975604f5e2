"""A file of several runs: which they are, what is put in where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.config.load import dump, loads
from ftsupervise.config.strict_yaml import parse
from ftsupervise.config.sweep import names_in
from ftsupervise.errors import ConfigError, UsageError

PATH = Path("/home/ada/vit/ftsupervise.yaml")
TWO = "name: 'vit-{lr}'\nsweep: {lr: [0.10, 1e-4]}\nlaunch: {command: 'python train.py --lr {lr} --out ${lr} {a,b}'}\n"


def names(text: str) -> tuple[str, ...]:
    return names_in(parse(text.encode(), str(PATH)))


def test_each_value_makes_a_run_and_is_put_in_as_it_was_typed() -> None:
    assert names(TWO) == ("vit-0.10", "vit-1e-4")
    run = loads(TWO, PATH, "vit-1e-4")
    assert run.launch.command == "python train.py --lr 1e-4 --out ${lr} {a,b}"  # the shell's own stay the shell's
    assert run.run_dir == Path("/home/ada/vit/runs/vit-1e-4")
    assert run.sweep == {"lr": ("1e-4",)}


def test_several_words_make_a_run_for_each_combination() -> None:
    text = "name: 'v-{lr}-{seed}'\nsweep:\n  lr: [0.1, 0.2]\n  seed: [1, 2]\n"
    text += "launch: {command: [python, train.py, '--seed={seed}'], env: {LR: '{lr}'}}\n"
    assert names(text) == ("v-0.1-1", "v-0.1-2", "v-0.2-1", "v-0.2-2")
    run = loads(text, PATH, "v-0.2-1")
    assert (run.launch.command, run.launch.env) == (("python", "train.py", "--seed=1"), {"LR": "0.2"})


def test_what_a_launch_writes_down_is_that_one_run() -> None:
    run = loads(TWO, PATH, "vit-0.10")
    assert names(dump(run)) == ()
    assert loads(dump(run), PATH) == run


def test_a_file_of_one_run_is_no_sweep() -> None:
    assert names("name: vit\nlaunch: {command: x}\n") == ()
    assert names("name: 'vit-{lr}'\nsweep: {lr: [0.1]}\nlaunch: {command: x}\n") == ()
    assert loads("name: 'vit-{lr}'\nsweep: {lr: [0.1]}\nlaunch: {command: x}\n", PATH).name == "vit-0.1"


def test_one_of_several_has_to_be_named() -> None:
    with pytest.raises(UsageError, match=r"is a sweep of 2 runs\n  name one of them: vit-0\.10, vit-1e-4"):
        loads(TWO, PATH)
    with pytest.raises(UsageError, match=r"has no run called vit-7\n  it has: vit-0\.10, vit-1e-4"):
        loads(TWO, PATH, "vit-7")


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("name: vit\nsweep: {lr: [1, 2]}", "1:7: name: two runs of the sweep have the same one; .*: name: vit-{lr}"),
        ("name: 'v-{lr}'\nsweep: {lr: [1, 1]}", "1:7: name: two runs of the sweep have the same one"),
        ("name: 'v-{lr}'\nrun_dir: here\nsweep: {lr: [1, 2]}", "2:10: run_dir: two runs of the sweep"),
        ("name: '${USER}-{lr}'\nsweep: {lr: [1, 2]}", "1:7: name: the name of a sweep takes no variable"),
        ("name: v\nsweep: [1, 2]", "2:8: sweep: expected a list of values for each word"),
        ("name: v\nsweep: {lr: 1}", r"2:13: sweep\.lr: expected a list of values"),
        ("name: v\nsweep: {lr: []}", r"2:13: sweep\.lr: expected a list of values"),
        ("name: v\nsweep: {lr: [[1]]}", r"2:14: sweep\.lr\[0\]: expected one value"),
        ("name: v\nsweep: {'l r': [1]}", "a word of letters"),
        ("name: v\nsweep: {checkpoint: [1]}", "take another word"),
        (f"name: 'v-{{a}}'\nsweep: {{a: {list(range(201))}}}", "201 runs; one file has 200 at most"),
        (
            f"name: v\nsweep: {{{', '.join(f'w{n}: [0, 1]' for n in range(1000))}}}",
            "billions of runs; one file has 200 at most",
        ),
        ("name: 'v-{lr}'\nsweep: {lr: ['a/b', c]}", "name: "),
    ],
)
def test_what_cannot_be_told_apart_is_refused_at_its_place(sweep: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loads(f"{sweep}\nlaunch: {{command: x}}\n", PATH, "v-a/b")
