"""What the pods of a Job or a Deployment say, pure. Called by ``observing``."""

from __future__ import annotations

from typing import Any, Literal

from prodrl_operator import names
from prodrl_operator.cluster.port import Object
from prodrl_operator.rounds.observed import DeploymentView, JobView

STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Waiting reasons of a pod that is on its way."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
PREEMPTED_EXITS = (80, 143)


def job_view(obj: Object, pods: list[Object]) -> JobView:
    """One Job."""
    metadata, spec, status = obj["metadata"], obj["spec"], obj.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}
    state: Literal["Pending", "Running", "Succeeded", "Failed"] = "Pending"
    if "Complete" in conditions:
        state = "Succeeded"
    elif "Failed" in conditions:
        state = "Failed"
    elif status.get("ready", 0) > 0 or any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
        state = "Running"
    ended = _deciding(pods, is_success=state == "Succeeded") if state in ("Succeeded", "Failed") else None
    terminated = (_terminated(ended) if ended else None) or {}
    waiting, waiting_message = _waiting(pods)
    return JobView(
        name=metadata["name"],
        uid=metadata["uid"],
        state=state,
        suspended=bool(spec.get("suspend")),
        is_queued=names.LABEL_QUEUE in metadata.get("labels", {}),
        exit_code=terminated.get("exitCode"),
        message=terminated.get("message") or "",
        reason=_reason(ended, terminated, conditions.get("Failed", {})),
        waiting=waiting,
        waiting_message=waiting_message,
        deleting="deletionTimestamp" in metadata,
    )


def deployment_view(obj: Object, pods: list[Object]) -> DeploymentView:
    """One Deployment."""
    metadata, status = obj["metadata"], obj.get("status", {})
    live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    waiting, waiting_message = _waiting(live)
    for condition in status.get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True" and not waiting:
            waiting, waiting_message = "FailedCreate", condition.get("message", "")
    worst = max(
        (container for pod in live for container in _containers(pod)),
        key=lambda container: int(container.get("restartCount", 0)),
        default={},
    )
    last = _last_end(worst)
    return DeploymentView(
        uid=metadata["uid"],
        desired=int(obj["spec"].get("replicas", 1)),
        ready=int(status.get("readyReplicas") or 0),
        is_current=int(status.get("observedGeneration") or 0) >= int(metadata.get("generation", 1)),
        waiting=waiting,
        waiting_message=waiting_message,
        restarts=int(worst.get("restartCount", 0)),
        last_exit=last.get("reason") or "",
        exit_code=last.get("exitCode"),
        exit_message=last.get("message") or "",
        deleting="deletionTimestamp" in metadata,
        has_pods=bool(pods),
    )


def _containers(pod: Object) -> list[dict[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _last_end(container: dict[str, Any]) -> dict[str, Any]:
    for state in (container.get("state", {}), container.get("lastState", {})):
        if state.get("terminated"):
            ended: dict[str, Any] = state["terminated"]
            return ended
    return {}


def _terminated(pod: Object) -> dict[str, Any] | None:
    """How the pod's containers ended: the one that failed, else the last."""
    ends = [end for container in _containers(pod) if (end := _last_end(container))]
    failed = [end for end in ends if end.get("exitCode")]
    return failed[0] if failed else (ends[-1] if ends else None)


def _deciding(pods: list[Object], *, is_success: bool) -> Object | None:
    """The pod that speaks for its Job: index 0 of a success; of a failure the one that ended first by itself."""
    if is_success:
        done = [pod for pod in pods if pod.get("status", {}).get("phase") == "Succeeded"]
        return min(done, key=lambda pod: pod["metadata"].get("labels", {}).get(INDEX_LABEL, "0"), default=None)
    failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]

    def order(pod: Object) -> tuple[bool, str, str]:
        end = _terminated(pod) or {}
        # When one rank dies the others are told to stop: they are not the cause.
        return end.get("exitCode") in PREEMPTED_EXITS, end.get("finishedAt") or "", pod["metadata"]["name"]

    return min(failed, key=order, default=None)


def _reason(pod: Object | None, terminated: dict[str, Any], failed: dict[str, Any]) -> str:
    if failed.get("reason") == "DeadlineExceeded":
        return "DeadlineExceeded"
    status = pod.get("status", {}) if pod else {}
    if any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions", [])):
        return "DisruptionTarget"
    return str(status.get("reason") or terminated.get("reason") or failed.get("reason") or "")


def _waiting(pods: list[Object]) -> tuple[str, str]:
    """Why the first pod that does not start does not."""
    for pod in pods:
        status = pod.get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or "")
        for container in _containers(pod):
            waiting = container.get("state", {}).get("waiting")
            if waiting and waiting.get("reason") not in STARTING:
                return str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    return "", ""
