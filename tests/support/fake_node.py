"""A scripted kubelet on a real API server: pods are made by the real controllers, and get their status from a script.

No pod is bound to a node, so that a deleted one is gone at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.local.store import now_utc, timestamp
from prodrl_operator.errors import ConflictError, NotFoundError
from tests.support.fake_kubelet import Outcome

Object = dict[str, Any]

REPLICA_SET = port.Kind("apps/v1", "ReplicaSet", "replicasets")


class FakeNode:
    """Plays all nodes of one namespace.

    Args:
        cluster: As an administrator.
        namespace: Whose pods are played.
        jobs: Job -> how its present pods end; None: they run.
        deployments: Deployment -> True (ready), False (starting) or the reason why its containers wait.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        namespace: str,
        jobs: Callable[[Object], Outcome | None],
        deployments: Callable[[Object], bool | str] = lambda _: True,
    ) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.jobs, self.deployments = jobs, deployments
        self.most_at_once: dict[str, int] = {}
        """By step: so many pods that had not ended were seen at the same time, of whatever round and attempt."""

    def tick(self) -> int:
        """Give every pod its next status; how many were written."""
        parents, pods = self._parents(), self._cluster.list(port.POD, self._namespace)
        working = [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        found = Counter(str(pod["metadata"]["labels"][names.LABEL_STEP]) for pod in working if _is_of_job(pod))
        for step, num in found.items():
            self.most_at_once[step] = max(num, self.most_at_once.get(step, 0))
        return sum(self._play(pod, parents) for pod in pods)

    def _parents(self) -> dict[str, Object]:
        """UID of a pod's owner -> the Job, or the Deployment behind the ReplicaSet."""
        found = {job["metadata"]["uid"]: job for job in self._cluster.list(port.JOB, self._namespace)}
        deployments = {d["metadata"]["uid"]: d for d in self._cluster.list(port.DEPLOYMENT, self._namespace)}
        for item in self._cluster.list(REPLICA_SET, self._namespace):
            owners = item["metadata"].get("ownerReferences", [])
            if owners and owners[0]["uid"] in deployments:
                found[item["metadata"]["uid"]] = deployments[owners[0]["uid"]]
        return found

    def _play(self, pod: Object, parents: dict[str, Object]) -> bool:
        owners = pod["metadata"].get("ownerReferences", [])
        parent = parents.get(owners[0]["uid"]) if owners else None
        if parent is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return False
        if parent["kind"] == "Job":
            outcome = self.jobs(parent)
            status = running(pod, True) if outcome is None else ended(pod, outcome)
        else:
            status = running(pod, self.deployments(parent))
        if {k: pod["status"].get(k) for k in ("phase", "containerStatuses")} == {
            k: status.get(k) for k in ("phase", "containerStatuses")
        }:
            return False
        try:
            self._cluster.update_status({**pod, "status": {**pod["status"], **status}})
        except (ConflictError, NotFoundError):
            return False
        return True


def _is_of_job(pod: Object) -> bool:
    return names.LABEL_ATTEMPT in pod["metadata"].get("labels", {})


def condition(is_ready: bool, since: str) -> Object:
    return {
        "type": "Ready",
        "status": "True" if is_ready else "False",
        "lastTransitionTime": since,
        "observedGeneration": 1,
    }


def _containers(pod: Object, facts: Object) -> list[Object]:
    base = {"imageID": "", "lastState": {}}
    return [
        {"name": container["name"], "image": container["image"]} | base | facts
        for container in pod["spec"]["containers"]
    ]


def running(pod: Object, state: bool | str) -> Object:
    """Ready, starting, or waiting for a reason."""
    now = pod.get("status", {}).get("startTime") or timestamp(now_utc())
    is_ready = state is True
    waiting = {"waiting": {"reason": state, "message": f"scripted: {state}"}}
    shown = waiting if isinstance(state, str) else {"running": {"startedAt": now}}
    return {
        "phase": "Pending" if isinstance(state, str) else "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "startTime": now,
        "conditions": [condition(is_ready, now)],
        "containerStatuses": _containers(
            pod, {"ready": is_ready, "started": is_ready, "restartCount": 0, "state": shown}
        ),
    }


def ended(pod: Object, outcome: Outcome) -> Object:
    """Every container ended with this outcome."""
    now = timestamp(now_utc())
    started = pod.get("status", {}).get("startTime") or now
    terminated = {
        "exitCode": outcome.exit_code,
        "reason": outcome.reason or ("Error" if outcome.exit_code else "Completed"),
        "message": outcome.text,
        "startedAt": started,
        "finishedAt": now,
    }
    facts = {"ready": False, "started": False, "restartCount": 0, "state": {"terminated": terminated}}
    return {
        "phase": "Failed" if outcome.exit_code else "Succeeded",
        "startTime": started,
        "containerStatuses": _containers(pod, facts),
    }
