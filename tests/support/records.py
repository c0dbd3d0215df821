"""A small world for tests: writes record shards and feedback segments as recorder and gateway do."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prodrl.config import CollectConfig, PolicyRef, StoreConfig
from prodrl.records import CompletionRecord, FeedbackEntry, Manifest, ManifestFile, arrow_schema
from prodrl.store import layout, open_store
from prodrl.store.port import Store

DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64
NOW = 1_800_000_000_000
"""Unix milliseconds of the tests' clock."""
HALF = -0.6931472
"""log 0.5"""


def make_record(trajectory: str, turn: int = 0, **changes: Any) -> CompletionRecord:
    """A trainable completion of two tokens with a complete support of two entries at each position."""
    output = changes.pop("output_ids", [11, 12])
    count = len(output)
    values: dict[str, Any] = {
        "record_id": f"{trajectory}.{turn}:0",
        "request_id": f"{trajectory}.{turn}",
        "trajectory_id": trajectory,
        "policy_digest": DIGEST,
        "policy_round": 0,
        "engine": "test 1",
        "started_ms": NOW - 10_000 + turn * 100,
        "finished_ms": NOW - 9_950 + turn * 100,
        "prompt_ids": [1, 2, 3],
        "output_ids": output,
        "logprobs": [HALF] * count,
        "head_ids": [11, 12] * count,
        "head_logprobs": [HALF] * (2 * count),
        "head_offsets": [2 * position for position in range(count + 1)],
        "support_complete": True,
        "logprobs_mode": "processed_logprobs",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "sampling": "{}",
        "finish_reason": "stop",
        "stop_reason": "12",
        "status": "finished",
        "num_cached_tokens": 0,
        "trainable": not changes.get("reasons"),
        "reasons": [],
    }
    return CompletionRecord(**(values | changes))


def make_feedback(trajectory: str, reward: float = 1.0, **changes: Any) -> FeedbackEntry:
    """A final reward for a trajectory of one turn."""
    values: dict[str, Any] = {
        "feedback_id": f"f-{trajectory}",
        "idempotency_key": f"key-{trajectory}",
        "trajectory_id": trajectory,
        "reward": reward,
        "final": True,
        "received_ms": NOW - 5_000,
        "request_ids": [f"{trajectory}.0"],
        "failed_request_ids": [],
        "metadata": {},
    }
    return FeedbackEntry.model_construct(**(values | changes))  # a reward that is no number must be possible


@dataclass
class World:
    """Writers of one store; each call makes one shard or segment."""

    store: Store
    writer: str = "engine-0"
    _sequence: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> int:
        self._sequence[name] = self._sequence.get(name, -1) + 1
        return self._sequence[name]

    def record(self, *records: CompletionRecord, digest: str = DIGEST, manifest: bool = True) -> str:
        """Write a shard; returns its key. Without a manifest it is what a crash leaves."""
        table = pa.Table.from_pylist([r.model_dump() for r in records], schema=arrow_schema(CompletionRecord))
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        data = buffer.getvalue()
        key = layout.record_shard(digest, self.writer, self.next("records" + digest))
        self.store.put(key, data)
        if manifest:
            entry = ManifestFile(path=key.rpartition("/")[2], size=len(data), sha256=hashlib.sha256(data).hexdigest())
            made = Manifest(
                kind="records",
                files=[entry],
                attributes={"rows": str(len(records)), "max_ms": str(max(r.finished_ms for r in records))},
            )
            self.store.create(layout.shard_manifest(key), made.canonical())
        return key

    def reward(self, *entries: FeedbackEntry) -> str:
        """Write a feedback segment; returns its key."""
        key = layout.feedback_segment("gateway-0", self.next("feedback"))
        self.store.create(key, "".join(entry.model_dump_json() + "\n" for entry in entries).encode())
        return key

    def play(self, *trajectories: str, reward: float = 1.0) -> None:
        """Record and reward trajectories of one turn."""
        self.record(*(make_record(name) for name in trajectories))
        self.reward(*(make_feedback(name, reward) for name in trajectories))


def make_config(store: StoreConfig, number: int = 1, **changes: Any) -> CollectConfig:
    """Two steps of two trajectories, no limits that a test does not ask for."""
    values: dict[str, Any] = {
        "store": store,
        "run": "test",
        "round": number,
        "source": PolicyRef(round=0, digest=DIGEST, key=layout.policy(0)),
        "steps": 2,
        "batch_size": 2,
        "reward_deadline_seconds": 3600,
        "settle_seconds": 10,
        "poll_seconds": 0.01,
    }
    return CollectConfig(**(values | changes))


def world(config: StoreConfig, writer: str = "engine-0") -> World:
    return World(open_store(config), writer)
