"""The restricted Pod Security Standard, as its page lists the controls. An oracle for what the builders make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

VOLUME_KINDS = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: Object) -> list[str]:
    """What an API server with ``pod-security.kubernetes.io/enforce: restricted`` would refuse; empty: nothing."""
    return [*_pod(pod), *(fault for item in _containers(pod) for fault in _container(item, pod))]


def _containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"], *pod.get("ephemeralContainers", [])]


def _pod(pod: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds or kinds - VOLUME_KINDS:
            yield f"volume {volume['name']}: {sorted(kinds)}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _container(item: Object, pod: Object) -> Iterator[str]:
    name, own, shared = item["name"], item.get("securityContext", {}), pod.get("securityContext", {})
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    if own.get("runAsNonRoot", shared.get("runAsNonRoot")) is not True:
        yield f"{name}: runAsNonRoot"
    if 0 in (own.get("runAsUser"), shared.get("runAsUser")):
        yield f"{name}: runAsUser 0"
    profile = own.get("seccompProfile", shared.get("seccompProfile", {})).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"{name}: seccompProfile {profile}"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield f"{name}: capabilities.drop"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities.add"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if any(port.get("hostPort") for port in item.get("ports", [])):
        yield f"{name}: hostPort"
