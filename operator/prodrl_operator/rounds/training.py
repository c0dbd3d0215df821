"""Training: S optimizer steps on the sealed dataset. Called by ``decide``."""

from __future__ import annotations

import math

from prodrl.config.results import TrainResult
from prodrl_operator.api.round import Checkpoint
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import attempts
from prodrl_operator.rounds.collecting import decimal
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.failures import Cause
from prodrl_operator.rounds.turn import Turn

KEPT_FIGURES = 64


def decide(turn: Turn) -> Outcome:
    """Wait for the checkpoint."""
    return attempts.work(turn, Step.TRAINING, TrainResult, _trained)


def _trained(turn: Turn, result: TrainResult) -> Outcome:
    if result.steps == 0:
        message = f"no optimizer step was made, {result.skipped_steps} were skipped"
        return attempts.give_up(turn, Step.TRAINING, Cause(Reason.NUMERICS, message, is_retryable=False))
    finite = {name: decimal(value) for name, value in sorted(result.figures.items()) if math.isfinite(value)}
    checkpoint = Checkpoint(
        key=result.checkpoint_key,
        weights_key=result.weights_key,
        weights_digest=result.weights_digest,
        steps=result.steps,
        skipped_steps=result.skipped_steps,
        figures=dict(list(finite.items())[:KEPT_FIGURES]),
    )
    return turn.go(Step.EXPORTING, status=turn.status.model_copy(update={"checkpoint": checkpoint}))
