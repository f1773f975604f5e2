"""Reads the end of an attempt, as the pages of the ledger record it."""

from __future__ import annotations

from collections.abc import Mapping

from ftsupervise.model import Cause, CauseKind, Failure, FailureKind
from ftsupervise.rundir.records import as_text, decode

_LONGEST = 2000  # characters of a text in a page


def read_failure(end: Mapping[str, object]) -> Failure | None:
    """Return the failure in a last page; None where it was none."""
    kinds = {kind.value: kind for kind in FailureKind}
    words, kind = as_text(end.get("failure"), _LONGEST), kinds.get(as_text(end.get("kind")))
    if not words and kind is None:
        return None
    sign = as_text(end.get("sign"), _LONGEST) or words  # a page without it has only the words
    detail, error = as_text(end.get("detail"), _LONGEST), as_text(end.get("error"), _LONGEST)
    return Failure(kind or FailureKind.CODE, sign, detail, error)


def read_cause(raw: object, words: str, code: int = 0) -> Cause:
    """Return the cause in a page: ``raw`` are its parts, ``code`` the exit code.

    Of a page with words only they are kept, unless they are those of one that needs no more.
    """
    try:
        return decode(Cause, raw, lenient=True)
    except ValueError:
        ends = Cause(CauseKind.EXIT, code=code), Cause(CauseKind.SIGNAL, signal=-code)
        plain = (*(Cause(one) for one in CauseKind), *ends)
        return next((one for one in plain if one.words() == words), Cause(CauseKind.OTHER, text=words))
