"""A rank that was forked from a standby cannot tell; it ends as others do, and nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.supervised import alive
from tests.story.warm_scene import Standby, clean, script

FACTS = Path(__file__).parent / "warm_facts.py"
Until = Callable[..., Any]


# ------------------------------------------------------------------------------------------------- it cannot be told


def both(one: Standby, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the command sees cold, and what it sees warm."""
    given: dict[str, Any] = {"cwd": one.folder, "env": one.env, "stdin": subprocess.DEVNULL, "start_new_session": True}
    given |= how
    found = []
    for words in (one.words, one.proxy()):
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, **given)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[0], found[1]


def assert_same(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    cold_random, warm_random = cold.pop("random"), warm.pop("random")
    assert cold_random[0] != warm_random[0]
    for key in cold:
        assert warm[key] == cold[key], key


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        (0, ("warm_facts.py", "a", "--b=ü")),
        (5, ("-u", "-X", "dev", "-W", "ignore", "warm_facts.py")),
        (1, ("-B", "-m", "warm_facts", "a")),
        (0, ("-c", "import runpy; runpy.run_path('warm_facts.py', run_name='__main__')")),
    ],
    ids=["script", "flags", "module", "text"],
)
def test_a_rank_sees_the_same_cold_and_warm(
    standby: Callable[..., Standby], tmp_path: Path, flags: int, command: tuple[str, ...]
) -> None:
    (tmp_path / "warm_facts.py").write_text(FACTS.read_text())
    one = standby(*command, flags=flags, FACTS="so it is")
    rank = {**one.env, "SLURM_PROCID": "0", "FTSUPERVISE_ATTEMPT": "2", "CUDA_VISIBLE_DEVICES": "3"}
    assert_same(*both(one, env=rank))


def test_a_rank_that_was_started_oddly_sees_the_same_cold_and_warm(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    """Its own limits, umask, ignored and blocked signals, a pipe as input, further descriptors, a closed one."""
    import resource

    (tmp_path / "warm_facts.py").write_text(FACTS.read_text())
    one = standby("warm_facts.py", BIG="x" * 100_000)
    read, write = os.pipe()
    ours = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR2: signal.SIG_IGN}

    def oddly() -> None:
        os.umask(0o137)
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, handler in ours.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        os.nice(3)

    try:
        with (tmp_path / "input").open("w+") as given:
            given.write("first line\nsecond")
            given.flush()
            both_inputs = []
            for words in (one.words, one.proxy()):
                given.seek(0)
                done = subprocess.run(
                    words, cwd=tmp_path, env=one.env, stdin=given, capture_output=True, text=True,
                    preexec_fn=oddly, pass_fds=(read, write), start_new_session=True, timeout=120,
                )  # fmt: skip
                both_inputs.append(done)
    finally:
        os.close(read)
        os.close(write)
    cold, warm = both_inputs
    assert (cold.stderr, warm.stderr) == ("", "")
    assert_same(json.loads(cold.stdout), json.loads(warm.stdout))


ENDS = {
    "an exception": "raise ValueError('oops')",
    "a code": "import atexit, sys; atexit.register(print, 'at exit'); print('unflushed', end=''); sys.exit(7)",
    "a text": "raise SystemExit('that was it')",
    "at once": "import os; print('lost', end=''); os._exit(3)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "an interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)",
    "an abort": "import faulthandler, os; faulthandler.enable(); os.abort()",
    "a pipe": "import os, signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.kill(os.getpid(), 13)",
    "a syntax error": "def f(:",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
}


def test_a_rank_ends_the_same_cold_and_warm(standby: Callable[..., Standby], tmp_path: Path) -> None:
    text = f"import os; print('begins', flush=True); exec(compile({ENDS!r}[os.environ['RANK']], 'how', 'exec'))"
    one = standby(script(tmp_path, text))
    for how in ENDS:
        env = {**one.env, "RANK": how}
        cold = subprocess.run(one.words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        warm = one.run(env=env)
        assert (warm.returncode, warm.stdout, thread(warm)) == (cold.returncode, cold.stdout, thread(cold)), how


def thread(done: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r"0x[0-9a-f]+", "", done.stderr)


def test_a_script_that_was_edited_is_read_anew_and_a_standby_serves_again_and_again(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    one = standby(script(tmp_path, "import own; print(own.word)"))
    for word in ("first", "second", "third"):
        script(tmp_path, f"word = {word!r}  # {word}", "own.py")
        done = one.run()
        assert (done.stdout, done.stderr) == (f"{word}\n", "")


def test_numpys_own_seed_is_another_one_in_each_rank(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(
        script(
            tmp_path, "import numpy; print(numpy.random.rand()); assert (numpy.ones((99, 99)) @ numpy.ones(99)).sum()"
        )
    )
    assert len({one.run().stdout for _ in range(4)}) == 4


# -------------------------------------------------------------------------------------------------- it is on its way

SAYS = "import sys; print('warm' if 'ftsupervise_slow' in sys.modules else 'cold')"


@pytest.fixture
def importing(standby: Callable[..., Standby], tmp_path: Path, until: Until) -> Standby:
    """A standby whose import does not end before the file ``go`` is there."""
    text = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ftsupervise_slow.py").write_text(text)
    words = script(tmp_path, SAYS)
    one = standby(words, modules=("ftsupervise_slow",), wait=False, PYTHONPATH=str(tmp_path / "own"))
    until(lambda: list(one.place.glob("*.coming")), "its word that it comes")
    return one


def test_a_rank_waits_for_a_standby_that_is_importing(importing: Standby, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(importing.run, patience=50) for _ in range(2)]
        time.sleep(1)
        assert not any(rank.done() for rank in ranks)
        (tmp_path / "go").touch()
        assert {(rank.result().stdout, rank.result().stderr) for rank in ranks} == {("warm\n", "")}
    assert [path.suffix for path in importing.place.iterdir()] == [".sock"]


def test_a_rank_does_not_wait_for_longer_than_it_is_told(importing: Standby) -> None:
    done = importing.run(patience=0.5)
    assert (done.stdout, done.stderr.partition(" ")[2]) == (
        "cold\n",
        "ftsupervise: started cold: the standby was still importing\n",
    )
    assert "no standby here" in importing.run(patience=0).stderr


def test_a_rank_does_not_wait_for_a_standby_that_has_died(importing: Standby) -> None:
    with ThreadPoolExecutor() as pool:
        rank = pool.submit(importing.run, patience=50)
        time.sleep(0.5)
        importing.process.kill()
        assert rank.result(timeout=30).stdout == "cold\n"
    assert "no standby here" in rank.result().stderr


# ----------------------------------------------------------------------------------------------------- life and death

WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if os.fork() == 0:
    os.write(1, b"helper %d\\n" % os.getpid())
    time.sleep(600)
os.write(1, b"rank %d\\n" % os.getpid())
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep begins is handled after it
"""


@contextmanager
def rank(one: Standby, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A rank that waits, its proxy, and the pids it has told."""
    process = subprocess.Popen(
        one.proxy(), cwd=one.folder, env={**one.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        told = sorted(process.stdout.readline().split() for _ in range(2))
        yield process, {name: int(pid) for name, pid in told}
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def test_signals_are_passed_on(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(script(tmp_path, WAITS))
    with rank(one) as (process, _):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 5


def test_when_its_proxy_is_killed_the_rank_dies_and_all_its_own(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    one = standby(script(tmp_path, WAITS))
    with rank(one) as (process, pids):
        process.kill()
        until(lambda: not any(map(alive, pids.values())), "their end", 30)
    assert one.process.poll() is None


@pytest.mark.parametrize("busy", [False, True])
def test_a_standby_whose_parent_is_gone_leaves_when_its_ranks_have(busy: bool, tmp_path: Path, until: Until) -> None:
    """slurmstepd ends what is below it; a standby that it could not see began to wait for ranks that never come."""
    words = [sys.executable, script(tmp_path, WAITS)]
    one = Standby(tmp_path, words, 0, (), clean(), between=("sh", "-c", '"$@" & wait', "sh"))
    try:
        until(one.ready, "the standby", 60)
        pid = one.facts()[-1]["pid"]
        if busy:
            with rank(one) as (_, pids):
                one.process.kill()
                one.process.wait(30)
                until(lambda: not list(one.place.glob("*.sock")), "its socket's end", 30)
                assert alive(pid) and alive(pids["rank"])
        one.process.kill()
        until(lambda: not alive(pid), "its end", 30)
    finally:
        one.end()


def test_what_a_rank_left_running_is_gone_before_the_next_attempt_begins(
    standby: Callable[..., Standby], tmp_path: Path
) -> None:
    deaf = "import os, signal, time\nif os.fork() == 0:\n  os.setsid(); signal.signal(15, signal.SIG_IGN)\n  time.sleep(600)\n"
    look = "old = os.path.exists('pid') and os.path.exists('/proc/' + open('pid').read())\nprint(old)\n"
    left = (
        "import os, signal, time\n"
        + look
        + deaf.replace(
            "  time.sleep", "  open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); time.sleep"
        )
    )
    one = standby(script(tmp_path, left))
    for attempt in ("1", "2", "3"):
        out = tmp_path / "out"
        with out.open("w") as file:  # no pipe, that what is left would hold open
            env = {**one.env, "FTSUPERVISE_ATTEMPT": attempt}
            subprocess.run(one.proxy(), cwd=tmp_path, env=env, stdout=file, stderr=file, timeout=60, check=True)
        assert out.read_text() == "False\n"


@pytest.mark.parametrize("why", ["cold", "another environment", "a module was edited"])
def test_nor_does_one_that_is_started_cold_meet_anything_of_an_older_attempt(
    standby: Callable[..., Standby], tmp_path: Path, why: str
) -> None:
    """Its GPU's memory, its port and its locks would be in the way."""
    site = tmp_path / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "slow.py").write_text("x = 1\n")
    leaves = (
        "import os, signal, slow, time\n"
        "print(os.path.exists('pid') and os.path.exists('/proc/' + open('pid').read()), flush=True)\n"
        "if os.environ['FTSUPERVISE_ATTEMPT'] == '1' and os.fork() == 0:\n"
        "  os.setsid(); signal.signal(15, signal.SIG_IGN); open('new', 'w').write(str(os.getpid()))\n"
        "  os.rename('new', 'pid'); time.sleep(600)\n"
        "while os.environ['FTSUPERVISE_ATTEMPT'] == '1' and not os.path.exists('pid'): time.sleep(0.01)\n"
    )
    one = standby(script(tmp_path, leaves), modules=("slow",), PYTHONPATH=str(site))
    out = tmp_path / "out"

    def start(attempt: str, **more: str) -> str:
        with out.open("w") as file:
            env = {**one.env, "FTSUPERVISE_ATTEMPT": attempt, **more}
            argv = one.proxy(patience="cold" if why == "cold" and attempt != "1" else 0)
            subprocess.run(argv, cwd=tmp_path, env=env, stdout=file, stderr=file, timeout=60, check=True)
        return out.read_text()

    assert start("1") == "False\n"
    if why == "a module was edited":
        (site / "slow.py").write_text("x = 2  # another one\n")
    said = start("2", **({"OMP_NUM_THREADS": "3"} if why == "another environment" else {}))
    assert "started cold: " in said
    assert said.splitlines()[-1] == "False", said


def test_when_the_standby_is_killed_its_ranks_die_and_their_proxies_tell(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    one = standby(script(tmp_path, WAITS))
    with rank(one) as (process, pids):
        one.process.kill()
        one.process.wait(30)
        assert process.wait(30) == -signal.SIGKILL
        until(lambda: not alive(pids["rank"]), "the rank's end", 30)
    done = one.run("true")
    assert done.returncode == 0
    assert "started cold: no standby here" in done.stderr


def test_a_standby_told_to_leave_does_not_hurry_its_ranks(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(script(tmp_path, WAITS))
    with rank(one) as (process, pids):
        one.process.terminate()
        assert "started cold" in one.run("true").stderr
        assert alive(pids["rank"])
        process.terminate()
        assert process.wait(30) == 5
    assert one.process.wait(30) == 0


def test_sigkill_by_the_attempts_mark_finds_a_rank_that_was_forked(
    standby: Callable[..., Standby], tmp_path: Path, until: Until
) -> None:
    from ftsupervise.scheduler.allocation import KILL_MARKED

    one = standby(script(tmp_path, WAITS))
    mark = f"FTSUPERVISE_ATTEMPT_DIR={tmp_path}/attempts/0002"
    with rank(one, FTSUPERVISE_ATTEMPT_DIR=f"{tmp_path}/attempts/0002") as (process, pids):
        os.kill(one.process.pid, signal.SIGSTOP)  # so that it is not the standby that does it
        subprocess.run(["sh", "-c", KILL_MARKED, "kill", mark], timeout=60, check=True)
        until(lambda: not any(map(alive, pids.values())), "their end", 30)
        os.kill(one.process.pid, signal.SIGCONT)
        assert process.wait(30) == -signal.SIGKILL
    assert one.process.poll() is None
