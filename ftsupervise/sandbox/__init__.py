"""A real Slurm on this machine, as any user, made in a second and gone without a trace: to try a run, and for tests.

    with temporary() as sandbox:
        subprocess.run(["sbatch", "train.sbatch"], env=sandbox.env(), timeout=60)
        sandbox.node("node-1", "crash")

munged, slurmctld and one slurmd per node live under one directory, on ports and with a key of their own, so several
sandboxes run side by side, and beside the machine's own Slurm. The directory is the interface: with its path a command can
ask for the environment, break a node, or take the sandbox down. Its processes are recognised by themselves
(``place.py``), so ``down`` works after any accident. One made by ``temporary`` ends with the
process that made it, however that ends (``keeper.py``); one made by ``Sandbox.up`` stays up until it is taken down.
"""

from __future__ import annotations

from ftsupervise.sandbox.cluster import CONTROLLER_ACTIONS, NODE_ACTIONS, ControllerAction, NodeAction, Sandbox
from ftsupervise.sandbox.conf import Shape
from ftsupervise.sandbox.keeper import Keeper, Seen, follow, sandboxes, temporary, temporary_folder
from ftsupervise.sandbox.place import ENV_DIRECTORY, default_directory, missing, outer_variables

__all__ = [
    "CONTROLLER_ACTIONS",
    "ENV_DIRECTORY",
    "NODE_ACTIONS",
    "ControllerAction",
    "Keeper",
    "NodeAction",
    "Sandbox",
    "Seen",
    "Shape",
    "default_directory",
    "follow",
    "missing",
    "outer_variables",
    "sandboxes",
    "temporary",
    "temporary_folder",
]
