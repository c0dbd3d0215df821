"""What the pods of a Job or a Deployment say, and what is made of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.pods import INDEX_LABEL, deployment_view, job_view
from tests.support.operator_harness import World


def pod(phase: str, name: str = "p", labels: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels or {}}, "status": {"phase": phase, **status}}


def ended(code: int, at: str = "2026-01-01T00:00:00Z", **more: Any) -> list[dict[str, Any]]:
    state = {"terminated": {"exitCode": code, "finishedAt": at, **more}}
    return [{"name": "step", "restartCount": 0, "state": state}]


def batch_job(condition: str | None = None, reason: str = "", **more: Any) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", "reason": reason}] if condition else []
    labels = more.pop("labels", {})
    return {
        "metadata": {"name": "j", "uid": "u", "labels": labels},
        "spec": {"suspend": more.pop("suspend", False), **more.pop("spec", {})},
        "status": {"conditions": conditions, **more},
    }


def test_of_many_ranks_the_one_that_died_first_by_itself_speaks() -> None:
    pods = [
        pod("Failed", "rank-0", containerStatuses=ended(143, "2026-01-01T00:00:01Z", message="told to stop")),
        pod("Failed", "rank-1", containerStatuses=ended(78, "2026-01-01T00:00:02Z", message="memory")),
        pod("Failed", "rank-2", containerStatuses=ended(69, "2026-01-01T00:00:03Z", message="lost a peer")),
    ]
    view = job_view(batch_job("Failed", "BackoffLimitExceeded"), pods)
    assert (view.state, view.exit_code, view.message) == ("Failed", 78, "memory")


def test_of_a_success_index_0_speaks() -> None:
    pods = [
        pod("Succeeded", "b", {INDEX_LABEL: "1"}, containerStatuses=ended(0, message="other")),
        pod("Succeeded", "a", {INDEX_LABEL: "0"}, containerStatuses=ended(0, message="result")),
    ]
    assert job_view(batch_job("Complete"), pods).message == "result"


INDEXED = {"completionMode": "Indexed", "completions": 2}
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]


@pytest.mark.parametrize(
    ("second", "status", "state"),
    [
        ([], {"ready": 1}, "Pending"),
        ([pod("Pending", "b", {INDEX_LABEL: "1"}, conditions=UNSCHEDULABLE)], {"ready": 1}, "Pending"),
        ([pod("Running", "b", {INDEX_LABEL: "0"})], {"ready": 2}, "Running"),
        ([pod("Running", "b", {INDEX_LABEL: "1"})], {}, "Running"),
        ([pod("Succeeded", "b", {INDEX_LABEL: "1"})], {}, "Running"),
        ([], {"ready": 1, "succeeded": 1}, "Running"),
        ([], {"failed": 1}, "Running"),
    ],
)
def test_a_training_on_several_nodes_has_begun_when_each_of_its_pods_has(
    second: list[dict[str, Any]], status: dict[str, Any], state: str
) -> None:
    view = job_view(batch_job(spec=INDEXED, **status), [pod("Running", "a", {INDEX_LABEL: "0"}), *second])
    assert view.state == state
    is_told = bool(second) and "conditions" in second[0]["status"]
    assert (view.waiting, view.waiting_message) == (("Unschedulable", "0/1 nodes") if is_told else ("", ""))


def test_a_job_whose_pod_was_taken_away_is_ending_and_does_not_wait_to_start() -> None:
    """The pod is seen to go before its Job is seen to fail."""
    ending = batch_job("FailureTarget", "PodFailurePolicy", spec=INDEXED)
    for seen in (batch_job(ready=1), batch_job(failed=1), ending):
        assert job_view(seen, []).state == "Running"
    assert job_view(batch_job(), []).state == "Pending"


def test_the_time_of_a_job_begins_when_its_pods_may_be_made() -> None:
    made = batch_job() | {"metadata": {"name": "j", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
    assert job_view(made, []).begun == datetime(2026, 1, 1, tzinfo=UTC)
    made["status"]["startTime"] = "2026-01-01T03:00:00Z"
    assert job_view(made, []).begun == datetime(2026, 1, 1, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("pods", "condition", "reason"),
    [
        ([pod("Failed", containerStatuses=ended(137, reason="OOMKilled"))], "BackoffLimitExceeded", "OOMKilled"),
        ([pod("Failed", reason="Evicted")], "BackoffLimitExceeded", "Evicted"),
        (
            [
                pod(
                    "Failed",
                    conditions=[{"type": "DisruptionTarget", "status": "True"}],
                    containerStatuses=ended(137, reason="Error"),
                )
            ],
            "PodFailurePolicy",
            "DisruptionTarget",
        ),
        ([pod("Failed", containerStatuses=ended(143))], "DeadlineExceeded", "DeadlineExceeded"),
        ([], "BackoffLimitExceeded", "BackoffLimitExceeded"),
    ],
)
def test_reasons_of_a_failed_job(pods: list[dict[str, Any]], condition: str, reason: str) -> None:
    assert job_view(batch_job("Failed", condition), pods).reason == reason


def test_an_evicted_pod_says_which_limit_it_passed() -> None:
    evicted = pod("Failed", reason="Evicted", message='Usage of EmptyDir volume "shm" exceeds the limit "1Gi".')
    assert job_view(batch_job("Failed", "BackoffLimitExceeded"), [evicted]).message == evicted["status"]["message"]


def test_waiting_pods_say_why() -> None:
    unschedulable = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]
    view = job_view(batch_job(), [pod("Pending", conditions=unschedulable)])
    assert (view.state, view.waiting, view.waiting_message) == ("Pending", "Unschedulable", "0/1 nodes")
    waiting = [{"name": "fetch", "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}]
    assert job_view(batch_job(), [pod("Pending", initContainerStatuses=waiting)]).waiting == "ErrImagePull"
    starting = [{"name": "step", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert job_view(batch_job(), [pod("Pending", containerStatuses=starting)]).waiting == ""


def test_a_queue_label_makes_suspend_kueues() -> None:
    view = job_view(batch_job(suspend=True, labels={names.LABEL_QUEUE: "gpus"}), [])
    assert (view.suspended, view.is_queued) == (True, True)
    assert not view.is_suspension_due(suspend=False)


def test_a_deployment_tells_its_worst_container() -> None:
    crashed = {
        "name": "server",
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": ""}},
    }
    deployment = {
        "metadata": {"name": "d", "uid": "u", "generation": 2},
        "spec": {"replicas": 2},
        "status": {"readyReplicas": 1, "observedGeneration": 2},
    }
    view = deployment_view(deployment, [pod("Running"), pod("Running", containerStatuses=[crashed])])
    assert (view.restarts, view.last_exit, view.waiting) == (4, "OOMKilled", "CrashLoopBackOff")
    assert not view.is_ready
    refused = deployment | {
        "status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}
    }
    assert deployment_view(refused, []).waiting == "FailedCreate"


def test_a_job_without_pods_is_explained_by_its_events() -> None:
    it = World()
    it.kubelet.tick = lambda: None  # type: ignore[method-assign]
    it.turn()
    job = it.store.get(port.JOB, "default", "chess-r0000-export-a0")
    assert job is not None
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "x.1", "namespace": "default"},
        "involvedObject": {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]},
        "reason": "FailedCreate",
        "message": "pods are forbidden: exceeded quota",
        "type": "Warning",
    }
    it.store.create(event)
    it.now += timedelta(seconds=60)
    it.turn()
    assert "exceeded quota" in it.round(0).status.message
