"""The reward join as a table: what becomes of a trajectory, whatever the order in which things are read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from prodrl.collect import join
from prodrl.collect.join import Fate, Rules
from prodrl.collect.tail import Line
from prodrl.records import FeedbackEntry, Reason
from tests.support.records import DIGEST, NOW, OTHER_DIGEST, make_feedback

RULES = Rules(
    digest=DIGEST,
    collect_from_ms=NOW - 60_000,
    is_sync=True,
    reward_deadline_seconds=100,
    settle_seconds=10,
    max_sequence_tokens=50,
)


def line(turn: int = 0, **changes: Any) -> Line:
    values: dict[str, Any] = {
        "record_id": f"t-1.{turn}:0",
        "request_id": f"t-1.{turn}",
        "trajectory_id": "t-1",
        "policy_digest": DIGEST,
        "policy_round": 0,
        "started_ms": NOW - 20_000 + turn,
        "finished_ms": NOW - 19_000 + turn,
        "num_prompt": 5,
        "num_output": 3,
        "reasons": (),
        "shard": "s",
        "row": turn,
    }
    return Line(**(values | changes))


def reward(value: float = 1.0, key: str = "k", **changes: Any) -> FeedbackEntry:
    values: dict[str, Any] = {"idempotency_key": key, "feedback_id": f"f-{key}"}
    return make_feedback("t-1", value, **(values | changes))


def judge(lines: list[Line], rewards: list[FeedbackEntry], now_ms: int = NOW, rules: Rules = RULES) -> join.Judgement:
    known = join.gather({}, lines, rewards)
    return join.judge(known["t-1"], rules, now_ms)


CASES: list[tuple[str, list[Line], list[FeedbackEntry], Fate, str]] = [
    ("a scored conversation is ready", [line()], [reward()], Fate.READY, ""),
    ("an unscored one waits", [line()], [], Fate.WAITING, ""),
    ("an unscored one past its deadline is expired", [line(finished_ms=NOW - 100_001)], [], Fate.EXPIRED, ""),
    (
        "a reward after the deadline comes too late, however early it is read",
        [line(finished_ms=NOW - 150_000, started_ms=NOW - 50_000)],
        [reward(received_ms=NOW - 40_000)],
        Fate.EXPIRED,
        "",
    ),
    ("a reward that is not final does not score", [line()], [reward(final=False)], Fate.WAITING, ""),
    ("an early reward counts", [line()], [reward(received_ms=NOW - 30_000)], Fate.READY, ""),
    (
        "records on their way are waited for",
        [line()],
        [reward(request_ids=["t-1.0", "t-1.1"])],
        Fate.WAITING,
        "",
    ),
    (
        "records that never came exclude",
        [line()],
        [reward(request_ids=["t-1.0", "t-1.1"], received_ms=NOW - 10_001)],
        Fate.EXCLUDED,
        Reason.RECORD_MISSING,
    ),
    (
        "a later post that tells of more requests begins the wait again",
        [line()],
        [reward(received_ms=NOW - 15_000), reward(2.0, "l", request_ids=["t-1.1"], received_ms=NOW - 1)],
        Fate.WAITING,
        "",
    ),
    ("an empty list of requests proves nothing yet", [line()], [reward(request_ids=[])], Fate.WAITING, ""),
    (
        "an empty list of requests is enough after settling",
        [line()],
        [reward(request_ids=[], received_ms=NOW - 10_001)],
        Fate.READY,
        "",
    ),
    (
        "two policies in one conversation exclude",
        [line(), line(1, policy_digest=OTHER_DIGEST)],
        [reward(request_ids=["t-1.0", "t-1.1"])],
        Fate.EXCLUDED,
        Reason.MIXED_POLICY,
    ),
    (
        "what began while the last round trained is excluded",
        [line(started_ms=NOW - 60_001), line(1)],
        [reward(request_ids=["t-1.0", "t-1.1"])],
        Fate.EXCLUDED,
        Reason.RECORDED_WHILE_TRAINING,
    ),
    (
        "one untrainable turn excludes with its reason",
        [line(), line(1, reasons=("Greedy", "Multimodal"))],
        [reward()],
        Fate.EXCLUDED,
        "Greedy",
    ),
    ("an aborted turn excludes", [line(reasons=("Aborted",))], [reward()], Fate.EXCLUDED, Reason.ABORTED),
    (
        "a failed request without a record excludes",
        [line()],
        [reward(failed_request_ids=["t-1.9"])],
        Fate.EXCLUDED,
        Reason.ENGINE_ERROR,
    ),
    ("nothing sampled excludes", [line(num_output=0)], [reward()], Fate.EXCLUDED, Reason.EMPTY),
    ("too long excludes", [line(num_prompt=48)], [reward()], Fate.EXCLUDED, Reason.TOO_LONG),
    ("exactly the limit does not", [line(num_prompt=47)], [reward()], Fate.READY, ""),
    ("a reward that is no number excludes", [line()], [reward(float("nan"))], Fate.EXCLUDED, Reason.INVALID_REWARD),
    (
        "infinities that cancel are no number either",
        [line()],
        [reward(float("inf")), reward(float("-inf"), "p", final=False)],
        Fate.EXCLUDED,
        Reason.INVALID_REWARD,
    ),
]


@pytest.mark.parametrize(("lines", "rewards", "fate", "reason"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_fate(lines: list[Line], rewards: list[FeedbackEntry], fate: Fate, reason: str) -> None:
    assert judge(lines, rewards) == join.Judgement(fate, str(reason))


def test_in_asynchronous_mode_it_does_not_matter_when_a_conversation_began() -> None:
    rules = Rules(DIGEST, NOW, False, 100, 10, 50)
    assert judge([line()], [reward()], rules=rules).fate is Fate.READY


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_final_reward_received_wins_and_partial_ones_are_added(order: tuple[int, ...]) -> None:
    posts = [
        reward(1.0, "first", received_ms=NOW - 3),
        reward(0.25, "partial", final=False, received_ms=NOW - 1),
        reward(-2.0, "revision", received_ms=NOW - 2),
    ]
    known = join.gather({}, [line()], [posts[index] for index in order])
    assert known["t-1"].reward == -1.75
    assert known["t-1"].scored_ms == NOW - 3


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_repeated_key_counts_once_by_the_post_that_came_first(is_reversed: bool) -> None:
    posts = [
        reward(0.5, final=False, received_ms=NOW - 2, request_ids=["t-1.0"]),
        reward(0.75, final=False, received_ms=NOW - 1, request_ids=["t-1.1"]),
        reward(1.0, "final"),
    ]
    known = join.gather({}, [line()], reversed(posts) if is_reversed else posts)
    assert known["t-1"].reward == 1.5
    assert known["t-1"].answered_requests() == {"t-1.0", "t-1.1"}


def test_rewards_of_unknown_conversations_wait_and_are_joined_when_the_records_come() -> None:
    known = join.gather({}, [], [reward()])
    assert join.sort_out(known, RULES, NOW, set()) == ([], {})
    join.gather(known, [line(), line()], [])
    ready, _ = join.sort_out(known, RULES, NOW, set())
    assert [t.id for t in ready] == ["t-1"]
    assert ready[0].num_tokens == 3


def test_a_dataset_is_filled_by_the_time_of_the_reward_then_by_id() -> None:
    times = {"t-c": 5, "t-a": 5, "t-b": 3, "t-d": 9}
    lines = [line(trajectory_id=name, record_id=name, request_id=f"{name}.0") for name in times]
    posts = [make_feedback(name, received_ms=NOW - 1000 + at) for name, at in times.items()]
    ready, _ = join.sort_out(join.gather({}, lines, posts), RULES, NOW, {"t-d"})
    assert [t.id for t in ready] == ["t-b", "t-a", "t-c"]


def test_what_cannot_be_taken_is_named_and_the_claimed_are_left_alone() -> None:
    lines = [
        line(trajectory_id=name, record_id=name, request_id=f"{name}.0", **changes)
        for name, changes in {
            "t-greedy": {"reasons": ("Greedy",)},
            "t-late": {"finished_ms": NOW - 100_001},
            "t-waiting": {},
            "t-claimed": {"reasons": ("Greedy",)},
            "t-elsewhere": {"policy_digest": OTHER_DIGEST},
        }.items()
    ]
    ready, refused = join.sort_out(join.gather({}, lines, []), RULES, NOW, {"t-claimed"})
    assert ready == []
    assert refused == {"t-greedy": "Greedy", "t-late": "Expired"}
