"""Whose file it is, how a file is made and read, how an interpreter of ours starts: with a stranger at work beside us."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ftsupervise.host import files, ownership, processes
from ftsupervise.printable import printable, printable_lines
from tests.neighbours import access_lists
from tests.neighbours.access_lists import give_list

HOSTILE = "import os; os.write(2, b'HOSTILE CODE RAN\\n'); raise SystemExit(3)\n"
STRANGER = 65534


def lay_modules(folder: Path) -> None:
    for name in ("click", "signal", "yaml", "sitecustomize", "usercustomize", "runpy", "site", "ftsupervise"):
        (folder / f"{name}.py").write_text(HOSTILE)


@pytest.mark.threat(
    "A module such as `click.py` lies in the current directory.",
    "Every interpreter of ours is started with `-I`, so it searches neither the current directory nor relative or "
    "empty entries of PYTHONPATH.",
)
@pytest.mark.parametrize("outer", [None, "", ":/nowhere", "/nowhere:", ".", "./:sub"])
def test_no_module_in_the_current_directory_is_ours(tmp_path: Path, outer: str | None) -> None:
    lay_modules(tmp_path)
    (tmp_path / "sub").mkdir()
    lay_modules(tmp_path / "sub")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | (
        {"PYTHONPATH": outer} if outer is not None else {}
    )
    for argv in (
        processes.own_command("--version"),
        processes.own_command("/nowhere", module="ftsupervise.scheduler.local"),
    ):
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert "HOSTILE" not in done.stderr
        assert done.stdout.startswith("ftsupervise 0") or done.stderr == "/nowhere holds no job\n"


@pytest.mark.threat(
    "PYTHONUSERBASE is relative, and a `.pth` file lies below the current directory.",
    "Our interpreters do not search that directory.",
)
def test_a_relative_user_base_brings_nothing_from_the_current_directory(tmp_path: Path) -> None:
    """Outside of a virtual environment: there the account's own site-packages are searched too."""
    base = str(getattr(sys, "_base_executable", sys.executable))
    sites = tmp_path / "base" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    sites.mkdir(parents=True)
    (sites / "trap.pth").write_text(f"import os; open({str(tmp_path / 'sprung')!r}, 'w').close()\n")
    for user_base in (str(tmp_path / "base"), "base"):
        (tmp_path / "sprung").unlink(missing_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONUSERBASE": user_base}
        words = processes.own_command("--version", python=base)
        subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=60)
        assert (tmp_path / "sprung").exists() == (user_base != "base"), "the trap is a real one, and is not sprung"


def test_it_starts_where_only_pythonpath_knows_the_package(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "ftsupervise"
    copy.parent.mkdir()
    subprocess.run(["cp", "-r", str(Path(processes.START).parent), str(copy)], check=True)
    code = "import ftsupervise; print(ftsupervise.__file__)"
    (copy / "told.py").write_text(code)
    argv = [sys.executable, "-I", str(copy / "start.py"), "-m", "ftsupervise.told"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(copy / "__init__.py"), "and not another version that is installed"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.threat(
    "A FIFO, a link, a folder or a device lies where ftsupervise reads a file.",
    "ftsupervise refuses it at once and waits for nothing.",
)
def test_a_fifo_a_link_a_folder_and_a_device_are_refused_at_once(tmp_path: Path, fifo: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, code in (
        (fifo, errno.EINVAL),
        (tmp_path, errno.EINVAL),
        (tmp_path / "link", errno.ELOOP),
        (Path("/dev/zero"), errno.EINVAL),
    ):
        with pytest.raises(OSError) as refused:
            files.read_bounded(path, 100)
        assert refused.value.errno == code
    with pytest.raises(OSError, match="not a regular file"):
        files.read_bounded(tmp_path / "zero", 100, follow=True)
    assert files.read_bounded(tmp_path / "link", 100, follow=True) == b"x"


@pytest.mark.threat(
    "A file of gigabytes lies where ftsupervise reads a small one.",
    "ftsupervise reads no more than a fixed number of bytes.",
)
def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"12345")
    assert files.read_bounded(tmp_path / "page", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes") as refused:
        files.read_bounded(tmp_path / "page", 4)
    assert refused.value.errno == errno.EFBIG


def test_two_temporary_files_never_have_one_name(tmp_path: Path) -> None:
    made = [files.create_temporary(tmp_path, "ä" * 200) for _ in range(50)]
    assert len({path for _, path in made}) == 50
    for fd, path in made:
        assert stat.S_IMODE(os.fstat(fd).st_mode) & 0o022 == 0
        assert Path(path).name.startswith(".tmp-")
        os.close(fd)


@pytest.mark.threat(
    "Everybody may write a file that ftsupervise reads.",
    "The file is not trusted. The message names its owner and the command to type.",
)
def test_an_own_file_is_believed_and_one_that_all_may_write_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("x")
    page.chmod(0o644)
    assert ownership.read_trusted(page) == b"x"
    page.chmod(0o666)
    with pytest.raises(ownership.NotTrusted, match=r"everybody may write .*page \(mode 0666\)") as refused:
        ownership.read_trusted(page)
    assert refused.value.hint == f"chmod go-w {page}"
    assert refused.value.exit_code == 77


@pytest.mark.threat(
    "A file of another account lies where ftsupervise reads its own file.",
    "The file is trusted only if it belongs to this account, to root, or to an account named in the settings.",
)
@pytest.mark.root
def test_a_file_of_another_account_is_believed_only_when_that_account_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("x")
    os.chown(page, STRANGER, 0)
    with pytest.raises(ownership.NotTrusted, match="belongs to nobody"):
        ownership.read_trusted(page)
    assert ownership.read_trusted(page, accounts={STRANGER}) == b"x"


@pytest.mark.threat(
    "A group may write a file that ftsupervise reads.",
    "The file is not trusted, unless the settings share it with that group or the group is the owner's private one.",
)
@pytest.mark.root
def test_a_group_that_others_are_in_may_not_write_unless_it_is_shared_with(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("x")
    page.chmod(0o664)
    assert ownership.read_trusted(page) == b"x", "the own private group"
    os.chown(page, 0, 100)
    with pytest.raises(ownership.NotTrusted, match="the group users may write"):
        ownership.read_trusted(page)
    assert ownership.read_trusted(page, group=100) == b"x"


@pytest.mark.root
def test_a_sticky_folder_is_no_danger_and_an_open_one_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert ownership.distrust(tmp_path.stat(), tmp_path) == ""
    tmp_path.chmod(0o777)
    assert "everybody may write" in ownership.distrust(tmp_path.stat(), tmp_path)


def given_to_a_stranger(page: Path) -> Path:
    """``page``, which belongs to a private group, and which an access list lets a stranger write."""
    page.write_text("x")
    give_list(page, (access_lists.ACCOUNT, 6, STRANGER), group=4)
    return page


@pytest.mark.threat("An access list (ACL) lets a stranger write a file.", "The file counts as writable by others.")
@pytest.mark.root
def test_an_access_list_behind_a_private_group_counts(tmp_path: Path) -> None:
    page = given_to_a_stranger(tmp_path / "page")
    with pytest.raises(ownership.NotTrusted):
        ownership.read_trusted(page)


@pytest.mark.threat(
    "An access list lets a stranger write a file of yours that you name by a link.",
    "The list of what the link leads to counts.",
)
@pytest.mark.root
def test_an_access_list_of_what_a_link_of_ones_own_leads_to_counts(tmp_path: Path) -> None:
    page = given_to_a_stranger(tmp_path / "page")
    (tmp_path / "link").symlink_to(page)
    with pytest.raises(ownership.NotTrusted):
        ownership.read_trusted(tmp_path / "link", follow=True)
    os.removexattr(page, "system.posix_acl_access")
    page.chmod(0o660)
    assert ownership.read_trusted(tmp_path / "link", follow=True) == b"x", "its group is a private one"


@pytest.mark.threat(
    "A stranger whom an access list lets write a file of yours moves it away after it was opened, so that its list "
    "is not found by its name.",
    "A list that cannot be seen counts as one that lets others write.",
)
@pytest.mark.root
@pytest.mark.parametrize("then", ["it is gone", "another file lies there"])
def test_an_access_list_counts_where_the_file_was_moved_away_before_it_was_looked_at(tmp_path: Path, then: str) -> None:
    """An account that may write the folder takes the name away at once: the list cannot be seen by that name."""
    page = given_to_a_stranger(tmp_path / "page")
    found = page.stat()
    page.rename(tmp_path / "elsewhere")
    if then != "it is gone":
        page.write_text("y")
        page.chmod(0o660)
    assert "may write" in ownership.distrust(found, page)


@pytest.mark.threat(
    "Text of others holds escape sequences and other control characters.",
    "ftsupervise prints each of them as `?`.",
)
@pytest.mark.parametrize(
    "hostile", ["\x1b]0;title\x07", "\x1b[2J", "a\rb", "\x9b31m", "\u202eevil", "\u2066x", "\udc80", "\x00"]
)
def test_no_control_character_passes(hostile: str) -> None:
    assert printable(hostile).isprintable()
    assert "?" in printable(hostile)
    assert printable_lines(f"one\n\t{hostile}").startswith("one\n\t")
    assert all(char.isprintable() or char in "\n\t" for char in printable_lines(hostile))


def test_text_of_any_language_stays() -> None:
    assert printable("Größe 大きさ ok") == "Größe 大きさ ok"
    assert printable("0123456789", 5) == "0123…"
