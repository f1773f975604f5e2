"""May this standby become that rank? No, if anything differs that an import may have read or a fork cannot change."""

from __future__ import annotations

import os
import sys
import zipimport
from collections.abc import Mapping
from typing import Any

from ftsupervise.warm import client as proxy

# The environment of one rank and one attempt. Everything else must be as it was when the modules were imported.
_OF_A_RANK = (
    b"SLURM", b"SRUN_", b"FTSUPERVISE_", b"PMI", b"OMPI_MCA_orte", b"CUDA_VISIBLE_DEVICES", b"GPU_DEVICE_ORDINAL",
    b"ROCR_VISIBLE_DEVICES", b"HIP_VISIBLE_DEVICES", b"ZE_AFFINITY_MASK", b"KRB5CCNAME", b"TORCHELASTIC_", b"XDG_SESSION_ID",
)  # fmt: skip
_OF_A_RANK_WHOLE = {b"_", b"PWD", b"OLDPWD", b"SHLVL", b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE",
                    b"NODE_RANK", b"GROUP_RANK", b"MASTER_ADDR", b"MASTER_PORT", b"HOSTNAME"}  # fmt: skip
# With these a thread pool depends on the CPUs themselves, not only on their number.
_PINNED = (b"OMP_PROC_BIND", b"OMP_PLACES", b"GOMP_CPU_AFFINITY", b"KMP_AFFINITY")


class Incompatible(Exception):
    """This rank has to be started cold; the text says why."""


class Judge:
    """The standby's state when its modules were imported. ``env``: its environment before that."""

    def __init__(self, cpus: int, env: Mapping[bytes, bytes]) -> None:
        self.cpus = cpus or len(os.sched_getaffinity(0))
        self.env = {key: value for key, value in env.items() if not _of_a_rank(key)}
        every = {*env, *os.environb}
        self.set = {key: os.environb.get(key) for key in every if os.environb.get(key) != env.get(key)}
        self.of_a_rank = sorted(os.fsdecode(key) for key in self.set if _of_a_rank(key))
        self.here = os.stat(".")
        self.own = {name.partition(".")[0] for name in sys.modules} - {"ftsupervise", "sitecustomize", "__main__"}

    def fits(self, request: dict[str, Any]) -> None:
        """Raises Incompatible."""
        if self.of_a_rank:
            raise Incompatible(f"imported modules set variables of one rank: {', '.join(self.of_a_rank[:5])}")
        if request["python"] != sys.hexversion or os.fsdecode(request["executable"]) != sys.executable:
            raise Incompatible("another Python")
        if [os.fsdecode(word) for word in request["command"]] != sys.orig_argv:
            raise Incompatible("another command")
        if request["groups"] != sorted(os.getgroups()):
            raise Incompatible("other groups")
        here = proxy.held_to()
        if other := [name for name, value in request["held"].items() if here.get(name) != value]:
            raise Incompatible(f"another container, cgroup or set of rights: {', '.join(other)}")
        if other := sorted(set(request["devices"]).symmetric_difference(proxy.devices())):
            raise Incompatible(f"other devices: {', '.join(other[:5])}")
        theirs = {key: value for key, value in request["env"].items() if not _of_a_rank(key)}
        if theirs != self.env:
            names = sorted(key for key in {*theirs, *self.env} if theirs.get(key) != self.env.get(key))
            raise Incompatible(f"another environment: {', '.join(map(os.fsdecode, names[:5]))}")
        if len(request["cpus"]) != self.cpus:
            raise Incompatible(f"{len(request['cpus'])} CPUs, and {self.cpus} when the modules were imported")
        if any(name in theirs for name in _PINNED) and set(request["cpus"]) != os.sched_getaffinity(0):
            raise Incompatible("threads are to be pinned to other CPUs")
        shadow = self._shadow()
        if shadow:
            raise Incompatible(f"{shadow} beside the program shadows an imported module of that name")

    def folder(self, fd: int) -> None:
        """Raises Incompatible when ``fd`` is another working directory than the one relative paths were resolved in."""
        theirs = os.fstat(fd)
        if (theirs.st_dev, theirs.st_ino) != (self.here.st_dev, self.here.st_ino):
            raise Incompatible("another working directory")

    def _shadow(self) -> str:
        """A module beside the program that an import here would have used instead, maybe a new one; "" if there is none."""
        first = _first_on_path()
        if first is None:
            return ""
        try:
            names = os.listdir(first)
        except OSError:
            return ""
        inside = {name for name in self.own if _lies_in(name, os.path.realpath(first))}
        for name in names:
            stem = name.partition(".")[0]
            if stem in self.own and stem not in inside:
                whole = os.path.join(first, name)
                if name.endswith((".py", ".so")) or os.path.isfile(os.path.join(whole, "__init__.py")):
                    return whole
        return ""


def _first_on_path() -> str | None:
    """The folder that the interpreter will put first in ``sys.path``; None for none. Raises Incompatible."""
    if getattr(sys.flags, "safe_path", False):
        return None
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word.startswith("--"):
            words = words[1:]
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in "mc":
                return os.getcwd()
            if letter in "WX":
                if at + 1 == len(word):
                    words = words[1:]
                break
    if not words or os.path.isdir(words[0]):
        return words[0] if words else None
    try:
        zipimport.zipimporter(words[0])
    except zipimport.ZipImportError:
        return os.path.dirname(os.path.realpath(words[0]))
    raise Incompatible("the program is a zip archive")


def _lies_in(name: str, folder: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and os.path.realpath(str(file)).startswith(folder + os.sep)


def _of_a_rank(key: bytes) -> bool:
    return key in _OF_A_RANK_WHOLE or key.startswith(_OF_A_RANK)
