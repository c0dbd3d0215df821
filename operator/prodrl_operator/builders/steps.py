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
from prodrl_operator.api.run import PodSettings, Run
from prodrl_operator.builders.metadata import STEP_WORDS, Object, Platform, config_map, job_name, labels, metadata
from prodrl_operator.builders.pods import (
    CONFIG_DIR,
    RESULT_PATH,
    Container,
    config_mount,
    credentials_mounts,
    environment,
    pod_spec,
    scratch_mount,
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


def _settings(this: Round, step: Step) -> PodSettings:
    settings = this.spec.settings
    return settings.export if step is Step.EXPORTING else settings.training if step is Step.TRAINING else PodSettings()


def _command(this: Round, step: Step) -> list[str]:
    arguments = [COMMANDS[step], "--config", f"{CONFIG_DIR}/config.json", "--result", RESULT_PATH]
    arguments += ["--listen", f"$(POD_IP):{names.PROGRESS_PORT}"]
    training = this.spec.settings.training
    if step is Step.TRAINING and training.nodes * training.processes_per_node > 1:
        torchrun = ["torchrun", "--nnodes", str(training.nodes), "--nproc-per-node", str(training.processes_per_node)]
        if training.nodes == 1:
            torchrun.append("--standalone")
        return [*torchrun, "--no-python", "prodrl", *arguments]
    return ["prodrl", *arguments]


def step_job(run: Run, this: Round, step: Step, attempt: int, inputs: StepInputs, platform: Platform) -> list[Object]:
    """ConfigMap, then Job, of one attempt at a step. Retries are the operator's: a Job runs its pods once."""
    name = job_name(run.metadata["name"], this.spec.number, step, attempt)
    its_labels = labels(run, STEP_WORDS[step], this.spec.number, step) | {names.LABEL_ATTEMPT: str(attempt)}
    config = CONFIGS[step](run, this, inputs)
    settings = _settings(this, step)
    spec = this.spec.settings
    worker = Container(
        name="step",
        image=settings.image or platform.runtime_image,
        command=_command(this, step),
        mounts=[config_mount(name), scratch_mount(), *credentials_mounts(spec)],
        env=environment(spec, settings),
        resources=settings.resources,
        ports={"progress": names.PROGRESS_PORT},
    )
    job: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(name, this, its_labels),
        "spec": {
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "template": {
                "metadata": {"labels": its_labels},
                "spec": pod_spec(settings, [worker], restart="Never"),
            },
        },
    }
    if step is not Step.COLLECTING:
        job["spec"]["activeDeadlineSeconds"] = spec.training.active_deadline_seconds
    if step is Step.TRAINING and spec.training.nodes > 1:
        job["spec"] |= {
            "completionMode": "Indexed",
            "completions": spec.training.nodes,
            "parallelism": spec.training.nodes,
        }
    return [config_map(name, this, its_labels, {"config.json": config.model_dump_json()}), job]
