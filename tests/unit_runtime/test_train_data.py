"""Dataset and batches: what is refused, how weights are spread, and that packing changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from prodrl.errors import DataError
from prodrl.records import Sample, arrow_schema
from prodrl.train import batch
from prodrl.train.dataset import Dataset
from tests.support.training import Lab, make_samples, tiny_model


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(8, model=tiny_model(), turns=2)


def dataset(samples: list[Sample]) -> Dataset:
    return Dataset("d", pa.Table.from_pylist([one.model_dump() for one in samples], schema=arrow_schema(Sample)))


def test_weights_are_one_over_b_and_t_over_trajectories(samples: list[Sample]) -> None:
    data = dataset(samples)
    assert len(samples) == 12  # every second trajectory has two samples
    total: dict[int, float] = {}
    for world_size, budget in ((1, 10_000), (1, 1), (2, 40), (3, 25)):
        plan = batch.minibatches(data, 2, 4, seed=1, round_number=1)
        for trajectories in plan:
            shares = batch.shares(data, trajectories, world_size, budget)
            assert len({len(share) for share in shares}) == 1
            total.clear()
            for share in shares:
                for rows in share:
                    micro = batch.collate(data, rows, batch_size=4)
                    for at, weight in zip(micro.trajectory_N.tolist(), micro.weight_N.tolist(), strict=True):
                        total[at] = total.get(at, 0.0) + weight
            assert {at: value for at, value in total.items() if value} == pytest.approx(
                dict.fromkeys(trajectories, 0.25)
            )


def test_oracle_j_aggregation() -> None:
    """Per-token losses [[1,1,1,1],[4],[2,2]], the first split into two samples: 7/3, however it is cut."""
    lengths, values = {0: [2, 2], 1: [1], 2: [2]}, {0: 1.0, 1: 4.0, 2: 2.0}
    rows = []
    for order, parts in lengths.items():
        for index, length in enumerate(parts):
            rows.append(made_sample(order=order, index=index, parts=parts, length=length))
    data = dataset(rows)
    for world_size in (1, 2, 3):
        shares = batch.shares(data, [0, 1, 2], world_size, 4)
        micros = [batch.collate(data, micro, batch_size=3) for share in shares for micro in share]
        loss = sum(
            float((micro.weight_N * torch.tensor([values[at] for at in micro.trajectory_N.tolist()])).sum())
            for micro in micros
        )
        assert loss == pytest.approx(7 / 3, abs=1e-6)


def made_sample(order: int, index: int, parts: list[int], length: int) -> Sample:
    return Sample(
        trajectory_id=f"t-{order}", index=index, num_samples=len(parts), order=order, reward=1.0,
        trajectory_tokens=sum(parts), policy_digest="d", ids=list(range(length + 1)),
        loss_positions=list(range(1, length + 1)), logprobs=[-1.0] * length, head_ids=[0] * length,
        head_logprobs=[-1.0] * length, head_offsets=list(range(length + 1)), support_complete=False,
        temperatures=[1.0] * length, record_ids=[],
    )  # fmt: skip


def test_every_loss_token_appears_once_and_is_scored_by_the_position_before_it(samples: list[Sample]) -> None:
    data = dataset(samples)
    seen: list[int] = []
    for rows in batch.shares(data, list(range(8)), 1, 30)[0]:
        micro = batch.collate(data, rows, batch_size=8)
        flat_ids = micro.ids_RL.flatten()
        assert torch.equal(flat_ids[micro.scored_from_N + 1], micro.ids_N1K[:, 0])
        seen += micro.flat_N.tolist()
    assert sorted(seen) == list(range(data.num_tokens))


def test_minibatches_depend_on_seed_and_round_and_not_on_the_order_inside(samples: list[Sample]) -> None:
    data = dataset(samples)
    plan = batch.minibatches(data, 2, 4, seed=1, round_number=1)
    assert plan == batch.minibatches(data, 2, 4, seed=1, round_number=1)
    assert sorted(at for piece in plan for at in piece) == list(range(8))
    assert plan != batch.minibatches(data, 2, 4, seed=2, round_number=1)
    assert plan != batch.minibatches(data, 2, 4, seed=1, round_number=2)
    assert all(piece == sorted(piece) for piece in plan)


def test_the_wrong_number_of_trajectories_is_refused(samples: list[Sample]) -> None:
    with pytest.raises(DataError, match="got 8"):
        batch.minibatches(dataset(samples), 2, 5, seed=0, round_number=1)


def changed(samples: list[Sample], **changes: Any) -> list[Sample]:
    return [samples[0].model_copy(update=changes), *samples[1:]]


def first(values: list[Any], value: Any) -> list[Any]:
    return [value, *values[1:]]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("logprobs", lambda s: first(s.logprobs, float("nan")), "logprobs must be finite"),
        ("logprobs", lambda s: first(s.logprobs, 0.5), "at most 0"),
        ("head_logprobs", lambda s: first(s.head_logprobs, float("-inf")), "head_logprobs must be finite"),
        ("head_logprobs", lambda s: [x - 1 for x in s.head_logprobs], "complete support must have mass 1"),
        ("head_logprobs", lambda s: [x / 2 for x in s.head_logprobs], "mass must be at most 1"),
        ("head_ids", lambda s: [s.head_ids[1], *s.head_ids[1:]], "same head id twice"),
        ("head_ids", lambda s: first(s.head_ids, 64), "head_ids must lie in 0..63"),
        ("ids", lambda s: first(s.ids, 99), "ids must lie in 0..63"),
        ("loss_positions", lambda s: first(s.loss_positions, 0), "must lie in 1.."),
        ("loss_positions", lambda s: s.loss_positions[::-1], "must"),
        ("temperatures", lambda s: first(s.temperatures, 0.0), "temperatures"),
        ("head_offsets", lambda s: [0, *s.head_offsets[2:], s.head_offsets[-1]], "position without"),
        ("head_offsets", lambda s: s.head_offsets[:-1], "must fit"),
    ],
)
def test_bad_samples_are_refused_by_name(samples: list[Sample], field: str, change: Any, message: str) -> None:
    bad = samples[0].model_copy(update={field: change(samples[0])})
    if field == "head_offsets" and message.startswith("position"):
        bad = bad.model_copy(update={"head_offsets": [0, 0, *samples[0].head_offsets[2:]]})
    data = dataset([bad, *samples[1:]])
    with pytest.raises(DataError, match=f"t-00-000.*{message}"):
        data.check(64, 100, needs_heads=True)


def test_longer_samples_than_agreed_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(DataError, match="longer than max_sequence_tokens 5"):
        dataset(samples).check(64, 5, needs_heads=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectory_tokens": 99}, "trajectory_tokens must be"),
        ({"reward": float("nan")}, "reward must be finite"),
        ({"num_samples": 2}, "samples must be"),
        ({"index": 1}, "samples must be"),
    ],
)
def test_trajectories_that_do_not_add_up_are_refused(
    samples: list[Sample], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        dataset(changed(samples, **changes))


def test_a_sampled_token_outside_its_support_is_counted(samples: list[Sample]) -> None:
    one = samples[0]
    token = next(v for v in range(64) if v not in one.head_ids)
    ids = list(one.ids)
    ids[one.loss_positions[0]] = token
    data = dataset(changed(samples, ids=ids))
    data.check(64, 100, needs_heads=True)
    assert batch.collate(data, [0], batch_size=8).outside_N.sum() == 1


def test_a_dataset_of_another_digest_or_with_other_bytes_is_refused(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    config = lab.config(samples)
    with pytest.raises(DataError, match="expected manifest digest"):
        lab.train(config.model_copy(update={"dataset_digest": "sha256:" + "0" * 64}))
    part = tmp_path / "store" / config.dataset_key / "part-0.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(DataError, match="sha256"):
        lab.train(config)


def test_files_that_are_no_samples_are_refused(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    import pyarrow.parquet as pq

    from prodrl.store.folders import write_folder

    folder = tmp_path / "other"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1]}), folder / "x.parquet")
    digest = write_folder(lab.store, "rounds/0001/dataset", folder, "dataset", {}).digest()
    from tests.support.training import train_config

    with pytest.raises(DataError):
        lab.train(train_config(lab.uri, digest))
