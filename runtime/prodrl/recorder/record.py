"""From what was seen of one completion to its record. Pure (numpy only); called by ``sink`` in the writer thread.

With ``--logprobs-mode processed_logprobs`` the engine gives for each position the sampled token first, then the K most
likely ones, the sampled token among them again where it belongs. The head that is kept must be a function of the
prefix alone, so the first entry is no member of it by itself. Entries outside the support (-inf) are left out. What
does not fit together is still recorded, but is never trainable.

Shape legend: T = sampled tokens, N = entries as the engine gave them (T sampled ones and the heads).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prodrl.config import RecorderConfig
from prodrl.recorder.sampling import Sampling
from prodrl.records import CompletionRecord, Reason

PROCESSED = "processed_logprobs"
SUPPORT_FLOOR = -9999.0
"""vLLM writes this where a log probability is -inf in an answer; no real one comes near."""
ENTRY_TOLERANCE = 1e-4
"""Largest difference between a sampled token's own log probability and its entry in the head."""
MASS_TOLERANCE = 1e-3
"""Largest deviation of a head's mass from what it can be."""

TIE_MARGIN = 12
"""Further entries that are asked for where the top-k fits the head. Logits in bfloat16 tie often, and vLLM keeps every
token that ties with the last of the top-k: without a margin one position in eight of a small model is incomplete."""

_FINISH_STATUS = {"abort": "aborted", "error": "error"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for every completion of one engine."""

    engine: str
    """Name and version."""
    logprobs_mode: str
    vocab_size: int
    head_size: int
    """K as configured, but never more than ``max_logprobs``."""
    reasons: tuple[Reason, ...] = ()
    """Why nothing of this engine can be trained on (speculative decoding, custom logits processors)."""
    max_logprobs: int = 0
    """The most that the engine gives."""

    def head_for(self, top_k: int) -> int:
        """Entries to ask for; a support that is at most that large is recorded whole."""
        margin = TIE_MARGIN if 0 < top_k <= self.head_size else 0
        return max(self.head_size, min(self.head_size + margin, self.max_logprobs))


@dataclass(slots=True)
class Entries:
    """Log probabilities as the engine gave them, flat over positions."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    """[N]"""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """[N]"""
    ranks: array[int] = field(default_factory=lambda: array("i"))
    """[N] 1 is the most likely token; of a sampled token, the number of tokens at least as likely."""
    counts: array[int] = field(default_factory=lambda: array("i"))
    """[T] entries of each position, the sampled one included."""


@dataclass(slots=True)
class Observation:
    """One choice of one request, as seen when the request ended."""

    request_id: str
    ordinal: int
    """How many engine calls the same HTTP request had made before this one."""
    index: int
    """Which of the ``n`` choices."""
    sampling: Sampling
    facts: Facts
    started_ms: int
    finished_ms: int = 0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    entries: Entries = field(default_factory=Entries)
    finish_reason: str = ""
    """Empty when the engine had not finished the choice."""
    stop_reason: str = ""
    failure: str = ""
    """``aborted`` or ``error`` when the request ended before the choice did."""
    num_cached_tokens: int = 0
    reasons: tuple[Reason, ...] = ()
    """Found while watching (multimodal, LoRA)."""


@dataclass(frozen=True, slots=True)
class _Head:
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    offsets: NDArray[np.int64]
    sampled: NDArray[np.float32]
    is_consistent: bool
    is_finite: bool
    is_complete: bool


def build(seen: Observation, config: RecorderConfig) -> CompletionRecord:
    """The record of a completion, with its verdict."""
    head = _head(seen)
    status = _FINISH_STATUS.get(seen.finish_reason, "finished") if seen.finish_reason else (seen.failure or "error")
    reasons = _reasons(seen, head, status)
    own = str(seen.index) if seen.ordinal == 0 else f"{seen.ordinal}.{seen.index}"
    return CompletionRecord(
        record_id=f"{seen.request_id}:{own}",
        request_id=seen.request_id,
        trajectory_id=seen.request_id.partition(".")[0],
        policy_digest=config.policy_digest,
        policy_round=config.round,
        engine=seen.facts.engine,
        started_ms=seen.started_ms,
        finished_ms=seen.finished_ms,
        prompt_ids=list(seen.prompt_ids),
        output_ids=list(seen.output_ids),
        logprobs=head.sampled.tolist(),
        head_ids=head.ids.tolist(),
        head_logprobs=head.logprobs.tolist(),
        head_offsets=head.offsets.tolist(),
        support_complete=head.is_complete and head.is_consistent and head.is_finite,
        logprobs_mode=seen.facts.logprobs_mode,
        temperature=seen.sampling.temperature,
        top_p=seen.sampling.top_p,
        top_k=seen.sampling.top_k,
        min_p=seen.sampling.min_p,
        sampling=seen.sampling.text,
        finish_reason=seen.finish_reason or ("abort" if status == "aborted" else "error"),
        stop_reason=seen.stop_reason,
        status=status,
        num_cached_tokens=seen.num_cached_tokens,
        trainable=not reasons,
        reasons=[reason.value for reason in reasons],
    )


def _reasons(seen: Observation, head: _Head, status: str) -> list[Reason]:
    found = {*seen.sampling.reasons, *seen.facts.reasons, *seen.reasons}
    found |= {Reason.ABORTED} if status == "aborted" else set()
    found |= {Reason.ENGINE_ERROR} if status == "error" else set()
    found |= {Reason.EMPTY} if not seen.output_ids else set()
    found |= {Reason.LOGPROBS_MODE} if seen.facts.logprobs_mode != PROCESSED else set()
    found |= set() if head.is_finite else {Reason.NON_FINITE}
    # A prompt without ids (embeddings, or a request that died early) cannot be joined to anything.
    found |= set() if head.is_consistent and (seen.prompt_ids or not seen.output_ids) else {Reason.INCONSISTENT}
    return [reason for reason in Reason if reason in found]


def _head(seen: Observation) -> _Head:
    output = np.asarray(seen.output_ids, np.int32)
    size = seen.facts.head_for(seen.sampling.top_k)
    counts = np.asarray(seen.entries.counts, np.int64)
    ids, logprobs = np.asarray(seen.entries.ids, np.int32), np.asarray(seen.entries.logprobs, np.float32)
    ranks = np.asarray(seen.entries.ranks, np.int32)
    num = len(output)
    if len(counts) != num or (counts < 1).any() or {len(ids), len(logprobs), len(ranks)} != {int(counts.sum())}:
        nothing = np.zeros(0, np.float32)
        return _Head(nothing.astype(np.int32), nothing, np.zeros(1, np.int64), nothing, num == 0, True, False)
    first = np.cumsum(counts) - counts
    position = np.repeat(np.arange(num), counts)
    is_first = np.zeros(len(ids), bool)
    is_first[first] = True
    sampled = logprobs[first]

    in_support = ~(logprobs <= SUPPORT_FLOOR)  # NaN stays, to be noticed
    keep = ~is_first & (ranks <= size) & in_support
    again = keep & (ids == ids[first][position])
    has_again = np.bincount(position[again], minlength=num) > 0
    # Merged outputs went through a dict, which drops the second mention of the sampled token: its rank tells.
    keep[first] = ~has_again & (ranks[first] <= size) & in_support[first]

    kept = np.bincount(position[keep], minlength=num)
    mass = np.bincount(position[keep], weights=np.exp(logprobs[keep].astype(np.float64)), minlength=num)
    is_finite = bool(np.isfinite(sampled).all() and np.isfinite(logprobs[keep]).all() and in_support[first].all())
    agrees = np.abs(logprobs[again] - sampled[position[again]]) <= ENTRY_TOLERANCE
    is_consistent = bool(
        (ids[first] == output).all()
        and (not is_finite or agrees.all())
        and (not is_finite or (mass <= 1 + MASS_TOLERANCE).all())
        and (size == 0 or (kept > 0).all())
    )
    return _Head(
        ids=ids[keep],
        logprobs=logprobs[keep],
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)]),
        sampled=sampled,
        is_consistent=is_consistent,
        is_finite=is_finite,
        is_complete=bool((_covers(seen, kept) & (np.abs(mass - 1) <= MASS_TOLERANCE)).all()),
    )


def _covers(seen: Observation, kept: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[T] whether the head must be the whole support: nothing else can have been sampled."""
    size = seen.facts.head_for(seen.sampling.top_k)
    if 0 < seen.sampling.top_k <= size or seen.facts.vocab_size <= size:
        return np.ones(len(kept), bool)
    return kept < size  # fewer entries than were asked for: the rest had no probability
