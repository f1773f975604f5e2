"""Reads back the evidence of a hang: the stack of each rank when the run stood still, equal ones put together.

The pages are those of ranks/hang_monitor.py, ``evidence/rank-N.txt``. A rank whose stack shows that it waits for others is
never the culprit while another one does not wait. What that one does says of which kind the hang is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ftsupervise.diagnosis.frames import first_to_look_at
from ftsupervise.diagnosis.vocabulary import FailureClass
from ftsupervise.host import files
from ftsupervise.host.memory import oom_victims
from ftsupervise.printable import printable
from ftsupervise.ranks.evidence import FRAME, EvidenceHeader, main_thread, parse_header
from ftsupervise.units import rank_words

_PAGE = re.compile(r"rank-(\d{1,9})\.txt$")
_LARGEST = 400_000  # bytes of a page
_MOST = 100_000  # pages
_LOADER = re.compile(
    r"/torch/utils/data/|\bin (?:_next_data|_get_data|_try_get_data|_get_iterator|default_collate|__getitem__)$", re.M
)
_ITSELF = re.compile(
    r'/threading\.py", line \d+ in (?:acquire|wait|join|__enter__|_wait_for_tstate_lock)|/queue\.py"|/multiprocessing/'
)
# The system calls that wait for a file: read, write, open, stat, fstat, lstat, pread64, pwrite64, readv, writev, fsync,
# fdatasync, getdents64, rename, mkdir, unlink, openat, newfstatat, statx; and futex, a lock. Each architecture has numbers of
# its own, and the nodes of a run are taken to be like the machine that reads their evidence.
_X86_64 = "x86_64"
MACHINE = os.uname().machine
_FILE_CALLS = {
    _X86_64: frozenset(map(str, (0, 1, 2, 4, 5, 6, 17, 18, 19, 20, 74, 75, 78, 82, 83, 87, 217, 257, 262, 332))),
    "aarch64": frozenset(map(str, (63, 64, 80, 67, 68, 65, 66, 82, 83, 61, 38, 276, 34, 35, 56, 79, 291))),
}
# the names of those in which a process is found that waits; Linux, by architecture
_CALL_NAMES = {
    _X86_64: "0 read,1 write,7 poll,17 pread64,18 pwrite64,23 select,34 pause,35 nanosleep,43 accept,44 sendto,45 recvfrom,"
    "46 sendmsg,47 recvmsg,61 wait4,72 fcntl,73 flock,74 fsync,202 futex,230 clock_nanosleep,232 epoll_wait,247 waitid,"
    "257 openat,262 newfstatat,270 pselect6,271 ppoll,281 epoll_pwait,332 statx",
    "aarch64": "22 epoll_pwait,25 fcntl,32 flock,56 openat,63 read,64 write,67 pread64,68 pwrite64,72 pselect6,73 ppoll,"
    "79 newfstatat,82 fsync,95 waitid,98 futex,101 nanosleep,115 clock_nanosleep,202 accept,206 sendto,207 recvfrom,"
    "211 sendmsg,212 recvmsg,260 wait4,291 statx",
}
# of a process that is dead, or will be once the kernel has written its core
_CORE = re.compile(r"^CoreDumping:\s*1$", re.M)
_NAME_OF = {machine: dict(one.split() for one in named.split(",")) for machine, named in _CALL_NAMES.items()}
_READ = {_X86_64: "0", "aarch64": "63"}
_FUTEX = {_X86_64: "202", "aarch64": "98"}
_IN_STORAGE = re.compile(
    r"nfs|fuse|lustre|ll_|cl_|gpfs|ceph|rpc_wait|request_wait|io_schedule|wait_on_page|folio_wait|xfs|btrfs|ext4", re.I
)


class RankStack(NamedTuple):
    """A rank of a hang. ``stack``: of its main thread, innermost first, "" where it gave none; ``dies``: it had crashed by
    then, and the others waited for what the kernel had not cleaned up yet."""

    rank: int
    seen: EvidenceHeader
    stack: str
    answered: bool
    dies: bool = False
    oom: bool = False  # … killed by the kernel for its memory

    @property
    def own(self) -> str:
        """Return the innermost frame in the user's own files, else the innermost one: "train.py:42 step"."""
        return first_to_look_at(FRAME.findall(self.stack)) or self.seen.at


class StackGroup(NamedTuple):
    """Ranks that did the same. ``doing``: "wait for others in all_reduce (train.py:42 step)"."""

    ranks: tuple[int, ...]
    doing: str
    waits: bool

    def words(self) -> str:
        return f"{rank_words(self.ranks)}: {self.doing}"


class StackVerdict(NamedTuple):
    """Of which kind the hang is, and whose it is."""

    kind: FailureClass
    culprits: tuple[int, ...]
    why: str
    where: str = ""
    sure: bool = False


def read_stacks(folder: Path) -> list[RankStack]:
    """Return what the pages in ``folder`` tell, by rank; [] where there are none. Raises OSError."""
    found, victims = [], set[int]()
    try:
        names = sorted(one.name for one in folder.iterdir())[:_MOST]
    except FileNotFoundError:
        return []
    for name in names:
        if name.startswith("node-"):
            victims |= oom_victims(files.read_bounded(folder / name, _LARGEST).decode("utf-8", "replace"))
        if (number := _PAGE.search(name)) is None:
            continue
        text = files.read_bounded(folder / name, _LARGEST).decode("utf-8", "replace")
        if (one := parse_stack(int(number[1]), text)) is not None:
            found.append(one)
    return sorted((one._replace(oom=one.dies and one.seen.pid in victims) for one in found), key=lambda one: one.rank)


def parse_stack(rank: int, text: str) -> RankStack | None:
    """Parse a page of evidence; None for anything else."""
    header = parse_header(text)
    if header is None:
        return None
    _, found, rest = text.partition("\n== Python stacks")
    if found and not FRAME.search(rest.partition("\n== ")[0]):  # the guard gave none, and a worker server may have
        _, found, rest = rest.partition("\n== Python stacks")
    stack = main_thread(rest.partition("\n== ")[0].partition("\n")[2]) if found else ""
    dies = header.state in ("Z", "X") or _CORE.search(text) is not None
    return RankStack(rank, header._replace(rank=rank), stack, bool(FRAME.search(stack)), dies)


def alike(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Return the ranks in groups that do the same, the largest first."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for one in stacks:
        groups.setdefault((doing(one), one.seen.waits and not one.dies), []).append(one.rank)
    found = [StackGroup(tuple(ranks), text, waits) for (text, waits), ranks in groups.items()]
    return sorted(found, key=lambda one: (-len(one.ranks), one.ranks))


def doing(one: RankStack) -> str:
    """Return what the rank does, as a clause."""
    frames = FRAME.findall(one.stack)
    inner = frames[0][2] if frames else ""
    at = f" ({one.own})" if one.own else ""
    if one.dies:
        how = "was killed by the kernel for its memory" if one.oom else "has crashed"
        return f"{how}, and its process is not gone yet{at}"
    if one.seen.waits:
        call = next((name for path, _, name in frames if "distributed" in path), inner)
        return f"waits for others in {printable(call, 60) or 'a collective'}{at}"
    if one.seen.state in "Tt":
        return f"is stopped (state T){at}"
    if one.seen.state == "D":
        return f"waits in the kernel ({one.seen.wchan or 'where is not known'}, state D){at}"
    if not one.answered:
        call = _NAME_OF.get(MACHINE, {}).get(one.seen.syscall, "")
        return (
            f"is in {call}(), state {one.seen.state or '?'}"
            if call
            else f"answers nothing, state {one.seen.state or '?'}"
        )
    return f"is in {printable(inner, 60)}{at}, state {one.seen.state or '?'}"


def judge(stacks: Sequence[RankStack], accused: Iterable[int] = (), machine: str = MACHINE) -> StackVerdict | None:
    """Return whose hang it is. ``accused``: ranks that the ledger names; ``machine``: the architecture of their nodes. None
    where the stacks do not say it."""
    waiting = [one for one in stacks if one.seen.waits and not one.dies]
    free = [one for one in stacks if not one.seen.waits or one.dies]
    named = set(accused)
    odd = [one for one in free if one.rank in named] or (
        free if len(free) <= max(1, len(waiting)) or not waiting else []
    )
    if not odd:
        return None if free else _in_another_collective(waiting)
    if len(odd) > 1 and not waiting:
        odd = _smallest(odd)
    kinds = {_kind(one, machine) for one in odd}
    kind = kinds.pop() if len(kinds) == 1 else FailureClass.MISSING
    first = odd[0]
    others = (
        f" while {rank_words(one.rank for one in waiting)} {'wait' if len(waiting) > 1 else 'waits'} for it"
        if waiting
        else ""
    )
    why = f"{rank_words(one.rank for one in odd)} {doing(first)}{others}"
    return StackVerdict(kind, tuple(one.rank for one in odd), why, first.own, sure=bool(waiting) and len(odd) == 1)


def _in_another_collective(waiting: Sequence[RankStack]) -> StackVerdict | None:
    """Return the ranks that wait in another collective than the most, or called it from another line; None where all are
    alike."""
    odd = _smallest(waiting)
    if not odd or len(odd) == len(waiting):
        return None
    rest = next(one for one in waiting if one not in odd)
    why = f"{rank_words(one.rank for one in odd)} {doing(odd[0])}, and the others {doing(rest).replace('waits', 'wait', 1)}"
    return StackVerdict(FailureClass.MISMATCH, tuple(one.rank for one in odd), why, odd[0].own)


def _smallest(stacks: Sequence[RankStack]) -> list[RankStack]:
    """Return the ranks that do something else than the most, where such a majority is to be seen; else all."""
    groups: dict[str, list[RankStack]] = {}
    for one in stacks:
        groups.setdefault(doing(one), []).append(one)
    most = max(groups.values(), key=len)
    return [one for one in stacks if one not in most] if 2 * len(most) > len(stacks) else list(stacks)


def _kind(one: RankStack, machine: str) -> FailureClass:
    call, in_a_file = one.seen.syscall, one.seen.syscall in _FILE_CALLS.get(machine, ())
    if one.dies:
        return FailureClass.HOST_MEMORY if one.oom else FailureClass.CRASH
    if one.seen.state and one.seen.state in "Tt":
        return FailureClass.STOPPED
    if one.seen.state == "D" or (in_a_file and _IN_STORAGE.search(one.seen.wchan)):
        return FailureClass.STUCK_IN_IO
    if _LOADER.search(one.stack):
        return FailureClass.STUCK_IN_LOADER
    if in_a_file and call != _READ[machine]:  # which may be of a pipe or a socket
        return FailureClass.STUCK_IN_IO
    if one.seen.state == "R" or call == "running":
        return FailureClass.BUSY
    if _ITSELF.search(one.stack) or (one.answered and call == _FUTEX.get(machine)):
        return FailureClass.DEADLOCK
    return FailureClass.MISSING
