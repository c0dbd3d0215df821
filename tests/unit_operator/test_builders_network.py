"""Who may connect to a run's pods, and what its objects are called when names are as long as they may be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prodrl.config import Route
from prodrl_operator import builders, names
from prodrl_operator.builders import Platform
from prodrl_operator.names import Step
from tests.support.manifests import DIGEST, make_round, make_run, trained
from tests.unit_operator.test_builders import STEPS, everything, inputs
from tests.unit_operator.test_builders_cluster import PLATFORM, full_run, manifests

Object = dict[str, Any]


# NetworkPolicies.


def allows(policies: list[Object], source: Object | None, target: Object, port: int) -> bool:
    """Whether a connection gets through, by the rules of the API reference. ``source`` None: outside the cluster."""
    chosen = [p for p in policies if _selects(p["spec"]["podSelector"], target)]
    if not chosen:
        return True
    for rule in (rule for policy in chosen for rule in policy["spec"]["ingress"]):
        if rule.get("ports") and port not in [item["port"] for item in rule["ports"]]:
            continue
        if not rule.get("from") or any(source is not None and _is_peer(peer, source) for peer in rule["from"]):
            return True
    return False


def _is_peer(peer: Object, source: Object) -> bool:
    here = {"matchLabels": {"kubernetes.io/metadata.name": "default"}}
    is_near = _selects(peer.get("namespaceSelector", here), {"kubernetes.io/metadata.name": source["namespace"]})
    return is_near and _selects(peer.get("podSelector", {}), source["labels"])


def _selects(selector: Object, found: Object) -> bool:
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    is_in = all(found.get(rule["key"]) in rule["values"] for rule in rules)
    return is_in and selector.get("matchLabels", {}).items() <= found.items()


def test_pods_let_in_what_the_loop_needs_and_nothing_else() -> None:
    run = make_run(training={"nodes": 2})
    policies = builders.network_policies(run, Platform(operator_namespace="prodrl-system"))
    labels = {}
    for manifest in everything(run):
        if manifest["kind"] in ("Job", "Deployment"):
            found = manifest["spec"]["template"]["metadata"]["labels"]
            labels[found[names.LABEL_COMPONENT]] = found
    peers = {name: {"namespace": "default", "labels": found} for name, found in labels.items()}
    operator = {"namespace": "prodrl-system", "labels": {"app.kubernetes.io/name": "prodrl-operator"}}
    pretender = {"namespace": "default", "labels": operator["labels"]}
    stranger = {"namespace": "default", "labels": {"app": "other"}}
    other_run = {"namespace": "default", "labels": labels["gateway"] | {names.LABEL_RUN: "other"}}
    far_gateway = {"namespace": "elsewhere", "labels": labels["gateway"]}
    good = [
        (None, "gateway", 8080),
        (stranger, "gateway", 8080),
        (operator, "gateway", 8081),
        (peers["gateway"], "serving", 8000),
        (peers["gate"], "serving", 8000),
        (peers["train"], "train", 29500),
        (peers["train"], "train", 43210),
        (stranger, "train", 9100),
    ]
    bad = [
        (pretender, "gateway", 8081),
        (stranger, "gateway", 8081),
        (None, "gateway", 8081),
        (peers["serving"], "gateway", 8081),
        (stranger, "serving", 8000),
        (other_run, "serving", 8000),
        (far_gateway, "serving", 8000),
        (None, "serving", 8000),
        (peers["train"], "serving", 8000),
        (stranger, "train", 29500),
        (peers["gateway"], "collect", 22),
    ]
    for source, target, port in good:
        assert allows(policies, source, labels[target], port), (source, target, port)
    for source, target, port in bad:
        assert not allows(policies, source, labels[target], port), (source, target, port)
    assert all(not allows(policies, stranger, found, 1) for found in labels.values()), "every pod is covered"


def test_policies_can_be_left_to_the_namespace() -> None:
    assert builders.network_policies(make_run(networkPolicy="None"), PLATFORM) == []


# Names, labels.

RUN_NAMES = st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def at_limit(run_name: str, number: int, attempt: int) -> Iterator[Object]:
    run = full_run()
    run.metadata["name"] = run_name
    this = make_round(number, run, **trained(number))
    this.metadata["name"] = builders.round_name(run_name, number)
    for step in STEPS:
        yield from builders.step_job(run, this, step, attempt, inputs(), PLATFORM)
    yield from builders.serving(run, this, PLATFORM)
    yield from builders.serving_budget(run, this)
    yield from builders.gateway(run, PLATFORM)
    yield from builders.network_policies(run, PLATFORM)
    yield builders.routes_config_map(
        run, builders.route_table([Route(digest=DIGEST, round=0, url="http://a:1", weight=100)])
    )


@given(RUN_NAMES, st.integers(1, 1_000_000), st.integers(0, 9_999))
def test_names_at_the_length_limit(run_name: str, number: int, attempt: int) -> None:
    """Fault 34: a name of 63 characters fails silently, as a label or as a host name."""
    found = list(at_limit(run_name, number, attempt))
    assert found == list(at_limit(run_name, number, attempt)), "a pure function of its arguments"
    assert len({(m["kind"], m["metadata"]["name"]) for m in found}) == len(found)
    for manifest in found:
        assert DNS_1035.fullmatch(manifest["metadata"]["name"])
        template = manifest["spec"].get("template", {}) if "spec" in manifest else {}
        for labels in (manifest["metadata"]["labels"], template.get("metadata", {}).get("labels", {})):
            assert all(LABEL_VALUE.fullmatch(value) for value in labels.values()), labels
        if manifest["kind"] == "Job" and manifest["spec"].get("completionMode") == "Indexed":
            last = manifest["spec"]["completions"] - 1
            assert DNS_1035.fullmatch(f"{manifest['metadata']['name']}-{max(last, 4095)}"), "the pods' host names"


def test_shortened_names_differ_where_their_runs_differ() -> None:
    twins = ["a" * 39 + "b", "a" * 39 + "c"]
    found = {builders.job_name(name, 1_000_000, Step.COLLECTING, 12) for name in twins}
    assert len(found) == 2
    assert all(len(name) == 57 for name in found)
    assert builders.job_name("a" * 40, 1, Step.TRAINING, 0) == f"{'a' * 40}-r0001-train-a0", "usual names stay readable"


def test_labels_and_annotations_of_parents_are_never_copied() -> None:
    """Fault 36: Argo CD prunes a child that carries its label."""
    run = full_run()
    run.metadata["labels"] = {"argocd.argoproj.io/instance": "x"}
    run.metadata["annotations"] = {"meta.helm.sh/release-name": "x"}
    allowed = {names.LABEL_MANAGED_BY, names.LABEL_COMPONENT, names.LABEL_RUN, names.LABEL_ROUND, names.LABEL_STEP}
    allowed |= {names.LABEL_ATTEMPT, names.LABEL_QUEUE}
    for manifest in manifests(run):
        assert manifest["metadata"]["labels"].keys() <= allowed
        assert "annotations" not in manifest["metadata"]
        assert "argocd" not in json.dumps(manifest)
        assert "helm.sh" not in json.dumps(manifest)
