"""Workloads under the controller: what is applied and removed when, and how the end of a Job is understood."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import podspec
from prodrl_operator.errors import UnsupportedError
from prodrl_operator.names import Reason, Step
from prodrl_operator.pods import INDEX_LABEL, job_view
from prodrl_operator.rounds import failures
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well, result
from tests.unit_operator.test_builders_cluster import POD, deployment, full_run, job, manifests

Object = dict[str, Any]
REPLICAS = {"serving": {"replicas": 2}}


def finished(world: World, rounds: int = 2) -> bool:
    return world.run.status.rounds_finished == rounds


# surge: Replace.


def replacing(script: Any = all_well, deployments: Any = None) -> tuple[World, list[tuple[str, ...]]]:
    """A world with hardware for one policy, and which Deployments existed at each step of it."""
    world = World({"serving": {"surge": "Replace"}, "rounds": {"max": 1, "steps": 2, "batchSize": 2}}, script)
    if deployments is not None:
        world.deployments = deployments
    seen: list[tuple[str, ...]] = []
    for _ in range(80):
        world.step()
        # All that holds hardware: Deployments, and pods on their way out.
        servers = {
            pod["metadata"]["labels"][names.LABEL_ROUND]
            for pod in world.store.list(port.POD, "default")
            if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == "serving"
        }
        found = tuple(sorted(servers))
        if not seen or seen[-1] != found:
            seen.append(found)
        if finished(world, 1):
            break
    return world, seen


def test_replace_takes_stable_down_before_the_candidate_comes_up() -> None:
    """Fault 15: without a spare GPU a surge would wait for ever."""
    world, seen = replacing()
    assert world.round(1).status.step == Step.PROMOTED
    world.steps(20)
    assert all(len(servers) <= 1 for servers in seen), seen
    assert [servers for servers in seen if servers] == [("0",), ("1",)]


def test_replace_brings_stable_back_when_the_candidate_fails() -> None:
    def deployments(item: Object) -> bool | str:
        return "ImagePullBackOff" if item["metadata"]["labels"].get(names.LABEL_ROUND) == "1" else True

    world, seen = replacing(deployments=deployments)
    assert world.round(1).status.step == Step.BLOCKED
    world.steps(20)
    assert all(len(servers) <= 1 for servers in seen), seen
    assert world.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0000-serve"]
    assert world.condition("StableAvailable")[0] == "True"
    assert world.weights() == {0: 100}


def available(world: World) -> bool:
    return world.is_true("StableAvailable") and world.names_of(port.DEPLOYMENT) == [
        "chess-gateway",
        "chess-r0000-serve",
    ]


@pytest.mark.parametrize("step", [Step.CANARY_DEPLOYING, Step.GATING])
def test_replace_gives_users_their_hardware_while_the_run_is_suspended(step: Step) -> None:
    """However long that is; what was measured half is measured once the candidate's servers are back."""
    asked: list[bool] = []

    def script(number: int, its: Step, attempt: int) -> Outcome | None:
        if (number, its) != (1, Step.GATING):
            return all_well(number, its, attempt)
        asked.append(world.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0001-serve"])
        return all_well(number, its, attempt) if is_let_go else None

    is_let_go = False
    world = World({"serving": {"surge": "Replace"}, "rounds": {"max": 1, "steps": 2, "batchSize": 2}}, script)
    world.until(lambda w: w.at(1, step))
    world.steps(2)
    assert not world.is_true("StableAvailable")
    world.edit(suspend=True)
    world.steps(4)
    world.steps(4, seconds=86_400)
    assert available(world)
    assert world.round(1).status.step == (Step.GATING if asked else step)
    asked.clear()
    is_let_go = True
    world.edit(suspend=False)
    world.until(lambda w: w.at(1, Step.PROMOTED))
    assert asked, "it was measured"
    assert all(asked), "by what was there to be measured"
    assert world.round(1).status.attempts == []


def test_replace_does_not_take_stable_down_while_a_person_is_asked_and_suspends() -> None:
    """Nor when the run goes on: only an approval makes room for the candidate."""
    spec = {"serving": {"surge": "Replace"}, "gate": {"approval": "Required"}}
    world = World({**spec, "rounds": {"max": 1, "steps": 2, "batchSize": 2}})
    while world.round(1).status.gate.measurements is None if world.has_round(1) else True:
        world.controller.reconcile("default", "chess")
        world.kubelet.tick()
        world.now += timedelta(seconds=5)
    world.edit(suspend=True)
    world.until(available)
    back = world.store.get(port.DEPLOYMENT, "default", "chess-r0000-serve")
    for suspend in (False, True, False):
        world.edit(suspend=suspend)
        for _ in range(5):
            world.step()
            assert uid_of(world.store.get(port.DEPLOYMENT, "default", "chess-r0000-serve")) == uid_of(back)
    world.edit(suspend=True, requests={"approveRound": 1})
    world.steps(5)
    assert available(world)
    world.edit(suspend=False)
    world.until(lambda w: w.at(1, Step.PROMOTED))


def uid_of(obj: Object | None) -> str | None:
    return obj["metadata"]["uid"] if obj else None


# Budgets and policies.


def test_only_the_stable_policy_has_a_disruption_budget() -> None:
    world = World({**REPLICAS, "rounds": {"max": 1, "steps": 2, "batchSize": 2}})
    world.until(lambda w: w.at(1, Step.GATING))
    assert world.names_of(port.PDB) == ["chess-r0000-serve"]
    assert "chess-r0001-serve" in world.names_of(port.DEPLOYMENT)
    world.until(finished_once)
    world.steps(40)
    assert world.names_of(port.PDB) == ["chess-r0001-serve"], "it moved with the promotion"
    assert world.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0001-serve"]


def finished_once(world: World) -> bool:
    return finished(world, 1)


def test_policies_and_budgets_go_when_their_setting_goes() -> None:
    world = World({"gateway": {"replicas": 2}, "rounds": {"max": 2, "steps": 2, "batchSize": 2}})
    world.until(lambda w: w.at(1, Step.COLLECTING))
    before = world.names_of(port.NETWORK_POLICY)
    assert "chess-gateway" in before
    assert "chess-serving" in before
    assert world.names_of(port.PDB) == ["chess-gateway"]

    def change(obj: Object) -> None:
        obj["spec"]["networkPolicy"] = "None"
        obj["spec"]["gateway"]["replicas"] = 1

    world.store.edit(port.RUN, "default", "chess", change)
    world.until(finished)
    world.steps(5)
    assert world.names_of(port.NETWORK_POLICY) == []
    assert world.names_of(port.PDB) == []


def test_a_network_policy_of_somebody_else_stays() -> None:
    world = World({"networkPolicy": "None"})
    foreign = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "theirs", "namespace": "default", "labels": {names.LABEL_RUN: "chess"}},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }
    world.store.create(foreign)
    world.until(lambda w: w.at(1, Step.COLLECTING))
    assert world.names_of(port.NETWORK_POLICY) == ["theirs"]


def test_served_users_keep_their_policies_and_budgets_when_the_run_goes() -> None:
    """Fault 32: ``onDelete.serving: Keep`` leaves all that serves, without an owner."""
    world = World({**REPLICAS, "rounds": {"max": 1, "steps": 2, "batchSize": 2}})
    world.until(finished_once)
    world.steps(40)
    world.store.delete(port.RUN, "default", "chess")
    world.steps(20)
    assert world.store.get(port.RUN, "default", "chess") is None
    assert "chess-gateway" in world.names_of(port.NETWORK_POLICY)
    assert world.names_of(port.PDB) == ["chess-r0001-serve"]


# Kueue.


def test_kueue_holds_a_job_and_no_clock_runs() -> None:
    """Fault 20: the operator never fights over ``suspend``."""
    world = World({"training": {"queueName": "gpus", "startDeadlineSeconds": 60}})
    world.until(lambda w: w.at(1, Step.TRAINING) and "chess-r0001-train-a0" in w.names_of(port.JOB))
    world.steps(10, seconds=600)
    job = world.store.get(port.JOB, "default", "chess-r0001-train-a0")
    assert job is not None
    assert job["spec"]["suspend"] is True
    assert world.names_of(port.JOB).count("chess-r0001-train-a0") == 1
    assert world.round(1).status.reason == Reason.QUEUED
    assert not world.is_true("Stalled"), "a hundred minutes in a queue are no failure to start"

    world.store.edit(port.JOB, "default", "chess-r0001-train-a0", lambda it: it["spec"].update(suspend=False))
    world.until(lambda w: w.has_round(1) and w.round(1).status.step == Step.PROMOTED)
    assert not [name for name in world.names_of(port.JOB) if name.endswith("train-a1")]


def test_kueue_may_take_a_running_job_back() -> None:
    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        return None if step is Step.TRAINING else all_well(number, step, attempt)

    world = World({"training": {"queueName": "gpus", "startDeadlineSeconds": 60}}, script)
    name = "chess-r0001-train-a0"
    world.until(lambda w: w.at(1, Step.TRAINING) and name in w.names_of(port.JOB))
    world.store.edit(port.JOB, "default", name, lambda it: it["spec"].update(suspend=False))
    world.steps(5)
    world.store.edit(port.JOB, "default", name, lambda it: it["spec"].update(suspend=True))
    world.steps(10, seconds=600)
    job = world.store.get(port.JOB, "default", name)
    assert job is not None
    assert job["spec"]["suspend"] is True
    assert world.at(1, Step.TRAINING)
    assert world.round(1).status.reason == Reason.QUEUED


# How a Job ended.


def a_job(condition: Object, **spec: Any) -> Object:
    return {
        "metadata": {"name": "j", "uid": "u", "labels": {}},
        "spec": spec,
        "status": {"conditions": [{"status": "True", **condition}]},
    }


def a_pod(name: str, phase: str, exit_code: int, message: str = "", index: str | None = None) -> Object:
    end = {"exitCode": exit_code, "message": message, "finishedAt": "2026-01-01T00:00:00Z", "reason": "Error"}
    labels = {} if index is None else {INDEX_LABEL: index}
    statuses = [{"name": "step", "state": {"terminated": end}}]
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase, "containerStatuses": statuses}}


def test_only_index_0_tells_the_result_of_a_gang() -> None:
    done = a_job({"type": "Complete"}, completionMode="Indexed", completions=12)
    told = json.dumps(result(1, Step.TRAINING))
    pods = [a_pod(f"p{i}", "Succeeded", 0, told if i == 0 else "", str(i)) for i in (11, 10, 0, 2)]
    assert job_view(done, pods).message == told
    assert job_view(done, pods[:2]).message == "", "its pod is gone: nothing is known, and nothing is made up"


POLICY = {"type": "Failed", "reason": "PodFailurePolicy"}


def exit_told(code: int) -> str:
    return f"Container step for pod default/p failed with exit code {code} matching FailJob rule at index 1"


@pytest.mark.parametrize(
    ("message", "reason", "is_disruption", "is_retryable"),
    [
        ("Pod default/p has condition DisruptionTarget matching FailJob rule at index 0", "Preempted", True, True),
        (exit_told(65), "InvalidData", False, False),
        (exit_told(78), "OutOfMemory", False, True),
        (exit_told(80), "Preempted", True, True),
    ],
)
def test_a_job_whose_pods_are_gone_is_understood(
    message: str, reason: str, is_disruption: bool, is_retryable: bool
) -> None:
    """Fault 19: the node took its pods along; the texts are those of the Job controller."""
    cause = failures.job_cause(job_view(a_job({**POLICY, "message": message}), []))
    assert (cause.reason, cause.is_disruption, cause.is_retryable) == (reason, is_disruption, is_retryable)


def test_a_launcher_does_not_hide_why_its_process_ended() -> None:
    """Torchrun ends with 1 whatever its processes ended with."""
    told = json.dumps({"reason": "StorageFull", "message": "no space left"})
    failed = a_job({"type": "Failed", "reason": "BackoffLimitExceeded"})
    cause = failures.job_cause(job_view(failed, [a_pod("p", "Failed", 1, told)]))
    assert (cause.reason, cause.is_retryable) == (Reason.STORAGE_FULL, False)
    unknown = failures.job_cause(job_view(failed, [a_pod("p", "Failed", 1, "Traceback")]))
    assert (unknown.reason, unknown.is_retryable) == (Reason.STEP_FAILED, True)


def test_a_drained_node_is_not_a_failure() -> None:
    """Fault 19: the attempt is repeated and not counted against the limit."""
    ends = iter(["DisruptionTarget"] * 4)

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        if step is Step.TRAINING and number == 1 and next(ends, None):
            return Outcome({"reason": "Preempted", "message": "stopped"}, exit_code=80)
        return all_well(number, step, attempt)

    world = World({"training": {"backoffLimit": 0}}, script)
    world.until(lambda w: w.has_round(1) and w.round(1).status.step == Step.PROMOTED)
    training = next(a for a in world.round(1).status.attempts if a.step == Step.TRAINING)
    assert (training.disruptions, training.failures, training.number) == (4, 0, 4)


# The local environment.


def test_the_local_environment_refuses_what_it_would_not_do() -> None:
    run = full_run()
    with pytest.raises(UnsupportedError, match="queueName"):
        podspec.check(job(run, Step.TRAINING))
    unqueued = {part: {**POD} for part in ("collect", "training", "export", "evaluate")}
    for manifest in manifests(full_run(**unqueued)):
        podspec.check(manifest)
    nfs = {"volumes": [{"name": "data", "nfs": {"server": "s", "path": "/"}}]}
    with pytest.raises(UnsupportedError, match="nfs"):
        podspec.check(deployment(full_run(serving={"podSpecPatch": nfs})))


def test_a_queue_stalls_a_local_run_with_the_field_to_change() -> None:
    """A Job that nobody admits would wait for ever."""
    world = World({"collect": {"queueName": "gpus"}})
    world.store._admit = podspec.check
    world.until(lambda w: w.is_true("Stalled"))
    stalled = next(item for item in world.run.status.conditions if item.type == "Stalled")
    assert stalled.reason == Reason.INVALID_CONFIGURATION
    assert "queueName" in stalled.message
