"""The body of a job script, cut into the statements of its outermost level, each with its lines. Pure.

It stands alone because it knows the grammar, and no command.

The words are those that ``launch/shell_code.py`` reads: one reader of shell code in the whole program, and no further package.
(tree-sitter-bash would bring a tree, and two compiled packages into every installation; whoever reads the tree must still know
what each command does, and that is the part that can go wrong.) Code that is not understood is no error here: the script is
then the command as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftsupervise.launch.shell_code import Simple, Token, tokens

_OPENS = {
    "if": "fi",
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
    "[[": "]]",
}
_GOES_ON = frozenset(("then", "do", "else", "elif", "!", "time", "coproc"))
ASSIGNS = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=")


class NotUnderstood(ValueError):
    """The code is not read; ``line``: where, counted from the body's first line as 0."""

    def __init__(self, words: str, at: int = 0) -> None:
        super().__init__(words)
        self.at = at


@dataclass(frozen=True)
class Pipeline:
    """One pipeline of a statement. ``connector``: what stands before it, "", "&&" or "||"."""

    connector: str
    text: str
    start: int
    piped: bool
    redirected: bool
    words: tuple[str, ...]  # of a simple command; () for anything else


@dataclass(frozen=True)
class Statement:
    """``start`` and ``end``: of its text in the body; ``first`` and ``last``: its lines, from 0, with its here-documents."""

    text: str
    start: int
    end: int
    first: int
    last: int
    parts: tuple[Pipeline, ...]
    background: bool
    defines: str  # the function that it defines

    @property
    def alone(self) -> Pipeline | None:
        """Return its only part, where it is one simple command without a pipe."""
        one = self.parts[0]
        return one if len(self.parts) == 1 and one.words and not one.piped else None

    def simples(self) -> tuple[Simple, ...]:
        """Return every simple command in it, those of its substitutions too: no names of functions, no patterns, no lists."""
        found: list[Simple] = []
        codes = [self.text]
        while codes:
            inside = _simples(codes.pop())
            found += inside
            codes += [code for one in inside for code in one.inner]
        return tuple(found)


_RESERVED = frozenset(
    ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done", "esac", "coproc")
)


def _simples(code: str) -> list[Simple]:
    try:
        found = list(tokens(code))
    except ValueError:
        return []
    made: list[Simple] = []
    words: list[str] = []
    inner: list[str] = []
    pattern, target = False, False  # of a case; behind a redirection
    math = 0  # open brackets of (( … ))
    listed = ""  # "(": in NAME=( … ); "function": its name follows

    def end() -> None:
        if words or inner:
            made.append(Simple(tuple(words), tuple(inner)))
        words.clear()
        inner.clear()

    for before, token in zip([None, *found], found, strict=False):
        text = token.text
        inner += token.within
        if math:
            math += (text == "(") - (text == ")")
        elif text == "(" and before is not None and before.text == "(" and before.end == token.start:
            math = 2
        elif words[:1] == ["[["] and words[-1] != "]]":
            words.append(text)
        elif listed == "(" and text != ")":
            continue
        elif token.kind == "word":
            if pattern and text == "esac":
                pattern = False
            elif target or listed or pattern:
                target, listed = False, ""
            elif not words and text in ("for", "select", "case"):
                words.append(":")  # (its words are none of a command)
                pattern = text == "case"
            elif pattern or (words[:1] == [":"] and before is not None and before.kind == "word"):
                pass
            elif not words and text in _RESERVED:
                continue
            elif not words and text == "function":
                listed = "function"
            else:
                words.append(text)
        elif "<" in text or ">" in text:
            target = True
        elif (
            text == "("
            and before is not None
            and before.kind == "word"
            and before.end == token.start
            and before.text.endswith("=")
        ):
            listed = "("
        elif text == ")" and listed == "(":
            listed = ""
        elif text == "(" and before is not None and before.kind == "word" and len(words) == 1:
            words.clear()  # the name of a function
        elif text == ")" and pattern:
            pattern = False
            words.clear()
        else:
            end()
            pattern = pattern or text in (";;", ";&", ";;&")
            listed = ""
    end()
    return made


def statements(code: str) -> tuple[Statement, ...]:
    """Return the statements of the outermost level of ``code``. Raises NotUnderstood."""
    try:
        found = list(tokens(code))
    except ValueError as error:
        raise NotUnderstood(str(error)) from None
    made: list[Statement] = []
    cut = _Cut(code)
    for token in found:
        ended = cut.take(token)
        if ended is not None:
            made += [ended] if ended.text else []
        if token.document and made and not cut.depth:
            last = made[-1]
            if "<<" in last.text:
                end = token.document
                made[-1] = _with(last, code, end)
    if cut.depth:
        raise NotUnderstood(f"{cut.depth[-1]!r} is missing", code.count("\n", 0, cut.opened))
    rest = cut.end_of_code()
    return (*made, *([rest] if rest is not None else []))


def _with(one: Statement, code: str, end: int) -> Statement:
    """Return the statement with the here-documents behind its line."""
    end = end - 1 if code[end - 1 : end] == "\n" else end
    last = code.count("\n", 0, end)
    return Statement(code[one.start : end], one.start, end, one.first, last, one.parts, one.background, one.defines)


class _Cut:
    """Follows the nesting of the code, word by word."""

    def __init__(self, code: str) -> None:
        self._code = code
        self.depth: list[str] = []  # the words that will close what is open
        self.opened = 0
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[Token] = []
        self._parts: list[list[Token]] = [[]]
        self._connectors = [""]
        self._command = True  # the next word is the first one of a command
        self._after = ""  # the operator before
        self._function = False  # the next word is the name of a function

    def take(self, token: Token) -> Statement | None:
        """Take the next word or operator; return the statement that it ends, one without text where there is none."""
        if token.kind == "operator":
            return self._operator(token)
        target, self._after = ">" in self._after or "<" in self._after, ""
        if target:
            self._add(token)
            return None
        word = token.text
        if self.depth and word == self.depth[-1] and (self._command or word == "]]"):
            self.depth.pop()
            self._command = word == "}" or word in ("fi", "done", "esac", "]]")
        elif self._command and self.depth[-1:] != ["]]"] and word in _OPENS:
            self._open(_OPENS[word], token)
            self._command = word in ("if", "while", "until", "{")
        elif self._command and word == "function":
            self._command = True
            self._function = True
            self._add(token)
            return None
        elif self._function:
            self._function = False
            self._command = True
        elif (self._command and word in _GOES_ON) or (word == "in" and self.depth[-1:] == ["esac"]):
            self._command = True
        else:
            self._command = bool(ASSIGNS.match(word)) and self._command
        self._add(token)
        return None

    def _open(self, closes: str, token: Token) -> None:
        if not self.depth:
            self.opened = token.start
        self.depth.append(closes)

    def _operator(self, token: Token) -> Statement | None:
        text = token.text
        self._after = text
        if "<" in text or ">" in text:
            self._add(token)
            return None
        if text == "(":
            self._open(")", token)
            self._command = True
            self._add(token)
            return None
        if text == ")":
            if self.depth[-1:] == [")"]:
                self.depth.pop()
            elif "esac" not in self.depth:
                raise NotUnderstood("a ) closes nothing", self._code.count("\n", 0, token.start))
            self._command = True
            self._add(token)
            return None
        self._command = True
        if self.depth:
            self._add(token)
            return None
        if text in ("&&", "||"):
            self._tokens.append(token)
            self._parts.append([])
            self._connectors.append(text)
            return None
        if text in ("|", "|&"):
            self._add(token)
            return None
        if text == "\n" and self._goes_on():
            return None
        return self._end(background=text == "&")

    def _goes_on(self) -> bool:
        """Return whether a line's end ends nothing: after ``|``, ``&&``, ``name ()``."""
        if not self._tokens:
            return False
        last = self._tokens[-1].text if self._tokens[-1].kind == "operator" else ""
        names = [one.text for one in self._tokens[-2:]]
        return last in ("|", "|&", "&&", "||") or (names == ["(", ")"] and len(self._tokens) == 3)

    def _add(self, token: Token) -> None:
        self._tokens.append(token)
        self._parts[-1].append(token)

    def end_of_code(self) -> Statement | None:
        ended = self._end(background=False)
        return ended if ended.text else None

    def _end(self, *, background: bool) -> Statement:
        found, parts, connectors = self._tokens, self._parts, self._connectors
        self._begin()
        if not found:
            return Statement("", 0, 0, 0, 0, (), False, "")
        start, end = found[0].start, found[-1].end
        made = tuple(_part(self._code, c, p) for c, p in zip(connectors, parts, strict=True) if p)
        first, last = (self._code.count("\n", 0, one) for one in (start, end))
        return Statement(self._code[start:end], start, end, first, last, made, background, _defines(found))


def _defines(found: Sequence[Token]) -> str:
    words = [one.text for one in found[:4]]
    if words[:1] == ["function"] and len(words) > 1:
        return words[1]
    return words[0] if words[1:3] == ["(", ")"] else ""


def _part(code: str, connector: str, found: Sequence[Token]) -> Pipeline:
    text = code[found[0].start : found[-1].end]
    operators = [one.text for one in found if one.kind == "operator"]
    redirects = [one for one in operators if "<" in one or ">" in one]
    words: list[str] = []
    for before, one in zip([None, *found], found, strict=False):
        target = before is not None and before.kind == "operator" and ("<" in before.text or ">" in before.text)
        if one.kind == "word" and not target:
            words.append(one.text)
    compound = any(one in operators for one in ("(", ")", ";", "\n", ";;", "&")) or words[:1] == ["{"]
    compound = compound or (bool(words) and words[0] in _OPENS)
    if compound and all(one in ("(", ")", "\n") or one in redirects for one in operators) and _is_array(found):
        compound = False
    simple = not compound and "|" not in operators and "|&" not in operators
    return Pipeline(
        connector, text, found[0].start, "|" in operators or "|&" in operators, bool(redirects),
        tuple(words) if simple else (),
    )  # fmt: skip


def _is_array(found: Sequence[Token]) -> bool:
    """Return whether it assigns a list: NAME=( … )."""
    words = [one.text for one in found]
    at = 1 if words[0] in ("export", "declare", "local", "readonly", "typeset") else 0
    return (
        len(words) > at + 1 and ASSIGNS.fullmatch(words[at]) is not None and words[at + 1] == "(" and words[-1] == ")"
    )
