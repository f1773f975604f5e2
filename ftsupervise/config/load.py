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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ftsupervise.config import sources
from ftsupervise.config.alerting import Alerts
from ftsupervise.config.explain import refusal, sentences
from ftsupervise.config.fields import JobFile, Strict
from ftsupervise.config.schema import Cron, Run
from ftsupervise.config.strict_yaml import Document, KeyPath, dotted, parse, plain
from ftsupervise.config.watchdogs import Watch

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
    return _anchored(validated(document, Account), (), document, sources.outer_files(given)[0].parent)


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


def loaded(document: Document, path: Path) -> Run:
    """The settings in ``document``, which was read from ``path``. Raises ConfigError."""
    base = path.absolute().parent
    run = _anchored(validated(document, Run), (), document, base)
    return run if run.run_dir else run.model_copy(update={"run_dir": base / "runs" / run.name})


def validated(document: Document, model: type[_Model]) -> _Model:
    """The document as ``model``. Raises ConfigError with all errors of either."""
    if document.value is None:
        raise refusal(document.problems)
    try:
        # Through JSON, because strict models take a list for a tuple and text for a path only from there.
        settings = model.model_validate_json(json.dumps(document.value))
    except ValidationError as error:
        raise refusal(document.problems + sentences(error, document, model)) from None
    if document.problems:
        raise refusal(document.problems)
    return settings


def _anchored(settings: _Model, path: KeyPath, document: Document, base: Path) -> _Model:
    """``settings`` with every Path in it absolute, at whatever depth."""
    changed: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        before = getattr(settings, name)
        here = (*path, field.alias or name)
        if isinstance(before, str) and any(isinstance(mark, JobFile) for mark in field.metadata):
            after: Any = _job_file(before, _start(here, document, base))
        else:
            after = _absolute(before, here, document, base)
        if after is not before:
            changed[name] = after
    return settings.model_copy(update=changed) if changed else settings


def _absolute(value: Any, path: KeyPath, document: Document, base: Path) -> Any:
    if isinstance(value, Path):
        return _start(path, document, base) / value.expanduser()
    if isinstance(value, BaseModel):
        return _anchored(value, path, document, base)
    if isinstance(value, tuple):
        items = tuple(_absolute(item, (*path, index), document, base) for index, item in enumerate(value))
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: _absolute(item, (*path, key), document, base) for key, item in value.items()}
    return value


def _start(path: KeyPath, document: Document, base: Path) -> Path:
    """Return where a relative path that stands at ``path`` starts: at the file it is written in."""
    place = document.places.get(path)
    return Path(place.file).absolute().parent if place else base


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
