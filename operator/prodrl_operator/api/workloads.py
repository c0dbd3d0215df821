"""What a run may set of its workloads' pods. Imported by ``run``; ``builders`` puts it into manifests.

A small part of a pod template, typed, and one way out for the rest: ``podSpecPatch``. What the operator needs of a pod
(its names, labels, commands, how results come back, no API token) can't be changed; ``patch_faults`` says what.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from prodrl_operator.api.model import Api, LabelKey, LabelValue, LocalRef, ObjectName, Text, worded
from prodrl_operator.api.placement import Affinity, PodClaim, TopologySpread
from prodrl_operator.api.pods import EnvVar, Resources, Toleration

Size = Annotated[
    str,
    StringConstraints(pattern="^[1-9][0-9]*([kMGT]|[KMGT]i)?$", max_length=16),
    worded("must be a whole number of bytes, for example 512k, 16G or 16Gi"),
]
"""A number of bytes as Kubernetes writes it: ``8Gi``."""

QueueName = Annotated[ObjectName, StringConstraints(max_length=63)]
"""Of a LocalQueue, which is a label's value too."""

OPERATOR_PREFIXES = ("prodrl.dev/", "app.kubernetes.io/", "batch.kubernetes.io/")
"""Keys of labels and annotations that are the operator's, or the Job controller's, to set."""
QUEUE_KEY = "kueue.x-k8s.io/queue-name"
"""On a pod it would be queued a second time, beside its Job."""

OPERATOR_CONTAINERS = frozenset({"gateway", "fetch", "server", "step"})
_POD_FIELDS = frozenset(
    {
        "automountServiceAccountToken",
        "enableServiceLinks",
        "hostname",
        "nodeName",
        "restartPolicy",
        "serviceAccount",
        "serviceAccountName",
        "setHostnameAsFQDN",
        "subdomain",
    }
)
_CONTAINER_FIELDS = frozenset({"args", "command", "terminationMessagePath", "terminationMessagePolicy"})
_PROBED_CONTAINERS = frozenset({"gateway", "server"})
_PROBES = frozenset({"livenessProbe", "readinessProbe", "startupProbe"})
"""A pod that is Ready serves the policy of its round: promotions are decided by it."""
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists that merge item by item, and the field that tells items apart; every other list is replaced."""


def patch_faults(patch: dict[str, Any]) -> list[str]:
    """What of a pod spec patch would break the operator; empty: nothing."""
    found = [f"{name}: is the operator's; leave it out" for name in sorted(_POD_FIELDS & patch.keys())]
    found += [
        f"{path}: null is lost on its way through kubectl; write {{$patch: delete}}" for path in _nulls(patch, "")
    ]
    found += _list_faults(patch, "")
    if found and any("must be a list" in fault for fault in found):
        return found
    for item in patch.get("volumes") or []:
        found += _volume_faults(item)
    for field in ("containers", "initContainers"):
        for item in patch.get(field) or []:
            where = f"{field}[{item['name']}]"
            found += _list_faults(item, f"{where}.")
            if item["name"] in OPERATOR_CONTAINERS:
                found += _container_faults(item, where)
    return found


def _list_faults(owner: dict[str, Any], where: str) -> list[str]:
    found = []
    for field in sorted(owner.keys() & MERGE_KEYS.keys()):
        items, key = owner[field], MERGE_KEYS[field]
        is_good = isinstance(items, list) and all(isinstance(item, dict) and item.get(key) for item in items)
        if not is_good:
            found.append(f"{where}{field}: must be a list whose items have {key}, got {items!r:.80}; they merge by it")
    return found


def _nulls(value: Any, path: str) -> list[str]:
    if value is None:
        return [path]
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in _nulls(item, f"{path}.{name}".lstrip("."))]
    if isinstance(value, list):
        return [found for position, item in enumerate(value) for found in _nulls(item, f"{path}[{position}]")]
    return []


def _volume_faults(item: dict[str, Any]) -> list[str]:
    projected = item.get("projected")
    sources = projected.get("sources") if isinstance(projected, dict) else None
    if not isinstance(sources, list) or not any(_is_api_token(source) for source in sources):
        return []
    return [
        f"volumes[{item['name']}].projected.sources: serviceAccountToken without an audience is a token of the API, "
        "which no workload holds; name whom it is for, such as audience: sts.amazonaws.com"
    ]


def _is_api_token(source: object) -> bool:
    """A token for somebody else, who verifies it, opens nothing of the cluster."""
    token = source.get("serviceAccountToken") if isinstance(source, dict) else None
    if token is None:
        return False
    audience = token.get("audience") if isinstance(token, dict) else None
    return not audience or "kubernetes" in str(audience)


def _container_faults(item: dict[str, Any], where: str) -> list[str]:
    found = [f"{where}.{name}: is the operator's; leave it out" for name in sorted(_CONTAINER_FIELDS & item.keys())]
    if item["name"] in _PROBED_CONTAINERS:
        found += [
            f"{where}.{name}: is the operator's, for which Ready means that the pod serves its policy; leave it out"
            for name in sorted(_PROBES & item.keys())
        ]
    if "$patch" in item:
        found.append(f"{where}: cannot be removed; the operator needs it")
    for entry in item.get("env") or []:
        if isinstance(entry, dict) and str(entry.get("name", "")).startswith(("PRODRL_", "POD_")):
            found.append(f"{where}.env[{entry['name']}]: names that begin with PRODRL_ and POD_ are the operator's")
    return found


def _checked(patch: dict[str, Any] | None) -> dict[str, Any] | None:
    faults = patch_faults(patch) if patch else []
    if faults:
        raise ValueError("; ".join(faults))
    return patch


PodSpecPatch = Annotated[
    dict[str, Any],
    AfterValidator(_checked),
    Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
"""Free in the schema: what it may hold is the pod API's own business, save what ``patch_faults`` refuses."""


class EmptyDirCache(Api):
    """A cache that goes with its pod."""

    size_limit: Size | None = None
    """Largest size; absent: what the node has."""


class ClaimCache(Api):
    """A cache on a PersistentVolumeClaim of the run's namespace."""

    claim_name: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """The claim; with several nodes it must be ReadWriteMany."""


class HostPathCache(Api):
    """A cache on each node. The baseline and restricted Pod Security levels forbid hostPath."""

    path: Annotated[
        str, StringConstraints(pattern="^/[^:]+$", max_length=1024), worded("must begin with '/' and hold no ':'")
    ]
    """A folder of the node that exists and that user 10001 may write."""


class Cache(Api):
    """Where policies, Hugging Face files and compiled kernels lie; at most one of the three. None: emptyDir."""

    empty_dir: EmptyDirCache | None = None
    """Each pod fetches its policy."""
    persistent_volume_claim: ClaimCache | None = None
    """Pods that share the claim fetch a policy once."""
    host_path: HostPathCache | None = None
    """Pods of a node fetch a policy once."""

    @property
    def is_shared(self) -> bool:
        """Whether what is in it outlives a pod."""
        return self.persistent_volume_claim is not None or self.host_path is not None


class PodSettings(Api):
    """The small part of a pod template that every workload takes."""

    image: Text | None = None
    """Container image; absent: the operator's default for that workload."""
    image_pull_secrets: Annotated[list[LocalRef], Field(max_length=16)] = Field(default_factory=list)
    """Secrets to pull images with."""
    resources: Resources = Field(default_factory=Resources)
    """``requests``, ``limits`` and ``claims`` as in a container."""
    resource_claims: Annotated[list[PodClaim], Field(max_length=16)] = Field(default_factory=list)
    """Devices by dynamic resource allocation; ``resources.claims`` hands them to the main container."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    """As in a pod."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """As in a pod."""
    affinity: Affinity | None = None
    """As in a pod."""
    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = Field(default_factory=list)
    """As in a pod."""
    env: Annotated[list[EnvVar], Field(max_length=128)] = Field(default_factory=list)
    """Further environment variables, as in a container."""
    runtime_class_name: ObjectName | None = None
    """As in a pod."""
    priority_class_name: ObjectName | None = None
    """As in a pod."""
    service_account_name: ObjectName | None = None
    """As in a pod, for a cloud's workload identity (then without ``storage.secretRef``); its API token stays out."""
    pod_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Further labels of the pods."""
    pod_annotations: Annotated[dict[LabelKey, Text], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the pods, for example ``karpenter.sh/do-not-disrupt: "true"``."""
    shm_size: Size | None = None
    """Size of /dev/shm, which counts as memory; absent: 8Gi for servers and training on several processes."""
    pod_spec_patch: PodSpecPatch | None = None
    """Merged into the pod's spec last, as a strategic merge patch: containers, initContainers, volumes, env and ports
    by name, volumeMounts by mountPath; ``$patch: delete`` removes an object or an item. The operator's containers are
    ``server`` and ``fetch`` (serving), ``step`` (Jobs) and ``gateway``."""


class CachingPodSettings(PodSettings):
    """The same with a cache, for pods that load models."""

    cache: Cache = Cache()
    """Where policies, Hugging Face files and compiled kernels lie."""


class StepSettings(CachingPodSettings):
    """The pods of a Job."""

    queue_name: QueueName | None = None
    """LocalQueue of Kueue that admits the Job; absent: it starts at once."""
