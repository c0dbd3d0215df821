"""Which finished rounds may go: their objects here, and their weights in the store. Called by ``planning``; pure."""

from __future__ import annotations

from prodrl_operator.api.run import HistoryEntry, Retention
from prodrl_operator.names import TERMINAL, Step
from prodrl_operator.rounds.observed import Observed


def protected(observed: Observed) -> set[int]:
    """Rounds that something still needs: what is served, what is in work, and what that was made from."""
    status = observed.run.status
    kept = {policy.round for policy in (status.stable, status.previous) if policy is not None}
    kept |= {status.lineage_round} | set(observed.servings)
    if status.halted_round is not None:
        kept.add(status.halted_round)
    for number, this in observed.rounds.items():
        if observed.is_unfinished(number):
            lineage = this.status.lineage_round
            kept |= {number, this.spec.lineage_round if lineage is None else lineage}
            if this.spec.source is not None:
                kept.add(this.spec.source.round)
    return kept


def expired(observed: Observed) -> list[int]:
    """Finished rounds beyond ``rounds.historyLimit``, oldest first, without the protected."""
    finished = [
        number
        for number in observed.numbers
        if number <= observed.last_accounted and Step(observed.rounds[number].status.step) in TERMINAL
    ]
    surplus = finished[: max(len(finished) - observed.run.spec.rounds.history_limit, 0)]
    kept = protected(observed)
    return [number for number in surplus if number not in kept]


def spent(observed: Observed, settings: Retention) -> tuple[int, ...]:
    """Accounted rounds beyond ``storage.retention``, oldest first, without the protected: their weights may go.

    Only rounds of which the history tells how they ended are named, so that a short memory keeps too much, never too
    little. A round that is named is needed by nothing now, and nothing ever goes back to one that is not protected.
    """
    history = observed.run.status.history
    kept = protected(observed) | _newest(history, settings.promoted, is_promoted=True)
    kept |= _newest(history, settings.blocked, is_promoted=False)
    return tuple(entry.number for entry in history if entry.number not in kept)


def _newest(history: list[HistoryEntry], count: int, *, is_promoted: bool) -> set[int]:
    numbers = [entry.number for entry in history if (entry.outcome == Step.PROMOTED) == is_promoted]
    return set(numbers[max(len(numbers) - count, 0) :])
