"""What a machine must have to run the cluster: found before anything is started. Called by ``__main__`` and tests.

Only looks; what only an attempt can tell (may we mount, may we make a bridge) is found out by ``isolation``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cluster.up.errors import CannotRunError

ROOT = Path(__file__).parents[3]
KUBERNETES = (
    "etcd",
    "kube-apiserver",
    "kubectl",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "pause",
)
PACKAGES = {
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "nft": "nftables",
    "conntrack": "conntrack",
    "iptables": "iptables",
    "openssl": "openssl",
    "getent": "libc-bin",
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
}
"""Program -> Debian package."""
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
CNI_PLUGINS = ("bridge", "host-local", "loopback")
# Root's own folders, which a plain user's PATH lacks, and sudo's or a container's may too.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Found:
    """Where everything is."""

    kubernetes: str
    """Folder of the Kubernetes programs."""
    cni: str
    """Folder of the network plugins."""
    path: str
    """PATH of everything that is started."""
    is_cgroup_v1: bool

    def to_json(self) -> dict[str, Any]:
        """For ``inside``, which is another process."""
        return asdict(self)


def check(*, build: bool) -> Found:
    """Everything that a cluster needs.

    Args:
        build: Build Kubernetes where it is missing (minutes).

    Raises:
        CannotRunError: Names all that is missing, with what would help.
    """
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = [*_machine(), *_programs(path)]
    cni = next((folder for folder in CNI_FOLDERS if all(Path(folder, name).exists() for name in CNI_PLUGINS)), None)
    if cni is None:
        missing.append(
            f"CNI plugins {', '.join(CNI_PLUGINS)} in one of {', '.join(CNI_FOLDERS)}: install the package "
            "containernetworking-plugins"
        )
    # Nobody waits for a build on a machine that lacks something else.
    kubernetes = _kubernetes(build=build and not missing)
    if kubernetes is None:
        missing.append(
            f"Kubernetes ({', '.join(KUBERNETES)}): run scripts/kubernetes cluster, or set KUBEBUILDER_ASSETS"
        )
    if missing or kubernetes is None or cni is None:
        raise CannotRunError("; ".join(missing))
    return Found(kubernetes=kubernetes, cni=cni, path=f"{kubernetes}:{path}", is_cgroup_v1=not is_cgroup_v2())


def is_cgroup_v2() -> bool:
    """Whether the unified hierarchy is the one with controllers."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def _machine() -> list[str]:
    if not sys.platform.startswith("linux"):
        return [f"Linux: namespaces and cgroups are needed, got {sys.platform}; run it in a Linux machine"]
    missing = []
    if os.geteuid() != 0:
        missing.append(f"root: mounts and network namespaces are made, got uid {os.geteuid()}; run it with sudo")
    if not is_cgroup_v2():
        for controller in ("cpu", "memory", "pids"):
            if not Path("/sys/fs/cgroup", controller, "tasks").exists():
                missing.append(f"cgroups: no controller {controller} below /sys/fs/cgroup; mount it")
    if missing == [] and not os.access("/sys/fs/cgroup", os.W_OK):
        missing.append("cgroups: /sys/fs/cgroup cannot be written; a container needs --privileged")
    return missing


def _programs(path: str) -> list[str]:
    lacking = {name: package for name, package in PACKAGES.items() if shutil.which(name, path=path) is None}
    if not lacking:
        return []
    packages = " ".join(sorted(set(lacking.values())))
    return [f"programs {', '.join(lacking)}: install the packages {packages}"]


def _kubernetes(*, build: bool) -> str | None:
    command = [str(ROOT / "scripts" / "kubernetes"), *([] if build else ["--find"]), "cluster"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
