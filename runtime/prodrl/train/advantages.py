"""Advantages: reward minus a baseline, centred over the whole minibatch before it is shared among ranks.

Pure functions of the rewards of B trajectories (one reward each, however many samples or tokens they have); called by
``loop``. No division by a standard deviation: the recipe has none, and it explodes on near-constant batches.

Shape legend: B = trajectories of one optimizer step.
"""

# ruff: noqa: N803  # tensors carry their shape in their name
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prodrl.errors import UsageError


def minibatch_mean(rewards_B: Tensor) -> Tensor:
    """A_i = R_i - mean(R), R_i included: its expected gradient is (1 - 1/B) of the exact one."""
    return rewards_B - rewards_B.mean()


def leave_one_out(rewards_B: Tensor) -> Tensor:
    """A_i = R_i - mean of the others = B/(B-1) (R_i - mean(R)).

    Raises:
        UsageError: There is no other.
    """
    size = rewards_B.numel()
    if size < 2:
        raise UsageError(f"Baseline LeaveOneOut: needs two trajectories a step, got {size}; raise batchSize")
    return (rewards_B - rewards_B.mean()) * (size / (size - 1))


@dataclass
class Baseline:
    """The configured baseline; EMA is the only one with a state, which checkpoints carry."""

    kind: Literal["MinibatchMean", "RoundMean", "LeaveOneOut", "EMA"]
    round_mean: float
    """Mean reward over all S*B trajectories."""
    ema_decay: float = 0.8
    """Share of the old value."""
    ema: float | None = None
    """None before the first minibatch of a lineage, which is its own baseline."""

    def advantages(self, rewards_B: Tensor) -> Tensor:
        """Advantages of one minibatch; EMA uses the value from before it."""
        if self.kind == "MinibatchMean":
            return minibatch_mean(rewards_B)
        if self.kind == "LeaveOneOut":
            return leave_one_out(rewards_B)
        if self.kind == "RoundMean":
            return rewards_B - self.round_mean
        return rewards_B - (float(rewards_B.mean()) if self.ema is None else self.ema)

    def observe(self, rewards_B: Tensor) -> None:
        """Let the moving average see a minibatch, after its advantages were taken."""
        mean = float(rewards_B.to(torch.float64).mean())
        self.ema = mean if self.ema is None else self.ema_decay * self.ema + (1 - self.ema_decay) * mean
