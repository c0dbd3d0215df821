"""How a run goes: traffic to a safe place, what users need orphaned or not, then the finalizer. Called by ``decide``.

Nothing is created any more. With ``onDelete.serving: Keep`` the gateway and stable's servers have no owner (``acting``)
and outlive the run; everything else goes by garbage collection, also when the operator is not there to see it.
"""

from __future__ import annotations

from datetime import datetime

from prodrl_operator.rounds import starting, times, traffic
from prodrl_operator.rounds.decision import (
    Decision,
    DeleteOrphans,
    EnsureRoutes,
    Intent,
    OrphanServing,
    RemoveFinalizer,
)
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.turn import LOOK_SECONDS

CONVERGE_SECONDS = 30.0
"""How long the gateway may take to send everybody to stable before the run goes anyway."""


def decide(observed: Observed, now: datetime) -> Decision:
    """One look at a run with a deletionTimestamp."""
    status = observed.run.status
    if not starting.has_finalizer(observed):
        return Decision(status)
    if observed.run.spec.on_delete.serving == "Delete":
        return Decision(status, (DeleteOrphans(None), RemoveFinalizer()))
    if status.stable is None:
        return Decision(status, (RemoveFinalizer(),))
    routes, number = traffic.routes(observed, now), status.stable.round
    intents: list[Intent] = [] if routes is None else [EnsureRoutes(routes)]
    intents += [OrphanServing(number), DeleteOrphans(number)]
    since = times.elapsed_seconds(observed.run.metadata["deletionTimestamp"], now)
    is_safe = observed.has_converged or not observed.replicas or since > CONVERGE_SECONDS
    if is_safe:
        intents.append(RemoveFinalizer())
    return Decision(status, tuple(intents), routes, requeue_after_seconds=LOOK_SECONDS)
