"""How a run and its rounds begin. Called by ``decide``."""

from __future__ import annotations

from datetime import datetime

from prodrl_operator import names
from prodrl_operator.api.run import RunStatus
from prodrl_operator.names import Condition, Reason, Step
from prodrl_operator.rounds import conditions, requests, times, traffic
from prodrl_operator.rounds.decision import AddFinalizer, Outcome, RemoveFinalizer
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.stalling import REFUSALS
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


def finalizer_due(observed: Observed) -> AddFinalizer | RemoveFinalizer | None:
    """A run waits for us while users would notice: a candidate that may have some of them, servers that still drain.

    At any other time garbage collection does all that a deletion asks for, whether the operator is there or not.
    """
    is_keeping = observed.run.spec.on_delete.serving == "Keep"
    is_moving = traffic.candidate(observed) is not None or not observed.is_kept_apart
    is_needed = is_moving if is_keeping else observed.has_orphans
    if is_needed == has_finalizer(observed):
        return None
    if is_needed:
        return AddFinalizer()
    # Until the gateway has heard of it, its users may still be sent to what goes.
    has_heard = observed.has_converged or not observed.replicas
    return RemoveFinalizer() if has_heard or not is_keeping else None


def invalid(status: RunStatus, generation: int | None, faults: list[str], now: datetime) -> RunStatus:
    """The status of a run whose spec cannot be used; nothing else changes, users stay served."""
    return status.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions.of_invalid(status.conditions, generation, faults, times.stamp(now)),
        }
    )


def must_begin_again(observed: Observed) -> bool:
    """Round 0 failed, or is refused, and the spec was edited since: its frozen settings are the fault.

    It has nothing to lose.
    """
    current, status = observed.current, observed.run.status
    if current is None or current.spec.number != 0 or status.stable is not None:
        return False
    is_refused = any(
        item.type == Condition.STALLED and item.status == "True" and item.reason in REFUSALS
        for item in status.conditions
    )
    return requests.is_spec_new(observed) and (is_refused or current.status.step == Step.FAILED)
