"""The main thread of one group's real supervisor locks itself out for ever, and its group alone is started again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ftsupervise.rundir.heartbeat_page import read_beats
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun, alive
from tests.story.test_replica_groups_run import NAMES, Groups

# Preloaded into all programs of the run: poll(2), in which every main loop of ours waits, waits for its own lock in one group's
# supervisor as soon as a file is there. The pipe to the process above is in the environment of supervisors alone.
DEAD_LOCK = r"""
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int chosen;

__attribute__((constructor)) static void choose(void) {
    const char *group = getenv("FTSUPERVISE_GROUP");
    chosen = group && !strcmp(group, "g002") && getenv("FTSUPERVISE_PULSE");
}

int poll(struct pollfd *of, nfds_t n, int ms) {
    if (chosen && syscall(SYS_gettid) == getpid() && !access(STAND, F_OK) && !unlink(STAND)) {
        pthread_mutex_lock(&lock);
        pthread_mutex_lock(&lock);
    }
    struct timespec until = {ms / 1000, ms % 1000 * 1000000L};
    return ppoll(of, n, ms < 0 ? 0 : &until, 0);
}
"""


@pytest.mark.fault(
    "The main thread of a group's supervisor locks itself out for ever",
    "after ten minutes its stacks are written and it is ended; its group alone is started again",
)
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_supervisor_whose_main_thread_locks_itself_out_is_ended_and_its_group_alone_is_started_again(
    run: SupervisedRun, tmp_path: Path
) -> None:
    source, library, stand = tmp_path / "stand.c", tmp_path / "stand.so", tmp_path / "stand"
    source.write_text(DEAD_LOCK)
    words = ["cc", "-shared", "-fPIC", "-o", str(library), f'-DSTAND="{stand}"', str(source), "-lpthread"]
    subprocess.run(words, check=True, timeout=60)
    groups = Groups(run, tmp_path)
    member = groups.start(1_000_000, env={"LD_PRELOAD": str(library), "FTSUPERVISE_SILENCE_SECONDS": "20"})
    pids = groups.train()
    supervisor = wait_until(lambda: groups.row("g002").pid, "the supervisor of g002")
    stand.touch()
    wait_until(lambda: not stand.exists(), "it stands")
    wait_until(lambda: "g002: its supervisor has not answered for 20 s" in run.log(), "it is found out", 120)
    pids_again = groups.train(2, "g002")
    assert not alive(pids["g002"]) and not alive(supervisor), "never two copies"
    assert pids_again["g002"] != pids["g002"]
    others = [name for name in NAMES if name != "g002"]
    assert all(groups.pid(name) == pids[name] for name in others), "the others train on"
    first = groups.attempts("g002")[0]
    assert "its supervisor did not answer for 2" in first.words
    stacks = (groups.of("g002").attempt(1) / "evidence" / "supervisor.txt").read_text()
    assert "in wait" in stacks and "signals.py" in stacks, "where its main thread stood"
    said = wait_until(lambda: "ended without a record: its supervisor did" in run.log() and run.log(), "its end")
    assert "it waits for no file system: it is ended by SIGKILL as soon as its stacks are read" in said
    assert len(read_beats(groups.of("g002"))) == 1
    (run.rundir.switches / "kill-switch").touch()
    assert member.wait(60) == 0
    assert not run.processes()
