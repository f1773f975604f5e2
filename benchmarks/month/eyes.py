"""Reads a run as the account whose it is, for the program that plays the month: a page is believed by its own people only.

python -m benchmarks.month.eyes RUN     a question a line ("ledger g001"), an answer a line, pickled
"""

from __future__ import annotations

import base64
import pickle
import sys

from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir


def main() -> None:
    rundir = RunDir(sys.argv[1])
    for line in sys.stdin:
        what, _, group = line.strip().partition(" ")
        place = rundir.group(group) if group else rundir
        try:
            answer: object = tuple(read_beats(place)) if what == "beats" else ledger(place)
        except OSError:
            answer = ()
        print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)


if __name__ == "__main__":
    main()
