"""Every error ftsupervise raises on purpose, and the exit code each one ends a command with.

    Error                      1   something went wrong that has no better name
    ├── UsageError            64   the command line does not make sense
    ├── NotFound              66   a file, run or job that was named does not exist
    ├── SchedulerUnavailable  69   Slurm could not be asked: nothing is known, nothing was changed
    ├── SubmitRejected        65   sbatch said no; its own words are in the message
    ├── Untranslatable        65   a job script that init cannot bring over; says the line and the reason
    ├── CannotWrite           73   the directory cannot be written
    │   └── DiskFull          73   ... because no space, inode or quota is left
    ├── NoAnswer              74   a file system, as a rule, does not answer within the bound, or with errors alone
    ├── Refused               75   not now: a kill switch is up, or the same thing was submitted already
    ├── NotPermitted          77   the file or job belongs to somebody else, or may not be read
    ├── ConfigError           78   ftsupervise.yaml is wrong; the message starts with file:line:col
    ├── PluginUnusable        78   a package that brings a watchdog or a receiver cannot be used
    ├── AlreadyRunning       100   another instance holds this place
    └── Cancelled            130   a person said no, or pressed Ctrl-C: what was not done yet is not done

A command ends with 0 when it did what it was asked. ``ftsupervise run`` ends with the exit code of its command;
``ftsupervise check`` and one tick of ``watch`` end with the Nagios codes 0 ok, 1 warning, 2 critical, 3 could not see.

A message is one sentence for the person awake at 3 a.m.: what failed, where, and what to type next (``hint``).
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # without typing: training loops import this file
if TYPE_CHECKING:
    from collections.abc import Iterable


def about(name: str, why: str) -> str:
    """Return "name: why", with the name once where ``why`` begins with it already, as the errors in a file do."""
    return why if why.startswith((f"{name}:", f"{name} ")) else f"{name}: {why}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause that names the one of ``known`` that is near ``name``, or begins with it; "" where none is."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, 1) or [one for one in names if name and one.startswith(name)]
    return f"; did you mean {near[0]!r}?" if near else ""


class Error(Exception):
    """Base of all errors a person may see. ``message`` says what failed and where; ``hint`` what to type next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(Error):
    exit_code = 64


class SubmitRejected(Error):
    exit_code = 65


class Untranslatable(Error):
    exit_code = 65


class NotFound(Error):
    exit_code = 66


class SchedulerUnavailable(Error):
    """The scheduler did not answer, or its answer cannot be trusted. Never to be read as "no such job"."""

    exit_code = 69


class CannotWrite(Error):
    exit_code = 73


class DiskFull(CannotWrite):
    """The disk is full. It may pass: a caller that can wait does."""


class NoAnswer(Error):
    """Something that was asked, a file system as a rule, does not answer within the bound, or with errors alone."""

    exit_code = 74


class Refused(Error):
    exit_code = 75


class NotPermitted(Error):
    exit_code = 77


class ConfigError(Error):
    exit_code = 78


class PluginUnusable(Error):
    """A watchdog or a receiver of another package is missing, or its module cannot be loaded or used."""

    exit_code = 78


class AlreadyRunning(Error):
    exit_code = 100


class Cancelled(Error):
    exit_code = 130


# A file system answers with these when its server, disk or daemon is gone. Nobody knows what lies there, and it may come back.
AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO)


def from_os_error(error: OSError, doing: str = "") -> Error:
    """Return an OSError as the sentence a person can act on. ``doing`` names the action and the path, e.g. "write /x/y"; by
    default it is the use of the file that the error names."""
    doing = doing or (f"use {error.filename}" if error.filename else "finish")
    text = f"cannot {doing}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text, hint="free some space or inodes (df -h, df -i, your quota command), then try again")
    if error.errno == errno.EROFS:
        return CannotWrite(text, hint="the file system refuses writes; check the mount, then try again")
    if error.errno in AWAY:
        from shlex import quote

        mount = (
            f"findmnt -T {quote(os.fsdecode(error.filename))}"
            if isinstance(error.filename, (str, bytes))
            else "findmnt"
        )
        return NoAnswer(text, hint=f"its disk or file server fails, or the mount is broken: {mount}; dmesg")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(text, hint="ask its owner, or use another directory")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(text, hint="check the path")
    return Error(text)
