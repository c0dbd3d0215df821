"""Conditions as kstatus reads them. Called by ``decide``; pure.

A loop that lasts for days holds neither ``Reconciling=True`` nor ``Ready=False`` while rounds turn, else every GitOps
tool that waits for it times out. ``Ready`` says that the spec is accepted and users are served; ``Stalled=True`` says
that a person is needed, whether users are served or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from prodrl_operator.api.model import Condition
from prodrl_operator.api.round import Round, RoundStatus
from prodrl_operator.names import TERMINAL, Reason, Step
from prodrl_operator.names import Condition as Type
from prodrl_operator.rounds import accounting
from prodrl_operator.rounds.observed import Hindrance, Observed

MAX_MESSAGE = 4096


class Conditions:
    """A list of conditions in the making; the transition time moves only with the status."""

    def __init__(self, present: Iterable[Condition], generation: int | None, now: str) -> None:
        self._items = {item.type: item for item in present}
        self._generation = generation
        self._now = now

    def set(self, type_: str, status: bool | None, reason: Reason | str, message: str = "") -> None:
        """Put one condition; None is Unknown."""
        text = {True: "True", False: "False", None: "Unknown"}[status]
        old = self._items.get(type_)
        self._items[type_] = Condition(
            type=type_,
            status=text,
            reason=str(reason),
            message=message[:MAX_MESSAGE],
            last_transition_time=old.last_transition_time if old and old.status == text else self._now,
            observed_generation=self._generation,
        )

    def done(self) -> list[Condition]:
        """The list; the order of first appearance stays."""
        return list(self._items.values())


def of_run(observed: Observed, stall: Hindrance | None, now: str) -> list[Condition]:
    """Conditions of the run, from its new status and what was observed."""
    run = observed.run
    result = Conditions(run.status.conditions, run.metadata.get("generation"), now)
    is_stable, why = _availability(observed)
    result.set(Type.READY, *_ready(observed, stall, is_stable, why))
    result.set(Type.RECONCILING, *_reconciling(observed))
    if stall is None:
        result.set(Type.STALLED, False, Reason.NOT_STALLED)
    else:
        result.set(Type.STALLED, True, stall.reason, stall.message)
    result.set(Type.PROGRESSING, *_progressing(observed, stall))
    no_stable = Reason.NO_STABLE if run.status.stable is None else Reason.STABLE_UNAVAILABLE
    result.set(Type.STABLE_AVAILABLE, is_stable, Reason.STABLE_AVAILABLE if is_stable else no_stable, why)
    result.set(Type.SUSPENDED, *_suspended(observed))
    if accounting.is_complete(observed):
        result.set(Type.COMPLETED, True, Reason.COMPLETED, f"{run.status.rounds_finished} rounds were made")
    else:
        result.set(Type.COMPLETED, False, Reason.RUNNING)
    return result.done()


def of_invalid(present: list[Condition], generation: int | None, faults: list[str], now: str) -> list[Condition]:
    """Conditions of a run whose spec cannot be used: everything else stays as it was."""
    result = Conditions(present, generation, now)
    message = "; ".join(faults)
    result.set(Type.READY, False, Reason.INVALID_SPEC, message)
    result.set(Type.RECONCILING, False, Reason.INVALID_SPEC, "the new spec is not in force")
    result.set(Type.STALLED, True, Reason.INVALID_SPEC, message)
    return result.done()


def of_round(this: Round, status: RoundStatus, now: str) -> list[Condition]:
    """Conditions of a round."""
    result = Conditions(status.conditions, this.metadata.get("generation"), now)
    step = Step(status.step)
    is_over = step in TERMINAL
    result.set(Type.PROGRESSING, not is_over, status.reason or step, status.message)
    succeeded = (step is Step.PROMOTED) if is_over else None
    result.set("Succeeded", succeeded, status.reason or step, status.message if is_over else "")
    return result.done()


def _availability(observed: Observed) -> tuple[bool, str]:
    stable = observed.run.status.stable
    if stable is None:
        return False, "no policy was promoted yet"
    servers = observed.servings.get(stable.round)
    ready = servers.ready if servers and not servers.deleting else 0
    if ready == 0:
        waiting = f": {servers.waiting} {servers.waiting_message}" if servers and servers.waiting else ""
        return False, f"no server of round {stable.round} is ready{waiting}"
    if stable.round not in observed.urls:
        return False, f"the Service of round {stable.round} is not seen"
    gateway = observed.gateway
    if gateway is None or gateway.ready == 0:
        waiting = f": {gateway.waiting} {gateway.waiting_message}" if gateway and gateway.waiting else ""
        return False, f"no replica of the gateway is ready{waiting}"
    return True, f"round {stable.round} is served"


def _ready(observed: Observed, stall: Hindrance | None, is_stable: bool, why: str) -> tuple[bool, Reason, str]:
    run = observed.run
    if not is_stable:
        if stall is not None:
            return False, stall.reason, f"{why}; {stall.message}"
        if run.spec.suspend:
            return False, Reason.SUSPENDED, why
        return False, Reason.STARTING if run.status.stable is None else Reason.STABLE_UNAVAILABLE, why
    if run.spec.suspend:
        return True, Reason.SUSPENDED, f"{why}; spec.suspend is true"
    if accounting.is_complete(observed):
        return True, Reason.COMPLETED, why
    return True, stall.reason if stall else Reason.LOOP_RUNNING, why


def _reconciling(observed: Observed) -> tuple[bool, Reason, str]:
    suspend = observed.run.spec.suspend
    pending = [
        job.name
        for job in observed.jobs.values()
        if job.is_suspension_due(suspend=suspend) or job.is_withdrawal_due(suspend=suspend)
    ]
    if pending:
        return True, Reason.APPLYING_GENERATION, f"spec.suspend reaches {', '.join(pending)}"
    newest = observed.rounds[observed.numbers[-1]] if observed.rounds else None
    if newest is not None and newest.spec.settings != observed.run.spec:
        return False, Reason.GENERATION_IN_FORCE, f"settings of rounds take effect after round {newest.spec.number}"
    return False, Reason.GENERATION_IN_FORCE, ""


def _progressing(observed: Observed, stall: Hindrance | None) -> tuple[bool, Reason | str, str]:
    current = observed.current
    if stall is not None:
        return False, stall.reason, stall.message
    if observed.run.spec.suspend:
        return False, Reason.SUSPENDED, "spec.suspend is true"
    if current is not None:
        status = current.status
        return True, status.reason or status.step, f"round {current.spec.number}: {status.message or status.step}"
    if accounting.is_complete(observed):
        return False, Reason.COMPLETED, ""
    return True, Reason.STARTING, "the next round begins"


def _suspended(observed: Observed) -> tuple[bool, Reason, str]:
    if observed.run.spec.suspend:
        return True, Reason.USER_REQUESTED, "spec.suspend is true"
    queued = [
        job.name
        for job in observed.jobs.values()
        if job.suspended and job.is_active and (job.is_queued or not job.is_suspended_by_us)
    ]
    if queued:
        return True, Reason.QUEUED, f"{', '.join(queued)} waits in its queue"
    return False, Reason.NOT_SUSPENDED, ""
