"""Whose programs run here: what lies in the cron folders is run as its owner only if nobody else could have put it there.

Believed are files of the owner, of root and of the accounts that the settings name, in folders that no stranger can write or
replace. Edge: files.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from ftsupervise.crontab.place import Installed
from ftsupervise.host import files, ownership
from ftsupervise.host.users import user_id


def distrust(path: Path, installed: Installed) -> str:
    """Why what the name ``path`` leads to is not believed, as a clause; "" when it is. Raises OSError."""
    return ownership.distrust_route(path, accounts=_accounts(installed), group=_group(installed))


def distrust_folder(path: Path, installed: Installed) -> str:
    """The same for a folder whose files are run: everybody may write it is too many, sticky or not. Raises OSError."""
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return f"everybody may write {path} (mode {stat.S_IMODE(mode):04o})"
    return distrust(path, installed)


def read(path: Path, installed: Installed, limit: int) -> bytes:
    """The bytes of a file that is believed, links followed. Raises NotTrusted, and OSError: EFBIG for more than ``limit``."""
    reason = distrust(path, installed)
    fd = files.open_regular(path, follow=True)
    try:
        found = os.fstat(fd)
        if reason:
            raise ownership.NotTrusted(reason, hint=ownership.remedy(found, path))
        ownership.require(found, path, accounts=_accounts(installed), group=_group(installed))
        return files.read_open(fd, limit, path)
    finally:
        os.close(fd)


def _accounts(installed: Installed) -> frozenset[int]:
    known = (user_id(name) for name in installed.trusted)
    return frozenset(uid for uid in known if uid is not None)


def _group(installed: Installed) -> int | None:
    try:
        return grp.getgrnam(installed.trusted_group).gr_gid if installed.trusted_group else None
    except KeyError:
        return None
