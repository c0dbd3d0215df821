"""What the CRDs accept and refuse, evaluated offline by the local store; tests/api runs the same table on a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

import pytest

from prodrl_operator.api import crd, rules
from prodrl_operator.api.model import DECIMAL
from prodrl_operator.api.run import Run
from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.errors import InvalidError
from prodrl_operator.rounds import validation
from tests.support import doc_manifests
from tests.support.crd_cases import ACCEPTED, REFUSED, SUITE, Case, manifest, submit
from tests.support.crd_schema import nodes, root_schema
from tests.support.doc_manifests import Shown

CRDS = list(crd.crds().values())


@pytest.fixture(scope="module")
def cluster() -> ObjectStore:
    return ObjectStore(crds=CRDS)


@pytest.fixture(autouse=True)
def _cleaned(cluster: ObjectStore) -> Iterator[None]:
    yield
    for found in cluster.list(port.RUN):
        cluster.delete(port.RUN, "default", found["metadata"]["name"])


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_accepted(cluster: ObjectStore, case: Case) -> None:
    stored = submit(cluster, case)
    run = Run.model_validate({"metadata": stored["metadata"], "spec": stored["spec"]})
    assert validation.faults(run) == [], "what the server accepts, the operator can use"


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(cluster: ObjectStore, case: Case) -> None:
    with pytest.raises(InvalidError) as refused:
        submit(cluster, case)
    assert case.message.lower() in str(refused.value).lower()


def test_cases_have_names_of_their_own() -> None:
    known = [case.name for case in ACCEPTED + REFUSED]
    assert len(known) == len(set(known))


def test_every_rule_has_its_field_and_its_refusal() -> None:
    """A rule whose path is misspelt would never be in the CRD; one that no case breaks may be vacuous."""
    placed = {
        path: {rule["message"] for rule in node["x-kubernetes-validations"]}
        for path, node in nodes(root_schema(crd.run_crd()))
        if "x-kubernetes-validations" in node
    }
    assert set(rules.RULES) <= placed.keys()
    messages = set().union(*placed.values())
    unbroken = [
        text for text in messages if not any(case.message.lower() in text.lower() for case in REFUSED if case.message)
    ]
    assert unbroken == []


def test_every_decimal_of_the_spec_has_a_range() -> None:
    settings = root_schema(crd.round_crd())["properties"]["spec"]["properties"]["settings"]
    decimals = {path for path, node in nodes(settings, "spec") if node.get("pattern") == DECIMAL}
    assert decimals == set(rules.DECIMALS)


def test_a_pattern_of_the_spec_is_said_in_words() -> None:
    """``should match '^...'`` helps nobody. The others would make the CRD too large, or cost too much."""
    spec = root_schema(crd.run_crd())["properties"]["spec"]
    bare = [path for path, node in nodes(spec, "spec") if "pattern" in node and "x-kubernetes-validations" not in node]
    assert {re.sub(r"^spec\.[a-z]+\.", "", path).split("[")[0].split(".")[0] for path in bare} == {"affinity"}


def test_defaults_keep_to_their_own_rules(cluster: ObjectStore) -> None:
    stored = submit(cluster, Case("all defaults"))
    assert Decimal(stored["spec"]["training"]["correction"]["cap"]) == 2
    assert stored["spec"]["gate"]["canary"]["steps"] == []


@pytest.mark.parametrize("shown", doc_manifests.shown(), ids=str)
def test_what_the_documentation_shows_is_accepted(cluster: ObjectStore, shown: Shown) -> None:
    stored = cluster.create(shown.run)
    run = Run.model_validate({"metadata": stored["metadata"], "spec": stored["spec"]})
    assert validation.faults(run) == []


def test_the_documentation_shows_runs() -> None:
    places = {found.place.split(":")[0] for found in doc_manifests.shown()}
    assert {"README.md", "docs/workloads.md", "examples/01-chess/run.yaml", "examples/02-cluster/run.yaml"} <= places


def test_the_field_is_named(cluster: ObjectStore) -> None:
    """Rules between fields stand at their parent, but report the field that is to be changed."""
    cluster.apply(manifest({}))
    with pytest.raises(InvalidError, match=r"spec\.storage\.uri: spec\.storage\.uri is immutable"):
        cluster.apply(manifest({"storage.uri": "file:///other"}))
    with pytest.raises(InvalidError, match=r"spec\.gate\.evaluations\[1\]\.minItems: "):
        cluster.apply(manifest({"gate.evaluations": [SUITE, {**SUITE, "name": "b", "minItems": 9, "maxItems": 8}]}))


def test_a_round_is_frozen(cluster: ObjectStore) -> None:
    stored = submit(cluster, Case("a run"))
    made = {
        "apiVersion": stored["apiVersion"],
        "kind": "ProdRLRound",
        "metadata": {"name": "chess-r0000", "namespace": "default"},
        "spec": {"run": "chess", "number": 0, "settings": stored["spec"]},
    }
    cluster.apply(made)
    changed = {**made, "spec": {**made["spec"], "settings": {**stored["spec"], "suspend": True}}}
    with pytest.raises(InvalidError, match="frozen"):
        cluster.apply(changed)
    with pytest.raises(InvalidError, match="source must be set"):
        cluster.apply(
            {**made, "metadata": {**made["metadata"], "name": "chess-r0001"}, "spec": {**made["spec"], "number": 1}}
        )
