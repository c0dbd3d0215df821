"""Stitching turns to samples by exact ids: counts, positions and heads against values worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl.collect.samples import Turn, stitch, to_rows
from prodrl.records import CompletionRecord, Sample, arrow_schema
from tests.support.records import DIGEST, make_record


def turn(prompt: list[int], output: list[int], **changes: Any) -> Turn:
    name = changes.pop("name", "r")
    record = make_record("t-1", record_id=name, prompt_ids=prompt, output_ids=output, **changes)
    return Turn.from_row(pa.Table.from_pylist([record.model_dump()], schema=arrow_schema(CompletionRecord)))


def rows(*turns: Turn) -> list[dict[str, Any]]:
    return to_rows(turns, trajectory_id="t-1", policy_digest=DIGEST, order=7, reward=0.5)


def test_a_turn_whose_prompt_extends_the_dialogue_joins_its_sample() -> None:
    (row,) = rows(turn([1, 2], [3, 4], name="a"), turn([1, 2, 3, 4, 5, 6], [7], name="b", temperature=0.5))
    assert row["ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row["loss_positions"].tolist() == [2, 3, 6]
    assert row["ids"][row["loss_positions"]].tolist() == [3, 4, 7]
    assert row["head_offsets"].tolist() == [0, 2, 4, 6]
    assert row["temperatures"].tolist() == [1.0, 1.0, 0.5]
    assert row["record_ids"] == ["a", "b"]
    assert (row["trajectory_tokens"], row["num_samples"], row["order"], row["reward"]) == (3, 1, 7, 0.5)


def test_a_dialogue_of_three_turns_with_an_edited_history_becomes_three_samples_that_share_their_tokens() -> None:
    made = rows(turn([1], [2, 3]), turn([1, 9, 4], [5, 6]), turn([1, 9, 8, 4], [7]))
    assert [row["ids"].tolist() for row in made] == [[1, 2, 3], [1, 9, 4, 5, 6], [1, 9, 8, 4, 7]]
    assert [row["loss_positions"].tolist() for row in made] == [[1, 2], [3, 4], [4]]
    assert {(row["trajectory_tokens"], row["num_samples"]) for row in made} == {(5, 3)}
    assert [row["index"] for row in made] == [0, 1, 2]
    assert sum(len(row["logprobs"]) for row in made) == 5


def test_a_completion_cut_by_length_is_not_extended() -> None:
    made = rows(turn([1], [2], finish_reason="length"), turn([1, 2, 3], [4]))
    assert [row["ids"].tolist() for row in made] == [[1, 2], [1, 2, 3, 4]]


def test_a_side_conversation_does_not_break_the_main_one() -> None:
    made = rows(turn([1], [2]), turn([50], [51]), turn([1, 2, 3], [4]))
    assert [row["ids"].tolist() for row in made] == [[1, 2, 3, 4], [50, 51]]


def test_an_answer_that_was_asked_for_again_is_a_sample_of_its_own() -> None:
    made = rows(turn([1], [2]), turn([1], [3]), turn([1, 3, 4], [5]))
    assert [row["ids"].tolist() for row in made] == [[1, 2], [1, 3, 4, 5]]


def test_one_incomplete_support_makes_the_sample_incomplete() -> None:
    (row,) = rows(turn([1], [2]), turn([1, 2], [3], support_complete=False))
    assert row["support_complete"] is False


def test_heads_of_different_sizes_keep_their_positions() -> None:
    first = turn([1], [2, 3], head_ids=[2, 9, 3], head_logprobs=[-1.0, -2.0, -3.0], head_offsets=[0, 2, 3])
    second = turn([1, 2, 3], [4], head_ids=[4], head_logprobs=[-4.0], head_offsets=[0, 1])
    (row,) = rows(first, second)
    offsets = row["head_offsets"]
    heads = [row["head_ids"][offsets[i] : offsets[i + 1]].tolist() for i in range(3)]
    assert heads == [[2, 9], [3], [4]]
    assert row["head_logprobs"].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_rows_fit_the_schema_of_samples() -> None:
    made = rows(turn([1], [2]), turn([9], [3]))
    for row in made:
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}
        assert Sample(**plain).model_dump() == plain
    assert set(made[0]) == set(Sample.model_fields)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(1, 3)), max_size=6))
def test_every_sampled_token_is_in_exactly_one_sample_at_a_position_after_the_first(
    shapes: list[tuple[list[int], int]],
) -> None:
    turns = [turn(prompt, [index + 10] * count, name=str(index)) for index, (prompt, count) in enumerate(shapes)]
    stitched = stitch(turns)
    found = [sample.ids[np.concatenate(sample.positions)].tolist() for sample in stitched]
    assert sorted(itertools.chain(*found)) == sorted(t for one in turns for t in one.output_ids.tolist())
    for sample in stitched:
        positions = np.concatenate(sample.positions)
        assert (positions >= 1).all()
        assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize("slice_from", [0, 1])
def test_rows_of_a_larger_shard_are_read_by_their_own_bounds(slice_from: int) -> None:
    records = [make_record("t-1", 0, prompt_ids=[1, 2]), make_record("t-2", 0, prompt_ids=[5], output_ids=[6])]
    table = pa.Table.from_pylist([r.model_dump() for r in records], schema=arrow_schema(CompletionRecord))
    found = Turn.from_row(table.slice(slice_from, 1))
    assert found.prompt_ids.tolist() == records[slice_from].prompt_ids
    assert found.head_offsets.tolist() == records[slice_from].head_offsets
