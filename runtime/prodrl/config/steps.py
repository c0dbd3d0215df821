"""Configurations of a round's steps. Written by ``prodrl_operator.builders``; one class a Job.

All numbers here are already numbers: the decimal strings of the CRD are parsed by the operator.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prodrl.config.common import Digest, PolicyRef, StoreConfig
from prodrl.config.model import Config


class FetchConfig(Config):
    """Copy one servable policy from the store to a folder, verifying every hash (init container of a server)."""

    store: StoreConfig
    policy: PolicyRef
    oldest_round: int = Field(default=0, ge=0)
    """Policies of earlier rounds that lie beside this one are removed: they are never served again."""


class CollectConfig(Config):
    """Join records and feedback of one policy into exactly ``steps * batch_size`` trajectories."""

    store: StoreConfig
    run: str
    round: int = Field(ge=1)
    """The round whose dataset is sealed."""
    source: PolicyRef
    """Only records of this digest are eligible."""
    steps: int = Field(ge=1)
    """S, optimizer steps of the round."""
    batch_size: int = Field(ge=1)
    """B, trajectories of one optimizer step."""
    mode: Literal["Sync", "AsyncOneRound"] = "Sync"
    """Sync: trajectories that began before ``collect_from_ms`` are excluded with the reason RecordedWhileTraining."""
    collect_from_ms: int = Field(default=0, ge=0)
    """Unix milliseconds at which the round began to collect."""
    reward_deadline_seconds: float = Field(gt=0)
    """A trajectory without a final reward this long after its last record is expired, never scored 0."""
    settle_seconds: float = Field(default=10.0, ge=0)
    """A scored trajectory is joined when all requests that the gateway saw are recorded, or excluded
    (RecordMissing) this long after its reward."""
    max_sequence_tokens: int = Field(default=32768, ge=2)
    """Trajectories with a longer sample are excluded (TooLong)."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Pause between two looks at the store."""
    spent: tuple[int, ...] = ()
    """Earlier rounds whose weights, checkpoints and policy may go: see :mod:`prodrl.store.retention`."""


class CorrectionConfig(Config):
    """Train-rollout mismatch correction (recipe R3, R4)."""

    type: Literal["ScoreCentering", "ImportanceSampling", "ReferenceModel", "None"] = "ScoreCentering"
    """ScoreCentering: s - E_mu[s], w=1. ImportanceSampling: TIS + PPO-clip. ReferenceModel: the same with the
    denominator computed by the trainer from upcast deployed weights. None: plain REINFORCE."""
    weighting: Literal["None", "TIS", "MIS"] = "None"
    """Weight f composed with score centering (paper eq. 14)."""
    cap: float = Field(default=2.0, gt=0)
    """C, upper cap of truncated weights."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO-clip: lower 1 - eps."""
    clip_high: float = Field(default=0.2, gt=0)
    """PPO-clip: upper 1 + eps."""
    band_low: float = Field(default=0.5, gt=0)
    """MIS: smallest ratio kept."""
    band_high: float = Field(default=5.0, gt=0)
    """MIS: largest ratio kept."""


class KlConfig(Config):
    """Sampled reverse KL to the round-start trainer policy (recipe R5)."""

    coefficient: float = Field(default=0.0, ge=0)
    """beta; 0 turns it off."""
    weight_cap: float = Field(default=5.0, gt=0)
    """Cap on w = p/mu; the capped fraction is logged."""


class OptimizerConfig(Config):
    """Adam(W); its state is carried over rounds."""

    learning_rate: float = Field(default=1e-6, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    maximise: bool = True
    """False descends the reward: a deliberately harmful trainer, for rehearsing a blocked round."""


class TrainConfig(Config):
    """One round of training: S optimizer steps on a sealed dataset."""

    store: StoreConfig
    run: str
    round: int = Field(ge=1)
    dataset_key: str
    """Folder of the sealed dataset, for example ``rounds/0003/dataset``."""
    dataset_digest: Digest
    """sha256 of the dataset's manifest; anything else is refused."""
    init_weights_key: str
    """Folder with Hugging Face weights, configuration and tokenizer: the base model's or the lineage's."""
    init_checkpoint_key: str | None = None
    """Trainer checkpoint (weights, Adam, step, RNG) of the lineage; None starts a cold optimizer."""
    reference_weights_key: str | None = None
    """For ReferenceModel: the deployed policy's files."""
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    seed: int = 0
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    baseline: Literal["MinibatchMean", "RoundMean", "LeaveOneOut", "EMA"] = "MinibatchMean"
    ema_decay: float = Field(default=0.8, ge=0, lt=1)
    """EMA baseline: share of the old value."""
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward pass; changes memory, never the result's meaning."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Loss tokens whose logits exist at once."""
    max_sequence_tokens: int = Field(default=32768, ge=2)
    """Longer samples are a data error: collect excludes them."""
    checkpoint_every_steps: int = Field(default=4, ge=1)
    """A complete step checkpoint is written every so many optimizer steps, and at the end."""
    max_skipped_steps: int = Field(default=2, ge=0)
    """Steps with non-finite gradients that may be skipped before the round fails with Numerics."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Computation type of the forward pass; master weights and Adam are always float32."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"


class ExportConfig(Config):
    """Quantise a copy of the weights, check it, and give it an identity."""

    store: StoreConfig
    run: str
    round: int = Field(ge=0)
    weights_key: str | None = None
    """Folder of the trainer's Hugging Face weights in the store; None exports ``model_uri``."""
    model_uri: str | None = None
    """The base model (round 0): ``file:///folder``, or ``store:KEY`` for a folder of the store."""
    quantization: Literal["NVFP4", "None"] = "NVFP4"
    dataset_key: str | None = None
    """Sealed dataset whose recorded prompts calibrate; None calibrates on generated token ids."""
    calibration_samples: int = Field(default=32, ge=1)
    engine_args: tuple[str, ...] = ()
    """Engine arguments that change numbers; part of the policy digest."""
    seed: int = 0


class EvaluationConfig(Config):
    """One held-out evaluation, candidate against stable, paired per item."""

    name: str
    suite: str
    """``module:function``, loaded by :mod:`prodrl.evaluate.suites`."""
    suite_key: str | None = None
    """Folder of the suite's items in the store."""
    metric: str
    """Name of the metric of the suite; a metric that the suite did not report is an Error, never a Pass."""
    min_items: int = Field(default=50, ge=1)
    max_items: int = Field(default=200, ge=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class EvaluateConfig(Config):
    """The gate's measurements: agreement and held-out evaluations. Verdicts are the operator's."""

    store: StoreConfig
    run: str
    round: int = Field(ge=0)
    candidate: PolicyRef
    candidate_url: str
    """Base URL of the candidate's server."""
    weights_key: str
    """The BF16/FP32 Hugging Face weights that the candidate was quantised from."""
    stable: PolicyRef | None = None
    """None in round 0: no comparison."""
    stable_url: str | None = None
    stable_weights_key: str | None = None
    served_name: str
    dataset_key: str | None = None
    """Recorded prompts for agreement; None uses generated token ids."""
    agreement_samples: int = Field(default=16, ge=1)
    """Recorded samples scored by the engine and by the trainer's weights."""
    evaluations: tuple[EvaluationConfig, ...] = ()
    concurrency: int = Field(default=8, ge=1)
    seed: int = 0
