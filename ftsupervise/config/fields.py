"""The field types of every part of the configuration: text is parsed here, once.

A setting's type is its unit: ``Duration`` -> timedelta, ``Size`` -> bytes, ``Share`` -> 0–1. A bare number where a unit
is needed is an error that says what to type, because ``threshold: 95`` and ``time: 20:00:00`` have both cost nights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ftsupervise import secrecy, units
from ftsupervise.config.grouping import GROUP_KEYS
from ftsupervise.config.strict_yaml import control_character
from ftsupervise.config.supervisor import BY_KEY, Form

VARIABLE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}"


class Lines:
    """Marks a setting whose text may have several lines: ``setup: Annotated[str, Lines()]``."""


class JobFile:
    """Marks text that is a file with sbatch's patterns (%x, %A …): relative ones start at the settings file, as paths do."""


class Strict(BaseModel):
    """Base of all settings: frozen, unknown keys are errors, no silent conversion between types, no secret and no
    control characters in any text (nor line breaks and tabs, but for settings marked with ``Lines``).

    The text under an attribute is its description in ``ftsupervise config schema``, which reads it from the source:
    pydantic would do so at every start of the program, and takes a sixth of it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=False,
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _no_control_characters(cls, value: object, info: ValidationInfo) -> object:
        marks = cls.model_fields[info.field_name].metadata if info.field_name else []
        refuse_control_characters(value, several_lines=any(isinstance(mark, Lines) for mark in marks))
        refuse_secrets(value)
        return value


def refuse_control_characters(value: object, *, several_lines: bool) -> None:
    """Raise ValueError where any text in ``value`` has one."""
    if isinstance(value, (str, Path)):
        text = str(value)
        found = control_character(text)
        if found:
            raise ValueError(f"control character {found}; no setting holds one")
        if not several_lines and ("\n" in text or "\t" in text):
            raise ValueError("a line break or tab; this setting is one line")
        if isinstance(value, Path) and "${" in text:
            raise ValueError("a variable that is the whole value may hold the secret itself; write the path out")
        if isinstance(value, Path) and text.startswith("~") and value.parts[0] != "~":
            raise ValueError("only one's own home directory is written with '~'; write the path out")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_control_characters(key, several_lines=False)
            refuse_control_characters(item, several_lines=several_lines)
    elif isinstance(value, (tuple, list)):
        for item in value:
            refuse_control_characters(item, several_lines=several_lines)


def refuse_secrets(value: object) -> None:
    """Refuse secrets: settings are read by everybody who may read the run, and stand in the job script.

    An address with a password can still be shown (without it) and fixed; ``launch`` refuses it.
    """
    if isinstance(value, (str, Path)):
        if (found := secrecy.kind(str(value))) and found != secrecy.WITH_PASSWORD:
            raise ValueError(f"{found} stands here; no setting holds a secret, only the file or the variable that does")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_secrets(key)
            refuse_secrets(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            refuse_secrets(item)


def wrong_at(path: tuple[str | int, ...], sentence: str) -> PydanticCustomError:
    """Return a validator's error about the key ``path`` below its model, so that the message points there."""
    context: dict[str, Any] = {"at": path, "sentence": sentence}
    return PydanticCustomError("wrong_at", "{sentence}", context)


@dataclass(frozen=True)
class Matching:
    """Text of one form: ``Annotated[str, Matching(r"[a-z]+", "small letters", "abc")]``.

    The sentence of the error is "expected ``says``, such as ``example``"; the JSON Schema gets pattern and example.
    """

    pattern: str
    says: str
    example: str

    def check(self, text: str) -> str:
        """``text`` if all of it has the form. Raises ValueError."""
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f'expected {self.says}, such as "{self.example}"')
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.pattern}|.*{VARIABLE}.*)$", "examples": [self.example]}


def _duration(value: object) -> timedelta:
    return value if isinstance(value, timedelta) else units.parse_duration(value)  # type: ignore[arg-type]


def _slurm_time(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError(f'write the time limit in quotes, such as time: "20:00:00" or time: 20h, got {value!r}')
    return units.parse_duration(value)


def _size(value: object) -> int:
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError(f'expected a size such as "500GB", got {value!r}')
    return units.parse_size(value)


def _share(value: object, info: ValidationInfo) -> float:
    if isinstance(value, float) and info.mode == "python" and 0 <= value <= 1:
        return value  # code is explicit; only in a file are 95 and 0.95 mixed up
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        meant = value * 100 if value <= 1 else value
        raise ValueError(f'write the share with a percent sign: "{meant:g}%"')
    return units.parse_share(value)  # type: ignore[arg-type]


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("expected more than 0s")
    return value


def _text_schema(example: str, **more: object) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example], **more})


def _secret_file(value: object) -> object:
    if (
        isinstance(value, str)
        and (not value.startswith(("/", "~", "./", "../", "${")) or secrecy.like_an_address(value))
        and not secrecy.like_a_file(value)
    ):
        raise ValueError(
            "expected the path of a file that holds the secret, which begins with '/', '~/' or './' "
            "(what stands here is not shown: it may be the secret itself)"
        )
    return value


def _secret_variable(value: object) -> object:
    if isinstance(value, str) and not value.startswith("${") and not secrecy.like_a_variable(value):
        raise ValueError(
            "expected the name of an environment variable in capitals, such as SLACK_TOKEN "
            "(what stands here is not shown: it may be the secret itself)"
        )
    return value


Off = Literal[False, "off"]


def off_is_null(kind: object) -> BeforeValidator:
    """Let false and "off" switch off, as null does, a setting of ``kind``."""

    def read(value: object) -> object:
        if value is False or value == "off":
            return None
        return tuple(value) if isinstance(value, list) else value  # the following check accepts no list for a tuple

    return BeforeValidator(read, json_schema_input_type=kind)


Duration = Annotated[
    timedelta,
    BeforeValidator(_duration),
    PlainSerializer(units.format_duration, return_type=str),
    _text_schema("10m"),
]
TimeLimit = Annotated[
    timedelta,
    BeforeValidator(_slurm_time),
    PlainSerializer(units.format_duration, return_type=str),
    _text_schema("20:00:00"),
]
Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(units.format_size, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "string", "examples": ["500GB"]}, {"type": "integer", "minimum": 0}]}),
]
Share = Annotated[
    float,
    BeforeValidator(_share),
    PlainSerializer(units.format_share, return_type=str),
    _text_schema("95%"),
]
SecretFile = Annotated[Path, BeforeValidator(_secret_file)]
SecretVariable = Annotated[str, BeforeValidator(_secret_variable)]
Positive = AfterValidator(_positive)


Span = Annotated[Duration, Positive]


class Section(Strict):
    """The settings that all watchdogs have."""

    every: Span | None = None
    """How often to check; default: at each tick."""


def declared(key: str) -> Any:
    """The pydantic field of a key of the settings: default, bounds and description."""
    setting = BY_KEY.get(key) or GROUP_KEYS[key]
    of_time = setting.form is Form.SECONDS
    bounds: dict[str, Any] = {"ge": setting.least, "gt": setting.above, "le": setting.most}
    if of_time or setting.form is Form.COUNTS:  # a type of its own says it: Positive, the values' bounds
        bounds = {}
    default = timedelta(seconds=setting.default) if of_time and setting.default is not None else setting.default
    if setting.form is Form.TEXT:  # a key that switches its section on has no default
        default = ...
    kept = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default, description=setting.help, **kept)
