"""What one optimizer step looked like, as numbers. Called by ``loop``; written as JSON lines and TensorBoard events.

Figures are means over loss tokens; names that end in ``_trajectory`` are the recipe's mean over trajectories of the
mean over tokens, as are ``loss``, ``pg_loss`` and ``kl``. Ratios are the raw ones, before any cap, in float64: clipped
weights would hide what these figures are for. Over a complete support p and p0 are renormalised like mu.

Means of |log ratio| fall when entropy falls, even at constant error: look at ``entropy`` beside them.

Shape legend: N = loss tokens, K = head entries.
"""

# ruff: noqa: N803, N806  # tensors carry their shape in their name
from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from prodrl.config import CorrectionConfig
from prodrl.store import layout
from prodrl.store.port import Store
from prodrl.train import losses
from prodrl.train.batch import MicroBatch
from prodrl.train.fsdp import Ranks
from prodrl.train.losses import Tokens

_MAX_LOG_RATIO = 60.0
"""exp(120) is still a float64."""
_PER_TRAJECTORY = ("engine_mismatch", "staleness", "net_mismatch", "entropy")
_WEIGHTED = ("loss", "pg_loss", "kl")

Figures = dict[str, float]


@torch.no_grad()
def token_figures(
    tokens: Tokens, entropy_N: Tensor, micro: MicroBatch, correction: CorrectionConfig, kl_cap: float
) -> dict[str, Tensor]:
    """Float64 figures of every loss token, to be averaged."""
    mass_N = losses.log_support_mass(tokens)
    p_N, start_N = (tokens.logp_N - mass_N).double(), (tokens.start_logp_N - tokens.start_log_mass_N).double()
    mu_N = tokens.log_mu_N.double()
    net_N, engine_N, stale_N = p_N - mu_N, start_N - mu_N, p_N - start_N
    ratio_N = net_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    stale_ratio_N = stale_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    positive_N = tokens.advantage_N > 0
    negative_N = tokens.advantage_N < 0
    return {
        "engine_mismatch": engine_N.abs(),
        "staleness": stale_N.abs(),
        "net_mismatch": net_N.abs(),
        "k1": -net_N,
        "k3": torch.expm1(net_N.clamp(max=_MAX_LOG_RATIO)) - net_N,
        "ratio_mean": ratio_N,
        "ratio_squared": ratio_N.square(),
        "ratio_outside_5x": ((ratio_N < 0.2) | (ratio_N > 5.0)).double(),
        "entropy": entropy_N.double(),
        "clip_fraction_positive": (positive_N & (stale_ratio_N > 1 + correction.clip_high)).double(),
        "clip_fraction_negative": (negative_N & (stale_ratio_N < 1 - correction.clip_low)).double(),
        "cap_fraction": _truncated(tokens, net_N, correction).double(),
        "kl_cap_fraction": ((tokens.logp_N - tokens.log_mu_N).double().exp() > kl_cap).double(),
        "outside_support_fraction": micro.outside_N.double(),
    } | _head_figures(tokens, correction)


def _truncated(tokens: Tokens, net_N: Tensor, correction: CorrectionConfig) -> Tensor:
    """Tokens whose weight was cut: TIS above the cap, MIS outside the band; without weights, what TIS would cut."""
    if correction.type in ("ImportanceSampling", "ReferenceModel"):
        if tokens.reference_logp_N is not None:
            net_N = (tokens.start_logp_N - tokens.reference_logp_N).double()
        else:
            net_N = (tokens.start_logp_N - tokens.start_log_mass_N - tokens.log_mu_N).double()
    ratio_N = net_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if correction.type == "ScoreCentering" and correction.weighting == "MIS":
        return (ratio_N < correction.band_low) | (ratio_N > correction.band_high)
    return ratio_N > correction.cap


def _head_figures(tokens: Tokens, correction: CorrectionConfig) -> dict[str, Tensor]:
    """Masses of the recorded head, the tail ratio, and the drift that centering removes (L1 of q - p on the head)."""
    mask_NK = tokens.head_mask_NK
    q_NK = torch.where(mask_NK, tokens.log_mu_head_NK, -torch.inf).double().exp()
    p_NK = torch.where(mask_NK, tokens.logp_head_NK, -torch.inf).double().exp()
    weighting = losses.Weighting(correction.weighting, correction.cap, correction.band_low, correction.band_high)
    c_NK, rho_N = losses.centering_coefficients(tokens, weighting)
    return {
        "head_mass_sampler": q_NK.sum(-1),
        "head_mass_trainer": p_NK.sum(-1),
        "drift_l1": (q_NK - p_NK).abs().sum(-1),
        "coefficient_l1": c_NK.double().abs().sum(-1),
        "tail_ratio": rho_N.double(),
    }


@dataclass
class Collector:
    """Sums over the micro-batches of one step and one rank; :meth:`reduce` makes them global."""

    tokens: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, micro: MicroBatch, figures: dict[str, Tensor], weighted: dict[str, Tensor]) -> None:
        """Count one micro-batch.

        Args:
            micro: Its weights are 1/(B*T_i); tokens of weight 0 only keep a rank in step.
            figures: Of :func:`token_figures`.
            weighted: Values that are reduced like the loss: ``loss``, ``pg_loss``, ``kl``.
        """
        real_N = (micro.weight_N > 0).double()
        weight_N = micro.weight_N.double()
        self.tokens += float(real_N.sum())
        for name, value_N in figures.items():
            self._sum(name, (value_N * real_N).sum())
        for name in _PER_TRAJECTORY:
            self._sum(f"{name}_trajectory", (figures[name] * weight_N).sum())
        for name, value_N in weighted.items():
            self._sum(name, (value_N.detach().double() * weight_N).sum())
        for name in ("tail_ratio", "net_mismatch"):
            seen = (figures[name] * real_N).max()
            self.maxima[f"{name}_max"] = torch.maximum(self.maxima.get(f"{name}_max", seen), seen)

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduce(self, ranks: Ranks) -> Figures:
        """Global means; every rank must call it."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        count = torch.tensor(self.tokens, dtype=torch.float64, device=ranks.device)
        total = ranks.sum(torch.stack([count] + [self.sums[name] for name in names])).tolist()
        highest = ranks.max(torch.stack([self.maxima[name] for name in tops])).tolist()
        tokens = total[0]
        figures = {
            name: value if name.endswith("_trajectory") or name in _WEIGHTED else value / tokens
            for name, value in zip(names, total[1:], strict=True)
        }
        squared = figures.pop("ratio_squared")
        figures["chi2"] = squared - 1.0
        figures["ess"] = figures["ratio_mean"] ** 2 / squared
        return figures | dict(zip(tops, highest, strict=True)) | {"tokens": tokens}


def reward_figures(rewards_B: Tensor, lengths_B: Sequence[int]) -> Figures:
    """Figures of the minibatch's trajectories, known to every rank."""
    return {
        "trajectories": float(len(lengths_B)),
        "reward_mean": float(rewards_B.mean()),
        "reward_std": float(rewards_B.std(correction=0)),
        "length_mean": sum(lengths_B) / len(lengths_B),
    }


def publish(store: Store, round_number: int, rows: Sequence[Figures], wall_times: Sequence[float]) -> None:
    """Replace the round's JSON lines and event file by those of all steps so far."""
    lines = "".join(_line(row, at) for row, at in zip(rows, wall_times, strict=True))
    store.put(layout.train_metrics(round_number), lines.encode())
    with tempfile.TemporaryDirectory(prefix="prodrl-events-") as folder:
        store.put_file(layout.train_events(round_number), _events(Path(folder), rows, wall_times))


def read(store: Store, round_number: int, steps: int) -> tuple[list[Figures], list[float]]:
    """What an earlier attempt wrote about the first ``steps`` steps; nothing if it is damaged: curves are no input."""
    try:
        lines = [json.loads(line) for line in store.get(layout.train_metrics(round_number)).splitlines()]
        times = [float(line.pop("time")) for line in lines]
        rows = [{name: math.nan if value is None else float(value) for name, value in line.items()} for line in lines]
    except (KeyError, ValueError, TypeError, AttributeError):
        return [], []
    kept = [(row, at) for row, at in zip(rows, times, strict=True) if row.get("step", steps + 1) <= steps]
    return [row for row, _ in kept], [at for _, at in kept]


def _line(row: Figures, at: float) -> str:
    """JSON has no NaN: what is not finite becomes null."""
    content = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(content | {"time": at}, allow_nan=False) + "\n"


def _events(folder: Path, rows: Sequence[Figures], wall_times: Sequence[float]) -> Path:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # slow to import, and only rank 0 writes

    writer = SummaryWriter(str(folder))
    for row, at in zip(rows, wall_times, strict=True):
        for name, value in row.items():
            if name not in ("step", "global_step"):
                writer.add_scalar(f"train/{name}", value, int(row["global_step"]), walltime=at)
    writer.close()
    (found,) = folder.glob("events.out.tfevents.*")
    return found
