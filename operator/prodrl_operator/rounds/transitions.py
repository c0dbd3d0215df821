"""The table of a round's steps and how a status moves along it. Called by the step files."""

from __future__ import annotations

from prodrl_operator.api.round import Attempt, RoundStatus, StepTime
from prodrl_operator.names import Step

TRANSITIONS: dict[Step, frozenset[Step]] = {
    Step.PENDING: frozenset({Step.COLLECTING, Step.EXPORTING, Step.ABORTED}),
    Step.COLLECTING: frozenset({Step.TRAINING, Step.FAILED, Step.ABORTED, Step.SUPERSEDED}),
    Step.TRAINING: frozenset({Step.EXPORTING, Step.FAILED, Step.ABORTED}),
    Step.EXPORTING: frozenset({Step.CANARY_DEPLOYING, Step.FAILED, Step.ABORTED}),
    Step.CANARY_DEPLOYING: frozenset({Step.GATING, Step.BLOCKED, Step.FAILED, Step.ABORTED}),
    Step.GATING: frozenset({Step.PROMOTING, Step.BLOCKED, Step.FAILED, Step.ABORTED}),
    Step.PROMOTING: frozenset({Step.PROMOTED, Step.BLOCKED, Step.FAILED, Step.ABORTED}),
    # A person may let a failed round try again, from the step that failed.
    Step.FAILED: frozenset({Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.ABORTED}),
    Step.PROMOTED: frozenset(),
    Step.BLOCKED: frozenset(),
    Step.ABORTED: frozenset(),
    Step.SUPERSEDED: frozenset(),
}
KEPT_TIMES = 16


def enter(status: RoundStatus, step: Step, now: str, reason: str | None = None, message: str = "") -> RoundStatus:
    """The status at the beginning of ``step``."""
    assert step in TRANSITIONS[Step(status.step)], f"{status.step} -> {step} is not in the table"
    times = [item if item.finished else item.model_copy(update={"finished": now}) for item in status.times]
    times.append(StepTime(step=step, started=now))
    return status.model_copy(
        update={
            "step": step.value,
            "since": now,
            "reason": reason,
            "message": message,
            "times": times[-KEPT_TIMES:],
            "paused_since": None,
            "unready_since": None,
        }
    )


def attempt_of(status: RoundStatus, step: Step) -> Attempt:
    """The present attempt at a step; before the first: number 0."""
    return next((item for item in status.attempts if item.step == step), Attempt(step=step))


def with_attempt(status: RoundStatus, attempt: Attempt) -> RoundStatus:
    """The status with this attempt in the place of its step's."""
    others = [item for item in status.attempts if item.step != attempt.step]
    return status.model_copy(update={"attempts": [*others, attempt]})


def last_working_step(status: RoundStatus) -> Step:
    """The step in which a failed round failed."""
    working = [Step(item.step) for item in status.times if Step(item.step) is not Step.FAILED]
    return working[-1] if working else Step.PENDING
