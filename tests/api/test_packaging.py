"""What is shipped, judged by a real API server: dry run, Pod Security, and whole rounds under the shipped RBAC.

The server is this file's own: it checks owner references against permissions (OwnerReferencesPermissionEnforcement) and
writes an audit log of the operator's account, which says exactly what the operator did and whether it was allowed to.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from prodrl_operator.leading import Elector
from prodrl_operator.names import Step
from tests.packaging import rendering
from tests.packaging.rendering import CHART, NAMESPACES, OVERLAYS, Object
from tests.support.api_world import ApiWorld
from tests.support.apiserver import ApiServer, running
from tests.support.fake_kubelet import Outcome
from tests.support.local_cluster import eventually
from tests.support.operator_harness import all_well, blocking

ACCOUNTS = {overlay: f"system:serviceaccount:{namespace}:prodrl-operator" for overlay, namespace in NAMESPACES.items()}
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": list(ACCOUNTS.values())}, {"level": "None"}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("packaging")
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    arguments = (
        *("--enable-admission-plugins", "OwnerReferencesPermissionEnforcement"),
        *("--audit-policy-file", "policy.yaml", "--audit-log-path", "audit.log", "--audit-log-mode", "blocking"),
    )
    with running(folder, arguments) as made:
        for namespace in NAMESPACES.values():
            made.kubectl("create", "namespace", namespace)
        yield made


def applied(server: ApiServer, text: str, *arguments: str) -> str:
    return server.kubectl("apply", "--server-side", "--force-conflicts", *arguments, "-f", "-", text=text).stdout


def stream(items: list[Object]) -> str:
    """As JSON: a string that looks like a number to some readers of YAML stays one."""
    return "\n---\n".join(json.dumps(item) for item in items)


SOURCES: dict[str, Callable[[str], str]] = {"kustomize": rendering.kustomized_text, "helm": rendering.templated_text}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_server_side_dry_run(server: ApiServer, source: str, overlay: str) -> None:
    text = SOURCES[source](overlay)
    said = applied(server, text, "--dry-run=server", "--validate=strict")
    assert said.count("serverside-applied (server dry run)") == len(rendering.objects(text)) >= 8


def test_the_operators_pod_is_admitted_under_restricted_pod_security(server: ApiServer) -> None:
    space = rendering.only(rendering.kustomized("cluster-wide"), "Namespace", "prodrl-system")
    space["metadata"]["name"] = "pod-security"
    applied(server, stream([space]))
    template = rendering.only(rendering.kustomized("cluster-wide"), "Deployment")["spec"]["template"]
    template["spec"].pop("priorityClassName")  # made by the overlay, and this is about another rule
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator", "namespace": "pod-security"}}
    command = ("create", "--dry-run=server", "-f", "-")
    server.kubectl(*command, text=json.dumps({**pod, "spec": template["spec"]}))
    del template["spec"]["containers"][0]["securityContext"]
    refused = server.kubectl(*command, text=json.dumps({**pod, "spec": template["spec"]}), check=False)
    assert 'violates PodSecurity "restricted:latest"' in refused.stderr


# RBAC, by the authorizer.


def installed(server: ApiServer, overlay: str, namespace: str | None = None) -> str:
    """Install the overlay's accounts and roles; a token of the operator. ``namespace``: the Role goes there."""
    items = [i for i in rendering.kustomized(overlay) if i["kind"] == "ServiceAccount" or "Role" in i["kind"]]
    for item in items:
        if namespace is not None and item["kind"] != "ServiceAccount" and item["metadata"]["name"] == "prodrl-operator":
            item["metadata"]["namespace"] = namespace
    applied(server, stream(items))
    space, account = namespace or NAMESPACES[overlay], ACCOUNTS[overlay]
    asked = ("auth", "can-i", "list", "prodrlruns.prodrl.dev", "-n", space, "--as", account)
    # The API server reads its roles from a watch; this asks as ourselves, so that the account's audit stays clean.
    eventually(lambda: server.kubectl(*asked, check=False).stdout.strip() == "yes")
    return server.kubectl("create", "token", "prodrl-operator", "-n", NAMESPACES[overlay]).stdout.strip()


def audited(server: ApiServer, account: str) -> list[tuple[str, str, str, int]]:
    """(group, resource, verb, status code) of every request of an account."""
    found = []
    for line in (server.folder / "audit.log").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["user"]["username"] != account or "objectRef" not in event:
            continue
        about = event["objectRef"]
        resource = about["resource"] + (f"/{about['subresource']}" if "subresource" in about else "")
        code = int(event.get("responseStatus", {}).get("code", 0))
        found.append((about.get("apiGroup", ""), resource, event["verb"], code))
    return found


def whole_rounds(server: ApiServer, token: str, **options: Any) -> None:
    """A promoted and a blocked round with replicas everywhere, then the deletion of the run."""
    spec = {
        "rounds": {"max": 2, "steps": 2, "batchSize": 2, "historyLimit": 1},
        "onBlocked": "ContinueLineage",
        "gateway": {"replicas": 2, "authentication": "Anonymous"},
        "serving": {"replicas": 2, "drainSeconds": 0},
        "training": {"nodes": 2},
    }
    world = ApiWorld(server, spec, blocking(2), cluster=server.connect(token), **options)
    world.until(ApiWorld.is_finished)
    assert [entry.outcome for entry in world.run.status.history] == ["Promoted", "Promoted", "Blocked"]
    world.close()


def suspended_and_aborted(server: ApiServer, token: str) -> None:
    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        return None if step is Step.TRAINING else all_well(number, step, attempt)

    world = ApiWorld(server, {}, script, cluster=server.connect(token))
    world.until(lambda w: w.at(1, Step.TRAINING))
    world.edit(suspend=True)
    world.step()
    world.edit(suspend=False)
    world.step()
    world.edit(requests={"abortRound": 1})
    world.until(lambda w: w.at(1, Step.ABORTED))
    world.close()


def elected(server: ApiServer, token: str, overlay: str) -> None:
    elector = Elector(server.connect(token), NAMESPACES[overlay], "prodrl-operator", "me")
    elector.look()
    elector.look()
    assert elector.is_leading
    elector.give_back()


@pytest.mark.timeout(600)
def test_whole_rounds_under_the_cluster_role_are_never_refused(server: ApiServer) -> None:
    token = installed(server, "cluster-wide")
    whole_rounds(server, token)
    suspended_and_aborted(server, token)
    elected(server, token, "cluster-wide")
    done = audited(server, ACCOUNTS["cluster-wide"])
    assert len(done) > 100
    # Creating in a namespace that goes away is refused by admission, not by RBAC; nothing of the kind happens here.
    assert [item for item in done if item[3] in (401, 403)] == []
    used = {item[:3] for item in done}
    # What is granted to children is really used: server-side apply, status, finalizers and Leases among them.
    for wanted in [
        ("apps", "deployments", "patch"),
        ("batch", "jobs", "create"),
        ("prodrl.dev", "prodrlruns/status", "update"),
        ("prodrl.dev", "prodrlruns", "patch"),
        ("policy", "poddisruptionbudgets", "patch"),
        ("coordination.k8s.io", "leases", "update"),
        ("", "events", "create"),
    ]:
        assert wanted in used
    assert "secrets" not in {resource for _, resource, _ in used}


@pytest.mark.timeout(600)
def test_the_namespaced_role_is_enough_and_ends_at_its_namespace(server: ApiServer) -> None:
    world = ApiWorld(server)
    token = installed(server, "namespaced", world.namespace)
    world.cluster = server.connect(token)
    world.restart()
    world.until(ApiWorld.is_finished)
    elected(server, token, "namespaced")
    assert [item for item in audited(server, ACCOUNTS["namespaced"]) if item[3] in (401, 403)] == []
    beyond = server.kubectl("get", "prun", "-n", "default", token=token, check=False)
    assert "Forbidden" in beyond.stderr
    secrets = server.kubectl("get", "secrets", "-n", world.namespace, token=token, check=False)
    assert "Forbidden" in secrets.stderr
    world.close()


def test_without_the_rule_for_finalizers_no_child_could_be_made(server: ApiServer) -> None:
    """The rule that no request shows in the audit log: owner references are checked when a child is made."""
    account = ACCOUNTS["cluster-wide"]
    installed(server, "cluster-wide")
    role = rendering.only(rendering.kustomized("cluster-wide"), "ClusterRole")
    role["rules"] = [rule for rule in role["rules"] if "prodrlruns/finalizers" not in rule["resources"]]
    child = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "child",
            "namespace": "default",
            "ownerReferences": [
                {
                    "apiVersion": "prodrl.dev/v1alpha1",
                    "kind": "ProdRLRun",
                    "name": "chess",
                    "uid": "0d9ef4cc-58b9-4a3f-a1ee-2ff6e1b3a0a8",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
    }
    create = ("create", "--dry-run=server", "--as", account, "-f", "-")
    server.kubectl(*create, text=json.dumps(child))
    applied(server, stream([role]))

    def is_refused() -> bool:
        return "blockOwnerDeletion" in server.kubectl(*create, text=json.dumps(child), check=False).stderr

    eventually(is_refused)
    installed(server, "cluster-wide")


# Helm, for real.


def helm(server: ApiServer, *arguments: str) -> str:
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig_of("admin"))}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        environment["HELM_" + name.removeprefix("XDG_")] = str(Path(server.folder) / "helm")
    done = subprocess.run(
        [rendering.helm(), *arguments], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_helm_upgrades_the_crds_and_leaves_them_and_the_runs(server: ApiServer) -> None:
    where = ("--namespace", "helm-test")
    server.kubectl("create", "namespace", "helm-test")
    said = helm(server, "install", "prodrl", str(CHART), *where, "--take-ownership", "--force-conflicts")
    assert "looks after runs in all namespaces" in said
    # An older CRD, as an earlier chart left it; the next upgrade must bring it up to date.
    old = {"spec": {"names": {"shortNames": ["oldrun"]}}}
    crd = "crd/prodrlruns.prodrl.dev"
    server.kubectl("patch", crd, "--type=merge", "-p", json.dumps(old))
    helm(server, "upgrade", "prodrl", str(CHART), *where, "--force-conflicts")
    names = json.loads(server.kubectl("get", crd, "-o", "json").stdout)["spec"]["names"]
    assert names["shortNames"] == ["prun"]
    run = {
        "apiVersion": "prodrl.dev/v1alpha1",
        "kind": "ProdRLRun",
        "metadata": {"name": "kept", "namespace": "helm-test"},
        "spec": {
            "model": {"uri": "s3://models/base", "servedName": "kept"},
            "storage": {"uri": "s3://store/kept"},
            "gateway": {"authentication": "Anonymous"},
        },
    }
    server.kubectl("create", "-f", "-", text=json.dumps(run))
    helm(server, "uninstall", "prodrl", *where)
    assert server.kubectl("get", "prun", "kept", "-n", "helm-test", "-o", "name").stdout.strip()
    left = server.kubectl("get", "deployment,role,serviceaccount", "-n", "helm-test", "-o", "name").stdout
    assert "prodrl-operator" not in left
