"""``ftsupervise completion SHELL``: the script with which a shell completes our words, and what the program answers it.

The shell asks at each press of a key, so the answer has a bound, and is nothing at all where something is wrong.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn

import click

VARIABLE = "_FTSUPERVISE_COMPLETE"  # as click calls it: bash_complete, zsh_complete, fish_complete
_WITHIN = 2.0  # seconds; a mount that hangs costs them once, not at every key
_PLAIN = r"[\w.@%+:/=~-]+"  # what a shell takes as it is: bash would expand a star in a name
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options and names: of runs, watchdogs, alerts, nodes.

    \b
    bash  eval "$(ftsupervise completion bash)"       in ~/.bashrc
    zsh   eval "$(ftsupervise completion zsh)"        in ~/.zshrc, after compinit
    fish  ftsupervise completion fish | source        in config.fish

    What a place does not say within two seconds is not completed; nothing is printed where something is wrong.
    """
    context = click.get_current_context().find_root()
    click.echo(_script(context.command, shell))


def _script(program: click.Command, shell: str) -> str:
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    # past the method of bash, which starts a bash to ask for its version
    text = ShellComplete.source(kind(program, {}, "ftsupervise", VARIABLE)).strip()
    # click has bash run the word that was typed, which may be ./ftsupervise in a folder of others
    return text.replace("=bash_complete $1)", "=bash_complete ftsupervise)")


def answer_the_shell(program: click.Command) -> NoReturn:
    """Print what may stand where the person is, and end; print nothing where that cannot be found out in time."""
    from ftsupervise.probe.errand import within

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    said = ""
    try:
        shell, _, _ = os.environ[VARIABLE].partition("_")
        before = " ".join(os.environ.get("COMP_WORDS", "").split()[:3])
        said = within(
            _WITHIN, lambda: _completions(program, shell), key=f"completion {os.environ.get('PWD', '')} {before}"
        )
    except BaseException:  # whatever it is: a person is in the middle of a word
        said = ""
    os.write(1, said.encode("utf-8", "surrogateescape"))
    os._exit(0)


def _completions(program: click.Command, shell: str) -> str:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        return ""
    asked = kind(program, {}, "ftsupervise", VARIABLE)
    words, incomplete = asked.get_completion_args()
    found = asked.get_completions(words, incomplete)
    kept = [one for one in found if one.type != "plain" or re.fullmatch(_PLAIN, one.value)]
    return "".join(f"{asked.format_completion(one)}\n" for one in kept)
