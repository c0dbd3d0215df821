"""What an image runs can be imported from what it installs: nothing leans on a package of the development environment.

No image is built for this. The requirements of an image's extras, and theirs in turn, are read from the metadata of
what is installed here. A process that finds no other distribution imports all that the image's code imports anywhere.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = ROOT / "runtime" / "prodrl"
OPERATOR = ROOT / "operator" / "prodrl_operator"

IMAGES: dict[str, tuple[list[str], list[Path]]] = {
    "operator": (["operator"], [path for path in OPERATOR.iterdir() if path.name not in ("local", "report")]),
    "runtime": (
        ["gateway", "train", "export", "evaluate", "lab"],
        [RUNTIME / name for name in ("cli.py", "store", "gateway", "collect", "train", "export", "evaluate")],
    ),
    "serving": (["serve"], [RUNTIME / name for name in ("store", "recorder", "export/fetch.py")]),
}
"""The extras that each Dockerfile installs, and the code that runs there."""
LAZY = {"runtime": ["modelopt.torch.quantization", "modelopt.torch.export"], "serving": ["vllm.entrypoints.cli.main"]}
"""What the code's own imports import later, when they are used."""

PROGRAM = """
import importlib, importlib.machinery, json, sys
missing, modules = json.load(sys.stdin)
missing = set(missing)

class Installed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in missing else super().find_spec(name, path, target)

sys.meta_path = [Installed if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
for name in modules:
    importlib.import_module(name)
"""


def required(extras: list[str]) -> set[str]:
    """Names of all distributions that these extras of the project bring, themselves and by others."""
    asked: set[tuple[str, str]] = set()
    queue = [("prodrl", extra) for extra in ["", *extras]]
    while queue:
        if (one := queue.pop()) in asked:
            continue
        asked.add(one)
        for text in _requirements(*one):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": one[1]}):
                queue += [(canonicalize_name(requirement.name), extra) for extra in ["", *requirement.extras]]
    return {name for name, _ in asked}


def _requirements(name: str, extra: str) -> list[str]:
    if name == "prodrl":  # as the file says now, whatever was installed
        return list(PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"])
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # of another platform, or replaced by an override


def test_the_dockerfiles_install_these_extras() -> None:
    for name, (extras, _) in IMAGES.items():
        text = (ROOT / "images" / name / "Dockerfile").read_text()
        assert f'ARG EXTRAS="{" ".join(extras)}"' in text or f"install dependencies {' '.join(extras)}\n" in text


def _modules(paths: list[Path]) -> set[str]:
    """Whatever is imported there from elsewhere, also inside of functions."""
    files = [file for path in paths for file in ([path] if path.suffix == ".py" else sorted(path.rglob("*.py")))]
    return {name for file in files for name in _imports(ast.parse(file.read_text()))}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        yield from _imports(node)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", IMAGES)
def test_all_that_an_image_imports_is_asked_for(image: str) -> None:
    extras, paths = IMAGES[image]
    wanted = required(extras)
    makers = importlib.metadata.packages_distributions()
    missing = [module for module, its in makers.items() if not wanted & set(map(canonicalize_name, its))]
    modules = sorted(_modules(paths) - {"__future__"}) + LAZY.get(image, [])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([missing, modules]),
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
