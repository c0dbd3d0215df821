"""Alerts and the dashboard ask for metrics that the operator really has; the component fits both overlays."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from prodrl_operator import builders, names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.names import Step
from prodrl_operator.serve import Facts, metrics_of
from tests.packaging import rendering
from tests.packaging.rendering import KUSTOMIZE, OVERLAYS, only
from tests.support.manifests import make_round, make_run, trained
from tests.support.operator_harness import World

NOTHING = builders.StepInputs()
COMPONENT = KUSTOMIZE / "components" / "monitoring"


def expressions() -> list[str]:
    rules = yaml.safe_load((COMPONENT / "prometheus-rule.yaml").read_text())["spec"]["groups"]
    found = [rule["expr"] for group in rules for rule in group["rules"]]
    dashboard = json.loads((COMPONENT / "dashboard.json").read_text())
    found += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [item["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]


def exposed() -> dict[str, set[str]]:
    """Sample name -> labels, of an operator that has turned a round."""
    it = World({"rounds": {"max": 1, "steps": 1, "batchSize": 2}})
    registry = metrics_of(it.controller, lambda: it.store.list(port.RUN), lambda: Facts(True, 1, {"get": 1}))
    it.until(lambda w: w.is_true("Completed"))
    it.controller.queue.add(("default", "chess"))
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        # A family without samples yet (no verdict, no pass) still has its name.
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
    return found


def test_every_metric_asked_for_is_exposed() -> None:
    known = exposed()
    asked = {name for text in expressions() for name in re.findall(r"\bprodrl_[a-z_]+", text)}
    assert len(asked) > 8
    assert asked - set(known) == set()


def test_metrics_of_runs_have_the_labels_that_alerts_name() -> None:
    assert {"namespace", "run"} <= exposed()["prodrl_run_stalled"]
    # Prometheus would rename a metric's `namespace` where the target has one as well.
    monitor = yaml.safe_load((COMPONENT / "service-monitor.yaml").read_text())
    assert all(endpoint["honorLabels"] for endpoint in monitor["spec"]["endpoints"])


def test_pods_are_scraped_at_ports_that_they_have_and_policies_let_in() -> None:
    monitor = yaml.safe_load((COMPONENT / "pod-monitor.yaml").read_text())["spec"]
    run, wanted = make_run(), {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    this = make_round(1, run, **trained(1))
    made = [
        *builders.gateway(run, Platform()),
        builders.step_job(run, this, Step.EXPORTING, 0, NOTHING, Platform())[-1],
    ]
    found: dict[str, int] = {}
    for pod in (item["spec"]["template"] for item in made if item["kind"] in ("Deployment", "Job")):
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for port_of in pod["spec"]["containers"][0]["ports"]:
            found[port_of["name"]] = port_of["containerPort"]
    assert {found[name] for name in wanted} == {names.PROGRESS_PORT}
    open_to_all = {
        entry["port"]
        for policy in builders.network_policies(run, Platform())
        for rule in policy["spec"]["ingress"]
        for entry in rule.get("ports", ())
        if rule.get("from") == [{"namespaceSelector": {}}]
    }
    assert open_to_all == {names.PROGRESS_PORT}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_fits_an_overlay(overlay: str, tmp_path: Path) -> None:
    # Kustomize takes folders by relative paths only.
    up = "/".join([".."] * len(tmp_path.resolve().relative_to("/").parts))
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "elsewhere",
        "resources": [f"{up}{KUSTOMIZE}/overlays/{overlay}"],
        "components": [f"{up}{COMPONENT}"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    items = rendering.objects(rendering.run(rendering.kubectl(), "kustomize", str(tmp_path)))
    for kind, name in [
        ("ServiceMonitor", "prodrl-operator"),
        ("PrometheusRule", "prodrl-operator"),
        ("PodMonitor", "prodrl-pods"),
        ("ConfigMap", "prodrl-dashboard"),
    ]:
        assert only(items, kind, name)["metadata"]["namespace"] == "elsewhere"
    service = only(items, "Service", "prodrl-operator-metrics")
    selector = only(items, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
