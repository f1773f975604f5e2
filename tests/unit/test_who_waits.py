"""Nobody is left waiting: this walks the source for what may wait without an end.

- Whoever waits for a thread, a child, a lock, a socket or a name server without a bound stands in ``WAITS``, with what ends it.
- A process that keeps the time of others touches no disk itself: its files are in ``KEEPS_TIME``, and whatever they read or
  write all the same stands there, with the reason why that cannot hang, or who is waiting for it.

All other code reads and writes the disk, and runs where somebody else keeps the time: in the child of a typed command
(``cli/time_limit.py``), of a watch (``watch/tour.py``), of a question (``probe/``), in the thread beside a training loop
(``guard/side_thread.py``), or in ``in_time``. What that is worth is measured by ``tests/faults/test_dead_mount_everywhere.py``:
every command, every place.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.neighbours.calls import calls

PACKAGE = Path(__file__).parents[2] / "ftsupervise"

# Why a call without a bound cannot hold anybody.
TIMED = "its socket has a timeout (settimeout), or never blocks"
LOCAL = "asks the routing table, or a number: nothing is sent, no name is looked up"
BESIDE = "in a thread that nobody waits for without a bound"
SYSTEM = "starts a program of the system (sh, timeout, srun), which lies where our own interpreter does"
OURS = "starts our own interpreter, which lies where this process has come from"
SANDBOX = "the sandbox is on this host alone; its command has the bound that its parts have (cli/time_limit.py)"
ITS_CHILD = "in a child that answers one question, and is given up at its bound (rpc.py)"
OWN_LOCK = "a lock that this function has made in this moment"
TRAINING = "of the program that trains: torchft's groups have timeouts of their own"
PERSON = "goes on until a person ends it"

WAITS: dict[str, dict[str, str]] = {
    "snapshots/slots.py": {"_run": "a thread of its own waits for work; it is a daemon"},
    "snapshots/wait.py": {"wait": TIMED, "_connect": TIMED, "_opened": "it is made, and waits for nobody here"},
    "cli/output.py": {"show_through_a_pager": PERSON},
    "cli/status_live.py": {"run": PERSON},
    "guard/loaded_again.py": {"require": "the loop saves to the disk that is being read here: it would wait for that one too"},
    "guard/side_thread.py": {"__init__": OWN_LOCK, "_wait": "the thread itself waits for work", "do": OWN_LOCK},
    "snapshots/memory.py": {"_prepare": "the thread fills memory, and touches no disk"},
    "host/addresses.py": {"_ask": BESIDE, "_towards": LOCAL, "own_addresses": LOCAL},
    "host/plugins.py": {"installed": "selects from a list"},
    "host/ports.py": dict.fromkeys(("_is_free", "_chosen"), LOCAL),
    "drill/scene.py": {"launch": OURS},
    "doctor/inside.py": {
        "_ask_the_nodes": "it listens, and waits for nobody: to be connected is enough",
        "_close_each": "a thread of its own, which the end of the nodes' tasks wakes; it is a daemon",
    },
    "integrations/torch_dcp.py": {"__exit__": "the writer of the loop's own checkpoint: torch's save would wait as well"},
    "integrations/torchft.py": {"_agree": TRAINING},
    "integrations/torchft_mended.py": {
        "_reduced": TRAINING,
        "_work": "a thread of its own waits for work",
        "reduce": TRAINING,
        "wait": TRAINING,
    },
    "probe/__init__.py": {"__init__": OURS},
    "probe/own_process.py": {"asked": OURS},
    "probe/server.py": {"run": "this child exists for that", "_end": "this child exists for that"},
    "ranks/__main__.py": {"receive": TIMED, "_send_to": TIMED},
    "ranks/agent_pool.py": {"_start": SYSTEM},
    "ranks/evidence.py": dict.fromkeys(("ask", "_connected", "_answer"), TIMED),
    "ranks/protocol.py": {
        "udp": TIMED,
        "resolve": "the agent looks its supervisor up once, at its start: nobody waits for an agent without a bound",
    },
    "snapshots/exchange.py": {
        "_hear": "readable has said that something is there",
        "_serve": "a thread of its own for one rank, whose end closes the connection; it is a daemon",
        "accepted": "a thread of its own waits for peers, or for ranks; it is a daemon",
        **dict.fromkeys(("_send", "fill", "connect", "accept"), TIMED),
    },
    "snapshots/node.py": {"heard": TIMED, "give_up_damaged": ITS_CHILD, "keep": ITS_CHILD, "_fetch_all": ITS_CHILD},
    "replicas/members.py": {"look": TIMED, "_ask": TIMED, "store_answers": TIMED},
    "replicas/lighthouse.py": {"__init__": "a Python that has just answered within a bound (torchft_python.py)"},
    "run/fencing.py": {"__init__": SYSTEM},
    "replicas/process.py": {"start": OURS},
    "run/lines.py": {"_run": "a thread of its own waits for lines; nobody joins it without a bound"},
    "run/attempt.py": {"_start": OURS},
    "run/supervisor.py": {"_begin_beside": SYSTEM},
    "sandbox/cluster.py": {"_free": LOCAL, "_start": SANDBOX, "_database": SANDBOX},
    "sandbox/keeper.py": {"start": OURS, "follow": PERSON},
    "scheduler/allocation.py": {"_try": TIMED},
    "scheduler/local.py": {"_start": OURS, "_member": SYSTEM},
    "warm/client.py": {"hand_over": TIMED, "connect": TIMED, "follow": "a rank waits for itself: it ends as its child does"},
    "warm/sitecustomize.py": {
        "_start": "a standby before it is one: ranks wait for it within a bound, and start cold",
        "_announce": "the lock of a file that this function has just made, under a name that nobody guesses",
    },
    "warm/standby.py": {
        "_left_behind": "a child that only leaves",
        "_bad_fork": "a child that asks torch one thing",
        **dict.fromkeys(("__init__", "accept", "_accept", "_become"), TIMED),
    },
    "watch/watchdogs/disk.py": {"_start": SYSTEM},
}  # fmt: skip

# What a process that keeps the time of others does to a file all the same.
KERNEL = "a file of the kernel or a device"
ASIDE = "called in a child, or where the caller has a bound for it (time_limit._aside, watched)"
OF_HOST = "a folder on a disk of this host (host/local_disks.py)"
FRONT = "between two attempts: the process in front keeps the time (host/front.py)"
IN_TOUR = "in the child of the tour: its parent keeps the time"
ROSTER = "in the child that looks up which runs there are (watch/tour.py, watch/general.py)"
KEEPS_TIME: dict[str, dict[str, str]] = {
    "cli/__init__.py": {"_main": KERNEL},
    "cli/time_limit.py": dict.fromkeys(
        ("try_dry_run", "_has_terminal", "_one_output", "_waited_for_a_processor", "_begun_by"), KERNEL
    ),
    "cli/watch.py": {"_name_all": "no path: names in a list of runs"},
    "guard/guard.py": {},
    "guard/side_thread.py": {},
    "host/begin.py": {"_become": "in the child, before it is the program"},
    "host/bounded.py": {"_children": KERNEL, "run": KERNEL, "_is_endless": "a file in memory"},
    "host/front.py": dict.fromkeys(("follow", "_let_go"), KERNEL),
    "host/in_time.py": {},
    "host/pulse.py": {},
    "probe/__init__.py": {},
    "probe/own_process.py": {"_done": "in the child that is watched"},
    "probe/errand.py": {
        "_boot": KERNEL,
        "_child": KERNEL,
        **dict.fromkeys(("__init__", "write", "forget", "_all"), OF_HOST),
        "movements": KERNEL,
    },
    "ranks/__main__.py": {},
    "ranks/rpc.py": {},
    "run/attempt.py": {**dict.fromkeys(("_size", "_readable"), "asked by in_time"), "begin": FRONT},
    "run/command.py": {},
    "run/supervisor.py": dict.fromkeys(("_why_not", "_brake"), FRONT),
    "start.py": {"prepare": "Python itself looks there before a line of ours; not in a virtual environment"},
    "watch/tick.py": {**dict.fromkeys(("_of_storage", "_journal"), IN_TOUR), "_in_general": OF_HOST},
    "watch/roster.py": dict.fromkeys(
        ("target", "is_no_more", "_stamp", "listed", "directories", "_write", "_page"), ROSTER
    ),
    "watch/tour.py": dict.fromkeys(
        ("_check_directory", "append", "_append_locked", "_append", "_last_byte", "_lock"), IN_TOUR
    ) | {"__init__": OF_HOST},
}  # fmt: skip


def has(call: ast.Call, *names: str) -> bool:
    return any(word.arg is None or word.arg in names for word in call.keywords)


def waits(call: ast.Call) -> bool:
    """Whether the call may wait, and has no bound of its own."""
    called, text = call.func, ast.unparse(call)
    if isinstance(called, ast.Name):
        if called.id == "all_at_once":
            return len(call.args) < 3 and not has(call, "seconds")
        unbounded = ("Popen", "urlopen", "getaddrinfo", "create_connection")
        return called.id == "input" or (called.id in unbounded and not has(call, "timeout"))
    if not isinstance(called, ast.Attribute):
        return False
    of, name, bare = ast.unparse(called.value), called.attr, not call.args and not has(call, "timeout", "blocking")
    if of == "subprocess":
        runs = name in ("run", "call", "check_call", "check_output")
        return name == "Popen" or (runs and not has(call, "timeout"))
    if of == "os":
        spawns = name.startswith(("posix_spawn", "spawn", "popen")) or name == "system"
        return (
            spawns
            or name == "lockf"
            or (name in ("wait", "wait3", "wait4", "waitid", "waitpid") and "WNOHANG" not in text)
        )
    if of == "fcntl":
        return name in ("flock", "lockf") and not ("LOCK_NB" in text or "LOCK_UN" in text)
    if of == "signal":
        return name in ("pause", "sigwait", "sigwaitinfo")
    if of == "socket":
        looks_up = name in (
            "getaddrinfo",
            "gethostbyaddr",
            "gethostbyname",
            "gethostbyname_ex",
            "getfqdn",
            "getnameinfo",
        )
        return (
            looks_up
            or name == "socket"
            or (name == "create_connection" and len(call.args) < 2 and not has(call, "timeout"))
        )
    if of in ("requests", "session", "self._session"):
        return name in ("get", "post", "put", "request", "head", "delete") and not has(call, "timeout")
    if name in ("HTTPConnection", "HTTPSConnection", "SMTP", "SMTP_SSL", "urlopen"):
        return not has(call, "timeout")
    if name in ("accept", "connect", "recv", "recv_into", "recvfrom", "recvmsg", "sendall"):
        return True
    if name == "select":
        return len(call.args) < 4 if of == "select" else bare
    if name == "poll":
        return bare and "poll" in of.lower()
    return bare and name in ("acquire", "communicate", "get", "join", "wait")


OF_OS = frozenset(
    (
        *(
            "access",
            "chdir",
            "chmod",
            "fstat",
            "fsync",
            "getxattr",
            "link",
            "listdir",
            "listxattr",
            "lstat",
            "makedirs",
        ),
        *("mkdir", "open", "readlink", "remove", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink"),
        *("truncate", "unlink", "utime", "walk"),
    )
)
OF_PATHS = frozenset(
    (
        *(
            "exists",
            "expanduser",
            "glob",
            "hardlink_to",
            "is_dir",
            "is_file",
            "is_symlink",
            "iterdir",
            "lstat",
            "mkdir",
        ),
        *("owner", "read_bytes", "read_text", "readlink", "rename", "resolve", "rglob", "rmdir", "samefile", "stat"),
        *("symlink_to", "touch", "unlink", "write_bytes", "write_text"),
    )
)
OF_OTHERS = frozenset(("copytree", "flock", "lexists", "realpath", "rmtree"))
# The files by which all others open, judge and write: whoever calls a function of theirs that touches a disk touches one.
OPENERS = (
    "host/files.py",
    "host/links.py",
    "host/ownership.py",
    "rundir/fence.py",
    "rundir/paths.py",
    "rundir/records.py",
)
MODULES = frozenset(Path(one).stem for one in OPENERS)


@cache
def openers() -> frozenset[str]:
    """The functions of ``OPENERS`` that touch a disk, those too that call such a one."""
    inside = [one for name in OPENERS for one in calls(ast.parse((PACKAGE / name).read_text("utf-8")))]
    known = frozenset(function for function, call in inside if touches(call, frozenset()))
    while more := {function for function, call in inside if touches(call, known)} - known:
        known |= more
    return known


def touches(call: ast.Call, ours: frozenset[str] | None = None) -> bool:
    """Whether the call reads or writes a disk. ``ours``: functions of ours that do, by default ``openers``."""
    called = call.func
    ours = frozenset(one for one in openers() if not one.startswith("_")) if ours is None else ours
    if isinstance(called, ast.Name):
        return called.id == "open" or called.id in OF_OTHERS | ours
    if not isinstance(called, ast.Attribute):
        return False
    of = ast.unparse(called.value)
    if of in ("os", "os.path"):
        return called.attr in (
            OF_OS if of == "os" else ("exists", "getmtime", "getsize", "isdir", "isfile", "islink", "realpath")
        )
    return called.attr in OF_PATHS | OF_OTHERS or (of in MODULES and called.attr in ours)


@cache
def found(of: str) -> dict[str, dict[str, str]]:
    """file -> function -> the first of its calls of that kind."""
    is_one = {"waits": waits, "touches": touches}[of]
    files: dict[str, dict[str, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        here = files.setdefault(path.relative_to(PACKAGE).as_posix(), {})
        for function, call in calls(ast.parse(path.read_text("utf-8"))):
            if is_one(call):
                here.setdefault(function, f"{call.lineno}: {ast.unparse(call)[:90]}")
    return files


@pytest.mark.threat(
    "New code waits for a thread, a child, a lock or a socket without a bound, or a process that keeps the time of "
    "others reads a disk itself.",
    "A test walks the source and names it, unless it stands in a table with what ends it.",
)
def test_whoever_waits_without_a_bound_stands_in_the_table_with_what_ends_it() -> None:
    all_of = found("waits")
    new = [
        f"{f}:{call} in {one}"
        for f, here in all_of.items()
        for one, call in here.items()
        if one not in WAITS.get(f, {})
    ]
    gone = [f"{f}: {one}" for f, known in WAITS.items() for one in known if one not in all_of.get(f, {})]
    assert not new, "give it a bound, or say in WAITS what ends it:\n" + "\n".join(new)
    assert not gone, f"it has a bound now, so take it out of WAITS: {gone}"


def test_who_keeps_the_time_of_others_touches_no_disk() -> None:
    all_of = found("touches")
    known = KEEPS_TIME.items()
    new = [f"{f}:{call} in {one}" for f, names in known for one, call in all_of[f].items() if one not in names]
    gone = [f"{f}: {one}" for f, names in known for one in names if one not in all_of[f]]
    assert not new, "do it in a child or in in_time, or say in KEEPS_TIME why it cannot hang:\n" + "\n".join(new)
    assert not gone, f"no longer there, so take it out of KEEPS_TIME: {gone}"


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(words)",
        "subprocess.Popen(words)",
        "child.communicate()",
        "child.wait()",
        "os.waitpid(pid, 0)",
        "os.posix_spawn(path, words, env)",
        "thread.join()",
        "queue.get()",
        "lock.acquire()",
        "event.wait()",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "socket.getaddrinfo(name, 1)",
        "socket.create_connection(address)",
        "sock.recv(4096)",
        "requests.get(address)",
        "smtplib.SMTP(host)",
        "select.select([fd], [], [])",
        "poll.poll()",
        "all_at_once(work, of)",
        "input()",
    ],
)
def test_a_new_wait_is_found(line: str) -> None:
    assert any(waits(call) for _, call in calls(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(words, timeout=5)",
        "child.wait(5)",
        "os.waitpid(pid, os.WNOHANG)",
        "thread.join(2.0)",
        "all_at_once(work, of, 5.0)",
        "','.join(words)",
        "queue.get(timeout=1)",
        "settings.get('name')",
        "lock.acquire(timeout=1)",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "socket.create_connection(address, timeout=3)",
        "select.select([fd], [], [], 1.0)",
    ],
)
def test_what_has_a_bound_is_not(line: str) -> None:
    assert not any(waits(call) for _, call in calls(ast.parse(line)))
