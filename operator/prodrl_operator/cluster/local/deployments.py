"""What the Deployment controller does, as a pure function: (deployment, its pods, now) -> pods to make, to end, status.

Called by ``workloads``. There are no ReplicaSets: a pod carries the hash of the template it was made from. Strategies
RollingUpdate (maxSurge, maxUnavailable) and Recreate; there is no rollback and no pause.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from prodrl_operator.cluster.local.jobs import owner_reference
from prodrl_operator.cluster.local.store import timestamp

Object = dict[str, Any]

HASH_LABEL = "pod-template-hash"


@dataclass
class Plan:
    """What to do."""

    create: list[Object] = field(default_factory=list)
    delete: list[Object] = field(default_factory=list)
    status: Object = field(default_factory=dict)


def plan(deployment: Object, pods: list[Object], now: datetime) -> Plan:
    """The next step of one Deployment."""
    spec = deployment["spec"]
    stamp = template_hash(deployment)
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    new = [pod for pod in alive if pod["metadata"]["labels"].get(HASH_LABEL) == stamp]
    old = [pod for pod in alive if pod not in new]
    create, delete = _roll(spec, new, old, len(pods), now)
    status = _status(deployment, alive, new, now)
    return Plan([pod_of(deployment, stamp) for _ in range(create)], delete, status)


def _roll(spec: Object, new: list[Object], old: list[Object], num_all: int, now: datetime) -> tuple[int, list[Object]]:
    """How many new pods to make, and which pods to end."""
    replicas = spec["replicas"]
    surplus = sorted(new, key=lambda pod: (is_ready(pod), pod["metadata"]["creationTimestamp"]))
    delete = surplus[: max(0, len(new) - replicas)]
    missing = max(0, replicas - len(new))
    if spec["strategy"]["type"] == "Recreate":
        others = num_all - len(new)  # also those that are still ending
        return (0 if others else missing), delete + old
    rolling = spec["strategy"].get("rollingUpdate", {})
    surge = _amount(rolling.get("maxSurge", "25%"), replicas, up=True)
    unavailable = _amount(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    create = max(0, min(missing, replicas + surge - len(new) - len(old)))
    available = sum(_is_available(pod, spec, now) for pod in [*new, *old])
    may_end = available - (replicas - unavailable)
    for pod in sorted(old, key=is_ready):  # those that serve nobody first
        if not _is_available(pod, spec, now):
            delete.append(pod)
        elif may_end > 0:
            may_end -= 1
            delete.append(pod)
    return create, delete


def template_hash(deployment: Object) -> str:
    """Stamp of the pod template."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def pod_of(deployment: Object, stamp: str) -> Object:
    """A pod of the Deployment's present template."""
    template = deployment["spec"]["template"]
    given = template.get("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{deployment['metadata']['name']}-{stamp}-{secrets.token_hex(3)[:5]}",
            "namespace": deployment["metadata"]["namespace"],
            "labels": given.get("labels", {}) | {HASH_LABEL: stamp},
            "annotations": given.get("annotations", {}),
            "ownerReferences": [owner_reference(deployment)],
        },
        "spec": template["spec"],
    }


def is_ready(pod: Object) -> bool:
    """Whether the pod's Ready condition is True."""
    return _ready_since(pod) is not None


def _ready_since(pod: Object) -> datetime | None:
    for item in pod.get("status", {}).get("conditions", ()):
        if item["type"] == "Ready" and item["status"] == "True":
            return datetime.fromisoformat(item["lastTransitionTime"])
    return None


def _is_available(pod: Object, spec: Object, now: datetime) -> bool:
    since = _ready_since(pod)
    return since is not None and (now - since).total_seconds() >= spec["minReadySeconds"]


def _amount(value: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    exact = int(value.rstrip("%")) * replicas / 100
    return math.ceil(exact) if up else math.floor(exact)


def _status(deployment: Object, alive: list[Object], new: list[Object], now: datetime) -> Object:
    spec, before = deployment["spec"], deployment.get("status", {})
    available = sum(_is_available(pod, spec, now) for pod in alive)
    status: Object = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(alive),
        "updatedReplicas": len(new),
        "readyReplicas": sum(is_ready(pod) for pod in alive),
        "availableReplicas": available,
        "unavailableReplicas": max(0, spec["replicas"] - available),
    }
    moved = any(status[name] != before.get(name) for name in ("observedGeneration", "updatedReplicas", "readyReplicas"))
    is_complete = status["updatedReplicas"] == status["replicas"] == spec["replicas"] == available
    rolling = spec["strategy"].get("rollingUpdate", {"maxUnavailable": spec["replicas"]})
    minimum = spec["replicas"] - _amount(rolling.get("maxUnavailable", "25%"), spec["replicas"], up=False)
    is_available = available >= minimum
    known = {item["type"]: item for item in before.get("conditions", ())}
    status["conditions"] = [
        _condition(
            known.get("Available"),
            "Available",
            is_available,
            "MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable",
            now,
        ),
        _progressing(known.get("Progressing"), spec, is_complete=is_complete, moved=moved, now=now),
    ]
    return status


def _progressing(before: Object | None, spec: Object, *, is_complete: bool, moved: bool, now: datetime) -> Object:
    if is_complete:
        return _condition(before, "Progressing", True, "NewReplicaSetAvailable", now)
    if before is None or moved or before["reason"] == "NewReplicaSetAvailable":
        return _condition(before, "Progressing", True, "ReplicaSetUpdated", now) | {"lastUpdateTime": timestamp(now)}
    waited = (now - datetime.fromisoformat(before["lastUpdateTime"])).total_seconds()
    if waited > spec["progressDeadlineSeconds"]:
        return _condition(before, "Progressing", False, "ProgressDeadlineExceeded", now)
    return before


def _condition(before: Object | None, kind: str, state: bool, reason: str, now: datetime) -> Object:
    if before and (before["status"], before["reason"]) == (str(state), reason):
        return before
    moment = before["lastTransitionTime"] if before and before["status"] == str(state) else timestamp(now)
    return {
        "type": kind,
        "status": str(state),
        "reason": reason,
        "message": "",
        "lastTransitionTime": moment,
        "lastUpdateTime": timestamp(now),
    }
