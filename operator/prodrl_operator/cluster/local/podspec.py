"""A pod as processes of this machine: what is understood, and how texts are translated. Pure.

Used by ``store`` (``check`` as admission) and ``runner`` (``render``). The translation of a container:

- ``image`` is ignored: the command runs in the environment that the operator runs in, its ``bin`` first on PATH.
  The command must be explicit.
- A mountPath does not exist on this machine. Wherever it stands as a path or the beginning of one in command, args,
  env values, workingDir and exec probes, the folder of the volume replaces it. So does the container's file for its
  termination message. Texts of ConfigMaps keep their paths: they may be the user's own.
- All pods share one network: each has a loopback address of its own, which replaces ``0.0.0.0``. There is no DNS:
  ``SERVICE.NAMESPACE.svc`` (with or without ``.cluster.local``) and ``http://SERVICE`` become the Service's address,
  ``POD_HOSTNAME.SERVICE.NAMESPACE.svc`` the address of the Indexed Job's pod; in texts of ConfigMaps, too.
- Accepted without effect: resources and sizes of volumes (nothing is limited), security contexts, service accounts,
  placement (node selectors, tolerations, affinity, spreading, priorities, runtime classes, device claims), pull
  settings, readOnly mounts. Nothing isolates these processes; NetworkPolicies and disruption budgets are stored only.

Everything else is refused with UnsupportedError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prodrl_operator.errors import UnsupportedError
from prodrl_operator.names import LABEL_QUEUE

Object = dict[str, Any]

_WITHOUT_EFFECT = frozenset(
    [
        "affinity",
        "automountServiceAccountToken",
        "dnsPolicy",
        "enableServiceLinks",
        "hostNetwork",
        "imagePullSecrets",
        "nodeSelector",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "resourceClaims",
        "runtimeClassName",
        "schedulerName",
        "securityContext",
        "serviceAccount",
        "serviceAccountName",
        "tolerations",
        "topologySpreadConstraints",
    ]
)
_POD_FIELDS = _WITHOUT_EFFECT | frozenset(
    [
        "containers",
        "hostname",
        "initContainers",
        "nodeName",
        "restartPolicy",
        "subdomain",
        "terminationGracePeriodSeconds",
        "volumes",
    ]
)
_CONTAINER_FIELDS = frozenset(
    [
        "name",
        "image",
        "command",
        "args",
        "env",
        "envFrom",
        "ports",
        "volumeMounts",
        "workingDir",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "lifecycle",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "imagePullPolicy",
        "resources",
        "securityContext",
    ]
)
_VOLUME_KINDS = frozenset({"configMap", "secret", "emptyDir", "persistentVolumeClaim", "hostPath"})
_MOUNT_FIELDS = frozenset({"name", "mountPath", "subPath", "readOnly"})
_PROBE_KINDS = frozenset({"httpGet", "tcpSocket", "exec"})
_PROBE_FIELDS = _PROBE_KINDS | frozenset(
    ["initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold"]
)
_JOB_FIELDS = frozenset(
    [
        "template",
        "parallelism",
        "completions",
        "completionMode",
        "backoffLimit",
        "podFailurePolicy",
        "activeDeadlineSeconds",
        "suspend",
        "ttlSecondsAfterFinished",
        "podReplacementPolicy",
    ]
)
_DEPLOYMENT_FIELDS = frozenset(
    [
        "template",
        "selector",
        "replicas",
        "strategy",
        "minReadySeconds",
        "progressDeadlineSeconds",
        "revisionHistoryLimit",
    ]
)
_SERVICE_FIELDS = frozenset(
    [
        "selector",
        "ports",
        "type",
        "clusterIP",
        "clusterIPs",
        "publishNotReadyAddresses",
        "ipFamilies",
        "ipFamilyPolicy",
        "internalTrafficPolicy",
    ]
)
_VARIABLE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


def check(obj: Object) -> None:
    """Raise UnsupportedError for a Job, Deployment, Pod or Service that this machine cannot run as it says."""
    where = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
    spec = obj.get("spec", {})
    match obj["kind"]:
        case "Job":
            _refuse(where, "spec", set(spec) - _JOB_FIELDS)
            if LABEL_QUEUE in obj["metadata"].get("labels", {}):
                raise UnsupportedError(f"{where}: there is no Kueue here that would admit it; leave out queueName")
            for rule in (spec.get("podFailurePolicy") or {}).get("rules", ()):
                if rule["action"] not in ("FailJob", "Ignore", "Count"):
                    raise UnsupportedError(f"{where}: podFailurePolicy action {rule['action']!r} is not run locally")
            _check_pod(where, spec["template"]["spec"])
        case "Deployment":
            _refuse(where, "spec", set(spec) - _DEPLOYMENT_FIELDS)
            if spec["template"]["spec"].get("restartPolicy", "Always") != "Always":
                raise UnsupportedError(f"{where}: a Deployment's restartPolicy must be Always")
            _check_pod(where, spec["template"]["spec"])
        case "Pod":
            _check_pod(where, spec)
        case "Service":
            _refuse(where, "spec", set(spec) - _SERVICE_FIELDS)
            if spec.get("type", "ClusterIP") != "ClusterIP":
                raise UnsupportedError(f"{where}: spec.type {spec['type']!r} is not served locally; use ClusterIP")
            if any(port.get("protocol", "TCP") != "TCP" for port in spec.get("ports", ())):
                raise UnsupportedError(f"{where}: only TCP ports are served locally")


def _check_pod(where: str, spec: Object) -> None:
    _refuse(where, "pod spec", set(spec) - _POD_FIELDS)
    for volume in spec.get("volumes", ()):
        _refuse(where, f"volume {volume['name']}", set(volume) - _VOLUME_KINDS - {"name"})
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        here = f"container {container.get('name')}"
        _refuse(where, here, set(container) - _CONTAINER_FIELDS)
        for mount in container.get("volumeMounts", ()):
            _refuse(where, f"{here} volumeMounts", set(mount) - _MOUNT_FIELDS)
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            _refuse(where, f"{here} {name}", set(container.get(name) or {}) - _PROBE_FIELDS)
        lifecycle = container.get("lifecycle") or {}
        _refuse(where, f"{here} lifecycle", set(lifecycle) - {"preStop"})
        _refuse(where, f"{here} preStop", set(lifecycle.get("preStop") or {}) - {"exec", "sleep"})
        for env in container.get("env", ()):
            source = env.get("valueFrom") or {}
            _refuse(where, f"{here} env {env['name']}", set(source) - {"fieldRef", "secretKeyRef", "configMapKeyRef"})


def _refuse(where: str, part: str, unknown: set[str]) -> None:
    if unknown:
        raise UnsupportedError(f"{where}: {part} has fields that the local environment lacks: {sorted(unknown)}")


@dataclass(frozen=True)
class Translation:
    """How texts of one container become texts of this machine."""

    paths: Mapping[str, str] = field(default_factory=dict)
    """Path in the container -> path here."""
    pod_ip: str = "127.0.0.1"
    namespace: str = "default"
    resolve: Callable[[str, str, str | None], str | None] = lambda service, namespace, host: None
    """(service, namespace, pod hostname or None) -> address, or None when there is no such Service."""

    def text(self, value: str) -> str:
        """Translate paths, the wildcard address and Service names."""
        value = self.hosts(re.sub(r"(?<![\d.])0\.0\.0\.0(?![\d.])", self.pod_ip, value))
        if not self.paths:
            return value
        ordered = sorted((path.rstrip("/") or "/" for path in self.paths), key=len, reverse=True)
        start = r"(?:(?<=://)|(?<![\w./~-]))"
        pattern = f"{start}({'|'.join(map(re.escape, ordered))})(?![\\w.-])"
        lookup = {path.rstrip("/") or "/": target for path, target in self.paths.items()}
        return re.sub(pattern, lambda match: lookup[match[1]], value)

    def hosts(self, value: str) -> str:
        """Translate Service names only."""
        label = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"

        def qualified(match: re.Match[str]) -> str:
            return self.resolve(match["service"], match["namespace"], match["host"]) or match[0]

        def short(match: re.Match[str]) -> str:
            return self.resolve(match["service"], match["namespace"] or self.namespace, None) or match[0]

        names = rf"(?:(?P<host>{label})\.)?(?P<service>{label})\.(?P<namespace>{label})\.svc(?:\.cluster\.local)?"
        value = re.sub(rf"(?<![\w.-]){names}(?![\w-]|\.\w)", qualified, value)
        names = rf"(?P<service>{label})(?:\.(?P<namespace>{label}))?"
        return re.sub(rf"(?:(?<=http://)|(?<=https://)){names}(?![\w-]|\.\w)", short, value)


def expand(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` and ``$$`` as Kubernetes expands them: unknown names stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _VARIABLE.sub(value, text)


def environment(
    pod: Object, container: Object, pod_ip: str, read: Callable[[str, str], Mapping[str, str] | None]
) -> Iterator[tuple[str, str]]:
    """The declared environment, expanded in order. ``read(kind, name)`` gives a ConfigMap's or Secret's texts.

    Raises:
        KeyError: A referenced object or key is missing and not optional (the container waits for it).
    """
    known: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        kind, ref = ("Secret", source["secretRef"]) if "secretRef" in source else ("ConfigMap", source["configMapRef"])
        data = read(kind, ref["name"])
        if data is None and not ref.get("optional"):
            raise KeyError(f"{kind} {ref['name']} not found")
        known |= {source.get("prefix", "") + name: value for name, value in (data or {}).items()}
    for item in container.get("env", ()):
        value: str | None = expand(item.get("value", ""), known)
        if item.get("valueFrom"):
            value = _value_from(pod, item["valueFrom"], pod_ip, read)
        if value is not None:
            known[item["name"]] = value
    yield from known.items()


def _value_from(
    pod: Object, source: Object, pod_ip: str, read: Callable[[str, str], Mapping[str, str] | None]
) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"], pod_ip)
    kind, ref = ("Secret", source.get("secretKeyRef")) if "secretKeyRef" in source else ("ConfigMap", None)
    ref = ref or source["configMapKeyRef"]
    value = (read(kind, ref["name"]) or {}).get(ref["key"])
    if value is None and not ref.get("optional"):
        raise KeyError(f"{kind} {ref['name']} has no key {ref['key']}")
    return value


def _field(pod: Object, path: str, pod_ip: str) -> str:
    metadata = pod["metadata"]
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": "127.0.0.1",
        "spec.nodeName": "local",
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
    }
    if path not in values:
        raise UnsupportedError(f"Pod {metadata['name']}: fieldRef {path!r} is not implemented locally")
    return str(values[path])
