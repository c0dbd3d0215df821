"""Faults that users of neighbouring operators reported in public: each kind must not happen here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prodrl_operator.names import Step
from prodrl_operator.rounds.decision import DeleteJob, DeleteServing, EnsureJob, EnsureServing
from tests.support import runs
from tests.support.operator_harness import digest
from tests.support.runs import INCONCLUSIVE, PASS, ago, condition, decide, failed, job, look, scene, servers, settled


def candidate(since: float, **view: Any) -> Any:
    """Round 1's servers do not come up."""
    down = {0: servers(), 1: servers(ready=0, **view)}
    return settled(scene(Step.CANARY_DEPLOYING, servings=down, since=since))


def test_an_image_that_cannot_be_pulled_stalls_the_run_fast_and_removes_the_candidate() -> None:
    observed, decision = candidate(61, waiting="ImagePullBackOff", waiting_message="no such tag")
    assert observed.rounds[1].status.step == "Blocked"
    assert condition(decision, "Stalled")[:2] == ("True", "ImagePullFailed")
    assert "no such tag" in condition(decision, "Stalled")[2]
    assert DeleteServing(1) in decision.intents
    assert EnsureServing(0) in decision.intents


def test_a_registry_may_be_away_for_a_minute() -> None:
    assert candidate(59, waiting="ErrImagePull")[0].rounds[1].status.step == "CanaryDeploying"
    assert candidate(1, waiting="InvalidImageName")[0].rounds[1].status.step == "Blocked"


def test_a_bad_stable_does_not_hold_up_a_good_candidate() -> None:
    broken = {0: servers(ready=0, restarts=9, last_exit="OOMKilled"), 1: servers()}
    intents = settled(scene(Step.GATING, servings=broken))[1].intents
    gate = next(item for item in intents if isinstance(item, EnsureJob))
    assert gate.stable is None, "it is measured without a baseline"
    observed, _ = settled(scene(Step.GATING, servings=broken, status={"gate": {"measurements": "{}"}}, measured=PASS))
    assert observed.rounds[1].status.step == "Promoted"


@pytest.mark.parametrize("asked", [0, 1, 3, 99])
def test_an_abort_of_another_round_does_nothing_but_say_so(asked: int) -> None:
    spec = {"requests": {"abortRound": asked}}
    observed = scene(Step.TRAINING, number=2, spec=spec, jobs={0: job()})
    decision = decide(observed)
    after, settled_decision = settled(observed)
    assert after.rounds[2].status.step == "Training"
    assert after.run.status.handled_requests.abort_round == asked
    assert EnsureServing(1) in settled_decision.intents
    assert not [item for item in settled_decision.intents if isinstance(item, (DeleteJob, DeleteServing))]
    assert [note.reason for note in decision.events if note.reason == "RequestIgnored"] == ["RequestIgnored"] * (
        asked != 0
    )


def test_time_never_turns_an_inconclusive_verdict_into_a_promotion() -> None:
    gate = {"gate": {"measurements": "{}", "verdict": "Inconclusive", "digest": digest(1)}}
    observed = scene(Step.GATING, status=gate, measured=INCONCLUSIVE)
    observed, _ = settled(observed)
    for days in (1, 10, 1000):
        observed, _ = settled(observed, seconds=days * 86_400)
        assert observed.rounds[1].status.step == "Gating"
        assert observed.run.status.stable is not None
        assert observed.run.status.stable.round == 0


def test_a_hundred_looks_at_an_inconclusive_gate_want_no_further_job() -> None:
    observed, _ = settled(
        scene(Step.GATING, status={"gate": {"measurements": "{}"}}, measured=INCONCLUSIVE, jobs={0: job("Succeeded")})
    )
    for second in range(100):
        decision = decide(observed, seconds=60 * second)
        assert not [item for item in decision.intents if isinstance(item, EnsureJob)]
        observed = runs.stored(observed, decision)


def test_a_breach_while_a_person_is_awaited_blocks() -> None:
    gate = {"approval": "Required", "canary": {"steps": [{"weight": 5, "minTrajectories": 1}]}}
    state = {"gate": {"measurements": "{}", "canary": {"index": 1, "started": ago(9)}}}
    breach = look(9, interim=runs.FAIL)
    observed, _ = settled(scene(Step.GATING, spec={"gate": gate}, status=state, measured=PASS, look=breach))
    assert observed.rounds[1].status.step == "Blocked"
    assert observed.run.status.canary_weight == 0


@pytest.mark.parametrize("step", [Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.GATING])
def test_an_edit_in_the_middle_of_a_round_waits_for_the_next(step: Step) -> None:
    observed, before = settled(scene(step, measured=PASS, look=look()))
    serving = observed.run.spec.serving.model_copy(update={"image": "other:2", "start_deadline_seconds": 1})
    edited = observed.run.model_copy(
        update={
            "spec": observed.run.spec.model_copy(update={"serving": serving}),
            "metadata": {**observed.run.metadata, "generation": 2},
        }
    )
    during, decision = settled(dataclasses.replace(observed, run=edited))
    assert during.rounds[1].spec.settings.serving.image is None
    assert during.rounds[1].status.step == observed.rounds[1].status.step
    assert decision.intents == before.intents
    assert condition(decision, "Reconciling")[0] == "False"
    back = observed.run.model_copy(update={"metadata": {**observed.run.metadata, "generation": 3}})
    _, again = settled(dataclasses.replace(during, run=back))
    assert again.intents == before.intents


def test_without_a_spare_gpu_the_run_says_insufficient_capacity() -> None:
    waiting = {"waiting": "Unschedulable", "waiting_message": "0/4 nodes have nvidia.com/gpu"}
    assert candidate(1790, **waiting)[0].rounds[1].status.step == "CanaryDeploying"
    observed, decision = candidate(1810, **waiting)
    assert condition(decision, "Stalled")[:2] == ("True", "InsufficientCapacity")
    assert "surge: Replace" in condition(decision, "Stalled")[2]
    assert observed.run.status.stable is not None


def test_a_policy_that_crash_loops_is_not_a_busy_one() -> None:
    previous = {"round": 0, "digest": digest(0)}
    stable = {"round": 1, "digest": digest(1), "since": ago(61)}
    observed = scene(Step.PROMOTED, run={"previous": previous, "stable": stable})
    observed = dataclasses.replace(
        observed, servings={0: servers(ready=0, restarts=50), 1: servers()}, urls={0: "http://s0", 1: "http://s1"}
    )
    assert DeleteServing(0) in settled(observed)[1].intents


def test_a_training_pod_that_cannot_pull_its_image_fails_with_that_reason() -> None:
    view = job("Pending", waiting="ImagePullBackOff", waiting_message="back-off pulling x:y")
    observed, decision = settled(scene(Step.TRAINING, jobs={0: view}, since=61))
    assert observed.rounds[1].status.step == "Failed"
    assert condition(decision, "Stalled")[:2] == ("True", "ImagePullFailed")
    assert "x:y" in condition(decision, "Stalled")[2]
    assert DeleteJob(1, Step.TRAINING, 0) in decision.intents, "its GPUs are freed"


def test_a_job_without_pods_for_want_of_quota_says_so() -> None:
    view = job("Pending", waiting="FailedCreate", waiting_message="exceeded quota: gpus")
    spec = {"training": {"backoffLimit": 0}}
    _, decision = settled(scene(Step.TRAINING, spec=spec, jobs={0: view}, since=1801))
    assert condition(decision, "Stalled")[:2] == ("True", "QuotaExceeded")
    assert "exceeded quota" in condition(decision, "Stalled")[2]


def test_a_drained_node_costs_no_attempt() -> None:
    status = decide(scene(Step.TRAINING, jobs={0: failed(137, "DisruptionTarget")})).round_status
    assert status is not None
    attempt = status.attempts[0]
    assert (attempt.disruptions, attempt.failures, attempt.number) == (1, 0, 1)


def test_a_job_that_kueue_suspended_is_left_alone_and_its_clock_stands() -> None:
    view = job("Pending", suspended=True, is_queued=True)
    observed, decision = settled(scene(Step.TRAINING, jobs={0: view}))
    assert condition(decision, "Suspended")[:2] == ("True", "Queued")
    observed, decision = settled(observed, seconds=1_000_000)
    assert observed.rounds[1].status.attempts == []
    assert not [item for item in decision.intents if type(item).__name__ == "SuspendJob"]


def test_a_job_that_succeeded_without_its_artifact_did_not() -> None:
    view = job("Succeeded", message="", exit_code=0)
    spec = {"training": {"backoffLimit": 0}}
    _, decision = settled(scene(Step.TRAINING, spec=spec, jobs={0: view}))
    assert condition(decision, "Stalled")[:2] == ("True", "ArtifactMissing")


def test_a_full_disk_is_not_filled_again() -> None:
    observed, decision = settled(scene(Step.TRAINING, jobs={0: failed(74)}))
    assert observed.rounds[1].status.step == "Failed"
    assert condition(decision, "Stalled")[:2] == ("True", "StorageFull")


def test_servers_that_die_of_memory_fail_fast() -> None:
    crash = {"restarts": 3, "last_exit": "OOMKilled", "exit_code": 137, "waiting": "CrashLoopBackOff"}
    observed, _ = candidate(30, **crash)
    assert (observed.rounds[1].status.step, observed.rounds[1].status.reason) == ("Blocked", "OutOfMemory")


def test_one_crash_right_after_the_old_pod_ended_is_tolerated() -> None:
    crash = {"restarts": 1, "last_exit": "Error", "exit_code": 1, "waiting": "CrashLoopBackOff"}
    assert candidate(30, **crash)[0].rounds[1].status.step == "CanaryDeploying"


def test_a_retry_has_a_name_of_its_own() -> None:
    status = {"attempts": [{"step": "Training", "number": 1, "failures": 1}]}
    going = job("Failed", deleting=True)
    intents = settled(scene(Step.TRAINING, status=status, jobs={0: going}, since=99))[1].intents
    assert not [item for item in intents if isinstance(item, EnsureJob)], "it waits until the old one is gone"
    intents = settled(scene(Step.TRAINING, status=status, since=99))[1].intents
    assert [item.attempt for item in intents if isinstance(item, EnsureJob)] == [1]
