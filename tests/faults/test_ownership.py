"""Whose objects they are: names, labels, owners, and what belongs to somebody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from prodrl_operator import names
from prodrl_operator.builders import Platform, serving
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step
from tests.faults.stage import Maker, together
from tests.faults.world import FaultWorld
from tests.support import runs

ROOT = Path(__file__).parents[2]
LONGEST = "a" + "b" * (names.MAX_RUN_NAME - 2) + "z"


@together
def test_a_foreign_object_of_our_name_is_named_and_never_touched(make: Maker) -> None:
    """cluster-readiness-engine#239, websphere-liberty#179: somebody's object was taken over because its name fitted."""
    it = make()
    it.is_operated = False
    theirs: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chess-gateway", "namespace": it.namespace, "labels": {"app": "theirs"}},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    it.apply(theirs)
    before = it.get(port.SERVICE, "chess-gateway")
    it.is_operated = True
    it.until(FaultWorld.stalled)
    it.steps(3)
    assert it.stalled() == "ForeignObject"
    assert "Service" in it.message("Stalled")
    assert "chess-gateway" in it.message("Stalled")
    assert it.get(port.SERVICE, "chess-gateway") == before
    it.kubectl("delete", "service", "chess-gateway")
    it.until(lambda w: w.stable() == 0 and w.stalled() is None)


@together
def test_a_foreign_job_with_all_our_labels_is_not_ours(make: Maker) -> None:
    """nais#498: labels can be copied; only the owner's UID says whose an object is."""
    it = make()
    it.is_operated = False
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_RUN: "chess",
        names.LABEL_ROUND: "0",
        names.LABEL_STEP: "Exporting",
        names.LABEL_ATTEMPT: "0",
    }
    pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x:1"}]}}
    metadata = {"name": "copy", "namespace": it.namespace, "labels": labels}
    it.apply(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"suspend": True, "template": pod}}
    )
    before = it.get(port.JOB, "copy")
    it.is_operated = True
    it.until(lambda w: w.stable() == 0)
    after = it.get(port.JOB, "copy")
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    assert it.round(0).status.attempts == []


@together
def test_the_longest_name_goes_through_a_whole_round_with_a_gang(make: Maker) -> None:
    """jobset#408, aibrix#2563: a pod's host name beyond 63 characters failed without a word."""
    it = make({"training": {"nodes": 2}}, name=LONGEST)
    hosts: dict[str, str] = {}

    def look(world: FaultWorld) -> bool:
        for pod in world.admin.list(port.POD, world.namespace):
            job = pod["metadata"]["labels"].get("job-name", "")
            if "train" in job:
                hosts[pod["spec"]["hostname"]] = job
        return world.is_finished()

    it.until(look)
    assert [e.outcome for e in it.run.status.history] == ["Promoted", "Promoted"]
    assert sorted(hosts) == [f"{job}-{index}" for index, job in enumerate(hosts.values())], "not cut: peers know it"
    assert all(len(host) <= 63 for host in hosts)
    one_more = {"apiVersion": names.API_VERSION, "kind": "ProdRLRun", "metadata": {"name": LONGEST + "z"}}
    refused = it.server.kubectl("create", "-f", "-", text=json.dumps({**one_more, "spec": it.spec}), check=False)
    assert refused.returncode != 0
    assert "at most 40 characters" in refused.stderr


@together
def test_labels_of_helm_and_argo_are_not_copied_to_what_they_would_prune(make: Maker) -> None:
    """clickhouse-operator#487, #1272, argocd-operator#414: Argo CD pruned volumes that bore its copied label."""
    theirs = {"argocd.argoproj.io/instance": "games", "app.kubernetes.io/instance": "games", "helm.sh/chart": "x"}
    notes = {"argocd.argoproj.io/tracking-id": "games:x", "meta.helm.sh/release-name": "games"}
    it = make(metadata={"labels": theirs, "annotations": notes})
    it.until(lambda w: w.stable() == 0)
    kinds = (port.ROUND, port.JOB, port.DEPLOYMENT, port.POD, port.SERVICE, port.CONFIG_MAP, port.NETWORK_POLICY)
    found = [o["metadata"] for kind in kinds for o in it.admin.list(kind, it.namespace)]
    assert len(found) >= 10
    for metadata in found:
        assert not (metadata.get("labels", {}).keys() | metadata.get("annotations", {}).keys()) & {*theirs, *notes}
    assert it.get(port.RUN, "chess")["metadata"]["labels"] == theirs


@together
def test_bad_specs_are_refused_while_no_operator_is_there_and_good_ones_are_not(make: Maker) -> None:
    """kueue#5244, jobset#361: a webhook that was down refused everything in the cluster."""
    it = make()
    it.is_operated = False
    for kind in ("validatingwebhookconfigurations", "mutatingwebhookconfigurations"):
        assert json.loads(it.server.kubectl("get", kind, "-o", "json").stdout)["items"] == []
    run: Object = {"apiVersion": names.API_VERSION, "kind": "ProdRLRun", "metadata": {"name": "good"}, "spec": it.spec}
    it.kubectl("create", "-f", "-", text=json.dumps(run))
    steps = [{"weight": 50, "minTrajectories": 1}, {"weight": 5, "minTrajectories": 1}]
    bad = {**it.spec, "gate": {"canary": {"steps": steps}}}
    done = it.server.kubectl(
        "-n", it.namespace, "create", "-f", "-", text=json.dumps({**run, "spec": bad}), check=False
    )
    assert "weights of steps must increase" in done.stderr


def test_no_manifest_installs_a_webhook() -> None:
    """kueue#5244: what is not there cannot be down."""
    files = [path for folder in ("crds", "manifests") for path in (ROOT / folder).rglob("*.yaml")]
    texts = {path: path.read_text() for path in files}
    assert len(texts) > 10
    assert not [path for path, text in texts.items() if "WebhookConfiguration" in text]
    for path in (ROOT / "crds").glob("prodrl*.yaml"):
        assert yaml.safe_load(path.read_text())["spec"].get("conversion", {}).get("strategy", "None") == "None"


@together
def test_a_slow_model_load_is_not_killed_before_its_deadline(make: Maker) -> None:
    """kserve#5062, kubeai#172, vllm#17386: liveness, or the Deployment's own deadline, ended a slow load."""
    it = make({"serving": {"drainSeconds": 0, "startDeadlineSeconds": 7200}})
    it.deployments = lambda d: "gateway" in d["metadata"]["name"]  # the server loads
    it.until(lambda w: w.at(0, Step.CANARY_DEPLOYING) and w.is_there(port.DEPLOYMENT, "chess-r0000-serve"))
    deployment = it.get(port.DEPLOYMENT, "chess-r0000-serve")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    probe = server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7200
    assert "initialDelaySeconds" not in server["livenessProbe"], "the startup probe keeps it off"
    assert deployment["spec"]["progressDeadlineSeconds"] > 7200
    it.steps(7, 1000.0)
    assert it.at(0, Step.CANARY_DEPLOYING)
    it.deployments = lambda d: True
    it.until(lambda w: w.stable() == 0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_server_fetches_by_an_init_step_into_a_cache_it_shares(replicas: int) -> None:
    """kserve#3869, SkyRL#800: every pod and rank downloaded the model. That one fetch serves all is in the index."""
    cache = {"persistentVolumeClaim": {"claimName": "policies"}}
    run = runs.make_run(runs.stable_status(), serving={"replicas": replicas, "cache": cache})
    made_by = runs.make_round(1, run, **runs.status_at(1, Step.CANARY_DEPLOYING))
    deployment = next(item for item in serving(run, made_by, Platform()) if item["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    fetch, server = pod["initContainers"][0], pod["containers"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "policies"}
    folder = fetch["command"][fetch["command"].index("--to") + 1]
    assert server["command"][server["command"].index("--model") + 1] == folder
    paths = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]}["cache"] for c in (fetch, server)]
    assert paths[0] == paths[1]
    assert folder.startswith(paths[0])
    assert {e["name"]: e.get("value") for e in server["env"]}["HF_HUB_OFFLINE"] == "1", "it cannot download by itself"
