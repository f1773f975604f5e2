"""Reports that the supervisor has stopped the chain, because the same failure came again and again without progress."""

from __future__ import annotations

from collections.abc import Iterator

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.rundir.records import as_time
from ftsupervise.truth import Health
from ftsupervise.units import named
from ftsupervise.watch import Look

WORDS = Words(
    "Nothing trains. The members of the chain stay in the queue, held, until a person has looked.",
    "ftsupervise diagnose {run_dir}",
    "{first}fix what failed, then: ftsupervise clear --brake {run_dir}",
    Severity.CRITICAL,
)

QUESTION = Words(
    "Nothing trains. A command without the guard has left with 0: it is finished, or it was to go on. The members wait, held.",
    "ftsupervise logs {run_dir}",
    "finished: ftsupervise clear --finished {run_dir}; not finished: ftsupervise clear --brake {run_dir}; for the next time: "
    "launch.finished_by",
)


def check(look: Look, settings: object) -> Iterator[Finding]:
    try:
        on = look.brake()
    except OSError as error:
        yield look.finding(
            "chain", Health.UNKNOWN, f"the brake cannot be read: {error.strerror}", WORDS, names={"first": ""}
        )
        return
    if on is None:
        yield look.finding("chain", Health.OK, "the brake is off", WORDS, names={"first": ""})
        return
    held = f"; held: {named('job', on.held)}" if on.held else ""
    if on.asks and look.rundir.finished.exists():
        yield look.finding("chain", Health.OK, "the run is finished", QUESTION)
        return
    text = f"{'is it finished? ' if on.asks else 'stopped by the brake: '}{on.words()}{held}"
    names = {"first": f"{on.first()}; " if on.loads else ""}
    words = QUESTION if on.asks else WORDS
    why = "" if on.asks else look.why(next((one for one in look.attempts if one.number == on.attempt), None))
    yield look.finding("chain", Health.BAD, text, words, since=as_time(on.at), value=on.failure, why=why, names=names)
