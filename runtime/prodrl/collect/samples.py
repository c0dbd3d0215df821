"""Turns of a trajectory as training samples, by exact id prefix; nothing is ever tokenised again. Pure.

Called by ``seal``. A turn whose prompt begins with everything a sample holds extends it: what the prompt adds is
context, what the engine sampled is trained on. A turn whose prompt was edited begins another sample; all samples of a
trajectory share one T_i.

Shape legend: T = sampled tokens of a turn, L = tokens of a sample, G = its loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Turn:
    """One completion record with its tokens; fields as in :class:`~prodrl.records.CompletionRecord`."""

    record_id: str
    prompt_ids: Ids
    output_ids: Ids
    logprobs: Floats
    head_ids: Ids
    head_logprobs: Floats
    head_offsets: Ids
    support_complete: bool
    temperature: float
    finish_reason: str

    @classmethod
    def from_row(cls, row: pa.Table) -> Turn:
        """A table of one row."""
        values: dict[str, Any] = {}
        for name in ("prompt_ids", "output_ids", "head_ids", "head_offsets"):
            values[name] = np.asarray(row.column(name)[0].values).astype(np.int32, copy=False)
        for name in ("logprobs", "head_logprobs"):
            values[name] = np.asarray(row.column(name)[0].values).astype(np.float32, copy=False)
        for name in ("record_id", "support_complete", "temperature", "finish_reason"):
            values[name] = row.column(name)[0].as_py()
        return cls(**values)


@dataclass
class Stitched:
    """A sample that a next turn may extend."""

    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """[L]"""
    positions: list[Ids] = field(default_factory=list)
    """One array a turn."""
    turns: list[Turn] = field(default_factory=list)

    def is_extended_by(self, turn: Turn) -> bool:
        """Whether the turn's prompt begins with all that this sample holds.

        A completion cut by ``length`` has no stop token: the next prompt holds one that was never sampled.
        """
        if self.turns and self.turns[-1].finish_reason == "length":
            return False
        return bool(np.array_equal(turn.prompt_ids[: len(self.ids)], self.ids))

    def add(self, turn: Turn) -> None:
        """Append what the prompt adds, then the sampled tokens."""
        start = len(turn.prompt_ids)
        self.ids = np.concatenate([turn.prompt_ids, turn.output_ids])
        self.positions.append(np.arange(start, start + len(turn.output_ids), dtype=np.int32))
        self.turns.append(turn)


def stitch(turns: Sequence[Turn]) -> list[Stitched]:
    """The trajectory's samples; ``turns`` in the order in which the engine took them.

    A turn joins the newest sample that it extends. All are tried, not only the last, so that a side conversation
    (another model call between two turns) does not break the main one.
    """
    samples: list[Stitched] = []
    for turn in turns:
        found = next((sample for sample in reversed(samples) if sample.is_extended_by(turn)), None)
        if found is None:
            found = Stitched()
            samples.append(found)
        found.add(turn)
    return samples


def _joined(arrays: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *arrays])


def _head_offsets(turns: Sequence[Turn]) -> Ids:
    """[G+1] the turns' offsets behind each other."""
    counts = _joined([np.diff(turn.head_offsets) for turn in turns], np.int32)
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])


def to_rows(
    turns: Sequence[Turn], *, trajectory_id: str, policy_digest: str, order: int, reward: float
) -> list[dict[str, Any]]:
    """The dataset rows of one trajectory: the fields of :class:`~prodrl.records.Sample`, arrays as numpy."""
    stitched = stitch(turns)
    shared = {
        "trajectory_id": trajectory_id,
        "num_samples": len(stitched),
        "order": order,
        "reward": reward,
        "trajectory_tokens": sum(len(turn.output_ids) for turn in turns),
        "policy_digest": policy_digest,
    }
    return [
        shared
        | {
            "index": index,
            "ids": sample.ids,
            "loss_positions": _joined(sample.positions, np.int32),
            "logprobs": _joined([turn.logprobs for turn in sample.turns], np.float32),
            "head_ids": _joined([turn.head_ids for turn in sample.turns], np.int32),
            "head_logprobs": _joined([turn.head_logprobs for turn in sample.turns], np.float32),
            "head_offsets": _head_offsets(sample.turns),
            "support_complete": all(turn.support_complete for turn in sample.turns),
            "temperatures": _joined(
                [np.full(len(turn.output_ids), turn.temperature, np.float32) for turn in sample.turns], np.float32
            ),
            "record_ids": [turn.record_id for turn in sample.turns],
        }
        for index, sample in enumerate(stitched)
    ]
