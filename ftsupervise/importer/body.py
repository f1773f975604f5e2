"""Takes the body of a job script apart: what prepares, the one command that trains, and what did our work by hand. Pure.

It stands alone because it knows the shell, and no setting.

What stands before the command goes to ``launch.setup`` as it stands: it runs in the job's own shell, as it did. So a variable
that is set and not exported, a module, a function and the directory are there as they were. A body that is not of that form
(two commands, work behind it) is not taken apart: the script itself becomes the command, with the reason. Nothing is left out
but what ``_DROPPED`` knows, and each line of it is told.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from ftsupervise.errors import Untranslatable
from ftsupervise.importer.ends import AfterZero
from ftsupervise.importer.resubmission import OWN_PATH, Submission, Submits, Whose
from ftsupervise.importer.sbatch import Script
from ftsupervise.importer.statements import ASSIGNS, NotUnderstood, Pipeline, Statement, statements
from ftsupervise.launch.script import PURGES
from ftsupervise.launch.shell_code import Kind, Simple, understand
from ftsupervise.scheduler.parse import is_srun, srun_options
from ftsupervise.secrecy import assigned, by_name, kind
from ftsupervise.units import signal_name

# Commands that prepare, look or tell: none of them is the training.
_LIGHT = frozenset(
    """
    : [ [[ . alias awk basename break builtin cat cd chmod command conda continue cp curl cut date deactivate declare df
    dirname du echo eval exit export expr false find free gcc git grep gunzip hash head hostname huggingface-cli hf id kill
    let ln local ls lscpu lspci mamba mapfile micromamba mkdir mktemp ml module mv nproc nvcc nvidia-smi pip pip3 popd
    printenv printf pushd pwd read readarray readlink readonly realpath return rm rmdir rocm-smi rsync sacct sbatch scancel
    scontrol sed seff seq set setfacl shift shopt sinfo sleep sort source spack sqlite3 squeue sstat stat sync tail tar tee
    test touch tr trap true typeset type ulimit umask unalias uname unset unzip uv wait wandb wc wget whereis which who
    whoami xargs
    """.split()  # noqa: SIM905 - a list of quoted words reads worse
)
# Of a handler, or behind the command: what they did is ours (the warning, the next job, the end), or tells only.
_DROPPED = frozenset(
    """
    : [ [[ break conda continue date deactivate echo exit false hostname kill let local mamba module printf pwd return sacct
    sbatch scancel scontrol seff set shift sleep squeue sstat sync test trap true uptime wait
    """.split()  # noqa: SIM905
)
_TELLS = frozenset(
    ("", ":", "[", "[[", "date", "echo", "hostname", "let", "printf", "pwd", "sacct", "seff", "squeue", "uptime")
)
_WRAPPERS = frozenset(
    """
    builtin catchsegv chrt command env exec gtime ionice nice nohup numactl script setsid stdbuf strace sudo taskset time
    timeout unbuffer
    """.split()  # noqa: SIM905
)
_KNOWN_TO_SHELL = frozenset(
    ("source", ".", "eval", "module", "ml", "conda", "mamba", "micromamba", "spack", "set", "shopt", "alias")
)
_SHELLS = frozenset(("bash", "sh", "dash"))
_SIGNALS = frozenset(("USR1", "USR2", "TERM", "INT", "HUP", "CONT", "EXIT", "QUIT", "ERR", "0"))
_NUMBERED = frozenset(one.value for one in signal.Signals)
_CAN_BE_CAUGHT = frozenset(one.name.removeprefix("SIG") for one in signal.Signals) - {"KILL", "STOP", "CONT"}
_POSITIONAL = re.compile(r"\$(?:[1-9@*#]|\{[1-9@*#][^}]*\})")
_OWN_PATH_ALONE = re.compile(r"\$(?:0(?![0-9])|\{0\}|BASH_SOURCE\b|\{BASH_SOURCE(?:\[0\])?\})")
_LOGIN = (
    "[ ! -r /etc/profile ] || . /etc/profile",
    "for own in ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -r $own ] || { . $own; break; }; done; unset own",
)
_AS_THEIRS = "set +o pipefail\n"  # the shell of a command sets it, so that train.py | tee fails when train.py does
_OF_A_CHECKPOINT = re.compile(r"ckpt|che?ck_?po?i?nt|resum|restart|latest|newest|last", re.I)
_GOES_ON = "the next job of the chain goes on"
_WAITS = "not needed: the next job of the chain waits in the queue already"
_LARGEST = 60_000  # characters of code in ftsupervise.yaml
_SUBMITS_HERE = {
    Whose.OTHER: "each start of the script that comes to this line submits it: in each job, and after each restart; is that "
    "meant?",
    Whose.UNKNOWN: "does this submit the script itself? Then take it out: the next job of the chain goes on, and two would "
    "train at once",
}


class BodyKind(Enum):
    SRUN = "one srun, which ftsupervise starts"
    ONCE = "code that runs once in the job"
    SCRIPT = "the script as it stands"


@dataclass(frozen=True)
class Remark:
    """Lines of the body, by their numbers in the script, and what became of them. ``decide``: a person has to."""

    first: int
    last: int
    text: str
    words: str
    decide: bool = False


@dataclass(frozen=True)
class Relay:
    """A handler that was left out, and gave the program another signal than the shell had: names as "USR1"."""

    line: int  # of the trap
    text: str
    caught: frozenset[str]
    sent: str


@dataclass(frozen=True)
class Body:
    """``command``: the code of ``launch.command``; "" for SCRIPT. ``setup``: the lines before it."""

    form: BodyKind
    command: str = ""
    command_lines: tuple[int, int] = (0, 0)
    setup: str = ""
    modules: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    take_along: tuple[str, ...] = ()
    told: tuple[Remark, ...] = ()
    why: str = ""  # of SCRIPT: why it was not taken apart
    relays: tuple[Relay, ...] = ()
    finished: str = ""  # why an exit with 0 finishes the run; "": nothing says so


class _Whole(Exception):
    """The body is not taken apart; says why, with the line of the script."""


def read_body(script: Script, arguments: Sequence[str] = (), *, whole: str = "", own: str = "") -> Body:
    """Return the body, taken apart where that is sure. ``arguments``: those the script is given; ``whole``: why it must stay;
    ``own``: the path of its file.

    Raises Untranslatable where neither will do: it submits itself again, in a way that cannot be left out.
    """
    shell, *flags = script.interpreter
    if shell.rpartition("/")[2] not in _SHELLS:
        why = f"line 1: it is a script of {shell.rpartition('/')[2]}"
        return _as_it_stands(script, list(Submits(script.body, own).by_lines(script.body)), why)
    try:
        if whole:
            raise _Whole(whole)
        return _Apart(script, tuple(flags), tuple(arguments), own).body()
    except NotUnderstood as error:
        why = f"line {script.body_line + error.at}: {error}, as far as it is understood here"
    except _Whole as reason:
        why = str(reason)
    submits = Submits(script.body, own)
    found = submits.found(script.body)
    again = any(one.whose is Whose.ITSELF for one in found)
    try:
        if left := _Apart(script, tuple(flags), tuple(arguments), own).what_is_left(why, must=again):
            return left
    except (NotUnderstood, _Whole) as reason:
        why = str(reason) if again else why
    return _as_it_stands(script, found, why)


def _in_its_place(script: Script, number: int) -> str:
    """Return what a person types for a line that submits the job again: what answers a signal goes, what follows an end
    ends.
    """
    try:
        inside = next(one for one in statements(script.body) if one.first <= number - script.body_line <= one.last)
    except (NotUnderstood, StopIteration):
        inside = None
    if inside is None or inside.defines or inside.alone is not None:
        return f"take line {number} out (the next job of the chain goes on by itself), then type this again"
    return (
        f"write exit 1 in the place of line {number} (ftsupervise starts the command again then), then type this again"
    )


def _as_it_stands(script: Script, submits: Sequence[Submission], why: str) -> Body:
    """Return the script as the command. Raises Untranslatable where it submits itself again."""
    told: list[Remark] = []
    lines = script.body.splitlines()
    for one in submits:
        at = script.body.count("\n", 0, one.start)
        number = script.body_line + at
        if one.whose is Whose.ITSELF:
            raise Untranslatable(
                f"line {number}: {_shown(lines[at])} puts the job into the queue again, beside the chain that is there; "
                f"it cannot be left out by itself ({why})",
                hint=_in_its_place(script, number),
            )
        told.append(Remark(number, number, _shown(lines[at]), _SUBMITS_HERE[one.whose], decide=True))
    for number, line in enumerate(lines, script.body_line):
        if line.lstrip().startswith("#"):
            continue
        if assigned(line) or kind(line):
            told.append(
                Remark(
                    number,
                    number,
                    _shown(line),
                    "a secret: it stays in the script, and nowhere else; chmod go-r it",
                    decide=True,
                )
            )
    return Body(BodyKind.SCRIPT, told=tuple(told), why=why)


class _Apart:
    """One body on its way to ``setup`` and ``command``."""

    def __init__(self, script: Script, flags: tuple[str, ...], arguments: tuple[str, ...], own: str) -> None:
        self._script, self._flags, self._arguments, self._own = script, flags, arguments, own
        self._all = statements(script.body)
        self._submits = Submits(script.body, own)
        self._told: list[Remark] = []
        self._out: set[int] = set()  # statements that are left out
        self._relays: list[Relay] = []
        self._finished = ""

    def _line(self, at: int) -> int:
        return self._script.body_line + at

    def _tell(self, one: Statement, words: str, *, decide: bool = False) -> None:
        self._told.append(Remark(self._line(one.first), self._line(one.last), _shown(one.text), words, decide))

    def _leave_out(self, index: int, words: str, *, decide: bool = False) -> None:
        """Leave out a statement, and tell why; what else it submitted is for a person."""
        self._out.add(index)
        sent = [one.whose for one in self._submits.found(self._all[index].text)]
        decide = decide or Whose.OTHER in sent or Whose.UNKNOWN in sent
        if Whose.UNKNOWN in sent:
            words = (
                f"left out: if what it submits is this script, {_GOES_ON}; is it another one? Then submit that yourself"
            )
        elif Whose.OTHER in sent:
            words = "left out, and with it the other job that it submits: submit that yourself when the run is finished"
        self._tell(self._all[index], words, decide=decide)

    # ------------------------------------------------------------------------------------------------------ the parts

    def body(self) -> Body:
        self._traps()
        main = self._main()
        self._behind(main)
        self._resubmitting(main)
        before, part = self._before(main)
        return self._made(main, before, part)

    def what_is_left(self, why: str, *, must: bool) -> Body | None:
        """Return a body that is one command: all of it but what put the job into the queue again, and what only tells behind
        the last program, whose exit code that would hide. None where there is neither, and ``must`` it be. Raises _Whole where
        that cannot be told from other work.
        """
        behind = self._only_tells_behind()
        if not must and not behind:
            return None
        if not self._starts():
            raise _Whole(why)
        if must:
            self._traps()
        for index in behind:
            if index not in self._out:
                self._leave_out(index, _why_behind(self._all[index]))
        always = False  # an exit with 0 too submits it
        ends: dict[int, str] = {}  # the text of a statement that ends now, where it submitted
        for index, one in enumerate(self._all):
            if index in self._out:
                continue
            found = self._submits.found(one.text)
            again = [sent for sent in found if sent.whose is Whose.ITSELF]
            if found and not again:
                self._tell(one, _SUBMITS_HERE[max(sent.whose for sent in found)], decide=True)
            if not again:
                continue
            if one.defines:
                raise _Whole(f"line {self._line(one.first)}: the function {one.defines} does that")
            early = index < self._starts()[0]
            if one.alone is not None or (early and _all_dropped(one.simples())):
                self._leave_out(index, _WAITS)
                always = True
                continue
            if early:
                raise _Whole(f"line {self._line(one.first)}: it submits the job again, and does other work")
            if not all(sent.can_end for sent in again):
                raise _Whole(f"line {self._line(one.first)}: an exit in its place would not end the script")
            text = one.text
            for sent in reversed(again):
                text = f"{text[: sent.start]}exit 1{text[sent.end :]}"
            ends[index] = text
            self._tell(
                one, "exit 1 in the place of what submitted the job again: ftsupervise starts the command again then"
            )
        kept = [index for index in range(len(self._all)) if index not in self._out]
        code = self._text(kept, self._own_lines() + self._given(), self._left_with(kept, ends), ends)
        if assigned(code) or kind(code) or len(code) > _LARGEST:
            raise _Whole("it holds a secret" if len(code) <= _LARGEST else "it is too long for a settings file")
        if _has_control_characters(code):
            raise _Whole("it holds control characters")
        lines = (self._line(self._all[kept[0]].first), self._line(self._all[kept[-1]].last))
        if _ends_at_an_error(code) and not any(self._all[index].parts[-1].piped for index in self._starts()):
            code = f"{_AS_THEIRS}{code}"
        code = _with_path(code, self._own)
        if self._submits.itself(code) is not None:
            raise _Whole("it stands in code that is not understood here")
        finished = "the script submits nothing then" if ends and not always else ""
        return Body(
            BodyKind.ONCE, code, lines, told=self._remarks(), why=why, relays=tuple(self._relays), finished=finished
        )

    def _left_with(self, kept: Sequence[int], ends: dict[int, str]) -> tuple[str, ...]:
        """Return the line that ends the script with the code of its last program, and have that kept in ``ends``: a test that
        is its last line, and submits nothing, would make a failure of its success.
        """
        start, last = self._starts()[-1], kept[-1]
        one = self._all[start]
        if last not in ends or start in (last, *ends) or one.background:
            return ()
        if not any(part.connector == "&&" for part in self._all[last].parts):
            return ()
        ends[start] = f"{one.text}\nleft=$?; (exit $left)"
        return ("exit $left",)

    def _starts(self) -> list[int]:
        """Return the statements that start a program which may be the training, functions of the script that do so included."""
        functions = {one.defines for one in self._all if one.defines}
        heavy = {
            one.defines for one in self._all if one.defines and 2 in [_weight(s, functions) for s in one.simples()]
        }
        return [
            index
            for index, one in enumerate(self._all)
            if not one.defines
            and not _assigns(one)
            and any(_weight(simple, functions) == 2 or _program(simple)[0] in heavy for simple in one.simples())
        ]

    def _only_tells_behind(self) -> tuple[int, ...]:
        """Return the statements behind the last one that starts a program, where all of them only tell; () where one of them
        ends the script by itself, waits, or the program's end is asked for.
        """
        starts = self._starts()
        if not starts or any(self._all[index].background for index in starts):
            return ()
        behind = range(starts[-1] + 1, len(self._all))
        tells = all(
            not one.defines
            and all(_program(simple)[0] in _TELLS for simple in one.simples())
            and not re.search(r"\$\?", one.text)
            for one in (self._all[index] for index in behind)
        )
        return tuple(behind) if tells else ()

    def _traps(self) -> None:
        """Leave out handlers that only did our work."""
        functions = {one.defines: index for index, one in enumerate(self._all) if one.defines}
        for index, one in enumerate(self._all):
            part = one.alone
            if part is None or part.words[0] != "trap":
                if any(_program(simple)[0] == "trap" for simple in one.simples()) and not one.defines:
                    raise _Whole(f"line {self._line(one.first)}: a trap inside of other code")
                continue
            words = [word for word in part.words[1:] if word != "--"]
            handler = words[0].strip("'\"") if words else ""
            signals = {_signal(word) for word in words[1:]}
            if len(words) < 2 or not signals <= _SIGNALS:
                raise _Whole(f"line {self._line(one.first)}: {_shown(one.text)}")
            called = _calls(handler, functions)
            if handler not in ("", "-") and called is None:
                raise _Whole(f"line {self._line(one.first)}: the trap does work of its own")
            sent = _relayed(handler)
            for name in called or ():
                body = self._all[functions[name]]
                sent = sent or _relayed(body.text)
                if not _all_dropped(body.simples()):
                    raise _Whole(f"line {self._line(body.first)}: {name}, which answers a signal, does work of its own")
                if functions[name] not in self._out:
                    self._leave_out(functions[name], f"not needed: {_warns(body.text)}")
            self._leave_out(index, f"not needed: {_warns(one.text)}")
            if sent and sent not in signals:
                self._relays.append(Relay(self._line(one.first), _shown(one.text), frozenset(signals), sent))
        gone = {self._all[index].defines for index in self._out} - {""}
        for index, one in enumerate(self._all):
            calls = {_program(simple)[0] for simple in one.simples()} & gone
            if calls and index not in self._out:
                raise _Whole(f"line {self._line(one.first)}: it calls {min(calls)}, which answers a signal, too")

    def _main(self) -> int:
        """Return the statement that trains."""
        functions = {one.defines for one in self._all if one.defines}
        heavy: list[int] = []
        for index, one in enumerate(self._all):
            if index in self._out:
                continue
            weights = [_weight(simple, functions) for simple in one.simples()]
            if one.defines:
                if 2 in weights:
                    raise _Whole(f"line {self._line(one.first)}: the function {one.defines} starts a program")
                continue
            if 2 in weights and not _assigns(one):  # (what it asks a program for is there before the next line)
                heavy.append(index)
        if not heavy:
            light = [i for i, one in enumerate(self._all) if 1 in [_weight(s, functions) for s in one.simples()]]
            if len(light) != 1:
                raise _Whole("no line of it is known to be the training")
            heavy = light
        if len(heavy) > 1:
            lines = ", ".join(str(self._line(self._all[index].first)) for index in heavy[:6])
            raise _Whole(f"lines {lines}: each starts a program, and ftsupervise supervises one command")
        return heavy[0]

    def _behind(self, main: int) -> None:
        """Leave out what stands behind the command: only lines that told, waited or submitted the job again."""
        waits, after = False, self._after_zero(main)
        for index in range(main + 1, len(self._all)):
            one = self._all[index]
            if index in self._out:
                continue
            if re.fullmatch(r"[A-Za-z_]\w*=(\$!|\$\?|\"\$[!?]\"|\$\{[!?]\})", one.text):
                self._leave_out(index, "not needed: the supervisor knows its process and its exit code")
                continue
            if one.defines or not _all_dropped(one.simples()):
                raise _Whole(f"line {self._line(one.first)}: {_shown(one.text)} works on, after the training has ended")
            waits = waits or any(_program(simple)[0] == "wait" for simple in one.simples())
            if after is not None and self._submits.itself(one.text):
                self._condition(index, after)
            elif any(_program(simple)[0] == "scancel" for simple in one.simples()):
                words = "it cancelled the jobs that waited: at an exit with 0 you are asked if the run is finished"
                self._leave_out(index, f"left out: {words}, or launch.finished_by", decide=True)
            else:
                self._leave_out(index, _why_behind(one))
        if self._all[main].background and not waits:
            raise _Whole(
                f"line {self._line(self._all[main].first)}: it goes on in the background, and nothing waits for it"
            )

    def _after_zero(self, main: int) -> AfterZero | None:
        """Return where the lines behind the command lead when it has left with 0; None where they cannot be followed."""
        code = self._script.body[self._all[main].end :]
        try:
            return AfterZero(code, [one.start for one in self._submits.found(code) if one.whose is not Whose.OTHER])
        except (ValueError, RecursionError):
            return None

    def _condition(self, index: int, after: AfterZero) -> None:
        """Leave out a statement that submits the job again, and tell when it did: that is the script's own word on the end."""
        one = self._all[index]
        if not after.may_submit:
            self._finished = f"line {self._line(one.first)} of the script submits nothing then"
            self._leave_out(index, f"{_WAITS}; at an exit with 0 this submits nothing: launch.finished_by")
        elif after.may_not:
            words = "this submits on a condition: at an exit with 0 you are asked if the run is finished, or launch.finished_by"
            self._leave_out(index, f"{_WAITS}; {words}", decide=True)
        else:
            self._leave_out(index, _WAITS)

    def _resubmitting(self, main: int) -> None:
        """Leave out what submitted the job again before the command began."""
        for index in range(main):
            one = self._all[index]
            if index in self._out or one.defines:
                continue
            found = self._submits.worst(one.text)
            if found is None:
                continue
            if found.whose is Whose.OTHER:
                self._tell(one, "launch.setup: each job of the chain submits this; is that meant?", decide=True)
                continue
            if found.whose is Whose.UNKNOWN:
                self._tell(one, f"launch.setup: {_SUBMITS_HERE[Whose.UNKNOWN]}", decide=True)
                continue
            if not _all_dropped(one.simples()):
                raise _Whole(f"line {self._line(one.first)}: it submits the job again, and does other work")
            self._leave_out(index, _WAITS)
            self._finished = ""

    def _before(self, main: int) -> tuple[list[int], Pipeline]:
        """Return the statements that go to setup, and the part of the main statement that trains."""
        one = self._all[main]
        first = one.parts[0]
        if len(one.parts) == 1:
            return [i for i in range(main) if i not in self._out], first
        chained = all(part.connector == "&&" for part in one.parts[1:])
        if chained and all(_light(part) for part in one.parts[:-1]) and not one.background:
            return [i for i in range(main) if i not in self._out], one.parts[-1]
        raise _Whole(f"line {self._line(one.first)}: {_shown(one.text)}")

    # ----------------------------------------------------------------------------------------------- setup and command

    def _made(self, main: int, before: list[int], part: Pipeline) -> Body:
        one, script = self._all[main], self._script
        code = part.text if len(one.parts) > 1 else script.body[one.start : one.end]
        if assigned(code) or kind(code):
            raise _Whole(f"line {self._line(one.first)}: it holds a secret")
        found = understand(code)
        lines = (self._line(one.first), self._line(one.last))
        take_along = self._secrets(before)
        before = [index for index in before if index not in self._out]
        chain = [f"{earlier.text} || exit" for earlier in one.parts[:-1]] if len(one.parts) > 1 else []
        own = self._own_lines()
        decided = self._decided(before, code)
        if found.kind is Kind.SRUN and not decided:
            modules, env, kept = ((), {}, before) if own else self._hoisted(before)
            setup = self._text(kept, own + self._given(), chain)
            return self._checked(Body(BodyKind.SRUN, code, lines, setup, modules, env, take_along))
        first = self._first_needed(before, code, decided)
        one_program = bool(part.words) and not part.redirected and found.kind in (Kind.CODE, Kind.PROGRAM)
        moved, before = before[first:], before[:first]
        options = [] if one_program and not moved else self._options_of_the_shell(before, own)
        if moved or options:
            earlier = self._text(moved, options, chain)
            code = (
                f"{_AS_THEIRS}{earlier}set -o pipefail\n{code}"
                if moved and _ends_at_an_error(earlier)
                else f"{earlier}{code}"
            )
            chain = []
        if moved:
            lines = (min(lines[0], self._line(self._all[moved[0]].first)), lines[1])
        if _POSITIONAL.search(code) and found.kind is not Kind.PROGRAM:
            raise _Whole(f"line {lines[0]}: it uses the script's arguments")
        modules, env, kept = ((), {}, before) if own else self._hoisted(before)
        setup = self._text(kept, own + self._given(), chain)
        return self._checked(Body(BodyKind.ONCE, code, lines, setup, modules, env, take_along))

    def _checked(self, made: Body) -> Body:
        for key, text in (("setup", made.setup), ("command", made.command)):
            if len(text) > _LARGEST:
                raise _Whole(f"its {key} is too long for a settings file ({len(text):,} characters)")
            if assigned(text) or kind(text):
                raise _Whole("it holds a secret, which has no place in a settings file")
            if _has_control_characters(text):
                raise _Whole("it holds control characters")
        if OWN_PATH.search(made.setup + made.command):
            raise _Whole("it asks for its own path ($0, BASH_SOURCE)")
        if self._submits.itself(made.command) is not None:
            raise _Whole(f"line {made.command_lines[0]}: it submits the job again itself")
        return replace(made, told=self._remarks(), relays=tuple(self._relays), finished=self._finished)

    def _remarks(self) -> tuple[Remark, ...]:
        return tuple(sorted(self._told, key=lambda one: one.first))

    def _own_lines(self) -> list[str]:
        """Return the lines that do what the first line of the script asks of its shell."""
        found: list[str] = []
        letters = ""
        for word in self._flags:
            if word in ("-l", "--login"):
                found += _LOGIN
            elif re.fullmatch(r"-[elux]+", word):
                found += _LOGIN if "l" in word else ()
                letters += word[1:].replace("l", "")
            else:
                raise _Whole(f"line 1: {' '.join(self._script.interpreter)}")
        return found + ([f"set -{letters}"] if letters else [])

    def _given(self) -> list[str]:
        import shlex

        return [f"set -- {shlex.join(self._arguments)}"] if self._arguments else []

    def _text(
        self,
        indices: Sequence[int],
        first: Iterable[str],
        last: Iterable[str],
        instead: Mapping[int, str] | None = None,
    ) -> str:
        """Return these statements as they stand, with the comments between two that stay. ``instead``: the text of some."""
        parts = [f"{line}\n" for line in first]
        body = self._script.body
        for index in indices:
            one = self._all[index]
            before = self._all[index - 1].end if index else 0
            gap = body[before : one.start]
            comments = (
                []
                if index - 1 in self._out
                else [line for line in gap.split("\n")[1 if index else 0 :] if line.strip()]
            )
            parts += [
                f"{line.strip()}\n"
                for line in comments
                if line.lstrip().startswith("#") and "#SBATCH" not in line and not (assigned(line) or kind(line))
            ]
            parts.append(f"{(instead or {}).get(index, one.text)}{' &' if one.background else ''}\n")
        return "".join((*parts, *(f"{line}\n" for line in last)))

    def _secrets(self, before: Sequence[int]) -> tuple[str, ...]:
        names: list[str] = []
        for index in before:
            one = self._all[index]
            part = one.alone
            if part is None or not (assigned(one.text) or kind(one.text)):
                continue
            given = [word.partition("=") for word in part.words[1:]]
            if part.words[0] != "export" or not all(by_name(name) for name, _, _ in given):
                raise _Whole(f"line {self._line(one.first)}: it holds a secret, in a form that cannot be taken along")
            found = [name for name, _, _ in given]
            names += found
            self._out.add(index)
            text = " ".join(f"export {name}=…" for name in found)
            words = f"launch.take_along: the value is not written; export {' '.join(found)} before you type ftsupervise launch"
            self._told.append(Remark(self._line(one.first), self._line(one.last), text, words, decide=True))
        return tuple(dict.fromkeys(names))

    # ------------------------------------------------------------------------------------------ variables not exported

    def _options_of_the_shell(self, before: Sequence[int], own: Sequence[str]) -> list[str]:
        """Return the lines that set the shell as it was, for the command's own. Raises _Whole where one is inside of others."""
        found = [line for line in own if line.startswith("set -")]
        for index in before:
            local, one = _Local(), self._all[index]
            local.read(one)
            if local.options and (one.alone is None or one.defines):
                raise _Whole(
                    f"line {self._line(one.first)}: {_shown(one.text)} sets the shell, which the command has not"
                )
            found += [one.text] if local.options else []
        return found

    def _decided(self, before: Sequence[int], code: str) -> frozenset[str]:
        """Return the variables of the command that depend on which checkpoint is there: each start has to look anew, and not
        each job alone.
        """
        wanted, found = _used(code), set[str]()
        for index in reversed(before):
            one = self._all[index]
            local = _Local()
            local.read(one)
            if names := local.all_names() & wanted:
                wanted |= _used(one.text)
                if _looks_for_a_checkpoint(one.text):
                    found |= names
                    self._tell(
                        one, "launch.command: each start looks anew which checkpoint is there, and not each job alone"
                    )
        return frozenset(found)

    def _first_needed(self, before: Sequence[int], code: str, decided: frozenset[str] = frozenset()) -> int:
        """Return the place in ``before`` from which on the statements go into the command: it runs in a shell of its own, which
        has what was exported only. ``decided``: variables that are set there in any case. Raises _Whole where what it needs
        cannot be said.
        """
        local = _Local()
        for index in before:
            local.read(self._all[index])
        needed = (_used(code) & local.names()) | decided
        first = len(before)
        if not needed:
            return first
        for place, index in enumerate(before):
            if self._sets(index) & needed:
                first = place
                break
        while True:  # what these need, and what those need again
            inside = "\n".join(self._all[index].text for index in before[first:])
            more = (_used(f"{inside}\n{code}") & local.names()) | decided
            earliest = next((p for p, index in enumerate(before) if self._sets(index) & more), first)
            if earliest >= first:
                break
            first = earliest
        for index in before[first:]:
            one = self._all[index]
            sets = one.alone is not None and one.alone.words[0] in ("set", "shopt")
            if one.defines or (not sets and any(_program(simple)[0] in _KNOWN_TO_SHELL for simple in one.simples())):
                raise _Whole(
                    f"line {self._line(one.first)}: {_shown(one.text)} stands between a variable that is not exported and the "
                    "command that uses it"
                )
        return first

    def _sets(self, index: int) -> set[str]:
        local = _Local()
        local.read(self._all[index])
        return local.all_names()

    # ----------------------------------------------------------------------------------------------- modules and env

    def _hoisted(self, before: list[int]) -> tuple[tuple[str, ...], dict[str, str], list[int]]:
        """Return modules and variables that stand so far in front that their own keys keep the order, and the rest."""
        rest, modules = list(before), list[str]()
        purges = [p for p, i in enumerate(rest) if PURGES.match(self._all[i].text)]
        lines = sum(1 for i in rest for line in self._all[i].text.splitlines() if PURGES.match(line))
        of_modules = any(_program(one)[0] in ("module", "ml") for i in rest for one in self._all[i].simples())
        if of_modules and lines == len(purges):  # (one inside of other code: the modules stay where they are)
            at = purges[-1] + 1 if purges else next((p for p, i in enumerate(rest) if not self._tells(i)), 0)
            while at < len(rest) and (found := self._loads(rest[at])):
                modules += found
                del rest[at]
        env: dict[str, str] = {}
        at = purges[-1] + 1 if modules and purges else 0  # (what stands before runs before the modules)
        while at < len(rest):
            one = self._all[rest[at]]
            if found_env := self._literals(rest[at]):
                said = "\n".join(self._all[i].text for i in rest[:at])
                if any(re.search(rf"\b{name}\b", said) or name in env for name in found_env):
                    break
                env |= found_env
                del rest[at]
                continue
            if not all(_program(simple)[0] in _HARMLESS for simple in one.simples()) or one.defines:
                break
            at += 1
        return tuple(modules), env, rest

    def _tells(self, index: int) -> bool:
        return all(
            _program(simple)[0] in ("echo", "date", "hostname", "printf") for simple in self._all[index].simples()
        )

    def _loads(self, index: int) -> list[str]:
        part = self._all[index].alone
        if part is None or part.redirected or part.words[:1] not in (("module",), ("ml",)):
            return []
        words = list(part.words[1:])
        if words[:1] in (["load"], ["add"]):
            words = words[1:]
        elif part.words[0] == "module" or (
            words and words[0] in ("purge", "reset", "restore", "unload", "use", "list", "swap")
        ):
            return []
        plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+/:=@-]*", word) for word in words)
        return words if plain else []

    def _literals(self, index: int) -> dict[str, str]:
        """Return the variables of an ``export`` whose values hold nothing that a shell expands; {} for anything else."""
        part = self._all[index].alone
        if part is None or part.redirected or part.words[:1] != ("export",):
            return {}
        found: dict[str, str] = {}
        for word in part.words[1:]:
            name, equals, value = word.partition("=")
            if (
                not equals
                or not re.fullmatch(r"[A-Za-z_]\w*", name)
                or name.startswith(("FTSUPERVISE_", "SLURM_", "SBATCH_"))
            ):
                return {}
            quoted = re.fullmatch(r"'([^'$]*)'|\"([^\"$`\\]*)\"|([\w@%+=:,./-]*)", value)
            if quoted is None or by_name(name) or value.startswith("~"):
                return {}
            found[name] = next((group for group in quoted.groups() if group is not None), "")
        return found


_HARMLESS = frozenset(("cd", "date", "echo", "hostname", "mkdir", "nvidia-smi", "printf", "pwd", "ulimit", "umask"))


class _Local:
    """The names that statements set in their shell, and that no program sees which is started there."""

    def __init__(self) -> None:
        self._set: set[str] = set()
        self._exported: set[str] = set()
        self._all_exported = False
        self.options: list[int] = []

    def names(self) -> set[str]:
        return self._set - self._exported

    def all_names(self) -> set[str]:
        return self._set | self._exported

    def read(self, one: Statement) -> None:
        if one.defines:
            self._set.add(one.defines)
            return
        self._set |= set(re.findall(r"\bfor\s+([A-Za-z_]\w*)", one.text))
        self._set |= set(re.findall(r"\b(?:read|mapfile|readarray|printf\s+-v)\s+(?:-\w+\s+)*([A-Za-z_]\w*)", one.text))
        for simple in one.simples():
            words = list(simple.words)
            names = [match[1] for word in words if (match := ASSIGNS.match(word))]
            if words and all(ASSIGNS.match(word) for word in words):
                target = self._exported if self._all_exported else self._set
                target |= set(names)
                self._set |= set(names)
            elif words[:1] in (["export"], ["declare"], ["typeset"], ["readonly"], ["local"]):
                out = words[0] == "export" or any(re.fullmatch(r"-\w*x\w*", word) for word in words[1:])
                plain = {word.partition("=")[0].rstrip("+") for word in words[1:] if not word.startswith("-")}
                self._set |= plain
                self._exported |= plain if out else set()
            elif words[:1] == ["set"] and len(words) > 1 and words[1] != "--":
                self._all_exported = self._all_exported or words[1] == "-a" or words[1:3] == ["-o", "allexport"]
                if words[1] == "+a":
                    self._all_exported = False
                self.options += [] if words[1] in ("-a", "+a") else [one.first]
            elif words[:1] == ["shopt"]:
                self.options.append(one.first)


def _used(code: str) -> set[str]:
    """Return the names that the code expands or calls."""
    found = set(re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", code))
    for inside in re.findall(r"\$?\(\((.*?)\)\)", code, re.S):
        found |= set(re.findall(r"[A-Za-z_]\w*", inside))
    return found | set(re.findall(r"(?:^|[;&|(\n])\s*([A-Za-z_][\w-]*)", code))


# --------------------------------------------------------------------------------------------------------- what a command is


def _program(simple: Simple) -> tuple[str, ...]:
    """Return the words of a simple command from its program on, without assignments, and without its srun or wrappers."""
    words = [word.strip("\"'") for word in simple.words]
    at = 0
    while at < len(words):
        if ASSIGNS.match(simple.words[at]):
            at += 1
        elif words[at].rpartition("/")[2] in _WRAPPERS and at + 1 < len(words):
            at += 1
            while at < len(words) and re.fullmatch(r"-.*|\d[\d.:,a-z-]*|[A-Za-z_]\w*=.*", words[at]):
                at += 1
        else:
            break
    return tuple(words[at:]) or ("",)


def _weight(simple: Simple, functions: set[str]) -> int:
    """Return 2 for a program that may be the training, 1 for a short Python one, 0 for a command that prepares or tells."""
    words = _program(simple)
    name = words[0].rpartition("/")[2]
    if is_srun(words):
        inner = words[srun_options(words)[1] :]
        return min(2, _weight(Simple(tuple(inner), ()), functions)) if inner else 2
    if words[1:2] == ("run",) and name in ("conda", "mamba", "micromamba", "uv", "poetry", "pixi", "pipenv"):
        return 2
    if words[:2] == ("wandb", "agent"):
        return 2
    if name in functions and name:
        return 0 if name == words[0] else 2
    if not name or name in _LIGHT or words == ("exec",):  # (an exec without a program only redirects the shell)
        return 0
    if name.startswith("python"):
        rest = words[1:]
        if rest[:1] in (("--version",), ("-V",)) or rest[:2] in (
            ("-m", "pip"),
            ("-m", "venv"),
            ("-m", "torch.utils.collect_env"),
        ):
            return 0
        return 1 if rest[:1] == ("-c",) or rest[:1] in ((), ("-",)) else 2
    return 2


def _assigns(one: Statement) -> bool:
    part = one.alone
    if part is None or part.redirected:
        return False
    return part.words[0] in ("export", "declare", "readonly", "local") or all(
        ASSIGNS.match(word) for word in part.words
    )


def _light(part: Pipeline) -> bool:
    return bool(part.words) and _weight(Simple(part.words, ()), set()) == 0


def _all_dropped(simples: Sequence[Simple]) -> bool:
    for simple in simples:
        words = _program(simple)
        if words[0] in _DROPPED or not words[0]:
            continue
        return False
    return True


def _signal(word: str) -> str:
    """Return "USR1" of "SIGUSR1", "usr1" and "10"; the word itself where it is no signal."""
    word = word.upper().removeprefix("SIG")
    return signal_name(int(word)).removeprefix("SIG") if word.isdigit() and int(word) in _NUMBERED else word


def _relayed(code: str) -> str:
    """Return the signal that a handler gives to another process first, as "INT"; "" where it gives none that can be caught."""
    for simple in (simple for one in statements(code) for simple in one.simples()):
        program, *words = _program(simple)
        if program in ("kill", "scancel") and "$$" not in words:
            sent = _signal(_signal_option(words) or ("TERM" if program == "kill" else ""))
            if sent in _CAN_BE_CAUGHT:
                return sent
    return ""


def _signal_option(words: Sequence[str]) -> str:
    """Return the signal in the options of kill or scancel: -s INT, -sINT, --signal=INT, -INT, -2."""
    for word, after in pairwise([*words, ""]):
        if word in ("-s", "-n", "--signal"):
            return after
        if found := re.fullmatch(r"(?:--signal=|-s|-)(\w+)", word):
            return found[1]
    return ""


def _calls(code: str, functions: Collection[str]) -> tuple[str, ...] | None:
    """Return the functions that a handler calls; None where it does work of its own, or cannot be read."""
    try:
        simples = [simple for one in statements(code) for simple in one.simples()]
    except NotUnderstood:
        return None
    programs = [_program(simple)[0] for simple in simples]
    if not _all_dropped([one for one, name in zip(simples, programs, strict=True) if name not in functions]):
        return None
    return tuple(dict.fromkeys(name for name in programs if name in functions))


def _with_path(code: str, own: str) -> str:
    """Return the code with the path of the script in the place of ``$0``. Raises _Whole where a shell may not expand that."""
    if OWN_PATH.search(code) is None:
        return code
    why = "it asks for its own path ($0, BASH_SOURCE)"
    if not re.fullmatch(r"[\w@%+=:,./-]+", own) or "<<" in code:
        raise _Whole(why)
    made, quote, at = list[str](), "", 0
    while at < len(code):
        char = code[at]
        if quote != "'" and (found := _OWN_PATH_ALONE.match(code, at)):
            made.append(own)
            at = found.end()
            continue
        if char == "\\" and quote != "'":
            made.append(code[at : at + 2])
            at += 2
            continue
        if not quote and char == "#" and (at == 0 or code[at - 1] in " \t\n;"):
            end = code.find("\n", at)
            end = len(code) if end < 0 else end
            made.append(code[at:end])
            at = end
            continue
        if char in "'\"":
            quote = "" if quote == char else quote or char
        made.append(char)
        at += 1
    text = "".join(made)
    if any(
        OWN_PATH.search(line) for line in re.sub(r"'[^']*'", "", text).splitlines() if not line.lstrip().startswith("#")
    ):
        raise _Whole(why)
    return text


def _looks_for_a_checkpoint(text: str) -> bool:
    """Return whether the code asks the file system for one: a test of a file, or a list of files, where a word speaks of it."""
    looks = re.search(r"(?:\[\s|\btest\s)(?:!\s+)?-[defrsL]\s|\b(?:ls|find|stat|compgen|readlink|realpath)\s", text)
    return looks is not None and _OF_A_CHECKPOINT.search(text) is not None


def _has_control_characters(text: str) -> bool:
    return any((ord(char) < 32 and char not in "\n\t") or char in "\x7f\x85\u2028\u2029\ufeff" for char in text)


def _ends_at_an_error(code: str) -> bool:
    """Return whether the code has a pipe, and ends at the first command that fails, but for one in the middle of a pipe."""
    sets = re.search(r"(?m)^\s*set\s+(?:-\w*e|-o\s+errexit)", code)
    return sets is not None and "pipefail" not in code and re.search(r"[^|]\|[^|]", code) is not None


def _warns(text: str) -> str:
    if "requeue" in text or "sbatch" in text:
        return "the next job of the chain goes on after the end, and the ranks get Slurm's warning from the supervisor"
    return "the supervisor passes Slurm's warning on to the ranks"


def _why_behind(one: Statement) -> str:
    text = one.text
    if "requeue" in text or re.search(r"\bsbatch\b", text):
        return _WAITS
    if re.search(r"\bwait\b", text):
        return "not needed: the supervisor waits for the command"
    if re.search(r"\bexit\b", text):
        return "not needed: the job ends with the exit code of the command"
    return "left out: nothing runs behind the supervisor; its log and ftsupervise status tell how the command ended"


def _shown(text: str) -> str:
    """Return a line for the table: its first line, cut short, and never a secret."""
    line = " ".join(text.strip().split("\n")[0].split())
    if assigned(line) or kind(line):
        line = re.sub(r"=.*", "=…", line) if "=" in line else "(a line with a secret)"
    return line if len(line) <= 60 else f"{line[:59]}…"
