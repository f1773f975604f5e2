"""Turns the options and the body of a job script into the settings of a run, and says of each line where it went. Pure."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ftsupervise.config.sweep import MOST
from ftsupervise.errors import Untranslatable
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.importer.body import Body, BodyKind, Relay, read_body
from ftsupervise.importer.sbatch import Option, Script
from ftsupervise.launch.doubts import job_numbers, without_told
from ftsupervise.launch.script import PURGES
from ftsupervise.launch.shell_code import Kind, calls_srun, understand
from ftsupervise.units import format_duration, format_slurm_time, parse_slurm_time

ELEMENT = "task"  # the word of a sweep that stands for the number of the element
_NUMBERS = {"ntasks": "ntasks", "ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task"}
_AS_IT_IS = {
    "account": "account", "partition": "partition", "qos": "qos", "constraint": "constraint", "reservation": "reservation",
    "gpus-per-node": "gpus_per_node", "gres": "gres", "hint": "hint", "licenses": "licenses",
}  # fmt: skip
_MEMORY = {"mem": "mem", "mem-per-cpu": "mem_per_cpu", "mem-per-gpu": "mem_per_gpu"}
_NOT_NEEDED = {
    "open-mode": "not needed: the output is always appended to",
    "requeue": "not needed: the next job of the chain goes on; launch.requeue: true has Slurm put a job back after a lost node",
    "parsable": "not needed: ftsupervise reads sbatch's answer itself",
    "wait": "not needed: ftsupervise status --watch looks on",
    "test-only": "not needed: ftsupervise launch --dry-run",
    "quiet": "not needed",
    "verbose": "not needed",
    "ignore-pbs": "not needed: the rendered script has no such lines",
}
_RESTARTS = re.compile(r"\$\{?SLURM_RESTART_COUNT\b|\bRestarts=")
_ARRAY_ID = r"SLURM_ARRAY_(?:TASK_ID|TASK_COUNT|TASK_MIN|TASK_MAX|TASK_STEP|JOB_ID)"
_SETS = re.compile(r"(?m)^[ \t]*([A-Za-z_]\w*)=(?:\"[^\"`\n]*\"|[^\s\"`(;&|]*)[ \t]*$")  # a line that sets a variable
_COUNTS = re.compile(
    r"[\w${}:\"-]{1,60}\s*(?:-l[te]|-g[te]|[<>]=?)\s*(?:\"?\$?\{?([A-Za-z_]\w*)|\"?(\d+))"
)  # a number with its most
_OF_A_COUNT = re.compile(r"restart|requeue|re_?submi|retr[iy]|attempt|count|max|iter", re.I)


@dataclass(frozen=True)
class Row:
    """A line of the table. ``lines``: "12", "12-15", or "" for what was typed or is not there. ``decide``: a person has to."""

    lines: str
    text: str
    words: str
    decide: bool = False


@dataclass(frozen=True)
class Draft:
    """A run to be written. ``launch``: the values of that section, with a comment each; ``mail``: who got Slurm's mail."""

    name: str
    launch: dict[str, tuple[Any, str]]
    rows: tuple[Row, ...]
    body: Body
    mail: str = ""
    after: str = ""  # the job that it waits for: launch --after
    elements: tuple[int, ...] = ()  # of a sweep: a run for each, in one file


@dataclass(frozen=True)
class ScriptSource:
    """Where the script came from. ``path``: as a shell in ``folder`` names it; "" where it is no file. ``folder``: where it was
    typed, in which sbatch would have started the job. ``arguments``: of the script. ``moved``: the settings lie elsewhere.
    """

    folder: str
    path: str = ""
    name: str = "run"
    arguments: tuple[str, ...] = ()
    moved: bool = False


def draft_of_command(command: str, name: str) -> Draft:
    """Return a run of one command, which was in no script: a job on one node, through srun as every command is."""
    row = Row("", _cut(command), "launch.command")
    launch: dict[str, tuple[Any, str]] = {"nodes": (1, ""), "command": (command, "")}
    return Draft(name, launch, (row,), Body(BodyKind.ONCE, command))


def draft(script: Script, source: ScriptSource) -> Draft:
    """Return the settings that submit the same job. Raises Untranslatable, with the line and the reason."""
    return _Drafting(script, source).made()


@dataclass
class _Drafting:
    script: Script
    source: ScriptSource
    name: str = ""
    launch: dict[str, tuple[Any, str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    sbatch: list[str] = field(default_factory=list)
    mail: str = ""
    after: str = ""
    folder: str = ""  # of --chdir
    elements: tuple[int, ...] = ()

    def made(self) -> Draft:
        given = self.script.given
        last = {id(one) for one in given.values()}
        if "chdir" in given:
            self._chdir(given["chdir"])
        for one in self.script.options:
            if id(one) not in last:
                self._row(one, "not needed: a later line says it again, and the last one counts")
            elif one.name != "chdir":
                self._option(one)
        self._nodes()
        for number, why in self.script.ignored:
            text = self.script.text.splitlines()[number - 1].strip()
            self.rows.append(Row(str(number), text[:60], f"not read, as by sbatch: {why}", decide=True))
        whole = "its array, of which each element runs it" if self.elements else ""
        body = read_body(self.script, self.source.arguments, whole=whole, own=self._path())
        self._body(body)
        self._job_numbers(body)
        if self.sbatch:
            self.launch["sbatch"] = (self.sbatch, "options without a setting of their own")
        self._given_name()
        self._shared_output()
        made = Draft(self.name, self.launch, tuple(self._sorted()), body, self.mail, self.after, self.elements)
        return _swept(made) if made.elements else made

    def _shared_output(self) -> None:
        """Tell of a file that all runs of a sweep would write to."""
        for key in ("output", "error"):
            one = self.script.given.get(key)
            if self.elements and one is not None and key in self.launch and not re.search(r"%[0-9]*[aAjJx]", one.value):
                self.rows = [row for row in self.rows if row.lines != str(one.line) or row.text != one.text]
                number = len(self.elements)
                words = (
                    f"launch.{key}: all {number} runs append to one file; {{{ELEMENT}}} in its name gives each its own"
                )
                self._row(one, words, decide=True)

    def _sorted(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: int(row.lines.split("-")[0]) if row.lines else 0)

    def _row(self, one: Option, words: str, *, decide: bool = False) -> None:
        text = one.text if one.line else f"{one.text} (typed)"
        self.rows.append(Row(str(one.line) if one.line else "", text, words, decide))

    def _set(self, one: Option, key: str, value: Any, words: str = "", *, decide: bool = False) -> None:
        self.launch[key] = (value, "")
        self._row(one, f"launch.{key}{': ' + words if words else ''}", decide=decide)

    def _refuse(self, one: Option, why: str, hint: str = "") -> Untranslatable:
        where = f"line {one.line}: " if one.line else ""
        return Untranslatable(f"{where}{one.text}: {why}", hint=hint)

    # ------------------------------------------------------------------------------------------------------ the options

    def _option(self, one: Option) -> None:
        name = one.name
        special = _SPECIAL.get(name)
        if name == "nodes":
            return
        if name in _NUMBERS:
            if not re.fullmatch(r"[1-9][0-9]*", one.value):
                raise self._refuse(one, "a number was expected")
            since = "each rank gets them; srun does not take them over from sbatch since Slurm 22.05"
            self._set(one, _NUMBERS[name], int(one.value), since if name == "cpus-per-task" else "")
        elif name in _AS_IT_IS:
            self._as_it_is(one)
        elif name in _MEMORY:
            self._memory(one)
        elif name in _NOT_NEEDED:
            self._row(one, _NOT_NEEDED[name])
        elif special is not None:
            special(self, one)
        else:
            self.sbatch.append(one.text)
            known = "launch.sbatch, as it stands"
            self._row(
                one,
                known if one.known else f"{known}: no option of sbatch(1); a plugin of your site may know it",
                decide=not one.known,
            )

    def _as_it_is(self, one: Option) -> None:
        value: Any = one.value
        if one.name == "gres" and re.search(r"(^|,)gpu\b", value) and "gpus-per-node" in self.script.given:
            self.sbatch.append(one.text)
            self._row(one, "launch.sbatch, as it stands")
            return
        if one.name == "gpus-per-node" and re.fullmatch(r"[1-9][0-9]*", value):
            value = int(value)
        if not value or (one.name == "gres" and value.lower() == "none"):
            self._row(one, "not needed: it asks for nothing")
            return
        self._set(one, _AS_IT_IS[one.name], value)

    def _memory(self, one: Option) -> None:
        match = re.fullmatch(r"([0-9]+)([KMGTkmgt]?)[Bb]?", one.value)
        if match is None:
            raise self._refuse(one, "no size that Slurm reads, such as 500G")
        self._set(one, _MEMORY[one.name], match[1] + match[2].upper())

    def _job_name(self, one: Option) -> None:
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", one.value).strip("-._")[:100]
        same = self.name == one.value
        self._row(
            one, "name" if same else f"name: {self.name}: a run's name has letters, digits, '.', '_' and '-' only"
        )

    def _nodes_option(self, one: Option) -> None:
        match = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", one.value)
        if match is None or (match[2] and match[2] != match[1]):
            raise self._refuse(
                one,
                "the number of nodes is left to Slurm, and a run has one",
                f"write one number, such as --nodes={match[2] if match else 1}",
            )
        self._set(one, "nodes", int(match[1]))

    def _nodes(self) -> None:
        given = self.script.given
        if "nodes" in given:
            one = given["nodes"]
            self._nodes_option(one)
            return
        tasks, each = (self.launch.get(key, (0, ""))[0] for key in ("ntasks", "tasks_per_node"))
        if tasks and each:
            self.launch = {"nodes": (-(-tasks // each), "ntasks / tasks_per_node"), **self.launch}
            return
        self.launch = {"nodes": (1, ""), **self.launch}
        wide = [
            name
            for name in ("ntasks", "gpus", "nodelist", "gpus-per-task")
            if name in given and given[name].value not in ("1", "")
        ]
        if wide:
            text = given[wide[0]].text
            self.rows.append(
                Row(
                    "",
                    "no --nodes",
                    f"launch.nodes: 1; your script left the number of nodes to Slurm ({text}): is one right?",
                    decide=True,
                )
            )

    def _time(self, one: Option) -> None:
        if one.value.lower() in ("unlimited", "infinite", "-1", "0"):
            raise self._refuse(
                one, "a job without a limit has no warning before it", "write the longest time that the partition gives"
            )
        try:
            limit = parse_slurm_time(one.value)
        except ValueError as error:
            raise self._refuse(one, str(error)) from None
        self._set(one, "time", one.value if ":" in one.value else format_slurm_time(limit))

    def _signal(self, one: Option) -> None:
        match = re.fullmatch(r"(?:([BR]+):)?(\w+)(?:@([0-9]+))?", one.value, re.I)
        if match is None:
            raise self._refuse(one, "no signal that sbatch reads")
        word, seconds = match[2].upper().removeprefix("SIG"), int(match[3] or 60)
        self.launch["signal"] = (int(word) if word.isdigit() else word, "")
        self.launch["warn"] = (format_duration(timedelta(seconds=seconds)), "")
        limit = self.script.given.get("time")
        if limit is not None:
            try:
                if parse_slurm_time(limit.value).total_seconds() <= seconds:
                    del self.launch["warn"]
                    self._row(
                        one,
                        "launch.signal; the time before the limit is longer than the job: half of it is taken",
                        decide=True,
                    )
                    return
            except ValueError:
                pass
        to = "; it reached your ranks from Slurm, and reaches them from the supervisor now"
        if "B" in (match[1] or "").upper():
            to = ""
        elif not calls_srun(self.script.body):
            to = "; without B: Slurm gave it to steps of srun alone, and the script names none: the command gets it now"
        self._row(one, f"launch.signal, launch.warn{to}")

    def _no_requeue(self, one: Option) -> None:
        self._set(one, "requeue", False)

    def _output(self, one: Option) -> None:
        self._file(one, "output")

    def _error(self, one: Option) -> None:
        self._file(one, "error")

    def _file(self, one: Option, key: str) -> None:
        value = one.value
        folder = value.rpartition("/")[0]
        differs = [part for part in re.findall(r"%%|%\d*[A-Za-z]", folder) if part not in ("%%", "%x", "%u")]
        if differs or "\\" in value:
            why = f"its folder differs from job to job ({differs[0]})" if differs else "it holds a backslash"
            words = f"not kept: {why}, and Slurm makes no folder; the output goes to runs/NAME/logs"
            self._row(one, words, decide=True)
            return
        if not value.startswith(("/", "~")) and (self.folder or self.source.moved):
            value = f"{self.folder or self.source.folder}/{value}"
        if value.startswith("~"):
            value = f"{self.folder or self.source.folder}/{value}"
        said = "; its folder is made at launch" if folder not in ("", ".") else ""
        if "$" in one.value:
            said += "; Slurm fills in no variable there, and the file has the $ in its name"
        elif not re.search(r"%[0-9]*[jJaA]", value):
            said += "; all jobs of the chain append to it"
        self._set(one, key, value, said.removeprefix("; "), decide="$" in one.value)

    def _exclude(self, one: Option) -> None:
        parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", one.value)
        try:
            for part in parts:
                expand_hostlist(part)
        except ValueError as error:
            raise self._refuse(one, str(error)) from None
        self._set(one, "exclude", parts)

    def _exclusive(self, one: Option) -> None:
        if one.value in ("user", "mcs", "topo"):
            self._set(one, "exclusive", one.value)
        elif one.value:
            raise self._refuse(one, "user, mcs or topo was expected")
        else:
            self._set(one, "exclusive", True)

    def _chdir(self, one: Option) -> None:
        self.folder = posixpath.normpath(posixpath.join(self.source.folder, one.value))
        if self.folder == self.source.folder and not self.source.moved:
            self.folder = ""
            self._row(one, "not needed: the job starts there")
            return
        self._row(one, "launch.setup: cd there first")

    def _mail_user(self, one: Option) -> None:
        self.mail = one.value
        words = "alerts.receivers, as a comment: ftsupervise tells more than Slurm's mails; fill in your mail server"
        self._row(one, words, decide=True)

    def _mail_type(self, one: Option) -> None:
        self._row(one, "not needed: ftsupervise tells of what is wrong, and when it is over (alerts.receivers)")

    def _comment(self, one: Option) -> None:
        self._row(one, "not kept: ftsupervise finds its jobs by their comment", decide=True)

    def _dependency(self, one: Option) -> None:
        match = re.fullmatch(r"after(?:any|ok|notok)?:([0-9]+(?:_[0-9]+)?)", one.value)
        if match is None:
            words = "not kept: a job of a chain waits for the one before; launch --after JOBID waits for another first"
            if one.value == "singleton":
                words = "not needed: one job of the chain runs at a time"
            self._row(one, words, decide=one.value != "singleton")
            return
        self.after = match[1]
        self._row(one, f"not in the settings: type ftsupervise launch --after {match[1]}", decide=True)

    def _hold(self, one: Option) -> None:
        self.sbatch.append("--hold")
        self._row(
            one, "launch.sbatch: each job of the chain is held until somebody releases it; is that meant?", decide=True
        )

    def _array(self, one: Option) -> None:
        found = re.fullmatch(r"([0-9,:\-]+)(?:%([0-9]+))?", one.value)
        numbers = _elements(found[1]) if found else ()
        if not found or not numbers:
            raise self._refuse(one, "no list of numbers that sbatch reads, such as 1-10%1")
        used = _uses_its_number(self.script.body)
        if not used and found[2] == "1":
            self.launch["jobs"] = (min(1000, len(numbers)), "one runs, the others wait to take over")
            self._row(one, f"launch.jobs: {min(1000, len(numbers))}: one runs at a time, the others wait to take over")
            return
        if len(numbers) == 1 and not used:
            self._row(one, "not needed: an array of one job; launch.jobs says how many are in the chain")
            return
        if len(numbers) > MOST:
            raise self._refuse(one, f"{len(numbers)} elements, and each would be a run of its own: at most {MOST}")
        if not self.source.path:
            raise self._refuse(
                one, "each element runs the script, and it is no file here", "save it in a file and name that"
            )
        self.elements = numbers
        most = f"; all may run at once, not {found[2]} of them" if found[2] else ""
        if found[2] == "1":
            chain = f"take --array out, type this again, and write launch: {{jobs: {min(1000, len(numbers))}}}"
            most = f"; yours ran one at a time: if they are parts of one training, this is a chain: {chain}"
        if not used:
            most += "; the script does not read it: if your program does not either, they are all the same"
        self._row(
            one,
            f"sweep: {len(numbers)} runs, each with a SLURM_ARRAY_TASK_ID that stays the same after each restart{most}",
            decide=bool(most),
        )

    def _wrap(self, one: Option) -> None:
        raise self._refuse(one, "it stands in a script, where sbatch refuses it")

    def _uid(self, one: Option) -> None:
        raise self._refuse(one, "only root may submit for another account")

    # --------------------------------------------------------------------------------------------------------- the body

    def _body(self, body: Body) -> None:
        for told in body.told:
            self.rows.append(Row(_lines(told.first, told.last), told.text, told.words, told.decide))
        self._relayed(body.relays)
        first = (
            [f"cd {shlex.quote(self.folder or self.source.folder)} || exit"] if self.folder or self.source.moved else []
        )
        if body.form is BodyKind.SCRIPT:
            self._script_itself(body, first)
            return
        if body.modules:
            purged = any(PURGES.match(line) for line in body.setup.splitlines())
            self.launch["modules"] = (
                list(body.modules),
                "loaded behind the purge of setup, in this order" if purged else "",
            )
        if body.env:
            self.launch["env"] = (dict(body.env), "")
        if body.take_along:
            self.launch["take_along"] = (list(body.take_along), "export them before you type ftsupervise launch")
        setup = "".join(f"{line}\n" for line in first) + body.setup
        if setup.strip():
            self.launch["setup"] = (setup, "")
        self.launch["command"] = (body.command, "")
        around = understand(body.command).kind is Kind.AROUND
        if body.form is BodyKind.ONCE and not around:
            self.launch["srun"] = (False, "it runs once in the job, as in your script")
        if body.finished:
            self.launch["finished_by"] = ("exit 0", body.finished)
        if body.why:
            self._what_is_left(body)
            return
        self._told_setup(body)
        lines = _lines(*body.command_lines)
        shown = self.script.text.splitlines()[body.command_lines[0] - 1].strip()
        words = "launch.command: ftsupervise starts this srun, with --kill-on-bad-exit=1 before your own options"
        if body.form is BodyKind.ONCE:
            words = "launch.command: runs once in the job, as in your script"
            if around:
                words += "; ftsupervise places no ranks: one srun alone would let it"
        again = re.match(r"\s*(?:while|until)\b", body.command) is not None
        if again:
            words += "; the loop starts it again by itself: without the loop ftsupervise does, and tells people"
        self.rows.append(Row(lines, _cut(shown), words, decide=again))

    def _relayed(self, relays: tuple[Relay, ...]) -> None:
        """Have the warning come as what the program got of it: that is what it answers."""
        warning = str(self.launch.get("signal", ("", ""))[0])
        for one in relays:
            words = []
            if not warning or warning in one.caught:
                self.launch["signal"] = (one.sent, "as your handler passed it on")
                words.append(f"the warning comes as SIG{one.sent} (launch.signal), which this gave your program")
            if ends := "TERM" in one.caught:
                words.append(
                    f"at scancel and a preemption it gets SIGTERM itself, not SIG{one.sent}: does it save then?"
                )
            if words:
                line = str(one.line)
                self.rows = [row for row in self.rows if (row.lines, row.text) != (line, one.text)]
                self.rows.append(Row(line, one.text, f"not needed: {'; '.join(words)}", decide=ends))

    def _what_is_left(self, body: Body) -> None:
        """Say of a script that is one command where it went: all lines but those that are told."""
        self.launch["command"] = (body.command, f"the script, without what is ftsupervise's: {body.why}")
        words = f"launch.command: what is left of the script, once in the job ({body.why})"
        words += "; an exit with 0 submits nothing: launch.finished_by" if body.finished else ""
        self.rows.append(Row(_lines(*body.command_lines), "the script's commands", words))

    def _told_setup(self, body: Body) -> None:
        """Say where each line of the body went that is in no other row."""
        told = {number for row in body.told for number in range(row.first, row.last + 1)}
        told |= set(range(body.command_lines[0], body.command_lines[1] + 1))
        lines = self.script.body.splitlines()
        modules = set(body.modules)
        block: list[tuple[int, str]] = []
        for number, line in enumerate(lines, self.script.body_line):
            stripped = line.strip()
            if number in told or not stripped or stripped.startswith("#"):
                continue
            words = stripped.split()
            if (
                words[0] in ("module", "ml")
                and modules
                and set(words[1:]) - {"load", "add"} <= modules
                and len(words) > 1
            ):
                self.rows.append(Row(str(number), _cut(stripped), "launch.modules"))
            elif re.search(r"\bMASTER_(?:ADDR|PORT)=|scontrol\s+show\s+hostname", stripped):
                words_of_it = (
                    "launch.setup, as it stands; without it each attempt gets MASTER_ADDR and a free MASTER_PORT"
                )
                self.rows.append(Row(str(number), _cut(stripped), words_of_it))
            elif (match := re.match(r"export\s+([A-Za-z_]\w*)=", stripped)) and match[1] in body.env:
                self.rows.append(Row(str(number), _cut(stripped), "launch.env"))
            else:
                block.append((number, stripped))
        at = 0
        while at < len(block):
            end = at
            while end + 1 < len(block) and block[end + 1][0] - block[end][0] <= 1:
                end += 1
            self.rows.append(Row(_lines(block[at][0], block[end][0]), _cut(block[at][1]), "launch.setup, as it stands"))
            at = end + 1

    def _path(self) -> str:
        """Return the path of the script from wherever a shell stands; "" where it is no file."""
        path = self.source.path
        return posixpath.normpath(posixpath.join(self.source.folder, path)) if path else ""

    def _script_itself(self, body: Body, first: list[str]) -> None:
        if not self.source.path:
            raise Untranslatable(
                f"the script has to stay as it is ({body.why}), and it is no file here",
                hint="save it in a file and name that",
            )
        shell = list(self.script.interpreter)
        shell[0] = shell[0] if shell[0].rpartition("/")[2] not in ("bash", "sh") else shell[0].rpartition("/")[2]
        path = self.source.path
        if (self.folder or self.source.moved) and not path.startswith("/"):
            path = f"{self.source.folder}/{path}"
        words = [*shell, path, *self.source.arguments]
        if first:
            self.launch["setup"] = ("".join(f"{line}\n" for line in first), "")
        self.launch["command"] = (shlex.join(words), f"{body.why}: so the script stays as it is")
        self.launch["srun"] = (False, "it runs once in the job, and calls srun itself where it wants")
        last = self.script.body_line + max(0, len(self.script.body.splitlines()) - 1)
        self.rows.append(
            Row(
                _lines(self.script.body_line, last),
                "the script's commands",
                f"launch.command: {shlex.join(words)}: the script stays as it is ({body.why})",
            )
        )

    def _job_numbers(self, body: Body) -> None:
        """Warn of a number that is another one in each job of the chain, and of arguments that nobody gave."""
        code = re.sub(r"(?m)#.*$", "", self.script.body)
        gone = {
            number for row in self.rows if re.match("not needed|left out", row.words) for number in _numbers(row.lines)
        }
        for number, line in enumerate(code.splitlines(), self.script.body_line):
            if number in gone:
                self._most(number, line)
                continue
            if _RESTARTS.search(without_told(line)) and not re.search(r"(?m)^\s*SLURM_RESTART_COUNT=", code):
                self.rows.append(Row(str(number), _cut(line), _counts_nothing(line, body), decide=True))
                continue
            names = [name for name in job_numbers(line) if not (self.elements and name.startswith("SLURM_ARRAY_TASK"))]
            if names and not _names_logs(line, code):
                words = f"{names[0]} is another one in each job: what it names is not found again after a restart; fix the name"
                self.rows.append(Row(str(number), _cut(line), words, decide=True))
            if (
                not self.source.arguments
                and (match := re.search(r"\$(?:([1-9])|\{([1-9])\})", line))
                and "awk" not in line
            ):
                where = self.source.path or "JOB.sbatch"
                words = f"the script's argument {match[1] or match[2]} is empty: ftsupervise init {where} ARGUMENTS gives it"
                self.rows.append(Row(str(number), _cut(line), words, decide=True))

    def _most(self, number: int, line: str) -> None:
        """Say of a line that counted how often the script submitted itself that nothing counts it now."""
        ours = [row for row in self.rows if number in _numbers(row.lines) and "next job of the chain" in row.words]
        found = _COUNTS.search(line)
        if not ours or found is None or not _OF_A_COUNT.search(found[0]):
            return
        most = found[2] or next(iter(re.findall(rf"(?m)^\s*{found[1]}=[\"']?(\d+)\b", self.script.body)), "")
        if most:
            jobs = self.launch.get("jobs", (10, ""))[0]
            words = (
                f"it stopped after {most} restarts; now the chain ends with the last of its jobs (launch.jobs: {jobs})"
            )
            self.rows.append(Row(str(number), _cut(line), words, decide=True))

    def _given_name(self) -> None:
        if not self.name:
            self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.name).strip("-._")[:100] or "run"


_SPECIAL: dict[str, Callable[[_Drafting, Option], None]] = {
    "array": _Drafting._array,
    "comment": _Drafting._comment,
    "dependency": _Drafting._dependency,
    "error": _Drafting._error,
    "exclude": _Drafting._exclude,
    "exclusive": _Drafting._exclusive,
    "gid": _Drafting._uid,
    "hold": _Drafting._hold,
    "job-name": _Drafting._job_name,
    "mail-type": _Drafting._mail_type,
    "mail-user": _Drafting._mail_user,
    "no-requeue": _Drafting._no_requeue,
    "output": _Drafting._output,
    "signal": _Drafting._signal,
    "time": _Drafting._time,
    "uid": _Drafting._uid,
    "wrap": _Drafting._wrap,
}


def _counts_nothing(line: str, body: Body) -> str:
    """Return what to ask in the place of Slurm's count of restarts, which is never one here. What the job's own shell runs or
    expands, once and before the supervisor, knows no attempt.
    """
    stays = "is never set" if "SLURM_RESTART_COUNT" in line else "stays 0"
    once = body.form is BodyKind.SRUN or (line.strip() in body.setup and line.strip() not in body.command)
    ask = "ask for FTSUPERVISE_ATTEMPT, which is 1 at the first start only"
    if once:
        ask = "it runs once in the job: ask if a checkpoint is there (only your program has FTSUPERVISE_ATTEMPT)"
    return f"Slurm counts no restart here, and this {stays}; {ask}"


def _names_logs(line: str, code: str) -> bool:
    """Return whether the line sets a variable that the code uses for the names of logs alone, or tells."""
    held = _SETS.fullmatch(line)
    return held is not None and not re.search(_reads((held[1],)), without_told(code))


def _reads(names: Collection[str]) -> str:
    """Return an expression for code that expands or exports one of these variables."""
    either = "|".join(names)
    return rf"\$\{{?(?:{either})\b|\bexport\s[^\n]*\b(?:{either})\b"


def _uses_its_number(code: str) -> bool:
    """Return whether the code does anything with the number of its element but tell it, and name logs with it."""
    code = without_told(re.sub(r"(?m)^\s*#.*$", "", code))
    reads = _ARRAY_ID
    for _ in range(5):  # variables in variables
        held = [one for one in _SETS.finditer(code) if re.search(reads, one[0])]
        if not held:
            break
        reads += f"|{_reads({one[1] for one in held})}"
        for one in reversed(held):
            code = code[: one.start()] + code[one.end() :]
    return re.search(reads, code) is not None


def _elements(text: str) -> tuple[int, ...]:
    """Return the numbers of "1-3,7,10-20:5"; () where it is no such list."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+)(?::([1-9][0-9]*))?)?", part)
        if match is None:
            return ()
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or last - first > 1_000_000:
            return ()
        found += range(first, last + 1, step)
    return tuple(sorted(set(found)))


def _swept(made: Draft) -> Draft:
    """Return the sweep of an array: each run has its element's variables of Slurm, always the same ones."""
    command, comment = made.launch["command"]
    numbers = made.elements
    names = {
        "TASK_ID": f"{{{ELEMENT}}}",
        "TASK_COUNT": len(numbers),
        "TASK_MIN": min(numbers),
        "TASK_MAX": max(numbers),
    }
    words = " ".join(f"SLURM_ARRAY_{key}={value}" for key, value in names.items())
    launch = dict(made.launch)
    code = f"export {words}\n{command}" if "\n" in str(command) else f"env {words} {command}"
    launch["command"] = (code, comment)
    for key in ("output", "error"):
        if key in launch:
            launch[key] = (re.sub(r"%[0-9]*a", f"{{{ELEMENT}}}", str(launch[key][0])), launch[key][1])
    return replace(made, name=f"{made.name[:90]}-{{{ELEMENT}}}", launch=launch)


def _numbers(lines: str) -> range:
    first, _, last = lines.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


def _lines(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:59]}…"
