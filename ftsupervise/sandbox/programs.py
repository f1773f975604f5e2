"""The paths of the programs that a sandbox needs on this machine, and the packages to install when they are missing.

Two places are searched: a prefix into which packages were unpacked without being installed (``dpkg -x``), and the
usual directories. Daemons live in sbin, which an ordinary user's PATH leaves out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ftsupervise.errors import NotFound

# program -> Debian's package
NEEDED = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmstepd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "srun": "slurm-client",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
ACCOUNTING |= {"sacctmgr": "slurm-client"}
_USUAL = ("/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin")


def search_path(prefix: str = "") -> str:
    """Return PATH for the sandbox: the prefix first, then the caller's own, then the directories of daemons.

    Entries that mean the current directory are left out: any account may have put a ``munged`` there.
    """
    own = [part for part in os.environ.get("PATH", "").split(":") if part.startswith("/")]
    return ":".join(dict.fromkeys([*_inside(prefix), *own, *_USUAL]))


def find_program(name: str, prefix: str = "") -> str | None:
    """Return the program's path. Debian installs NAME-wlm and a link NAME to it; ``dpkg -x`` leaves only NAME-wlm."""
    for path in (":".join(_inside(prefix)), search_path()):
        found = shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path) if path else None
        if found:
            return found
    return None


def _inside(prefix: str) -> list[str]:
    return [f"{prefix}/usr/bin", f"{prefix}/usr/sbin", f"{prefix}/bin", f"{prefix}/sbin"] if prefix else []


def missing(prefix: str = "", *, accounting: bool = False) -> dict[str, str]:
    """Return the programs that a sandbox needs and this machine lacks, each with its Debian package."""
    return absent_programs(NEEDED | (ACCOUNTING if accounting else {}), prefix)


def absent_programs(wanted: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Return those of the ``wanted`` programs, each with its package, that this machine lacks."""
    return {name: package for name, package in wanted.items() if find_program(name, prefix) is None}


def require_programs(prefix: str = "", *, accounting: bool = False) -> None:
    """Raise NotFound, in one sentence with what to install, unless everything is there."""
    if prefix and not Path(prefix).is_dir():
        raise NotFound(f"there is no directory {prefix} (--prefix)")
    absent = missing(prefix, accounting=accounting)
    if absent:
        packages = " ".join(dict.fromkeys(absent.values()))
        what = "accounting in a sandbox" if set(absent) <= set(ACCOUNTING) else "a sandbox"
        where = f" (nor under {prefix})" if prefix else ""
        raise NotFound(
            f"{what} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not on this machine{where}",
            hint=f"install them: sudo apt-get install {packages}"
            f"   (without root: apt-get download, dpkg -x each into a directory DIR, then --prefix DIR)",
        )


def plugins(prefix: str) -> str:
    """Return Slurm's plugin directory under ``prefix``; "" for installed packages, which know their own."""
    if not prefix:
        return ""
    for found in sorted(Path(prefix).glob("usr/lib*/**/auth_munge.so")):
        return str(found.parent)
    raise NotFound(f"no Slurm plugins under {prefix}", hint="unpack slurm-wlm-basic-plugins there too (dpkg -x)")


def libraries(prefix: str, before: str = "") -> str:
    """Return LD_LIBRARY_PATH for programs under ``prefix``, ahead of its value ``before``."""
    beside = Path(plugins(prefix))
    parts = [str(beside), str(beside.parent), *before.split(":")]
    return ":".join(dict.fromkeys(part for part in parts if part))
