"""What the pods of a Job or a Deployment say, pure. Called by ``observing``."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from prodrl.config.results import Failure
from prodrl_operator import names
from prodrl_operator.cluster.port import Object
from prodrl_operator.rounds.observed import DeploymentView, JobView
from prodrl_operator.rounds.times import parse

STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Waiting reasons of a pod that is on its way."""
HELD_UP_SECONDS = 60.0
"""A pod of which nothing runs after so long, though a node has it: its events are asked why."""
HELD_UP = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
"""What its events can say."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
PREEMPTED_EXITS = (80, 143)
LAUNCHER_EXIT = 1
LOST_SECONDS = 600.0
"""After the time that a pod had to end; Kubernetes takes five minutes to find a node gone."""
POLICY_REASON = "PodFailurePolicy"
_TOLD_EXIT = re.compile(r"failed with exit code (\d+)")


def job_view(obj: Object, pods: list[Object]) -> JobView:
    """One Job."""
    metadata, spec, status = obj["metadata"], obj["spec"], obj.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}
    state: Literal["Pending", "Running", "Succeeded", "Failed"] = "Pending"
    if "Complete" in conditions:
        state = "Succeeded"
    elif "Failed" in conditions:
        state = "Failed"
    elif _has_begun(obj, pods):
        state = "Running"
    ended = _deciding(obj, pods, state) if state in ("Succeeded", "Failed") else None
    terminated = (_terminated(ended) if ended else None) or {}
    failed = conditions.get("Failed", {})
    waiting, waiting_message = _waiting(pods)
    return JobView(
        name=metadata["name"],
        uid=metadata["uid"],
        state=state,
        suspended=bool(spec.get("suspend")),
        is_queued=names.LABEL_QUEUE in metadata.get("labels", {}),
        exit_code=_exit_code(terminated, failed),
        message=terminated.get("message") or _evicted(ended) or "",
        reason=_reason(ended, terminated, failed),
        waiting=waiting,
        waiting_message=waiting_message,
        deleting="deletionTimestamp" in metadata,
        begun=_begun(metadata, status),
        is_suspended_by_us=names.ANNOTATION_SUSPENDED in metadata.get("annotations", {}),
    )


def pods_wanted(job: Object) -> int:
    """How many pods must run at the same time."""
    return int(job["spec"].get("completions") or 1) if job["spec"].get("completionMode") == "Indexed" else 1


def _has_begun(job: Object, pods: list[Object]) -> bool:
    """Whether all its pods ran, as the pods say or the Job does: of the two, either may be known first.

    What has begun never waits again: the first pod that fails, or is taken away, is the end of the Job.
    """
    status = job.get("status", {})
    ending = {"FailureTarget", "SuccessCriteriaMet"}
    if status.get("failed") or any(c["type"] in ending and c["status"] == "True" for c in status.get("conditions", [])):
        return True
    ran = [pod["metadata"] for pod in pods if pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")]
    ranks = {metadata.get("labels", {}).get(INDEX_LABEL) for metadata in ran}
    told = int(status.get("ready") or 0) + int(status.get("succeeded") or 0)
    return max(len(ranks), told) >= pods_wanted(job)


def _begun(metadata: Object, status: Object) -> datetime | None:
    since = status.get("startTime") or metadata.get("creationTimestamp")
    return parse(since) if since else None


def _evicted(pod: Object | None) -> str | None:
    """What the kubelet says of a pod that it evicted: which limit was passed."""
    status = pod.get("status", {}) if pod else {}
    return status.get("message") if status.get("reason") == "Evicted" else None


def lost(pods: list[Object], now: datetime) -> str:
    """The pod that should have been gone for long; the empty string where there is none.

    Of a pod that is asked to go, ``deletionTimestamp`` is when its time to do so is over.
    """
    for pod in pods:
        gone = pod["metadata"].get("deletionTimestamp")
        if gone and not is_over(pod) and (now - parse(gone)).total_seconds() > LOST_SECONDS:
            return f"pod {pod['metadata']['name']} should be gone since {gone}, its node does not answer"
    return ""


def is_over(pod: Object) -> bool:
    """Whether it has ended; a pod that is going away has not."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_told(obj: Object, pods: list[Object]) -> bool:
    """Whether the pod that speaks for an ended Job is among these."""
    conditions = {c["type"] for c in obj.get("status", {}).get("conditions", []) if c["status"] == "True"}
    return _deciding(obj, pods, "Succeeded" if "Complete" in conditions else "Failed") is not None


def is_under_way(pods: list[Object]) -> bool:
    """Whether one of them has neither ended nor is going away: it cannot be so when its Job has ended."""
    return any(is_alive(pod) for pod in pods)


def deployment_view(obj: Object, pods: list[Object]) -> DeploymentView:
    """One Deployment."""
    metadata, status = obj["metadata"], obj.get("status", {})
    live = [pod for pod in pods if is_alive(pod)]
    waiting, waiting_message = _waiting(live)
    for condition in status.get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True" and not waiting:
            waiting, waiting_message = "FailedCreate", condition.get("message", "")
    worst = max(
        (container for pod in live for container in _containers(pod) if not container.get("ready")),
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
        created=parse(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None,
        unready_since=_unready_since(obj, live),
    )


def _unready_since(obj: Object, live: list[Object]) -> datetime | None:
    """Of the pod that is not ready for longest; of a Deployment that lacks pods, since it does."""
    times = [since for pod in live if (since := _pod_unready_since(pod)) is not None]
    status = obj.get("status", {})
    if times or int(status.get("readyReplicas") or 0) >= int(obj["spec"].get("replicas", 1)):
        return min(times, default=None)
    told = {"ReplicaFailure": "True", "Available": "False"}
    for condition in status.get("conditions", []):
        if told.get(condition["type"]) == condition["status"] and condition.get("lastTransitionTime"):
            return parse(condition["lastTransitionTime"])
    created = obj["metadata"].get("creationTimestamp")
    return parse(created) if created else None


def _pod_unready_since(pod: Object) -> datetime | None:
    ready: Object = next((c for c in pod.get("status", {}).get("conditions", []) if c["type"] == "Ready"), {})
    if ready.get("status") == "True":
        return None
    since = ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return parse(since) if since else None


def held_up(pods: list[Object], now: datetime) -> Object | None:
    """A pod that a node has and of which nothing runs for long: a volume that cannot be mounted looks like this."""
    for pod in pods:
        status = pod.get("status", {})
        waits = [container.get("state", {}).get("waiting", {}).get("reason") for container in _containers(pod)]
        is_silent = status.get("phase", "Pending") == "Pending" and all(wait in STARTING for wait in waits)
        placed = _placed_at(pod)
        if is_alive(pod) and is_silent and placed and (now - placed).total_seconds() > HELD_UP_SECONDS:
            return pod
    return None


def is_alive(pod: Object) -> bool:
    """Neither going away nor ended: an evicted pod stays as an object until somebody deletes it."""
    return "deletionTimestamp" not in pod["metadata"] and not is_over(pod)


def _placed_at(pod: Object) -> datetime | None:
    """When a node got it; None: none has."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            since = condition.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
            return parse(since) if since else None
    return None


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


def _deciding(obj: Object, pods: list[Object], state: str) -> Object | None:
    """The pod that speaks for its Job: index 0 of a success; of a failure the one that ended first by itself."""
    if state == "Succeeded":
        done = [pod for pod in pods if pod.get("status", {}).get("phase") == "Succeeded"]
        if obj["spec"].get("completionMode") == "Indexed":  # only rank 0 knows the result
            done = [pod for pod in done if pod["metadata"].get("labels", {}).get(INDEX_LABEL) == "0"]
        return min(done, key=lambda pod: str(pod["metadata"]["name"]), default=None)
    failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]

    def order(pod: Object) -> tuple[bool, str, str]:
        end = _terminated(pod) or {}
        # When one rank dies the others are told to stop: they are not the cause.
        return end.get("exitCode") in PREEMPTED_EXITS, end.get("finishedAt") or "", pod["metadata"]["name"]

    return min(failed, key=order, default=None)


def _exit_code(terminated: dict[str, Any], failed: dict[str, Any]) -> int | None:
    """Of the process that failed, though a launcher (torchrun) ends with 1, or no pod may be left to ask.

    The failure policy writes the code into the Job's condition; a step names its reason in the termination message.
    """
    code = terminated.get("exitCode")
    if code is None:
        told = _TOLD_EXIT.search(failed.get("message") or "") if failed.get("reason") == POLICY_REASON else None
        return int(told[1]) if told else None
    if code == LAUNCHER_EXIT:
        return _named_exit(terminated.get("message") or "") or code
    return int(code)


def _named_exit(message: str) -> int | None:
    try:
        reason = Failure.model_validate_json(message).reason
    except ValidationError:
        return None
    return next((code for code, (name, _) in names.EXIT_CODES.items() if name == reason), None)


def _reason(pod: Object | None, terminated: dict[str, Any], failed: dict[str, Any]) -> str:
    if failed.get("reason") == "DeadlineExceeded":
        return "DeadlineExceeded"
    status = pod.get("status", {}) if pod else {}
    if any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions", [])):
        return "DisruptionTarget"
    if pod is None and failed.get("reason") == POLICY_REASON and "DisruptionTarget" in (failed.get("message") or ""):
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
