"""recorded = trained + waiting + excluded + expired: over random histories, and broken on purpose."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prodrl.collect import ledger
from prodrl.collect import run as step
from prodrl.collect.audit import Audit, audit
from prodrl.config import PolicyRef, StoreConfig
from prodrl.progress import Progress
from prodrl.store import folders, layout, open_store
from tests.support.records import DIGEST, NOW, OTHER_DIGEST, make_config, make_feedback, make_record, world

pytest_plugins = ["tests.support.stores"]
FOUR = ("t-a", "t-b", "t-c", "t-d")


def collect(config: StoreConfig, number: int = 1, **changes: object) -> None:
    assert step.Collector(open_store(config), make_config(config, number, **changes), lambda: NOW).look(Progress())


def look(config: StoreConfig, **arguments: float) -> Audit:
    return audit(open_store(config), now_ms=NOW, **arguments)  # type: ignore[arg-type]


def test_every_fate_has_its_term(any_config: StoreConfig) -> None:
    there = world(any_config)
    there.play(*FOUR)
    there.record(
        make_record("t-waiting"),
        make_record("t-greedy", reasons=["Greedy"]),
        make_record("t-expired", started_ms=NOW - 9_000_000, finished_ms=NOW - 9_000_000),
    )
    there.reward(make_feedback("t-unknown"))
    collect(any_config)
    found = look(any_config)
    assert found.holds
    assert found.equation() == "7 recorded = 4 trained + 1 waiting + 1 excluded (Greedy 1) + 1 expired"
    assert found.unmatched_rewards == 1
    assert found.rounds == {1: 4}
    assert found.as_json()["fate"] == {
        "recorded": 7,
        "trained": 4,
        "waiting": 1,
        "expired": 1,
        "excluded": {"Greedy": 1},
    }


def test_the_deadline_is_the_rounds_own_unless_it_is_given(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    there.record(make_record("t-e", started_ms=NOW - 60_000, finished_ms=NOW - 60_000))
    collect(local_config)
    assert look(local_config).waiting == 1
    assert look(local_config, reward_deadline_seconds=59).expired == 1


def test_an_abandoned_round_is_excluded_and_stays_claimed(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    collect(local_config)
    ledger.abandon(there.store, 1)
    found = look(local_config)
    assert found.holds
    assert (found.trained, found.excluded) == (0, {"RoundAbandoned": 4})
    assert step.Collector(there.store, make_config(local_config, 2), lambda: NOW).look(Progress()) is None


def test_what_a_newer_policy_leaves_behind_is_surplus_or_of_another_policy(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR, "t-left")
    collect(local_config)
    blocked = "sha256:" + "c" * 64
    there.record(make_record("t-blocked", policy_digest=blocked, policy_round=1), digest=blocked)
    newer = [make_record(f"t-{n}", policy_digest=OTHER_DIGEST, policy_round=2) for n in range(4)]
    there.record(*newer, digest=OTHER_DIGEST)
    there.reward(*(make_feedback(record.trajectory_id) for record in newer))
    source = PolicyRef(round=2, digest=OTHER_DIGEST, key=layout.policy(2))
    collect(local_config, 3, source=source)
    found = look(local_config)
    assert found.holds
    assert found.excluded == {"SurplusOfRound": 1, "OtherPolicy": 1}
    assert found.trained == 8


def test_a_trajectory_claimed_twice_breaks_the_equation(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    collect(local_config)
    forged = ledger.standing(there.store, 1).model_copy(update={"round": 2})
    there.store.put(layout.ledger(2), forged.model_dump_json().encode())
    found = look(local_config)
    assert not found.holds
    assert "!=" in found.equation()
    assert any("t-a: claimed twice, by rounds 1 and 2" in fault for fault in found.faults)


def test_damage_is_found_in_shards_datasets_and_ledger(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    shard = there.record(make_record("t-e"))
    collect(local_config)
    there.store.put(shard, b"damaged")
    (file,) = folders.read_manifest(there.store, layout.dataset(1)).files
    there.store.put(f"{layout.dataset(1)}/{file.path}", b"damaged")
    there.store.put(layout.ledger(2), b"damaged")
    found = look(local_config)
    assert not found.holds
    for name in (shard, file.path, layout.ledger(2)):
        assert any(name in fault for fault in found.faults), name


def test_deleted_shards_are_accounted_from_the_ledger(local_config: StoreConfig) -> None:
    there = world(local_config)
    there.play(*FOUR)
    there.record(make_record("t-greedy", reasons=["Greedy"]))
    collect(local_config)
    before = look(local_config)
    for key in list(there.store.list(layout.RECORDS)):
        there.store.delete(key)
    after = look(local_config)
    assert after.holds
    assert after.equation() == before.equation()
    assert after.notes == ["shards of 4 claimed and 1 excluded trajectories are deleted"]


ACTS = ["play", "record", "untrainable", "old", "other", "reward", "partial", "collect", "abandon"]
EVENTS = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(ACTS)), max_size=25)
OLD = NOW - 9_000_000
RECORDS: dict[str, dict[str, Any]] = {
    "play": {},
    "record": {},
    "untrainable": {"reasons": ["Greedy"]},
    "old": {"started_ms": OLD, "finished_ms": OLD},
    "other": {"policy_digest": OTHER_DIGEST, "policy_round": 1},
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
@example([(0, "play"), (0, "collect"), (0, "collect"), (1, "play"), (0, "collect"), (2, "abandon"), (0, "collect")])
def test_over_any_history_the_equation_holds_and_nothing_is_trained_twice(events: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = StoreConfig(uri=Path(folder).as_uri())
        there = world(config)
        number, recorded, claimed = 1, set(), 0
        for index, (trajectory, act) in enumerate(events):
            name = f"t-{trajectory}"
            if act in RECORDS:
                digest = RECORDS[act].get("policy_digest", DIGEST)
                there.record(make_record(name, index, **RECORDS[act]), digest=digest)
                recorded.add(name)
            if act in ("play", "reward", "partial"):
                key, at = f"k{trajectory}-{index % 3}", NOW - 20_000 + index
                changes = {"final": act != "partial", "request_ids": [], "received_ms": at}
                there.reward(make_feedback(name, idempotency_key=key, **changes))
            if act == "abandon":
                ledger.abandon(there.store, trajectory + 1)
                number = max(number, trajectory + 2)
            if act == "collect":
                settings_of = make_config(config, number, steps=1, batch_size=1)
                done = step.Collector(there.store, settings_of, lambda: NOW).look(Progress())
                number, claimed = number + (done is not None), claimed + (done is not None)
            found = look(config)
            assert found.holds, found.as_text()
            assert found.recorded == len(recorded)
        claims = [name for entry in ledger.claims_before(there.store, number) for name in entry.trajectory_ids]
        assert len(claims) == len(set(claims)) == claimed


@pytest.mark.parametrize("field", ["trained", "waiting", "expired"])
def test_a_wrong_count_shows(field: str) -> None:
    found = Audit(recorded=3, trained=1, waiting=1, expired=1)
    assert found.holds
    setattr(found, field, 2)
    assert not found.holds
    assert "DOES NOT hold" in found.as_text()
