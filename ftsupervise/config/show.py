"""The settings for reading: as they will be used, with nothing in them that only one person may know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ftsupervise.config.load import as_yaml, leaves, values
from ftsupervise.config.schema import Run
from ftsupervise.config.strict_yaml import KeyPath, dotted, secret_at

HIDDEN = "(not shown)"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]*(?=@)")


def shown(run: Run) -> dict[str, Any]:
    """The settings as JSON values; what may be a secret is replaced by "(not shown)"."""
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
