"""Rules of the house that a machine can check: layout, generated files, tables that must agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import prodrl.errors
from prodrl_operator import names
from prodrl_operator.api import crd

ROOT = Path(__file__).parents[2]


def test_committed_crds_equal_the_models() -> None:
    for folder in (ROOT / "crds", ROOT / "manifests" / "helm" / "prodrl" / "files" / "crds"):
        for name, found in crd.crds().items():
            assert (folder / name).read_text(encoding="utf-8") == crd.render(found), "run `make crds`"


def test_no_file_is_a_link() -> None:
    """An archive, a package of Helm's or a checkout on Windows may turn a link into a file that holds a path."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]
    assert ROOT / "manifests" / "helm" / "prodrl" / "files" / "crds" / "prodrlruns.yaml" in paths
    assert [str(path) for path in paths if path.is_symlink()] == []


def test_the_folder_operator_never_shadows_the_standard_library() -> None:
    strays = [*(ROOT / "operator").glob("*.py"), *(ROOT / "operator").rglob("conftest.py")]
    assert strays == []
    assert not list((ROOT / "operator").rglob("test_*.py"))
    done = subprocess.run([sys.executable, "-c", "import operator; operator.add"], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_exit_codes_are_one_table() -> None:
    kinds = [
        k for k in vars(prodrl.errors).values() if isinstance(k, type) and issubclass(k, prodrl.errors.RuntimeFault)
    ]
    assert {k.exit_code: k.reason for k in kinds} == {code: reason for code, (reason, _) in names.EXIT_CODES.items()}


@pytest.mark.parametrize("module", ["prodrl.config", "prodrl.records", "prodrl.store.layout", "prodrl_operator.api"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    program = (
        f"import sys, {module}; heavy = {{'torch', 'vllm', 'transformers', 'boto3', 'pyarrow', 'kubernetes', 'kopf'}};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _nodes(schema: dict, path: str = "") -> list[tuple[str, dict]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += _nodes(schema[key], f"{path}[]")
    return found


@pytest.mark.parametrize("name", ["prodrlruns.yaml", "prodrlrounds.yaml"])
def test_crds_follow_the_api_conventions(name: str) -> None:
    version = crd.crds()[name]["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    schema = version["schema"]["openAPIV3Schema"]
    for part in ("spec", "status"):
        for path, node in _nodes(schema["properties"][part], part):
            assert node.get("type") != "number", f"{path}: no floats"
            if node.get("type") == "string" and "enum" not in node:
                assert "maxLength" in node, f"{path}: every string is bounded"
            if node.get("type") == "array":
                assert "maxItems" in node, f"{path}: every list is bounded"
                assert node["x-kubernetes-list-type"] in ("map", "atomic", "set"), path
            if node.get("type") == "integer" and part == "spec":
                assert "minimum" in node, f"{path}: integers of the spec are bounded below"
                assert "maximum" in node, f"{path}: integers of the spec are bounded above"
