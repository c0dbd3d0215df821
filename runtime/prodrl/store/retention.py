"""Old rounds' weights, removed in two phases. Called by the collect step, with what the operator plans to let go.

A round is marked first. A later round deletes what it finds marked, if it plans the same, so that nobody is robbed of
what he just began to read, and no clock is trusted. What users did (records, feedback, claims) and what
tells of a round (dataset, metrics, evaluation) is never deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from prodrl.progress import check_stop
from prodrl.store import layout
from prodrl.store.port import Store

logger = logging.getLogger(__name__)


def retire(store: Store, number: int, spent: Collection[int]) -> list[int]:
    """Mark what is spent, and delete what an earlier round marked; a crash anywhere is resumed by a later round.

    Args:
        store: Where the rounds lie.
        number: The round that tidies up.
        spent: Earlier rounds whose weights, checkpoints and policy nothing refers to any more.

    Returns:
        The rounds whose objects were deleted now.

    Raises:
        ValueError: ``spent`` names this round or a later one.
    """
    if spent and max(spent) >= number:
        raise ValueError(f"Round {number}: only earlier rounds can be spent, got {sorted(spent)}; this is a bug")
    marks: dict[int, int] = {}
    for key in store.list(layout.RETIRING):
        other, by = _mark_of(key)
        if other in spent and by <= number + 1:  # beyond: of a run that was here before
            marks[other] = min(by, marks.get(other, by))
        else:
            store.delete(key)
    gone = set()
    for key in store.list(layout.RETIRED):
        name = key.removeprefix(layout.RETIRED)
        other = int(name) if name.isdecimal() else number
        if other + 1 < number:
            gone.add(other)
        else:  # a run that began anew in the same store makes this round once more
            store.delete(key)
    deleted = []
    for other in sorted(set(spent) - gone):
        if other not in marks:
            store.create(layout.retiring(other, number), b"")
        elif marks[other] < number:
            count = _delete(store, other)
            store.create(layout.retired(other), b"")
            logger.info("Round %d: %d objects of round %d are deleted", number, count, other)
            deleted.append(other)
    for other in gone.union(deleted) & marks.keys():
        store.delete(layout.retiring(other, marks[other]))
    return deleted


def _mark_of(key: str) -> tuple[int, int]:
    """(round, marked by); (-1, -1) of a key that is no mark."""
    parts = key.removeprefix(layout.RETIRING).split("-")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (-1, -1)


def _delete(store: Store, number: int) -> int:
    """Manifests first: a folder ends to exist before its files go."""
    keys = [key for folder in layout.heavy_folders(number) for key in store.list(f"{folder}/")]
    for key in sorted(keys, key=lambda key: (not key.endswith(f"/{layout.MANIFEST}"), key)):
        check_stop(f"Retention of round {number}")
        store.delete(key)
    return len(keys)
