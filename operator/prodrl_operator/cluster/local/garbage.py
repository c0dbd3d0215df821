"""What garbage collection must do next, as a pure function of all objects. Used by ``store``.

Kubernetes' rules: a dependent goes when none of its owners exists; an owner deleted in the foreground keeps its
finalizer until its blocking dependents are gone; an owner deleted as an orphan first loses its dependents'
references. Owners of kinds that are not in the store are never judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"

Object = dict[str, Any]


@dataclass(frozen=True)
class Action:
    """One step: delete the object (background or foreground), drop owner references, or drop a finalizer."""

    verb: Literal["Background", "Foreground", "DropOwners", "DropFinalizer"]
    uid: str
    values: frozenset[str] = frozenset()
    """Owners' uids, or the finalizer."""


def next_action(objects: Iterable[Object], kinds: frozenset[tuple[str, str]]) -> Action | None:
    """The next step, or None when nothing is to be collected. ``kinds``: (apiVersion, kind) that the store holds."""
    present = {item["metadata"]["uid"]: item for item in objects}
    dependents: dict[str, list[Object]] = {}
    for item in present.values():
        for owner in item["metadata"].get("ownerReferences", ()):
            dependents.setdefault(owner["uid"], []).append(item)
    for uid, item in present.items():
        action = _of_owner(uid, item, dependents.get(uid, []))
        action = action or _of_dependent(uid, item, present, dependents, kinds)
        if action:
            return action
    return None


def _of_owner(uid: str, item: Object, dependents: list[Object]) -> Action | None:
    finalizers = _dying_finalizers(item)
    if ORPHAN in finalizers:
        if dependents:
            return Action("DropOwners", dependents[0]["metadata"]["uid"], frozenset({uid}))
        return Action("DropFinalizer", uid, frozenset({ORPHAN}))
    if FOREGROUND in finalizers and not any(_blocks(dependent, uid) for dependent in dependents):
        return Action("DropFinalizer", uid, frozenset({FOREGROUND}))
    return None


def _of_dependent(
    uid: str,
    item: Object,
    present: dict[str, Object],
    dependents: dict[str, list[Object]],
    kinds: frozenset[tuple[str, str]],
) -> Action | None:
    owners = item["metadata"].get("ownerReferences", [])
    if not owners or any((owner["apiVersion"], owner["kind"]) not in kinds for owner in owners):
        return None
    gone = {owner["uid"] for owner in owners if not _is_owner(present.get(owner["uid"]), owner, item)}
    waiting = {owner["uid"] for owner in owners} - gone
    waiting = {owner for owner in waiting if FOREGROUND in _dying_finalizers(present[owner])}
    solid = {owner["uid"] for owner in owners} - gone - waiting
    if solid:
        return Action("DropOwners", uid, frozenset(gone | waiting)) if gone or waiting else None
    if "deletionTimestamp" in item["metadata"]:
        return None
    return Action("Foreground" if waiting and dependents.get(uid) else "Background", uid)


def _is_owner(found: Object | None, owner: dict[str, Any], item: Object) -> bool:
    """A reference holds only when kind, name, uid and namespace all match."""
    return (
        found is not None
        and found["kind"] == owner["kind"]
        and found["metadata"]["name"] == owner["name"]
        and found["metadata"]["namespace"] == item["metadata"]["namespace"]
    )


def _dying_finalizers(item: Object) -> frozenset[str]:
    metadata = item["metadata"]
    return frozenset(metadata.get("finalizers", ())) if "deletionTimestamp" in metadata else frozenset()


def _blocks(dependent: Object, uid: str) -> bool:
    return any(
        owner["uid"] == uid and owner.get("blockOwnerDeletion")
        for owner in dependent["metadata"].get("ownerReferences", ())
    )
