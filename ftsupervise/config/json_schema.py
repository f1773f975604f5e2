"""The JSON Schema (draft 2020-12) of ``ftsupervise.yaml``, for editors: every key with its description and default.

It differs from what pydantic writes where the file differs from Python: defaults in the words of the file ("4h", not
"PT4H"), ``${VARIABLE}`` in the place of numbers and words, sections that may be left empty.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaError, SchemaSerializer, core_schema

from ftsupervise.config.fields import VARIABLE
from ftsupervise.config.load import as_yaml, leaves, values
from ftsupervise.config.schema import Run
from ftsupervise.config.sources import SECTIONS
from ftsupervise.config.strict_yaml import KeyPath, dotted, secret_at

_VARIABLE = {"$ref": "#/$defs/variable"}


def json_schema() -> dict[str, Any]:
    """The schema as a JSON value."""
    schema = Run.model_json_schema(by_alias=True, schema_generator=_InWordsOfTheFile)
    definitions = schema.pop("$defs", {})
    for one in (schema, *definitions.values()):
        _open_to_variables(one)
    for section in SECTIONS:
        _may_be_empty(schema, section)
    definitions["variable"] = {
        "description": "The value of an environment variable, with a default if it may be missing.",
        "type": "string",
        "pattern": f"^{VARIABLE}$",
        "examples": ["${SCRATCH}", "${NODES:-4}"],
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ftsupervise.yaml"}
    return {**head, **{k: v for k, v in schema.items() if k != "title"}, "$defs": dict(sorted(definitions.items()))}


class _InWordsOfTheFile(GenerateJsonSchema):
    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        if "default" in result and not isinstance(result["default"], dict):
            try:
                serializer = SchemaSerializer(schema["schema"])
            except SchemaError:  # it refers to a model defined elsewhere, whose default is written well already
                return result
            result["default"] = serializer.to_python(schema.get("default"), mode="json")
        return result

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        texts = _texts_under_attributes(model)
        for name, field in model.model_fields.items():
            below = result.get("properties", {}).get(field.alias or name)
            if below is not None and field.description is None and name in texts:
                below["description"] = texts[name]
        return result

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _texts_under_attributes(model: type[BaseModel]) -> dict[str, str]:
    """Return the text that stands in the source under each attribute of ``model`` and of what it inherits from."""
    texts: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or one is BaseModel:
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for pair in pairwise(body.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts


def _open_to_variables(schema: dict[str, Any]) -> None:
    """Let ``${VARIABLE}`` stand wherever a number, a truth or one of some words is asked for."""
    for key, below in schema.get("properties", {}).items():
        schema["properties"][key] = _opened(below)


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("items"), dict):
        schema = {**schema, "items": _opened(schema["items"])}
    if "anyOf" in schema:
        forms = [_opened(form) for form in schema["anyOf"]]
        flat = [part for form in forms for part in (form["anyOf"] if set(form) == {"anyOf"} else [form])]
        return {**schema, "anyOf": [form for index, form in enumerate(flat) if form not in flat[:index]]}
    if "enum" in schema or schema.get("type") in ("integer", "number", "boolean"):
        about = [key for key in ("description", "default", "examples") if key in schema]
        form = {key: part for key, part in schema.items() if key not in about}
        return {key: schema[key] for key in about} | {"anyOf": [form, _VARIABLE]}
    return schema


def _may_be_empty(schema: dict[str, Any], section: str) -> None:
    if section in schema["properties"] and section not in schema.get("required", ()):
        reference = schema["properties"][section].pop("$ref")
        schema["properties"][section]["anyOf"] = [{"$ref": reference}, {"type": "null"}]


# The settings for reading: as they will be used, without secrets.

HIDDEN = "(not shown)"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]*(?=@)")


def shown(run: Run) -> dict[str, Any]:
    """The settings as JSON values; a possible secret is replaced by "(not shown)"."""
    result: dict[str, Any] = _hidden(values(run), ())
    return result


def shown_yaml(run: Run) -> str:
    """``shown`` as the text of a settings file."""
    return as_yaml(shown(run))


def lines(run: Run, origins: Mapping[str, str]) -> Iterator[str]:
    """One "key: value  # origin" for each single setting."""
    rows = [(f"{dotted(p)}: {json.dumps(v, ensure_ascii=False)}", dotted(p)) for p, v in leaves(shown(run)).items()]
    width = min(48, max(len(text) for text, _ in rows))
    for text, key in rows:
        yield f"{text:{width}}  # {origins[key]}"


def _hidden(value: Any, path: KeyPath) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, str) and secret_at(path) and not re.search(r"[_-](?:file|env)$", str(path[-1]), re.IGNORECASE):
        return HIDDEN
    return _CREDENTIALS.sub("...", value) if isinstance(value, str) else value
