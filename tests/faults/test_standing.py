"""Pods that cannot start or do not stay: the run says which and why, goes on once it is cured, and loses nothing."""

from __future__ import annotations

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import now_utc, timestamp
from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step
from tests.faults.stage import Maker, together
from tests.faults.test_rollout import CANDIDATE, check_users_are_with_stable
from tests.faults.world import FaultWorld, crashing, is_of, unschedulable, waiting

GATEWAY = "chess-gateway"
EXPORT = "chess-r0000-export-a0"
MISSING = 'MountVolume.SetUp failed for volume "keys" : secret "api-keys" not found'


def mounting(it: FaultWorld, pod: Object) -> Object:
    """A node has it and cannot mount a volume: only an event says so."""
    name, namespace = pod["metadata"]["name"], it.namespace
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.mount", "namespace": namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": name,
            "namespace": namespace,
            "uid": pod["metadata"]["uid"],
        },
        "reason": "FailedMount",
        "message": MISSING,
        "type": "Warning",
        "lastTimestamp": timestamp(now_utc()),
    }
    if name not in {item["involvedObject"]["name"] for item in it.admin.list(port.EVENT, namespace)}:
        it.admin.create(event)
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": pod["metadata"]["creationTimestamp"]}
    return {**waiting(pod, "ContainerCreating"), "conditions": [placed]}


@together
def test_a_gateway_that_cannot_pull_its_image_says_so_and_takes_a_corrected_one(make: Maker) -> None:
    """argo-rollouts#4128: pods were stuck pulling, and the rollout said Progressing for hours."""
    it = make({"gateway": {"image": "typo:1", "authentication": "Anonymous"}})

    def is_pulled(deployment: Object) -> bool | str:
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        return "ImagePullBackOff" if image == "typo:1" else True

    it.deployments = is_pulled
    it.pace = 10.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "ImagePullFailed"
    assert it.message("Stalled").startswith("the gateway cannot run")
    assert not it.is_true("Ready")
    it.until(lambda w: "ImagePullBackOff" in w.message("Ready"))
    it.until(lambda w: w.stable() == 0)
    it.steps(3)
    assert it.at(0, Step.PROMOTING)
    assert it.stalled() == "ImagePullFailed"
    it.edit(gateway={"image": "right:1"})
    it.until(lambda w: w.is_true("Ready") and w.stalled() is None)
    it.until(lambda w: w.stable() == 1)


@together
def test_a_gateway_that_crashes_again_and_again_says_how(make: Maker) -> None:
    """kuberay#1990, trainer#2001: a pod that could not start was never told of."""
    it = make()
    it.until(lambda w: w.at(1, Step.COLLECTING) or w.at(1, Step.TRAINING))
    it.pods = lambda pod, parent: crashing(pod, 4, "Error", 77) if is_of(parent, GATEWAY) else None
    it.until(FaultWorld.stalled)
    assert it.stalled() == "CredentialsRejected", "exit code 77"
    assert not it.is_true("Ready")
    it.pods = lambda pod, parent: None
    it.until(lambda w: w.stalled() is None and w.is_true("Ready"))
    it.until(FaultWorld.is_finished)


@together
def test_a_secret_that_is_not_there_is_named_for_servers_jobs_and_the_gateway(make: Maker) -> None:
    """kubernetes#90124, trainer#2001: why a pod does not start stood in events only."""
    it = make({"gateway": {"apiKeysSecretRef": {"name": "api-keys"}}})
    for name, told in ((EXPORT, f"Job {EXPORT}"), ("chess-r0000-serve", "a server of round 0"), (GATEWAY, "gateway")):
        it.pods = lambda pod, parent, name=name: mounting(it, pod) if is_of(parent, name) else None
        it.pace = 10.0
        it.until(FaultWorld.stalled)
        assert it.stalled() == "InvalidConfiguration"
        assert told in it.message("Stalled")
        assert 'secret "api-keys" not found' in it.message("Stalled")
        it.pods = lambda pod, parent: None
        it.until(lambda w: w.stalled() is None)
    it.until(lambda w: w.stable() == 1)
    assert [sum(a.failures for a in it.round(number).status.attempts) for number in (0, 1)] == [0, 0]


@together
def test_a_priority_class_that_is_not_there_is_named_and_once_it_is_the_job_runs(make: Maker) -> None:
    """kubernetes#90124, kuberay#603: that pods could not be created stood in events only; it is not always a quota."""
    it = make()
    name = f"first-{it.namespace}"
    it.edit(export={"priorityClassName": name})
    it.pace = 5.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "InvalidConfiguration"
    assert f"no PriorityClass with name {name} was found" in it.message("Stalled")
    assert it.round(0).status.step == "Exporting"
    made = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1}
    it.apply(made)
    try:
        it.pace = 0.5
        it.until(lambda w: w.stable() == 0)
        assert [a.failures for a in it.round(0).status.attempts] == []
    finally:
        it.kubectl("delete", "priorityclass", name, "--wait=false")


@together
def test_a_candidate_that_loses_its_node_on_the_canary_gets_no_users_and_is_turned_down(make: Maker) -> None:
    """trainer#999, LLMKube#192: a preempted server was waited for, and users sent to it, for ever."""
    canary = {"steps": [{"weight": 50, "minTrajectories": 100, "deadlineSeconds": 86_400}]}
    serving = {"drainSeconds": 0, "startDeadlineSeconds": 600}
    it = make({"gate": {"approval": "Required", "canary": canary}, "serving": serving})
    it.until(lambda w: w.at(1, Step.GATING) and w.weights() == {0: 50, 1: 50})
    it.pods = lambda pod, parent: unschedulable(pod) if is_of(parent, CANDIDATE) else None
    for name in it.names_of(port.POD):
        if name.startswith(CANDIDATE):
            it.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
    it.until(lambda w: w.weights() == {0: 100, 1: 0})
    assert it.at(1, Step.GATING), "it may come back"
    it.pace = 60.0
    it.until(lambda w: w.at(1, Step.BLOCKED))
    assert it.round(1).status.reason == "InsufficientCapacity"
    check_users_are_with_stable(it)
