"""The cluster is a real one: what the operator and its workloads count on, shown without prodrl."""

from __future__ import annotations

import pytest

from tests.cluster.up import images
from tests.support import node as support
from tests.support.node import KubectlError, Node

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.exists("/scratch/sick") else 200)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
CLIENT = """
import sys, time, urllib.request
wanted, urls, deadline = int(sys.argv[1]), sys.argv[2:], time.monotonic() + 60
while True:
    try:
        names = {urllib.request.urlopen(url, timeout=10).read().decode() for url in urls * 20}
        fault = f"answers of {sorted(names)}"
    except OSError as exc:
        names, fault = (), repr(exc)
    if len(names) == wanted:
        break
    assert time.monotonic() < deadline, fault
    time.sleep(0.5)
print(*sorted(names))
"""
"""Asks until as many servers as wanted answer: a node hears of a Service a moment after its pods are ready."""


def _web(node: Node, namespace: str, replicas: int) -> list[str]:
    """Start the server behind a Service; returns its pods."""
    ready = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    server = support.container(["python", "-c", SERVER], readinessProbe=ready, startupProbe=ready)
    node.apply(
        support.deployment("web", support.pod_spec([server]), replicas=replicas),
        support.service("web", 80, 8000),
        namespace=namespace,
    )
    node.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=120s")
    return sorted(item["metadata"]["name"] for item in node.list("pods", namespace, "app=web"))


def test_the_node_is_ready_and_of_the_wanted_version(node: Node) -> None:
    status = node.get("node", node.settings.node)["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]}["Ready"] == "True"
    assert status["nodeInfo"]["kubeletVersion"].startswith("v1.34.")


def test_a_deployment_answers_by_its_services_name(node: Node, namespace: str) -> None:
    pods = _web(node, namespace, replicas=2)
    urls = ["http://web/", f"http://web.{namespace}.svc.cluster.local:80/"]
    client = support.pod("client", support.pod_spec([support.container(["python", "-c", CLIENT, "2", *urls])]))
    assert node.run_to_end(client, namespace=namespace).split() == pods


def test_a_pod_that_is_not_ready_gets_no_traffic(node: Node, namespace: str) -> None:
    sick, well = _web(node, namespace, replicas=2)
    node.kubectl("exec", sick, "-n", namespace, "--", "touch", "/scratch/sick")
    node.wait("one endpoint is left", lambda: _ready_endpoints(node, namespace) == {well}, namespace=namespace)
    client = support.pod("client", support.pod_spec([support.container(["python", "-c", CLIENT, "1", "http://web/"])]))
    assert node.run_to_end(client, namespace=namespace).split() == [well]


def _ready_endpoints(node: Node, namespace: str) -> set[str]:
    slices = node.list("endpointslices", namespace, "kubernetes.io/service-name=web")
    endpoints = [endpoint for item in slices for endpoint in item.get("endpoints") or []]
    return {endpoint["targetRef"]["name"] for endpoint in endpoints if endpoint["conditions"]["ready"]}


def test_an_image_that_cannot_be_pulled_is_named(node: Node, namespace: str) -> None:
    main = support.container(["true"]) | {"image": "registry.invalid/none:1"}
    node.apply(support.pod("pulling", support.pod_spec([main])), namespace=namespace)

    def waiting() -> str | None:
        states = node.get("pod", "pulling", namespace)["status"].get("containerStatuses", [])
        return next((s["state"]["waiting"]["reason"] for s in states if "waiting" in s["state"]), None)

    reasons = {"ErrImagePull", "ImagePullBackOff"}
    assert node.wait("the pull fails", lambda: r if (r := waiting()) in reasons else None, namespace=namespace)


def test_a_restricted_namespace_refuses_root(node: Node) -> None:
    name = node.make_namespace("restricted")
    bare = {"containers": [{"name": "main", "image": support.USERLAND}]}
    with pytest.raises(KubectlError, match="violates PodSecurity") as refused:
        node.apply(support.pod("root", bare), namespace=name)
    assert "runAsNonRoot" in str(refused.value)
    security = {"securityContext": support.user_security() | {"runAsUser": images.USER}}
    node.apply(support.pod("user", {"containers": [{**bare["containers"][0], **security}]}), namespace=name)


def test_logs_and_exec(node: Node, namespace: str) -> None:
    program = "import time; print('hello from a pod', flush=True); time.sleep(600)"
    node.apply(
        support.pod("talker", support.pod_spec([support.container(["python", "-c", program])])), namespace=namespace
    )
    node.kubectl("wait", "--for=condition=Ready", "pod/talker", "-n", namespace, "--timeout=60s")
    node.wait("a line is logged", lambda: "hello" in node.kubectl("logs", "talker", "-n", namespace))
    assert node.kubectl("exec", "talker", "-n", namespace, "--", "id", "-u").strip() == str(images.USER)


def test_exit_code_and_termination_message_come_back(node: Node, namespace: str) -> None:
    program = "import sys; open('/dev/termination-log', 'w').write('{\"reason\": \"Tired\"}'); sys.exit(77)"
    node.apply(
        support.pod("ending", support.pod_spec([support.container(["python", "-c", program])])), namespace=namespace
    )
    state = node.wait_for_end("ending", namespace=namespace)["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["message"]) == (77, '{"reason": "Tired"}')


def test_a_container_over_its_memory_limit_is_killed_for_it(node: Node, namespace: str) -> None:
    greedy = ["python", "-c", "held = [b'x' * 2**20 for _ in range(512)]"]
    limits = {"limits": {"memory": "64Mi"}}
    node.apply(
        support.pod("greedy", support.pod_spec([support.container(greedy, resources=limits)])), namespace=namespace
    )
    state = node.wait_for_end("greedy", namespace=namespace)["containerStatuses"][0]["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("OOMKilled", 137)


ASK = """
import json, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
token, namespace = open(folder + "token").read(), open(folder + "namespace").read()
context = ssl.create_default_context(cafile=folder + "ca.crt")
for resource in ("configmaps", "secrets"):
    url = f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/{resource}"
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    try:
        print(urllib.request.urlopen(request, context=context, timeout=10).status)
    except urllib.error.HTTPError as exc:
        print(exc.code)
"""


def test_a_pods_account_may_do_what_its_role_says_and_no_more(node: Node, namespace: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    group = "rbac.authorization.k8s.io"
    node.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "reader"}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "reader"}],
        },
        namespace=namespace,
    )
    spec = support.pod_spec([support.container(["python", "-c", ASK])])
    spec |= {"serviceAccountName": "reader", "automountServiceAccountToken": True}
    assert node.run_to_end(support.pod("asking", spec), namespace=namespace).split() == ["200", "403"]


def test_what_belongs_to_a_deleted_object_is_collected(node: Node, namespace: str) -> None:
    _web(node, namespace, replicas=1)
    node.kubectl("delete", "deployment", "web", "-n", namespace, "--cascade=background")
    node.wait("its pods are gone", lambda: not node.list("pods", namespace, "app=web"), namespace=namespace)
    assert node.list("replicasets", namespace) == []


def test_a_network_policy_is_accepted(node: Node, namespace: str) -> None:
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": {}}]}]}
    node.apply(
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "own"}, "spec": spec},
        namespace=namespace,
    )
    assert node.get("networkpolicy", "own", namespace)["spec"]["policyTypes"] == ["Ingress"]


def test_nothing_leaves_the_cluster(node: Node, namespace: str) -> None:
    # An address for documentation (RFC 5737): the sink takes its packets.
    program = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=2)"
    node.apply(
        support.pod("outbound", support.pod_spec([support.container(["python", "-c", program])])), namespace=namespace
    )
    assert node.wait_for_end("outbound", namespace=namespace)["phase"] == "Failed"
    assert "TimeoutError" in node.kubectl("logs", "outbound", "-n", namespace)
