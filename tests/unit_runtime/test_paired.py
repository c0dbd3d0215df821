"""Intervals of paired differences: known answers, exact coverage, and how often an A/A comparison alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prodrl.errors import DataError
from prodrl.evaluate.paired import difference


def outcomes(both: int, candidate_only: int, stable_only: int, neither: int) -> tuple[list[float], list[float]]:
    ours = [1.0] * (both + candidate_only) + [0.0] * (stable_only + neither)
    theirs = [1.0] * both + [0.0] * candidate_only + [1.0] * stable_only + [0.0] * neither
    return ours, theirs


def test_binary_interval_worked_by_hand():
    """21 children before and after (1 both, 1 only after, 7 only before, 12 neither).

    p = 2/23, q = 8/23: difference -6/23 = -0.260870; variance (10/23 - 36/529) / 23 = 194/12167;
    1.959964 * 0.1262726 = 0.2474898.
    """
    found = difference(*outcomes(1, 1, 7, 12), 0.95)
    assert found.difference == pytest.approx(-6 / 21)
    assert (found.candidate_mean, found.stable_mean) == (pytest.approx(2 / 21), pytest.approx(8 / 21))
    assert (found.low, found.high) == (pytest.approx(-0.508359, abs=1e-6), pytest.approx(-0.013380, abs=1e-6))


def test_interval_mirrors_when_the_sides_change_places():
    there, back = difference(*outcomes(5, 3, 9, 40), 0.9), difference(*outcomes(5, 9, 3, 40), 0.9)
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


@pytest.mark.parametrize("num", [50, 200])
@pytest.mark.parametrize(
    ("won", "lost"), [(0.0, 0.0), (0.01, 0.01), (0.02, 0.0), (0.05, 0.05), (0.15, 0.05), (0.3, 0.3)]
)
def test_binary_interval_covers_the_true_difference(num, won, lost):
    """Exact: the sum over all discordant counts of their multinomial probability."""
    covered = 0.0
    for b in range(num + 1):
        for c in range(num + 1 - b):
            chance = stats.multinomial.pmf([b, c, num - b - c], num, [won, lost, 1 - won - lost])
            if chance < 1e-9:
                continue
            found = difference(*outcomes(0, b, c, num - b - c), 0.95)
            covered += chance * (found.low <= won - lost <= found.high)
    assert covered >= 0.94


def test_nobody_differs_is_not_certainty():
    found = difference(*outcomes(20, 0, 0, 30), 0.95)
    assert found.difference == 0.0
    assert found.high == pytest.approx(1.959964 * math.sqrt(2) / 52, rel=1e-6)
    assert found.low == pytest.approx(-found.high)
    assert difference(*outcomes(0, 0, 0, 2000), 0.95).high < 0.002


def test_everybody_differs_stays_within_bounds():
    found = difference(*outcomes(0, 50, 0, 0), 0.95)
    assert found.difference == 1.0
    assert 0.8 < found.low < found.high <= 1.0


def test_graded_outcomes_give_scipys_paired_t_interval():
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(0.3, 1, 40), generator.normal(0, 1, 40)
    found = difference(ours.tolist(), theirs.tolist(), 0.9)
    interval = stats.ttest_1samp(ours - theirs, 0.0).confidence_interval(0.9)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_graded_outcomes_that_all_differ_alike_keep_a_width():
    found = difference([0.5] * 30, [0.25] * 30, 0.95)
    assert found.difference == pytest.approx(0.25)
    assert found.low < 0.25 < found.high
    assert found.low == pytest.approx(0.5 - found.high)
    one = difference([0.5], [0.25], 0.95)
    assert one.low < 0 < one.high


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_false_alarms_of_an_a_a_comparison(confidence, rate):
    """The same policy on both sides, sampling on: the interval may leave out 0 in at most alpha of the gates."""
    generator = np.random.default_rng(7)
    gates, items = 600, 100
    # Items differ in difficulty, so that outcomes are correlated, as they are on a suite.
    chances = generator.beta(rate * 4, (1 - rate) * 4, (gates, items))
    ours = (generator.random((gates, items)) < chances).astype(float)
    theirs = (generator.random((gates, items)) < chances).astype(float)
    alarms = 0
    for gate in range(gates):
        found = difference(ours[gate].tolist(), theirs[gate].tolist(), confidence)
        alarms += not found.low <= 0.0 <= found.high
    alpha = 1 - confidence
    assert alarms / gates <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / gates)


def test_real_regression_is_seen():
    found = difference(*outcomes(60, 4, 36, 100), 0.95)
    assert found.high < 0


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([float("nan")], [1.0]), ([1.0], [float("inf")])])
def test_no_figure_without_finite_outcomes(ours, theirs):
    with pytest.raises(DataError):
        difference(ours, theirs, 0.95)
