"""Runs the user's own health command on all nodes at the same time, with a bound on each and one for all.

Exit 0 ok, 1 warning, 2 critical (the node is not used), 3 unknown, as a Nagios plug-in; any other is unknown too. A
node is not used either if the command does not end there but ends on others: a command that hangs on one node has found
something. If it ends on no node, the command or something that all nodes share is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.host import bounded
from ftsupervise.printable import printable
from ftsupervise.rundir.records import as_count

if TYPE_CHECKING:
    from ftsupervise.scheduler.allocation import Allocation

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
