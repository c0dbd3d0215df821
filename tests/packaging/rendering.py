"""The manifests as a cluster would get them: rendered by kubectl kustomize and by helm, once a process."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support import tiers

ROOT = Path(__file__).parents[2]
KUSTOMIZE = ROOT / "manifests" / "kustomize"
OVERLAYS = ("cluster-wide", "namespaced")
CHART = ROOT / "manifests" / "helm" / "prodrl"
Object = dict[str, Any]

NAMESPACES = {"cluster-wide": "prodrl-system", "namespaced": "prodrl"}
VALUES = {"cluster-wide": [], "namespaced": ["--set", "scope=Namespace"]}
"""The chart's values that say the same as an overlay."""


def script(name: str, *arguments: str, finds_only: bool | None = None) -> str | None:
    """What a script of ``scripts/`` found; it may fetch and install only where every tier is required."""
    if finds_only is None:
        finds_only = not tiers.are_required()
    find = ["--find"] if finds_only else []
    command = [str(ROOT / "scripts" / name), *find, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def kubectl() -> str:
    """kubectl, for its kustomize: on PATH, or built with the control plane of tests/api."""
    found = shutil.which("kubectl")
    if found is None and (folder := script("kubernetes", "api", finds_only=True)):
        found = f"{folder}/kubectl"
    return found or tiers.lack("kubectl: not on PATH and not built; run scripts/kubernetes api")


@functools.cache
def helm() -> str:
    """Helm: on PATH, or fetched."""
    return script("helm") or tiers.lack("helm: not found; run scripts/helm")


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def kustomized_text(overlay: str) -> str:
    """The stream that ``kubectl apply -k`` of an overlay sends."""
    return run(kubectl(), "kustomize", str(KUSTOMIZE / "overlays" / overlay))


def kustomized(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    return objects(kustomized_text(overlay))


@functools.cache
def templated_text(overlay: str, *values: str) -> str:
    """The stream that helm sends with the values that correspond to an overlay, and more."""
    return run(helm(), "template", "prodrl", str(CHART), "--namespace", NAMESPACES[overlay], *VALUES[overlay], *values)


def templated(overlay: str, *values: str) -> list[Object]:
    """Its objects."""
    return objects(templated_text(overlay, *values))


def objects(text: str) -> list[Object]:
    """All documents of a stream."""
    return [item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item]


def only(items: list[Object], kind: str, name: str = "prodrl-operator") -> Object:
    """The one object of a kind and name."""
    found = [item for item in items if item["kind"] == kind and item["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: wanted one, got {len(found)}"
    return found[0]
