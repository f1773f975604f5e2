"""Sections of the settings that belong to another package: a watchdog's below ``watch:``, a receiver's below ``alerts:``.

The package's own model judges them when the file is read, so that an error is told at its place in the file as for any
other. They are kept as they are written, and made into the package's values where they are used: no other module of ours
has to import that package, and settings can be read, shown and written where it is broken or missing. The watch reports it
then, beside what its other watchdogs see.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from ftsupervise.config.fields import Section, Strict, refuse_control_characters, refuse_secrets
from ftsupervise.errors import PluginUnusable
from ftsupervise.host import plugins

_Base = TypeVar("_Base", bound=Strict)


class PluggedWatchdog(Section):
    """The settings of another package's watchdog, as JSON values."""

    model_config = ConfigDict(extra="allow")


class PluggedReceiver(Strict):
    """The settings of another package's receiver, as JSON values."""

    model_config = ConfigDict(extra="allow")


class Reading(NamedTuple):
    """How a file is read that may have sections of other packages."""

    may_load: bool = True  # false for a file of another account: it imports nothing here
    may_miss: bool = (
        False  # true for the settings as launched: they were judged by the account and the Python that launched
    )


def reading_of(info: ValidationInfo) -> Reading:
    """Return how the file is read that is being judged."""
    return info.context if isinstance(info.context, Reading) else Reading()


def settings_as_kept(model: type[BaseModel], group: str, extra: dict[str, Any] | None, info: ValidationInfo) -> None:
    """Judge each of the ``extra`` keys of ``model``, and put what is kept in its place. Raises ValidationError."""
    wrong: list[InitErrorDetails] = []
    for key, given in (extra or {}).items():
        if isinstance(given, (PluggedWatchdog, PluggedReceiver)):
            continue
        try:
            (extra or {})[key] = _kept(group, key, given, reading_of(info))
        except _Unknown:
            wrong.append(InitErrorDetails(type="extra_forbidden", loc=(key,), input=given))
        except ValidationError as error:
            wrong += [_below(key, one) for one in error.errors(include_url=False)]
        except ValueError as error:
            said = PydanticCustomError("wrong_at", "{sentence}", {"at": (), "sentence": str(error)})
            wrong.append(InitErrorDetails(type=said, loc=(key,), input=given))
    if wrong:
        raise ValidationError.from_exception_data(model.__name__, wrong)


class _Unknown(Exception):
    """No package brings it."""


def _kept(group: str, key: str, given: Any, reading: Reading) -> Strict | None:
    base: type[PluggedWatchdog | PluggedReceiver]
    base = PluggedWatchdog if group == plugins.WATCHDOGS else PluggedReceiver
    known = not reading.may_load or _is_known(group, key)
    if not known and not reading.may_miss:
        raise _Unknown
    if given is None:
        return None
    kept = base.model_validate_json(json.dumps(given))
    refuse_control_characters(given, several_lines=False)
    refuse_secrets(given)
    if known and reading.may_load:
        try:
            made = module_of(group, key).Settings.model_validate_json(json.dumps(given))
        except PluginUnusable:
            return kept
        return base.model_validate_json(made.model_dump_json(by_alias=True))
    return kept


def _is_known(group: str, key: str) -> bool:
    try:
        return plugins.find(group, key) is not None
    except PluginUnusable:
        return True


def _below(key: str, one: Any) -> InitErrorDetails:
    """Return an error of a package's model as one below ``key``: of pydantic's own kinds where it is one."""
    kind, context, place = one["type"], dict(one.get("ctx", {})), (key, *one["loc"])
    try:
        PydanticKnownError(kind, context or None)
    except (KeyError, TypeError, ValueError):  # a validator's own kind
        kind = PydanticCustomError(kind, "{sentence}", {**context, "sentence": one["msg"]})
    return InitErrorDetails(type=kind, loc=place, input=one["input"], ctx=context)


def module_of(group: str, key: str) -> ModuleType:
    """Return the module of a plug-in that can be used: with its function, and ``Settings``. Raises PluginUnusable."""
    plugin = plugins.find(group, key)
    if plugin is None:
        what = "watchdog" if group == plugins.WATCHDOGS else "receiver"
        raise PluginUnusable(
            f"no package of this Python brings the {what} {key.replace('_', '-')}",
            hint="install the package beside ftsupervise, or take the section out",
        )
    module = plugins.load(plugin)
    base, function = (Section, "check") if group == plugins.WATCHDOGS else (Strict, "send")
    settings = getattr(module, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, base)):
        raise PluginUnusable(f"{plugin} cannot be used: {plugin.module}.Settings is no subclass of {base.__name__}")
    if not callable(getattr(module, function, None)):
        raise PluginUnusable(f"{plugin} cannot be used: {plugin.module} has no function {function}")
    return module


def as_used(group: str, key: str, kept: Strict) -> Any:
    """Return the settings as the package's own values. Raises PluginUnusable."""
    try:
        return module_of(group, key).Settings.model_validate_json(kept.model_dump_json(by_alias=True))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise PluginUnusable(f"the settings of {key} are none for the package that is installed: {said}") from None


def changed(group: str, key: str, kept: _Base, change: Callable[[Any], BaseModel]) -> _Base:
    """Return ``kept`` after a ``change`` of the package's values; as it is where there are none."""
    try:
        before = as_used(group, key, kept)
    except PluginUnusable:
        return kept
    after = change(before)
    return kept if after is before else type(kept).model_validate_json(after.model_dump_json(by_alias=True))
