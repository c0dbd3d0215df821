"""One look at a run and everything below it. Called by ``cli`` and ``watching``; what it means is ``health``'s.

Specs stay dicts: a plugin may be older than the CRD. Statuses are parsed by models that ignore what they do not know.
What a person may not read (pods, often) is left out and named, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prodrl_operator import names
from prodrl_operator.api.round import RoundStatus
from prodrl_operator.api.run import RunStatus
from prodrl_operator.cluster.port import DEPLOYMENT, JOB, POD, ROUND, RUN, Kind, Object, Objects
from prodrl_operator.errors import ForbiddenError, InvalidError, NotFoundError
from prodrl_operator.names import Condition
from prodrl_operator.plugin.access import Access
from prodrl_operator.pods import deployment_view, job_view
from prodrl_operator.rounds.observed import DeploymentView, JobView

CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")
"""What a terminal would obey; tab and newline stay."""


def printable(value: Any) -> Any:
    """The same JSON without control characters: messages of processes end up in statuses, and then on a terminal."""
    if isinstance(value, str):
        return value.translate(CONTROL)
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class RoundLook:
    """A ProdRLRound."""

    number: int
    spec: dict[str, Any]
    status: RoundStatus


@dataclass(frozen=True)
class PodLook:
    """A pod in a line."""

    name: str
    labels: dict[str, str]
    state: str
    """Phase, or why it is not running."""
    message: str
    is_ready: bool
    restarts: int
    container: str
    """The first container's name."""
    ip: str


@dataclass(frozen=True)
class Look:
    """A run as it is now."""

    namespace: str
    name: str
    raw: Object
    """The ProdRLRun as read."""
    status: RunStatus
    rounds: list[RoundLook]
    """By number."""
    jobs: dict[tuple[int, str, int], JobView]
    """(round, step, attempt) -> Job."""
    servings: dict[int, DeploymentView]
    """Round -> servers of its policy."""
    gateway: DeploymentView | None
    pods: list[PodLook]
    hidden: tuple[str, ...] = ()
    """Kinds that may not be read."""

    @property
    def spec(self) -> dict[str, Any]:
        """The run's spec as stored."""
        return dict(self.raw["spec"])

    @property
    def generation(self) -> int | None:
        """Of the spec."""
        found = self.raw["metadata"].get("generation")
        return None if found is None else int(found)

    @property
    def current(self) -> RoundLook | None:
        """The round in work, as its own object says it."""
        shown = self.status.current_round
        return None if shown is None else self.round(shown.number)

    def round(self, number: int) -> RoundLook | None:
        """A round whose object still exists."""
        return next((item for item in self.rounds if item.number == number), None)

    def is_true(self, condition: Condition) -> bool:
        """Whether a condition of the run is True."""
        return any(item.type == condition and item.status == "True" for item in self.status.conditions)

    def pods_of(self, component: str, number: int | None = None, attempt: int | None = None) -> list[PodLook]:
        """Pods of a step, of a policy's servers, or of the gateway."""
        wanted = {names.LABEL_COMPONENT: component}
        wanted |= {} if number is None else {names.LABEL_ROUND: str(number)}
        wanted |= {} if attempt is None else {names.LABEL_ATTEMPT: str(attempt)}
        return [pod for pod in self.pods if wanted.items() <= pod.labels.items()]


def choose(access: Access, namespace: str, name: str | None) -> str:
    """The run that is meant: the one named, or the only one.

    Raises:
        InvalidError: None was named and there is not exactly one.
    """
    if name is not None:
        return name
    found = [obj["metadata"]["name"] for obj in access.store.list(RUN, namespace)]
    if len(found) == 1:
        return str(found[0])
    if not found:
        raise InvalidError(f"Namespace {namespace}: there is no ProdRLRun; apply one, or choose a namespace with -n")
    raise InvalidError(f"Namespace {namespace}: which run is meant? Name one of: {', '.join(sorted(found))}")


def look(access: Access, namespace: str, name: str) -> Look:
    """Read everything once. Raises NotFoundError."""
    store = access.store
    raw = store.get(RUN, namespace, name)
    if raw is None:
        known = ", ".join(obj["metadata"]["name"] for obj in store.list(RUN, namespace)) or "none"
        raise NotFoundError(f"ProdRLRun {namespace}/{name}: not found; runs of this namespace: {known}")
    raw = dict(printable(raw))
    hidden: list[str] = []

    def children(kind: Kind) -> Objects:
        try:
            return list(printable(store.list(kind, namespace, {names.LABEL_RUN: name})))
        except ForbiddenError:
            hidden.append(kind.plural)
            return []

    rounds = [obj for obj in children(ROUND) if owner_uid(obj) == raw["metadata"].get("uid")]
    jobs, deployments, pods = children(JOB), children(DEPLOYMENT), children(POD)
    return Look(
        namespace=namespace,
        name=name,
        raw=raw,
        status=RunStatus.model_validate(raw.get("status") or {}),
        rounds=sorted((_round(obj) for obj in rounds), key=lambda item: item.number),
        jobs=dict(_job(obj, pods) for obj in jobs if _has(obj, names.LABEL_STEP, names.LABEL_ATTEMPT)),
        servings={
            int(obj["metadata"]["labels"][names.LABEL_ROUND]): deployment_view(obj, _selected(obj, pods))
            for obj in deployments
            if _has(obj, names.LABEL_ROUND)
        },
        gateway=next(
            (deployment_view(o, _selected(o, pods)) for o in deployments if not _has(o, names.LABEL_ROUND)), None
        ),
        pods=[pod_look(obj) for obj in pods],
        hidden=tuple(hidden),
    )


def owner_uid(obj: Object) -> str | None:
    """UID of the controller owner."""
    owners = obj["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), None)


def pod_look(obj: Object) -> PodLook:
    """What a person needs of a pod."""
    metadata, status = obj["metadata"], obj.get("status", {})
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    state, message = _pod_state(obj, containers)
    return PodLook(
        name=metadata["name"],
        labels=dict(metadata.get("labels", {})),
        state=state,
        message=message,
        is_ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])),
        restarts=sum(int(container.get("restartCount", 0)) for container in containers),
        container=str(next((c["name"] for c in obj.get("spec", {}).get("containers", [])), "")),
        ip=str(status.get("podIP") or ""),
    )


def _pod_state(obj: Object, containers: list[dict[str, Any]]) -> tuple[str, str]:
    status = obj.get("status", {})
    if "deletionTimestamp" in obj["metadata"]:
        return "Terminating", ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or "")
    for container in containers:
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            last = (container.get("lastState") or {}).get("terminated") or {}
            before = f"last exit {last.get('exitCode')} {last.get('reason', '')}".strip() if last else ""
            return str(waiting.get("reason") or "Waiting"), str(waiting.get("message") or before)
    for container in containers:
        ended = container.get("state", {}).get("terminated") or {}
        if ended.get("exitCode"):
            return str(status.get("reason") or ended.get("reason") or "Error"), f"exit code {ended['exitCode']}"
    return str(status.get("reason") or status.get("phase") or "Pending"), str(status.get("message") or "")


def _round(obj: Object) -> RoundLook:
    return RoundLook(int(obj["spec"]["number"]), obj["spec"], RoundStatus.model_validate(obj.get("status") or {}))


def _job(obj: Object, pods: Objects) -> tuple[tuple[int, str, int], JobView]:
    labels = obj["metadata"]["labels"]
    key = (int(labels[names.LABEL_ROUND]), str(labels[names.LABEL_STEP]), int(labels[names.LABEL_ATTEMPT]))
    return key, job_view(obj, [pod for pod in pods if owner_uid(pod) == obj["metadata"]["uid"]])


def _has(obj: Object, *labels: str) -> bool:
    return all(label in obj["metadata"].get("labels", {}) for label in labels)


def _selected(deployment: Object, pods: Objects) -> Objects:
    wanted = deployment["spec"]["selector"]["matchLabels"]
    return [pod for pod in pods if wanted.items() <= pod["metadata"].get("labels", {}).items()]
