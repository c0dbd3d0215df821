"""Held-out evaluations: non-inferiority of the candidate to stable, paired per item. Called by ``verdict``.

With the confidence interval [low, high] of (candidate - stable) and the margin m:
low > -m passes (worse by m or more is excluded), high < -m fails (only worse by more than m remains), and an interval
that straddles -m is Inconclusive: more items could still say either.
"""

from __future__ import annotations

import math

from prodrl.config.results import PairedFigures
from prodrl_operator.api.judgement import Judgement
from prodrl_operator.api.run import Evaluation
from prodrl_operator.names import Reason, Verdict


def judge_paired(wanted: Evaluation, figures: PairedFigures | None) -> Judgement:
    """One evaluation; ``figures`` None: the gate did not report it."""
    name = f"evaluation {wanted.name}"
    if figures is None:
        return _error(f"{name}: not measured")
    fault = _fault(wanted, figures)
    if fault is not None:
        return _error(f"{name}: {fault}")
    if figures.items < wanted.min_items:
        return Judgement(
            Verdict.INCONCLUSIVE, f"{name}: {figures.items} items, minItems is {wanted.min_items}", Reason.NO_DATA
        )
    return _non_inferiority(name, float(wanted.margin), figures)


def _fault(wanted: Evaluation, figures: PairedFigures) -> str | None:
    if figures.metric != wanted.metric:
        return f"metric {wanted.metric} was not measured, got {figures.metric}; check the suite"
    numbers = (figures.candidate_mean, figures.stable_mean, figures.difference, figures.low, figures.high)
    if not all(math.isfinite(number) for number in numbers):
        return f"all figures must be finite, got {numbers}"
    if not figures.low <= figures.difference <= figures.high:
        return f"the interval [{figures.low}, {figures.high}] must hold the difference {figures.difference}"
    return None


def _non_inferiority(name: str, margin: float, figures: PairedFigures) -> Judgement:
    facts = (
        f"{name}: {figures.candidate_mean:.4f} against {figures.stable_mean:.4f}, difference "
        f"[{figures.low:+.4f}, {figures.high:+.4f}] with margin {margin:g}"
    )
    if figures.low > -margin:
        return Judgement(Verdict.PASS, facts, Reason.GATE_PASSED)
    if figures.high < -margin:
        return Judgement(Verdict.FAIL, f"{facts}: worse", Reason.GATE_BLOCKED)
    return Judgement(Verdict.INCONCLUSIVE, f"{facts}: undecided; raise maxItems or margin", Reason.GATE_INCONCLUSIVE)


def _error(message: str) -> Judgement:
    return Judgement(Verdict.ERROR, message, Reason.INVALID_DATA)
