"""One cluster: up, down, and the actions between."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ftsupervise.errors import AlreadyRunning, Error, NotFound, NotPermitted, Refused, SchedulerUnavailable
from ftsupervise.host.ownership import user_name
from ftsupervise.host.processes import Process, signal_exactly, wait_gone
from ftsupervise.printable import to_type
from ftsupervise.sandbox import conf, place
from ftsupervise.sandbox.conf import Layout, Shape
from ftsupervise.sandbox.place import MARK, MARK_NODE, absent_programs, find_program, libraries, search_path

# Hosts for the nodes of a sandbox: for each a network namespace with an address and a cable, a host name, and a /dev/shm.
#
# Without them all nodes are one host at 127.0.0.1, and what goes wrong only between hosts cannot be tried: an address found by
# host name, a pulled cable, a power cut that closes no connection.
#
# The namespaces have names (``ip netns``) that are made from the sandbox's directory, so ``down`` finds them whatever happened
# to the record. A bridge in a namespace of its own joins them, out of reach of this machine's firewall; one interface of this
# machine leads to it. Only root makes such names and interfaces: a namespace of our name is ours. The interface of our
# name is ours if its other end is on our switch, and it is removed from that end only. The memory that a power cut takes,
# /dev/shm, is a folder in this machine's /dev/shm, where anybody can make names: one that is not root's is not touched.

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
            raise Refused(
                f"{self.memory} cannot be made: {error.strerror}", hint=f"ls -ld {to_type(self.memory)}"
            ) from None
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


# ------------------------------------------------------------------------------------------


# Starts the sandbox's daemons. Each start is bounded, and a failure shows the daemon's own last words.
#
# Daemons get a small environment of their own: not one variable of an outer Slurm job may reach them. They carry a mark
# in it, by which they are found again whatever happens to our files.

_KEPT = ("HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR")


class PortTaken(Error):
    """Another process took one of our ports between the check and the start. Worth another try."""


def environment(layout: Layout, shape: Shape, **more: str) -> dict[str, str]:
    """Return the whole environment of a daemon."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {"PATH": search_path(shape.prefix), "SLURM_CONF": str(layout.slurm_conf), MARK: str(layout.root)}
    if shape.prefix:
        env["LD_LIBRARY_PATH"] = libraries(shape.prefix)
    return env | more


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row, below those that the kernel assigns."""
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        ephemeral = 32768
    top = (ephemeral if ephemeral > 12000 + count else 60000) - count
    for _ in range(200):
        first = random.randrange(10000, top)
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise Error(f"no {count} free ports in a row on this machine", hint="ss -ltn shows the listening processes")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def link(layout: Layout, shape: Shape) -> None:
    """Make links with the names that the daemons expect: slurmctld acts by its own name."""
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        target = find_program(name, shape.prefix)
        assert target is not None, name  # require_programs came first
        (layout.bin / name).symlink_to(target)


def start_munged(layout: Layout, shape: Shape, seconds: float) -> None:
    program = find_program("munged", shape.prefix) or "munged"
    key, socket_, log = layout.munge / "key", layout.munge_socket, layout.munge / "log"
    # --force: its checks of the directories above are for a machine's one key, not for one made a moment ago.
    command = [program, "--force", f"--key-file={key}", f"--socket={socket_}", f"--log-file={log}"]
    command += [f"--pid-file={layout.munge}/pid", f"--seed-file={layout.munge}/seed", "--num-threads=2"]
    _start({"munged": command}, layout, environment(layout, shape), seconds, log)


def start_slurmdbd(layout: Layout, env: dict[str, str], seconds: float) -> None:
    _start({"slurmdbd": [str(layout.bin / "slurmdbd")]}, layout, env, seconds, layout.logs / "slurmdbd.log")


def start_slurmctld(layout: Layout, shape: Shape, seconds: float, *, clean: bool = False) -> None:
    """Start slurmctld and return when it listens. ``clean`` forgets all jobs and states of nodes from earlier."""
    command = [str(layout.bin / "slurmctld"), *(["-c"] if clean else [])]
    _start({"slurmctld": command}, layout, environment(layout, shape), seconds, layout.logs / "slurmctld.log")


def start_slurmds(
    layout: Layout, shape: Shape, nodes: Sequence[str], seconds: float, network: Network | None = None
) -> None:
    """Start slurmd of each node, on the node's own host where there is a ``network`` of hosts."""
    commands = {}
    for node in nodes:
        (layout.spool / node).mkdir(exist_ok=True)
        before = network.enter(node, layout.hosts / node) if network else []
        commands[node] = [*before, str(layout.bin / "slurmd"), "-N", node, "-d", str(layout.bin / "slurmstepd")]
    _start(commands, layout, environment(layout, shape), seconds, layout.logs / "{name}.log", node_mark=True)


def _start(
    commands: Mapping[str, Sequence[str]],
    layout: Layout,
    env: dict[str, str],
    seconds: float,
    log: Path,
    *,
    node_mark: bool = False,
) -> None:
    """Start daemons that go to the background by themselves; return when all of them have."""
    end = time.monotonic() + seconds
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            own = env | {MARK_NODE: name} if node_mark else env
            with (layout.logs / f"{name}.start").open("wb") as words:
                os.fchmod(words.fileno(), 0o644)  # whatever the umask says
                running[name] = subprocess.Popen(
                    command,
                    env=own,
                    cwd=layout.root,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    umask=0o022,
                    start_new_session=True,
                )
        for name, process in running.items():
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _failed(name, f"did not come up within {seconds:.0f} s", layout, log) from None
            if code:
                raise _failed(name, f"ended with exit code {code}", layout, log)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait(5)


def _failed(name: str, how: str, layout: Layout, log: Path) -> Error:
    own_log = Path(str(log).format(name=name))
    said = last_words(layout.logs / f"{name}.start") or last_words(own_log)
    who = f"slurmd of {name}" if own_log != log else name
    return explained(f"{who} {how}" + (f": {said}" if said else ""), said + last_words(own_log, 2000))


def gave_up(name: str, log: Path) -> Error:
    """Return the error for a daemon that went to the background and ended there."""
    said = last_words(log)
    return explained(f"{name} ended: {said}", said)


def explained(message: str, said: str) -> Error:
    """Return the error for a daemon's last output, with a hint where it is known."""
    if "already in use" in said:
        return PortTaken(message)
    if "Invalid user for SlurmUser nobody" in said:
        return Error(message, hint="Slurm 26.05 does not run as the account nobody: use an account of a person")
    if "5027" in said and "@var := concat" in said:
        return Error(
            f"the slurmdbd of this machine ends with its MariaDB (known of Slurm 24.11 and 26.05 with MariaDB 11.8): {message}",
            hint="leave out --accounting: all but sacct works",
        )
    return Error(message)


def last_words(log: Path, most: int = 300) -> str:
    """Return the last lines of a log on one line; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * most))
            text = file.read(4 * most).decode("utf-8", "replace")
    except OSError:
        return ""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[-most:]


# A database and slurmdbd for a sandbox, so that ``sacct`` works. It costs seconds and 100 MB: not the default.


def start_accounting(layout: Layout, shape: Shape, seconds: float) -> None:
    """Start the database first, then slurmdbd; return when slurmdbd answers. munged must be up already."""
    end = time.monotonic() + seconds
    env = environment(layout, shape)
    _install(layout, shape, env, seconds)
    socket = layout.database / "sock"
    database = _database(layout, shape, env, socket)
    _wait_until(socket.exists, end, database, layout.database / "err.log", "mariadbd")
    env["MYSQL_UNIX_PORT"] = str(socket)
    program = find_program("slurmdbd", shape.prefix) or "slurmdbd"
    (layout.bin / "slurmdbd").symlink_to(program)
    start_slurmdbd(layout, env, max(1.0, end - time.monotonic()))
    ask = [find_program("sacctmgr", shape.prefix) or "sacctmgr", "-i", "-Q", "add", "cluster", conf.CLUSTER]
    _wait_until(_Answer(ask, env, layout), end, database, layout.logs / "slurmdbd.log", "slurmdbd")


def _install(layout: Layout, shape: Shape, env: dict[str, str], seconds: float) -> None:
    place.folder(layout.database, 0o700)  # its root has no password
    program = find_program("mariadb-install-db", shape.prefix) or "mariadb-install-db"
    log = layout.database / "install.log"
    command = [program, "--no-defaults", *_as_root(), *_based(program, shape), f"--datadir={layout.database}/data"]
    command += ["--auth-root-authentication-method=normal", "--skip-test-db"]
    with log.open("wb") as words:  # its errors; its other output is advice for a real installation
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise Error(f"mariadb-install-db did not end within {seconds:.0f} s") from None
    if done.returncode:
        raise Error(f"mariadb-install-db ended with exit code {done.returncode}: {last_words(log)}")


def _database(layout: Layout, shape: Shape, env: dict[str, str], socket: Path) -> subprocess.Popen[bytes]:
    program = find_program("mariadbd", shape.prefix) or "mariadbd"
    command = [program, "--no-defaults", *_as_root(), *_based(program, shape), f"--datadir={layout.database}/data"]
    command += [f"--socket={socket}", f"--pid-file={layout.database}/pid", f"--log-error={layout.database}/err.log"]
    # slurmdbd complains, and at times refuses, below these
    command += ["--skip-networking", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
    return subprocess.Popen(
        command,
        env=env,
        cwd=layout.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        umask=0o077,
        start_new_session=True,
    )


def _as_root() -> list[str]:
    return ["--user=root"] if os.getuid() == 0 else []


def _based(program: str, shape: Shape) -> list[str]:
    """Return the options that tell an unpacked MariaDB its own path; an installed one knows it."""
    inside = shape.prefix and program.startswith(f"{shape.prefix}/")
    return [f"--basedir={shape.prefix}/usr"] if inside else []


@dataclass
class _Answer:
    """Return whether slurmdbd answers ``ask``. Raises Error with its last output once it has ended."""

    ask: list[str]
    env: dict[str, str]
    layout: Layout
    absent: int = 0  # scans in a row without it: a process that forks and ends can escape one

    def __call__(self) -> bool:
        import psutil  # here: an interpreter without any package can bring up a sandbox

        if _succeeds(self.ask, self.env):
            return True
        lives = any(
            one.info["name"] == "slurmdbd" and (one.info["environ"] or {}).get(MARK) == str(self.layout.root)
            for one in psutil.process_iter(["name", "environ"])
        )
        self.absent = 0 if lives else self.absent + 1
        if self.absent == 10:
            raise gave_up("slurmdbd", self.layout.logs / "slurmdbd.log")
        return False


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _wait_until(done: Callable[[], bool], end: float, database: subprocess.Popen[bytes], log: Path, name: str) -> None:
    while not done():
        if database.poll() is not None:
            raise Error(f"mariadbd ended with exit code {database.returncode}: {last_words(log)}")
        if time.monotonic() >= end:
            raise Error(f"{name} did not answer in time: {last_words(log)}")
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------


NODE_ACTIONS = ("start", "stop", "kill", "pause", "cont", "crash", "cut", "plug")
CONTROLLER_ACTIONS = ("start", "stop", "kill", "restart", "pause", "cont")
NodeAction = Literal["start", "stop", "kill", "pause", "cont", "crash", "cut", "plug"]
ControllerAction = Literal["start", "stop", "kill", "restart", "pause", "cont"]

_STOP_SECONDS = 15.0  # a clean stop takes 2; after this it is killed


@dataclass(frozen=True)
class Sandbox:
    """One cluster, known by its directory. Holds no handle: another process may hold the same sandbox."""

    directory: Path
    shape: Shape
    port: int
    made: bool = False  # the directory is ours to remove, not only what is in it
    owner: str = ""  # the mark of the process it ends with (keeper.py); "": it stays up until it is taken down
    marks: bool = False  # ... which is this process: commands started with ``env`` die with it too
    subnet: str = ""  # that of its hosts, with Shape.hosts

    # ------------------------------------------------------------------------------------------------ up and down

    @classmethod
    def up(
        cls, directory: Path | str | None = None, *, timeout: float = 60.0, owner: str = "", **shape: Any
    ) -> Sandbox:
        """Bring a cluster up and return when its nodes are idle. Takes the fields of ``Shape`` by name.

        Leftovers of an earlier one in ``directory`` (dead, or half up) are cleared first. Raises AlreadyRunning if one
        lives there, NotFound if Slurm is not installed, UsageError for a directory Slurm cannot live in, Refused if
        there is something else in it, NotPermitted if others may change it. Whenever it raises, it leaves nothing behind.
        It stays up until it is taken down; ``visit.temporary`` makes one that ends with this process.
        """
        if shape.get("prefix"):
            shape["prefix"] = os.path.realpath(shape["prefix"])
        form = Shape(**{**shape, "overrides": tuple(shape.get("overrides", ()))})
        place.require_programs(form.prefix, accounting=form.accounting)
        if form.hosts:
            require_hosts()
        layout = Layout(place.real(directory))
        end = time.monotonic() + timeout
        for tries_left in (2, 1, 0):
            try:
                return cls._up(layout, form, end, owner)
            except (PortTaken, SubnetTaken):
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _up(cls, layout: Layout, shape: Shape, end: float, owner: str) -> Sandbox:
        made = place.make(layout.root)
        _refuse_foreign(layout)
        with place.alone(layout):
            made |= _clear_leftovers(layout)
            port, subnet = free_ports(shape.ports), free_subnet() if shape.hosts else ""
            sandbox = cls(layout.root, shape, port, made, owner, marks=bool(owner), subnet=subnet)
            try:
                sandbox._write_files()
                sandbox._start(end)
            except BaseException:
                sandbox._remove()
                raise
        return sandbox

    @classmethod
    def at(cls, directory: Path | str | None = None) -> Sandbox:
        """Return the sandbox in ``directory``, living or dead.

        Raises NotFound if there is none, NotPermitted for a stranger's.
        """
        root = place.real(directory)
        try:
            record = json.loads(place.believed(root, "sandbox.json", "slurm.conf"))
            shape = {**record["shape"], "overrides": tuple(record["shape"]["overrides"])}
            made, owner, subnet = bool(record["made"]), str(record.get("owner", "")), str(record.get("subnet", ""))
            return cls(root, Shape(**shape), int(record["port"]), made, owner, subnet=subnet)
        except FileNotFoundError:
            raise NotFound(f"there is no sandbox in {root}", hint=f"{_typed('up', root)}   makes one") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NotFound(
                f"{root}/sandbox.json is not whole: the sandbox is half made or damaged",
                hint=_typed("down", root),
            ) from None

    @classmethod
    def remains(cls, directory: Path | str | None = None) -> Sandbox:
        """Return the same as ``at``; also one whose record is damaged or whose files are gone, well enough for ``down``."""
        try:
            return cls.at(directory)
        except NotFound:
            rest = cls(place.real(directory), Shape(nodes=conf.MOST_NODES), 0)
            if not rest.layout.record.exists() and not rest.alive and not rest.network.names():
                raise
            return rest

    def down(self, *, timeout: float = 20.0) -> None:
        """End every process of the sandbox, its jobs' included, and remove its files. Files of others stay.

        Raises Error, naming them, if processes could not be ended within ``timeout`` seconds (state D).
        """
        with place.alone(self.layout):
            self._remove(timeout=timeout)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.down()

    # --------------------------------------------------------------------------------------------------- using it

    def env(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a whole environment for commands that shall see this cluster: ``base`` (ours) without any outer Slurm's."""
        own = os.environ if base is None else base
        mark = {place.MARK_OWNER: self.owner} if self.marks else {}
        return place.scrub(own) | {"PATH": place.search_path(self.shape.prefix)} | self.exports(own) | mark

    def exports(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return only the variables that make the difference to ``base`` (ours)."""
        exports = {"SLURM_CONF": str(self.layout.slurm_conf), place.ENV_DIRECTORY: str(self.directory)}
        if self.shape.prefix:
            exports["PATH"] = place.search_path(self.shape.prefix)
            before = (os.environ if base is None else base).get("LD_LIBRARY_PATH", "")
            exports["LD_LIBRARY_PATH"] = place.libraries(self.shape.prefix, before)
        return exports

    def run(self, command: Sequence[str], *, timeout: float = 60.0) -> str:
        """Return the output of one command in this cluster. Raises SchedulerUnavailable with its words if it fails."""
        try:
            done = subprocess.run(command, env=self.env(), capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise SchedulerUnavailable(f"{command[0]} gave no answer within {timeout:.0f} s") from None
        if done.returncode:
            raise SchedulerUnavailable(f"{command[0]} ended with exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Return when every node accepts jobs. After ``timeout`` seconds raises SchedulerUnavailable with their states."""
        self._wait_ready(timeout, lambda: None)

    def _wait_ready(self, timeout: float, while_waiting: Callable[[], None]) -> None:
        end = time.monotonic() + timeout
        states = "no answer yet"
        while True:
            try:
                asked = ["sinfo", "-h", "-p", conf.PARTITION, "-N", "-o", "%N %T (%E)"]
                states = self.run(asked, timeout=max(1.0, end - time.monotonic())).replace(" (none)", "")
                found = [line.split()[1] for line in states.splitlines() if line.strip()]
                if len(found) >= self.shape.nodes and all(one in ("idle", "mixed", "allocated") for one in found):
                    return
            except SchedulerUnavailable as error:
                states = error.message
            if time.monotonic() >= end:
                said = ", ".join(states.split("\n")).strip(", ")
                hint = self.network.unheard() if self.shape.hosts and "*" in said else ""  # Slurm's sign for no answer
                raise SchedulerUnavailable(f"the sandbox was not ready within {timeout:.0f} s: {said}", hint=hint)
            while_waiting()
            time.sleep(0.05)

    def node(self, name: str, action: NodeAction) -> None:
        """Do something to one node.

        start, stop (clean), kill: its slurmd only, jobs live on. pause, cont: slurmd hangs, goes on. crash: slurmd and
        all processes of jobs there end at one moment, as in a power cut; ``start`` brings the node back. cut, plug: the
        network cable of the node's host is pulled and put in again; all that runs there lives on.
        """
        if name not in self.shape.node_names:
            raise NotFound(f"there is no node {name!r}", hint=f"nodes: {conf.span('node-', 0, self.shape.nodes)}")
        if action in ("cut", "plug"):
            self._cable(name, action)
        elif action == "crash":
            self._crash(name)
        elif action == "start":
            self._refuse_double(name, self._slurmd(name))
            if self.shape.hosts:
                self.network.boot(name)
            self._start_slurmds([name], 20)
        else:
            _act(name, self._slurmd(name), action)

    def controller(self, action: ControllerAction) -> None:
        """Do something to slurmctld. After start and restart it knows its jobs; pause makes every command hang.

        Slurm writes its notes down every five seconds: ``kill`` loses what happened after the last ones, and a job
        that had just started is pending again.
        """
        if action in ("stop", "kill", "restart", "pause", "cont"):
            _act("slurmctld", self._slurmctld(), "stop" if action == "restart" else action)
        if action in ("start", "restart"):
            self._refuse_double("slurmctld", self._slurmctld())
            start_slurmctld(self.layout, self.shape, 20)
            self._wait_controller(20)

    @property
    def alive(self) -> bool:
        """Return whether any daemon of it runs."""
        return bool(self._daemons())

    @property
    def layout(self) -> Layout:
        return Layout(self.directory)

    @property
    def network(self) -> Network:
        """Return the hosts of its nodes; none are there without Shape.hosts."""
        return Network(self.directory, self.subnet)

    def processes(self) -> list[place.Member]:
        """Return all its processes, daemons and jobs, each with its node."""
        return place.members(self.layout.slurm_conf, self.shape.node_names, self.network.numbers())

    # ---------------------------------------------------------------------------------------------------- inside

    def _daemons(self) -> list[Process]:
        return [m.process for m in self.processes() if m.process.name in place.DAEMONS]

    def _slurmd(self, node: str) -> list[Process]:
        return [m.process for m in self.processes() if m.node == node and m.process.name == "slurmd"]

    def _slurmctld(self) -> list[Process]:
        return [p for p in self._daemons() if p.name == "slurmctld"]

    def _crash(self, node: str) -> None:
        if not self._slurmd(node):
            raise NotFound(f"{node} is not running", hint=_typed(f"node {node} start", self.directory))
        if self.shape.hosts:
            self.network.cable(node, "down")  # first: nothing that ends now can say so to another host
        left = place.power_cut(lambda: [m.process for m in self.processes() if m.node == node], 10)
        if self.shape.hosts:
            self.network.power_off(node)
        _complain(left)

    def _cable(self, node: str, action: str) -> None:
        if not self.shape.hosts:
            raise Refused(
                f"{node} has no network cable of its own: this sandbox was made without --hosts",
                hint=f"{_typed('down', self.directory)}   then: {_typed('up --hosts', self.directory)}",
            )
        if self.network.namespace(node) not in self.network.names():
            raise NotFound(f"{node} has crashed and is not running", hint=_typed(f"node {node} start", self.directory))
        self.network.cable(node, "down" if action == "cut" else "up")

    def _start_slurmds(self, nodes: Sequence[str], seconds: float) -> None:
        network = self.network if self.shape.hosts else None
        start_slurmds(self.layout, self.shape, nodes, seconds, network)

    def _refuse_double(self, name: str, running: list[Process]) -> None:
        if running:
            raise AlreadyRunning(f"{name} is running already (pid {running[0].pid})")

    def _write_files(self) -> None:
        layout, shape = self.layout, self.shape
        # The record comes first: from now on all files here are known to be ours.
        record = {"shape": shape.as_json(), "port": self.port, "made": self.made, "owner": self.owner}
        record |= {"subnet": self.subnet}
        place.write_new(layout.record, json.dumps(record, indent=1) + "\n", 0o644)
        for directory in (layout.bin, layout.state, layout.spool, layout.logs, layout.devices, layout.munge):
            place.folder(directory, 0o700 if directory == layout.munge else 0o755)
        user = user_name()
        host = socket.gethostname().split(".")[0]
        plugins = place.plugins(shape.prefix)
        text = conf.slurm_conf(shape, layout, port=self.port, user=user, host=host, plugins=plugins, subnet=self.subnet)
        place.write_new(layout.slurm_conf, text, 0o644)
        if shape.hosts:
            place.folder(layout.hosts, 0o755)
            for node in shape.node_names:
                text = conf.hosts_file(shape, node, subnet=self.subnet, host=host)
                place.write_new(layout.hosts / node, text, 0o644)
        if shape.gpus_per_node:
            for n in range(shape.gpus_per_node):
                (layout.devices / f"gpu{n}").symlink_to("/dev/null")
            place.write_new(layout.gres_conf, conf.gres_conf(shape, layout), 0o644)
        if shape.accounting:
            text = conf.slurmdbd_conf(layout, port=self.port, user=user, plugins=plugins)
            place.write_new(layout.slurmdbd_conf, text, 0o600)
        place.write_new(layout.munge / "key", os.urandom(1024), 0o600)
        link(layout, shape)

    def _start(self, end: float) -> None:
        layout, shape = self.layout, self.shape

        def left() -> float:
            return max(1.0, end - time.monotonic())

        if shape.hosts:
            self.network.build(shape.node_names)
        start_munged(layout, shape, left())
        if shape.accounting:
            start_accounting(layout, shape, left())
        start_slurmctld(layout, shape, left(), clean=True)
        self._wait_controller(left())
        self._start_slurmds(shape.node_names, left())
        self._wait_ready(left(), self._give_up_on_slurmds())

    def _give_up_on_slurmds(self) -> Callable[[], None]:
        """Return what raises Error once a slurmd has ended: since 24.11 it loads its plug-ins in the background."""
        absent: Counter[str] = Counter()

        def look() -> None:
            there = {member.node for member in self.processes() if member.process.name == "slurmd"}
            for node in self.shape.node_names:
                absent[node] = 0 if node in there else absent[node] + 1
                if absent[node] == 10:  # not the first time: a process that forks and ends can escape one scan
                    raise gave_up(f"slurmd of {node}", self.layout.logs / f"{node}.log")

        return look

    def _wait_controller(self, seconds: float) -> None:
        """Wait until slurmctld answers, which goes to the background before it is ready, or report why it ended."""
        end = time.monotonic() + seconds
        absent = 0
        while True:
            try:
                self.run(["scontrol", "ping"], timeout=max(1.0, end - time.monotonic()))
                return
            except SchedulerUnavailable:
                absent = 0 if self._slurmctld() else absent + 1
                if absent == 10:  # not the first time: a process that forks and ends can escape one scan
                    raise gave_up("slurmctld", self.layout.logs / "slurmctld.log") from None
                if time.monotonic() >= end:
                    raise
            time.sleep(0.02)

    def _remove(self, *, timeout: float = 20.0) -> None:
        left = place.power_cut(lambda: [m.process for m in self.processes()], timeout)
        self.network.remove()
        place.clear(self.layout)
        place.leave(self.layout, root_too=self.made)
        _complain(left)


def _refuse_foreign(layout: Layout) -> None:
    """Raise Refused if the directory holds anything and is not a sandbox's."""
    strange = sorted(path.name for path in layout.root.iterdir() if path != layout.lock)
    if strange and not layout.record.exists():
        some = ", ".join(strange[:3]) + (" ..." if len(strange) > 3 else "")
        raise Refused(f"{layout.root} holds other things ({some})", hint="use another directory: --dir DIR")


def _clear_leftovers(layout: Layout) -> bool:
    """Remove the leftovers of an earlier sandbox.

    Returns whether it had made the directory. Raises AlreadyRunning if it lives.
    """
    old = Sandbox(layout.root, Shape(nodes=conf.MOST_NODES), 0)
    if old.alive:
        raise AlreadyRunning(
            f"a sandbox is up in {layout.root}",
            hint=f"use it, or: {_typed('down', layout.root)}",
        )
    try:
        made = Sandbox.at(layout.root).made
    except NotFound:
        made = False
    old.network.remove()
    place.clear(layout)  # not the lock: we hold it
    return made


def _act(name: str, running: list[Process], action: str) -> None:
    if not running:
        raise NotFound(f"{name} is not running")
    number = {"stop": "SIGTERM", "kill": "SIGKILL", "pause": "SIGSTOP", "cont": "SIGCONT"}[action]
    for process in running:
        signal_exactly(process, signal.Signals[number])
        if action == "stop":  # a paused one has to receive it too
            signal_exactly(process, signal.SIGCONT)
    if action in ("stop", "kill"):
        left = wait_gone(running, _STOP_SECONDS)
        for process in left:
            signal_exactly(process, signal.SIGKILL)
        _complain(wait_gone(left, 5))


def _complain(left: Sequence[Process]) -> None:
    if left:
        names = ", ".join(f"{p.name} (pid {p.pid})" for p in left)
        raise Error(f"could not end {names}", hint="a process in state D ends when its file system or device answers")


def _typed(verb: str, root: Path) -> str:
    """Return a command about the sandbox in ``root``, to be typed anywhere."""
    return f"ftsupervise sandbox {verb} --dir {shlex.quote(str(root))}"
