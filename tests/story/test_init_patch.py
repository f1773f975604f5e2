"""``ftsupervise init --patch train.py``: what it writes, through what, and what it leaves alone."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from ftsupervise.config.own_file import read_own, write_back
from ftsupervise.errors import Refused
from tests.neighbours.typed import typed

# A training without torch: its loss, and what saves it, are its own.
TRAIN = """import json
import time
from pathlib import Path


class Loss:
    def backward(self):
        time.sleep(0.05)


def save(step):
    Path("saved.json").write_text(json.dumps(step))


for step in range(1, 2000):
    Loss().backward()
    if step % 1000 == 0:
        save(step)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    path.chmod(0o750)
    return path


def test_it_shows_the_difference_first_and_writes_it_when_it_is_told(train: Path) -> None:
    said = typed("init", "python", "train.py", folder=train.parent, code=0).stdout
    assert "    +    decision = guard.step(step)\n" in said
    assert "  ftsupervise init --patch train.py    writes these lines into it\n" in said
    assert train.read_text() == TRAIN
    done = typed("init", "--patch", "train.py", folder=train.parent, code=0)
    assert "+    decision = guard.step(step)\n" in done.stdout
    assert "    if decision.save or (step % 1000 == 0):\n" in train.read_text()
    assert stat.S_IMODE(train.stat().st_mode) == 0o750
    assert sorted(one.name for one in train.parent.iterdir()) == ["ftsupervise.yaml", "train.py"]
    again = typed("init", "--patch", "train.py", folder=train.parent, code=0)
    assert again.stdout == "train.py names ftsupervise already: it is left as it is\n"


def test_the_patched_script_saves_when_it_is_asked_and_stops(train: Path) -> None:
    typed("init", "--patch", "train.py", folder=train.parent, code=0)
    run = train.parent / "run"
    for folder in (run, run / "switches"):
        folder.mkdir(mode=0o755)
    (run / "switches/save-switch").touch()
    asked = (
        "import pathlib, threading, time\n"
        "def stop():\n"
        "    while not pathlib.Path('saved.json').exists(): time.sleep(0.05)\n"
        "    pathlib.Path('run/switches/kill-switch').touch()\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "exec(compile(open('train.py').read(), 'train.py', 'exec'))\n"
    )
    typed("run", "--run-dir", "run", "--", sys.executable, "-c", asked, folder=train.parent)
    assert int((train.parent / "saved.json").read_text()) < 1000
    assert not (run / "switches/save-switch").exists()


def test_nothing_is_written_through_a_link_or_into_a_file_with_two_names(train: Path) -> None:
    (train.parent / "link.py").symlink_to("train.py")
    assert "link.py is a link" in typed("init", "--patch", "link.py", folder=train.parent, code=77).stderr
    os.link(train, train.parent / "second.py")
    assert "has a second name" in typed("init", "--patch", "train.py", folder=train.parent, code=77).stderr
    assert train.read_text() == TRAIN


def test_a_script_that_has_changed_meanwhile_is_left_as_it_is(train: Path) -> None:
    script = read_own(train, limit=100_000, links=False)
    train.write_text(TRAIN.replace("2000", "3000"))
    with pytest.raises(Refused, match="has changed since it was read"):
        write_back(script, "other")
    assert train.read_text() == TRAIN.replace("2000", "3000")


@pytest.mark.root
def test_a_script_of_another_account_is_left_as_it_is(train: Path) -> None:
    os.chown(train, 65534, 65534)
    said = typed("init", "--patch", "train.py", folder=train.parent, code=77).stderr
    assert "train.py belongs to nobody" in said
    assert train.read_text() == TRAIN


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--patch"], 64, "--patch takes one training script"),
        (["--patch", "--force", "train.py"], 64, "--patch takes one training script"),
        (["--patch", "none.py"], 66, "cannot read none.py"),
        (["--patch", "."], 1, "cannot read .: not a regular file"),
        (["--patch", "loop.py"], 65, "line 2: the loop is not of the form"),
    ],
)
def test_what_it_cannot_do_is_one_sentence_and_writes_nothing(
    train: Path, words: list[str], code: int, said: str
) -> None:
    loop = train.with_name("loop.py")
    loop.write_text("import torch\nwhile True:\n    loss.backward()\n")
    done = typed("init", *words, folder=train.parent, code=code)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert loop.read_text().count("guard") == 0
