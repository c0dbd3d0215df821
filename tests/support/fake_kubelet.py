"""A scripted kubelet for the in-memory object store: no processes, no clock, one step a ``tick()``.

Deployments and Jobs are driven by the local environment's own controllers (``workloads``); what the kubelet would do
is scripted: pods get ready, or end as the script says, with the termination message where the controller
reads it (``status.containerStatuses[].state.terminated.message``). Deleted pods go at the next tick.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import jobs, podstatus
from prodrl_operator.cluster.local.store import ObjectStore, now_utc, timestamp
from prodrl_operator.cluster.local.workloads import Workloads

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
        jobs: Job -> how its present pods end; None: they are still running.
        deployments: Deployment -> True (ready), False (starting) or the reason why its containers wait.
        now: The nodes' clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        jobs: Callable[[Object], Outcome | None],
        deployments: Callable[[Object], bool | str] = _always_ready,
        now: Callable[[], datetime] = now_utc,
    ) -> None:
        self.store = store
        self.jobs = jobs
        self.deployments = deployments
        self.now = now
        self._workloads = Workloads(store, back_off=NO_BACK_OFF, now=now)

    def tick(self) -> None:
        """What a cluster does until nothing moves by itself: pods are made, ended, judged, replaced once."""
        with self.store.as_system():
            self._remove_deleted()
            for _ in range(2):  # a rollout ends its old pods only when the new ones are ready
                self._workloads.sync()
                self._play()
                self._workloads.sync()
                self._remove_deleted()
            self.store.collect_garbage()

    def _remove_deleted(self) -> None:
        for pod in self.store.list(port.POD):
            if "deletionTimestamp" in pod["metadata"]:
                self.store.remove(*_id(pod), uid=pod["metadata"]["uid"])

    def _play(self) -> None:
        outcomes: dict[str, Outcome | None] = {}
        now = timestamp(self.now())
        for pod in self.store.list(port.POD):
            owners, namespace = pod["metadata"].get("ownerReferences"), pod["metadata"]["namespace"]
            is_going = "deletionTimestamp" in pod["metadata"]
            if not owners or is_going or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                continue
            owner = owners[0]
            parent = self.store.get(port.KINDS[owner["kind"]], namespace, owner["name"])
            if parent is None:
                continue
            if owner["kind"] == "Job":
                if owner["uid"] not in outcomes:  # all pods of one Job share one outcome of a tick
                    outcomes[owner["uid"]] = self.jobs(parent)
                outcome = outcomes[owner["uid"]]
                status = _running(pod, True, now) if outcome is None else _ended(pod, outcome, now)
            else:
                status = _running(pod, self.deployments(parent), now)
            self._set(pod, status)

    def _set(self, pod: Object, status: Object) -> None:
        def change(it: Object) -> None:
            it["spec"]["nodeName"] = "fake"
            it["status"] = status

        self.store.edit(*_id(pod), change)


NO_BACK_OFF = jobs.BackOff(base=0.0, limit=0.0)


def _id(pod: Object) -> tuple[port.Kind, str, str]:
    return port.POD, pod["metadata"]["namespace"], pod["metadata"]["name"]


def _running(pod: Object, state: bool | str, now: str) -> Object:
    now = pod.get("status", {}).get("startTime", now)
    is_ready = state is True
    waiting = {"waiting": {"reason": state, "message": f"scripted: {state}"}}
    shown = waiting if isinstance(state, str) else {"running": {"startedAt": now}}
    facts = {"ready": is_ready, "started": is_ready, "restartCount": 0}
    return {
        "phase": "Pending" if isinstance(state, str) else "Running",
        "podIP": "127.0.0.1",
        "startTime": now,
        "conditions": [podstatus.condition("Ready", is_ready, now)],
        "containerStatuses": [
            {"name": container["name"], "image": container.get("image", ""), "state": shown} | facts
            for container in pod["spec"]["containers"]
        ],
    }


def _ended(pod: Object, outcome: Outcome, now: str) -> Object:
    terminated = {
        "exitCode": outcome.exit_code,
        "reason": outcome.reason or ("Error" if outcome.exit_code else "Completed"),
        "message": outcome.text,
        "startedAt": pod.get("status", {}).get("startTime", now),
        "finishedAt": now,
    }
    facts = {"ready": False, "restartCount": 0, "state": {"terminated": terminated}}
    return {
        "phase": "Failed" if outcome.exit_code else "Succeeded",
        "startTime": terminated["startedAt"],
        "containerStatuses": [
            {"name": container["name"], "image": container.get("image", "")} | facts
            for container in pod["spec"]["containers"]
        ],
    }
