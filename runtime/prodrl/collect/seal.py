"""Sealing: dataset shard, manifest, ledger entry, in that order. Each is written once; a crash between is resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prodrl.collect import ledger
from prodrl.collect.join import Trajectory
from prodrl.collect.samples import to_samples
from prodrl.config import CollectConfig, CollectResult
from prodrl.errors import DataError
from prodrl.records import Manifest, Sample, arrow_schema
from prodrl.store import folders, layout
from prodrl.store.port import Store

SHARD = "samples.parquet"


def rows_of(chosen: Sequence[Trajectory]) -> list[Sample]:
    """The dataset's rows in order."""
    return [
        row
        for order, trajectory in enumerate(chosen)
        for row in to_samples(list(trajectory.records.values()), order=order, reward=trajectory.reward)
    ]


def write_dataset(store: Store, config: CollectConfig, chosen: Sequence[Trajectory]) -> Manifest:
    """Write the dataset folder, or return the one that stands there already (an earlier attempt's)."""
    key = layout.dataset(config.round)
    if folders.exists(store, key):
        return folders.read_manifest(store, key)
    rows = rows_of(chosen)
    rewards = [trajectory.reward for trajectory in chosen]
    attributes = {
        "trajectories": str(len(chosen)),
        "tokens": str(sum(row.trajectory_tokens for row in rows if row.index == 0)),
        "reward_mean": repr(sum(rewards) / len(rewards)),
        "policy_digest": config.source.digest,
        "steps": str(config.steps),
        "batch_size": str(config.batch_size),
        "trajectory_ids": " ".join(trajectory.id for trajectory in chosen),
    }
    table = pa.Table.from_pylist([row.model_dump() for row in rows], schema=arrow_schema(Sample))
    with tempfile.TemporaryDirectory() as work:
        pq.write_table(table, Path(work) / SHARD, compression="zstd")
        try:
            return folders.write_folder(store, key, Path(work), "dataset", attributes)
        except DataError:
            return folders.read_manifest(store, key)  # another attempt sealed first: its dataset stands


def seal(
    store: Store, config: CollectConfig, chosen: Sequence[Trajectory], excluded: dict[str, int], now_ms: int
) -> CollectResult:
    """Write and claim. The result always tells what stands in the store, not what this process wanted."""
    manifest = write_dataset(store, config, chosen)
    entry = ledger.claim(store, entry_for(config, manifest, excluded, now_ms))
    return result_of(store, entry)


def entry_for(config: CollectConfig, manifest: Manifest, excluded: dict[str, int], now_ms: int) -> ledger.Entry:
    """The claim on the dataset that stands."""
    return ledger.Entry(
        round=config.round,
        dataset_key=layout.dataset(config.round),
        dataset_digest=manifest.digest(),
        policy_digest=config.source.digest,
        trajectory_ids=manifest.attributes["trajectory_ids"].split(),
        collect_from_ms=config.collect_from_ms if config.mode == "Sync" else 0,
        sealed_ms=now_ms,
        tokens=int(manifest.attributes["tokens"]),
        reward_mean=float(manifest.attributes["reward_mean"]),
        settle_seconds=config.settle_seconds,
        max_sequence_tokens=config.max_sequence_tokens,
        excluded=excluded,
    )


def result_of(store: Store, entry: ledger.Entry) -> CollectResult:
    """The step's result, after the dataset's manifest was checked against the claim."""
    folders.read_manifest(store, entry.dataset_key, expect_digest=entry.dataset_digest)
    return CollectResult(
        dataset_key=entry.dataset_key,
        dataset_digest=entry.dataset_digest,
        trajectories=len(entry.trajectory_ids),
        tokens=entry.tokens,
        reward_mean=entry.reward_mean,
        excluded=entry.excluded,
    )
