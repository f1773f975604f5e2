"""The hook in COMMAND's interpreter: there it becomes a standby instead of running COMMAND.

``python -IS sitecustomize.py ORDERS FLAGS -- COMMAND …`` starts COMMAND with this folder first in PYTHONPATH, so that ``site``
finds this file in that interpreter, and in no other. A Python that does not read PYTHONPATH, or has no ``site``, would run the
user's program. So it is tested first, with the same flags and the same environment and nothing to run. If anything goes wrong
in the hook, the process ends for the same reason. Until the standby serves it holds a lock on PLACE/NODE.coming: ranks wait
for it.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ENV = "FTSUPERVISE_STANDBY"
_PROBE = "probe"
_SEEN = 42  # exit code of the probe: this file is found, with this interpreter, these flags and this environment


def _start() -> None:
    import json

    orders, flags, command = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    orders["flags"], orders["coming"], orders["parent"] = flags, _announce(orders["place"], node), os.getppid()
    before = orders["pythonpath"] = os.environ.get("PYTHONPATH")
    # an empty one says nothing to Python; with something before it, it would be the current directory
    os.environ["PYTHONPATH"] = _HERE + os.pathsep + before if before else _HERE
    os.environ[_ENV] = _PROBE
    probe = [*command[: 1 + flags], "-c", "raise SystemExit(3)"]
    pid = os.fork()
    if pid == 0:
        try:
            os.execvp(probe[0], probe)
        finally:
            os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != _SEEN:
        refused = f"its Python does not stop at our hook ({code})"
        os.write(1, (json.dumps({"node": node, "refused": refused}) + "\n").encode())
        return
    os.environ[_ENV] = json.dumps(orders)
    os.execvp(command[0], command)


def _announce(place: str, node: str) -> int | None:
    """Return a descriptor that stays open over an exec, its file locked; None where it cannot be made: ranks do not
    wait then.
    """
    import fcntl
    import stat

    try:
        os.makedirs(place, 0o700, exist_ok=True)
        there = os.lstat(place)
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o022:
            return None
        # the folder is not removed (``ranks/shm_dir.py``) until this process ends, over an exec too
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.set_inheritable(held, True)
        mine = f"{place}/.{node}.{os.urandom(8).hex()}.coming"
        fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(mine, f"{place}/{node}.coming")  # it is never seen without its lock
        os.set_inheritable(fd, True)
    except OSError:
        return None
    return fd


def _step_aside() -> None:
    """Remove this folder from the path, and run the site's own sitecustomize, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    sys.modules.pop("sitecustomize", None)


def _only_our_package() -> None:
    """Have this package imported from beside this file, and nothing else that lies there: the tool may live in an environment
    of its own, whose packages (another torch, a backport of a module) are not the job's."""
    from importlib.util import module_from_spec, spec_from_file_location

    ours = os.path.dirname(_HERE)
    spec = spec_from_file_location("ftsupervise", os.path.join(ours, "__init__.py"), submodule_search_locations=[ours])
    if spec is None or spec.loader is None:
        raise ImportError("there is no ftsupervise in " + ours)
    sys.modules["ftsupervise"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _stand_by(orders: str) -> None:
    try:
        if orders == _PROBE:
            os._exit(_SEEN)
        _only_our_package()
        from ftsupervise.warm.standby import stand_by

        stand_by(orders)  # comes back in a child that is to become a rank, and nowhere else
    except BaseException:  # else Python goes on and runs what it was started for
        try:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)


if __name__ == "__main__":
    _start()
else:
    _step_aside()
    if os.environ.get(_ENV):
        _stand_by(os.environ[_ENV])
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - the site's own; where there is none, site takes the ImportError for just that
