"""The verdict on a gate Job's measurements. Called by ``observing``; the parts are in ``agreement`` and ``paired``."""

from __future__ import annotations

from pydantic import ValidationError

from prodrl.config.results import EvaluateResult
from prodrl_operator.api.judgement import Judgement
from prodrl_operator.api.run import Gate
from prodrl_operator.gates.agreement import judge_agreement
from prodrl_operator.gates.paired import judge_paired
from prodrl_operator.names import Reason, Verdict

SEVERITY = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASS)
"""The worst part is the verdict of the whole."""


def worst(parts: list[Judgement]) -> Judgement:
    """The first of the worst kind; all parts' messages when everything passed."""
    assert parts, "there is always the agreement"
    verdict = min((part.verdict for part in parts), key=SEVERITY.index)
    chosen = [part for part in parts if part.verdict is verdict]
    return Judgement(verdict, "; ".join(part.message for part in chosen), chosen[0].reason)


def judge_measurements(gate: Gate, measurements: str, *, is_first: bool) -> Judgement:
    """Agreement and all evaluations.

    Args:
        gate: The round's gate.
        measurements: JSON of an ``EvaluateResult``.
        is_first: Round 0 has nothing to be compared with, so only agreement counts.
    """
    try:
        result = EvaluateResult.model_validate_json(measurements)
    except ValidationError as exc:
        return Judgement(Verdict.ERROR, f"the gate's measurements cannot be read: {exc}"[:1000], Reason.INVALID_DATA)
    parts = [judge_agreement(gate.agreement, result.agreement)]
    if not is_first:
        parts += _comparisons(gate, result)
    return worst(parts)


def _comparisons(gate: Gate, result: EvaluateResult) -> list[Judgement]:
    has_baseline = bool(result.evaluations) or (
        result.agreement is not None and result.agreement.stable_mean_abs is not None
    )
    if not has_baseline:
        wanted = len(gate.evaluations) + (gate.agreement.max_ratio_to_stable is not None)
        message = f"stable could not be measured: {wanted} comparisons have no baseline"
        return [Judgement(Verdict.INCONCLUSIVE, message, Reason.BASELINE_UNAVAILABLE)] if wanted else []
    measured = {figures.name: figures for figures in result.evaluations}
    return [judge_paired(wanted, measured.get(wanted.name)) for wanted in gate.evaluations]
