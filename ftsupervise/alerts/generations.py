"""One generation of the alerts' journal as bytes on a disk: whose it is, whether it is whole, and what it says.

Nothing in a file is believed before its owner is: this account, root, the owner of the run, or a member of the group that
the folder is shared with. A file that is torn, too large, foreign, from a newer version, or that lies under
another number than its own raises ValueError or OSError; the journal passes it over and says so.

A silence and an acknowledgement bear the name of the account that wrote the generation in which they first stand, not the
name in their text: several accounts may share a journal, and each writes whole generations, with all that the others said.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.alerts.outbox import JournalState, Silence
from ftsupervise.findings import Alert
from ftsupervise.host import files
from ftsupervise.host.modes import is_shared, may_be_changed, stranger
from ftsupervise.host.ownership import in_group, remedy
from ftsupervise.rundir.records import decode, encode

FORMAT = 1
LIMIT = (
    24_000_000  # bytes of a generation; 5,000 alerts are 3, and what is read takes up to thirty times as much memory
)
LEAP = 1_000_000  # numbers: no writer of generations makes a file further ahead
_NAME = re.compile(r"\d{8}|[1-9]\d{8,11}")
_Word = tuple[object, ...]  # a silence or an acknowledgement without its author


class Generation(NamedTuple):
    """A whole State, the number in the journal's directory that it was made from, and the account that wrote it."""

    state: JournalState
    base: int
    owner: int


def numbers(directory: Path) -> set[int]:
    """Return the numbers of all generations.

    An NFS listing may be a minute old, so the next numbers are looked up one by one.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return set()
    found = {int(stem) for stem, dot, rest in (name.partition(".") for name in names) if rest == "json" and _fits(stem)}
    following = max(found, default=0) + 1
    while os.path.lexists(directory / f"{following:08d}.json"):
        found.add(following)
        following += 1
    return found


def _fits(stem: str) -> bool:
    return bool(_NAME.fullmatch(stem))


def read(path: Path, number: int, folder: os.stat_result, at: Path) -> Generation:
    """Return the generation ``number`` at ``path``, which lies in ``folder``. ``at``: its path in the folder that is held open.

    Raises OSError, and ValueError with a sentence.
    """
    fd = files.open_regular(at)
    try:
        found = os.fstat(fd)
        why = stranger(folder, found) or may_be_changed(folder, found, path)
        if why:
            raise ValueError(
                f"{why}; {'rm ' + shlex.quote(str(path)) if found.st_uid != os.geteuid() else remedy(found, path)}"
            )
        if found.st_size > LIMIT:
            raise ValueError(f"it has {found.st_size} bytes, and none of ours has more than {LIMIT}")
        state, base = parse(files.read_open(fd, LIMIT, path), number)
    finally:
        os.close(fd)
    return Generation(state, base, found.st_uid)


def distrust(directory: Path, folder: os.stat_result) -> str:
    """Return why nothing that lies in ``directory`` is trusted, as a clause; "" when each file is checked by itself.

    It may lie in a directory that others may write: then they can put one of their own in its place.
    """
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return f"everybody may write it (chmod go-w {shlex.quote(str(directory))})"
    try:
        above, run = directory.parent.stat(), directory.parent.parent.stat()
    except OSError:
        return ""
    if folder.st_uid in (os.geteuid(), 0, run.st_uid) or (is_shared(above) and in_group(folder.st_uid, above.st_gid)):
        return ""
    return stranger(above, folder)


def render(state: JournalState, number: int, base: int) -> bytes:
    """Return the bytes of a generation. Raises OSError (EFBIG) when there are too many of them to be read again."""
    import errno

    text = json.dumps(encode(state, sparse=True), ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(data).hexdigest()
    head = json.dumps({"format": FORMAT, "generation": number, "base": base, "sha256": digest})
    whole = head[:-1].encode() + b', "state": ' + data + b"}\n"
    if len(whole) > LIMIT:
        raise OSError(
            errno.EFBIG, f"{len(state.alerts)} alerts and {len(state.outbox)} messages are too many for one file"
        )
    return whole


def parse(raw: bytes, number: int | None = None) -> tuple[JournalState, int]:
    """Return the State in a generation's bytes, and the number it was made from.

    Raises ValueError when it is not whole, or when it is not generation ``number`` (an old one under a new name).
    """
    head, found, rest = raw.partition(b', "state": ')
    if not found or not raw.endswith(b"}\n"):
        raise ValueError("not a whole generation")
    try:
        about: Any = json.loads(head + b"}")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError("written by another version")
        body = rest[:-2]
        if hashlib.sha256(body).hexdigest() != about.get("sha256"):
            raise ValueError("its checksum does not match")
        if number is not None and about.get("generation") != number:
            raise ValueError(f"it is another generation ({str(about.get('generation'))[:20]}) under this name")
        base = about.get("base", -1)
        if type(base) is not int or not -1 <= base < 10**12:
            raise ValueError("it does not say what it was made from")
        return decode(JournalState, json.loads(body.decode("utf-8", "surrogatepass"))), base
    except RecursionError:
        raise ValueError("nested too deeply") from None


# ---------------------------------------------------------------------------------------------------------- authors


def signed(line: Sequence[Generation], name: Callable[[int], str], me: int) -> JournalState:
    """Return the State of the last generation in ``line`` (oldest first, without gaps), with the authors that the
    files' owners prove.

    The first is the ground: a sentence in one that ``me`` or root wrote was proved before. In another account's it was
    not, so its sentences are given as the words of that account.
    """
    ground = line[0]
    proved = ground.owner in (me, 0)
    known: dict[_Word, str] = {}
    for key, author in _words(ground.state):
        known[key] = author if proved or author == name(ground.owner) else _says(author, name(ground.owner))
    for generation in line[1:]:
        for key, _ in _words(generation.state):
            known.setdefault(key, name(generation.owner))
    return _with(line[-1].state, known)


def _says(author: str, teller: str) -> str:
    return author if author.endswith(f" (says {teller})") else f"{author} (says {teller})"


def _silence(silence: Silence) -> _Word:
    return (silence.id, silence.pattern, silence.run, silence.start, silence.end, silence.reason)


def _ack(alert: Alert) -> _Word:
    return (alert.id, alert.incident, alert.acked_at, alert.ack_note)


def _words(state: JournalState) -> list[tuple[_Word, str]]:
    acks = [(_ack(alert), alert.acked_by) for alert in state.alerts.values() if alert.acked_by]
    return [*((_silence(one), one.author) for one in state.silences), *acks]


def _with(state: JournalState, known: dict[_Word, str]) -> JournalState:
    alerts = {key: replace(a, acked_by=known[_ack(a)]) if a.acked_by else a for key, a in state.alerts.items()}
    silences = tuple(replace(silence, author=known[_silence(silence)]) for silence in state.silences)
    return replace(state, silences=silences, alerts=alerts)
