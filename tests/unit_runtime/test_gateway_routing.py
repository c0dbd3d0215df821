"""Placing conversations, health, identity and what is kept over a restart: pure parts, no servers."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from scipy import stats as statistics

from prodrl.gateway import identity, spool, wire
from prodrl.gateway.routing import Conversations, Health, Router, place
from prodrl.gateway.stats import Stats, Trails, render_metrics
from tests.support.upstream import digest, table

IDS = [identity.trajectory_id("alice", f"talk-{number}") for number in range(20_000)]


@pytest.mark.parametrize("weights", [(95, 5), (50, 50), (1, 99), (34, 33, 33)])
def test_new_conversations_follow_the_weights(weights):
    routes = table(*((letter, "http://x", weight) for letter, weight in zip("abc", weights, strict=False))).routes
    placed = [place(trajectory, routes).digest for trajectory in IDS]
    counts = [placed.count(route.digest) for route in routes]
    expected = [len(IDS) * weight / 100 for weight in weights]
    assert statistics.chisquare(counts, expected).pvalue > 1e-3  # the ids are fixed: this never flickers
    assert placed == [place(trajectory, routes).digest for trajectory in IDS]


def test_a_growing_canary_keeps_what_it_had():
    def candidates(weight: int) -> set[str]:
        routes = table(("a", "http://x", 100 - weight), ("b", "http://y", weight)).routes
        return {trajectory for trajectory in IDS if place(trajectory, routes).digest == digest("b")}

    shares = [candidates(weight) for weight in (0, 5, 50, 100)]
    assert shares[0] == set()
    assert shares[0] < shares[1] < shares[2] < shares[3] == set(IDS)


def test_a_policy_of_weight_0_gets_nobody_new():
    routes = table(("a", "http://x", 100), ("b", "http://y", 0)).routes
    assert {place(trajectory, routes).digest for trajectory in IDS} == {digest("a")}
    assert place(IDS[0], ()) is None


def router(*routes: tuple[str, str, int]) -> Router:
    made = Router(Conversations(60.0), Health(1.0))
    made.apply(table(*routes))
    return made


def test_an_idle_conversation_is_placed_anew_after_the_sticky_time():
    r = router(("a", "http://x", 100), ("b", "http://y", 0))
    assert r.commit("t", digest("a"), now=0.0)
    assert not r.commit("t", digest("a"), now=50.0)
    r.apply(table(("a", "http://x", 0), ("b", "http://y", 100), version="2"))
    assert r.choose("t", now=100.0).route.digest == digest("a")
    assert r.choose("t", now=111.0).route.digest == digest("b")
    assert r.conversations.active(111.0) == {}


def test_the_number_of_conversations_is_bounded():
    seats = Conversations(1e9, max_size=10)
    for number in range(100):
        seats.hold(f"t{number}", digest("a"), float(number))
    assert seats.active(100.0) == {digest("a"): 10}
    assert seats.get("t99", 100.0)
    assert seats.get("t0", 100.0) is None


@hypothesis.given(st.lists(st.tuples(st.sampled_from("tuvwx"), st.sampled_from("ab"), st.integers(0, 30)), max_size=60))
def test_active_counts_equal_a_recount(events):
    seats = Conversations(40.0, max_size=4)
    now = 0.0
    for name, letter, step in events:
        now += step
        seats.hold(name, digest(letter), now)
        recount: dict[str, int] = {}
        for _, policy, _ in seats.items():
            recount[policy] = recount.get(policy, 0) + 1
        assert seats.active(now) == recount


def test_when_the_own_policy_is_avoided_only_stable_takes_over():
    r = router(("a", "http://x", 90), ("b", "http://y", 10))
    r.commit("t", digest("b"), 0.0)
    r.commit("u", digest("a"), 0.0)
    moved = r.choose("t", 0.0, {digest("b")})
    assert (moved.route.digest, moved.left) == (digest("a"), digest("b"))
    assert r.choose("u", 0.0, {digest("a")}) is None
    assert r.choose("new", 0.0, {digest("a")}).route.digest == digest("b")


def test_health_is_down_after_the_window_and_probed_once_a_second():
    health = Health(2.0)
    health.failed("d", 0.0)
    assert not health.is_down("d", 1.9)
    assert health.is_down("d", 2.0)
    assert [health.may_probe("d", at) for at in (2.0, 2.5, 3.1)] == [True, False, True]
    health.succeeded("d")
    assert not health.is_down("d", 9.0)


def test_a_new_address_of_a_policy_is_not_held_guilty():
    r = router(("a", "http://x", 100))
    r.health.failed(digest("a"), 0.0)
    r.apply(table(("a", "http://z", 100), version="2"))
    assert not r.health.is_down(digest("a"), 9.0)


@hypothesis.given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.text(max_size=40))
def test_internal_ids_of_two_keys_never_meet(one, two, name):
    mine = identity.trajectory_id(one, name)
    assert mine.startswith("t-")
    assert "." not in mine
    assert identity.trajectory_id(one, mine) == mine
    if one != two:
        assert identity.trajectory_id(two, name) != mine
        with pytest.raises(identity.IdentityError, match="another API key"):
            identity.trajectory_id(two, mine)


def test_a_header_and_a_body_name_the_same_conversation():
    assert identity.name_in_header("caf\u00e9".encode()) == "caf\u00e9"
    body = '{"session_id": "caf\u00e9"}'.encode()
    assert identity.name_in_body(b"application/json; charset=utf-8", body) == "caf\u00e9"
    assert identity.name_in_body(b"text/plain", body) is None
    assert identity.name_in_body(b"application/json", b'{"session_id": ') is None
    assert identity.name_in_body(b"application/json", b'["session_id"]') is None
    with pytest.raises(identity.IdentityError, match="at most 512"):
        identity.trajectory_id("", "x" * 513)


def test_headers_of_the_connection_go_no_further():
    given = [
        (b"connection", b"close, X-One"),
        (b"x-one", b"1"),
        (b"te", b"trailers"),
        (b"accept", b"a"),
        (b"accept", b"b"),
    ]
    assert wire.upstream_headers(given, "r") == [(b"accept", b"a"), (b"accept", b"b"), (b"x-request-id", b"r")]
    back = [(b"Transfer-Encoding", b"chunked"), (b"X-ProdRL-Policy", b"forged"), (b"Content-Type", b"x")]
    assert wire.client_headers(back, [(b"o", b"1")]) == [(b"Content-Type", b"x"), (b"o", b"1")]


def test_counters_come_back_and_what_was_in_flight_counts_as_failed(tmp_path):
    stats = Stats()
    for outcome in ("answered", "aborted", None):
        stats.entered("d")
        if outcome:
            stats.left("d", outcome)
    stats.rewarded("d", 2.0)
    stats.rewarded("d", -1.0)
    stats.count("unauthorised", 3)
    spool.Spool(tmp_path).save(stats.changes, stats.snapshot(), [], [])
    back = spool.Spool(tmp_path).load_stats()
    policy = back.policies["d"]
    assert (policy.requests, policy.answered, policy.aborted, policy.failed) == (3, 1, 1, 1)
    assert (policy.feedback, policy.reward_sum, policy.reward_squares, back.unauthorised) == (2, 1.0, 5.0, 3)
    assert back.inflight == {}
    assert 'prodrl_gateway_answered_total{policy="d"} 1' in render_metrics(back, {})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"policies": {"d": {"nonsense": 1}}}', '{"policies": 5}'])
def test_a_damaged_snapshot_begins_anew(tmp_path, content):
    (tmp_path / "stats.json").write_text(content)
    assert spool.Spool(tmp_path).load_stats().policies == {}


def test_seats_come_back_and_a_torn_line_is_skipped(tmp_path):
    seats = Conversations(1000.0)
    for trajectory in IDS[:5]:
        seats.hold(trajectory, digest("a"), 100.0)
    first = spool.Spool(tmp_path)
    first.save(0, {}, seats.take_journal(), [])
    seats.hold(IDS[0], digest("b"), 200.0)
    first.save(0, {}, seats.take_journal(), [])
    with (tmp_path / "conversations.log").open("a") as log:
        log.write(f"{IDS[5]} {digest('a')} 30")
    back = Conversations(1000.0)
    spool.Spool(tmp_path).load_conversations(back, 300.0)
    assert {trajectory: policy for trajectory, policy, _ in back.items()} == {
        **dict.fromkeys(IDS[1:5], digest("a")),
        IDS[0]: digest("b"),
    }
    assert len((tmp_path / "conversations.log").read_text().splitlines()) == 5
    late = Conversations(1000.0)
    spool.Spool(tmp_path).load_conversations(late, 1150.0)
    assert [trajectory for trajectory, _, _ in late.items()] == [IDS[0]]


def test_trails_are_bounded():
    trails = Trails(max_trajectories=2)
    for number in range(300):
        trails.add("a", f"a.{number}", is_failed=False)
    trails.add("b", "b.1", is_failed=True)
    assert len(trails.of("a")[0]) == 256
    trails.add("c", "c.1", is_failed=False)
    assert trails.of("a") == ([], [])
    assert trails.of("b") == ([], ["b.1"])
