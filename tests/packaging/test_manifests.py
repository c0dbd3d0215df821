"""The manifests against judges of their own: Kubernetes' schemas, checkov, helm; and kustomize against helm."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from prodrl_operator import cli, names
from prodrl_operator.builders import Platform
from prodrl_operator.observing import CHILD_KINDS
from tests.packaging import rendering
from tests.packaging.rendering import CHART, OVERLAYS, ROOT, Object, only
from tests.support import tiers

EVERYTHING = (
    *("--set", "serviceMonitor.create=true", "--set", "operator.workers=8"),
    *("--set", "operator.resyncSeconds=120", "--set", "imagePullSecrets[0].name=registry"),
    *("--set", f"image.digest=sha256:{'0' * 64}", "--set", "nodeSelector.disk=ssd", "--set", "podAnnotations.a=b"),
    *("--set-json", 'tolerations=[{"key": "gpu", "operator": "Exists"}]'),
)
"""Every switch of the chart thrown."""
UNKNOWN = {"ServiceMonitor": "another project's kind", "CustomResourceDefinition": "judged by the API server"}


def minors() -> list[str]:
    """The last four minors that the validator knows."""
    major, minor, _ = kubernetes_validate.latest_version().split(".")
    return [f"{major}.{int(minor) - back}" for back in range(4)]


RENDERED: dict[str, Any] = {
    **{f"kustomize-{name}": (lambda name=name: rendering.kustomized(name)) for name in OVERLAYS},
    **{f"helm-{name}": (lambda name=name: rendering.templated(name)) for name in OVERLAYS},
    **{f"helm-{name}-everything": (lambda name=name: rendering.templated(name, *EVERYTHING)) for name in OVERLAYS},
}


@pytest.mark.parametrize("minor", minors())
@pytest.mark.parametrize("source", RENDERED)
def test_kubernetes_schemas_strictly(source: str, minor: str) -> None:
    items = RENDERED[source]()
    judged = [item for item in items if item["kind"] not in UNKNOWN]
    assert len(judged) >= 8
    for item in judged:
        kubernetes_validate.validate(item, minor, strict=True)


def test_the_strict_validator_refuses_an_unknown_field() -> None:
    deployment = copy.deepcopy(only(rendering.kustomized("cluster-wide"), "Deployment"))
    deployment["spec"]["template"]["spec"]["hostNetwrk"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, minors()[0], strict=True)


# checkov.


def checkov(folder: Path, *arguments: str) -> dict[str, Any]:
    program = rendering.script("checkov") or tiers.lack("checkov: not installed; run scripts/checkov")
    command = [program, "--directory", str(folder), "--output", "json", *arguments]
    # In that folder: a configuration in the current one would be read unasked.
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=folder)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["parsing_errors"] == 0
    return dict(found)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    for name, render in RENDERED.items():
        judged = [item for item in render() if item["kind"] not in UNKNOWN]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(judged))
    return folder


@pytest.mark.slow
def test_checkov_finds_nothing_but_what_is_skipped_with_a_reason(rendered: Path) -> None:
    found = checkov(rendered, "--config-file", str(ROOT / ".checkov.yaml"))
    assert found["summary"]["passed"] > 100
    failed = [(item["check_id"], item["check_name"], item["resource"]) for item in found["results"]["failed_checks"]]
    assert failed == []


@pytest.mark.slow
def test_every_skip_of_checkov_is_needed_and_has_its_reason(rendered: Path) -> None:
    text = (ROOT / ".checkov.yaml").read_text()
    skipped = yaml.safe_load(text)["skip-check"]
    found = checkov(rendered, "--framework", "kubernetes", "--skip-download", "--check", ",".join(skipped))
    assert {item["check_id"] for item in found["results"]["failed_checks"]} == set(skipped)
    for check in skipped:
        assert re.search(rf"^  #.*\n  - {check}$", text, re.MULTILINE), f"{check}: no reason is given"


# Helm.


def lint(*values: str) -> subprocess.CompletedProcess[str]:
    command = [rendering.helm(), "lint", "--strict", str(CHART), *values]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("values", [(), ("--set", "scope=Namespace"), EVERYTHING], ids=["default", "namespace", "all"])
def test_helm_lint(values: tuple[str, ...]) -> None:
    done = lint(*values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "value",
    ["scope=World", "replicas=2", "image.digest=sha256:1", "operator.workers=0", "networkPolicy.apiServer.ports={}"],
)
def test_values_that_mean_nothing_are_refused(value: str) -> None:
    done = lint("--set", value)
    assert done.returncode != 0
    assert value.split("=", maxsplit=1)[0].split(".", maxsplit=1)[0] in done.stdout + done.stderr


def test_the_schema_knows_every_value_and_its_default() -> None:
    def walk(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        for key, value in values.items():
            assert key in schema["properties"], f"{path}{key}: not in values.schema.json"
            below = schema["properties"][key]
            if isinstance(value, dict) and "properties" in below:
                assert below["additionalProperties"] is False
                walk(value, below, f"{path}{key}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    walk(values, schema, "")
    assert set(schema["properties"]) - {"global"} == set(values)


def test_the_chart_carries_the_crds_and_keeps_them() -> None:
    carried = {i["metadata"]["name"]: i for i in rendering.templated("cluster-wide") if i["kind"] in UNKNOWN}
    files = sorted((ROOT / "crds").glob("*.yaml"))
    assert len(carried) == len(files) == 2
    for path in files:
        wanted = yaml.safe_load(path.read_text())
        found = carried[wanted["metadata"]["name"]]
        assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert found["spec"] == wanted["spec"]
        assert (CHART / "files" / "crds" / path.name).read_bytes() == path.read_bytes()
    without = rendering.templated("cluster-wide", "--set", "crds.install=false")
    assert not [item for item in without if item["kind"] in UNKNOWN]


def test_a_namespaced_release_can_do_without_any_cluster_scoped_object() -> None:
    values = ("--set", "crds.install=false", "--set", "userRoles.create=false")
    items = rendering.templated("namespaced", *values)
    assert {item["metadata"].get("namespace") for item in items} == {rendering.NAMESPACES["namespaced"]}


# Kustomize and helm say the same.


def essence(item: Object) -> Object:
    """An object without what the two mark differently: labels, annotations, and the order of lists of names."""
    item = copy.deepcopy(item)
    for metadata in (item["metadata"], item.get("spec", {}).get("template", {}).get("metadata", {})):
        mine = metadata.get("labels", {})
        kept = {k: v for k, v in mine.items() if k.startswith(("pod-security", "rbac.authorization"))}
        metadata.pop("labels", None)
        metadata.pop("annotations", None)
        if kept:
            metadata["labels"] = kept
    for name in ("selector", "podSelector"):
        # Kustomize's labels reach selectors of its own objects too; the name is what selects.
        selector = item.get("spec", {}).get(name)
        if selector:
            labels = selector.get("matchLabels", selector)
            assert labels["app.kubernetes.io/name"] == names.MANAGED_BY
    pod = item.get("spec", {}).get("template", {}).get("spec", {})
    for container in pod.get("containers", []):
        container["env"] = sorted(container["env"], key=lambda entry: str(entry["name"]))
    return item


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_and_the_overlay_are_the_same_installation(overlay: str) -> None:
    values: dict[str, tuple[str, ...]] = {
        "cluster-wide": (),
        "namespaced": ("--set", "crds.install=false", "--set", "userRoles.create=false"),
    }

    def by_name(items: list[Object]) -> dict[str, Object]:
        found = {f"{item['kind']} {item['metadata']['name']}": essence(item) for item in items}
        assert len(found) == len(items)
        return found

    chart, overlaid = by_name(rendering.templated(overlay, *values[overlay])), by_name(rendering.kustomized(overlay))
    # Helm keeps its release in the namespace, which must be there before anything of the chart is.
    made = {name for name in overlaid if name.startswith("Namespace ")}
    assert set(chart) == set(overlaid) - made
    for name, item in chart.items():
        assert item == overlaid[name], name


# What the manifests promise the operator and its users.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operator_is_configured_by_options_that_it_has(overlay: str) -> None:
    container = only(rendering.kustomized(overlay), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item for item in container["env"]}
    program, command = container["command"]
    assert (program, command) == ("prodrl-operator", "run")
    options = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    known = {str(option.envvar) for option in options if option.envvar}
    assert {name for name in env if name.startswith("PRODRL_")} <= known
    assert ("PRODRL_NAMESPACE" in env) == (overlay == "namespaced")
    platform = Platform()
    assert env["PRODRL_RUNTIME_IMAGE"]["value"] == platform.runtime_image
    assert env["PRODRL_SERVING_IMAGE"]["value"] == platform.serving_image


def test_a_digest_wins_over_the_tag() -> None:
    items = rendering.templated("cluster-wide", *EVERYTHING)
    image = only(items, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"prodrl/operator@sha256:{'0' * 64}"


@pytest.mark.parametrize("source", RENDERED)
def test_pods_meet_restricted_pod_security(source: str) -> None:
    """The rules of the standard, spelled out; the API server judges the same in tests/api."""
    pod = only(RENDERED[source](), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(set(volume) & {"emptyDir", "configMap", "secret", "projected"} for volume in pod["volumes"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= container["resources"].keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_policy_lets_through_what_the_operator_needs(overlay: str) -> None:
    policy = only(rendering.kustomized(overlay), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    pods = only(rendering.kustomized(overlay), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    gateways = next(rule for rule in policy["egress"] if rule["ports"][0]["port"] == names.GATEWAY_ADMIN_PORT)
    labels = gateways["to"][0]["podSelector"]["matchLabels"]
    assert labels == {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_COMPONENT: "gateway"}


def test_the_operator_may_make_every_kind_of_child() -> None:
    role = only(rendering.kustomized("cluster-wide"), "ClusterRole")
    resources = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert {kind.plural for kind in CHILD_KINDS} <= resources


def test_versions_agree() -> None:
    version = next(
        line.split('"')[1]
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if line.startswith("version = ")
    )
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    deployment = only(rendering.kustomized("cluster-wide"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"prodrl/operator:{version}"
