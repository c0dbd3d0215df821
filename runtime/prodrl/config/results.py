"""What a step reports through its termination message: small JSON, at most 4096 bytes.

Written by ``prodrl.cli``; parsed by ``prodrl_operator.rounds``. A step that failed writes :class:`Failure`.
"""

from __future__ import annotations

from pydantic import Field

from prodrl.config.common import Digest
from prodrl.config.model import Config


class Failure(Config):
    """Why a process ended with an exit code other than 0."""

    reason: str
    """CamelCase, from ``prodrl.errors``."""
    message: str = Field(max_length=2000)
    """The thing, the value and the remedy."""


class CollectResult(Config):
    """A sealed and claimed dataset."""

    dataset_key: str
    dataset_digest: Digest
    trajectories: int
    """Always ``steps * batch_size``."""
    tokens: int
    """Model-generated tokens over all trajectories."""
    reward_mean: float
    excluded: dict[str, int] = Field(default_factory=dict)
    """Reason -> trajectories seen and not taken."""
    retired: int = 0
    """Older rounds whose weights, checkpoints and policy were deleted on the way."""
    retention_error: str = Field(default="", max_length=500)
    """Why they could not be; the round does not fail for it."""


class TrainResult(Config):
    """A finished round of training."""

    checkpoint_key: str
    """Trainer checkpoint: weights, Adam, step counter, RNG."""
    weights_key: str
    """Plain Hugging Face weights, for export."""
    weights_digest: Digest
    """sha256 of the weights' manifest."""
    steps: int
    """Optimizer steps made (S, less the skipped)."""
    skipped_steps: int = 0
    trajectories: int = 0
    global_step: int = 0
    """Steps over the whole lineage."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Last step's diagnostics, for example ``engine_mismatch``, ``staleness``, ``net_mismatch``, ``kl``."""


class ExportResult(Config):
    """A servable policy."""

    policy_key: str
    policy_digest: Digest
    size_bytes: int
    quantization: str
    weights_key: str = ""
    """The unquantised Hugging Face weights it was made from (round 0 publishes the base model's)."""


class AgreementFigures(Config):
    """|log p_trainer - log p_engine| over recorded prompts, natural logs, per token."""

    samples: int
    tokens: int
    mean_abs: float
    p99_abs: float
    stable_mean_abs: float | None = None
    """The same figure of the stable policy; None in round 0."""


class PairedFigures(Config):
    """One evaluation, candidate minus stable per item."""

    name: str
    metric: str
    items: int
    """Items answered by both; a failed session counts as 0, never as missing."""
    candidate_mean: float
    stable_mean: float
    difference: float
    low: float
    """Lower end of the confidence interval of the difference."""
    high: float
    candidate_failures: int = 0
    """Sessions that ended in an error (scored 0)."""
    stable_failures: int = 0


class EvaluateResult(Config):
    """The gate's measurements."""

    agreement: AgreementFigures | None = None
    evaluations: tuple[PairedFigures, ...] = ()
