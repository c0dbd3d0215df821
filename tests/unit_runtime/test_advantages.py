"""Baselines: the numbers are in test_oracles; here is what has a state or an edge."""

from __future__ import annotations

import pytest
import torch

from prodrl.errors import UsageError
from prodrl.train.advantages import Baseline


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_round_mean_is_the_same_for_every_minibatch() -> None:
    baseline = Baseline("RoundMean", round_mean=0.25)
    assert baseline.advantages(rewards(1, 0)).tolist() == [0.75, -0.25]
    baseline.observe(rewards(1, 0))
    assert baseline.advantages(rewards(0, 0)).tolist() == [-0.25, -0.25]


def test_ema_uses_the_value_from_before_the_minibatch() -> None:
    baseline = Baseline("EMA", round_mean=9.0, ema_decay=0.8)
    assert baseline.advantages(rewards(1, 0)).tolist() == [0.5, -0.5]  # the first is its own baseline
    baseline.observe(rewards(1, 0))
    assert baseline.advantages(rewards(1, 1)).tolist() == [0.5, 0.5]
    baseline.observe(rewards(1, 1))
    assert baseline.ema == pytest.approx(0.8 * 0.5 + 0.2 * 1.0)


def test_minibatch_mean_centres_trajectories_not_tokens() -> None:
    assert Baseline("MinibatchMean", 0.0).advantages(rewards(1, 0, 0, 0)).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_needs_another() -> None:
    with pytest.raises(UsageError, match="two trajectories"):
        Baseline("LeaveOneOut", 0.0).advantages(rewards(1))


def test_a_constant_batch_has_no_advantage() -> None:
    for kind in ("MinibatchMean", "LeaveOneOut"):
        assert Baseline(kind, 0.0).advantages(rewards(0.3, 0.3, 0.3)).abs().max() < 1e-15  # type: ignore[arg-type]
