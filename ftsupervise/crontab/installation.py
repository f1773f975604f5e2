"""The installed folder, the decisions of ``cron install``, and the accounts whose files are run. A tick reads this first.

DIR/
  README
  crontab                        five-field lines
  cron.minutely/ cron.hourly/ cron.daily/ cron.weekly/
                                 drop an executable, or a .slurm or .sbatch job script
  state/
    installed.json               the decisions of install: back end, period, environment, receivers of alerts
    secrets.env                  the variables of the environment that are secrets; only the owner may read state/
    tick.sbatch                  the job of one slot
    slots/20261121T090000Z/      a slot, claimed by mkdir: claim.json, ensured, end.json
    runs/hourly.disk/            runs of one entry: 20261121T090000Z/{start.json,output,end.json}; last is a link
    alerts/                      the journal of what failed
    log/                         messages that a tick had no other place for
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path

from ftsupervise.config.find_run import default_cron_directory
from ftsupervise.errors import Error, NotFound, NotPermitted, from_os_error
from ftsupervise.host import ownership
from ftsupervise.host.ownership import user_id, user_name
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import Exact, decode, encode, parse_object, write_json

FOLDERS = ("minutely", "hourly", "daily", "weekly")
default_directory = default_cron_directory
_STAMP = "%Y%m%dT%H%M%SZ"


def stamp(at: datetime) -> str:
    """A time as the name of a directory: sorts by time, says UTC."""
    return at.astimezone(timezone.utc).strftime(_STAMP)


def read_stamp(name: str) -> datetime | None:
    try:
        return datetime.strptime(name, _STAMP).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


class CronDir:
    """The paths of one installed folder. Opens nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.crontab = root / "crontab"
        self.state = root / "state"
        self.installed = self.state / "installed.json"
        self.secrets = self.state / "secrets.env"
        self.script = self.state / "tick.sbatch"
        self.slots = self.state / "slots"
        self.runs = self.state / "runs"
        self.alerts = self.state / "alerts"
        self.log = self.state / "log"

    def folder(self, name: str) -> Path:
        return self.root / f"cron.{name}"

    @property
    def option(self) -> str:
        """Return the option that makes a command mean this cron: " --dir DIR"."""
        return f" --dir {shlex.quote(str(self.root))}"


def dir_option(cron: CronDir) -> str:
    """Return ``cron.option``; "" for the cron in its usual place, which needs none."""
    return "" if cron.root == default_directory(os.environ) else cron.option


def journal_of(folder: str) -> Path | None:
    """Return the folder of the alerts of the cron installed in ``folder``; None if it is no such folder."""
    cron = CronDir(Path(folder))
    try:
        return cron.alerts if cron.installed.is_file() else None
    except OSError:
        return None


def journal_of_default(env: Mapping[str, str]) -> Path | None:
    """Return the folder of the alerts of the cron in its usual place; None if there never was one."""
    cron = CronDir(default_directory(env))
    return cron.alerts if cron.alerts.is_dir() else None


@dataclass(frozen=True)
class Installed:
    """The decisions of install: all the settings that a tick has."""

    id: Exact
    owner: Exact
    backend: Exact
    why: Exact
    python: Exact
    period: timedelta
    spares: int
    limit: timedelta
    timezone: Exact
    times: dict[str, Exact]  # folder -> schedule
    keep: int
    options: tuple[Exact, ...]  # of sbatch, for a tick
    job_options: tuple[Exact, ...]  # of sbatch, for dropped scripts that do not set it themselves
    environment: dict[str, Exact]
    alerts: dict[str, object]
    alerts_from: Exact
    at: datetime
    # when the cron was first installed since it was last removed; typing install again does not change it
    since: datetime
    removed: Exact = ""  # the account that removed the cron, and when; "" while it is installed
    note: dict[str, Exact] = field(default_factory=dict)
    trusted: tuple[Exact, ...] = ()  # accounts besides the owner and root whose files are run
    trusted_group: Exact = ""  # a group whose members may write the folders
    secret: dict[str, Exact] = field(default_factory=dict, repr=False)  # of the environment; kept in a file of its own

    @property
    def zone(self) -> tzinfo:
        from zoneinfo import ZoneInfo

        return ZoneInfo(self.timezone)

    @property
    def whole_environment(self) -> dict[str, str]:
        """Return the environment of an entry.

        Slurm does not get it: it keeps a job's environment and shows it to administrators.
        """
        return {**self.environment, **self.secret}


def read_installed(cron: CronDir) -> Installed | None:
    """Return the decisions of install; None if nothing was installed here.

    Raises Error when the file cannot be read, and NotTrusted (one of its kinds) when another account could have written
    it, for it names the programs that are run.
    """
    try:
        found = decode(Installed, parse_object(ownership.read_trusted(cron.installed)))
        if min(found.period.total_seconds(), found.limit.total_seconds(), found.spares, found.keep) <= 0:
            raise ValueError("a number that has to be above zero is not")
    except FileNotFoundError:
        return None
    except PermissionError:  # only its owner may read the outputs and settings of an installed cron
        try:
            owner = user_name(cron.root.stat().st_uid)
        except OSError:
            owner = "another account"
        hint = "ask them, or install your own with --dir DIR"
        raise NotPermitted(f"the cron in {cron.root} is {owner}'s", hint=hint) from None
    except OSError as error:
        raise from_os_error(error, f"read {cron.installed}") from None
    except ValueError as error:
        hint = f"ftsupervise cron install{dir_option(cron)}   rewrites it"
        raise Error(f"{cron.installed} is damaged ({error})", hint=hint) from None
    return replace(found, secret=_read_secrets(cron))


def _read_secrets(cron: CronDir) -> dict[str, str]:
    """Return the variables in ``secrets.env``, which a shell reads too; {} when there are none, or when they cannot be
    trusted.
    """
    try:
        text = ownership.read_trusted(cron.secrets, limit=1_000_000).decode("utf-8", "surrogateescape")
        words = shlex.split(text, comments=True)
    except (OSError, Error, ValueError):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def need_installed(cron: CronDir) -> Installed:
    """Return the same as ``read_installed``. Raises NotFound if nothing was installed."""
    found = read_installed(cron)
    if found is None:
        raise NotFound(f"no cron is installed in {cron.root}", hint=f"ftsupervise cron install{dir_option(cron)}")
    return found


def write_installed(cron: CronDir, installed: Installed) -> None:
    """Write the decisions of install. Raises CannotWrite or NotPermitted."""
    try:
        if installed.secret:
            lines = (f"export {name}={shlex.quote(value)}\n" for name, value in sorted(installed.secret.items()))
            text = "# written by ftsupervise cron install: variables that are secrets\n" + "".join(lines)
            write_whole(cron.secrets, text.encode("utf-8", "surrogateescape"), mode=0o600)
        else:
            cron.secrets.unlink(missing_ok=True)
        record = encode(replace(installed, secret={}), sparse=True)
        write_json(cron.installed, {"schema_version": 1, **record}, mode=0o600)
    except OSError as error:
        raise from_os_error(error, f"write {cron.installed}") from None


# ------------------------------------------------------------------------------------------------------------ trust
#
# The files in the cron folders run as their owner. They are trusted only if no other account could have put them there: files
# of the owner, of root and of the accounts that the settings name, in folders that no stranger can write or replace.


def distrust(path: Path, installed: Installed) -> str:
    """Return why the file that ``path`` leads to is not trusted, as a clause; "" when it is. Raises OSError."""
    accounts, group = _believed(installed)
    return ownership.distrust_route(path, accounts=accounts, group=group)


def distrust_folder(path: Path, installed: Installed) -> str:
    """Return the same for a folder whose files are run: it is not trusted if everybody may write it, sticky or not.

    Raises OSError.
    """
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return f"everybody may write {path} (mode {stat.S_IMODE(mode):04o})"
    return distrust(path, installed)


def read_believed(path: Path, installed: Installed, limit: int) -> bytes:
    """Return the bytes of a trusted file, links followed. Raises NotTrusted, and OSError: EFBIG for more than ``limit``."""
    if reason := distrust(path, installed):
        raise ownership.NotTrusted(reason, hint=ownership.remedy(path.stat(), path))
    accounts, group = _believed(installed)
    return ownership.read_trusted(path, limit=limit, accounts=accounts, group=group, follow=True)


def _believed(installed: Installed) -> tuple[frozenset[int], int | None]:
    """Return the accounts and the group that the settings name."""
    import grp

    accounts = frozenset(uid for uid in map(user_id, installed.trusted) if uid is not None)
    try:
        return accounts, grp.getgrnam(installed.trusted_group).gr_gid if installed.trusted_group else None
    except KeyError:
        return accounts, None


# ------------------------------------------------------------------------------------------------------ environment
#
# A cron that passes its own job's SLURM_* on makes every sbatch and srun below it take over that job's CPUs and memory.
_RECORDED = frozenset(
    """
    HOME USER LOGNAME SHELL LANG LANGUAGE TZ VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH LD_LIBRARY_PATH
    MODULEPATH MODULESHOME LMOD_CMD BASH_ENV XDG_CONFIG_HOME XDG_STATE_HOME XDG_CACHE_HOME TMPDIR SCRATCH WORK
    http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY SSL_CERT_FILE REQUESTS_CA_BUNDLE
    SLURM_CONF SLURM_CLUSTERS SLURM_CONF_SERVER FTSUPERVISE_STATE_DIR FTSUPERVISE_SITE_CONFIG FTSUPERVISE_RUNS
    """.split()  # noqa: SIM905 - a list of thirty quoted words reads worse
)


def recorded(env: Mapping[str, str], chosen: Iterable[str], python: str) -> dict[str, str]:
    """Return the variables an entry gets: the known harmless ones, ``chosen`` ones, and a PATH that finds this ftsupervise."""
    wanted = _RECORDED | frozenset(chosen)
    found = {key: value for key, value in env.items() if key in wanted or key.startswith("LC_")}
    own = str(Path(python).parent)
    path = [part for part in env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":") if part.startswith("/")]
    found["PATH"] = ":".join([own, *(part for part in path if part != own)])
    return found


def local_zone(env: Mapping[str, str]) -> str:
    """Return the name of this machine's time zone; "UTC" where it is unknown."""
    from zoneinfo import ZoneInfo

    try:
        written = Path("/etc/timezone").read_text("ascii")[:200].strip()
    except (OSError, UnicodeDecodeError):
        written = ""
    link = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2].removeprefix("posix/")
    for name in (env.get("TZ", "").removeprefix(":"), link, written):
        try:
            if name and ZoneInfo(name):
                return name
        except (KeyError, ValueError, OSError):
            continue
    return "UTC"
