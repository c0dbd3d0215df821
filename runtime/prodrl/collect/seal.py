"""Sealing: ids of the excluded, dataset, manifest, claim, in that order; each is created once. Called by ``run``.

Several attempts at a round may seal at the same time. The first manifest decides which dataset there is, the first
ledger entry decides who claims it, and every attempt returns what stands. A crash between any two of them is resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prodrl.collect import ledger
from prodrl.collect.join import Trajectory
from prodrl.collect.samples import Turn, to_rows
from prodrl.collect.tail import Shards
from prodrl.config import CollectConfig, CollectResult
from prodrl.errors import DataError, from_os_error
from prodrl.progress import check_stop
from prodrl.records import Manifest, Sample, arrow_schema
from prodrl.store import folders, layout
from prodrl.store.port import Store

logger = logging.getLogger(__name__)

ROW_GROUP_TRAJECTORIES = 64
"""Trajectories in memory at once."""


def resume(store: Store, config: CollectConfig) -> CollectResult | None:
    """What an earlier attempt finished: a claim, or a dataset that was not claimed yet.

    Raises:
        DataError: What stands is damaged, or the round was fenced.
    """
    key = layout.dataset(config.round)
    if ledger.read(store, config.round) is not None:
        entry = ledger.standing(store, config.round)
        folders.verify(store, key, expect_digest=entry.dataset_digest)
    elif folders.exists(store, key):
        entry = ledger.claim(store, entry_for(store, config, folders.read_manifest(store, key)))
    else:
        return None
    logger.info("Round %d: the dataset of an earlier attempt stands", config.round)
    return result_of(store, entry)


def seal(
    store: Store,
    config: CollectConfig,
    chosen: Sequence[Trajectory],
    refused: Mapping[str, str],
    *,
    seen: int,
    now_ms: int,
) -> CollectResult:
    """Write and claim. The result tells what stands in the store, not what this attempt wanted.

    Raises:
        DataError: A shard was damaged since it was read, or a later round has overtaken this one.
    """
    assert len(chosen) == config.steps * config.batch_size, "a dataset has exactly S*B trajectories"
    excluded_key = write_excluded(store, config.round, refused)
    attributes = {
        "trajectories": str(len(chosen)),
        "tokens": str(sum(trajectory.num_tokens for trajectory in chosen)),
        "reward_mean": repr(sum(trajectory.reward for trajectory in chosen) / len(chosen)),
        "policy_digest": config.source.digest,
        "steps": str(config.steps),
        "batch_size": str(config.batch_size),
        "sealed_ms": str(now_ms),
        "seen": str(seen),
        "excluded": json.dumps(dict(sorted(Counter(refused.values()).items()))),
        "excluded_key": excluded_key,
    }
    manifest = write_dataset(store, config, chosen, attributes)
    return result_of(store, ledger.claim(store, entry_for(store, config, manifest)))


def write_excluded(store: Store, number: int, refused: Mapping[str, str]) -> str:
    """The ids that were not taken, under a name made of the content, so that attempts never overwrite each other."""
    lines = [json.dumps({"trajectory_id": name, "reason": reason}) for name, reason in sorted(refused.items())]
    data = "".join(line + "\n" for line in lines).encode()
    key = layout.ledger_excluded(number, hashlib.sha256(data).hexdigest()[:16])
    store.create(key, data)
    return key


def read_excluded(store: Store, key: str) -> dict[str, str]:
    """Trajectory id -> reason. Raises DataError when the object is gone or damaged."""
    try:
        rows = [json.loads(line) for line in store.get(key).splitlines()]
        return {str(row["trajectory_id"]): str(row["reason"]) for row in rows}
    except (KeyError, TypeError, ValueError) as exc:
        raise DataError(f"Object {key}: is missing or damaged, {exc}; restore it") from exc


def write_dataset(
    store: Store, config: CollectConfig, chosen: Sequence[Trajectory], attributes: Mapping[str, str]
) -> Manifest:
    """Write the dataset folder; where another attempt's stands already, that one is returned."""
    key = layout.dataset(config.round)
    try:
        with tempfile.TemporaryDirectory(prefix="prodrl-collect-") as name:
            folder = Path(name)
            draft = folder / "samples.parquet"
            with pq.ParquetWriter(draft, arrow_schema(Sample), compression="zstd") as writer:
                for table in _tables(store, config, chosen):
                    writer.write_table(table)
            # Two attempts may choose differently: with the hash in the name, neither replaces the other's bytes.
            draft.rename(folder / f"samples-{folders.file_entry(folder, draft).sha256[:16]}.parquet")
            if folders.exists(store, key):
                return folders.read_manifest(store, key)
            return folders.write_folder(store, key, folder, "dataset", attributes)
    except OSError as exc:
        raise from_os_error(exc, f"Dataset {key}") from exc
    except DataError:
        if not folders.exists(store, key):
            raise
        return folders.read_manifest(store, key)


def _tables(store: Store, config: CollectConfig, chosen: Sequence[Trajectory]) -> Iterator[pa.Table]:
    shards = Shards(store)
    schema = arrow_schema(Sample)
    for start in range(0, len(chosen), ROW_GROUP_TRAJECTORIES):
        check_stop(f"Collect round {config.round}")
        rows: list[dict[str, Any]] = []
        for order, trajectory in enumerate(chosen[start : start + ROW_GROUP_TRAJECTORIES], start=start):
            rows += to_rows(
                [Turn.from_row(shards.row(line)) for line in trajectory.turns()],
                trajectory_id=trajectory.id,
                policy_digest=config.source.digest,
                order=order,
                reward=trajectory.reward,
            )
        columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in schema]
        yield pa.Table.from_arrays(columns, schema=schema)


def trajectory_ids(store: Store, key: str, manifest: Manifest) -> list[str]:
    """The trajectories of a dataset in order, from its verified files."""
    found: dict[int, str] = {}
    for file in manifest.files:
        if not file.path.endswith(".parquet"):
            continue
        name = f"{key}/{file.path}"
        try:
            data = folders.check_bytes(store.get(name), file, name)
        except KeyError as exc:
            raise DataError(f"File {name}: is in the manifest and not in {store.uri}; restore it") from exc
        table = pq.read_table(pa.BufferReader(data), columns=["order", "trajectory_id"])
        found |= dict(zip(table.column("order").to_pylist(), table.column("trajectory_id").to_pylist(), strict=True))
    return [found[order] for order in sorted(found)]


def entry_for(store: Store, config: CollectConfig, manifest: Manifest) -> ledger.Entry:
    """The claim on the dataset that stands, whichever attempt wrote it.

    Raises:
        DataError: It was made for other settings.
    """
    key, attributes = layout.dataset(config.round), manifest.attributes
    wanted = {"policy_digest": config.source.digest, "trajectories": str(config.steps * config.batch_size)}
    if found := {name: attributes.get(name) for name, value in wanted.items() if attributes.get(name) != value}:
        raise DataError(f"Dataset {key}: was made for other settings, got {found!r} for {wanted!r}; begin a new round")
    return ledger.Entry(
        round=config.round,
        dataset_key=key,
        dataset_digest=manifest.digest(),
        policy_digest=config.source.digest,
        policy_round=config.source.round,
        trajectory_ids=trajectory_ids(store, key, manifest),
        is_sync=config.mode == "Sync",
        collect_from_ms=config.collect_from_ms,
        reward_deadline_seconds=config.reward_deadline_seconds,
        settle_seconds=config.settle_seconds,
        max_sequence_tokens=config.max_sequence_tokens,
        sealed_ms=int(attributes["sealed_ms"]),
        tokens=int(attributes["tokens"]),
        reward_mean=float(attributes["reward_mean"]),
        seen=int(attributes["seen"]),
        excluded=json.loads(attributes["excluded"]),
        excluded_key=attributes["excluded_key"],
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
