"""What an entry's environment is made of: what was there at install, not what a job happens to inherit. Pure.

A cron that passes its own job's ``SLURM_*`` on makes every sbatch and srun below it take over that job's CPUs and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ftsupervise.secrecy import is_secret

_KEPT = frozenset(
    """
    HOME USER LOGNAME SHELL LANG LANGUAGE TZ VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH LD_LIBRARY_PATH
    MODULEPATH MODULESHOME LMOD_CMD BASH_ENV XDG_CONFIG_HOME XDG_STATE_HOME XDG_CACHE_HOME TMPDIR SCRATCH WORK
    http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY SSL_CERT_FILE REQUESTS_CA_BUNDLE
    SLURM_CONF SLURM_CLUSTERS SLURM_CONF_SERVER FTSUPERVISE_STATE_DIR FTSUPERVISE_SITE_CONFIG FTSUPERVISE_RUNS
    """.split()  # noqa: SIM905 - a list of thirty quoted words reads worse
)
ENV_SLOT = "FTSUPERVISE_CRON_SLOT"  # the slot's time, ISO, UTC
ENV_ENTRY = "FTSUPERVISE_CRON_ENTRY"
ENV_DIR = "FTSUPERVISE_CRON_DIR"


def recorded(env: Mapping[str, str], chosen: Iterable[str], python: str) -> dict[str, str]:
    """The variables an entry gets: the known harmless ones, ``chosen`` ones, and a PATH that finds this ftsupervise."""
    wanted = _KEPT | frozenset(chosen)
    found = {key: value for key, value in env.items() if key in wanted or key.startswith("LC_")}
    own = str(Path(python).parent)
    path = [part for part in env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":") if part.startswith("/")]
    found["PATH"] = ":".join([own, *(part for part in path if part != own)])
    return found


def split(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(what anybody may see, the secrets): known by name, or by value as a proxy's address with a password in it is."""
    secret = {name: value for name, value in env.items() if is_secret(name, value)}
    return {name: value for name, value in env.items() if name not in secret}, secret


def local_zone(env: Mapping[str, str]) -> str:
    """The name of this machine's time zone, as far as it can be told; else "UTC"."""
    from zoneinfo import ZoneInfo

    def known(name: str) -> bool:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            return False
        return bool(name)

    named = env.get("TZ", "").removeprefix(":")
    if known(named):
        return named
    try:
        link = os.path.realpath("/etc/localtime")
    except OSError:
        return "UTC"
    name = link.partition("zoneinfo/")[2].removeprefix("posix/")
    if known(name):
        return name
    try:
        with open("/etc/timezone", encoding="ascii") as file:  # noqa: PTH123
            name = file.read(200).strip()
    except (OSError, UnicodeDecodeError):
        return "UTC"
    return name if known(name) else "UTC"
