"""A sandbox leads to commands and plugins: one that a stranger made or may change is refused, with a real second account."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import NotPermitted
from ftsupervise.sandbox import Sandbox, Shape, sandboxes

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users"),
]
STRANGER = 65534
RECORD = json.dumps({"shape": asdict(Shape(nodes=1)), "port": 12345, "made": True})
LAY = """
import os, sys
os.umask(0)
os.mkdir(sys.argv[1])
open(sys.argv[1] + "/sandbox.json", "w").write(sys.argv[2])
open(sys.argv[1] + "/slurm.conf", "w").write("PluginDir=/tmp/stranger")
"""
WORDS = [("env",), ("env", "--json"), ("up",), ("down",), ("node", "node-0", "kill"), ("controller", "stop")]


@pytest.fixture
def place(slurm_installed: None, short_tmp: Path) -> Iterator[Path]:
    """In a directory where everybody may make things, as in /tmp."""
    shared = short_tmp / "shared-tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    yield shared / "s"
    shutil.rmtree(shared)


def lay(place: Path, uid: int) -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"  # one that other users may run
    subprocess.run(
        [python, "-c", LAY, str(place), RECORD], user=uid, group=uid, extra_groups=[], check=True, timeout=30
    )


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ftsupervise", "sandbox", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.threat(
    "Another account makes the folder of your sandbox first, with a `slurm.conf` that names its own plugins.",
    "`up`, `down`, `env`, `node`, `controller` and `sandbox -- COMMAND` refuse it with one sentence and touch "
    "nothing in it.",
)
def test_a_strangers_sandbox_is_refused_whatever_is_typed(place: Path) -> None:
    lay(place, STRANGER)
    ran = place.parent / "ran"
    for words in WORDS:
        done = typed(*words, "--dir", str(place))
        assert done.returncode == 77, (words, done.stdout, done.stderr)
        why, hint = f"this sandbox is not used: {place} belongs to nobody", "use a directory of your own: --dir DIR"
        if "--json" in words:
            error = json.loads(done.stderr)["error"]
            assert done.stdout == "" and error == {"message": why, "hint": hint, "exit_code": 77}
        else:
            assert done.stdout == "" and done.stderr.splitlines() == [f"ftsupervise: {why}", f"  {hint}"]
    done = typed("--dir", str(place), "--", "touch", str(ran))
    assert done.returncode == 77 and "belongs to nobody" in done.stderr and not ran.exists()
    assert (place / "sandbox.json").exists(), "nothing of the stranger's was touched"


@pytest.mark.threat(
    "Another account lays a link at the sandbox's place that leads to its own folder.",
    "The commands refuse the link as they refuse the folder.",
)
def test_a_link_that_a_stranger_laid_to_his_own_is_refused_too(place: Path) -> None:
    lay(place.parent / "his", STRANGER)
    place.symlink_to(place.parent / "his")
    os.lchown(place, STRANGER, STRANGER)
    assert typed("env", "--dir", str(place)).returncode == 77


@pytest.mark.threat(
    "Everybody may write your sandbox's folder, its record or its `slurm.conf`.",
    "The commands refuse the sandbox and name the file and its mode.",
)
@pytest.mark.parametrize("loose", [".", "sandbox.json", "slurm.conf"])
def test_ones_own_that_everybody_may_write_is_refused(place: Path, loose: str) -> None:
    lay(place, 0)
    for name in (".", "sandbox.json", "slurm.conf"):
        (place / name).chmod(0o777 if name == loose else 0o755)
    with pytest.raises(NotPermitted, match=r"everybody may write .* \(mode 0777\)") as refused:
        Sandbox.at(place)
    assert refused.value.hint == f"chmod go-w {place / loose}"
    (place / loose).chmod(0o755)
    assert Sandbox.at(place).port == 12345


@pytest.mark.threat(
    "A FIFO, a link to `/dev/zero` or a file of a terabyte lies in the place of a sandbox's record.",
    "The commands refuse it at once.",
)
@pytest.mark.parametrize("kind", ["fifo", "link", "huge"])
def test_a_record_that_is_no_plain_file_holds_nobody(place: Path, kind: str) -> None:
    place.mkdir(0o755)
    record = place / "sandbox.json"
    if kind == "fifo":
        os.mkfifo(record)
    elif kind == "link":
        record.symlink_to("/dev/zero")
    else:
        with record.open("w") as file:
            file.truncate(1 << 40)
    for words in (("env",), ("down",)):
        done = typed(*words, "--dir", str(place))
        assert done.returncode == 77 and f"{record} cannot be trusted" in done.stderr


@pytest.mark.threat(
    "Another account makes a folder in `/tmp` that is named like a sandbox of yours.",
    "`sandbox list` does not show it as yours. A sandbox for one command has an unguessable name.",
)
def test_what_a_stranger_laid_in_tmp_is_not_listed_as_ours(slurm_installed: None) -> None:
    squatted = Path(f"/tmp/ftsupervise-sandbox-{os.getuid()}-{os.getpid()}")
    lay(squatted, STRANGER)
    try:
        assert squatted not in {seen.directory for seen in sandboxes()}
    finally:
        shutil.rmtree(squatted)


@pytest.mark.threat(
    "A program called `munged` lies in the current directory, and PATH names that directory.",
    "The sandbox searches only absolute entries of PATH for Slurm's programs.",
)
def test_a_program_in_the_current_directory_is_not_slurms(place: Path) -> None:
    """Even where PATH names it, as "." does."""
    place.mkdir()
    trap = place / "munged"
    trap.write_text(f"#!/bin/sh\ntouch {place}/ran\nexit 1\n")
    trap.chmod(0o755)
    env = {**os.environ, "PATH": f".:{os.environ['PATH']}"}
    words = ["--dir", f"{place.parent}/own", "--nodes", "1", "--", "true"]
    command = [sys.executable, "-m", "ftsupervise", "sandbox", *words]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (place / "ran").exists()


@pytest.mark.threat(
    "Another account that may enter the folder of a sandbox asks its munged for a credential.",
    "The folder of its key and socket has mode 0700 of its own.",
)
def test_nobody_else_gets_a_credential_from_its_munged(place: Path) -> None:
    """Even where all may enter the sandbox: the folder of the key and of the socket is closed by itself."""
    place.mkdir(0o755)
    with Sandbox.up(place, nodes=1):
        place.chmod(0o755)
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        words = ["/usr/bin/python3", "-c", code, str(place / "munge" / "sock")]
        assert subprocess.run(words, check=False, timeout=30).returncode == 0, "its owner does"
        done = subprocess.run(
            words,
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "PermissionError" in done.stderr


@pytest.mark.threat(
    "Another account that may enter the folder of a sandbox with accounting connects to its database, whose root has no "
    "password and may write files as you.",
    "The folder of the database and its socket has mode 0700 of its own.",
)
@pytest.mark.slow
def test_nobody_else_reaches_its_database(place: Path, short_tmp: Path) -> None:
    """``select … into outfile`` was a line in /etc/cron.d, where root had such a sandbox."""
    prefix = with_a_database(short_tmp)
    place.mkdir()
    place.chmod(0o755)
    with Sandbox.up(place, nodes=1, accounting=True, prefix=str(prefix)):
        written = place.parent / "written"
        code = f"select 'theirs' into outfile '{written}'"
        words = [
            str(prefix / "usr/bin/mariadb"),
            "--no-defaults",
            "-S",
            str(place / "db" / "sock"),
            "-u",
            "root",
            "-e",
            code,
        ]
        env = {"LD_LIBRARY_PATH": os.fspath(prefix / "usr/lib/x86_64-linux-gnu")}
        theirs: dict[str, Any] = {"user": STRANGER, "group": STRANGER, "extra_groups": []}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30, check=False, **theirs)
        assert "Can't connect" in done.stderr and "(13)" in done.stderr, done.stderr
        assert not written.exists()
        assert subprocess.run(words, env=env, timeout=30, check=False).returncode == 0, "its owner does"


def with_a_database(short_tmp: Path) -> Path:
    """Unpack Slurm, slurmdbd and MariaDB of this Debian, and return where."""
    packages = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "slurmdbd"]
    packages += ["munge", "libmunge2", "mariadb-server", "mariadb-server-core", "mariadb-client-core", "mariadb-common"]
    packages += ["mariadb-client", "libmariadb3", "libaio1", "liburing2", "libsnappy1v5", "libpmem1", "libndctl6"]
    packages += ["libdaxctl1"]
    debs, prefix = short_tmp / "database-debs", short_tmp / "database"
    debs.mkdir()
    got = subprocess.run(
        ["apt-get", "-q", "download", *packages], cwd=debs, capture_output=True, timeout=120, check=False
    )
    if got.returncode:
        pytest.skip("apt-get has no such packages here")
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(prefix)], check=True, timeout=60)
    return prefix


def test_a_sandbox_made_with_an_umask_of_0_is_no_wider(place: Path) -> None:
    before = os.umask(0)
    try:
        with Sandbox.up(place, nodes=1):
            wide = [path for path in place.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
            private = place / "munge"
            assert [path for path in wide if private not in path.parents and not path.is_char_device()] == []
    finally:
        os.umask(before)
