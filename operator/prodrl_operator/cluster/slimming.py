"""What is kept in memory of an object that was read: what the controller reads of it. Called by ``caching``.

A thousand runs are twenty thousand objects, and most of their bytes are pod templates. Runs and rounds are kept whole,
because they are sent back with a new status; of a child its metadata, its status and these fields of its spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object

WHOLE = (port.RUN.kind, port.ROUND.kind)
SPEC_FIELDS: dict[str, tuple[str, ...]] = {
    port.JOB.kind: ("suspend", "completionMode", "completions"),
    port.DEPLOYMENT.kind: ("replicas",),
    port.SERVICE.kind: ("clusterIP", "ports"),
}
"""Of kinds that are not here, nothing of the spec."""
POD_STATUS_FIELDS = ("phase", "reason", "message", "podIP", "conditions", "initContainerStatuses", "containerStatuses")
CONTAINER_FIELDS = ("name", "state", "lastState", "ready", "restartCount")
METADATA_FIELDS = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"),
    *("labels", "annotations", "ownerReferences", "finalizers"),
)
LONGEST_SHARED = 80
"""Longer strings are rarely the same twice."""
MOST_SHARED = 65_536
"""Then all are forgotten: those of objects that are gone must not stay, as they do in what ``sys.intern`` keeps."""

_known: dict[str, str] = {}


def slim(obj: Object) -> Object:
    """A copy to keep, whose strings are shared with others like it."""
    kept = obj if obj["kind"] in WHOLE else _child(obj)
    shared: Object = _shared(kept)
    return shared


def _child(obj: Object) -> Object:
    kind = obj["kind"]
    kept: Object = {"apiVersion": obj["apiVersion"], "kind": kind, "metadata": _of(obj["metadata"], METADATA_FIELDS)}
    if kind in SPEC_FIELDS:
        kept["spec"] = _of(obj["spec"], SPEC_FIELDS[kind])
    if kind == port.DEPLOYMENT.kind:
        kept["spec"]["template"] = {"spec": _images(obj["spec"]["template"]["spec"])}
    if kind == port.POD.kind:
        kept["status"] = _pod_status(obj.get("status", {}))
    elif "status" in obj:
        kept["status"] = obj["status"]
    return kept


def _images(pod: Object) -> Object:
    return {
        field: [{"name": item["name"], "image": item["image"]} for item in pod[field]]
        for field in ("initContainers", "containers")
        if field in pod
    }


def _pod_status(status: Object) -> Object:
    kept = _of(status, POD_STATUS_FIELDS)
    for field in ("initContainerStatuses", "containerStatuses"):
        if field in kept:
            kept[field] = [_of(item, CONTAINER_FIELDS) for item in kept[field]]
    return kept


def _of(obj: Object, fields: Iterable[str]) -> Object:
    return {name: obj[name] for name in fields if name in obj}


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {_same(name): _shared(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shared(item) for item in value]
    return _same(value) if isinstance(value, str) and len(value) <= LONGEST_SHARED else value


def _same(text: str) -> str:
    if len(_known) >= MOST_SHARED:
        _known.clear()
    return _known.setdefault(text, text)
