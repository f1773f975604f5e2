"""Where the next attempt is started: srun's words and node states in, srun's words out."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from ftsupervise.host.addresses import Names
from ftsupervise.nodes.selector import Placement, place, text_of, wanted
from ftsupervise.scheduler.allocation import addresses, silent
from ftsupervise.scheduler.parse import is_away

SRUN = ("srun", "--kill-on-bad-exit=1", "--nodes=2", "python", "-N", "9")
NODES = ("node-0", "node-1", "node-2")


@pytest.mark.parametrize(
    ("command", "nodes"),
    [(SRUN, 2), (("srun", "-N2", "x"), 2), (("srun", "-N", "2", "x"), 2), (("srun", "x", "-N1"), 3), (("python",), 3)],
)
def test_srun_says_how_many_nodes_it_wants(command: tuple[str, ...], nodes: int) -> None:
    assert wanted(command, 3) == nodes


def test_a_spare_takes_the_place_of_a_node_that_is_down() -> None:
    found = place(SRUN, NODES, {"node-0": "mixed", "node-1": "down*", "node-2": "mixed"}, {})
    assert found.nodes == ("node-0", "node-2")
    assert found.command[:2] == ("srun", "--nodelist=node-[0,2]")


def test_a_node_with_a_past_and_one_that_drains_are_taken_last() -> None:
    assert place(SRUN, NODES, {}, {"node-0": 1}).nodes == ("node-1", "node-2")
    assert place(SRUN, NODES, {"node-1": "draining"}, {}).nodes == ("node-0", "node-2")
    assert place(SRUN, NODES[:2], {"node-1": "draining"}, {}).nodes == ("node-0", "node-1")


def test_a_script_that_takes_its_nodes_from_the_environment_is_given_those_that_are_well(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("cd here\nsrun -n 8 --nodes=2 --nodelist=$FTSUPERVISE_NODES python train.py")
    command = ("bash", str(script))
    found = place(command, NODES, {"node-1": "down*"}, {}, text=text_of(command))
    assert found.nodes == ("node-0", "node-2")
    assert found.command == command
    assert place(command, NODES, {}, {"node-0": 1}, text=text_of(command)).nodes == ("node-1", "node-2")
    typed = ("bash", "-c", "srun --nodelist=$FTSUPERVISE_NODES train")
    assert place(typed, NODES, {}, {}, text=text_of(typed)).nodes == NODES
    assert place(typed, NODES, {"node-1": "down"}, {}, text=text_of(typed)).short


def test_a_script_that_does_not_is_not_started_beside_a_node_that_is_gone() -> None:
    command = ("bash", "-c", "srun -N2 train")
    assert place(command, NODES, {"node-1": "mixed"}, {}, text=text_of(command)).nodes == NODES
    short = place(command, NODES, {"node-1": "down*"}, {}, text=text_of(command)).short
    assert short == (
        "2 of 3 nodes are left (node-1 is down*); the command does not take its nodes from $FTSUPERVISE_NODES"
    )


def test_a_command_that_can_run_on_fewer_nodes_shrinks_and_grows_with_them() -> None:
    command = ("srun", "--nodes=3", "--ntasks=6", "--", "torchrun", "train.py")
    down = {"node-1": "down*", "node-2": "mixed", "node-0": "mixed"}
    fewer = place(command, NODES, down, {}, least=1)
    assert fewer.nodes == ("node-0", "node-2")
    shrunk = ("--nodes=2", "--ntasks=4", "--", "torchrun", "train.py")
    assert fewer.command == ("srun", "--nodelist=node-[0,2]", "--nodes=3", "--ntasks=6", *shrunk)
    assert place(command, NODES, {}, {}, least=1) == Placement(command, NODES)
    alone = place(command, NODES, {**down, "node-0": "down"}, {}, least=2)
    assert alone.short == "1 of 2 nodes are left (node-0 is down, node-1 is down*)"
    free = place(("srun", "python", "train.py"), NODES, down, {}, least=2)
    assert free.command == ("srun", "--nodelist=node-[0,2]", "--nodes=2", "python", "train.py")


def test_too_few_nodes_are_said_by_name() -> None:
    found = place(SRUN, NODES[:2], {"node-1": "silent*"}, {})
    assert found.short == "1 of 2 nodes are left (node-1 is silent*)"


def test_what_a_person_chose_and_what_is_no_srun_stay_as_they_are() -> None:
    own = ("srun", "-w", "node-0", "x")
    assert place(own, NODES, {}, {}).command == own
    assert place(("torchrun", "x"), NODES, {"node-1": "down"}, {}).command == ("torchrun", "x")
    whole = ("srun", "x")
    assert place(whole, NODES, {}, {}).command == whole


@pytest.mark.parametrize(
    ("state", "away"),
    [("mixed", False), ("allocated", False), ("draining", False), ("drained", True), ("down*", True), ("mixed*", True),
     ("failing", False), ("fail", True), ("", False), ("idle", False)],
)  # fmt: skip
def test_states_as_sinfo_says_them(state: str, away: bool) -> None:
    assert is_away(state) is away


def test_addresses_are_read_as_scontrol_shows_them() -> None:
    shown = (
        "NodeName=node-0 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=a Port=18003 Version=22.05\n"
        "NodeName=node-1 Arch=x86_64 NodeAddr=b NodeHostName=b\n"
    )
    assert addresses(shown, 6818) == {"node-0": ("10.0.0.1", 18003), "node-1": ("b", 6818)}


def test_who_refuses_is_silent_but_never_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        lives = ("127.0.0.1", one.getsockname()[1])
        dead = ("127.0.0.1", other.getsockname()[1])
        other.close()
        assert silent({"a": lives, "b": dead}, 1.0) == ("b",)
        assert silent({"b": dead}, 1.0) == ()


def test_a_name_server_that_is_slow_holds_the_question_up_once_and_only_for_its_bound() -> None:
    """Four names at 1.5 s each took 6 s at every restart, name after name."""

    def slowly(name: str) -> str:
        time.sleep(0.3 if name != "never" else 3600)
        return "" if name == "unknown" else "127.0.0.1"

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, dead = one.getsockname()[1], other.getsockname()[1]
        other.close()
        where = {name: (name, port) for name in ("a", "b", "c", "unknown", "never")} | {"d": ("d", dead)}
        names, began = Names(slowly), time.monotonic()
        assert silent(where, 1.0, names) == ("d",), "of a name without an address nothing is known"
        assert 0.3 <= time.monotonic() - began < 1.2, "all at once, within the bound"
        began = time.monotonic()
        assert silent(where, 1.0, names) == ("d",)
        assert time.monotonic() - began < 0.9, "what was not known in time is not waited for again"


def test_when_no_node_can_be_looked_up_none_is_silent() -> None:
    assert silent({"a": ("a", 1), "b": ("b", 1)}, 1.0, Names(lambda name: "")) == ()
