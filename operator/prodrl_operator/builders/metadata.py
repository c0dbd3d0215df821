"""Names, labels and owner references of children. Names are a pure function of (run, round, step, attempt).

A parent's labels and annotations are never copied: a GitOps tool that finds its own label on a child prunes the child.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from prodrl_operator import names
from prodrl_operator.api.round import Round, SourcePolicy
from prodrl_operator.api.run import Run
from prodrl_operator.names import Step

Object = dict[str, Any]

STEP_WORDS = {
    Step.COLLECTING: "collect",
    Step.TRAINING: "train",
    Step.EXPORTING: "export",
    Step.CANARY_DEPLOYING: "serve",
    Step.GATING: "gate",
}


@dataclass(frozen=True)
class Platform:
    """What differs between clusters, not between runs."""

    runtime_image: str = "prodrl/runtime:0.1.0"
    """Collect, train, export, evaluate, gateway, fetch."""
    serving_image: str = "prodrl/serving:0.1.0"
    """vLLM with the recorder."""
    operator_namespace: str | None = None
    """Where the operator's pods are; None: not known, or it is no pod."""
    local: bool = False
    """The local environment: images are ignored, GPUs are not asked for."""


MAX_JOB_NAME = 57
"""An Indexed Job's pods have the host name JOB-INDEX, of at most 63 characters; indexes have up to four digits."""
_HASH_LENGTH = 8


def bounded(start: str, end: str, limit: int) -> str:
    """``start + end`` within the limit: where it is too long, a hash of ``start`` stands for the end of it."""
    if len(start) + len(end) <= limit:
        return start + end
    digest = hashlib.sha256(start.encode()).hexdigest()[:_HASH_LENGTH]
    kept = start[: limit - len(end) - _HASH_LENGTH - 1].rstrip("-")
    return f"{kept}-{digest}{end}"


def round_name(run_name: str, number: int) -> str:
    """Name of the ProdRLRound."""
    return f"{run_name}-r{number:04d}"


def job_name(run_name: str, number: int, step: Step, attempt: int) -> str:
    """Name of a step's Job; the attempt is part of it, so that a retry never meets an old object."""
    return bounded(run_name, f"-r{number:04d}-{STEP_WORDS[step]}-a{attempt}", MAX_JOB_NAME)


def serving_name(run_name: str, number: int) -> str:
    """Name of the Deployment, Service and ConfigMap that serve the policy of a round."""
    return f"{round_name(run_name, number)}-serve"


def gateway_name(run_name: str) -> str:
    """Name of the gateway's Deployment and Service: what users know."""
    return f"{run_name}-gateway"


def routes_name(run_name: str) -> str:
    """Name of the ConfigMap with the gateway's routes."""
    return f"{run_name}-routes"


_SERVES_USERS = re.compile(r"(gateway|routes|serving|steps|train|r\d{4,}-serve)")


def serves_users(run_name: str, name: str) -> bool:
    """Whether ``name`` is one that we give to what serves users: anybody's object may carry our labels."""
    start = f"{run_name}-"
    return name.startswith(start) and _SERVES_USERS.fullmatch(name.removeprefix(start)) is not None


def labels(run: Run, component: str, number: int | None = None, step: Step | None = None) -> dict[str, str]:
    """Our labels, and no others."""
    result = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_COMPONENT: component,
        names.LABEL_RUN: run.metadata["name"],
    }
    if number is not None:
        result[names.LABEL_ROUND] = str(number)
    if step is not None:
        result[names.LABEL_STEP] = step.value
    return result


def owned_by(owner: Run | Round) -> list[Object]:
    """The controller reference to a run or a round."""
    return [
        {
            "apiVersion": names.API_VERSION,
            "kind": "ProdRLRun" if isinstance(owner, Run) else "ProdRLRound",
            "name": owner.metadata["name"],
            "uid": owner.metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def metadata(name: str, owner: Run | Round, its_labels: dict[str, str]) -> Object:
    """Metadata of a child in its owner's namespace."""
    return {
        "name": name,
        "namespace": owner.metadata.get("namespace", "default"),
        "labels": its_labels,
        "ownerReferences": owned_by(owner),
    }


def config_map(name: str, owner: Run | Round, its_labels: dict[str, str], data: dict[str, str]) -> Object:
    """A ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(name, owner, its_labels), "data": data}


def disruption_budget(name: str, owner: Run | Round, its_labels: dict[str, str]) -> Object:
    """At most one pod at a time is drained away; for workloads of several replicas only: one would block its node.

    Pods that do not serve anyway can always be drained: a broken node must be.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(name, owner, its_labels),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": its_labels},
        },
    }


def _compact(settings: Object) -> Object:
    """Without empty lists and maps: each of them is its field's default, and six workloads have a dozen each."""
    empty: tuple[object, ...] = ([], {})
    return {
        part: {name: value for name, value in found.items() if value not in empty} if isinstance(found, dict) else found
        for part, found in settings.items()
    }


def round_object(run: Run, number: int, source: SourcePolicy | None, lineage_round: int) -> Object:
    """A ProdRLRound with the run's present spec frozen into it."""
    spec: Object = {
        "run": run.metadata["name"],
        "number": number,
        "lineageRound": lineage_round,
        "settings": _compact(run.spec.model_dump(by_alias=True, exclude_none=True)),
    }
    if source is not None:
        spec["source"] = source.model_dump(by_alias=True)
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ProdRLRound",
        "metadata": metadata(round_name(run.metadata["name"], number), run, labels(run, "round", number)),
        "spec": spec,
    }
