"""``decide``: the way of a round that goes well, and every exit of the steps that run as Jobs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.names import Step
from prodrl_operator.rounds import collecting
from prodrl_operator.rounds.decision import (
    AddFinalizer,
    CreateRound,
    DeleteJob,
    EnsureGateway,
    EnsureJob,
    EnsureRoutes,
    EnsureServing,
)
from prodrl_operator.rounds.observed import JobView, Observed
from prodrl_operator.rounds.transitions import TRANSITIONS
from tests.support import runs
from tests.support.operator_harness import digest
from tests.support.runs import PASS, condition, decide, failed, job, scene, servers, settled, step_after, succeeded

JOB_STEPS = [Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING]


def kinds(observed: Observed) -> list[type]:
    return [type(item) for item in decide(observed).intents]


# Beginning.


def test_a_run_gets_its_finalizer_before_its_candidate_gets_servers() -> None:
    observed = scene(Step.CANARY_DEPLOYING)
    observed.run.metadata.pop("finalizers")
    assert decide(observed).intents == (AddFinalizer(),)


def test_the_gateway_comes_up_before_there_is_a_policy() -> None:
    _, decision = settled(Observed(run=runs.make_run()))
    assert decision.intents == (EnsureRoutes(()), EnsureGateway(None), CreateRound(0, None, 0))


def test_a_new_run_is_not_ready_and_not_stalled() -> None:
    decision = decide(Observed(run=runs.make_run()))
    assert condition(decision, "Ready")[:2] == ("False", "Starting")
    assert condition(decision, "Stalled")[0] == "False"


def test_round_0_exports_first_and_the_others_collect() -> None:
    assert step_after(scene(Step.PENDING, number=0)) == "Exporting"
    assert step_after(scene(Step.PENDING)) == "Collecting"


def test_a_round_notes_when_it_began_to_collect() -> None:
    status = decide(scene(Step.PENDING), seconds=0.25).round_status
    assert status is not None
    assert status.collect_from == "2026-01-01T12:00:00.250Z"


def test_the_next_round_learns_from_stable_and_goes_on_from_the_lineage() -> None:
    observed = scene(Step.PROMOTED, number=0, run=runs.stable_status(0, lineageRound=0), urls={0: "http://s0"})
    _, decision = settled(observed)
    created = next(item for item in decision.intents if isinstance(item, CreateRound))
    assert (created.number, created.source.digest if created.source else None) == (1, digest(0))


# Working.


@pytest.mark.parametrize("step", JOB_STEPS)
def test_a_step_without_a_job_wants_its_first_attempt(step: Step) -> None:
    intent = next(item for item in settled(scene(step))[1].intents if isinstance(item, EnsureJob))
    assert (intent.number, intent.step, intent.attempt) == (1, step, 0)


def test_training_starts_from_the_lineage_and_gating_compares_with_stable() -> None:
    train = next(i for i in settled(scene(Step.TRAINING))[1].intents if isinstance(i, EnsureJob))
    gate = next(i for i in settled(scene(Step.GATING))[1].intents if isinstance(i, EnsureJob))
    assert (train.lineage, train.source, train.stable) == (0, 0, None)
    assert gate.stable == 0


@pytest.mark.parametrize(
    ("step", "following"),
    [
        (Step.TRAINING, Step.EXPORTING),
        (Step.EXPORTING, Step.CANARY_DEPLOYING),
    ],
)
def test_a_result_moves_the_round_on(step: Step, following: Step) -> None:
    assert step_after(scene(step, jobs={0: succeeded(1, step)})) == following


def test_a_sealed_dataset_is_kept_and_trained_on() -> None:
    observed, _ = settled(scene(Step.COLLECTING, jobs={0: succeeded(1, Step.COLLECTING)}))
    status = observed.rounds[1].status
    assert (status.step, status.dataset.trajectories if status.dataset else None) == ("Training", 4)
    assert observed.run.status.reward == "0.5"


def test_the_digest_and_the_figures_of_a_step_are_kept() -> None:
    train = succeeded(1, Step.TRAINING, figures={"kl": 0.25, "broken": float("inf")}, skipped_steps=1)
    status = decide(scene(Step.TRAINING, jobs={0: train})).round_status
    assert status is not None
    assert status.checkpoint is not None
    assert (status.checkpoint.figures, status.checkpoint.skipped_steps) == ({"kl": "0.25"}, 1)
    status = decide(scene(Step.EXPORTING, jobs={0: succeeded(1, Step.EXPORTING)})).round_status
    assert status is not None
    assert status.policy is not None
    assert status.policy.digest == digest(1)


def test_numbers_are_written_as_the_api_takes_them() -> None:
    pattern = re.compile(r"^-?[0-9]+(\.[0-9]+)?([eE]-?[0-9]+)?$")
    for value in (0.0, -0.5, 1e-9, 1.5e22, -3e8, 123456789.0):
        assert pattern.match(collecting.decimal(value))
        assert float(collecting.decimal(value)) == pytest.approx(value, rel=1e-5)


def test_a_dataset_whose_mean_reward_is_no_number_fails_the_round() -> None:
    view = job("Succeeded", message=succeeded(1, Step.COLLECTING).message.replace("0.5", "NaN"))
    observed, decision = settled(scene(Step.COLLECTING, jobs={0: view}))
    assert observed.rounds[1].status.step == "Failed"
    assert condition(decision, "Stalled")[:2] == ("True", "InvalidData")


def test_servers_that_are_ready_are_judged_next() -> None:
    assert step_after(scene(Step.CANARY_DEPLOYING)) == "Gating"
    assert step_after(scene(Step.CANARY_DEPLOYING, servings={0: servers(), 1: servers(ready=0)})) == "CanaryDeploying"


def test_a_deployment_whose_spec_was_not_seen_yet_is_not_ready() -> None:
    observed = scene(Step.CANARY_DEPLOYING, servings={0: servers(), 1: servers(is_current=False)})
    assert step_after(observed) == "CanaryDeploying"


def test_the_candidate_is_served_beside_stable() -> None:
    intents = settled(scene(Step.CANARY_DEPLOYING, servings={0: servers()}, urls={0: "http://s0"}))[1].intents
    assert [item.number for item in intents if isinstance(item, EnsureServing)] == [0, 1]


def test_nothing_moves_while_a_job_runs() -> None:
    observed, decision = settled(scene(Step.TRAINING, jobs={0: job("Running")}))
    assert observed.rounds[1].status.step == "Training"
    assert decision.round_status is None


def test_a_healthy_loop_is_ready_and_not_reconciling() -> None:
    for step in (Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.GATING):
        decision = decide(scene(step, jobs={0: job("Running")} if step in JOB_STEPS else None, measured=PASS))
        assert condition(decision, "Ready")[:2] == ("True", "LoopRunning"), step
        assert condition(decision, "Reconciling")[0] == "False"
        assert condition(decision, "Stalled")[0] == "False"


def test_every_condition_and_the_status_carry_the_generation() -> None:
    status = decide(scene(Step.TRAINING, generation=7)).run_status
    assert status.observed_generation == 7
    assert {item.observed_generation for item in status.conditions} == {7}


def test_a_transition_time_moves_only_with_the_status() -> None:
    observed, _ = settled(scene(Step.TRAINING))
    later = decide(observed, seconds=500).run_status
    assert later.conditions == observed.run.status.conditions


# Failing.


def failing(step: Step, view: JobView, **changes: Any) -> Observed:
    return scene(step, jobs={0: view}, **changes)


@pytest.mark.parametrize("step", JOB_STEPS)
@pytest.mark.parametrize(
    ("view", "counted"),
    [
        pytest.param(failed(1), "failures", id="an internal error"),
        pytest.param(failed(69), "failures", id="a peer is away"),
        pytest.param(failed(78), "failures", id="out of memory"),
        pytest.param(failed(137, "OOMKilled"), "failures", id="killed for memory"),
        pytest.param(failed(3), "failures", id="an unknown exit code"),
        pytest.param(failed(None), "failures", id="no pod left to tell"),
        pytest.param(failed(80), "disruptions", id="preempted and said so"),
        pytest.param(failed(143), "disruptions", id="ended by SIGTERM"),
        pytest.param(failed(137, "DisruptionTarget"), "disruptions", id="drained"),
        pytest.param(failed(137, "Evicted"), "failures", id="over a limit of its own"),
        pytest.param(job("Succeeded", message=""), "failures", id="no result"),
        pytest.param(job("Succeeded", message='{"x": 1}'), "failures", id="another result"),
    ],
)
def test_another_attempt_follows_what_it_can_cure(step: Step, view: JobView, counted: str) -> None:
    status = decide(failing(step, view)).round_status
    assert status is not None
    assert status.step == step
    attempt = status.attempts[0]
    assert (attempt.number, attempt.failures + attempt.disruptions) == (1, 1)
    assert getattr(attempt, counted) == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (64, "InvalidConfiguration"),
        (65, "InvalidData"),
        (74, "StorageFull"),
        (77, "CredentialsRejected"),
        (79, "Numerics"),
    ],
)
@pytest.mark.parametrize("step", JOB_STEPS)
def test_what_no_attempt_can_cure_fails_the_round_at_once(step: Step, code: int, reason: str) -> None:
    observed, decision = settled(failing(step, failed(code, message="the thing is wrong")))
    assert observed.rounds[1].status.step == "Failed"
    stalled = condition(decision, "Stalled")
    assert stalled[:2] == ("True", reason)
    assert "the thing is wrong" in stalled[2]
    assert "requests.retryToken" in stalled[2]


def test_users_stay_served_while_the_run_is_stalled() -> None:
    observed, decision = settled(failing(Step.TRAINING, failed(79)))
    assert condition(decision, "Ready")[:2] == ("True", "Numerics")
    assert observed.run.status.stable is not None
    assert EnsureServing(0) in decision.intents


def exhausted(step: Step, **counts: int) -> dict[str, Any]:
    return {"attempts": [{"step": step.value, "number": 3, **counts}]}


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (failed(1), "StepBackoffExceeded"),
        (failed(69), "StepBackoffExceeded"),
        (failed(78), "OutOfMemory"),
        (job("Succeeded", message=""), "ArtifactMissing"),
        (failed(None, "DeadlineExceeded"), "ActiveDeadlineExceeded"),
    ],
)
def test_the_backoff_limit_ends_the_attempts(view: JobView, reason: str) -> None:
    spec = {"training": {"backoffLimit": 3}}
    observed = scene(Step.TRAINING, spec=spec, status=exhausted(Step.TRAINING, failures=3), jobs={3: view})
    assert condition(settled(observed)[1], "Stalled")[:2] == ("True", reason)


def test_disruptions_never_use_up_the_limit() -> None:
    spec = {"training": {"backoffLimit": 0}}
    observed = scene(Step.TRAINING, spec=spec, status=exhausted(Step.TRAINING, disruptions=50), jobs={3: failed(80)})
    status = decide(observed).round_status
    assert status is not None
    assert (status.step, status.attempts[0].disruptions, status.attempts[0].number) == ("Training", 51, 4)


def test_a_training_that_skipped_every_step_is_no_checkpoint() -> None:
    observed = scene(Step.TRAINING, jobs={0: succeeded(1, Step.TRAINING, steps=0, skipped_steps=2)})
    assert condition(settled(observed)[1], "Stalled")[:2] == ("True", "Numerics")


def test_the_next_attempt_waits_longer_after_each_failure() -> None:
    def is_wanted(failures: int, since: float, disruptions: int = 0) -> bool:
        counts = {"number": failures + disruptions, "failures": failures, "disruptions": disruptions}
        status = {"attempts": [{"step": "Training", **counts}]}
        intents = settled(scene(Step.TRAINING, status=status, since=since))[1].intents
        return any(isinstance(item, EnsureJob) for item in intents)

    assert not is_wanted(1, 4)
    assert is_wanted(1, 6)
    assert not is_wanted(2, 6)
    assert is_wanted(2, 11)
    assert is_wanted(30, 301)
    assert not is_wanted(0, 6, disruptions=2)
    assert is_wanted(0, 11, disruptions=2)
    assert is_wanted(0, 301, disruptions=300)


def test_a_deadline_is_no_disruption_though_it_ends_pods_by_sigterm() -> None:
    spec = {"training": {"backoffLimit": 0}}
    for code in (80, 143, None):
        observed = scene(Step.TRAINING, spec=spec, jobs={0: failed(code, "DeadlineExceeded")})
        assert condition(settled(observed)[1], "Stalled")[1] == "ActiveDeadlineExceeded"


def test_an_older_attempt_is_stopped_and_gone_before_the_next_begins() -> None:
    status = {"attempts": [{"step": "Training", "number": 1, "failures": 1}]}
    for old in (job("Running"), job("Pending")):
        intents = settled(scene(Step.TRAINING, status=status, jobs={0: old}, since=99))[1].intents
        assert DeleteJob(1, Step.TRAINING, 0) in intents
        assert not [item for item in intents if isinstance(item, EnsureJob)]
    going = job("Running", deleting=True)
    intents = settled(scene(Step.TRAINING, status=status, jobs={0: going}, since=99))[1].intents
    assert not [item for item in intents if isinstance(item, (EnsureJob, DeleteJob))]
    intents = settled(scene(Step.TRAINING, status=status, jobs={0: failed(1)}, since=99))[1].intents
    assert [item for item in intents if isinstance(item, EnsureJob)]


def test_jobs_of_a_round_that_ended_are_stopped() -> None:
    for step in (Step.FAILED, Step.ABORTED, Step.SUPERSEDED, Step.BLOCKED):
        observed = scene(step, jobs={})
        observed.jobs[1, Step.TRAINING, 0] = job("Running")  # type: ignore[index]
        assert DeleteJob(1, Step.TRAINING, 0) in settled(observed)[1].intents


# Deadlines.


def test_a_job_that_does_not_start_fails_its_attempt_after_the_deadline() -> None:
    view = job("Pending", waiting="Unschedulable", waiting_message="0/3 nodes have a GPU")
    spec = {"training": {"startDeadlineSeconds": 600}}
    assert decide(scene(Step.TRAINING, spec=spec, jobs={0: view}, since=590)).round_status.attempts == []  # type: ignore[union-attr]
    status = decide(scene(Step.TRAINING, spec=spec, jobs={0: view}, since=610)).round_status
    assert status is not None
    assert (status.attempts[0].failures, status.reason) == (1, "InsufficientCapacity")
    assert "0/3 nodes" in status.message


def test_a_job_that_runs_too_long_fails_its_attempt() -> None:
    spec = {"training": {"activeDeadlineSeconds": 1000}}
    observed = scene(Step.TRAINING, spec=spec, jobs={0: job("Running")}, since=1070)
    status = decide(observed).round_status
    assert status is not None
    assert status.reason == "ActiveDeadlineExceeded"


def test_collecting_has_no_deadline_it_lasts_as_long_as_users_take() -> None:
    observed = scene(Step.COLLECTING, jobs={0: job("Running")}, since=10_000_000)
    assert settled(observed)[0].rounds[1].status.attempts == []


def test_i10_deadlines_do_not_run_while_suspended() -> None:
    spec = {"suspend": True, "training": {"activeDeadlineSeconds": 100}}
    view = job("Running", suspended=True)
    observed = scene(Step.TRAINING, spec=spec, jobs={0: view}, since=50)
    observed, _ = settled(observed)
    assert observed.rounds[1].status.paused_since is not None
    observed, _ = settled(observed, seconds=100_000)
    assert observed.rounds[1].status.attempts == []
    resumed = observed.run.model_copy(update={"spec": observed.run.spec.model_copy(update={"suspend": False})})
    observed = runs.dataclasses.replace(observed, run=resumed, jobs={(1, Step.TRAINING, 0): job("Running")})
    observed, _ = settled(observed, seconds=100_000)
    assert observed.rounds[1].status.attempts == []
    assert observed.rounds[1].status.paused_since is None
    # 50 s were used before the pause: 100 s and a grace of 60 s allow 110 more.
    assert settled(observed, seconds=100_000 + 105)[0].rounds[1].status.attempts == []
    assert settled(observed, seconds=100_000 + 115)[0].rounds[1].status.attempts[0].failures == 1


def test_i10_a_clock_that_jumps_back_rearms_the_deadlines() -> None:
    spec = {"training": {"activeDeadlineSeconds": 100}}
    observed = scene(Step.TRAINING, spec=spec, jobs={0: job("Running")}, since=-600)
    observed, _ = settled(observed)
    assert observed.rounds[1].status.since == runs.stamp(runs.NOW)
    assert observed.rounds[1].status.attempts == []


# The table.


def test_the_table_names_every_step_and_only_failed_rounds_come_back() -> None:
    assert set(TRANSITIONS) == set(Step)
    comes_back = {step for step in names.TERMINAL if TRANSITIONS[step]}
    assert comes_back == {Step.FAILED}
