"""The tables of ``drill`` for docs/drill.md, printed by the program from what it has seen on some day (examples/minimal)."""

from __future__ import annotations

from click import unstyle

from ftsupervise.cli.drill import list_lines, table_lines
from ftsupervise.drill.verdict import RowOutcome, RowResult, Shortfall

EMPTY = "alerts.receivers is empty: a mailbox of the drill stood in, and nobody would hear of the real run"
PASS, FAIL = RowOutcome.PASS, RowOutcome.FAIL
TOLD = ("mailbox",)
GUARDED = (
    RowResult("kill-rank", PASS, 0.2, 1.4, 17, TOLD),
    RowResult("stop-rank", PASS, 5.1, 6.3, 3, TOLD),
    RowResult("kill-supervisor", PASS, 0.6, 1.7, 0, TOLD),
    RowResult("corrupt-checkpoint", PASS, 0.3, 0.8, 20, TOLD),
    RowResult("cancel-while-saving", PASS, 0.2, 1.1, 30, TOLD),
    RowResult("break-mail", PASS, 0.3, 1.5, 0, TOLD),
    RowResult("fill-disk", PASS, 1.0, 20.1, 50, TOLD),
    RowResult("take-slurm", PASS, 5.8, 6.4, None, TOLD),
    RowResult("lose-node", PASS, 8.6, 9.7, 9, TOLD),
)
INIT = "ftsupervise init --patch train.py, or say how it resumes: launch.resume (docs/own-script.md)"
AGAIN = (Shortfall("it began again at step 10 instead of going on", INIT),)
DAMAGED = "step-00000350 was damaged, and nothing compares what the run loads with what it saved"
STOOD = "a rank that stood still was not ended within 60 s: launch.restart.hang is off"
BARE = (
    RowResult("kill-rank", FAIL, 0.1, 4.1, 401, TOLD, problems=AGAIN),
    RowResult("stop-rank", FAIL, 7.0, 10.6, 411, TOLD, problems=AGAIN),
    RowResult("corrupt-checkpoint", FAIL, 0.2, 3.7, 381, TOLD, problems=(Shortfall(DAMAGED, INIT),)),
    RowResult("cancel-while-saving", RowOutcome.NOT_TRIED, why_not="without the guard it is not known when it saves"),
)
ON = "take {}: null out of the settings"
FULL = Shortfall("no alert said that the disk is full: watch.disk is off", ON.format("watch.disk"))
OFF = (
    RowResult("stop-rank", FAIL, problems=(Shortfall(STOOD, ON.format("launch.restart.hang")),)),
    RowResult("fill-disk", FAIL, 2.1, 78.6, 50, TOLD, problems=(FULL,)),
)


def drill_screens() -> dict[str, str]:
    """Return the text of each ``same=`` block of the page, by its name."""
    tables = {"drill-guarded": GUARDED, "drill-bare": BARE, "drill-off": OFF}
    made = {name: unstyle("\n".join(table_lines(rows, [EMPTY])) + "\n") for name, rows in tables.items()}
    return {**made, "drill-list": "\n".join(list_lines()) + "\n"}
