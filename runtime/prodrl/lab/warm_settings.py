"""Sizes and rates of the warm start; apart from ``warm_start`` so that asking the cache needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmStart:
    """What decides the warm-started model."""

    steps: int = 370
    batch_size: int = 128
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    final_rate: float = 0.1
    """Share of the learning rate that is left at the end."""
    weight_decay: float = 0.01
    bpe_dropout: float = 0.1
    seed: int = 0
    threads: int = 2
    """Torch threads; at most the machine's cores are used."""
