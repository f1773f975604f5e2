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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ftsupervise.config import plugged, sources, sweep
from ftsupervise.config.alerting import Alerts, Receiver
from ftsupervise.config.fields import JobFile, Strict
from ftsupervise.config.plugged import PluggedReceiver, PluggedWatchdog, Reading
from ftsupervise.config.schema import Cron, Run
from ftsupervise.config.slurm_options import instead_of
from ftsupervise.config.strict_yaml import Document, KeyPath, Problem, dotted, parse, plain, secret_at
from ftsupervise.config.watchdogs import Watch
from ftsupervise.errors import ConfigError, PluginUnusable
from ftsupervise.host import plugins
from ftsupervise.secrecy import masked

_Model = TypeVar("_Model", bound=BaseModel)
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")


def load(path: Path, run: str = "", *, environ: Mapping[str, str] | None = None, text: bytes | None = None) -> Run:
    """The settings in ``path``, with the person's and the site's own beneath them. ``run``: which one of a sweep; ``text``:
    what stands there, if it is known.

    ``run_dir`` and every other path in the result are absolute: relative ones start at the file they are written in.
    Raises ConfigError (all that is wrong, a line each, with file:line:column), NotFound, NotPermitted; UsageError where it is
    a sweep, and no run of it is named.
    """
    return loaded(sources.read(path, os.environ if environ is None else environ, text, run=run), path)


def loads(
    text: str | bytes,
    path: Path = Path("ftsupervise.yaml"),
    run: str = "",
    *,
    environ: Mapping[str, str] | None = None,
) -> Run:
    """The settings in ``text`` as if it stood in ``path``; no other file is read. ``run``: which one of a sweep."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    document = sweep.of_one(sources.checked(parse(raw, str(path)), path), run)
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


def origins(
    path: Path, run: str = "", *, environ: Mapping[str, str] | None = None, text: bytes | None = None
) -> dict[str, str]:
    """Dotted key -> "file:line:column", "$VARIABLE (file:line:column)" or "default", for every single setting."""
    document = sources.read(path, os.environ if environ is None else environ, text, run=run)
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


# ------------------------------------------------------------------------------------------
# The messages about wrong settings: pydantic's findings as sentences at file:line:column. No setting is known here by its name.
#
# pydantic names the place of an error with keys, list indexes and the names of the union members it tried; here the
# members are taken out again, one of them is chosen to speak, and the words come from the settings' JSON Schema (which
# keys exist here, what an example looks like). So sections written by others are explained without knowing them.

MOST = 20  # problems reported at once
_EXPLAINED = 200  # a millisecond each: a hostile file has thousands
_ADDRESS = re.compile(r"(https?://)(?:[^/\s'\"]*@)?([^/\s'\"]+)(?:/[^\s'\"]*)?", re.IGNORECASE)
AT = "at"  # context of an error that belongs to a key below the model that found it

_NOUNS = {
    "string_type": "text",
    "string_sub_type": "text",
    "path_type": "a path",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "'key: value' lines",
    "model_type": "'key: value' lines",
    "model_attributes_type": "'key: value' lines",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "less_than": "expected less than {lt}",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "string_too_short": "expected at least {min_length} characters",
    "string_too_long": "expected at most {max_length} characters",
    "finite_number": "expected a finite number",
}


class _Finding(NamedTuple):
    path: KeyPath
    members: tuple[tuple[KeyPath, str], ...]  # the member of the union, at each path, that was tried
    kind: str
    message: str
    given: Any
    context: dict[str, Any]
    about_key: bool = False


def refusal(problems: Iterable[Problem]) -> ConfigError:
    """All problems as one error: a line each, in the order of the file, each of them once, with no secret in any."""
    seen = sorted(dict.fromkeys(problems), key=lambda problem: (problem.file, problem.line, problem.column))
    lines = [masked(str(problem)) for problem in seen[:MOST]]
    if len(seen) > MOST:
        lines.append(f"... and {len(seen) - MOST} more")
    return ConfigError("\n".join(lines))


def sentences(
    error: ValidationError,
    document: Document,
    model: type[BaseModel],
    others: Mapping[KeyPath, type[BaseModel]] = MappingProxyType({}),
) -> list[Problem]:
    """Return each finding of pydantic at its place in the file, but for keys that a problem of the document covers already.
    Values under the name of a secret are never repeated. ``others``: models of other packages, and where they stand."""
    known = Known(model, others)
    told = [problem.path for problem in document.problems if problem.path]
    found = [
        _finding(item, document.value) for item in error.errors(include_url=False) if item["type"] != "json_invalid"
    ]
    found, unsaid = found[:_EXPLAINED], found[_EXPLAINED:]
    found = _without_misspelled(found, document, known)
    speaking = [f for f in _chosen(found) if not any(f.path[: len(path)] == path for path in told)]
    places = [document.places.get(one.path) for one in unsaid]
    more = [
        Problem(place.file, place.line, place.column, (), "this is wrong too") for place in places if place is not None
    ]
    return [_problem(finding, document, known) for finding in speaking] + more


# ------------------------------------------------------------------------------------------- where, and which member


def _finding(item: Any, value: Any) -> _Finding:
    path: KeyPath = ()
    members: list[tuple[KeyPath, str]] = []
    location: Sequence[int | str] = item["loc"]
    for index, step in enumerate(location):
        inside = isinstance(value, dict) and step in value
        inside = inside or (isinstance(value, list) and isinstance(step, int) and step < len(value))
        if inside:
            value = value[step]
            path = (*path, step)
        elif item["type"] == "missing" and index == len(location) - 1:
            path = (*path, step)
        elif step != "[key]":
            members.append((path, str(step)))
    context = item.get("ctx", {})
    path = (*path, *context.get(AT, ()))
    return _Finding(
        path, tuple(members), item["type"], item["msg"], item["input"], context, location[-1:] == ("[key]",)
    )


def _chosen(found: list[_Finding]) -> list[_Finding]:
    """Choose one voice for each union: the member that fits best, or all of them in one sentence if none has the form."""
    for place in sorted({place for finding in found for place, _ in finding.members}, key=len):
        members: dict[str, list[_Finding]] = {}
        for finding in found:
            for where, member in finding.members:
                if where == place:
                    members.setdefault(member, []).append(finding)
                    break
        if len(members) < 2:
            continue
        fitting = {m: all_ for m, all_ in members.items() if not any(_no_form(f, place) for f in all_)}
        if fitting:
            best = min(fitting.values(), key=len)
        else:
            kinds = [f for all_ in members.values() for f in all_ if _no_form(f, place)]
            nouns = " or ".join(dict.fromkeys(_noun(f) for f in kinds))
            best = [kinds[0]._replace(kind="forms", message=nouns, members=())]
        heard = [f for all_ in members.values() for f in all_]
        found = [f for f in found if not any(f is other for other in heard)] + best
    return found


def _no_form(finding: _Finding, place: KeyPath) -> bool:
    return finding.path == place and (finding.kind in _NOUNS or finding.kind in ("literal_error", "forms"))


def _noun(finding: _Finding) -> str:
    if finding.kind in ("literal_error", "enum"):
        return str(finding.context.get("expected", "another word"))
    return _NOUNS.get(finding.kind) or finding.message


# ----------------------------------------------------------------------------------------------------- the sentence


def _problem(finding: _Finding, document: Document, known: Known) -> Problem:
    at = finding.path
    while at not in document.places and at:
        at = at[:-1]
    place = document.places.get(at)
    path = finding.path
    if finding.kind == "extra_forbidden":
        path, text = path[:-1], _unknown(finding.path, finding.given, document, known)
    elif finding.kind in ("union_tag_invalid", "union_tag_not_found"):
        path, text = _no_tag(finding, document, known)
        place = document.places.get(path, place)
    elif finding.kind == "missing":
        text = _missing(path, known)
    else:
        # Only the host of an address is shown: the rest may be a webhook's secret.
        text = _ADDRESS.sub(r"\1\2/...", _wrong(finding, document))
    if place is None:
        return Problem("", 0, 0, path, text)
    by_key = finding.about_key or finding.kind in ("extra_forbidden", "missing", "union_tag_invalid")
    line, column = (place.key_line, place.key_column) if by_key else (place.line, place.column)
    return Problem(place.file, line, column, path, text)


_A_KEY = re.compile(r"(?<=did you mean ')|(?=sbatch: \[)")  # where the text about a key of launch names one


# Keys of earlier versions that ftsupervise decides by itself, and how.
NO_SETTINGS_ANY_MORE = {
    "launch.restart.hang.factor": "three times the longest pause of a phase is a hang",
    "guard.loss.tries": "the brake comes on after three tries",
    "nodes.half_life": "an incident counts half after 24h",
    "nodes.exclude_at": "a node is excluded at a score of 1.5, and nodes.at_most bounds how many are",
    "checkpoints.quarantine_after": "two failures in a row from one checkpoint set it aside",
    "watch.is_running.completing_for": "a job may be COMPLETING for 10m",
    "watch.hang.times": "10 of the run's own step times without a step are a hang",
    "watch.hang.kill_within": "a run may take 1h to stop after its kill switch was raised",
    "watch.checkpoints.smallest": "one of less than half the usual size is too small",
    "alerts.forget_after": "an alert that is not checked any more ends after 1h",
    "alerts.dead_man.timeout": "the service is given 5s",
    "cron.missed": "one run makes up for all missed slots",
}


def _unknown(path: KeyPath, given: Any, document: Document, known: Known) -> str:
    key = str(path[-1])
    here = known.keys(path[:-1], document.value)
    if secret_at(path) and not isinstance(given, (dict, list)):
        bare = re.sub(r"[_-](?:file|env)$", "", key)
        offers = [name for name in (f"{bare}_file", f"{bare}_env") if name in here] or [f"{bare}_file", f"{bare}_env"]
        if key not in offers:
            variable = re.fullmatch(r"\$\{(\w+).*\}", given) if isinstance(given, str) else None
            words = {"file": "PATH", "env": variable[1] if variable else "VARIABLE"}
            ways = " or ".join(f"'{name}: {words[name.rsplit('_', 1)[1]]}'" for name in offers)
            return f"unknown key '{key}'; a secret is never written in a settings file, type {ways}"
    if (decided := NO_SETTINGS_ANY_MORE.get(dotted(tuple(step for step in path if isinstance(step, str))))) is not None:
        return f"{key!r} is no setting any more: {decided}; leave it out"
    text = f"unknown key {key!r}"
    if path[:-1] == ("launch",) and (slurms := instead_of(key, given)):
        return f"{text}; {slurms}"
    close = _close(path, here)
    if close:
        return f"{text}; did you mean {close[0]!r}?"
    longer = [name for name in here if name.startswith(key)] if len(key) > 2 else []
    if len(longer) == 1:  # launch: {gpu: 8}
        return f"{text}; did you mean {longer[0]!r}?"
    if path[:-1] == ("watch",) and not known.homes(key):
        return f"{text}; no watchdog of ours is called so, and no installed package brings one"
    elsewhere = known.homes(key)
    if elsewhere:
        return f"{text}; it is known as " + " and ".join(dotted(home) for home in elsewhere[:3])
    if len(path) == 1 and (slurms := instead_of(key, given)):
        return f"{text}; {_A_KEY.sub('launch.', slurms)}"
    return f"{text}; known here: {', '.join([*here[:12], *(['...'] if here[12:] else [])])}" if here else text


def _without_misspelled(found: list[_Finding], document: Document, known: Known) -> list[_Finding]:
    """Leave out a missing key that was misspelt: ``comand:`` is one mistake, not an unknown key and a missing ``command``."""
    meant = {
        (*f.path[:-1], close)
        for f in found
        if f.kind == "extra_forbidden"
        for close in _close(f.path, known.keys(f.path[:-1], document.value))
    }
    return [f for f in found if f.kind != "missing" or f.path not in meant]


def _close(path: KeyPath, here: Sequence[str]) -> list[str]:
    """The key that was probably meant by the last step of ``path``, or nothing."""
    key = str(path[-1])
    return get_close_matches(key, here, 1, 0.6) or get_close_matches(key.replace("-", "_").lower(), here, 1, 0.6)


def _no_tag(finding: _Finding, document: Document, known: Known) -> tuple[KeyPath, str]:
    """Explain an item of a list of alternatives that is none of them."""
    path, given = finding.path, finding.given
    here = known.keys(path, {})
    if isinstance(given, dict):
        for key in given:
            if key not in here:
                return path, _unknown((*path, key), given[key], document, known)
    tag = finding.context.get("tag")
    expected = re.findall(r"'([^']*)'", str(finding.context.get("expected_tags", ""))) or list(here)
    close = get_close_matches(str(tag), expected, 1) if tag else []
    ending = f"; did you mean {close[0]!r}?" if close else f", got {_shown(given, path)}"
    return path, f"expected one of {', '.join(expected)}{ending}"


def _missing(path: KeyPath, known: Known) -> str:
    key, example = path[-1], known.example(path)
    return f"missing; add '{key}: {example}'" if example else f"missing; add '{key}:' here"


def _wrong(finding: _Finding, document: Document) -> str:
    path, given, context = finding.path, finding.given, finding.context
    if AT in context:
        return _masked(finding.message, path, document)
    if finding.kind in _NOUNS or finding.kind == "forms":
        nouns = finding.message if finding.kind == "forms" else _NOUNS[finding.kind]
        return f"expected {nouns}, got {_shown(given, path)}{_advice(nouns, given, path, document)}"
    if finding.kind in ("literal_error", "enum"):
        close = get_close_matches(str(given), re.findall(r"'([^']*)'", context["expected"]), 1)
        ending = f"; did you mean {close[0]!r}?" if close else ""
        return f"expected {context['expected']}, got {_shown(given, path)}{ending}"
    if finding.kind in _BOUNDS:
        text = _BOUNDS[finding.kind].format(**context)
    else:
        text = finding.message.removeprefix("Value error, ").replace("Input should be", "expected")
    text = _masked(text, path, document)
    return text if "got " in text or isinstance(given, (dict, list)) else f"{text}, got {_shown(given, path)}"


def _masked(text: str, path: KeyPath, document: Document) -> str:
    """``text`` with the value at ``path`` taken out of it if it may be a secret."""
    value = value_at(document.value, path)
    if not secret_at(path) or not isinstance(value, str) or not value:
        return text
    for form in (repr(value), value):
        text = text.replace(form, "(not shown)")
    return text


def value_at(value: Any, path: KeyPath) -> Any:
    """The value at ``path`` below ``value``; None when there is none."""
    for step in path:
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def _shown(value: Any, path: KeyPath) -> str:
    if secret_at(path):
        return "(not shown)"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "'key: value' lines"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:70]}... ({len(text)} characters)"


def _advice(nouns: str, given: Any, path: KeyPath, document: Document) -> str:
    """The text to type instead, where it is known."""
    key = path[-1] if path and isinstance(path[-1], str) else ""
    before = f"{key}: " if key else ""
    place = document.places.get(path)
    if secret_at(path):
        return ""
    if place and place.variable:
        if "text" not in nouns:
            return f" (from ${{{place.variable}}})"
        return f' (from ${{{place.variable}}}); write "${{{place.variable}}}" in quotes if text is meant'
    if nouns.startswith("text") and isinstance(given, (bool, int, float)):
        return f'; type {before}"{_shown(given, path)}"'
    if nouns == "a list" and isinstance(given, dict):
        return "; put '- ' before the first key of each entry"
    if not isinstance(given, str):
        return ""
    if "whole number" in nouns and isinstance(_meaning(given), int):
        return f"; type {before}{given} without quotes"
    if "true or false" in nouns and given.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"; type {before}{'true' if given.lower() in ('true', 'yes', 'on') else 'false'}"
    return f'; type {before}["{given}"]' if nouns == "a list" and given.isprintable() and len(given) < 60 else ""


def _meaning(text: str) -> object:
    try:
        return plain(text)
    except ValueError:
        return text


# ------------------------------------------------------------------- the keys of each section, by the JSON Schema


class Known:
    """The keys of ``model`` and of everything below it; at the places of ``others``, of that one's."""

    def __init__(
        self, model: type[BaseModel], others: Mapping[KeyPath, type[BaseModel]] = MappingProxyType({})
    ) -> None:
        self._root: dict[str, Any] = model.model_json_schema(by_alias=True)
        self._others = {place: Known(other) for place, other in others.items()}

    def keys(self, path: KeyPath, value: Any) -> list[str]:
        """The keys that may stand in the mapping at ``path``. ``value``: the whole document, to tell alternatives."""
        return list(dict.fromkeys(key for schema in self._at(path, value) for key in schema.get("properties", {})))

    def example(self, path: KeyPath) -> str:
        """Return how the value of the key at ``path`` may be written; "" when the schema has no example."""
        for schema in self._at(path, {}):
            if schema.get("examples"):
                return json.dumps(schema["examples"][0], ensure_ascii=False)
            if schema.get("type") == "string" and "enum" in schema:
                return str(schema["enum"][0])
        for schema in self._at(path, {}):
            for key in schema.get("required", ()):
                return f"{{{key}: {self.example((*path, key))}}}"
        return ""

    def homes(self, key: str) -> list[KeyPath]:
        """Return every path that ends in ``key``, lists left out."""
        return [path for path in self._paths(self._root, ()) if path[-1] == key]

    def _paths(self, schema: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
        if len(path) > 6:
            return
        for form in self._forms(schema):
            for key, below in form.get("properties", {}).items():
                yield (*path, key)
                yield from self._paths(below, (*path, key))

    def _at(self, path: KeyPath, value: Any) -> list[dict[str, Any]]:
        for place, other in self._others.items():
            if path[: len(place)] == place:
                return other._at(path[len(place) :], value_at(value, place))
        here = self._forms(self._root)
        for step in path:
            value = value_at(value, (step,))
            below = [found for schema in here for found in _below(schema, step)]
            here = [form for schema in below for form in self._forms(schema)]
            here = [form for form in here if not _other_kind(form, value)] or here
        return here

    def _forms(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The alternatives a schema allows, references followed."""
        examples = {"examples": schema["examples"]} if "examples" in schema else {}
        while "$ref" in schema:
            schema = self._root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
        return [{**form, **examples} for one in alternatives for form in self._forms(one)] or [schema]


def _below(schema: dict[str, Any], step: int | str) -> Iterator[dict[str, Any]]:
    if isinstance(step, int):
        if isinstance(schema.get("items"), dict):
            yield schema["items"]
        yield from schema.get("prefixItems", [])[step : step + 1]
    elif step in schema.get("properties", {}):
        yield schema["properties"][step]
    elif isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]


def _other_kind(form: dict[str, Any], value: Any) -> bool:
    """Return whether ``value`` says, by a key with one allowed word, that it is another alternative."""
    properties = form.get("properties", {})
    if not isinstance(value, dict):
        return False
    return any("const" in properties.get(key, {}) and properties[key]["const"] != word for key, word in value.items())
