"""Pod templates: what every workload has in common (restricted security, volumes, environment)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prodrl.config import StoreConfig
from prodrl_operator.api.run import PodSettings, RunSpec

Object = dict[str, Any]

CONFIG_DIR = "/etc/prodrl"
CREDENTIALS_DIR = "/etc/prodrl-credentials"
SCRATCH_DIR = "/scratch"
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
    resources: Object = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    probes: Object = field(default_factory=dict)


def store_config(spec: RunSpec) -> StoreConfig:
    """The run's store as the runtime reads it; credentials are named by environment, not here."""
    return StoreConfig(uri=spec.storage.uri, endpoint_url=spec.storage.endpoint_url, region=spec.storage.region)


def config_mount(config_map: str) -> Mount:
    """The process's configuration."""
    return Mount("config", CONFIG_DIR, {"configMap": {"name": config_map}})


def scratch_mount() -> Mount:
    """Room for temporary files; the root file system is read-only."""
    return Mount("scratch", SCRATCH_DIR, {"emptyDir": {}}, read_only=False)


def credentials_mounts(spec: RunSpec) -> list[Mount]:
    """The store's credentials, where the run names a Secret."""
    if spec.storage.secret_ref is None:
        return []
    source = {"secret": {"secretName": spec.storage.secret_ref.name, "defaultMode": 0o440}}
    return [Mount("credentials", CREDENTIALS_DIR, source)]


def environment(spec: RunSpec, settings: PodSettings) -> list[Object]:
    """Variables of every container: who it is, where scratch and credentials are, then the user's own."""
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
    return env + list(settings.env)


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
        manifest["resources"] = item.resources
    if item.ports:
        manifest["ports"] = [{"name": name, "containerPort": port} for name, port in item.ports.items()]
    return manifest


def pod_spec(
    settings: PodSettings, containers: list[Container], init: list[Container] | None = None, *, restart: str = "Always"
) -> Object:
    """The pod's spec: no API token, non-root, the user's scheduling wishes passed through."""
    mounts = {m.name: m for item in [*(init or []), *containers] for m in item.mounts}
    spec: Object = {
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(item) for item in containers],
        "volumes": [{"name": m.name, **m.source} for m in mounts.values()],
    }
    if init:
        spec["initContainers"] = [container(item) for item in init]
    if settings.node_selector:
        spec["nodeSelector"] = settings.node_selector
    if settings.tolerations:
        spec["tolerations"] = settings.tolerations
    if settings.runtime_class_name:
        spec["runtimeClassName"] = settings.runtime_class_name
    if settings.priority_class_name:
        spec["priorityClassName"] = settings.priority_class_name
    return spec
