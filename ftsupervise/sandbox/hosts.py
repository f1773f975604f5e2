"""Hosts for the nodes of a sandbox: for each a network namespace with an address and a cable, a host name, and a /dev/shm.

Without them all nodes are one host at 127.0.0.1, and what goes wrong only between hosts cannot be tried: an address found by
host name, a pulled cable, a power cut that closes no connection.

The namespaces have names (``ip netns``) that are made from the sandbox's directory, so ``down`` finds them whatever happened
to the record. A bridge in a namespace of its own joins them, out of reach of this machine's firewall; one interface of this
machine leads to it. Only root makes such names and interfaces: a namespace of our name is ours. The interface of our
name is ours if its other end is on our switch, and it is removed from that end only. The memory that a power cut takes,
/dev/shm, is a folder in this machine's /dev/shm, where anybody can make names: one that is not root's is not touched.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.errors import Error, NotFound, NotPermitted, Refused
from ftsupervise.sandbox import conf, place
from ftsupervise.sandbox.place import absent_programs, search_path

_NAMES = Path("/run/netns")  # where `ip netns` keeps the names; only root may write there
_INTERFACES = Path("/sys/class/net")
_MEMORY = Path("/dev/shm")
_RANGE = ipaddress.IPv4Network("198.18.0.0/15")  # RFC 2544: for trials between hosts, nobody's on the Internet
_SECONDS = 30.0  # for one call of ``ip``; the longest, for 250 nodes, takes one

# A shell sets the host name and the mounts of a node's host, and becomes its slurmd: only that and its children see them.
_ON_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /dev/shm && shift 3 && exec "$@"'


class SubnetTaken(Error):
    """Another command took our addresses between the choice and their use. Worth another try."""


def require_hosts() -> None:
    """Raise NotPermitted without root, NotFound without the programs, each in one sentence."""
    if os.geteuid() != 0:
        raise NotPermitted(
            "a sandbox with hosts needs root: it makes network namespaces and interfaces",
            hint="sudo ftsupervise sandbox up --hosts   or leave out --hosts: all nodes are one host then",
        )
    absent = absent_programs({"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"})
    if absent:
        raise NotFound(
            f"a sandbox with hosts needs {', '.join(absent)}",
            hint=f"install them: sudo apt-get install {' '.join(dict.fromkeys(absent.values()))}",
        )


def free_subnet() -> str:
    """Return the first three numbers of a /24 network of 198.18.0.0/15 to which no address or route of this machine leads."""
    there = _leads_to()
    free = [net for net in _RANGE.subnets(new_prefix=24) if not any(net.overlaps(other) for other in there)]
    if not free:
        raise Error(f"addresses or routes of this machine use all of {_RANGE}", hint="ip route show table all")
    return str(random.choice(free)[0]).rpartition(".")[0]


def _leads_to(*, without: str = "") -> list[ipaddress.IPv4Network]:
    """Return the networks to which an address or route leads, but those of the interface ``without``.

    Routes to a large part of the Internet (a default route, a VPN's two halves) give way to a nearer one.
    """
    routes = json.loads(_ip(["-4", "-json", "route", "show", "table", "all"]) or "[]")
    found = [
        ipaddress.IPv4Network(one["dst"]) for one in routes if one["dst"] != "default" and one.get("dev") != without
    ]
    return [network for network in found if network.prefixlen >= 8]


@dataclass(frozen=True)
class Network:
    """The hosts of the sandbox in the directory ``root``. Without a ``subnet`` it is good for looking and removing."""

    root: Path
    subnet: str = ""

    @property
    def interface(self) -> str:
        """Return the name of this machine's interface to the switch, with which the namespaces' names begin."""
        return "fts" + hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]

    @property
    def switch(self) -> str:
        return f"{self.interface}-switch"

    @property
    def memory(self) -> Path:
        """Return the folder in this machine's memory that has the hosts' own."""
        return _MEMORY / self.interface

    def namespace(self, node: str) -> str:
        return f"{self.interface}-{node}"

    def names(self) -> list[str]:
        """Return the namespaces that are there."""
        try:
            return sorted(path.name for path in _NAMES.glob(f"{self.interface}-*"))
        except OSError:
            return []

    def numbers(self) -> dict[tuple[int, int], str]:
        """Return the nodes by the numbers of their namespaces, as ``place.members`` wants them."""
        found = {}
        for name in self.names():
            if name != self.switch:
                try:
                    seen = (_NAMES / name).stat()
                except OSError:  # going
                    continue
                found[seen.st_dev, seen.st_ino] = name.removeprefix(f"{self.interface}-")
        return found

    def build(self, nodes: Sequence[str]) -> None:
        """Make the switch, this machine's end of it, and a host for each node.

        Raises Refused if an interface or a folder of this name is another's, SubnetTaken, and Error with the kernel's
        words.
        """
        if (_INTERFACES / self.interface).exists():
            raise Refused(
                f"this machine has an interface {self.interface}, which is not this sandbox's",
                hint="use another directory: --dir DIR",
            )
        self._ip([f"netns add {self.switch}"])  # first, and removed last: the rest is known by it
        try:
            self.memory.mkdir(0o755)
        except OSError as error:
            raise Refused(f"{self.memory} cannot be made: {error.strerror}", hint=f"ls -ld {self.memory}") from None
        self.memory.chmod(0o755)  # whatever the umask says
        self._ip(["link add switch type bridge", "link set switch up"], self.switch)
        self._ip([f"link add {self.interface} type veth peer name uplink netns {self.switch}"])
        self._ip(["link set uplink master switch", "link set uplink up"], self.switch)
        self._ip([f"addr add {conf.address(self.subnet)}/24 dev {self.interface}", f"link set {self.interface} up"])
        ours = ipaddress.IPv4Network(f"{self.subnet}.0/24")
        if any(ours.overlaps(other) for other in _leads_to(without=self.interface)):
            raise SubnetTaken(f"another command took the addresses {ours}")
        self._make(nodes)

    def boot(self, node: str) -> None:
        """Make the host of a node anew if a power cut took it, and put its cable in."""
        if self.namespace(node) not in self.names():
            self._make([node])
        else:
            self.cable(node, "up")

    def cable(self, node: str, way: str) -> None:
        """Put the cable of a node in ("up") or pull it ("down"). Its address stays, as on a real host."""
        self._ip([f"link set {node} {way}"], self.switch)

    def power_off(self, node: str) -> None:
        """Remove the host of a node whose cable is out and whose processes have ended.

        Connections that its kernel would still close are lost with it, as in a power cut.
        """
        self._ip([f"link del {node}"], self.switch)
        self._ip([f"netns del {self.namespace(node)}"])
        shutil.rmtree(self.memory / node, ignore_errors=True)

    def remove(self) -> None:
        """Remove all that is there. Its processes have ended before; what another account runs there loses its network."""
        names = self.names()
        if not names or os.geteuid() != 0:
            return
        try:
            if self.memory.lstat().st_uid == 0:
                shutil.rmtree(self.memory, ignore_errors=True)  # it follows no link
        except OSError:  # none
            pass
        if self.switch in names:
            # now, not when the kernel comes to it: an interface of this name must be gone when this returns
            self._ip(["link del uplink"], self.switch, forgive=True)
        self._ip([f"netns del {name}" for name in names], forgive=True)

    def unheard(self) -> str:
        """Return what to check where the nodes do not reach slurmctld."""
        return f"a firewall of this machine may refuse what comes in at {self.interface}: nft list ruleset"

    def enter(self, node: str, hosts: Path) -> list[str]:
        """Return the words before a command that runs it on the host of ``node``, with the file ``hosts`` as /etc/hosts."""
        own = ["unshare", "--mount", "--propagation", "slave", "--uts", "sh", "-c", _ON_HOST]
        seen = [node, str(hosts), str(self.memory / node)]
        return ["nsenter", f"--net={_NAMES / self.namespace(node)}", *own, "sh", *seen]

    def _make(self, nodes: Sequence[str]) -> None:
        addresses = {node: conf.address(self.subnet, node) for node in nodes}
        for node in nodes:
            (self.memory / node).mkdir()
            (self.memory / node).chmod(0o1777)
        self._ip([f"netns add {self.namespace(node)}" for node in nodes])
        self._ip(
            [
                f"link add {node} netns {self.switch} type veth"
                f" peer name eth0 address {_hardware(address)} netns {self.namespace(node)}"
                for node, address in addresses.items()
            ]
        )
        for node, address in addresses.items():
            lines = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
            self._ip(lines, self.namespace(node))
        self._ip([f"link set {node} master switch up" for node in nodes], self.switch)

    def _ip(self, lines: Iterable[str], namespace: str = "", *, forgive: bool = False) -> None:
        """Run commands of ``ip``. They carry the sandbox's mark: ``down`` ends those of an ``up`` that was killed."""
        more = {"SLURM_CONF": str(conf.Layout(self.root).slurm_conf), place.MARK: str(self.root)}
        words = [*(["-netns", namespace] if namespace else []), *(["-force"] if forgive else []), "-batch", "-"]
        _ip(words, "\n".join(lines) + "\n", more, forgive=forgive)


def _hardware(address: str) -> str:
    """Return a hardware address that a host keeps over a power cut: other hosts remember it for a while."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _ip(words: Sequence[str], lines: str = "", more: dict[str, str] | None = None, *, forgive: bool = False) -> str:
    env = {"PATH": search_path(), "LC_ALL": "C", **(more or {})}
    try:
        done = subprocess.run(["ip", *words], input=lines, capture_output=True, text=True, timeout=_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        raise Error(f"ip gave no answer within {_SECONDS:.0f} s") from None
    if done.returncode and not forgive:
        said = " / ".join(line for line in done.stderr.splitlines() if not line.startswith("Command failed"))
        raise Error(
            f"the hosts of the sandbox could not be made: ip: {said}",
            hint="a container may refuse network namespaces: leave out --hosts, and all nodes are one host",
        )
    return done.stdout
