"""Ranks, and sharding applied from outside. Called by ``loop``; the policy knows nothing of it.

Started by torchrun (RANK and WORLD_SIZE in the environment) the policy is sharded with FSDP2 over all ranks, over nccl
with GPUs and gloo without. Started alone there is no process group at all and every collective here is the identity.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from prodrl.train.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the round."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, on all of them."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, on all of them."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on all of them."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: decisions that end the loop must be taken by all at once."""
        return bool(self.max(torch.tensor(float(flag), device=self.device)))


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group that torchrun described, if it did."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, 0, 0, device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), world_size, local_rank, int(os.environ.get("GROUP_RANK", "0")), device)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def node_folder(ranks: Ranks) -> Iterator[Path]:
    """A temporary folder that all ranks of one node share; the first of them makes and removes it."""
    made = tempfile.mkdtemp(prefix="prodrl-train-") if ranks.local_rank == 0 else None
    folders = {node: Path(folder) for node, folder in ranks.gather((ranks.node, made)) if folder is not None}
    try:
        yield folders[ranks.node]
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype) -> Policy:
    """Shard every block, then the rest (embeddings, last norm, head) with the root; alone, only move to the device.

    Weights stay float32 and are cast when they are gathered; gradients are reduced in float32.
    """
    if ranks.world_size == 1:
        policy.to(ranks.device)
        return policy
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in getattr(policy.body, "layers", ()):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard; a collective, so every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
