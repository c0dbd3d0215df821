"""The CRDs on a real API server: they install within its CEL cost budget, and it decides like the offline table."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prodrl_operator.api import crd
from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.errors import InvalidError
from tests.support import doc_manifests
from tests.support.apiserver import ApiServer
from tests.support.crd_cases import ACCEPTED, REFUSED, SUITE, Case, manifest, submit
from tests.support.crd_schema import nodes, root_schema
from tests.support.doc_manifests import Shown

NAMES = ["prodrlruns.prodrl.dev", "prodrlrounds.prodrl.dev"]


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_accepted(api: KubernetesCluster, case: Case) -> None:
    stored = submit(api, case)
    assert stored["metadata"]["generation"] >= 1


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(api: KubernetesCluster, case: Case) -> None:
    with pytest.raises(InvalidError) as refused:
        submit(api, case)
    assert case.message.lower() in str(refused.value).lower()


@pytest.mark.parametrize("shown", doc_manifests.shown(), ids=str)
def test_what_the_documentation_shows_is_accepted(api_server: ApiServer, shown: Shown) -> None:
    """As a reader would try it: a misspelt field is refused, too."""
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    assert "prodrlrun.prodrl.dev/" in api_server.kubectl(*arguments, text=shown.text).stdout


def test_the_server_finds_nothing_to_complain_of(api_server: ApiServer) -> None:
    """NonStructuralSchema, Terminating and broken names would stand in the conditions of the CRD."""
    for name in NAMES:
        found = api_server.kubectl(
            "get", "crd", name, "-o", "jsonpath={range .status.conditions[*]}{.type}={.status} {end}"
        )
        assert sorted(found.stdout.split()) == ["Established=True", "NamesAccepted=True"]


def test_client_side_apply_still_works(api_server: ApiServer) -> None:
    """``kubectl apply`` without --server-side keeps the whole manifest in an annotation, which is limited."""
    text = "---\n".join(crd.render(found) for found in crd.crds().values())
    done = api_server.kubectl("apply", "--dry-run=server", "-f", "-", text=text)
    assert "configured" in done.stdout


def test_an_installed_version_can_be_replaced(api_server: ApiServer) -> None:
    """Installing again changes nothing: the server stores what we render."""
    text = "---\n".join(crd.render(found) for found in crd.crds().values())
    done = api_server.kubectl("diff", "--server-side", "-f", "-", text=text, check=False)
    assert done.returncode == 0, done.stdout


def test_older_servers_can_afford_the_rules(api_server: ApiServer) -> None:
    """Until Kubernetes 1.32 a server estimates that what may be a number is a text of 3 MB, whatever its maxLength."""
    found = copy.deepcopy(crd.run_crd())
    for _, node in nodes(root_schema(found)):
        if node.get("x-kubernetes-int-or-string"):
            node.pop("maxLength", None)
    api_server.kubectl(
        "apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-", text=crd.render(found)
    )


@pytest.mark.parametrize(
    ("arguments", "headers"),
    [
        (("get", "prun"), ["NAME", "ROUND", "STEP", "READY", "STABLE", "GATE", "WEIGHT", "AGE"]),
        (
            ("get", "prun", "-o", "wide"),
            ["NAME", "ROUND", "STEP", "READY", "STABLE", "GATE", "WEIGHT", "AGE", "REWARD", "MODEL", "REASON"],
        ),
        (("get", "pround"), ["NAME", "RUN", "NUMBER", "STEP", "VERDICT", "REASON", "AGE"]),
    ],
)
def test_columns(api_server: ApiServer, api: KubernetesCluster, arguments: tuple[str, ...], headers: list[str]) -> None:
    made = api.apply(manifest({}))
    api.create(_round(made))
    assert api_server.kubectl(*arguments).stdout.splitlines()[0].split() == headers


def test_columns_show_the_status(api_server: ApiServer, api: KubernetesCluster) -> None:
    made = api.apply(manifest({}))
    now = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "LoopRunning", "message": "", "lastTransitionTime": now}
    made["status"] = {
        "conditions": [ready, {**ready, "type": "Progressing", "reason": "Gating"}],
        "currentRound": {"number": 7, "step": "Gating"},
        "stable": {"round": 6, "digest": "sha256:x"},
        "lastGate": {"round": 6, "verdict": "Pass"},
        "canaryWeight": 25,
        "reward": "0.75",
    }
    api.update_status(made)
    row = api_server.kubectl("get", "prun", "-o", "wide", "--no-headers").stdout.split()
    assert row[:7] == ["chess", "7", "Gating", "True", "6", "Pass", "25"]
    assert row[8:] == ["0.75", "chess", "Gating"]


def test_the_category_finds_runs_and_rounds(api_server: ApiServer, api: KubernetesCluster) -> None:
    api.create(_round(api.apply(manifest({}))))
    found = api_server.kubectl("get", "prodrl", "-o", "name").stdout.split()
    assert found == ["prodrlround.prodrl.dev/chess-r0000", "prodrlrun.prodrl.dev/chess"]
    assert "prodrl" not in api_server.kubectl("get", "all", "-o", "name").stdout, "`kubectl delete all` spares them"


def test_every_field_is_explained(api_server: ApiServer) -> None:
    text = api_server.kubectl("explain", "prodrlruns.spec.gate.evaluations.margin").stdout
    assert "non-inferiority" in text
    whole = api_server.kubectl("explain", "prodrlruns", "--recursive").stdout
    assert "maxMeanAbsLogprobDiff" in whole


def test_a_round_is_frozen(api: KubernetesCluster) -> None:
    made = api.create(_round(api.apply(manifest({}))))
    changed = copy.deepcopy(_round({"apiVersion": made["apiVersion"], "spec": made["spec"]["settings"]}))
    changed["spec"]["settings"]["suspend"] = True
    with pytest.raises(InvalidError, match="frozen"):
        api.apply(changed)


def test_the_field_is_named(api: KubernetesCluster) -> None:
    """Rules between fields stand at their parent, but report the field that is to be changed."""
    api.apply(manifest({}))
    with pytest.raises(InvalidError, match=r"spec\.storage\.uri: Invalid value: .*spec\.storage\.uri is immutable"):
        api.apply(manifest({"storage.uri": "file:///other"}))
    with pytest.raises(InvalidError, match=r"spec\.gate\.evaluations\[1\]\.minItems: Invalid value"):
        api.apply(manifest({"gate.evaluations": [SUITE, {**SUITE, "name": "b", "minItems": 9, "maxItems": 8}]}))


def test_a_bad_status_is_refused_without_harm(api: KubernetesCluster) -> None:
    made = api.apply(manifest({}))
    with pytest.raises(InvalidError, match="canaryWeight"):
        api.update_status({**made, "status": {"canaryWeight": 101}})
    found = api.get(port.RUN, "default", "chess")
    assert found is not None
    assert "status" not in found, "status has no defaults: it says only what the operator wrote"


def _round(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": run["apiVersion"],
        "kind": "ProdRLRound",
        "metadata": {"name": "chess-r0000", "namespace": "default"},
        "spec": {"run": "chess", "number": 0, "settings": run["spec"]},
    }
