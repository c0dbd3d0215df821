"""A cluster that notes what is asked of it, as the API server's authorizer would see it, and a world that drives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.cluster.port import Finalizers, Kind, Object, Objects, Propagation
from prodrl_operator.controller import Controller
from tests.support.operator_harness import Script, World, all_well

Access = tuple[str, str, str]
"""(API group, resource, verb)."""


def access(kind: Kind, verb: str, subresource: str = "") -> Access:
    """A verb on a kind."""
    group = kind.api_version.rpartition("/")[0]
    return group, kind.plural + (f"/{subresource}" if subresource else ""), verb


class RecordingCluster:
    """What ``cluster.kubernetes`` offers, over the in-memory store. A method that it lacks ends the test."""

    def __init__(self, inner: ObjectStore, seen: set[Access]) -> None:
        self._inner = inner
        self._seen = seen

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self._seen.add(access(kind, "get"))
        return self._inner.get(kind, namespace, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Objects:
        self._seen.add(access(kind, "list"))
        return self._inner.list(kind, namespace, labels)

    def each(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Objects:
        """A LIST as any other."""
        return self.list(kind, namespace, labels)

    def list_metadata(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Objects:
        """A LIST as any other."""
        return self.list(kind, namespace, labels)

    def events_of(self, obj: Object) -> Objects:
        """A LIST with a field selector."""
        events = self.list(port.EVENT, obj["metadata"]["namespace"])
        return [item for item in events if item["involvedObject"]["uid"] == obj["metadata"]["uid"]]

    def create(self, manifest: Object) -> Object:
        self._seen.add(access(port.kind_of(manifest), "create"))
        return self._inner.create(manifest)

    def try_out(self, manifest: Object) -> None:
        self._seen.add(access(port.kind_of(manifest), "create"))
        self._inner.try_out(manifest)

    def apply(self, manifest: Object) -> Object:
        """Server-side apply is a PATCH, and needs ``create`` too where the object is not there."""
        kind, metadata = port.kind_of(manifest), manifest["metadata"]
        self._seen.add(access(kind, "patch"))
        if self._inner.get(kind, metadata["namespace"], metadata["name"]) is None:
            self._seen.add(access(kind, "create"))
        return self._inner.apply(manifest)

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
        self._seen.add(access(kind, "delete"))
        self._inner.delete(kind, namespace, name, uid=uid, resource_version=resource_version, propagation=propagation)

    def update_status(self, manifest: Object) -> Object:
        self._seen.add(access(port.kind_of(manifest), "update", "status"))
        return self._inner.update_status(manifest)

    def set_finalizers(self, manifest: Object, finalizers: Finalizers) -> Object:
        """A merge patch under the object's resourceVersion."""
        self._seen.add(access(port.kind_of(manifest), "patch"))
        return self._inner.set_finalizers(manifest, finalizers)

    def replace(self, manifest: Object) -> Object:
        """A PUT of the whole object."""
        self._seen.add(access(port.kind_of(manifest), "update"))
        return self._inner.apply(manifest)


class RecordedWorld(World):
    """The in-memory world with the controller over the cache over a recorded API server, resynced before each turn."""

    def __init__(self, seen: set[Access], spec: dict[str, Any] | None = None, script: Script = all_well) -> None:
        self._seen = seen
        super().__init__(spec, script)

    def restart(self) -> None:
        """A new process."""
        self.cached = CachedCluster(cast(Any, RecordingCluster(self.store, self._seen)))
        self.controller = Controller(
            self.cached, Platform(), clock=lambda: self.now, gateway_admin=self.gateway, namespace="default"
        )

    def turn(self, *, passes: int = 60) -> None:
        """With what a resync finds, for nothing is watched here."""
        self.cached.renew()
        super().turn(passes=passes)
