"""A scripted kubelet for the in-memory object store: no processes, no clock, one step a ``tick()``.

It does what Kubernetes' controllers and kubelet would have done by then: Deployments get ready pods, Jobs get pods
that end as the script says, with the termination message where the controller reads it
(``status.containerStatuses[].state.terminated.message``). Deleted pods go at the next tick.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import ObjectStore, now_utc, timestamp

Object = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a Job's pod ends."""

    message: Object | str = ""
    """Termination message; a dict becomes JSON."""
    exit_code: int = 0
    reason: str = ""
    """For example ``OOMKilled``; default ``Completed`` or ``Error``."""

    @property
    def text(self) -> str:
        """The message as the kubelet reports it."""
        text = self.message if isinstance(self.message, str) else json.dumps(self.message)
        return text.encode()[:4096].decode(errors="ignore")


def _always_ready(deployment: Object) -> bool | str:
    return True


class FakeKubelet:
    """Plays cluster for ``store``.

    Args:
        store: The store; writes are made as the system, so that ``on_mutation`` does not see them.
        jobs: Job -> how its present pod ends; None: it is still running.
        deployments: Deployment -> True (ready), False (starting) or the reason why its containers wait.
    """

    def __init__(
        self,
        store: ObjectStore,
        jobs: Callable[[Object], Outcome | None],
        deployments: Callable[[Object], bool | str] = _always_ready,
    ) -> None:
        self.store = store
        self.jobs = jobs
        self.deployments = deployments

    def tick(self) -> None:
        """One step of every Deployment, Job and deleted pod."""
        with self.store.as_system():
            for pod in self.store.list(port.POD):
                if "deletionTimestamp" in pod["metadata"]:
                    self.store.remove(port.POD, *_id(pod), uid=pod["metadata"]["uid"])
            for deployment in self.store.list(port.DEPLOYMENT):
                if "deletionTimestamp" not in deployment["metadata"]:
                    self._deploy(deployment)
            for job in self.store.list(port.JOB):
                if "deletionTimestamp" not in job["metadata"]:
                    self._run(job)
            self.store.collect_garbage()

    def _deploy(self, deployment: Object) -> None:
        state = self.deployments(deployment)
        replicas = deployment["spec"]["replicas"]
        generation = deployment["metadata"]["generation"]
        pods = self._pods_of(deployment)
        stamp = str(generation)
        for pod in pods:
            if pod["metadata"]["annotations"].get("fake/generation") != stamp:
                self.store.remove(port.POD, *_id(pod), uid=pod["metadata"]["uid"])
        kept = self._pods_of(deployment)
        for pod in kept[replicas:]:
            self.store.remove(port.POD, *_id(pod), uid=pod["metadata"]["uid"])
        for index in range(len(kept), replicas):
            self._create_pod(deployment, f"{deployment['metadata']['name']}-{generation}-{index}", stamp)
        for pod in self._pods_of(deployment):
            self.store.edit(port.POD, *_id(pod), lambda it: it.update(status=_running_status(it, state)))
        ready = replicas if state is True else 0
        now = timestamp(now_utc())
        conditions = [
            _condition("Available", ready >= replicas, "MinimumReplicasAvailable", now),
            _condition("Progressing", True, "NewReplicaSetAvailable" if ready else "ReplicaSetUpdated", now),
        ]
        status = {
            "observedGeneration": generation,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": replicas - ready,
            "conditions": conditions,
        }
        self.store.edit(port.DEPLOYMENT, *_id(deployment), lambda it: _set_status(it, status))

    def _run(self, job: Object) -> None:
        status = job.get("status", {})
        if any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in status.get("conditions", ())):
            return
        if job["spec"].get("suspend"):
            for pod in self._pods_of(job):
                self.store.remove(port.POD, *_id(pod), uid=pod["metadata"]["uid"])
            suspended = {"conditions": [_condition("Suspended", True, "JobSuspended", timestamp(now_utc()))]}
            self.store.edit(port.JOB, *_id(job), lambda it: _set_status(it, suspended))
            return
        failed = [pod for pod in self._pods_of(job) if pod.get("status", {}).get("phase") == "Failed"]
        wanted = job["spec"].get("completions") or job["spec"].get("parallelism", 1)
        live = [pod for pod in self._pods_of(job) if pod.get("status", {}).get("phase") in (None, "Running")]
        for index in range(len(live), wanted):
            self._create_pod(job, f"{job['metadata']['name']}-{len(failed)}-{index}", str(index))
        outcome = self.jobs(job)
        live = [pod for pod in self._pods_of(job) if pod.get("status", {}).get("phase") in (None, "Running")]
        for pod in live:
            ended = _running_status(pod, True) if outcome is None else _ended_status(pod, outcome)
            self.store.edit(port.POD, *_id(pod), lambda it, ended=ended: it.update(status=ended))  # type: ignore[misc]
        counted = [pod for pod in failed if _verdict(job, pod) != "Ignore"]
        self._set_job_status(job, outcome, wanted, len(counted))

    def _set_job_status(self, job: Object, outcome: Outcome | None, wanted: int, failures: int) -> None:
        now = timestamp(now_utc())
        status: Object = {"startTime": job.get("status", {}).get("startTime", now), "conditions": []}
        if outcome is None:
            status |= {"active": wanted, "ready": wanted, "failed": failures}
        elif outcome.exit_code == 0:
            status |= {"active": 0, "succeeded": wanted, "failed": failures, "completionTime": now}
            status["conditions"].append(_condition("Complete", True, "CompletionsReached", now))
        else:
            verdict = _verdict_of_code(job, outcome.exit_code)
            failures += verdict != "Ignore"
            status |= {"active": 0, "failed": failures}
            reason = "PodFailurePolicy" if verdict == "FailJob" else "BackoffLimitExceeded"
            if verdict == "FailJob" or failures > job["spec"]["backoffLimit"]:
                status["conditions"].append(_condition("Failed", True, reason, now))
        self.store.edit(port.JOB, *_id(job), lambda it: _set_status(it, status))

    def _pods_of(self, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        pods = self.store.list(port.POD, owner["metadata"]["namespace"])
        return [pod for pod in pods if any(o["uid"] == uid for o in pod["metadata"].get("ownerReferences", ()))]

    def _create_pod(self, owner: Object, name: str, stamp: str) -> None:
        template = owner["spec"]["template"]
        labels = dict(template.get("metadata", {}).get("labels", {}))
        if owner["kind"] == "Job":
            labels |= {
                "job-name": owner["metadata"]["name"],
                "batch.kubernetes.io/job-name": owner["metadata"]["name"],
                "batch.kubernetes.io/job-completion-index": stamp,
            }
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata = {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels,
            "annotations": template.get("metadata", {}).get("annotations", {}) | {"fake/generation": stamp},
            "ownerReferences": [reference],
        }
        spec = template["spec"] | {"nodeName": "fake"}
        if self.store.get(port.POD, metadata["namespace"], name) is None:
            self.store.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def _id(obj: Object) -> tuple[str, str]:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _condition(kind: str, state: bool, reason: str, now: str) -> Object:
    return {"type": kind, "status": str(state), "reason": reason, "message": "", "lastTransitionTime": now}


def _set_status(obj: Object, status: Object) -> None:
    """Keep the transition time of a condition whose status did not change."""
    before = {c["type"]: c for c in obj.get("status", {}).get("conditions", ())}
    for condition in status["conditions"]:
        was = before.get(condition["type"])
        if was and was["status"] == condition["status"]:
            condition["lastTransitionTime"] = was["lastTransitionTime"]
    obj["status"] = status


def _running_status(pod: Object, state: bool | str) -> Object:
    now = pod.get("status", {}).get("startTime", timestamp(now_utc()))
    running = {"running": {"startedAt": now}}
    waiting = {"waiting": {"reason": state, "message": f"scripted: {state}"}}
    statuses = [
        {
            "name": container["name"],
            "ready": state is True,
            "started": state is True,
            "restartCount": 0,
            "image": container.get("image", ""),
            "state": waiting if isinstance(state, str) else running,
        }
        for container in pod["spec"]["containers"]
    ]
    return {
        "phase": "Pending" if isinstance(state, str) else "Running",
        "podIP": "127.0.0.1",
        "startTime": now,
        "conditions": [_condition("Ready", state is True, "", now)],
        "containerStatuses": statuses,
    }


def _ended_status(pod: Object, outcome: Outcome) -> Object:
    now = timestamp(now_utc())
    terminated = {
        "exitCode": outcome.exit_code,
        "reason": outcome.reason or ("Error" if outcome.exit_code else "Completed"),
        "message": outcome.text,
        "startedAt": pod.get("status", {}).get("startTime", now),
        "finishedAt": now,
    }
    statuses = [
        {
            "name": container["name"],
            "ready": False,
            "restartCount": 0,
            "image": container.get("image", ""),
            "state": {"terminated": terminated},
        }
        for container in pod["spec"]["containers"]
    ]
    phase = "Failed" if outcome.exit_code else "Succeeded"
    return {"phase": phase, "startTime": terminated["startedAt"], "containerStatuses": statuses}


def _verdict(job: Object, pod: Object) -> str:
    codes = [s["state"]["terminated"]["exitCode"] for s in pod["status"]["containerStatuses"]]
    return _verdict_of_code(job, max(codes))


def _verdict_of_code(job: Object, code: int) -> str:
    for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules", ()):
        codes = rule.get("onExitCodes")
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"
