"""What cannot start, or does not stay up: who is told, when, and what becomes of the round."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step
from prodrl_operator.pods import deployment_view, held_up
from prodrl_operator.rounds.decision import EnsureGateway, EnsureJob, EnsureRoutes, EnsureServing
from prodrl_operator.rounds.observed import DeploymentView, Observed
from tests.support import runs
from tests.support.runs import NOW, PASS, condition, decide, job, look, scene, servers, settled, stored

REFUSED = 'pods "x" is forbidden: no PriorityClass with name nope was found'
MISSING = 'MountVolume.SetUp failed for volume "credentials" : secret "s3" not found'
UNBOUND = '0/3 nodes are available: persistentvolumeclaim "cache" not found'
PROVISIONING = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims"
LACKING: list[tuple[str, str]] = [
    ("FailedMount", MISSING),
    ("FailedCreate", REFUSED),
    ("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged'),
    ("FailedCreate", "admission webhook deny.example.com denied the request: no owner label"),
    ("FailedCreate", 'pods "x" is forbidden: failed quota: q: must specify limits.cpu'),
    ("CreateContainerConfigError", 'secret "hf" not found'),
    ("Unschedulable", UNBOUND),
]
PASSING: list[tuple[str, str]] = [
    ("Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
    ("Unschedulable", PROVISIONING),
    ("FailedCreate", 'pods "x" is forbidden: exceeded quota: gpus'),
    ("FailedCreate", 'pods "x" is forbidden: error looking up service account ns/default: not found'),
    ("FailedCreate", "Internal error occurred: failed calling webhook a.example.com: connection refused"),
    ("", ""),
]


def down(seconds: float, **changes: Any) -> DeploymentView:
    """Servers of which none has been ready for so long."""
    since = NOW - timedelta(seconds=seconds)
    return servers(**{"ready": 0, "created": since, "unready_since": since} | changes)


def stall_of(observed: Observed, seconds: float = 0.0) -> tuple[str, str]:
    status, reason, message = condition(settled(observed, seconds)[1], "Stalled")
    return (reason, message) if status == "True" else ("", "")


# The gateway and stable.


@pytest.mark.parametrize(
    ("facts", "seconds", "reason"),
    [
        ({"waiting": "ImagePullBackOff", "waiting_message": "no such image"}, 61, "ImagePullFailed"),
        ({"waiting": "ImagePullBackOff"}, 30, ""),
        ({"restarts": 5, "exit_code": 1, "exit_message": "boom"}, 1, "CrashLoop"),
        ({"restarts": 5, "last_exit": "OOMKilled"}, 1, "OutOfMemory"),
        ({"restarts": 2, "exit_code": 1}, 200, ""),
        ({"waiting": "Unschedulable", "waiting_message": "no cpu"}, 1801, "InsufficientCapacity"),
        ({"waiting": "FailedCreate", "waiting_message": "exceeded quota: q"}, 1801, "QuotaExceeded"),
        ({"waiting": "FailedMount", "waiting_message": MISSING}, 61, "InvalidConfiguration"),
        ({"waiting": "FailedCreate", "waiting_message": REFUSED}, 61, "InvalidConfiguration"),
        ({}, 1801, "StartDeadlineExceeded"),
        ({}, 1799, ""),
        ({"waiting": "Unschedulable", "waiting_message": "a node is on its way"}, 900, ""),
    ],
)
def test_a_gateway_that_cannot_run_stalls_the_run_and_says_why(
    facts: dict[str, Any], seconds: float, reason: str
) -> None:
    """argo-rollouts#4128, for the one Deployment that no round judges."""
    observed = scene(Step.COLLECTING, gateway=down(seconds, **facts), jobs={0: job()})
    found, message = stall_of(observed)
    assert found == reason
    decision = settled(observed)[1]
    assert condition(decision, "Ready")[0] == "False"
    if reason:
        assert message.startswith("the gateway ")
        assert "surge" not in message
        assert facts.get("waiting_message", facts.get("exit_message", "")) in message
        assert "requests.abortRound: 1" in message or reason == "InvalidConfiguration"
    if facts.get("waiting"):
        assert facts["waiting"] in condition(decision, "Ready")[2]


def test_a_gateway_of_which_some_serve_is_stalled_by_faults_and_not_by_lack_of_room() -> None:
    def partly(**facts: Any) -> str:
        return stall_of(scene(Step.COLLECTING, gateway=down(9999, desired=3, ready=2, **facts), jobs={0: job()}))[0]

    assert partly(waiting="ImagePullBackOff") == "ImagePullFailed"
    assert partly(restarts=3, exit_code=1, waiting="CrashLoopBackOff") == "CrashLoop"
    assert partly(restarts=3, exit_code=1) == "", "restarts are counted for a pod's whole life"
    assert partly(waiting="Unschedulable") == ""
    assert partly() == ""


def test_stable_that_does_not_come_back_is_said_and_a_good_candidate_is_promoted_all_the_same() -> None:
    """argo-rollouts#1774: a bad stable blocked a good canary."""
    broken = {0: down(61, waiting="ImagePullBackOff"), 1: servers()}
    assert stall_of(scene(Step.GATING, servings=broken, jobs={0: job()}))[0] == "ImagePullFailed"
    verdict = {"gate": {"verdict": "Pass", "digest": runs.digest(1)}}
    observed, _ = settled(scene(Step.PROMOTING, status=verdict, servings=broken))
    assert observed.run.status.stable is not None
    assert observed.run.status.stable.round == 1
    assert stall_of(observed) == ("", "")


def test_a_committed_promotion_whose_gateway_never_came_up_takes_a_corrected_spec() -> None:
    """Round 0 would wait for ever for a gateway with settings that it froze itself."""
    observed = scene(Step.PROMOTING, number=0, run=runs.stable_status(0), gateway=down(61, waiting="ErrImagePull"))
    decision = settled(dataclasses.replace(observed, replicas=()))[1]
    assert condition(decision, "Stalled")[1] == "ImagePullFailed"
    assert "abortRound" not in condition(decision, "Stalled")[2]
    assert EnsureGateway(None) in decision.intents


# A candidate that was ready.

SLOW = {"gate": {"canary": {"steps": [{"weight": 50, "minTrajectories": 9, "deadlineSeconds": 90_000}]}}}
ON_CANARY = {"gate": {"measurements": "{}", "canary": {"index": 0, "started": runs.ago(9)}}}


@pytest.mark.parametrize("step", [Step.GATING, Step.PROMOTING])
@pytest.mark.parametrize(
    ("waiting", "after", "reason"),
    [("Unschedulable", 1801, "InsufficientCapacity"), ("ImagePullBackOff", 61, "ImagePullFailed")],
)
def test_a_candidate_that_is_lost_and_does_not_come_back_is_blocked(
    step: Step, waiting: str, after: float, reason: str
) -> None:
    verdict = {"gate": {"verdict": "Pass", "digest": runs.digest(1)}}
    status = verdict if step is Step.PROMOTING else ON_CANARY
    observed = scene(step, spec=SLOW, status=status, measured=PASS, look=look())
    lost = dataclasses.replace(observed, servings={**observed.servings, 1: servers(ready=0, waiting=waiting)})
    lost, decision = settled(lost)
    assert lost.rounds[1].status.step == step, "its pod may come back"
    assert lost.rounds[1].status.unready_since == runs.ago(0)
    assert decision.run_status.canary_weight == 0, "nobody new is sent there"
    assert decide(lost, after - 2).round_status is None
    ended, _ = settled(lost, after)
    assert ended.rounds[1].status.step == "Blocked"
    assert ended.rounds[1].status.reason == reason
    assert ended.run.status.stable is not None
    assert ended.run.status.stable.round == 0
    back = stored(lost, decide(dataclasses.replace(lost, servings=observed.servings), 30))
    assert back.rounds[1].status.unready_since is None


def test_the_time_of_a_suspended_run_does_not_count_against_a_lost_candidate() -> None:
    observed = scene(Step.GATING, spec=SLOW, status=ON_CANARY, measured=PASS, look=look())
    lost = dataclasses.replace(observed, servings={**observed.servings, 1: servers(ready=0)})
    lost, _ = settled(lost)
    asked = lost.run.model_copy(update={"spec": lost.run.spec.model_copy(update={"suspend": True})})
    paused, _ = settled(dataclasses.replace(lost, run=asked), 10)
    resumed, _ = settled(dataclasses.replace(paused, run=lost.run), 5000)
    assert resumed.rounds[1].status.step == "Gating"
    assert resumed.rounds[1].status.unready_since == runs.ago(-4990)


REPLACE = {"serving": {"surge": "Replace"}}


def test_hardware_that_stable_has_back_while_a_person_thinks_is_no_lost_candidate() -> None:
    gate = {"gate": {"measurements": "{}", "verdict": "Inconclusive", "digest": runs.digest(1)}}
    observed = scene(Step.GATING, spec=REPLACE, status=gate, measured=PASS, servings={0: servers()})
    rested, _ = settled(observed, 90_000)
    assert rested.rounds[1].status.unready_since is None
    asked = rested.run.spec.model_copy(
        update={"requests": rested.run.spec.requests.model_copy(update={"retry_token": "x"})}
    )
    again = dataclasses.replace(
        rested, run=rested.run.model_copy(update={"spec": asked}), servings={0: servers()}, urls={}
    )
    measured, decision = settled(dataclasses.replace(again, measured=None), 90_001)
    assert measured.rounds[1].status.step == "Gating"
    assert not [item for item in decision.intents if isinstance(item, EnsureJob)], "it has no address yet"
    coming = dataclasses.replace(measured, servings={1: servers(ready=0)})
    assert settled(coming, 90_600)[0].rounds[1].status.step == "Gating", "not at once, for the time that it was away"


def test_a_suspended_run_with_hardware_for_one_gives_it_to_stable() -> None:
    observed = scene(Step.CANARY_DEPLOYING, spec={**REPLACE, "suspend": True}, servings={}, urls={0: "http://s0"})
    assert EnsureServing(0) in settled(observed)[1].intents


def test_what_an_earlier_run_left_keeps_its_routes_until_there_is_a_policy() -> None:
    observed = scene(Step.EXPORTING, number=0, has_orphans=True, jobs={0: job()})
    decision = settled(observed)[1]
    assert decision.routes is None
    assert not [item for item in decision.intents if isinstance(item, EnsureRoutes)]


# What a person must provide.


@pytest.mark.parametrize(("waiting", "message"), LACKING)
def test_what_a_pod_lacks_is_named_after_a_minute_and_nothing_fails_yet(waiting: str, message: str) -> None:
    made = job("Pending", waiting=waiting, waiting_message=message, begun=NOW)
    observed = scene(Step.TRAINING, since=0, jobs={0: made})
    assert stall_of(observed, 59) == ("", "")
    reason, text = stall_of(observed, 61)
    assert reason == "InvalidConfiguration"
    assert message in text
    assert "round 1: Training: Job job" in text
    after, _ = settled(observed, 61)
    assert after.rounds[1].status.step == "Training"
    late, _ = settled(observed, 1801)
    assert (late.rounds[1].status.step, late.rounds[1].status.reason) == ("Failed", "InvalidConfiguration")


@pytest.mark.parametrize(("waiting", "message"), PASSING)
def test_what_may_pass_is_waited_for_and_tried_again(waiting: str, message: str) -> None:
    made = job("Pending", waiting=waiting, waiting_message=message, begun=NOW)
    observed = scene(Step.TRAINING, since=0, jobs={0: made})
    assert stall_of(observed, 1700) == ("", "")
    after, _ = settled(observed, 1801)
    assert after.rounds[1].status.step == "Training"
    assert [(a.number, a.failures) for a in after.rounds[1].status.attempts] == [(1, 1)]


def test_a_server_that_lacks_something_stalls_and_its_round_goes_on() -> None:
    view = down(61, waiting="FailedMount", waiting_message=MISSING)
    observed = scene(Step.CANARY_DEPLOYING, number=0, servings={0: view}, since=61)
    assert stall_of(observed)[0] == "InvalidConfiguration"
    assert 'secret "s3" not found' in stall_of(observed)[1]
    failed, _ = settled(dataclasses.replace(observed, servings={0: down(1801, waiting="FailedMount")}), 1801)
    assert failed.rounds[0].status.step == "Failed"
    assert failed.rounds[0].status.message.count("create or correct what it names") == 1


# What is read.


def pod(
    *waits: str, made: float = 0.0, placed: float | None = None, ready: float | None = None, **status: Any
) -> Object:
    """A pod whose containers wait, made some seconds before NOW; ``placed`` -1: no node has it."""
    conditions = [{"type": "PodScheduled", "status": "False" if placed == -1 else "True"}]
    if placed is not None:
        conditions[0]["lastTransitionTime"] = runs.ago(placed)
    if ready is not None:
        conditions.append({"type": "Ready", "status": "False", "lastTransitionTime": runs.ago(ready)})
    containers = [{"name": f"c{i}", "state": {"waiting": {"reason": wait}}} for i, wait in enumerate(waits)]
    return {
        "metadata": {"name": "p", "creationTimestamp": runs.ago(made)},
        "status": {"phase": "Pending", "conditions": conditions, "containerStatuses": containers, **status},
    }


def test_a_pod_of_which_nothing_runs_is_asked_why_after_a_minute() -> None:
    def is_held_up(one: Object) -> bool:
        return held_up([one], NOW) is one

    assert is_held_up(pod("ContainerCreating", made=61))
    assert is_held_up(pod(made=61)), "no kubelet said anything of it"
    assert not is_held_up(pod("ContainerCreating", made=59))
    assert not is_held_up(pod("ContainerCreating", made=61, placed=-1)), "no node has it"
    assert not is_held_up(pod("ContainerCreating", made=600, placed=5)), "a node came late"
    going = pod("ContainerCreating", made=61)
    going["metadata"]["deletionTimestamp"] = runs.ago(1)
    assert not is_held_up(going)
    assert not is_held_up(pod("ImagePullBackOff", made=61)), "that says it by itself"
    fetching = {"initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}]}
    assert not is_held_up(pod("PodInitializing", made=6100, **fetching)), "it fetches, which may take long"
    assert not is_held_up(pod("ContainerCreating", made=61, phase="Running"))


def test_since_when_servers_are_not_ready() -> None:
    def since(replicas: int, ready: int, *pods: Object, **conditions: str) -> float | None:
        told = [
            {"type": kind, "status": value, "lastTransitionTime": runs.ago(40)} for kind, value in conditions.items()
        ]
        obj = {
            "metadata": {"uid": "d", "creationTimestamp": runs.ago(99)},
            "spec": {"replicas": replicas},
            "status": {"readyReplicas": ready, "conditions": told},
        }
        found = deployment_view(obj, list(pods)).unready_since
        return None if found is None else (NOW - found).total_seconds()

    fine = {"metadata": {"name": "q"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert since(1, 1, fine) is None
    assert since(1, 0, pod(made=7)) == 7
    assert since(2, 1, fine, pod(made=70, ready=5), pod(made=6)) == 6, "ready once: since it is not"
    assert since(1, 1, fine, pod(made=50)) == 50, "a rollout whose new pod does not come up"
    assert since(2, 1, fine, ReplicaFailure="True") == 40
    assert since(2, 0, Available="False") == 40
    assert since(2, 0, Available="True") == 99


def test_an_evicted_pod_that_lingers_says_nothing_of_those_that_serve() -> None:
    crashed = {"name": "a", "ready": False, "restartCount": 9, "lastState": {"terminated": {"exitCode": 1}}}
    evicted = {"metadata": {"name": "p", "creationTimestamp": runs.ago(90_000)}, "status": {"phase": "Failed"}}
    evicted["status"]["containerStatuses"] = [crashed]
    fine = {"metadata": {"name": "q"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    view = deployment_view(
        {"metadata": {"uid": "d"}, "spec": {"replicas": 1}, "status": {"readyReplicas": 1}}, [evicted, fine]
    )
    assert (view.restarts, view.unready_since, view.waiting) == (0, None, "")


def test_only_containers_that_are_not_ready_are_crashing() -> None:
    old = {"name": "a", "ready": True, "restartCount": 9, "lastState": {"terminated": {"reason": "OOMKilled"}}}
    new = {"name": "b", "ready": False, "restartCount": 4, "lastState": {"terminated": {"exitCode": 3}}}
    pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": [old, new]}}]
    obj = {"metadata": {"uid": "d"}, "spec": {"replicas": 1}}
    view = deployment_view(obj, pods)
    assert (view.restarts, view.exit_code, view.last_exit) == (4, 3, "")
