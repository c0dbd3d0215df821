"""What ``kubectl prodrl`` gets through a real kubelet: a command's parts, logs as they come, logs before a crash."""

from __future__ import annotations

import json

import pytest

from prodrl_operator import names
from prodrl_operator.plugin import auditing
from prodrl_operator.plugin.access import Access, Finished, connect
from prodrl_operator.plugin.looking import look
from tests.support import node as support
from tests.support.apiserver import ROOT
from tests.support.node import Node

LABELS = {names.LABEL_RUN: "chess", names.LABEL_COMPONENT: "gateway"}
RUN = {
    "apiVersion": names.API_VERSION,
    "kind": "ProdRLRun",
    "metadata": {"name": "chess"},
    "spec": {
        "model": {"uri": "file:///models/base", "servedName": "chess"},
        "storage": {"uri": "file:///scratch/store"},
        "gateway": {"authentication": "Anonymous"},
    },
}


@pytest.fixture
def access(node: Node, namespace: str) -> Access:
    """A run, and a pod where its gateway would be; nobody turns the loop."""
    node.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    node.wait("the kind is served", lambda: "prodrlruns" in node.kubectl("api-resources", "-o", "name"))
    script = "mkdir -p /scratch/store; for i in 1 2 3; do echo line $i; done; exec sleep 600"
    server = support.container(["sh", "-c", script], name="gateway")
    manifest = support.pod("chess-gateway-1", support.pod_spec([server]))
    manifest["metadata"]["labels"] = LABELS
    node.apply(RUN, manifest, namespace=namespace)
    node.kubectl("wait", "--for=condition=Ready", "pod/chess-gateway-1", "-n", namespace, "--timeout=120s")
    return connect()


def test_a_command_runs_in_a_pod_and_its_parts_come_back_whole(access: Access, namespace: str) -> None:
    def run(*command: str) -> Finished:
        return access.pods.exec(namespace, "chess-gateway-1", command, "gateway")

    assert run("sh", "-c", "echo out; echo err >&2; exit 7") == Finished(7, "out\n", "err\n")
    # More than one frame, and characters of two bytes at every boundary.
    long = run("python3", "-S", "-c", "import sys; sys.stdout.buffer.write(('x' + '\\u00e9' * 500_000).encode())")
    assert (long.exit_code, long.error) == (0, "")
    assert long.output == "x" + "\u00e9" * 500_000


def test_the_audit_runs_where_the_store_is(access: Access, namespace: str) -> None:
    seen = look(access, namespace, "chess")
    found = auditing.audit(access, seen)
    assert found["fate"]["recorded"] == 0
    assert auditing.holds(found)
    assert auditing.audit_lines(found)[-1] == "the equation holds"


def test_logs_come_line_by_line_and_from_before_a_crash(node: Node, access: Access, namespace: str) -> None:
    lines = access.pods.logs(namespace, "chess-gateway-1", "gateway", follow=True)
    assert [next(lines) for _ in range(3)] == ["line 1", "line 2", "line 3"]
    assert list(access.pods.logs(namespace, "chess-gateway-1", tail_lines=1)) == ["line 3"]
    script = "test -e /scratch/second && exec sleep 600; touch /scratch/second; echo first life; exit 1"
    crashing = support.container(["sh", "-c", script], name="gateway")
    node.apply(support.pod("crash", support.pod_spec([crashing], restart="OnFailure")), namespace=namespace)

    def restarted() -> bool:
        statuses = node.get("pod", "crash", namespace)["status"].get("containerStatuses", [])
        return json.dumps(statuses).count('"running"') > 0 and statuses[0]["restartCount"] == 1

    node.wait("the second life", restarted, namespace=namespace)
    assert list(access.pods.previous_logs(namespace, "crash", "gateway", None)) == ["first life"]
