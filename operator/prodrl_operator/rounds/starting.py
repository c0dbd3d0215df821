"""How a run and its rounds begin. Called by ``decide``."""

from __future__ import annotations

from datetime import datetime

from prodrl_operator import names
from prodrl_operator.api.run import RunStatus
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import conditions, requests, times
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.turn import Turn


def decide(turn: Turn) -> Outcome:
    """Pending: round 0 exports the base model, every other one collects first."""
    if turn.run.spec.suspend:
        return turn.stay(Reason.SUSPENDED, "suspended before it began")
    if turn.number == 0:
        return turn.go(Step.EXPORTING)
    status = turn.status.model_copy(update={"collect_from": times.stamp(turn.now, precise=True)})
    return turn.go(Step.COLLECTING, status=status)


def has_finalizer(observed: Observed) -> bool:
    """Whether the run waits for us when it is deleted."""
    return names.FINALIZER in observed.run.metadata.get("finalizers", [])


def invalid(status: RunStatus, generation: int | None, faults: list[str], now: datetime) -> RunStatus:
    """The status of a run whose spec cannot be used; nothing else changes, users stay served."""
    return status.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions.of_invalid(status.conditions, generation, faults, times.stamp(now)),
        }
    )


def must_begin_again(observed: Observed) -> bool:
    """Round 0 failed and the spec was edited since: it has nothing to lose, and its frozen settings are the fault."""
    current = observed.current
    if current is None or current.spec.number != 0 or current.status.step != Step.FAILED:
        return False
    return requests.is_spec_new(observed) and observed.run.status.stable is None
