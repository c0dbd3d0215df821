"""Empties a namespace between tests: faster than deleting it, and without a controller."""

from __future__ import annotations

import time

from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.errors import ConflictError, NotFoundError

KEPT = {"kube-root-ca.crt", "kubernetes", "default"}


def emptied(cluster: KubernetesCluster, namespace: str, seconds: float = 30.0) -> None:
    """Delete what lies there, finalizers or not, until a look finds nothing."""
    deadline = time.monotonic() + seconds
    while left := [item for kind in port.KINDS.values() for item in _of(cluster, kind, namespace)]:
        assert time.monotonic() < deadline, f"still there: {[o['metadata']['name'] for o in left]}"
        for item in left:
            metadata, kind = item["metadata"], port.kind_of(item)
            try:
                cluster.delete(kind, namespace, metadata["name"], propagation="Background")
                if metadata.get("finalizers") and (fresh := cluster.get(kind, namespace, metadata["name"])):
                    cluster.set_finalizers(fresh, [])
            except (ConflictError, NotFoundError):
                continue


def _of(cluster: KubernetesCluster, kind: port.Kind, namespace: str) -> port.Objects:
    return [item for item in cluster.list(kind, namespace) if item["metadata"]["name"] not in KEPT]
