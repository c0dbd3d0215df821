"""CanaryDeploying: the candidate's servers come up. Called by ``decide``."""

from __future__ import annotations

from prodrl_operator.names import Step
from prodrl_operator.rounds import blocking, failures
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.turn import LOOK_SECONDS, Turn


def decide(turn: Turn) -> Outcome:
    """Ready means that all replicas serve the digest and answered a request (the readiness probe demands it)."""
    serving = turn.settings.serving
    deadline = serving.start_deadline_seconds
    servers = turn.observed.servings.get(turn.number)
    if servers is None or servers.deleting:
        return turn.stay(requeue=None if turn.run.spec.suspend else LOOK_SECONDS)
    if servers.is_ready:
        return turn.go(Step.GATING)
    cause = failures.serving_cause(servers, turn.elapsed_seconds, deadline)
    if cause is not None:
        return blocking.cannot_serve(turn, cause)
    waiting = f", {servers.waiting}: {servers.waiting_message}" if servers.waiting else ""
    grace = failures.IMAGE_GRACE_SECONDS
    next_look = grace if turn.elapsed_seconds <= grace else deadline
    return turn.stay(
        message=f"{servers.ready} of {servers.desired} servers are ready{waiting}",
        requeue=max(next_look - turn.elapsed_seconds, 0.0) + 1,
    )
