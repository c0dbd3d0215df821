"""The gateway: ConfigMaps, Service, Deployment and disruption budget, and its route table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from prodrl.config import GatewayConfig, Route, RouteTable
from prodrl_operator import names
from prodrl_operator.api.run import Run
from prodrl_operator.builders.metadata import (
    Object,
    Platform,
    config_map,
    disruption_budget,
    gateway_name,
    labels,
    metadata,
    routes_name,
)
from prodrl_operator.builders.pods import (
    CONFIG_DIR,
    Container,
    Mount,
    Pod,
    config_mount,
    credentials_mounts,
    environment,
    pod_template,
    scratch_mount,
    shm_mount,
    store_config,
)

ROUTES_DIR = "/etc/prodrl-routes"
KEYS_DIR = "/etc/prodrl-keys"
SPOOL_DIR = "/spool"
LEAVING_SECONDS = 5
"""Until every node has heard that a pod is no endpoint any more."""
DRAIN_SECONDS = 30
"""For requests that run."""
GRACE_SECONDS = LEAVING_SECONDS + DRAIN_SECONDS + 10


def route_table(routes: Sequence[Route]) -> RouteTable:
    """The table with its version: a hash of the routes."""
    content = json.dumps([route.model_dump() for route in routes], sort_keys=True)
    return RouteTable(version=hashlib.sha256(content.encode()).hexdigest()[:16], routes=tuple(routes))


def routes_config_map(run: Run, table: RouteTable) -> Object:
    """What a restarted replica starts from."""
    data = {"routes.json": table.model_dump_json()}
    return config_map(routes_name(run.metadata["name"]), run, labels(run, "gateway"), data)


def gateway(run: Run, platform: Platform) -> list[Object]:
    """ConfigMap, Service, Deployment and, with several replicas, a disruption budget."""
    name = gateway_name(run.metadata["name"])
    its_labels = labels(run, "gateway")
    config = GatewayConfig(
        store=store_config(run.spec),
        run=run.metadata["name"],
        served_name=run.spec.model.served_name,
        drain_seconds=DRAIN_SECONDS,
    )
    objects = [
        config_map(name, run, its_labels, {"gateway.json": config.model_dump_json()}),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(name, run, its_labels),
            "spec": {
                "selector": its_labels,
                "ports": [{"name": "http", "port": names.GATEWAY_PORT, "targetPort": names.GATEWAY_PORT}],
            },
        },
        _deployment(run, platform, its_labels),
    ]
    if run.spec.gateway.replicas > 1:
        objects.append(disruption_budget(name, run, its_labels))
    return objects


def _deployment(run: Run, platform: Platform, its_labels: dict[str, str]) -> Object:
    name = gateway_name(run.metadata["name"])
    settings = run.spec.gateway
    command = ["prodrl", "gateway", "--config", f"{CONFIG_DIR}/gateway.json", "--routes", f"{ROUTES_DIR}/routes.json"]
    command += ["--host", "$(POD_IP)", "--port", str(names.GATEWAY_PORT)]
    command += ["--admin-host", "$(POD_IP)", "--admin-port", str(names.GATEWAY_ADMIN_PORT)]
    command += ["--metrics-port", str(names.PROGRESS_PORT)]
    mounts = [
        config_mount(name),
        Mount("routes", ROUTES_DIR, {"configMap": {"name": routes_name(run.metadata["name"]), "optional": True}}),
        Mount("spool", SPOOL_DIR, {"emptyDir": {}}, read_only=False),
        scratch_mount(),
        *shm_mount(settings, None),
        *credentials_mounts(run.spec),
    ]
    more: list[Object] = [{"name": "PRODRL_SPOOL_DIR", "value": SPOOL_DIR}]
    if settings.api_keys_secret_ref is not None:
        mounts.append(Mount("keys", KEYS_DIR, {"secret": {"secretName": settings.api_keys_secret_ref.name}}))
        more.append({"name": "PRODRL_API_KEYS_DIR", "value": KEYS_DIR})
    server = Container(
        name="gateway",
        image=settings.image or platform.runtime_image,
        command=command,
        mounts=mounts,
        env=environment(run.spec, settings, more),
        resources=settings.resources,
        ports={"http": names.GATEWAY_PORT, "admin": names.GATEWAY_ADMIN_PORT, "metrics": names.PROGRESS_PORT},
        # Nobody else may still send requests when the listener closes. (The local runner sees to that by itself.)
        pre_stop_seconds=0 if platform.local else LEAVING_SECONDS,
        probes={
            # It has routes and could reach the store once: a new replica that cannot must not replace one that can.
            "readinessProbe": {
                "httpGet": {"path": "/readyz", "port": names.GATEWAY_PORT},
                "periodSeconds": 2,
                "timeoutSeconds": 5,  # a busy node is not a gateway that is gone
            },
            "livenessProbe": {
                "httpGet": {"path": "/healthz", "port": names.GATEWAY_PORT},
                "periodSeconds": 10,
                "failureThreshold": 6,
                "timeoutSeconds": 5,
            },
        },
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, run, its_labels),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": its_labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod_template(
                settings, its_labels, [server], Pod(more={"terminationGracePeriodSeconds": GRACE_SECONDS})
            ),
        },
    }
