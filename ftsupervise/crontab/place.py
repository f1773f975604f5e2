"""The installed folder, and what ``cron install`` decided. Light: a tick reads this before anything else.

DIR/
  README
  crontab                        five-field lines
  cron.minutely/ cron.hourly/ cron.daily/ cron.weekly/
                                 drop an executable, or a .slurm or .sbatch job script
  state/
    installed.json               what install decided: back end, period, environment, who is told
    secrets.env                  the variables of the environment that are secrets; nobody else may read state/
    tick.sbatch                  the job of one slot
    slots/20261121T090000Z/      a slot, claimed by mkdir: claim.json, ensured, end.json
    runs/hourly.disk/            runs of one entry: 20261121T090000Z/{start.json,output,end.json}; last is a link
    alerts/                      the journal of what failed
    log/                         what a tick could not say anywhere else
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path

from ftsupervise.config.find_run import default_cron_directory
from ftsupervise.errors import Error, NotFound, NotPermitted, from_os_error
from ftsupervise.host import ownership
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import write_json

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


@dataclass(frozen=True)
class CronDir:
    """The paths of one installed folder. Opens nothing by itself."""

    root: Path

    @property
    def crontab(self) -> Path:
        return self.root / "crontab"

    def folder(self, name: str) -> Path:
        return self.root / f"cron.{name}"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def installed(self) -> Path:
        return self.state / "installed.json"

    @property
    def secrets(self) -> Path:
        return self.state / "secrets.env"

    @property
    def script(self) -> Path:
        return self.state / "tick.sbatch"

    @property
    def slots(self) -> Path:
        return self.state / "slots"

    @property
    def runs(self) -> Path:
        return self.state / "runs"

    @property
    def alerts(self) -> Path:
        return self.state / "alerts"

    @property
    def log(self) -> Path:
        return self.state / "log"


def dir_option(cron: CronDir) -> str:
    """What a command has to be given to mean this cron: " --dir DIR", "" for the one in its usual place."""
    return "" if cron.root == default_directory(os.environ) else f" --dir {shlex.quote(str(cron.root))}"


def journal_of(folder: str) -> Path | None:
    """Where the alerts of the cron installed in ``folder`` are; None if it is no such folder."""
    cron = CronDir(Path(folder))
    try:
        return cron.alerts if cron.installed.is_file() else None
    except OSError:
        return None


def journal_of_default(env: Mapping[str, str]) -> Path | None:
    """… of the cron in its usual place, if it ever had something to tell."""
    cron = CronDir(default_directory(env))
    return cron.alerts if cron.alerts.is_dir() else None


@dataclass(frozen=True)
class Installed:
    """What install decided. A tick asks nothing else."""

    id: str
    owner: str
    backend: str
    why: str
    python: str
    period: timedelta
    spares: int
    limit: timedelta
    missed: str  # "once" or "skip"
    timezone: str
    times: dict[str, str]  # folder -> schedule
    keep: int
    output: int  # bytes
    options: tuple[str, ...]  # of sbatch, for a tick
    job_options: tuple[str, ...]  # of sbatch, for dropped scripts that say nothing else
    environment: dict[str, str]
    alerts: dict[str, object]
    alerts_from: str
    at: datetime
    since: datetime  # it has been kept since then; typing install again does not change it
    removed: str = ""  # who took it away, and when; "" while it is meant to live
    note: dict[str, str] = field(default_factory=dict)
    trusted: tuple[str, ...] = ()  # accounts besides the owner and root whose files are run
    trusted_group: str = ""  # a group whose members may write the folders
    secret: dict[str, str] = field(default_factory=dict, repr=False)  # of the environment; kept in a file of its own

    @property
    def zone(self) -> tzinfo:
        from zoneinfo import ZoneInfo

        return ZoneInfo(self.timezone)

    @property
    def whole_environment(self) -> dict[str, str]:
        """What an entry gets. Not for Slurm, which keeps the environment of a job and shows it to administrators."""
        return {**self.environment, **self.secret}

    def as_json(self) -> dict[str, object]:
        """Without the secrets."""
        return {
            "schema_version": 1,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "secret"},
            "period": self.period.total_seconds(),
            "limit": self.limit.total_seconds(),
            "at": self.at.isoformat(),
            "since": self.since.isoformat(),
        }


def read_installed(cron: CronDir) -> Installed | None:
    """What install decided; None if nothing was installed here.

    Raises Error when it is there and not readable, NotTrusted (one of its kinds) when somebody else could have written it:
    it says which programs are run.
    """
    try:
        raw = json.loads(ownership.read_trusted(cron.installed))
        if not isinstance(raw, dict):
            raise ValueError("it does not hold a JSON object")
    except FileNotFoundError:
        return None
    except PermissionError:
        raise _somebody_elses(cron) from None
    except OSError as error:
        raise from_os_error(error, f"read {cron.installed}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(cron, str(error)) from None
    try:
        return _installed(raw, _read_secrets(cron))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(cron, f"{type(error).__name__}: {error}") from None


def _somebody_elses(cron: CronDir) -> NotPermitted:
    """An installed cron is its owner's alone to read: outputs and settings of hers are in it."""
    try:
        owner = user_name(cron.root.stat().st_uid)
    except OSError:
        owner = "somebody else"
    return NotPermitted(f"the cron in {cron.root} is {owner}'s", hint="ask them, or install your own with --dir DIR")


def _read_secrets(cron: CronDir) -> dict[str, str]:
    """The variables in ``secrets.env``, which a shell reads too. {} when there are none, or when they cannot be believed."""
    try:
        text = ownership.read_trusted(cron.secrets, limit=1_000_000).decode("utf-8", "surrogateescape")
        words = shlex.split(text, comments=True)
    except (OSError, Error, ValueError):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def need_installed(cron: CronDir) -> Installed:
    """As ``read_installed``. Raises NotFound if nothing was installed."""
    found = read_installed(cron)
    if found is None:
        raise NotFound(f"no cron is installed in {cron.root}", hint=f"ftsupervise cron install{dir_option(cron)}")
    return found


def write_installed(cron: CronDir, installed: Installed) -> None:
    """Raises CannotWrite or NotPermitted."""
    try:
        if installed.secret:
            lines = (f"export {name}={shlex.quote(value)}\n" for name, value in sorted(installed.secret.items()))
            text = "# written by ftsupervise cron install: variables that are secrets\n" + "".join(lines)
            write_whole(cron.secrets, text.encode("utf-8", "surrogateescape"), mode=0o600)
        else:
            cron.secrets.unlink(missing_ok=True)
        write_json(cron.installed, installed.as_json(), mode=0o600)
    except OSError as error:
        raise from_os_error(error, f"write {cron.installed}") from None


def _damaged(cron: CronDir, why: str) -> Error:
    return Error(
        f"{cron.installed} is damaged ({why})", hint=f"ftsupervise cron install{dir_option(cron)}   writes it anew"
    )


def _installed(raw: dict[str, object], secret: dict[str, str]) -> Installed:
    def text(key: str) -> str:
        value = raw[key]
        if not isinstance(value, str):
            raise TypeError(f"{key} is no text")
        return value

    def number(key: str) -> float:
        value = raw[key]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise TypeError(f"{key} is no number")
        return value

    def mapping(key: str) -> dict[str, object]:
        value = raw[key]
        if not isinstance(value, dict):
            raise TypeError(f"{key} is no mapping")
        return value

    def words(key: str) -> tuple[str, ...]:
        value = raw[key]
        if not isinstance(value, list):
            raise TypeError(f"{key} is no list")
        return tuple(str(item) for item in value)

    at = _time(text("at"))
    return Installed(
        id=text("id"),
        owner=text("owner"),
        backend=text("backend"),
        why=text("why"),
        python=text("python"),
        period=timedelta(seconds=number("period")),
        spares=int(number("spares")),
        limit=timedelta(seconds=number("limit")),
        missed=text("missed"),
        timezone=text("timezone"),
        times={key: str(value) for key, value in mapping("times").items()},
        keep=int(number("keep")),
        output=int(number("output")),
        options=words("options"),
        job_options=words("job_options"),
        environment={key: str(value) for key, value in mapping("environment").items()},
        alerts=mapping("alerts"),
        alerts_from=text("alerts_from"),
        at=at,
        since=_time(text("since")) if "since" in raw else at,
        removed=text("removed"),
        note={key: str(value) for key, value in mapping("note").items()},
        trusted=words("trusted") if "trusted" in raw else (),
        trusted_group=text("trusted_group") if "trusted_group" in raw else "",
        secret=secret,
    )


def _time(text: str) -> datetime:
    """Raises ValueError for what is no time with a zone, OverflowError for one that has no name in UTC."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return at.astimezone(timezone.utc)


def user_name(uid: int | None = None) -> str:
    import pwd

    uid = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
