"""``ftsupervise help VERB``: what ``VERB --help`` prints; the same as values for programs, and as man pages.

The pages of reference are made of the same values (docs/write_reference.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from typing import NamedTuple

import click

from ftsupervise.cli.command_group import no_such_command, summary_of
from ftsupervise.cli.names import Named
from ftsupervise.cli.output import answer
from ftsupervise.errors import UsageError
from ftsupervise.version import VERSION


def _verbs(ctx: click.Context) -> Iterable[str]:
    assert ctx.parent is not None
    found = _context_of(ctx.parent, ctx.params.get("verbs") or ())
    return found.command.list_commands(found) if isinstance(found.command, click.Group) else ()


@click.command("help")
@click.argument("verbs", nargs=-1, metavar="[VERB [SUBVERB]]", type=Named(_verbs))
@click.option("--man", "as_man", is_flag=True, help="As a man page: ftsupervise help --man VERB | man -l -")
@click.option(
    "--json", "as_json", is_flag=True, help="Usage, text and options of it and of all below it, for programs."
)
@click.pass_context
def show_help(ctx: click.Context, verbs: tuple[str, ...], as_man: bool, as_json: bool) -> None:
    """Show the help of ftsupervise, of a command, or of a command of a group.

    \b
    ftsupervise help
    ftsupervise help launch
    ftsupervise help cron install

    After pip has installed it into an environment whose bin is in the PATH, `man ftsupervise` and `man ftsupervise-launch` show
    the same.
    """
    assert ctx.parent is not None
    if as_man and as_json:
        raise UsageError("--man and --json do not go together", hint="leave one of them out")
    found = _context_of(ctx.parent, verbs)
    if not (as_man or as_json):
        click.echo(found.get_help())
        return
    if as_json:
        answer(**page_of(found)._asdict())
        return
    from ftsupervise.cli import GROUPS

    if len(verbs) > 1:  # the page of a group has them all
        found = _context_of(ctx.parent, verbs[:1])
    click.echo(man_page(page_of(found), GROUPS), nl=False)


def _context_of(root: click.Context, verbs: Sequence[str]) -> click.Context:
    """Return the context in which the command is that ``verbs`` name. Raises click.UsageError where there is none."""
    found = root
    for word in verbs:
        group = found.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"it has no commands of its own, so {word!r} names none", found)
        command = group.get_command(found, word)
        if command is None:
            raise no_such_command(word, group.list_commands(found), found)
        found = click.Context(command, info_name=word, parent=found)
    return found


# Every command of click's table as values.


class Paragraph(NamedTuple):
    """A part of a help text. ``kept``: its lines stay as they are."""

    text: str
    kept: bool = False


class OptionLine(NamedTuple):
    """An option, as ``--help`` lists it."""

    names: str
    meaning: str


class CommandPage(NamedTuple):
    """One command. ``name``: its words without the program's, "" for the program itself; ``below``: those of a group."""

    name: str
    usage: str
    summary: str
    paragraphs: tuple[Paragraph, ...]
    options: tuple[OptionLine, ...]
    below: tuple[CommandPage, ...] = ()


def page_of(ctx: click.Context) -> CommandPage:
    """Return the page of the command of ``ctx``, which stands below that of the program, and the pages below it. Hidden ones
    are left out."""
    command = ctx.command
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    options = tuple(_options(command, ctx))
    name = ctx.command_path.partition(" ")[2]
    return CommandPage(name, usage, summary_of(command), tuple(_paragraphs(command.help or "")), options, _below(ctx))


def _below(ctx: click.Context) -> tuple[CommandPage, ...]:
    group = ctx.command
    if not isinstance(group, click.Group):
        return ()
    named = [(name, group.get_command(ctx, name)) for name in group.list_commands(ctx)]
    inner = [
        click.Context(one, info_name=name, parent=ctx) for name, one in named if one is not None and not one.hidden
    ]
    return tuple(map(page_of, inner))


def _options(command: click.Command, ctx: click.Context) -> Iterator[OptionLine]:
    for one in command.params:
        record = one.get_help_record(ctx) if isinstance(one, click.Option) and not one.hidden else None
        if record is not None:
            yield OptionLine(*record)


def _paragraphs(text: str) -> Iterator[Paragraph]:
    r"""Yield the paragraphs of a help text; one that click leaves as it is begins with \b."""
    for part in cleandoc(text).replace("``", "`").split("\n\n"):
        if part.startswith("\b"):
            yield Paragraph(part.removeprefix("\b").strip("\n"), kept=True)
        else:
            yield Paragraph(" ".join(part.split()))


# Man pages: one for the program, and one for each command, with the commands of its group.


def page_name(page: CommandPage) -> str:
    """Return what ``man`` is asked for: "ftsupervise", "ftsupervise-launch"."""
    return "-".join(["ftsupervise", *page.name.split()[:1]])


def man_page(page: CommandPage, groups: Mapping[str, Sequence[str]]) -> str:
    """Return ``page`` in the language of man(7). ``groups``: the commands of the program in the groups of its help."""
    name = page_name(page)
    lines = [
        f'.TH "{_text(name.upper())}" "1" "" "ftsupervise {VERSION}" "ftsupervise"',
        *(".SH NAME", f"{_text(name)} \\- {_text(page.summary[:1].lower() + page.summary[1:].rstrip('.'))}"),
        *(".SH SYNOPSIS", f".B {_text(page.usage)}"),
        *(".SH DESCRIPTION", *_man_text(page.paragraphs)),
        *([".SH OPTIONS"] if page.options else []),
        *_man_options(page),
        *(_commands(page) if page.name else _groups(page, groups)),
        *(".SH SEE ALSO", _see_also(page)),
    ]
    return "\n".join(lines) + "\n"


def _groups(page: CommandPage, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    said = {one.name: one.summary for one in page.below}
    yield ".SH COMMANDS"
    for title, names in groups.items():
        yield f".SS {_text(title)}"
        for name in names:
            yield from (".TP", f".B {_text(name)}", _text(said[name]))


def _commands(page: CommandPage) -> Iterator[str]:
    if page.below:
        yield ".SH COMMANDS"
    for one in page.below:
        yield from (f".SS {_text(one.name)}", f".B {_text(one.usage)}", ".PP", *_man_text(one.paragraphs))
        yield from _man_options(one)


def _man_options(page: CommandPage) -> Iterator[str]:
    for one in page.options:
        yield from (".TP", f".B {_text(one.names)}", _text(" ".join(one.meaning.split())))


def _man_text(paragraphs: Sequence[Paragraph]) -> Iterator[str]:
    for number, one in enumerate(paragraphs):
        yield from [".PP"] if number else []
        if one.kept:
            yield from (".nf", ".RS 2", *map(_text, one.text.splitlines()), ".RE", ".fi")
        else:
            yield _text(one.text)


def _see_also(page: CommandPage) -> str:
    return ".BR ftsupervise (1)" if page.name else ".B ftsupervise help"


def _text(text: str) -> str:
    """Return ``text`` such that man shows it as it is."""
    plain = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga").replace('"', "\\(dq")
    )
    plain = plain.replace("~", "\\(ti").replace("^", "\\(ha")
    plain = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in plain)
    return f"\\&{plain}" if plain.startswith(".") else plain
