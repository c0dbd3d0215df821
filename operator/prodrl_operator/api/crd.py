"""The CRDs, generated from the pydantic models. Pure: ``crds()`` gives dicts, ``render()`` the committed YAML.

What pydantic says in JSON Schema becomes a structural OpenAPI v3 schema: references inlined, ``X | None`` made
optional, object defaults reduced to what rules read (the server fills the nested ones), status left without defaults.
A keyword that has no counterpart is an error, so that no bound is lost. List types and printer columns are declared
here, CEL rules in ``rules``.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from prodrl_operator import names
from prodrl_operator.api.model import MESSAGE
from prodrl_operator.api.round import Round, RoundSpec, RoundStatus
from prodrl_operator.api.rules import POD_SETTINGS, ROUND_RULES, RULES, Rules, worded
from prodrl_operator.api.run import Run, RunSpec, RunStatus
from prodrl_operator.errors import UnsupportedError

Schema = dict[str, Any]

LIST_MAPS = {
    "status.conditions": ["type"],
    "spec.gate.evaluations": ["name"],
    **{f"spec.{part}.env": ["name"] for part in POD_SETTINGS},
    **{f"spec.{part}.resources.claims": ["name"] for part in POD_SETTINGS},
    "status.history": ["number"],
    "status.attempts": ["step"],
}
"""Lists that merge by key; every other list is atomic."""

RUN_COLUMNS = [
    ("Round", "integer", ".status.currentRound.number", 0),
    ("Step", "string", ".status.currentRound.step", 0),
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", 0),
    ("Stable", "integer", ".status.stable.round", 0),
    ("Gate", "string", ".status.lastGate.verdict", 0),
    ("Weight", "integer", ".status.canaryWeight", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reward", "string", ".status.reward", 1),
    ("Model", "string", ".spec.model.servedName", 1),
    ("Reason", "string", ".status.conditions[?(@.type=='Progressing')].reason", 1),
]
ROUND_COLUMNS = [
    ("Run", "string", ".spec.run", 0),
    ("Number", "integer", ".spec.number", 0),
    ("Step", "string", ".status.step", 0),
    ("Verdict", "string", ".status.gate.verdict", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reward", "string", ".status.dataset.rewardMean", 1),
    ("Digest", "string", ".status.policy.digest", 1),
]

DEFAULTED = ("spec.gate", "spec.gate.canary")
"""Objects whose absent lists are empty for the server too, because rules count their items."""

FREE = ".podSpecPatch"
"""The one free mapping: a patch of a whole pod's spec would make the CRD larger than clients can apply."""

KEPT = (
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "format",
    "x-kubernetes-preserve-unknown-fields",
)
"""Keywords that mean the same in JSON Schema and in a structural schema."""

READ = frozenset({*KEPT, "description", "type", "title", "default", "const", "items", "properties", "required"}) | {
    "additionalProperties",
    "propertyNames",
    "patternProperties",
    MESSAGE,
}


def structural(schema: Schema, defs: dict[str, Schema], path: str) -> Schema:
    """One JSON Schema node as a structural OpenAPI v3 node; ``path`` finds its rules and list type."""
    if "$ref" in schema:
        target = defs[schema["$ref"].rsplit("/", 1)[1]]
        return structural({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, defs, path)
    if "anyOf" in schema:
        return _union(schema, defs, path)
    unread = schema.keys() - READ
    if unread:
        raise UnsupportedError(f"CRD field {path}: has no structural form, got {sorted(unread)}; use another type")
    node: Schema = _described(schema)
    node |= {key: schema[key] for key in KEPT if key in schema}
    node["type"] = schema.get("type", "object")
    if "const" in schema:
        node["enum"] = [schema["const"]]
    # Lists are compared whole: a default in an item would make Git's differ from the server's for ever. Models have it.
    if "default" in schema and not path.startswith("status") and "[]" not in path:
        node["default"] = schema["default"]
    _rule(node, schema, path)
    if node["type"] == "array":
        _list(node, schema, defs, path)
    elif node["type"] == "object":
        _object(node, schema, defs, path)
        if "default" in node:
            node["default"] = _default(node, path)
    elif node["type"] == "integer":
        node["format"] = "int64"
    return node


def _rule(node: Schema, schema: Schema, path: str) -> None:
    """Rules of the path, and of the type; a pattern that a rule holds is said there, in words."""
    rules: Rules = list(RULES.get(path, ()))
    if MESSAGE in schema and path.startswith("spec"):
        rules += worded(schema)
    if rules:
        node["x-kubernetes-validations"] = rules
    if any(f"matches('{node.get('pattern')}')" in rule["rule"] for rule in rules):
        del node["pattern"]


def _default(node: Schema, path: str) -> Schema:
    """Empty, but for what the object's own rules read: a server checks a default before it fills in nested ones."""
    rules = " ".join(rule["rule"] for rule in RULES.get(path, ()))
    children: Schema = node.get("properties", {})
    return {
        name: child["default"] for name, child in children.items() if "default" in child and f"self.{name}" in rules
    }


def _described(schema: Schema) -> Schema:
    return {"description": " ".join(schema["description"].split())} if "description" in schema else {}


def _union(schema: Schema, defs: dict[str, Schema], path: str) -> Schema:
    """``X | None`` is an optional X; an integer or a string is Kubernetes' own union."""
    branches = [branch for branch in schema["anyOf"] if branch.get("type") != "null"]
    outer = {k: v for k, v in schema.items() if k not in ("anyOf", "default")}
    if [branch.get("type") for branch in branches] == ["integer", "string"]:
        text: Schema = {k: v for k, v in {**branches[1], **outer}.items() if k in KEPT}
        _rule(text, {**branches[1], **outer}, path)
        return {**_described(outer), **text, "x-kubernetes-int-or-string": True}
    (branch,) = branches
    return structural({**branch, **outer}, defs, path)


def _list(node: Schema, schema: Schema, defs: dict[str, Schema], path: str) -> None:
    node["items"] = structural(schema["items"], defs, f"{path}[]")
    keys = LIST_MAPS.get(path)
    node["x-kubernetes-list-type"] = "map" if keys else "atomic"
    if keys:
        node["x-kubernetes-list-map-keys"] = keys


def _object(node: Schema, schema: Schema, defs: dict[str, Schema], path: str) -> None:
    # Of a mapping's keys a structural schema says nothing; rules do.
    extra = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), None)
    if "properties" in schema:
        node["properties"] = {
            name: structural(child, defs, f"{path}.{name}" if path else name)
            for name, child in schema["properties"].items()
        }
        if schema.get("required"):
            node["required"] = schema["required"]
        for name, child in schema["properties"].items():
            # A list made by a factory has no default in JSON Schema; rules may then not mention it.
            if path in DEFAULTED and child.get("type") == "array" and name not in schema.get("required", []):
                node["properties"][name].setdefault("default", [])
    elif isinstance(extra, dict):
        node["additionalProperties"] = structural(extra, defs, f"{path}{{}}")
    elif path.endswith(FREE):
        node["x-kubernetes-preserve-unknown-fields"] = True
    elif "x-kubernetes-preserve-unknown-fields" not in schema:
        raise UnsupportedError(f"CRD field {path}: is a free mapping; give it a model or a value type")


def _part(model: type[Any], path: str) -> Schema:
    schema = model.model_json_schema(by_alias=True)
    return structural(schema, schema.pop("$defs", {}), path)


def _whole(model: type[Run | Round], spec: Schema, status: Schema, rules: list[dict[str, str]]) -> Schema:
    """The schema of a whole object; metadata, apiVersion and kind are the server's to describe."""
    return {
        **_described({"description": model.__doc__ or ""}),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        **({"x-kubernetes-validations": rules} if rules else {}),
    }


def _crd(kind: str, short: str, columns: list[tuple[str, str, str, int]], schema: Schema) -> Schema:
    plural = f"{kind.lower()}s"
    version: Schema = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind_, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind_, path, priority in columns
        ],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["prodrl"],
            },
            "versions": [version],
        },
    }


def run_crd() -> Schema:
    """The CustomResourceDefinition of ProdRLRun."""
    schema = _whole(Run, _part(RunSpec, "spec"), _part(RunStatus, "status"), RULES[""])
    return _crd("ProdRLRun", "prun", RUN_COLUMNS, schema)


def round_crd() -> Schema:
    """The CustomResourceDefinition of ProdRLRound; its spec is immutable."""
    spec = _part(RoundSpec, "roundspec")
    spec["x-kubernetes-validations"] = ROUND_RULES
    return _crd("ProdRLRound", "pround", ROUND_COLUMNS, _whole(Round, spec, _part(RoundStatus, "status"), []))


def crds() -> dict[str, Schema]:
    """File name in ``crds/`` -> CustomResourceDefinition."""
    return {"prodrlruns.yaml": run_crd(), "prodrlrounds.yaml": round_crd()}


class _Dumper(yaml.SafeDumper):
    """No aliases: rules are shared objects here and must be written out."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Quotes where a reader of YAML 1.2 would see a number that this writer does not: 1e-6."""
    style = "'" if re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render(crd: Schema) -> str:
    """The YAML text as committed."""
    header = "# Generated by `prodrl-operator crds`; edit operator/prodrl_operator/api instead.\n"
    return header + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120)
