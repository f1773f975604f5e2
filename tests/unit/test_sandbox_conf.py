"""What Slurm is told in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.errors import UsageError
from ftsupervise.sandbox import Shape
from ftsupervise.sandbox.cluster import PortTaken, explained
from ftsupervise.sandbox.conf import (
    LONGEST_ROOT,
    Layout,
    gres_conf,
    hosts_file,
    override,
    slurm_conf,
    slurmdbd_conf,
    span,
)

LAYOUT = Layout(Path("/tmp/lab"))


def conf(**shape: object) -> dict[str, str]:
    text = slurm_conf(Shape(**shape), LAYOUT, port=20000, user="ann", host="box")  # type: ignore[arg-type]
    lines = [line.split("=", 1) for line in text.splitlines()]
    assert len({key for key, _ in lines}) == len(lines), "a key given twice makes every command complain"
    return dict(lines)


def test_every_node_has_a_port_of_its_own_after_the_controllers() -> None:
    lines = conf(nodes=4)
    assert lines["SlurmctldPort"] == "20000"
    assert lines["NodeName"].startswith("node-[0-3] ") and " Port=[20002-20005] " in lines["NodeName"]


def test_one_node_is_not_written_as_a_range() -> None:
    assert conf(nodes=1)["NodeName"].startswith("node-0 NodeHostname=box NodeAddr=127.0.0.1 Port=20002 ")


def hosts_conf(**shape: object) -> str:
    return slurm_conf(Shape(hosts=True, **shape), LAYOUT, port=20000, user="ann", host="box", subnet="198.18.7")  # type: ignore[arg-type]


def test_hosts_are_told_apart_by_their_addresses_and_listen_on_one_port() -> None:
    text = hosts_conf(nodes=4, accounting=True)
    assert "SlurmctldHost=box(198.18.7.1)\n" in text and "AccountingStorageHost=198.18.7.1\n" in text
    assert "NodeName=node-[0-3] NodeHostname=node-[0-3] NodeAddr=198.18.7.[2-5] Port=20002 " in text
    assert "127.0.0.1" not in text
    assert "NodeName=node-0 NodeHostname=node-0 NodeAddr=198.18.7.2 Port=20002 " in hosts_conf(nodes=1)
    assert (Shape(hosts=True).ports, Shape().ports) == (3, 6)


def test_a_hosts_own_name_leads_to_itself_only_as_on_debian() -> None:
    text = hosts_file(Shape(nodes=3, hosts=True), "node-1", subnet="198.18.7", host="box")
    assert text.splitlines() == [
        "127.0.0.1 localhost",
        "127.0.1.1 node-1",
        "198.18.7.1 box",
        "198.18.7.2 node-0",
        "198.18.7.4 node-2",
    ]


def test_hosts_are_as_many_as_their_network_has_addresses() -> None:
    Shape(nodes=250, hosts=True)
    with pytest.raises(UsageError, match="a sandbox with hosts has at most 250 nodes, got 251"):
        Shape(nodes=251, hosts=True)


def test_nodes_have_the_processors_memory_and_gpus_they_were_asked_to_have() -> None:
    assert conf(cpus=8, memory=1000, gpus_per_node=2)["NodeName"].endswith(
        "CPUs=8 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
    )


def test_without_gpus_slurm_hears_nothing_of_gpus() -> None:
    lines = conf(gpus_per_node=0)
    assert "GresTypes" not in lines and "Gres" not in lines["NodeName"]


def test_gpus_are_files_since_a_bare_count_makes_the_node_invalid() -> None:
    assert gres_conf(Shape(), LAYOUT) == "NodeName=node-[0-3] Name=gpu File=/tmp/lab/dev/gpu[0-7] AutoDetect=off\n"


def test_an_override_replaces_the_line_with_its_key_whatever_its_case() -> None:
    lines = conf(overrides=("killwait=30", "PrologFlags=Alloc"))
    assert "KillWait" not in lines
    assert lines["killwait"] == "30" and lines["PrologFlags"] == "Alloc"


def test_a_second_override_of_a_key_wins_over_the_first() -> None:
    assert conf(overrides=("KillWait=30", "KillWait=40"))["KillWait"] == "40"


def test_partitions_can_be_added_without_losing_the_first() -> None:
    low = "PartitionName=low Nodes=node-[0-3] PriorityTier=1"
    assert override(["PartitionName=prod Nodes=x", "KillWait=2"], (low,)) == [
        "PartitionName=prod Nodes=x",
        "KillWait=2",
        low,
    ]


@pytest.mark.parametrize("line", ["KillWait", "=3", "KillWait=", "KillWait=3\nSlurmUser=root", "Kill Wait=3"])
def test_an_override_that_is_no_setting_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"expected a slurm\.conf setting"):
        Shape(overrides=(line,))


@pytest.mark.parametrize(("field", "value"), [("nodes", 0), ("nodes", 1000), ("cpus", 0), ("gpus_per_node", -1)])
def test_a_cluster_that_cannot_be_is_refused(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=field.split("_")[0]):
        Shape(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["/tmp/a b", "/tmp/a,b", "/tmp/a%n", "/tmp/a[0-3]", "/tmp/a#b", "/tmp/ä", "/tmp/a\nb"])
def test_a_directory_that_slurms_files_cannot_name_is_refused_with_the_character(name: str) -> None:
    with pytest.raises(UsageError, match="cannot live in") as caught:
        Layout(Path(name))
    assert "/tmp/lab" in caught.value.hint


def test_a_directory_too_long_for_unix_sockets_is_refused_with_the_limit() -> None:
    Layout(Path("/" + "a" * (LONGEST_ROOT - 1)))
    with pytest.raises(UsageError, match=r"61 characters are too many .*\(at most 60\)"):
        Layout(Path("/" + "a" * LONGEST_ROOT))


def test_accounting_names_the_munge_socket_where_slurmdbd_looks_for_it() -> None:
    lines = conf(accounting=True)
    assert lines["AccountingStoragePass"] == "/tmp/lab/munge/sock" and lines["AccountingStoragePort"] == "20001"
    assert "DbdPort=20001\n" in slurmdbd_conf(LAYOUT, port=20000, user="ann")


def test_a_range_of_one_is_a_name() -> None:
    assert (span("node-", 0, 1), span("node-", 0, 2), span("", 7, 3)) == ("node-0", "node-[0-1]", "[7-9]")


@pytest.mark.fault(
    "slurmdbd ends at its start (24.11 and 26.05 with MariaDB 11.8), or Slurm refuses the account nobody",
    "the sandbox does not wait for it and says what to do",
)
def test_last_words_of_daemons_that_are_known_say_what_to_do() -> None:
    """The words by which they are known; those of Slurm 26.05 were seen on Debian sid."""
    words = "slurmdbd: error: mysql_query failed: 5027 select @var := concat('')"
    clash = explained(f"slurmdbd ended: {words}", words)
    assert "known of Slurm 24.11 and 26.05 with MariaDB 11.8" in clash.message and "--accounting" in clash.hint
    nobody = explained("slurmctld ended: x", "slurmctld: fatal: Invalid user for SlurmUser nobody, ignored")
    assert "account" in nobody.hint
    assert isinstance(explained("slurmd ended", "bind: Address already in use"), PortTaken)
    assert explained("slurmd ended: odd", "odd").hint == ""
