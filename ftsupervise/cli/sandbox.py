"""``ftsupervise sandbox``: a real Slurm on this machine, from the command line. The work is in the sandbox room."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ftsupervise.cli.command_group import CommandGroup
from ftsupervise.cli.output import JSON, answer
from ftsupervise.sandbox import (
    CONTROLLER_ACTIONS,
    ENV_DIRECTORY,
    NODE_ACTIONS,
    Sandbox,
    follow,
    outer_variables,
    sandboxes,
)


class _Sandbox(CommandGroup):
    """A group in which ``sandbox [up's options] -- COMMAND`` means: run COMMAND in a sandbox."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args and args[0] not in self.commands:
            args = ["exec", *args]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["COMMAND [ARGS]... | [OPTIONS of up] -- COMMAND..."]


def _directory(command: Any) -> Any:
    return click.option(
        "--dir",
        "directory",
        type=Path,
        envvar=ENV_DIRECTORY,
        show_envvar=True,
        help="Its directory; a short path, since it holds Unix sockets.  [default: /tmp/ftsupervise-sandbox-UID]",
    )(command)


def _shape(command: Any) -> Any:
    options = [
        click.option("--nodes", type=click.IntRange(1, 999), default=4, show_default=True),
        click.option("--cpus", type=click.IntRange(1), default=96, show_default=True, help="Per node; simulated."),
        click.option("--memory", type=click.IntRange(1), default=512_000, show_default=True, help="MB per node."),
        click.option("--gpus-per-node", type=click.IntRange(0, 1000), default=8, show_default=True, help="Made up."),
        click.option("--accounting", is_flag=True, help="mariadbd and slurmdbd too, so that sacct works."),
        click.option("--prefix", default="", metavar="DIR", help="Where packages were unpacked with dpkg -x."),
        click.option("--hosts", is_flag=True, help="Each node a host with a network of its own; needs root."),
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A slurm.conf line; repeatable."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=_Sandbox)
def sandbox() -> None:
    """A real Slurm on this machine, for trying things. Needs no root; leaves nothing behind.

    \b
    ftsupervise sandbox up; eval "$(ftsupervise sandbox env)"; sinfo
    ftsupervise sandbox node node-1 crash  what does my run do when a node dies?
    ftsupervise sandbox down
    ftsupervise sandbox -- make test       up if none is, run it there, down again
    ftsupervise sandbox up --hosts         each node a host, with a cable (root)
    """


@sandbox.command()
@_directory
@_shape
@JSON
def up(directory: Path | None, as_json: bool, **shape: Any) -> None:
    """Start a cluster; returns when its nodes are idle."""
    began = time.monotonic()
    made = Sandbox.up(directory, **shape)
    if as_json:
        answer(directory=made.directory, state="up", shape=made.shape, seconds=time.monotonic() - began)
        return
    where = "" if directory is None else f" --dir {shlex.quote(str(made.directory))}"
    nodes = f"{made.shape.nodes} nodes with {made.shape.gpus_per_node} GPUs each"
    nodes += f", each a host in {made.subnet}.0/24" if made.shape.hosts else ""
    click.echo(f"up in {time.monotonic() - began:.1f}s: {nodes}, in {made.directory}")
    click.echo(f'  eval "$(ftsupervise sandbox env{where})"   then sinfo, sbatch, squeue as on any cluster')
    click.echo(f"  ftsupervise sandbox down{where}   removes it")


@sandbox.command()
@_directory
@JSON
def down(directory: Path | None, as_json: bool) -> None:
    """End all its processes, jobs included, and remove its files."""
    found = Sandbox.remains(directory)
    found.down()
    left = found.directory.is_dir() and any(found.directory.iterdir())
    if as_json:
        answer(directory=found.directory, state="down", files_left=left)
        return
    stays = "; files that are not the sandbox's stay there" if left else ""
    click.echo(f"down: {found.directory}{stays}")
    if os.environ.get("SLURM_CONF") == str(found.directory / "slurm.conf"):  # every Slurm command here would hang on it
        click.echo(f"  unset SLURM_CONF {ENV_DIRECTORY}   so that this shell forgets it")


@sandbox.command()
@_directory
@click.option("--json", "as_json", is_flag=True, help="As a JSON object, without the variables to unset.")
def env(directory: Path | None, as_json: bool) -> None:
    """Print shell exports: eval "$(ftsupervise sandbox env)"."""
    exports = Sandbox.at(directory).exports()
    if as_json:
        click.echo(json.dumps(exports, indent=1))
        return
    unset = outer_variables(os.environ)
    if unset:
        click.echo(f"unset {' '.join(unset)}")
    for name, value in exports.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@sandbox.command("list")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def list_(as_json: bool) -> None:
    """List the sandboxes of this account, and whether they live."""
    seen = sandboxes()
    if as_json:
        found = [{"directory": str(one.directory), "state": one.word} for one in seen]
        click.echo(json.dumps({"schema_version": 1, "sandboxes": found}, indent=1))
        return
    for one in seen:
        click.echo(f"{one.directory}  {one.word}")
    if not seen:
        click.echo("none", err=True)


_DONE = {
    "start": "started",
    "restart": "restarted",
    "stop": "stopped",
    "kill": "killed",
    "pause": "paused: it does not answer",
    "cont": "answers again",
    "crash": "crashed, with all processes of its jobs",
    "cut": "its network cable is out",
    "plug": "its network cable is in again",
}


_BACK = {"stop": "start", "kill": "start", "crash": "start", "pause": "cont", "cut": "plug"}


def _undo(what: str, words: str, directory: Path | None) -> str:
    where = f" --dir {shlex.quote(str(directory))}" if directory is not None else ""
    return f"; to undo it: ftsupervise sandbox {what} {words}{where}" if words else ""


@sandbox.command()
@click.argument("name")
@click.argument("action", type=click.Choice(NODE_ACTIONS))
@_directory
@JSON
def node(name: str, action: Any, directory: Path | None, as_json: bool) -> None:
    """Start, stop or break a node.

    \b
    stop   a clean end of slurmd     kill   SIGKILL to slurmd; its jobs live on
    pause  slurmd hangs              cont   and goes on
    crash  a power cut: slurmd and all its jobs' processes end at one moment;
           start brings it back
    cut    its network cable is out  plug   and in again (up --hosts only)
    """
    made = Sandbox.at(directory)
    made.node(name, action)
    if as_json:
        answer(directory=made.directory, node=name, action=action, undo=_BACK.get(action))
        return
    back = _BACK.get(action, "")
    click.echo(f"{name}: {_DONE[action]}{_undo('node', f'{name} {back}' if back else '', directory)}")


@sandbox.command()
@click.argument("action", type=click.Choice(CONTROLLER_ACTIONS))
@_directory
@JSON
def controller(action: Any, directory: Path | None, as_json: bool) -> None:
    """Start, stop or break slurmctld. Paused, it makes every Slurm command hang."""
    made = Sandbox.at(directory)
    made.controller(action)
    if as_json:
        answer(directory=made.directory, action=action, undo=_BACK.get(action))
        return
    click.echo(f"slurmctld: {_DONE[action]}{_undo('controller', _BACK.get(action, ''), directory)}")


@sandbox.command("exec", hidden=True)
@_directory
@_shape
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def exec_(ctx: click.Context, /, directory: Path | None, command: tuple[str, ...], **shape: Any) -> None:
    """Run COMMAND in the sandbox that is up, or in one that lives as long as COMMAND. Ends with its exit code."""
    asked = {
        name: value for name, value in shape.items() if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    ctx.exit(follow(command, directory, **asked))
