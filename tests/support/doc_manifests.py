"""The ProdRLRuns that README, docs and examples show, so that tests can ask a server whether it would take them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prodrl_operator.api.run import RunSpec
from tests.support.crd_cases import manifest

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^(?P<indent> *)```ya?ml\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A run as a reader would copy it."""

    place: str
    """File and line."""
    run: dict[str, Any]
    """The whole object; parts of a spec are put into a minimal one."""
    text: str
    """What a reader would give to kubectl: as it is written, for YAML is read differently there."""

    def __str__(self) -> str:
        return self.place


def shown() -> list[Shown]:
    """Every run, and every part of a run's spec, in a fenced block of a Markdown file or a manifest of an example."""
    found = []
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]):
        text = path.read_text(encoding="utf-8")
        for block in FENCED.finditer(text):
            line = text[: block.start()].count("\n") + 1
            found += _runs(f"{path.relative_to(ROOT)}:{line}", block["text"])
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        found += _runs(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    return found


def _runs(place: str, text: str) -> Iterator[Shown]:
    fields = {field.alias for field in RunSpec.model_fields.values()}
    for document in yaml.safe_load_all(text):
        if not isinstance(document, dict):
            continue
        if document.get("kind") == "ProdRLRun":
            yield Shown(place, {**document, "metadata": {**document["metadata"], "namespace": "default"}}, text)
        elif "kind" not in document and document.keys() & fields:
            whole = manifest(document)
            yield Shown(place, whole, json.dumps(whole))
