"""``decide`` around the gate: measurements, canary traffic, verdicts, persons, promotion, and what a block means."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prodrl_operator.api.judgement import Counters
from prodrl_operator.names import Step
from prodrl_operator.rounds.decision import CreateRound, DeleteServing, EnsureJob, EnsureServing
from prodrl_operator.rounds.observed import GatewayReplica, Observed
from tests.support import runs
from tests.support.operator_harness import digest
from tests.support.runs import (
    ERROR,
    FAIL,
    INCONCLUSIVE,
    PASS,
    ago,
    condition,
    decide,
    look,
    scene,
    servers,
    settled,
    succeeded,
)

CANARY = {"canary": {"steps": [{"weight": 5, "minTrajectories": 20}, {"weight": 50, "minTrajectories": 50}]}}
MEASURED: dict[str, Any] = {"measurements": "{}"}
MUTE = (GatewayReplica("http://g:8081", reachable=False),)


def gating(gate: dict[str, Any] | None = None, **changes: Any) -> Observed:
    """Round 1 measured and within limits, canary steps configured."""
    spec = {"gate": CANARY} | changes.pop("spec", {})
    defaults = {"measured": PASS, "look": look()}
    return scene(Step.GATING, spec=spec, status={"gate": MEASURED | (gate or {})}, **(defaults | changes))


def at_step(index: int, *, started: float = 10.0, **changes: Any) -> Observed:
    """In the middle of a canary step."""
    weight = {0: 5, 1: 50, 2: 50}[index]
    run = {"canaryWeight": weight} | changes.pop("run", {})
    return gating({"canary": {"index": index, "started": ago(started)}}, run=run, **changes)


def verdict(observed: Observed) -> tuple[str, str | None]:
    status = observed.rounds[1].status
    return status.step, status.gate.verdict


# Measurements.


def test_measurements_are_kept_before_they_are_judged() -> None:
    observed = scene(Step.GATING, jobs={0: succeeded(1, Step.GATING)})
    status = decide(observed).round_status
    assert status is not None
    assert status.gate.verdict is None
    assert "mean_abs" in (status.gate.measurements or "")


def test_a_gate_that_passed_without_canary_steps_promotes() -> None:
    observed = gating(spec={"gate": {}})
    status = decide(observed).round_status
    assert status is not None
    assert (status.step, status.gate.verdict, status.gate.digest) == ("Promoting", "Pass", digest(1))


@pytest.mark.parametrize("judgement", [FAIL, ERROR])
def test_a_fail_and_an_error_block(judgement: Any) -> None:
    observed, decision = settled(gating(measured=judgement))
    assert verdict(observed) == ("Blocked", judgement.verdict)
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 0
    assert condition(decision, "Stalled")[:2] == ("True", "GateBlocked")
    assert judgement.message in condition(decision, "Stalled")[2]


def test_round_0_that_fails_its_gate_stalls_the_run_as_nothing_is_stable() -> None:
    observed = scene(Step.GATING, number=0, status={"gate": MEASURED}, measured=FAIL)
    observed, decision = settled(observed)
    assert observed.rounds[0].status.step == "Failed"
    assert condition(decision, "Stalled")[:2] == ("True", "GateBlocked")
    assert condition(decision, "Ready")[0] == "False"


def test_an_inconclusive_gate_pauses_and_says_what_a_person_can_do() -> None:
    observed, decision = settled(gating(measured=INCONCLUSIVE))
    assert verdict(observed) == ("Gating", "Inconclusive")
    status, reason, message = condition(decision, "Stalled")
    assert (status, reason) == ("True", "GateInconclusive")
    assert all(word in message for word in ("approveRound: 1", "abortRound: 1", "retryToken"))
    assert not [item for item in decision.intents if isinstance(item, (EnsureJob, CreateRound))]


def test_an_inconclusive_gate_blocks_where_the_run_says_so() -> None:
    observed, _ = settled(gating(measured=INCONCLUSIVE, spec={"gate": CANARY | {"onInconclusive": "Block"}}))
    assert verdict(observed) == ("Blocked", "Inconclusive")


# Canary traffic.


def test_the_first_canary_step_writes_weight_and_baseline_at_once() -> None:
    totals = Counters(requests=9, trajectories=7, reward_sum=1.25)
    decision = decide(gating(look=look(candidate=totals, stable=Counters(requests=100))))
    assert decision.round_status is not None
    canary = decision.round_status.gate.canary
    assert canary is not None
    assert (canary.index, canary.baseline_candidate["trajectories"]) == (0, 7)
    assert canary.baseline_candidate["rewardSum"] == 1_250_000
    assert canary.baseline_stable["requests"] == 100
    assert decision.run_status.canary_weight == 5


def test_the_canary_waits_for_the_gateways_counters() -> None:
    observed, decision = settled(gating(look=None, replicas=MUTE))
    assert observed.rounds[1].status.gate.canary is None
    assert decision.requeue_after_seconds is not None


def test_a_canary_step_waits_for_its_trajectories() -> None:
    observed, _ = settled(at_step(0, look=look(19)))
    assert observed.rounds[1].status.gate.canary is not None
    assert observed.rounds[1].status.gate.canary.index == 0
    assert observed.run.status.canary_weight == 5
    decision = decide(at_step(0, look=look(20)))
    assert decision.run_status.canary_weight == 50


def test_after_the_last_canary_step_the_round_is_promoted() -> None:
    observed, _ = settled(at_step(1, look=look(50)))
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 1


@pytest.mark.parametrize("index", [0, 1])
def test_a_guard_blocks_at_any_look(index: int) -> None:
    observed, _ = settled(at_step(index, look=look(1, interim=FAIL)))
    assert verdict(observed) == ("Blocked", "Fail")
    assert observed.run.status.canary_weight == 0


def test_a_canary_step_without_enough_traffic_by_its_deadline_is_inconclusive() -> None:
    observed, decision = settled(at_step(0, started=3601, look=look(19)))
    assert verdict(observed) == ("Gating", "Inconclusive")
    assert observed.run.status.canary_weight == 0
    assert "19 of 20" in condition(decision, "Stalled")[2]


def test_no_data_is_never_a_pass_when_the_gateway_cannot_be_asked() -> None:
    observed, _ = settled(at_step(1, started=3601, look=None, replicas=MUTE))
    assert verdict(observed) == ("Gating", "Inconclusive")


def test_what_only_the_end_can_judge_waits_for_the_deadline() -> None:
    observed, _ = settled(at_step(1, look=look(60, final=FAIL)))
    assert verdict(observed) == ("Gating", None)
    observed, _ = settled(at_step(1, started=3601, look=look(60, final=FAIL)))
    assert verdict(observed) == ("Blocked", "Fail")
    observed, _ = settled(at_step(1, started=3601, look=look(60, final=INCONCLUSIVE)))
    assert verdict(observed) == ("Gating", "Inconclusive")


def test_counters_that_went_backwards_are_counted_again_from_there() -> None:
    less = look(candidate=Counters(trajectories=3), is_behind=True)
    decision = decide(at_step(0, look=less))
    assert decision.round_status is not None
    canary = decision.round_status.gate.canary
    assert canary is not None
    assert (canary.index, canary.baseline_candidate["trajectories"]) == (0, 3)
    assert canary.started == ago(10), "the deadline runs on"


def test_a_candidate_that_is_stables_very_bytes_needs_no_canary() -> None:
    observed = gating()
    policy = observed.rounds[1].status.policy
    assert policy is not None
    same = policy.model_copy(update={"digest": digest(0)})
    status = observed.rounds[1].status.model_copy(update={"policy": same})
    rounds = {**observed.rounds, 1: observed.rounds[1].model_copy(update={"status": status})}
    observed, decision = settled(dataclasses.replace(observed, rounds=rounds))
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 1
    assert decision.routes is not None
    assert len({route.digest for route in decision.routes}) == len(decision.routes)


def test_suspended_no_traffic_goes_to_the_candidate_and_guards_still_judge() -> None:
    spec = {"suspend": True, "gate": CANARY}
    observed, _ = settled(at_step(0, spec=spec, look=look(99)))
    assert observed.run.status.canary_weight == 0
    assert verdict(observed) == ("Gating", None)
    observed, _ = settled(at_step(0, spec=spec, look=look(99, interim=FAIL)))
    assert verdict(observed) == ("Blocked", "Fail")


def test_servers_that_crash_during_the_canary_block_the_candidate() -> None:
    crashed = servers(ready=0, restarts=3, last_exit="OOMKilled", exit_code=137)
    observed, _ = settled(at_step(0, servings={0: servers(), 1: crashed}))
    assert verdict(observed) == ("Blocked", "Error")
    assert observed.rounds[1].status.reason == "OutOfMemory"


# Persons.

REQUIRED = CANARY | {"approval": "Required"}


def test_a_gate_that_passed_waits_for_approval_where_it_is_required() -> None:
    observed, decision = settled(at_step(2, spec={"gate": REQUIRED}))
    assert observed.rounds[1].status.reason == "AwaitingApproval"
    assert verdict(observed) == ("Gating", None)
    assert observed.run.status.canary_weight == 50
    assert condition(decision, "Stalled")[0] == "False"
    assert condition(decision, "Ready")[0] == "True"


def test_an_approval_promotes_and_is_marked_as_handled() -> None:
    observed, _ = settled(at_step(2, spec={"gate": REQUIRED, "requests": {"approveRound": 1}}))
    assert observed.run.status.handled_requests.approve_round == 1
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 1


def test_an_approval_of_another_round_is_none() -> None:
    observed, _ = settled(at_step(2, spec={"gate": REQUIRED, "requests": {"approveRound": 2}}))
    assert observed.rounds[1].status.reason == "AwaitingApproval"


def test_an_inconclusive_round_that_a_person_approved_is_promoted() -> None:
    gate = MEASURED | {"verdict": "Inconclusive", "digest": digest(1)}
    observed, _ = settled(gating(gate, measured=INCONCLUSIVE, spec={"requests": {"approveRound": 1}}))
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 1
    assert observed.run.status.history[-1].verdict == "Inconclusive"
    assert observed.run.status.history[-1].reason == "Approved"


def test_a_retry_measures_an_inconclusive_round_again_with_a_new_attempt() -> None:
    gate = MEASURED | {"verdict": "Inconclusive", "digest": digest(1)}
    observed, decision = settled(gating(gate, measured=None, look=None, spec={"requests": {"retryToken": "again"}}))
    assert observed.run.status.handled_requests.retry_token == "again"
    assert condition(decision, "Stalled")[0] == "False"
    wanted = [item for item in decision.intents if isinstance(item, EnsureJob)]
    assert [(item.step, item.attempt) for item in wanted] == [(Step.GATING, 1)]


# Promotion.


def promoting(**changes: Any) -> Observed:
    gate = {"gate": {"verdict": "Pass", "digest": digest(1)}}
    return scene(Step.PROMOTING, status=gate | changes.pop("status", {}), **changes)


def test_the_commit_is_one_write_of_the_run_alone() -> None:
    decision = decide(promoting(run={"consecutiveBlocked": 2, "roundsFinished": 3}))
    status = decision.run_status
    assert (decision.round_status is None) or decision.round_status.step == "Promoting"
    assert (status.stable.round, status.previous.round) == (1, 0)  # type: ignore[union-attr]
    assert (status.lineage_round, status.consecutive_blocked, status.rounds_finished) == (1, 0, 4)
    assert [item.number for item in status.history] == [0, 1]
    assert status.last_gate is not None
    assert status.last_gate.verdict == "Pass"
    assert decision.intents == ()


def test_a_committed_round_is_promoted_once_every_replica_follows() -> None:
    observed = runs.stored(promoting(), decide(promoting()))
    late = dataclasses.replace(observed, routes_version="v2")
    assert settled(late)[0].rounds[1].status.step == "Promoting"
    assert not [item for item in settled(late)[1].intents if isinstance(item, CreateRound)]
    assert settled(observed)[0].rounds[1].status.step == "Promoted"


def test_a_commit_is_never_made_twice() -> None:
    observed = runs.stored(promoting(), decide(promoting()))
    observed, _ = settled(observed)
    assert [item.number for item in observed.run.status.history] == [0, 1]
    assert observed.run.status.rounds_finished == 1


@pytest.mark.parametrize(
    "gate",
    [
        {},
        {"verdict": "Fail", "digest": digest(1)},
        {"verdict": "Error", "digest": digest(1)},
        {"verdict": "Inconclusive", "digest": digest(1)},
        {"verdict": "Pass", "digest": digest(2)},
        {"verdict": "Pass"},
    ],
)
def test_i4_no_promotion_without_a_verdict_on_that_digest(gate: dict[str, Any]) -> None:
    observed, _ = settled(promoting(status={"gate": gate}))
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 0


def test_a_candidate_that_stopped_serving_is_not_promoted() -> None:
    down = {0: servers(), 1: servers(ready=0)}
    observed, _ = settled(promoting(servings=down))
    assert observed.rounds[1].status.step == "Promoting"
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 0


def test_the_previous_policy_drains_and_goes() -> None:
    busy = GatewayReplica("http://g", reachable=True, version=runs.VERSION, conversations={digest(0): 3})
    observed = dataclasses.replace(runs.stored(promoting(), decide(promoting())), replicas=(busy,))
    observed, decision = settled(observed)
    assert {route.round: route.weight for route in decision.routes or ()} == {1: 100, 0: 0}
    assert DeleteServing(0) not in settled(observed, seconds=59)[1].intents
    _, decision = settled(observed, seconds=61)
    assert DeleteServing(0) in decision.intents
    assert [route.round for route in decision.routes or ()] == [1]


def test_the_previous_policy_goes_early_when_no_conversation_is_left() -> None:
    observed = runs.stored(promoting(), decide(promoting()))
    assert DeleteServing(0) in settled(observed)[1].intents
    old = dataclasses.replace(observed, settled_versions=frozenset({"v2"}), routes_version="v2")
    assert DeleteServing(0) not in settled(old)[1].intents, "a replica with old routes may begin more there"
    unknown = dataclasses.replace(observed, replicas=MUTE)
    assert DeleteServing(0) not in settled(unknown)[1].intents


def test_the_previous_policy_stays_while_a_ready_replica_may_still_begin_conversations_on_it() -> None:
    """It does not answer the operator, but users reach it: the routes that it has are the old ones."""
    observed = runs.stored(promoting(), decide(promoting()))
    promoted, _ = settled(observed)
    for replicas, is_gone in (
        (MUTE, False),
        ((*promoted.replicas, *MUTE), False),
        (promoted.replicas, True),
        ((), True),
    ):
        _, decision = settled(dataclasses.replace(observed, replicas=replicas), seconds=3600)
        assert (DeleteServing(0) in decision.intents) is is_gone, replicas


# Blocks.


def blocked(choice: str, reason: str = "GateBlocked", **changes: Any) -> Observed:
    """Round 2 was just blocked; round 1 is stable."""
    spec = {"onBlocked": choice} | changes.pop("spec", {})
    gate = {"verdict": "Fail", "message": "worse", "digest": digest(2)}
    observed = scene(
        Step.BLOCKED,
        number=2,
        spec=spec,
        status={"reason": reason, "gate": gate, **_trained()},
        run={"canaryWeight": 5, "lineageRound": 1} | changes.pop("run", {}),
        **changes,
    )
    observed.servings[2] = servers()  # type: ignore[index]
    observed.urls[2] = "http://s2"  # type: ignore[index]
    return observed


def _trained() -> dict[str, Any]:
    return {name: value for name, value in runs.status_at(2, Step.PROMOTED).items() if name in ("checkpoint", "policy")}


def next_round(observed: Observed) -> CreateRound | None:
    return next((item for item in settled(observed)[1].intents if isinstance(item, CreateRound)), None)


def test_a_block_sends_traffic_back_and_removes_the_candidate() -> None:
    observed, decision = settled(blocked("HaltForHuman"))
    assert observed.run.status.canary_weight == 0
    assert [route.round for route in decision.routes or ()] == [1]
    assert DeleteServing(2) in decision.intents
    assert EnsureServing(1) in decision.intents


def test_halt_for_human_waits_for_a_retry_token_and_goes_on_from_stable() -> None:
    observed, decision = settled(blocked("HaltForHuman"))
    assert (observed.run.status.halted_round, observed.run.status.lineage_round) == (2, 1)
    status, reason, message = condition(decision, "Stalled")
    assert (status, reason) == ("True", "GateBlocked")
    assert "worse" in message
    assert "round 1 stays stable" in message
    assert next_round(observed) is None
    asked = observed.run.spec.model_copy(
        update={"requests": observed.run.spec.requests.model_copy(update={"retry_token": "go"})}
    )
    released = dataclasses.replace(observed, run=observed.run.model_copy(update={"spec": asked}))
    created = next_round(released)
    assert created is not None
    assert (created.number, created.lineage_round) == (3, 1)


def test_an_approval_or_a_spec_edit_does_not_release_a_halt() -> None:
    observed, _ = settled(blocked("HaltForHuman"))
    spec = observed.run.spec.model_copy(
        update={"requests": observed.run.spec.requests.model_copy(update={"approve_round": 2})}
    )
    run = observed.run.model_copy(update={"spec": spec, "metadata": {**observed.run.metadata, "generation": 9}})
    assert next_round(dataclasses.replace(observed, run=run)) is None


@pytest.mark.parametrize(("choice", "lineage"), [("ContinueLineage", 2), ("RestartFromStable", 1)])
def test_what_becomes_of_the_trainer_after_a_block(choice: str, lineage: int) -> None:
    created = next_round(blocked(choice))
    assert created is not None
    assert (created.number, created.lineage_round) == (3, lineage)
    assert created.source is not None
    assert created.source.round == 1


def test_too_many_blocks_in_a_row_stall_whatever_the_run_says() -> None:
    observed, decision = settled(blocked("ContinueLineage", run={"consecutiveBlocked": 2}))
    assert condition(decision, "Stalled")[:2] == ("True", "ConsecutiveBlocksExceeded")
    assert next_round(observed) is None


@pytest.mark.parametrize("reason", ["ImagePullFailed", "InsufficientCapacity", "CredentialsRejected"])
def test_a_candidate_that_never_ran_halts_whatever_the_run_says(reason: str) -> None:
    _, decision = settled(blocked("ContinueLineage", reason=reason))
    assert condition(decision, "Stalled")[:2] == ("True", reason)


def test_a_block_is_accounted_once() -> None:
    observed, _ = settled(blocked("ContinueLineage"))
    observed, _ = settled(observed)
    status = observed.run.status
    assert [item.number for item in status.history][-1] == 2
    assert (status.consecutive_blocked, status.rounds_finished) == (1, 1)
    assert status.last_gate is not None
    assert (status.last_gate.round, status.last_gate.verdict) == (2, "Fail")
