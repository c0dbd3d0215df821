"""What the Job controller does, as a pure function: (job, its pods, now) -> pods to make, pods to end, status.

Called by ``workloads``. Kubernetes' rules for completions, parallelism, Indexed Jobs, backoffLimit, pod failure
policies, deadlines and suspension. A Job that fails first ends its pods (condition FailureTarget), then is Failed.
Differences: a pod that someone deletes while it runs is replaced and not counted; back-off between failed pods is
that of the local environment.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from prodrl_operator.cluster.local.store import timestamp

Object = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Plan:
    """What to do; ``status`` is None when the Job is over."""

    create: list[Object] = field(default_factory=list)
    delete: list[Object] = field(default_factory=list)
    status: Object | None = None
    is_expired: bool = False
    """The Job itself goes (ttlSecondsAfterFinished)."""


@dataclass(frozen=True)
class BackOff:
    """Seconds between failed pods."""

    base: float = 1.0
    limit: float = 60.0


def plan(job: Object, pods: list[Object], now: datetime, back_off: BackOff) -> Plan:
    """The next step of one Job."""
    spec, status = job["spec"], job.get("status", {})
    finished = finished_condition(job)
    active = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
    if finished is not None:
        return Plan(delete=_alive(active), is_expired=_is_expired(spec, finished, now))
    succeeded = [pod for pod in pods if _phase(pod) == "Succeeded"]
    failed = [pod for pod in pods if _phase(pod) == "Failed"]
    counted = [pod for pod in failed if failure_action(job, pod) != "Ignore"]
    new = {
        "startTime": status.get("startTime", timestamp(now)),
        "active": len(active),
        "ready": sum(_is_ready(pod) for pod in active),
        "succeeded": max(status.get("succeeded", 0), _completions(spec, succeeded)),
        "failed": max(status.get("failed", 0), len(counted)),
        "conditions": list(status.get("conditions", ())),
    }
    if spec["completionMode"] == "Indexed":
        new["completedIndexes"] = _ranges({int(_index(pod)) for pod in succeeded})
    failure = _condition(status, "FailureTarget") or _failure(job, new, counted, active, now)
    if failure:
        return _fail(failure, new, active, now)
    wanted = spec.get("completions")
    is_done = new["succeeded"] >= wanted if wanted is not None else bool(succeeded) and not active
    if is_done:
        if not active:
            _set(new, now, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
            new["completionTime"] = timestamp(now)
        return Plan(delete=_alive(active), status=new)
    if spec.get("suspend"):
        del new["startTime"]
        _set(new, now, "Suspended", "JobSuspended", "Job suspended")
        return Plan(delete=_alive(active), status=new)
    if _condition(new, "Suspended"):
        _set(new, now, "Suspended", "JobResumed", "Job resumed", state="False")
    create = [] if _is_waiting(failed, counted, now, back_off) else _missing(job, active, succeeded, new["succeeded"])
    surplus = _alive(active)[spec["parallelism"] :] if len(active) > spec["parallelism"] else []
    return Plan(create=create, delete=surplus, status=new)


def finished_condition(job: Object) -> Object | None:
    """The condition Complete or Failed, when it is True."""
    status = job.get("status", {})
    return _condition(status, "Complete") or _condition(status, "Failed")


def failure_action(job: Object, pod: Object) -> str:
    """What the pod failure policy says of a failed pod: FailJob, Ignore or Count."""
    for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules", ()):
        if "onExitCodes" in rule and _matches_codes(rule["onExitCodes"], pod):
            return str(rule["action"])
        for pattern in rule.get("onPodConditions", ()):
            conditions = pod.get("status", {}).get("conditions", ())
            wanted = (pattern["type"], pattern.get("status", "True"))
            if any((item["type"], item["status"]) == wanted for item in conditions):
                return str(rule["action"])
    return "Count"


def _matches_codes(rule: Object, pod: Object) -> bool:
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        if rule.get("containerName") not in (None, container["name"]):
            continue
        code = container.get("state", {}).get("terminated", {}).get("exitCode", 0)
        if code != 0 and (code in rule["values"]) == (rule["operator"] == "In"):
            return True
    return False


def _failure(
    job: Object, status: Object, counted: list[Object], active: list[Object], now: datetime
) -> tuple[str, str] | None:
    spec = job["spec"]
    for pod in counted:
        if failure_action(job, pod) == "FailJob":
            return "PodFailurePolicy", f"Pod {pod['metadata']['name']} failed with an exit code of the failure policy"
    restarts = 0
    if spec["template"]["spec"]["restartPolicy"] == "OnFailure":
        restarts = sum(
            c.get("restartCount", 0) for pod in active for c in pod.get("status", {}).get("containerStatuses", ())
        )
    if status["failed"] + restarts > spec["backoffLimit"]:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not spec.get("suspend"):
        age = now - datetime.fromisoformat(status["startTime"])
        if age.total_seconds() >= deadline:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
    return None


def _fail(failure: Object | tuple[str, str], status: Object, active: list[Object], now: datetime) -> Plan:
    reason, message = failure if isinstance(failure, tuple) else (failure["reason"], failure["message"])
    _set(status, now, "FailureTarget", reason, message)
    if not active:
        _set(status, now, "Failed", reason, message)
    return Plan(delete=_alive(active), status=status)


def _missing(job: Object, active: list[Object], succeeded: list[Object], num_succeeded: int) -> list[Object]:
    spec = job["spec"]
    free = spec["parallelism"] - len(active)
    if spec["completionMode"] == "Indexed":
        taken = {int(_index(pod)) for pod in [*active, *succeeded]}
        indexes = [index for index in range(spec["completions"]) if index not in taken]
        return [pod_of(job, index) for index in indexes[: max(0, free)]]
    if spec.get("completions") is not None:
        free = min(free, spec["completions"] - num_succeeded - len(active))
    elif succeeded:
        free = 0  # a work queue: after the first success no pod is started
    return [pod_of(job, None) for _ in range(free)]


def pod_of(job: Object, index: int | None) -> Object:
    """A pod of the Job, for one index when it is Indexed."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    template = job["spec"]["template"]
    given = template.get("metadata", {})
    labels = given.get("labels", {}) | {"job-name": name, "batch.kubernetes.io/job-name": name}
    labels |= {"controller-uid": uid, "batch.kubernetes.io/controller-uid": uid}
    annotations = dict(given.get("annotations", {}))
    spec = dict(template["spec"])
    middle = ""
    if index is not None:
        labels[INDEX] = annotations[INDEX] = str(index)
        spec["hostname"] = f"{name}-{index}"
        spec["containers"] = [_with_index(container, index) for container in spec["containers"]]
        spec["initContainers"] = [_with_index(container, index) for container in spec.get("initContainers", ())]
        middle = f"-{index}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}{middle}-{secrets.token_hex(3)[:5]}",
            "namespace": job["metadata"]["namespace"],
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def owner_reference(owner: Object) -> Object:
    """A reference to the controlling owner."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _with_index(container: Object, index: int) -> Object:
    env = [item for item in container.get("env", ()) if item["name"] != "JOB_COMPLETION_INDEX"]
    return container | {"env": [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}, *env]}


def _is_waiting(failed: list[Object], counted: list[Object], now: datetime, back_off: BackOff) -> bool:
    """Whether the last failure is too recent for another pod."""
    if not failed:
        return False
    seconds = min(back_off.limit, back_off.base * 2.0 ** min(30, max(0, len(counted) - 1)))
    last = max(_finished(pod, now) for pod in failed)
    return 0 <= (now - last).total_seconds() < seconds


def _finished(pod: Object, now: datetime) -> datetime:
    times = [
        container["state"]["terminated"]["finishedAt"]
        for container in pod.get("status", {}).get("containerStatuses", ())
        if "terminated" in container.get("state", {})
    ]
    return datetime.fromisoformat(max(times)) if times else now


def _is_expired(spec: Object, finished: Object, now: datetime) -> bool:
    ttl = spec.get("ttlSecondsAfterFinished")
    if ttl is None:
        return False
    return (now - datetime.fromisoformat(finished["lastTransitionTime"])).total_seconds() >= float(ttl)


def _completions(spec: Object, succeeded: list[Object]) -> int:
    if spec["completionMode"] == "Indexed":
        return len({_index(pod) for pod in succeeded})
    return len(succeeded)


def _ranges(indexes: Iterable[int]) -> str:
    """``0-2,5`` as the API writes sets of indexes."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def _index(pod: Object) -> str:
    return str(pod["metadata"]["annotations"][INDEX])


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _alive(pods: list[Object]) -> list[Object]:
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def _condition(status: Object, kind: str) -> Object | None:
    found = (item for item in status.get("conditions", ()) if item["type"] == kind and item["status"] == "True")
    return next(found, None)


def _set(status: Object, now: datetime, kind: str, reason: str, message: str, *, state: str = "True") -> None:
    """Set a condition; its transition time changes with its status only."""
    before = next((item for item in status["conditions"] if item["type"] == kind), None)
    changed = before is None or before["status"] != state
    moment = timestamp(now) if changed or before is None else before["lastTransitionTime"]
    item = {"type": kind, "status": state, "reason": reason, "message": message, "lastTransitionTime": moment}
    status["conditions"] = [old for old in status["conditions"] if old["type"] != kind] + [item]
