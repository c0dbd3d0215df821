"""The CRDs, generated from the pydantic models. Pure: ``crds()`` gives dicts, ``render()`` the committed YAML.

What pydantic says in JSON Schema becomes a structural OpenAPI v3 schema: references inlined, ``X | None`` made
optional, object defaults reduced to ``{}`` (the server fills the nested ones). CEL rules, list types and printer
columns are declared here, beside the schema that they belong to. Rules keep to core CEL, so that they can be
evaluated without a server too.
"""

from __future__ import annotations

from typing import Any

import yaml

from prodrl_operator import names
from prodrl_operator.api.round import RoundSpec, RoundStatus
from prodrl_operator.api.run import RunSpec, RunStatus

Schema = dict[str, Any]

RULES: dict[str, list[dict[str, str]]] = {
    "": [
        {
            "rule": "size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "message": "metadata.name must be a DNS label of at most 40 characters that starts with a letter: "
            "names of Jobs and Deployments are derived from it",
        }
    ],
    "spec": [
        {"rule": "self.mode == oldSelf.mode", "message": "spec.mode is immutable: create another ProdRLRun"},
        {
            "rule": "self.model.uri == oldSelf.model.uri",
            "message": "spec.model.uri is immutable: create another ProdRLRun for another base model",
        },
        {
            "rule": "self.storage.uri == oldSelf.storage.uri",
            "message": "spec.storage.uri is immutable: records, datasets and checkpoints lie there",
        },
        {
            "rule": "self.serving.surge != 'Replace' || size(self.gate.canary.steps) == 0",
            "message": "spec.gate.canary.steps must be empty with serving.surge Replace: stable does not run beside "
            "the candidate",
        },
    ],
    "spec.training.correction": [
        {
            "rule": "self.type == 'ScoreCentering' || self.weighting == 'None'",
            "message": "weighting composes with type ScoreCentering only; set weighting to None",
        }
    ],
    "spec.gate.canary": [
        {
            "rule": "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18].all(i, i + 1 >= size(self.steps) || "
            "self.steps[i].weight < self.steps[i + 1].weight)",
            "message": "weights of canary steps must increase",
        }
    ],
    "spec.gate.evaluations[]": [
        {"rule": "self.minItems <= self.maxItems", "message": "minItems must not be larger than maxItems"}
    ],
}
"""CEL rules by path; ``[]`` stands for the items of a list."""

LIST_MAPS = {
    "status.conditions": ["type"],
    "spec.gate.evaluations": ["name"],
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

KEPT = ("description", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "maxItems", "format")


def structural(schema: Schema, defs: dict[str, Schema], path: str) -> Schema:
    """One JSON Schema node as a structural OpenAPI v3 node; ``path`` finds its rules and list type."""
    if "$ref" in schema:
        target = defs[schema["$ref"].rsplit("/", 1)[1]]
        return structural({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, defs, path)
    if "anyOf" in schema:
        (branch,) = [b for b in schema["anyOf"] if b.get("type") != "null"]
        outer = {k: v for k, v in schema.items() if k not in ("anyOf", "default")}
        return structural({**branch, **outer}, defs, path)
    node: Schema = {key: schema[key] for key in KEPT if key in schema}
    node["type"] = schema.get("type", "object")
    if "const" in schema:
        node["enum"] = [schema["const"]]
    if "default" in schema:
        node["default"] = {} if node["type"] == "object" else schema["default"]
    if path in RULES:
        node["x-kubernetes-validations"] = RULES[path]
    if node["type"] == "array":
        _list(node, schema, defs, path)
    elif node["type"] == "object":
        _object(node, schema, defs, path)
    elif node["type"] == "integer":
        node["format"] = "int64"
    return node


def _list(node: Schema, schema: Schema, defs: dict[str, Schema], path: str) -> None:
    node["items"] = structural(schema["items"], defs, f"{path}[]")
    keys = LIST_MAPS.get(path)
    node["x-kubernetes-list-type"] = "map" if keys else "atomic"
    if keys:
        node["x-kubernetes-list-map-keys"] = keys


def _object(node: Schema, schema: Schema, defs: dict[str, Schema], path: str) -> None:
    extra = schema.get("additionalProperties")
    if "properties" in schema:
        node["properties"] = {
            name: structural(child, defs, f"{path}.{name}" if path else name)
            for name, child in schema["properties"].items()
        }
        if schema.get("required"):
            node["required"] = schema["required"]
        for name, child in schema["properties"].items():
            # A list made by a factory has no default in JSON Schema; rules may then not mention it.
            if path.startswith("spec") and child.get("type") == "array" and name not in schema.get("required", []):
                node["properties"][name].setdefault("default", [])
    elif isinstance(extra, dict):
        node["additionalProperties"] = structural(extra, defs, f"{path}{{}}")
        if "maxProperties" in schema:
            node["maxProperties"] = schema["maxProperties"]
    else:
        node["x-kubernetes-preserve-unknown-fields"] = True


def _part(model: type[Any], path: str) -> Schema:
    schema = model.model_json_schema(by_alias=True)
    return structural(schema, schema.get("$defs", {}), path)


def _crd(
    kind: str, plural: str, short: str, spec: Schema, status: Schema, columns: list[tuple[str, str, str, int]]
) -> Schema:
    version: Schema = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind_, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind_, path, priority in columns
        ],
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": spec,
                    "status": status,
                },
                **({"x-kubernetes-validations": RULES[""]} if kind == "ProdRLRun" else {}),
            }
        },
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
    return _crd("ProdRLRun", "prodrlruns", "prun", _part(RunSpec, "spec"), _part(RunStatus, "status"), RUN_COLUMNS)


def round_crd() -> Schema:
    """The CustomResourceDefinition of ProdRLRound; its spec is immutable."""
    spec = _part(RoundSpec, "roundspec")
    spec["x-kubernetes-validations"] = [
        {"rule": "self == oldSelf", "message": "a ProdRLRound's spec is frozen when the round begins"}
    ]
    return _crd("ProdRLRound", "prodrlrounds", "pround", spec, _part(RoundStatus, "status"), ROUND_COLUMNS)


def crds() -> dict[str, Schema]:
    """File name in ``crds/`` -> CustomResourceDefinition."""
    return {"prodrlruns.yaml": run_crd(), "prodrlrounds.yaml": round_crd()}


class _Dumper(yaml.SafeDumper):
    """No aliases: rules are shared objects here and must be written out."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render(crd: Schema) -> str:
    """The YAML text as committed."""
    header = "# Generated by `prodrl-operator crds`; edit operator/prodrl_operator/api instead.\n"
    return header + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120)
