"""What kube-proxy and the endpoint controller do: Services -> listeners with targets. Pure; called by ``workloads``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prodrl_operator.cluster.local import deployments

Object = dict[str, Any]


def listeners(services: list[Object], pods: list[Object], publish: Mapping[str, int]) -> list[Object]:
    """Every address to listen at, ``{"host", "port", "targets": [[host, port]]}``; published ones at 127.0.0.1."""
    found = []
    for service in services:
        spec = service["spec"]
        address = spec.get("clusterIP")
        if not address or address == "None" or "deletionTimestamp" in service["metadata"]:
            continue
        for position, port in enumerate(spec.get("ports", ())):
            targets = endpoints(service, port, pods)
            found.append({"host": address, "port": port["port"], "targets": targets})
            public = publish.get(service["metadata"]["name"])
            if public is not None and position == 0:
                found.append({"host": "127.0.0.1", "port": public, "targets": targets})
    return found


def endpoints(service: Object, port: Object, pods: list[Object]) -> list[list[Any]]:
    """Addresses of the pods that get this port's traffic."""
    spec = service["spec"]
    selector = spec.get("selector")
    if not selector:
        return []
    chosen = []
    for pod in pods:
        same = pod["metadata"]["namespace"] == service["metadata"]["namespace"]
        if not same or not selector.items() <= pod["metadata"].get("labels", {}).items():
            continue
        serves = deployments.is_ready(pod) or bool(spec.get("publishNotReadyAddresses"))
        number = _port_number(port["targetPort"], pod)
        if serves and number and pod.get("status", {}).get("podIP") and "deletionTimestamp" not in pod["metadata"]:
            chosen.append([pod["status"]["podIP"], number])
    return sorted(chosen)


def _port_number(target: int | str, pod: Object) -> int | None:
    if isinstance(target, int):
        return target
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports", ()))
    return next((port["containerPort"] for port in ports if port.get("name") == target), None)
