"""Follows the lines behind a command that has left with 0, and says whether they can submit the job again. Pure.

It stands alone because it follows the branches of a script for one exit code, and knows nothing of settings. A condition that
is not understood may hold or not: only what no way leads to is said to be not done.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ftsupervise.importer.statements import ASSIGNS
from ftsupervise.launch.shell_code import Token, tokens

_SEPARATE = frozenset((";", "\n", "&"))
_LOOPS = frozenset(("for", "while", "until", "select"))
_SUCCEEDS = frozenset(("", ":", "date", "echo", "printf", "set", "sleep", "sync", "true", "wait"))
_COMPARES = {
    "-eq": "==", "=": "==", "==": "==", "-ne": "!=", "!=": "!=", "-lt": "<", "<": "<", "-le": "<=", "<=": "<=", "-gt": ">",
    ">": ">", "-ge": ">=", ">=": ">=",
}  # fmt: skip
_THE_CODE = ("$?", "${?}", "${PIPESTATUS[0]}", "$PIPESTATUS")


class AfterZero:
    """The lines ``code``, right behind a command that has left with 0. ``submits``: the places of what submits the job.

    ``may_submit``: a way leads to one of these; ``may_not``: a way leads past all of them.
    """

    def __init__(self, code: str, submits: Collection[int]) -> None:
        self._code, self._submits = code, submits
        self._found = list(tokens(code))
        self._at = 0
        self._zero = set[str]()  # variables with the command's code
        self._status: bool | None = True  # of the last command: it succeeded, it failed, or one of both
        self.may_submit = False
        self._left = False  # a way leads out, past all of them
        live = self._lines(True, ())
        if self._at < len(self._found):
            raise ValueError("the end of something is missing")
        self.may_not = live or self._left

    def _next(self) -> str:
        return self._found[self._at].text if self._at < len(self._found) else ""

    def _lines(self, live: bool, ends: Collection[str]) -> bool:
        """Follow the lines up to one of ``ends``; return whether a way leads to that one that has submitted nothing. ``live``:
        one leads here.
        """
        while self._at < len(self._found) and self._next() not in ends:
            if self._next() in _SEPARATE:
                self._at += 1
                continue
            before = self._at
            live = self._chain(live)
            if self._at == before:
                raise ValueError(f"{self._next()} is not understood")
        return live

    def _chain(self, live: bool) -> bool:
        live = self._pipe(live)
        while self._next() in ("&&", "||"):
            wanted = self._next() == "&&"
            self._over()
            status = self._status
            runs, zero = live and status is not (not wanted), set(self._zero)
            after = self._pipe(runs)
            self._zero &= zero
            if status is None:
                self._status = None
            elif status is not wanted:
                self._status = status
            live = after if live and status is wanted else live and (after or status is not wanted)
        return live

    def _over(self) -> None:
        """Go over the operator, and the ends of lines behind it."""
        self._at += 1
        while self._next() == "\n":
            self._at += 1

    def _pipe(self, live: bool) -> bool:
        turned = False
        while self._next() in ("!", "time"):
            turned = turned ^ (self._next() == "!")
            self._at += 1
        left, piped = self._left, False
        after = self._command(live)
        while self._next() in ("|", "|&"):
            self._over()
            self._command(live)
            piped = True
        if piped:
            self._status = None
            after, self._left = live, left
        if turned and self._status is not None:
            self._status = not self._status
        return after

    def _command(self, live: bool) -> bool:
        word = self._next()
        if word == "if":
            return self._if(live)
        if word == "case":
            return self._case(live)
        if word == "{":
            self._at += 1
            live = self._lines(live, ("}",))
            self._take("}")
            return live
        if word == "(":
            if self._at + 1 < len(self._found) and self._found[self._at + 1].text == "(":
                self._status = self._holds(self._arithmetic())
                return live
            self._at += 1
            left = self._left
            self._lines(live, (")",))
            self._take(")")
            self._left, self._status = left, None
            return live
        if word in _LOOPS:
            self._at += 1
            self._lines(live, ("do",))
            self._take("do")
            self._zero.clear()  # (a second round may see others)
            self._lines(live, ("done",))
            self._take("done")
            self._status = None
            return live
        if word == "[[":
            words = self._until("]]")
            self._status = self._holds(words)
            return live
        return self._simple(live)

    def _take(self, word: str) -> None:
        if self._next() != word:
            raise ValueError(f"{word} is missing")
        self._at += 1
        self._redirections()

    def _redirections(self) -> None:
        while "<" in self._next() or ">" in self._next():
            self._at += 2

    def _until(self, end: str) -> list[str]:
        """Return the words up to ``end``, over which it goes."""
        self._at += 1
        first = self._at
        while self._next() != end:
            if self._at >= len(self._found):
                raise ValueError(f"{end} is missing")
            self._at += 1
        self._at += 1
        return [one.text for one in self._found[first : self._at - 1]]

    def _arithmetic(self) -> list[str]:
        self._at += 1
        first = self._at
        self._until(")")
        text = self._code[self._found[first].end : self._found[self._at - 1].start]
        self._take(")")
        return re.findall(r"\$\{?\w+\}?|\$\?|\w+|[<>=!]=|&&|\|\||[^\s]", text)

    def _if(self, live: bool) -> bool:
        out = False
        while self._next() in ("if", "elif"):
            self._at += 1
            live = self._lines(live, ("then",))
            self._take("then")
            holds = self._status
            zero = set(self._zero)
            out = self._lines(live and holds is not False, ("elif", "else", "fi")) or out
            self._zero &= zero
            live = live and holds is not True
            self._status = False if holds is False else None
        if self._next() == "else":
            self._at += 1
            out = self._lines(live, ("fi",)) or out
            live = False
        self._take("fi")
        self._status = None
        return out or live

    def _case(self, live: bool) -> bool:
        self._at += 1
        value = self._value(self._next())
        self._at += 1
        while self._next() == "\n":
            self._at += 1
        if self._next() != "in":
            raise ValueError("in is missing")
        self._at += 1
        out = False
        while self._next() != "esac":
            if self._at >= len(self._found):
                raise ValueError("esac is missing")
            if self._next() in ("\n", "("):
                self._at += 1
                continue
            patterns: list[str] = []
            while self._next() != ")":
                if self._at >= len(self._found):
                    raise ValueError("a ) is missing")
                patterns += [self._next().strip("\"'")] if self._next() != "|" else []
                self._at += 1
            self._at += 1
            may = value is None or any(not one.isdigit() or int(one) == value for one in patterns)
            sure = value is not None and any(one == "*" or (one.isdigit() and int(one) == value) for one in patterns)
            zero = set(self._zero)
            out = self._lines(live and may, (";;", ";&", ";;&", "esac")) or out
            self._zero &= zero
            if self._next() != "esac":
                sure = sure and self._next() == ";;"
                self._at += 1
            live = live and not sure
        self._take("esac")
        self._status = None
        return out or live

    def _simple(self, live: bool) -> bool:
        words: list[str] = []
        first = self._at
        while self._at < len(self._found):
            token = self._found[self._at]
            if token.kind == "operator":
                if "<" not in token.text and ">" not in token.text:
                    break
                self._at += 2
                continue
            words.append(token.text)
            self._at += 1
        if self._next() == "(":
            raise ValueError("a function or a list is not followed")
        if words[:1] in (["export"], ["local"], ["declare"], ["readonly"]):
            words = words[1:]
        if live and any(self._is_submitted(one) for one in self._found[first : self._at]):
            self.may_submit = True
            self._status = None
            return False
        if words and all(ASSIGNS.match(word) for word in words):
            code = self._status is True
            for name, _, value in (word.partition("=") for word in words):
                same = self._value(value) == 0 and (code or value.strip('"') not in _THE_CODE)
                self._zero = self._zero | {name} if same else self._zero - {name}
            self._status = None if any("$(" in word or "`" in word for word in words) else True
            return live
        name = words[0] if words else ""
        if name in ("[", "test"):
            self._status = self._holds(words[1:-1] if name == "[" else words[1:])
            return live
        if name == "exit":
            self._left = self._left or live
            return False
        if name in ("read", "eval", "source", ".", "unset", "mapfile", "readarray"):
            self._zero.clear()
        self._status = False if name == "false" else True if name in _SUCCEEDS else None
        return live

    def _is_submitted(self, token: Token) -> bool:
        return any(token.start <= one < token.end for one in self._submits)

    def _value(self, word: str) -> int | None:
        """Return the number that a word stands for; None where it is not known."""
        word = word.strip("\"'")
        if word in _THE_CODE:
            return 0 if self._status is True else None
        name = re.fullmatch(r"\$(?:(\w+)|\{(\w+)(?::-[^}]*)?\})", word)
        if name is not None:
            return 0 if (name[1] or name[2]) in self._zero else None
        return int(word) if word.isdigit() else 0 if word in self._zero else None

    def _holds(self, words: Sequence[str]) -> bool | None:
        """Return whether this condition holds; None where that is not known."""
        for joins, result in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if joins in words:
                at = list(words).index(joins)
                both = (self._holds(words[:at]), self._holds(words[at + 1 :]))
                return result if result in both else None if None in both else not result
        if words[:1] == ["!"]:
            inner = self._holds(words[1:])
            return None if inner is None else not inner
        if len(words) == 1:
            value = self._value(words[0])
            return value != 0 if value is not None and not words[0].startswith("$") else None
        if len(words) != 3 or words[1] not in _COMPARES:
            return None
        left, right = self._value(words[0]), self._value(words[2])
        if left is None or right is None:
            return None
        return {
            "==": left == right, "!=": left != right, "<": left < right, "<=": left <= right, ">": left > right,
            ">=": left >= right,
        }[_COMPARES[words[1]]]  # fmt: skip
