"""The consumption ledger: one entry a round, created once, after the dataset's manifest.

An entry claims its trajectories for ever; a later round never takes them, whatever became of the earlier one. Entries
are read by name (rounds 1 .. k-1), never found by listing.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from prodrl.errors import DataError
from prodrl.store import layout
from prodrl.store.port import Store


class Entry(BaseModel):
    """One round's claim."""

    model_config = ConfigDict(extra="forbid")

    round: int
    dataset_key: str
    dataset_digest: str
    policy_digest: str
    trajectory_ids: list[str]
    """In dataset order."""
    collect_from_ms: int
    """Trajectories of this policy that began before were excluded (0 in asynchronous mode)."""
    sealed_ms: int
    """When."""
    tokens: int
    reward_mean: float
    settle_seconds: float
    max_sequence_tokens: int
    excluded: dict[str, int]
    """Reason -> count, as known when the dataset was sealed."""


def read(store: Store, number: int) -> Entry | None:
    """The round's entry; None when it has not claimed."""
    try:
        return Entry.model_validate_json(store.get(layout.ledger(number)))
    except KeyError:
        return None
    except ValidationError as exc:
        raise DataError(f"Ledger {layout.ledger(number)}: damaged, {exc.error_count()} faults; restore it") from exc


def claim(store: Store, entry: Entry) -> Entry:
    """Claim, unless the round has claimed already. Returns the entry that stands."""
    if store.create(layout.ledger(entry.round), entry.model_dump_json().encode()):
        return entry
    standing = read(store, entry.round)
    assert standing is not None, "create() said that it exists"
    return standing


def claimed_before(store: Store, number: int) -> set[str]:
    """All trajectories that rounds 1 .. number-1 claimed."""
    entries = (read(store, earlier) for earlier in range(1, number))
    return {trajectory for entry in entries if entry is not None for trajectory in entry.trajectory_ids}


def abandon(store: Store, number: int) -> None:
    """Mark that a claim was never trained on (the round was aborted before its first step)."""
    store.put(layout.ledger_abandoned(number), b"{}")


def is_abandoned(store: Store, number: int) -> bool:
    """Whether :func:`abandon` marked it."""
    return store.exists(layout.ledger_abandoned(number))
