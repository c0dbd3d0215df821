"""The CRDs change only by addition since the last release; the comparison itself is tried on every kind of break."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import crd_diff
from tests.support.crd_schema import Schema, committed

DELIBERATE: dict[str, str] = {}
"""Break since the last release, as the comparison words it -> why, and what users must do. Emptied at each release."""

WORD = {"type": "string", "maxLength": 10}
RULE = {"rule": "self.size > 0", "message": "size must be positive: 1 is usual"}


def crd() -> Schema:
    """A small CRD with every feature that the comparison knows."""
    item = {"type": "object", "required": ["name"], "properties": {"name": dict(WORD), "value": dict(WORD)}}
    spec = {
        "type": "object",
        "required": ["size"],
        "x-kubernetes-validations": [dict(RULE)],
        "properties": {
            "size": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 10},
            "name": {**WORD, "minLength": 1, "pattern": "^[a-z]+$"},
            "mode": {"type": "string", "enum": ["A", "B"], "default": "A"},
            "free": {"type": "string"},
            "words": {
                "type": "array",
                "minItems": 0,
                "maxItems": 5,
                "items": item,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
            "labels": {"type": "object", "maxProperties": 5, "additionalProperties": dict(WORD)},
            "patch": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "limits": {
                "type": "object",
                "default": {"cpu": 1},
                "properties": {"cpu": {"type": "integer", "default": 1}},
            },
            "maybe": {"type": "string", "nullable": True},
        },
    }
    root = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": {"type": "object"}}}
    names = {"kind": "Thing", "plural": "things", "singular": "thing", "listKind": "ThingList", "shortNames": ["th"]}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    version["schema"] = {"openAPIV3Schema": root}
    return {
        "spec": {"group": "g", "scope": "Namespaced", "names": {**names, "categories": ["c"]}, "versions": [version]}
    }


def _spec(changed: Schema) -> Schema:
    found: Schema = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def _of(field: str, **schema: Any) -> Callable[[Schema], Any]:
    """Changes keywords of one field; None removes them."""

    def change(changed: Schema) -> None:
        node = _spec(changed)["properties"][field]
        node.update({key: value for key, value in schema.items() if value is not None})
        for key in [key for key, value in schema.items() if value is None]:
            del node[key]

    return change


def _add(rule: dict[str, Any]) -> Callable[[Schema], Any]:
    return lambda changed: _spec(changed)["x-kubernetes-validations"].append(rule)


def _version(**fields: Any) -> Callable[[Schema], Any]:
    return lambda changed: changed["spec"]["versions"][0].update(fields)


BREAKS: dict[str, tuple[Callable[[Schema], Any], str]] = {
    "another group": (lambda c: c["spec"].update(group="h"), "group: g became h"),
    "another scope": (lambda c: c["spec"].update(scope="Cluster"), "scope: Namespaced became Cluster"),
    "another plural": (lambda c: c["spec"]["names"].update(plural="thingies"), "names.plural"),
    "another kind": (lambda c: c["spec"]["names"].update(kind="Object"), "names.kind"),
    "no short name": (lambda c: c["spec"]["names"].pop("shortNames"), "names.shortNames: th was removed"),
    "another category": (lambda c: c["spec"]["names"].update(categories=["d"]), "names.categories: c was removed"),
    "a version that goes": (_version(name="v2"), "v1: is no longer served"),
    "a version that is not served": (_version(served=False), "v1: is no longer served"),
    "no status subresource": (_version(subresources={}), "v1: the subresource status was removed"),
    "a field that goes": (lambda c: _spec(c)["properties"].pop("free"), "v1.spec.free: was removed"),
    "a field of items that goes": (
        lambda c: _spec(c)["properties"]["words"]["items"]["properties"].pop("value"),
        "v1.spec.words[].value: was removed",
    ),
    "another type": (_of("free", type="integer"), "v1.spec.free: the type string became integer"),
    "another format": (_of("size", format="int32"), "v1.spec.size: format int64 became int32"),
    "another type of values": (_of("labels", additionalProperties={"type": "integer"}), "v1.spec.labels{}: the type"),
    "no values": (_of("labels", additionalProperties=None), "v1.spec.labels: additionalProperties were removed"),
    "no null": (_of("maybe", nullable=None), "v1.spec.maybe: null is no longer accepted"),
    "nothing unknown": (
        _of("patch", **{"x-kubernetes-preserve-unknown-fields": None}),
        "v1.spec.patch: unknown fields",
    ),
    "an option less": (_of("mode", enum=["A"]), "v1.spec.mode: the options ['B'] were removed"),
    "options for what was free": (_of("free", enum=["A"]), "v1.spec.free: any value became one of"),
    "a smaller maximum": (_of("size", maximum=9), "v1.spec.size: maximum fell from 10 to 9"),
    "a larger minimum": (_of("size", minimum=2), "v1.spec.size: minimum rose from 1 to 2"),
    "a shorter string": (_of("name", maxLength=9), "v1.spec.name: maxLength fell"),
    "a bound for what was endless": (_of("free", maxLength=9), "v1.spec.free: maxLength fell"),
    "a longer least string": (_of("name", minLength=2), "v1.spec.name: minLength rose"),
    "something instead of nothing": (_of("free", minLength=1), "v1.spec.free: minLength rose"),
    "fewer items": (_of("words", maxItems=4), "v1.spec.words: maxItems fell"),
    "more items": (_of("words", minItems=1), "v1.spec.words: minItems rose"),
    "fewer entries": (_of("labels", maxProperties=4), "v1.spec.labels: maxProperties fell"),
    "another pattern": (_of("name", pattern="^[a-y]+$"), "v1.spec.name: pattern"),
    "a pattern for what was free": (_of("free", pattern="^x"), "v1.spec.free: pattern"),
    "another list type": (
        _of("words", **{"x-kubernetes-list-type": "atomic"}),
        "v1.spec.words: x-kubernetes-list-type",
    ),
    "another key": (
        _of("words", **{"x-kubernetes-list-map-keys": ["value"]}),
        "v1.spec.words: x-kubernetes-list-map-keys",
    ),
    "a field that is required now": (lambda c: _spec(c)["required"].append("name"), "v1.spec.name: became required"),
    "a new field that is required": (
        lambda c: (_spec(c)["properties"].update(new=dict(WORD)), _spec(c)["required"].append("new")),
        "v1.spec.new: became required",
    ),
    "another default": (_of("mode", default="B"), "v1.spec.mode: the default 'A' became 'B'"),
    "no default": (_of("mode", default=None), "v1.spec.mode: the default 'A' became None"),
    "a default for what was absent": (_of("free", default="x"), "v1.spec.free: the default None became 'x'"),
    "another default of an object": (
        _of("limits", default={"cpu": 2}),
        "v1.spec.limits: the defaults of ['cpu'] changed",
    ),
    "a rule": (_add({"rule": "self.size < 9", "message": "less"}), "v1.spec: a rule was added: self.size < 9"),
    "a rule on changes": (_add({"rule": "self.size == oldSelf.size", "message": "no"}), "v1.spec: a rule was added"),
    "a stricter rule": (
        lambda c: _spec(c)["x-kubernetes-validations"][0].update(rule="self.size > 1"),
        "v1.spec: a rule was added: self.size > 1",
    ),
}

COMPATIBLE: dict[str, Callable[[Schema], Any]] = {
    "nothing": lambda c: None,
    "an optional field": lambda c: _spec(c)["properties"].update(new=dict(WORD)),
    "a field with rules and required fields of its own": lambda c: _spec(c)["properties"].update(
        new={
            "type": "object",
            "required": ["a"],
            "properties": {"a": dict(WORD)},
            "x-kubernetes-validations": [{"rule": "self.a != ''", "message": "a must not be empty"}],
        }
    ),
    "a field with a default": lambda c: _spec(c)["properties"].update(new={**WORD, "default": "x"}),
    "a field of the status": lambda c: c["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
        "status"
    ].update(properties={"new": dict(WORD)}),
    "an option more": _of("mode", enum=["A", "B", "C"]),
    "no options": _of("mode", enum=None),
    "a larger maximum": _of("size", maximum=11),
    "no maximum": _of("size", maximum=None),
    "a smaller minimum": _of("size", minimum=0),
    "a longer string": _of("name", maxLength=11),
    "no pattern": _of("name", pattern=None),
    "more items": _of("words", maxItems=6),
    "a number or a text": _of("free", type=None, **{"x-kubernetes-int-or-string": True}),
    "null": _of("free", nullable=True),
    "no longer required": lambda c: _spec(c).update(required=[]),
    "a rule that ratchets": _add({"rule": "oldSelf.hasValue()", "message": "m", "optionalOldSelf": True}),
    "another message": lambda c: _spec(c)["x-kubernetes-validations"][0].update(message="size: at least 1"),
    "a rule less": lambda c: _spec(c).pop("x-kubernetes-validations"),
    "a description": _of("name", description="Something."),
    "a short name more": lambda c: c["spec"]["names"].update(shortNames=["th", "thing"]),
    "a version more": lambda c: c["spec"]["versions"].append(
        {**c["spec"]["versions"][0], "name": "v2", "storage": False}
    ),
    "a default of an object that says more": _of("limits", default={"cpu": 1, "memory": 2}),
    "a mapping that is free": _of(
        "labels", additionalProperties=None, **{"x-kubernetes-preserve-unknown-fields": True}
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_found(what: str) -> None:
    change, expected = BREAKS[what]
    changed = copy.deepcopy(crd())
    change(changed)
    found = crd_diff.breaks(crd(), changed)
    assert [item for item in found if item.startswith(expected)] != [], found


@pytest.mark.parametrize("what", COMPATIBLE)
def test_an_addition_is_no_break(what: str) -> None:
    changed = copy.deepcopy(crd())
    COMPATIBLE[what](changed)
    assert crd_diff.breaks(crd(), changed) == []


def test_every_break_is_found_at_every_depth() -> None:
    """The comparison reaches all of our own schema: removing any one field is found."""
    whole = committed()["prodrlruns"]

    def without_each(node: Schema) -> Any:
        for name in list(node.get("properties", {})):
            below = node["properties"].pop(name)
            yield
            node["properties"][name] = below
            yield from without_each(below)
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                yield from without_each(node[key])

    changed = copy.deepcopy(whole)
    spec = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    before = whole["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    parts = [name for name in before["properties"] if name in ("gate", "storage", "serving")]
    for part in parts:
        for _ in without_each(spec["properties"][part]):
            assert list(crd_diff._node(before["properties"][part], spec["properties"][part], part)) != []


@pytest.mark.parametrize("name", committed())
def test_nothing_broke_since_the_last_release(name: str) -> None:
    """If this fails: make the change an addition, or say in DELIBERATE why users must act, and in the changelog how."""
    version = crd_diff.releases()[-1]
    found = crd_diff.breaks(crd_diff.released(version)[name], committed()[name])
    assert [item for item in found if item not in DELIBERATE] == [], f"since {version}"


def test_no_crd_of_the_last_release_is_gone_and_no_excuse_is_old() -> None:
    before = crd_diff.released(crd_diff.releases()[-1])
    assert before.keys() <= committed().keys()
    found = {item for name, old in before.items() for item in crd_diff.breaks(old, committed()[name])}
    assert DELIBERATE.keys() <= found
