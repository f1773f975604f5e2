"""A value of ftsupervise.yaml is changed in its place, and everything a person wrote around it stays."""

from __future__ import annotations

import pytest

from ftsupervise.config.edited import with_values
from ftsupervise.config.load import loads
from ftsupervise.errors import Refused

TEXT = """\
# our big run
name: big          # do not rename

launch:
  # asks for whole nodes
  command: python train.py --save-every 100
  nodes: 64
  warn: "5m"       # too short?
  restart: {in_place: 10}

checkpoints:       # on the fast disk
  path: /scratch/ckpt
"""


def test_a_value_is_changed_where_it_stands_and_each_comment_stays() -> None:
    text = with_values(
        TEXT, {("launch", "warn"): "12m", ("checkpoints", "every"): "20m", ("launch", "spare_nodes"): 2}, "f"
    )
    changed = set(text.splitlines()) ^ set(TEXT.splitlines())
    assert changed == {
        '  warn: "5m"       # too short?',
        "  warn: 12m       # too short?",
        "  every: 20m  # ftsupervise plan",
        "  spare_nodes: 2  # ftsupervise plan",
    }
    run = loads(text)
    assert run.launch.spare_nodes == 2 and run.checkpoints.every is not None
    assert run.checkpoints.every.total_seconds() == 1200


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\nlaunch: {command: x}\n", "checkpoints:\n  every: 20m"),
        ("name: a\nlaunch: {command: x}\ncheckpoints:\n", "checkpoints:\n  every: 20m"),
        ("name: a\ncheckpoints:   # later\nlaunch: {command: x}\n", "every: 20m"),
        ("name: a\nlaunch: {command: x}\ncheckpoints: null\n", "  every: 20m"),
        ("name: a\nlaunch: {command: x}\ncheckpoints: {pattern: 'step-*'}\n", "{every: 20m, pattern: 'step-*'}"),
        ("name: a\nlaunch: {command: x}\ncheckpoints: {every: 1h}\n", "{every: 20m}"),
        ("name: a\nlaunch: {command: x}\ncheckpoints:\n    every:\n", "    every: 20m"),
        ("name: a\nlaunch: {command: x}", "checkpoints:\n  every: 20m"),
    ],
)
def test_each_way_of_writing_a_section_is_followed(text: str, line: str) -> None:
    made = with_values(text, {("checkpoints", "every"): "20m"}, "f")
    assert line in made
    every = loads(made).checkpoints.every
    assert every is not None and every.total_seconds() == 1200


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nlaunch: {command: x}\ncheckpoints: {}\n",
        "name: a\nlaunch: {command: x}\nwatch: &all {every: 5m}\ncron: *all\ncheckpoints: *all\n",
        "name: a\nname: b\n",
        "- a\n",
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_value_to_write(text: str) -> None:
    with pytest.raises(Refused):
        with_values(text, {("checkpoints", "every"): "20m"}, "f")
