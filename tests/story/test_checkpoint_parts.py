"""A large file goes to its copy in parts: what was killed in the middle of it goes on there, and nothing but its own part is
taken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.digest import BLOCK
from ftsupervise.checkpoints.offload import CopyDamaged, OffloadReport, offload
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from tests.neighbours.patience import wait_until

BLOCKS = 6
SIZE = BLOCKS * BLOCK - 5


def now() -> datetime:
    return datetime.now(timezone.utc)


class Scene(NamedTuple):
    checkpoint: Path
    store: FolderStore

    def copy(self) -> OffloadReport:
        return offload(self.checkpoint, self.store, now=now, part=BLOCK)

    def there(self) -> Path:
        """The part that lies at the place of the copies."""
        (found,) = (self.store.root / self.checkpoint.name).glob(".tmp-part-*")
        return found

    def is_whole(self, tmp_path: Path) -> bool:
        (copy,), _ = copies_in([self.store])
        back = restore(copy, tmp_path / "back", now=now)
        assert verify(back, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
        names = sorted(path.name for path in (self.store.root / self.checkpoint.name).iterdir())
        return names == [".ftsupervise", "large.bin", "small.bin"] and (back / "large.bin").stat().st_size == SIZE


KILLED = """
import sys
from datetime import datetime, timezone
from pathlib import Path
from ftsupervise.checkpoints.digest import BLOCK
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.stores import FolderStore
here, far = map(Path, sys.argv[1:])
offload(here, FolderStore(far), now=lambda: datetime.now(timezone.utc), part=BLOCK, rate=float(16 << 20))
"""


@pytest.fixture
def killed(tmp_path: Path) -> Scene:
    """A copy that was killed in the middle of its large file, three blocks or more behind its beginning."""
    checkpoint = tmp_path / "here" / "step-00000100"
    checkpoint.mkdir(parents=True)
    draw = random.Random(7)
    with (checkpoint / "large.bin").open("wb") as file:
        for left in range(SIZE, 0, -BLOCK):
            file.write(draw.randbytes(min(BLOCK, left)))
    (checkpoint / "small.bin").write_bytes(draw.randbytes(1000))
    commit(checkpoint)
    scene = Scene(checkpoint, FolderStore(tmp_path / "far"))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(checkpoint), str(scene.store.root)]) as child:
        wait_until(lambda: [*scene.store.root.rglob(".tmp-part-*")], "the first part")
        wait_until(lambda: scene.there().stat().st_size > 3.2 * BLOCK, "the fourth block")
        child.send_signal(signal.SIGKILL)
    return scene


def written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.resume(
    "`offload` is killed in the middle of a large file, and its part is torn, damaged, exchanged or opened to others "
    "before the next call",
    "the checkpoint itself; the copy goes on behind the last part that is right, and counts when all of it was read "
    "back",
    '"copied to ...: ... sent and read back"',
)
def test_a_copy_that_is_killed_in_a_large_file_goes_on_in_the_middle_of_it(killed: Scene, tmp_path: Path) -> None:
    before = written()
    report = killed.copy()
    assert report.there >= 3 * BLOCK and report.sent == SIZE + 1000 - report.there
    assert written() - before < SIZE - 2.5 * BLOCK, "three blocks were not written again"
    assert killed.is_whole(tmp_path)


@pytest.mark.parametrize("harm", ["flipped", "torn"])
def test_of_a_part_that_was_harmed_only_what_is_right_is_taken(killed: Scene, harm: str, tmp_path: Path) -> None:
    part = killed.there()
    if harm == "torn":
        os.truncate(part, 2 * BLOCK + 17)
    else:
        with part.open("r+b") as file:
            file.seek(2 * BLOCK + 17)
            byte = file.read(1)[0]
            file.seek(2 * BLOCK + 17)
            file.write(bytes([byte ^ 16]))
    assert 0 <= killed.copy().there - 2 * BLOCK <= 1000
    assert killed.is_whole(tmp_path)


def test_what_somebody_else_put_in_the_place_of_a_part_is_not_taken(killed: Scene, tmp_path: Path) -> None:
    part, other = killed.there(), tmp_path / "other"
    part.rename(other)
    kept = other.read_bytes()
    part.symlink_to(other)
    assert killed.copy().there <= 1000
    assert other.read_bytes() == kept, "a link is not followed"
    assert killed.is_whole(tmp_path)


def test_a_part_that_others_may_write_is_not_taken(killed: Scene, tmp_path: Path) -> None:
    killed.there().chmod(0o666)
    assert killed.copy().there <= 1000
    assert killed.is_whole(tmp_path)


def test_a_large_file_that_is_damaged_here_is_not_copied_and_its_part_goes(killed: Scene) -> None:
    """The blocks that were read back before are right; the rest is damaged now."""
    with (killed.checkpoint / "large.bin").open("r+b") as file:
        file.seek(SIZE - 3)
        file.write(b"xyz")
    with pytest.raises(CopyDamaged, match=r"large\.bin is not what was committed"):
        killed.copy()
    assert not [*killed.store.root.rglob("*large*")] and copies_in([killed.store])[0] == ()
