"""The index of README.md: every fault has its tests, and every test here has its fault."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INDEX = (HERE / "README.md").read_text()
ROWS = [line for line in INDEX.splitlines() if re.match(r"\| \S+#\d+", line)]
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py)::(\w+)`", INDEX)))
REPORTS = [
    "argo-rollouts#4128",
    "argo-rollouts#1774",
    "argo-rollouts#1292",
    "argo-rollouts#3850",
    "argo-rollouts#926",
    "flagger#1581",
    "flagger#1801",
    "argo-rollouts#1690",
    "kserve#5062",
    "kserve#3869",
    "LLMKube#192",
    "LLMKube#1250",
    "trainer#2001",
    "kubernetes#90124",
    "trainer#999",
    "kueue#14811",
    "prime-rl#1712",
    "prime-rl#1857",
    "fms-hf-tuning#217",
    "kuberay#715",
    "kopf#585",
    "kopf#75",
    "k8s-nim-operator#594",
    "kuberay#735",
    "flagger#686",
    "jobset#408",
    "clickhouse-operator#487",
    "kueue#5244",
    "kubectl#1414",
    "client-go#448",
    "k8sgpt-operator#137",
    "llm-d-benchmark#285",
    "skypilot#8752",
]
"""One of each kind of fault: none may fall out of the index."""
REPORT = re.compile(r"\w#\d+")


@cache
def functions_of(path: Path) -> dict[str, str]:
    """Name -> docstring of the test functions of a file, without importing it."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in found if node.name.startswith("test_")}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions_of(ROOT / path)


@pytest.mark.parametrize("row", ROWS)
def test_a_fault_has_its_tests(row: str) -> None:
    assert "::test_" in row


def test_the_index_is_complete() -> None:
    cited = set(re.findall(r"[\w-]+#\d+", "\n".join(ROWS)))
    assert set(REPORTS) - cited == set()
    files = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    for path in files:
        for name, text in functions_of(path).items():
            if name == "test":  # the decorator's own
                continue
            assert (str(path.relative_to(ROOT)), name) in NAMED, f"{name} is not in the index"
            assert REPORT.search(text) or "kueue's" in text, f"{name} cites no report"
