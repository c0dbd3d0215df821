"""CanaryDeploying: the candidate's servers come up, and stay so. Called by ``decide``, ``gating``, ``promoting``."""

from __future__ import annotations

from prodrl_operator.names import Step
from prodrl_operator.rounds import blocking, failures, times
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.failures import Cause
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
    elapsed = turn.seconds_of(servers.created)
    cause = failures.serving_cause(servers, elapsed, deadline)
    if cause is not None:
        return blocking.cannot_serve(turn, cause)
    waiting = f", {servers.waiting}: {servers.waiting_message}" if servers.waiting else ""
    grace = failures.IMAGE_GRACE_SECONDS
    next_look = grace if elapsed <= grace else deadline
    return turn.stay(
        message=f"{servers.ready} of {servers.desired} servers are ready{waiting}",
        requeue=max(next_look - elapsed, 0.0) + 1,
    )


def lost(turn: Turn) -> Cause | None:
    """Why a candidate that was ready is not, and does not come back: None while it may."""
    servers, status = turn.observed.servings.get(turn.number), turn.status
    if servers is None or servers.deleting or servers.is_ready:
        return None
    elapsed = times.elapsed_seconds(status.unready_since, turn.now, status.paused_since)
    return failures.serving_cause(servers, elapsed, turn.settings.serving.start_deadline_seconds)
