"""examples/02-cluster as a user applies it: operator from its own image, users served by pods that are replaced.

Two rounds are promoted and a deliberately harmful third is blocked. The example is applied as it stands, but for its
Secrets, smaller rounds, and the RuntimeClass that spares the building of images of gigabytes (unless they are given).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from prodrl.lab.display import Display
from prodrl.lab.prepare import Prepared, Request, prepare
from tests.cluster.up import images
from tests.cluster.up.configuration import USERLAND_CLASS
from tests.support import cluster_s3, tiers
from tests.support import node as support
from tests.support.cluster_s3 import ClusterS3
from tests.support.cluster_witness import Witness, conditions, kstatus
from tests.support.node import PATH, ROOT, Node, Object

pytestmark = [pytest.mark.demo, pytest.mark.timeout(3300)]

EXAMPLE = ROOT / "examples" / "02-cluster"
OPERATOR_IMAGE = ROOT / ".prodrl" / "images" / "operator.tar"
"""Made by ``test_tier`` before it goes inside, where there is no network: scripts/images operator FILE."""
OPERATOR_NAMESPACE = "prodrl-system"
BUCKET = "prodrl"
WORKLOADS = {"serving": "serving"} | dict.fromkeys(("gateway", "collect", "training", "export", "evaluate"), "runtime")
"""Parts of the spec, and the image that their pods run."""
REAL_IMAGES = "PRODRL_WORKLOAD_IMAGES"
"""A folder with runtime.tar, or it and serving.tar (its pods fetch from the former), made by scripts/images."""
SMALL: Object = {"rounds": {"max": 5, "steps": 4, "batchSize": 16}}
HARM: Object = {"spec": {"training": {"optimizer": {"maximise": False, "learningRate": "5e-3"}}}}
USERS = """
prodrl lab users --gateway http://chess-gateway:8080 --puzzles /puzzles/users.csv --report /scratch/users.json \
    --rate 3 --concurrency 8 --late 0.05 --late-seconds 3 --duplicate 0.05 --seed 1 &
users=$!
trap 'kill -TERM $users' TERM
wait $users
wait $users
cat /scratch/users.json
"""


def quickstart() -> Object:
    """The example's run, changed where this machine is not a cluster of GPUs."""
    run: Object = yaml.safe_load((EXAMPLE / "run.yaml").read_text(encoding="utf-8"))
    spec = run["spec"]
    spec["rounds"] |= SMALL["rounds"]
    evaluation = spec["gate"]["evaluations"][0]
    evaluation |= {"minItems": 64, "maxItems": 128}
    spec["gate"]["canary"]["steps"] = [{"weight": 30, "minTrajectories": 10}]
    for workload, image in WORKLOADS.items():
        if _archive(image) is None:
            spec[workload]["runtimeClassName"] = USERLAND_CLASS
    # Shared, as a cluster's users would for a large model: the second server starts in a third of the time.
    spec["serving"]["cache"] = {"persistentVolumeClaim": {"claimName": "cache"}}
    return run


def _archive(name: str) -> Path | None:
    path = Path(os.environ.get(REAL_IMAGES, ""), f"{name}.tar")
    return path if os.environ.get(REAL_IMAGES) and path.is_file() else None


@dataclass
class Quickstart:
    """What the module's tests look at, after the rounds are over."""

    node: Node
    namespace: str
    witness: Witness
    storage: ClusterS3
    waited: str
    """What ``kubectl wait --for=condition=Ready`` printed right after the apply."""
    run: Object
    """As it was at the end."""
    users: dict[str, Any]
    """Their report."""


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(Request(), Display())


@pytest.fixture(scope="module")
def storage(node: Node, prepared: Prepared) -> ClusterS3:
    """The example's object store, with what the user uploads."""
    node.apply(_namespace("storage"))
    server = cluster_s3.start(node, "storage", BUCKET)
    command = [sys.executable, str(EXAMPLE / "upload.py"), str(EXAMPLE / "run.yaml")]
    command += ["--model", str(prepared.model), "--puzzles", str(prepared.held_out)]
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    subprocess.run(command, check=True, env={**os.environ, **keys})
    return server


@pytest.fixture(scope="module")
def operator(node: Node) -> str:
    """The operator, installed as its manual says, from its own image."""
    if not OPERATOR_IMAGE.is_file():
        tiers.lack(f"no {OPERATOR_IMAGE}; make it outside: scripts/images operator {OPERATOR_IMAGE.relative_to(ROOT)}")
    node.load_image(OPERATOR_IMAGE)
    for name in sorted(set(WORKLOADS.values())):
        archive = _archive(name)
        if archive is not None:
            node.load_image(archive)
        else:
            node.add_image(images.userland(f"prodrl/{name}:0.1.0", PATH))
    node.kubectl("apply", "--server-side", "-k", str(ROOT / "manifests" / "kustomize" / "overlays" / "cluster-wide"))
    node.kubectl("rollout", "status", "deployment/prodrl-operator", "-n", OPERATOR_NAMESPACE, "--timeout=120s")
    return OPERATOR_NAMESPACE


@pytest.fixture(scope="module")
def finished(node: Node, storage: ClusterS3, operator: str, prepared: Prepared) -> Iterator[Quickstart]:
    """Apply the quickstart, let users play, do harm in the third round, and wait for it to be blocked."""
    del operator  # must be there
    namespace = "chess"
    node.apply(_namespace(namespace))
    witness = Witness(node, namespace, "chess", node.settings.scratch / "pods")
    witness.start()
    try:
        yield _play(node, storage, prepared, witness)
    finally:
        witness.stop()
        for line in [*witness.timeline, *witness.contradictions]:
            sys.stderr.write(f"{line}\n")


def _play(node: Node, storage: ClusterS3, prepared: Prepared, witness: Witness) -> Quickstart:
    namespace = witness.namespace
    key = secrets.token_urlsafe(16)
    api_keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "api-keys"}, "stringData": {"site": key}}
    for volume in _cache(node, namespace):
        node.apply(volume, namespace=volume["metadata"].get("namespace", "default"))
    node.apply(storage.secret("s3"), api_keys, quickstart(), namespace=namespace)
    waiting = ("wait", "--for=condition=Ready", "prun/chess", "-n", namespace, "--timeout=900s")
    waited = _or_explain(node, namespace, lambda: node.kubectl(*waiting, seconds=930))
    _start_users(node, namespace, prepared)

    def current(number: int) -> bool:
        found = _run(node, namespace)["status"].get("currentRound") or {}
        return int(found.get("number", -1)) >= number

    _or_explain(node, namespace, lambda: node.wait("round 2 begins", lambda: current(2), seconds=1200))
    # In force from the next round on: round 2 keeps the settings that it began with.
    node.kubectl("patch", "prun", "chess", "-n", namespace, "--type=merge", "-p", json.dumps(HARM))
    waiting = ("wait", "--for=condition=Stalled", "prun/chess", "-n", namespace, "--timeout=1500s")
    _or_explain(node, namespace, lambda: node.kubectl(*waiting, seconds=1530))
    users = _stop_users(node, namespace)
    return Quickstart(node, namespace, witness, storage, waited, _run(node, namespace), users)


def _or_explain(node: Node, namespace: str, action: Any) -> Any:
    """Run it; where it fails, what the operator and the run say is part of the failure."""
    try:
        return action()
    except (AssertionError, subprocess.TimeoutExpired) as exc:
        said = node.kubectl("logs", "deployment/prodrl-operator", "-n", OPERATOR_NAMESPACE, "--tail=40")
        run = yaml.safe_dump(_run(node, namespace).get("status"))
        raise AssertionError(f"{exc}\n{node.diagnosis(namespace)}\n{run[-6000:]}\n{said[-6000:]}") from exc


def _cache(node: Node, namespace: str) -> list[Object]:
    """A claim and the volume for it: this cluster has no provisioner."""
    folder = node.settings.data / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    size, modes = {"storage": "8Gi"}, ["ReadWriteMany"]
    common = {"accessModes": modes, "storageClassName": ""}
    claim = {"name": "cache", "namespace": namespace}
    volume = {**common, "capacity": size, "hostPath": {"path": str(folder)}, "claimRef": claim}
    request = {**common, "resources": {"requests": size}, "volumeName": "cache"}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "cache"}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": request},
    ]


def _namespace(name: str) -> Object:
    metadata = {"name": name, "labels": {support.SECURITY_LABEL: "restricted"}}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def _run(node: Node, namespace: str) -> Object:
    return node.get("prun", "chess", namespace)


def _start_users(node: Node, namespace: str, prepared: Prepared) -> None:
    node.kubectl("create", "configmap", "puzzles", "-n", namespace, f"--from-file=users.csv={prepared.users}")
    crowd = support.container(
        ["sh", "-c", USERS], volumeMounts=[{"name": "puzzles", "mountPath": "/puzzles", "readOnly": True}]
    )
    crowd["env"].append({"name": "PRODRL_API_KEY", "valueFrom": {"secretKeyRef": {"name": "api-keys", "key": "site"}}})
    volumes = [{"name": "puzzles", "configMap": {"name": "puzzles"}}]
    node.apply(support.pod("users", support.pod_spec([crowd], volumes=volumes)), namespace=namespace)


def _stop_users(node: Node, namespace: str) -> dict[str, Any]:
    node.kubectl("exec", "users", "-n", namespace, "--", "kill", "-TERM", "1")
    status = node.wait_for_end("users", namespace=namespace, seconds=180)
    text = node.kubectl("logs", "users", "-n", namespace)
    assert status["phase"] == "Succeeded", text
    report: dict[str, Any] = json.loads(text[text.index("{\n") :])
    return report


def _rounds(done: Quickstart) -> dict[int, Object]:
    found = done.node.list("pround", done.namespace)
    return {item["spec"]["number"]: item for item in found}


def test_two_rounds_are_promoted_and_the_harmful_one_is_blocked(finished: Quickstart) -> None:
    history = {item["number"]: item for item in finished.run["status"]["history"]}
    assert {number: item["outcome"] for number, item in history.items()} == {
        0: "Promoted", 1: "Promoted", 2: "Promoted", 3: "Blocked",
    }  # fmt: skip
    assert finished.run["status"]["stable"]["round"] == 2
    settings = {number: item["spec"]["settings"]["training"]["optimizer"] for number, item in _rounds(finished).items()}
    assert [settings[number]["maximise"] for number in (1, 2, 3)] == [True, True, False]
    assert history[3]["verdict"] == "Fail"


def test_users_were_served_throughout(finished: Quickstart) -> None:
    users = finished.users
    assert (users["failed"], users["rewardsFailed"], users["errors"]) == (0, 0, {})
    digests = {item["number"]: item["digest"] for item in finished.run["status"]["history"]}
    assert set(users["byDigest"]) == set(digests.values()) or set(users["byDigest"]) == set(digests.values()) - {
        digests[3]
    }, "only policies of this run answered, and all that were ever stable did"
    assert users["sent"] == users["answered"] + users["aborted"]
    assert users["answered"] > 200


def test_pods_were_really_replaced(finished: Quickstart) -> None:
    served = {name: uids for name, uids in finished.witness.pods.items() if uids}
    assert {f"chess-r{number:04d}-serve" for number in (0, 1, 2)} <= served.keys()
    names = [name for name, uids in served.items() for _ in uids]
    assert len(set.union(*served.values())) == len(names), "no pod served two policies"
    node = finished.node
    node.wait(
        "only stable's Deployment is left",
        lambda: _servers(node, finished.namespace) == {"chess-r0002-serve"},
        namespace=finished.namespace,
    )


def _servers(node: Node, namespace: str) -> set[str]:
    return {item["metadata"]["name"] for item in node.list("deployments", namespace)} - {"chess-gateway"}


def test_what_the_run_said_was_true_at_every_moment(finished: Quickstart) -> None:
    assert finished.waited.strip() == "prodrlrun.prodrl.dev/chess condition met"
    assert finished.witness.contradictions == []
    assert kstatus(finished.run) == "Failed", "a blocked round waits for a person"
    stalled = conditions(finished.run)["Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", "GateBlocked")
    assert conditions(finished.run)["Ready"]["status"] == "True", "and users are served all the same"


def test_the_operator_ran_from_its_own_image_with_its_own_rights(finished: Quickstart) -> None:
    node = finished.node
    (pod,) = node.list("pods", OPERATOR_NAMESPACE, "app.kubernetes.io/name=prodrl-operator")
    (status,) = pod["status"]["containerStatuses"]
    assert status["image"].endswith("prodrl/operator:0.1.0")
    assert pod["spec"].get("runtimeClassName") is None
    assert (status["restartCount"], pod["spec"]["serviceAccountName"]) == (0, "prodrl-operator")
    labels = node.get("namespace", OPERATOR_NAMESPACE)["metadata"]["labels"]
    assert labels[support.SECURITY_LABEL] == "restricted"
    log = node.kubectl("logs", pod["metadata"]["name"], "-n", OPERATOR_NAMESPACE)
    assert "forbidden" not in log.lower()
    for pod in node.list("pods", finished.namespace, "app.kubernetes.io/managed-by=prodrl-operator"):
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_every_recorded_conversation_is_accounted_for(finished: Quickstart) -> None:
    command = [str(Path(sys.executable).with_name("prodrl")), "data", "audit", "--store", "s3://prodrl/runs/chess"]
    command += ["--endpoint-url", finished.storage.url, "--region", "us-east-1"]
    keys = {
        "AWS_ACCESS_KEY_ID": finished.storage.access_key,
        "AWS_SECRET_ACCESS_KEY": finished.storage.secret_key,
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **keys})
    assert done.returncode == 0, done.stdout + done.stderr
