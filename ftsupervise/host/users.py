"""Accounts and groups by their names; never by LOGNAME or USER, which anybody can set.

The modules ``pwd`` and ``grp`` are loaded when they are needed, not by a start.
"""

from __future__ import annotations

import os


def user_name(uid: int | None = None) -> str:
    """The name of an account, of this one without ``uid``; where it has none its number, as Slurm prints it."""
    import pwd

    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # an account of a container, or one that was removed
        return str(uid)


def shown_user(uid: int | None = None) -> str:
    """``user_name`` for a sentence: "uid 1234" where the account has no name."""
    name = user_name(uid)
    return f"uid {name}" if name.isdigit() else name


def user_id(name: str) -> int | None:
    """The number of the account ``name``; None when there is none."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def group_name(gid: int) -> str:
    """The name of a group, or "gid 1234" where it has none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


def in_group(uid: int, gid: int) -> bool:
    """Is the account ``uid`` in the group ``gid``? False for an account without a name here."""
    import pwd

    try:
        account = pwd.getpwuid(uid)
        return gid in os.getgrouplist(account.pw_name, account.pw_gid)
    except (KeyError, OSError):
        return False
