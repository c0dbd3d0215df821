"""Do the engine and the trainer's weights give the same tokens the same probability? Called by ``run``.

The engine is asked for the logprobs of given tokens as a prompt, which it computes at temperature 1 from the whole
vocabulary, whatever its sampling settings; ``reference`` computes the same from the weights that were quantised.
The mean of |difference| per token is what quantisation and kernels cost; its tail finds single broken layers and
experts. Scored are the tokens that the policy sampled, or all of generated samples.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from prodrl.errors import DataError
from prodrl.evaluate.chat import ChatClient
from prodrl.progress import check_stop

GENERATED_TOKENS = 64
_NO_PROBABILITY = -9999.0
"""What vLLM writes for minus infinity, since JSON has none."""


@dataclass(frozen=True)
class Probe:
    """One sample whose tokens are scored."""

    ids: list[int]
    """[L]"""
    positions: list[int]
    """[G] scored indices into ``ids``, each >= 1."""


@dataclass(frozen=True)
class Figures:
    """|log p - log mu| over all scored tokens."""

    tokens: int
    mean_abs: float
    p99_abs: float


def recorded_probes(folder: Path, num_samples: int, max_tokens: int | None, seed: int) -> list[Probe]:
    """Draw samples of a sealed dataset, cut to what the engine takes.

    Raises:
        DataError: The dataset has no sample with a scored token within ``max_tokens``.
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.parquet")):
        rows += pq.read_table(path, columns=["ids", "loss_positions"]).to_pylist()
    probes = []
    for row in rows:
        ids = row["ids"][:max_tokens]
        positions = [position for position in row["loss_positions"] if 1 <= position < len(ids)]
        if positions:
            probes.append(Probe(ids=ids, positions=positions))
    if not probes:
        limit = "" if max_tokens is None else f" within {max_tokens} tokens"
        raise DataError(f"Dataset: no recorded sample has a sampled token{limit}; check dataset_key")
    chosen = random.Random(seed).sample(range(len(probes)), min(num_samples, len(probes)))  # noqa: S311  # not secret
    return [probes[index] for index in sorted(chosen)]


def generated_probes(samples: Sequence[Sequence[int]]) -> list[Probe]:
    """Score every token of generated samples but the first, which nothing predicts."""
    return [Probe(ids=list(ids), positions=list(range(1, len(ids)))) for ids in samples]


async def engine_logprobs(client: ChatClient, probes: Sequence[Probe], concurrency: int) -> list[list[float]]:
    """Log mu of the scored tokens, by the engine.

    Raises:
        DataError: The engine left a logprob out, or one is not finite; it is never taken as 0.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, probe: Probe) -> list[float]:
        async with slots:
            check_stop("Agreement, asking the engine")
            body = {"prompt": probe.ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            reply = await client.post("/v1/completions", body)
            return prompt_logprobs(reply, probe, f"{client.base_url} sample {number}")

    return list(await asyncio.gather(*(one(number, probe) for number, probe in enumerate(probes))))


def prompt_logprobs(reply: dict[str, Any], probe: Probe, named: str) -> list[float]:
    """Read the scored tokens' logprobs out of a completion's answer.

    ``choices[0].prompt_logprobs`` has one entry a prompt token, the first of them null; an entry maps token ids to
    ``{"logprob": ...}`` and holds the prompt's own token whatever else it holds.
    """
    choices = reply.get("choices") or [{}]
    entries = choices[0].get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(probe.ids):
        got = len(entries) if isinstance(entries, list) else entries
        raise DataError(
            f"Engine {named}: needs {len(probe.ids)} prompt logprobs, got {got!r:.60}; serve with an engine that"
            " returns prompt_logprobs"
        )
    found = []
    for position in probe.positions:
        entry = (entries[position] or {}).get(str(probe.ids[position]))
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= _NO_PROBABILITY:
            raise DataError(f"Engine {named}: no finite logprob at token {position}, got {value!r}; do not promote it")
        found.append(float(value))
    return found


def compare(engine: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], named: str) -> Figures:
    """Pool |difference| over all scored tokens of all samples.

    Raises:
        DataError: There is no token, or the reference is not finite.
    """
    ours = np.concatenate([np.asarray(row, dtype=float) for row in engine]) if engine else np.empty(0)
    theirs = np.concatenate([np.asarray(row, dtype=float) for row in reference]) if reference else np.empty(0)
    if ours.shape != theirs.shape or not len(ours):
        raise DataError(
            f"Agreement {named}: {len(ours)} and {len(theirs)} logprobs cannot be compared; check the dataset"
        )
    gaps = np.abs(ours - theirs)
    if not np.isfinite(gaps).all():
        raise DataError(
            f"Agreement {named}: the trainer's weights give logprobs that are not finite; do not deploy them"
        )
    return Figures(tokens=len(gaps), mean_abs=float(gaps.mean()), p99_abs=float(np.quantile(gaps, 0.99)))
