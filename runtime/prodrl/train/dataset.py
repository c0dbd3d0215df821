"""The sealed dataset: its Parquet rows, read and checked. Called by ``loop``; ``batch`` makes tensors of it.

Whatever could make a loss silently wrong is refused here by name: counts that don't agree, logprobs that are not finite
or positive, a support whose mass is not 1, a token id outside the vocabulary. A sampled token outside its recorded
support is not refused but counted (``outside_support_fraction``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prodrl.errors import DataError
from prodrl.records import Manifest, Sample

MASS_TOLERANCE = 2e-3
"""How far the mass of a complete support may be from 1, and a head's above it: K float32 roundings and more."""
LOGPROB_TOLERANCE = 1e-4
"""How far above 0 a recorded log probability may be."""


@dataclass(frozen=True)
class Row:
    """One sample as arrays; see :class:`prodrl.records.Sample` for the fields."""

    ids: np.ndarray
    loss_positions: np.ndarray
    logprobs: np.ndarray
    head_ids: np.ndarray
    head_logprobs: np.ndarray
    head_offsets: np.ndarray
    temperatures: np.ndarray
    support_complete: bool
    trajectory: int
    """Index into ``Dataset.trajectories``."""
    first_token: int
    """Index of its first loss token among all of the dataset."""


@dataclass(frozen=True)
class Trajectory:
    """What the loss needs to know of one trajectory, whatever its number of samples."""

    trajectory_id: str
    reward: float
    tokens: int
    """T_i, over all its samples."""
    rows: tuple[int, ...]
    """Its samples, in order."""


class Dataset:
    """The rows of a round, sorted by trajectory order and sample index."""

    def __init__(self, key: str, table: pa.Table) -> None:
        self.key = key
        self.table = table.sort_by([("order", "ascending"), ("index", "ascending")])
        self.lengths: list[int] = self._lengths("ids")
        self.loss_counts = np.array(self._lengths("loss_positions"), dtype=np.int64)
        self._first_token = np.concatenate([[0], np.cumsum(self.loss_counts)])
        self.trajectories: list[Trajectory] = []
        self._trajectory_of_row: list[int] = []
        self._group()
        names = self._light("trajectory_id")
        self.row_names: list[tuple[str, int]] = list(zip(names, self._light("index"), strict=True))

    @property
    def num_tokens(self) -> int:
        """Loss tokens of all rows."""
        return int(self._first_token[-1])

    def row(self, index: int) -> Row:
        """The arrays of one sample."""

        def array(name: str) -> np.ndarray:
            return np.asarray(self.table.column(name)[index].values.to_numpy(zero_copy_only=False))

        return Row(
            **{name: array(name) for name in _ARRAYS},
            support_complete=bool(self.table.column("support_complete")[index].as_py()),
            trajectory=self._trajectory_of_row[index],
            first_token=int(self._first_token[index]),
        )

    def check(self, vocabulary: int, max_sequence_tokens: int, needs_heads: bool) -> None:
        """Refuse what cannot be trained on.

        Args:
            vocabulary: Token ids must be below it.
            max_sequence_tokens: Longest sample.
            needs_heads: Score centering: a position without a head would silently be plain REINFORCE.

        Raises:
            DataError: Names the first bad sample and what is wrong with it.
        """
        for at in range(self.table.num_rows):
            row = self.row(at)
            fault = next(_fault_of(row, vocabulary, max_sequence_tokens, needs_heads), None)
            if fault is not None:
                name, index = self.row_names[at]
                raise DataError(f"Dataset {self.key}: trajectory {name} sample {index}: {fault}; collect it again")

    def _light(self, name: str) -> list[Any]:
        values: list[Any] = self.table.column(name).to_pylist()
        return values

    def _lengths(self, name: str) -> list[int]:
        lengths: list[int] = pc.list_value_length(self.table.column(name)).to_pylist()
        return lengths

    def _group(self) -> None:
        """Rows -> trajectories; one reward, one T_i and all samples each."""
        names, rewards, counts = self._light("trajectory_id"), self._light("reward"), self._light("trajectory_tokens")
        indices, totals, orders = self._light("index"), self._light("num_samples"), self._light("order")
        groups: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            groups.setdefault(name, []).append(row)
        for position, (name, rows) in enumerate(groups.items()):
            first = rows[0]
            tokens = int(self.loss_counts[rows].sum())
            same = {(rewards[row], counts[row], totals[row], orders[row]) for row in rows}
            if [indices[row] for row in rows] != list(range(totals[first])) or len(same) != 1:
                raise self._bad(name, f"samples must be 0..{totals[first] - 1} with one reward and one order", rows)
            if tokens != counts[first] or tokens == 0:
                raise self._bad(name, "trajectory_tokens must be its loss tokens and above 0", (counts[first], tokens))
            if not np.isfinite(rewards[first]):
                raise self._bad(name, "reward must be finite", rewards[first])
            self.trajectories.append(Trajectory(name, float(rewards[first]), tokens, tuple(rows)))
            self._trajectory_of_row += [position] * len(rows)
        if [row for trajectory in self.trajectories for row in trajectory.rows] != list(range(len(names))):
            raise DataError(f"Dataset {self.key}: order must be one number a trajectory; collect it again")

    def _bad(self, name: str, fault: str, value: object) -> DataError:
        return DataError(f"Dataset {self.key}: trajectory {name}: {fault}, got {value!r}; collect it again")


_ARRAYS = ("ids", "loss_positions", "logprobs", "head_ids", "head_logprobs", "head_offsets", "temperatures")


def read(folder: Path, manifest: Manifest, key: str) -> Dataset:
    """Read the Parquet files of a verified folder.

    Raises:
        DataError: A file is no Parquet file of samples, or the rows do not agree with each other.
    """
    names = [file.path for file in manifest.files if file.path.endswith(".parquet")]
    if manifest.kind != "dataset" or not names:
        raise DataError(f"Folder {key}: is no dataset, got kind {manifest.kind!r} with {len(names)} Parquet files")
    columns = list(Sample.model_fields)
    try:
        tables = [pq.read_table(folder / name, columns=columns) for name in names]
        table = pa.concat_tables(tables)
    except (pa.ArrowException, OSError) as exc:
        raise DataError(f"Dataset {key}: cannot be read, {exc}; collect it again") from exc
    missing = sorted(set(columns) - set(table.column_names))
    if missing or any(column.null_count for column in table.columns):
        raise DataError(f"Dataset {key}: columns are missing or hold nulls, got {missing!r} missing; collect it again")
    return Dataset(key, table)


def _fault_of(row: Row, vocabulary: int, max_sequence_tokens: int, needs_heads: bool) -> Iterator[str]:
    """Everything that is wrong with a sample; whoever asks for the first never reaches a check that builds on it."""
    count, length = len(row.loss_positions), len(row.ids)
    if length > max_sequence_tokens:
        yield f"longer than max_sequence_tokens {max_sequence_tokens}, got {length}"
    if {len(row.logprobs), len(row.temperatures), len(row.head_offsets) - 1} != {count}:
        yield "logprobs, temperatures and head_offsets must fit loss_positions"
    if count and not (row.loss_positions[0] >= 1 and row.loss_positions[-1] < length):
        yield f"loss_positions must lie in 1..{length - 1}, got {row.loss_positions[[0, -1]].tolist()}"
    if np.any(np.diff(row.loss_positions) <= 0):
        yield "loss_positions must ascend"
    for name, ids in (("ids", row.ids), ("head_ids", row.head_ids)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
            yield f"{name} must lie in 0..{vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}"
    if not np.all(np.isfinite(row.temperatures) & (row.temperatures > 0)):
        yield "temperatures must be finite and above 0"
    for name, values in (("logprobs", row.logprobs), ("head_logprobs", row.head_logprobs)):
        if not np.all(np.isfinite(values)) or (len(values) and values.max() > LOGPROB_TOLERANCE):
            yield f"{name} must be finite and at most 0"
    yield from _head_fault(row, needs_heads)


def _head_fault(row: Row, needs_heads: bool) -> Iterator[str]:
    sizes = np.diff(row.head_offsets)
    if len(row.head_ids) != len(row.head_logprobs) or row.head_offsets[0] != 0 or np.any(sizes < 0):
        yield "head_ids, head_logprobs and head_offsets must fit each other"
    if row.head_offsets[-1] != len(row.head_ids):
        yield f"head_offsets must end at {len(row.head_ids)}, got {int(row.head_offsets[-1])}"
    if len(sizes) and sizes.min() == 0 and (needs_heads or row.support_complete):
        yield "has a position without a recorded head, which score centering and complete supports need"
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if len(np.unique(owner.astype(np.int64) << 32 | row.head_ids)) != len(owner):
        yield "a position has the same head id twice"
    mass = np.bincount(owner, weights=np.exp(row.head_logprobs.astype(np.float64)), minlength=len(sizes))
    if np.any(mass > 1 + MASS_TOLERANCE):
        yield f"the head's mass must be at most 1, got {mass.max():.6f}; logprobs are not those of the sampler"
    if row.support_complete and np.any(mass < 1 - MASS_TOLERANCE):
        yield f"a complete support must have mass 1, got {mass.min():.6f}"
