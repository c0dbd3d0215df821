"""Pod templates: what every workload has in common (restricted security, volumes, environment)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prodrl.config import StoreConfig
from prodrl_operator.api.run import RunSpec
from prodrl_operator.api.workloads import Cache, CachingPodSettings, PodSettings
from prodrl_operator.builders.patching import merged

Object = dict[str, Any]

CONFIG_DIR = "/etc/prodrl"
CREDENTIALS_DIR = "/etc/prodrl-credentials"
SCRATCH_DIR = "/scratch"
CACHE_DIR = "/cache"
SHM_DIR = "/dev/shm"  # noqa: S108  (the kernel's name for it)
RESULT_PATH = "/dev/termination-log"


@dataclass(frozen=True)
class Mount:
    """A volume and where it is mounted."""

    name: str
    path: str
    source: Object
    read_only: bool = True


@dataclass(frozen=True)
class Container:
    """One container of a pod."""

    name: str
    image: str
    command: list[str]
    mounts: list[Mount]
    env: list[Object] = field(default_factory=list)
    resources: Mapping[str, Any] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    probes: Object = field(default_factory=dict)
    pre_stop_seconds: int = 0
    """Before it is told to stop."""


@dataclass(frozen=True)
class Pod:
    """What of a pod is not in its containers."""

    restart: str = "Always"
    init: list[Container] = field(default_factory=list)
    more: Object = field(default_factory=dict)
    """Further fields of the pod's spec."""


def store_config(spec: RunSpec) -> StoreConfig:
    """The run's store as the runtime reads it; credentials are named by environment, not here."""
    return StoreConfig(uri=spec.storage.uri, endpoint_url=spec.storage.endpoint_url, region=spec.storage.region)


def config_mount(config_map: str) -> Mount:
    """The process's configuration."""
    return Mount("config", CONFIG_DIR, {"configMap": {"name": config_map}})


def scratch_mount() -> Mount:
    """Room for temporary files; the root file system is read-only."""
    return Mount("scratch", SCRATCH_DIR, {"emptyDir": {}}, read_only=False)


def shm_mount(settings: PodSettings, default: str | None) -> list[Mount]:
    """Shared memory between the processes of a pod; Kubernetes gives 64 MiB, which engines and NCCL outgrow."""
    size = settings.shm_size or default
    if size is None:
        return []
    return [Mount("shm", SHM_DIR, {"emptyDir": {"medium": "Memory", "sizeLimit": size}}, read_only=False)]


def cache_mount(settings: CachingPodSettings) -> Mount:
    """Policies, Hugging Face files and compiled kernels."""
    return Mount("cache", CACHE_DIR, _cache_source(settings.cache), read_only=False)


def _cache_source(cache: Cache) -> Object:
    if cache.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim.claim_name}}
    if cache.host_path is not None:
        # A folder that the kubelet makes would be root's: the user's own, or a pod that says what is missing.
        return {"hostPath": {"path": cache.host_path.path, "type": "Directory"}}
    limit = cache.empty_dir.size_limit if cache.empty_dir else None
    return {"emptyDir": {"sizeLimit": limit} if limit else {}}


def cache_environment() -> list[Object]:
    """Where libraries look for their caches."""
    folders = {
        "HF_HOME": "huggingface",
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
        "TRITON_CACHE_DIR": "triton",
    }
    return [{"name": name, "value": f"{CACHE_DIR}/{folder}"} for name, folder in folders.items()]


def credentials_mounts(spec: RunSpec) -> list[Mount]:
    """The store's credentials, where the run names a Secret."""
    if spec.storage.secret_ref is None:
        return []
    source = {"secret": {"secretName": spec.storage.secret_ref.name, "defaultMode": 0o440}}
    return [Mount("credentials", CREDENTIALS_DIR, source)]


def environment(spec: RunSpec, settings: PodSettings, more: Sequence[Object] = ()) -> list[Object]:
    """Variables of every container: who it is, where scratch and credentials are, ``more``, then the user's own.

    A name is there once: the user's value replaces a default.
    """
    env: list[Object] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": SCRATCH_DIR},
        {"name": "TMPDIR", "value": SCRATCH_DIR},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "HF_HUB_OFFLINE", "value": "1"},
    ]
    if spec.storage.secret_ref is not None:
        env.append({"name": "PRODRL_CREDENTIALS_DIR", "value": CREDENTIALS_DIR})
    user: list[Object] = [dict(item) for item in settings.env]
    return list({item["name"]: item for item in [*env, *more, *user]}.values())


def container(item: Container) -> Object:
    """The container's manifest, restricted as Pod Security asks."""
    manifest: Object = {
        "name": item.name,
        "image": item.image,
        "command": item.command,
        "env": item.env,
        "terminationMessagePath": RESULT_PATH,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": m.name, "mountPath": m.path, **({"readOnly": True} if m.read_only else {})} for m in item.mounts
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **item.probes,
    }
    if item.resources:
        manifest["resources"] = dict(item.resources)
    if item.pre_stop_seconds:
        # By the image's own program: the kubelet's sleep is not in every version that we support.
        manifest["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(item.pre_stop_seconds)]}}}
    if item.ports:
        manifest["ports"] = [{"name": name, "containerPort": port} for name, port in item.ports.items()]
    return manifest


def pod_template(
    settings: PodSettings, its_labels: dict[str, str], containers: list[Container], pod: Pod | None = None
) -> Object:
    """The pod's template: no API token, non-root, the user's wishes passed through, the user's patch last."""
    pod = pod or Pod()
    mounts = {m.name: m for item in [*pod.init, *containers] for m in item.mounts}
    spec: Object = {
        "restartPolicy": pod.restart,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            # Changing the owner of every file of a large cache at each start takes minutes.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(item) for item in containers],
        "volumes": [{"name": m.name, **m.source} for m in mounts.values()],
        **_placement(settings, its_labels),
        **pod.more,
    }
    if pod.init:
        spec["initContainers"] = [container(item) for item in pod.init]
    metadata: Object = {"labels": {**settings.pod_labels, **its_labels}}
    if settings.pod_annotations:
        metadata["annotations"] = settings.pod_annotations
    return {"metadata": metadata, "spec": merged(spec, settings.pod_spec_patch or {})}


def _placement(settings: PodSettings, its_labels: dict[str, str]) -> Object:
    """What the user wishes of the scheduler; nothing is named that was not set."""
    own = {"labelSelector": {"matchLabels": its_labels}}
    wishes: Object = {
        "nodeSelector": settings.node_selector,
        "tolerations": settings.tolerations,
        "affinity": settings.affinity,
        "topologySpreadConstraints": [own | item for item in settings.topology_spread_constraints],
        "runtimeClassName": settings.runtime_class_name,
        "priorityClassName": settings.priority_class_name,
        "serviceAccountName": settings.service_account_name,
        "imagePullSecrets": [{"name": ref.name} for ref in settings.image_pull_secrets],
        "resourceClaims": settings.resource_claims,
    }
    return {name: value for name, value in wishes.items() if value}
