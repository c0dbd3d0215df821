"""Workloads as a cluster gets them: settings passed through, gangs, queues, patches, budgets.

Judges from outside: Kubernetes' own schemas in strict mode for four minors, the restricted Pod Security Standard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from prodrl.config import FetchConfig, GatewayConfig
from prodrl_operator import builders, names
from prodrl_operator.api import Run
from prodrl_operator.builders import Platform
from prodrl_operator.builders.patching import merged
from prodrl_operator.names import Step
from tests.support import pod_security
from tests.support.manifests import DIGEST, make_round, make_run, trained
from tests.unit_operator.test_builders import STEPS, everything, inputs

Object = dict[str, Any]
MINORS = kubernetes_validate.utils.all_versions()[-4:]
PLATFORM = Platform()

POD: Object = {
    "image": "registry.example/image:1",
    "imagePullSecrets": [{"name": "pull"}],
    "resources": {
        "requests": {"cpu": 2, "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
        "claims": [{"name": "gpu", "request": "one"}],
    },
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "b200"}],
    "nodeSelector": {"gpu": "b200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 10,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app": "x"}},
                    },
                }
            ]
        },
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HF_HUB_OFFLINE", "value": "0"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "podLabels": {"sidecar.istio.io/inject": "false"},
    "podAnnotations": {"karpenter.sh/do-not-disrupt": "true"},
    "shmSize": "32Gi",
}
CACHE: Object = {"cache": {"persistentVolumeClaim": {"claimName": "cache"}}}
STEP = {**POD, **CACHE, "queueName": "gpus"}
PATCH: Object = {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "containers": [
        {
            "name": "server",
            "env": [{"name": "EXTRA", "value": "1"}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        {
            "name": "sidecar",
            "image": "sidecar:1",
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        },
    ],
    "initContainers": [{"name": "fetch", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
}


def full_run(**spec: Any) -> Run:
    """Every option on, on several nodes."""
    base: Object = {
        "serving": {**POD, **CACHE, "replicas": 3, "args": ["--max-model-len", "512"], "podSpecPatch": PATCH},
        "storage": {"uri": "s3://bucket/chess", "endpointUrl": "http://s3:9000", "secretRef": {"name": "s3"}},
        "gateway": {**POD, "replicas": 2, "apiKeysSecretRef": {"name": "keys"}},
        "collect": STEP,
        "training": {**STEP, "nodes": 4, "processesPerNode": 8},
        "export": STEP,
        "evaluate": STEP,
    }
    return make_run(**{**base, **spec})


RUNS = {
    "plain": make_run(),
    "everything": full_run(),
    "one node, several processes": make_run(training={"processesPerNode": 8}),
    "several nodes": make_run(training={"nodes": 2}),
    "replace": make_run(serving={"surge": "Replace", "replicas": 2}),
}


def manifests(run: Run) -> Iterator[Object]:
    yield from everything(run)
    yield from builders.serving_budget(run, make_round(1, run, **trained(1)))
    yield from builders.network_policies(run, PLATFORM)


def pods(run: Run) -> list[Object]:
    return [m["spec"]["template"]["spec"] for m in manifests(run) if m["kind"] in ("Job", "Deployment")]


def job(run: Run, step: Step, attempt: int = 0) -> Object:
    this = make_round(1, run, **trained(1))
    return builders.step_job(run, this, step, attempt, inputs(), PLATFORM)[-1]


def deployment(run: Run) -> Object:
    return builders.serving(run, make_round(1, run, **trained(1)), PLATFORM)[-1]


def by_name(items: list[Object]) -> dict[str, Object]:
    return {item["name"]: item for item in items}


# Judges.


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_manifests_are_strictly_valid_for_the_last_four_minors(run: Run, minor: str) -> None:
    kinds = set()
    for manifest in manifests(run):
        kubernetes_validate.validate(manifest, minor, strict=True)
        kinds.add(manifest["kind"])
    assert {"Deployment", "Service", "ConfigMap", "Job", "NetworkPolicy"} <= kinds


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_pods_meet_the_restricted_standard(run: Run) -> None:
    for pod in pods(run):
        assert pod_security.violations(pod) == []
        assert pod["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in pod


def test_the_restricted_standard_is_really_judged() -> None:
    pod = pods(make_run())[0]
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    pod["containers"][0]["securityContext"] = {"privileged": True}
    assert len(pod_security.violations(pod)) == 4


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_lists_that_the_api_server_merges_by_name_hold_no_name_twice(run: Run) -> None:
    for pod in pods(run):
        assert len(by_name(pod["volumes"])) == len(pod["volumes"])
        for item in [*pod["containers"], *pod.get("initContainers", [])]:
            assert len(by_name(item.get("env", []))) == len(item.get("env", []))
            paths = [mount["mountPath"] for mount in item.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            assert {mount["name"] for mount in item.get("volumeMounts", [])} <= by_name(pod["volumes"]).keys()


# Settings.


def test_settings_reach_every_workload() -> None:
    templates = [m["spec"]["template"] for m in manifests(full_run()) if m["kind"] in ("Job", "Deployment")]
    assert len(templates) == 6
    for template in templates:
        pod, main = template["spec"], template["spec"]["containers"][0]
        for field in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "priorityClassName"):
            assert pod[field] == POD[field], field
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert pod["resourceClaims"] == POD["resourceClaims"]
        assert main["resources"] == POD["resources"]
        assert main["image"] == POD["image"]
        spread = pod["topologySpreadConstraints"][0]
        assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
        assert template["metadata"]["annotations"] == POD["podAnnotations"]
        assert by_name(main["env"])["HF_HUB_OFFLINE"]["value"] == "0", "the user's value replaces a default"
        assert by_name(pod["volumes"])["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def test_shared_memory_and_caches_have_defaults_where_they_are_needed() -> None:
    assert (
        by_name(deployment(make_run())["spec"]["template"]["spec"]["volumes"])["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    )
    single, several = job(make_run(), Step.TRAINING), job(make_run(training={"processesPerNode": 2}), Step.TRAINING)
    assert "shm" not in by_name(single["spec"]["template"]["spec"]["volumes"])
    assert "shm" in by_name(several["spec"]["template"]["spec"]["volumes"])
    server = deployment(make_run())["spec"]["template"]["spec"]["containers"][0]
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert by_name(server["env"])[name]["value"].startswith("/cache/"), "the root file system is read-only"


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({}, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "80Gi"}}, {"emptyDir": {"sizeLimit": "80Gi"}}),
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"persistentVolumeClaim": {"claimName": "c"}}),
        ({"hostPath": {"path": "/mnt/nvme"}}, {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}}),
    ],
)
def test_the_policy_lies_in_the_cache_under_its_digest(cache: Object, source: Object) -> None:
    """Fault 14: every pod downloads the model."""
    run = make_run(serving={"cache": cache})
    pod = deployment(run)["spec"]["template"]["spec"]
    assert by_name(pod["volumes"])["cache"] == {"name": "cache", **source}
    fetch, server = pod["initContainers"][0]["command"], pod["containers"][0]["command"]
    folder = fetch[fetch.index("--to") + 1]
    assert server[server.index("--model") + 1] == folder
    assert folder == f"/cache/policies/default.chess/{'a' * 16}"


def test_a_shared_cache_is_told_which_policies_are_never_served_again() -> None:
    run = make_run()
    this = make_round(9, run, **trained(9))
    status = {"stable": {"round": 7, "digest": DIGEST}, "previous": {"round": 5, "digest": DIGEST}}
    for found, expected in ((status, 5), ({"stable": status["stable"]}, 0), ({}, 0)):
        observed = run.model_copy(update={"status": type(run.status).model_validate(found)})
        config = builders.serving(observed, this, PLATFORM)[0]["data"]["fetch.json"]
        assert FetchConfig.model_validate_json(config).oldest_round == expected


# The patch.


def test_a_patch_adds_volumes_variables_and_sidecars() -> None:
    pod = deployment(full_run())["spec"]["template"]["spec"]
    containers, init = by_name(pod["containers"]), by_name(pod["initContainers"])
    assert by_name(pod["volumes"])["data"]["persistentVolumeClaim"] == {"claimName": "data"}
    for item in (containers["server"], init["fetch"]):
        assert {"name": "data", "mountPath": "/data"} in item["volumeMounts"]
        assert len(item["volumeMounts"]) > 1, "ours stay"
    assert by_name(containers["server"]["env"])["EXTRA"] == {"name": "EXTRA", "value": "1"}
    assert containers["server"]["command"][0] == "python"
    assert containers["sidecar"]["image"] == "sidecar:1"


def test_a_patch_changes_and_removes_parts_of_objects() -> None:
    patch = {
        "securityContext": {"fsGroup": 20, "seccompProfile": {"$patch": "delete"}},
        "containers": [{"name": "step", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Ti"}}],
    }
    pod = job(make_run(training={"podSpecPatch": patch}), Step.TRAINING)["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == 20
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "seccompProfile" not in pod["securityContext"]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert by_name(pod["volumes"])["scratch"] == {"name": "scratch", "emptyDir": {"sizeLimit": "1Ti"}}


def test_merging_changes_neither_side_and_removes_items() -> None:
    target = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}], "x": [1, 2]}
    patch = {"volumes": [{"name": "a", "$patch": "delete"}, {"name": "c", "emptyDir": {}}], "x": [3]}
    before = json.dumps([target, patch])
    assert merged(target, patch) == {
        "volumes": [{"name": "b", "emptyDir": {}}, {"name": "c", "emptyDir": {}}],
        "x": [3],
    }
    assert json.dumps([target, patch]) == before


@pytest.mark.parametrize(
    ("patch", "word"),
    [
        ({"serviceAccountName": "admin"}, "serviceAccountName"),
        ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
        ({"restartPolicy": "OnFailure"}, "restartPolicy"),
        ({"hostname": "x"}, "hostname"),
        ({"subdomain": "x"}, "subdomain"),
        ({"containers": [{"name": "server", "command": ["sh"]}]}, "command"),
        ({"containers": [{"name": "server", "args": ["--enforce-eager"]}]}, "args"),
        ({"containers": [{"name": "step", "terminationMessagePath": "/x"}]}, "terminationMessagePath"),
        ({"containers": [{"name": "server", "$patch": "delete"}]}, "removed"),
        (
            {"containers": [{"name": "server", "env": [{"name": "PRODRL_MODEL_DIR", "value": "/x"}]}]},
            "PRODRL_MODEL_DIR",
        ),
        ({"containers": [{"image": "nameless"}]}, "name"),
        ({"containers": {"server": {}}}, "must be a list"),
        ({"volumes": "none"}, "must be a list"),
        ({"volumes": {"$patch": "delete"}}, "must be a list"),
        ({"containers": [{"name": "server", "volumeMounts": [{"name": "x"}]}]}, "mountPath"),
        ({"nodeName": "n"}, "nodeName"),
        ({"priorityClassName": None}, "null"),
        ({"containers": [{"name": "server", "securityContext": {"runAsUser": None}}]}, "null"),
    ],
)
def test_a_patch_cannot_touch_what_the_operator_needs(patch: Object, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        make_run(serving={"podSpecPatch": patch})


@pytest.mark.parametrize(("part", "name"), [("serving", "server"), ("gateway", "gateway")])
@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
@pytest.mark.parametrize("change", [{"$patch": "delete"}, {"exec": {"command": ["true"]}}])
def test_a_patch_cannot_say_when_a_pod_is_ready(part: str, name: str, probe: str, change: Object) -> None:
    """Ready means that a pod serves the policy of its round and has answered: promotions are decided by it."""
    with pytest.raises(ValidationError, match=rf"containers\[{name}\].{probe}: is the operator's.*leave it out"):
        make_run(**{part: {"podSpecPatch": {"containers": [{"name": name, probe: change}]}}})


def test_sidecars_have_probes_of_their_own() -> None:
    sidecar = {
        "name": "proxy",
        "image": "proxy:1",
        "restartPolicy": "Always",
        "startupProbe": {"tcpSocket": {"port": 1}},
    }
    pod = deployment(make_run(serving={"podSpecPatch": {"initContainers": [sidecar]}}))["spec"]["template"]["spec"]
    assert by_name(pod["initContainers"])["proxy"] == sidecar


def test_a_patch_brings_no_token_of_the_api() -> None:
    def patch(*sources: Object) -> Object:
        return {"podSpecPatch": {"volumes": [{"name": "token", "projected": {"sources": list(sources)}}]}}

    secret = {"secret": {"name": "s"}}
    for part in ("serving", "gateway", "collect", "training", "export", "evaluate"):
        for token in ({"path": "t"}, {"path": "t", "audience": "https://kubernetes.default.svc"}, "x", {}):
            with pytest.raises(
                ValidationError, match=r"volumes\[token\].projected.sources: serviceAccountToken without"
            ):
                make_run(**{part: patch(secret, {"serviceAccountToken": token})})
    for_another = {"serviceAccountToken": {"path": "t", "audience": "sts.amazonaws.com"}}
    for sources in ([secret], [secret, for_another]):
        assert make_run(serving=patch(*sources)).spec.serving.pod_spec_patch == patch(*sources)["podSpecPatch"]


def test_pods_may_have_an_identity_of_their_own_and_still_hold_no_token() -> None:
    """A cloud's workload identity: the S3 client finds its credentials without a Secret of ours."""
    identity = {"serviceAccountName": "chess-trainer"}
    run = make_run(training=identity)
    spec = job(run, Step.TRAINING)["spec"]["template"]["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("chess-trainer", False)
    assert "serviceAccountName" not in job(run, Step.EXPORTING)["spec"]["template"]["spec"]


# Jobs.


def test_jobs_end_at_a_disruption_and_tell_every_exit_code() -> None:
    """Fault 19: a drained node is not a failed training."""
    for step in STEPS:
        spec = job(make_run(), step)["spec"]
        first, second = spec["podFailurePolicy"]["rules"]
        assert first == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert set(second["onExitCodes"]["values"]) == set(names.EXIT_CODES)
        assert second["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
        assert spec["backoffLimit"] == 0, "retries are the operator's"


def test_a_gang_meets_at_the_first_pod_of_its_headless_service() -> None:
    run = make_run(training={"nodes": 4, "processesPerNode": 8})
    config_map, service, training = builders.step_job(
        run, make_round(1, run, **trained(1)), Step.TRAINING, 2, inputs(), PLATFORM
    )
    spec, pod = training["spec"], training["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert "successPolicy" not in spec, "all indexes must succeed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= training["spec"]["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"], "gives pods their names"
    command = pod["containers"][0]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=False))
    name = training["metadata"]["name"]
    assert options["--rdzv-endpoint"] == f"{name}-0.{service['metadata']['name']}.default.svc:29500"
    assert options["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--max-restarts"]) == ("4", "8", "0")
    assert config_map["kind"] == "ConfigMap"
    other = builders.step_job(run, make_round(1, run, **trained(1)), Step.TRAINING, 3, inputs(), PLATFORM)[1]
    assert other["spec"]["selector"] != service["spec"]["selector"], "attempts never meet each other"


def test_one_node_needs_no_rendezvous() -> None:
    run = make_run(training={"processesPerNode": 8})
    kinds = [
        m["kind"]
        for m in builders.step_job(run, make_round(1, run, **trained(1)), Step.TRAINING, 0, inputs(), PLATFORM)
    ]
    assert kinds == ["ConfigMap", "Job"]
    assert "--standalone" in job(run, Step.TRAINING)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert job(make_run(), Step.TRAINING)["spec"]["template"]["spec"]["containers"][0]["command"][0] == "prodrl"


def test_a_queued_job_starts_suspended_under_its_queue() -> None:
    """Fault 20: Kueue decides when it runs."""
    for step in STEPS:
        queued = job(full_run(), step)
        assert queued["metadata"]["labels"][names.LABEL_QUEUE] == "gpus"
        assert queued["spec"]["suspend"] is True
        assert names.LABEL_QUEUE not in queued["spec"]["template"]["metadata"]["labels"], "it would be queued twice"
        plain = job(make_run(), step)
        assert "suspend" not in plain["spec"]
        assert names.LABEL_QUEUE not in plain["metadata"]["labels"]


# Servers.


def test_servers_come_and_go_as_surge_says() -> None:
    surge = deployment(make_run())["spec"]["strategy"]
    assert surge == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert deployment(make_run(serving={"surge": "Replace"}))["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment(make_run(serving={"terminationGraceSeconds": 300}))["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300


def test_a_gateway_is_ready_when_it_can_serve_and_leaves_before_it_stops() -> None:
    """A replica without routes, or that cannot reach the store, must not replace one that serves."""

    def of(platform: Platform) -> tuple[Object, Object]:
        found = next(item for item in builders.gateway(make_run(), platform) if item["kind"] == "Deployment")
        pod = found["spec"]["template"]["spec"]
        return pod, pod["containers"][0]

    pod, container = of(PLATFORM)
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    config = next(item for item in builders.gateway(make_run(), PLATFORM) if item["kind"] == "ConfigMap")
    drain = GatewayConfig.model_validate_json(config["data"]["gateway.json"]).drain_seconds
    assert program == "sleep"
    assert int(seconds) + drain < pod["terminationGracePeriodSeconds"]
    assert "lifecycle" not in of(Platform(local=True))[1], "there a pod leaves its Service by itself"


def test_the_operators_engine_arguments_have_the_last_word() -> None:
    """An argument parser takes the last of two, and abbreviations that no rule knows."""
    command = deployment(make_run(serving={"args": ["--por", "9", "--logprobs-m", "raw_logprobs"]}))
    words = command["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words.index("--por") < words.index("--port")
    assert words.index("--logprobs-m") < words.index("--logprobs-mode")


def test_a_quota_finds_amounts_on_every_container_and_devices_on_one() -> None:
    amounts = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1}
    resources = {"requests": amounts, "limits": amounts, "claims": [{"name": "gpu"}]}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "h200"}]
    pod = deployment(make_run(serving={"resources": resources, "resourceClaims": claims}))["spec"]["template"]["spec"]
    plain = {"cpu": "4", "memory": "16Gi"}
    assert pod["initContainers"][0]["resources"] == {"requests": plain, "limits": plain}
    assert pod["containers"][0]["resources"] == resources
    assert "resources" not in deployment(make_run())["spec"]["template"]["spec"]["initContainers"][0]


def test_what_a_round_will_make_is_what_it_makes() -> None:
    """All of it is tried out before the round begins: only what nobody can know yet may differ."""
    run = make_run(training={"podLabels": {"team": "games"}}, serving={"nodeSelector": {"gpu": "h200"}})
    manifest = builders.round_object(run, 1, make_round(1, run).spec.source, 0)
    tried = {item["metadata"]["name"]: item for item in builders.preview(run, manifest, PLATFORM)}
    this = make_round(1, run, **trained(1))
    made = [builders.step_job(run, this, step, 0, inputs(), PLATFORM)[-1] for step in STEPS]
    users = builders.gateway(run, PLATFORM)
    made += [item for item in [*builders.serving(run, this, PLATFORM), *users] if item["kind"] == "Deployment"]
    assert {item["metadata"]["name"] for item in made} == set(tried)
    for item in made:
        twin = tried[item["metadata"]["name"]]
        assert _pod_of(item) == _pod_of(twin)
        assert item["metadata"]["labels"] == twin["metadata"]["labels"]
    first = builders.round_object(run, 0, None, 0)
    kinds = [item["metadata"]["name"] for item in builders.preview(run, first, PLATFORM)]
    assert kinds == ["chess-r0000-export-a0", "chess-r0000-gate-a0", "chess-r0000-serve", "chess-gateway"]


def _pod_of(item: Object) -> Object:
    """Without the policy's folder, which is named after its digest."""
    text = json.dumps(item["spec"]["template"])
    return dict(json.loads(re.sub(r"/policies/default.chess/[0-9a-f]{16}", "/policies/x", text)))


def test_budgets_guard_several_replicas_only() -> None:
    this = make_round(1, make_run(), **trained(1))
    assert builders.serving_budget(make_run(), this) == []
    run = make_run(serving={"replicas": 2})
    (budget,) = builders.serving_budget(run, make_round(1, run, **trained(1)))
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a broken node can be drained"
    template = deployment(run)["spec"]["template"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert "PodDisruptionBudget" not in {
        m["kind"] for m in builders.serving(run, make_round(1, run, **trained(1)), PLATFORM)
    }
