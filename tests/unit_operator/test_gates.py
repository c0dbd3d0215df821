"""Verdicts: tables, and A/A simulations whose right answer is known beforehand."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl.config.results import AgreementFigures, PairedFigures
from prodrl_operator.api.judgement import Counters
from prodrl_operator.api.run import Agreement, Evaluation, Gate, Guards
from prodrl_operator.gates import judge_canary, judge_measurements
from prodrl_operator.gates.agreement import judge_agreement
from prodrl_operator.gates.canary import ALPHA, boundary
from prodrl_operator.gates.paired import judge_paired
from prodrl_operator.names import Reason, Verdict

PASS, FAIL, INCONCLUSIVE, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR


def figures(**changes: Any) -> AgreementFigures:
    base = {"samples": 16, "tokens": 100, "mean_abs": 0.01, "p99_abs": 0.1, "stable_mean_abs": 0.01}
    return AgreementFigures(**(base | changes))


def paired(low: float, high: float, **changes: Any) -> PairedFigures:
    base = {
        "name": "puzzles",
        "metric": "solved",
        "items": 200,
        "candidate_mean": 0.5,
        "stable_mean": 0.5,
        "difference": (low + high) / 2,
        "low": low,
        "high": high,
    }
    return PairedFigures(**(base | changes))


EVALUATION = Evaluation(name="puzzles", suite="builtin:x", metric="solved", margin="0.02", min_items=100)


@pytest.mark.parametrize(
    ("limits", "measured", "verdict"),
    [
        pytest.param({}, {}, PASS, id="within the mean"),
        pytest.param({}, {"mean_abs": 0.06}, FAIL, id="above the mean"),
        pytest.param({}, {"mean_abs": 0.05}, PASS, id="exactly at the mean"),
        pytest.param({"max_p99_abs_logprob_diff": "0.05"}, {}, FAIL, id="above the tail"),
        pytest.param({}, {"p99_abs": 99.0}, PASS, id="a tail that is not judged"),
        pytest.param({"max_ratio_to_stable": "1.5"}, {"mean_abs": 0.02}, FAIL, id="twice stable"),
        pytest.param({"max_ratio_to_stable": "1.5"}, {"mean_abs": 0.014}, PASS, id="1.4 times stable"),
        pytest.param({"max_ratio_to_stable": "1.5"}, {"mean_abs": 0.0, "stable_mean_abs": 0.0}, PASS, id="0 and 0"),
        pytest.param({"max_ratio_to_stable": "1.5"}, {"stable_mean_abs": None}, PASS, id="no stable to compare with"),
        pytest.param({"max_ratio_to_stable": "1.5"}, {"stable_mean_abs": math.nan}, ERROR, id="stable is NaN"),
        pytest.param({}, {"mean_abs": math.nan}, ERROR, id="NaN mean"),
        pytest.param({}, {"p99_abs": math.inf}, ERROR, id="infinite tail"),
        pytest.param({}, {"mean_abs": -0.1}, ERROR, id="a negative magnitude"),
        pytest.param({}, {"tokens": 0}, INCONCLUSIVE, id="no tokens"),
    ],
)
def test_agreement(limits: dict[str, str], measured: dict[str, Any], verdict: Verdict) -> None:
    assert judge_agreement(Agreement(**limits), figures(**measured)).verdict is verdict


def test_agreement_that_was_not_measured_is_an_error() -> None:
    assert judge_agreement(Agreement(), None).verdict is ERROR


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        pytest.param(paired(-0.01, 0.03), PASS, id="worse than the margin is excluded"),
        pytest.param(paired(0.01, 0.03), PASS, id="better"),
        pytest.param(paired(-0.09, -0.03), FAIL, id="worse by more than the margin"),
        pytest.param(paired(-0.05, 0.03), INCONCLUSIVE, id="straddles the margin"),
        pytest.param(paired(-0.02, 0.03), INCONCLUSIVE, id="touches the margin from above"),
        pytest.param(paired(-0.09, -0.02), INCONCLUSIVE, id="touches the margin from below"),
        pytest.param(paired(-0.01, 0.03, items=99), INCONCLUSIVE, id="too few items"),
        pytest.param(paired(-0.01, 0.03, items=0), INCONCLUSIVE, id="no items"),
        pytest.param(paired(-0.01, 0.03, candidate_mean=math.nan), ERROR, id="NaN mean"),
        pytest.param(paired(-0.01, math.inf, difference=0.0), ERROR, id="infinite interval"),
        pytest.param(paired(-0.01, 0.03, difference=0.5), ERROR, id="an interval without its difference"),
        pytest.param(paired(-0.01, 0.03, metric="other"), ERROR, id="another metric than the one asked for"),
        pytest.param(None, ERROR, id="an evaluation that was never written"),
    ],
)
def test_paired_evaluation(measured: PairedFigures | None, verdict: Verdict) -> None:
    assert judge_paired(EVALUATION, measured).verdict is verdict


def measurements(*evaluations: PairedFigures, **agreement: Any) -> str:
    return json.dumps(
        {"agreement": figures(**agreement).model_dump(), "evaluations": [item.model_dump() for item in evaluations]}
    )


GATE = Gate(evaluations=[EVALUATION])


def test_a_fail_outweighs_an_error_and_an_error_outweighs_too_little() -> None:
    few = paired(-0.01, 0.03, items=1)
    assert judge_measurements(GATE, measurements(few), is_first=False).verdict is INCONCLUSIVE
    assert judge_measurements(GATE, measurements(few, mean_abs=-1.0), is_first=False).verdict is ERROR
    worse = measurements(paired(-0.9, -0.8), mean_abs=-1.0)
    assert judge_measurements(GATE, worse, is_first=False).verdict is FAIL


def test_a_metric_that_was_never_written_is_an_error_and_no_success() -> None:
    """A gate that names something the Job did not report."""
    other = paired(0.1, 0.2, name="another")
    assert judge_measurements(GATE, measurements(other), is_first=False).verdict is ERROR
    assert judge_measurements(GATE, "{}", is_first=False).verdict is ERROR
    assert judge_measurements(GATE, "not JSON", is_first=False).verdict is ERROR


def test_a_gate_without_a_baseline_is_inconclusive_with_that_reason() -> None:
    judgement = judge_measurements(GATE, measurements(stable_mean_abs=None), is_first=False)
    assert (judgement.verdict, judgement.reason) == (INCONCLUSIVE, Reason.BASELINE_UNAVAILABLE)


def test_without_comparisons_asked_for_a_missing_baseline_does_not_matter() -> None:
    assert judge_measurements(Gate(), measurements(stable_mean_abs=None), is_first=False).is_pass


def test_round_0_is_judged_by_agreement_only() -> None:
    assert judge_measurements(GATE, measurements(stable_mean_abs=None), is_first=True).is_pass
    assert judge_measurements(GATE, measurements(mean_abs=1.0), is_first=True).verdict is FAIL


def traffic(requests: int, failed: int = 0, aborted: int = 0, rewards: tuple[float, ...] = ()) -> Counters:
    return Counters(
        requests=requests,
        failed=failed,
        aborted=aborted,
        trajectories=requests,
        feedback=len(rewards),
        reward_sum=sum(rewards),
        reward_squares=sum(r * r for r in rewards),
    )


@pytest.mark.parametrize(
    ("candidate", "stable", "verdict"),
    [
        pytest.param(traffic(0), traffic(100), PASS, id="no requests are no breach"),
        pytest.param(traffic(1, failed=1), traffic(100), PASS, id="one failure of one is no evidence"),
        pytest.param(traffic(20, failed=20), traffic(100), FAIL, id="everything fails"),
        pytest.param(traffic(20, failed=20), traffic(0), FAIL, id="everything fails and there is no baseline"),
        pytest.param(traffic(1000, failed=15), traffic(1000, failed=5), PASS, id="an increase within the limit"),
        pytest.param(traffic(1000, failed=200), traffic(1000, failed=5), FAIL, id="an increase far above it"),
        pytest.param(traffic(1000, failed=200), traffic(1000, failed=200), PASS, id="a fault of both"),
        pytest.param(traffic(500, aborted=400), traffic(500, aborted=50), FAIL, id="users walk away"),
    ],
)
def test_guards(candidate: Counters, stable: Counters, verdict: Verdict) -> None:
    assert judge_canary(Guards(), candidate, stable, is_final=False).verdict is verdict


def test_a_reward_drop_beyond_noise_fails_and_one_within_the_limit_does_not() -> None:
    guards = Guards(max_reward_drop="0.1")
    good, bad, fair = (1.0, 0.8) * 100, (0.3, 0.1) * 100, (0.9, 0.75) * 100
    assert judge_canary(guards, traffic(200, rewards=bad), traffic(200, rewards=good), is_final=False).verdict is FAIL
    assert judge_canary(guards, traffic(200, rewards=fair), traffic(200, rewards=good), is_final=False).is_pass


def test_rewards_that_never_came_are_inconclusive_at_the_end_and_silent_before() -> None:
    guards = Guards(max_reward_drop="0.1")
    sides = traffic(100), traffic(100, rewards=(1.0, 0.5) * 50)
    assert judge_canary(guards, *sides, is_final=False).is_pass
    assert judge_canary(guards, *sides, is_final=True).reason is Reason.NO_DATA
    assert judge_canary(guards, *reversed(sides), is_final=True).reason is Reason.BASELINE_UNAVAILABLE


def test_unscored_trajectories_are_judged_at_the_end_only() -> None:
    guards = Guards(max_unscored_rate_increase="0.1")
    sides = traffic(200), traffic(200, rewards=(1.0,) * 190)
    assert judge_canary(guards, *sides, is_final=False).is_pass
    assert judge_canary(guards, *sides, is_final=True).verdict is FAIL


def test_the_boundary_is_that_of_the_paper() -> None:
    """Equation of the asymptotic confidence sequence, written out with its own symbols."""
    rho_squared = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / 100
    for t in (1, 10, 100, 10_000):
        scaled = t * rho_squared
        radius = math.sqrt(2 * (scaled + 1) / (t**2 * rho_squared) * math.log(math.sqrt(scaled + 1) / ALPHA))
        assert boundary(t) == pytest.approx(radius * math.sqrt(t))


@pytest.mark.parametrize("base", [0.01, 0.1, 0.4])
def test_equal_policies_are_hardly_ever_blocked_however_often_they_are_looked_at(base: float) -> None:
    """A/A: the same error rate on both sides, a limit of zero, a look after every ten requests."""
    rng = random.Random(7)
    guards = Guards(max_error_rate_increase="0", max_abort_rate_increase="1")
    runs, blocked = 300, 0
    for _ in range(runs):
        bad = stable_bad = 0
        for count in range(10, 601, 10):
            bad += sum(rng.random() < base for _ in range(10))
            stable_bad += sum(rng.random() < base for _ in range(10))
            if judge_canary(guards, traffic(count, bad), traffic(count, stable_bad), is_final=False).verdict is FAIL:
                blocked += 1
                break
    # ALPHA is 1 %: 9 of 300 would have a probability of less than 0.2 %.
    assert blocked <= 8


def test_a_worse_policy_is_blocked_within_its_canary() -> None:
    """A/B: 2 % against 20 % of failed requests are seen within 300 requests, almost always."""
    rng = random.Random(8)
    caught = 0
    for _ in range(100):
        bad = sum(rng.random() < 0.20 for _ in range(300))
        stable_bad = sum(rng.random() < 0.02 for _ in range(300))
        verdict = judge_canary(Guards(), traffic(300, bad), traffic(300, stable_bad), is_final=False).verdict
        caught += verdict is FAIL
    assert caught >= 95


@given(
    st.tuples(st.integers(0, 500), st.integers(0, 500)),
    st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_guards_never_pass_judgement_on_less_than_they_are_given(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Whatever the counters: a candidate that fails no more often than stable is never blocked for failures."""
    candidate, stable = traffic(sum(a), failed=a[0]), traffic(sum(b), failed=b[0])
    verdict = judge_canary(Guards(), candidate, stable, is_final=True).verdict
    if stable.requests and candidate.failed * stable.requests <= stable.failed * candidate.requests:
        assert verdict is PASS


def test_counters_survive_the_status() -> None:
    counters = traffic(7, failed=2, rewards=(0.25, -1.5))
    assert Counters.from_status(counters.to_status()) == counters
