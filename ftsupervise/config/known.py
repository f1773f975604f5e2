"""The keys of each section, by the settings' own JSON Schema, for suggestions and examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ftsupervise.config.strict_yaml import KeyPath


class Known:
    """The keys of ``model`` and of everything below it."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._root: dict[str, Any] = model.model_json_schema(by_alias=True)

    def keys(self, path: KeyPath, value: Any) -> list[str]:
        """The keys that may stand in the mapping at ``path``. ``value``: the whole document, to tell alternatives."""
        return list(dict.fromkeys(key for schema in self._at(path, value) for key in schema.get("properties", {})))

    def example(self, path: KeyPath) -> str:
        """How the value of the key at ``path`` may be written; "" when the schema has no example."""
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
        """Every path that ends in ``key``, lists left out."""
        return [path for path in self._paths(self._root, ()) if path[-1] == key]

    def _paths(self, schema: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
        if len(path) > 6:
            return
        for form in self._forms(schema):
            for key, below in form.get("properties", {}).items():
                yield (*path, key)
                yield from self._paths(below, (*path, key))

    def _at(self, path: KeyPath, value: Any) -> list[dict[str, Any]]:
        here = self._forms(self._root)
        for step in path:
            if isinstance(value, dict):
                value = value.get(step)
            else:
                value = value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None
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
    """Does ``value`` say, by a key with one allowed word, that it is another alternative?"""
    properties = form.get("properties", {})
    if not isinstance(value, dict):
        return False
    return any("const" in properties.get(key, {}) and properties[key]["const"] != word for key, word in value.items())
