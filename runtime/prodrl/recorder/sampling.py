"""What the effective sampling parameters mean for training. Pure: reads attributes, imports no vllm.

Called by ``capture`` when a request begins. Parameters are those that reach the engine, after the server merged the
model's generation configuration, never those of the HTTP body.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from prodrl.config import SamplingPolicy
from prodrl.records import Reason

GREEDY_BELOW = 1e-5
"""vLLM's own limit: a lower temperature takes the most likely token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that a completion was drawn from, and what forbids to train on it."""

    temperature: float
    top_p: float
    top_k: int
    """0 means all."""
    min_p: float
    text: str
    """All effective parameters, as JSON."""
    reasons: tuple[Reason, ...] = ()


def describe(params: Any, policy: SamplingPolicy) -> Sampling:
    """Read vLLM's ``SamplingParams``."""
    top_k = max(int(params.top_k), 0)
    reasons = [
        reason
        for reason, applies in (
            (Reason.GREEDY, params.temperature < GREEDY_BELOW),
            (Reason.SAMPLING_POLICY, not _follows(policy, params.temperature, params.top_p, top_k)),
            (Reason.PENALTIES, _is_biased(params)),
            (Reason.STRUCTURED, params.structured_outputs is not None),
            (Reason.FORCED, _is_forced(params)),
            (Reason.MULTIPLE_CHOICES, params.n > 1),
        )
        if applies
    ]
    return Sampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=top_k,
        min_p=float(params.min_p),
        text=_as_json(params),
        reasons=tuple(reasons),
    )


def _follows(policy: SamplingPolicy, temperature: float, top_p: float, top_k: int) -> bool:
    pinned = ((policy.temperature, temperature), (policy.top_p, top_p), (policy.top_k, top_k))
    return all(wanted is None or math.isclose(wanted, got, abs_tol=1e-6) for wanted, got in pinned)


def _is_biased(params: Any) -> bool:
    """Logits were changed in a way that the trainer does not repeat."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
    )


def _is_forced(params: Any) -> bool:
    """Some tokens may not have been sampled from the policy at all."""
    return bool(
        params.min_tokens
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids
        or getattr(params, "watermarking", None)
    )


_NOT_SAMPLING = frozenset(
    {
        "output_kind",
        "skip_clone",
        "output_text_buffer_length",
        "flat_logprobs",
        "stream_interval",
        "detokenize",
        "prompt_logprob_token_ids",
    }
)


def _as_json(params: Any) -> str:
    names = [name for name in params.__struct_fields__ if name not in _NOT_SAMPLING and not name.startswith("_")]
    values = {name: value for name in names if (value := getattr(params, name)) not in (None, [], {})}
    return json.dumps(values, sort_keys=True, default=str)
