"""One fresh read of a run and its children, as the ``Observed`` that ``decide`` judges. Called by ``controller``.

Nothing is cached: a watch is only a hint to look again. Children are found by label and believed by owner: an object
that carries our labels but belongs to another, or to an earlier run of the same name, is not ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prodrl_operator import builders, gates, names
from prodrl_operator.api.judgement import COUNTS, Counters
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Cluster, Kind, Object
from prodrl_operator.gateway_admin import GatewayAdmin
from prodrl_operator.names import Step
from prodrl_operator.pods import deployment_view, job_view
from prodrl_operator.rounds import traffic
from prodrl_operator.rounds.observed import CanaryLook, DeploymentView, GatewayReplica, JobKey, JobView, Observed

CHILD_KINDS = (port.JOB, port.POD, port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.PDB)
FAILED_CREATE_SECONDS = 15.0
"""A Job without pods after so long: its events are asked why."""


@dataclass(frozen=True)
class Snapshot:
    """What was observed, and the objects behind it."""

    observed: Observed
    run: Object
    """The ProdRLRun as read."""
    rounds: Mapping[int, Object]
    """The ProdRLRounds as read."""
    children: Mapping[tuple[str, str], Object]
    """By kind and name: every object with the run's label, ours or not."""


def owner_uid(obj: Object) -> str | None:
    """UID of the controller owner."""
    owners = obj["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), None)


def is_orphan_of_ours(obj: Object) -> bool:
    """Made by us and left behind by a run that was deleted with ``onDelete.serving: Keep``."""
    labels = obj["metadata"].get("labels", {})
    return owner_uid(obj) is None and labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY


def parse_round(obj: Object) -> Round:
    """A ProdRLRound as read."""
    parts = {"metadata": obj["metadata"], "spec": obj["spec"], "status": obj.get("status") or {}}
    return Round.model_validate(parts)


class Observer:
    """Reads through the port and the gateway's admin port."""

    def __init__(self, cluster: Cluster, gateway_admin: GatewayAdmin) -> None:
        self._cluster = cluster
        self._admin = gateway_admin

    def observe(self, run: Run, raw: Object, now: datetime) -> Snapshot:
        """Everything about one run."""
        namespace, name, uid = run.metadata["namespace"], run.metadata["name"], run.metadata["uid"]
        labels = {names.LABEL_RUN: name}
        rounds = {
            int(obj["spec"]["number"]): obj
            for obj in self._cluster.list(port.ROUND, namespace, labels)
            if owner_uid(obj) == uid
        }
        children = {
            (kind.kind, obj["metadata"]["name"]): obj
            for kind in CHILD_KINDS
            for obj in self._cluster.list(kind, namespace, labels)
        }
        owners = {uid, *(obj["metadata"]["uid"] for obj in rounds.values())}
        pods = [obj for (kind, _), obj in children.items() if kind == port.POD.kind]
        ours = _Ours(children, owners)
        observed = Observed(
            run=run,
            rounds={number: parse_round(obj) for number, obj in rounds.items()},
            jobs=self._jobs(ours, pods, now),
            servings=_servings(ours, pods),
            urls={
                int(obj["metadata"]["labels"][names.LABEL_ROUND]): service_url(obj)
                for obj in ours.of(port.SERVICE, "serving")
            },
            gateway=_gateway(ours, pods),
            endpoint=next((service_url(obj) for obj in ours.of(port.SERVICE, "gateway")), None),
            replicas=tuple(self._replica(pod) for pod in pods if _is_gateway(pod)),
        )
        return Snapshot(_judged(_with_version(observed, now)), raw, rounds, children)

    def _jobs(self, ours: _Ours, pods: list[Object], now: datetime) -> dict[JobKey, JobView]:
        jobs: dict[JobKey, JobView] = {}
        for obj in ours.of(port.JOB):
            labels, uid = obj["metadata"]["labels"], obj["metadata"]["uid"]
            key = (int(labels[names.LABEL_ROUND]), Step(labels[names.LABEL_STEP]), int(labels[names.LABEL_ATTEMPT]))
            view = job_view(obj, [pod for pod in pods if owner_uid(pod) == uid])
            jobs[key] = self._explained(view, obj, now)
        return jobs

    def _explained(self, view: JobView, obj: Object, now: datetime) -> JobView:
        """A Job whose pods cannot be created says so in events only."""
        metadata = obj["metadata"]
        created = datetime.fromisoformat(metadata["creationTimestamp"].replace("Z", "+00:00"))
        is_silent = view.state == "Pending" and not view.waiting and not view.suspended
        if not is_silent or (now - created).total_seconds() < FAILED_CREATE_SECONDS:
            return view
        for event in self._cluster.list(port.EVENT, metadata["namespace"]):
            if event.get("reason") == "FailedCreate" and event.get("involvedObject", {}).get("uid") == metadata["uid"]:
                return dataclasses.replace(view, waiting="FailedCreate", waiting_message=event.get("message", ""))
        return view

    def _replica(self, pod: Object) -> GatewayReplica:
        url = f"http://{pod['status']['podIP']}:{names.GATEWAY_ADMIN_PORT}"
        answer = self._admin.status(url)
        if answer is None:
            return GatewayReplica(url, reachable=False)
        return GatewayReplica(
            url=url,
            reachable=True,
            version=answer.get("version"),
            counters={digest: counters_of(values) for digest, values in (answer.get("stats") or {}).items()},
            conversations={digest: int(count) for digest, count in (answer.get("conversations") or {}).items()},
        )


def counters_of(values: Mapping[str, Any]) -> Counters:
    """One policy's counters as a replica answers them."""
    return Counters(
        **{name: int(values.get(name, 0)) for name in COUNTS},
        reward_sum=float(values.get("reward_sum", 0.0)),
        reward_squares=float(values.get("reward_squares", 0.0)),
    )


def service_url(obj: Object) -> str:
    """Base URL of a Service: its address, or its name where it has none of its own."""
    metadata, spec = obj["metadata"], obj["spec"]
    address = spec.get("clusterIP")
    if not address or address == "None":
        address = f"{metadata['name']}.{metadata['namespace']}.svc"
    elif ":" in address:
        address = f"[{address}]"
    return f"http://{address}:{spec['ports'][0]['port']}"


@dataclass(frozen=True)
class _Ours:
    children: Mapping[tuple[str, str], Object]
    owners: set[str]

    def of(self, kind: Kind, component: str | None = None) -> list[Object]:
        """Objects of a kind that are ours; what serves users may have been orphaned on purpose."""
        return [
            obj
            for (its_kind, _), obj in self.children.items()
            if its_kind == kind.kind
            and component in (None, obj["metadata"]["labels"].get(names.LABEL_COMPONENT))
            and (owner_uid(obj) in self.owners or (component is not None and is_orphan_of_ours(obj)))
        ]


def _pods_of(pods: list[Object], component: str, number: str | None = None) -> list[Object]:
    found = []
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if labels.get(names.LABEL_COMPONENT) == component and labels.get(names.LABEL_ROUND) == number:
            found.append(pod)
    return found


def _servings(ours: _Ours, pods: list[Object]) -> dict[int, DeploymentView]:
    result = {
        number: DeploymentView(uid="", desired=0, ready=0, deleting=True)
        for number in {
            int(pod["metadata"]["labels"][names.LABEL_ROUND])
            for pod in pods
            if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == "serving"
        }
    }
    for obj in ours.of(port.DEPLOYMENT, "serving"):
        number = obj["metadata"]["labels"][names.LABEL_ROUND]
        result[int(number)] = deployment_view(obj, _pods_of(pods, "serving", number))
    return result


def _gateway(ours: _Ours, pods: list[Object]) -> DeploymentView | None:
    found = ours.of(port.DEPLOYMENT, "gateway")
    return deployment_view(found[0], _pods_of(pods, "gateway")) if found else None


def _is_gateway(pod: Object) -> bool:
    if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) != "gateway" or "deletionTimestamp" in pod["metadata"]:
        return False
    status = pod.get("status", {})
    is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
    return is_ready and bool(status.get("podIP"))


def _with_version(observed: Observed, now: datetime) -> Observed:
    """What is draining depends on the routes in force, and the routes wanted on what is draining: in this order."""
    settled = {
        builders.route_table(traffic.table(observed, has_previous=has_previous)).version
        for has_previous in (True, False)
    }
    observed = dataclasses.replace(observed, settled_versions=frozenset(settled))
    wanted = builders.route_table(traffic.routes(observed, now))
    return dataclasses.replace(observed, routes_version=wanted.version)


def _judged(observed: Observed) -> Observed:
    """What the gates say of the current round."""
    current = observed.current
    if current is None or current.status.policy is None:
        return observed
    gate, status = current.spec.settings.gate, current.status
    measured = None
    if status.gate.measurements is not None:
        measured = gates.judge_measurements(gate, status.gate.measurements, is_first=current.spec.number == 0)
    return dataclasses.replace(observed, measured=measured, look=_look(observed, current))


def _look(observed: Observed, current: Round) -> CanaryLook | None:
    stable, policy = observed.run.status.stable, current.status.policy
    if stable is None or policy is None or not observed.replicas:
        return None
    if not all(replica.reachable for replica in observed.replicas):
        return None
    candidate = sum((r.counters.get(policy.digest, Counters()) for r in observed.replicas), Counters())
    baseline = sum((r.counters.get(stable.digest, Counters()) for r in observed.replicas), Counters())
    canary = current.status.gate.canary
    if canary is None:
        return CanaryLook(candidate, baseline)
    before = Counters.from_status(canary.baseline_candidate), Counters.from_status(canary.baseline_stable)
    if candidate.is_behind(before[0]) or baseline.is_behind(before[1]):
        return CanaryLook(candidate, baseline, is_behind=True)
    seen, compared = candidate.since(before[0]), baseline.since(before[1])
    guards = current.spec.settings.gate.canary.guards
    return CanaryLook(
        candidate,
        baseline,
        trajectories=seen.trajectories,
        interim=gates.judge_canary(guards, seen, compared, is_final=False),
        final=gates.judge_canary(guards, seen, compared, is_final=True),
    )
