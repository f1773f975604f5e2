"""Takes the evidence of ranks on all their nodes at once: each node writes the pages of its own (``evidence.py``).

It stands alone because the hang monitor takes it before a kill, and a person who asks a run that goes on takes it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from ftsupervise.host.ownership import make_folder
from ftsupervise.ranks.evidence import BETWEEN, BOUND, EvidenceHeader, RankProcess, parse_header, question
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import as_count
from ftsupervise.truth import RankState

Ask = Callable[[Mapping[str, str], float], Mapping[str, str]]  # node -> question, bound; node -> answer


_LATER = 5.0  # seconds after a failure: the next start comes first
_NODES, _MOST = 5.0, 64  # seconds for the pages of the nodes; nodes
_PROCESSES = 1.0  # seconds in which the nodes tell which processes the ranks are


class EvidenceTaken(NamedTuple):
    """The first lines of the pages, the nodes that did not answer, and the pages that their nodes could not write."""

    headers: tuple[EvidenceHeader, ...]
    silent: tuple[str, ...] = ()
    unwritten: Mapping[str, str] = {}  # name -> text


def take_evidence(ask: Ask, ranks: Sequence[RankState], into: Path, *, goes_on: bool = False) -> EvidenceTaken:
    """Have the nodes of ``ranks`` write their pages to ``into``. ``goes_on``: the run may be healthy, and nothing is asked of
    it that it could mind."""
    nodes: dict[str, list[RankState]] = {}
    for one in ranks:
        nodes.setdefault(one.node, []).append(one)
    folder = into.absolute()
    questions = {
        node: question((RankProcess(one.rank, one.pid) for one in some), folder, goes_on=goes_on)
        for node, some in nodes.items()
    }
    answers = ask(questions, BOUND) if questions else {}
    headers, unwritten = list[EvidenceHeader](), dict[str, str]()
    for node, answer in answers.items():
        for one, text in zip(nodes[node], answer.split(BETWEEN), strict=False):
            if (header := parse_header(text)) is not None:
                headers.append(header._replace(rank=one.rank))
            if "\n" in text:
                unwritten[f"rank-{one.rank}.txt"] = text
    return EvidenceTaken(tuple(headers), tuple(sorted(set(nodes) - set(answers))), unwritten)


def with_processes(
    ask: Ask, states: Sequence[RankState], attempt: Path, nodes: Sequence[str], bound: float = _PROCESSES
) -> list[RankState]:
    """Return ``states``; where no rank has a page, and a step was read from the output at most, the ranks by their processes on
    ``nodes``, each at that step."""
    read = next((one for one in states if one.read), None)
    if states and read is None:
        return list(states)
    found, now = list[RankState](), monotonic()
    for node, text in ask(dict.fromkeys(nodes, f"ranks {attempt}"), bound).items():
        for words in (line.split() for line in text.splitlines()):
            numbers = [number for word in words if (number := as_count(word)) is not None]
            if len(words) == len(numbers) == 2:
                one = read or RankState(0, node, None, "", now, now, now)
                found.append(one._replace(rank=numbers[0], node=node, pid=numbers[1], state="", cpu=None))
    return found or list(states)


def take_afterwards(
    ask: Ask, nodes: Sequence[str], slurm: Callable[[Sequence[str]], str], attempt: Path, wait: float = _LATER
) -> threading.Thread:
    """Begin to write, after a failure, what Slurm shows of the job and its nodes (``evidence/slurm.txt``), and the pages of the
    nodes. The next start waits for none of it, and when the job ends before that it is left out."""
    work = _take_afterwards, (ask, tuple(nodes)[:_MOST], slurm, attempt.absolute() / "evidence", wait)
    thread = threading.Thread(target=work[0], args=work[1], name="evidence", daemon=True)
    thread.start()
    return thread


def _take_afterwards(
    ask: Ask, nodes: Sequence[str], slurm: Callable[[Sequence[str]], str], folder: Path, wait: float
) -> None:
    sleep(wait)
    try:
        if text := slurm(nodes):
            make_folder(folder)
            write_whole(folder / "slurm.txt", text, sync=False)
    except OSError:  # the disk is full
        return
    ask(dict.fromkeys(nodes, f"node {folder}"), _NODES)
