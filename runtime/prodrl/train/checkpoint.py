"""Trainer checkpoints: float32 weights, Adam, counters, RNG and baseline. Called by ``loop``.

Tensors are written with torch.distributed.checkpoint as safetensors shards (no pickle), so that any number of ranks can
read what any other number wrote. A checkpoint is made in a local folder, uploaded by the ranks that hold its files, and
exists once rank 0 has put the manifest. Checkpoints are found by asking for the manifests of known step numbers, never
by listing; one of another dataset or configuration, or damaged, is passed over.

The uploads here do not look at ``stop_requested``: a checkpoint is what a stopped process leaves behind.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from prodrl.errors import DataError, RuntimeFault, StorageFullError, from_os_error
from prodrl.records import Manifest, ManifestFile
from prodrl.store import layout
from prodrl.store.folders import fetch_folder, file_entry, read_manifest
from prodrl.store.port import Store
from prodrl.train.fsdp import Ranks
from prodrl.train.policy import Policy

LOGGER = logging.getLogger(__name__)
_STATE = "trainer.json"
KIND = "checkpoint"


@dataclass
class TrainerState:
    """What goes on from step to step beside the tensors."""

    step: int = 0
    """Minibatches of this round that are done, the skipped ones included."""
    skipped: int = 0
    """Of them, steps whose gradient was not finite."""
    global_step: int = 0
    """Optimizer steps made over the whole lineage."""
    ema: float | None = None
    """EMA of the reward; kept whatever the baseline, so that it may be changed between rounds."""


@dataclass
class Trainer:
    """What a checkpoint holds."""

    policy: Policy
    """Float32 master weights, perhaps sharded."""
    optimizer: torch.optim.AdamW
    """Of :func:`adam`."""
    state: TrainerState


def save(store: Store, key: str, folder: Path, trainer: Trainer, identity: str, ranks: Ranks) -> Manifest:
    """Write a checkpoint to ``key``, by way of ``folder`` (new, one a node); every rank must call it.

    Args:
        store: Where to.
        key: Folder of the store.
        folder: Local space for it; removed again.
        trainer: What to write.
        identity: What a resuming attempt must have in common (see ``loop``).
        ranks: Among which the tensors are sharded.

    Raises:
        StorageFullError: No space; the key has no manifest then.
    """
    policy, optimizer, state = trainer.policy, trainer.optimizer, trainer.state
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _alone_is_fine():
            dcp.save(_tensors(policy, optimizer), storage_writer=writer, no_dist=ranks.world_size == 1)
        ranks.gather(None)  # all shards of the node are written
        if ranks.local_rank == 0:
            for path in folder.glob("*.safetensors"):
                _order_header(path)
        if ranks.is_first:
            content = asdict(state) | {"adam_steps": _adam_steps(policy, optimizer), "rng": _rng()}
            (folder / _STATE).write_text(json.dumps(content), encoding="utf-8")
    except (OSError, CheckpointException) as exc:
        raise _fault(exc, key) from exc
    attributes = {"identity": identity, "step": str(state.step), "global_step": str(state.global_step)}
    manifest = publish(store, key, folder, attributes, ranks)
    if ranks.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def publish(store: Store, key: str, folder: Path, attributes: dict[str, str], ranks: Ranks) -> Manifest:
    """Upload this node's files, then let rank 0 put the manifest over all nodes' files."""
    ranks.gather(None)  # all files of the node are complete
    if ranks.is_first:
        store.delete(layout.manifest_of(key))
    ranks.gather(None)  # nobody can read a mixture of two checkpoints
    mine: list[ManifestFile] = []
    if ranks.local_rank == 0:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            store.put_file(f"{key}/{path.name}", path)
            mine.append(file_entry(folder, path))
    files = {file.path: file for part in ranks.gather(mine) for file in part}
    manifest = Manifest(kind=KIND, files=[files[name] for name in sorted(files)], attributes=attributes)
    if ranks.is_first:
        store.put(layout.manifest_of(key), manifest.canonical())
    ranks.gather(None)
    return manifest


def fetch(store: Store, key: str, folder: Path, ranks: Ranks) -> Manifest:
    """Download and verify a folder once a node; every rank must call it.

    Raises:
        DataError: It does not exist or is damaged.
    """
    error: RuntimeFault | None = None
    if ranks.local_rank == 0:
        try:
            fetch_folder(store, key, folder)
        except RuntimeFault as exc:
            error = exc
    failed = [found for found in ranks.gather(error) if found is not None]
    if failed:
        raise failed[0]
    return read_manifest(store, key)


def load(folder: Path, trainer: Trainer, ranks: Ranks) -> None:
    """Fill ``trainer`` from a fetched checkpoint; every rank must call it.

    Raises:
        DataError: It does not fit the model.
    """
    policy, optimizer = trainer.policy, trainer.optimizer
    try:
        content = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        reader = dcp.HuggingFaceStorageReader(str(folder))
        with _alone_is_fine():
            dcp.load(_tensors(policy, optimizer), storage_reader=reader, no_dist=ranks.world_size == 1)
        steps = content.pop("adam_steps")
        for name, parameter in policy.named_parameters():
            optimizer.state[parameter]["step"].fill_(float(steps[name]))
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(content.pop("rng"))), dtype=torch.uint8))
        trainer.state = TrainerState(**content)
    except (CheckpointException, KeyError, ValueError, RuntimeError, TypeError, OSError) as exc:
        raise DataError(f"Checkpoint {folder.name}: does not fit the model, {exc}; start from its own weights") from exc


def is_ours(store: Store, key: str, identity: str) -> bool:
    """Whether a folder is complete and was made by the same configuration on the same dataset."""
    if not store.exists(layout.manifest_of(key)):
        return False
    try:
        return read_manifest(store, key).attributes.get("identity") == identity
    except DataError as exc:
        LOGGER.warning("passed over: %s", exc)
        return False


def discard(store: Store, key: str) -> None:
    """Remove a folder, its manifest first."""
    store.delete(layout.manifest_of(key))
    for name in list(store.list(f"{key}/")):
        store.delete(name)


def adam(policy: Policy, **settings: Any) -> torch.optim.AdamW:
    """AdamW with its state made now, so that a checkpoint has somewhere to go."""
    optimizer = torch.optim.AdamW(policy.parameters(), **settings)
    for parameter in policy.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """DCP warns when there is no process group, even when it was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What DCP writes and fills in place; tied parameters appear once."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        for part in ("exp_avg", "exp_avg_sq"):
            tensors[f"{part}/{name}"] = optimizer.state[parameter][part].detach()
    return tensors


def _order_header(path: Path) -> None:
    """The safetensors writer puts its metadata in random order: equal checkpoints would have unequal digests."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(ordered) == size, "only the order may change"
        file.seek(8)
        file.write(ordered)


def _adam_steps(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {name: int(optimizer.state[parameter]["step"]) for name, parameter in policy.named_parameters()}


def _rng() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def _fault(exc: Exception, key: str) -> RuntimeFault:
    """The kind of a failed write; DCP wraps what happened on each rank."""
    causes = [pair[0] for pair in exc.failures.values()] if isinstance(exc, CheckpointException) else [exc]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return StorageFullError(f"Checkpoint {key}: no space left on the local disk; give TMPDIR more space")
    for cause in causes:
        if isinstance(cause, OSError):
            return from_os_error(cause, f"Checkpoint {key}")
    return DataError(f"Checkpoint {key}: cannot be written, {exc}")
