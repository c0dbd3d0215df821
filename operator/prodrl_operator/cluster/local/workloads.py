"""The controllers that a cluster has anyway: Deployments and Jobs make pods, Services get addresses and endpoints.

Level-based: ``sync`` reads everything and makes the next step of each object; ``deployments``, ``jobs`` and
``services`` say which. ``environment`` calls it in a loop; nothing is kept between calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import deployments, jobs, network, services
from prodrl_operator.cluster.local.store import ObjectStore, now_utc
from prodrl_operator.errors import OperatorError

_log = logging.getLogger(__name__)

Object = dict[str, Any]


class Workloads:
    """Runs the controllers on ``store``."""

    def __init__(
        self,
        store: ObjectStore,
        addresses: network.Addresses | None = None,
        *,
        back_off: jobs.BackOff | None = None,
        now: Callable[[], datetime] = now_utc,
    ) -> None:
        self.store = store
        self.addresses = addresses
        self.back_off = back_off or jobs.BackOff()
        self.now = now

    def sync(self) -> None:
        """One step of every Deployment, Job and Service."""
        with self.store.as_system():
            pods = self._pods_by_owner()
            for kind, step in ((port.DEPLOYMENT, self._deploy), (port.JOB, self._run), (port.SERVICE, self._serve)):
                for obj in self.store.list(kind):
                    if "deletionTimestamp" in obj["metadata"]:
                        continue
                    try:
                        step(obj, pods.get(obj["metadata"]["uid"], []))
                    except OperatorError:  # one object's trouble must not stop the others; it is tried again
                        _log.exception("%s %s: sync failed", kind.kind, obj["metadata"]["name"])

    def listeners(self, publish: Mapping[str, int]) -> list[Object]:
        """What the proxy is to listen at now."""
        return services.listeners(self.store.list(port.SERVICE), self.store.list(port.POD), publish)

    def _pods_by_owner(self) -> dict[str, list[Object]]:
        result: dict[str, list[Object]] = {}
        for pod in self.store.list(port.POD):
            for owner in pod["metadata"].get("ownerReferences", ()):
                if owner.get("controller"):
                    result.setdefault(owner["uid"], []).append(pod)
        return result

    def _deploy(self, deployment: Object, pods: list[Object]) -> None:
        plan = deployments.plan(deployment, pods, self.now())
        self._change(plan.create, plan.delete)
        self._set_status(port.DEPLOYMENT, deployment, plan.status)

    def _run(self, job: Object, pods: list[Object]) -> None:
        plan = jobs.plan(job, pods, self.now(), self.back_off)
        self._change(plan.create, plan.delete)
        if plan.status is not None:
            plan.status["active"] += len(plan.create)
            self._set_status(port.JOB, job, plan.status)
        if plan.is_expired:
            self.store.delete(*_id(port.JOB, job), uid=job["metadata"]["uid"])

    def _serve(self, service: Object, pods: list[Object]) -> None:
        if service["spec"].get("clusterIP") or self.addresses is None:
            return
        taken = {other["spec"].get("clusterIP") for other in self.store.list(port.SERVICE)}
        ports = [item["port"] for item in service["spec"].get("ports", ())]
        address = self.addresses.free_service_address(taken, ports)

        def assign(it: Object) -> None:
            it["spec"].update(clusterIP=address, clusterIPs=[address])

        self.store.edit(*_id(port.SERVICE, service), assign, uid=service["metadata"]["uid"])

    def _change(self, create: list[Object], delete: list[Object]) -> None:
        for pod in delete:
            self.store.delete(*_id(port.POD, pod), uid=pod["metadata"]["uid"])
        for pod in create:
            self.store.create(pod)

    def _set_status(self, kind: port.Kind, obj: Object, status: Object) -> None:
        if status != obj.get("status"):
            self.store.edit(*_id(kind, obj), lambda it: it.update(status=status), uid=obj["metadata"]["uid"])


def _id(kind: port.Kind, obj: Object) -> tuple[port.Kind, str, str]:
    return kind, obj["metadata"]["namespace"], obj["metadata"]["name"]
