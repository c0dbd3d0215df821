"""What the CRD's rules refuse, checked once more: an object may be older than its rule. Called by ``decide``."""

from __future__ import annotations

import itertools
from decimal import Decimal

from prodrl_operator import names
from prodrl_operator.api.run import Gate, Run


def faults(run: Run) -> list[str]:
    """All faults at once; empty: usable."""
    name, spec = run.metadata["name"], run.spec
    found: list[str] = []
    if len(name) > names.MAX_RUN_NAME:
        found.append(f"metadata.name: at most {names.MAX_RUN_NAME} characters, got {len(name)}; choose a shorter one")
    if spec.serving.surge == "Replace" and spec.gate.canary.steps:
        found.append("spec.serving.surge: Replace leaves no stable policy to compare with; remove gate.canary.steps")
    correction = spec.training.correction
    if correction.type != "ScoreCentering" and correction.weighting != "None":
        found.append(f"spec.training.correction.weighting: only with ScoreCentering, got {correction.type}; use None")
    return found + _gate_faults(spec.gate)


def _gate_faults(gate: Gate) -> list[str]:
    found: list[str] = []
    weights = [step.weight for step in gate.canary.steps]
    if any(later <= earlier for earlier, later in itertools.pairwise(weights)):
        found.append(f"spec.gate.canary.steps: weights must increase, got {weights}; order them")
    seen: set[str] = set()
    for item in gate.evaluations:
        field = f"spec.gate.evaluations[{item.name}]"
        if item.name in seen:
            found.append(f"{field}: the name is taken; choose another")
        seen.add(item.name)
        if item.min_items > item.max_items:
            found.append(f"{field}.minItems: at most maxItems, got {item.min_items} and {item.max_items}")
        if Decimal(item.margin) < 0:
            found.append(f"{field}.margin: at least 0, got {item.margin}; it is what the candidate may be worse by")
        if not Decimal("0.5") < Decimal(item.confidence) < 1:
            found.append(f"{field}.confidence: between 0.5 and 1, got {item.confidence}; 0.95 is usual")
    return found
