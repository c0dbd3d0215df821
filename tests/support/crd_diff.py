"""What of a CRD's change breaks its users: manifests in Git, stored objects, readers of status.

``python -m tests.support.crd_diff VERSION`` keeps the present CRDs as those of a release; the test of changes compares
with the newest. Descriptions are left out of what is kept: they break nobody.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.crd_schema import Schema, committed

RELEASES = Path(__file__).parents[1] / "data/crds"
"""One folder a release, with a JSON file a CRD."""

UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")
LOWER = ("minimum", "minLength", "minItems", "minProperties")
EXACT = ("pattern", "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type")
PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"


def breaks(old: Schema, new: Schema) -> list[str]:
    """Every change from ``old`` to ``new`` that can break someone, as ``<path>: <what>``."""
    return [*_identity(old["spec"], new["spec"]), *_versions(old["spec"], new["spec"])]


def _identity(old: Schema, new: Schema) -> Iterator[str]:
    for field in ("group", "scope"):
        if old[field] != new[field]:
            yield f"{field}: {old[field]} became {new[field]}"
    for field in ("kind", "plural", "singular", "listKind"):
        if old["names"].get(field) != new["names"].get(field):
            yield f"names.{field}: {old['names'].get(field)} became {new['names'].get(field)}"
    for field in ("shortNames", "categories"):
        for gone in sorted(set(old["names"].get(field, [])) - set(new["names"].get(field, []))):
            yield f"names.{field}: {gone} was removed"


def _versions(old: Schema, new: Schema) -> Iterator[str]:
    present = {version["name"]: version for version in new["versions"]}
    for before in old["versions"]:
        name = before["name"]
        after = present.get(name)
        if after is None or (before["served"] and not after["served"]):
            yield f"{name}: is no longer served"
            continue
        for gone in sorted(before.get("subresources", {}).keys() - after.get("subresources", {}).keys()):
            yield f"{name}: the subresource {gone} was removed"
        yield from _node(before["schema"]["openAPIV3Schema"], after["schema"]["openAPIV3Schema"], name)


def _node(old: Schema, new: Schema, path: str) -> Iterator[str]:
    yield from _type(old, new, path)
    yield from _values(old, new, path)
    yield from _default(old, new, path)
    yield from _rules(old, new, path)
    yield from _fields(old, new, path)
    for key, sign in (("items", "[]"), ("additionalProperties", "{}")):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _node(before, after, path + sign)
        elif before and not after and not new.get(PRESERVE):
            yield f"{path}: {key} were removed"


def _type(old: Schema, new: Schema, path: str) -> Iterator[str]:
    before, after = _kind(old), _kind(new)
    is_wider = after == "int-or-string" and before in ("integer", "string")
    if before != after and not is_wider:
        yield f"{path}: the type {before} became {after}"
    if old.get("nullable") and not new.get("nullable"):
        yield f"{path}: null is no longer accepted"
    if old.get(PRESERVE) and not new.get(PRESERVE):
        yield f"{path}: unknown fields are no longer kept"


def _kind(node: Schema) -> str | None:
    return "int-or-string" if node.get(INT_OR_STRING) else node.get("type")


def _values(old: Schema, new: Schema, path: str) -> Iterator[str]:
    for field in UPPER:
        if field in new and new[field] < old.get(field, float("inf")):
            yield f"{path}: {field} fell from {old.get(field)} to {new[field]}"
    for field in LOWER:
        if field in new and new[field] > old.get(field, 0 if field != "minimum" else float("-inf")):
            yield f"{path}: {field} rose from {old.get(field)} to {new[field]}"
    for field in EXACT:
        is_looser = field in ("pattern", "format") and field not in new and _kind(old) != "integer"
        if old.get(field) != new.get(field) and not is_looser:
            yield f"{path}: {field} {old.get(field)} became {new.get(field)}"
    if "enum" in new:
        options = old.get("enum")
        gone = None if options is None else sorted(set(options) - set(new["enum"]))
        if gone is None:
            yield f"{path}: any value became one of {new['enum']}"
        elif gone:
            yield f"{path}: the options {gone} were removed"


def _default(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """An object's default is what its fields' defaults make of it; these are compared one by one."""
    before, after = old.get("default"), new.get("default")
    if isinstance(before, dict) and isinstance(after, dict):
        changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
        if changed:
            yield f"{path}: the defaults of {sorted(changed)} changed"
    elif before != after or ("default" in old) != ("default" in new):
        yield f"{path}: the default {before!r} became {after!r}"


def _rules(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """A rule that is new refuses what was accepted, unless it says itself what it does with the value before it."""
    known = {rule["rule"] for rule in old.get("x-kubernetes-validations", [])}
    for rule in new.get("x-kubernetes-validations", []):
        if rule["rule"] not in known and not rule.get("optionalOldSelf"):
            yield f"{path}: a rule was added: {rule['rule']}"


def _fields(old: Schema, new: Schema, path: str) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name in before.keys() - after.keys():
        if not new.get(PRESERVE):
            yield f"{path}.{name}: was removed"
    for name in sorted(set(new.get("required", [])) - set(old.get("required", []))):
        yield f"{path}.{name}: became required"
    for name in before.keys() & after.keys():
        yield from _node(before[name], after[name], f"{path}.{name}")


def without_descriptions(value: Any) -> Any:
    """A copy of a schema; a field that is called description stays."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "description" or not isinstance(v, str)}
        return {name: without_descriptions(below) for name, below in kept.items()}
    return [without_descriptions(item) for item in value] if isinstance(value, list) else value


def releases() -> list[str]:
    """Versions, oldest first."""
    found = [path.name for path in RELEASES.iterdir() if path.is_dir()] if RELEASES.exists() else []
    return sorted(found, key=lambda name: tuple(int(part) for part in name.split(".")))


def released(version: str) -> dict[str, Schema]:
    """Name -> CRD of a release."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RELEASES / version).glob("*.json"))}


def keep(version: str) -> None:
    """Keep the present CRDs as those of ``version``."""
    folder = RELEASES / version
    folder.mkdir(parents=True, exist_ok=True)
    for name, crd in committed().items():
        text = json.dumps(without_descriptions(crd), separators=(",", ":"), sort_keys=True)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep(sys.argv[1])
