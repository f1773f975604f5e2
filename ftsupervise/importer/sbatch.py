"""Reads the ``#SBATCH`` lines of a person's job script into options, as sbatch itself does: which lines count, which words
they hold, and what each word means. Pure.

Source: ``src/sbatch/opt.c`` of Slurm 22.05 to 25.11, and sbatch(1). A directive counts up to the first line that is neither
blank nor a comment; ``#`` is its first character; quotes, backslashes and comments are those of Slurm, not of a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftsupervise.errors import Untranslatable
from ftsupervise.launch.shell_code import tokens

# Long names of sbatch's options: with a value, with a value that may be left out ("--nice", "--nice=10"), without one.
_VALUE = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
    core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket open-mode output partition power prefer priority profile qos reservation resv-ports segment signal
    sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
    wrap
    """.split()  # noqa: SIM905 - a list of quoted words reads worse
)
_MAY_HAVE_VALUE = frozenset(("exclusive", "get-user-env", "nice", "no-kill", "propagate", "requeue"))
_NONE = frozenset(
    """
    contiguous hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot spread-job stepmgr test-only
    use-min-nodes verbose wait
    """.split()  # noqa: SIM905
)
_ALL = _VALUE | _MAY_HAVE_VALUE | _NONE
_SHORT = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input", "J": "job-name",
    "k": "no-kill", "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe", "S": "core-spec", "t": "time",
    "v": "verbose", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip
_ALSO = {
    "tasks-per-node": "ntasks-per-node",
    "workdir": "chdir",
    "share": "oversubscribe",
    "gpus-per-tasks": "gpus-per-task",
}
_HET = frozenset(("hetjob", "packjob"))
_MAGIC = "#SBATCH"
_ELSEWHERE = re.compile(r"#(PBS|BSUB|\$)(?=\s)")
_NEARLY = re.compile(r"\s+#SBATCH\b|#\s+SBATCH\b|#sbatch\b")


@dataclass(frozen=True)
class Option:
    """One option as it was given. ``value``: "" where it has none. ``line``: of the script, from 1; 0: typed."""

    name: str  # the long name
    value: str = ""
    line: int = 0
    known: bool = True  # False: none of sbatch(1); a plugin of the site may know it

    @property
    def text(self) -> str:
        return f"--{self.name}={self.value}" if self.value or self.name in _VALUE else f"--{self.name}"


@dataclass(frozen=True)
class Script:
    """A job script, read. ``body``: its text from the first command on; ``body_line``: the line that begins there."""

    text: str
    interpreter: tuple[str, ...]  # the words of its first line: ("/bin/bash", "-l")
    options: tuple[Option, ...]  # in their order; of two equal ones sbatch takes the last
    ignored: tuple[tuple[int, str], ...]  # lines that look like options and that sbatch passes over, with the reason
    body: str
    body_line: int

    @property
    def given(self) -> dict[str, Option]:
        """The option that counts, by its name."""
        return {one.name: one for one in self.options}


def read_script(text: str) -> Script:
    """Return the script. Raises Untranslatable for what sbatch itself refuses, and for a heterogeneous job."""
    lines = text.splitlines()
    if not text.startswith("#!"):
        raise Untranslatable(
            "line 1 does not begin with #!: sbatch takes no such script", hint='begin it with "#!/bin/bash"'
        )
    if "\r\n" in text:
        raise Untranslatable(
            "the script has DOS line ends (\\r\\n), which sbatch refuses", hint="sed -i 's/\\r$//' SCRIPT removes them"
        )
    options: list[Option] = []
    ignored: list[tuple[int, str]] = []
    at = len(lines)
    for number, line in enumerate(lines[1:], 2):
        if line.startswith(_MAGIC):
            options += options_of(words_of(line[len(_MAGIC) :], number), number)
        elif line.strip() and not line.lstrip().startswith("#"):
            at = number - 1
            break
        elif _NEARLY.match(line):
            ignored.append((number, "sbatch reads #SBATCH at the line's beginning only"))
        elif _ELSEWHERE.match(line):
            ignored.append((number, "an option of another scheduler: write it as #SBATCH"))
    body = "\n".join(lines[at:]) + "\n" if lines[at:] else ""
    for number in _after(body, at + 1):
        ignored.append((number, "it stands after the first command, where sbatch reads no options"))
    interpreter = tuple(lines[0][2:].split())
    if interpreter[:1] and interpreter[0].endswith("/env"):
        interpreter = tuple(word for word in interpreter[1:] if word != "-S")
    if not interpreter:
        raise Untranslatable("line 1 names no interpreter", hint='begin the script with "#!/bin/bash"')
    return Script(text, interpreter, tuple(options), tuple(ignored), body, at + 1)


def _after(body: str, first: int) -> Iterator[int]:
    """Yield the lines of ``body`` that look like options and are comments: not those in a text that the script writes."""
    inside: set[int] = set()
    try:
        found = list(tokens(body))
    except ValueError:
        return
    for one in found:
        inside.update(
            range(body.count("\n", 0, one.start), body.count("\n", 0, one.end - 1) + 1) if one.text != "\n" else ()
        )
        inside.update(
            range(body.count("\n", 0, one.end), body.count("\n", 0, one.document))
        )  # here-documents behind it
    for number, line in enumerate(body.splitlines()):
        if line.startswith(f"{_MAGIC} ") and number not in inside:
            yield first + number


def words_of(line: str, number: int = 0) -> list[str]:
    """Return the words of what follows ``#SBATCH``: quotes join, a backslash escapes inside too, ``#`` begins a comment.

    Raises Untranslatable for a quote that is not closed.
    """
    words: list[str] = []
    word: list[str] | None = None
    quote, escaped = "", False
    for char in line:
        if escaped and (quote or not char.isspace()):  # (a blank ends a word all the same)
            word, escaped = [*(word or []), char], False
        elif char == "\\" and not escaped:
            escaped, word = True, word or []
        elif quote:
            quote = "" if char == quote else quote
            word = word or []
            if quote:
                word.append(char)
        elif char in "\"'":
            quote, word = char, word or []
        elif char == "#":
            break
        elif char.isspace():
            words += ["".join(word)] if word is not None else []
            word, escaped = None, False
        else:
            word = [*(word or []), char]
    if quote:
        raise Untranslatable(f"line {number}: a quote {quote} is not closed")
    return words + (["".join(word)] if word is not None else [])


def options_of(words: Sequence[str], line: int = 0) -> list[Option]:
    """Return the options in ``words``: ``--x=y``, ``--x y``, ``-N 2``, ``-N2``, and a long name that was cut short.

    Raises Untranslatable for what sbatch refuses, and for the mark of a heterogeneous job.
    """
    found, rest = typed_options(words, line)
    if rest:
        if rest[0] in _HET or rest[0] == ":":
            raise Untranslatable(
                f"line {line}: {rest[0]} makes this a heterogeneous job, and the jobs of a chain have nodes of one kind",
                hint="write one part of it as a job of its own",
            )
        raise Untranslatable(f"line {line}: {rest[0]!r} is no option, and sbatch refuses it")
    return found


def typed_options(words: Sequence[str], line: int = 0) -> tuple[list[Option], list[str]]:
    """Return the options at the beginning of ``words``, and the rest: a script and its arguments, where they were typed."""
    found: list[Option] = []
    at = 0
    where = f"line {line}: " if line else ""
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or word == "-":
            return found, list(words[at:])
        at += 1
        if word == "--":
            return found, list(words[at:])
        following = words[at] if at < len(words) else None
        if not word.startswith("--"):
            at += _short(word, following, line, found, where)
            continue
        given, equals, value = word[2:].partition("=")
        name = _long(given, where)
        if name in _NONE:
            if equals:
                raise Untranslatable(f"{where}--{name} takes no value")
        elif name in _VALUE and not equals:
            if following is None:
                raise Untranslatable(f"{where}--{name} needs a value")
            value, at = following, at + 1
        elif name not in _ALL and not equals and following is not None and not following.startswith("-"):
            value, at = following, at + 1
        found.append(Option(name, value, line, known=name in _ALL))
    return found, []


def _short(word: str, following: str | None, line: int, found: list[Option], where: str) -> int:
    """Add the options of a word such as ``-N2`` or ``-HO``; return how many of the following words it takes."""
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = _SHORT.get(letter)
        if name is None:
            raise Untranslatable(f"{where}-{letter} is no option of sbatch")
        if name in _VALUE:
            if not letters and following is None:
                raise Untranslatable(f"{where}-{letter} (--{name}) needs a value")
            found.append(Option(name, letters or following or "", line))
            return 0 if letters else 1
        if name in _MAY_HAVE_VALUE:
            found.append(Option(name, letters, line))
            return 0
        found.append(Option(name, "", line))
    return 0


def _long(given: str, where: str) -> str:
    """Return the whole name. A name may be cut short, as long as it begins no second one."""
    if given in _ALL:
        return given
    if given in _ALSO:
        return _ALSO[given]
    begun = sorted(name for name in (*_ALL, *_ALSO) if name.startswith(given))
    if len(begun) == 1:
        return _ALSO.get(begun[0], begun[0])
    if begun:
        raise Untranslatable(f"{where}--{given} begins several options: {', '.join(begun[:4])}")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", given):
        raise Untranslatable(f"{where}--{given} is no option of sbatch")
    return given
