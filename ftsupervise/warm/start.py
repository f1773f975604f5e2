"""``python -IS start.py ORDERS FLAGS -- COMMAND …``: COMMAND's interpreter as a standby, once it is sure that it stops at the
hook. Until it serves it holds a lock on PLACE/NODE.coming, so that ranks that start now wait for it.

A Python that does not read PYTHONPATH, or has no ``site``, would run the user's program here. So it is tested first, with the
same flags and the same environment and nothing to run.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys

SEEN = 42  # what sitecustomize.py leaves with
_HOOK = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    orders, flags, command = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    orders["coming"] = announce(orders["place"], node)
    before = os.environ.get("PYTHONPATH")
    orders["pythonpath"] = before
    # an empty one says nothing to Python; with something before it, it would be the current directory
    os.environ["PYTHONPATH"] = f"{_HOOK}{os.pathsep}{before}" if before else _HOOK
    os.environ["FTSUPERVISE_STANDBY"] = "probe"
    asked = [*command[: 1 + flags], "-c", "raise SystemExit(3)"]
    pid = os.fork()
    if pid == 0:
        try:
            os.execvp(asked[0], asked)
        finally:
            os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != SEEN:
        os.write(
            1, (json.dumps({"node": node, "refused": f"its Python does not stop at our hook ({code})"}) + "\n").encode()
        )
        return
    os.environ["FTSUPERVISE_STANDBY"] = json.dumps(orders)
    os.execvp(command[0], command)


def announce(place: str, node: str) -> int | None:
    """A descriptor that stays open over an exec, its file locked; None where it cannot be made: ranks do not wait then."""
    try:
        os.makedirs(place, 0o700, exist_ok=True)
        there = os.lstat(place)
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o022:
            return None
        hold(place)
        mine = f"{place}/.{node}.{os.urandom(8).hex()}.coming"
        fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(mine, f"{place}/{node}.coming")  # it is never seen without its lock
        os.set_inheritable(fd, True)
    except OSError:
        return None
    return fd


def hold(place: str) -> None:
    """Lock the directory against removal until this process ends, over an exec too (``ranks/shm_dir.py``). Raises OSError."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.set_inheritable(fd, True)


if __name__ == "__main__":
    main()
