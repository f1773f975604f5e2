"""Other accounts are on the machine: three rules hold for every file, and this walks the source for who goes past them.

- The path that is really used: files and folders are made by ``ROOMS``, which follow no link, wait for no FIFO and set the
  mode. Whoever makes, opens to write, moves or removes by itself stands in a table, with the reason why no stranger gains by
  it.
- Never wider than the source: whoever sets rights by itself stands there too.
- Authority: whoever reads settings of a run, or acts for one, asks whose they are.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from ftsupervise.cli import COMMANDS
from tests.neighbours.calls import calls

PACKAGE = Path(__file__).parents[2] / "ftsupervise"

# The rooms that apply the rule of the path and that of the rights.
ROOMS = frozenset(
    (
        "host/files.py",
        "host/links.py",
        "host/ownership.py",
        "host/memory.py",
        "rundir/paths.py",
        "rundir/fence.py",
    )
)

# Why a stranger gains nothing where the call stands outside of the rooms.
RUN = "in the run directory, which is the one that was launched (rundir/pinned.py), and where only its owner writes"
SHARED = "in a folder that the group may write: its own entry only, by name; a link is removed and not followed"
TYPED = "in a run that was named by a person: cli/ has refused a link of another account on the way (refuse_link)"
HELD = "in a folder that is held open: it was judged, and cannot be exchanged (ownership.held)"
STATE = "in the account's own state directory, 0700 (make_own)"
CRON = "in the folder of cron, whose owner and whole way are judged before (crontab/installation.py)"
PRIVATE = "in a folder of this host that is this account's alone (is_private, private_folder)"
STAGED = "in a staging area of the account's own, before it becomes a checkpoint"
JUDGED = "in a folder of checkpoints that is judged before anything is saved there (_require_trusted, refuse_link)"
SANDBOX = "in the sandbox's folder, which is judged before anything is made there (sandbox/place.py)"
DEVICE = "a device or a file of the kernel"
OWN = "the descriptor of a file that this function has just made"
NARROWER = "takes rights away"
SAME = "has the rights of the file that it was made from, and stands beside it"


class Past(NamedTuple):
    """The functions of a file that go past the rooms, and why they may."""

    functions: str
    why: str


PAST: dict[str, tuple[Past, ...]] = {
    "alerts/journal.py": (Past("_link _commit _prune _sweep", HELD),),
    "checkpoints/commit.py": (Past("_replace", STAGED),),
    "snapshots/room.py": (Past("_empty", PRIVATE),),
    "snapshots/kept.py": (Past("remove", HELD),),
    "snapshots/keeper.py": (Past("prepare", STAGED),),
    "snapshots/slots.py": (Past("open_slots create_slots", PRIVATE), Past("__init__", PRIVATE),),
    "snapshots/wait.py": (Past("listen", PRIVATE),),
    "checkpoints/previous.py": (Past("keep", SAME),),
    "checkpoints/quarantine.py": (Past("_move", JUDGED),),
    "checkpoints/restore.py": (
        Past("restore _begin_anew _move_over _make_link _drop_links _drop_others _as_old_as_it_is", JUDGED),
    ),
    "checkpoints/retain.py": (Past("remove _delete", HELD),),
    "checkpoints/rank_lists.py": (Past("forget clear_older enter leave fail remove_lists", STAGED),),
    "checkpoints/part_files.py": (
        Past("finish discard _open", "a part of a copy: no link is followed, and only a file of ours alone is gone on with"),
    ),
    "checkpoints/stores.py": (Past("remove", "half of a copy that this command has begun, in a place that was typed or set"),),
    "checkpoints/written.py": (Past("keep _copy _link _remove", HELD),),
    "cli/__init__.py": (Past("_main", DEVICE),),
    "cli/completion.py": (Past("answer_the_shell", DEVICE),),
    "cli/forget.py": (Past("_forget", STATE),),
    "cli/output.py": (Past("bar_console", "no path: the standard error that it has"),),
    "cli/time_limit.py": (Past("try_dry_run _has_terminal", DEVICE),),
    "host/front.py": (Past("_let_go", DEVICE),),
    "cli/watch.py": (Past("_name_all", "no path: names in a list of runs"),),
    "config/believed.py": (Past("_remember", STATE),),
    "crontab/dispatch.py": (Past("_begin", "mkdtemp: a name that nobody guesses, 0700"),),
    "crontab/history.py": (Past("mark_ensured prune_slots claim_run _point_to prune_runs", CRON),),
    "crontab/installation.py": (Past("write_installed", CRON),),
    "crontab/keepalive.py": (Past("_first_to_revive", CRON),),
    "crontab/tick.py": (Past("_prune_logs", CRON),),
    "guard/checkpoint.py": (
        Past("list_own _take_away", JUDGED),
        Past("_close_to_others", NARROWER),
    ),
    "guard/heartbeat.py": (Past("answer_with_the_stack", PRIVATE),),
    "guard/loop_state.py": (Past("write_loop_file", STAGED),),
    "guard/snapshots.py": (Past("staging unpack", PRIVATE),),
    "snapshots/memory.py": (Past("remove _make", PRIVATE),),
    "host/bounded.py": (Past("run", DEVICE),),
    "host/memory.py": (Past("_open_level", DEVICE),),
    "integrations/huggingface.py": (Past("throw_away", STAGED),),
    "launch/folders.py": (Past("_give", "gives a folder of this account's own, which is held, to a group that is named"),),
    "launch/submit.py": (Past("register", STATE), Past("submit _claim", RUN)),
    "drill/play.py": (Past("keep_what_is_left", HELD),),
    "drill/rows.py": (Past("_flip_bits", PRIVATE),),
    "doctor/here.py": (Past("_write_as_a_run", OWN),),
    "doctor/trial.py": (Past("_take_away", HELD),),
    "nodes/incidents.py": (Past("set_override forget", SHARED),),
    "probe/errand.py": (Past("_child", DEVICE), Past("forget", PRIVATE)),
    "probe/server.py": (Past("clock", "a file of an unguessable name, made exclusively and removed again"),),
    "ranks/shm_dir.py": (Past("__init__ _sweep close", PRIVATE),),
    "snapshots/exchange.py": (Past("drop_old", PRIVATE),),
    "replicas/record.py": (Past("_claim", RUN),),
    "run/guard_folder.py": (Past("_drop_old", HELD),),
    "run/gate.py": (Past("_probe", OWN), Past("_close_output", NARROWER)),
    "ranks/evidence.py": (
        Past("_write_into", "two bytes into a pipe, which must be this account's: no link is followed, no file is written"),
    ),
    "rundir/progress_writer.py": (Past("_touch", "sets a time, of a file and not of what a link leads to"),),
    "rundir/heartbeat_page.py": (Past("__init__ ends", PRIVATE), Past("remove_watcher remove_watchers", SHARED)),
       "rundir/ledger.py": (Past("give_back", HELD),),
    "rundir/live_look.py": (Past("begin_answer", HELD),),
    "rundir/lineage.py": (Past("_make", RUN),),
    "rundir/members.py": (Past("forget_all _write", HELD),),
    "rundir/switches.py": (Past("put_back", SHARED), Past("clear_answered release_brake", HELD)),
    "sandbox/cluster.py": (
        Past("_write_files link start_slurmds start_accounting _install _start", SANDBOX),
        Past("build _make power_off remove", SANDBOX),
    ),
    "sandbox/place.py": (Past("make folder alone write_new clear leave", SANDBOX),),
    "sandbox/keeper.py": (Past("remove_folder", PRIVATE),),
    "scheduler/local.py": (Past("_claim release", STATE), Past("main _back_in_the_queue", STATE), Past("_file", DEVICE),),
    "warm/standby.py": (
        Past("__init__ _check_bounds _leave", PRIVATE),
        Past("_fresh_standard_files", "descriptors that the rank has already"),
        Past("_set_oom", DEVICE),
    ),
    "warm/sitecustomize.py": (Past("_announce", PRIVATE),),
    "watch/tour.py": (Past("_append_locked", HELD),),
}  # fmt: skip

# Calls that make, move, remove or give rights by a name. ``os.replace`` and ``Path.replace`` are told from ``str.replace``.
OS = frozenset(
    (
        *(
            "mkdir",
            "makedirs",
            "mkfifo",
            "mknod",
            "link",
            "symlink",
            "rename",
            "renames",
            "replace",
            "unlink",
            "remove",
        ),
        *(
            "rmdir",
            "removedirs",
            "truncate",
            "utime",
            "chmod",
            "lchmod",
            "fchmod",
            "chown",
            "lchown",
            "fchown",
            "setxattr",
        ),
    )
)
SHUTIL = frozenset(
    (
        *("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "copymode", "copystat", "chown", "make_archive"),
        *("unpack_archive",),
    )
)
PATH = frozenset(
    (
        *("mkdir", "write_text", "write_bytes", "touch", "chmod", "lchmod", "rename", "unlink", "rmdir", "symlink_to"),
        *("hardlink_to", "copy_into", "move_into"),
    )
)


def mode_of(call: ast.Call, at: int) -> ast.expr | None:
    """The mode of an ``open``, which is its argument number ``at``."""
    if len(call.args) > at:
        return call.args[at]
    return next((word.value for word in call.keywords if word.arg == "mode"), None)


def writes_by(mode: ast.expr | None) -> bool:
    """Whether a file is written that is opened so; a mode that is no literal may be any."""
    if mode is None:
        return False
    return not isinstance(mode, ast.Constant) or bool(set("wax+").intersection(str(mode.value)))


def past_the_rooms(call: ast.Call) -> bool:
    """Whether the call makes, opens to write, moves, removes or gives rights by itself."""
    called = call.func
    if isinstance(called, ast.Name):
        return called.id == "open" and writes_by(mode_of(call, 1))
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value.id if isinstance(called.value, ast.Name) else ""
    if owner == "os" and called.attr == "open":
        names = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        return not names & {"O_RDONLY", "O_PATH"} or bool(names & {"O_CREAT", "O_WRONLY", "O_RDWR"})
    if owner in ("io", "codecs", "gzip", "bz2", "lzma", "tarfile", "zipfile") and called.attr in ("open", "ZipFile"):
        return writes_by(mode_of(call, 1))
    if owner in ("os", "shutil", "tempfile"):
        return {"os": called.attr in OS, "shutil": called.attr in SHUTIL, "tempfile": called.attr != "gettempdir"}[
            owner
        ]
    if called.attr == "open":
        first = call.args[0] if call.args else mode_of(call, 0)
        return isinstance(first, ast.Constant) and len(str(first.value)) < 4 and writes_by(first)
    if called.attr == "replace":
        return len(call.args) == 1 and not call.keywords
    return called.attr in PATH


def found_in(tree: ast.Module) -> dict[str, str]:
    """function -> the first of its calls that goes past the rooms."""
    found: dict[str, str] = {}
    for function, call in calls(tree):
        if past_the_rooms(call):
            found.setdefault(function, f"{call.lineno}: {ast.unparse(call)}")
    return found


@cache
def sources() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


@pytest.mark.threat(
    "New code makes, opens to write, moves or removes a file, or sets rights, without the functions that apply the "
    "rules.",
    "A test walks the source and names it, unless it stands in a table with the reason.",
)
def test_whoever_writes_past_the_rooms_stands_in_the_table_with_a_reason() -> None:
    unknown, gone = [], []
    for file, tree in sources().items():
        if file in ROOMS:
            continue
        known = {function for past in PAST.get(file, ()) for function in past.functions.split()}
        found = found_in(tree)
        unknown += [f"{file}:{call} in {function}" for function, call in found.items() if function not in known]
        gone += [f"{file}: {function}" for function in known - found.keys()]
    assert not unknown, (
        "make it by files, modes or write_whole, or say in PAST why no stranger gains by it:\n" + "\n".join(unknown)
    )
    assert not gone, f"no longer past the rooms, so take it out of PAST: {gone}"
    assert PAST.keys() <= sources().keys()


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, how)",
        "os.open(path, os.O_WRONLY)",
        "os.open(path, os.O_RDWR | os.O_CREAT, 0o600)",
        "os.open(path, flags)",
        "path.open('x')",
        "path.write_text(text)",
        "path.write_bytes(raw)",
        "path.touch()",
        "path.mkdir(parents=True)",
        "os.makedirs(path)",
        "path.chmod(0o755)",
        "os.chmod(path, 0o755)",
        "os.fchmod(fd, 0o755)",
        "os.chown(path, 0, 0)",
        "os.replace(one, other)",
        "one.replace(other)",
        "one.rename(other)",
        "shutil.copytree(one, other)",
        "shutil.copy2(one, other)",
        "shutil.move(one, other)",
        "shutil.rmtree(path)",
        "path.unlink()",
        "os.link(one, other)",
        "path.symlink_to(other)",
        "tempfile.NamedTemporaryFile()",
        "tarfile.open(path, 'w')",
    ],
)
def test_a_new_one_is_found(line: str) -> None:
    assert found_in(ast.parse(f"def new(path):\n    {line}\n")).keys() == {"new"}


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "os.open(path, os.O_RDONLY)",
        "text.replace('a', 'b')",
        "files.create_new(path)",
    ],
)
def test_what_only_reads_and_what_goes_through_the_rooms_is_not(line: str) -> None:
    assert found_in(ast.parse(f"def new(path):\n    {line}\n")) == {}


# -------------------------------------------------------------------------------------------------------------- authority

# Who reads the settings of a run without ``load_to_act``, and what it does with them.
SHOWS = {
    "config/believed.py": "the rule itself",
    "config/find_run.py": "which run, and which cron folder: what others may write leads to none of ours elsewhere",
    "cli/plan.py": "to change a file of one's own, and to check what it is about to write: nothing in it is run",
    "cli/config.py": "for a watch and to show: what acts is held back; each command that acts takes load_to_act",
    "cli/init.py": "to check what it has just written itself: nothing in it is run",
    "config/checkpoint_place.py": "what another account wrote is only shown: refuse_held",
    "cli/doctor.py": "looks: what acts is held back, another account's Python is not asked; --probe takes load_to_act",
    "watch/roster.py": "a watch: what acts is held back",
    "report/everything.py": "a report: paths of this account are left out",
    "report/mail.py": "whom a report goes to: another account's receivers are held back, its own stand in",
}
# The commands that act for a run: what each asks before.
ASKS = {
    "config/checkpoint_place.py": {
        "require_launched",
        "refuse_link",
    },  # ``place_of(acts=True)``, by which all that act find the folder
    "cli/checkpoint_upkeep.py": {
        "place_of",
        "refuse_held",
        "require_launched",
        "held",
    },
    "launch/switching.py": {"refuse_link"},  # ``runs_to_switch``, for save, kill, clear and observe, and for Python
    "interface/looks.py": {"runs_to_switch", "load_to_act"},
    "cli/nodes.py": {"refuse_link"},
    "diagnosis/live.py": {"held"},  # the question to the supervisor, which ``diagnose`` leaves in a run that goes on
    "report/everything.py": {"require"},  # ``read_report``, by which each page of a run is made
    "cli/plan.py": {"settings_of_launch", "distrust"},
    "cli/plan_values.py": {"require"},
    "replicas/options.py": {"refuse_link"},
    "report/alert_list.py": {"refuse_link"},
    "alerts/journal.py": {"strangers_link"},
    "launch/submit.py": {"require_own", "strangers_link"},
    "launch/folders.py": {"require_own"},
    "run/gate.py": {"refuse"},
    "replicas/apart.py": {"refuse"},
}
# The commands of click's table that write nothing for a run, and those whose asking is above, or that act for no run of others.
READ_ONLY = frozenset(("check", "completion", "config", "doctor", "help", "list", "logs", "status", "version", "watch"))
ACTS = {
    "alerts": "report/alert_list.py",
    "checkpoints": "config/checkpoint_place.py",
    "clear": "launch/switching.py",
    "diagnose": "diagnosis/live.py",
    "kill": "launch/switching.py",
    "save": "launch/switching.py",
    "observe": "launch/switching.py",
    "nodes": "cli/nodes.py",
    "groups": "replicas/options.py",
    "launch": "launch/submit.py",
    "report": "report/everything.py",
    "plan": "cli/plan.py",
    "simulate": "cli/plan_values.py",
    "run": "run/gate.py",
}
OWN_ONLY = frozenset(
    ("cron", "drill", "forget", "init", "metrics", "notify", "sandbox")
)  # the account's own state, files and sandbox; drill and init --try act by settings_to_act_on, on a copy


# What a person names on the command line may lie where others write, and minutes may lie between the name and the writing.
NAMED = {
    "cli/init.py": Past("_try", STATE),
}


def test_a_file_that_a_person_has_named_is_written_where_its_way_was_judged() -> None:
    """The command line writes by ``write_named`` and ``own_file.write_back``, which hold the folder open."""
    found: dict[str, str] = {}
    for file, tree in sources().items():
        if not file.startswith("cli/"):
            continue
        for function, call in calls(tree):
            writes = isinstance(call.func, ast.Name) and call.func.id in ("write_whole", "make_folder", "as_page")
            if writes and function not in found.get(file, ""):
                found[file] = f"{found.get(file, '')} {function}".strip()
    assert found == {file: one.functions for file, one in NAMED.items()}


def test_no_link_is_followed_that_was_not_judged() -> None:
    """A file that somebody has named is opened by ``ownership.open_judged``: others follow a link where it is said why."""
    known = {
        "host/ownership.py": "what it has judged, by the descriptor",
        "checkpoints/layouts.py": "a shard of a checkpoint whose folder was judged: its last bytes, of which nothing is shown",
        "checkpoints/stores.py": "a part of a copy, whose folder is held open",
        "nodes/selector.py": "the script of a command of one's own, in which words are looked for",
        "replicas/torchft_python.py": "the first line of a program on PATH",
    }
    found = set()
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                opens = node.func.attr in ("open_regular", "reopened", "read_bounded")
                if opens and any(one.arg == "follow" for one in node.keywords):
                    found.add(file)
    assert found == known.keys()


_TYPED = re.compile(r"(?:^|[\s(:;`])(?:ls -\w+|rm(?: -\w+)?|rmdir|chmod \S+|cp|mv|cat|findmnt -T|tail -f) $")

_AS_A_SHELL_TAKES_IT = re.compile("quote|to_type|_globbed")


def test_a_command_to_type_holds_no_path_as_another_account_has_named_it() -> None:
    """What a person is told to type is copied: a folder may be called ``x;curl …``."""
    found = []
    for file, tree in sources().items():
        for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
            for before, value in pairwise(text.values):
                says = isinstance(before, ast.Constant) and _TYPED.search(str(before.value))
                if not says or not isinstance(value, ast.FormattedValue):
                    continue
                word = ast.unparse(value.value)
                plain = file.startswith("crontab/") and word == "name"  # of an entry: letters, digits and _ . + -
                if not (plain or _AS_A_SHELL_TAKES_IT.search(word) or is_quoted(word, tree)):
                    found.append(f"{file}:{value.lineno}: {word}")
    assert not found


def is_quoted(name: str, tree: ast.Module) -> bool:
    """Whether the value that has this name somewhere in the file is a quoted one."""
    given = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return any(
        isinstance(target, ast.Name) and target.id == name and _AS_A_SHELL_TAKES_IT.search(ast.unparse(node.value))
        for node in given
        for target in node.targets
    )


def test_whoever_reads_the_settings_of_a_run_asks_whose_they_are() -> None:
    readers = {"load", "loads", "loaded", "load_believed", "read_bytes", "safe_load"}
    whole = {"believed.load_believed", "load.load", "sources.read_bytes", "yaml.safe_load"}
    of = {"ftsupervise.config.load", "ftsupervise.config.believed", "ftsupervise.config.sources", "yaml"}
    found = set()
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in of and readers & {one.name for one in node.names}:
                found.add(file)
            if isinstance(node, ast.Attribute) and ast.unparse(node) in whole:
                found.add(file)
    assert found == SHOWS.keys()


def test_whoever_acts_for_a_run_asks_before() -> None:
    for file, asks in ASKS.items():
        named = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(sources()[file])
            if isinstance(node, ast.Attribute | ast.Name)
        }
        assert asks <= named, f"{file} no longer asks: {asks - named}"


@pytest.mark.threat(
    "New code acts by the settings of a run, or for one, without asking whose it is; or a new command does.",
    "A test walks the source and the table of commands.",
)
def test_every_command_is_known_to_show_or_to_ask() -> None:
    assert COMMANDS.keys() == READ_ONLY | OWN_ONLY | ACTS.keys()
    assert set(ACTS.values()) <= ASKS.keys()
