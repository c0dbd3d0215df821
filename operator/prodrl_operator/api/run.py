"""ProdRLRun: what a user writes, and the status the operator writes. The source of ``crds/prodrlruns.yaml``.

Defaults live here and in the CRD alike; the operator never writes ``spec``. Cross-field rules are CEL, declared in
``crd.py`` next to the schema they belong to, so that an API server refuses what this module would refuse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from prodrl_operator.api.model import (
    Api,
    Condition,
    Count,
    DecimalString,
    LocalRef,
    Message,
    Name,
    RoundNumber,
    Status,
    Text,
    Timestamp,
    Word,
    worded,
)
from prodrl_operator.api.workloads import CachingPodSettings, PodSettings, StepSettings

PLACE = "^(file:///|s3://).+"
Uri = Annotated[str, StringConstraints(pattern=PLACE, max_length=1024)]
"""A folder that the run's pods can reach; ``rules`` has what a bucket and a path may be."""
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]


class Rounds(Api):
    """How many rounds, and how large."""

    max: Annotated[int, Field(ge=1, le=100_000)] = 50
    """The run is Completed after this many training rounds."""
    steps: Annotated[int, Field(ge=1, le=10_000)] = 16
    """S: optimizer steps of a round."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """B: trajectories of one optimizer step."""
    max_consecutive_blocked: Annotated[int, Field(ge=1, le=1000)] = 3
    """The run is Stalled after so many blocked rounds in a row, whatever ``onBlocked`` says."""
    history_limit: Annotated[int, Field(ge=1, le=1000)] = 20
    """Finished ProdRLRound objects that are kept."""


class Model(Api):
    """The base model. Immutable."""

    uri: Uri
    """Hugging Face folder: configuration, safetensors, tokenizer and chat template."""
    served_name: Annotated[
        str,
        StringConstraints(pattern="^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$", max_length=253),
        worded(
            "must be letters, digits and . _ : / @ + -, beginning with a letter or digit: users and engines take it"
        ),
    ]
    """The model name that users send."""


class Retention(Api):
    """How many finished rounds keep what is as large as the model: policy, weights and checkpoints.

    What anything refers to is never deleted: stable, previous, what serves or is in work, and where training goes on.
    Records, rewards, datasets, metrics and evaluations stay. Of the last 200 rounds; one that is older was kept till
    then.
    """

    promoted: Annotated[int, Field(ge=2, le=1000)] = 5
    """Promoted rounds."""
    blocked: Annotated[int, Field(ge=0, le=1000)] = 1
    """Rounds that ended in any other way."""


class Storage(Api):
    """Where records, datasets, checkpoints and policies lie. ``uri`` is immutable."""

    uri: Uri
    """``s3://bucket/prefix`` or, on one machine, ``file:///folder``."""
    endpoint_url: Text | None = None
    """S3 endpoint; absent: AWS."""
    region: Word | None = None
    """S3 region."""
    secret_ref: LocalRef | None = None
    """Secret with the keys ``accessKeyId`` and ``secretAccessKey``."""
    retention: Retention = Retention()
    """What is kept."""


class Serving(CachingPodSettings):
    """The vLLM Deployments."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Servers of the stable policy; a candidate gets as many."""
    args: Annotated[list[Text], Field(max_length=128)] = Field(default_factory=list)
    """Further engine arguments. All of them are part of the policy digest. The operator's own come last, and win."""
    start_deadline_seconds: Seconds = 1800
    """A server that is not ready by then fails the round."""
    termination_grace_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How long a server that is told to stop may finish its requests and bring its records to the store."""
    surge: Literal["Surge", "Replace"] = "Surge"
    """Replace: stable gives its hardware to the candidate (users wait); for clusters without a spare GPU. It has it
    back while a person is awaited or the run is suspended."""
    drain_seconds: Annotated[int, Field(ge=0, le=86_400)] = 60
    """How long conversations of the replaced policy may go on."""


class SamplingPolicy(Api):
    """Sampling parameters that a request must have had to be trained on; absent: any."""

    temperature: DecimalString | None = None
    """Serving temperature."""
    top_p: DecimalString | None = None
    """Nucleus mass."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Tokens kept; 0: all."""


class Recording(Api):
    """What is recorded of every completion. Pinned per round."""

    metadata: Literal["ScoreCentering", "SampledLogprob"] = "ScoreCentering"
    """ScoreCentering records the top-K head of the sampling distribution too, from the next promoted policy on: only
    then can training.correction.type be ScoreCentering."""
    top_logprobs: Annotated[int, Field(ge=0, le=512)] = 20
    """K, the size of the head."""
    reward_deadline_seconds: Seconds = 86_400
    """A trajectory without a reward by then is expired, never scored 0."""
    flush_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    """Age at which a shard of records is closed."""
    settle_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """How long after its reward a trajectory may wait for records that are still missing."""
    sampling_policy: SamplingPolicy = SamplingPolicy()
    """What is trainable."""


class Gateway(PodSettings):
    """The durable endpoint that users talk to."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Gateway pods."""
    api_keys_secret_ref: LocalRef | None = None
    """Secret with one key a customer."""
    authentication: Literal["ApiKeys", "Anonymous"] | None = None
    """Anonymous: no key is wanted, whoever reaches the gateway is served and may post rewards. It must be said where no
    Secret is named; a local run, which only this machine reaches, is Anonymous if nothing is said. Absent: ApiKeys."""


class Correction(Api):
    """Train-rollout mismatch correction."""

    type: Literal["ScoreCentering", "ImportanceSampling", "ReferenceModel", "None"] = "ScoreCentering"
    """Score centering; TIS + PPO-clip; the same with a denominator from a reference model; or nothing."""
    weighting: Literal["None", "TIS", "MIS"] = "None"
    """Weight composed with score centering."""
    cap: DecimalString = "2.0"
    """C: upper cap of truncated weights."""
    clip_low: DecimalString = "0.2"
    """PPO-clip, lower."""
    clip_high: DecimalString = "0.2"
    """PPO-clip, upper."""


class Kl(Api):
    """Reverse KL to the round-start trainer policy."""

    coefficient: DecimalString = "0"
    """beta; 0: off."""


class Optimizer(Api):
    """Adam, carried over rounds."""

    learning_rate: DecimalString = "1e-6"
    """Step size."""
    beta1: DecimalString = "0.9"
    """First moment."""
    beta2: DecimalString = "0.95"
    """Second moment."""
    weight_decay: DecimalString = "0"
    """Decoupled."""
    max_grad_norm: DecimalString = "1.0"
    """Global gradient clip."""
    maximise: bool = True
    """False descends the reward: a rehearsal of a harmful round, to see the gate block it."""


class Training(StepSettings):
    """The training Jobs."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Pods of the Indexed Job."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks a pod."""
    correction: Correction = Correction()
    """Mismatch correction."""
    kl: Kl = Kl()
    """KL penalty."""
    baseline: Literal["MinibatchMean", "RoundMean", "LeaveOneOut", "EMA"] = "MinibatchMean"
    """Advantage baseline."""
    optimizer: Optimizer = Optimizer()
    """Optimizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation type; master weights are float32."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 0
    """Seed of the shuffle and of everything random."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 16_384
    """Tokens of one forward pass."""
    max_sequence_tokens: Annotated[int, Field(ge=2, le=16_777_216)] = 32_768
    """Longer samples are excluded."""
    checkpoint_every_steps: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Step checkpoints."""
    backoff_limit: Annotated[int, Field(ge=0, le=100)] = 3
    """Further attempts of a step after failures that another attempt can cure."""
    start_deadline_seconds: Seconds = 1800
    """A Job whose pods do not run by then fails."""
    active_deadline_seconds: Seconds = 86_400
    """A Job that runs longer fails."""


class Export(StepSettings):
    """Quantisation."""

    quantization: Literal["NVFP4", "None"] = "NVFP4"
    """None serves bfloat16."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Recorded prompts used for calibration."""


class Agreement(Api):
    """The quantisation gate: |log p_trainer - log p_engine| over recorded prompts."""

    max_mean_abs_logprob_diff: DecimalString = "0.05"
    """Largest mean."""
    max_p99_abs_logprob_diff: DecimalString | None = None
    """Largest 99th percentile; absent: not judged."""
    max_ratio_to_stable: DecimalString | None = None
    """Largest ratio to the same figure of the stable policy; absent: not judged."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 16
    """Recorded samples that are scored."""


class Evaluation(Api):
    """A held-out evaluation, candidate against stable, paired per item."""

    name: Name
    """Name of the evaluation."""
    suite: Text
    """``module:function`` of the suite."""
    suite_uri: Annotated[str, StringConstraints(max_length=900)] | None = None
    """Folder of the suite's items: a key of the run's store, for example ``suites/puzzles``."""
    metric: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    """The metric judged; one that the suite does not report is an Error."""
    margin: DecimalString = "0.02"
    """The candidate may be worse by at most this (non-inferiority): the interval's lower end must be above -margin."""
    confidence: DecimalString = "0.95"
    """Of the interval."""
    min_items: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Fewer paired items are no data."""
    max_items: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Items played."""


class CanaryStep(Api):
    """A share of new conversations, until enough were seen."""

    weight: Annotated[int, Field(ge=1, le=99)]
    """Percent of new trajectories that begin on the candidate."""
    min_trajectories: Annotated[int, Field(ge=1, le=10_000_000)]
    """Trajectories the candidate must have served at this step."""
    deadline_seconds: Seconds = 3600
    """A step that does not see them by then is Inconclusive."""


class Guards(Api):
    """Limits on canary traffic, candidate against stable. Judged at every look, not only at the end."""

    max_error_rate_increase: DecimalString = "0.02"
    """Share of requests failed, candidate minus stable."""
    max_abort_rate_increase: DecimalString = "0.10"
    """Share of requests that users aborted."""
    max_unscored_rate_increase: DecimalString | None = None
    """Share of trajectories without feedback."""
    max_reward_drop: DecimalString | None = None
    """Mean reward, stable minus candidate, beyond sampling noise at the 99% level."""


class Canary(Api):
    """Real traffic before promotion."""

    steps: Annotated[list[CanaryStep], Field(max_length=20)] = Field(default_factory=list)
    """Weights must increase. Empty: no canary traffic."""
    guards: Guards = Guards()
    """Limits."""


class Gate(Api):
    """When a checkpoint may go live."""

    agreement: Agreement = Agreement()
    """Quantisation and engine."""
    evaluations: Annotated[list[Evaluation], Field(max_length=10)] = Field(default_factory=list)
    """Held-out suites: as many as the figures of one Job, which a pod's termination message carries, have room for."""
    canary: Canary = Canary()
    """Traffic."""
    on_inconclusive: Literal["Pause", "Block"] = "Pause"
    """What an Inconclusive verdict does."""
    approval: Literal["Automatic", "Required"] = "Automatic"
    """Required: a passing round waits for ``requests.approveRound``."""


class OnDelete(Api):
    """What stays when the run is deleted."""

    serving: Literal["Keep", "Delete"] = "Keep"
    """Keep orphans the gateway and the stable Deployment: users stay served."""
    artifacts: Literal["Retain", "Delete"] = "Retain"
    """Objects in the store. Delete is not acted on yet: they stay."""


class Requests(Api):
    """One-shot verbs that Git can express; compared with ``status.handledRequests``."""

    abort_round: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Abort this round if it is the current one."""
    approve_round: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Approve this round's promotion."""
    retry_token: Annotated[str, StringConstraints(max_length=64)] = ""
    """A new value lets a stalled run try again."""


class RunSpec(Api):
    """What the user wants."""

    suspend: bool = False
    """Start nothing new, suspend running Jobs, take queued ones away until later; stable keeps serving."""
    mode: Literal["Sync", "AsyncOneRound"] = "Sync"
    """AsyncOneRound trains on the previous round's data while the next is collected. Immutable."""
    rounds: Rounds = Rounds()
    """Size and number."""
    model: Model
    """The base model."""
    storage: Storage
    """The store."""
    serving: Serving = Serving()
    """Engines."""
    recording: Recording = Recording()
    """Records."""
    gateway: Gateway = Gateway()
    """Endpoint."""
    collect: StepSettings = StepSettings()
    """Collector."""
    training: Training = Training()
    """Trainer."""
    export: Export = Export()
    """Quantiser."""
    evaluate: StepSettings = StepSettings()
    """Measurements for the gate."""
    gate: Gate = Gate()
    """Gate."""
    on_blocked: Literal["HaltForHuman", "ContinueLineage", "RestartFromStable"] = "HaltForHuman"
    """What becomes of the trainer after a blocked round: stop and ask; go on from the blocked weights; go back to
    stable's. Traffic returns to stable in every case."""
    network_policy: Literal["Managed", "None"] = "Managed"
    """Managed: NetworkPolicies let into the run's pods only what the loop needs (see docs/workloads.md). None: the
    namespace's own rules hold."""
    on_delete: OnDelete = OnDelete()
    """Deletion."""
    requests: Requests = Requests()
    """One-shot verbs."""


class StablePolicy(Status):
    """The policy that users get."""

    round: RoundNumber
    """The round that made it."""
    digest: Word
    """Its digest."""
    since: Timestamp | None = None
    """When it was promoted."""


class CurrentRound(Status):
    """The round in work."""

    number: RoundNumber
    """Its number."""
    step: Word
    """Where it stands."""
    since: Timestamp | None = None
    """Since when it stands there."""


class LastGate(Status):
    """The last verdict."""

    round: RoundNumber
    """Of which round."""
    verdict: Word
    """Pass, Fail, Inconclusive or Error."""
    message: Message = ""
    """Why."""


class HistoryEntry(Status):
    """One finished round."""

    number: RoundNumber
    """Its number."""
    outcome: Word
    """The step it ended in: Promoted, Blocked, Failed, Aborted or Superseded."""
    digest: Word | None = None
    """The policy it made."""
    verdict: Word | None = None
    """The gate's."""
    reason: Word | None = None
    """CamelCase."""
    reward: Word | None = None
    """Mean reward of its training data (decimal)."""
    finished: Timestamp | None = None
    """When."""


class HandledRequests(Status):
    """The one-shot verbs that took effect."""

    abort_round: RoundNumber = 0
    """Last abort."""
    approve_round: RoundNumber = 0
    """Last approval."""
    retry_token: Word = ""
    """Last retry."""


class RunStatus(Status):
    """What the operator says."""

    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    """See ``names.Condition``."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    stable: StablePolicy | None = None
    """The commit point of a promotion: traffic, retention and everything else is derived from it."""
    previous: StablePolicy | None = None
    """Stable before the last promotion; its Deployment drains."""
    current_round: CurrentRound | None = None
    """The round in work."""
    canary_weight: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of new conversations on the candidate."""
    last_gate: LastGate | None = None
    """The last verdict."""
    lineage_round: RoundNumber = 0
    """The round whose trainer checkpoint the next round starts from; 0: the base model, a cold optimizer."""
    consecutive_blocked: Count = 0
    """Blocked rounds since the last promotion."""
    halted_round: RoundNumber | None = None
    """The blocked round at which the run waits for a person; a new ``requests.retryToken`` clears it."""
    rounds_finished: Count = 0
    """Training rounds that ended (any way)."""
    reward: Word | None = None
    """Mean reward of the last sealed dataset (decimal)."""
    endpoint: Text | None = None
    """Base URL for users, inside the cluster."""
    handled_requests: HandledRequests = HandledRequests()
    """One-shot verbs that took effect."""
    history: Annotated[list[HistoryEntry], Field(max_length=200)] = Field(default_factory=list)
    """Finished rounds, oldest first."""


class Run(Api):
    """A whole ProdRLRun object as read; metadata stays a plain dict."""

    metadata: dict[str, Any]
    """As in the API."""
    spec: RunSpec
    """What the user wants."""
    status: RunStatus = RunStatus()
    """What the operator says."""
