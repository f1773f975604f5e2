"""``ftsupervise report``: a run as one HTML file, or as Markdown; the last week of several, also by mail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ftsupervise import host
from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, for_programs, progress, say
from ftsupervise.errors import CannotWrite, Error, NoAnswer, UsageError, from_os_error
from ftsupervise.host.in_time import LOOK, OneAtATime, in_time
from ftsupervise.printable import printable, to_type
from ftsupervise.probe.own_process import asked
from ftsupervise.report.following import Followed, FollowedPage, PageLife, run_is_over, sentence_of
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.report.everything import ReportFacts
    from ftsupervise.report.week import WeekReport

_DIAGNOSING = 10.0  # seconds in which the output of failed attempts is read, of all runs together
_HOME = "index.html"  # the page of all runs, in a folder
_LEAST, _MOST = 5.0, 86_400.0  # seconds from one page to the next
_REST = 9  # looks that take T seconds of CPU are followed by 9 T seconds without one, at least
_WRITING = 10.0  # seconds for a page
_LEAVING = 2.0  # … that is written because the person leaves


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option(
    "--output", "-o", metavar="FILE", help="The file to write; -: standard output; a folder: its pages, by their names."
)
@click.option("--markdown", is_flag=True, help="Markdown for a pull request or a wiki, on standard output.")
@click.option(
    "--week", is_flag=True, help="The last seven days of RUNs, or of all runs of this account, in one report."
)
@click.option("--plan", "planned", is_flag=True, help="With what ftsupervise plan says would help, and its picture.")
@click.option("--mail", is_flag=True, help="With --week: mail it to the email receivers of the runs instead.")
@click.option("--follow", is_flag=True, help="Renew the pages in the folder of --output until their runs are over.")
@click.option(
    "--every", default="60s", show_default=True, metavar="TIME", help="With --follow: from one page to the next."
)
@JSON
def report(
    runs: tuple[str, ...],
    output: str | None,
    markdown: bool,
    week: bool,
    planned: bool,
    mail: bool,
    as_json: bool,
    **kept_fresh: Any,
) -> None:
    """Write what there is to know about RUN into one HTML file, which needs no network: report-NAME.html.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    \b
    ftsupervise report train-10b             report-train-10b.html
    ftsupervise report train-10b --markdown  for a pull request or a wiki
    ftsupervise report --week                all runs, the last seven days
    ftsupervise report --week --mail         the same, by mail (for the crontab)
    ftsupervise report --week -o pages/      the same, with a page of each run
    ftsupervise report --follow -o pages/    a page that renews itself
    """
    follow, every = bool(kept_fresh["follow"]), str(kept_fresh["every"])
    if planned and (week or markdown or follow):
        raise UsageError("--plan is for the page of one run", hint="ftsupervise plan RUN says the same as text")
    if mail and not week:
        raise UsageError("--mail sends the report of a week", hint="ftsupervise report --week --mail")
    if mail and (output is not None or markdown):
        raise UsageError("--mail writes no file", hint="leave out --output and --markdown")
    if as_json and (output == "-" or (markdown and output is None) or follow):
        raise UsageError(
            "--json says which file was written, and this report goes on, or to the standard output",
            hint="name a file with --output; status --json has the facts of a run",
        )
    if follow:
        if markdown or mail or output in (None, "-"):
            raise UsageError(
                "--follow renews pages in a folder", hint="ftsupervise report RUN --follow --output pages/"
            )
        _follow(runs, Path(output or "").absolute(), _seconds(every), week=week)
        return
    with for_programs(as_json):
        if week:
            written = _week(runs, output, markdown=markdown, mail=mail)
        else:
            written = {"files": _each(runs, output, markdown=markdown, planned=planned)}
    if as_json:
        answer(**written)


def _each(runs: tuple[str, ...], output: str | None, *, markdown: bool, planned: bool) -> list[str]:
    """Write a report of each run; return the files."""
    from ftsupervise.config.find_run import each_run, find_run

    folder = _folder(output)
    if output is not None and output != "-" and folder is None and len(runs) > 1:
        raise UsageError(
            "--output names one file, and there are several runs", hint="leave it out: each run has its own file"
        )
    names, files = list[str](), list[str]()
    every = each_run(runs) or (None,)
    with progress("reports", len(every)) as step:
        for run in every:
            step(run or "")
            root = find_run(run).root
            found = _diagnosed(_read(root), _DIAGNOSING / len(every))
            names.append(_file_name(found.detail.status.name, names))
            to = (str(folder / names[-1]) if folder is not None else output) or ("-" if markdown else names[-1])
            files.append(_write(_text(found, markdown=markdown, planned=planned), to, (root,)))
    return files


def _folder(output: str | None) -> Path | None:
    """Return the folder that --output names, made where it says so with a slash at its end; None where it is a file."""
    if output is None or output == "-":
        return None
    path = Path(output).absolute()
    try:
        if output.endswith("/"):
            _made(path)
        return path if path.is_dir() else None
    except OSError as error:
        raise from_os_error(error, f"make the folder {path}") from None
    except ValueError as error:  # a null byte in the name
        raise CannotWrite(f"cannot write {printable(str(path))}: {error}") from None


def _seconds(every: str) -> float:
    from ftsupervise.units import parse_duration

    try:
        seconds = parse_duration(every).total_seconds()
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--every: {error}") from None
    if not _LEAST <= seconds <= _MOST:
        raise UsageError(f"--every: {every} is not between 5s and 1d", hint="such as 60s or 5m")
    return seconds


def _week(runs: tuple[str, ...], output: str | None, *, markdown: bool, mail: bool) -> dict[str, list[str]]:
    from ftsupervise.report.following import places_of
    from ftsupervise.report.rows import my_runs

    where = places_of(runs) if runs else my_runs()
    if mail:
        return {"mailed": _mail(where)}
    from ftsupervise.report.mail import filename
    from ftsupervise.report.week_page import as_markdown, page

    found, folder = _seven_days(where), _folder(output)
    if folder is not None and not markdown:
        links = _pages(found, where, folder)
        home = _write(page(found, links), str(folder / _HOME), tuple(where.values()))
        return {"files": [home, *(str(folder / one) for one in links.values())]}
    to = output or ("-" if markdown else filename(found.end))
    return {"files": [_write(as_markdown(found) if markdown else page(found), to, tuple(where.values()))]}


def _pages(found: WeekReport, where: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Write a page of each run that was active; return the names of the files. One that cannot be read is left out."""
    links: dict[str, str] = {}
    for name in (one.row.name for one in found.rows if one.row.name in where):
        file = _file_name(name, [*links.values()])
        try:
            text = _text(_read(where[name]), markdown=False, home=_HOME)
        except Error as error:
            say(f"left out: {error.message}", err=True)
            continue
        _write(text, str(folder / file), (where[name],))
        links[name] = file
    return links


def _seven_days(where: Mapping[str, Path]) -> WeekReport:
    from ftsupervise.report.week import week_of

    with progress("runs are read", 2 * len(where)) as step:  # first what each has been doing, then what it cost
        return week_of(where, datetime.now(timezone.utc), os.environ, extend=time_limit.extend, step=step)


def _mail(where: Mapping[str, Path]) -> list[str]:
    """Mail each receiver the report of its runs; return those that were sent one. What one of them does not
    take keeps no other from having it."""
    from ftsupervise.alerts.receivers import Broken, TryLater
    from ftsupervise.report.mail import addressees, send

    found, problems = addressees(where)
    for sentence in problems:
        say(f"left out: {sentence}", err=True)
    failed, mailed = [], []
    for one in found:
        seven = _seven_days(one.runs)
        to = ", ".join(one.settings.to)
        if not seven.rows:
            say(f"{one.name}: nothing to report: none of its runs was active in the last seven days")
            continue
        try:
            refused = send(seven, one.settings)
        except (TryLater, Broken) as error:
            failed.append(f"{one.name}: {error}")
            continue
        mailed.append(one.name)
        say(f"{one.name}: mailed to {to}: {count(len(seven.rows), 'run')}{f'; refused: {refused}' if refused else ''}")
    if not found:
        say(
            "no run names a receiver of kind email, so nothing was mailed: alerts.receivers in ftsupervise.yaml",
            err=True,
        )
    if failed:
        raise Error("; ".join(failed), hint="ftsupervise notify test tries the receivers")
    return mailed


def _read(root: Path) -> ReportFacts:
    from ftsupervise.report.everything import read_report

    return read_report(root, datetime.now(timezone.utc), os.environ, time_limit.extend)


def _diagnosed(found: ReportFacts, seconds: float) -> ReportFacts:
    """Return the same with the verdicts about its newest faults, which are kept now where no watch has done it and this account
    may."""
    from ftsupervise.report.everything import may_have_a_verdict, verdicts_of

    newest = [one for one in found.incidents if may_have_a_verdict(one)][-1:]
    kept = [found.verdicts[one.attempt] for one in newest if one.attempt in found.verdicts]
    if len(kept) == len(newest) and all(page.kind for page in kept):
        return found
    from ftsupervise.diagnosis.kept import keep_within

    rundir = found.detail.status.rundir
    time_limit.extend(seconds + LOOK)
    keep_within(rundir, found.detail.status.attempts, seconds)
    return found._replace(verdicts=verdicts_of(rundir, found.incidents, found.detail.status.run.braked))


def _text(found: ReportFacts, *, markdown: bool, planned: bool = False, home: str = "") -> str:
    if markdown:
        from ftsupervise.report.markdown import as_markdown

        return as_markdown(found)
    from ftsupervise.report.html import page

    if not planned:
        return page(found, home=home)
    from ftsupervise.cli.plan import forecast_of

    return page(found, home=home, forecast=forecast_of(found))


def _file_name(of: str, taken: list[str]) -> str:
    """Return the name of the file for a run. Two runs of one command may be called alike."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in of)
    stem = f"report-{plain[:100].lstrip('.') or 'run'}"
    every = (f"{stem}{f'-{number}' if number > 1 else ''}.html" for number in range(1, len(taken) + 2))
    return next(name for name in every if name not in taken)


def _write(text: str, to: str, about: Sequence[Path]) -> str:
    """Write a report, for those alone who may read all the run directories that it is ``about``; return its path, "-" for the
    standard output."""
    if to == "-":
        click.echo(text, nl=False)
        return to
    path = Path(to).absolute()
    try:
        _written(path, text, about)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None
    except ValueError as error:  # a null byte in the name
        raise CannotWrite(f"cannot write {printable(str(path))}: {error}") from None
    say(f"{path}: {len(text.encode()) / 1024:.0f} kB")
    return str(path)


# --------------------------------------------------------------------------------------------------------------- followed
#
# Each look is made in a process of its own, which is left behind where it hangs: the page then says since when it cannot be
# seen, and the next look is made all the same.


def _follow(runs: tuple[str, ...], folder: Path, every: float, *, week: bool) -> None:
    """Renew the pages of these runs, or with ``week`` of all runs of this account, and the page of all, until they are over.

    Raises what the first look raises; a later one that fails is told on the page.
    """
    where: Mapping[str, Path] | None = None
    if runs or not week:
        where = asked("report.following:places_of", runs, patience=host.ANSWER, slurm=host.SLURM)
    _make(folder)
    pages = _Pages(where, folder, every, week=week)
    with _ended_in_order(pages):
        pages.first()
        say(f"{pages.front}: renewed every {every:.0f} s; open it in a browser, and end this with Ctrl-C")
        while not pages.over:
            time.sleep(pages.pause)
            pages.renew()
    say(f"{pages.front}: {pages.how_it_ended()}")


def _made(folder: Path) -> bool:
    """Make the folder of the pages, and those that are missing above it. Raises NotTrusted, OSError."""
    from ftsupervise.host.ownership import FOLDER, Reach, held_or_made

    with held_or_made(folder, Reach(FOLDER)):
        return True


def _make(folder: Path) -> None:
    try:
        if not in_time(lambda: _made(folder), _WRITING):
            raise NoAnswer(f"{folder} does not answer: no page can be written", hint=f"findmnt -T {to_type(folder)}")
    except OSError as error:
        raise from_os_error(error, f"make the folder {folder}") from None


@contextmanager
def _ended_in_order(pages: _Pages) -> Iterator[None]:
    """Have the pages say that nobody renews them, where a person, or the end of a session, ends this."""

    def end(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        pages.leave()
        raise


class _Pages:
    """The pages in one folder. ``pause``: seconds until the next look."""

    def __init__(self, where: Mapping[str, Path] | None, folder: Path, every: float, *, week: bool) -> None:
        self._named, self._folder, self._every, self._with_week = where, folder, every, week
        self._where: dict[str, Path] = dict(where or {})
        self._files: dict[str, str] = {}  # run -> the name of its page
        self._runs: dict[str, Followed[ReportFacts]] = {}
        self._week: Followed[WeekReport] = Followed()
        self._write_in_time = OneAtATime[bool]()
        self._trouble = ""  # why the last page could not be written
        self.pause = every

    @property
    def front(self) -> Path:
        """The page to open."""
        first = _HOME if self._with_week or not self._files else next(iter(self._files.values()))
        return self._folder / first

    @property
    def over(self) -> bool:
        """Return whether all runs that were named are over. Other runs may begin where none was named."""
        if self._named is None:
            return False
        return all(self._runs.get(name, Followed[Any]()).is_over for name in self._where)

    def how_it_ended(self) -> str:
        if len(self._where) > 1:
            return f"all {count(len(self._where), 'run')} are over: these are the last pages"
        facts = next(iter(self._runs.values())).facts
        verdict = facts.detail.status.verdict if facts is not None else "over"
        return f"it is {verdict}: this is the last page"

    def first(self) -> None:
        """The first pages. Raises Error where there is nothing to show yet, or they cannot be written."""
        if not self._with_week:
            for name, root in self._where.items():
                self._runs[name] = self._seen_of(_asked_for_run(root), Followed())
                self._files[name] = _file_name(name, [*self._files.values()])
        self.renew(first=True)

    def renew(self, *, first: bool = False) -> None:
        before = sum(os.times()[:4])  # of this process and those that have made its looks
        if self._with_week:
            self._look_at_all()
        for name, known in self._runs.items():
            if not known.is_over and not (first and known.facts is not None):
                self._runs[name] = self._look(name, known)
        self.pause = max(self._every, ceil(_REST * (sum(os.times()[:4]) - before)))
        self._write_all(first=first)

    def leave(self) -> None:
        """Say on each page that nobody renews it any more."""
        self._write_all(life=PageLife.LEFT, within=_LEAVING)

    # ------------------------------------------------------------------------------------------------------------- looks

    def _look_at_all(self) -> None:
        now = datetime.now(timezone.utc)
        try:
            self._where, week = asked(
                "report.following:week_facts", self._named, now, patience=host.ANSWER + _WRITING, slurm=host.SLURM
            )
        except (Error, OSError, ValueError) as error:
            if self._week.facts is None:
                raise
            self._week = self._week.unseen(sentence_of(error), now)
            return
        self._week = self._week.seen(week, now, over=False)
        active = {one.row.name: one.row.verdict for one in week.rows if one.row.name in self._where}
        for name in self._where if self._named is not None else active:
            self._files.setdefault(name, _file_name(name, [*self._files.values()]))
            self._runs[name] = self._runs.get(name, Followed()).again(active.get(name, ""))
        self._runs = {
            name: known for name, known in self._runs.items() if name in self._where
        }  # but for those forgotten

    def _look(self, name: str, known: Followed[ReportFacts]) -> Followed[ReportFacts]:
        try:
            return self._seen_of(_asked_for_run(self._where[name]), known)
        except (Error, OSError, ValueError) as error:
            return known.unseen(sentence_of(error), datetime.now(timezone.utc))

    @staticmethod
    def _seen_of(facts: ReportFacts, known: Followed[ReportFacts]) -> Followed[ReportFacts]:
        seen = facts.detail.status
        return known.seen(facts, seen.at, over=run_is_over(facts), blind=seen.blind if seen.jobs is None else "")

    # ------------------------------------------------------------------------------------------------------------- pages

    def _write_all(self, *, first: bool = False, life: PageLife = PageLife.RENEWED, within: float = _WRITING) -> None:
        """First the runs, then the page that leads to them."""
        from ftsupervise.report.html import page
        from ftsupervise.report.week_page import page as page_of_all

        now, home = datetime.now(timezone.utc), _HOME if self._with_week else ""
        made = {}
        for name, known in self._runs.items():
            if known.facts is not None:
                made[name] = self._files[name]
                text = page(known.facts, self._about(known, now, life), home)
                self._write(self._files[name], text, within, (self._where[name],), first=first)
        if self._week.facts is not None:
            of_all = PageLife.OVER if self.over else life
            about = FollowedPage(of_all, now, self.pause, self._week.blind_since, self._week.why)
            text, every = page_of_all(self._week.facts, made, about), tuple(self._where.values())
            self._write(_HOME, text, within, every, first=first)

    def _about(self, known: Followed[Any], now: datetime, life: PageLife) -> FollowedPage:
        life = PageLife.OVER if known.is_over else life
        return FollowedPage(life, now, self.pause, known.blind_since, known.why)

    def _write(self, name: str, text: str, within: float, of: Sequence[Path], *, first: bool) -> None:
        path = self._folder / name
        try:
            done = self._write_in_time(lambda: _written(path, text, of), within)
            error: Error | None = None if done else NoAnswer(f"{self._folder} does not answer: no page can be written")
        except OSError as problem:
            error = from_os_error(problem, f"write {path}")
        except Error as problem:
            error = problem
        if error is not None and first:
            raise error
        said = error.message if error is not None else ""
        if said != self._trouble:
            say(said or f"{path}: pages are written again", err=True)
        self._trouble = said


def _written(path: Path, text: str, about: Sequence[Path]) -> bool:
    """Write a page, for those alone who may read all the run directories that it is ``about``."""
    from ftsupervise.host.ownership import PAGE, Reach
    from ftsupervise.report.output import readers
    from ftsupervise.rundir.paths import write_named

    write_named(path, text, mode=Reach(PAGE).within(*map(readers, about)), sync=False)
    return True


def _asked_for_run(root: Path) -> ReportFacts:
    now = datetime.now(timezone.utc)
    found: ReportFacts = asked("report.following:run_facts", str(root), now, patience=host.ANSWER, slurm=host.SLURM)
    return found
