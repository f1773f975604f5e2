"""The page of a run in an experiment tracker (W&B, MLflow, TensorBoard …): ``attempts/NNNN/tracker.json``, written by rank 0.

The address comes from the environment of the training, or from its loop. It is shown to people beside our own words, so it must
be http or https, name a host, be short, and be made of the plain characters of an address. What stands before ``@`` and behind
``?`` is left out: services put passwords and keys there. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host.ownership import distrust_in
from ftsupervise.rundir.paths import TRACKER, RunDir, tracked_attempts
from ftsupervise.rundir.records import read_record, write_json

ENV_URL = "FTSUPERVISE_TRACKER_URL"  # for a tracker that has no variables of its own
_LONGEST = 500
_PLAIN = re.compile(r"[A-Za-z0-9._~:/@!$&'()*+,;=%#\[\]-]+")  # of RFC 3986, without what parts or closes it elsewhere
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")


class TrackerPage(NamedTuple):
    url: Annotated[str, _LONGEST] = ""
    kind: Annotated[str, 40] = ""  # "W&B", "MLflow" or "tracker"


def from_environment(env: Mapping[str, str]) -> TrackerPage | None:
    """Return the page that the variables of a tracker name, as precisely as they do: the run, else its project or
    experiment.
    """
    for found in (TrackerPage(env.get(ENV_URL, ""), "tracker"), _wandb(env), _mlflow(env)):
        if found is not None and (url := safe_url(found.url)):
            return found._replace(url=url)
    return None


def safe_url(text: str) -> str:
    """Return the address as it may be shown; "" where it may not."""
    if len(text) > 4 * _LONGEST or not text.isascii() or not text.isprintable():
        return ""
    scheme, mark, rest = text.strip().partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        return ""
    rest, hash_mark, fragment = rest.partition("#")
    rest = rest.partition("?")[0]
    place, slash, path = rest.partition("/")
    place = place.rpartition("@")[2]
    url = f"{scheme.lower()}://{place}{slash}{path}" + (f"#{fragment.partition('?')[0]}" if hash_mark else "")
    if not _HOST.fullmatch(place) or not _PLAIN.fullmatch(url) or len(url) > _LONGEST:
        return ""
    return url


def _wandb(env: Mapping[str, str]) -> TrackerPage | None:
    entity, project, run = (env.get(f"WANDB_{name}", "") for name in ("ENTITY", "PROJECT", "RUN_ID"))
    if (
        not entity
        or not project
        or env.get("WANDB_MODE", "online") != "online"
        or _is_on(env.get("WANDB_DISABLED", ""))
    ):
        return None
    base = env.get("WANDB_BASE_URL") or "https://wandb.ai"
    base = base.rstrip("/").replace("://api.wandb.ai", "://wandb.ai")  # the service's own door is not its page
    return TrackerPage(f"{base}/{_part(entity)}/{_part(project)}{f'/runs/{_part(run)}' if run else ''}", "W&B")


def _mlflow(env: Mapping[str, str]) -> TrackerPage | None:
    base, experiment, run = (env.get(f"MLFLOW_{name}", "") for name in ("TRACKING_URI", "EXPERIMENT_ID", "RUN_ID"))
    if not base.startswith(("http://", "https://")):  # a folder or a database has no page
        return None
    where = f"/#/experiments/{_part(experiment)}{f'/runs/{_part(run)}' if run else ''}" if experiment else ""
    return TrackerPage(f"{base.rstrip('/')}{where}", "MLflow")


def _part(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _is_on(word: str) -> bool:
    return word.strip().lower() in ("1", "true", "yes", "on")


def write_tracker(attempt: Path, page: TrackerPage) -> None:
    """Write the page. Raises OSError."""
    write_json(attempt / TRACKER, page, sync=False)


def read_tracker(rundir: RunDir, newest: int) -> TrackerPage | None:
    """Return the page of the newest attempt that names one, of the last few.

    None where there is none, and where a stranger may have written it.
    """
    for number in tracked_attempts(newest):
        folder = rundir.attempt(number)
        if (found := _read(folder)) is not None:
            return found
    return None


def _read(folder: Path) -> TrackerPage | None:
    path = folder / TRACKER
    if not os.path.lexists(path):
        return None
    try:
        whose = folder.stat()
        page = read_record(
            TrackerPage,
            path,
            limit=8000,
            distrust=distrust_in(whose, path),
        )
    except (OSError, ValueError):
        return None
    url = safe_url(page.url) if page is not None else ""
    return (
        TrackerPage(url, page.kind if page.kind in ("W&B", "MLflow") else "tracker")
        if page is not None and url
        else None
    )
