"""The Jobs of a round: a ConfigMap with the step's configuration, and the Job that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prodrl.config import (
    CollectConfig,
    Config,
    CorrectionConfig,
    EvaluateConfig,
    EvaluationConfig,
    ExportConfig,
    KlConfig,
    OptimizerConfig,
    PolicyRef,
    TrainConfig,
)
from prodrl_operator import names
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.api.workloads import StepSettings
from prodrl_operator.builders.metadata import STEP_WORDS, Object, Platform, config_map, job_name, labels, metadata
from prodrl_operator.builders.pods import (
    CONFIG_DIR,
    RESULT_PATH,
    Container,
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
from prodrl_operator.builders.serving import engine_args
from prodrl_operator.builders.times import unix_ms
from prodrl_operator.names import Step


@dataclass(frozen=True)
class StepInputs:
    """The other rounds and addresses that a step needs; None where there is none."""

    source: Round | None = None
    """The round that made the policy whose records are used."""
    lineage: Round | None = None
    """The round whose trainer checkpoint is the start (round 0: base weights)."""
    stable: Round | None = None
    """The round that made the stable policy."""
    candidate_url: str | None = None
    """The candidate's server."""
    stable_url: str | None = None
    """Stable's server."""
    spent: tuple[int, ...] = ()
    """Rounds whose weights may go."""


def policy_ref(made_by: Round) -> PolicyRef:
    """The policy that a round made, as the runtime names it."""
    policy = made_by.status.policy
    assert policy is not None, "a policy is referred to after Exporting"
    return PolicyRef(round=made_by.spec.number, digest=policy.digest, key=policy.key)


def weights_key(made_by: Round) -> str:
    """The unquantised weights of a round: the trainer's, or in round 0 the base model's."""
    if made_by.status.checkpoint is not None:
        return made_by.status.checkpoint.weights_key
    assert made_by.status.policy is not None, "round 0 publishes its weights when it exports"
    return made_by.status.policy.weights_key


def collect_config(run: Run, this: Round, inputs: StepInputs) -> CollectConfig:
    """Exactly S*B trajectories of the source policy."""
    settings = this.spec.settings
    assert inputs.source is not None, "a training round has a source policy"
    return CollectConfig(
        store=store_config(settings),
        run=run.metadata["name"],
        round=this.spec.number,
        source=policy_ref(inputs.source),
        steps=settings.rounds.steps,
        batch_size=settings.rounds.batch_size,
        mode=settings.mode,
        collect_from_ms=unix_ms(this.status.collect_from),
        reward_deadline_seconds=settings.recording.reward_deadline_seconds,
        settle_seconds=settings.recording.settle_seconds,
        max_sequence_tokens=settings.training.max_sequence_tokens,
        spent=inputs.spent,
    )


def train_config(run: Run, this: Round, inputs: StepInputs) -> TrainConfig:
    """S optimizer steps from the lineage's checkpoint."""
    settings, training = this.spec.settings, this.spec.settings.training
    dataset = this.status.dataset
    assert dataset is not None, "Training follows Collecting"
    assert inputs.lineage is not None, "a training round has a lineage"
    assert inputs.source is not None, "a training round has a source policy"
    checkpoint = inputs.lineage.status.checkpoint
    correction, optimizer = training.correction, training.optimizer
    return TrainConfig(
        store=store_config(settings),
        run=run.metadata["name"],
        round=this.spec.number,
        dataset_key=dataset.key,
        dataset_digest=dataset.digest,
        init_weights_key=weights_key(inputs.lineage),
        init_checkpoint_key=checkpoint.key if checkpoint else None,
        reference_weights_key=policy_ref(inputs.source).key if correction.type == "ReferenceModel" else None,
        steps=settings.rounds.steps,
        batch_size=settings.rounds.batch_size,
        seed=training.seed,
        correction=CorrectionConfig(
            type=correction.type,
            weighting=correction.weighting,
            cap=float(correction.cap),
            clip_low=float(correction.clip_low),
            clip_high=float(correction.clip_high),
        ),
        kl=KlConfig(coefficient=float(training.kl.coefficient)),
        baseline=training.baseline,
        optimizer=OptimizerConfig(
            learning_rate=float(optimizer.learning_rate),
            beta1=float(optimizer.beta1),
            beta2=float(optimizer.beta2),
            weight_decay=float(optimizer.weight_decay),
            max_grad_norm=float(optimizer.max_grad_norm),
            maximise=optimizer.maximise,
        ),
        micro_batch_tokens=training.micro_batch_tokens,
        max_sequence_tokens=training.max_sequence_tokens,
        checkpoint_every_steps=training.checkpoint_every_steps,
        dtype=training.dtype,
    )


def export_config(run: Run, this: Round, _inputs: StepInputs) -> ExportConfig:
    """The trainer's weights, or in round 0 the base model."""
    settings = this.spec.settings
    checkpoint, dataset = this.status.checkpoint, this.status.dataset
    return ExportConfig(
        store=store_config(settings),
        run=run.metadata["name"],
        round=this.spec.number,
        weights_key=checkpoint.weights_key if checkpoint else None,
        model_uri=None if checkpoint else settings.model.uri,
        quantization=settings.export.quantization,
        dataset_key=dataset.key if dataset else None,
        calibration_samples=settings.export.calibration_samples,
        engine_args=tuple(engine_args(settings)),
        seed=settings.training.seed,
    )


def evaluate_config(run: Run, this: Round, inputs: StepInputs) -> EvaluateConfig:
    """Agreement of the candidate, and held-out evaluations against stable."""
    settings, gate = this.spec.settings, this.spec.settings.gate
    assert inputs.candidate_url is not None, "Gating follows CanaryDeploying"
    stable = inputs.stable
    return EvaluateConfig(
        store=store_config(settings),
        run=run.metadata["name"],
        round=this.spec.number,
        candidate=policy_ref(this),
        candidate_url=inputs.candidate_url,
        weights_key=weights_key(this),
        stable=policy_ref(stable) if stable else None,
        stable_url=inputs.stable_url if stable else None,
        stable_weights_key=weights_key(stable) if stable else None,
        served_name=settings.model.served_name,
        dataset_key=this.status.dataset.key if this.status.dataset else None,
        agreement_samples=gate.agreement.samples,
        evaluations=tuple(
            EvaluationConfig(
                name=item.name,
                suite=item.suite,
                suite_key=item.suite_uri,
                metric=item.metric,
                min_items=item.min_items,
                max_items=item.max_items,
                confidence=float(item.confidence),
            )
            for item in (gate.evaluations if stable else [])
        ),
        seed=settings.training.seed + this.spec.number,
    )


CONFIGS: dict[Step, Callable[[Run, Round, StepInputs], Config]] = {
    Step.COLLECTING: collect_config,
    Step.TRAINING: train_config,
    Step.EXPORTING: export_config,
    Step.GATING: evaluate_config,
}
COMMANDS = {Step.COLLECTING: "collect", Step.TRAINING: "train", Step.EXPORTING: "export", Step.GATING: "evaluate"}


RENDEZVOUS_PORT = 29500
SHM_SIZE = "8Gi"
_TOLD: Object = {"containerName": "step", "operator": "In", "values": sorted(names.EXIT_CODES)}
FAILURE_POLICY: Object = {
    "rules": [
        # An evicted, preempted or drained pod: the attempt ends at once, and the operator does not count it as failed.
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # Every code means something: so the Job's condition tells it, also when its pod is gone.
        {"action": "FailJob", "onExitCodes": _TOLD},
    ]
}


def _settings(this: Round, step: Step) -> StepSettings:
    settings = this.spec.settings
    by_step: dict[Step, StepSettings] = {
        Step.COLLECTING: settings.collect,
        Step.TRAINING: settings.training,
        Step.EXPORTING: settings.export,
        Step.GATING: settings.evaluate,
    }
    return by_step[step]


def _command(this: Round, step: Step, name: str) -> list[str]:
    arguments = [COMMANDS[step], "--config", f"{CONFIG_DIR}/config.json", "--result", RESULT_PATH]
    arguments += ["--listen", f"$(POD_IP):{names.PROGRESS_PORT}"]
    training = this.spec.settings.training
    if step is not Step.TRAINING or training.nodes * training.processes_per_node == 1:
        return ["prodrl", *arguments]
    torchrun = ["torchrun", "--nnodes", str(training.nodes), "--nproc-per-node", str(training.processes_per_node)]
    torchrun += ["--max-restarts", "0"]
    if training.nodes == 1:
        torchrun.append("--standalone")
    else:
        namespace = this.metadata.get("namespace", "default")
        first = f"{name}-0.{name}.{namespace}.svc"
        torchrun += ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--rdzv-id", name]
        torchrun += ["--rdzv-endpoint", f"{first}:{RENDEZVOUS_PORT}"]
    return [*torchrun, "--no-python", "prodrl", *arguments]


def _rendezvous(name: str, owner: Round, its_labels: dict[str, str]) -> Object:
    """Gives the pods of an Indexed Job names, before they are ready: they need each other to become so."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, owner, its_labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": its_labels,
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT}],
        },
    }


def _worker(this: Round, step: Step, name: str, platform: Platform) -> Container:
    spec, settings = this.spec.settings, _settings(this, step)
    training = spec.training
    is_parallel = step is Step.TRAINING and training.nodes * training.processes_per_node > 1
    return Container(
        name="step",
        image=settings.image or platform.runtime_image,
        command=_command(this, step, name),
        mounts=[
            config_mount(name),
            cache_mount(settings),
            scratch_mount(),
            *shm_mount(settings, SHM_SIZE if is_parallel else None),
            *credentials_mounts(spec),
        ],
        env=environment(spec, settings, cache_environment()),
        resources=settings.resources,
        ports={"progress": names.PROGRESS_PORT},
    )


def step_job(run: Run, this: Round, step: Step, attempt: int, inputs: StepInputs, platform: Platform) -> list[Object]:
    """ConfigMap, rendezvous Service, then Job, of one attempt."""
    made = job(run, this, step, attempt, platform)
    name, its_labels = made["metadata"]["name"], _labels(run, this, step, attempt)
    config = CONFIGS[step](run, this, inputs)
    objects = [config_map(name, this, its_labels, {"config.json": config.model_dump_json()})]
    return [*objects, *([_rendezvous(name, this, its_labels)] if _is_indexed(this, step) else []), made]


def _labels(run: Run, this: Round, step: Step, attempt: int) -> dict[str, str]:
    return labels(run, STEP_WORDS[step], this.spec.number, step) | {names.LABEL_ATTEMPT: str(attempt)}


def _is_indexed(this: Round, step: Step) -> bool:
    return step is Step.TRAINING and this.spec.settings.training.nodes > 1


def job(run: Run, this: Round, step: Step, attempt: int, platform: Platform) -> Object:
    """The Job of one attempt. Retries are the operator's: a Job runs its pods once."""
    name = job_name(run.metadata["name"], this.spec.number, step, attempt)
    its_labels = _labels(run, this, step, attempt)
    settings, training = _settings(this, step), this.spec.settings.training
    is_indexed = _is_indexed(this, step)
    pod = Pod(restart="Never", more={"subdomain": name} if is_indexed else {})
    spec: Object = {
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": FAILURE_POLICY,
        "template": pod_template(settings, its_labels, [_worker(this, step, name, platform)], pod),
    }
    if step is not Step.COLLECTING:
        spec["activeDeadlineSeconds"] = training.active_deadline_seconds
    if is_indexed:
        spec |= {"completionMode": "Indexed", "completions": training.nodes, "parallelism": training.nodes}
    made: Object = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(name, this, its_labels), "spec": spec}
    if settings.queue_name is not None:
        # Kueue admits the Job by clearing `suspend`, which is its own from then on.
        made["metadata"]["labels"] = its_labels | {names.LABEL_QUEUE: settings.queue_name}
        spec["suspend"] = True
    return made
