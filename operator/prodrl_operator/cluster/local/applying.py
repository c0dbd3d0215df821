"""Server-side apply for one field manager, as pure functions on dicts. Used by ``store``.

Kubernetes keeps the set of fields that each manager owns; with a single manager the manifest applied last is that
set. A field that was applied and is absent now goes away; a field that someone else set (defaults, the
environment's controllers, an earlier ``create``) stays. Which lists are merged by key is decided by ``list_keys``:
from the CRD's schema for our kinds, from a table for the built-in ones; every other list is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Keys = tuple[str, ...]
ListKeys = Callable[[tuple[str, ...]], Keys | None]
"""Path of a list -> the keys its items are merged by; ``()`` for a set of scalars; None for an atomic list."""

BUILT_IN_LIST_KEYS: dict[str, Keys] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "finalizers": (),
}
BUILT_IN_ATOMIC_MAPS = {("spec", "selector"), ("spec", "podSelector")}
"""Maps that are replaced as a whole: a Service's selector, a label selector."""

_KEY_DEFAULTS = {"protocol": "TCP"}


def built_in_list_keys(path: tuple[str, ...]) -> Keys | None:
    """Merge keys of a list of a built-in kind; ports differ between containers and Services."""
    if path == ("spec", "ports"):
        return ("port", "protocol")
    if path[-1] == "ports" and "containers" in path:
        return ("containerPort", "protocol")
    return BUILT_IN_LIST_KEYS.get(path[-1])


def schema_list_keys(schema: dict[str, Any]) -> ListKeys:
    """Merge keys as the ``x-kubernetes-list-type`` marks of an OpenAPI schema say."""

    def keys(path: tuple[str, ...]) -> Keys | None:
        if path[0] == "metadata":
            return built_in_list_keys(path)
        node: dict[str, Any] = schema
        for name in path:
            node = node.get("items", {}) if name == "[]" else _child(node, name)
        match node.get("x-kubernetes-list-type"):
            case "map":
                return tuple(node["x-kubernetes-list-map-keys"])
            case "set":
                return ()
        return None

    return keys


def _child(node: dict[str, Any], name: str) -> dict[str, Any]:
    properties: dict[str, Any] = node.get("properties", {})
    if name in properties:
        return dict(properties[name])
    additional = node.get("additionalProperties")
    return additional if isinstance(additional, dict) else {}


def merge(live: Any, before: Any, applied: Any, list_keys: ListKeys, path: tuple[str, ...] = ()) -> Any:
    """The new value of ``live``, after ``before`` was applied the last time and ``applied`` is now."""
    if isinstance(applied, dict) and isinstance(live, dict) and path not in BUILT_IN_ATOMIC_MAPS:
        return _merge_map(live, before if isinstance(before, dict) else {}, applied, list_keys, path)
    if isinstance(applied, list) and isinstance(live, list):
        keys = list_keys(path)
        if keys is not None:
            return _merge_list(live, before if isinstance(before, list) else [], applied, list_keys, path, keys)
    return applied


def named_twice(applied: Any, list_keys: ListKeys, path: tuple[str, ...] = ()) -> str | None:
    """The path of a merged list that names an item twice; None: there is none."""
    if isinstance(applied, dict):
        children = [(value, (*path, name)) for name, value in applied.items()]
    elif isinstance(applied, list):
        keys = list_keys(path) if path else None
        known = [identity(item, keys) for item in applied] if keys else []
        if len(known) != len(set(known)):
            return ".".join(path)
        children = [(item, (*path, "[]")) for item in applied]
    else:
        return None
    return next((found for value, below in children if (found := named_twice(value, list_keys, below))), None)


def _merge_map(
    live: dict[str, Any], before: dict[str, Any], applied: dict[str, Any], list_keys: ListKeys, path: tuple[str, ...]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in live.items():
        below = (*path, name)
        if name in applied:
            result[name] = merge(value, before.get(name), applied[name], list_keys, below)
        elif name in before:
            kept = _remove(value, before[name], list_keys, below)
            if kept not in (None, {}, []):
                result[name] = kept
        else:
            result[name] = value
    return result | {name: value for name, value in applied.items() if name not in live}


def _remove(live: Any, owned: Any, list_keys: ListKeys, path: tuple[str, ...]) -> Any:
    """What is left of ``live`` when its owner no longer applies ``owned``."""
    if isinstance(live, dict) and isinstance(owned, dict) and path not in BUILT_IN_ATOMIC_MAPS:
        return _merge_map(live, owned, {}, list_keys, path)
    if isinstance(live, list) and isinstance(owned, list):
        keys = list_keys(path)
        if keys is not None:
            return _merge_list(live, owned, [], list_keys, path, keys)
    return None


def _merge_list(
    live: list[Any], before: list[Any], applied: list[Any], list_keys: ListKeys, path: tuple[str, ...], keys: Keys
) -> list[Any]:
    old = {identity(item, keys): item for item in before}
    new = {identity(item, keys): item for item in applied}
    present = {identity(item, keys): item for item in live}
    result = [
        merge(present[key], old.get(key), item, list_keys, (*path, "[]")) if key in present else item
        for key, item in new.items()
    ]
    return result + [item for key, item in present.items() if key not in new and key not in old]


def identity(item: Any, keys: Keys) -> Any:
    """What an item of a merged list is known by."""
    if not keys or not isinstance(item, dict):
        return repr(item)
    return tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys)
