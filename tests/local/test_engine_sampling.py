"""The recorder's reading of vLLM's own SamplingParams: the class itself is the oracle, so vllm is imported (20 s)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prodrl.config import SamplingPolicy
from prodrl.recorder import sampling
from prodrl.records import Reason

pytestmark = pytest.mark.engine


def params(**changes: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(**{"temperature": 0.7, "top_p": 0.9, "top_k": 20, **changes})


POLICY = SamplingPolicy(temperature=0.7, top_p=0.9, top_k=20)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, ()),
        ({"temperature": 0}, (Reason.GREEDY, Reason.SAMPLING_POLICY)),
        ({"temperature": 0.71}, (Reason.SAMPLING_POLICY,)),
        ({"top_k": -1}, (Reason.SAMPLING_POLICY,)),
        ({"presence_penalty": 0.5}, (Reason.PENALTIES,)),
        ({"repetition_penalty": 1.1}, (Reason.PENALTIES,)),
        ({"logit_bias": {3: 1.0}}, (Reason.PENALTIES,)),
        ({"bad_words": ["x"]}, (Reason.PENALTIES,)),
        ({"allowed_token_ids": [1]}, (Reason.PENALTIES,)),
        ({"min_tokens": 2}, (Reason.FORCED,)),
        ({"thinking_token_budget": 4}, (Reason.FORCED,)),
        ({"trace_decode_token_ids": [1, 2]}, (Reason.FORCED,)),
        ({"n": 2}, (Reason.MULTIPLE_CHOICES,)),
        ({"stop": ["x"], "seed": 3, "logprobs": 5}, ()),
    ],
)
def test_sampling_parameters_of_vllm_and_their_verdicts(changes: dict[str, Any], reasons: tuple[Reason, ...]) -> None:
    assert sampling.describe(params(**changes), POLICY).reasons == reasons


def test_structured_outputs_are_not_samples() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    structured = StructuredOutputsParams(regex="a+")
    assert sampling.describe(params(structured_outputs=structured), POLICY).reasons == (Reason.STRUCTURED,)


def test_nothing_is_pinned_by_an_empty_policy() -> None:
    assert sampling.describe(params(temperature=1.3, top_k=5), SamplingPolicy()).reasons == ()


def test_effective_parameters_are_kept_as_json() -> None:
    kept = json.loads(sampling.describe(params(seed=7, stop=["END"]), POLICY).text)
    assert (kept["seed"], kept["stop"], kept["temperature"], kept["top_k"]) == (7, ["END"], 0.7, 20)
