"""Weights in and out as plain Hugging Face folders. Called by ``loop``; trainer checkpoints are ``checkpoint``'s.

Loading makes float32 master weights whatever the files hold. Writing gives them the type of the base model's
configuration, and copies every other file (configuration, tokenizer, chat template, generation configuration) from
where the lineage began, byte for byte: what serves users must not depend on how this library renders JSON.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prodrl.config import TrainConfig
from prodrl.errors import DataError, UsageError, from_os_error
from prodrl.train import fsdp, nvfp4
from prodrl.train.policy import Policy

_COPIED = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
_NOT_COPIED = frozenset({"manifest.json", "model.safetensors.index.json", "hf_quant_config.json"})


def load(folder: Path, config: TrainConfig, ranks: fsdp.Ranks, name: str) -> Policy:
    """A sharded policy with float32 weights.

    Args:
        folder: Hugging Face files on this machine.
        config: Attention, computation type and head chunk.
        ranks: Over which to shard.
        name: What to call the weights in messages.

    Raises:
        UsageError: The architecture is not supported, or the weights are quantised.
        DataError: Files are missing or don't fit the configuration.
    """
    if nvfp4.algorithm(folder) is not None:
        raise UsageError(f"Weights {name}: are quantised, got {nvfp4.algorithm(folder)!r}; train from plain weights")
    transformers_logging.disable_progress_bar()
    dtype: torch.dtype = getattr(torch, config.dtype)
    alone_in_low_precision = ranks.world_size == 1 and dtype != torch.float32
    policy = Policy(_model(folder, config, name), config.head_chunk_tokens, dtype if alone_in_low_precision else None)
    policy.train()
    policy.check_head(name)
    if ranks.device.type == "cuda":
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp.shard(policy, ranks, dtype)


def _model(folder: Path, config: TrainConfig, name: str) -> Any:
    try:
        settings = _without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True))
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=settings,
            dtype=torch.float32,
            attn_implementation=config.attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, ImportError) as exc:
        raise UsageError(f"Weights {name}: cannot be loaded, {exc}") from exc
    except OSError as exc:
        raise DataError(f"Weights {name}: cannot be read, {exc}; export them again") from exc
    faults = {kind: sorted(map(str, info[kind]))[:5] for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if faults:
        raise DataError(f"Weights {name}: do not fit their config.json, got {faults}; export them again")
    return model


def _without_dropout(settings: Any) -> Any:
    """Log p must depend on weights and tokens alone; evaluation mode would turn off the recomputation of blocks."""
    for field, value in settings.to_dict().items():
        if isinstance(value, float) and field.endswith(("dropout", "pdrop")):
            setattr(settings, field, 0.0)
    return settings


def save(policy: Policy, origin: Path, target: Path, ranks: fsdp.Ranks) -> None:
    """Gather the weights tensor by tensor and let rank 0 write them to ``target``; every rank must call it.

    Args:
        policy: What to write.
        origin: Folder the lineage began with, for the other files and the type of the weights.
        target: New folder of this machine.
        ranks: Among which the weights are sharded.
    """
    settings = AutoConfig.from_pretrained(origin, local_files_only=True)
    dtype = settings.dtype if isinstance(settings.dtype, torch.dtype) else torch.float32
    gathered: dict[str, torch.Tensor] = {}
    for name, value in policy.model.state_dict().items():
        whole = fsdp.full(value)
        if ranks.is_first:
            gathered[name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype)
    if not ranks.is_first:
        return
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    try:
        skeleton.save_pretrained(target, state_dict=gathered)
        for path in sorted(origin.iterdir()):
            if path.suffix in _COPIED and path.name not in _NOT_COPIED:
                shutil.copyfile(path, target / path.name)
    except OSError as exc:
        raise from_os_error(exc, f"Weights {target}") from exc
