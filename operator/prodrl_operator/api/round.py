"""ProdRLRound: one turn of the loop as an object. Created and written by the operator only.

The spec is frozen at creation (the run's spec of that moment), so that edits of the run take effect at the next
round. The source of ``crds/prodrlrounds.yaml``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from prodrl_operator.api.model import (
    Api,
    Condition,
    Count,
    DecimalString,
    Key,
    Message,
    RoundNumber,
    Status,
    Tally,
    Text,
    Timestamp,
    Word,
)
from prodrl_operator.api.run import RunSpec


class SourcePolicy(Api):
    """The policy whose records are trained on."""

    round: RoundNumber
    """The round that made it."""
    digest: Word
    """Its digest."""


class RoundSpec(Api):
    """Frozen at creation."""

    run: Annotated[str, Field(max_length=40)]
    """Name of the ProdRLRun."""
    number: RoundNumber
    """0 deploys the base model."""
    source: SourcePolicy | None = None
    """Whose records; absent in round 0."""
    lineage_round: RoundNumber = 0
    """The round whose trainer checkpoint this one starts from; 0: base weights, cold optimizer."""
    settings: RunSpec
    """The run's spec when the round began."""


class Dataset(Status):
    """The sealed dataset."""

    key: Text
    """Folder in the store."""
    digest: Word
    """sha256 of its manifest."""
    trajectories: Count
    """S*B."""
    tokens: Count
    """Model-generated tokens."""
    reward_mean: DecimalString
    """Mean reward."""
    excluded: Annotated[dict[Key, Count], Field(max_length=64)] = Field(default_factory=dict)
    """Reason -> trajectories."""


class Checkpoint(Status):
    """What the trainer left."""

    key: Text
    """Trainer checkpoint in the store."""
    weights_key: Text
    """Hugging Face weights in the store."""
    weights_digest: Word
    """sha256 of the weights' manifest."""
    steps: Count
    """Optimizer steps made."""
    skipped_steps: Count = 0
    """Steps skipped for non-finite gradients."""
    figures: Annotated[dict[Key, DecimalString], Field(max_length=64)] = Field(default_factory=dict)
    """Diagnostics of the last step."""


class Policy(Status):
    """The exported policy."""

    key: Text
    """Folder in the store."""
    digest: Word
    """Its digest."""
    size_bytes: Count
    """Size of its files."""
    weights_key: Text = ""
    """The unquantised weights it was made from."""


class Attempt(Status):
    """How often a step was tried."""

    step: Word
    """Collecting, Training, Exporting, CanaryDeploying or Gating."""
    number: Count = 0
    """Index of the present attempt; part of the child's name."""
    failures: Count = 0
    """Attempts that failed and counted."""
    disruptions: Count = 0
    """Attempts that were preempted; they do not count against the limit."""


class CanaryProgress(Status):
    """Where the canary stands."""

    index: Count = 0
    """Index of the current canary step."""
    started: Timestamp | None = None
    """When it began."""
    baseline_candidate: Annotated[dict[Key, Tally], Field(max_length=16)] = Field(default_factory=dict)
    """The candidate's counters when the step began; rewards in millionths (the API has no floats)."""
    baseline_stable: Annotated[dict[Key, Tally], Field(max_length=16)] = Field(default_factory=dict)
    """Stable's counters when the step began."""


class GateStatus(Status):
    """What the gate measured and said."""

    measurements: Annotated[str, Field(max_length=8192)] | None = None
    """JSON of the evaluation Job's result."""
    canary: CanaryProgress | None = None
    """Progress on traffic."""
    verdict: Word | None = None
    """Written once."""
    message: Message = ""
    """Why."""
    digest: Word | None = None
    """The policy judged."""


class StepTime(Status):
    """How long a step took."""

    step: Word
    """Its name."""
    started: Timestamp
    """Begin."""
    finished: Timestamp | None = None
    """End."""


class RoundStatus(Status):
    """What the operator says."""

    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """Progressing, Succeeded."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    step: Word = "Pending"
    """Where the round stands: see ``names.Step``."""
    since: Timestamp | None = None
    """Since when."""
    reason: Word | None = None
    """Why it ended, or why it waits."""
    message: Message = ""
    """For people."""
    collect_from: Timestamp | None = None
    """Sync: trajectories that began before are not trained on."""
    lineage_round: RoundNumber | None = None
    """The round whose trainer checkpoint is the start, settled when Training begins: AsyncOneRound creates a round
    before its predecessor has ended."""
    dataset: Dataset | None = None
    """After Collecting."""
    checkpoint: Checkpoint | None = None
    """After Training."""
    policy: Policy | None = None
    """After Exporting."""
    gate: GateStatus = GateStatus()
    """From Gating on."""
    attempts: Annotated[list[Attempt], Field(max_length=8)] = Field(default_factory=list)
    """Per step."""
    times: Annotated[list[StepTime], Field(max_length=16)] = Field(default_factory=list)
    """Per step."""
    paused_since: Timestamp | None = None
    """When the run was suspended during this step: deadlines do not run."""
    unready_since: Timestamp | None = None
    """Since when a candidate that was ready is not."""


class Round(Api):
    """A whole ProdRLRound object as read; metadata stays a plain dict."""

    metadata: dict[str, Any]
    """As in the API."""
    spec: RoundSpec
    """Frozen."""
    status: RoundStatus = RoundStatus()
    """What the operator says."""

    @property
    def is_going(self) -> bool:
        """Being deleted."""
        return "deletionTimestamp" in self.metadata
