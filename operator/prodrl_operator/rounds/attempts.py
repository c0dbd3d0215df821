"""Attempts at a step that runs as a Job: success, failure, retry, deadlines. Called by the step files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import failures, times, transitions
from prodrl_operator.rounds.decision import Note, Outcome
from prodrl_operator.rounds.failures import Cause
from prodrl_operator.rounds.observed import JobKey, JobView, Observed
from prodrl_operator.rounds.turn import Turn

Result = TypeVar("Result", bound=BaseModel)

RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
WAITS = "waits for "
DEADLINE_GRACE_SECONDS = 60.0
"""Kubernetes' own active deadline speaks first; ours is for a Job controller that does not."""


def work(turn: Turn, step: Step, result: type[Result], done: Callable[[Turn, Result], Outcome]) -> Outcome:
    """One look at the present attempt: ``done`` is called with the parsed result of one that succeeded."""
    job = job_of(turn, step)
    if job is None or job.deleting:
        wait = retry_delay_seconds(turn, step)
        return turn.stay(message=_waits(turn, step), reason=_kept(turn), requeue=wait if wait > 0 else None)
    if job.state == "Succeeded":
        try:
            parsed = result.model_validate_json(job.message)
        except ValidationError as exc:
            text = f"Job {job.name} succeeded without a result, got {job.message[:200]!r} ({exc.error_count()} faults)"
            return fail(turn, step, Cause(Reason.ARTIFACT_MISSING, text))
        return done(turn, parsed)
    if job.state == "Failed":
        return fail(turn, step, failures.job_cause(job))
    return _judge_active(turn, step, job)


def _judge_active(turn: Turn, step: Step, job: JobView) -> Outcome:
    if job.suspended:
        if turn.run.spec.suspend:
            return turn.stay(Reason.SUSPENDED, f"Job {job.name} is suspended")
        why = "waits in its queue" if job.is_queued else "was suspended by somebody else; a queue that takes all Jobs?"
        return turn.stay(Reason.QUEUED, f"Job {job.name} {why}")
    training = turn.settings.training
    age = turn.seconds_of(job.begun)
    if job.state == "Pending":
        cause = failures.pending_cause(job, age, training.start_deadline_seconds)
        if cause is not None:
            return fail(turn, step, cause)
        grace = failures.IMAGE_GRACE_SECONDS
        next_look = grace if age <= grace else training.start_deadline_seconds
        waiting = f"{job.waiting}: {job.waiting_message}" if job.waiting else ""
        return turn.stay(message=waiting, requeue=max(next_look - age, 0.0) + 1)
    # Collecting lasts as long as users take; everything else has a limit.
    limit = training.active_deadline_seconds + DEADLINE_GRACE_SECONDS
    if step is not Step.COLLECTING and age > limit:
        return fail(turn, step, Cause(Reason.ACTIVE_DEADLINE, f"Job {job.name} ran longer than {limit:g} s"))
    return turn.stay(requeue=None if step is Step.COLLECTING else limit - age + 1)


def fail(turn: Turn, step: Step, cause: Cause) -> Outcome:
    """Count the failed attempt and say whether there is another."""
    attempt = transitions.attempt_of(turn.status, step)
    message = f"attempt {attempt.number} of {step}: {cause.reason}: {cause.message}"
    counted = {"disruptions": attempt.disruptions + 1} if cause.is_disruption else {"failures": attempt.failures + 1}
    next_attempt = attempt.model_copy(update={"number": attempt.number + 1, **counted})
    limit = turn.settings.training.backoff_limit
    if not cause.is_retryable or next_attempt.failures > limit:
        return give_up(turn, step, cause)
    status = transitions.with_attempt(turn.status, next_attempt).model_copy(
        update={"since": times.stamp(turn.now), "reason": cause.reason.value, "message": message, "paused_since": None}
    )
    note = Note(Reason.ATTEMPT_FAILED, message, turn.number, "Warning", key=f"{step}/{attempt.number}")
    return Outcome(status, notes=(note,), requeue_after_seconds=0.0)


def give_up(turn: Turn, step: Step, cause: Cause) -> Outcome:
    """The round fails and waits for a person; the step's counters stay for them to see."""
    attempt = transitions.attempt_of(turn.status, step)
    failed = attempt.model_copy(update={"failures": attempt.failures + 1})
    is_specific = not cause.is_retryable or cause.reason in failures.SPECIFIC
    reason = cause.reason if is_specific else Reason.STEP_BACKOFF
    text = (
        f"{step} failed after {failed.failures} failures (backoffLimit {turn.settings.training.backoff_limit}), "
        f"last {cause.reason}: {cause.message}; {failures.remedy(cause.reason)}"
    )
    return turn.end(Step.FAILED, reason, text, status=transitions.with_attempt(turn.status, failed))


def job_of(turn: Turn, step: Step) -> JobView | None:
    """The Job of the present attempt."""
    number = transitions.attempt_of(turn.status, step).number
    return turn.observed.jobs.get((turn.number, step, number))


def retry_delay_seconds(turn: Turn, step: Step) -> float:
    """How long the next attempt still waits: longer after each one."""
    attempt = transitions.attempt_of(turn.status, step)
    tried = attempt.failures + attempt.disruptions
    if tried == 0:
        return 0.0
    pause = min(RETRY_SECONDS * 2.0 ** min(tried - 1, 10), LONGEST_RETRY_SECONDS)
    return max(pause - turn.elapsed_seconds, 0.0)


def in_the_way(observed: Observed, number: int, step: Step, attempt: int) -> str:
    """What of the step's other attempts still works, or holds hardware; the empty string where nothing does.

    Two attempts at one round would write the same objects, so that nothing but its end makes room. For another round's
    nobody waits whose node is lost: what it holds is no use to anybody. Pods of this attempt without a Job are looked
    into where it is made (``acting``): it may have lost its labels only.
    """
    key = (number, step, attempt)
    for other, job in sorted(observed.jobs.items()):
        if other != key and other[1] is step and job.is_active and _counts(observed, number, other):
            return f"Job {job.name}"
    for other, pods in sorted(observed.pods.items()):
        if other != key and other[1] is step and _counts(observed, number, other):
            return f"pod {pods.name}"
    return ""


def _counts(observed: Observed, number: int, other: JobKey) -> bool:
    pods = observed.pods.get(other)
    return other[0] == number or pods is None or not pods.lost


def _waits(turn: Turn, step: Step) -> str:
    """The failure before, or what the next attempt waits for."""
    told = turn.status.message
    if told and not told.startswith(WAITS):
        return told
    key = (turn.number, step, transitions.attempt_of(turn.status, step).number)
    left = turn.observed.pods.get(key)
    other = f"pod {left.name}" if left is not None else in_the_way(turn.observed, *key)
    return f"{WAITS}{other}: it has not ended yet" if other else ""


def _kept(turn: Turn) -> Reason | None:
    return Reason(turn.status.reason) if turn.status.reason else None
