"""Guards on canary traffic, judged at every look. Called by ``observing``.

Looking again and again at a test made for one look finds "significant" differences in equal policies sooner or later.
So the boundary is an always-valid one: the asymptotic confidence sequence of Waudby-Smith et al. (2021, Theorem 2.2)
for a mean, applied to the difference of two independent means. The chance that a guard *ever* fires on a difference
that is within its limit is about ALPHA, however often it is judged. Rates are smoothed by one success and one failure,
so that three failures of three requests are suspicious and thirty of thirty are a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prodrl_operator.api.judgement import Counters, Judgement
from prodrl_operator.api.run import Guards
from prodrl_operator.names import Reason, Verdict

ALPHA = 0.01
TUNED_FOR = 100
"""The number of observations at which the sequence is narrowest."""
MIN_REWARDS = 5
"""Rewards of each side below which a variance says nothing."""


@dataclass(frozen=True)
class Sample:
    """n observations of one side."""

    count: int
    mean: float
    variance: float


def judge_canary(guards: Guards, candidate: Counters, stable: Counters, *, is_final: bool) -> Judgement:
    """Whether the candidate treats users worse than stable beyond the guards' limits.

    Args:
        guards: The limits.
        candidate: What came to the candidate since the canary step began.
        stable: The same of stable.
        is_final: The step has its trajectories. Only then unscored trajectories count (feedback comes late), and only
            then a comparison without a baseline is Inconclusive.
    """
    breaches = [
        _excess("failed requests", candidate.failed, stable.failed, candidate, stable, guards.max_error_rate_increase),
        _excess(
            "aborted requests", candidate.aborted, stable.aborted, candidate, stable, guards.max_abort_rate_increase
        ),
    ]
    if guards.max_reward_drop is not None:
        breaches.append(_reward_drop(candidate, stable, float(guards.max_reward_drop)))
    if is_final and guards.max_unscored_rate_increase is not None:
        breaches.append(_unscored(candidate, stable, float(guards.max_unscored_rate_increase)))
    found = [breach for breach in breaches if breach is not None]
    if found:
        return Judgement(Verdict.FAIL, f"canary traffic: {'; '.join(found)}", Reason.GATE_BLOCKED)
    if is_final and guards.max_reward_drop is not None and min(candidate.feedback, stable.feedback) < MIN_REWARDS:
        message = (
            f"canary traffic: {candidate.feedback} rewards on the candidate and {stable.feedback} on stable are too "
            f"few to judge maxRewardDrop"
        )
        is_baseline = stable.feedback < MIN_REWARDS
        return Judgement(Verdict.INCONCLUSIVE, message, Reason.BASELINE_UNAVAILABLE if is_baseline else Reason.NO_DATA)
    return Judgement(Verdict.PASS, "canary traffic: within its guards", Reason.GATE_PASSED)


def exceeds(worse: Sample, better: Sample, limit: float) -> bool:
    """Whether mean(worse) - mean(better) is above ``limit``, at any look."""
    if worse.count == 0:
        return False
    spread = worse.variance / worse.count + (better.variance / better.count if better.count else 0.0)
    return worse.mean - better.mean - limit > boundary(worse.count) * math.sqrt(spread)


def boundary(count: int) -> float:
    """Half width of the confidence sequence, in standard errors, after ``count`` observations."""
    log = -2 * math.log(ALPHA)
    intrinsic = count * (log + math.log(log) + 1) / TUNED_FOR
    return math.sqrt(2 * (intrinsic + 1) / intrinsic * math.log(math.sqrt(intrinsic + 1) / ALPHA))


def _rate(bad: int, count: int) -> Sample:
    if count <= 0:
        # Without a baseline, stable is taken to be faultless: the limit itself is what the candidate may do.
        return Sample(0, 0.0, 0.0)
    smoothed = (bad + 1) / (count + 2)
    return Sample(count, bad / count, smoothed * (1 - smoothed))


def _excess(what: str, bad: int, stable_bad: int, candidate: Counters, stable: Counters, limit: str) -> str | None:
    worse, better = _rate(bad, candidate.requests), _rate(stable_bad, stable.requests)
    if not exceeds(worse, better, float(limit)):
        return None
    return (
        f"{what}: {bad} of {candidate.requests} on the candidate, {stable_bad} of {stable.requests} on stable, "
        f"an increase above {limit}"
    )


def _unscored(candidate: Counters, stable: Counters, limit: float) -> str | None:
    missing = max(candidate.trajectories - candidate.feedback, 0)
    stable_missing = max(stable.trajectories - stable.feedback, 0)
    worse, better = _rate(missing, candidate.trajectories), _rate(stable_missing, stable.trajectories)
    if not exceeds(worse, better, limit):
        return None
    return (
        f"unscored trajectories: {missing} of {candidate.trajectories} on the candidate, "
        f"{stable_missing} of {stable.trajectories} on stable, an increase above {limit:g}"
    )


def _reward_drop(candidate: Counters, stable: Counters, limit: float) -> str | None:
    worse, better = _rewards(candidate), _rewards(stable)
    if min(worse.count, better.count) < MIN_REWARDS:
        return None
    # A drop is an increase of the negated reward.
    if not exceeds(_negated(worse), _negated(better), limit):
        return None
    return f"mean reward {worse.mean:.4g} on the candidate, {better.mean:.4g} on stable, a drop above {limit:g}"


def _rewards(counters: Counters) -> Sample:
    count = counters.feedback
    if count <= 0:
        return Sample(0, 0.0, 0.0)
    mean = counters.reward_sum / count
    return Sample(count, mean, max(counters.reward_squares / count - mean * mean, 0.0) * count / max(count - 1, 1))


def _negated(sample: Sample) -> Sample:
    return Sample(sample.count, -sample.mean, sample.variance)
