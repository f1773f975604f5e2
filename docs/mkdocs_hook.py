"""Make a site of pages that GitHub shows too: add those outside of docs/, change their links, take out the tests' marks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "manual.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "example-minimal.md": "examples/minimal/README.md",
    "example-ddp.md": "examples/ddp/README.md",
    "example-fsdp.md": "examples/fsdp_dcp/README.md",
    "example-lightning.md": "examples/lightning/README.md",
    "example-huggingface.md": "examples/huggingface/README.md",
    "example-accelerate.md": "examples/accelerate/README.md",
    "example-torchrun.md": "examples/torchrun/README.md",
    "example-shell.md": "examples/shell/README.md",
    "example-replicas.md": "examples/replicas/README.md",
    "checkpoint-figures.md": "benchmarks/README.md",
    "recovery.md": "benchmarks/recovery/README.md",
    "replica-faults.md": "benchmarks/replicas/README.md",
    "predictions.md": "benchmarks/prediction/README.md",
    "verdicts.md": "benchmarks/diagnosis/README.md",
}
_PAGES = {source: page for page, source in ELSEWHERE.items()}


def on_files(files: Files, *, config: Any) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = Path(ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    here = Path("docs", page.file.src_uri).parent

    def on_site(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or "://" in path:
            return match[0]
        source = os.path.normpath(folder / path)
        there = f"docs/{_PAGES[source]}" if source in _PAGES else source
        if not there.startswith("docs/"):  # a file of the repository that is no page of the site
            return match[1]
        return f"[{match[1]}]({os.path.relpath(there, here)}{mark}{anchor})"

    markdown = re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", on_site, markdown)
    markdown = re.sub(r"(?<=\]\()docs/(?=pictures/)", "", markdown)
    return re.sub(r"^(```\w+) .+$", r"\1", markdown, flags=re.M)
