"""Manifests: right by the schemas of Kubernetes, named within the limits, and nothing copied from users."""

from __future__ import annotations

import json
from collections.abc import Iterator

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl.config import CollectConfig, EvaluateConfig, ExportConfig, Route, TrainConfig
from prodrl_operator import builders, names
from prodrl_operator.api import Run
from prodrl_operator.api.round import SourcePolicy
from prodrl_operator.builders import Platform, StepInputs
from prodrl_operator.names import Step
from tests.support.manifests import DIGEST, exported, make_round, make_run, trained

PLATFORM = Platform()
STEPS = [Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING]


def inputs() -> StepInputs:
    base = make_round(0, **exported(0))
    return StepInputs(
        source=base, lineage=base, stable=base, candidate_url="http://10.0.0.2:8000", stable_url="http://s:8000"
    )


def everything(run: Run) -> Iterator[dict]:
    this = make_round(1, run, **trained(1))
    for step in STEPS:
        yield from builders.step_job(run, this, step, 0, inputs(), PLATFORM)
    yield from builders.serving(run, this, PLATFORM)
    yield from builders.gateway(run, PLATFORM)
    route = Route(digest=DIGEST, round=0, url="http://10.0.0.1:8000", weight=100)
    yield builders.routes_config_map(run, builders.route_table([route]))


RUNS = {
    "plain": make_run(),
    "everything set": make_run(
        serving={"replicas": 2, "args": ["--max-model-len", "512"], "nodeSelector": {"gpu": "b200"}, "drainSeconds": 5},
        storage={"uri": "s3://bucket/chess", "endpointUrl": "http://s3:9000", "secretRef": {"name": "s3"}},
        gateway={"replicas": 2, "apiKeysSecretRef": {"name": "keys"}},
        training={"nodes": 2, "processesPerNode": 8, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_manifest_is_strictly_valid_for_kubernetes(run: Run) -> None:
    for manifest in everything(run):
        kubernetes_validate.validate(manifest, "1.34", strict=True)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_no_workload_has_an_api_token_and_all_are_restricted(run: Run) -> None:
    pods = [m["spec"]["template"]["spec"] for m in everything(run) if m["kind"] in ("Job", "Deployment")]
    assert len(pods) == 6
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_configurations_are_read_by_the_runtime() -> None:
    run, classes = make_run(), [CollectConfig, TrainConfig, ExportConfig, EvaluateConfig]
    this = make_round(1, run, **trained(1))
    for step, kind in zip(STEPS, classes, strict=True):
        config_map, _ = builders.step_job(run, this, step, 0, inputs(), PLATFORM)
        kind.model_validate_json(config_map["data"]["config.json"])


def test_startup_budget_covers_the_deadline() -> None:
    run = make_run(serving={"startDeadlineSeconds": 720})
    deployment = builders.serving(run, make_round(1, run, **trained(1)), PLATFORM)[2]
    probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 720
    assert deployment["spec"]["progressDeadlineSeconds"] > 720


def test_a_candidate_keeps_the_settings_of_its_own_round() -> None:
    before = make_run(serving={"args": ["--max-model-len", "512"]})
    this = make_round(1, before, **trained(1))
    edited = make_run(serving={"args": ["--max-model-len", "9"]})
    command = builders.serving(edited, this, PLATFORM)[2]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--max-model-len 512 " in " ".join(command)


def test_parent_labels_and_annotations_are_never_copied() -> None:
    run = make_run()
    run.metadata["labels"] = {"argocd.argoproj.io/instance": "app"}
    run.metadata["annotations"] = {"argocd.argoproj.io/tracking-id": "x"}
    for manifest in everything(run):
        assert "argocd" not in json.dumps(manifest)


def test_round_objects_freeze_the_spec() -> None:
    run = make_run()
    made = builders.round_object(run, 3, SourcePolicy(round=2, digest=DIGEST), 2)
    assert made["metadata"]["name"] == "chess-r0003"
    assert made["spec"]["settings"]["model"] == {"uri": "file:///models/base", "servedName": "chess"}
    assert made["spec"]["source"] == {"round": 2, "digest": DIGEST}


def test_kueue_keeps_suspend_to_itself() -> None:
    jobs = [m for m in everything(make_run()) if m["kind"] == "Job"]
    assert all("suspend" not in job["spec"] for job in jobs)


@given(st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z"), st.integers(0, 1_000_000), st.integers(0, 999))
def test_names_stay_dns_labels(run_name: str, number: int, attempt: int) -> None:
    found = [builders.job_name(run_name, number, step, attempt) for step in STEPS]
    found += [builders.serving_name(run_name, number), builders.gateway_name(run_name), builders.routes_name(run_name)]
    assert all(len(name) <= 63 - 6 for name in found), "Jobs and ReplicaSets append five characters and a dash to pods"
    assert len(set(found)) == len(found)


def test_versions_of_route_tables_follow_their_content() -> None:
    one = Route(digest=DIGEST, round=0, url="http://a:1", weight=100)
    assert builders.route_table([one]).version == builders.route_table([one]).version
    assert builders.route_table([one]).version != builders.route_table([]).version
    assert names.SERVING_PORT == 8000
