"""The node's own view of the machine: mounts, kernel settings, network. Called by ``inside``, in fresh namespaces.

Every folder outside the scratch folder that Kubernetes writes is covered by one of the scratch folder's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.up.errors import CannotRunError
from tests.cluster.up.settings import Settings

BRIDGE = "cni0"
"""Pods are attached to it, and the API server, DNS and kubelet listen on its address."""
SINK = "sink0"
"""A bridge without ports: what no rule of kube-proxy's rewrites ends here. ``dummy`` links need a module."""
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings of the whole machine that a kubelet changes: it finds them as it wants them, and writes into plain files."""


def attempt(what: str, *command: str) -> None:
    """Run a program that a restricted machine may refuse.

    Raises:
        CannotRunError: It was refused.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        line, said = " ".join(command), done.stdout.strip()[-500:]
        raise CannotRunError(f"{what}: '{line}' ended with {done.returncode}, {said}; a container needs --privileged")


def cover(settings: Settings) -> None:
    """Mounts."""
    attempt("mounts", "mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run")
    for source, target in ((settings.data / "var-lib", "/var/lib"), (settings.logs / "var-log", "/var/log")):
        source.mkdir()
        attempt("mounts", "mount", "--bind", str(source), target)
    for name, value in KERNEL.items():
        setting = Path("/proc/sys", name)
        if setting.exists():
            copy = settings.data / name.replace("/", "-")
            copy.write_text(value + "\n", encoding="ascii")
            attempt("kernel settings", "mount", "--bind", str(copy), str(setting))
    _cover_resolver(settings)


def _cover_resolver(settings: Settings) -> None:
    """The node's own processes ask the cluster's DNS as pods do: tests and operator use Service names."""
    configuration = settings.etc / "resolv.conf"
    configuration.write_text(
        f"nameserver {settings.bridge_ip}\nsearch default.svc.cluster.local svc.cluster.local cluster.local\n"
        "options ndots:5 timeout:2\n",
        encoding="ascii",
    )
    target = Path("/etc/resolv.conf").resolve()
    if target.is_relative_to("/run"):  # where a resolver daemon keeps it; /run is new and empty
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    if target.exists():
        attempt("mounts", "mount", "--bind", str(configuration), str(target))


def connect(settings: Settings) -> None:
    """Links and routes: pods and Services on this node, and no way out."""
    commands: Sequence[str] = (
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {settings.bridge_ip}/{settings.pod_range.split('/')[1]} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"link add {SINK} type bridge",
        f"link set {SINK} up",
        f"route add {settings.service_range} dev {SINK}",
        # The kubelet and the API server look for a default route; nothing leaves by it.
        f"route add default dev {SINK}",
    )
    for command in commands:
        attempt("network", "ip", *command.split())
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    try:
        forward.write_text("1", encoding="ascii")
    except OSError as exc:
        raise CannotRunError(f"network: {forward} cannot be written, {exc.strerror}") from exc


def snapshotter(settings: Settings) -> str:
    """How containerd can keep images: overlayfs, or full copies where the scratch folder is an overlay itself."""
    folder = settings.data / "overlay-probe"
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    command = ["mount", "-t", "overlay", "none", "-o", options, str(folder / "merged")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return "native"
    attempt("mounts", "umount", str(folder / "merged"))
    return "overlayfs"
