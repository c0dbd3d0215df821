"""The operator's process on a real API server: watches by kopf, Lease, controller, metrics and health."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prodrl_operator import names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import OURS, CachedCluster
from prodrl_operator.cluster.port import Kind, Object
from prodrl_operator.process import Options, Process
from tests.packaging.rendering import KUSTOMIZE
from tests.support.api_world import ApiWorld
from tests.support.local_cluster import eventually


@contextmanager
def operating(world: ApiWorld, **options) -> Iterator[Process]:
    """A whole process in threads, on the world's namespace, with the world's gateway and clock."""
    chosen = {"listen": "127.0.0.1:0", "lease_namespace": world.namespace, "namespaces": (world.namespace,)} | options
    process = Process(
        world.cluster, Options(platform=Platform(), **chosen), gateway_admin=world.gateway, clock=world.clock
    )
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(process.run()), name="operator", daemon=True)
    thread.start()
    try:
        yield process
    finally:
        process.stop()
        thread.join(60)
    assert codes == [0]


@pytest.fixture
def world(api_server) -> Iterator[ApiWorld]:
    made = ApiWorld(api_server)
    yield made
    made.close()


def around_until(world: ApiWorld, is_so, seconds: float = 120.0) -> None:
    """Only the rest of the world is played; the process acts by itself."""
    deadline = time.monotonic() + seconds
    while not is_so(world):
        assert time.monotonic() < deadline, world.run.status.model_dump(exclude_none=True)
        world.around()
        time.sleep(0.1)


def test_a_process_turns_a_run_by_its_watches_alone(world):
    with operating(world, resync_seconds=3600.0) as process:
        around_until(world, ApiWorld.is_finished)
        world.check_jobs()
        lease = world.admin.get(port.LEASE, world.namespace, "prodrl-operator")
        assert lease["spec"]["holderIdentity"]
        figures = httpx.get(f"http://127.0.0.1:{process.server.port}/metrics", trust_env=False).text
        labels = f'namespace="{world.namespace}",run="chess"'
        assert f"prodrl_stable_round{{{labels}}} 1.0" in figures
        assert f"prodrl_run_ready{{{labels}}} 1.0" in figures
        assert f'prodrl_gate_verdict_total{{{labels},verdict="Pass"}} 2.0' in figures
        assert "prodrl_leader 1.0" in figures
        for path in ("/healthz", "/readyz"):
            assert httpx.get(f"http://127.0.0.1:{process.server.port}{path}", trust_env=False).status_code == 200
    lease = world.admin.get(port.LEASE, world.namespace, "prodrl-operator")
    assert lease["spec"]["holderIdentity"] == "", "given back at the end"


def test_nothing_of_kopf_is_left_on_objects(world):
    with operating(world):
        around_until(world, ApiWorld.is_finished)
    for kind in (port.RUN, port.ROUND, port.JOB, port.DEPLOYMENT, port.POD):
        for obj in world.admin.list(kind, world.namespace):
            assert "kopf" not in json.dumps(obj["metadata"]).lower()
            if kind is port.RUN:
                assert "annotations" not in obj["metadata"]


@pytest.mark.parametrize("allowed", [(), ("prodrlruns", "prodrlrounds", "pods", "services")])
def test_a_namespace_whose_role_lacks_something_does_not_keep_the_others_waiting(api_server, world, caplog, allowed):
    """The operator as its own manifests allow it, in one of the two namespaces that it is told to look after."""
    closed = f"{world.namespace}-closed"
    api_server.kubectl("create", "namespace", closed)
    if allowed:
        resources = ",".join(allowed)
        api_server.kubectl("create", "role", "some", f"--resource={resources}", "--verb=list", "--namespace", closed)
        api_server.kubectl("create", "rolebinding", "some", "--role=some", "--user=nobody", "--namespace", closed)
    for file in (KUSTOMIZE / "overlays" / "namespaced" / "role.yaml", KUSTOMIZE / "base" / "lease-role.yaml"):
        api_server.kubectl("apply", "--namespace", world.namespace, "-f", str(file))
    for role in ("prodrl-operator", "prodrl-operator-lease"):
        binding = (
            "create",
            "rolebinding",
            f"{role}-here",
            f"--role={role}",
            "--user=nobody",
            "--namespace",
            world.namespace,
        )
        api_server.kubectl(*binding)
    world.cluster = api_server.connect("nobody")
    with operating(world, namespaces=(closed, world.namespace)):
        around_until(world, ApiWorld.is_finished)
    world.check_jobs()
    assert f"namespace {closed}: left out until this process starts again" in caplog.text


def pod(world: ApiWorld, name: str, labels: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": world.namespace, "labels": labels}
    spec = {"containers": [{"name": "c", "image": "none"}], "schedulerName": "nobody"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_only_pods_with_our_label_come_over_the_wire(api_server, world, monkeypatch):
    """A cluster has pods by the ten thousand; a label that comes back brings its object back, by watches alone."""
    seen: list[tuple[str | None, str]] = []
    note = CachedCluster.note

    def noted(self: CachedCluster, kind: Kind, event_type: str | None, obj: Object) -> None:
        if kind is port.POD:
            seen.append((event_type, obj["metadata"]["name"]))
        note(self, kind, event_type, obj)

    monkeypatch.setattr(CachedCluster, "note", noted)
    ours = {**OURS, names.LABEL_RUN: "another"}
    world.admin.create(pod(world, "others-0", {"app": "other"}))
    world.admin.create(pod(world, "ours-0", ours))
    with operating(world, resync_seconds=3600.0) as process:

        def known() -> list[str]:
            found = process.cached.list(port.POD, world.namespace, {names.LABEL_RUN: "another"})
            return [item["metadata"]["name"] for item in found]

        eventually(lambda: (None, "ours-0") in seen, seconds=60)
        world.admin.create(pod(world, "others-1", {"app": "other"}))
        world.admin.create(pod(world, "ours-1", ours))
        eventually(lambda: known() == ["ours-0", "ours-1"], seconds=60)
        relabel = ("label", "pod", "ours-1", "--namespace", world.namespace)
        api_server.kubectl(*relabel, f"{names.LABEL_MANAGED_BY}-")
        eventually(lambda: ("DELETED", "ours-1") in seen and known() == ["ours-0"], seconds=60)
        api_server.kubectl(*relabel, f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}")
        eventually(lambda: known() == ["ours-0", "ours-1"], seconds=60)
    assert not [name for _, name in seen if name.startswith("others")]


def test_the_command_runs_stops_on_a_signal_and_gives_the_lease_back(api_server, world, tmp_path):
    log = tmp_path / "log"
    command = [str(Path(sys.executable).with_name("prodrl-operator")), "run", "--namespace", world.namespace]
    command += ["--kubeconfig", str(api_server.kubeconfig), "--listen", "127.0.0.1:0", "--log-format", "json"]
    command += ["--lease-namespace", world.namespace]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"POD_NAME": "operator-0"})
    try:
        eventually(lambda: "chess-r0000" in world.names_of(port.ROUND), seconds=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("leads" in line["message"] for line in lines)
    lease = world.admin.get(port.LEASE, world.namespace, "prodrl-operator")
    assert lease["spec"]["holderIdentity"] == ""


def test_a_signal_ends_a_process_that_still_waits_for_the_api_server(tmp_path):
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))
    command = [str(Path(sys.executable).with_name("prodrl-operator")), "run", "--listen", "127.0.0.1:0"]
    command += ["--kubeconfig", str(tmp_path / "config")]
    with (tmp_path / "log").open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        eventually(lambda: "waiting for the API server" in (tmp_path / "log").read_text(), seconds=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()


def test_a_kubeconfig_that_is_not_there_is_named():
    command = [str(Path(sys.executable).with_name("prodrl-operator")), "run", "--kubeconfig", "/nowhere/config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "/nowhere/config" in done.stderr
    assert "--kubeconfig" in done.stderr
