"""Exporting: the weights become a servable policy with an identity. Called by ``decide``."""

from __future__ import annotations

from prodrl.config.results import ExportResult
from prodrl_operator.api.round import Policy
from prodrl_operator.names import Step
from prodrl_operator.rounds import attempts
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.turn import Turn


def decide(turn: Turn) -> Outcome:
    """Wait for the policy."""
    return attempts.work(turn, Step.EXPORTING, ExportResult, _exported)


def _exported(turn: Turn, result: ExportResult) -> Outcome:
    policy = Policy(
        key=result.policy_key,
        digest=result.policy_digest,
        size_bytes=result.size_bytes,
        weights_key=result.weights_key,
    )
    return turn.go(Step.CANARY_DEPLOYING, status=turn.status.model_copy(update={"policy": policy}))
