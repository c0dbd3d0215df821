"""How a candidate is turned down. Called by ``deploying``, ``gating``, ``promoting``; ``accounting`` does the rest."""

from __future__ import annotations

from prodrl_operator.api.judgement import Judgement
from prodrl_operator.api.round import RoundStatus
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.failures import Cause, remedy
from prodrl_operator.rounds.turn import Turn


def with_verdict(turn: Turn, judgement: Judgement) -> RoundStatus:
    """The status with the verdict on this digest."""
    assert turn.status.policy is not None, "only a policy is judged"
    gate = turn.status.gate.model_copy(
        update={
            "verdict": judgement.verdict.value,
            "message": judgement.message,
            "digest": turn.status.policy.digest,
        }
    )
    return turn.status.model_copy(update={"gate": gate})


def block(turn: Turn, judgement: Judgement) -> Outcome:
    """Blocked; round 0, which has no stable policy to go back to, Failed instead."""
    status = with_verdict(turn, judgement)
    step = Step.FAILED if turn.number == 0 else Step.BLOCKED
    message = f"{judgement.verdict}: {judgement.message}"
    if step is Step.FAILED:
        message += f"; {remedy(judgement.reason)}"
    return turn.end(step, judgement.reason, message, status=status)


def cannot_serve(turn: Turn, cause: Cause) -> Outcome:
    """The candidate does not run: an Error is never a Pass."""
    message = f"the candidate cannot serve: {cause.reason}: {cause.message}"
    if turn.number > 0:  # of round 0 ``block`` tells it
        message += f"; {remedy(cause.reason)}"
    return block(turn, Judgement(Verdict.ERROR, message, cause.reason))


def inconclusive(turn: Turn, judgement: Judgement) -> Outcome:
    """Pause for a person, or block, as the round was told."""
    if turn.number == 0 or turn.settings.gate.on_inconclusive == "Block":
        return block(turn, judgement)
    message = (
        f"{judgement.message}; set requests.approveRound: {turn.number} to promote, requests.abortRound: {turn.number} "
        f"to give it up, or a new requests.retryToken to measure again"
    )
    status = with_verdict(turn, judgement).model_copy(
        update={"reason": Reason.GATE_INCONCLUSIVE.value, "message": message}
    )
    return Outcome(status, requeue_after_seconds=0.0)
