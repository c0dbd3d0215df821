"""Logprobs by the trainer's weights, with transformers. Called by ``run`` for ``agreement``.

Computes in float32 on the host and in the weights' own type on an accelerator, always with float32 softmax, at
temperature 1. Memory: the logits of one sample's scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from prodrl.errors import DataError, UsageError
from prodrl.progress import check_stop

CHUNK = 1024
"""Positions whose log-softmax exists at once."""


class Reference:
    """A model of the store, loaded for scoring."""

    def __init__(self, folder: Path, named: str) -> None:
        self.named = named
        cuda = torch.cuda.is_available()
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto" if cuda else torch.float32,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError) as exc:
            raise UsageError(f"Weights {named}: transformers cannot load them, {exc}; check weights_key") from exc
        if info["missing_keys"]:
            raise DataError(f"Weights {named}: tensors are missing, got {sorted(info['missing_keys'])[:4]!r}")
        self._model: Any = model.eval().to("cuda" if cuda else "cpu")

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """Log p of ``ids[position]`` given all tokens before it, for each position (all >= 1)."""
        check_stop(f"Agreement, scoring with {self.named}")
        tokens = torch.tensor([list(ids)], device=self._model.device)
        where = torch.tensor(list(positions), device=self._model.device)
        logits = self._model(input_ids=tokens, logits_to_keep=where - 1, use_cache=False).logits[0]
        found: list[float] = []
        for start in range(0, len(where), CHUNK):
            rows = slice(start, start + CHUNK)
            targets = tokens[0, where[rows]].unsqueeze(-1)
            found += logits[rows].float().log_softmax(-1).gather(-1, targets).squeeze(-1).tolist()
        return found

    @torch.inference_mode()
    def generate(self, num_samples: int, length: int, seed: int) -> list[list[int]]:
        """Token ids that the model writes at temperature 1 from random first tokens; a seed gives the same ids.

        Uniformly random ids would be a poor test: nothing that is served looks like them, and their logprobs lie
        deep in the tail, where engines differ most.
        """
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self._model.config.get_text_config().vocab_size
        step = torch.randint(vocabulary, (num_samples, 1), generator=generator)
        columns, cache = [step], None
        for _ in range(length - 1):
            check_stop("Agreement, generating prompts")
            output = self._model(input_ids=step.to(self._model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            step = torch.multinomial(output.logits[:, -1].float().softmax(-1).cpu(), 1, generator=generator)
            columns.append(step)
        ids: list[list[int]] = torch.cat(columns, dim=1).tolist()
        return ids
