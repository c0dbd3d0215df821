"""The multi-document YAML of a local run: Secrets, ConfigMaps and exactly one ProdRLRun."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from prodrl_operator.api.run import Run
from prodrl_operator.errors import InvalidError

ALLOWED = ("ProdRLRun", "Secret", "ConfigMap")


def _faults(exc: ValidationError) -> Iterable[str]:
    for error in exc.errors():
        where = ".".join(str(part) for part in error["loc"])
        value = error.get("input")
        shown = f", got {value!r}" if not isinstance(value, dict | list) else ""
        yield f"{where}: {error['msg']}{shown}"


def parse_run(document: dict[str, Any]) -> Run:
    """The run, with every fault of its spec in one message."""
    name = document.get("metadata", {}).get("name", "")
    try:
        return Run(metadata=document["metadata"], spec=document.get("spec") or {})
    except ValidationError as exc:
        listed = "\n  ".join(_faults(exc))
        raise InvalidError(f"ProdRLRun {name!r}: the spec is not valid; correct these fields:\n  {listed}") from exc


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All documents but the run (Secrets and ConfigMaps first), and the run.

    Raises:
        InvalidError: Not readable, not YAML, an unknown kind, or not exactly one ProdRLRun.
    """
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d]
    except OSError as exc:
        raise InvalidError(f"{path}: cannot be read, {exc.strerror}; give the YAML of a ProdRLRun") from exc
    except yaml.YAMLError as exc:
        raise InvalidError(f"{path}: is not YAML, {exc}") from exc
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in ALLOWED:
            raise InvalidError(f"{path}: kind {kind!r} cannot run locally; use only {', '.join(ALLOWED)}")
        if not isinstance(document.get("metadata"), dict) or not document["metadata"].get("name"):
            raise InvalidError(f"{path}: a {kind} has no metadata.name; give it one")
        document["metadata"].setdefault("namespace", "default")
    runs = [d for d in documents if d["kind"] == "ProdRLRun"]
    if len(runs) != 1:
        raise InvalidError(f"{path}: holds {len(runs)} ProdRLRuns, a local run takes exactly one")
    return [d for d in documents if d["kind"] != "ProdRLRun"], _reached_from_here(runs[0])


def _reached_from_here(document: dict[str, Any]) -> dict[str, Any]:
    """The run with a gateway that asks nobody for a key, if it says nothing of keys: it listens on loopback only."""
    spec = document.get("spec")
    gateway = (spec.get("gateway") or {}) if isinstance(spec, dict) else None
    if not isinstance(gateway, dict) or gateway.keys() & {"apiKeysSecretRef", "authentication"}:
        return document
    return {**document, "spec": {**document["spec"], "gateway": {**gateway, "authentication": "Anonymous"}}}
