"""The quantisation gate: does the engine compute what the trainer computed? Called by ``verdict``."""

from __future__ import annotations

import math

from prodrl.config.results import AgreementFigures
from prodrl_operator.api.judgement import Judgement
from prodrl_operator.api.run import Agreement
from prodrl_operator.names import Reason, Verdict


def judge_agreement(limits: Agreement, figures: AgreementFigures | None) -> Judgement:
    """|log p_trainer - log p_engine| per token, its mean and tail, against limits and against stable's figure."""
    if figures is None:
        return _error("the gate measured no agreement")
    if figures.samples == 0 or figures.tokens == 0:
        return Judgement(
            Verdict.INCONCLUSIVE, f"agreement: {figures.samples} samples, {figures.tokens} tokens", Reason.NO_DATA
        )
    if not _is_magnitude(figures.mean_abs) or not _is_magnitude(figures.p99_abs):
        return _error(f"agreement: mean {figures.mean_abs} and p99 {figures.p99_abs} must be finite and not negative")
    mean_limit = float(limits.max_mean_abs_logprob_diff)
    if figures.mean_abs > mean_limit:
        return _fail(f"mean |logprob difference| {figures.mean_abs:.4g} is above {mean_limit:g}")
    if limits.max_p99_abs_logprob_diff is not None and figures.p99_abs > float(limits.max_p99_abs_logprob_diff):
        return _fail(f"p99 |logprob difference| {figures.p99_abs:.4g} is above {limits.max_p99_abs_logprob_diff}")
    return _judge_ratio(limits, figures)


def _judge_ratio(limits: Agreement, figures: AgreementFigures) -> Judgement:
    passed = Judgement(Verdict.PASS, f"agreement: mean {figures.mean_abs:.4g}", Reason.GATE_PASSED)
    if limits.max_ratio_to_stable is None or figures.stable_mean_abs is None:
        return passed
    if not _is_magnitude(figures.stable_mean_abs):
        return _error(f"agreement: stable's mean must be finite and not negative, got {figures.stable_mean_abs}")
    # A product, not a quotient: stable may agree exactly.
    if figures.mean_abs > float(limits.max_ratio_to_stable) * figures.stable_mean_abs:
        return _fail(
            f"mean |logprob difference| {figures.mean_abs:.4g} is more than {limits.max_ratio_to_stable} times "
            f"stable's {figures.stable_mean_abs:.4g}"
        )
    return passed


def _is_magnitude(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _error(message: str) -> Judgement:
    return Judgement(Verdict.ERROR, message, Reason.INVALID_DATA)


def _fail(message: str) -> Judgement:
    return Judgement(Verdict.FAIL, f"agreement: {message}", Reason.GATE_BLOCKED)
