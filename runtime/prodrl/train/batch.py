"""From a sealed dataset to minibatches and micro-batches. Called by ``loop``; ``dataset`` reads and checks the rows.

Trajectories are shuffled by (seed, round); a minibatch is S*B cut into S pieces of B. Each of its samples goes to one
rank, and each rank pads its samples into micro-batches under a token budget. Samples never see each other (one row
each; attention is causal and padding comes last), so packing changes no number. The weight 1/(B*T_i) of every loss
token is fixed here, over trajectories, whatever the split into samples, micro-batches and ranks.

Shape legend: R = rows of a micro-batch, L = their padded length, N = loss tokens, K = head entries (padded, >= 1).
"""

# ruff: noqa: N806, N815  # tensors carry their shape in their name
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prodrl.errors import DataError
from prodrl.train.dataset import Dataset, Row


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. All tensors lie on one device."""

    ids_RL: Tensor
    """Token ids, padded with 0 behind."""
    scored_from_N: Tensor
    """Index into R*L of the position whose hidden state scores the loss token (the one before it)."""
    ids_N1K: Tensor
    """Sampled token, then the recorded head (padded with 0)."""
    head_mask_NK: Tensor
    log_mu_N: Tensor
    log_mu_head_NK: Tensor
    temperature_N: Tensor
    complete_N: Tensor
    outside_N: Tensor
    """The sampled token is not in its complete support, which cannot be: counted by the diagnostics."""
    weight_N: Tensor
    """1/(B*T_i); 0 in a micro-batch that only keeps a rank in step."""
    trajectory_N: Tensor
    """Index of the trajectory in the dataset."""
    flat_N: Tensor
    """Index of the loss token in the dataset; -1 in a micro-batch that only keeps a rank in step."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})


def minibatches(dataset: Dataset, steps: int, batch_size: int, seed: int, round_number: int) -> list[list[int]]:
    """The trajectories of each optimizer step, as indices into ``dataset.trajectories``.

    Inside a minibatch the order is that of the trajectory ids, so that equal sets give equal bits.

    Raises:
        DataError: The dataset has not exactly ``steps * batch_size`` trajectories.
    """
    found = len(dataset.trajectories)
    if found != steps * batch_size:
        raise DataError(
            f"Dataset {dataset.key}: must hold steps * batch_size = {steps} * {batch_size} trajectories, got {found}; "
            "collect it again with this configuration"
        )
    shuffled = np.random.Generator(np.random.PCG64([seed, round_number])).permutation(found).tolist()
    pieces = [shuffled[start : start + batch_size] for start in range(0, found, batch_size)]
    return [sorted(piece, key=lambda index: dataset.trajectories[index].trajectory_id) for piece in pieces]


def shares(dataset: Dataset, trajectories: Sequence[int], world_size: int, budget: int) -> list[list[list[int]]]:
    """Rows of each rank's micro-batches; every rank gets equally many, the last ones perhaps empty.

    Longest first to the least loaded rank; micro-batches hold rows of similar length.
    """
    rows = [row for index in trajectories for row in dataset.trajectories[index].rows]
    rows.sort(key=lambda row: (-dataset.lengths[row], dataset.row_names[row]))
    loads, assigned = [0] * world_size, [[] for _ in range(world_size)]  # type: list[int], list[list[int]]
    for row in rows:
        rank = loads.index(min(loads))
        loads[rank] += dataset.lengths[row]
        assigned[rank].append(row)
    packed = [_micro_batches(dataset, rank_rows, budget) for rank_rows in assigned]
    most = max(map(len, packed))
    return [micro + [[] for _ in range(most - len(micro))] for micro in packed]


def _micro_batches(dataset: Dataset, rows: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows, longest first, so that rows * longest stays in the budget (a single row may exceed it)."""
    micro: list[list[int]] = []
    for row in rows:
        if micro and (len(micro[-1]) + 1) * dataset.lengths[micro[-1][0]] <= budget:
            micro[-1].append(row)
        else:
            micro.append([row])
    return micro


def collate(dataset: Dataset, rows: Sequence[int], batch_size: int) -> MicroBatch:
    """Tensors of one micro-batch; no rows give the one that contributes nothing, yet runs every collective."""
    if not rows:
        return _idle()
    read = [dataset.row(row) for row in rows]
    longest = max(len(row.ids) for row in read)
    ids_RL = np.zeros((len(read), longest), dtype=np.int64)
    for at, row in enumerate(read):
        ids_RL[at, : len(row.ids)] = row.ids
    head_ids, head_mask, head_logprobs = _padded_heads(read)
    sampled = np.concatenate([row.ids[row.loss_positions] for row in read])
    counts = [len(row.loss_positions) for row in read]
    trajectory = np.repeat([row.trajectory for row in read], counts)
    tokens = np.array([dataset.trajectories[index].tokens for index in trajectory], dtype=np.float64)
    complete = np.repeat([row.support_complete for row in read], counts)
    in_head = (head_mask & (head_ids == sampled[:, None])).any(axis=1)
    return MicroBatch(
        ids_RL=torch.from_numpy(ids_RL),
        scored_from_N=_long(np.concatenate([at * longest + row.loss_positions - 1 for at, row in enumerate(read)])),
        ids_N1K=_long(np.concatenate([sampled[:, None], head_ids], axis=1)),
        head_mask_NK=torch.from_numpy(head_mask),
        log_mu_N=_float(np.concatenate([row.logprobs for row in read])),
        log_mu_head_NK=_float(head_logprobs),
        temperature_N=_float(np.concatenate([row.temperatures for row in read])),
        complete_N=torch.from_numpy(complete),
        outside_N=torch.from_numpy(complete & ~in_head),
        weight_N=_float(1.0 / (batch_size * tokens)),
        trajectory_N=_long(trajectory),
        flat_N=_long(np.concatenate([row.first_token + np.arange(n) for row, n in zip(read, counts, strict=True)])),
    )


def _padded_heads(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat heads -> (ids, mask, logprobs), each [N, K]; padding is id 0, False, -inf."""
    counts = np.concatenate([np.diff(row.head_offsets) for row in rows])
    width = max(1, int(counts.max(initial=0)))
    mask = np.arange(width)[None, :] < counts[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    logprobs = np.full(mask.shape, -np.inf, dtype=np.float32)
    ids[mask] = np.concatenate([row.head_ids for row in rows])
    logprobs[mask] = np.concatenate([row.head_logprobs for row in rows])
    return ids, mask, logprobs


def _idle() -> MicroBatch:
    one, no = torch.ones(1), torch.zeros(1, dtype=torch.bool)
    return MicroBatch(
        ids_RL=torch.zeros(1, 2, dtype=torch.long),
        scored_from_N=torch.zeros(1, dtype=torch.long),
        ids_N1K=torch.zeros(1, 2, dtype=torch.long),
        head_mask_NK=no[:, None],
        log_mu_N=-one,
        log_mu_head_NK=torch.full((1, 1), -torch.inf),
        temperature_N=one,
        complete_N=no,
        outside_N=no,
        weight_N=torch.zeros(1),
        trajectory_N=torch.zeros(1, dtype=torch.long),
        flat_N=torch.full((1,), -1, dtype=torch.long),
    )


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
