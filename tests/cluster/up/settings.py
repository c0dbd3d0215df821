"""Addresses, folders and names of a cluster: a value, written by ``inside`` and read by all of this package."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.up.preflight import ROOT, Found

IDENTITIES = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "system:kube-proxy": "",
    "system:node:node1": "system:nodes",
}
"""User -> group: who talks to the API server, under the roles that Kubernetes itself ships."""


@dataclass(frozen=True)
class Settings:
    """One cluster."""

    scratch: Path
    found: Found
    cgroup: str
    node: str = "node1"
    bridge_ip: str = "10.244.0.1"
    pod_range: str = "10.244.0.0/24"
    service_range: str = "10.96.0.0/16"
    service_ip: str = "10.96.0.1"
    """Of the API server itself: the first of the range."""
    api_port: int = 6443
    containerd: str = "/run/containerd.sock"
    """On the node's own /run: a socket's path must be short."""
    tokens: dict[str, str] = field(default_factory=lambda: {user: secrets.token_hex(16) for user in IDENTITIES})

    @classmethod
    def read(cls, scratch: Path) -> Settings:
        """What ``__main__`` found."""
        values = json.loads((scratch / "settings.json").read_text(encoding="utf-8"))
        cgroup = values.pop("cgroup")
        return cls(scratch=scratch, found=Found(**values), cgroup=cgroup)

    @property
    def userland(self) -> list[str]:
        """Folders of this machine that pods may have at the same paths: its programs, and the checkout's Python."""
        wanted = {ROOT.resolve(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path("/usr")}
        return sorted(str(path) for path in wanted if not any(other in path.parents for other in wanted))

    @property
    def data(self) -> Path:
        """Bulk; removed at the end."""
        return self.scratch / "data"

    @property
    def etc(self) -> Path:
        """Configuration files."""
        return self.scratch / "etc"

    @property
    def logs(self) -> Path:
        """One file a program."""
        return self.scratch / "logs"

    @property
    def api_url(self) -> str:
        """Reachable from the node and from pods."""
        return f"https://{self.bridge_ip}:{self.api_port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.etc / "admin.kubeconfig"

    def kubeconfig_of(self, user: str) -> Path:
        """A component's."""
        return self.etc / f"{user.rsplit(':', 1)[-1]}.kubeconfig"

    def program(self, name: str) -> str:
        """Path of a Kubernetes program."""
        return str(Path(self.found.kubernetes, name))
