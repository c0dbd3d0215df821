"""Kubernetes' API conventions, after the rules of kube-api-linter, on the committed CRDs.

The linter reads Go types; these are its rules for a schema. Each is a function from a CRD to faults, and each is tried
on a schema that breaks it, so that none can pass by looking at nothing.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.crd_schema import Schema, committed, nodes, root_schema

MAX_BYTES = 215_000
"""`kubectl apply` keeps a copy in an annotation; all annotations of an object may have 262144 bytes."""

FREE = re.compile(r"\.podSpecPatch$")
"""A strategic merge patch of a pod's spec. Its schema, six times, would make the CRD larger than clients can apply."""

BOOLEANS = {
    "suspend": "as in Job and CronJob",
    "maximise": "a rehearsal's switch, with no third state",
    "optional": "as in SecretKeySelector",
}
MAPS = {
    "nodeSelector": "as in a pod",
    "requests": "as in a container",
    "limits": "as in a container",
    "matchLabels": "as in a label selector",
    "podLabels": "labels are a mapping",
    "podAnnotations": "annotations are a mapping",
    "podSpecPatch": "see FREE",
    "excluded": "counts by reason, read as a whole",
    "figures": "diagnostics by name, read as a whole",
    "baselineCandidate": "counters by name, read as a whole",
    "baselineStable": "counters by name, read as a whole",
}
TIMES_IN_SECONDS = re.compile(r"(Deadline|Timeout|Period|Interval|Delay|Grace|Duration|Drain|Settle)")

CONDITION: dict[str, dict[str, Any]] = {
    "type": {"type": "string", "maxLength": 316},
    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
    "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
    "message": {"type": "string", "maxLength": 32768},
    "lastTransitionTime": {"type": "string", "format": "date-time"},
    "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
}
"""metav1.Condition."""

Rule = Callable[[Schema], Iterator[str]]


def _ours(crd: Schema) -> Iterator[tuple[str, Schema]]:
    """Nodes of spec and status; metadata is the server's."""
    for part, schema in root_schema(crd)["properties"].items():
        if part in ("spec", "status"):
            yield from nodes(schema, part)


def _last(path: str) -> str:
    return path.replace("[]", "").replace("{}", "").rsplit(".", 1)[-1]


def conditions(crd: Schema) -> Iterator[str]:
    """Conditions are the first field of status, a list map by type of metav1.Condition."""
    status = root_schema(crd)["properties"]["status"]["properties"]
    if next(iter(status)) != "conditions":
        yield f"status: conditions must come first, got {next(iter(status))}"
        return
    found = status["conditions"]
    if found.get("x-kubernetes-list-type") != "map" or found.get("x-kubernetes-list-map-keys") != ["type"]:
        yield "status.conditions: must be a list map by type"
    fields = found["items"]["properties"]
    if sorted(found["items"]["required"]) != ["lastTransitionTime", "message", "reason", "status", "type"]:
        yield f"status.conditions[]: requires {found['items']['required']}"
    for name, wanted in CONDITION.items():
        if not wanted.items() <= fields.get(name, {}).items():
            yield f"status.conditions[].{name}: must have {wanted}"


def list_types(crd: Schema) -> Iterator[str]:
    """Every list says how server-side apply merges it, and list maps have keys that items must have."""
    for path, node in _ours(crd):
        if node.get("type") != "array":
            continue
        kind = node.get("x-kubernetes-list-type")
        if kind not in ("atomic", "set", "map"):
            yield f"{path}: no list type"
        keys = node.get("x-kubernetes-list-map-keys", [])
        items = node["items"]
        if (kind == "map") != bool(keys) or len(keys) != len(set(keys)):
            yield f"{path}: a list map has unique keys, got {keys}"
        elif not {key for key in keys if "default" not in items["properties"][key]} <= set(items.get("required", [])):
            yield f"{path}: items must require {keys}"
        if kind == "set" and items.get("type") in ("object", "array"):
            yield f"{path}: a set has scalars"


def bounds(crd: Schema) -> Iterator[str]:
    """Every string, list and mapping is bounded above (CEL's cost is estimated from it)."""
    for path, node in _ours(crd):
        kind = node.get("type")
        if (kind == "string" and "enum" not in node) or node.get("x-kubernetes-int-or-string"):
            if "maxLength" not in node:
                yield f"{path}: a string without maxLength"
        elif kind == "array" and "maxItems" not in node:
            yield f"{path}: a list without maxItems"
        elif kind == "object" and "additionalProperties" in node and "maxProperties" not in node:
            yield f"{path}: a mapping without maxProperties"


def integers(crd: Schema) -> Iterator[str]:
    """No floats; integers have a format and both bounds, which every JSON reader can hold."""
    for path, node in _ours(crd):
        if node.get("type") == "number" or node.get("format") in ("float", "double"):
            yield f"{path}: a float"
        if node.get("type") == "integer":
            low, high = node.get("minimum"), node.get("maximum")
            if node.get("format") not in ("int32", "int64"):
                yield f"{path}: an integer without int32 or int64"
            if low is None or high is None or not -(2**53) < low <= high < 2**53:
                yield f"{path}: an integer without bounds"


def status_is_optional(crd: Schema) -> Iterator[str]:
    """Status is a subresource, never required, has no required first-level fields and no defaults."""
    (version,) = crd["spec"]["versions"]
    root = root_schema(crd)
    if version.get("subresources") != {"status": {}}:
        yield "status: must be a subresource"
    if "status" in root.get("required", []) or root["properties"]["status"].get("required"):
        yield "status: must be optional, with optional fields"
    yield from (
        f"{path}: a default in status" for path, node in _ours(crd) if path.startswith("status") and "default" in node
    )


def git_agrees(crd: Schema) -> Iterator[str]:
    """No default below a list: a GitOps tool compares lists whole, and would find a difference for ever."""
    for path, node in _ours(crd):
        if "[]" in path and "default" in node:
            yield f"{path}: a default in an item of a list"


def structure(crd: Schema) -> Iterator[str]:
    """Nothing is nullable or unknown; nothing is both required and defaulted."""
    if crd["spec"].get("preserveUnknownFields"):
        yield "spec.preserveUnknownFields"
    for path, node in nodes(root_schema(crd)):
        if node.get("nullable"):
            yield f"{path}: nullable"
        if node.get("x-kubernetes-preserve-unknown-fields") and not FREE.search(path):
            yield f"{path}: unknown fields"
        if path and "type" not in node and not node.get("x-kubernetes-int-or-string"):
            yield f"{path}: no type"
        properties = node.get("properties", {})
        for name in node.get("required", []):
            if name not in properties:
                yield f"{path}: requires {name}, which it has not"
            elif "default" in properties[name]:
                yield f"{path}.{name}: required and defaulted"
        if len(node.get("required", [])) != len(set(node.get("required", []))):
            yield f"{path}: requires a field twice"


def field_names(crd: Schema) -> Iterator[str]:
    """CamelCase; no phase in status, no timestamps by that name, times as integers with their unit."""
    for path, node in _ours(crd):
        name = _last(path)
        if not re.fullmatch(r"[a-z][A-Za-z0-9]*", name):
            yield f"{path}: not camelCase"
        if path.startswith("status") and name.lower() == "phase":
            yield f"{path}: a phase; use conditions, or the name of what it is"
        if "timestamp" in name.lower():
            yield f"{path}: a timestamp; call it a time"
        if node.get("format") == "duration":
            yield f"{path}: a duration; use an integer of seconds"
        scalar = node.get("type") in ("integer", "string")
        if scalar and TIMES_IN_SECONDS.search(name[0].upper() + name[1:]) and not name.endswith("Seconds"):
            yield f"{path}: a time without its unit"


def kinds_of_fields(crd: Schema) -> Iterator[str]:
    """Booleans and mappings cannot grow; each that there is has its reason."""
    for path, node in _ours(crd):
        if node.get("type") == "boolean" and _last(path) not in BOOLEANS:
            yield f"{path}: a boolean; use an enum, which can grow"
        is_map = "additionalProperties" in node or node.get("x-kubernetes-preserve-unknown-fields")
        if is_map and _last(path) not in MAPS:
            yield f"{path}: a mapping; use a list map"


def descriptions(crd: Schema) -> Iterator[str]:
    """`kubectl explain` says something about every field."""
    root = root_schema(crd)
    if not root.get("description"):
        yield "the kind has no description"
    for path, node in _ours(crd):
        if not path.endswith(("[]", "{}")) and not node.get("description", "").strip():
            yield f"{path}: no description"


def markers(crd: Schema) -> Iterator[str]:
    """Defaults and enums agree with the schema; no enum or rule twice."""
    for path, node in _ours(crd):
        options, default = node.get("enum"), node.get("default")
        if options is not None and len(options) != len(set(options)):
            yield f"{path}: an option twice"
        if options is not None and default is not None and default not in options:
            yield f"{path}: the default is no option"
        rules = [rule["rule"] for rule in node.get("x-kubernetes-validations", [])]
        if len(rules) != len(set(rules)):
            yield f"{path}: a rule twice"
        for rule in node.get("x-kubernetes-validations", []):
            if len(rule.get("message", "")) < 20 or "\n" in rule["message"] or len(rule["message"]) > 2048:
                yield f"{path}: a rule without a message that helps"


def size(crd: Schema) -> Iterator[str]:
    """Client-side apply can store it."""
    actual = len(json.dumps(crd, separators=(",", ":")).encode())
    if actual >= MAX_BYTES:
        yield f"{actual} bytes; at most {MAX_BYTES}"


def columns(crd: Schema) -> Iterator[str]:
    """Columns show fields that exist, conditions by type and never by position; age comes before the wide ones."""
    (version,) = crd["spec"]["versions"]
    known = {f".{path}" for path, _ in nodes(root_schema(crd))} | {".metadata.creationTimestamp"}
    found = version["additionalPrinterColumns"]
    for column in found:
        path = column["jsonPath"]
        if path.startswith(".status.conditions"):
            if not re.fullmatch(r"\.status\.conditions\[\?\(@\.type=='[A-Za-z]+'\)\]\.(status|reason)", path):
                yield f"{column['name']}: a condition by position"
        elif path not in known:
            yield f"{column['name']}: no field {path}"
    narrow = [column["name"] for column in found if not column.get("priority")]
    if narrow[-1] != "Age" or [column["name"] for column in found][: len(narrow)] != narrow:
        yield f"Age must be the last narrow column, got {narrow}"


def kind_names(crd: Schema) -> Iterator[str]:
    """A category of our own: in `all`, `kubectl delete all` would stop serving."""
    found = crd["spec"]["names"]
    if found["categories"] != ["prodrl"]:
        yield f"categories: got {found['categories']}"
    if len(found.get("shortNames", [])) != 1 or found["listKind"] != f"{found['kind']}List":
        yield f"names: got {found}"
    if crd["spec"]["scope"] != "Namespaced":
        yield "scope: must be Namespaced"


Break = tuple[Rule, Callable[[Schema], Any]]


def _status(crd: Schema) -> Schema:
    found: Schema = root_schema(crd)["properties"]["status"]
    return found


def _field(**schema: Any) -> Callable[[Schema], Any]:
    """Adds a status field that is right but for what is given."""
    name = schema.pop("name", "extra")
    base = {"description": "Something.", "type": "string", "maxLength": 10}
    return lambda crd: _status(crd)["properties"].update({name: {**base, **schema}})


def _of_conditions(**schema: Any) -> Callable[[Schema], Any]:
    return lambda crd: _status(crd)["properties"]["conditions"].update(schema)


def _of_condition(name: str, **schema: Any) -> Callable[[Schema], Any]:
    return lambda crd: _status(crd)["properties"]["conditions"]["items"]["properties"][name].update(schema)


def _version(**fields: Any) -> Callable[[Schema], Any]:
    return lambda crd: crd["spec"]["versions"][0].update(fields)


LIST = {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 3}, "x-kubernetes-list-type": "atomic"}
ITEMS = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}}

BREAKS: dict[str, Break] = {
    "conditions of another list type": (conditions, _of_conditions(**{"x-kubernetes-list-type": "atomic"})),
    "conditions by another key": (conditions, _of_conditions(**{"x-kubernetes-list-map-keys": ["reason"]})),
    "an endless message": (conditions, _of_condition("message", maxLength=65536)),
    "an empty reason": (conditions, _of_condition("reason", minLength=0)),
    "a fourth state": (conditions, _of_condition("status", enum=["True", "False", "Unknown", "Maybe"])),
    "a list without a type": (list_types, _field(**{**LIST, "x-kubernetes-list-type": None})),
    "a set of objects": (list_types, _field(**{**LIST, "x-kubernetes-list-type": "set", "items": ITEMS})),
    "a list map without keys": (list_types, _field(**{**LIST, "x-kubernetes-list-type": "map", "items": ITEMS})),
    "a list map by an optional key": (
        list_types,
        _field(**{**LIST, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items": ITEMS}),
    ),
    "a list map by a key twice": (
        list_types,
        _field(
            **{
                **LIST,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name", "name"],
                "items": {**ITEMS, "required": ["name"]},
            }
        ),
    ),
    "an endless string": (bounds, lambda crd: _status(crd)["properties"].update(extra={"type": "string"})),
    "an endless string in a list": (bounds, _field(**{**LIST, "items": {"type": "string"}})),
    "an endless list": (bounds, lambda crd: _status(crd)["properties"].update(extra={"type": "array", "items": {}})),
    "an endless mapping": (bounds, _field(type="object", additionalProperties={"type": "string", "maxLength": 3})),
    "an endless quantity": (
        bounds,
        lambda crd: _status(crd)["properties"].update(extra={"x-kubernetes-int-or-string": True}),
    ),
    "a float": (integers, _field(type="number")),
    "a float by format": (integers, _field(type="integer", format="double")),
    "an integer without a format": (integers, _field(type="integer", minimum=0, maximum=1)),
    "an integer of 16 bits": (integers, _field(type="integer", format="int16", minimum=0, maximum=1)),
    "an integer without a bound": (integers, _field(type="integer", format="int64", minimum=0)),
    "an integer that JSON readers round": (integers, _field(type="integer", format="int64", minimum=0, maximum=2**60)),
    "no subresource": (status_is_optional, _version(subresources={})),
    "a required status": (status_is_optional, lambda crd: root_schema(crd)["required"].append("status")),
    "a required field of status": (status_is_optional, lambda crd: _status(crd).update(required=["conditions"])),
    "a default in status": (status_is_optional, _field(default="x")),
    "a default in an item": (
        git_agrees,
        _field(**{**LIST, "items": {"type": "object", "properties": {"x": {"type": "string", "default": "y"}}}}),
    ),
    "null": (structure, _field(nullable=True)),
    "unknown fields at the top": (
        structure,
        lambda crd: root_schema(crd).update({"x-kubernetes-preserve-unknown-fields": True}),
    ),
    "unknown fields everywhere": (structure, lambda crd: crd["spec"].update(preserveUnknownFields=True)),
    "a free mapping": (structure, _field(type="object", **{"x-kubernetes-preserve-unknown-fields": True})),
    "no type": (structure, lambda crd: _status(crd)["properties"].update(extra={"maxLength": 3})),
    "required and defaulted": (
        structure,
        _field(type="object", required=["a"], properties={"a": {"type": "string", "maxLength": 1, "default": "x"}}),
    ),
    "required and missing": (structure, _field(type="object", required=["a"], properties={})),
    "a phase": (field_names, _field(name="phase")),
    "a phase further down": (field_names, _field(type="object", properties={"phase": {"type": "string"}})),
    "a timestamp": (field_names, _field(name="startTimestamp")),
    "a duration": (field_names, _field(name="wait", format="duration")),
    "a time without its unit": (field_names, _field(name="startDeadline")),
    "snake_case": (field_names, _field(name="start_time")),
    "a boolean": (kinds_of_fields, _field(type="boolean")),
    "a mapping": (kinds_of_fields, _field(type="object", additionalProperties={"type": "string"})),
    "no description": (descriptions, _field(description=" ")),
    "a kind without a description": (descriptions, lambda crd: root_schema(crd).pop("description")),
    "a default that is no option": (markers, _field(enum=["a"], default="b")),
    "an option twice": (markers, _field(enum=["a", "a"])),
    "a rule without a message": (markers, _field(**{"x-kubernetes-validations": [{"rule": "true"}]})),
    "a rule twice": (markers, _field(**{"x-kubernetes-validations": [{"rule": "true", "message": "m" * 30}] * 2})),
    "too large": (size, _field(description="x" * MAX_BYTES)),
    "a condition by position": (
        columns,
        lambda crd: crd["spec"]["versions"][0]["additionalPrinterColumns"].insert(
            0, {"name": "Last", "type": "string", "jsonPath": ".status.conditions[-1:].type"}
        ),
    ),
    "a column of nothing": (
        columns,
        lambda crd: crd["spec"]["versions"][0]["additionalPrinterColumns"].insert(
            0, {"name": "Nothing", "type": "string", "jsonPath": ".status.nothing"}
        ),
    ),
    "a column after Age": (
        columns,
        lambda crd: crd["spec"]["versions"][0]["additionalPrinterColumns"].append(
            {"name": "Late", "type": "string", "jsonPath": ".spec"}
        ),
    ),
    "in all": (kind_names, lambda crd: crd["spec"]["names"].update(categories=["all"])),
    "cluster-wide": (kind_names, lambda crd: crd["spec"].update(scope="Cluster")),
}
RULES = list(dict.fromkeys(rule for rule, _ in BREAKS.values()))


@pytest.mark.parametrize("name", committed())
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_crds_keep_the_conventions(rule: Rule, name: str) -> None:
    assert list(rule(committed()[name])) == []


@pytest.mark.parametrize("what", BREAKS)
def test_each_rule_finds_what_breaks_it(what: str) -> None:
    rule, spoil = BREAKS[what]
    crd = copy.deepcopy(committed()["prodrlruns"])
    spoil(crd)
    assert list(rule(crd)) != []


def test_conditions_come_first() -> None:
    crd = copy.deepcopy(committed()["prodrlruns"])
    status = _status(crd)
    status["properties"] = {"other": {"type": "string"}, **status["properties"]}
    assert list(conditions(crd)) != []


def test_the_columns_of_a_run() -> None:
    """What an operator of the platform looks at first, and with -o wide."""
    (version,) = committed()["prodrlruns"]["spec"]["versions"]
    found = version["additionalPrinterColumns"]
    narrow = [column["name"] for column in found if not column.get("priority")]
    assert narrow == ["Round", "Step", "Ready", "Stable", "Gate", "Weight", "Age"]
    assert [column["name"] for column in found if column.get("priority") == 1] == ["Reward", "Model", "Reason"]
    assert {crd["spec"]["names"]["shortNames"][0] for crd in committed().values()} == {"prun", "pround"}


def test_exceptions_are_needed() -> None:
    """A reason for a field that is gone excuses the next one of that name."""
    seen = {_last(path) for crd in committed().values() for path, _ in _ours(crd)}
    assert {*BOOLEANS, *MAPS} <= seen
