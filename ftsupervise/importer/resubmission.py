"""Which commands of a job script put a job into the queue, and whether that job is the script again. Pure.

It stands alone because a script has many names for itself: ``$0``, its file, what Slurm knows of it, a variable with any of
these. What else ``sbatch`` is given is another script, or one that only a shell could name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from ftsupervise.errors import Untranslatable
from ftsupervise.importer.sbatch import typed_options
from ftsupervise.importer.statements import ASSIGNS
from ftsupervise.launch.shell_code import Token, tokens

_OF_ANOTHER = re.compile(r"\b__file__\b|\bargv\[0\]|\$argv0\b")  # in the languages of other scripts
OWN_PATH = re.compile(r"\$(?:0\b|\{0\b|\{?BASH_SOURCE\b)")
_OF_SLURM = re.compile(
    r"\bscontrol\b.{0,99}\bshow\b.{0,99}\bjob(?:id|s)?\b.{0,299}\bCommand\b|\bsqueue\b.{0,299}(?:%\.?\d*o\b|\b[Cc]ommand\b)",
    re.S,
)
_BRACKETED = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"  # as deep as people write it
# The folder of a path, and no file.
_FOLDER = re.compile(rf"\bdirname\b(?:[^()`]|{_BRACKETED})*|\$\{{(?:0|BASH_SOURCE(?:\[0\])?|[A-Za-z_]\w*)%/\*\}}")
_EXPANDS = re.compile(rf"\${_BRACKETED}|`[^`]*`|\$\{{[^}}]*\}}|\$\w+|\$[@*#?$!]|[*?]|\{{\}}")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_USES = re.compile(r"\$\{?([A-Za-z_]\w*)")
_SPEAKS = re.compile(r"\bsbatch\b|\bscontrol\W+requeue\w*\b")
_ENDS = frozenset((";", "&", "|", "|&", "&&", "||", "\n", "(", ")", ";;", ";&", ";;&"))
_GOES_ON = frozenset(("if", "then", "else", "elif", "do", "while", "until", "!", "{"))
_COPIES = re.compile(r"\bcp\s[^;&|\n]*|\bscontrol\s+write\s+batch_script\s[^;&|\n]*")
_TELLS = frozenset(("[", "[[", "command", "echo", "grep", "hash", "man", "printf", "test", "type", "which"))
_NESTED = 5  # variables in variables, code in code


class Whose(IntEnum):
    """Which script a command submits, the worst for a chain last."""

    OTHER = 0
    UNKNOWN = 1
    ITSELF = 2


@dataclass(frozen=True)
class Submission:
    """``start`` and ``end``: in the code, of the command, or of the word that holds it. ``can_end``: an exit in its place ends
    the script.
    """

    start: int
    end: int
    whose: Whose
    can_end: bool


class Submits:
    """Knows by which names the script ``code`` goes. ``own``: the path of its file; "" where it is none."""

    def __init__(self, code: str, own: str) -> None:
        self._own = own.rpartition("/")[2]
        self._named = re.compile(rf"(?<![\w.-]){re.escape(self._own)}(?![\w.-])") if self._own else None
        self._values: dict[str, list[str]] = {}
        for name, value in _assignments(code):
            self._values.setdefault(name, []).append(value)
        self._names, self._copies = set[str](), set[str]()
        for _ in range(_NESTED):
            self._names |= {name for name, values in self._values.items() if any(map(self._is_itself, values))}
        made = [one for one in _COPIES.findall(code) if "scontrol" in one or self._is_itself(one)]
        self._copies = {_bare(one.split()[-1]) for one in made} - {""}

    def _is_itself(self, text: str) -> bool:
        text = _FOLDER.sub("", text)
        return bool(
            OWN_PATH.search(text)
            or _OF_SLURM.search(text)
            or (self._named is not None and self._named.search(text))
            or self._names & set(_USES.findall(text))
        )

    def itself(self, code: str) -> Submission | None:
        """Return the first command of the code that submits the script again."""
        return next((one for one in self.found(code) if one.whose is Whose.ITSELF), None)

    def worst(self, code: str) -> Submission | None:
        """Return that which is the worst for a chain; None where the code submits nothing."""
        return max(self.found(code), key=lambda one: one.whose, default=None)

    def found(self, code: str, depth: int = 0) -> list[Submission]:
        """Return the commands that submit a job, in their order."""
        if depth > _NESTED or re.search(r"sbatch|requeue", code) is None:
            return []
        try:
            return [one for command in _commands(code) for one in self._of_command(code, command, depth)]
        except ValueError:
            return list(self.by_lines(code))

    def by_lines(self, code: str) -> Iterator[Submission]:
        """Yield those in code that is not understood, or is none of a shell."""
        at = 0
        for line in code.splitlines(keepends=True):
            if not line.lstrip().startswith("#") and (spoken := _SPEAKS.search(line)):
                behind = line[spoken.end() :]
                again = "requeue" in spoken[0] or self._is_itself(behind) or _OF_ANOTHER.search(behind)
                again = again and re.search(r"[\"'$`]", line)  # (else it may be a sentence in a text)
                yield Submission(at, at + len(line.rstrip("\n")), Whose.ITSELF if again else Whose.UNKNOWN, False)
            at += len(line)

    def _of_command(self, code: str, command: _Command, depth: int) -> Iterator[Submission]:
        words = [one for one in command.tokens if one.kind == "word"]
        first = next((_bare(one.text) for one in words if one.text not in _GOES_ON and not ASSIGNS.match(one.text)), "")
        end = command.tokens[-1].end
        ends = command.can_end
        for place, one in enumerate(words):
            bare = _bare(one.text)
            ends = ends and all(other.text in _GOES_ON for other in words[:place])
            if first not in _TELLS:
                if bare == "scontrol" and any(_bare(other.text).startswith("requeue") for other in words[place + 1 :]):
                    yield Submission(one.start, end, Whose.ITSELF, ends)
                    return
                if bare == "sbatch":
                    fed = command.fed or ("<" if any("<" in other.text for other in command.tokens) else "")
                    fed += code[command.tokens[0].start : end] if fed else ""
                    behind = [other.text for other in words[place + 1 :] if other not in command.targets]
                    yield Submission(one.start, end, self._whose(behind, fed + command.document), ends)
                    return
            inner = list(one.within)
            if first not in _TELLS and re.search(r"[\s\"']", one.text):
                inner.append(_unquoted(one.text.partition("=")[2] if ASSIGNS.match(one.text) else one.text))
            inside = [found for text in inner for found in self.found(text, depth + 1)]
            if inside:
                yield Submission(one.start, one.end, max(sent.whose for sent in inside), False)

    def _whose(self, words: Sequence[str], fed: str) -> Whose:
        """Return whose script is submitted by an sbatch with these words. ``fed``: the code that writes to its input, or ""."""
        try:
            options, rest = typed_options([_unquoted(word) for word in words])
        except Untranslatable:
            options, rest = [], [word for word in words if not word.startswith("-")]
        wrapped = [one.value for one in options if one.name == "wrap"]
        while rest and self._is_options(rest[0]):
            rest = rest[1:]
        if any(map(self._is_itself, (*wrapped, *rest))) or (rest and "SLURM_JOB_NAME" in rest[0]):
            return Whose.ITSELF
        if rest:
            return self._of_word(rest[0])
        if wrapped or not fed:
            return Whose.OTHER
        if self._is_itself(fed):
            return Whose.ITSELF
        return Whose.OTHER if "<<" in fed or re.match(r"\s*(?:echo|printf)\b", fed) else Whose.UNKNOWN

    def _is_options(self, word: str) -> bool:
        variable = _VARIABLE.fullmatch(_unquoted(word))
        values = self._values.get(variable[1] or variable[2], []) if variable else []
        return bool(values) and all(_unquoted(value).startswith("-") or not _unquoted(value) for value in values)

    def _of_word(self, word: str, depth: int = 0) -> Whose:
        """Return whose script this is, which is not known to be the own one."""
        word = word.strip("\"'")
        expansions = _EXPANDS.findall(word)
        last = _EXPANDS.sub("\0", word).replace('"', "").replace("'", "").rpartition("/")[2]
        if not self._own or depth > _NESTED:
            return Whose.UNKNOWN
        if last in self._copies or (_bare(word) in self._copies):
            return Whose.ITSELF
        if last.strip("\0"):
            pattern = ".*".join(re.escape(part) for part in last.split("\0"))
            return Whose.UNKNOWN if re.fullmatch(pattern, self._own) else Whose.OTHER
        variable = _VARIABLE.fullmatch(expansions[-1]) if last == "\0" else None
        values = self._values.get(variable[1] or variable[2], []) if variable else []
        if not values:
            return Whose.UNKNOWN
        return max(self._of_word(value, depth + 1) for value in values)


@dataclass(frozen=True)
class _Command:
    """A simple command. ``targets``: words that are those of a redirection; ``fed``: what stands before it in its pipe."""

    tokens: list[Token]
    targets: list[Token]
    fed: str
    document: str
    can_end: bool


def _commands(code: str) -> Iterator[_Command]:
    """Yield the simple commands of the code. Raises ValueError where it cannot be read."""
    found = list(tokens(code))
    now: list[Token] = []
    piped = -1  # where the pipe before it begins
    brackets = 0
    for place, token in enumerate([*found, Token("operator", "\n", [], len(code), len(code))]):
        if not (token.kind == "operator" and token.text in _ENDS):
            now.append(token)
            continue
        if now:
            targets = [one for before, one in pairwise(now) if before.kind == "operator" and one.kind == "word"]
            fed = code[piped : now[0].start] if piped >= 0 else ""
            document = ""
            if "<<" in code[piped if piped >= 0 else now[0].start : now[-1].end]:
                line = next((one for one in found[place:] if one.document), None)
                document = f"<<{code[line.end : line.document]}" if line is not None else ""
            joined = piped >= 0 or token.text in ("|", "|&", "&")
            yield _Command(now, targets, fed, document, not joined and not brackets)
            if token.text in ("|", "|&"):
                piped = piped if piped >= 0 else now[0].start
        if token.text not in ("|", "|&"):
            piped = -1
        brackets = max(0, brackets + (token.text == "(") - (token.text == ")"))
        now = []


def _assignments(code: str) -> Iterator[tuple[str, str]]:
    try:
        found = list(tokens(code))
    except ValueError:
        yield from re.findall(r"(?<![\w$-])([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|\S*)", code)
        return
    for token, after in zip(found, [*found[1:], None], strict=False):
        if token.kind == "word" and (match := ASSIGNS.match(token.text)):
            listed = after is not None and after.text == "(" and after.start == token.end
            yield match[1], "$(…)" if listed else token.text[match.end() :]


def _bare(word: str) -> str:
    return word.strip("\"'\\").rpartition("/")[2]


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word
