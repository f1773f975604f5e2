"""The attempt before left no record of its end, because its batch host is gone: the next job asks Slurm, and writes it down.

Nobody on a lost host can say why it is silent. Slurm knows it for the few minutes in which it keeps an ended job.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence

from ftsupervise.host import bounded
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import LostEnd, write_page
from ftsupervise.rundir.paths import ENV_GROUP_JOB, RunDir
from ftsupervise.scheduler.parse import is_away

_ASK = 10.0  # seconds for one question
_OF_A_LOST_HOST = ("NODE_FAIL", "CANCELLED")  # by Slurm, or by our agents: no slurmd was there to report another end
_NO_ORDER = (0, signal.SIGHUP)  # a host that goes down may hang up on its processes first
_FIELDS = re.compile(r"(?:^|\s)(JobState|BatchHost|NodeList)=(\S*)")


def note_lost_host(rundir: RunDir, number: int, env: Mapping[str, str]) -> None:
    """Begin to find out what became of the host of attempt ``number``, in a thread: no start waits for it. Of the groups of one
    job only the whole run asks: Slurm is not asked the same thing hundreds of times."""
    in_a_job_of_others = rundir.whole is not None and not env.get(ENV_GROUP_JOB)
    if number > 0 and env.get("SLURM_JOB_ID") and not in_a_job_of_others:
        threading.Thread(target=_note, args=(rundir, number, dict(env)), name="lost-host", daemon=True).start()


def _note(rundir: RunDir, number: int, env: Mapping[str, str]) -> None:
    try:
        one = next(ledger.backwards(rundir, before=number + 1, first=number), None)
        if one is None or one.ended is not None or one.stop_signal not in _NO_ORDER or not one.job_id:
            return
        if one.job_id != ledger.job_id(env):
            words = fate_of(one.job_id, env, one.nodes)
        else:  # in this very job, which Slurm has begun again
            words = lost_from(one.nodes, env) if env.get("SLURM_RESTART_COUNT", "0") != "0" else ""
        if words:
            write_page(rundir.attempt(number), LostEnd(words))
    except OSError:  # it stays an end without a record
        return


def fate_of(job: str, env: Mapping[str, str], began_on: Sequence[str] = ()) -> str:
    """Return why Slurm or our agents have ended ``job``: "its batch host node-0 was lost (down)"; "" where that was not why,
    or where Slurm does not say. ``began_on``: its nodes, if known. Raises OSError where there are no Slurm commands."""
    shown = _answer(("scontrol", "--oneliner", "show", "job", job), env)
    fields = dict(_FIELDS.findall(shown))
    host, state = fields.get("BatchHost", "").removeprefix("(null)"), fields.get("JobState", "")
    if state in ("", "RUNNING", "PENDING", "COMPLETING"):
        return ""
    now = _answer(("sinfo", "-h", "-N", "-n", host, "-o", "%T"), env).split("\n")[0].strip() if host else ""
    nodes, away = fields.get("NodeList", "").removeprefix("(null)"), bool(now) and is_away(now)
    try:
        taken_out = bool(host and nodes) and host not in expand_hostlist(nodes)
    except ValueError:
        taken_out = False
    if taken_out or (away and state in _OF_A_LOST_HOST):
        return f"its batch host {host} was lost{f' ({_plain(now)})' if away else ''}"
    if state != "NODE_FAIL":
        return ""
    which = f"its node {began_on[0]}" if len(began_on) == 1 else "one of its nodes"
    return f"{which} was lost, and Slurm ended the job (NODE_FAIL)"


def lost_from(nodes: Sequence[str], env: Mapping[str, str]) -> str:
    """Return which of ``nodes``, the first of them its batch host, a job has lost before Slurm began it again; "" if none."""
    if not nodes:
        return ""
    listed = ("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T")
    states = dict(line.split(None, 1) for line in _answer(listed, env).splitlines() if " " in line)
    away = [node for node in nodes if is_away(states.get(node, ""))]
    if not away:
        return ""
    what = "batch host" if away[0] == nodes[0] else "node"
    return f"its {what} {away[0]} was lost ({_plain(states[away[0]])}), and Slurm began the job again"


def _plain(state: str) -> str:
    """Return a node's state without the sign that its slurmd does not answer, which comes and goes."""
    return state.rstrip("*")


def _answer(words: tuple[str, ...], env: Mapping[str, str]) -> str:
    done = bounded.run(words, timeout=_ASK, env=env)
    return done.stdout if done.code == 0 else ""
