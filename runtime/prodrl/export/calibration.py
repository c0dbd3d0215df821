"""Token ids that calibrate the activation scales: recorded ones, else what the model itself writes.

Called by ``run``. Recorded prompts are what the policy will be served with; without any (round 0) the model's own
samples keep activations in their usual range, which uniformly random ids do not.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from prodrl.errors import DataError

MAX_TOKENS = 1024
"""Recorded sequences are cut here: scales settle long before, and memory stays bounded."""
GENERATED_TOKENS = 128


def recorded(folder: Path, num_samples: int, seed: int) -> list[list[int]]:
    """Draw sequences from a sealed dataset, joined prompts and completions, without replacement.

    Raises:
        DataError: The dataset holds no sample.
    """
    ids: list[list[int]] = []
    for path in sorted(folder.rglob("*.parquet")):
        ids += pq.read_table(path, columns=["ids"]).column("ids").to_pylist()
    if not ids:
        raise DataError(f"Dataset {folder.name}: no sample to calibrate with; collect the round again")
    chosen = random.Random(seed).sample(range(len(ids)), min(num_samples, len(ids)))  # noqa: S311  # not for secrecy
    return [ids[index][:MAX_TOKENS] for index in sorted(chosen)]


@torch.inference_mode()
def generated(model: Any, num_samples: int, seed: int) -> list[list[int]]:
    """Let the model write at temperature 1 from random first tokens; the same seed gives the same ids."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    step = torch.randint(vocabulary, (num_samples, 1), generator=generator)
    columns, cache = [step], None
    for _ in range(GENERATED_TOKENS - 1):
        output = model(input_ids=step.to(model.device), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        probabilities = output.logits[:, -1].float().softmax(-1).cpu()
        step = torch.multinomial(probabilities, 1, generator=generator)
        columns.append(step)
    ids: list[list[int]] = torch.cat(columns, dim=1).tolist()
    return ids
