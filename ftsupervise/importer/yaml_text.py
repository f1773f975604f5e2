"""Writes a draft as a commented ftsupervise.yaml, in the order in which people look for things. Pure."""

from __future__ import annotations

from typing import Any

from ftsupervise.config.load import as_yaml
from ftsupervise.importer.settings import ELEMENT, Draft

_ORDER = (
    "partition", "account", "qos", "constraint", "reservation", "nodes", "ntasks", "tasks_per_node", "cpus_per_task",
    "gpus_per_node", "gres", "mem", "mem_per_cpu", "mem_per_gpu", "exclusive", "hint", "licenses", "exclude", "time", "signal",
    "warn", "requeue", "jobs", "output", "error", "sbatch", "modules", "env", "take_along", "setup", "srun", "command",
    "finished_by",
)  # fmt: skip
_SAY = {
    "time": "of each job of the chain",
    "warn": "so long before the limit the run is asked to save and leave",
    "modules": "loaded first, in this order",
    "setup": "lines of the job's own shell, once in each job, before the supervisor starts",
    "take_along": "secrets: not written here",
}


def yaml_of(draft: Draft, source: str) -> str:
    """Return the text of the file. ``source``: what it was made from, in words."""
    parts = [
        f"# Made by ftsupervise init from {source}.\n",
        "# Every setting: docs/configuration.md. What would be submitted: ftsupervise launch --dry-run\n",
        as_yaml({"name": draft.name}),
        *_sweep(draft.elements),
        "launch:\n",
    ]
    for key in _ORDER:
        if key in draft.launch:
            value, comment = draft.launch[key]
            parts.append(_entry(key, value, comment or _SAY.get(key, "")))
    if "jobs" not in draft.launch:
        parts.append("  # jobs: 10 is the default: one runs, nine wait to take over\n")
    parts.append(
        "  # resume: --resume {checkpoint}    # for a script that has to be told where to go on from: docs/own-script.md\n"
    )
    to = draft.mail or "ada@example.org"
    parts += [
        "# alerts:                             # who is told, of what is wrong and when it is over: docs/alerts.md\n",
        "#   receivers:\n",
        f"#     - email: {{host: mail.example.org, from: cluster@example.org, to: [{to}]}}\n",
    ]
    return "".join(parts)


def _sweep(elements: tuple[int, ...]) -> list[str]:
    if not elements:
        return []
    words = f"{{{ELEMENT}}} stands for one of these; ftsupervise launch launches them all"
    return [f"sweep:  # a run for each element: {words}\n", f"  {ELEMENT}: [{', '.join(map(str, elements))}]\n"]


def _entry(key: str, value: Any, comment: str) -> str:
    said = f"  # {comment}" if comment else ""
    if isinstance(value, str) and "\n" in value:
        above = f"  # {comment}\n" if comment else ""
        return f"{above}  {key}: {_block(value)}"
    if isinstance(value, list):
        items = ", ".join(_scalar((key, None), item) for item in value)
        return f"  {key}: [{items}]{said}\n"
    if isinstance(value, dict):
        lines = "".join(f"    {name}: {_scalar((key, name), item)}\n" for name, item in value.items())
        return f"  {key}:{said}\n{lines}"
    text = _scalar((key,), value)
    if len(text) + len(said) > 110:
        return f"{said}\n  {key}: {text}\n" if said else f"  {key}: {text}\n"
    return f"  {key}: {text}{said}\n"


def _scalar(path: tuple[Any, ...], value: Any) -> str:
    """Return one value as the file has it: in quotes where it could be read as something else, with its dollars doubled."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if path == ("command",) or path == ("setup",):
        written = as_yaml({"launch": {path[0]: value}})
        if written.count("\n") == 2:
            return written.split("\n")[1].partition(": ")[2]
        return f'"{_quoted(value)}"'
    written = as_yaml({"value": value})
    return written.removeprefix("value: ").rstrip("\n") if written.count("\n") == 1 else f'"{_quoted(value)}"'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _block(text: str) -> str:
    """Return shell code as YAML's literal block, in which each line stands as it is."""
    body = text.rstrip("\n")
    indicator = "2" if body[:1] in (" ", "\t", "\n") else ""
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.split("\n"))
    return f"|{indicator}\n{lines}"
