"""The files Slurm reads in a sandbox, as text. Pure: nothing here touches the machine.

Most lines were found necessary the hard way; the reasons are beside them. Everything is
written for one machine that plays many nodes: one slurmd per node name, told apart by their ports, or by their addresses
where each node is a host of its own.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ftsupervise.errors import UsageError

PARTITION = "prod"
CLUSTER = "sandbox"

# Keys that may stand in slurm.conf several times; any other key given with --set replaces the sandbox's own line.
_REPEATABLE = {"nodename", "partitionname", "nodeset", "downnodes"}
_SETTING = re.compile(r"([A-Za-z]+)=(.*\S)\s*")
_SAFE = re.compile(r"[A-Za-z0-9._/+-]+")
# The longest Unix socket is <root>/spool/node-999/node-999_67108863.4294967291, and a socket's path ends at 107 bytes.
LONGEST_ROOT = 60
MOST_NODES = 999
MOST_HOSTS = 250  # in one /24 network


@dataclass(frozen=True)
class Shape:
    """The cluster as its users see it. Times are whole seconds, as slurm.conf wants them."""

    nodes: int = 4
    cpus: int = 96  # per node
    memory: int = 512_000  # per node, in MB: Slurm's own unit
    gpus_per_node: int = 8
    accounting: bool = False  # mariadbd and slurmdbd, so that sacct works
    prefix: str = ""  # where packages were unpacked with dpkg -x; "" for the installed ones
    slurmd_timeout: int = 6  # a lost node is noticed after 1.5 to 2.5 times this
    kill_wait: int = 2  # from SIGTERM to SIGKILL
    min_job_age: int = 300  # how long a finished job can still be asked for
    message_timeout: int = 5  # how long commands wait for a controller that hangs
    cred_expire: int = 5  # how long a requeued job waits before it may start again (Slurm's default: 120)
    overrides: tuple[str, ...] = ()  # "Key=Value" lines for slurm.conf
    hosts: bool = False  # each node a host of its own, with its own network (hosts.py)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("cpus", 1), ("memory", 1), ("gpus_per_node", 0), ("slurmd_timeout", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"a sandbox needs {name.replace('_', ' ')} >= {least}, got {getattr(self, name)}")
        if self.nodes > MOST_NODES:
            raise UsageError(f"a sandbox has at most {MOST_NODES} nodes, got {self.nodes}")
        if self.hosts and self.nodes > MOST_HOSTS:
            raise UsageError(f"a sandbox with hosts has at most {MOST_HOSTS} nodes, got {self.nodes}")
        for line in self.overrides:
            if "\n" in line or not _SETTING.fullmatch(line):
                raise UsageError(f"expected a slurm.conf setting such as KillWait=30, got {line!r}")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{n}" for n in range(self.nodes))

    @property
    def ports(self) -> int:
        """Return the number of consecutive ports that the daemons listen on: slurmctld, slurmdbd, and one for each node.

        Hosts have addresses of their own, and one port does for all of them.
        """
        return 2 + (1 if self.hosts else self.nodes)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """The paths under the sandbox's directory."""

    root: Path

    def __post_init__(self) -> None:
        text = str(self.root)
        if not _SAFE.fullmatch(text):
            bad = next(c for c in text if not _SAFE.fullmatch(c))
            raise UsageError(
                f"a sandbox cannot live in {text!r}: Slurm's files cannot name a directory with {bad!r} in it",
                hint="use letters, digits and . _ - + only, such as --dir /tmp/lab",
            )
        if len(text) > LONGEST_ROOT:
            raise UsageError(
                f"a sandbox cannot live in {text}: {len(text)} characters are too many for its Unix sockets"
                f" (at most {LONGEST_ROOT})",
                hint="use a shorter path, such as --dir /tmp/lab",
            )

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def gres_conf(self) -> Path:
        return self.root / "gres.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.root / "slurmdbd.conf"

    @property
    def record(self) -> Path:
        return self.root / "sandbox.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def devices(self) -> Path:
        return self.root / "dev"

    @property
    def hosts(self) -> Path:
        return self.root / "hosts"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "sock"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def own(self) -> tuple[Path, ...]:
        """Return all files that a sandbox makes except its lock: ``down`` may remove them. The record goes last."""
        pids = (self.root / "slurmctld.pid", self.root / "slurmdbd.pid")
        trees = (self.bin, self.state, self.spool, self.logs, self.devices, self.munge, self.database, self.hosts)
        return (self.slurm_conf, self.gres_conf, self.slurmdbd_conf, *pids, *trees, self.record)


def span(stem: str, first: int, count: int) -> str:
    """Return Slurm's hostlist form: ``node-[0-3]``, and ``node-0`` for one (it refuses ``node-[0-0]`` in some places)."""
    return f"{stem}{first}" if count == 1 else f"{stem}[{first}-{first + count - 1}]"


def address(subnet: str, node: str = "") -> str:
    """Return the address of a node's host, or of this machine among the hosts."""
    return f"{subnet}.{int(node.removeprefix('node-')) + 2 if node else 1}"


def hosts_file(shape: Shape, node: str, *, subnet: str, host: str) -> str:
    """Return /etc/hosts of a node's host, as Debian writes it: the own name leads to the loopback interface only."""
    others = [f"{address(subnet, other)} {other}" for other in shape.node_names if other != node]
    return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {node}", f"{address(subnet)} {host}", *others]) + "\n"


def slurm_conf(
    shape: Shape, layout: Layout, *, port: int, user: str, host: str, plugins: str = "", subnet: str = ""
) -> str:
    """Return slurm.conf.

    ``port`` is the first of ``shape.ports`` free ones; ``plugins`` a directory, if not Slurm's own; ``subnet`` that of
    the hosts.
    """
    nodes = span("node-", 0, shape.nodes)
    gres = f" Gres=gpu:{shape.gpus_per_node}" if shape.gpus_per_node else ""
    ports = span("", port + 2, shape.nodes)  # pairs up with the names, one each
    here = address(subnet) if shape.hosts else "127.0.0.1"
    if shape.hosts:
        addresses = span(f"{subnet}.", 2, shape.nodes)
        machine = f"NodeName={nodes} NodeHostname={nodes} NodeAddr={addresses} Port={port + 2}"
    else:
        machine = f"NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports}"
    partition = f"PartitionName={PARTITION} Nodes={nodes} Default=YES MaxTime=INFINITE DefaultTime=INFINITE"
    lines = [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={host}({here})",
        f"SlurmctldPort={port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket},cred_expire={shape.cred_expire}",
        "CredType=cred/munge",
        *([f"PluginDir={plugins}"] if plugins else []),
        f"StateSaveLocation={layout.state}",
        f"SlurmdSpoolDir={layout.spool}/%n",
        f"SlurmctldPidFile={layout.root}/slurmctld.pid",
        f"SlurmdPidFile={layout.spool}/%n.pid",
        f"SlurmctldLogFile={layout.logs}/slurmctld.log",
        f"SlurmdLogFile={layout.logs}/%n.log",
        # No cgroups: they need root, and an ordinary user gets a sandbox too.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # The nodes claim more processors and memory than this machine has.
        "SlurmdParameters=config_overrides",
        # Schedule every second: a try should not wait for a production scheduler's minute.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,bf_window=1440,batch_sched_delay=0,sched_min_interval=0",
        "ReturnToService=2",
        f"SlurmdTimeout={shape.slurmd_timeout}",
        "SlurmctldTimeout=10",
        f"MessageTimeout={shape.message_timeout}",
        "TCPTimeout=1",
        f"KillWait={shape.kill_wait}",
        "UnkillableStepTimeout=30",
        "BatchStartTimeout=5",
        f"MinJobAge={shape.min_job_age}",
        "InactiveLimit=0",
        "JobRequeue=1",
        "MaxArraySize=10001",
        "MaxJobCount=20000",
        "PropagateResourceLimits=NONE",
        *(["GresTypes=gpu"] if gres else []),
        *(_accounting(layout, here, port + 1) if shape.accounting else []),
        f"{machine} CPUs={shape.cpus} RealMemory={shape.memory}{gres} State=UNKNOWN",
        f"{partition} DefMemPerNode={min(1000, shape.memory)} State=UP",
    ]
    return "\n".join(override(lines, shape.overrides)) + "\n"


def override(lines: list[str], settings: tuple[str, ...]) -> list[str]:
    """Return ``lines`` with each setting in place of the line with its key. A key given twice makes every command complain."""
    keys = {_key(setting) for setting in settings} - _REPEATABLE
    last = {_key(setting): setting.strip() for setting in settings if _key(setting) not in _REPEATABLE}
    more = [setting.strip() for setting in settings if _key(setting) in _REPEATABLE]
    return [line for line in lines if _key(line) not in keys] + [*last.values(), *more]


def _key(line: str) -> str:
    return line.split("=", 1)[0].strip().lower()


def _accounting(layout: Layout, here: str, port: int) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={here}",
        f"AccountingStoragePort={port}",
        # For slurmdbd the "password" is where munge listens; AuthInfo alone is ignored.
        f"AccountingStoragePass={layout.munge_socket}",
    ]


def gres_conf(shape: Shape, layout: Layout) -> str:
    """Return gres.conf: GPUs that are links to /dev/null. A bare Count= would be read as 0, and the node as invalid."""
    files = span(f"{layout.devices}/gpu", 0, shape.gpus_per_node)
    return f"NodeName={span('node-', 0, shape.nodes)} Name=gpu File={files} AutoDetect=off\n"


def slurmdbd_conf(layout: Layout, *, port: int, user: str, plugins: str = "") -> str:
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={port + 1}",
        f"SlurmUser={user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_acct",
        f"LogFile={layout.logs}/slurmdbd.log",
        f"PidFile={layout.root}/slurmdbd.pid",
        *([f"PluginDir={plugins}"] if plugins else []),
    ]
    return "\n".join(lines) + "\n"
