"""The state machine: what was observed in, statuses and intents out. Pure: no clock, no I/O.

Called by ``controller`` on every pass. Reads as: deleted? invalid? -> one look at the rounds in work -> requests ->
accounting -> derived status -> and only when nothing of that moved, the intents of the stored status.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime
from typing import Literal

from prodrl_operator import names
from prodrl_operator.api.model import Condition
from prodrl_operator.api.round import Round, RoundStatus
from prodrl_operator.api.run import CurrentRound, RunStatus
from prodrl_operator.names import Step
from prodrl_operator.rounds import (
    accounting,
    collecting,
    conditions,
    deploying,
    exporting,
    finishing,
    gating,
    planning,
    promoting,
    requests,
    stalling,
    starting,
    times,
    traffic,
    training,
    validation,
)
from prodrl_operator.rounds.decision import Decision, DeleteRound, Note, Outcome
from prodrl_operator.rounds.observed import Hindrance, Observed
from prodrl_operator.rounds.turn import LOOK_SECONDS, Turn

STEPS: dict[Step, Callable[[Turn], Outcome]] = {
    Step.PENDING: starting.decide,
    Step.COLLECTING: collecting.decide,
    Step.TRAINING: training.decide,
    Step.EXPORTING: exporting.decide,
    Step.CANARY_DEPLOYING: deploying.decide,
    Step.GATING: gating.decide,
    Step.PROMOTING: promoting.decide,
}
SAYING_ONLY = frozenset({"conditions", "observed_generation", "current_round", "endpoint"})
"""Fields of the run's status that nothing is decided from."""
UNREACHABLE_SECONDS = 30.0
LATELY_SECONDS = 600.0
"""So long after a step began, users may have been moved since a replica that does not answer last heard of it."""
ROUND_SAYING_ONLY = frozenset({"conditions", "observed_generation", "message", "reason"})
"""The same of a round's."""


def decide(observed: Observed, now: datetime) -> Decision:
    """One pass."""
    run = observed.run
    if "deletionTimestamp" in run.metadata:
        return finishing.decide(observed, now)
    faults = validation.faults(run)
    if faults:
        return Decision(starting.invalid(run.status, run.metadata.get("generation"), faults, now))
    finalizer = starting.finalizer_due(observed)
    if finalizer is not None:
        return Decision(run.status, (finalizer,), requeue_after_seconds=0.0)
    number, outcome = _look(observed, now)
    after, notes = _applied(observed, number, outcome)
    stall = stalling.stall(after, now)
    status = _said(after, stall, now)
    round_status = _round_said(observed, number, outcome, now)
    notes += _run_notes(run.status.conditions, status.conditions, status.observed_generation)
    if starting.must_begin_again(observed):
        return Decision(status, (DeleteRound(0),), None, None, None, notes, 0.0)
    has_moved = _is_material(observed, number, round_status, status)
    return Decision(
        run_status=status,
        intents=() if has_moved else planning.plan(observed, now, stall),
        routes=traffic.routes(observed, now),
        round_number=number if round_status is not None else None,
        round_status=round_status,
        events=notes,
        requeue_after_seconds=0.0 if has_moved else _requeue(observed, now, outcome),
    )


def _look(observed: Observed, now: datetime) -> tuple[int | None, Outcome | None]:
    """The current round first; the one ahead only when the current one stands still: one status write a pass."""
    current, ahead = observed.current, observed.ahead
    if current is None:
        return None, None
    outcome = _turn(observed, current, now)
    if outcome.round != current.status or outcome.changes or ahead is None:
        return current.spec.number, outcome
    other = _turn(observed, ahead, now)
    waits = [o.requeue_after_seconds for o in (outcome, other) if o.requeue_after_seconds is not None]
    return ahead.spec.number, dataclasses.replace(other, requeue_after_seconds=min(waits, default=None))


def _turn(observed: Observed, this: Round, now: datetime) -> Outcome:
    turn = Turn(observed, this.model_copy(update={"status": _timed(observed, this, now)}), now)
    if this.is_going and Step(this.status.step) not in names.TERMINAL:
        return turn.stay(message="its ProdRLRound is being deleted")  # what would be made now would only hold that up
    is_current = this is observed.current
    if is_current and requests.wants_abort(observed):
        aborted = requests.abort(turn)
        if aborted is not None:
            return aborted
    is_failed = turn.status.step == Step.FAILED
    if is_current and (requests.wants_retry(observed) or (is_failed and requests.is_spec_new(observed))):
        retried = None if starting.must_begin_again(observed) else requests.retry(turn)
        if retried is not None:
            return retried
    return Outcome(this.status) if is_failed else STEPS[Step(turn.status.step)](turn)


def _timed(observed: Observed, this: Round, now: datetime) -> RoundStatus:
    """Deadlines do not run while the run, or the round's Job in its queue, is suspended."""
    if Step(this.status.step) in names.TERMINAL:
        return this.status
    status = _seen_ready(observed, this.spec.number, times.rearm(this.status, now), now)
    is_job_suspended = any(
        job.suspended and job.is_active and number == this.spec.number and step == status.step
        for (number, step, _), job in observed.jobs.items()
    )
    is_paused = observed.run.spec.suspend or is_job_suspended
    return times.pause(status, now) if is_paused else times.resume(status, now)


def _seen_ready(observed: Observed, number: int, status: RoundStatus, now: datetime) -> RoundStatus:
    """Since when a candidate that was ready is not, by our own clock."""
    if Step(status.step) not in (Step.GATING, Step.PROMOTING) or traffic.is_resting(observed, number):
        return status if status.unready_since is None else status.model_copy(update={"unready_since": None})
    servers = observed.servings.get(number)
    since = None if servers is not None and servers.is_ready else status.unready_since or times.stamp(now)
    return status if since == status.unready_since else status.model_copy(update={"unready_since": since})


def _applied(observed: Observed, number: int | None, outcome: Outcome | None) -> tuple[Observed, tuple[Note, ...]]:
    """What would be observed once everything is written: accounting and conditions are derived from that."""
    changes: dict[str, object] = {}
    notes: tuple[Note, ...] = ()
    rounds = dict(observed.rounds)
    if outcome is not None and number is not None:
        rounds[number] = rounds[number].model_copy(update={"status": outcome.round})
        changes |= outcome.changes
        notes += outcome.notes
    after = _with(observed, rounds, changes)
    handled, ignored = requests.handled(after)
    if handled != after.run.status.handled_requests:
        changes = {"handled_requests": handled}
        if requests.wants_retry(observed) and after.run.status.halted_round is not None:
            changes |= accounting.release(after.run.status)
        after = _with(after, rounds, changes)
    after = _with(after, rounds, accounting.account(after))
    current = after.current
    weight = traffic.canary_weight(after, current) if current else 0
    return _with(after, rounds, {"canary_weight": weight, "reward": accounting.reward(after)}), notes + ignored


def _with(observed: Observed, rounds: dict[int, Round], changes: dict[str, object]) -> Observed:
    status = observed.run.status.model_copy(update=changes)
    return dataclasses.replace(observed, run=observed.run.model_copy(update={"status": status}), rounds=rounds)


def _said(after: Observed, stall: Hindrance | None, now: datetime) -> RunStatus:
    """The parts of the status that only tell."""
    status = after.run.status
    shown = after.current or (after.rounds[after.numbers[-1]] if after.rounds else None)
    current = None
    if shown is not None:
        current = CurrentRound(number=shown.spec.number, step=shown.status.step, since=shown.status.since)
    return status.model_copy(
        update={
            "conditions": conditions.of_run(after, stall, times.stamp(now)),
            "observed_generation": after.run.metadata.get("generation"),
            "current_round": current,
            "endpoint": after.endpoint or status.endpoint,
        }
    )


def _round_said(observed: Observed, number: int | None, outcome: Outcome | None, now: datetime) -> RoundStatus | None:
    if number is None or outcome is None:
        return None
    this = observed.rounds[number]
    status = outcome.round.model_copy(
        update={
            "conditions": conditions.of_round(this, outcome.round, times.stamp(now)),
            "observed_generation": this.metadata.get("generation"),
        }
    )
    return None if status == this.status else status


def _is_material(observed: Observed, number: int | None, round_status: RoundStatus | None, status: RunStatus) -> bool:
    """Whether something moved that intents depend on."""
    if status.model_dump(exclude=set(SAYING_ONLY)) != observed.run.status.model_dump(exclude=set(SAYING_ONLY)):
        return True
    if round_status is None or number is None:
        return False
    old = observed.rounds[number].status
    said = set(ROUND_SAYING_ONLY)
    return round_status.model_dump(exclude=said) != old.model_dump(exclude=said)


def _requeue(observed: Observed, now: datetime, outcome: Outcome | None) -> float | None:
    waits = [] if outcome is None or outcome.requeue_after_seconds is None else [outcome.requeue_after_seconds]
    # The gateway tells nobody when it applied its routes or when a conversation ended.
    behind = [replica for replica in observed.replicas if replica.version != observed.routes_version]
    if any(replica.reachable for replica in behind):
        waits.append(LOOK_SECONDS)
    elif behind:
        # Later the resync will do: at thousands of runs, looking at those that do not answer would be all we do.
        waits += [UNREACHABLE_SECONDS] if _has_moved_lately(observed, now) else []
    elif traffic.is_draining(observed, now):
        waits.append(LOOK_SECONDS)
    return min(waits, default=None)


def _has_moved_lately(observed: Observed, now: datetime) -> bool:
    newest = observed.rounds[observed.numbers[-1]].status.since if observed.rounds else None
    stable = observed.run.status.stable
    times_of = [newest, stable.since if stable else None]
    return any(since is not None and times.elapsed_seconds(since, now) < LATELY_SECONDS for since in times_of)


def _run_notes(old: list[Condition], new: list[Condition], generation: int | None) -> tuple[Note, ...]:
    """An event for each condition that became true, and for a stall that ended."""
    before = {item.type: item for item in old}
    notes: list[Note] = []
    for item in new:
        was = before.get(item.type)
        is_same = was is not None and (was.status, was.reason) == (item.status, item.reason)
        if is_same or item.status != "True" or item.type not in ("Stalled", "Completed", "Suspended"):
            continue
        kind: Literal["Normal", "Warning"] = "Warning" if item.type == "Stalled" else "Normal"
        key = f"{item.type}/{item.last_transition_time}/{generation}"
        notes.append(Note(item.reason, item.message or item.type, type=kind, key=key))
    return tuple(notes)
