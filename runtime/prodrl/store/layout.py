"""Every key of the store. Pure; the only place where a key is spelled.

``rounds/NNNN/...`` holds what a round made, ``records/``, ``feedback/`` and ``ledger/`` what the users did.
A folder counts once its ``manifest.json`` is there and verifies.
"""

from __future__ import annotations

MANIFEST = "manifest.json"
FEEDBACK = "feedback/"
"""Prefix of all feedback segments."""
RECORDS = "records/"
"""Prefix of all record shards."""
RETIRING = "retiring/"
"""Prefix of the marks on rounds whose weights a later round may delete."""
RETIRED = "retired/"
"""Prefix of the notes on rounds whose weights are deleted."""


def round_folder(number: int) -> str:
    """Everything that round ``number`` made."""
    return f"rounds/{number:04d}"


def dataset(number: int) -> str:
    """The sealed dataset of a round."""
    return f"{round_folder(number)}/dataset"


def step_checkpoints(number: int) -> str:
    """All checkpoints that were written while the round trained."""
    return f"{round_folder(number)}/steps"


def step_checkpoint(number: int, step: int) -> str:
    """Trainer checkpoint after ``step`` optimizer steps of the round."""
    return f"{step_checkpoints(number)}/{step:06d}"


def checkpoint(number: int) -> str:
    """Trainer checkpoint at the end of the round."""
    return f"{round_folder(number)}/checkpoint"


def weights(number: int) -> str:
    """Plain Hugging Face weights at the end of the round."""
    return f"{round_folder(number)}/weights"


def policy(number: int) -> str:
    """The exported, servable policy of a round."""
    return f"{round_folder(number)}/policy"


def heavy_folders(number: int) -> tuple[str, ...]:
    """What retention deletes of a round: all that is as large as the model."""
    return policy(number), weights(number), checkpoint(number), step_checkpoints(number)


def train_metrics(number: int) -> str:
    """Diagnostics per optimizer step, JSON lines."""
    return f"{round_folder(number)}/metrics.jsonl"


def train_events(number: int) -> str:
    """The same as TensorBoard events; the folder is what ``tensorboard --logdir`` takes."""
    return f"{round_folder(number)}/tensorboard/events.out.tfevents.0.prodrl"


def evaluation(number: int) -> str:
    """Per-item outcomes of the gate's evaluations, JSON."""
    return f"{round_folder(number)}/evaluation.json"


def records(policy_digest: str) -> str:
    """Folder of the record shards of a policy."""
    return f"records/{policy_digest.removeprefix('sha256:')[:16]}"


def record_shard(policy_digest: str, writer: str, sequence: int) -> str:
    """One Parquet shard; its manifest is :func:`shard_manifest` of this key."""
    return f"{records(policy_digest)}/{writer}-{sequence:08d}.parquet"


def shard_manifest(shard_key: str) -> str:
    """The manifest that makes a shard exist."""
    return shard_key.removesuffix(".parquet") + ".manifest.json"


def feedback_segment(writer: str, sequence: int) -> str:
    """One group commit of feedback, JSON lines, written whole."""
    return f"feedback/{writer}-{sequence:010d}.jsonl"


def ledger(number: int) -> str:
    """The claim of a round on its trajectories; written once, after the dataset's manifest."""
    return f"ledger/{number:04d}.json"


def retiring(number: int, by: int) -> str:
    """Mark, set by round ``by``: the weights of round ``number`` may go."""
    return f"{RETIRING}{number:04d}-{by:04d}"


def retired(number: int) -> str:
    """Note: the round's weights are gone."""
    return f"{RETIRED}{number:04d}"


def manifest_of(folder: str) -> str:
    """The manifest of a folder."""
    return f"{folder}/{MANIFEST}"


def ledger_abandoned(number: int) -> str:
    """Mark beside a claim whose round was never trained."""
    return f"ledger/{number:04d}.abandoned.json"


def ledger_excluded(number: int, content: str) -> str:
    """Ids that the round's claim left out, and why; ``content`` is the beginning of its hash."""
    return f"ledger/{number:04d}.excluded-{content}.jsonl"
