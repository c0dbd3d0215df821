"""The collect step on stores: exactly S*B, sealed once, whoever crashes or races."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prodrl import progress
from prodrl.collect import join, ledger, seal
from prodrl.collect import run as step
from prodrl.config import CollectConfig, CollectResult, StoreConfig
from prodrl.errors import DataError, PreemptedError, UnavailableError
from prodrl.progress import Progress
from prodrl.recorder import spool
from prodrl.store import folders, layout, open_store
from prodrl.store.port import Store
from prodrl.train import dataset as trainer
from tests.support.records import DIGEST, NOW, OTHER_DIGEST, World, make_config, make_feedback, make_record, world

pytest_plugins = ["tests.support.stores"]
FOUR = ("t-a", "t-b", "t-c", "t-d")


def collect(config: CollectConfig, now_ms: int = NOW) -> CollectResult:
    return step.run(config, Progress(), lambda: now_ms)


def look(config: CollectConfig, now_ms: int = NOW) -> CollectResult | None:
    return step.Collector(open_store(config.store), config, lambda: now_ms).look(Progress())


def dataset(store: Store, number: int = 1) -> pa.Table:
    manifest = folders.verify(store, layout.dataset(number))
    (file,) = manifest.files
    return pq.read_table(pa.BufferReader(store.get(f"{layout.dataset(number)}/{file.path}")))


def test_a_full_round_is_sealed_and_claimed(any_config: StoreConfig) -> None:
    there = world(any_config)
    there.play("t-a", "t-b", reward=1.0)
    there.play("t-c", "t-d", "t-e", reward=0.0)
    result = collect(make_config(any_config))
    assert (result.trajectories, result.tokens, result.reward_mean, result.excluded) == (4, 8, 0.5, {})
    table = dataset(there.store)
    assert table.column("trajectory_id").to_pylist() == list(FOUR)
    assert table.column("order").to_pylist() == [0, 1, 2, 3]
    assert table.column("ids").to_pylist() == [[1, 2, 3, 11, 12]] * 4
    assert table.column("loss_positions").to_pylist() == [[3, 4]] * 4
    assert np.asarray(pa.compute.list_flatten(table.column("logprobs"))).dtype == np.float32
    manifest = folders.read_manifest(there.store, result.dataset_key, result.dataset_digest)
    assert manifest.kind == "dataset"
    wanted = {"trajectories": "4", "tokens": "8", "reward_mean": "0.5", "policy_digest": DIGEST, "steps": "2"}
    assert wanted.items() <= manifest.attributes.items()
    assert ledger.standing(there.store, 1).trajectory_ids == list(FOUR)


def test_repeating_a_finished_round_returns_the_same_result(local_config: StoreConfig) -> None:
    world(local_config).play(*FOUR)
    first = collect(make_config(local_config))
    world(local_config, "engine-1").record(make_record("t-0"))
    assert collect(make_config(local_config)) == first


def test_nothing_is_sealed_before_the_round_is_full(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play("t-a", "t-b", "t-c")
    there.record(make_record("t-d"))
    assert look(make_config(local_config)) is None
    assert not folders.exists(there.store, layout.dataset(1))
    there.reward(make_feedback("t-d"))
    assert look(make_config(local_config)) is not None


def test_half_unrewarded_traffic_is_left_out_and_never_scored_zero(local_config: StoreConfig) -> None:
    there = world(local_config)
    names = [f"t-{number}" for number in range(8)]
    there.record(*(make_record(name, started_ms=NOW - 9_000_000, finished_ms=NOW - 9_000_000) for name in names))
    there.reward(*(make_feedback(name, 1.0, received_ms=NOW - 8_999_000) for name in names[::2]))
    result = collect(make_config(local_config))
    assert result.reward_mean == 1.0
    assert result.excluded == {"Expired": 4}
    assert set(dataset(there.store).column("reward").to_pylist()) == {1.0}
    entry = ledger.standing(there.store, 1)
    assert seal.read_excluded(there.store, entry.excluded_key) == dict.fromkeys(names[1::2], "Expired")
    assert entry.seen == 8


def test_a_dialogue_of_several_shards_is_one_trajectory(local_config: StoreConfig) -> None:
    there, other = world(local_config), world(local_config, "engine-1")
    there.play("t-b", "t-c", "t-d")
    other.record(make_record("t-a", 1, prompt_ids=[1, 2, 3, 11, 12, 9]))
    there.record(make_record("t-a", 0))
    there.record(make_record("t-a", 0))  # uploaded twice after a restart
    there.reward(make_feedback("t-a", request_ids=["t-a.0", "t-a.1"]))
    collect(make_config(local_config))
    row = dataset(there.store).slice(0, 1).to_pylist()[0]
    assert row["ids"] == [1, 2, 3, 11, 12, 9, 11, 12]
    assert row["loss_positions"] == [3, 4, 6, 7]
    assert row["trajectory_tokens"] == 4


def test_a_shard_without_its_manifest_does_not_exist(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.record(*(make_record(name) for name in FOUR), manifest=False)
    there.reward(*(make_feedback(name) for name in FOUR))
    assert look(make_config(local_config)) is None


@pytest.mark.parametrize("damage", [b"garbage", None])
def test_a_damaged_shard_is_set_aside_and_the_others_go_on(local_config: StoreConfig, damage: bytes | None) -> None:
    there = world(local_config)
    key = there.record(make_record("t-0"))
    there.reward(make_feedback("t-0"))
    if damage is None:
        there.store.delete(key)
    else:
        there.store.put(key, damage)
    there.play(*FOUR)
    collect(make_config(local_config))
    assert ledger.standing(there.store, 1).trajectory_ids == list(FOUR)


def test_a_shard_with_the_bytes_of_another_is_set_aside(local_config: StoreConfig) -> None:
    there = world(local_config)
    mine, other = there.record(make_record("t-0")), there.record(make_record("t-1", logprobs=[-0.1, -0.1]))
    there.store.put(mine, there.store.get(other))
    there.reward(make_feedback("t-0"))
    there.play(*FOUR)
    collector = step.Collector(there.store, make_config(local_config), lambda: NOW)
    assert collector.look(Progress()) is not None
    (damage,) = collector._tail.damaged.values()
    assert mine in damage
    assert "expected sha256" in damage


def test_a_damaged_segment_loses_only_its_damaged_lines(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.record(*(make_record(name) for name in FOUR))
    good = [make_feedback(name).model_dump_json() for name in FOUR]
    there.store.put(layout.feedback_segment("gateway-9", 0), "\n".join([good[0], "{", *good[1:]]).encode())
    assert collect(make_config(local_config)).trajectories == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": [-0.5]}, "InconsistentRecord"),
        ({"head_offsets": [0, 2, 3]}, "InconsistentRecord"),
        ({"head_offsets": [0, 5, 4]}, "InconsistentRecord"),
        ({"head_logprobs": [-3.0, -3.0, -0.69, -0.69]}, "InconsistentRecord"),
        ({"head_logprobs": [0.0, 0.0, -0.69, -0.69], "support_complete": False}, "InconsistentRecord"),
        ({"logprobs": [0.5, -0.5]}, "InconsistentRecord"),
        ({"prompt_ids": []}, "InconsistentRecord"),
        ({"trainable": False}, "InconsistentRecord"),
        ({"temperature": float("nan")}, "InconsistentRecord"),
        ({"logprobs": [float("nan"), -0.5]}, "NonFiniteLogprob"),
        ({"head_logprobs": [float("-inf"), -0.5, -0.5, -0.5]}, "NonFiniteLogprob"),
        ({"reasons": ["Greedy"]}, "Greedy"),
        ({"policy_digest": OTHER_DIGEST}, None),
    ],
)
def test_a_record_that_contradicts_itself_is_never_trained_on(
    local_config: StoreConfig, changes: dict[str, Any], reason: str | None
) -> None:
    there = world(local_config)
    there.record(make_record("t-0", **changes), *(make_record(name) for name in FOUR))
    there.reward(make_feedback("t-0", received_ms=NOW - 6_000), *(make_feedback(name) for name in FOUR))
    result = collect(make_config(local_config))
    assert result.excluded == ({reason: 1} if reason else {})
    assert ledger.standing(there.store, 1).trajectory_ids == list(FOUR)


def test_a_conversation_that_began_under_another_policy_is_mixed(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.record(make_record("t-0", 0, policy_digest=OTHER_DIGEST), digest=OTHER_DIGEST)
    there.record(make_record("t-0", 1))
    there.reward(make_feedback("t-0", request_ids=[], received_ms=NOW - 60_000))
    there.play(*FOUR)
    assert collect(make_config(local_config)).excluded == {"MixedPolicy": 1}


def test_old_shards_of_other_policies_are_not_read(local_config: StoreConfig) -> None:
    there = world(local_config)
    old, recent = NOW - 30 * 86_400_000, NOW - 86_400_000
    for name, at in (("t-old", old), ("t-recent", recent)):
        record = make_record(name, 0, policy_digest=OTHER_DIGEST, started_ms=at, finished_ms=at)
        there.record(record, digest=OTHER_DIGEST)
    collector = step.Collector(there.store, make_config(local_config, collect_from_ms=NOW), lambda: NOW)
    collector.look(Progress())
    assert set(collector._known) == {"t-recent"}


def test_what_the_recorder_spools_is_read_and_what_is_sealed_the_trainer_reads(
    local_config: StoreConfig, tmp_path: Path
) -> None:
    there = world(local_config)
    box = spool.Spool(tmp_path / "spool", "engine-0-0123")
    records = [make_record(name) for name in FOUR] + [make_record("t-a", 1, prompt_ids=[9])]
    spool.upload(there.store, box.write(layout.record_shard(DIGEST, "engine-0-0123", 0), records))
    box.close()
    there.reward(make_feedback("t-a", request_ids=["t-a.0", "t-a.1"]), *(make_feedback(name) for name in FOUR[1:]))
    result = collect(make_config(local_config))
    manifest = folders.fetch_folder(there.store, result.dataset_key, tmp_path / "dataset", result.dataset_digest)
    found = trainer.read(tmp_path / "dataset", manifest, result.dataset_key)
    assert [(t.trajectory_id, t.tokens, len(t.rows)) for t in found.trajectories] == [
        ("t-a", 4, 2),
        ("t-b", 2, 1),
        ("t-c", 2, 1),
        ("t-d", 2, 1),
    ]


def test_a_later_round_never_takes_what_was_claimed(any_config: StoreConfig) -> None:
    there = world(any_config)
    there.play(*FOUR)
    collect(make_config(any_config))
    there.play("t-e", "t-f", "t-g")
    assert look(make_config(any_config, 2)) is None
    there.play("t-h")
    collect(make_config(any_config, 2))
    assert ledger.standing(there.store, 2).trajectory_ids == ["t-e", "t-f", "t-g", "t-h"]


def test_an_attempt_of_an_earlier_round_can_not_claim_after_a_later_round_has(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    slow = step.Collector(there.store, make_config(local_config, 1), lambda: NOW)
    collect(make_config(local_config, 3))
    with pytest.raises(DataError, match="overtaken by round 3"):
        slow.look(Progress())
    assert ledger.rounds(there.store) == [1, 2, 3]


@pytest.mark.parametrize("overtaken_at", ["dataset", "claim"])
def test_whatever_an_earlier_round_is_doing_when_it_is_overtaken_no_trajectory_has_two_claims(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, overtaken_at: str
) -> None:
    there = world(local_config)
    there.play(*FOUR)
    name = {"dataset": "write_dataset", "claim": "entry_for"}[overtaken_at]
    real = getattr(seal, name)

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(seal, name, real)
        made = real(*arguments)
        collect(make_config(local_config, 2))
        return made

    monkeypatch.setattr(seal, name, overtaken)
    with pytest.raises(DataError, match="overtaken by round 2"):
        collect(make_config(local_config, 1))
    assert ledger.claims_before(there.store, 10) == [ledger.standing(there.store, 2)]


class CrashError(BaseException):
    """The process died here."""


@pytest.mark.parametrize("crash_at", range(8))
def test_a_crash_after_any_write_is_resumed_to_one_dataset(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    there = world(local_config)
    there.play(*FOUR)
    config = make_config(local_config)
    writes = 0

    def counted(real: Any) -> Any:
        def act(self: Store, *arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == crash_at // 2 + 1 and crash_at % 2 == 0:
                raise CrashError
            made = real(self, *arguments)
            if writes == crash_at // 2 + 1:
                raise CrashError
            return made

        return act

    kind = type(there.store)
    with monkeypatch.context() as patch:
        for name in ("put", "put_file", "create"):
            patch.setattr(kind, name, counted(getattr(kind, name)))
        with pytest.raises(CrashError):
            collect(config)
    had_manifest = folders.exists(there.store, layout.dataset(1))
    before = folders.read_manifest(there.store, layout.dataset(1)).digest() if had_manifest else None
    there.play("t-0")  # what comes meanwhile must not change a dataset that stands
    result = collect(config, NOW + 1)
    assert before in (None, result.dataset_digest)
    assert result.trajectories == 4
    folders.verify(there.store, layout.dataset(1), result.dataset_digest)


def test_racing_attempts_that_see_different_traffic_return_one_dataset(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*(f"t-{number}" for number in range(7)))
    barrier = threading.Barrier(3)
    results: list[CollectResult] = []

    def attempt(number: int) -> None:
        collector = step.Collector(open_store(local_config), make_config(local_config), lambda: NOW + number)
        join.gather(collector._known, collector._tail.records(), ())
        lacking = collector._known.pop(f"t-{number}")  # each attempt knows other traffic
        assert lacking.records
        barrier.wait()
        result = collector.look(Progress())
        assert result is not None
        results.append(result)

    threads = [threading.Thread(target=attempt, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len({result.dataset_digest for result in results}) == 1
    folders.verify(there.store, layout.dataset(1), results[0].dataset_digest)


def test_a_damaged_dataset_is_never_returned_as_a_result(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    result = collect(make_config(local_config))
    (file,) = folders.read_manifest(there.store, result.dataset_key).files
    there.store.put(f"{result.dataset_key}/{file.path}", b"damaged")
    with pytest.raises(DataError, match=r"File rounds/0001/dataset/samples-.*expected"):
        collect(make_config(local_config))


def test_a_dataset_of_other_settings_is_not_claimed(local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    there = world(local_config)
    there.play(*FOUR)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "claim", lambda *_: (_ for _ in ()).throw(CrashError()))
        with pytest.raises(CrashError):
            collect(make_config(local_config))
    with pytest.raises(DataError, match="other settings"):
        collect(make_config(local_config, batch_size=1))


def test_the_step_stops_when_told_to(local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()
    monkeypatch.setattr(progress, "stop_requested", event)
    monkeypatch.setattr(step, "stop_requested", event)
    threading.Timer(0.2, event.set).start()
    with pytest.raises(PreemptedError):
        collect(make_config(local_config, poll_seconds=60))


def test_a_short_outage_is_waited_out_and_a_long_one_is_not(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(local_config).play(*FOUR)
    failures = iter([True, True, False])
    real = step.Collector.look

    def flaky(self: step.Collector, state: Progress) -> CollectResult | None:
        if next(failures):
            raise UnavailableError("away")
        return real(self, state)

    monkeypatch.setattr(step.Collector, "look", flaky)
    assert collect(make_config(local_config)).trajectories == 4
    failures = iter([True] * 100)
    monkeypatch.setattr(step, "MAX_OUTAGE_SECONDS", 0.05)
    with pytest.raises(UnavailableError):
        collect(make_config(local_config, 2))


def test_progress_counts_what_is_ready(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play("t-a", "t-b")
    there.record(make_record("t-c"))
    state = Progress()
    step.Collector(there.store, make_config(local_config), lambda: NOW).look(state)
    assert state.snapshot()["done"] == 2
    assert "3 recorded, 2 scored" in state.snapshot()["message"]


def test_new_writers_and_stragglers_are_found_between_full_listings(s3_config: StoreConfig) -> None:
    there: World = world(s3_config)
    collector = step.Collector(there.store, make_config(s3_config), lambda: NOW)
    there.play("t-a")
    assert collector.look(Progress()) is None
    there.play("t-b")
    world(s3_config, "engine-1").record(make_record("t-c"))
    there.reward(make_feedback("t-c"))
    there.play("t-d")
    result = None
    for _ in range(200):
        result = result or collector.look(Progress())
    assert result is not None
