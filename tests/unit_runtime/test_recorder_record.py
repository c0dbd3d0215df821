"""Records: what is kept, what is dropped, and which verdict a completion gets. Answers are computed by hand here."""

from __future__ import annotations

import math
import pathlib
from array import array
from typing import Any

import numpy as np
import pytest

from prodrl.recorder import record
from prodrl.recorder.record import Entries, Facts, Observation
from prodrl.recorder.sampling import Sampling
from prodrl.records import CompletionRecord, Reason
from tests.support.engine import recorder_config

NONE_LEFT = float("-inf")


def config() -> Any:
    return recorder_config(pathlib.Path("/store"))


def drawn(**changes: Any) -> Sampling:
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 4, "min_p": 0.0, "text": "{}"}
    return Sampling(**{**values, **changes})


def entries(*positions: list[tuple[int, float, int]]) -> Entries:
    """Each position as the engine gives it: the sampled token first, then its head."""
    flat = [entry for position in positions for entry in position]
    return Entries(
        ids=array("i", [entry[0] for entry in flat]),
        logprobs=array("f", [entry[1] for entry in flat]),
        ranks=array("i", [entry[2] for entry in flat]),
        counts=array("i", [len(position) for position in positions]),
    )


def seen(output: list[int], noted: Entries, **changes: Any) -> Observation:
    values: dict[str, Any] = {
        "request_id": "t-1.a",
        "ordinal": 0,
        "index": 0,
        "sampling": drawn(),
        "facts": Facts("vllm 0", record.PROCESSED, 512, 4),
        "started_ms": 1,
        "finished_ms": 2,
        "prompt_ids": [9, 9],
        "output_ids": output,
        "entries": noted,
        "finish_reason": "stop",
    }
    return Observation(**{**values, **changes})


def build(*arguments: Any, **changes: Any) -> CompletionRecord:
    return record.build(seen(*arguments, **changes), config())


def as_engine(probabilities: list[float], sampled: int, size: int = 4) -> list[tuple[int, float, int]]:
    """One position of a distribution over ids 0.. as vLLM lists it under processed logprobs."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    logs = [math.log(p) if p > 0 else NONE_LEFT for p in probabilities]
    rank = sum(log >= logs[sampled] for log in logs)
    return [(sampled, logs[sampled], rank)] + [(t, logs[t], place + 1) for place, t in enumerate(order[:size])]


def test_the_sampled_token_is_listed_twice_by_the_engine_and_once_in_the_head() -> None:
    row = build([2], entries(as_engine([0.5, 0.2, 0.2, 0.1], 3)), output_ids=[3])
    assert row.head_ids == [0, 1, 2, 3]
    assert row.logprobs == pytest.approx([math.log(0.1)])
    assert np.exp(row.head_logprobs).sum() == pytest.approx(1, abs=1e-6)
    assert row.trainable
    assert row.support_complete


def test_the_head_does_not_depend_on_what_was_sampled() -> None:
    heads = []
    for sampled in range(4):
        row = build([sampled], entries(as_engine([0.4, 0.3, 0.2, 0.1, 0.0], sampled)))
        heads.append(dict(zip(row.head_ids, row.head_logprobs, strict=True)))
    assert all(head == heads[0] for head in heads)


def test_outputs_that_were_merged_lost_the_second_mention() -> None:
    twice = as_engine([0.4, 0.3, 0.2, 0.1], 2)
    once = [(2, math.log(0.2), 3)] + [entry for entry in twice[1:] if entry[0] != 2]
    rows = [build([2], entries(position)) for position in (twice, once)]
    heads = [dict(zip(row.head_ids, row.head_logprobs, strict=True)) for row in rows]
    assert heads[0] == heads[1]
    assert rows[1].support_complete


def test_a_sampled_token_outside_the_head_is_not_put_into_it() -> None:
    row = build([5], entries(as_engine([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], 5)), sampling=drawn(top_k=0))
    assert 5 not in row.head_ids
    assert len(row.head_ids) == 4
    assert row.trainable
    assert not row.support_complete


def test_what_cannot_be_sampled_is_left_out_and_makes_the_support_complete_without_top_k() -> None:
    nucleus = [0.7, 0.3, 0.0, 0.0, 0.0, 0.0]
    row = build([1], entries(as_engine(nucleus, 1)), sampling=drawn(top_k=0, top_p=0.95))
    assert row.head_ids == [0, 1]
    assert row.support_complete
    clamped = [(token, max(logprob, -9999.0), rank) for token, logprob, rank in as_engine(nucleus, 1)]
    assert build([1], entries(clamped), sampling=drawn(top_k=0)).head_ids == [0, 1]


def test_a_wide_nucleus_is_not_complete() -> None:
    row = build([0], entries(as_engine([0.2] * 5, 0)), sampling=drawn(top_k=0, top_p=0.95))
    assert row.trainable
    assert not row.support_complete


def test_a_vocabulary_no_larger_than_the_head_is_complete() -> None:
    facts = Facts("vllm 0", record.PROCESSED, 4, 4)
    row = build([0], entries(as_engine([0.25] * 4, 0)), sampling=drawn(top_k=0), facts=facts)
    assert row.support_complete


def test_tokens_that_tie_with_the_last_of_the_top_k_need_a_larger_head() -> None:
    ties = [0.2] * 5 + [0.0] * 20
    without = build([0], entries(as_engine(ties, 0)))
    assert (len(without.head_ids), without.support_complete, without.trainable) == (4, False, True)
    facts = Facts("vllm 0", record.PROCESSED, 512, 4, max_logprobs=20)
    row = build([0], entries(as_engine(ties, 0, facts.head_for(4))), facts=facts)
    assert (row.head_ids, row.support_complete) == ([0, 1, 2, 3, 4], True)
    assert [facts.head_for(top_k) for top_k in (0, 1, 4, 5)] == [4, 16, 16, 4]
    assert Facts("vllm 0", record.PROCESSED, 512, 20, max_logprobs=20).head_for(20) == 20


@pytest.mark.parametrize("value", [float("nan"), NONE_LEFT, -9999.0])
def test_a_sampled_token_without_a_real_logprob_is_never_trained_on(value: float) -> None:
    position = as_engine([0.5, 0.3, 0.2, 0.0], 1)
    position = [(token, value if token == 1 else logprob, rank) for token, logprob, rank in position]
    row = build([1], entries(position))
    assert row.reasons == [Reason.NON_FINITE.value]
    assert not row.support_complete
    assert row.logprobs != [0.0]


def test_nan_in_the_head_alone_is_seen() -> None:
    position = [(t, float("nan") if t == 0 else p, r) for t, p, r in as_engine([0.5, 0.3, 0.2, 0.0], 1)]
    assert build([1], entries(position)).reasons == [Reason.NON_FINITE.value]


def test_a_position_without_entries_is_inconsistent() -> None:
    noted = entries(as_engine([0.5, 0.5], 0), [])
    row = build([0, 1], noted)
    assert row.reasons == [Reason.INCONSISTENT.value]
    assert row.head_offsets == [0]


def test_ids_shifted_by_one_are_inconsistent() -> None:
    positions = [as_engine([0.4, 0.3, 0.2, 0.1], token) for token in (0, 1, 2)]
    assert build([0, 1, 2], entries(*positions)).trainable
    assert build([1, 2, 3], entries(*positions)).reasons == [Reason.INCONSISTENT.value]
    assert build([0, 1], entries(*positions)).reasons == [Reason.INCONSISTENT.value]


def test_the_sampled_logprob_must_be_the_heads() -> None:
    position = as_engine([0.4, 0.3, 0.2, 0.1], 1)
    close = [(1, position[0][1] + 5e-5, 2), *position[1:]]
    far = [(1, position[0][1] + 5e-3, 2), *position[1:]]
    assert build([1], entries(close)).trainable
    assert build([1], entries(far)).reasons == [Reason.INCONSISTENT.value]


def test_a_head_of_more_than_all_mass_is_inconsistent() -> None:
    position = [(t, p + 0.1, r) for t, p, r in as_engine([0.4, 0.3, 0.2, 0.1], 1)]
    assert build([1], entries(position)).reasons == [Reason.INCONSISTENT.value]


def test_raw_logprobs_at_another_temperature_are_not_the_sampling_distribution() -> None:
    facts = Facts("vllm 0", "raw_logprobs", 512, 4)
    row = build([1], entries(as_engine([0.4, 0.3, 0.2, 0.1], 1)), sampling=drawn(temperature=0.6), facts=facts)
    assert row.reasons == [Reason.LOGPROBS_MODE.value]
    assert row.temperature == 0.6


def test_statuses() -> None:
    position = entries(as_engine([0.4, 0.3, 0.2, 0.1], 1))
    rows = {
        "stop": build([1], position),
        "length": build([1], position, finish_reason="length"),
        "abort": build([1], position, finish_reason="abort"),
        "client": build([1], position, finish_reason="", failure="aborted"),
        "nothing": build([], Entries(), finish_reason="", failure="aborted"),
        "error": build([1], position, finish_reason="", failure="error"),
    }
    assert {name: (row.status, row.finish_reason, row.reasons) for name, row in rows.items()} == {
        "stop": ("finished", "stop", []),
        "length": ("finished", "length", []),
        "abort": ("aborted", "abort", ["Aborted"]),
        "client": ("aborted", "abort", ["Aborted"]),
        "nothing": ("aborted", "abort", ["Aborted", "EmptyCompletion"]),
        "error": ("error", "error", ["EngineError"]),
    }
    assert rows["nothing"].head_offsets == [0]


def test_records_of_one_request_have_their_own_ids() -> None:
    ids = {build([], Entries(), ordinal=call, index=choice).record_id for call in range(3) for choice in range(3)}
    assert len(ids) == 9
    assert "t-1.a:0" in ids
