"""The ready-made scripts that come with ftsupervise, and how one gets into somebody's folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from ftsupervise.crontab.place import CronDir
from ftsupervise.errors import NotFound, Refused, from_os_error
from ftsupervise.rundir.paths import write_whole


@dataclass(frozen=True)
class Ready:
    """One script: where it belongs, and the first line of what it says about itself."""

    folder: str  # "hourly"
    name: str
    about: str
    text: str


def ready() -> tuple[Ready, ...]:
    """All of them, by folder and name; those that are jobs of their own come last."""
    top = resources.files("ftsupervise.cron")
    found = []
    for place in (top, top / "as-jobs"):
        for folder in sorted(place.iterdir(), key=lambda one: one.name):
            if folder.name.startswith("cron.") and folder.is_dir():
                for script in sorted(folder.iterdir(), key=lambda one: one.name):
                    text = script.read_text("utf-8")
                    found.append(Ready(folder.name.removeprefix("cron."), script.name, _about(text), text))
    return tuple(found)


def add(cron: CronDir, name: str, folder: str | None = None) -> str:
    """Put the script called ``name`` into its folder (or ``folder``); its path. Raises NotFound, Refused if it is there."""
    known = {one.name: one for one in ready()}
    if name not in known:
        raise NotFound(f"no ready-made script is called {name!r}", hint=f"there are: {', '.join(known)}")
    one = known[name]
    path = cron.folder(folder or one.folder) / name
    if path.exists():
        raise Refused(f"{path} is there already", hint="it was left as it is")
    try:
        write_whole(path, one.text, mode=0o755)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None
    return str(path)


def _about(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("# "):
            return line[2:]
    return ""
