"""``decide`` at the level of the run: requests, suspend, traffic, async mode, completion."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl.config.serving import RouteTable
from prodrl_operator.names import Step
from prodrl_operator.rounds import traffic
from prodrl_operator.rounds.decision import (
    CreateRound,
    DeleteJob,
    DeleteRound,
    DeleteServing,
    EnsureJob,
    EnsureServing,
    SuspendJob,
)
from prodrl_operator.rounds.observed import GatewayReplica, Hindrance, Observed, Reason
from tests.support import runs
from tests.support.operator_harness import digest
from tests.support.runs import PASS, ago, condition, decide, failed, job, look, scene, servers, settled


def of(observed: Observed, kind: Any, seconds: float = 0.0) -> list[Any]:
    return [item for item in settled(observed, seconds)[1].intents if isinstance(item, kind)]


# Abort and retry.


@pytest.mark.parametrize(
    "step",
    [
        Step.COLLECTING,
        Step.TRAINING,
        Step.EXPORTING,
        Step.CANARY_DEPLOYING,
        Step.GATING,
        Step.PROMOTING,
        Step.FAILED,
    ],
)
def test_an_abort_ends_the_current_round_wherever_it_stands(step: Step) -> None:
    observed = scene(step, spec={"requests": {"abortRound": 1}}, measured=PASS)
    observed, _ = settled(observed)
    assert observed.rounds[1].status.step == "Aborted"
    assert observed.run.status.handled_requests.abort_round == 1
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 0
    assert of(observed, CreateRound)[0].number == 2


def test_an_abort_after_the_commit_comes_too_late() -> None:
    gate = {"gate": {"verdict": "Pass", "digest": digest(1)}}
    observed = scene(Step.PROMOTING, status=gate)
    observed = runs.stored(observed, decide(observed))
    asked = observed.run.spec.model_copy(
        update={"requests": observed.run.spec.requests.model_copy(update={"abort_round": 1})}
    )
    observed, _ = settled(dataclasses.replace(observed, run=observed.run.model_copy(update={"spec": asked})))
    assert observed.rounds[1].status.step == "Promoted"


def test_i6_abort_comes_before_block_before_pause_before_promote() -> None:
    gate = {"canary": {"steps": [{"weight": 5, "minTrajectories": 1}]}}
    state = {"gate": {"measurements": "{}", "canary": {"index": 0, "started": ago(9)}}}

    def ends(**spec: Any) -> tuple[str, str | None]:
        judged = look(9, interim=runs.FAIL if spec.pop("is_bad") else PASS)
        full = {"gate": gate, **spec}
        observed, _ = settled(scene(Step.GATING, spec=full, status=state, measured=PASS, look=judged))
        return observed.rounds[1].status.step, observed.rounds[1].status.gate.verdict

    assert ends(is_bad=True, suspend=True, requests={"abortRound": 1})[0] == "Aborted"
    assert ends(is_bad=True, suspend=True) == ("Blocked", "Fail")
    assert ends(is_bad=False, suspend=True) == ("Gating", None)
    assert ends(is_bad=False) == ("Promoted", "Pass")


def test_a_failed_round_goes_on_from_the_failed_step_with_a_fresh_attempt() -> None:
    observed, _ = settled(scene(Step.TRAINING, jobs={0: failed(79)}))
    asked = observed.run.spec.model_copy(
        update={"requests": observed.run.spec.requests.model_copy(update={"retry_token": "1"})}
    )
    observed = dataclasses.replace(observed, run=observed.run.model_copy(update={"spec": asked}))
    observed, decision = settled(observed)
    assert observed.rounds[1].status.step == "Training"
    attempt = observed.rounds[1].status.attempts[0]
    assert (attempt.number, attempt.failures) == (1, 0)
    assert [item.attempt for item in decision.intents if isinstance(item, EnsureJob)] == [1]
    assert condition(decision, "Stalled")[0] == "False"
    assert observed.run.status.handled_requests.retry_token == "1"


def test_a_failed_round_goes_on_when_the_spec_was_edited() -> None:
    observed, _ = settled(scene(Step.EXPORTING, jobs={0: failed(74)}))
    run = observed.run.model_copy(update={"metadata": {**observed.run.metadata, "generation": 2}})
    observed, _ = settled(dataclasses.replace(observed, run=run))
    assert observed.rounds[1].status.step == "Exporting"


def test_a_round_that_failed_in_its_gate_deploys_again_and_measures_anew() -> None:
    observed, _ = settled(scene(Step.GATING, jobs={0: failed(65)}))
    assert observed.rounds[1].status.step == "Failed"
    assert DeleteServing(1) in settled(observed)[1].intents
    run = observed.run.model_copy(update={"metadata": {**observed.run.metadata, "generation": 2}})
    status = decide(dataclasses.replace(observed, run=run)).round_status
    assert status is not None
    assert status.step == "CanaryDeploying"
    assert [(item.step, item.number) for item in status.attempts] == [("Gating", 1)]


def test_round_0_that_failed_begins_again_under_the_edited_spec() -> None:
    observed, _ = settled(scene(Step.EXPORTING, number=0, jobs={0: failed(64)}))
    run = observed.run.model_copy(update={"metadata": {**observed.run.metadata, "generation": 2}})
    decision = decide(dataclasses.replace(observed, run=run))
    assert decision.intents == (DeleteRound(0),)
    assert decision.run_status.observed_generation == 2


def test_a_retry_token_with_nothing_to_retry_is_used_up() -> None:
    observed, _ = settled(scene(Step.TRAINING, jobs={0: job()}, spec={"requests": {"retryToken": "x"}}))
    assert observed.run.status.handled_requests.retry_token == "x"
    assert observed.rounds[1].status.step == "Training"


# Suspend.


def test_suspend_stops_running_jobs_and_starts_nothing() -> None:
    observed = scene(Step.TRAINING, spec={"suspend": True}, jobs={0: job("Running")})
    assert of(observed, SuspendJob) == [SuspendJob(1, Step.TRAINING, 0, suspend=True)]
    assert not of(scene(Step.TRAINING, spec={"suspend": True}), EnsureJob)
    assert not of(scene(Step.PROMOTED, spec={"suspend": True}), CreateRound)
    down = scene(Step.CANARY_DEPLOYING, spec={"suspend": True}, servings={0: servers()})
    assert of(down, EnsureServing) == [EnsureServing(0)]


def test_suspended_the_run_is_ready_and_says_so() -> None:
    observed = scene(Step.TRAINING, spec={"suspend": True}, jobs={0: job("Running", suspended=True)})
    _, decision = settled(observed)
    assert condition(decision, "Ready")[:2] == ("True", "Suspended")
    assert condition(decision, "Suspended")[:2] == ("True", "UserRequested")
    assert condition(decision, "Reconciling")[0] == "False"


def test_reconciling_holds_until_the_suspension_took_effect() -> None:
    observed = scene(Step.TRAINING, spec={"suspend": True}, jobs={0: job("Running")})
    assert condition(decide(observed), "Reconciling")[:2] == ("True", "ApplyingGeneration")


def test_resuming_unsuspends_the_job() -> None:
    observed = scene(Step.TRAINING, jobs={0: job("Pending", suspended=True, is_suspended_by_us=True)})
    assert of(observed, SuspendJob) == [SuspendJob(1, Step.TRAINING, 0, suspend=False)]


def test_what_somebody_else_suspended_is_theirs_to_let_go() -> None:
    """Kueue can manage Jobs that name no queue: neither takes the other's word back for ever."""
    observed = scene(Step.TRAINING, jobs={0: job("Pending", suspended=True)})
    assert not of(observed, SuspendJob)
    observed, decision = settled(observed)
    assert condition(decision, "Suspended")[:2] == ("True", "Queued")
    assert "suspended by somebody else" in observed.rounds[1].status.message


@pytest.mark.parametrize("suspend", [True, False])
@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_jobs_suspension_belongs_to_its_queue(suspend: bool, is_waiting: bool) -> None:
    """A suspended run takes it away whole instead: nothing fights over ``suspend``, and no hardware is held."""
    observed = scene(
        Step.TRAINING, spec={"suspend": suspend}, jobs={0: job("Running", is_queued=True, suspended=is_waiting)}
    )
    assert not of(observed, SuspendJob)
    assert of(observed, DeleteJob) == ([DeleteJob(1, Step.TRAINING, 0)] if suspend else [])
    assert condition(decide(observed), "Reconciling")[0] == str(suspend)
    going = scene(Step.TRAINING, spec={"suspend": suspend}, jobs={0: job("Running", is_queued=True, deleting=True)})
    assert not of(going, DeleteJob)
    assert condition(decide(going), "Reconciling")[0] == str(suspend), "its pods still hold hardware"
    ended = scene(Step.TRAINING, spec={"suspend": suspend}, jobs={0: job("Succeeded", is_queued=True)})
    assert not of(ended, DeleteJob)


# Traffic.


@given(
    weight=st.integers(0, 99),
    step=st.sampled_from(list(Step)),
    has_urls=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    suspend=st.booleans(),
    began=st.booleans(),
    since=st.integers(-100, 10_000),
)
def test_i3_routes_follow_from_status_and_always_sum_to_100(
    weight: int, step: Step, has_urls: tuple[bool, bool, bool], suspend: bool, began: bool, since: int
) -> None:
    status = {"gate": {"canary": {"index": 0, "started": ago(5)}}} if began else {}
    previous = {"round": 0, "digest": digest(0)}
    run = {"canaryWeight": weight, "previous": previous}
    observed = scene(step, number=2, spec={"suspend": suspend}, run=run, status=status)
    stable = observed.run.status.stable
    assert stable is not None
    moved = observed.run.status.model_copy(update={"stable": stable.model_copy(update={"since": ago(since)})})
    urls = {number: f"http://s{number}" for number, has in enumerate(has_urls) if has}
    served = {number: servers() for number in urls}
    observed = dataclasses.replace(
        observed, urls=urls, servings=served, run=observed.run.model_copy(update={"status": moved})
    )
    routes = traffic.routes(observed, runs.NOW)
    assert routes == traffic.routes(observed, runs.NOW)
    if stable.round not in urls:
        assert routes is None, "what the gateways have is better than nothing"
        return
    assert routes is not None
    RouteTable(version="x", routes=routes)  # checks the sum and that digests differ
    assert sum(route.weight for route in routes) in (0, 100)
    shares = {route.round: route.weight for route in routes}
    assert bool(routes) == (1 in urls), "without stable's address nobody is sent anywhere"
    is_canary = began and 2 in urls and step in (Step.GATING, Step.PROMOTING, Step.CANARY_DEPLOYING)
    if 1 in urls:
        assert shares.get(2, 0) == (weight if is_canary else 0)
        assert shares.get(0, 0) == 0


@given(weight=st.integers(0, 99), step=st.sampled_from(list(Step)))
def test_i3_a_stored_weight_that_the_round_does_not_justify_is_corrected(weight: int, step: Step) -> None:
    observed = scene(step, run={"canaryWeight": weight}, measured=PASS, jobs={0: job()} if step is Step.GATING else {})
    observed, _ = settled(observed)
    assert observed.run.status.canary_weight == 0


def test_i1_stable_is_wanted_at_every_step() -> None:
    for step in Step:
        assert 0 in traffic.servings(scene(step), runs.NOW).required, step


def test_replace_frees_the_hardware_first_and_gives_it_back() -> None:
    spec = {"serving": {"surge": "Replace"}}
    both = scene(Step.CANARY_DEPLOYING, spec=spec, servings={0: servers()}, urls={0: "http://s0"})
    assert of(both, DeleteServing) == [DeleteServing(0, only_deployment=True)]
    assert not of(both, EnsureServing)
    going = dataclasses.replace(both, servings={0: servers(deleting=True)})
    assert not of(going, EnsureServing)
    free = dataclasses.replace(both, servings={})
    assert of(free, EnsureServing) == [EnsureServing(1)]
    _, decision = settled(free)
    assert [route.round for route in decision.routes or ()] == [0], "users wait at stable's address"
    blocked = scene(Step.BLOCKED, spec=spec, servings={1: servers()}, urls={0: "http://s0", 1: "http://s1"})
    assert of(blocked, DeleteServing) == [DeleteServing(1)]
    assert not of(blocked, EnsureServing)
    assert of(dataclasses.replace(blocked, servings={}), EnsureServing) == [EnsureServing(0)]


def test_replace_gives_users_their_hardware_while_a_person_thinks() -> None:
    spec = {"serving": {"surge": "Replace"}}
    gate = {"gate": {"measurements": "{}", "verdict": "Inconclusive", "digest": digest(1)}}
    observed = scene(Step.GATING, spec=spec, status=gate, servings={1: servers()})
    assert of(observed, DeleteServing) == [DeleteServing(1)]


# Recording.


@pytest.mark.parametrize("step", [Step.PROMOTED, Step.BLOCKED])
def test_score_centering_waits_for_a_policy_that_is_served_with_heads(step: Step) -> None:
    """Switched on in one commit: the next round would collect from servers that record without heads, for nothing."""
    by_ratio = {"training": {"correction": {"type": "ImportanceSampling"}}, "onBlocked": "RestartFromStable"}
    without = {"recording": {"metadata": "SampledLogprob"}, **by_ratio}
    promoted = runs.stable_status(1, lineageRound=1) if step is Step.PROMOTED else {}
    observed = scene(step, spec=without, run=promoted)
    assert of(observed, CreateRound)
    asked = runs.make_run(None, 2).spec
    assert (asked.recording.metadata, asked.training.correction.type) == ("ScoreCentering", "ScoreCentering")
    both = dataclasses.replace(observed, run=observed.run.model_copy(update={"spec": asked}))
    assert not of(both, CreateRound)
    status, reason, message = condition(settled(both)[1], "Stalled")
    assert (status, reason) == ("True", "InvalidConfiguration")
    assert "set training.correction.type to ImportanceSampling until one round more is promoted" in message
    recording = runs.make_run(None, 2, **by_ratio).spec
    first = dataclasses.replace(observed, run=observed.run.model_copy(update={"spec": recording}))
    assert of(first, CreateRound), "recorded first"
    assert condition(settled(first)[1], "Stalled")[0] == "False"


def test_score_centering_is_not_complained_of_while_the_round_that_brings_the_heads_is_in_work() -> None:
    """AsyncOneRound would begin the next one already: it waits for that policy."""
    mode = {"mode": "AsyncOneRound"}
    training = {"training": {"correction": {"type": "ImportanceSampling"}}}
    old = runs.make_run(None, recording={"metadata": "SampledLogprob"}, **training, **mode)
    observed = scene(Step.TRAINING, spec={**training, **mode}, jobs={0: job()})
    rounds = {**observed.rounds, 0: runs.make_round(0, old, **runs.status_at(0, Step.PROMOTED))}
    spec = runs.make_run(None, 2, **mode).spec
    now = dataclasses.replace(observed, rounds=rounds, run=observed.run.model_copy(update={"spec": spec}))
    assert not of(now, CreateRound)
    assert condition(settled(now)[1], "Stalled")[0] == "False"
    assert of(observed, CreateRound)


# Keeping and finishing.


def test_the_run_completes_after_its_rounds_and_keeps_serving() -> None:
    observed = scene(
        Step.PROMOTED, spec={"rounds": {"max": 1}}, run=runs.stable_status(1, roundsFinished=1, lineageRound=1)
    )
    observed = dataclasses.replace(observed, servings={1: servers()}, urls={1: "http://s1"})
    observed, decision = settled(observed)
    assert condition(decision, "Completed")[:2] == ("True", "MaxRoundsReached")
    assert condition(decision, "Ready")[:2] == ("True", "MaxRoundsReached")
    assert EnsureServing(1) in decision.intents
    assert not of(observed, CreateRound)


# Invalid and hindered.


def test_an_invalid_spec_names_all_faults_and_changes_nothing_else() -> None:
    spec = {
        "serving": {"surge": "Replace"},
        "gate": {
            "canary": {"steps": [{"weight": 50, "minTrajectories": 1}, {"weight": 5, "minTrajectories": 1}]},
            "evaluations": [{"name": "a", "suite": "b", "metric": "c", "minItems": 9, "maxItems": 3}],
        },
    }
    observed = scene(Step.TRAINING, spec=spec, run={"canaryWeight": 3}, generation=4)
    decision = decide(observed)
    status, reason, message = condition(decision, "Stalled")
    assert (status, reason) == ("True", "InvalidSpec")
    assert all(word in message for word in ("Replace", "increase", "minItems"))
    assert (decision.intents, decision.routes, decision.round_status) == ((), None, None)
    assert decision.run_status.canary_weight == 3
    assert decision.run_status.observed_generation == 4


def test_a_hindrance_stalls_the_run_and_goes_away_by_itself() -> None:
    observed = scene(Step.TRAINING, hindrance=Hindrance(Reason.FOREIGN_OBJECT, "Job x: exists and is not ours"))
    _, decision = settled(observed)
    assert condition(decision, "Stalled")[:2] == ("True", "ForeignObject")
    assert condition(decision, "Ready")[0] == "True"
    _, decision = settled(scene(Step.TRAINING))
    assert condition(decision, "Stalled")[0] == "False"


def test_a_round_object_that_somebody_deleted_stalls_instead_of_crashing() -> None:
    observed = scene(Step.TRAINING, number=2)
    rounds = {number: this for number, this in observed.rounds.items() if number != 1}
    _, decision = settled(dataclasses.replace(observed, rounds=rounds))
    assert condition(decision, "Stalled")[:2] == ("True", "RoundMissing")
    assert not [item for item in decision.intents if isinstance(item, EnsureJob)]


def test_stable_that_does_not_serve_is_not_ready_without_a_stall() -> None:
    _, decision = settled(scene(Step.TRAINING, servings={0: servers(ready=0, waiting="CrashLoopBackOff")}))
    assert condition(decision, "Ready")[:2] == ("False", "StableUnavailable")
    assert condition(decision, "StableAvailable")[:2] == ("False", "StableUnavailable")
    assert condition(decision, "Stalled")[0] == "False"


def test_a_gateway_that_cannot_be_asked_does_not_stop_training() -> None:
    mute = (GatewayReplica("http://g", reachable=False),)
    assert of(scene(Step.TRAINING, replicas=mute), EnsureJob)
