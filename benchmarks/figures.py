"""All figures in one place: each benchmark prints its own, ``docs/figures.md`` keeps them, and every page quotes from there.

    python benchmarks/figures.py                     # make bench: all but the long ones, about 25 minutes on two quiet cores
    python benchmarks/figures.py guard status        # make bench ONLY=guard,status: their rows alone
    python benchmarks/figures.py --quote             # write the figures of docs/figures.md into the pages that quote them
    python benchmarks/figures.py --list              # the programs, and how long each may take

A program says a figure by ``figure()``, as a line of its output: ``figures: guard/step = 96 ns (2.1 times time.monotonic())``.
What stands in brackets is the peer or the floor of the same run. What a run does not print keeps its row, with its own date
and machine; a row that nobody prints any more is deleted from the page by hand.

A page quotes by a comment behind the number, which no reader sees. A page that says no unit has that of ``docs/figures.md``::

    a step costs 96 ns<!-- figure: guard/step -->, 2.1<!-- times: guard/step --> times a look at the clock, and never more
    than 1 µs<!-- below: guard/step -->

``tests/story/test_figures.py`` compares them, and finds numbers that look measured and quote nothing.
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures.md"
TORCH = ROOT / ".venv-torch" / "bin" / "python"
GRACE = 60.0  # seconds to take a sandbox down after SIGTERM


# ------------------------------------------------------------------------------------------------- what a program says


_SAYING: list[str] = []


def figure(name: str, value: float, unit: str = "", beside: str = "", *, times: float | None = None) -> None:
    """Say one figure of ``program/name``, at the end of the output. ``beside``: the peer or floor of the same run, of which it
    is so many ``times``. A name may be the words of a table's row: what is neither a letter nor a digit becomes a dash."""
    words = f"{shown(times)} times {beside}" if times is not None else beside
    own = name.endswith(f"/{beside}")  # it is the floor
    if not _SAYING:
        atexit.register(lambda: print("", *_SAYING, sep="\n", flush=True))
    _SAYING.append(f"figures: {slug(name)} = {shown(value)}{_spaced(unit)}{f' ({words})' if words and not own else ''}")


def slug(name: str) -> str:
    return re.sub(r"[^\w/]+", "-", name).strip("-")


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def shown(value: float, digits: int = 3) -> str:
    """So many significant digits, in full; a whole number as it is."""
    if isinstance(value, int) or value == 0:
        return str(value)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


class Figure(NamedTuple):
    """A row of the page. ``on``: the key of its machine."""

    name: str
    value: float
    unit: str
    beside: str = ""
    day: str = ""
    load: str = ""
    on: str = ""

    @property
    def times(self) -> float | None:
        """The ratio to what stands beside it, where that was said."""
        found = re.match(r"(-?[\d.]+) times ", self.beside)
        return float(found[1]) if found else None

    @property
    def line(self) -> str:
        seen = f"{self.day}, {self.on}, load {self.load}" if self.load else f"{self.day}, {self.on}"
        return f"| {self.name} | {plain(self.value)}{_spaced(self.unit)} | {self.beside} | {seen} |"


def plain(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) >= 100 else f"{value:.12g}"


_VALUE = r"(?P<value>-?[\d.]+)"
_SAID = re.compile(rf"figures: (?P<name>[\w-]+/[^=]+?) = {_VALUE}(?: (?P<unit>[^\s(][^(]*?))?(?: \((?P<beside>.*)\))?$")
_ROW = re.compile(
    rf"\| (?P<name>[\w-]+/[\w/-]+) \| {_VALUE}(?: (?P<unit>[^|]+?))? \| (?P<beside>[^|]*?) ?\| "
    r"(?P<day>[\d-]+), (?P<on>[A-Z])(?:, load (?P<load>[\d.]+))? \|$"
)


def said_in(line: str) -> Figure | None:
    """The figure that a line of a program's output says."""
    found = _SAID.match(line.strip())
    return _figure(found) if found else None


def _figure(found: re.Match[str]) -> Figure:
    parts = {name: text or "" for name, text in found.groupdict().items()}
    return Figure(**{**parts, "name": slug(parts["name"]), "value": float(parts["value"])})  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the programs


class Program(NamedTuple):
    """``torch``: it needs it, or prints more with it. ``long``: it runs where it is named, and not with all others."""

    name: str
    words: tuple[str, ...]
    seconds: float
    torch: str = ""
    long: bool = False

    @property
    def command(self) -> str:
        return " ".join(("python", *self.words))


def _program(name: str, words: str, seconds: float, torch: str = "", *, long: bool = False) -> Program:
    return Program(name, tuple(words.split()), seconds, torch, long)


BETTER, NEEDED = "prints more with torch", "needs torch"
PROGRAMS = (
    _program("guard", "benchmarks/guard.py", 180, BETTER),
    _program("cli", "benchmarks/cli.py", 60),
    _program("status", "benchmarks/status.py --idle 60", 240),
    _program("tick", "benchmarks/tick.py", 420),
    _program("scale", "benchmarks/scale.py", 600),
    _program("beats", "benchmarks/beats.py", 180),
    _program("report", "benchmarks/report.py", 90),
    _program("simulator", "benchmarks/simulator.py", 90),
    _program("checkpoints", "benchmarks/checkpoints.py 128", 240, BETTER),
    _program("snapshots", "benchmarks/snapshots.py 256", 120, BETTER),
    _program("snapshot-copies", "benchmarks/snapshots.py 64 --copies", 210),
    _program("snapshot-waits", "benchmarks/snapshots.py 1 16 --wait", 120),
    _program("diagnosis-scale", "benchmarks/diagnosis_scale.py", 180),
    _program("recovery", "benchmarks/recovery --rounds 1 --faults SIGKILL --idle 10 --launchers "
             "ftsupervise,ftsupervise-memory,bash-srun,torchrun-env", 600, NEEDED),
    _program("replicas", "benchmarks/replicas/faults.py --rounds 1 --launchers groups", 300, NEEDED),
    _program("lighthouse", "benchmarks/replicas/control_plane.py --groups 8,50", 240, NEEDED),
    _program("timeline", "benchmarks/replicas/timeline.py --kills 5", 150, NEEDED),
    _program("diagnosis", "benchmarks/diagnosis --trials 1", 600, NEEDED, long=True),
    _program("losses", "benchmarks/replicas/losses.py --check", 3600, NEEDED, long=True),
    _program("prediction", "-m benchmarks.prediction", 900, long=True),
    _program("prediction-apply", "-m benchmarks.prediction --apply", 900, long=True),
    _program("month", "-m benchmarks.month --minutes 60 --all", 7200, long=True),
    _program("recovery-soak", "benchmarks/recovery --launchers ftsupervise --rounds 0 --soak 60", 1800, NEEDED, long=True),
    _program("replica-soak", "benchmarks/replicas/faults.py --soak 15m", 1500, NEEDED, long=True),
)  # fmt: skip


def run(program: Program) -> tuple[list[Figure], str]:
    """Run it to its end, its output shown: its figures, and why it failed or was left out ("" where it did not)."""
    torch = program.torch and TORCH.exists()
    if program.torch == NEEDED and not torch:
        return [], "left out: it needs torch (make test-torch makes .venv-torch)"
    python = str(TORCH) if torch else sys.executable
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    child = subprocess.Popen(
        [python, *program.words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    found, late = list[Figure](), False
    for line in _lines(child, program.seconds):
        if line is None:
            late = True
            continue
        print(line, flush=True)
        if (one := said_in(line)) is not None:
            found.append(one)
    if late:
        return found, f"ended after {program.seconds:.0f} s"
    return found, f"ended with {child.returncode}" if child.returncode else "" if found else "printed no figure"


def _lines(child: subprocess.Popen[bytes], bound: float) -> Iterator[str | None]:
    """Its output until it has ended; None once when its time is over. Its group is asked to end, then killed."""
    assert child.stdout is not None
    rest, due, late = b"", time.monotonic() + bound, False
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if ready.select(max(0.0, min(1.0, due - time.monotonic()))):
                if not (read := os.read(child.stdout.fileno(), 65_536)):
                    break
                *lines, rest = (rest + read).split(b"\n")
                yield from (one.decode("utf-8", "replace") for one in lines)
            elif child.poll() is not None:
                break  # what it left behind may hold the pipe
            if time.monotonic() >= due:
                os.killpg(child.pid, signal.SIGKILL if late else signal.SIGTERM)
                if not late:
                    yield None
                late, due = True, time.monotonic() + GRACE
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


# --------------------------------------------------------------------------------------------------------------- the page


class Page(NamedTuple):
    figures: dict[str, Figure]
    machines: dict[str, str]  # key -> words

    def on(self, words: str) -> str:
        """The key of a machine, a new one where it has none."""
        known = next((key for key, text in self.machines.items() if text == words), None)
        key = known or next(chr(one) for one in range(ord("A"), ord("Z")) if chr(one) not in self.machines)
        self.machines[key] = words
        return key

    def put(self, found: Iterable[Figure], day: str, load: str, machine: str) -> None:
        key = self.on(machine)
        self.figures.update({one.name: one._replace(day=day, load=load, on=key) for one in found})


def read_page(text: str) -> Page:
    rows = (_ROW.match(line) for line in text.splitlines())
    figures = [_figure(one) for one in rows if one]
    machines = dict(re.findall(r"^\| ([A-Z]) \| ([^|]+?) \|$", text, re.M))
    return Page({one.name: one for one in figures}, machines)


_HEAD = """\
# Figures

*For you if you want every measured number with its day and its machine.*

`make bench` writes this page, and all others quote from it. What is beside a figure is the peer or the floor of the same run.
Seconds are a machine's own; ratios travel. A row that was not measured again keeps its day.

| machine | |
|---|---|
"""
_TABLES = """
| program | command |
|---|---|
{programs}

| figure | value | beside it | measured |
|---|---|---|---|
{figures}
"""


def page_text(page: Page) -> str:
    """The page as it is written; programs in their order, and what they print in theirs."""
    order = [one.name for one in PROGRAMS]
    rows = sorted(page.figures.values(), key=lambda one: _place(order, one.name.partition("/")[0]))
    used = {one.on for one in rows}
    machines = "".join(f"| {key} | {words} |\n" for key, words in sorted(page.machines.items()) if key in used)
    programs = "\n".join(f"| {one.name} | `{one.command}` |" for one in PROGRAMS)
    return _HEAD + machines + _TABLES.format(programs=programs, figures="\n".join(one.line for one in rows))


def _place(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def machine() -> str:
    """Return, in one line, the machine and the versions that the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = platform.release().partition("-")[0]
    parts = [f"{os.cpu_count()} cores", _processor(), f"{memory:.0f} GiB", f"Linux {kernel}"]
    parts.append(f"Python {platform.python_version()}")
    if TORCH.exists():
        asked = "import importlib.metadata as m; print('torch', m.version('torch'))"
        parts.append(_said([str(TORCH), "-c", asked]))
    if shutil.which("slurmctld"):
        parts.append(_said(["slurmctld", "-V"]).replace("slurm-wlm", "Slurm").replace("slurm ", "Slurm "))
    return ", ".join(one for one in parts if one).replace("|", "/")


def _processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.M)
    return re.sub(r"\((?:R|TM)\)| CPU| Processor|\s+@.*", "", names[0]) if names else ""


def _said(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


# -------------------------------------------------------------------------------------------------------------- the quotes

_SCALES = (
    {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "seconds": 1.0, "second": 1.0, "min": 60.0, "minutes": 60.0},
    {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
)
_UNITS = "|".join((*(unit for scale in _SCALES for unit in scale), "%", "points", "times"))
QUOTE = re.compile(
    rf"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<rest>(?:\s?(?P<unit>{_UNITS})(?!\w))?[*_]*)"
    r"<!-- (?P<kind>figure|times|below): (?P<name>[\w/-]+) -->"
)


class Quote(NamedTuple):
    """A number in a page, and the figure that it is of."""

    kind: str
    name: str
    number: str
    unit: str

    def value(self, page: Page) -> float:
        """Return the value on the page of figures, in the unit of the quote. Raises ValueError where there is none."""
        of = page.figures.get(self.name)
        if of is None:
            raise ValueError(f"docs/figures.md has no {self.name}")
        if self.kind == "times":
            if of.times is None:
                raise ValueError(f"{self.name} is no ratio: {of.line}")
            return of.times
        return of.value * _scale(of.unit, self.unit or of.unit)

    def agrees(self, page: Page) -> bool:
        """Is it that figure, rounded to the digits that stand there? Of ``below``: is the figure less?"""
        value, number = self.value(page), _number(self.number)
        if self.kind == "below":
            return value < number
        return abs(value - number) <= 0.5000001 * 10.0 ** -_places(self.number)

    def anew(self, page: Page) -> str:
        """The number as it is to stand there: what agrees stays, else as many digits as there were."""
        if self.kind == "below" or self.agrees(page):
            return self.number
        digits = len(self.number.replace(",", "").replace(".", "").lstrip("0"))
        whole, point, rest = shown(self.value(page), digits if "." in self.number else min(digits, 2)).partition(".")
        return f"{int(whole):,}{point}{rest}"


def _scale(own: str, wanted: str) -> float:
    if own == wanted:
        return 1.0
    for scale in _SCALES:
        if own in scale and wanted in scale:
            return scale[own] / scale[wanted]
    raise ValueError(f"{own!r} is not {wanted!r}")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _places(text: str) -> int:
    """Decimals that count; negative for a whole number whose last digits are zeros, two digits of which count at least."""
    whole, point, decimals = text.replace(",", "").partition(".")
    return len(decimals) if point else -min(len(whole) - len(whole.rstrip("0")), max(0, len(whole) - 2))


def quotes(text: str) -> Iterator[tuple[re.Match[str], Quote]]:
    for found in QUOTE.finditer(text):
        yield found, Quote(found["kind"], found["name"], found["number"], found["unit"] or "")


def pages() -> list[Path]:
    """Return the pages that may quote figures."""
    below = (path for place in ("docs", "benchmarks") for path in sorted((ROOT / place).rglob("*.md")))
    return [ROOT / "README.md", *(path for path in below if path != PAGE and path.parent.name != "reference")]


def quoted_anew(text: str, page: Page) -> str:
    return QUOTE.sub(
        lambda found: (
            Quote(found["kind"], found["name"], found["number"], found["unit"] or "").anew(page)
            + found[0][len(found["number"]) :]
        ),
        text,
    )


def write_quotes(page: Page) -> int:
    wrong = 0
    for path in pages():
        text = path.read_text("utf-8")
        for found, quote in quotes(text):
            where = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
            try:
                if quote.kind == "below" and not quote.agrees(page):
                    wrong += 1
                    print(
                        f"{where}: {quote.name} is not below {quote.number} {quote.unit}: {page.figures[quote.name].line}"
                    )
                elif (number := quote.anew(page)) != quote.number:
                    print(f"{where}: {quote.name}: {quote.number} -> {number} {quote.unit}")
            except ValueError as error:
                wrong += 1
                print(f"{where}: {error}")
        if not wrong and (new := quoted_anew(text, page)) != text:
            path.write_text(new, "utf-8")
    return int(wrong > 0)


# ------------------------------------------------------------------------------------------------------------------ typed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="names, also with commas")
    parser.add_argument("--quote", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(argv)
    if given.quote:
        return write_quotes(read_page(_written()))
    if given.list:
        for one in PROGRAMS:
            kept = ", ".join(word for word in (one.torch, "only where it is named" if one.long else "") if word)
            print(f"{one.name:17} {one.seconds:5.0f} s at most  {one.command}{f'  ({kept})' if kept else ''}")
        return 0
    names = [name for word in given.programs for name in word.split(",") if name]
    if unknown := {*names} - {one.name for one in PROGRAMS}:
        parser.error(
            f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in PROGRAMS)}"
        )
    return measure([one for one in PROGRAMS if (one.name in names if names else not one.long)])


def _written() -> str:
    return PAGE.read_text("utf-8") if PAGE.exists() else ""


def measure(programs: Sequence[Program]) -> int:
    """Run them one after the other. What each has said is on the page before the next begins."""
    here, told = machine(), list[str]()
    for program in programs:
        print(f"\n=== {program.name}: {program.command}", flush=True)
        load, began = f"{os.getloadavg()[0]:.1f}", time.monotonic()
        found, why = run(program)
        page = read_page(_written())  # another one may run beside
        page.put(found, f"{datetime.now(timezone.utc):%Y-%m-%d}", load, here)
        PAGE.write_text(page_text(page), "utf-8")
        told.append(f"{program.name:17} {time.monotonic() - began:5.0f} s  {len(found):3} figures  {why}")
    print("\n" + "\n".join(told))
    print(f"written to {PAGE.relative_to(ROOT)}; python benchmarks/figures.py --quote brings them into the pages")
    return int(any("ended" in one for one in told))


if __name__ == "__main__":
    sys.exit(main())
