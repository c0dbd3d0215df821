"""Helpers for tests that run small real processes in the local environment."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import yaml

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.environment import LocalCluster
from prodrl_operator.cluster.local.runner import Settings

Object = dict[str, Any]

ROOT = pathlib.Path(__file__).parents[2]
CRDS = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
SETTINGS = Settings(back_off_base=0.2, back_off_limit=1.0, stop_seconds=3.0)

# Without site-packages an interpreter starts in 20 ms. Answers every GET with its argument at POD_IP:8000.
HTTP_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ok = self.path != "/ready" or os.path.exists(sys.argv[3]) if len(sys.argv) > 3 else True
        self.send_response(200 if ok else 503)
        body = sys.argv[2].encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""


def open_cluster(data: pathlib.Path, **options: Any) -> LocalCluster:
    return LocalCluster(data, CRDS, **({"settings": SETTINGS} | options))


def job(name: str, script: str, **spec: Any) -> Object:
    container = {"name": "main", "command": ["sh", "-c", script]} | spec.pop("container", {})
    pod = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}
    pod |= spec.pop("pod", {})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": pod}} | spec,
    }


def deployment(name: str, command: list[str], *, container: Object | None = None, **spec: Any) -> Object:
    main = {"name": "main", "command": command, "ports": [{"containerPort": 8000, "name": "http"}]}
    pod = {"containers": [main | (container or {})], "terminationGracePeriodSeconds": 1} | spec.pop("pod", {})
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": template} | spec,
    }


def http_deployment(name: str, text: str, **options: Any) -> Object:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 0.1}
    container = {"readinessProbe": probe} | options.pop("container", {})
    command = ["python", "-S", "-E", "-c", HTTP_SERVER, "0.0.0.0", text]
    return deployment(name, command, container=container, **options)


def service(name: str, app: str, number: int = 80) -> Object:
    spec = {"selector": {"app": app}, "ports": [{"port": number, "targetPort": "http"}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def eventually(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The first true result; the test fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.03)
    raise AssertionError(f"not true within {seconds} s: {condition}")


def finished(cluster: LocalCluster, name: str) -> Object:
    """The Job's final condition and status, when it has one."""

    def look() -> Object | None:
        status = cluster.store.get(port.JOB, "default", name).get("status", {})
        ends = [
            c for c in status.get("conditions", ()) if c["type"] in ("Complete", "Failed") and c["status"] == "True"
        ]
        return status | {"end": ends[0]} if ends else None

    return eventually(look)


def pods_of(cluster: LocalCluster, owner: str) -> list[Object]:
    pods = cluster.store.list(port.POD, "default")
    return [pod for pod in pods if pod["metadata"]["ownerReferences"][0]["name"] == owner]


def ready_replicas(cluster: LocalCluster, name: str) -> int:
    status = cluster.store.get(port.DEPLOYMENT, "default", name).get("status", {})
    return status.get("readyReplicas", 0)


def terminated(pod: Object) -> Object:
    return pod["status"]["containerStatuses"][0]["state"]["terminated"]
