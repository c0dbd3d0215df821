"""The vLLM Deployment, Service and ConfigMap of one policy, and the disruption budget of the stable one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prodrl.config import PolicyRef, RecorderConfig, SamplingPolicy, StoreConfig
from prodrl.config.steps import FetchConfig
from prodrl_operator import names
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run, RunSpec
from prodrl_operator.builders.metadata import (
    Object,
    Platform,
    config_map,
    disruption_budget,
    labels,
    metadata,
    serving_name,
)
from prodrl_operator.builders.pods import (
    CACHE_DIR,
    CONFIG_DIR,
    RESULT_PATH,
    SHM_DIR,
    Container,
    Mount,
    Pod,
    cache_environment,
    cache_mount,
    config_mount,
    credentials_mounts,
    environment,
    pod_template,
    scratch_mount,
    shm_mount,
    store_config,
)
from prodrl_operator.names import Step

SPOOL_DIR = "/spool"
SHM_SIZE = "8Gi"
PLAIN = ("cpu", "memory", "ephemeral-storage")
PROBE_SECONDS = 3
ENGINE_HEAD = 20
"""The engine's own limit, which clients may count on."""
TIE_MARGIN = 12
"""Logits in bfloat16 tie at the edge of a top-k filter: the recorder asks for a few entries more to see all of it."""


def engine_args(spec: RunSpec) -> list[str]:
    """Engine arguments that change numbers: part of the policy digest, in this order; of two the last one counts."""
    head = spec.recording.top_logprobs if spec.recording.metadata == "ScoreCentering" else 0
    limit = max(head, ENGINE_HEAD) + TIE_MARGIN
    return [*spec.serving.args, "--logprobs-mode", "processed_logprobs", "--max-logprobs", str(limit)]


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def recorder_config(run_name: str, made_by: Round, store: StoreConfig) -> RecorderConfig:
    """What the recorder inside the server is told; the replica's own name comes from its environment."""
    policy = made_by.status.policy
    assert policy is not None, "serving is built after Exporting"
    recording = made_by.spec.settings.recording
    wanted = recording.sampling_policy
    return RecorderConfig(
        store=store,
        run=run_name,
        round=made_by.spec.number,
        policy_digest=policy.digest,
        top_logprobs=recording.top_logprobs if recording.metadata == "ScoreCentering" else 0,
        sampling_policy=SamplingPolicy(
            temperature=_number(wanted.temperature), top_p=_number(wanted.top_p), top_k=wanted.top_k
        ),
        flush_seconds=recording.flush_seconds,
    )


def serving(run: Run, made_by: Round, platform: Platform) -> list[Object]:
    """ConfigMap, Service and Deployment that serve the policy made by a round, under that round's settings."""
    spec = made_by.spec.settings
    policy = made_by.status.policy
    assert policy is not None, "serving is built after Exporting"
    name = serving_name(run.metadata["name"], made_by.spec.number)
    its_labels = labels(run, "serving", made_by.spec.number, Step.CANARY_DEPLOYING)
    store = store_config(spec)
    fetch = FetchConfig(
        store=store,
        policy=PolicyRef(round=made_by.spec.number, digest=policy.digest, key=policy.key),
        oldest_round=_oldest_served(run, made_by),
    )
    data = {
        "fetch.json": fetch.model_dump_json(),
        "recorder.json": recorder_config(run.metadata["name"], made_by, store).model_dump_json(),
    }
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, run, its_labels),
        "spec": {
            "selector": its_labels,
            "ports": [{"name": "http", "port": names.SERVING_PORT, "targetPort": names.SERVING_PORT}],
        },
    }
    return [
        config_map(name, run, its_labels, data),
        service,
        _deployment(run, made_by, platform, its_labels),
    ]


def serving_budget(run: Run, made_by: Round) -> list[Object]:
    """The disruption budget of the stable policy's servers, where there are several. A candidate has none."""
    number = made_by.spec.number
    if made_by.spec.settings.serving.replicas == 1:
        return []
    its_labels = labels(run, "serving", number, Step.CANARY_DEPLOYING)
    return [disruption_budget(serving_name(run.metadata["name"], number), run, its_labels)]


def model_dir(run: Run, made_by: Round) -> str:
    """Where the policy lies in its pods: a cache may hold those of other rounds and other runs."""
    policy = made_by.status.policy
    assert policy is not None, "serving is built after Exporting"
    owner = f"{run.metadata.get('namespace', 'default')}.{run.metadata['name']}"
    return f"{CACHE_DIR}/policies/{owner}/{policy.digest.removeprefix('sha256:')[:16]}"


def _oldest_served(run: Run, made_by: Round) -> int:
    """No policy of an earlier round will be served again: a shared cache may forget it."""
    served = (run.status.stable, run.status.previous)
    return min(made_by.spec.number, *(policy.round if policy else 0 for policy in served))


def _deployment(run: Run, made_by: Round, platform: Platform, its_labels: dict[str, str]) -> Object:
    settings = made_by.spec.settings.serving
    name = serving_name(run.metadata["name"], made_by.spec.number)
    budget = settings.start_deadline_seconds
    surge: Object = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    folder = model_dir(run, made_by)
    pod = Pod(
        init=[_fetcher(made_by.spec.settings, name, folder, platform)],
        more={"terminationGracePeriodSeconds": settings.termination_grace_seconds},
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, run, its_labels),
        "spec": {
            "replicas": settings.replicas,
            "revisionHistoryLimit": 1,
            # The operator judges the deadline; Kubernetes' own must not speak first.
            "progressDeadlineSeconds": budget + 600,
            "strategy": surge if settings.surge == "Surge" else {"type": "Recreate"},
            "selector": {"matchLabels": its_labels},
            "template": pod_template(
                settings, its_labels, [_server(made_by.spec.settings, name, folder, platform)], pod
            ),
        },
    }


def _fetcher(spec: RunSpec, name: str, folder: str, platform: Platform) -> Container:
    return Container(
        name="fetch",
        image=platform.runtime_image,
        command=["prodrl", "fetch", "--config", f"{CONFIG_DIR}/fetch.json", "--to", folder, "--result", RESULT_PATH],
        mounts=[config_mount(name), cache_mount(spec.serving), scratch_mount(), *credentials_mounts(spec)],
        env=environment(spec, spec.serving),
        # Quotas ask for them of every container; the pod asks for the larger of the two, so they cost nothing.
        resources=_of_processor(spec.serving.resources),
    )


def _of_processor(resources: Mapping[str, Any]) -> Object:
    """Processor, memory and disk of the server, without devices and claims."""
    found: Object = {}
    for part in ("requests", "limits"):
        wanted: Mapping[str, object] = resources.get(part) or {}
        amounts = {name: value for name, value in wanted.items() if name in PLAIN}
        if amounts:
            found[part] = amounts
    return found


def _server(spec: RunSpec, name: str, folder: str, platform: Platform) -> Container:
    port = str(names.SERVING_PORT)
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", *engine_args(spec), "--model", folder]
    command += ["--served-model-name", spec.model.served_name, "--host", "$(POD_IP)", "--port", port]
    command += ["--middleware", "prodrl.recorder.middleware.Readiness"]
    more: list[Object] = [
        *cache_environment(),
        {"name": "PRODRL_RECORDER_CONFIG", "value": f"{CONFIG_DIR}/recorder.json"},
        {"name": "PRODRL_MODEL_DIR", "value": folder},
        {"name": "PRODRL_SPOOL_DIR", "value": SPOOL_DIR},
        {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        # Unix sockets between the engine's processes: in memory, and with a short path.
        {"name": "VLLM_RPC_BASE_PATH", "value": SHM_DIR},
    ]
    alive = {"httpGet": {"path": "/health", "port": names.SERVING_PORT}, "timeoutSeconds": 10}
    ready = {"httpGet": {"path": "/prodrl/ready", "port": names.SERVING_PORT}, "timeoutSeconds": 30}
    return Container(
        name="server",
        image=spec.serving.image or platform.serving_image,
        command=command,
        mounts=[
            config_mount(name),
            cache_mount(spec.serving),
            scratch_mount(),
            Mount("spool", SPOOL_DIR, {"emptyDir": {}}, read_only=False),
            *shm_mount(spec.serving, SHM_SIZE),
            *credentials_mounts(spec),
        ],
        env=environment(spec, spec.serving, more),
        resources=spec.serving.resources,
        ports={"http": names.SERVING_PORT},
        probes={
            "startupProbe": {
                **alive,
                "periodSeconds": PROBE_SECONDS,
                "failureThreshold": math.ceil(spec.serving.start_deadline_seconds / PROBE_SECONDS) + 1,
            },
            "livenessProbe": {**alive, "periodSeconds": 10, "failureThreshold": 6},
            "readinessProbe": {**ready, "periodSeconds": PROBE_SECONDS, "failureThreshold": 3},
        },
    )
