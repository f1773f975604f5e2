"""What does not fit a standby is started cold, and what attacks or starves it costs nobody a rank."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.warm import client
from tests.story.warm_scene import Standby, script

Until = Callable[..., Any]
SAYS = "import json, os, sys; print(len(os.environ.get('FTSUPERVISE_BIG', '')), len(os.listdir('/proc/self/fd')) - 1, end='')"


# --------------------------------------------------------------------------------------------------- it does not fit


def why_cold(one: Standby, *words: str, **how: Any) -> str:
    done = one.run(*words, **how)
    assert done.returncode == 0, done.stderr
    return done.stderr.partition(" ftsupervise: started cold: ")[2].strip()


def test_what_differs_where_an_import_may_have_seen_it_is_started_cold(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, "pass"), OMP_NUM_THREADS="1")
    assert why_cold(one) == ""
    assert why_cold(one, env={**one.env, "OMP_NUM_THREADS": "2"}) == "another environment: OMP_NUM_THREADS"
    assert why_cold(one, sys.executable, "-c", "pass") == "another command"
    other = tmp_path / "other"
    other.mkdir()
    script(other, "pass")
    assert why_cold(one, cwd=other) == "another working directory"
    assert why_cold(one, env={**one.env, "SLURM_PROCID": "1", "FOO": "1"}) == ""  # one rank says it for all
    if len(cpus := os.sched_getaffinity(0)) > 1:
        fewer = why_cold(one, preexec_fn=lambda: os.sched_setaffinity(0, {min(cpus)}))
        assert fewer == f"1 CPUs, and {len(cpus)} when the modules were imported"


def prctl_no_new_privileges() -> None:
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)


def memory_of_node_0() -> None:
    mask = ctypes.c_ulong(1)
    assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), 64) == 0  # set_mempolicy(MPOL_BIND) on x86-64


def personality_without_random_addresses() -> None:
    ctypes.CDLL(None).personality(0x0040000)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (prctl_no_new_privileges, "NoNewPrivs"),
        pytest.param(
            memory_of_node_0,
            "memory policy",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="the call's number is of x86-64"),
        ),
        (personality_without_random_addresses, "personality"),
    ],
)
def test_what_a_fork_cannot_be_held_to_is_started_cold(
    standby: Callable[..., Standby], tmp_path: Path, how: Callable[[], None], name: str
) -> None:
    one = standby(script(tmp_path, "pass"))
    assert why_cold(one, preexec_fn=how) == f"another container, cgroup or set of rights: {name}"
    assert why_cold(one) == ""


def test_a_rank_with_its_own_gpu_is_not_started_from_a_standby_that_sees_them_all(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    """Slurm gives each task its own by the device cgroup, and all of them call it number 0."""
    group = Path("/sys/fs/cgroup/devices") / f"ftsupervise-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no device cgroup (version 1) to make here: {error.strerror}")
    try:
        number = Path("/dev/random").stat().st_rdev
        (group / "devices.deny").write_text(f"c {os.major(number)}:{os.minor(number)} rwm")
        one = standby(script(tmp_path, "pass"))
        assert why_cold(one, preexec_fn=lambda: (group / "tasks").write_text("0")) == "other devices: /dev/random"
        assert why_cold(one) == ""
    finally:
        group.rmdir()


def test_a_module_beside_the_program_goes_before_one_that_was_imported(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, "import json; print(json.__file__)"))
    script(tmp_path, "", "json.py")
    done = one.run()
    assert done.stdout.strip() == str(tmp_path / "json.py")
    assert f"{tmp_path}/json.py beside the program shadows an imported module of that name" in done.stderr


def test_a_directory_is_a_program_whose_modules_go_first_and_an_archive_is_left_alone(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    script(app, "import json; print(json.__file__)", "__main__.py")
    one = standby("app")
    assert why_cold(one) == ""
    script(app, "", "json.py")
    done = one.run()
    assert done.stdout.strip() == f"{app}/json.py" and "app/json.py beside the program" in done.stderr
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "pass")
    assert why_cold(standby("app.pyz")) == "the program is a zip archive"


def test_what_an_import_does_to_the_environment_is_done_to_the_rank_too(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sets.py").write_text(
        "import os\nos.environ.setdefault('KMP_X', 'by default')\nos.environ['GIVEN'] += ', changed'\ndel os.environ['GONE']"
    )
    told = script(tmp_path, "import sets, os; print(os.environ['KMP_X'], os.environ['GIVEN'], os.environ.get('GONE'))")
    one = standby(told, modules=("sets",), PYTHONPATH=str(own), GIVEN="given", GONE="there")
    done = one.run(env={**one.env, "RANK": "1"})
    assert (done.stdout, done.stderr) == ("by default given, changed None\n", "")
    assert why_cold(one, env={**one.env, "GIVEN": "given, changed"}) == "another environment: GIVEN"
    (own / "sets.py").write_text("import os; os.environ['LOCAL_RANK'] = '0'")
    told = script(tmp_path, "import sets")
    assert (
        why_cold(standby(told, modules=("sets",), PYTHONPATH=str(own)))
        == "imported modules set variables of one rank: LOCAL_RANK"
    )


def test_what_was_edited_or_installed_since_is_imported_anew(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    own, site = tmp_path / "own", tmp_path / "site-packages"
    for folder in (own, site):
        folder.mkdir()
    (own / "mine.py").write_text("word = 'old'")
    path = {"PYTHONPATH": f"{own}:{site}"}
    one = standby(script(tmp_path, "import mine; print(mine.word)"), modules=("mine",), **path)
    assert one.run().stdout == "old\n"
    (own / "mine.py").write_text("word = 'newer'")
    done = one.run()
    assert done.stdout == "newer\n"
    assert "mine.py has changed since it was imported" in done.stderr
    assert one.process.wait(30) == 0  # it is of no more use
    two = standby("train.py", **path)
    (site / "fresh.py").touch()
    assert "site-packages has changed" in why_cold(two)


def test_what_was_edited_where_it_is_installed_is_imported_anew(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    inside = tmp_path / "site-packages" / "mine"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("word = 'old'")
    told = script(tmp_path, "import mine; print(mine.word)")
    one = standby(told, modules=("mine",), PYTHONPATH=str(inside.parent))
    assert one.run().stdout == "old\n"
    (inside / "__init__.py").write_text("word = 'newer'")  # the folders' times stay as they are
    done = one.run()
    assert done.stdout == "newer\n"
    assert "mine/__init__.py has changed since it was imported" in done.stderr


def test_a_python_that_would_not_stop_at_the_hook_is_never_given_the_program(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby("-S", script(tmp_path, "open('ran', 'w')"), flags=1, wait=False)
    assert one.process.wait(60) == 0
    assert "does not stop at our hook" in one.said.read_text()
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------------------------ attacks


def connect(one: Standby) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(next(one.place.glob("*.sock"))))
    return link


def test_half_a_message_and_nonsense_hold_nobody_up(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    one = standby(script(tmp_path, SAYS))
    half, nonsense, huge, silent = (connect(one) for _ in range(4))
    half.sendall(client.PROTOCOL + (1000).to_bytes(8, "little") + b"{")
    nonsense.sendall(os.urandom(5000))
    huge.sendall(client.PROTOCOL + (1 << 60).to_bytes(8, "little"))
    began = time.monotonic()
    for _ in range(3):
        assert why_cold(one) == ""
    assert time.monotonic() - began < 30
    for link in (half, nonsense, huge, silent):
        link.settimeout(30)
        try:
            assert link.recv(100) in (b"", b"timed out\n")  # dropped at the bound
        except ConnectionResetError:
            pass
        link.close()
    assert one.process.poll() is None
    until(lambda: len(os.listdir(f"/proc/{one.process.pid}/fd")) < 12, "its descriptors")


def test_a_thousand_descriptors_and_a_megabyte_of_environment_are_handed_over(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, SAYS))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(900)]
    try:
        big = {f"FTSUPERVISE_BIG{n}": "x" * 100_000 for n in range(9)}
        env = {**one.env, **big, "FTSUPERVISE_BIG": "x" * 100_000}
        cold = subprocess.run(
            one.words, cwd=tmp_path, env=env, pass_fds=many, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        warm = one.run(env=env, pass_fds=many)
    finally:
        for fd in many:
            os.close(fd)
    assert (warm.stdout, warm.stderr) == (cold.stdout, "")


DYING = """
import ctypes, os, signal, threading, time
if os.environ["FTSUPERVISE_ATTEMPT"] == "1":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("dying", os.getpid(), flush=True)
    ctypes.CDLL(None).syscall(60, 0)  # exit(2) of the first thread alone, on x86-64: a zombie that still holds all it had
print("begun", flush=True)
time.sleep(3)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the call's number is of x86-64")
def test_ranks_begin_when_an_older_one_is_gone_that_looked_dead_before_and_do_not_end_each_other(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    one = standby(script(tmp_path, DYING))
    given: dict[str, Any] = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    old = subprocess.Popen(one.proxy(), env={**one.env, "FTSUPERVISE_ATTEMPT": "1"}, **given)
    assert old.stdout is not None
    pid = int(old.stdout.readline().split()[1])
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "its first thread's end")
    assert one.ranks() == [pid]
    env = {**one.env, "FTSUPERVISE_ATTEMPT": "2"}
    new = [subprocess.Popen(one.proxy(), env=env, stderr=subprocess.PIPE, **given) for _ in range(3)]
    for each in new:
        assert each.communicate(timeout=60) == ("begun\n", "")
        assert each.returncode == 0
    assert not Path(f"/proc/{pid}").exists()
    assert old.wait(30) == -9


LATE = """
import importlib.util, marshal, os, socket, sys
spec = importlib.util.spec_from_file_location("become", sys.argv[1])
become = importlib.util.module_from_spec(spec); spec.loader.exec_module(become)
link = become.connect(sys.argv[2], os.uname().nodename, 0)
payload = marshal.dumps({**become.myself(sys.argv[3:], [0, 1, 2]), "env": {**os.environb, b"FTSUPERVISE_ATTEMPT": b"1"}})
link.sendall(become.PROTOCOL + len(payload).to_bytes(8, "little") + payload)
print(link.recv(100), flush=True)
sys.stdin.readline()
fds = [os.open(".", os.O_RDONLY), 0, 1, 2]
link.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds))])
print(link.recv(100), flush=True)
"""


def test_a_rank_of_an_older_attempt_that_comes_late_ends_nobody(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    one = standby(script(tmp_path, "import time; print('begun', flush=True); time.sleep(2)"))
    words = [sys.executable, "-c", LATE, client.__file__, str(one.place), *one.words]
    given: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    late = subprocess.Popen(words, stdin=subprocess.PIPE, env=one.env, **given)
    assert late.stdout is not None and late.stdout.readline() == "b'send'\n"
    new = subprocess.Popen(one.proxy(), stdin=subprocess.DEVNULL, env={**one.env, "FTSUPERVISE_ATTEMPT": "2"}, **given)
    assert new.stdout is not None and new.stdout.readline() == "begun\n"
    assert late.communicate("go on\n", timeout=30)[0] == "b'a newer attempt has begun\\n'\n"
    assert new.wait(30) == 0


@pytest.mark.threat(
    "Another account makes the standby's folder first.",
    "The ranks start without the standby and do not wait for it.",
)
def test_a_place_that_somebody_else_made_keeps_nobody_waiting(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(place / f"{os.uname().nodename}.coming")
    words = [sys.executable, "-IS", client.__file__, str(place), "5", "--", "echo", "ran"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n" and "no standby here" in done.stderr
    place.chmod(0o777)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n" and f"{place} belongs to another user" in done.stderr


def test_a_standby_that_does_not_answer_costs_a_bounded_time(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(script(tmp_path, "print('ran')"))
    os.kill(one.process.pid, 19)
    try:
        done = one.run()
    finally:
        os.kill(one.process.pid, 18)
    assert done.stdout == "ran\n"  # once, cold
    assert "started cold: timed out" in done.stderr


@pytest.mark.threat(
    "Another account connects to the standby.",
    "The standby sends it nothing and accepts nothing from it.",
)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to be another user")
def test_another_user_gets_nothing_from_a_standby_and_gives_nothing_to_a_rank(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, "print('ran')"))
    name = str(next(one.place.glob("*.sock")))
    text = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r}); s.sendall(b'x'); print(s.recv(9))"
    as_other = [
        "setpriv",
        "--reuid=65534",
        "--clear-groups",
        sys.executable.replace(sys.prefix, sys.base_prefix),
        "-c",
        text,
    ]
    as_other[3] = "/usr/bin/python3"
    shut_out = subprocess.run(as_other, capture_output=True, text=True, timeout=60)
    assert "PermissionError" in shut_out.stderr
    one.place.chmod(0o755)  # had somebody opened it
    Path(name).chmod(0o666)
    seen = subprocess.run(as_other, capture_output=True, text=True, timeout=60)
    assert seen.stdout.strip() == "b''" or "Error" in seen.stderr
    assert one.run().stderr == ""
