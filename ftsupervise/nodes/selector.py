"""Selects the nodes that the supervisor uses: it knows the past of each, where the next attempt runs, and which are
excluded.

After a failure its incidents are written down and every node is judged anew (``judging.py``). In this allocation the
better nodes are taken as far as there are spares; the worst ones are excluded for the waiting members.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.config.supervisor import default
from ftsupervise.host import bounded, files, processes
from ftsupervise.model import Attempt, Cause, CauseKind, Claim, Failure, FailureKind
from ftsupervise.nodes import incidents
from ftsupervise.nodes.judging import NodeJudge, margin, seen_on
from ftsupervise.printable import printable
from ftsupervise.probe.errand import within
from ftsupervise.rundir.ledger import job_id
from ftsupervise.rundir.observing import tell_only
from ftsupervise.rundir.paths import ENV_GROUP_JOB, ENV_NODES, RunDir, tell
from ftsupervise.rundir.progress import Straggler
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.parse import is_away, is_leaving, is_srun, on_nodes, with_fewer
from ftsupervise.truth import EXCLUSION

if TYPE_CHECKING:
    from ftsupervise.nodes.exclude import ExclusionResult
    from ftsupervise.scheduler.allocation import Allocation

# Runs the user's own health command on all nodes at the same time, with a bound on each and one for all.
#
# Exit 0 ok, 1 warning, 2 critical (the node is not used), 3 unknown, as a Nagios plug-in; any other is unknown too. A
# node is not used either if the command does not end there but ends on others: a command that hangs on one node has found
# something. If it ends on no node, the command or something that all nodes share is at fault.

OK, WARNING, CRITICAL, UNKNOWN, NO_ANSWER = "ok", "warning", "critical", "unknown", "no answer"
_WORDS = {0: OK, 1: WARNING, 2: CRITICAL, 3: UNKNOWN}
_ENDED = (124, 137)  # coreutils' timeout: it ended the command, or had to kill it
_SLACK = 10.0  # seconds for srun to start it everywhere and to bring the answers
_MARK = "ftsupervise-health"
# Prints the first line of its output, and its exit code. $1: seconds, $2: the command
_ASK = (
    f'{{ timeout -k 2 $1 sh -c "$2" 2>&1 </dev/null; printf \'\\n{_MARK} %s %s\\n\' $? "$SLURMD_NODENAME"; }}'
    " | cut -c -500 | sed -un '1p;$p'"
)
_LABELLED = re.compile(r"^ *(\d+): ?(.*)$")


class HealthAnswer(NamedTuple):
    """The command's answer about one node."""

    word: str  # OK, WARNING, CRITICAL, UNKNOWN or NO_ANSWER
    line: str = ""  # the first line of its output

    @property
    def unfit(self) -> bool:
        return self.word in (CRITICAL, NO_ANSWER)

    def words(self) -> str:
        return f"{self.word}: {self.line}" if self.line else self.word


def ask(command: str, allocation: Allocation, nodes: Sequence[str], timeout: float) -> dict[str, HealthAnswer]:
    """Return node -> answer, for each of ``nodes``. Takes ``timeout`` seconds and a little; never raises."""
    if not allocation.elsewhere:
        return {node: _here(command, timeout, allocation.side_env()) for node in nodes[:1]}
    words = allocation.side_step(
        nodes, "sh", "-c", _ASK, "sh", f"{timeout:g}", command, output="all", options=["--label"]
    )
    words.remove("--gres=none")  # no rank runs now, and the command wants to see the devices
    before = allocation.steps()
    try:
        done = bounded.run(words, timeout=timeout + _SLACK, env=allocation.side_env())
    except OSError as error:
        return {node: HealthAnswer(UNKNOWN, f"srun could not be started: {error.strerror}") for node in nodes}
    found = parse(done.stdout)
    if done.timed_out:
        allocation.kill_steps(without=before)
    if not found and not done.timed_out:  # srun itself was refused
        return {node: HealthAnswer(UNKNOWN, done.words()[:200]) for node in nodes}
    return judged({node: found.get(node, HealthAnswer(NO_ANSWER)) for node in nodes})


def parse(output: str) -> dict[str, HealthAnswer]:
    """Return node -> answer, from the lines that srun's ``--label`` made of the tasks' output."""
    first: dict[str, str] = {}
    found: dict[str, HealthAnswer] = {}
    for line in output.splitlines():
        match = _LABELLED.match(line)
        if not match:
            continue
        task, text = match.groups()
        words = text.split(" ")
        code = as_count(words[1]) if words[0] == _MARK and len(words) == 3 else None
        if code is not None:
            found[words[2]] = answer(code, first.get(task, ""))
        else:
            first.setdefault(task, text)
    return found


def answer(code: int | None, text: str) -> HealthAnswer:
    """Return the answer for an exit code; ``code`` None: it was ended at its bound."""
    line = printable(text.strip().partition("\n")[0], 200)
    if code is None or code in _ENDED:
        return HealthAnswer(NO_ANSWER, line)
    word = _WORDS.get(code)
    return HealthAnswer(word, line) if word else HealthAnswer(UNKNOWN, f"exit code {code}{': ' + line if line else ''}")


def judged(answers: Mapping[str, HealthAnswer]) -> dict[str, HealthAnswer]:
    """Return ``answers``, but all UNKNOWN where the command ended on no node: then the command may be at fault."""
    if len(answers) > 1 and all(one.word == NO_ANSWER for one in answers.values()):
        return {
            node: HealthAnswer(UNKNOWN, f"no answer from any node; {one.line}".rstrip("; "))
            for node, one in answers.items()
        }
    return dict(answers)


def _here(command: str, timeout: float, env: Mapping[str, str]) -> HealthAnswer:
    try:
        done = bounded.run(["sh", "-c", command], timeout=timeout, env=env, output_limit=4096)
    except OSError as error:
        return HealthAnswer(UNKNOWN, f"sh could not be started: {error.strerror}")
    found = answer(done.code, done.stdout.strip() or done.stderr)
    # with no other node to compare with, a command that does not end speaks against itself as much as against the node
    return HealthAnswer(UNKNOWN, f"no answer within {timeout:g} s") if found.word == NO_ANSWER else found


# ------------------------------------------------------------------------------------------


START, FAILURE = "start", "failure"
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
_ASKED = (signal.SIGTERM, signal.SIGINT)  # a rank that was asked to leave


_NODES = re.compile(r"(?:-N|--nodes=)(\d+)(?:-\d+)?")
_IN_TEXT = re.compile(r"\bsrun\b[^\n;|&]*?\s(?:-N\s*|--nodes[=\s]\s*)(\d+)")
_MOST = 64_000  # bytes of a script that are read
_LOOK = 5.0  # seconds for reading them
_CHOSEN = ("-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile")


@dataclass(frozen=True)
class NodePolicy:
    """The settings for judging and checking nodes. Seconds."""

    directory: Path | None = None  # incidents shared with other runs
    at_most: int | None = None  # nodes excluded because of their score; None: the spare margin
    least: int | None = None  # nodes that the command can run on; None: it needs all that it asks for
    health: str = ""  # a shell command; "": none
    health_timeout: float = default("care.health_timeout")
    health_when: tuple[str, ...] = (START, FAILURE)


class WaitingExclusions:
    """The exclusions of the run's waiting jobs, as far as this job has brought them up to date."""

    def __init__(
        self,
        rundir: RunDir,
        env: Mapping[str, str],
        allocation: Allocation,
        judge: NodeJudge,
        observes: Callable[[str], bool],
    ) -> None:
        self.rundir, self.env, self.allocation, self.judge, self.observes = rundir, env, allocation, judge, observes
        self.applied: ExclusionResult | None = None  # the result of the last update
        # an earlier job may have excluded nodes for a reason that is over
        self.outdated = incidents.any_exclusions(rundir.nodes)
        self._said: frozenset[str] = frozenset()  # nodes whose exclusion is only told
        # of the last update: the nodes to exclude; whether this job was leaving; the nodes that did not answer
        self._requested: tuple[frozenset[str], bool, frozenset[str]] = (frozenset(), False, frozenset())

    def update(self, log: Path | None, *, leaving: bool = False) -> None:
        """Exclude the bad nodes for the run's waiting jobs. Asks Slurm only when something has changed.

        ``leaving``: the next member is to start now, in the place of this job.
        """
        judged, nodes, gone = self.judge.nodes, self.judge.excluded(), self.allocation.last_silent
        if self.observes(EXCLUSION):
            self.tell_only(log)
            judged = tuple(node for node in judged if node.state == "by hand")
            nodes = frozenset(node.name for node in judged)
        if not job_id(self.env) or not self.env.get("SLURM_JOB_ID"):
            return
        if self.rundir.whole is not None and not self.env.get(ENV_GROUP_JOB):
            return  # the jobs that wait belong to the whole run
        unchanged = (nodes, leaving, gone) == self._requested or not (nodes or self._requested[0])
        if unchanged and not self.outdated:
            return
        from ftsupervise.nodes import exclude  # a job that runs well never needs it
        from ftsupervise.scheduler.ownership import own_job_ids

        done = exclude.apply(
            self.rundir,
            self.env,
            judged,
            whole=self.judge.whole,
            member=own_job_ids(self.env),
            gone=gone,
            leaving=leaving,
        )
        for sentence in (*done.changed, *done.not_excluded):
            tell(log, sentence)
        if done.problem:
            again = "trying again after the next attempt"
            tell(log, f"could not update the excluded nodes of the waiting jobs ({done.problem}); {again}")
        self.applied, self.outdated = done, bool(done.problem)
        self._requested = nodes, leaving, gone

    def tell_only(self, log: Path | None) -> None:
        """Say once which nodes would be excluded for their past, and write it down for each attempt; by hand they are all the
        same."""
        bad = {node.name: node.why for node in self.judge.nodes if node.state == "excluded"}
        for name, why in bad.items():
            tell_only(EXCLUSION, f"excluded {name}", why or "its past", log, name, say=name not in self._said)
        self._said = frozenset(bad)

    def release(self, log: Path | None) -> None:
        """Exclude no node any more, once the run has finished: the waiting members have nothing to do."""
        if self.rundir.has_finished() and incidents.any_exclusions(self.rundir.nodes):
            self.outdated = True
            self.update(log)


class NodeSelector:
    """The nodes of one job."""

    def __init__(
        self,
        rundir: RunDir,
        name: str,
        command: tuple[str, ...],
        care: NodePolicy,
        env: Mapping[str, str],
        allocation: Allocation,
        observes: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.rundir, self.name, self.command, self.care, self.allocation = rundir, name, command, care, allocation
        self.names = allocation.nodes or (_host(),)
        self.job = job_id(env)
        self.text = text_of(command) if allocation.job else ""
        need = wanted(command, len(self.names), self.text)
        most = margin(need, len(self.names) - need) if care.at_most is None else care.at_most
        writer = f"{name}.{self.job or 'none'}.{_host()}.{os.getpid()}.{processes.identity(os.getpid())}"
        self.judge = NodeJudge(rundir.nodes, care.directory, most, writer)
        self.exclusions = WaitingExclusions(rundir, env, allocation, self.judge, observes)
        self.failed_nodes: frozenset[str] = frozenset()  # failed under a step of this job, or started none
        self.unhealthy: dict[str, str] = {}  # node -> what its health command said
        in_a_job_of_others = rundir.whole is not None and not env.get(ENV_GROUP_JOB)
        self._after = "the group needs another one" if in_a_job_of_others else "the next member, if any, takes over"

    # --------------------------------------------------------------------------------------------------------- asking

    def barred(self, *, by_hand: bool = True) -> dict[str, str]:
        """Return the nodes that are not used here at all, and why: by their health command, or by hand."""
        unhealthy = {} if self.exclusions.observes(EXCLUSION) else self.unhealthy
        return {**(self.judge.by_hand() if by_hand else {}), **unhealthy}

    def too_few(self, why: str) -> Failure:
        """Return the failure that too few nodes are healthy.

        If none is, the health command may be at fault: that is not tried ten times.
        """
        none = self.unhealthy.keys() >= set(self.names)
        return (
            Failure(FailureKind.START, "no node healthy", why)
            if none
            else Failure(FailureKind.NODE, "nodes not healthy", why)
        )

    # -------------------------------------------------------------------------------------------------------- placing

    def initial(self) -> Placement | str:
        """Return where to start, or why not to. Slurm has just given us the nodes: only a health command prevents the start."""
        incidents.forget(self.rundir.nodes, _now())
        self.judge.judge_anew(None)
        self.examine(START, None)
        self.exclusions.update(None)
        command, nodes = self.command, self.allocation.nodes
        states = self.allocation.how_they_are() if self.allocation.elsewhere else {}
        found = self._place(states, self.barred())
        if found.short:
            found = self._place(states, self.barred(by_hand=False))
        if found.short and self.barred(by_hand=False):
            return found.short
        return Placement(command, nodes) if found.short else found

    def next(self, ended: Attempt, states: Mapping[str, str]) -> Placement | str:
        """Return where to start again, or why it cannot be done here. ``states``: node -> sinfo's word."""
        found = self._place(states, self.barred())
        if found.short:
            return f"{found.short}: {self._after}"
        observed = self.exclusions.observes(EXCLUSION)
        here = [] if observed else [node for node in found.nodes if node in self.judge.excluded()]
        if here:
            self.exclusions.outdated = True  # the waiting members may have changed since the last update
            self.exclusions.update(None, leaving=True)
        applied = self.exclusions.applied
        if bad := [node for node in here if applied and applied.excludes(node)]:
            return f"there is no node to take the place of {', '.join(bad)}, and the next member will not get it"
        gone = [node for node in found.nodes if node in self.failed_nodes]
        if gone and ended.failure is not None and ended.failure.kind is FailureKind.NODE:
            return f"there is no node to take the place of {', '.join(gone)}: {self._after}"
        if here:
            self.exclusions.update(None)  # this job goes on after all
        return found

    def _place(self, states: Mapping[str, str], barred: Mapping[str, str]) -> Placement:
        if self.allocation.nodes or barred:
            scores = {} if self.exclusions.observes(EXCLUSION) else self.judge.scores()
            return place(self.command, self.names, states, scores, barred, self.text, self.care.least)
        return Placement(self.command, ())

    # ---------------------------------------------------------------------------------------------------------- doing

    def after(self, mine: Claim, ended: Attempt, gone: Collection[str], lost: Mapping[str, str]) -> None:
        """Write down which nodes this failure speaks against, and judge all anew. ``gone``: those that Slurm's lines name."""
        log = mine.folder / "run.log"
        self.failed_nodes |= frozenset(gone)
        blamed = against(ended, gone, lost)
        found = [self._incident(ended, known_as(node, self.names), *more) for node, *more in blamed]
        known = self.judge.note(found, log)
        for one in found:
            nodes = seen_on(known.incidents, one)
            if len(nodes) > 1:
                tell(log, f"rank {one.rank} has failed in the same way on {', '.join(nodes)}: this blames no node")

    def waited_for(self, mine: Claim, slow: Straggler) -> None:
        """Write down that the others waited for the ranks of a node, to the end of the attempt."""
        node, ranks = known_as(slow.node, self.names), ",".join(map(str, slow.ranks))
        log = mine.folder / "run.log"
        tell(log, slow.words())
        if node in self.names:
            one = incidents.Incident(
                node, "slow", _now(), self.name, self.job, mine.number, ranks, "", _host(), slow.words()
            )
            self.judge.note([one], log)

    def examine(self, when: str, log: Path | None) -> None:
        """Run the health command on every node, if it is due; its answer holds until it runs again."""
        if not self.care.health or when not in self.care.health_when:
            return
        silent = self.allocation.silent()
        nodes = [node for node in self.names if node not in silent]
        answers = ask(self.care.health, self.allocation, nodes, self.care.health_timeout)
        self.unhealthy = {node: f"its health command says {one.words()}" for node, one in answers.items() if one.unfit}
        kinds = {WARNING: "warning", CRITICAL: "health", NO_ANSWER: "no-answer"}
        found = [
            incidents.Incident(node, kinds[one.word], _now(), self.name, self.job, by=_host(), evidence=one.words())
            for node, one in answers.items()
            if one.word in kinds
        ]
        for words in dict.fromkeys(one.words() for one in answers.values() if one.word != OK):
            on = ", ".join(node for node, one in answers.items() if one.words() == words)
            tell(log, f"health command on {on}: {words}")
        if self.unhealthy and self.exclusions.observes(EXCLUSION):
            self._tell_only(log, say=True)
        self.judge.note(found, log)

    def tell_standing(self, log: Path) -> None:
        """Write down, for the attempt that begins, which nodes would be left out."""
        if self.exclusions.observes(EXCLUSION):
            self._tell_only(log, say=False)
            self.exclusions.tell_only(log)

    def _tell_only(self, log: Path | None, *, say: bool) -> None:
        for node, words in self.unhealthy.items():
            tell_only(EXCLUSION, f"left out {node}", words, log, node, say=say)

    # --------------------------------------------------------------------------------------------------------- inside

    def _incident(self, ended: Attempt, node: str, kind: str, rank: str, evidence: str) -> incidents.Incident:
        where = self.name, self.job, ended.number, rank
        return incidents.Incident(node, kind, _now(), *where, ended.sign, _host(), evidence[:300])


def against(ended: Attempt, gone: Iterable[str], lost: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return (node, kind of incident, rank, evidence) for each node that a failure speaks against; none for a program's
    own error.

    ``gone``: nodes that Slurm's lines say went away or took no task; ``lost``: node -> Slurm's word, for nodes that were lost
    under the attempt. Pure.
    """
    if ended.failure is None or ended.cause is None:
        return []
    found = [(node, "node", "", f"{node} is {state.rstrip('*')}") for node, state in lost.items()]
    found += [(node, "launch", "", ended.words) for node in gone if node not in lost]
    if found:
        return found
    kind = "hardware" if ended.hardware else speaks_of(ended.failure, ended.cause.first)
    ranks: dict[str, list[str]] = {}
    for one in ended.cause.first.at:
        if one.node and one.ranks:
            ranks.setdefault(one.node, []).append(one.ranks)
    evidence = ended.hardware or ended.words
    return [(node, kind, ",".join(some), evidence) for node, some in ranks.items()] if kind else []


def known_as(host: str, nodes: Collection[str]) -> str:
    """Return Slurm's name of a node whose program gave the full host name: gpu-1 for gpu-1.example.org. Pure."""
    short = host.partition(".")[0]
    return short if host not in nodes and short in nodes else host


def speaks_of(failure: Failure, cause: Cause) -> str:
    """Return the kind of incident (``judging.WEIGHTS``); "" if it speaks against no node."""
    by = cause.killed_by
    if failure.kind is FailureKind.SIGNAL or (failure.kind is FailureKind.HANG and cause.kind is not CauseKind.HANG):
        return "" if not by or by in _ASKED else "crashed" if by in _CRASHES else "killed"
    if failure.kind is FailureKind.MEMORY:  # words of the program alone are its own error
        return "memory" if by == signal.SIGKILL or cause.kind is not CauseKind.EXIT else ""
    return "hang" if failure.kind is FailureKind.HANG else ""


def _host() -> str:
    return os.uname().nodename


def _now() -> datetime:
    return datetime.now(timezone.utc)


# Choose the nodes of the allocation on which the next attempt runs. Pure, but for ``text_of``: node states and scores
# in, srun's words out. Another command than srun finds its nodes in FTSUPERVISE_NODES: srun itself reads no such
# variable.


@dataclass(frozen=True)
class Placement:
    """The command to start, and its nodes. ``nodes`` () when the allocation has no list, or nothing is chosen."""

    command: tuple[str, ...]
    nodes: tuple[str, ...]
    short: str = ""  # why it cannot be started here: too few nodes are left


def wanted(command: Sequence[str], allocated: int, text: str = "") -> int:
    """Return how many nodes the command's srun asks for; all, when it does not say.

    ``text``: that of a script that calls srun.
    """
    if not is_srun(command):
        said = _IN_TEXT.search(text) if follows(text) else None
        return min(allocated, int(said[1])) if said else allocated
    words = list(command[1:])
    for index, word in enumerate(words):
        if not word.startswith("-"):
            break  # the command of srun begins here
        if word in ("-N", "--nodes") and index + 1 < len(words) and words[index + 1].isdigit():
            return min(allocated, int(words[index + 1]))
        if match := _NODES.fullmatch(word):
            return min(allocated, int(match[1]))
    return allocated


def text_of(command: Sequence[str]) -> str:
    """Return the text of a command that is no srun: its words, and the contents of the scripts among them, if their file system
    answers."""
    if is_srun(command):
        return "\n".join(command)
    try:
        return "\n".join((*command, *within(_LOOK, lambda: _scripts(command[:3]), key="scripts of the command")))
    except (OSError, TimeoutError):  # in a child: a thread that hangs would keep this process from ending
        return "\n".join(command)


def _scripts(words: Sequence[str]) -> list[str]:
    found = []
    for word in words:
        path = Path(word)
        try:
            if "\n" not in word and path.is_file():
                found.append(files.read_bounded(path, _MOST, follow=True).decode("utf-8", "replace"))
        except (OSError, ValueError):
            continue
    return found


def follows(text: str) -> bool:
    """Return whether a command that is no srun starts its steps on the nodes we choose."""
    return ENV_NODES in text


def calls_srun(command: Sequence[str], text: str) -> bool:
    return is_srun(command) or re.search(r"\bsrun\b", text) is not None


def place(
    command: tuple[str, ...],
    allocation: Sequence[str],
    states: Mapping[str, str],
    scores: Mapping[str, float],
    barred: Mapping[str, str] = {},
    text: str = "",
    least: int | None = None,
) -> Placement:
    """Return where to start ``command``: the healthy nodes, those with a score last, in Slurm's order.

    ``states``: node -> sinfo's word, {} when Slurm could not be asked. ``scores``: node -> how bad its past is.
    ``barred``: nodes that are not to be used, and why; a command that chooses its nodes itself is not started when one
    is. ``text``: that of a command that is no srun. It takes its nodes from FTSUPERVISE_NODES, or needs all of them.
    ``least``: how many nodes are enough; all that there are up to what it asks for are used. With as many nodes as srun
    wants, and all of them healthy, the command stays as it is.
    """
    unfit = any(node in barred or is_away(states.get(node, "")) for node in allocation)
    if not allocation or not (is_srun(command) or follows(text) or unfit):
        return Placement(command, tuple(allocation))
    want = wanted(command, len(allocation), text)
    well = [node for node in allocation if not is_away(states.get(node, "")) and node not in barred]
    enough = want if least is None else min(least, want)
    if len(well) < enough:
        gone = (node for node in allocation if node not in well)
        away = ", ".join(f"{node}: {barred[node]}" if node in barred else f"{node} is {states[node]}" for node in gone)
        note = (
            ""
            if is_srun(command) or follows(text) or not well
            else f"; the command does not take its nodes from ${ENV_NODES}"
        )
        return Placement(command, (), f"{len(well)} of {enough} nodes are left ({away}){note}")
    order = sorted(well, key=lambda node: (round(scores.get(node, 0), 1), is_leaving(states.get(node, ""))))
    chosen = set(order[:want])
    nodes = tuple(node for node in allocation if node in chosen)
    if len(allocation) == len(nodes) or not is_srun(command) or _person_chose(command):
        return Placement(command, nodes)
    return Placement(on_nodes(with_fewer(command, len(nodes), want), nodes), nodes)


def _person_chose(command: Sequence[str]) -> bool:
    for word in command[1:]:
        if not word.startswith("-"):
            return False
        if word.partition("=")[0] in _CHOSEN:
            return True
    return False
