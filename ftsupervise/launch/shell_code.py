"""Says what ``launch.command`` is: a program, shell code for each rank, an srun of its own, or code that calls srun itself.

An srun inside the srun that we add waits for ever for the resources that the outer one holds. So the code is read as a shell
reads it, with its quotes, comments, here-documents and continued lines. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ftsupervise.host.processes import OUTLIVES
from ftsupervise.scheduler.parse import is_srun, srun_options


class ShellWord(str):
    """A word of shell code, as the person wrote it: the job's shell expands it, as it would in a script of theirs."""

    __slots__ = ()


class Kind(Enum):
    PROGRAM = "a program and its arguments"
    CODE = "shell code that calls no srun"
    SRUN = "one srun"
    AROUND = "shell code that calls srun itself"


@dataclass(frozen=True)
class Understood:
    """What a command is. ``words``: those of the program or of the srun, for CODE and AROUND those of a shell."""

    kind: Kind
    words: tuple[str, ...]
    assignments: tuple[str, ...] = ()  # NAME=value before the srun


@dataclass(frozen=True)
class Simple:
    """One simple command of the code: its words as they are written."""

    words: tuple[str, ...]
    inner: tuple[str, ...]  # the code of its command substitutions


_BUILTINS = re.compile(r"exec|cd|export|source|\.|eval|set|unset|ulimit|umask|trap|time|if|for|while|case|test|\[|\{")
_PLAIN_SHELL = re.compile(r"[A-Za-z0-9_@%+=:,./ -]*")
_ASSIGNS = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATOR = re.compile(r"&>>|&>|\d*(?:<<<|<<-?|<>|[<>]&|>>|>\||<(?!\()|>(?!\())|;;&|;;|;&|;|&&|\|\||\|&|&|\||\(|\)")
_RESERVED = frozenset(
    ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done", "esac", "coproc")
)
_LEADING = frozenset(("exec", "time", "command", "env"))  # may stand before our own srun, and then mean nothing more
_WRAPPERS = _LEADING | {
    "nohup", "builtin", "timeout", "nice", "ionice", "stdbuf", "setsid", "unbuffer", "numactl", "taskset", "chrt", "sudo",
    "strace", "xargs", "catchsegv", "gtime", "script",
}  # fmt: skip
_BETWEEN = re.compile(r"-.*|\d[\d.:,a-z-]*|[A-Za-z_]\w*=.*")  # words between such a program and the one that it starts
_SRUN_LATER = re.compile(r"\s*(?:\S*/)?srun(?:\s|$)")
_SHELLS = re.compile(r"(?:\S*/)?(?:ba|da|k|z)?sh")


def understand(command: str | Sequence[str], warning: str = "USR1") -> Understood:
    """Return what ``command`` is. Text is shell code, a list is a program and its arguments."""
    if not isinstance(command, str):
        return _of_list(tuple(command))
    try:
        simples, alone = _read(command)
    except ValueError:  # a shell will say what is wrong with it
        return Understood(Kind.AROUND if re.search(r"\bsrun\b", command) else Kind.CODE, in_a_shell(command, warning))
    if alone and len(simples) == 1:
        assignments, at = _leading(simples[0].words)
        words = simples[0].words[at:]
        if is_srun([_plain(word) for word in words[:1]]):
            return Understood(Kind.SRUN, tuple(map(_kept, words)), tuple(ShellWord(one) for one in assignments))
    if any(map(_calls_srun, simples)):
        return Understood(Kind.AROUND, in_a_shell(command, warning))
    first = command.split()[0]
    if _PLAIN_SHELL.fullmatch(command.strip()) and "=" not in first and not _BUILTINS.fullmatch(first):
        return Understood(Kind.PROGRAM, tuple(shlex.split(command)))
    return Understood(Kind.CODE, in_a_shell(command, warning))


def words_before_a_program(code: str) -> tuple[str, ...]:
    """Return the words of one simple command, to which those of a program are added. Raises ValueError for other code."""
    simples, alone = _read(code)
    if not alone or len(simples) != 1:
        raise ValueError("not one simple command")
    return tuple(map(_kept, simples[0].words))


def in_a_shell(code: str, warning: str = "USR1", more: str = "") -> tuple[str, ...]:
    """Return a bash that outlives the warning signal (a bash without a trap dies of it and takes the rank along), and that
    fails with any part of a pipe: ``train.py | tee log`` fails when train.py does."""
    trapped = " ".join(dict.fromkeys(("USR1", "USR2", warning)))
    return ("bash", "-c", f"{OUTLIVES}{trapped}\n{more}{code}")


def calls_srun(code: str) -> bool:
    """Return whether this shell code starts an srun anywhere."""
    try:
        return any(map(_calls_srun, _read(code)[0]))
    except ValueError:
        return re.search(r"\bsrun\b", code) is not None


def expands(command: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the variables ``names`` that this code, or a shell among these words, expands."""
    text = command if isinstance(command, str) else "\n".join(command)
    return tuple(name for name in names if re.search(rf"\$(?:{name}\b|\{{{name}\b)", text))


def program_words(found: Understood) -> tuple[str, ...]:
    """Return the first words of each program that a rank runs, as far as they are known before they are expanded."""
    if found.kind is Kind.SRUN:
        return found.words[srun_options(found.words)[1] :][:3]
    if found.kind is Kind.CODE:
        simples = _read(found.words[-1])[0]
        return tuple(_plain(word) for one in simples for word in one.words[:3] if not _ASSIGNS.match(word))
    return found.words[:3]


def python_files(found: Understood) -> tuple[str, ...]:
    """Return the words of the code that name a Python file, as a launcher such as torchrun has them behind its own options; of
    a module (``-m scripts.train``) the file that it may be.
    """
    words, files = _all_words(found), []
    for before, word in zip(("", *words), words, strict=False):
        if before == "-m" and re.fullmatch(r"[A-Za-z_]\w*(?:\.\w+)*", word):
            files.append(f"{word.replace('.', '/')}.py")
        elif re.fullmatch(r"[^\s$'\"`-][^\s$'\"`]*\.py", word):
            files.append(word)
    return tuple(files)


def shell_files(found: Understood) -> tuple[str, ...]:
    """Return the words of the code that name a shell script: ``bash job.sh``, ``./job.sh``."""
    words = _all_words(found)
    named = (
        word
        for before, word in zip(("", *words), words, strict=False)
        if word.endswith(".sh") or _SHELLS.fullmatch(before)
    )
    return tuple(word for word in named if re.fullmatch(r"[^\s$'\"`-][^\s$'\"`]*", word))


def _all_words(found: Understood) -> Sequence[str]:
    if found.kind in (Kind.SRUN, Kind.PROGRAM):
        return found.words
    try:
        return [_plain(word) for one in _read(found.words[-1])[0] for word in one.words]
    except ValueError:
        return ()


def _of_list(words: tuple[str, ...]) -> Understood:
    assignments, at = _leading(words)
    if at and is_srun(words[at:]):
        given = (one.partition("=") for one in assignments)
        return Understood(Kind.SRUN, words[at:], tuple(ShellWord(f"{n}={shlex.quote(v)}") for n, _, v in given))
    simple = Simple(tuple(map(shlex.quote, words)), ())
    kind = Kind.SRUN if is_srun(words) else Kind.AROUND if _calls_srun(simple) else Kind.PROGRAM
    return Understood(kind, words)


def _leading(words: Sequence[str]) -> tuple[list[str], int]:
    """Return the assignments before a command's own first word, and the index of that word."""
    found: list[str] = []
    for index, word in enumerate(words):
        if _ASSIGNS.match(word):
            found.append(word)
        elif word not in _LEADING:
            return found, index
    return found, len(words)


def _calls_srun(simple: Simple) -> bool:
    if any(map(calls_srun, simple.inner)):
        return True
    plain = [_plain(word) for word in simple.words]
    if any(_ASSIGNS.match(word) and _SRUN_LATER.match(word.partition("=")[2]) for word in plain):
        return True  # cmd="srun python train.py", and then $cmd
    at = next((index for index, word in enumerate(plain) if not _ASSIGNS.match(word)), len(plain))
    while at < len(plain):
        word = plain[at]
        if is_srun([word]):
            return True
        if word == "eval":
            return calls_srun(" ".join(plain[at + 1 :]))
        if _SHELLS.fullmatch(word):
            code = next((i for i, one in enumerate(plain) if i > at and re.fullmatch(r"-[a-z]*c", one)), None)
            return code is not None and code + 1 < len(plain) and calls_srun(plain[code + 1])
        if word not in _WRAPPERS:
            return False
        at += 1
        while at < len(plain) and _BETWEEN.fullmatch(plain[at]):
            at += 1
    return False


def _plain(word: str) -> str:
    """Return a word without its quotes, as far as that can be said before it is expanded."""
    try:
        return "".join(shlex.split(word)) if word[:1] != "#" else word
    except ValueError:
        return word


def _kept(word: str) -> str:
    """Return a word without its quotes where nothing in it is expanded, and as it is written where something is."""
    return _plain(word) if re.fullmatch(r"[\w@%+=:,./-]*|'[^']*'", word) else ShellWord(word)


# ------------------------------------------------------------------------------------------------------------- reading


def _read(code: str) -> tuple[list[Simple], bool]:
    """Return the simple commands of ``code``, and whether it is one and nothing else. Raises ValueError for an open quote."""
    simples: list[Simple] = []
    words: list[str] = []
    inner: list[str] = []
    alone, skip = True, False  # skip: the next word is the target of a redirection
    for kind, text, code_within, *_ in tokens(code):
        if kind == "word":
            if skip:
                skip, inner = False, [*inner, *code_within]
            elif not words and text in _RESERVED:
                alone = False
            else:
                words.append(text)
                inner += code_within
        elif "<" in text or ">" in text:
            alone, skip = False, True
        else:
            alone = alone and text in (";", "\n")
            if words or inner:
                simples.append(Simple(tuple(words), tuple(inner)))
            words, inner = [], []
    if words or inner:
        simples.append(Simple(tuple(words), tuple(inner)))
    return simples, alone


class Token(NamedTuple):
    """A word or an operator of shell code, from ``start`` to ``end``. ``document``: the end of the here-documents behind a
    line's end; 0: there are none.
    """

    kind: str  # "word" or "operator"
    text: str
    within: list[str]  # the code of its substitutions
    start: int
    end: int
    document: int = 0


def tokens(code: str) -> Iterator[Token]:
    """Yield the words and operators of ``code``, without comments and here-documents. Raises ValueError for an open quote."""
    at, ends = 0, list[tuple[str, bool]]()  # of the here-documents that begin on this line
    while at < len(code):
        if code.startswith("\\\n", at):
            at += 2
        elif code[at] in " \t\r":
            at += 1
        elif code[at] == "#":
            at = _until(code, at, "\n")
        elif code[at] == "\n":
            start, at = at, at + 1
            for end, tabs in ends:
                at = _after_document(code, at, end, tabs)
            yield Token("operator", "\n", [], start, start + 1, at if ends else 0)
            ends.clear()
        elif match := _OPERATOR.match(code, at):
            yield Token("operator", match[0], [], at, match.end())
            at = match.end()
            if match[0].lstrip("0123456789") in ("<<", "<<-"):
                start = _after_blanks(code, at)
                text, at, _ = _word(code, start)
                ends.append((_plain(text), match[0].endswith("-")))
                yield Token("word", text, [], start, at)
        else:
            start = at
            text, at, within = _word(code, at)
            yield Token("word", text, within, start, at)


def _after_blanks(code: str, at: int) -> int:
    while at < len(code) and code[at] in " \t":
        at += 1
    return at


def _after_document(code: str, at: int, end: str, tabs: bool) -> int:
    while at < len(code):
        stop = _until(code, at, "\n")
        line = code[at:stop]
        at = stop + 1
        if (line.lstrip("\t") if tabs else line) == end:
            break
    return at


def _until(code: str, at: int, what: str) -> int:
    found = code.find(what, at)
    return len(code) if found < 0 else found


def _word(code: str, at: int) -> tuple[str, int, list[str]]:
    """Return the word at ``at``, without continued lines; the place behind it; and the code of its substitutions."""
    parts: list[str] = []
    within: list[str] = []
    while at < len(code) and code[at] not in " \t\r\n;&|()":
        if code[at] in "<>" and not code.startswith("(", at + 1):
            break
        try:
            stop = _piece(code, at, within)
        except RecursionError:
            raise ValueError("brackets are nested too deeply") from None
        if code[at:stop] != "\\\n":
            parts.append(code[at:stop])
        at = stop
    return "".join(parts), at, within


def _piece(code: str, at: int, within: list[str]) -> int:
    """Return the place behind the character, quote or expansion at ``at``. Raises ValueError when it is not closed."""
    if code[at] == "\\":
        return min(len(code), at + 2)
    if code[at] == "'":
        return _behind(code.find("'", at + 1))
    if code[at] == '"':
        at += 1
        while at < len(code) and code[at] != '"':
            at = _piece(code, at, within) if code[at] in "\\$`" else at + 1
        return _behind(at if at < len(code) else -1)
    if code[at] == "`":
        stop = _behind(code.find("`", at + 1))
        within.append(code[at + 1 : stop - 1])
        return stop
    if code.startswith(("$(", "<(", ">("), at):
        stop = _bracket(code, at + 2, ")")
        if not code.startswith("$((", at):
            within.append(code[at + 2 : stop - 1])
        return stop
    if code.startswith("${", at):
        return _bracket(code, at + 2, "}")
    return at + 1


def _behind(at: int) -> int:
    """Return the place behind the closing quote at ``at``; -1: there is none."""
    if at < 0:
        raise ValueError("a quote is not closed")
    return at + 1


def _bracket(code: str, at: int, end: str) -> int:
    """Return the place behind the bracket ``end`` that closes the one before ``at``."""
    depth = 1
    while at < len(code):
        if code[at] == end:
            depth -= 1
            if not depth:
                return at + 1
            at += 1
        elif code[at] in "\\'\"`$":
            at = _piece(code, at, [])
        else:
            depth += code[at] == {")": "(", "}": "{"}[end]
            at += 1
    raise ValueError("a bracket is not closed")
