"""Deployments and Services as real processes: readiness, restarts, rollouts, the proxy."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import containers
from prodrl_operator.errors import InvalidError
from tests.support.local_cluster import (
    deployment,
    eventually,
    http_deployment,
    open_cluster,
    pods_of,
    ready_replicas,
    service,
)


def fetch(host: str, number: int, path: str = "/") -> str:
    connection = http.client.HTTPConnection(host, number, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def address_of(cluster, name: str) -> str:
    return eventually(lambda: cluster.store.get(port.SERVICE, "default", name)["spec"].get("clusterIP"))


def answers(host: str, number: int) -> str | None:
    try:
        return fetch(host, number)
    except (OSError, http.client.HTTPException):  # nobody listens, or a server that is just ending
        return None


def test_a_deployment_is_ready_when_its_probe_says_so(cluster, tmp_path):
    manifest = http_deployment("web", "hello")
    manifest["spec"]["template"]["spec"]["containers"][0]["command"].append(str(tmp_path / "go"))
    cluster.store.apply(manifest)
    (pod,) = eventually(lambda: [p for p in pods_of(cluster, "web") if p.get("status", {}).get("phase") == "Running"])
    eventually(lambda: answers(pod["status"]["podIP"], 8000))
    assert ready_replicas(cluster, "web") == 0
    (tmp_path / "go").touch()
    eventually(lambda: ready_replicas(cluster, "web") == 1)
    status = cluster.store.get(port.DEPLOYMENT, "default", "web")["status"]
    assert status["availableReplicas"] == 1
    assert {c["type"]: c["status"] for c in status["conditions"]} == {"Available": "True", "Progressing": "True"}
    assert pod["status"]["podIP"].startswith("127.")
    (tmp_path / "go").unlink()
    eventually(lambda: ready_replicas(cluster, "web") == 0)


def test_replicas_have_their_own_addresses_and_scale_down(cluster):
    manifest = http_deployment("web", "hello", replicas=2)
    cluster.store.apply(manifest)
    eventually(lambda: ready_replicas(cluster, "web") == 2)
    assert len({pod["status"]["podIP"] for pod in pods_of(cluster, "web")}) == 2
    manifest["spec"]["replicas"] = 1
    cluster.store.apply(manifest)
    eventually(lambda: len(pods_of(cluster, "web")) == 1)
    eventually(lambda: len(containers.marked(str(cluster.data / "pods"))) == 1)


def test_a_new_template_rolls_without_a_gap(cluster):
    cluster.store.apply(http_deployment("web", "old"))
    cluster.store.apply(service("web", "web"))
    host = address_of(cluster, "web")
    eventually(lambda: answers(host, 80) == "old")
    failures: list[Exception] = []
    seen: list[str] = []
    done = threading.Event()

    def use() -> None:
        while not done.is_set():
            try:
                seen.append(fetch(host, 80))
            except (OSError, http.client.HTTPException) as error:
                failures.append(error)
            time.sleep(0.005)

    user = threading.Thread(target=use)
    user.start()
    cluster.store.apply(http_deployment("web", "new"))
    eventually(lambda: seen[-1:] == ["new"] and len(pods_of(cluster, "web")) == 1)
    done.set()
    user.join()
    assert "old" in seen
    assert failures == []


def test_recreate_ends_the_old_pod_first(cluster):
    cluster.store.apply(http_deployment("web", "old", strategy={"type": "Recreate"}))
    eventually(lambda: ready_replicas(cluster, "web") == 1)
    (old,) = pods_of(cluster, "web")
    most = []
    stop = cluster.store.watch(lambda _: most.append(len(pods_of(cluster, "web"))))
    cluster.store.apply(http_deployment("web", "new", strategy={"type": "Recreate"}))

    def is_replaced() -> bool:
        uids = [pod["metadata"]["uid"] for pod in pods_of(cluster, "web")]
        return len(uids) == 1 and uids[0] != old["metadata"]["uid"] and ready_replicas(cluster, "web") == 1

    eventually(is_replaced)
    stop()
    assert max(most) == 1


def test_crashing_containers_are_restarted_with_back_off(cluster):
    cluster.store.apply(deployment("crash", ["sh", "-c", "exit 7"]))

    def crashed() -> dict | None:
        for pod in pods_of(cluster, "crash"):
            for status in pod.get("status", {}).get("containerStatuses", ()):
                if (
                    status["restartCount"] >= 3
                    and status["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
                ):
                    return status
        return None

    status = eventually(crashed)
    assert status["lastState"]["terminated"]["exitCode"] == 7
    assert not status["ready"]
    box = next((cluster.data / "pods").glob("*/containers/main"))
    ends = containers.Container(box).history()
    gaps = [after.started - before.finished for before, after in itertools.pairwise(ends)]
    assert gaps[0] >= 0.2
    assert gaps[1] >= 0.4
    assert gaps[2] >= 0.8


def test_a_failing_liveness_probe_kills_and_restarts(cluster, tmp_path):
    probe = {
        "exec": {"command": ["test", "!", "-e", str(tmp_path / "sick")]},
        "periodSeconds": 0.1,
        "failureThreshold": 2,
    }
    command = ["sh", "-c", f"trap '' TERM; touch {tmp_path}/deaf; sleep 100 & wait; sleep 100"]
    cluster.store.apply(deployment("live", command, container={"livenessProbe": probe}))
    eventually(lambda: ready_replicas(cluster, "live") == 1)
    eventually((tmp_path / "deaf").exists)
    (tmp_path / "sick").touch()

    def restarted() -> bool:
        (pod,) = pods_of(cluster, "live")
        return pod["status"]["containerStatuses"][0]["restartCount"] >= 1

    eventually(restarted)
    (tmp_path / "sick").unlink()
    eventually(lambda: ready_replicas(cluster, "live") == 1)
    (pod,) = pods_of(cluster, "live")
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 137


def test_a_startup_probe_holds_the_others_back(cluster, tmp_path):
    startup = {"exec": {"command": ["test", "-e", str(tmp_path / "up")]}, "periodSeconds": 0.1, "failureThreshold": 100}
    live = startup | {"failureThreshold": 1, "timeoutSeconds": 10}
    cluster.store.apply(
        deployment("slow", ["sleep", "100"], container={"startupProbe": startup, "livenessProbe": live})
    )
    eventually(lambda: [p for p in pods_of(cluster, "slow") if p.get("status", {}).get("phase") == "Running"])
    eventually(lambda: not pods_of(cluster, "slow")[0]["status"]["containerStatuses"][0]["started"])
    (tmp_path / "up").touch()
    eventually(lambda: ready_replicas(cluster, "slow") == 1)
    assert pods_of(cluster, "slow")[0]["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_service_balances_and_refuses_without_endpoints(cluster):
    cluster.store.apply(service("web", "web", 8080))
    host = address_of(cluster, "web")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, 8080), timeout=2)
    cluster.store.apply(http_deployment("one", "one"))
    cluster.store.apply(http_deployment("two", "two"))
    for name in ("one", "two"):
        manifest = http_deployment(name, name)
        manifest["spec"]["template"]["metadata"]["labels"]["both"] = "yes"
        cluster.store.apply(manifest)
    both = service("web", "web", 8080)
    both["spec"]["selector"] = {"both": "yes"}
    cluster.store.apply(both)
    eventually(lambda: {answers(host, 8080) for _ in range(4)} == {"one", "two"})
    cluster.store.delete(port.DEPLOYMENT, "default", "one")
    eventually(lambda: {answers(host, 8080) for _ in range(4)} == {"two"})
    cluster.store.delete(port.DEPLOYMENT, "default", "two")
    eventually(lambda: answers(host, 8080) is None)


def test_half_closed_connections_pass_both_ways(cluster):
    """A client that closes its sending side still gets the whole answer (as `nc -N` expects)."""
    echo = "import socket as s;l=s.create_server((__import__('sys').argv[1],8000))\nwhile 1:\n c=l.accept()[0];b=b''"
    echo += "\n while x:=c.recv(9999): b+=x\n c.sendall(b[::-1]);c.close()"
    probe = {"tcpSocket": {"port": "http"}, "periodSeconds": 0.1}
    command = ["python", "-S", "-E", "-c", echo, "$(IP)"]
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    cluster.store.apply(deployment("echo", command, container={"env": env, "readinessProbe": probe}))
    cluster.store.apply(service("echo", "echo"))
    host = address_of(cluster, "echo")
    eventually(lambda: ready_replicas(cluster, "echo") == 1)

    def talk() -> bytes | None:
        try:
            with socket.create_connection((host, 80), timeout=5) as connection:
                connection.sendall(b"abc" * 100_000)
                connection.shutdown(socket.SHUT_WR)
                parts = []
                while part := connection.recv(65536):
                    parts.append(part)
                return b"".join(parts)
        except ConnectionRefusedError:
            return None

    assert eventually(talk) == b"cba" * 100_000


def test_a_published_service_is_at_its_port(tmp_path):
    running = open_cluster(tmp_path / "data", publish={"web": 0})
    running.start()
    try:
        running.store.apply(http_deployment("web", "hello"))
        running.store.apply(service("web", "web"))
        eventually(lambda: answers("127.0.0.1", running.published["web"]) == "hello")
    finally:
        running.stop(terminate=True)


def test_a_published_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(InvalidError, match=f"port {number}.*choose another"):
            open_cluster(tmp_path / "data", publish={"web": number})
    running = open_cluster(tmp_path / "data", publish={"web": number})  # the failed start left no lock
    running.stop()
