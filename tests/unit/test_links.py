"""The way to a file is judged as the kernel goes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.host import files, links, ownership


@pytest.mark.parametrize("opens", [files.open_regular, ownership.open_to_read, files.open_append])
@pytest.mark.parametrize("typed", ["{here}/link/../page", "{here}/link/../../a/page", "../page", "../../a/page"])
def test_what_lies_above_a_link_is_not_what_its_name_says(
    typed: str, opens: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "a" / "page").write_text("x")
    monkeypatch.chdir(tmp_path / "link")
    fd = opens(typed.format(here=tmp_path))
    try:
        assert os.path.samestat(os.fstat(fd), (tmp_path / "a" / "page").stat())
    finally:
        os.close(fd)


def test_a_new_file_lies_where_the_kernel_goes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    os.close(files.create_new(tmp_path / "link" / ".." / "new"))
    assert (tmp_path / "a" / "new").exists()


def test_a_current_directory_that_was_removed_matters_to_no_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "page").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for folder in (tmp_path, tmp_path / "link"):
        os.close(files.open_regular(folder / "page"))
        os.close(ownership.open_to_read(folder / "page"))


def test_what_a_server_has_lost_is_looked_for_some_times_and_not_once_more_by_each_who_asks() -> None:
    """A reader opens, judges and reads by three functions that each look again: on a server that is gone that was 512 looks."""
    looks = 0

    def look(found_at: int) -> str:
        nonlocal looks
        looks += 1
        if looks == found_at:
            return "the page that has the name now"
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/run/page")

    nested = links.anew(links.anew(links.anew(look)))
    with pytest.raises(OSError, match="/run/page") as told:
        nested(0)
    assert told.value.errno == errno.ESTALE and looks == 32
    looks = 0
    assert nested(3) == "the page that has the name now"
