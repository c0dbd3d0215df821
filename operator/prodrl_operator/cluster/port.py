"""The small port through which the controller sees a cluster. Objects are plain dicts as in the API.

Semantics are Kubernetes' own, for every implementation: optimistic concurrency by ``metadata.resourceVersion``,
``metadata.generation`` counted up by changes of ``spec``, owner references and finalizers honoured by the
cluster, not by the caller. A contract suite runs the same cases against each implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prodrl_operator.errors import UnsupportedError

Object = dict[str, Any]
"""A Kubernetes object."""

Objects = list[Object]
Finalizers = list[str]
Propagation = Literal["Background", "Foreground", "Orphan"]
"""What becomes of dependents: deleted afterwards, deleted before the object itself goes, or left alone."""
"""Both spelled here because a method of the port is called ``list``."""


@dataclass(frozen=True)
class Kind:
    """A resource type."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True


RUN = Kind("prodrl.dev/v1alpha1", "ProdRLRun", "prodrlruns")
ROUND = Kind("prodrl.dev/v1alpha1", "ProdRLRound", "prodrlrounds")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
JOB = Kind("batch/v1", "Job", "jobs")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
PDB = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")

KINDS = {
    kind.kind: kind
    for kind in (RUN, ROUND, DEPLOYMENT, JOB, POD, SERVICE, CONFIG_MAP, SECRET, EVENT, LEASE, PDB, NETWORK_POLICY)
}


def kind_of(manifest: Object) -> Kind:
    """The resource type of an object.

    Raises:
        UnsupportedError: It is none of ours.
    """
    found = KINDS.get(manifest.get("kind", ""))
    if found is None or found.api_version != manifest.get("apiVersion"):
        what = f"{manifest.get('apiVersion')}/{manifest.get('kind')}"
        raise UnsupportedError(f"kind {what}: not known to the operator; use one of {', '.join(sorted(KINDS))}")
    return found


@dataclass(frozen=True)
class WatchEvent:
    """A hint that something changed; never trusted for content or existence."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class Cluster(Protocol):
    """What the controller may do."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, or None."""
        ...

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Objects that carry all ``labels`` (equality), sorted by namespace and name."""
        ...

    def events_of(self, obj: Object) -> Objects:
        """Events about one object."""
        ...

    def create(self, manifest: Object) -> Object:
        """Create. Raises AlreadyExistsError, InvalidError, ForbiddenError."""
        ...

    def try_out(self, manifest: Object) -> None:
        """What ``create`` would say, but for a name that is taken; nothing is made. Raises as it does."""
        ...

    def apply(self, manifest: Object) -> Object:
        """Server-side apply with our field manager, forced: sets the fields given, removes those given before."""
        ...

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        """Delete; a missing object is fine. ConflictError when a precondition fails."""
        ...

    def update_status(self, manifest: Object) -> Object:
        """PUT of the status subresource; ``metadata.resourceVersion`` must be the present one (ConflictError)."""
        ...

    def set_finalizers(self, manifest: Object, finalizers: Finalizers) -> Object:
        """Replace ``metadata.finalizers`` under the object's resourceVersion (ConflictError)."""
        ...


class Watched(Cluster, Protocol):
    """A cluster that says when to look again."""

    def watch(self, notify: Callable[[WatchEvent], None]) -> Callable[[], None]:
        """Call ``notify`` (from another thread) for changes of runs, rounds and our Jobs, Deployments and Pods.

        Returns the stop function. Hints may come late, twice, in another order, or not at all.
        """
        ...

    def renew(self) -> None:
        """Let what is read from now on be as new as this call, whatever the watches missed."""
        ...
