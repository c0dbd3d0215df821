"""What the port shows of a run and its children, as the ``Observed`` that ``decide`` judges. Called by ``controller``.

Nothing is kept from pass to pass. Children are found by label and believed by owner: an object
that carries our labels but belongs to another, or to an earlier run of the same name, is not ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from prodrl_operator import builders, gates, names
from prodrl_operator.api.judgement import COUNTS, Counters
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Cluster, Kind, Object
from prodrl_operator.errors import UnreadableError
from prodrl_operator.gateway_admin import GatewayAdmin
from prodrl_operator.names import Step
from prodrl_operator.pods import (
    HELD_UP,
    deployment_view,
    held_up,
    is_over,
    is_told,
    is_under_way,
    job_view,
    lost,
    pods_wanted,
)
from prodrl_operator.rounds import traffic
from prodrl_operator.rounds.observed import (
    CanaryLook,
    DeploymentView,
    GatewayReplica,
    JobKey,
    JobView,
    LivePods,
    Observed,
)

View = TypeVar("View", JobView, DeploymentView)

CHILD_KINDS = (port.JOB, port.POD, port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.PDB, port.NETWORK_POLICY)
KINDS_OF_SERVERS = (port.PDB, port.CONFIG_MAP, port.SERVICE, port.DEPLOYMENT)
"""What a policy's servers are made of, in the order of deletion: the trigger of the next pass goes last."""
SERVING_KINDS = frozenset(kind.kind for kind in (*KINDS_OF_SERVERS, port.NETWORK_POLICY))
"""Of what serves users: the gateway and the policies' servers."""
FAILED_CREATE_SECONDS = 15.0
"""A Job that lacks pods after so long: its events are asked why."""


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


def is_orphan_of_ours(obj: Object, run_name: str) -> bool:
    """Made by us and without an owner: what outlives a run with ``onDelete.serving: Keep``, the present or an old one.

    A deletion in the foreground takes at once whatever has an owner, so it is not left to the deletion to remove it.
    Labels alone prove nothing: ``kubectl expose`` copies them. The name must be ours too, and the mark of what we sent.
    """
    metadata = obj["metadata"]
    is_marked = names.ANNOTATION_MANIFEST in metadata.get("annotations", {})
    return owner_uid(obj) is None and is_marked and builders.serves_users(run_name, metadata["name"])


def parse_round(obj: Object) -> Round:
    """A ProdRLRound as read."""
    parts = {"metadata": obj["metadata"], "spec": obj["spec"], "status": obj.get("status") or {}}
    return Round.model_validate(parts)


def _read(obj: Object) -> Round:
    try:
        return parse_round(obj)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UnreadableError(
            f"ProdRLRound {obj['metadata']['name']}: {field}: {first['msg']}; it is of another version of the "
            "operator: go back to that one to let the round end, or delete the round"
        ) from exc


class Observer:
    """Reads through the port and the gateway's admin port."""

    def __init__(self, cluster: Cluster, gateway_admin: GatewayAdmin) -> None:
        self._cluster = cluster
        self._admin = gateway_admin

    def observe(self, run: Run, raw: Object, now: datetime) -> Snapshot:
        """Everything about one run.

        Raises:
            UnreadableError: One of its rounds cannot be read.
        """
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
        ours = _Ours(name, children, owners)
        parsed = {number: _read(obj) for number, obj in rounds.items()}
        steps = {number: item.status.step for number, item in parsed.items()}
        observed = Observed(
            run=run,
            rounds=parsed,
            jobs=self._jobs(ours, pods, steps, now),
            pods=_live(name, pods, now),
            # What a lost node holds is no use to anybody, and not waited for.
            servings={
                number: self._mounted(view, _pods_of(pods, "serving", str(number)), now)
                for number, view in _servings(ours, [pod for pod in pods if not lost([pod], now)]).items()
            },
            remnants=_remnants(ours),
            urls={
                number: service_url(obj)
                for obj in ours.of(port.SERVICE, "serving")
                if (number := _round_of(obj)) is not None
            },
            gateway=self._gateway(ours, pods, now),
            endpoint=next((service_url(obj) for obj in ours.of(port.SERVICE, "gateway")), None),
            replicas=tuple(self._replica(pod) for pod in pods if _is_gateway(pod, name)),
            has_orphans=any(is_orphan_of_ours(o, name) for o in children.values() if o["kind"] in SERVING_KINDS),
            is_kept_apart=_is_kept_apart(run, children, owners),
        )
        return Snapshot(_judged(_with_version(observed, now)), raw, rounds, children)

    def _jobs(self, ours: _Ours, pods: list[Object], steps: Mapping[int, str], now: datetime) -> dict[JobKey, JobView]:
        jobs: dict[JobKey, JobView] = {}
        for obj in ours.of(port.JOB):
            key, uid = _key_of(obj), obj["metadata"]["uid"]
            if key is None:
                continue
            its_pods = [pod for pod in pods if owner_uid(pod) == uid]
            view = job_view(obj, its_pods)
            # How an older Job ended is not asked again.
            is_judged = view.state in ("Succeeded", "Failed") and steps.get(key[0]) == key[1]
            if is_judged and (not is_told(obj, its_pods) or is_under_way(its_pods)):
                view = job_view(obj, self._pods_now(obj))
            is_short = len(its_pods) < pods_wanted(obj)
            jobs[key] = self._mounted(self._explained(view, obj, now) if is_short else view, its_pods, now)
        return jobs

    def _gateway(self, ours: _Ours, pods: list[Object], now: datetime) -> DeploymentView | None:
        found, its_pods = ours.of(port.DEPLOYMENT, "gateway"), _pods_of(pods, "gateway")
        return self._mounted(deployment_view(found[0], its_pods), its_pods, now) if found else None

    def _mounted(self, view: View, pods: list[Object], now: datetime) -> View:
        """A pod that waits for a Secret or a volume that is not there says so in events only."""
        silent = None if view.waiting else held_up(pods, now)
        told = self._cluster.events_of(silent) if silent is not None else []
        # Repeated events are counted in one object: the last in the list need not be the last that happened. Only that
        # one counts: a mount that succeeded at last is followed by the pulling of images.
        newest = max(told, key=lambda event: str(event.get("lastTimestamp") or ""), default={})
        if newest.get("reason") not in HELD_UP:
            return view
        return dataclasses.replace(view, waiting=newest["reason"], waiting_message=str(newest.get("message") or ""))

    def _pods_now(self, job: Object) -> list[Object]:
        """Jobs and pods are watched apart: that a Job ended may be known before its pod's last words are."""
        metadata = job["metadata"]
        told = (names.LABEL_ROUND, names.LABEL_STEP, names.LABEL_ATTEMPT)
        # Not by run, which would be answered from what the watches have shown.
        labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY} | {name: metadata["labels"][name] for name in told}
        found = self._cluster.list(port.POD, metadata["namespace"], labels)
        return [pod for pod in found if owner_uid(pod) == metadata["uid"]]

    def _explained(self, view: JobView, obj: Object, now: datetime) -> JobView:
        """A Job whose pods cannot be created says so in events only."""
        is_silent = view.state == "Pending" and not view.waiting and not view.suspended
        if not is_silent or view.begun is None or (now - view.begun).total_seconds() < FAILED_CREATE_SECONDS:
            return view
        for event in self._cluster.events_of(obj):
            if event.get("reason") == "FailedCreate":
                return dataclasses.replace(view, waiting="FailedCreate", waiting_message=event.get("message", ""))
        return view

    def _replica(self, pod: Object) -> GatewayReplica:
        url = f"http://{_host(pod['status']['podIP'])}:{names.GATEWAY_ADMIN_PORT}"
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
    return f"http://{_host(address)}:{spec['ports'][0]['port']}"


def _host(address: str) -> str:
    """An address as a URL has it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def _round_of(obj: Object) -> int | None:
    """Of the label; None where somebody took it off, or wrote something else."""
    number = obj["metadata"].get("labels", {}).get(names.LABEL_ROUND, "")
    return int(number) if number.isdecimal() else None


def _key_of(obj: Object) -> JobKey | None:
    """Of a Job, or of one of its pods."""
    labels, number = obj["metadata"].get("labels", {}), _round_of(obj)
    step, attempt = labels.get(names.LABEL_STEP), labels.get(names.LABEL_ATTEMPT, "")
    if number is None or step not in {known.value for known in Step} or not attempt.isdecimal():
        return None
    return number, Step(step), int(attempt)


def live_pods(run_name: str, pods: Iterable[Object]) -> dict[JobKey, list[Object]]:
    """Those that have not ended, by attempt: who deletes a Job may leave its pods, for a while or for good.

    Told by the Job's name, which its controller writes on them, so that a copy made for debugging is not one of them.
    """
    found: dict[JobKey, list[Object]] = {}
    for pod in pods:
        key = _key_of(pod)
        if key is None or is_over(pod):
            continue
        if pod["metadata"]["labels"].get(names.LABEL_JOB_NAME) == builders.job_name(run_name, *key):
            found.setdefault(key, []).append(pod)
    return found


def _live(run_name: str, pods: list[Object], now: datetime) -> dict[JobKey, LivePods]:
    found = live_pods(run_name, pods).items()
    return {key: LivePods(its[0]["metadata"]["name"], lost(its, now)) for key, its in found}


@dataclass(frozen=True)
class _Ours:
    run_name: str
    children: Mapping[tuple[str, str], Object]
    owners: set[str]

    def of(self, kind: Kind, component: str | None = None) -> list[Object]:
        """Objects of a kind that are ours; what serves users may have been orphaned on purpose."""
        return [
            obj
            for (its_kind, _), obj in self.children.items()
            if its_kind == kind.kind
            and component in (None, obj["metadata"]["labels"].get(names.LABEL_COMPONENT))
            and (owner_uid(obj) in self.owners or (component is not None and is_orphan_of_ours(obj, self.run_name)))
        ]


def _pods_of(pods: list[Object], component: str, number: str | None = None) -> list[Object]:
    found = []
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if labels.get(names.LABEL_COMPONENT) == component and labels.get(names.LABEL_ROUND) == number:
            found.append(pod)
    return found


def _remnants(ours: _Ours) -> frozenset[int]:
    found = [obj for kind in (port.CONFIG_MAP, port.PDB) for obj in ours.of(kind, "serving")]
    return frozenset(number for obj in found if (number := _round_of(obj)) is not None)


def _servings(ours: _Ours, pods: list[Object]) -> dict[int, DeploymentView]:
    result = {
        number: DeploymentView(uid="", desired=0, ready=0, deleting=True)
        for pod in pods
        if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == "serving" and (number := _round_of(pod)) is not None
    }
    for obj in ours.of(port.DEPLOYMENT, "serving"):
        if (number := _round_of(obj)) is not None:
            result[number] = deployment_view(obj, _pods_of(pods, "serving", str(number)))
    return result


def _is_gateway(pod: Object, run_name: str) -> bool:
    """Ready, and made for our Deployment: a pod that only carries our labels is not asked, nor told where users go."""
    metadata, ours = pod["metadata"], builders.gateway_name(run_name)
    makers = [owner["name"] for owner in metadata.get("ownerReferences", []) if owner.get("controller")]
    is_ours = any(maker == ours or maker.startswith(f"{ours}-") for maker in makers)
    if not is_ours or "deletionTimestamp" in metadata or metadata["labels"].get(names.LABEL_COMPONENT) != "gateway":
        return False
    status = pod.get("status", {})
    is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
    return is_ready and bool(status.get("podIP"))


def _is_kept_apart(run: Run, children: Mapping[tuple[str, str], Object], owners: set[str]) -> bool:
    """Whether the gateway and stable's servers, and these only, have no owner."""
    name, stable = run.metadata["name"], run.status.stable
    kept = {None, stable.round} if stable else set()
    for obj in children.values():
        if obj["kind"] not in SERVING_KINDS or not builders.serves_users(name, obj["metadata"]["name"]):
            continue
        is_owned, is_to_stay = owner_uid(obj) in owners, _round_of(obj) in kept
        is_left = not is_owned and is_orphan_of_ours(obj, name)
        if stable is not None and ((is_owned and is_to_stay) or (is_left and not is_to_stay)):
            return False
    return True


def _with_version(observed: Observed, now: datetime) -> Observed:
    """What is draining depends on the routes in force, and the routes wanted on what is draining: in this order."""
    tables = (traffic.table(observed, has_previous=has_previous) for has_previous in (True, False))
    settled = {builders.route_table(table).version for table in tables if table is not None}
    observed = dataclasses.replace(observed, settled_versions=frozenset(settled))
    wanted = traffic.routes(observed, now)
    if wanted is None:
        return observed
    return dataclasses.replace(observed, routes_version=builders.route_table(wanted).version)


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
