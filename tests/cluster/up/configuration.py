"""The configuration files of a cluster's programs, as text. Pure but for ``write_all``; called by ``node``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.up.isolation import BRIDGE
from tests.cluster.up.settings import IDENTITIES, Settings

PAUSE_IMAGE = "test.local/pause:1"
USERLAND_CLASS = "userland"
"""RuntimeClass, and containerd's handler for it: its containers see ``Settings.userland`` read-only."""


def containerd(settings: Settings, snapshotter: str) -> str:
    """Of containerd: everything in the scratch folder or in the node's own /run."""
    return f"""version = 2
root = "{settings.data}/containerd"
state = "/run/containerd"
[grpc]
  address = "{settings.containerd}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{settings.data}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{USERLAND_CLASS}]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{settings.etc}/userland.json"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{settings.found.cni}"
    conf_dir = "{settings.etc}/cni"
"""


def userland(settings: Settings, plain: dict[str, Any]) -> dict[str, Any]:
    """The specification that containers of ``USERLAND_CLASS`` start from.

    Args:
        settings: The cluster's.
        plain: What containerd starts from otherwise.
    """
    mounts = [
        {"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro", "nosuid", "nodev"]}
        for path in settings.userland
    ]
    return {**plain, "mounts": [*plain["mounts"], *mounts]}


def network(settings: Settings) -> dict[str, Any]:
    """The list of network plugins."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": settings.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": f"{settings.data}/cni",
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, {"type": "loopback"}]}


def kubelet(settings: Settings) -> dict[str, Any]:
    """Of the kubelet."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Logs and exec come from the API server; nobody else can reach this network.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.cgroup}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "containerRuntimeEndpoint": f"unix://{settings.containerd}",
        "clusterDomain": "cluster.local",
        "clusterDNS": [settings.bridge_ip],
        "resolvConf": str(settings.etc / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # There is no registry to pull a collected image from again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        # A watch for each ConfigMap of each pod costs seconds where there is little time to run.
        "configMapAndSecretChangeDetectionStrategy": "Get",
        "makeIPTablesUtilChains": False,
    }


def dns(settings: Settings) -> str:
    """Of CoreDNS: Services of this cluster, and nothing beyond."""
    return f"""cluster.local:53 {{
    bind {settings.bridge_ip}
    errors
    kubernetes cluster.local {{
        kubeconfig {settings.kubeconfig}
        ttl 1
    }}
}}
"""


def kubeconfig(settings: Settings, user: str) -> dict[str, Any]:
    """Access as one of ``IDENTITIES``."""
    cluster = {"server": settings.api_url, "certificate-authority": str(settings.data / "certs" / "apiserver.crt")}
    context = {"cluster": "test", "user": user, "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": user, "user": {"token": settings.tokens[user]}}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }


def write_all(settings: Settings, *, snapshotter: str, plain_spec: dict[str, Any]) -> None:
    """Write them into the scratch folder; the arguments are what containerd said."""
    etc = settings.etc
    _write(etc / "containerd.toml", containerd(settings, snapshotter))
    _write(etc / "userland.json", json.dumps(userland(settings, plain_spec)))
    _write(etc / "cni" / "10-pods.conflist", json.dumps(network(settings)))
    _write(etc / "kubelet.yaml", yaml.safe_dump(kubelet(settings)))
    _write(etc / "Corefile", dns(settings))
    _write(etc / "tokens.csv", "".join(_token_line(settings, user) for user in IDENTITIES))
    for user in IDENTITIES:
        _write(settings.kubeconfig_of(user), yaml.safe_dump(kubeconfig(settings, user)))


def _token_line(settings: Settings, user: str) -> str:
    return f'{settings.tokens[user]},{user},{user},"{IDENTITIES[user]}"\n'


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
