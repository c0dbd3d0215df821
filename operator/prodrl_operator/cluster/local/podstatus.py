"""The status of a pod from what its containers do, as the kubelet writes it. Pure; called by ``runner``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prodrl_operator.cluster.local.containers import State
from prodrl_operator.cluster.local.store import timestamp

Object = dict[str, Any]


@dataclass(frozen=True)
class Fact:
    """One container, as seen now."""

    state: State
    last: State | None = None
    """The attempt before."""
    reason: str = ""
    """Why it waits."""
    is_started: bool = False
    is_ready: bool = False


def now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def should_restart(policy: str, code: int) -> bool:
    """Whether a container that ended with ``code`` runs again."""
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def is_of_job(pod: Object) -> bool:
    """Whether a Job made the pod."""
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", ()))


def condition(kind: str, state: bool, moment: str, reason: str = "") -> Object:
    """A pod condition."""
    return {"type": kind, "status": str(state), "lastTransitionTime": moment} | ({"reason": reason} if reason else {})


def status_of(pod: Object, name: str, attempt: int) -> Object:
    """What the pod's status says of that attempt of a container; empty when it speaks of another."""
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if status["name"] == name and status["restartCount"] == attempt and "running" in status["state"]:
            return dict(status)
    return {}


def pod_status(pod: Object, facts: Mapping[str, Fact]) -> Object:
    """The whole status; transition times of unchanged conditions are kept."""
    spec, before = pod["spec"], pod.get("status", {})
    policy = spec.get("restartPolicy", "Always")
    inits = [container["name"] for container in spec.get("initContainers", ())]
    mains = [container["name"] for container in spec["containers"]]
    phase = _phase(policy, [facts[name] for name in inits], [facts[name] for name in mains])
    is_ready = phase == "Running" and all(facts[name].is_ready for name in mains)
    is_initialized = all(facts[name].state.phase == "ended" and facts[name].state.code == 0 for name in inits)
    moment = timestamp(now())
    reason = "PodCompleted" if phase == "Succeeded" else "" if is_ready else "ContainersNotReady"
    conditions = [
        condition("PodScheduled", True, moment),
        condition("Initialized", is_initialized, moment),
        condition("ContainersReady", is_ready, moment, reason),
        condition("Ready", is_ready, moment, reason),
    ]
    status = {**before, "phase": phase, "conditions": _keep_times(conditions, before.get("conditions", ()))}
    if inits:
        status["initContainerStatuses"] = [_container(c, facts[c["name"]]) for c in spec["initContainers"]]
    status["containerStatuses"] = [_container(c, facts[c["name"]]) for c in spec["containers"]]
    return status


def mark_not_ready(pod: Object) -> None:
    """Take a pod that is about to stop out of the Services."""
    status = pod["status"]
    moment = timestamp(now())
    for container in status.get("containerStatuses", ()):
        container["ready"] = False
    for item in status.get("conditions", ()):
        if item["type"] in ("Ready", "ContainersReady") and item["status"] == "True":
            item.update(status="False", lastTransitionTime=moment)


def _phase(policy: str, inits: list[Fact], mains: list[Fact]) -> str:
    for fact in inits:
        if fact.state.phase == "ended" and fact.state.code != 0 and policy == "Never":
            return "Failed"
        if fact.state.phase != "ended" or fact.state.code != 0:
            return "Pending"
    ended = [f for f in mains if f.state.phase == "ended" and not should_restart(policy, f.state.code)]
    if len(ended) == len(mains):
        return "Failed" if any(fact.state.code for fact in ended) else "Succeeded"
    if all(fact.state.phase in ("new", "starting") for fact in mains):
        return "Pending"
    return "Running"


def _container(container: Object, fact: Fact) -> Object:
    state = fact.state
    result: Object = {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": fact.is_ready,
        "started": fact.is_started,
        "restartCount": state.attempt,
        "state": _state(fact),
    }
    if fact.reason and state.phase == "ended":
        result["lastState"] = {"terminated": _terminated(state)}
    elif fact.last is not None:
        result["lastState"] = {"terminated": _terminated(fact.last)}
    return result


def _state(fact: Fact) -> Object:
    if fact.reason:
        reason, _, message = fact.reason.partition(": ")
        return {"waiting": {"reason": reason, "message": message or _waiting_message(fact)}}
    if fact.state.phase == "ended":
        return {"terminated": _terminated(fact.state)}
    if fact.state.phase == "running":
        return {"running": {"startedAt": _time(fact.state.started)}}
    return {"waiting": {"reason": "ContainerCreating" if fact.state.phase == "starting" else "PodInitializing"}}


def _waiting_message(fact: Fact) -> str:
    return f"back-off after exit code {fact.state.code}"


def _terminated(state: State) -> Object:
    result: Object = {
        "exitCode": state.code,
        "reason": "OOMKilled" if state.is_out_of_memory else "Error" if state.code else "Completed",
        "startedAt": _time(state.started),
        "finishedAt": _time(state.finished),
    }
    if state.signal:
        result["signal"] = state.signal
    if state.message:
        result["message"] = state.message
    return result


def _time(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _keep_times(conditions: list[Object], before: Any) -> list[Object]:
    known = {item["type"]: item for item in before}
    for item in conditions:
        was = known.get(item["type"])
        if was and was["status"] == item["status"]:
            item["lastTransitionTime"] = was["lastTransitionTime"]
    return conditions
