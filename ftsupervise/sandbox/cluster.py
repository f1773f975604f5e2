"""One cluster: up, down, and the actions between."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ftsupervise.errors import AlreadyRunning, Error, NotFound, Refused, SchedulerUnavailable
from ftsupervise.host.ownership import user_name
from ftsupervise.host.processes import Process, signal_exactly, wait_gone
from ftsupervise.sandbox import conf, daemons, hosts, place
from ftsupervise.sandbox.conf import Layout, Shape
from ftsupervise.sandbox.hosts import Network

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
            hosts.require_hosts()
        layout = Layout(place.real(directory))
        end = time.monotonic() + timeout
        for tries_left in (2, 1, 0):
            try:
                return cls._up(layout, form, end, owner)
            except (daemons.PortTaken, hosts.SubnetTaken):
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _up(cls, layout: Layout, shape: Shape, end: float, owner: str) -> Sandbox:
        made = place.make(layout.root)
        _refuse_foreign(layout)
        with place.alone(layout):
            made |= _clear_leftovers(layout)
            port, subnet = daemons.free_ports(shape.ports), hosts.free_subnet() if shape.hosts else ""
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
        end = time.monotonic() + timeout
        states = "no answer yet"
        while True:
            try:
                states = self.run(
                    ["sinfo", "-h", "-p", conf.PARTITION, "-N", "-o", "%N %T"], timeout=max(1.0, end - time.monotonic())
                )
                pairs = [line.split() for line in states.splitlines() if line.strip()]
                if len(pairs) >= self.shape.nodes and all(s in ("idle", "mixed", "allocated") for _, s in pairs):
                    return
            except SchedulerUnavailable as error:
                states = error.message
            if time.monotonic() >= end:
                said = ", ".join(states.split("\n")).strip(", ")
                hint = self.network.unheard() if self.shape.hosts and "*" in said else ""  # Slurm's sign for no answer
                raise SchedulerUnavailable(f"the sandbox was not ready within {timeout:.0f} s: {said}", hint=hint)
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
            daemons.start_slurmctld(self.layout, self.shape, 20)
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
        daemons.start_slurmds(self.layout, self.shape, nodes, seconds, network)

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
            directory.mkdir(0o700)
            directory.chmod(
                0o700 if directory == layout.munge else 0o755
            )  # nobody else gets credentials from its munged
        user = user_name()
        host = socket.gethostname().split(".")[0]
        plugins = place.plugins(shape.prefix)
        text = conf.slurm_conf(shape, layout, port=self.port, user=user, host=host, plugins=plugins, subnet=self.subnet)
        place.write_new(layout.slurm_conf, text, 0o644)
        if shape.hosts:
            layout.hosts.mkdir()
            layout.hosts.chmod(0o755)
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
        daemons.link(layout, shape)

    def _start(self, end: float) -> None:
        layout, shape = self.layout, self.shape

        def left() -> float:
            return max(1.0, end - time.monotonic())

        if shape.hosts:
            self.network.build(shape.node_names)
        daemons.start_munged(layout, shape, left())
        if shape.accounting:
            daemons.start_accounting(layout, shape, left())
        daemons.start_slurmctld(layout, shape, left(), clean=True)
        self._wait_controller(left())
        self._start_slurmds(shape.node_names, left())
        self.wait_ready(left())

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
                    raise daemons.gave_up("slurmctld", self.layout.logs / "slurmctld.log") from None
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
