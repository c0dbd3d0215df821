"""Intents: what must exist, and what must not, for the statuses as they are stored. Called by ``decide``.

Only stored statuses lead to acts, never those that are about to be written: after a crash between the two the next
pass finds either the old status, and decides again, or the new one, and acts on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from prodrl_operator import names
from prodrl_operator.api.round import Round, SourcePolicy
from prodrl_operator.names import Step
from prodrl_operator.rounds import attempts, retention, stalling, traffic, transitions
from prodrl_operator.rounds.decision import (
    CreateRound,
    DeleteJob,
    DeleteRound,
    DeleteServing,
    EnsureGateway,
    EnsureJob,
    EnsureRoutes,
    EnsureServing,
    Intent,
    SuspendJob,
)
from prodrl_operator.rounds.observed import Hindrance, Observed
from prodrl_operator.rounds.turn import Turn

JOB_STEPS = frozenset({Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING})


def plan(observed: Observed, now: datetime, stall: Hindrance | None) -> tuple[Intent, ...]:
    """In order of urgency: stop, free, serve, work, begin, tidy."""
    return (
        *_suspensions(observed),
        *_unwanted_jobs(observed),
        *_unwanted_servings(observed, now),
        # A gateway without a table is not ready: the table comes first.
        *_routes(observed, now),
        EnsureGateway(observed.gateway_settings_of),
        *_wanted_servings(observed, now),
        *_jobs(observed, now),
        *_next_round(observed, stall),
        *(DeleteRound(number) for number in retention.expired(observed)),
    )


def _routes(observed: Observed, now: datetime) -> Iterator[Intent]:
    routes = traffic.routes(observed, now)
    if routes is not None:
        yield EnsureRoutes(routes)


def _suspensions(observed: Observed) -> Iterator[Intent]:
    suspend = observed.run.spec.suspend
    for (number, step, attempt), job in sorted(observed.jobs.items()):
        if not suspend and step is Step.GATING and not _is_measurable(observed, number):
            continue  # what it measures gave its hardware away meanwhile
        if job.is_suspension_due(suspend=suspend) and _is_wanted(observed, number, step, attempt):
            yield SuspendJob(number, step, attempt, suspend)


def _unwanted_jobs(observed: Observed) -> Iterator[Intent]:
    for (number, step, attempt), job in sorted(observed.jobs.items()):
        if not job.is_active or job.deleting:
            continue
        is_wanted = _is_wanted(observed, number, step, attempt)
        if not is_wanted or job.is_withdrawal_due(suspend=observed.run.spec.suspend):
            yield DeleteJob(number, step, attempt)


def _is_wanted(observed: Observed, number: int, step: Step, attempt: int) -> bool:
    this = observed.rounds.get(number)
    if this is None:
        return True
    status = this.status
    return status.step == step and transitions.attempt_of(status, step).number == attempt


def _unwanted_servings(observed: Observed, now: datetime) -> Iterator[Intent]:
    wanted = traffic.servings(observed, now)
    for number in sorted({*observed.servings, *observed.urls, *observed.remnants}):
        servers = observed.servings.get(number)
        if number in wanted.displaced:
            if servers is not None and not servers.deleting:
                yield DeleteServing(number, only_deployment=True)
        elif number not in wanted.required | wanted.kept:
            yield DeleteServing(number)


def _wanted_servings(observed: Observed, now: datetime) -> Iterator[Intent]:
    wanted = traffic.servings(observed, now)
    stable = observed.run.status.stable
    is_blocked = traffic.is_replacing(observed) and bool(set(observed.servings) - wanted.required)
    if is_blocked:
        # The hardware is not free yet: a server that still goes away holds it.
        return
    for number in sorted(wanted.required, key=lambda number: not (stable and stable.round == number)):
        is_new = stable is None or stable.round != number
        if number in observed.rounds and not (is_new and observed.run.spec.suspend):
            yield EnsureServing(number)


def _jobs(observed: Observed, now: datetime) -> Iterator[Intent]:
    if observed.run.spec.suspend:
        return
    for this in (observed.current, observed.ahead):
        if this is None or this.is_going or Step(this.status.step) not in JOB_STEPS:
            continue
        if stalling.missing_rounds(observed, this):
            continue
        step = Step(this.status.step)
        if step is Step.GATING and not _is_measurable(observed, this.spec.number):
            continue
        turn = Turn(observed, this, now)
        attempt = transitions.attempt_of(this.status, step).number
        is_waiting = attempts.retry_delay_seconds(turn, step) > 0
        if _is_done(this, step) or is_waiting:
            continue
        if not attempts.in_the_way(observed, this.spec.number, step, attempt):
            yield _job(observed, this, step, attempt)


def _is_measurable(observed: Observed, number: int) -> bool:
    servers = observed.servings.get(number)
    return number in observed.urls and servers is not None and servers.ready > 0 and not servers.deleting


def _is_done(this: Round, step: Step) -> bool:
    status = this.status
    if step is Step.COLLECTING:
        return status.dataset is not None
    return step is Step.GATING and (status.gate.measurements is not None or status.gate.verdict is not None)


def _job(observed: Observed, this: Round, step: Step, attempt: int) -> EnsureJob:
    lineage = this.status.lineage_round
    stable = observed.run.status.stable
    servers = observed.servings.get(stable.round) if stable else None
    is_comparable = this.spec.number > 0 and servers is not None and servers.ready > 0 and not servers.deleting
    return EnsureJob(
        number=this.spec.number,
        step=step,
        attempt=attempt,
        source=this.spec.source.round if this.spec.source else None,
        lineage=(this.spec.lineage_round if lineage is None else lineage) if this.spec.number > 0 else None,
        stable=stable.round if stable and is_comparable and step is Step.GATING else None,
        spent=retention.spent(observed, this.spec.settings.storage.retention) if step is Step.COLLECTING else (),
    )


def _next_round(observed: Observed, stall: Hindrance | None) -> Iterator[Intent]:
    run, status = observed.run, observed.run.status
    number = max([observed.last_accounted, *observed.numbers], default=-1) + 1
    if run.spec.suspend or stall is not None or not _is_due(observed) or stalling.lacks_heads(observed):
        return
    if number == 0:
        yield CreateRound(0, None, 0)
    elif status.stable is not None:
        source = SourcePolicy(round=status.stable.round, digest=status.stable.digest)
        yield CreateRound(number, source, status.lineage_round)


def _is_due(observed: Observed) -> bool:
    status, current = observed.run.status, observed.current
    open_rounds = sum(observed.is_unfinished(number) for number in observed.numbers if number > 0)
    if status.rounds_finished + open_rounds >= observed.run.spec.rounds.max and status.stable is not None:
        return False
    if current is None:
        newest = observed.numbers[-1] if observed.numbers else None
        # A promotion that is committed but has not converged is not over.
        return newest is None or Step(observed.rounds[newest].status.step) in names.TERMINAL
    is_ahead_possible = observed.run.spec.mode == "AsyncOneRound" and observed.ahead is None
    has_left_collecting = current.spec.number > 0 and current.status.dataset is not None
    return is_ahead_possible and has_left_collecting and Step(current.status.step) is not Step.COLLECTING
