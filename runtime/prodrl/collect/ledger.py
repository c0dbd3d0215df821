"""The consumption ledger: one entry a round, created once, after the dataset's manifest.

A claim stands for ever: no other round takes its trajectories, whatever became of the round. Before a round claims, it
fences the earlier rounds that have not: an attempt of theirs that still lives somewhere can no longer claim
trajectories that this round is about to take. So two rounds never hold the same one, whoever is slow.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from prodrl.errors import DataError
from prodrl.store import layout
from prodrl.store.port import Store


class Entry(BaseModel):
    """One round's claim, and the rules under which it was made (``audit`` judges the rest by them)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    round: int
    dataset_key: str
    dataset_digest: str
    policy_digest: str
    """Whose records it took."""
    policy_round: int
    trajectory_ids: list[str]
    """In dataset order."""
    is_sync: bool
    collect_from_ms: int
    reward_deadline_seconds: float
    settle_seconds: float
    max_sequence_tokens: int
    sealed_ms: int
    tokens: int
    reward_mean: float
    seen: int
    """Trajectories of the policy that were known, unclaimed, when the dataset was sealed."""
    excluded: dict[str, int]
    """Reason -> trajectories that were not taken then."""
    excluded_key: str
    """Object with their ids, JSON lines."""


class Fence(BaseModel):
    """A round that may no longer claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    round: int
    fenced_by: int
    """The later round that claimed first; the round itself when it was abandoned before it had a dataset."""


_ADAPTER: TypeAdapter[Entry | Fence] = TypeAdapter(Entry | Fence)


def read(store: Store, number: int) -> Entry | Fence | None:
    """What the round's name holds; None when it has not claimed."""
    key = layout.ledger(number)
    try:
        return _ADAPTER.validate_json(store.get(key))
    except KeyError:
        return None
    except ValidationError as exc:
        raise DataError(f"Ledger {key}: is damaged, {exc.error_count()} faults; restore it") from exc


def claim(store: Store, entry: Entry) -> Entry:
    """Claim, unless the round has claimed already. Returns the entry that stands.

    Raises:
        DataError: A later round has fenced this one.
    """
    if store.create(layout.ledger(entry.round), entry.model_dump_json().encode()):
        return entry
    return standing(store, entry.round)


def standing(store: Store, number: int) -> Entry:
    """The claim that a round is known to have.

    Raises:
        DataError: It has none, or is fenced.
    """
    found = read(store, number)
    if isinstance(found, Entry):
        return found
    if found is None:
        raise DataError(f"Ledger {layout.ledger(number)}: is gone after it was created; restore it")
    why = "was abandoned" if found.fenced_by == number else f"was overtaken by round {found.fenced_by}"
    raise DataError(f"Round {number}: {why} before it had a dataset, and may not claim any more; begin a new round")


def claims_before(store: Store, number: int) -> list[Entry]:
    """The claims of rounds 1 .. number-1, read by name."""
    found = (read(store, earlier) for earlier in range(1, number))
    return [entry for entry in found if isinstance(entry, Entry)]


def fence_before(store: Store, number: int) -> list[Entry]:
    """Close every earlier round that has not claimed, and return all earlier claims: they are final now."""
    for earlier in range(1, number):
        if read(store, earlier) is None:
            fence = Fence(round=earlier, fenced_by=number)
            store.create(layout.ledger(earlier), fence.model_dump_json().encode())
    return claims_before(store, number)


def claimed(entries: Iterable[Entry]) -> set[str]:
    """All trajectories that the entries hold."""
    return {trajectory for entry in entries for trajectory in entry.trajectory_ids}


def rounds(store: Store) -> list[int]:
    """Every round with an entry, in order."""
    names = (key.removeprefix("ledger/").removesuffix(".json") for key in store.list("ledger/"))
    return sorted(int(name) for name in names if name.isdigit())


def abandon(store: Store, number: int) -> None:
    """Say that the round's trajectories were not trained on. They stay claimed; a round without a claim is fenced."""
    fence = Fence(round=number, fenced_by=number)
    if not store.create(layout.ledger(number), fence.model_dump_json().encode()):
        store.put(layout.ledger_abandoned(number), b"{}")


def is_abandoned(store: Store, number: int) -> bool:
    """Whether :func:`abandon` marked the round's claim."""
    return store.exists(layout.ledger_abandoned(number))
