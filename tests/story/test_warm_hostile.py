"""What does not fit a standby is started cold, and what attacks or starves it costs nobody a rank."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.warm import become
from tests.story.warm_scene import Standby, script

Until = Callable[..., Any]
SAYS = "import json, os, sys; print(len(os.environ.get('FTSUPERVISE_BIG', '')), len(os.listdir('/proc/self/fd')) - 1, end='')"


# --------------------------------------------------------------------------------------------------- it does not fit


def why_cold(one: Standby, *words: str, **how: Any) -> str:
    done = one.run(*words, **how)
    assert done.returncode == 0, done.stderr
    return done.stderr.removeprefix("ftsupervise: started cold: ").strip()


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
    assert f"{tmp_path}/json.py beside the program stands before a module of that name" in done.stderr


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


LEAVES = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "process": "import subprocess; child = subprocess.Popen(['sleep', '600'])",
    "socket": "import socket; s = socket.socket()",
    "device": "f = open('/dev/zero')",
}


def test_a_module_that_leaves_something_a_fork_cannot_carry_is_not_imported(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name, text in LEAVES.items():
        (own / f"leaves_{name}.py").write_text(text)
    (own / "harmless.py").write_text("")
    modules = ("json", *(f"leaves_{name}" for name in LEAVES), "harmless")
    told = "import sys; print(*sorted(n for n in sys.modules if n.startswith(('leaves', 'harmless'))))"
    one = standby(script(tmp_path, told), modules=modules, PYTHONPATH=str(own))
    assert one.run().stdout == "harmless\n"
    skipped = next(fact["skipped"] for fact in one.facts() if "skipped" in fact)
    assert set(skipped) == {f"leaves_{name}" for name in LEAVES}


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
    half.sendall(become.PROTOCOL + (1000).to_bytes(8, "little") + b"{")
    nonsense.sendall(os.urandom(5000))
    huge.sendall(become.PROTOCOL + (1 << 60).to_bytes(8, "little"))
    began = time.monotonic()
    for _ in range(3):
        assert why_cold(one) == ""
    assert time.monotonic() - began < 30
    for link in (half, nonsense, huge, silent):
        link.settimeout(30)
        try:
            assert link.recv(100) == b""  # dropped at the bound
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


def test_a_standby_that_does_not_answer_costs_a_bounded_time(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(script(tmp_path, "print('ran')"))
    os.kill(one.process.pid, 19)
    try:
        done = one.run()
    finally:
        os.kill(one.process.pid, 18)
    assert done.stdout == "ran\n"  # once, cold
    assert "started cold: timed out" in done.stderr


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
