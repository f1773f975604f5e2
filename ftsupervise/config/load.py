"""``ftsupervise.yaml`` -> a frozen ``Run``, and back. The only module of the configuration other rooms call.

load(path)     the settings of one run, every path in them absolute
loads(text)    the same from text, with no other file beneath it
dump(run)      YAML that loads to an equal Run; secrets are never in it, because no setting holds one
load_account() the sections that belong to no run, from the person's own file and the site's
origins(path)  where each setting came from
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ftsupervise.config import plugged, sources
from ftsupervise.config.alerting import Alerts, Receiver
from ftsupervise.config.explain import refusal, sentences
from ftsupervise.config.fields import JobFile, Strict
from ftsupervise.config.plugged import PluggedReceiver, PluggedWatchdog, Reading
from ftsupervise.config.schema import Cron, Run
from ftsupervise.config.strict_yaml import Document, KeyPath, dotted, parse, plain
from ftsupervise.config.watchdogs import Watch
from ftsupervise.errors import PluginUnusable
from ftsupervise.host import plugins

_Model = TypeVar("_Model", bound=BaseModel)
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")


def load(path: Path, *, environ: Mapping[str, str] | None = None) -> Run:
    """The settings in ``path``, with the person's and the site's own beneath them.

    ``run_dir`` and every other path in the result are absolute: relative ones start at the file they are written in.
    Raises ConfigError (all that is wrong, a line each, with file:line:column), NotFound, NotPermitted.
    """
    return loaded(sources.read(path, os.environ if environ is None else environ), path)


def loads(text: str | bytes, path: Path = Path("ftsupervise.yaml"), *, environ: Mapping[str, str] | None = None) -> Run:
    """The settings in ``text`` as if it stood in ``path``; no other file is read."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    document = sources.checked(parse(raw, str(path)), path)
    return loaded(sources.fill(document, os.environ if environ is None else environ), path)


class Account(Strict):
    """The settings of this account's own file and the site's, beneath any run."""

    alerts: Alerts = Alerts()
    cron: Cron = Cron()
    watch: Watch = Watch()


def load_account(*, environ: Mapping[str, str] | None = None) -> Account:
    """Return ``alerts``, ``cron`` and ``watch`` of this person's own file and the site's; defaults where there is
    neither.

    Raises ConfigError, NotPermitted.
    """
    given = os.environ if environ is None else environ
    document = sources.read_outer(given, ("alerts", "cron", "watch"))
    return _anchored(validated(document, Account), (), _Anchor(document, sources.outer_files(given)[0].parent))


def dump(run: Run) -> str:
    """Every setting as YAML, defaults included, so that it means the same on another day and for another person."""
    return as_yaml(values(run))


def as_yaml(settings: dict[str, Any]) -> str:
    """Settings in the words of the file as the text of one."""
    text: str = yaml.dump(
        _escaped(settings, ()), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )
    return text


def values(run: Run) -> dict[str, Any]:
    """The settings as JSON values, in the words of the file."""
    return run.model_dump(mode="json", by_alias=True)


def origins(path: Path, *, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Dotted key -> "file:line:column", "$VARIABLE (file:line:column)" or "default", for every single setting."""
    document = sources.read(path, os.environ if environ is None else environ)
    return {dotted(key): origin_of(document, key) for key in leaves(values(loaded(document, path)))}


def leaves(value: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    """Every single value by its path; an empty mapping or list counts as one."""
    if isinstance(value, dict) and value:
        return {p: v for key, item in value.items() for p, v in leaves(item, (*path, key)).items()}
    if isinstance(value, list) and value:
        return {p: v for index, item in enumerate(value) for p, v in leaves(item, (*path, index)).items()}
    return {path: value}


def origin_of(document: Document, path: KeyPath) -> str:
    """Return the place of the setting at ``path``, as ``origins`` has it."""
    place = document.places.get(path)
    if place is None:
        return "default"
    where = f"{place.file}:{place.line}:{place.column}"
    return f"${place.variable} ({where})" if place.variable else where


def loaded(document: Document, path: Path, *, strangers: bool = False) -> Run:
    """The settings in ``document``, which was read from ``path``. ``strangers``: another account wrote it, so it makes this
    process import no package that it names. Raises ConfigError."""
    base = path.absolute().parent
    reading = Reading(may_load=not strangers, may_miss=strangers or path.name == sources.LAUNCHED)
    run = _anchored(validated(document, Run, reading), (), _Anchor(document, base, reading.may_load))
    return run if run.run_dir else run.model_copy(update={"run_dir": base / "runs" / run.name})


def validated(document: Document, model: type[_Model], reading: Reading = Reading()) -> _Model:  # noqa: B008 - frozen
    """The document as ``model``. Raises ConfigError with all errors of either."""
    if document.value is None:
        raise refusal(document.problems)
    try:
        # Through JSON, because strict models take a list for a tuple and text for a path only from there.
        settings = model.model_validate_json(json.dumps(document.value), context=reading)
    except ValidationError as error:
        others = dict(_of_other_packages(document.value)) if reading.may_load else {}
        raise refusal(document.problems + sentences(error, document, model, others)) from None
    if document.problems:
        raise refusal(document.problems)
    return settings


def _of_other_packages(value: Any) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yield the place of each section of another package's watchdog or receiver, and that package's model of it."""
    watch, alerts = (value.get(key) if isinstance(value, dict) else None for key in ("watch", "alerts"))
    receivers = alerts.get("receivers") if isinstance(alerts, dict) else None
    found: list[tuple[str, KeyPath, Any, type[BaseModel]]] = [(plugins.WATCHDOGS, ("watch",), watch, Watch)]
    for index, one in enumerate(receivers if isinstance(receivers, list) else ()):
        found.append((plugins.RECEIVERS, ("alerts", "receivers", index), one, Receiver))
    for group, path, section, ours in found:
        for key in section if isinstance(section, dict) else ():
            if key not in ours.model_fields:
                try:
                    yield (*path, key), plugged.module_of(group, key).Settings
                except PluginUnusable:
                    continue


class _Anchor(NamedTuple):
    """Where relative paths start."""

    document: Document
    base: Path  # of a path that stands in no file
    may_load: bool = True  # the packages that the settings name


def _anchored(settings: _Model, path: KeyPath, at: _Anchor) -> _Model:
    """``settings`` with every Path in it absolute, at whatever depth."""
    changed: dict[str, Any] = {}
    for name, before in (settings.model_extra or {}).items():
        after: Any = _of_a_package(name, before, (*path, name), at)
        if after is not before:
            changed[name] = after
    for name, field in type(settings).model_fields.items():
        before = getattr(settings, name)
        here = (*path, field.alias or name)
        if isinstance(before, str) and any(isinstance(mark, JobFile) for mark in field.metadata):
            after = _job_file(before, _start(here, at))
        else:
            after = _absolute(before, here, at)
        if after is not before:
            changed[name] = after
    return settings.model_copy(update=changed) if changed else settings


def _of_a_package(key: str, kept: Any, path: KeyPath, at: _Anchor) -> Any:
    if not isinstance(kept, (PluggedWatchdog, PluggedReceiver)) or not at.may_load:
        return kept
    group = plugins.WATCHDOGS if isinstance(kept, PluggedWatchdog) else plugins.RECEIVERS
    return plugged.changed(group, key, kept, lambda settings: _anchored(settings, path, at))


def _absolute(value: Any, path: KeyPath, at: _Anchor) -> Any:
    if isinstance(value, Path):
        return _start(path, at) / value.expanduser()
    if isinstance(value, BaseModel):
        return _anchored(value, path, at)
    if isinstance(value, tuple):
        items = tuple(_absolute(item, (*path, index), at) for index, item in enumerate(value))
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: _absolute(item, (*path, key), at) for key, item in value.items()}
    return value


def _start(path: KeyPath, at: _Anchor) -> Path:
    """Return where a relative path that stands at ``path`` starts: at the file it is written in."""
    place = at.document.places.get(path)
    return Path(place.file).absolute().parent if place else at.base


def _job_file(text: str, start: Path) -> str:
    """Make the path of a job's file absolute: sbatch knows no "~", and a "%" in our part is none of its patterns."""
    if text.startswith("/"):
        return text
    home = text.startswith("~/")
    before = Path("~").expanduser() if home else start
    return f"{str(before).replace('%', '%%')}/{text[2:] if home else text}"


def _escaped(value: Any, path: KeyPath, before: object = None) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        pairs = zip([None, *value], value, strict=False)
        return [_escaped(item, (*path, index), last) for index, (last, item) in enumerate(pairs)]
    return sources.escape(value, shell=sources.reads_shell(path, before)) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes all text but the plainest words, so that no reader of YAML sees anything else in it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    try:
        if _PLAIN.fullmatch(text) and isinstance(plain(text), str):
            style = ""
    except ValueError:
        pass
    if "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)


_Dumper.add_representer(str, _text)
