"""Validation of our own kinds against their CRDs, as the API server does it. Used by ``store``.

Of a CRD's ``openAPIV3Schema``: defaults are filled in, unknown fields refused (``fieldValidation=Strict``), types and
bounds checked by jsonschema, and the ``x-kubernetes-validations`` evaluated by a CEL library, transition rules
(``oldSelf``) included. Kubernetes' own CEL extensions (quantity, url, ip, regex find ...) are not there: a rule that
uses one is refused when the CRD is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import cel
import jsonschema

from prodrl_operator.cluster.local import applying
from prodrl_operator.errors import InvalidError, UnsupportedError

_OPERATORS = frozenset({"has", "all", "exists", "exists_one", "map", "filter"})
_FUNCTIONS = frozenset(
    [
        "size",
        "matches",
        "contains",
        "startsWith",
        "endsWith",
        "int",
        "uint",
        "double",
        "string",
        "bool",
        "bytes",
        "duration",
        "timestamp",
        "type",
        "dyn",
        "max",
        "min",
        "getFullYear",
        "getMonth",
        "getDate",
        "getDayOfMonth",
        "getDayOfWeek",
        "getDayOfYear",
        "getHours",
        "getMinutes",
        "getSeconds",
        "getMilliseconds",
    ]
)
_BLOCKING = frozenset({"anyOf", "enum", "maxItems", "maxLength", "maxProperties", "required", "type"})
"""What rules may presume; of a pattern or a bound that is broken a rule may know better words."""
_ROOT = frozenset({"apiVersion", "kind", "metadata"})
_FORMATS = jsonschema.FormatChecker(formats=())


def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value.replace("Z", "+00:00")).tzinfo is not None


_FORMATS.checks("date-time", raises=ValueError)(_is_date_time)


@dataclass(frozen=True)
class _Rule:
    source: str
    message: str
    is_transition: bool
    program: Any
    field_path: str


@dataclass
class Schema:
    """The schema of one served version."""

    api_version: str
    kind: str
    has_status: bool
    root: dict[str, Any]
    list_keys: applying.ListKeys
    _validator: Any = None
    _rules: dict[int, list[_Rule]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compile once."""
        self._validator = jsonschema.Draft4Validator(_to_json_schema(self.root), format_checker=_FORMATS)
        self._compile(self.root)

    def fill_defaults(self, obj: dict[str, Any]) -> dict[str, Any]:
        """A copy with the schema's defaults."""
        filled: dict[str, Any] = _default(self.root, obj)
        return filled

    def check(self, obj: dict[str, Any], old: dict[str, Any] | None) -> None:
        """Raise InvalidError that lists every fault of ``obj``; ``old`` is what it replaces."""
        faults = [f"{path}: unknown field" for path in _unknown(self.root, obj, "", is_root=True)]
        faults += _duplicates(self.root, obj, "")
        errors = sorted(self._validator.iter_errors(obj), key=lambda error: list(map(str, error.absolute_path)))
        is_blocked = bool(faults) or any(error.validator in _BLOCKING for error in errors)
        faults += [f"{_json_path(error.absolute_path)}: {error.message}" for error in errors]
        if not is_blocked:
            faults += self._broken_rules(self.root, obj, old, "")
        if faults:
            name = obj["metadata"].get("name")
            raise InvalidError(f"{self.kind} {name}: {'; '.join(faults)}; correct the manifest")

    def _compile(self, node: dict[str, Any]) -> None:
        for rule in node.get("x-kubernetes-validations", ()):
            self._rules.setdefault(id(node), []).append(_compile_rule(rule))
        for below in _subschemas(node):
            self._compile(below)

    def _broken_rules(self, node: dict[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
        for rule in self._rules.get(id(node), ()):
            if rule.is_transition and old is None:
                continue
            fault = _evaluate(rule, value, old)
            if fault:
                yield f"{(path + rule.field_path).lstrip('.') or '<root>'}: {fault}"
        if isinstance(value, dict):
            for name, child in value.items():
                below = node.get("properties", {}).get(name) or node.get("additionalProperties")
                if isinstance(below, dict):
                    was = old.get(name) if isinstance(old, dict) else None
                    yield from self._broken_rules(below, child, was, f"{path}.{name}".lstrip("."))
        elif isinstance(value, list) and isinstance(node.get("items"), dict):
            yield from self._broken_items(node, value, old, path)

    def _broken_items(self, node: dict[str, Any], value: list[Any], old: Any, path: str) -> Iterator[str]:
        keys = tuple(node.get("x-kubernetes-list-map-keys", ()))
        was = {applying.identity(item, keys): item for item in old} if keys and isinstance(old, list) else {}
        for index, item in enumerate(value):
            before = was.get(applying.identity(item, keys)) if keys else None
            yield from self._broken_rules(node["items"], item, before, f"{path}[{index}]")


def load(crd: dict[str, Any]) -> list[Schema]:
    """The served versions of a CustomResourceDefinition."""
    kind = crd["spec"]["names"]["kind"]
    return [
        Schema(
            api_version=f"{crd['spec']['group']}/{version['name']}",
            kind=kind,
            has_status="status" in version.get("subresources", {}),
            root=version["schema"]["openAPIV3Schema"],
            list_keys=applying.schema_list_keys(version["schema"]["openAPIV3Schema"]),
        )
        for version in crd["spec"]["versions"]
        if version["served"]
    ]


def _compile_rule(rule: dict[str, Any]) -> _Rule:
    source = rule["rule"]
    if "messageExpression" in rule or "optionalOldSelf" in rule:
        raise UnsupportedError(
            f"CEL rule {source!r}: messageExpression and optionalOldSelf are not implemented locally"
        )
    try:
        program = cel.compile(source)
    except ValueError as error:
        raise UnsupportedError(f"CEL rule {source!r}: cannot be compiled locally: {error}") from error
    names = {name for name in program.functions() if name.isidentifier()}
    unknown = names - _FUNCTIONS - _OPERATORS
    if unknown:
        raise UnsupportedError(f"CEL rule {source!r}: uses {sorted(unknown)}, which the local environment lacks")
    message, is_transition = rule.get("message", f"failed rule: {source}"), "oldSelf" in program.variables()
    return _Rule(source, message, is_transition, program, rule.get("fieldPath", ""))


def _evaluate(rule: _Rule, value: Any, old: Any) -> str | None:
    context = {"self": value} | ({"oldSelf": old} if rule.is_transition else {})
    try:
        result = rule.program.execute(context)
    except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        return f"rule {rule.source!r} could not be evaluated: {error}"
    return None if result is True else rule.message


def _subschemas(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from node.get("properties", {}).values()
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield node[name]


def _to_json_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes' dialect as JSON Schema draft 4, which OpenAPI 3.0 follows."""
    result = {name: value for name, value in node.items() if not name.startswith("x-") and name != "default"}
    if "properties" in result:
        result["properties"] = {name: _to_json_schema(below) for name, below in result["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(result.get(name), dict):
            result[name] = _to_json_schema(result[name])
    if node.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if result.pop("nullable", False) and "type" in result:
        result["type"] = [result["type"], "null"]
    if "required" in result and not result["required"]:
        del result["required"]
    return result


def _default(node: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict):
        properties = node.get("properties", {})
        filled = dict(value)
        for name, below in properties.items():
            if "default" in below and (name not in filled or (filled[name] is None and not below.get("nullable"))):
                filled[name] = below["default"]
        additional = node.get("additionalProperties")
        extra = additional if isinstance(additional, dict) else {}
        return {name: _default(properties.get(name, extra), item) for name, item in filled.items()}
    if isinstance(value, list):
        return [_default(node.get("items", {}), item) for item in value]
    return value


def _unknown(node: dict[str, Any], value: Any, path: str, *, is_root: bool = False) -> Iterator[str]:
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict):
        properties, additional = node.get("properties", {}), node.get("additionalProperties")
        for name, child in value.items():
            if is_root and name in _ROOT:
                continue
            below = properties.get(name, additional)
            here = f"{path}.{name}".lstrip(".")
            if below is None or below is False:
                yield here
            elif isinstance(below, dict):
                yield from _unknown(below, child, here)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(node.get("items", {}), item, f"{path}[{index}]")


def _duplicates(node: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """Items of merged lists that have the same key."""
    if isinstance(value, dict):
        for name, child in value.items():
            below = node.get("properties", {}).get(name) or node.get("additionalProperties")
            if isinstance(below, dict):
                yield from _duplicates(below, child, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys, seen = tuple(node.get("x-kubernetes-list-map-keys", ())), set()
        for index, item in enumerate(value):
            if node.get("x-kubernetes-list-type") in ("map", "set"):
                identity = applying.identity(item, keys)
                if identity in seen:
                    yield f"{path}[{index}]: Duplicate value: {identity!r}"
                seen.add(identity)
            yield from _duplicates(node.get("items", {}), item, f"{path}[{index}]")


def _json_path(parts: Any) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".") or "<root>"
