"""A tiny model, datasets sampled from a known mu, and rounds of training in a temporary store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from prodrl.config import StoreConfig, TrainConfig, TrainResult
from prodrl.progress import Progress
from prodrl.records import Sample, arrow_schema
from prodrl.store import layout, open_store
from prodrl.store.folders import write_folder
from prodrl.store.port import Store
from prodrl.train.loop import run

VOCABULARY = 64
BASE_KEY = "rounds/0000/weights"


def tiny_config(tied: bool = True, **changes: Any) -> Qwen3Config:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
        "tie_word_embeddings": tied, "initializer_range": 0.2,
    }  # fmt: skip
    return Qwen3Config(**(settings | changes))


def tiny_model(seed: int = 0, tied: bool = True, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(tiny_config(tied, **changes)).float()


def write_model(store: Store, folder: Path, model: Any, key: str = BASE_KEY) -> None:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_folder(store, key, folder, "model", {})


@torch.no_grad()
def make_samples(
    count: int, *, model: Any, seed: int = 0, top_k: int | None = 8, noise: float = 0.3, temperature: float = 0.8,
    turns: int = 1, head: int = 6, prompt: int = 4,
) -> list[Sample]:  # fmt: skip
    """Trajectories sampled from softmax((logits + noise) / temperature), filtered to top_k (None: head only)."""
    random = np.random.default_rng(seed)
    bias = torch.from_numpy(random.normal(0, noise, VOCABULARY)).float()
    samples = []
    for order in range(count):
        parts = []
        for index in range(turns if order % 2 else 1):
            length = int(random.integers(2, 9))
            parts.append(_sample(model, random, bias, (prompt + index, length), (top_k, head, temperature)))
        tokens = sum(len(part["loss_positions"]) for part in parts)
        reward = float(random.integers(0, 2)) + 0.25 * float(random.random())
        samples += [
            Sample(
                trajectory_id=f"t-{seed:02d}-{order:03d}", index=index, num_samples=len(parts), order=order,
                reward=reward, trajectory_tokens=tokens, policy_digest="sha256:" + "0" * 64,
                record_ids=[f"r{order}-{index}"], **part,
            )
            for index, part in enumerate(parts)
        ]  # fmt: skip
    return samples


def _sample(
    model: Any,
    random: np.random.Generator,
    bias: torch.Tensor,
    lengths: tuple[int, int],
    sampler: tuple[int | None, int, float],
) -> dict[str, Any]:
    (prompt, length), (top_k, head, temperature) = lengths, sampler
    ids = [int(token) for token in random.integers(0, VOCABULARY, prompt)]
    logprobs, head_ids, head_logprobs, offsets = [], [], [], [0]
    for _ in range(length):
        logits = (model(torch.tensor([ids])).logits[0, -1] + bias) / temperature
        if top_k is not None:
            kept = torch.topk(logits, top_k).indices
            mask = torch.full_like(logits, -torch.inf)
            mask[kept] = 0.0
            logits = logits + mask
        log_mu = torch.log_softmax(logits, dim=-1)
        probabilities = log_mu.exp().double().numpy()
        token = int(random.choice(VOCABULARY, p=probabilities / probabilities.sum()))
        recorded = torch.topk(log_mu, head if top_k is None else top_k).indices
        head_ids += recorded.tolist()
        head_logprobs += log_mu[recorded].tolist()
        offsets.append(len(head_ids))
        logprobs.append(float(log_mu[token]))
        ids.append(token)
    return {
        "ids": ids, "loss_positions": list(range(prompt, prompt + length)), "logprobs": logprobs, "head_ids": head_ids,
        "head_logprobs": head_logprobs, "head_offsets": offsets, "support_complete": top_k is not None,
        "temperatures": [temperature] * length,
    }  # fmt: skip


def write_dataset(store: Store, folder: Path, samples: Sequence[Sample], round_number: int = 1) -> str:
    """Returns the digest."""
    folder.mkdir(parents=True)
    rows = [sample.model_dump() for sample in samples]
    half = (len(rows) + 1) // 2
    for at, part in enumerate((rows[:half], rows[half:])):
        if part:
            pq.write_table(pa.Table.from_pylist(part, schema=arrow_schema(Sample)), folder / f"part-{at}.parquet")
    return write_folder(store, layout.dataset(round_number), folder, "dataset", {"trajectories": "?"}).digest()


def train_config(uri: str, digest: str, round_number: int = 1, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "store": StoreConfig(uri=uri), "run": "test", "round": round_number,
        "dataset_key": layout.dataset(round_number), "dataset_digest": digest,
         "init_weights_key": BASE_KEY, "steps": 2, "batch_size": 4, "seed": 7,
        "optimizer": {"learning_rate": 1e-2}, "micro_batch_tokens": 40, "head_chunk_tokens": 5,
        "checkpoint_every_steps": 1,
    }  # fmt: skip
    return TrainConfig.model_validate(settings | changes)


class Lab:
    """A store with a base model; one dataset and one training a round."""

    def __init__(self, folder: Path, model: Any | None = None) -> None:
        self.folder = folder
        self.uri = f"file://{folder}/store"
        self.store = open_store(StoreConfig(uri=self.uri))
        self.model = model or tiny_model()
        write_model(self.store, folder / "base", self.model)

    def dataset(self, samples: Sequence[Sample], round_number: int = 1) -> str:
        return write_dataset(self.store, self.folder / f"dataset-{round_number}", samples, round_number)

    def config(self, samples: Sequence[Sample], round_number: int = 1, **changes: Any) -> TrainConfig:
        return train_config(self.uri, self.dataset(samples, round_number), round_number, **changes)

    def train(self, config: TrainConfig) -> TrainResult:
        return run(config, Progress())

    def figures(self, round_number: int = 1) -> list[dict[str, float]]:
        import json

        return [json.loads(line) for line in self.store.get(layout.train_metrics(round_number)).splitlines()]

    def digests(self, round_number: int = 1) -> tuple[dict[str, str], dict[str, str]]:
        """Hashes of the checkpoint's and the weights' files."""
        from prodrl.store.folders import read_manifest

        keys = (layout.checkpoint(round_number), layout.weights(round_number))
        found = [read_manifest(self.store, key) for key in keys]
        return tuple({file.path: file.sha256 for file in manifest.files} for manifest in found)  # type: ignore[return-value]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
