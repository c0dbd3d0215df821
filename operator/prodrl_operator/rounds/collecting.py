"""Collecting: S*B scored trajectories of one policy, sealed. Called by ``decide``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prodrl.config.results import CollectResult
from prodrl_operator.api.round import Dataset
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import attempts, times
from prodrl_operator.rounds.decision import Note, Outcome
from prodrl_operator.rounds.failures import Cause
from prodrl_operator.rounds.turn import Turn


def decide(turn: Turn) -> Outcome:
    """Wait for the dataset, then for the predecessor."""
    if turn.status.dataset is not None:
        return _begin_training(turn)
    overdue = _starved_seconds(turn)
    if overdue is not None and overdue >= 0 and not _is_sealed(turn):
        message = f"policy of round {_source(turn)} is not served any more and left too little data"
        return turn.end(Step.SUPERSEDED, Reason.SUPERSEDED, message)
    outcome = attempts.work(turn, Step.COLLECTING, CollectResult, _sealed)
    if overdue is None or outcome.requeue_after_seconds is not None:
        return outcome
    return Outcome(outcome.round, outcome.changes, outcome.notes, max(-overdue, 0.0) + 1)


def _sealed(turn: Turn, result: CollectResult) -> Outcome:
    if not math.isfinite(result.reward_mean):
        text = f"dataset {result.dataset_key}: the mean reward must be finite, got {result.reward_mean}"
        return attempts.give_up(turn, Step.COLLECTING, Cause(Reason.INVALID_DATA, text, is_retryable=False))
    dataset = Dataset(
        key=result.dataset_key,
        digest=result.dataset_digest,
        trajectories=result.trajectories,
        tokens=result.tokens,
        reward_mean=decimal(result.reward_mean),
        excluded=dict(sorted(result.excluded.items(), key=lambda item: -item[1])[:64]),
    )
    status = turn.status.model_copy(update={"dataset": dataset, "reason": None, "message": ""})
    return Outcome(status, notes=tuple(_retention(turn, result)), requeue_after_seconds=0.0)


def _retention(turn: Turn, result: CollectResult) -> Iterator[Note]:
    if result.retired:
        text = f"policy, weights and checkpoints of {result.retired} old rounds were deleted (storage.retention)"
        yield Note(Reason.ARTIFACTS_DELETED, text, turn.number)
    if result.retention_error:
        text = (
            f"what storage.retention lets go could not be deleted, the next round tries again: {result.retention_error}"
        )
        yield Note(Reason.RETENTION_FAILED, text, turn.number, "Warning")


def _begin_training(turn: Turn) -> Outcome:
    current, accounted = turn.observed.current, turn.observed.last_accounted
    unaccounted = [number for number in turn.observed.numbers if accounted < number < turn.number]
    if current is not None and current.spec.number < turn.number:
        return turn.stay(message=f"dataset sealed; round {current.spec.number} has not ended")
    if unaccounted:  # how it ended says from which checkpoint this round starts, and whether it may
        return turn.stay(message=f"dataset sealed; round {unaccounted[0]} has just ended")
    halted = turn.run.status.halted_round
    if halted is not None:
        return turn.stay(message=f"dataset sealed; round {halted} was blocked, and a person decides how to go on")
    # In AsyncOneRound the predecessor had not ended when this round was created: only now is the lineage known.
    lineage = turn.run.status.lineage_round if turn.settings.mode == "AsyncOneRound" else turn.round.spec.lineage_round
    return turn.go(Step.TRAINING, status=turn.status.model_copy(update={"lineage_round": lineage}))


def _source(turn: Turn) -> int | None:
    return turn.round.spec.source.round if turn.round.spec.source else None


def _is_sealed(turn: Turn) -> bool:
    job = attempts.job_of(turn, Step.COLLECTING)
    return job is not None and job.state == "Succeeded"


def _starved_seconds(turn: Turn) -> float | None:
    """Seconds since the source policy's last record can have settled (negative: to go); None: it is stable."""
    stable = turn.run.status.stable
    if stable is None or stable.round == _source(turn):
        return None
    recording = turn.settings.recording
    grace = turn.settings.serving.drain_seconds + recording.flush_seconds + recording.settle_seconds
    return times.elapsed_seconds(stable.since, turn.now, turn.status.paused_since) - grace


def decimal(value: float) -> str:
    """A finite number as the API writes it."""
    return f"{value:.6g}".replace("e+", "e")
