"""What the API server checks and fills in for the built-in kinds, as far as the local environment needs it. Pure.

Called by ``store`` before a write. Names, labels, sizes and owner references are checked for every kind; Jobs,
Deployments and Services get their defaults and their immutable fields. Whether a pod can run on this machine is
``podspec``'s question.
"""

from __future__ import annotations

import base64
import re
import secrets
from typing import Any

from prodrl_operator.errors import InvalidError, UnsupportedError

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RFC1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_METADATA = frozenset(
    [
        "name",
        "generateName",
        "namespace",
        "labels",
        "annotations",
        "ownerReferences",
        "finalizers",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
    ]
)
_SPECIFIC = {
    "ConfigMap": "data binaryData immutable",
    "Secret": "data stringData type immutable",
    "Event": "action count eventTime firstTimestamp involvedObject lastTimestamp message reason related "
    "reportingComponent reportingInstance series source type",
}
_MAX_OBJECT = 1_500_000  # etcd's own limit on a request
_MAX_DATA = 1 << 20
_MAX_ANNOTATIONS = 256 << 10

GENERATION_KINDS = frozenset({"Deployment", "Job", "Pod", "PodDisruptionBudget", "NetworkPolicy"})
STATUS_KINDS = frozenset({"Deployment", "Job", "Pod", "Service", "PodDisruptionBudget"})


def normalize(manifest: Object, *, is_custom: bool) -> Object:
    """A private copy with the namespace filled in, nulls dropped (built-in kinds) and ``stringData`` encoded."""
    result: Object = copy(manifest) if is_custom else _without_nulls(manifest)
    metadata = result.setdefault("metadata", {})
    metadata.setdefault("namespace", "default")
    metadata.pop("managedFields", None)
    if "generateName" in metadata and "name" not in metadata:
        metadata["name"] = metadata["generateName"][:58] + secrets.token_hex(3)[:5]
    if result.get("kind") == "Secret":
        text = result.pop("stringData", None) or {}
        coded = {name: base64.b64encode(value.encode()).decode() for name, value in text.items()}
        if coded:
            result["data"] = result.get("data", {}) | coded
    return result


def copy(value: Any) -> Any:
    """A deep copy of JSON data; anything else is refused, so that no object is shared by reference."""
    if isinstance(value, dict):
        return {str(name): copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return str(value) if isinstance(value, str) else value
    raise InvalidError(f"manifest: only JSON data can be stored, got {value!r}; convert it first")


def check(obj: Object, size_bytes: int) -> None:
    """Raise InvalidError or UnsupportedError when the API server would refuse this object of any kind."""
    kind, metadata = obj["kind"], obj["metadata"]
    where = f"{kind} {metadata.get('namespace')}/{metadata.get('name')}"
    _check_name(where, kind, metadata)
    unknown = set(metadata) - _METADATA
    if unknown:
        raise InvalidError(f"{where}: unknown fields in metadata, got {sorted(unknown)!r}; remove them")
    _check_labels(where, metadata.get("labels", {}))
    for owner in metadata.get("ownerReferences", ()):
        missing = {"apiVersion", "kind", "name", "uid"} - {name for name, value in owner.items() if value}
        if missing:
            raise InvalidError(f"{where}: an owner reference lacks fields, got {owner!r}; set {sorted(missing)}")
    for finalizer in metadata.get("finalizers", ()):
        if "/" not in finalizer and finalizer not in ("orphan", "foregroundDeletion"):
            raise InvalidError(f"{where}: a finalizer must be qualified, got {finalizer!r}; write domain/name")
    if size_bytes > _MAX_OBJECT:
        raise InvalidError(f"{where}: is larger than {_MAX_OBJECT} bytes, got {size_bytes}; make it smaller")
    annotations = metadata.get("annotations", {})
    if sum(len(name) + len(value) for name, value in annotations.items()) > _MAX_ANNOTATIONS:
        raise InvalidError(f"{where}: annotations are larger than {_MAX_ANNOTATIONS} bytes; make them smaller")


def check_built_in(obj: Object, old: Object | None) -> None:
    """Raise InvalidError for what the built-in kind itself refuses."""
    kind, metadata = obj["kind"], obj["metadata"]
    where = f"{kind} {metadata['namespace']}/{metadata['name']}"
    allowed = set(_SPECIFIC.get(kind, "spec status").split()) | {"apiVersion", "kind", "metadata"}
    if set(obj) - allowed:
        raise InvalidError(f"{where}: unknown fields, got {sorted(set(obj) - allowed)!r}; remove them")
    if kind in ("ConfigMap", "Secret"):
        _check_data(where, obj, old)
    elif kind == "Job":
        _check_job(where, obj["spec"], old)
    elif kind == "Deployment":
        _check_deployment(where, obj["spec"], old)
    elif kind == "Service" and old and old["spec"].get("clusterIP") not in (None, obj["spec"].get("clusterIP")):
        raise InvalidError(f"{where}: spec.clusterIP is immutable, got {obj['spec'].get('clusterIP')!r}; leave it out")


def fill_defaults(obj: Object) -> None:
    """Fill in, in place, the defaults that the controllers here read."""
    spec = obj.get("spec", {})
    match obj["kind"]:
        case "Job":
            if "parallelism" not in spec and "completions" not in spec:
                spec["completions"] = 1
            for name, value in _JOB.items():
                spec.setdefault(name, value)
        case "Deployment":
            for name, value in _DEPLOYMENT.items():
                spec.setdefault(name, copy(value))
        case "Service":
            spec.setdefault("type", "ClusterIP")
            for port in spec.get("ports", ()):
                port.setdefault("protocol", "TCP")
                port.setdefault("targetPort", port["port"])
        case "Secret":
            obj.setdefault("type", "Opaque")
    pod = spec if obj["kind"] == "Pod" else spec.get("template", {}).get("spec")
    if isinstance(pod, dict):
        _default_pod(pod, "Never" if obj["kind"] == "Job" else "Always")


_JOB = {"parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": False}
_DEPLOYMENT = {
    "replicas": 1,
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
    "minReadySeconds": 0,
    "progressDeadlineSeconds": 600,
    "revisionHistoryLimit": 10,
}


def _default_pod(pod: Object, restart_policy: str) -> None:
    if restart_policy == "Always":  # a Job must say Never or OnFailure itself
        pod.setdefault("restartPolicy", restart_policy)
    pod.setdefault("terminationGracePeriodSeconds", 30)
    for container in [*pod.get("initContainers", ()), *pod.get("containers", ())]:
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
        for probe in (container.get(name) for name in ("startupProbe", "livenessProbe", "readinessProbe")):
            if probe is not None:
                for name, value in _PROBE.items():
                    probe.setdefault(name, value)


_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def _check_name(where: str, kind: str, metadata: Object) -> None:
    name, namespace = metadata.get("name"), metadata["namespace"]
    if not isinstance(name, str) or not name:
        raise InvalidError(f"{kind}: metadata.name is required, got {name!r}; set it")
    pattern, limit = (_RFC1035, 63) if kind == "Service" else (_SUBDOMAIN, 253)
    if len(name) > limit or not pattern.fullmatch(name):
        raise InvalidError(f"{where}: metadata.name must be a DNS name of at most {limit} characters, got {name!r}")
    if not _LABEL.fullmatch(namespace):
        raise InvalidError(f"{where}: metadata.namespace must be a DNS label, got {namespace!r}; correct it")


def _check_labels(where: str, labels: Object) -> None:
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        good_prefix = not slash or (len(prefix) <= 253 and _SUBDOMAIN.fullmatch(prefix))
        if not good_prefix or not _KEY.fullmatch(name):
            raise InvalidError(f"{where}: metadata.labels has an invalid key, got {key!r}; correct it")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            message = f"{where}: metadata.labels[{key!r}] must be 63 characters [A-Za-z0-9._-] at most, got {value!r}"
            raise InvalidError(message)


def _check_data(where: str, obj: Object, old: Object | None) -> None:
    data = obj.get("data", {})
    for name, value in data.items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name) or name in (".", "..") or name.startswith("../"):
            raise InvalidError(f"{where}: invalid key, got {name!r}; use letters, digits, '-', '_' and '.'")
        if not isinstance(value, str):
            raise InvalidError(f"{where}: data[{name!r}] must be text, got {type(value).__name__}; quote it")
        if obj["kind"] == "Secret":
            try:
                base64.b64decode(value, validate=True)
            except ValueError as error:
                raise InvalidError(f"{where}: data[{name!r}] must be base64: {error}; or use stringData") from error
    if sum(len(value) for value in data.values()) > _MAX_DATA:
        raise InvalidError(f"{where}: data is larger than {_MAX_DATA} bytes; split it")
    if old and old.get("immutable") and (old.get("data") != obj.get("data") or not obj.get("immutable")):
        raise InvalidError(f"{where}: is immutable; create another one")


def _check_job(where: str, spec: Object, old: Object | None) -> None:
    template = spec.get("template", {}).get("spec", {})
    if template.get("restartPolicy") not in ("Never", "OnFailure"):
        got = template.get("restartPolicy")
        raise InvalidError(f"{where}: spec.template.spec.restartPolicy must be Never or OnFailure, got {got!r}")
    if spec.get("podFailurePolicy") and template["restartPolicy"] != "Never":
        raise InvalidError(f"{where}: podFailurePolicy needs restartPolicy Never, got {template['restartPolicy']!r}")
    if spec["completionMode"] == "Indexed" and spec.get("completions") is None:
        raise InvalidError(f"{where}: spec.completions is required when completionMode is Indexed; set it")
    for name in ("template", "completions", "completionMode", "podFailurePolicy", "selector"):
        if old and old["spec"].get(name) != spec.get(name):
            raise InvalidError(f"{where}: spec.{name} is immutable, got {spec.get(name)!r}; create another Job")


def _check_deployment(where: str, spec: Object, old: Object | None) -> None:
    selector = spec.get("selector", {})
    if "matchExpressions" in selector:
        raise UnsupportedError(f"{where}: spec.selector.matchExpressions is not implemented locally; use matchLabels")
    wanted, labels = selector.get("matchLabels", {}), spec["template"].get("metadata", {}).get("labels", {})
    if not wanted or not wanted.items() <= labels.items():
        raise InvalidError(
            f"{where}: spec.selector does not match the template's labels, got {wanted!r}; make it equal"
        )
    if old and old["spec"]["selector"] != selector:
        raise InvalidError(f"{where}: spec.selector is immutable, got {selector!r}; create another Deployment")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return copy(value)
