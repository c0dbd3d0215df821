"""How a run goes: traffic to a safe place, what users need orphaned or not, then the finalizer. Called by ``decide``.

Nothing is created any more. With ``onDelete.serving: Keep`` the gateway and stable's servers lose their owner and
outlive the run; everything else goes by garbage collection, also when the operator is not there to see it.
"""

from __future__ import annotations

from datetime import datetime

from prodrl_operator.rounds import starting, times, traffic
from prodrl_operator.rounds.decision import Decision, EnsureRoutes, Intent, OrphanServing, RemoveFinalizer
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.turn import LOOK_SECONDS

CONVERGE_SECONDS = 30.0
"""How long the gateway may take to send everybody to stable before the run goes anyway."""


def decide(observed: Observed, now: datetime) -> Decision:
    """One look at a run with a deletionTimestamp."""
    status = observed.run.status
    if not starting.has_finalizer(observed):
        return Decision(status)
    if observed.run.spec.on_delete.serving == "Delete" or status.stable is None:
        return Decision(status, (RemoveFinalizer(),))
    routes = traffic.routes(observed, now)
    intents: list[Intent] = [EnsureRoutes(routes), OrphanServing(status.stable.round)]
    since = times.elapsed_seconds(observed.run.metadata["deletionTimestamp"], now)
    is_safe = observed.has_converged or not observed.replicas or since > CONVERGE_SECONDS
    if is_safe:
        intents.append(RemoveFinalizer())
    return Decision(status, tuple(intents), routes, requeue_after_seconds=LOOK_SECONDS)
