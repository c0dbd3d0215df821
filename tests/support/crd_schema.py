"""Walks the schemas of CustomResourceDefinitions. Used by the tests of the CRDs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

CRDS = Path(__file__).parents[2] / "crds"


def read(path: Path) -> Schema:
    """A manifest; by libyaml where it is there, which takes a tenth of the time."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Schema = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return found


@functools.cache
def committed() -> dict[str, Schema]:
    """Name -> CustomResourceDefinition as committed; not to be changed."""
    files = [path for path in sorted(CRDS.glob("*.yaml")) if path.name != "kustomization.yaml"]
    return {path.stem: read(path) for path in files}


def root_schema(crd: Schema) -> Schema:
    """The schema of the version that is stored."""
    (version,) = [version for version in crd["spec"]["versions"] if version["storage"]]
    found: Schema = version["schema"]["openAPIV3Schema"]
    return found


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every node below and including ``node``: ``[]`` for items, ``{}`` for values of a mapping."""
    yield path, node
    for name, below in node.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}".lstrip("."))
    for key, sign in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}{sign}")
