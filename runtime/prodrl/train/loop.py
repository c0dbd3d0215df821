"""One round of training, top to bottom. ``prodrl train`` calls :func:`run`; torchrun starts one process a rank.

    load -> log p at the round's start, frozen -> for each minibatch: advantages -> losses -> backward -> Adam step
         -> figures -> checkpoint -> ... -> weights for export

What each line means is elsewhere: ``losses`` and ``advantages`` (formulas), ``dataset`` and ``batch`` (tokens and
their weights), ``policy`` and ``head`` (log p), ``fsdp`` (ranks), ``checkpoint`` and ``weights`` (files). What the
recipe leaves open, and what we chose, is in docs/adr/0005-trainer.md.
"""

# ruff: noqa: N806  # tensors carry their shape in their name
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prodrl.config import TrainConfig, TrainResult
from prodrl.errors import DataError, NumericsError, PreemptedError, UsageError
from prodrl.progress import Progress, stop_requested
from prodrl.store import layout, open_store
from prodrl.store.folders import read_manifest, write_folder
from prodrl.store.port import Store
from prodrl.train import advantages, batch, checkpoint, dataset, diagnostics, fsdp, head, losses, nvfp4, weights
from prodrl.train.checkpoint import TrainerState
from prodrl.train.fsdp import Ranks
from prodrl.train.policy import Policy

LOGGER = logging.getLogger(__name__)
_RESULT_FIGURES = (
    "loss", "pg_loss", "kl", "reward_mean", "engine_mismatch", "staleness", "net_mismatch", "ess", "entropy",
    "grad_norm", "outside_support_fraction",
)  # fmt: skip
_NOT_IDENTITY = {"store", "micro_batch_tokens", "head_chunk_tokens", "checkpoint_every_steps", "max_skipped_steps"}
_START = 0
"""Step number under which the frozen log probabilities are kept."""


@dataclass
class Round:
    """What the steps of one round share."""

    config: TrainConfig
    store: Store
    ranks: Ranks
    folder: Path
    """Temporary, shared by the ranks of a node."""
    identity: str
    """Hash of everything that decides the result, save the number of ranks."""
    data: dataset.Dataset
    plan: list[list[int]]
    """The trajectories of each optimizer step."""
    trainer: checkpoint.Trainer
    baseline: advantages.Baseline

    def micro_batches(self, step: int) -> Iterator[batch.MicroBatch]:
        """This rank's share of a minibatch; the same cut for the frozen log p and for training."""
        shares = batch.shares(self.data, self.plan[step], self.ranks.world_size, self.config.micro_batch_tokens)
        for rows in shares[self.ranks.rank]:
            yield batch.collate(self.data, rows, self.config.batch_size).to(self.ranks.device)


@dataclass(frozen=True)
class Frozen:
    """Log probabilities of every loss token of the round, from before its first step. Index: ``MicroBatch.flat_N``."""

    logp: Tensor
    log_mass: Tensor
    """log p0 of the recorded support, 0 where it is not complete."""
    reference_logp: Tensor | None = None


def run(config: TrainConfig, progress: Progress) -> TrainResult:
    """Make the round's optimizer steps, resuming from its last complete step checkpoint.

    Raises:
        DataError: The dataset, the weights or the lineage's checkpoint are missing, damaged or do not fit.
        NumericsError: More gradients than allowed were not finite.
        PreemptedError: Told to stop; what was done is kept in a step checkpoint.
    """
    store = open_store(config.store)
    with _deterministic(), fsdp.joined() as ranks, fsdp.node_folder(ranks) as folder:
        progress.set(0, total=config.steps, unit="steps", message="loading")
        current = _load(config, store, ranks, folder)
        if not _is_stored(current, layout.checkpoint(config.round)):
            frozen = _resume(current) or _freeze(current, progress)
            _train(current, frozen, progress)
            _save(current, layout.checkpoint(config.round))
        else:
            _restore(current, layout.checkpoint(config.round))
        return _finish(current)


def _train(current: Round, frozen: Frozen, progress: Progress) -> None:
    """The optimizer steps that are still to be made."""
    config, state = current.config, current.trainer.state
    rows, times = diagnostics.read(current.store, config.round, state.step)
    for step in range(state.step, config.steps):
        figures = _optimizer_step(current, frozen, step)
        rows, times = [*rows, figures], [*times, time.time()]
        if current.ranks.is_first:
            diagnostics.publish(current.store, config.round, rows, times)
        progress.set(state.step, message=f"loss {figures['loss']:.4g}, reward {figures['reward_mean']:.4g}")
        if state.skipped > config.max_skipped_steps:
            raise NumericsError(
                f"Round {config.round}: {state.skipped} steps had a gradient norm that is not finite, the last was "
                f"step {state.step}, got {figures['grad_norm']}; read metrics.jsonl, lower the learning rate"
            )
        stop = current.ranks.any(stop_requested.is_set())
        if state.step < config.steps and (stop or state.step % config.checkpoint_every_steps == 0):
            _save_step(current)
        if stop:
            raise PreemptedError(
                f"Round {config.round}: stopped after step {state.step} of {config.steps}; a new attempt goes on there"
            )


def _optimizer_step(current: Round, frozen: Frozen, step: int) -> diagnostics.Figures:
    """One minibatch: gradient of (1/B) sum_i (1/T_i) sum_t loss, clipped, then Adam."""
    config, state, ranks = current.config, current.trainer.state, current.ranks
    trajectories = [current.data.trajectories[index] for index in current.plan[step]]
    rewards_B = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    advantage_of = torch.zeros(len(current.data.trajectories), dtype=torch.float64)
    advantage_of[current.plan[step]] = current.baseline.advantages(rewards_B)
    collector = diagnostics.Collector()
    for micro in current.micro_batches(step):
        output = current.trainer.policy(micro.ids_RL, micro.scored_from_N, micro.ids_N1K, micro.temperature_N)
        tokens = _tokens(micro, output, advantage_of, frozen)
        pg_N = losses.policy_gradient(tokens, config.correction)
        pg_N = pg_N if config.optimizer.maximise else -pg_N
        kl_N = losses.reverse_kl(tokens.logp_N, tokens.start_logp_N, tokens.log_mu_N, config.kl.weight_cap)
        loss_N = pg_N + config.kl.coefficient * kl_N if config.kl.coefficient else pg_N
        # FSDP averages gradients over ranks, and the weights already divide by the global B.
        ((micro.weight_N * loss_N).sum() * ranks.world_size).backward()
        figures = diagnostics.token_figures(tokens, output.entropy_N, micro, config.correction, config.kl.weight_cap)
        collector.add(micro, figures, {"loss": loss_N, "pg_loss": pg_N, "kl": kl_N})
    norm, stepped = _apply(current)
    current.baseline.observe(rewards_B)
    state.ema = current.baseline.ema
    return {
        "step": float(state.step),
        "global_step": float(state.global_step),
        **collector.reduce(ranks),
        **diagnostics.reward_figures(rewards_B, [trajectory.tokens for trajectory in trajectories]),
        "grad_norm": norm,
        "skipped": float(not stepped),
        "learning_rate": config.optimizer.learning_rate,
    }


def _tokens(micro: batch.MicroBatch, output: head.HeadOutput, advantage_of: Tensor, frozen: Frozen) -> losses.Tokens:
    """Join one forward pass with what is known of its tokens; everything on the micro-batch's device."""
    device = micro.flat_N.device
    flat_N = micro.flat_N.cpu().clamp(min=0)
    reference = frozen.reference_logp
    return losses.Tokens(
        logp_N=output.logp_N,
        logp_head_NK=output.logp_head_NK,
        log_mu_N=micro.log_mu_N,
        log_mu_head_NK=micro.log_mu_head_NK,
        head_mask_NK=micro.head_mask_NK,
        complete_N=micro.complete_N,
        advantage_N=advantage_of[micro.trajectory_N.cpu()].float().to(device),
        start_logp_N=frozen.logp[flat_N].to(device),
        start_log_mass_N=frozen.log_mass[flat_N].to(device),
        reference_logp_N=None if reference is None else reference[flat_N].to(device),
    )


def _apply(current: Round) -> tuple[float, bool]:
    """Clip and step; a gradient that is not finite is skipped and counted. Same on all ranks: the norm is global."""
    config, state = current.config, current.trainer.state
    parameters = list(current.trainer.policy.parameters())
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = float(fsdp.full(total))
    finite = math.isfinite(norm)
    if finite:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.optimizer.max_grad_norm, total)
        current.trainer.optimizer.step()
        state.global_step += 1
    current.trainer.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    if not finite:
        state.skipped += 1
        LOGGER.warning("round %d step %d skipped: gradient norm %s", config.round, state.step, norm)
    return norm, finite


def _freeze(current: Round, progress: Progress) -> Frozen:
    """Log p of all S*B trajectories before step 0, by the very forward passes of the steps; stored, to resume with."""
    config = current.config
    progress.set(0, message="log probabilities at the round's start")
    logp, log_mass = _score(current, current.trainer.policy)
    tensors = {"logp": logp, "log_mass": log_mass}
    if config.correction.type == "ReferenceModel":
        tensors["reference_logp"], _ = _score(current, _reference(current))
    folder = current.folder / "frozen"
    if current.ranks.local_rank == 0:
        folder.mkdir()
        if current.ranks.is_first:
            save_file(tensors, folder / "frozen.safetensors")
    key = layout.step_checkpoint(config.round, _START)
    checkpoint.publish(current.store, key, folder, {"identity": current.identity, "step": "0"}, current.ranks)
    return Frozen(**tensors)


@torch.no_grad()
def _score(current: Round, policy: Policy) -> tuple[Tensor, Tensor]:
    """Log p of every loss token of the round and of its complete support; each rank fills in its share."""
    both = torch.zeros(2, current.data.num_tokens, device=current.ranks.device)
    for step in range(current.config.steps):
        for micro in current.micro_batches(step):
            output = policy(micro.ids_RL, micro.scored_from_N, micro.ids_N1K, micro.temperature_N)
            mass_N = losses.masked_logsumexp(output.logp_head_NK, micro.head_mask_NK)
            real_N = micro.flat_N >= 0
            flat_N = micro.flat_N[real_N]
            both[0, flat_N] = output.logp_N[real_N]
            both[1, flat_N] = torch.where(micro.complete_N, mass_N, 0.0)[real_N]
    logp, log_mass = current.ranks.sum(both).cpu()
    return logp.contiguous(), log_mass.contiguous()


def _reference(current: Round) -> Policy:
    """The deployed policy's weights, upcast, for the ReferenceModel correction."""
    config = current.config
    if config.reference_weights_key is None:
        raise UsageError("Correction ReferenceModel: needs reference_weights_key, got None; name the deployed policy")
    folder = current.folder / "reference"
    checkpoint.fetch(current.store, config.reference_weights_key, folder, current.ranks)
    if nvfp4.algorithm(folder) is not None:
        if current.ranks.local_rank == 0:
            nvfp4.upcast(folder, current.folder / "upcast")
        current.ranks.gather(None)
        folder = current.folder / "upcast"
    return weights.load(folder, config, current.ranks, config.reference_weights_key)


def _load(config: TrainConfig, store: Store, ranks: Ranks, folder: Path) -> Round:
    """Dataset, model and optimizer as the lineage left them."""
    found = read_manifest(store, config.dataset_key, config.dataset_digest)
    checkpoint.fetch(store, config.dataset_key, folder / "dataset", ranks)
    data = dataset.read(folder / "dataset", found, config.dataset_key)
    plan = batch.minibatches(data, config.steps, config.batch_size, config.seed, config.round)
    checkpoint.fetch(store, config.init_weights_key, folder / "init", ranks)
    policy = weights.load(folder / "init", config, ranks, config.init_weights_key)
    data.check(policy.vocabulary, config.max_sequence_tokens, config.correction.type == "ScoreCentering")
    settings = config.optimizer
    optimizer = checkpoint.adam(
        policy,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    rewards = [trajectory.reward for trajectory in data.trajectories]
    baseline = advantages.Baseline(config.baseline, sum(rewards) / len(rewards), config.ema_decay)
    torch.manual_seed(config.seed)
    trainer = checkpoint.Trainer(policy, optimizer, TrainerState())
    current = Round(config, store, ranks, folder, _identity(config), data, plan, trainer, baseline)
    if config.init_checkpoint_key is not None:
        _restore(current, config.init_checkpoint_key)
        current.trainer.state.step = current.trainer.state.skipped = 0
    return current


def _identity(config: TrainConfig) -> str:
    content = config.model_dump(mode="json", exclude=_NOT_IDENTITY)
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _restore(current: Round, key: str) -> None:
    folder = current.folder / "restored" / key.replace("/", "-")
    checkpoint.fetch(current.store, key, folder, current.ranks)
    checkpoint.load(folder, current.trainer, current.ranks)
    current.baseline.ema = current.trainer.state.ema


def _resume(current: Round) -> Frozen | None:
    """Go to the last complete step checkpoint of this round; None when nothing of it is usable."""
    store, number = current.store, current.config.round
    start = layout.step_checkpoint(number, _START)
    if not _is_stored(current, start):
        return None
    folder = current.folder / "frozen-before"
    try:
        checkpoint.fetch(store, start, folder, current.ranks)
    except DataError as exc:
        LOGGER.warning("round %d begins again: %s", number, exc)
        return None
    frozen = Frozen(**load_file(folder / "frozen.safetensors"))
    for step in range(current.config.steps, _START, -1):
        if not _is_stored(current, layout.step_checkpoint(number, step)):
            continue
        try:
            _restore(current, layout.step_checkpoint(number, step))
        except DataError as exc:
            LOGGER.warning("round %d passes over step %d: %s", number, step, exc)
            continue
        LOGGER.info("round %d resumes after step %d", number, step)
        break
    return frozen


def _is_stored(current: Round, key: str) -> bool:
    """Whether a checkpoint of this very round is complete; rank 0 looks, so that all ranks go the same way."""
    found = current.ranks.is_first and checkpoint.is_ours(current.store, key, current.identity)
    return current.ranks.gather(found)[0]


def _save_step(current: Round) -> None:
    """The latest step checkpoint, and the one before it in case it is damaged; older ones go."""
    config, step = current.config, current.trainer.state.step
    _save(current, layout.step_checkpoint(config.round, step))
    old = step - 2 * config.checkpoint_every_steps
    if current.ranks.is_first and old > _START:
        checkpoint.discard(current.store, layout.step_checkpoint(config.round, old))


def _save(current: Round, key: str) -> None:
    folder = current.folder / "saving" / key.replace("/", "-")
    checkpoint.save(current.store, key, folder, current.trainer, current.identity, current.ranks)


def _finish(current: Round) -> TrainResult:
    """Weights for export, then the step checkpoints go, then the result."""
    config, state, store = current.config, current.trainer.state, current.store
    folder = current.folder / "weights"
    weights.save(current.trainer.policy, current.folder / "init", folder, current.ranks)
    digest = ""
    if current.ranks.is_first:
        attributes = {"identity": current.identity, "round": str(config.round), "global_step": str(state.global_step)}
        manifest = write_folder(store, layout.weights(config.round), folder, "weights", attributes, replace=True)
        digest = manifest.digest()
        for step in range(config.steps, -1, -1):
            checkpoint.discard(store, layout.step_checkpoint(config.round, step))
    rows, _ = diagnostics.read(store, config.round, config.steps)
    last = rows[-1] if rows else {}
    return TrainResult(
        checkpoint_key=layout.checkpoint(config.round),
        weights_key=layout.weights(config.round),
        weights_digest=current.ranks.gather(digest)[0],
        steps=config.steps - state.skipped,
        skipped_steps=state.skipped,
        trajectories=len(current.data.trajectories),
        global_step=state.global_step,
        figures={name: last[name] for name in _RESULT_FIGURES if name in last and math.isfinite(last[name])},
    )


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Equal inputs give equal bits on one kind of machine; operations that cannot only warn."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
